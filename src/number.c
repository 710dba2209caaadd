/*-------------------------------------------------------------------------
 *
 * number.c
 *		A JSON number as its exact decimal value.
 *
 * A number is normalised as text, in one pass over its token: its significant
 * digits, wherever the token has its point, and an exponent.  ECMAScript's layout
 * goes to exponents below 1e-6 and from 1e21 on, so 1e999999999 is written
 * with no zeros and costs what its token costs; and an exponent too long for any
 * integer is added to digit by digit.
 *
 * A double comes in only where a caller asks whether one would keep the value.
 * Neither the digits of float8out() are ECMAScript's (1e23), nor is the first
 * precision of printf() whose output is read back (46 powers of two).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <math.h>

#include "utils/builtins.h"

#include "canonical.h"

/* A decimal number as its digits d1 d2 … dn and the exponent of 0.d1d2… */
typedef struct Decimal
{
	bool		negative;
	const char *digits;			/* of the integer part */
	int			ndigits;
	const char *fraction;		/* digits behind the point, if any */
	int			first;			/* first significant digit, counting through both */
	int			count;			/* of significant digits; 0: the value is zero */
	int64		exponent;
	/* an exponent too large for int64 arithmetic: its digits, shift to be added */
	const char *huge;			/* or NULL */
	int			nhuge;
	bool		huge_negative;
} Decimal;

/* Exponents up to this many digits are computed with. */
#define EXPONENT_DIGITS		17

/* Takes a JSON number apart, or a decimal of numeric_out(). */
static void
decimal_parse(const char *token, int len, Decimal *d)
{
	const char *p = token;
	const char *end = token + len;
	int			nfraction = 0;
	int			last;
	int64		exponent = 0;

	memset(d, 0, sizeof(Decimal));
	d->fraction = end;
	d->negative = (p < end && *p == '-');
	if (d->negative)
		p++;
	d->digits = p;
	while (p < end && *p >= '0' && *p <= '9')
		p++;
	d->ndigits = p - d->digits;
	if (p < end && *p == '.')
	{
		d->fraction = ++p;
		while (p < end && *p >= '0' && *p <= '9')
			p++;
		nfraction = p - d->fraction;
	}

	/* significant digits, counted through the point */
#define DIGIT(i)	((i) < d->ndigits ? d->digits[i] : d->fraction[(i) - d->ndigits])
	last = d->ndigits + nfraction - 1;
	while (last >= 0 && DIGIT(last) == '0')
		last--;
	if (last < 0)
		return;
	while (DIGIT(d->first) == '0')
		d->first++;
	d->count = last - d->first + 1;
#undef DIGIT

	if (p < end)				/* e or E */
	{
		bool		negative;

		p++;
		negative = (*p == '-');
		if (*p == '-' || *p == '+')
			p++;
		while (p < end && *p == '0')
			p++;
		if (end - p > EXPONENT_DIGITS)
		{
			d->huge = p;
			d->nhuge = end - p;
			d->huge_negative = negative;
		}
		else
		{
			for (; p < end; p++)
				exponent = exponent * 10 + (*p - '0');
			if (negative)
				exponent = -exponent;
		}
	}
	d->exponent = exponent + d->ndigits - d->first;
}

/* Copies "count" significant digits, from the given one on. */
static char *
decimal_copy(char *dst, const Decimal *d, int from, int count)
{
	int			first = d->first + from;

	if (first < d->ndigits)
	{
		int			n = Min(count, d->ndigits - first);

		memcpy(dst, d->digits + first, n);
		dst += n;
		first += n;
		count -= n;
	}
	if (count > 0)
		memcpy(dst, d->fraction + (first - d->ndigits), count);
	return dst + count;
}

/*
 * Writes an exponent that has more digits than an int64 is trusted with: the
 * digits of the token plus d->exponent - 1, which is small.  The lowest digits
 * are added as a number, and a carry or borrow goes through those before.
 */
static char *
decimal_write_huge_exponent(char *dst, const Decimal *d)
{
	int			high = d->nhuge - EXPONENT_DIGITS;
	int64		low = 0;
	int64		base = 1;
	char	   *digits = dst;
	int			i;

	for (i = high; i < d->nhuge; i++)
	{
		low = low * 10 + (d->huge[i] - '0');
		base *= 10;
	}
	low += d->huge_negative ? -(d->exponent - 1) : d->exponent - 1;

	*digits++ = '0';			/* for a carry out of the first digit */
	memcpy(digits, d->huge, high);
	if (low >= base)
	{
		low -= base;
		for (i = high - 1; digits[i] == '9'; i--)
			digits[i] = '0';
		digits[i]++;
	}
	else if (low < 0)
	{
		low += base;
		for (i = high - 1; digits[i] == '0'; i--)
			digits[i] = '9';
		digits[i]--;
	}
	for (i = d->nhuge - 1; i >= high; i--)
	{
		digits[i] = '0' + low % 10;
		low /= 10;
	}

	/* the first digit may be 0 now, and so may the one before it be */
	for (i = 0; dst[i] == '0'; i++)
		;
	memmove(dst, dst + i, d->nhuge + 1 - i);
	return dst + d->nhuge + 1 - i;
}

/* Writes "e+22" and the like. */
static char *
decimal_write_exponent(char *dst, const Decimal *d)
{
	int64		exponent = d->exponent - 1;

	*dst++ = 'e';
	*dst++ = (d->huge ? d->huge_negative : exponent < 0) ? '-' : '+';
	if (d->huge)
		return decimal_write_huge_exponent(dst, d);
	return dst + pg_ulltoa_n(exponent < 0 ? -exponent : exponent, dst);
}

/* Writes a number as ECMAScript's Number::toString lays its digits out. */
static char *
decimal_write(char *dst, const Decimal *d)
{
	int64		point = d->exponent;

	if (d->count == 0)
	{
		*dst++ = '0';
		return dst;
	}
	if (d->negative)
		*dst++ = '-';
	if (d->huge == NULL && point > 0 && point <= 21)
	{
		int			whole = Min(d->count, (int) point);

		dst = decimal_copy(dst, d, 0, whole);
		memset(dst, '0', point - whole);
		dst += point - whole;
		if (d->count > whole)
		{
			*dst++ = '.';
			dst = decimal_copy(dst, d, whole, d->count - whole);
		}
	}
	else if (d->huge == NULL && point > -6 && point <= 0)
	{
		*dst++ = '0';
		*dst++ = '.';
		memset(dst, '0', -point);
		dst = decimal_copy(dst - point, d, 0, d->count);
	}
	else
	{
		dst = decimal_copy(dst, d, 0, 1);
		if (d->count > 1)
		{
			*dst++ = '.';
			dst = decimal_copy(dst, d, 1, d->count - 1);
		}
		dst = decimal_write_exponent(dst, d);
	}
	return dst;
}

/*
 * Writes the canonical form of a JSON number, or of a decimal as numeric_out()
 * writes it, and returns its length: at most NUMBER_SIZE(len).
 */
int
number_write(char *dst, const char *token, int len)
{
	Decimal		d;

	decimal_parse(token, len, &d);
	return decimal_write(dst, &d) - dst;
}

/* Whether the decimal of "digits", read as an integer, times 10^scale is read as this double. */
static bool
reads_as(uint64 digits, int scale, double value)
{
	char		buffer[64];

	snprintf(buffer, sizeof(buffer), UINT64_FORMAT "e%d", digits, scale);
	return strtod(buffer, NULL) == value;
}

/* Up to 17 significant digits as an integer. */
static uint64
decimal_digits(const Decimal *d)
{
	char		buffer[32];

	*decimal_copy(buffer, d, 0, d->count) = '\0';
	return strtou64(buffer, NULL, 10);
}

/*
 * Whether ECMAScript, which reads a number as a double, would write the same
 * decimal number back: it writes the fewest digits that are read as that double,
 * and of those the nearest to it.
 */
bool
number_survives_double(const char *token, int len)
{
	Decimal		decimal;
	const Decimal *d = &decimal;
	char		buffer[64];
	uint64		digits;
	int			scale;
	double		value;
	Decimal		nearest;

	decimal_parse(token, len, &decimal);
	if (d->count == 0)
		return true;
	if (d->huge || d->count > 17 || d->exponent > 309 || d->exponent < -330)
		return false;
	/* fifteen digits always survive, where doubles are normal */
	if (d->count <= 15 && d->exponent > -300 && d->exponent < 300)
		return true;

	digits = decimal_digits(d);
	scale = (int) d->exponent - d->count;
	snprintf(buffer, sizeof(buffer), UINT64_FORMAT "e%d", digits, scale);
	value = strtod(buffer, NULL);
	if (value == 0 || isinf(value))
		return false;

	/*
	 * No nearer one of its length must be read as the double.  Below a power of
	 * two doubles are closer than above, so the nearest of all may miss it.
	 */
	snprintf(buffer, sizeof(buffer), "%.*e", d->count - 1, value);
	decimal_parse(buffer, strlen(buffer), &nearest);
	if ((nearest.count != d->count || nearest.exponent != d->exponent ||
		 decimal_digits(&nearest) != digits) &&
		strtod(buffer, NULL) == value)
		return false;

	/* And none may be shorter; if one is, it is a neighbour with a digit less. */
	if (d->count == 1)
		return true;
	return !reads_as(digits / 10, scale + 1, value) &&
		!reads_as(digits / 10 + 1, scale + 1, value);
}

/*
 * Whether a JSON number is spelled canonically, so that it can stay where it
 * is.  May say no of one that is.
 */
bool
number_is_canonical(const char *token, int len)
{
	const char *p = token;
	const char *end = token + len;
	const char *digits;

	if (*p == '-')
		p++;
	digits = p;
	while (p < end && *p >= '0' && *p <= '9')
		p++;
	if (p - digits > 21)
		return false;
	if (p == end)
		return !(*digits == '0' && *token == '-');
	if (*p != '.' || end[-1] == '0')
		return false;
	if (*digits == '0' && end - p > 6 && memcmp(p + 1, "000000", 6) == 0)
		return false;
	for (p++; p < end; p++)
	{
		if (*p < '0' || *p > '9')
			return false;
	}
	return true;
}

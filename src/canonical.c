/*-------------------------------------------------------------------------
 *
 * canonical.c
 *		Canonical JSON: one text, or one SHA-256, for all spellings of a value.
 *
 * The form is RFC 8785 (no white space, names sorted by UTF-16 code units,
 * shortest string escapes) with one rule of its own: a number is its exact
 * decimal value in ECMAScript's layout.  RFC 8785 sends numbers through an IEEE
 * double, which makes one of 9007199254740993 and 9007199254740992; two amounts
 * of money must not look alike, so no double is involved (see number.c).
 *
 * The hard idea is that a document is never rebuilt.  One pass of PostgreSQL's
 * JSON parser leaves an array of 8-byte cells, one for each value and each name,
 * that refer to the bytes of the document; what is spelled canonically, which is
 * nearly everything, stays where it is, and only the rest (strings with
 * escapes, odd numbers) is written to the side.  Objects keep their members as
 * they came, with a list of their order beside them only if they were not
 * sorted.  Output then walks the cells and joins what is adjacent in the
 * document into runs, so that a compact and sorted document is hashed in
 * one piece, and no copy of any document is made for a digest.
 *
 * The parser is asked not to de-escape strings: it would refuse \u0000, and
 * would copy every string.  It has no event that tells where a token is, but its
 * lexer stands on the value when an object field or an array element starts,
 * so scalars need no callback; and the name is what lies between the previous
 * value and the colon.
 *
 * Nothing here reads catalogs.  Bytes are UTF-8 whatever the server encoding.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "common/cryptohash.h"
#include "common/jsonapi.h"
#include "common/sha2.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "port/pg_bswap.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/jsonfuncs.h"
#include "utils/memutils.h"
#include "utils/numeric.h"

#include "canonical.h"

StaticAssertDecl(IDEM_DIGEST_LEN == PG_SHA256_DIGEST_LENGTH, "a fingerprint is a SHA-256");

/* where the bytes of a name or a scalar are; whether an object is in order */
typedef enum CellPlace
{
	IN_DOCUMENT,				/* spelled canonically there */
	IN_DOCUMENT_BARE,			/* a string of a jsonb, to be put in quotes */
	ASIDE,						/* in Canonical.aside */
	DROPPED,					/* left out by include or exclude */

	SORTED = 0,
	UNSORTED					/* start is where Canonical.order has its list */
} CellPlace;

typedef enum CellKind
{
	SCALAR,						/* or a name */
	ESCAPED,					/* a name whose canonical form has backslashes */
	ARRAY,
	OBJECT
} CellKind;

/*
 * A value, or the name before it.  No document reaches 1 GB, so 30 bits are
 * enough for an offset, a length, or the number of a cell.
 */
typedef struct Cell
{
	uint32		start:30;		/* offset of the bytes */
	uint32		place:2;		/* CellPlace */
	uint32		length:30;		/* of the bytes; a container: the cell after its last */
	uint32		kind:2;			/* CellKind */
} Cell;

StaticAssertDecl(sizeof(Cell) == 8, "a cell has eight bytes");

/* An array or object that is not closed yet. */
typedef struct Level
{
	uint64		last_prefix;	/* of the name before, see name_prefix() */
	uint32		last_name;		/* its cell; 0: none */
	uint32		cell;			/* of the container */
	uint32		members;		/* or elements, so far */
	bool		sorted;
	/* the rest is about include and exclude */
	bool		included;
	bool		excluded;
	bool		kept;			/* something in it is in the form */
	int			match;			/* first of its pointer nodes in Canonical.matches */
	int			match_end;
} Level;

/* what include and exclude say of the value that comes next */
typedef struct Verdict
{
	bool		included;
	bool		excluded;
	int			match;
	int			match_end;
} Verdict;

#define INLINE_CELLS		128
#define INLINE_LEVELS		16

typedef struct Canonical
{
	const char *document;		/* UTF-8 JSON text, or the bytes of a jsonb */
	const char *document_end;
	bool		strict;

	/* reading text */
	JsonLexContext *lex;
	const char *cursor;			/* end of what has been read */
	const char *backslash;		/* first one at or after the cursor, or document_end */

	Cell	   *cells;
	uint32		ncells;
	uint32		maxcells;
	Level	   *levels;
	uint32		depth;
	uint32		maxlevels;
	char	   *aside;
	uint32		naside;
	uint32		maxaside;
	uint32	   *order;			/* lists of name cells, each after its length */
	uint32		norder;
	uint32		maxorder;

	const IdemPointers *pointers;	/* or NULL */
	Verdict		next;
	int		   *matches;
	uint32		nmatches;
	uint32		maxmatches;

	/* so that a small document allocates nothing */
	Cell		inline_cells[INLINE_CELLS];
	Level		inline_levels[INLINE_LEVELS];
} Canonical;

/* Output: a hash if there is one, else all of it in the buffer. */
typedef struct Output
{
	const char *run;			/* bytes to be written, adjacent in memory */
	const char *run_end;
	const char *run_limit;		/* how far it may grow into what follows it */
	pg_cryptohash_ctx *hash;
	char	   *buffer;
	Size		used;
	Size		size;
} Output;

#define HASH_BUFFER_SIZE	4096

/* ---- memory ---- */

/* what an offset or the number of a cell may come to; see Cell */
#define MAX_ELEMENTS		((1U << 30) - 1)

/*
 * Makes room for "more" elements behind the first "used".  "fixed" is the array
 * that is part of another struct, if any, which must be copied first.
 */
static void *
enlarge(void *array, const void *fixed, Size element, uint32 used, uint32 *max, Size more)
{
	Size		wanted = Max((Size) *max * 2, used + more);

	if (used + more > MAX_ELEMENTS)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("JSON document is too large")));
	wanted = Min(Max(wanted, 64), MAX_ELEMENTS);
	*max = (uint32) wanted;
	if (array != NULL && array != fixed)
		return repalloc_huge(array, wanted * element);
	else
	{
		void	   *result = palloc_extended(wanted * element, MCXT_ALLOC_HUGE);

		Assert(array != NULL || used == 0);
		if (used > 0)
			memcpy(result, array, used * element);
		return result;
	}
}

/* Returns where to write up to "len" bytes aside. */
static inline char *
aside_reserve(Canonical *c, Size len)
{
	if (unlikely(len > (Size) c->maxaside - c->naside))
		c->aside = enlarge(c->aside, NULL, 1, c->naside, &c->maxaside, len);
	return c->aside + c->naside;
}

static inline Cell *
add_cell(Canonical *c)
{
	if (unlikely(c->ncells == c->maxcells))
		c->cells = enlarge(c->cells, c->inline_cells, sizeof(Cell), c->ncells, &c->maxcells, 1);
	return &c->cells[c->ncells++];
}

static inline void
fill_cell(Cell *cell, CellKind kind, CellPlace place, Size start, Size length)
{
	cell->start = start;
	cell->place = place;
	cell->length = length;
	cell->kind = kind;
}

/* The bytes of a name or scalar; a string that is not bare is in its quotes. */
static inline const char *
cell_bytes(const Canonical *c, const Cell *cell)
{
	return (cell->place == ASIDE ? c->aside : c->document) + cell->start;
}

/* ---- numbers ---- */

/* Makes the cell of a number; "in_document" says that the token is there to stay. */
static void
number_cell(Canonical *c, Cell *cell, const char *token, int len, bool in_document)
{
	int			written;

	if (c->strict && !number_survives_double(token, len))
		ereport(ERROR,
				(errcode(ERRCODE_NUMERIC_VALUE_OUT_OF_RANGE),
				 errmsg("number cannot be represented exactly as an IEEE 754 double"),
				 errdetail("RFC 8785 would change the value of %.*s%s.", Min(len, 40), token, len > 40 ? "..." : ""),
				 errdetail_log("RFC 8785 would change its value."),
				 errhint("Send it as a string, or do without strict.")));
	if (in_document && number_is_canonical(token, len))
	{
		fill_cell(cell, SCALAR, IN_DOCUMENT, token - c->document, len);
		return;
	}
	written = number_write(aside_reserve(c, NUMBER_SIZE(len)), token, len);
	fill_cell(cell, SCALAR, ASIDE, c->naside, written);
	c->naside += written;
}

/* ---- strings ---- */

/* Writes one byte of a string as RFC 8785 has it. */
static inline char *
escape_byte(char *dst, unsigned char byte)
{
	static const char hex[] = "0123456789abcdef";
	char		letter;

	if (likely(byte >= 0x20 && byte != '"' && byte != '\\'))
	{
		*dst++ = byte;
		return dst;
	}
	switch (byte)
	{
		case '"':
		case '\\':
			letter = byte;
			break;
		case '\b':
			letter = 'b';
			break;
		case '\t':
			letter = 't';
			break;
		case '\n':
			letter = 'n';
			break;
		case '\f':
			letter = 'f';
			break;
		case '\r':
			letter = 'r';
			break;
		default:
			memcpy(dst, "\\u00", 4);
			dst[4] = hex[byte >> 4];
			dst[5] = hex[byte & 15];
			return dst + 6;
	}
	*dst++ = '\\';
	*dst++ = letter;
	return dst;
}

/* The length of what canonical_escape() writes. */
Size
canonical_escaped_size(const char *src, int len)
{
	char		escape[8];
	Size		size = 0;

	for (const char *end = src + len; src < end; src++)
		size += escape_byte(escape, *src) - escape;
	return size;
}

/* Writes the inside of the canonical JSON string of some UTF-8 bytes. */
void
canonical_escape(char *dst, const char *src, int len)
{
	for (const char *end = src + len; src < end; src++)
		dst = escape_byte(dst, *src);
}

/* Four hexadecimal digits, which the lexer has checked. */
static uint32
hex4(const char *p)
{
	uint32		value = 0;

	for (int i = 0; i < 4; i++)
	{
		char		ch = p[i];

		value = value << 4 | (ch <= '9' ? ch - '0' : (ch | 0x20) - 'a' + 10);
	}
	return value;
}

static void
surrogate_error(const char *detail)
{
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_TEXT_REPRESENTATION),
			 errmsg("invalid input syntax for type %s", "json"),
			 errdetail_internal("%s", detail)));
}

/*
 * Reads the four digits after \u, and the second half of a surrogate pair; *p is
 * left behind what was read.  22P02 for half a pair.
 */
static uint32
unicode_escape(const char **p, const char *end)
{
	uint32		code = hex4(*p);

	*p += 4;
	if (is_utf16_surrogate_first(code))
	{
		uint32		second = 0;

		if (end - *p >= 6 && (*p)[0] == '\\' && (*p)[1] == 'u')
			second = hex4(*p + 2);
		if (!is_utf16_surrogate_second(second))
			surrogate_error("Unicode low surrogate must follow a high surrogate.");
		*p += 6;
		return surrogate_pair_to_codepoint(code, second);
	}
	if (is_utf16_surrogate_second(code))
		surrogate_error("Unicode low surrogate must follow a high surrogate.");
	return code;
}

/*
 * Makes the cell of a string or name with escapes: its canonical form, aside,
 * with the quotes.  That is never longer than what the document has.
 */
static void
escaped_string_cell(Canonical *c, Cell *cell, const char *token, int len)
{
	char	   *start = aside_reserve(c, len);
	char	   *dst = start;
	const char *p = token + 1;
	const char *end = token + len - 1;
	CellKind	kind = SCALAR;

	*dst++ = '"';
	while (p < end)
	{
		const char *stop = memchr(p, '\\', end - p);
		uint32		code;

		if (stop == NULL)
			stop = end;
		memcpy(dst, p, stop - p);
		dst += stop - p;
		p = stop;
		if (p == end)
			break;

		p += 2;
		switch (p[-1])
		{
			case 'b':
				code = '\b';
				break;
			case 't':
				code = '\t';
				break;
			case 'n':
				code = '\n';
				break;
			case 'f':
				code = '\f';
				break;
			case 'r':
				code = '\r';
				break;
			case 'u':
				code = unicode_escape(&p, end);
				break;
			default:			/* quote, backslash, slash */
				code = (unsigned char) p[-1];
				break;
		}
		if (code < 0x80)
		{
			char	   *escape = dst;

			dst = escape_byte(dst, (unsigned char) code);
			if (dst - escape > 1)
				kind = ESCAPED;
		}
		else
		{
			unicode_to_utf8(code, (unsigned char *) dst);
			dst += pg_utf_mblen((unsigned char *) dst);
		}
	}
	*dst++ = '"';
	fill_cell(cell, kind, ASIDE, c->naside, dst - start);
	c->naside += dst - start;
}

/* Makes the cell of a string or name of a JSON text. */
static inline void
string_cell(Canonical *c, Cell *cell, const char *token, int len)
{
	/* look for backslashes in the document once, not in each string */
	if (c->backslash < token)
	{
		c->backslash = memchr(token, '\\', c->document_end - token);
		if (c->backslash == NULL)
			c->backslash = c->document_end;
	}
	if (likely(c->backslash >= token + len))
		fill_cell(cell, SCALAR, IN_DOCUMENT, token - c->document, len);
	else
		escaped_string_cell(c, cell, token, len);
}

/* ---- the order of names ---- */

/*
 * UTF-8 sorts by code point.  UTF-16 differs in one thing: surrogates, for what
 * UTF-8 begins with F0 to F4, sort before U+E000 to U+FFFF, which begin with EE
 * and EF.  These bytes occur nowhere else, so exchanging them is all it takes.
 */
static inline unsigned char
utf16_rank(unsigned char byte)
{
	if (likely(byte < 0xEE))
		return byte;
	return byte >= 0xF0 ? byte - 2 : byte + 5;
}

/* The inside of a name, without its quotes. */
static inline const char *
name_bytes(const Canonical *c, const Cell *name, int *len)
{
	if (name->place == IN_DOCUMENT_BARE)
	{
		*len = name->length;
		return cell_bytes(c, name);
	}
	*len = name->length - 2;
	return cell_bytes(c, name) + 1;
}

/* The next byte of a name, of which *p is the canonical inside, ranked. */
static inline unsigned char
name_next(const char **p, bool escaped)
{
	unsigned char byte = *(*p)++;

	if (escaped && byte == '\\')
	{
		byte = *(*p)++;
		switch (byte)
		{
			case 'b':
				return '\b';
			case 't':
				return '\t';
			case 'n':
				return '\n';
			case 'f':
				return '\f';
			case 'r':
				return '\r';
			case 'u':
				*p += 4;
				return (unsigned char) hex4(*p - 4);
			default:
				return byte;
		}
	}
	return utf16_rank(byte);
}

/* The first eight bytes of a name as a number that sorts as they do. */
static inline uint64
name_prefix(const Canonical *c, const Cell *name)
{
	int			len;
	const char *p = name_bytes(c, name, &len);
	const char *end = p + len;
	uint64		prefix;
	int			shift;

	if (likely(name->kind == SCALAR && name->place != ASIDE && c->document_end - p >= 8))
	{
		memcpy(&prefix, p, 8);
		prefix = pg_ntoh64(prefix);
		if (len < 8)
			prefix = len == 0 ? 0 : prefix & (~UINT64CONST(0) << (64 - 8 * len));
		if (likely((prefix & UINT64CONST(0x8080808080808080)) == 0))
			return prefix;
	}
	prefix = 0;
	for (shift = 56; shift >= 0 && p < end; shift -= 8)
		prefix |= (uint64) name_next(&p, name->kind == ESCAPED) << shift;
	return prefix;
}

static int
compare_names(const Canonical *c, const Cell *a, const Cell *b)
{
	int			a_len;
	int			b_len;
	const char *p = name_bytes(c, a, &a_len);
	const char *q = name_bytes(c, b, &b_len);
	const char *p_end = p + a_len;
	const char *q_end = q + b_len;

	if (a->kind == SCALAR && b->kind == SCALAR)
	{
		while (p_end - p >= 8 && q_end - q >= 8 && memcmp(p, q, 8) == 0)
		{
			p += 8;
			q += 8;
		}
	}
	while (p < p_end && q < q_end)
	{
		unsigned char x = name_next(&p, a->kind == ESCAPED);
		unsigned char y = name_next(&q, b->kind == ESCAPED);

		if (x != y)
			return x < y ? -1 : 1;
	}
	return (p < p_end) - (q < q_end);
}

/* a name to be sorted */
typedef struct SortName
{
	uint64		prefix;
	uint32		cell;
} SortName;

static int
compare_sort_names(const SortName *a, const SortName *b, const Canonical *c)
{
	if (a->prefix != b->prefix)
		return a->prefix < b->prefix ? -1 : 1;
	return compare_names(c, &c->cells[a->cell], &c->cells[b->cell]);
}

#define ST_SORT sort_names
#define ST_ELEMENT_TYPE SortName
#define ST_COMPARE(a, b, c) compare_sort_names(a, b, c)
#define ST_COMPARE_ARG_TYPE const Canonical
#define ST_CHECK_FOR_INTERRUPTS
#define ST_SCOPE static
#define ST_DEFINE
#include "lib/sort_template.h"

static void
duplicate_error(const Canonical *c, const Cell *name)
{
	ereport(ERROR,
			(errcode(ERRCODE_DUPLICATE_JSON_OBJECT_KEY_VALUE),
			 errmsg("duplicate JSON object key value"),
			 /* bytes here are UTF-8 */
			 GetDatabaseEncoding() != PG_UTF8 ? 0 :
			 errdetail("The name %.*s occurs more than once in one object.",
					   pg_encoding_mbcliplen(PG_UTF8, cell_bytes(c, name), name->length, 100),
					   cell_bytes(c, name))));
}

/* The cell after a value, over all that is in it. */
static inline uint32
after_value(const Canonical *c, uint32 value)
{
	return c->cells[value].kind >= ARRAY ? c->cells[value].length : value + 1;
}

/* Lists the order of an object's members beside it. */
static void
order_members(Canonical *c, const Level *level, Cell *object)
{
	SortName	few[32];
	SortName   *names = few;
	uint32		n = level->members;
	uint32		cell = level->cell + 1;
	uint32		i;

	if (n > lengthof(few))
		names = palloc_extended(n * sizeof(SortName), MCXT_ALLOC_HUGE);
	for (i = 0; i < n; i++)
	{
		names[i].prefix = name_prefix(c, &c->cells[cell]);
		names[i].cell = cell;
		cell = after_value(c, cell + 1);
	}
	sort_names(names, n, c);

	if (unlikely(n >= c->maxorder - c->norder))
		c->order = enlarge(c->order, NULL, sizeof(uint32), c->norder, &c->maxorder, (Size) n + 1);
	object->place = UNSORTED;
	object->start = c->norder;
	c->order[c->norder++] = n;
	for (i = 0; i < n; i++)
	{
		if (i > 0 && unlikely(compare_sort_names(&names[i - 1], &names[i], c) == 0))
			duplicate_error(c, &c->cells[names[i].cell]);
		c->order[c->norder++] = names[i].cell;
	}
	if (names != few)
		pfree(names);
}

/* ---- include and exclude ---- */

static inline void
add_match(Canonical *c, int node)
{
	if (unlikely(c->nmatches == c->maxmatches))
		c->matches = enlarge(c->matches, NULL, sizeof(int), c->nmatches, &c->maxmatches, 1);
	c->matches[c->nmatches++] = node;
	c->next.included |= c->pointers->nodes[node].include;
	c->next.excluded |= c->pointers->nodes[node].exclude;
}

/* Verdict of the whole document. */
static void
match_root(Canonical *c)
{
	c->next.included = !c->pointers->has_include;
	c->next.excluded = false;
	c->next.match = c->nmatches;
	add_match(c, 0);
	c->next.match_end = c->nmatches;
}

/* Verdict of the member with this name, or of an element if that is NULL. */
static void
match_child(Canonical *c, const Level *level, const Cell *name)
{
	const IdemPointerNode *nodes = c->pointers->nodes;
	const char *bytes = NULL;
	int			len = 0;

	if (name != NULL)
		bytes = name_bytes(c, name, &len);
	c->nmatches = level->match_end;
	c->next.included = level->included;
	c->next.excluded = level->excluded;
	c->next.match = c->nmatches;
	for (int i = level->match; i < level->match_end; i++)
	{
		for (int child = nodes[c->matches[i]].first_child; child != 0; child = nodes[child].next_sibling)
		{
			const IdemPointerNode *node = &nodes[child];

			if (name == NULL ? node->any_element || node->index == (int64) level->members :
				node->name_len == len && memcmp(node->name, bytes, len) == 0)
				add_match(c, child);
		}
	}
	c->next.match_end = c->nmatches;
}

/* ---- what is read becomes cells ---- */

static inline Level *
current_level(Canonical *c)
{
	return &c->levels[c->depth - 1];
}

/* An array or object starts. */
static void
open_container(Canonical *c, CellKind kind)
{
	Level	   *level;

	CHECK_FOR_INTERRUPTS();
	if (unlikely(c->depth == c->maxlevels))
	{
		if (c->depth >= CANONICAL_MAX_DEPTH)
			ereport(ERROR,
					(errcode(ERRCODE_STATEMENT_TOO_COMPLEX),
					 errmsg("JSON document is nested too deeply"),
					 errdetail("The limit is %d levels.", CANONICAL_MAX_DEPTH)));
		c->levels = enlarge(c->levels, c->inline_levels, sizeof(Level), c->depth, &c->maxlevels, 1);
		c->maxlevels = Min(c->maxlevels, CANONICAL_MAX_DEPTH);
	}
	level = &c->levels[c->depth++];
	level->last_name = 0;
	level->cell = c->ncells;
	level->members = 0;
	level->sorted = true;
	if (c->pointers != NULL)
	{
		level->included = c->next.included;
		level->excluded = c->next.excluded;
		level->kept = false;
		level->match = c->next.match;
		level->match_end = c->next.match_end;
	}
	fill_cell(add_cell(c), kind, SORTED, 0, 0);
}

/* It ends; "cell" is known when it does. */
static void
close_container(Canonical *c)
{
	Level	   *level = current_level(c);
	Cell	   *cell = &c->cells[level->cell];

	cell->length = c->ncells;
	if (!level->sorted)
		order_members(c, level, cell);
	c->depth--;
	if (c->pointers != NULL)
	{
		if (level->excluded || !(level->included || level->kept))
			cell->place = DROPPED;
		else if (c->depth > 0)
			current_level(c)->kept = true;
	}
}

/* The name in the last cell joins the innermost object. */
static inline void
add_name(Canonical *c)
{
	Level	   *level = current_level(c);
	uint32		cell = c->ncells - 1;
	uint64		prefix;

	CHECK_FOR_INTERRUPTS();
	if (c->pointers != NULL)
		match_child(c, level, &c->cells[cell]);
	level->members++;
	if (!level->sorted)
		return;
	prefix = name_prefix(c, &c->cells[cell]);
	if (level->last_name != 0 && prefix <= level->last_prefix)
	{
		int			order = prefix < level->last_prefix ? 1 :
			compare_names(c, &c->cells[level->last_name], &c->cells[cell]);

		if (order == 0)
			duplicate_error(c, &c->cells[cell]);
		level->sorted = order < 0;
	}
	level->last_name = cell;
	level->last_prefix = prefix;
}

/* An array element follows. */
static inline void
add_element(Canonical *c)
{
	Level	   *level = current_level(c);

	CHECK_FOR_INTERRUPTS();
	if (c->pointers != NULL)
		match_child(c, level, NULL);
	level->members++;
}

/* The scalar in the last cell is complete. */
static inline void
scalar_done(Canonical *c)
{
	if (c->pointers == NULL)
		return;
	if (c->next.excluded || !c->next.included)
		c->cells[c->ncells - 1].place = DROPPED;
	else if (c->depth > 0)
		current_level(c)->kept = true;
}

/* ---- reading JSON text ---- */

/* Makes the cell of a scalar token. */
static inline void
read_scalar(Canonical *c, const char *token, int len)
{
	Cell	   *cell = add_cell(c);

	if (*token == '"')
		string_cell(c, cell, token, len);
	else if (*token == '-' || (*token >= '0' && *token <= '9'))
		number_cell(c, cell, token, len, true);
	else
		fill_cell(cell, SCALAR, IN_DOCUMENT, token - c->document, len);
	scalar_done(c);
}

/*
 * The lexer stands on a value: if it is a scalar, take it.  What cannot be a
 * value is left to the parser, which refuses it next.
 */
static inline void
read_value(Canonical *c)
{
	switch (c->lex->token_type)
	{
		case JSON_TOKEN_STRING:
		case JSON_TOKEN_NUMBER:
		case JSON_TOKEN_TRUE:
		case JSON_TOKEN_FALSE:
		case JSON_TOKEN_NULL:
			read_scalar(c, c->lex->token_start, c->lex->token_terminator - c->lex->token_start);
			c->cursor = c->lex->token_terminator;
			break;
		default:
			break;
	}
}

static JsonActionResult
read_object_start(void *state)
{
	Canonical  *c = state;

	open_container(c, OBJECT);
	c->cursor = c->lex->token_start + 1;
	JSON_ACTION_RETURN();
}

static JsonActionResult
read_array_start(void *state)
{
	open_container(state, ARRAY);
	JSON_ACTION_RETURN();
}

static JsonActionResult
read_container_end(void *state)
{
	Canonical  *c = state;

	close_container(c);
	c->cursor = c->lex->prev_token_terminator;
	JSON_ACTION_RETURN();
}

static JsonActionResult
read_field(void *state, char *fname, bool isnull)
{
	Canonical  *c = state;
	const char *start = c->cursor;
	const char *end = c->lex->prev_token_terminator - 1;	/* the colon */

	while (*start != '"')
		start++;
	while (end[-1] != '"')
		end--;
	string_cell(c, add_cell(c), start, end - start);
	add_name(c);
	read_value(c);
	JSON_ACTION_RETURN();
}

static JsonActionResult
read_element(void *state, bool isnull)
{
	add_element(state);
	read_value(state);
	JSON_ACTION_RETURN();
}

/* A document that is one scalar makes no event. */
static void
read_root_scalar(Canonical *c)
{
	const char *start = c->document;
	const char *end = c->document_end;

	while (strchr(" \t\r\n", *start))
		start++;
	while (strchr(" \t\r\n", end[-1]))
		end--;
	read_scalar(c, start, end - start);
}

static void
read_text(Canonical *c, const char *document, int len)
{
	JsonLexContext lex;
	JsonSemAction actions;

	c->document = document;
	c->document_end = document + len;
	c->cursor = document;
	c->backslash = document - 1;
	memset(&actions, 0, sizeof(actions));
	actions.semstate = c;
	actions.object_start = read_object_start;
	actions.object_end = read_container_end;
	actions.array_start = read_array_start;
	actions.array_end = read_container_end;
	actions.object_field_start = read_field;
	actions.array_element_start = read_element;

	c->lex = makeJsonLexContextCstringLen(&lex, unconstify(char *, document), len, PG_UTF8, false);
	pg_parse_json_or_ereport(c->lex, &actions);
	if (c->ncells == 0)
		read_root_scalar(c);
}

static bool
is_ascii(const char *bytes, int len)
{
	unsigned char all = 0;

	for (int i = 0; i < len; i++)
		all |= (unsigned char) bytes[i];
	return all < 0x80;
}

/*
 * The UTF-8 bytes of a text or json datum.
 *
 * Where that takes a conversion, the document is parsed before it too: the
 * parser's errors quote the document and must do so in the server's encoding.
 */
static const char *
text_to_utf8(text *document, int *len)
{
	const char *bytes = VARDATA_ANY(document);
	const char *utf8;

	*len = VARSIZE_ANY_EXHDR(document);
	if (GetDatabaseEncoding() == PG_UTF8 || is_ascii(bytes, *len))
		return bytes;
	if (GetDatabaseEncoding() != PG_SQL_ASCII)
	{
		JsonLexContext lex;
		JsonLexContext *lexer = makeJsonLexContextCstringLen(&lex, unconstify(char *, bytes), *len,
															 GetDatabaseEncoding(), false);

		pg_parse_json_or_ereport(lexer, &nullSemAction);
	}
	utf8 = pg_server_to_any(bytes, *len, PG_UTF8);
	if (utf8 != bytes)
		*len = strlen(utf8);
	return utf8;
}

/* ---- reading jsonb ---- */

/* Makes the cell of a string or name of a jsonb. */
static void
bare_string_cell(Canonical *c, Cell *cell, const char *bytes, int len)
{
	bool		plain = true;
	const char *utf8 = bytes;
	Size		size;
	char	   *dst;

	for (int i = 0; i < len && plain; i++)
		plain = (unsigned char) bytes[i] >= 0x20 && bytes[i] != '"' && bytes[i] != '\\';
	if (GetDatabaseEncoding() != PG_UTF8 && !is_ascii(bytes, len))
	{
		utf8 = pg_server_to_any(bytes, len, PG_UTF8);
		if (utf8 != bytes)
			len = strlen(utf8);
	}
	if (plain && utf8 == bytes)
	{
		fill_cell(cell, SCALAR, IN_DOCUMENT_BARE, bytes - c->document, len);
		return;
	}
	size = canonical_escaped_size(utf8, len) + 2;
	dst = aside_reserve(c, size);
	dst[0] = dst[size - 1] = '"';
	canonical_escape(dst + 1, utf8, len);
	fill_cell(cell, plain ? SCALAR : ESCAPED, ASIDE, c->naside, size);
	c->naside += size;
	if (utf8 != bytes)
		pfree(unconstify(char *, utf8));
}

static void
read_jsonb_scalar(Canonical *c, const JsonbValue *value)
{
	Cell	   *cell = add_cell(c);
	const char *word;
	char	   *number;

	switch (value->type)
	{
		case jbvString:
			bare_string_cell(c, cell, value->val.string.val, value->val.string.len);
			cell->kind = SCALAR;
			break;
		case jbvNumeric:
			number = DatumGetCString(DirectFunctionCall1(numeric_out,
														 NumericGetDatum(value->val.numeric)));
			number_cell(c, cell, number, strlen(number), false);
			pfree(number);
			break;
		case jbvNull:
		case jbvBool:
			word = value->type == jbvNull ? "null" : value->val.boolean ? "true" : "false";
			memcpy(aside_reserve(c, 5), word, strlen(word));
			fill_cell(cell, SCALAR, ASIDE, c->naside, strlen(word));
			c->naside += strlen(word);
			break;
		default:
			elog(ERROR, "unexpected jsonb value type %d", (int) value->type);
	}
	scalar_done(c);
}

static void
read_jsonb(Canonical *c, Jsonb *jsonb)
{
	JsonbIterator *it = JsonbIteratorInit(&jsonb->root);
	JsonbValue	value;
	JsonbIteratorToken token;
	bool		scalar = JB_ROOT_IS_SCALAR(jsonb);

	c->document = (const char *) jsonb;
	c->document_end = c->document + VARSIZE(jsonb);
	while ((token = JsonbIteratorNext(&it, &value, false)) != WJB_DONE)
	{
		switch (token)
		{
			case WJB_BEGIN_ARRAY:
			case WJB_BEGIN_OBJECT:
				if (scalar)		/* is wrapped in an array */
					break;
				/* members have been added as values, elements are by their start */
				if (c->depth > 0 && c->cells[current_level(c)->cell].kind == ARRAY)
					add_element(c);
				open_container(c, token == WJB_BEGIN_ARRAY ? ARRAY : OBJECT);
				break;
			case WJB_END_ARRAY:
			case WJB_END_OBJECT:
				if (!scalar)
					close_container(c);
				break;
			case WJB_KEY:
				bare_string_cell(c, add_cell(c), value.val.string.val, value.val.string.len);
				add_name(c);
				break;
			case WJB_ELEM:
				if (!scalar)
					add_element(c);
				read_jsonb_scalar(c, &value);
				break;
			case WJB_VALUE:
				read_jsonb_scalar(c, &value);
				break;
			default:
				elog(ERROR, "unexpected jsonb token %d", (int) token);
		}
	}
}

/* ---- output ---- */

static void
hash_update(pg_cryptohash_ctx *hash, const char *bytes, Size len)
{
	if (pg_cryptohash_update(hash, (const uint8 *) bytes, len) < 0)
		elog(ERROR, "could not compute SHA-256: %s", pg_cryptohash_error(hash));
}

/* Moves "len" bytes to where output goes. */
static void
output_write(Output *out, const char *bytes, Size len)
{
	if (unlikely(len > out->size - out->used))
	{
		if (out->hash != NULL)
		{
			hash_update(out->hash, out->buffer, out->used);
			out->used = 0;
			if (len >= out->size)
			{
				hash_update(out->hash, bytes, len);
				return;
			}
		}
		else
		{
			Size		size = Max(out->size * 2, out->used + len);

			if (out->used + len > MaxAllocSize)
				ereport(ERROR,
						(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
						 errmsg("canonical JSON document is too large")));
			out->size = Min(size, MaxAllocSize);
			out->buffer = repalloc(out->buffer, out->size);
		}
	}
	Assert(bytes != NULL);
	memcpy(out->buffer + out->used, bytes, len);
	out->used += len;
}

static inline void
output_flush(Output *out)
{
	if (out->run != out->run_end)
		output_write(out, out->run, out->run_end - out->run);
	out->run = out->run_end = out->run_limit = NULL;
}

/*
 * Writes bytes, by making the run longer where they follow it in memory.  Bytes up
 * to "limit" may be looked at.
 */
static inline void
output_bytes(Output *out, const char *bytes, Size len, const char *limit)
{
	if (bytes != out->run_end)
	{
		output_flush(out);
		out->run = bytes;
		out->run_limit = limit;
	}
	out->run_end = bytes + len;
}

/* Writes one byte, likewise if it happens to follow. */
static inline void
output_byte(Output *out, char byte)
{
	if (out->run_end < out->run_limit && *out->run_end == byte)
		out->run_end++;
	else
	{
		output_flush(out);
		if (likely(out->used < out->size))
			out->buffer[out->used++] = byte;
		else
			output_write(out, &byte, 1);
	}
}

static inline void
output_scalar(const Canonical *c, Output *out, const Cell *cell)
{
	const char *bytes = cell_bytes(c, cell);

	if (unlikely(cell->place == IN_DOCUMENT_BARE))
	{
		output_byte(out, '"');
		output_bytes(out, bytes, cell->length, c->document_end);
		output_byte(out, '"');
	}
	else
		output_bytes(out, bytes, cell->length, cell->place == ASIDE ? bytes : c->document_end);
}

static void output_container(const Canonical *c, Output *out, const Cell *container);

static inline void
output_value(const Canonical *c, Output *out, const Cell *cell)
{
	if (cell->kind >= ARRAY)
		output_container(c, out, cell);
	else
		output_scalar(c, out, cell);
}

/* Writes the member whose name that is, unless it is left out. */
static inline void
output_member(const Canonical *c, Output *out, const Cell *name, bool *first)
{
	if (unlikely(name[1].place == DROPPED))
		return;
	if (!*first)
		output_byte(out, ',');
	*first = false;
	output_scalar(c, out, name);
	output_byte(out, ':');
	output_value(c, out, &name[1]);
}

static void
output_container(const Canonical *c, Output *out, const Cell *container)
{
	uint32		end = container->length;
	uint32		i = container - c->cells + 1;
	bool		first = true;

	check_stack_depth();
	CHECK_FOR_INTERRUPTS();
	output_byte(out, container->kind == OBJECT ? '{' : '[');
	if (container->kind == ARRAY)
	{
		for (; i < end; i = after_value(c, i))
		{
			if (unlikely(c->cells[i].place == DROPPED))
				continue;
			if (!first)
				output_byte(out, ',');
			first = false;
			output_value(c, out, &c->cells[i]);
		}
	}
	else if (container->place == SORTED)
	{
		for (; i < end; i = after_value(c, i + 1))
			output_member(c, out, &c->cells[i], &first);
	}
	else
	{
		const uint32 *order = c->order + container->start;

		for (uint32 n = *order++; n > 0; n--)
			output_member(c, out, &c->cells[*order++], &first);
	}
	output_byte(out, container->kind == OBJECT ? '}' : ']');
}

/* Writes the whole document. */
static void
output_document(const Canonical *c, Output *out)
{
	if (c->cells[0].place == DROPPED)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("no \"include\" pointer matches anything in the request"),
				 errdetail("All such requests would have the same fingerprint.")));
	out->run = out->run_end = out->run_limit = NULL;
	output_value(c, out, &c->cells[0]);
	output_flush(out);
}

/* ---- the canonical form ---- */

static void
canonical_init(Canonical *c, bool strict, const IdemPointers *pointers)
{
	/* all but the arrays inside, which are many times larger */
	memset(c, 0, offsetof(Canonical, inline_cells));
	c->strict = strict;
	c->cells = c->inline_cells;
	c->maxcells = INLINE_CELLS;
	c->levels = c->inline_levels;
	c->maxlevels = INLINE_LEVELS;
	c->pointers = pointers;
	if (pointers != NULL)
		match_root(c);
}

/* Reads a document into cells; 22P02, 22030, 22003, 54001, 22021 and 22P05 as described above. */
static void
canonical_read(Canonical *c, Datum document, IdemDocumentType type)
{
	if (type == IDEM_DOCUMENT_JSONB)
		read_jsonb(c, DatumGetJsonbP(document));
	else
	{
		int			len;
		const char *bytes = text_to_utf8(DatumGetTextPP(document), &len);

		read_text(c, bytes, len);
	}
}

static void
canonical_free(Canonical *c)
{
	if (c->cells != c->inline_cells)
		pfree(c->cells);
	if (c->levels != c->inline_levels)
		pfree(c->levels);
	if (c->aside != NULL)
		pfree(c->aside);
	if (c->order != NULL)
		pfree(c->order);
	if (c->matches != NULL)
		pfree(c->matches);
}

/*
 * Computes the SHA-256 of the canonical form of a text, json or jsonb datum, or
 * of what "pointers" leave of it.
 *
 * Raises 22P02 for what is not JSON or has half a surrogate pair, 22030 for a
 * name that occurs twice in one object, 54001 for nesting that is too deep, 22023
 * if there are include pointers and none matches, and 22021 or 22P05 for
 * bytes that are not or have no UTF-8.
 */
void
canonical_digest(Datum document, IdemDocumentType type,
				 const IdemPointers *pointers, IdemDigest *digest)
{
	Canonical	c;
	Output		out;
	char		buffer[HASH_BUFFER_SIZE];

	canonical_init(&c, false, pointers);
	canonical_read(&c, document, type);

	out.buffer = buffer;
	out.used = 0;
	out.size = sizeof(buffer);
	out.hash = pg_cryptohash_create(PG_SHA256);
	if (out.hash == NULL)
		ereport(ERROR, (errcode(ERRCODE_OUT_OF_MEMORY), errmsg("out of memory")));
	if (pg_cryptohash_init(out.hash) < 0)
		elog(ERROR, "could not initialize SHA-256: %s", pg_cryptohash_error(out.hash));
	output_document(&c, &out);
	hash_update(out.hash, out.buffer, out.used);
	if (pg_cryptohash_final(out.hash, digest->data, IDEM_DIGEST_LEN) < 0)
		elog(ERROR, "could not finalize SHA-256: %s", pg_cryptohash_error(out.hash));
	pg_cryptohash_free(out.hash);
	canonical_free(&c);
}

/*
 * Returns the canonical form of a text, json or jsonb datum, in the server's
 * encoding.  "strict" raises 22003 for a number that does not survive an IEEE
 * double, which RFC 8785 would change; else raises what canonical_digest() does,
 * and 54000 if the form does not fit into a text.
 */
text *
canonical_text(Datum document, IdemDocumentType type, bool strict)
{
	Canonical	c;
	Output		out;
	char	   *converted;

	canonical_init(&c, strict, NULL);
	canonical_read(&c, document, type);

	/* the text's own header is in front of it, so that no copy has to be made */
	out.size = Min((Size) (c.document_end - c.document) + VARHDRSZ + 64, MaxAllocSize);
	out.buffer = palloc(out.size);
	out.used = VARHDRSZ;
	out.hash = NULL;
	output_document(&c, &out);
	canonical_free(&c);

	if (GetDatabaseEncoding() != PG_UTF8)
	{
		converted = pg_any_to_server(out.buffer + VARHDRSZ, out.used - VARHDRSZ, PG_UTF8);
		if (converted != out.buffer + VARHDRSZ)
			return cstring_to_text(converted);
	}
	SET_VARSIZE(out.buffer, out.used);
	return (text *) out.buffer;
}

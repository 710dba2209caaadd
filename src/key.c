/*-------------------------------------------------------------------------
 *
 * key.c
 *		What callers pass: keys, made of parts or derived, and documents.
 *
 * The format of idem_key() is final, since keys are stored and recomputed:
 * parts are joined by a colon; a colon or a backslash inside a part has a
 * backslash before it. Reading from the left, every unescaped colon ends a
 * part, so two lists of parts with one key are one list.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "common/cryptohash.h"
#include "common/hashfn.h"
#include "common/sha2.h"
#include "lib/stringinfo.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"

#include "idem.h"

PG_FUNCTION_INFO_V1(idem_key);
PG_FUNCTION_INFO_V1(idem_key_any);
PG_FUNCTION_INFO_V1(idem_child);

/* The name of a scope among a function's arguments; 22004 for NULL. */
text *
key_scope_name(FunctionCallInfo fcinfo, int arg)
{
	if (PG_ARGISNULL(arg))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("scope must not be null")));
	return PG_GETARG_TEXT_PP(arg);
}

static void
check_length(int len)
{
	if (len < 1 || len > IDEM_KEY_MAX)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("key must have 1 to %d bytes, not %d", IDEM_KEY_MAX, len)));
}

/*
 * The key among a function's arguments, its scope to be set yet; 22004 for
 * NULL, 22023 for a length not allowed.
 */
void
key_argument(FunctionCallInfo fcinfo, int arg, IdemKey *key)
{
	if (PG_ARGISNULL(arg))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("key must not be null")));
	key->value = PG_GETARG_TEXT_PP(arg);
	check_length(VARSIZE_ANY_EXHDR(key->value));
}

/* Makes a key of its parts; value stays the caller's. */
void
key_set(IdemKey *key, int32 scope_id, text *value)
{
	key->scope_id = scope_id;
	key->value = value;
	key->hash = hash_bytes_extended((const unsigned char *) VARDATA_ANY(value),
									VARSIZE_ANY_EXHDR(value), (uint64) scope_id);
}

bool
key_equal(const IdemKey *a, const IdemKey *b)
{
	return a->hash == b->hash && a->scope_id == b->scope_id &&
		VARSIZE_ANY_EXHDR(a->value) == VARSIZE_ANY_EXHDR(b->value) &&
		memcmp(VARDATA_ANY(a->value), VARDATA_ANY(b->value), VARSIZE_ANY_EXHDR(b->value)) == 0;
}

/*
 * For use within ereport(): the key itself goes to the client only, the server
 * log gets its hash, the one that the view idem.holder shows.
 */
int
key_errdetail(const IdemKey *key)
{
	errdetail_log("Key hash " INT64_FORMAT ".", (int64) key->hash);
	return errdetail("Key \"%.*s\".", (int) VARSIZE_ANY_EXHDR(key->value), VARDATA_ANY(key->value));
}

/* A duration among a function's arguments, in microseconds; 22023 if it is negative. */
int64
key_interval(FunctionCallInfo fcinfo, int arg, const char *name)
{
	int64		duration = scope_duration(PG_GETARG_INTERVAL_P(arg));

	if (duration < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must not be negative", name)));
	return duration;
}

/*
 * For error_context_stack while a document is read: the parser quotes it in
 * detail and context, which are for the client and not for the server log.
 */
void
key_hide_document(void *arg)
{
	errdetail_log("The document is not logged.");
	errhidecontext(true);
}

/*
 * A request or response as json: the text as it was given. Text that is not
 * known to be JSON yet is checked; 22P02 if it is not.
 */
Datum
key_json(Datum document, IdemDocumentType type, bool checked)
{
	if (type == IDEM_DOCUMENT_JSONB)
		return CStringGetTextDatum(DatumGetCString(DirectFunctionCall1(jsonb_out, document)));
	if (type == IDEM_DOCUMENT_TEXT && !checked)
	{
		ErrorContextCallback hide = {.callback = key_hide_document, .previous = error_context_stack};

		error_context_stack = &hide;
		document = DirectFunctionCall1(json_in, CStringGetDatum(TextDatumGetCString(document)));
		error_context_stack = hide.previous;
	}
	return document;
}

static void
append_part(StringInfo key, const char *part, int len, bool first)
{
	if (!first)
		appendStringInfoCharMacro(key, ':');
	/* a byte of a multibyte character never equals an ASCII one in a server encoding */
	for (int i = 0; i < len; i++)
	{
		if (part[i] == ':' || part[i] == '\\')
			appendStringInfoCharMacro(key, '\\');
		appendStringInfoCharMacro(key, part[i]);
	}
}

static void
append_text_part(StringInfo key, Datum part, bool isnull, bool first)
{
	text	   *value;

	if (isnull)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("part of a key must not be null")));
	value = DatumGetTextPP(part);
	append_part(key, VARDATA_ANY(value), VARSIZE_ANY_EXHDR(value), first);
}

static Datum
finish_key(StringInfo key)
{
	check_length(key->len);
	return PointerGetDatum(cstring_to_text_with_len(key->data, key->len));
}

static ArrayType *
parts_argument(FunctionCallInfo fcinfo)
{
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("parts of a key must not be null")));
	return PG_GETARG_ARRAYTYPE_P(0);
}

/*
 * idem_key(VARIADIC parts text[]) → text
 *
 * One key out of parts; 22004 for a NULL part, 22023 for a key that would be
 * empty or longer than 255 bytes.
 */
Datum
idem_key(PG_FUNCTION_ARGS)
{
	StringInfoData key;
	Datum	   *parts;
	bool	   *nulls;
	int			count;

	deconstruct_array(parts_argument(fcinfo), TEXTOID, -1, false, TYPALIGN_INT, &parts, &nulls, &count);
	initStringInfo(&key);
	for (int i = 0; i < count; i++)
		append_text_part(&key, parts[i], nulls[i], i == 0);
	return finish_key(&key);
}

/*
 * The text form of a part. Types whose text depends on settings of the session
 * would make one request two keys, so they are refused.
 */
static Datum
part_as_text(Datum value, Oid type)
{
	Oid			base = getBaseType(type);
	Oid			output;
	bool		is_varlena;

	getTypeOutputInfo(type, &output, &is_varlena);
	switch (base)
	{
		case TEXTOID:
		case VARCHAROID:
			return value;
		case FLOAT4OID:
		case FLOAT8OID:
		case INTERVALOID:
		case BYTEAOID:
			output = InvalidOid;
			break;
		default:
			if (func_volatile(output) != PROVOLATILE_IMMUTABLE && !type_is_enum(base) && base != UNKNOWNOID)
				output = InvalidOid;
	}
	if (!OidIsValid(output))
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("type %s cannot be part of a key", format_type_be(type)),
				 errdetail("Its text form depends on settings of the session."),
				 errhint("Convert the part to text in a form of your choice, for example with to_char().")));
	return CStringGetTextDatum(OidOutputFunctionCall(output, value));
}

/*
 * idem_key(VARIADIC parts "any") → text
 *
 * As idem_key(text[]), the parts by their text form; 42804 for a type whose
 * text form depends on the session.
 */
Datum
idem_key_any(PG_FUNCTION_ARGS)
{
	StringInfoData key;

	initStringInfo(&key);
	if (get_fn_expr_variadic(fcinfo->flinfo))
	{
		ArrayType  *array = parts_argument(fcinfo);
		Oid			type = ARR_ELEMTYPE(array);
		int16		typlen;
		bool		typbyval;
		char		typalign;
		Datum	   *parts;
		bool	   *nulls;
		int			count;

		get_typlenbyvalalign(type, &typlen, &typbyval, &typalign);
		deconstruct_array(array, type, typlen, typbyval, typalign, &parts, &nulls, &count);
		for (int i = 0; i < count; i++)
			append_text_part(&key, nulls[i] ? (Datum) 0 : part_as_text(parts[i], type), nulls[i], i == 0);
	}
	else
	{
		for (int i = 0; i < PG_NARGS(); i++)
		{
			bool		isnull = PG_ARGISNULL(i);
			Datum		part = isnull ? (Datum) 0 :
				part_as_text(PG_GETARG_DATUM(i), get_fn_expr_argtype(fcinfo->flinfo, i));

			append_text_part(&key, part, isnull, i == 0);
		}
	}
	return finish_key(&key);
}

/*
 * idem_child(scope, key, step) → uuid
 *
 * The key for a downstream call: the first 16 bytes of SHA-256 over the UTF-8
 * text of idem_key(scope, key, step), without its limit of length, with the
 * version (8) and variant bits of RFC 9562. 22004 for NULL.
 */
Datum
idem_child(PG_FUNCTION_ARGS)
{
	StringInfoData parts;
	pg_cryptohash_ctx *hash;
	uint8		digest[PG_SHA256_DIGEST_LENGTH];
	pg_uuid_t  *uuid = palloc(sizeof(pg_uuid_t));
	char	   *utf8;

	initStringInfo(&parts);
	for (int i = 0; i < 3; i++)
	{
		if (PG_ARGISNULL(i))
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("scope, key and step must not be null")));
		append_text_part(&parts, PG_GETARG_DATUM(i), false, i == 0);
	}
	utf8 = pg_server_to_any(parts.data, parts.len, PG_UTF8);

	hash = pg_cryptohash_create(PG_SHA256);
	if (hash == NULL || pg_cryptohash_init(hash) < 0 ||
		pg_cryptohash_update(hash, (const uint8 *) utf8, strlen(utf8)) < 0 ||
		pg_cryptohash_final(hash, digest, sizeof(digest)) < 0)
		elog(ERROR, "could not compute SHA-256");
	pg_cryptohash_free(hash);

	memcpy(uuid->data, digest, UUID_LEN);
	uuid->data[6] = (uuid->data[6] & 0x0f) | 0x80;
	uuid->data[8] = (uuid->data[8] & 0x3f) | 0x80;
	PG_RETURN_UUID_P(uuid);
}

/*-------------------------------------------------------------------------
 *
 * fingerprint.c
 *		The type idem_digest, idem_fingerprint() and idem_canonical().
 *
 * A fingerprint is the plain SHA-256 of canonical bytes, so that anybody can
 * verify it with other tools.  JSON Pointers (RFC 6901) say what of a request
 * counts.  They are parsed here into one tree of their tokens, with names spelled
 * as canonical.c spells them, so that matching one is comparing bytes; a token
 * "*" stands for every element of an array, and for a member of that name in an
 * object.  A pointer that cannot mean what its author wants is an error: one
 * that excludes the whole document, or includes that match nothing.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "common/cryptohash.h"
#include "common/hashfn.h"
#include "libpq/pqformat.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/memutils.h"

#include "canonical.h"

/* ---- idem_digest ---- */

PG_FUNCTION_INFO_V1(idem_digest_in);
PG_FUNCTION_INFO_V1(idem_digest_out);
PG_FUNCTION_INFO_V1(idem_digest_recv);
PG_FUNCTION_INFO_V1(idem_digest_send);
PG_FUNCTION_INFO_V1(idem_digest_eq);
PG_FUNCTION_INFO_V1(idem_digest_ne);
PG_FUNCTION_INFO_V1(idem_digest_lt);
PG_FUNCTION_INFO_V1(idem_digest_le);
PG_FUNCTION_INFO_V1(idem_digest_gt);
PG_FUNCTION_INFO_V1(idem_digest_ge);
PG_FUNCTION_INFO_V1(idem_digest_cmp);
PG_FUNCTION_INFO_V1(idem_digest_hash);
PG_FUNCTION_INFO_V1(idem_digest_hash_extended);
PG_FUNCTION_INFO_V1(idem_digest_from_bytea);
PG_FUNCTION_INFO_V1(idem_digest_to_bytea);

/* The value of a hexadecimal digit, or -1. */
static int
hex_value(char ch)
{
	if (ch >= '0' && ch <= '9')
		return ch - '0';
	if (ch >= 'a' && ch <= 'f')
		return ch - 'a' + 10;
	if (ch >= 'A' && ch <= 'F')
		return ch - 'A' + 10;
	return -1;
}

/* idem_digest_in(cstring): 64 hexadecimal digits of either case; 22P02, softly. */
Datum
idem_digest_in(PG_FUNCTION_ARGS)
{
	const char *input = PG_GETARG_CSTRING(0);
	IdemDigest *digest = palloc(sizeof(IdemDigest));
	int			i;

	for (i = 0; i < IDEM_DIGEST_LEN; i++)
	{
		int			high = hex_value(input[2 * i]);
		int			low = high < 0 ? -1 : hex_value(input[2 * i + 1]);

		if (low < 0)
			break;
		digest->data[i] = high << 4 | low;
	}
	if (i < IDEM_DIGEST_LEN || input[2 * IDEM_DIGEST_LEN] != '\0')
		ereturn(fcinfo->context, (Datum) 0,
				(errcode(ERRCODE_INVALID_TEXT_REPRESENTATION),
				 errmsg("invalid input syntax for type %s: \"%s\"", "idem_digest", input),
				 errdetail("A fingerprint has %d hexadecimal digits.", 2 * IDEM_DIGEST_LEN)));
	PG_RETURN_IDEM_DIGEST_P(digest);
}

/* idem_digest_out(idem_digest): 64 lower-case hexadecimal digits. */
Datum
idem_digest_out(PG_FUNCTION_ARGS)
{
	IdemDigest *digest = PG_GETARG_IDEM_DIGEST_P(0);
	char	   *output = palloc(2 * IDEM_DIGEST_LEN + 1);

	for (int i = 0; i < IDEM_DIGEST_LEN; i++)
	{
		output[2 * i] = "0123456789abcdef"[digest->data[i] >> 4];
		output[2 * i + 1] = "0123456789abcdef"[digest->data[i] & 15];
	}
	output[2 * IDEM_DIGEST_LEN] = '\0';
	PG_RETURN_CSTRING(output);
}

/* idem_digest_recv(internal): 32 bytes; 22P03 for any other number. */
Datum
idem_digest_recv(PG_FUNCTION_ARGS)
{
	StringInfo	message = (StringInfo) PG_GETARG_POINTER(0);
	IdemDigest *digest;

	if (message->len - message->cursor != IDEM_DIGEST_LEN)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_BINARY_REPRESENTATION),
				 errmsg("invalid length in external \"%s\" value", "idem_digest")));
	digest = palloc(sizeof(IdemDigest));
	pq_copymsgbytes(message, (char *) digest->data, IDEM_DIGEST_LEN);
	PG_RETURN_IDEM_DIGEST_P(digest);
}

static bytea *
digest_to_bytea(const IdemDigest *digest)
{
	return (bytea *) cstring_to_text_with_len((const char *) digest->data, IDEM_DIGEST_LEN);
}

/* idem_digest_send(idem_digest): the 32 bytes. */
Datum
idem_digest_send(PG_FUNCTION_ARGS)
{
	PG_RETURN_BYTEA_P(digest_to_bytea(PG_GETARG_IDEM_DIGEST_P(0)));
}

static int
digest_compare(FunctionCallInfo fcinfo)
{
	return memcmp(PG_GETARG_IDEM_DIGEST_P(0), PG_GETARG_IDEM_DIGEST_P(1), IDEM_DIGEST_LEN);
}

/* Bytewise comparison: the operators, and support of the btree operator class. */
Datum
idem_digest_eq(PG_FUNCTION_ARGS)
{
	PG_RETURN_BOOL(digest_compare(fcinfo) == 0);
}

Datum
idem_digest_ne(PG_FUNCTION_ARGS)
{
	PG_RETURN_BOOL(digest_compare(fcinfo) != 0);
}

Datum
idem_digest_lt(PG_FUNCTION_ARGS)
{
	PG_RETURN_BOOL(digest_compare(fcinfo) < 0);
}

Datum
idem_digest_le(PG_FUNCTION_ARGS)
{
	PG_RETURN_BOOL(digest_compare(fcinfo) <= 0);
}

Datum
idem_digest_gt(PG_FUNCTION_ARGS)
{
	PG_RETURN_BOOL(digest_compare(fcinfo) > 0);
}

Datum
idem_digest_ge(PG_FUNCTION_ARGS)
{
	PG_RETURN_BOOL(digest_compare(fcinfo) >= 0);
}

Datum
idem_digest_cmp(PG_FUNCTION_ARGS)
{
	int			order = digest_compare(fcinfo);

	PG_RETURN_INT32((order > 0) - (order < 0));
}

/*
 * Support of the hash operator class.  The type accepts any 32 bytes, so they are
 * hashed, though those of a SHA-256 would do as they are.
 */
Datum
idem_digest_hash(PG_FUNCTION_ARGS)
{
	return hash_any(PG_GETARG_IDEM_DIGEST_P(0)->data, IDEM_DIGEST_LEN);
}

Datum
idem_digest_hash_extended(PG_FUNCTION_ARGS)
{
	return hash_any_extended(PG_GETARG_IDEM_DIGEST_P(0)->data, IDEM_DIGEST_LEN, PG_GETARG_INT64(1));
}

/* idem_digest(bytea): a digest from its 32 bytes; 22023 for any other number. */
Datum
idem_digest_from_bytea(PG_FUNCTION_ARGS)
{
	bytea	   *bytes = PG_GETARG_BYTEA_PP(0);
	IdemDigest *digest;

	if (VARSIZE_ANY_EXHDR(bytes) != IDEM_DIGEST_LEN)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("a fingerprint has %d bytes, not %d",
						IDEM_DIGEST_LEN, (int) VARSIZE_ANY_EXHDR(bytes))));
	digest = palloc(sizeof(IdemDigest));
	memcpy(digest->data, VARDATA_ANY(bytes), IDEM_DIGEST_LEN);
	PG_RETURN_IDEM_DIGEST_P(digest);
}

/* bytea(idem_digest): its 32 bytes. */
Datum
idem_digest_to_bytea(PG_FUNCTION_ARGS)
{
	PG_RETURN_BYTEA_P(digest_to_bytea(PG_GETARG_IDEM_DIGEST_P(0)));
}

/* ---- JSON Pointers ---- */

static void
pointer_error(text *pointer, const char *detail)
{
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("invalid JSON Pointer \"%s\"", text_to_cstring(pointer)),
			 errdetail_internal("%s", detail)));
}

/* The array element that a token names, or -1: RFC 6901 has no leading zeros. */
static int32
token_index(const char *token, int len)
{
	int32		index = 0;

	if (len == 0 || len > 9 || (token[0] == '0' && len > 1))
		return -1;
	for (int i = 0; i < len; i++)
	{
		if (token[i] < '0' || token[i] > '9')
			return -1;
		index = index * 10 + (token[i] - '0');
	}
	return index;
}

/* The node under "parent" for a token, which is made if there is none. */
static int
pointer_child(IdemPointers *pointers, int parent, const char *token, int len)
{
	IdemPointerNode *node;
	int			name_len = canonical_escaped_size(token, len);
	char	   *name = palloc(name_len + 1);
	int			child;

	canonical_escape(name, token, len);
	for (child = pointers->nodes[parent].first_child; child != 0;
		 child = pointers->nodes[child].next_sibling)
	{
		node = &pointers->nodes[child];
		if (node->name_len == name_len && memcmp(node->name, name, name_len) == 0)
			return child;
	}
	child = pointers->nnodes++;
	node = &pointers->nodes[child];
	node->name = name;
	node->name_len = name_len;
	node->index = token_index(token, len);
	node->any_element = (len == 1 && token[0] == '*');
	node->next_sibling = pointers->nodes[parent].first_child;
	pointers->nodes[parent].first_child = child;
	return child;
}

/* Adds one pointer to the tree and returns the node it ends in; 22023 if it is not one. */
static int
pointer_add(IdemPointers *pointers, text *pointer)
{
	int			len = VARSIZE_ANY_EXHDR(pointer);
	const char *server = VARDATA_ANY(pointer);
	const char *p = pg_server_to_any(server, len, PG_UTF8);
	const char *end = p + (p == server ? (size_t) len : strlen(p));
	char	   *token = palloc(end - p + 1);
	int			node = 0;

	if (p < end && *p != '/')
		pointer_error(pointer, "It must be empty or begin with \"/\".");
	while (p < end)
	{
		int			n = 0;

		for (p++; p < end && *p != '/'; p++)
		{
			char		ch = *p;

			if (ch == '~')
			{
				if (p + 1 == end || (p[1] != '0' && p[1] != '1'))
					pointer_error(pointer, "A \"~\" must be followed by 0 or 1.");
				ch = *++p == '0' ? '~' : '/';
			}
			token[n++] = ch;
		}
		node = pointer_child(pointers, node, token, n);
	}
	pfree(token);
	return node;
}

/* The elements of an array of pointers, counting in "tokens" what they can come to. */
static int
pointer_array(ArrayType *array, Datum **elements, int *tokens)
{
	bool	   *nulls;
	int			n;

	if (array == NULL)
		return 0;
	deconstruct_array(array, TEXTOID, -1, false, TYPALIGN_INT, elements, &nulls, &n);
	for (int i = 0; i < n; i++)
	{
		text	   *pointer;

		if (nulls[i])
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("a JSON Pointer must not be null")));
		pointer = DatumGetTextPP((*elements)[i]);
		(*elements)[i] = PointerGetDatum(pointer);
		for (size_t j = 0; j < VARSIZE_ANY_EXHDR(pointer); j++)
			*tokens += VARDATA_ANY(pointer)[j] == '/';
	}
	return n;
}

/*
 * Parses include and exclude pointers, either of which may be NULL or empty, into
 * the current memory context; NULL if there are none.
 *
 * Raises 22023 for what is not a JSON Pointer and for an exclude of the whole
 * document, 22004 for a null among them.
 */
IdemPointers *
fingerprint_pointers(ArrayType *include, ArrayType *exclude)
{
	Datum	   *includes = NULL;
	Datum	   *excludes = NULL;
	int			tokens = 0;
	int			nincludes = pointer_array(include, &includes, &tokens);
	int			nexcludes = pointer_array(exclude, &excludes, &tokens);
	IdemPointers *pointers;

	if (nincludes + nexcludes == 0)
		return NULL;
	pointers = palloc0(offsetof(IdemPointers, nodes) + (tokens + 1) * sizeof(IdemPointerNode));
	pointers->has_include = nincludes > 0;
	pointers->nnodes = 1;
	pointers->nodes[0].index = -1;
	for (int i = 0; i < nincludes; i++)
		pointers->nodes[pointer_add(pointers, DatumGetTextPP(includes[i]))].include = true;
	for (int i = 0; i < nexcludes; i++)
	{
		int			node = pointer_add(pointers, DatumGetTextPP(excludes[i]));

		if (node == 0)
			pointer_error(DatumGetTextPP(excludes[i]),
						  "Nothing would be left if the whole document were excluded.");
		pointers->nodes[node].exclude = true;
	}
	return pointers;
}

/* ---- fingerprints ---- */

/*
 * Computes the fingerprint of a text, json or jsonb datum, or of what "pointers"
 * (or NULL) leave of it; raises what canonical_digest() does.
 */
void
fingerprint_document(Datum document, IdemDocumentType type,
					 const IdemPointers *pointers, IdemDigest *digest)
{
	ErrorContextCallback hide = {.callback = key_hide_document, .previous = error_context_stack};

	error_context_stack = &hide;
	canonical_digest(document, type, pointers, digest);
	error_context_stack = hide.previous;
}

PG_FUNCTION_INFO_V1(idem_fingerprint);
PG_FUNCTION_INFO_V1(idem_fingerprint_json);
PG_FUNCTION_INFO_V1(idem_fingerprint_jsonb);
PG_FUNCTION_INFO_V1(idem_fingerprint_bytea);
PG_FUNCTION_INFO_V1(idem_canonical);
PG_FUNCTION_INFO_V1(idem_canonical_json);
PG_FUNCTION_INFO_V1(idem_canonical_jsonb);

/* pointers of the last call, kept while they stay the same */
typedef struct CallPointers
{
	MemoryContext context;		/* of what follows */
	bool		valid;
	ArrayType  *include;		/* what they were parsed from; or NULL */
	ArrayType  *exclude;
	IdemPointers *pointers;
} CallPointers;

static bool
array_same(const ArrayType *a, const ArrayType *b)
{
	if (a == NULL || b == NULL)
		return a == b;
	return VARSIZE(a) == VARSIZE(b) && memcmp(a, b, VARSIZE(a)) == 0;
}

static ArrayType *
array_copy(const ArrayType *array)
{
	return array == NULL ? NULL : memcpy(palloc(VARSIZE(array)), array, VARSIZE(array));
}

/*
 * The pointers that arguments 1 and 2 of a call give, or NULL.  That they are the
 * same as the last time is found by comparing: an expression of PL/pgSQL
 * keeps its call while the variables in it change.
 */
static const IdemPointers *
call_pointers(FunctionCallInfo fcinfo)
{
	FmgrInfo   *flinfo = fcinfo->flinfo;
	CallPointers *cached = flinfo->fn_extra;
	ArrayType  *include;
	ArrayType  *exclude;
	MemoryContext old;

	if (PG_ARGISNULL(1) && PG_ARGISNULL(2))
		return NULL;
	include = PG_ARGISNULL(1) ? NULL : PG_GETARG_ARRAYTYPE_P(1);
	exclude = PG_ARGISNULL(2) ? NULL : PG_GETARG_ARRAYTYPE_P(2);
	if (cached == NULL)
	{
		cached = MemoryContextAllocZero(flinfo->fn_mcxt, sizeof(CallPointers));
		cached->context = AllocSetContextCreate(flinfo->fn_mcxt, "idem_fingerprint pointers",
												ALLOCSET_SMALL_SIZES);
		flinfo->fn_extra = cached;
	}
	if (cached->valid && array_same(include, cached->include) && array_same(exclude, cached->exclude))
		return cached->pointers;

	cached->valid = false;
	MemoryContextReset(cached->context);
	old = MemoryContextSwitchTo(cached->context);
	cached->include = array_copy(include);
	cached->exclude = array_copy(exclude);
	cached->pointers = fingerprint_pointers(include, exclude);
	cached->valid = true;
	MemoryContextSwitchTo(old);
	return cached->pointers;
}

static Datum
fingerprint_call(FunctionCallInfo fcinfo, IdemDocumentType type)
{
	IdemDigest *digest;

	if (PG_ARGISNULL(0))
		PG_RETURN_NULL();
	digest = palloc(sizeof(IdemDigest));
	fingerprint_document(PG_GETARG_DATUM(0), type, call_pointers(fcinfo), digest);
	PG_RETURN_IDEM_DIGEST_P(digest);
}

/*
 * idem_fingerprint(request text | json | jsonb, include text[], exclude text[])
 * returns the SHA-256 of the canonical form of what is included and not
 * excluded; NULL for NULL.  Raises what canonical_digest() and
 * fingerprint_pointers() do.
 */
Datum
idem_fingerprint(PG_FUNCTION_ARGS)
{
	return fingerprint_call(fcinfo, IDEM_DOCUMENT_TEXT);
}

Datum
idem_fingerprint_json(PG_FUNCTION_ARGS)
{
	return fingerprint_call(fcinfo, IDEM_DOCUMENT_JSON);
}

Datum
idem_fingerprint_jsonb(PG_FUNCTION_ARGS)
{
	return fingerprint_call(fcinfo, IDEM_DOCUMENT_JSONB);
}

/* idem_fingerprint(bytea): the SHA-256 of raw bytes, for what is not JSON. */
Datum
idem_fingerprint_bytea(PG_FUNCTION_ARGS)
{
	bytea	   *bytes = PG_GETARG_BYTEA_PP(0);
	IdemDigest *digest = palloc(sizeof(IdemDigest));
	pg_cryptohash_ctx *hash = pg_cryptohash_create(PG_SHA256);

	if (hash == NULL)
		ereport(ERROR, (errcode(ERRCODE_OUT_OF_MEMORY), errmsg("out of memory")));
	if (pg_cryptohash_init(hash) < 0 ||
		pg_cryptohash_update(hash, (const uint8 *) VARDATA_ANY(bytes), VARSIZE_ANY_EXHDR(bytes)) < 0 ||
		pg_cryptohash_final(hash, digest->data, IDEM_DIGEST_LEN) < 0)
		elog(ERROR, "could not compute SHA-256: %s", pg_cryptohash_error(hash));
	pg_cryptohash_free(hash);
	PG_RETURN_IDEM_DIGEST_P(digest);
}

static Datum
canonical(FunctionCallInfo fcinfo, IdemDocumentType type)
{
	ErrorContextCallback hide = {.callback = key_hide_document, .previous = error_context_stack};
	text	   *result;

	error_context_stack = &hide;
	result = canonical_text(PG_GETARG_DATUM(0), type, PG_GETARG_BOOL(1));
	error_context_stack = hide.previous;
	PG_RETURN_TEXT_P(result);
}

/*
 * idem_canonical(request text | json | jsonb, strict boolean) returns the canonical
 * form as text.  Raises what canonical_text() does.
 */
Datum
idem_canonical(PG_FUNCTION_ARGS)
{
	return canonical(fcinfo, IDEM_DOCUMENT_TEXT);
}

Datum
idem_canonical_json(PG_FUNCTION_ARGS)
{
	return canonical(fcinfo, IDEM_DOCUMENT_JSON);
}

Datum
idem_canonical_jsonb(PG_FUNCTION_ARGS)
{
	return canonical(fcinfo, IDEM_DOCUMENT_JSONB);
}

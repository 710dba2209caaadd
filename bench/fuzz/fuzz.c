/*-------------------------------------------------------------------------
 *
 * fuzz.c
 *		libFuzzer target over the canonicalizer: src/canonical.c and number.c as they are, the
 *		server's own JSON parser (libpgcommon), and thin stand-ins for the rest.
 *
 * The first byte of an input chooses pointers; the rest is the document.
 * Beside what the sanitizers find, three things must hold: what is hashed is the
 * canonical text; the canonical text is its own canonical form; and strict
 * changes nothing where it does not refuse.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <setjmp.h>

#include "common/cryptohash.h"
#include "common/jsonapi.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/jsonfuncs.h"
#include "utils/memutils.h"

#include "../../src/canonical.h"

/* ---- memory: all of it is freed after each run, whatever became of it ---- */

typedef struct Chunk
{
	struct Chunk *next;
	struct Chunk *previous;
	size_t		size;
	size_t		unused;			/* alignment */
} Chunk;

static Chunk chunks = {&chunks, &chunks, 0, 0};

void *
palloc(Size size)
{
	Chunk	   *chunk = malloc(sizeof(Chunk) + size);

	chunk->size = size;
	chunk->next = chunks.next;
	chunk->previous = &chunks;
	chunks.next->previous = chunk;
	chunks.next = chunk;
	return chunk + 1;
}

void
pfree(void *pointer)
{
	Chunk	   *chunk = (Chunk *) pointer - 1;

	chunk->previous->next = chunk->next;
	chunk->next->previous = chunk->previous;
	free(chunk);
}

void *
palloc0(Size size)
{
	return memset(palloc(size), 0, size);
}

void *
palloc_extended(Size size, int flags)
{
	return (flags & MCXT_ALLOC_ZERO) ? palloc0(size) : palloc(size);
}

void *
repalloc(void *pointer, Size size)
{
	void	   *result = palloc(size);

	memcpy(result, pointer, Min(size, ((Chunk *) pointer - 1)->size));
	pfree(pointer);
	return result;
}

void *
repalloc_huge(void *pointer, Size size)
{
	return repalloc(pointer, size);
}

char *
pstrdup(const char *string)
{
	return strcpy(palloc(strlen(string) + 1), string);
}

static void
free_all(void)
{
	while (chunks.next != &chunks)
		pfree(chunks.next + 1);
}

/* ---- errors: back to the run ---- */

static sigjmp_buf on_error;

bool
errstart(int elevel, const char *domain)
{
	return true;
}

bool
errstart_cold(int elevel, const char *domain)
{
	return true;
}

void
errfinish(const char *filename, int lineno, const char *funcname)
{
	siglongjmp(on_error, 1);
}

int
errcode(int sqlerrcode)
{
	return 0;
}

/* formats, so that the sanitizers see what a message reads */
static int
format_message(const char *format, va_list args)
{
	char		buffer[1024];

	pg_vsnprintf(buffer, sizeof(buffer), format, args);
	return 0;
}

#define MESSAGE_FUNCTION(name) \
	int \
	name(const char *fmt, ...) \
	{ \
		va_list		args; \
		va_start(args, fmt); \
		format_message(fmt, args); \
		va_end(args); \
		return 0; \
	}

MESSAGE_FUNCTION(errmsg)
MESSAGE_FUNCTION(errmsg_internal)
MESSAGE_FUNCTION(errdetail)
MESSAGE_FUNCTION(errdetail_internal)
MESSAGE_FUNCTION(errhint)

/* ---- the rest of the server ---- */

volatile sig_atomic_t InterruptPending = false;

void
ProcessInterrupts(void)
{
}

void
check_stack_depth(void)
{
}

int
GetDatabaseEncoding(void)
{
	return PG_UTF8;
}

int
pg_encoding_mbcliplen(int encoding, const char *mbstr, int len, int limit)
{
	return Min(len, limit);
}

char *
pg_server_to_any(const char *s, int len, int encoding)
{
	return unconstify(char *, s);
}

char *
pg_any_to_server(const char *s, int len, int encoding)
{
	return unconstify(char *, s);
}

int
pg_ulltoa_n(uint64 value, char *a)
{
	char		buffer[32];
	int			len = snprintf(buffer, sizeof(buffer), UINT64_FORMAT, value);

	memcpy(a, buffer, len);
	return len;
}

struct varlena *
pg_detoast_datum_packed(struct varlena *datum)
{
	return datum;
}

struct varlena *
pg_detoast_datum(struct varlena *datum)
{
	return datum;
}

text *
cstring_to_text(const char *s)
{
	abort();
}

#if PG_VERSION_NUM >= 180000
#define SEM_CONST const
#else
#define SEM_CONST
#endif
#if PG_VERSION_NUM >= 160000
bool
pg_parse_json_or_errsave(JsonLexContext *lex, SEM_CONST JsonSemAction *sem, Node *escontext)
{
	if (pg_parse_json(lex, sem) != JSON_SUCCESS)
		siglongjmp(on_error, 1);
	return true;
}
#else
void
pg_parse_json_or_ereport(JsonLexContext *lex, JsonSemAction *sem)
{
	if (pg_parse_json(lex, sem) != JSON_SUCCESS)
		siglongjmp(on_error, 1);
}
#endif

/* jsonb needs the server */
JsonbIterator *
JsonbIteratorInit(JsonbContainer *container)
{
	abort();
}

JsonbIteratorToken
JsonbIteratorNext(JsonbIterator **it, JsonbValue *val, bool skipNested)
{
	abort();
}

Datum
DirectFunctionCall1Coll(PGFunction func, Oid collation, Datum arg1)
{
	abort();
}

Datum
numeric_out(PG_FUNCTION_ARGS)
{
	abort();
}

/* A hash that keeps what it is given. */
struct pg_cryptohash_ctx
{
	char	   *bytes;
	size_t		len;
};

static struct pg_cryptohash_ctx hashed;

pg_cryptohash_ctx *
pg_cryptohash_create(pg_cryptohash_type type)
{
	hashed.bytes = palloc(1);
	hashed.len = 0;
	return &hashed;
}

int
pg_cryptohash_init(pg_cryptohash_ctx *ctx)
{
	return 0;
}

int
pg_cryptohash_update(pg_cryptohash_ctx *ctx, const uint8 *data, size_t len)
{
	ctx->bytes = repalloc(ctx->bytes, ctx->len + len + 1);
	memcpy(ctx->bytes + ctx->len, data, len);
	ctx->len += len;
	return 0;
}

int
pg_cryptohash_final(pg_cryptohash_ctx *ctx, uint8 *dest, size_t len)
{
	memset(dest, 0, len);
	return 0;
}

void
pg_cryptohash_free(pg_cryptohash_ctx *ctx)
{
}

const char *
pg_cryptohash_error(pg_cryptohash_ctx *ctx)
{
	return "";
}

/* ---- runs ---- */

#define NODE(token, i, any, in, ex, child, sibling) \
	{.name = token, .name_len = sizeof(token) - 1, .index = i, .any_element = any, \
	 .include = in, .exclude = ex, .first_child = child, .next_sibling = sibling}

/* include "/a" and "/b/" + asterisk + "/c", exclude "/a/b", "/0" */
static IdemPointers *
make_pointers(bool include)
{
	static const IdemPointerNode nodes[] = {
		NODE("", -1, false, false, false, 1, 0),
		NODE("a", -1, false, true, false, 5, 2),
		NODE("b", -1, false, false, false, 3, 6),
		NODE("*", -1, true, false, false, 4, 0),
		NODE("c", -1, false, true, false, 0, 0),
		NODE("b", -1, false, false, true, 0, 0),
		NODE("0", 0, false, false, true, 0, 0),
	};
	IdemPointers *pointers = palloc(offsetof(IdemPointers, nodes) + sizeof(nodes));

	pointers->has_include = include;
	pointers->nnodes = lengthof(nodes);
	memcpy(pointers->nodes, nodes, sizeof(nodes));
	for (int i = 0; i < lengthof(nodes); i++)
		pointers->nodes[i].include &= include;
	return pointers;
}

static text *
make_text(const void *bytes, size_t len)
{
	text	   *result = palloc(VARHDRSZ + len);

	SET_VARSIZE(result, VARHDRSZ + len);
	memcpy(VARDATA(result), bytes, len);
	return result;
}

/* The canonical form, or NULL where it is refused. */
static text *
canonical_or_null(text *document, bool strict)
{
	if (sigsetjmp(on_error, 0) != 0)
		return NULL;
	return canonical_text(PointerGetDatum(document), IDEM_DOCUMENT_TEXT, strict);
}

static bool
digest_or_false(text *document, const IdemPointers *pointers)
{
	IdemDigest	digest;

	if (sigsetjmp(on_error, 0) != 0)
		return false;
	canonical_digest(PointerGetDatum(document), IDEM_DOCUMENT_TEXT, pointers, &digest);
	return true;
}

static bool
text_equal(const text *a, const text *b)
{
	return VARSIZE(a) == VARSIZE(b) && memcmp(a, b, VARSIZE(a)) == 0;
}

extern int	LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	text	   *document;
	text	   *canonical;
	text	   *again;

	/* a server's text is valid in its encoding and has no zero byte */
	if (size == 0 || memchr(data + 1, '\0', size - 1) != NULL ||
		pg_encoding_verifymbstr(PG_UTF8, (const char *) data + 1, size - 1) != size - 1)
		return 0;
	document = make_text(data + 1, size - 1);

	canonical = canonical_or_null(document, false);
	if (digest_or_false(document, NULL) != (canonical != NULL))
		abort();
	if (canonical != NULL)
	{
		if (hashed.len != VARSIZE(canonical) - VARHDRSZ ||
			memcmp(hashed.bytes, VARDATA(canonical), hashed.len) != 0)
			abort();
		again = canonical_or_null(canonical, false);
		if (again == NULL || !text_equal(again, canonical))
			abort();
		again = canonical_or_null(document, true);
		if (again != NULL && !text_equal(again, canonical))
			abort();
	}
	if (data[0] & 1)
	{
		if (digest_or_false(document, make_pointers(data[0] & 2)) &&
			canonical_or_null(make_text(hashed.bytes, hashed.len), false) == NULL)
			abort();
	}
	free_all();
	return 0;
}

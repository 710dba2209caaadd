/*-------------------------------------------------------------------------
 *
 * idem.h
 *		Declarations shared by the files of the extension.
 *
 * Arrows point one way: claim, settle, admin and sweep decide; they use ledger
 * (rows), held (locks and open claims), scope (policy), key and fingerprint
 * (arguments); those use only what is declared here.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_H
#define IDEM_H

#include "access/htup.h"
#include "datatype/timestamp.h"
#include "fmgr.h"
#include "nodes/pg_list.h"
#include "storage/block.h"
#include "storage/buf.h"
#include "storage/itemptr.h"
#include "storage/lockdefs.h"
#include "utils/array.h"
#include "utils/hsearch.h"
#include "utils/jsonb.h"
#include "utils/relcache.h"

#define IDEM_VERSION			"1.0"

/* ---- differences between server versions, all of them ---- */

#if PG_VERSION_NUM < 160000
#define object_aclcheck(class, object, role, mode)	pg_proc_aclcheck(object, role, mode)
#define ereturn(context, dummy_value, ...) \
	do { (void) (context); ereport(ERROR, __VA_ARGS__); return dummy_value; } while (0)
#define JsonActionResult				void
#define JSON_ACTION_RETURN()			return
#else
#define JsonActionResult				JsonParseErrorType
#define JSON_ACTION_RETURN()			return JSON_SUCCESS
#endif
#ifndef BGWORKER_INTERRUPTIBLE
#define BGWORKER_INTERRUPTIBLE			0
#endif
#if PG_VERSION_NUM < 170000
#define makeJsonLexContextCstringLen(lex, json, len, encoding, need_escapes) \
	((void) (lex), (makeJsonLexContextCstringLen) (json, len, encoding, need_escapes))
#define WaitEventExtensionNew(name)		PG_WAIT_EXTENSION
#endif
#if PG_VERSION_NUM < 180000
#define pg_noreturn						pg_attribute_noreturn()
#endif
#if PG_VERSION_NUM < 190000
#define TupleDescFinalize(desc)			((void) 0)
#define table_beginscan_tidrange(rel, snapshot, mintid, maxtid, flags) \
	(table_beginscan_tidrange) (rel, snapshot, mintid, maxtid)
#define table_index_fetch_begin(rel, flags)	(table_index_fetch_begin) (rel)
#endif

/* ---- error codes of our own; the README lists them ---- */

#define ERRCODE_IDEM_LEASE_LOST			MAKE_SQLSTATE('I','D','0','0','1')
#define ERRCODE_IDEM_NOT_HELD			MAKE_SQLSTATE('I','D','0','0','2')
#define ERRCODE_IDEM_UNSETTLED			MAKE_SQLSTATE('I','D','0','0','3')
#define ERRCODE_IDEM_KEY_REUSED			MAKE_SQLSTATE('I','D','0','0','4')
#define ERRCODE_IDEM_NOT_SETTLED		MAKE_SQLSTATE('I','D','0','0','5')

/* ---- fingerprint.c: what tells two requests apart ---- */

#define IDEM_DIGEST_LEN			32

/* the SQL type idem_digest: fixed length, by reference, no alignment */
typedef struct IdemDigest
{
	uint8		data[IDEM_DIGEST_LEN];
} IdemDigest;

#define DatumGetIdemDigestP(X)		((IdemDigest *) DatumGetPointer(X))
#define IdemDigestPGetDatum(X)		PointerGetDatum(X)
#define PG_GETARG_IDEM_DIGEST_P(n)	DatumGetIdemDigestP(PG_GETARG_DATUM(n))
#define PG_RETURN_IDEM_DIGEST_P(x)	return IdemDigestPGetDatum(x)

/* the version of the canonical form that fingerprints are made with */
#define IDEM_FORM				1

/* which overload of a function a document came through */
typedef enum IdemDocumentType
{
	IDEM_DOCUMENT_TEXT,			/* text, to be checked for being JSON */
	IDEM_DOCUMENT_JSON,
	IDEM_DOCUMENT_JSONB
} IdemDocumentType;

/* parsed include and exclude pointers; opaque outside fingerprint.c and canonical.c */
typedef struct IdemPointers IdemPointers;

extern IdemPointers *fingerprint_pointers(ArrayType *include, ArrayType *exclude);
extern void fingerprint_document(Datum document, IdemDocumentType type,
								 const IdemPointers *pointers, IdemDigest *digest);

/* ---- key.c: what callers pass: keys and documents ---- */

#define IDEM_KEY_MAX			255

typedef struct IdemKey
{
	int32		scope_id;
	text	   *value;			/* 1 to IDEM_KEY_MAX bytes */
	uint64		hash;			/* of scope and key: the key lock's tag */
} IdemKey;

extern text *key_scope_name(FunctionCallInfo fcinfo, int arg);
extern void key_argument(FunctionCallInfo fcinfo, int arg, IdemKey *key);
extern void key_set(IdemKey *key, int32 scope_id, text *value);
extern bool key_equal(const IdemKey *a, const IdemKey *b);
extern int	key_errdetail(const IdemKey *key);
extern int64 key_interval(FunctionCallInfo fcinfo, int arg, const char *name);
extern Datum key_json(Datum document, IdemDocumentType type, bool checked);
extern void key_hide_document(void *arg);

/* ---- scope.c: the policy of a scope ---- */

/* a duration that never ends, in microseconds */
#define IDEM_FOREVER			PG_INT64_MAX

typedef struct IdemScope
{
	int32		id;
	char	   *name;
	Oid			owner;			/* whose members claim and settle */
	Oid			operators;		/* whose members resolve, recover, forget, quarantine */
	int64		retention;		/* durations in microseconds; IDEM_FOREVER */
	int64		archive_retention;
	int64		retry_within;
	int64		lease;			/* 0: claims are transaction-scoped */
	int32		max_attempts;	/* 0: any number */
	char		archive;		/* 'n' none, 'k' key, 'f' full */
	bool		hold;			/* on_expiry = 'hold' */
	char		keep_request;	/* 'n' never, 'i' inflight, 'a' always */
	IdemPointers *pointers;		/* include and exclude, or NULL */
} IdemScope;

/* an entry of what scope_all() returns */
typedef struct IdemScopeById
{
	int32		id;
	IdemScope	scope;
} IdemScopeById;

extern void scope_init(void);
extern const IdemScope *scope_lookup(const text *name);
extern HTAB *scope_all(void);
extern const IdemScope *scope_of_key(FunctionCallInfo fcinfo, IdemKey *key);
extern int64 scope_duration(const Interval *interval);
extern TimestampTz scope_deadline(TimestampTz start, int64 duration);
extern void scope_check_owner(const IdemScope *scope);
extern void scope_check_operator(const IdemScope *scope);
extern bool scope_within_retention(const IdemScope *scope, TimestampTz completed_at, TimestampTz now);
extern bool scope_speaks(const IdemScope *scope, TimestampTz completed_at, TimestampTz now);
extern bool scope_in_doubt(const IdemScope *scope, int32 attempt, TimestampTz created_at,
						   TimestampTz now);
extern bool scope_abandoned(const IdemScope *scope, char state, int32 attempt, TimestampTz created_at,
							TimestampTz lease_until, TimestampTz now);

/* ---- lookup.c: where the rows of a key are ---- */

#define IDEM_FOUND_MAX			16

/* Pointers to rows, which stay those rows' as long as the leaf is pinned. */
typedef struct IdemFound
{
	int			count;
	Buffer		leaf;			/* if there are any */
	ItemPointerData tids[IDEM_FOUND_MAX];
} IdemFound;

extern bool lookup_fits(Relation index);
extern bool lookup_key(Relation index, const IdemKey *key, IdemFound *found);
extern void lookup_end(IdemFound *found);

/* ---- ledger.c: rows ---- */

typedef enum IdemTable
{
	IDEM_SCOPE,
	IDEM_RESULT,
	IDEM_INFLIGHT,
	IDEM_ARCHIVE,
	IDEM_AUDIT,
	IDEM_SWEEP
} IdemTable;
#define IDEM_TABLES				(IDEM_SWEEP + 1)

/* columns by attribute number; ledger.c checks that the tables agree */
typedef enum IdemScopeColumn
{
	Anum_scope_id = 1, Anum_scope_name, Anum_scope_owner, Anum_scope_operators,
	Anum_scope_retention, Anum_scope_archive, Anum_scope_archive_retention,
	Anum_scope_replay_window, Anum_scope_lease, Anum_scope_on_expiry,
	Anum_scope_max_attempts, Anum_scope_retry_within, Anum_scope_include,
	Anum_scope_exclude, Anum_scope_keep_request
} IdemScopeColumn;

/* idem.result, and idem.archive, which has one more */
typedef enum IdemResultColumn
{
	Anum_result_token = 1, Anum_result_created_at, Anum_result_completed_at,
	Anum_result_scope_id, Anum_result_attempt, Anum_result_form, Anum_result_state,
	Anum_result_fingerprint, Anum_result_key, Anum_result_response,
	Anum_result_status_code, Anum_result_headers, Anum_result_body, Anum_result_request,
	Anum_archive_archived_at
} IdemResultColumn;

typedef enum IdemInflightColumn
{
	Anum_inflight_token = 1, Anum_inflight_lease_until, Anum_inflight_created_at,
	Anum_inflight_updated_at, Anum_inflight_scope_id, Anum_inflight_attempt,
	Anum_inflight_form, Anum_inflight_state, Anum_inflight_fingerprint, Anum_inflight_key,
	Anum_inflight_claimant, Anum_inflight_owner, Anum_inflight_recovery_point,
	Anum_inflight_request, Anum_inflight_checkpoint
} IdemInflightColumn;

typedef enum IdemAuditColumn
{
	Anum_audit_at = 1, Anum_audit_scope_id, Anum_audit_event, Anum_audit_scope,
	Anum_audit_key, Anum_audit_who, Anum_audit_application, Anum_audit_fingerprint,
	Anum_audit_old, Anum_audit_new
} IdemAuditColumn;

typedef enum IdemSweepColumn
{
	Anum_sweep_last_started = 1, Anum_sweep_last_duration, Anum_sweep_reclaimed,
	Anum_sweep_held, Anum_sweep_archived, Anum_sweep_purged, Anum_sweep_more,
	Anum_sweep_result_hand, Anum_sweep_archive_hand, Anum_sweep_inflight_hand,
	Anum_sweep_audit_hand, Anum_sweep_only_row
} IdemSweepColumn;

#define IDEM_RESULT_COLUMNS		Anum_result_request
#define IDEM_MAX_COLUMNS		15

/* the states of a row, as stored; ledger_state_name() spells them out */
#define IDEM_PROCESSING			'p'
#define IDEM_FREE				'e'
#define IDEM_IN_DOUBT			'u'
#define IDEM_SUCCEEDED			's'
#define IDEM_FAILED				'f'

/* A row as a probe found it. */
typedef struct IdemRow
{
	IdemTable	table;
	HeapTuple	tuple;			/* a copy; NULL: the table has no row of the key */
	TransactionId busy;			/* another transaction that is writing or deleting it */
	bool		committed;		/* if busy: it is there already, about to be changed or deleted */
	bool		own;			/* written by this transaction */
	bool		visible;		/* to the transaction's snapshot, where it keeps one */
	Datum		values[IDEM_MAX_COLUMNS];
	bool		nulls[IDEM_MAX_COLUMNS];
} IdemRow;

/* a column of an IdemRow or of a pair of arrays, by attribute number */
#define ROW_VALUE(row, anum)	((row)->values[(anum) - 1])
#define ROW_IS_NULL(row, anum)	((row)->nulls[(anum) - 1])
#define ROW_STATE(row, anum)	DatumGetChar(ROW_VALUE(row, anum))

/* What a settled key answers with. */
typedef struct IdemPayload
{
	Datum		response;		/* json */
	Datum		headers;		/* jsonb */
	Datum		body;			/* bytea */
	int32		status_code;
	bool		no_response;
	bool		no_headers;
	bool		no_body;
	bool		no_status_code;
} IdemPayload;

/* A key about to be settled: what its row in idem.result starts with. */
typedef struct IdemSettlement
{
	int64		token;
	int32		attempt;
	TimestampTz created_at;
	const IdemDigest *fingerprint;	/* or NULL */
	Datum		request;			/* json to keep, or 0 */
	char		state;
} IdemSettlement;

typedef void (*IdemRowCallback) (const IdemRow *row, void *arg);
typedef bool (*IdemWalkCallback) (const IdemRow *row, void *arg);	/* false: stop before this row */

extern void ledger_init(void);
extern void ledger_open(IdemTable table);
extern bool ledger_try_open(IdemTable table);
extern void ledger_forget_locks(void);
extern Oid	ledger_scope_relid(void);
extern void ledger_probe(IdemTable table, const IdemKey *key, IdemRow *row);
extern void ledger_insert(IdemTable table, const Datum *values, const bool *nulls);
extern void ledger_update(const IdemRow *row, const Datum *values, const bool *nulls);
extern void ledger_delete(const IdemRow *row);
extern void ledger_delete_key(IdemTable table, const IdemKey *key);
extern void ledger_set_state(const IdemRow *row, char state, TimestampTz lease_until, TimestampTz now);
extern void ledger_strip(const IdemRow *row);
extern void ledger_settle(const IdemKey *key, const IdemSettlement *settlement,
						  const IdemPayload *payload, TimestampTz now);
extern void ledger_wait(const IdemRow *row);
extern void ledger_each(IdemTable table, int32 scope_id, bool miss_none,
						IdemRowCallback callback, void *arg);
extern BlockNumber ledger_walk(IdemTable table, BlockNumber start, BlockNumber blocks,
							   IdemWalkCallback callback, void *arg);
extern BlockNumber ledger_blocks(IdemTable table);
extern bool ledger_unchanged(const IdemRow *row);
extern bool ledger_read_scope(const text *name, IdemRow *row);
extern bool ledger_read_sweep(IdemRow *row);
extern bool ledger_scope_in_use(IdemTable table, int32 scope_id);
extern void ledger_audit(const char *event, int32 scope_id, const char *scope, const IdemKey *key,
						 const IdemDigest *fingerprint, Jsonb *old_value, Jsonb *new_value);
extern bool ledger_audited(const char *event, const IdemKey *key, const IdemDigest *fingerprint);
extern const char *ledger_state_name(char state);
extern const IdemDigest *ledger_fingerprint(const IdemRow *row);

/* ---- held.c: the key lock, and the claims this transaction holds ---- */

/*
 * field4 of the lock tag: what tells a key lock from an advisory lock (1 and
 * 2) in the same lock space. The view idem.holder shows locks by this number.
 */
#define IDEM_KEY_LOCK_CLASS		7453

/* A transaction-scoped claim: no row yet, or rows that no longer speak. */
typedef struct IdemClaim
{
	IdemKey		key;			/* its value is behind the struct */
	int64		token;
	int32		attempt;
	TimestampTz created_at;
	bool		has_fingerprint;
	IdemDigest	fingerprint;
	bool		has_result;		/* a row in idem.result to delete when settled */
	bool		has_inflight;	/* likewise in idem.inflight */
	bool		has_archive;	/* likewise in idem.archive */
	Datum		request;		/* json to be kept with the result, or 0 */
	char		settled;		/* how, in a subtransaction of the claim's; or 0 */
	/* what is left is held.c's own */
	SubTransactionId claim_subid;
	SubTransactionId settle_subid;
	TransactionId xid;			/* the transaction's xid and command when it claimed */
	CommandId	cid;
	struct IdemClaim *covered;	/* an older one of the key, settled or released */
	struct IdemClaim *older_claim;	/* by claim_subid, deepest first */
	struct IdemClaim *newer_claim;
	struct IdemClaim *older_settled;	/* by settle_subid, deepest first */
	struct IdemClaim *newer_settled;
} IdemClaim;

extern void held_init(void);
extern bool held_lock(const IdemKey *key, bool wait);
extern void held_unlock(const IdemKey *key);
extern bool held_elsewhere(const IdemKey *key);
extern IdemClaim *held_find(const IdemKey *key);
extern IdemClaim *held_add(const IdemKey *key);
extern void held_keep_request(IdemClaim *claim, Datum request);
extern void held_settle(IdemClaim *claim, char how);
extern bool held_untouched(const IdemClaim *claim);
extern bool held_in_scope(int32 scope_id);
pg_noreturn extern void held_lease_lost(const IdemKey *key);
extern void held_doom(int sqlerrcode, const char *message, const IdemKey *key);
extern void held_repeat(const IdemKey *key);
extern void held_require_durable_commit(void);
extern void held_pause(int *pause);

/* ---- decide.c: the decision table ---- */

/* What is asked of a key. */
typedef struct IdemQuestion
{
	const IdemScope *scope;
	IdemKey		key;
	bool		has_fingerprint;
	IdemDigest	fingerprint;
	int64		lease;			/* microseconds; 0: transaction-scoped */
	text	   *claimant;		/* or NULL */
	Datum		request;		/* json, or 0 */
} IdemQuestion;

/* The lines of the table in DESIGN order; idem_explain() names them. */
typedef enum IdemLine
{
	IDEM_LINE_BUSY,				/* another transaction's lock or uncommitted row */
	IDEM_LINE_OWN_OTHER,		/* this transaction's claim, for another request */
	IDEM_LINE_OWN,				/* this transaction's claim */
	IDEM_LINE_MISMATCH,			/* a row that speaks, with another fingerprint */
	IDEM_LINE_SAME_CLAIMANT,	/* its holder asks again */
	IDEM_LINE_LEASE_RUNNING,
	IDEM_LINE_IN_DOUBT,
	IDEM_LINE_TAKEOVER,			/* free again, or the lease is over */
	IDEM_LINE_REPLAY,			/* settled, inside its retention */
	IDEM_LINE_TOMBSTONE,		/* settled, older, archive = key */
	IDEM_LINE_ARCHIVED,			/* settled, older, archive = full */
	IDEM_LINE_NEW				/* nothing speaks for the key */
} IdemLine;

typedef enum IdemOutcome
{
	IDEM_CLAIMED, IDEM_REPLAYED, IDEM_IN_PROGRESS, IDEM_MISMATCH, IDEM_EXPIRED, IDEM_UNKNOWN,
	IDEM_EXECUTED
} IdemOutcome;

/* What was found of a key, and what follows. */
typedef struct IdemDecision
{
	IdemLine	line;
	IdemOutcome outcome;
	TimestampTz now;			/* the clock it was decided by */
	IdemClaim  *claim;			/* this transaction's open claim, or NULL */
	IdemRow    *row;			/* the row that spoke, or NULL */
	char		state;			/* of one in idem.inflight, by the clock */
	IdemRow		result;			/* what the probes found; tuple NULL: nothing */
	IdemRow		inflight;
	IdemRow		archive;
	/* of a claim that was taken */
	int64		token;
	int32		attempt;
	TimestampTz created_at;
} IdemDecision;

extern void decide(const IdemQuestion *question, IdemDecision *decision);
extern void decide_check_visible(const IdemDecision *decision);
extern void decide_free(IdemDecision *decision);
extern void decide_take(const IdemQuestion *question, IdemDecision *decision);
extern void decide_number(IdemDecision *decision);
extern void decide_answer(const IdemDecision *decision,
						  Datum *values, bool *nulls);
extern void decide_answer_free(const IdemDecision *decision, Datum *values, bool *nulls);
extern void decide_without_lock(IdemDecision *decision);
extern Datum decide_answer_datum(FunctionCallInfo fcinfo, const Datum *values, const bool *nulls);

/* the attributes of idem_answer that this library knows */
#define IDEM_ANSWER_COLUMNS		14
#define IDEM_ANSWER_COLUMNS_MAX	64	/* and as many as it can do with */

/* ---- settle.c ---- */

extern void settle_read_payload(FunctionCallInfo fcinfo, IdemDocumentType type, int response_arg,
								int status_arg, IdemPayload *payload);
extern void settle_handled(const IdemKey *key, const IdemPayload *payload);

/* ---- sweep.c ---- */

/* as IDEM_KEY_LOCK_CLASS: the lock that keeps a database's sweeps apart */
#define IDEM_SWEEP_LOCK_CLASS	7454

typedef struct IdemSweepCounts
{
	int64		reclaimed;		/* leases that were over, free again */
	int64		held;			/* leases that were over, in doubt */
	int64		archived;		/* settled keys stripped or moved */
	int64		purged;			/* rows removed */
	bool		more;			/* there is work left */
} IdemSweepCounts;

/* How far a sweep in several transactions may turn its hands; starts as zeros. */
typedef struct IdemSweepPace
{
	bool		known;
	BlockNumber due[IDEM_TABLES];
} IdemSweepPace;

extern void sweep_run(int64 max_rows, IdemSweepPace *pace, IdemSweepCounts *counts);

/* ---- stats.c ---- */

/* in the order of idem_stat()'s columns; the first ones in that of IdemOutcome */
typedef enum IdemCounter
{
	IDEM_COUNT_CLAIMED, IDEM_COUNT_REPLAYED, IDEM_COUNT_IN_PROGRESS, IDEM_COUNT_MISMATCH,
	IDEM_COUNT_EXPIRED, IDEM_COUNT_UNKNOWN,
	IDEM_COUNT_TAKEOVERS, IDEM_COUNT_SUCCEEDED, IDEM_COUNT_FAILED, IDEM_COUNT_RELEASED,
	IDEM_COUNT_IN_DOUBT, IDEM_COUNT_LEASES_LOST, IDEM_COUNT_RECLAIMED, IDEM_COUNT_HELD,
	IDEM_COUNT_ARCHIVED, IDEM_COUNT_PURGED
} IdemCounter;
#define IDEM_COUNTERS			(IDEM_COUNT_PURGED + 1)

extern bool idem_track;

extern void stats_init(void);
extern void stats_add(int32 scope_id, IdemCounter counter, int64 n);
extern void stats_replay_age(int32 scope_id, int64 microseconds);
extern void stats_mark_database(void);
extern bool stats_database_marked(Oid oid);
extern bool stats_set_failing(bool failing);
extern List *stats_databases(void);
extern void stats_give_up(Oid oid);

/* ---- worker.c ---- */

extern void worker_init(void);

#endif							/* IDEM_H */

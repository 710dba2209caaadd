/*-------------------------------------------------------------------------
 *
 * scope.c
 *		The policy of a scope: one backend-local cache, its invalidation.
 *
 * A contract is read with the latest snapshot, whatever the transaction's own
 * is: what an old snapshot sees must not stay in the cache. The trigger on
 * idem.scope sends a relcache invalidation for the table with every change.
 * It is delivered at commit, before the changer's locks are released, and a
 * claim opens idem.result (which accepts invalidations) before it looks its
 * scope up; the trigger takes SHARE on idem.result before it lets a scope go.
 * So a claim either holds its lock on idem.result first, and the deleter waits
 * and then sees the claim's row, or it sees that the scope is gone.
 *
 * The cache is thrown away as a whole. Contracts handed out stay valid to the
 * end of the transaction.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "common/int.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/jsonb.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/timestamp.h"

#include "idem.h"

PG_FUNCTION_INFO_V1(idem_scope_guard);

#define SCOPE_NAME_MAX			255

typedef struct ScopeEntry
{
	char		name[SCOPE_NAME_MAX + 1];
	IdemScope	scope;
} ScopeEntry;

static HTAB *scopes = NULL;
static MemoryContext scopes_context = NULL;
static ScopeEntry *last_used = NULL;
static bool scopes_valid = false;

static void
scopes_invalidate(Datum arg, Oid relid)
{
	if (relid == InvalidOid || relid == ledger_scope_relid())
		scopes_valid = false;
}

void
scope_init(void)
{
	CacheRegisterRelcacheCallback(scopes_invalidate, (Datum) 0);
}

/* An interval in microseconds, a day being 24 hours and a month 30 days; saturates. */
int64
scope_duration(const Interval *interval)
{
	int64		days = (int64) interval->month * DAYS_PER_MONTH + interval->day;
	int64		result;

	if (pg_mul_s64_overflow(days, USECS_PER_DAY, &result) ||
		pg_add_s64_overflow(result, interval->time, &result))
		return days < 0 ? PG_INT64_MIN : IDEM_FOREVER;
	return result;
}

/* The time that long after start; infinity where there is none. */
TimestampTz
scope_deadline(TimestampTz start, int64 duration)
{
	TimestampTz result;

	if (duration == IDEM_FOREVER || pg_add_s64_overflow(start, duration, &result) ||
		!IS_VALID_TIMESTAMP(result))
		return DT_NOEND;
	return result;
}

static int64
duration_column(const IdemRow *row, int column, int64 if_null)
{
	if (ROW_IS_NULL(row, column))
		return if_null;
	return scope_duration(DatumGetIntervalP(ROW_VALUE(row, column)));
}

static ArrayType *
array_column(const IdemRow *row, int column)
{
	return ROW_IS_NULL(row, column) ? NULL : DatumGetArrayTypeP(ROW_VALUE(row, column));
}

static char
word_column(const IdemRow *row, int column)
{
	return *VARDATA_ANY(DatumGetTextPP(ROW_VALUE(row, column)));
}

static void
fill_scope(const IdemRow *row, IdemScope *scope)
{
	scope->id = DatumGetInt32(ROW_VALUE(row, Anum_scope_id));
	scope->name = TextDatumGetCString(ROW_VALUE(row, Anum_scope_name));
	scope->owner = DatumGetObjectId(ROW_VALUE(row, Anum_scope_owner));
	scope->operators = ROW_IS_NULL(row, Anum_scope_operators) ? scope->owner :
		DatumGetObjectId(ROW_VALUE(row, Anum_scope_operators));
	scope->retention = duration_column(row, Anum_scope_retention, IDEM_FOREVER);
	scope->archive_retention = duration_column(row, Anum_scope_archive_retention, IDEM_FOREVER);
	scope->retry_within = duration_column(row, Anum_scope_retry_within, IDEM_FOREVER);
	scope->lease = duration_column(row, Anum_scope_lease, 0);
	scope->max_attempts = ROW_IS_NULL(row, Anum_scope_max_attempts) ? 0 :
		DatumGetInt32(ROW_VALUE(row, Anum_scope_max_attempts));
	scope->archive = word_column(row, Anum_scope_archive);
	scope->hold = word_column(row, Anum_scope_on_expiry) == 'h';
	scope->keep_request = word_column(row, Anum_scope_keep_request);
	scope->pointers = fingerprint_pointers(array_column(row, Anum_scope_include),
										   array_column(row, Anum_scope_exclude));
}

static void
start_cache(void)
{
	HASHCTL		ctl;

	if (scopes_context != NULL)
	{
		MemoryContextSetParent(scopes_context, TopTransactionContext);
		scopes_context = NULL;
	}
	scopes = NULL;
	last_used = NULL;
	scopes_context = AllocSetContextCreate(CacheMemoryContext, "idem scopes", ALLOCSET_SMALL_SIZES);
	memset(&ctl, 0, sizeof(ctl));
	ctl.keysize = SCOPE_NAME_MAX + 1;
	ctl.entrysize = sizeof(ScopeEntry);
	ctl.hcxt = scopes_context;
	scopes = hash_create("idem scopes", 16, &ctl, HASH_ELEM | HASH_STRINGS | HASH_CONTEXT);
	scopes_valid = true;
}

static void
no_such_scope(const char *name)
{
	ereport(ERROR,
			(errcode(ERRCODE_UNDEFINED_OBJECT),
			 errmsg("scope \"%s\" does not exist", name),
			 errhint("INSERT INTO idem.scope (name) VALUES (%s);", quote_literal_cstr(name))));
}

/*
 * The contract of a scope, valid to the end of the transaction; 42704 if there
 * is none. The caller has opened idem.result.
 */
const IdemScope *
scope_lookup(const text *name)
{
	ScopeEntry *entry;
	MemoryContext caller;
	IdemScope	scope;
	IdemRow		row;
	char		buffer[SCOPE_NAME_MAX + 1];
	int			len = VARSIZE_ANY_EXHDR(name);

	if (len > SCOPE_NAME_MAX)
		no_such_scope(text_to_cstring(name));
	if (scopes_valid && last_used && memcmp(last_used->name, VARDATA_ANY(name), len) == 0 &&
		last_used->name[len] == '\0')
		return &last_used->scope;

	memcpy(buffer, VARDATA_ANY(name), len);
	buffer[len] = '\0';
	if (!scopes_valid)
		start_cache();
	entry = hash_search(scopes, buffer, HASH_FIND, NULL);
	if (entry == NULL)
	{
		if (!ledger_read_scope(name, &row))
			no_such_scope(buffer);
		if (!scopes_valid)
			start_cache();		/* reading it has told us of a change */
		caller = MemoryContextSwitchTo(scopes_context);
		fill_scope(&row, &scope);
		MemoryContextSwitchTo(caller);
		entry = hash_search(scopes, buffer, HASH_ENTER, NULL);
		entry->scope = scope;
	}
	last_used = entry;
	return &entry->scope;
}

static void
add_scope(const IdemRow *row, void *arg)
{
	HTAB	   *all = arg;
	int32		id = DatumGetInt32(ROW_VALUE(row, Anum_scope_id));
	IdemScopeById *entry = hash_search(all, &id, HASH_ENTER, NULL);

	fill_scope(row, &entry->scope);
}

/* All contracts as they are now, by id, for a sweep; in the current memory context. */
HTAB *
scope_all(void)
{
	HASHCTL		ctl = {
		.keysize = sizeof(int32),
		.entrysize = sizeof(IdemScopeById),
		.hcxt = CurrentMemoryContext
	};
	HTAB	   *all = hash_create("idem scopes by id", 64, &ctl, HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);

	ledger_each(IDEM_SCOPE, 0, true, add_scope, all);
	return all;
}

/*
 * What every function on a key begins with: reads scope and key, the first two
 * arguments. idem.result is opened before the scope is looked up, see above.
 */
const IdemScope *
scope_of_key(FunctionCallInfo fcinfo, IdemKey *key)
{
	text	   *name = key_scope_name(fcinfo, 0);
	const IdemScope *scope;

	key_argument(fcinfo, 1, key);
	ledger_open(IDEM_RESULT);
	scope = scope_lookup(name);
	key_set(key, scope->id, key->value);
	return scope;
}

static void
check_role(const IdemScope *scope, Oid role, const char *what)
{
	if (!has_privs_of_role(GetUserId(), role))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied for scope \"%s\"", scope->name),
				 errhint("The current user must be a member of the scope's %s.", what)));
}

/* 42501 unless the current user may claim and settle. */
void
scope_check_owner(const IdemScope *scope)
{
	check_role(scope, scope->owner, "owner");
}

/* 42501 unless the current user may resolve, recover, forget and quarantine. */
void
scope_check_operator(const IdemScope *scope)
{
	check_role(scope, scope->operators, "operators");
}

/* Is a key settled at that time inside its retention? */
bool
scope_within_retention(const IdemScope *scope, TimestampTz completed_at, TimestampTz now)
{
	return now < scope_deadline(completed_at, scope->retention);
}

/* Does the row of a key settled at that time still speak, be it as a tombstone? */
bool
scope_speaks(const IdemScope *scope, TimestampTz completed_at, TimestampTz now)
{
	TimestampTz end = scope_deadline(completed_at, scope->retention);

	if (scope->archive != 'n' && end != DT_NOEND)
		end = scope_deadline(end, scope->archive_retention);
	return now < end;
}

/* Is a lease that is over one that nobody may take over without a human's word? */
bool
scope_in_doubt(const IdemScope *scope, int32 attempt, TimestampTz created_at, TimestampTz now)
{
	return scope->hold ||
		(scope->max_attempts > 0 && attempt >= scope->max_attempts) ||
		now > scope_deadline(created_at, scope->retry_within);
}

/*
 * Is a key in flight forgotten: free, or its lease over, for longer than the
 * retention? Not one whose lease is over where there is retry_within: that
 * comes to be in doubt, and would do so too late for who was told it is new.
 */
bool
scope_abandoned(const IdemScope *scope, char state, int32 attempt, TimestampTz created_at,
				TimestampTz lease_until, TimestampTz now)
{
	if (state == IDEM_IN_DOUBT || now < scope_deadline(lease_until, scope->retention))
		return false;
	return state == IDEM_FREE ||
		(scope->retry_within == IDEM_FOREVER && !scope_in_doubt(scope, attempt, created_at, now));
}

/* ---- the trigger on idem.scope ---- */

static bool
column_changed(TriggerData *trigger, int column)
{
	TupleDesc	desc = RelationGetDescr(trigger->tg_relation);
	bool		old_null,
				new_null;
	Datum		old_value = heap_getattr(trigger->tg_trigtuple, column, desc, &old_null);
	Datum		new_value = heap_getattr(trigger->tg_newtuple, column, desc, &new_null);
	Form_pg_attribute att = TupleDescAttr(desc, column - 1);

	if (old_null || new_null)
		return old_null != new_null;
	if (att->attlen == -1)
	{
		old_value = PointerGetDatum(PG_DETOAST_DATUM(old_value));
		new_value = PointerGetDatum(PG_DETOAST_DATUM(new_value));
	}
	return !datumIsEqual(old_value, new_value, att->attbyval, att->attlen);
}

static Datum
tuple_column(TriggerData *trigger, HeapTuple tuple, int column, bool *isnull)
{
	return heap_getattr(tuple, column, RelationGetDescr(trigger->tg_relation), isnull);
}

static bool
contract_changed(TriggerData *trigger)
{
	for (int column = 1; column <= Anum_scope_keep_request; column++)
	{
		if (column_changed(trigger, column))
			return true;
	}
	return false;
}

/* The whole row for the audit. */
static Jsonb *
contract_as_jsonb(TriggerData *trigger, HeapTuple tuple)
{
	Datum		row = heap_copy_tuple_as_datum(tuple, RelationGetDescr(trigger->tg_relation));
	Datum		json = DirectFunctionCall1(row_to_json, row);

	return DatumGetJsonbP(DirectFunctionCall1(jsonb_in, CStringGetDatum(TextDatumGetCString(json))));
}

static void
refuse(const char *message, const char *name, const char *hint)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg(message, name),
			 errhint("%s", hint)));
}

static bool
scope_has_rows(int32 scope_id)
{
	return ledger_scope_in_use(IDEM_RESULT, scope_id) ||
		ledger_scope_in_use(IDEM_INFLIGHT, scope_id) ||
		ledger_scope_in_use(IDEM_ARCHIVE, scope_id) ||
		held_in_scope(scope_id);
}

static void
guard_update(TriggerData *trigger, int32 scope_id, const char *name)
{
	bool		isnull;

	if (column_changed(trigger, Anum_scope_id))
		refuse("the id of scope \"%s\" cannot change", name, "Keys refer to it.");
	if ((column_changed(trigger, Anum_scope_include) || column_changed(trigger, Anum_scope_exclude)) &&
		scope_has_rows(scope_id))
		refuse("include and exclude of scope \"%s\" cannot change while it has keys", name,
			   "Honest retries would be told apart from their first request: make a new scope.");
	if (column_changed(trigger, Anum_scope_archive) &&
		*VARDATA_ANY(DatumGetTextPP(tuple_column(trigger, trigger->tg_newtuple, Anum_scope_archive, &isnull))) == 'k' &&
		ledger_scope_in_use(IDEM_ARCHIVE, scope_id))
		refuse("the archive policy of scope \"%s\" cannot become key while it has archived keys", name,
			   "Archived keys would be new again: make a new scope, or wait until they are past archive_retention.");
}

/* include and exclude must be JSON Pointers; 22023 */
static void
check_pointers(TriggerData *trigger, HeapTuple tuple)
{
	ArrayType  *arrays[2] = {NULL, NULL};

	for (int i = 0; i < 2; i++)
	{
		bool		isnull;
		Datum		value = tuple_column(trigger, tuple, i == 0 ? Anum_scope_include : Anum_scope_exclude, &isnull);

		if (!isnull)
			arrays[i] = DatumGetArrayTypeP(value);
	}
	(void) fingerprint_pointers(arrays[0], arrays[1]);
}

/*
 * idem_scope_guard() → trigger
 *
 * AFTER each row: 55000 for deleting a scope that has keys, or changing what
 * its keys rely on; 22023 for a bad pointer; audits changes and deletions, and
 * invalidates every backend's cache. BEFORE TRUNCATE: 55000.
 */
Datum
idem_scope_guard(PG_FUNCTION_ARGS)
{
	TriggerData *trigger = (TriggerData *) fcinfo->context;
	bool		isnull;
	int32		scope_id;
	char	   *name;

	if (!CALLED_AS_TRIGGER(fcinfo))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("idem_scope_guard() was not called as a trigger")));
	if (TRIGGER_FIRED_BY_TRUNCATE(trigger->tg_event))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("idem.scope cannot be truncated"),
				 errhint("DELETE scopes that have no keys.")));

	scope_id = DatumGetInt32(tuple_column(trigger, trigger->tg_trigtuple, Anum_scope_id, &isnull));
	name = TextDatumGetCString(tuple_column(trigger, trigger->tg_trigtuple, Anum_scope_name, &isnull));
	CacheInvalidateRelcache(trigger->tg_relation);

	/* on a subscriber the publisher has checked and audited already */
	if (SessionReplicationRole == SESSION_REPLICATION_ROLE_REPLICA)
		return PointerGetDatum(NULL);

	if (TRIGGER_FIRED_BY_INSERT(trigger->tg_event))
		check_pointers(trigger, trigger->tg_trigtuple);
	else if (TRIGGER_FIRED_BY_UPDATE(trigger->tg_event))
	{
		check_pointers(trigger, trigger->tg_newtuple);
		guard_update(trigger, scope_id, name);
		if (!contract_changed(trigger))
			return PointerGetDatum(NULL);
		ledger_audit("scope changed", scope_id, name, NULL, NULL,
					 contract_as_jsonb(trigger, trigger->tg_trigtuple),
					 contract_as_jsonb(trigger, trigger->tg_newtuple));
	}
	else
	{
		if (scope_has_rows(scope_id))
			refuse("scope \"%s\" cannot be deleted while it has keys", name,
				   "Forget its keys or wait until the sweep has removed them.");
		ledger_audit("scope deleted", scope_id, name, NULL, NULL,
					 contract_as_jsonb(trigger, trigger->tg_trigtuple), NULL);
	}
	return PointerGetDatum(NULL);
}

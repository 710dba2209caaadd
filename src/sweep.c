/*-------------------------------------------------------------------------
 *
 * sweep.c
 *		One bounded sweep: tidies up what the clock has decided already.
 *
 * A claim never depends on the sweep: by the same clock and policy it treats a
 * row as what the sweep would make of it. The sweep gives the space back, and
 * lets people see the state that a claim would see.
 *
 * Rows are found by walking the tables in block order, each with a clock hand
 * that idem.sweep keeps: no index on a time column, no cost to a claim. A row
 * is changed under its key's lock, and only if it is still the row that was
 * read. Nothing is waited for: a key whose lock is taken, or whose row somebody
 * is at, is left to the next turn of the hand. Only one sweep runs at a time;
 * another one finds nothing to do.
 *
 * A lease that is over becomes free, or in doubt, by the scope's policy. Where
 * the policy has retry_within, it stays as it is until that is over: "free"
 * would forget that a late takeover is no longer allowed.
 *
 * If the clock is behind the last sweep, it may have been ahead then or be
 * wrong now; nothing is touched until it has caught up.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/lock.h"
#include "tcop/utility.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "idem.h"

PG_FUNCTION_INFO_V1(idem_sweep);

/* as many rows are looked at for each one that may be changed */
#define ROWS_LOOKED_AT			20

/* what a paced sweep looks at in any case, in blocks */
#define PACED_BLOCKS			64

typedef struct Sweep
{
	HTAB	   *scopes;
	TimestampTz now;
	int64		changes_left;	/* the bounds of this sweep */
	int64		looks_left;
	IdemSweepCounts *counts;
	MemoryContext row_context;
} Sweep;

/* ---- what becomes of a row ---- */

typedef enum Action
{
	KEEP, PURGE, STRIP, MOVE, FREE, HOLD
} Action;

static bool
has_payload(const IdemRow *row)
{
	return !ROW_IS_NULL(row, Anum_result_headers) || !ROW_IS_NULL(row, Anum_result_response) ||
		!ROW_IS_NULL(row, Anum_result_body) || !ROW_IS_NULL(row, Anum_result_request);
}

static Action
settled_action(const IdemScope *scope, const IdemRow *row, TimestampTz now)
{
	TimestampTz completed = DatumGetTimestampTz(ROW_VALUE(row, Anum_result_completed_at));

	if (!scope_speaks(scope, completed, now))
		return PURGE;
	if (row->table == IDEM_ARCHIVE || scope_within_retention(scope, completed, now))
		return KEEP;
	if (scope->archive == 'f')
		return MOVE;
	return has_payload(row) ? STRIP : KEEP;
}

static Action
inflight_action(const IdemScope *scope, const IdemRow *row, TimestampTz now)
{
	char		state = ROW_STATE(row, Anum_inflight_state);
	int32		attempt = DatumGetInt32(ROW_VALUE(row, Anum_inflight_attempt));
	TimestampTz created = DatumGetTimestampTz(ROW_VALUE(row, Anum_inflight_created_at));
	TimestampTz until = DatumGetTimestampTz(ROW_VALUE(row, Anum_inflight_lease_until));

	if (scope_abandoned(scope, state, attempt, created, until, now))
		return PURGE;
	if (state != IDEM_PROCESSING || now < until)
		return KEEP;
	if (scope_in_doubt(scope, attempt, created, now))
		return HOLD;
	return scope->retry_within == IDEM_FOREVER ? FREE : KEEP;
}

/* An audit row is kept as long as its scope keeps anything; of a scope that is gone, for ever. */
static Action
audit_action(const IdemScope *scope, const IdemRow *row, TimestampTz now)
{
	TimestampTz end = scope_deadline(DatumGetTimestampTz(ROW_VALUE(row, Anum_audit_at)), scope->retention);

	return end == DT_NOEND || now < scope_deadline(end, scope->archive_retention) ? KEEP : PURGE;
}

/* ---- doing it ---- */

/* To the archive, in place of what an earlier life of the key may have left there. */
static void
move(const IdemKey *key, const IdemRow *row, TimestampTz now)
{
	Datum		v[IDEM_MAX_COLUMNS];
	bool		n[IDEM_MAX_COLUMNS];

	memcpy(v, row->values, sizeof(v));
	memcpy(n, row->nulls, sizeof(n));
	v[Anum_archive_archived_at - 1] = TimestampTzGetDatum(now);
	n[Anum_archive_archived_at - 1] = false;
	ledger_delete_key(IDEM_ARCHIVE, key);
	ledger_insert(IDEM_ARCHIVE, v, n);
	ledger_delete(row);
}

static void
act(Sweep *sweep, int32 scope_id, const IdemKey *key, const IdemRow *row, Action action)
{
	IdemCounter counter = IDEM_COUNT_PURGED;
	int64	   *count = &sweep->counts->purged;

	switch (action)
	{
		case KEEP:
			return;
		case PURGE:
			ledger_delete(row);
			break;
		case STRIP:
		case MOVE:
			if (action == STRIP)
				ledger_strip(row);
			else
				move(key, row, sweep->now);
			counter = IDEM_COUNT_ARCHIVED;
			count = &sweep->counts->archived;
			break;
		case FREE:
			ledger_set_state(row, IDEM_FREE,
							 DatumGetTimestampTz(ROW_VALUE(row, Anum_inflight_lease_until)), sweep->now);
			counter = IDEM_COUNT_RECLAIMED;
			count = &sweep->counts->reclaimed;
			break;
		case HOLD:
			ledger_set_state(row, IDEM_IN_DOUBT, DT_NOEND, sweep->now);
			counter = IDEM_COUNT_HELD;
			count = &sweep->counts->held;
			break;
	}
	(*count)++;
	stats_add(scope_id, counter, 1);
	sweep->changes_left--;
}

/* Changes the row of a key, unless somebody is at the key. */
static void
act_on_key(Sweep *sweep, int32 scope_id, const IdemRow *row, int key_column, Action action)
{
	IdemKey		key;

	key_set(&key, scope_id, DatumGetTextPP(ROW_VALUE(row, key_column)));
	if (held_find(&key) != NULL || !held_lock(&key, false))
		return;
	if (ledger_unchanged(row))
		act(sweep, scope_id, &key, row, action);
	held_unlock(&key);
}

/* Looks at one row; false: enough. */
static bool
visit(const IdemRow *row, void *arg)
{
	Sweep	   *sweep = arg;
	int			scope_column = row->table == IDEM_INFLIGHT ? Anum_inflight_scope_id :
		row->table == IDEM_AUDIT ? Anum_audit_scope_id : Anum_result_scope_id;
	int32		scope_id = DatumGetInt32(ROW_VALUE(row, scope_column));
	IdemScopeById *entry = hash_search(sweep->scopes, &scope_id, HASH_FIND, NULL);
	MemoryContext caller;
	Action		action;

	sweep->looks_left--;
	if (entry == NULL)
		return sweep->looks_left > 0;
	caller = MemoryContextSwitchTo(sweep->row_context);
	switch (row->table)
	{
		case IDEM_INFLIGHT:
			action = inflight_action(&entry->scope, row, sweep->now);
			if (action != KEEP)
				act_on_key(sweep, scope_id, row, Anum_inflight_key, action);
			break;
		case IDEM_AUDIT:
			action = audit_action(&entry->scope, row, sweep->now);
			if (action != KEEP && ledger_unchanged(row))
				act(sweep, scope_id, NULL, row, action);
			break;
		default:
			action = settled_action(&entry->scope, row, sweep->now);
			if (action != KEEP)
				act_on_key(sweep, scope_id, row, Anum_result_key, action);
			break;
	}
	MemoryContextSwitchTo(caller);
	MemoryContextReset(sweep->row_context);
	return sweep->changes_left > 0 && sweep->looks_left > 0;
}

/* ---- the hands ---- */

/*
 * How many blocks a paced sweep may look at, so that one turn of the hand takes
 * about the shortest finite retention; with none finite it stands still.
 */
static BlockNumber
paced_blocks(const Sweep *sweep, IdemTable table, TimestampTz last)
{
	HASH_SEQ_STATUS status;
	IdemScopeById *entry;
	int64		shortest = IDEM_FOREVER;
	double		share;

	hash_seq_init(&status, sweep->scopes);
	while ((entry = hash_seq_search(&status)) != NULL)
	{
		shortest = Min(shortest, entry->scope.retention);
		if (table == IDEM_ARCHIVE || entry->scope.archive == 'k')
			shortest = Min(shortest, entry->scope.archive_retention);
	}
	if (shortest == IDEM_FOREVER)
		return 0;
	share = Min(1.0, (double) (sweep->now - last) / Max(shortest, 1));
	return PACED_BLOCKS + (BlockNumber) (share * ledger_blocks(table));
}

/* Moves one hand on; returns where it stands then, and notes if it stopped early. */
static Datum
turn_hand(Sweep *sweep, IdemTable table, const IdemRow *last, int column, bool paced)
{
	BlockNumber hand = last->tuple ? (BlockNumber) DatumGetInt64(ROW_VALUE(last, column)) : 0;
	BlockNumber blocks = MaxBlockNumber;

	if (paced)
		blocks = paced_blocks(sweep, table, last->tuple ?
							  DatumGetTimestampTz(ROW_VALUE(last, Anum_sweep_last_started)) : sweep->now);
	if (blocks > 0 && sweep->changes_left > 0 && sweep->looks_left > 0)
	{
		hand = ledger_walk(table, hand, blocks, visit, sweep);
		if (sweep->changes_left <= 0 || sweep->looks_left <= 0)
			sweep->counts->more = hand > 0 || sweep->counts->more;
	}
	else if (blocks > 0)
		sweep->counts->more = true;
	return Int64GetDatum((int64) hand);
}

/* Lets one sweep run at a time in a database; false: another one is running. */
static bool
only_sweep(void)
{
	LOCKTAG		tag;

	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, 0, 0, IDEM_SWEEP_LOCK_CLASS);
	return LockAcquire(&tag, ExclusiveLock, false, true) != LOCKACQUIRE_NOT_AVAIL;
}

static void
write_sweep(const IdemRow *last, Datum *v, bool *n)
{
	if (last->tuple)
		ledger_update(last, v, n);
	else
		ledger_insert(IDEM_SWEEP, v, n);
	CommandCounterIncrement();
}

/*
 * One sweep in the current transaction, changing at most max_rows rows. paced:
 * looks only at what is due for this part of a turn. What was done is added to
 * counts; counts->more: it stopped before its hands came round.
 */
void
sweep_run(int64 max_rows, bool paced, IdemSweepCounts *counts)
{
	Sweep		sweep = {
		.now = GetCurrentTimestamp(),
		.changes_left = max_rows,
		.looks_left = max_rows * ROWS_LOOKED_AT,
		.counts = counts
	};
	IdemRow		last;
	Datum		v[IDEM_MAX_COLUMNS];
	bool		n[IDEM_MAX_COLUMNS] = {false};
	Interval	duration = {0};

	memset(counts, 0, sizeof(*counts));
	if (!only_sweep())
		return;
	if (!ledger_read_sweep(&last))
		last.tuple = NULL;
	else if (sweep.now < DatumGetTimestampTz(ROW_VALUE(&last, Anum_sweep_last_started)))
		return;

	sweep.scopes = scope_all();
	sweep.row_context = AllocSetContextCreate(CurrentMemoryContext, "idem sweep row", ALLOCSET_DEFAULT_SIZES);
	v[Anum_sweep_inflight_hand - 1] = turn_hand(&sweep, IDEM_INFLIGHT, &last, Anum_sweep_inflight_hand, false);
	v[Anum_sweep_result_hand - 1] = turn_hand(&sweep, IDEM_RESULT, &last, Anum_sweep_result_hand, paced);
	v[Anum_sweep_archive_hand - 1] = turn_hand(&sweep, IDEM_ARCHIVE, &last, Anum_sweep_archive_hand, paced);
	v[Anum_sweep_audit_hand - 1] = turn_hand(&sweep, IDEM_AUDIT, &last, Anum_sweep_audit_hand, paced);
	MemoryContextDelete(sweep.row_context);
	hash_destroy(sweep.scopes);

	duration.time = GetCurrentTimestamp() - sweep.now;
	v[Anum_sweep_last_started - 1] = TimestampTzGetDatum(sweep.now);
	v[Anum_sweep_last_duration - 1] = IntervalPGetDatum(&duration);
	v[Anum_sweep_reclaimed - 1] = Int64GetDatum(counts->reclaimed);
	v[Anum_sweep_held - 1] = Int64GetDatum(counts->held);
	v[Anum_sweep_archived - 1] = Int64GetDatum(counts->archived);
	v[Anum_sweep_purged - 1] = Int64GetDatum(counts->purged);
	v[Anum_sweep_more - 1] = BoolGetDatum(counts->more);
	v[Anum_sweep_only_row - 1] = BoolGetDatum(true);
	write_sweep(&last, v, n);
}

/*
 * idem_sweep(max_rows) → (reclaimed, held, archived, purged, more)
 *
 * One bounded sweep in the caller's transaction; never waits. 22023 for a
 * max_rows below 1, 25006 on a standby or in a read-only transaction.
 */
Datum
idem_sweep(PG_FUNCTION_ARGS)
{
	IdemSweepCounts counts;
	TupleDesc	desc;
	Datum		v[5];
	bool		n[5] = {false};
	int32		max_rows = PG_ARGISNULL(0) ? 0 : PG_GETARG_INT32(0);

	PreventCommandIfReadOnly("idem_sweep()");
	PreventCommandIfParallelMode("idem_sweep()");
	if (max_rows < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max_rows must be at least 1")));
	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");

	sweep_run(max_rows, false, &counts);
	v[0] = Int64GetDatum(counts.reclaimed);
	v[1] = Int64GetDatum(counts.held);
	v[2] = Int64GetDatum(counts.archived);
	v[3] = Int64GetDatum(counts.purged);
	v[4] = BoolGetDatum(counts.more);
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc), v, n)));
}

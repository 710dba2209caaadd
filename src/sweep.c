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
 * is at, is left to the next turn of the hand; where somebody keeps a whole
 * table, there is no sweep. Only one sweep runs at a time; another one finds
 * nothing to do.
 *
 * Who calls idem_sweep() until there is no more turns every hand to the end of
 * its table: one that is there waits for the others. The worker turns them
 * slower, see blocks_due().
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

/* as many rows of a table are looked at for each one that may be changed */
#define ROWS_LOOKED_AT			100

/* a hand that waits at the end of its table for the others */
#define HAND_AT_END				(-1)

/* what a paced sweep looks at in any case, in blocks */
#define PACED_BLOCKS			64

typedef struct Sweep
{
	HTAB	   *scopes;
	TimestampTz now;
	int64		changes_left;	/* the bounds of this sweep */
	int64		max_looks;		/* at each table */
	int64		looks_left;		/* at the one it is walking */
	BlockNumber block;			/* where it is */
	IdemSweepPace *pace;		/* or NULL */
	IdemSweepCounts *counts;
	MemoryContext row_context;
} Sweep;

/* the hands, in the order they are turned, and where idem.sweep keeps them */
static const IdemTable hand_tables[] = {IDEM_INFLIGHT, IDEM_RESULT, IDEM_ARCHIVE, IDEM_AUDIT};
static const int hand_columns[] = {Anum_sweep_inflight_hand, Anum_sweep_result_hand,
	Anum_sweep_archive_hand, Anum_sweep_audit_hand};

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

/*
 * To the archive, in place of what an earlier life of the key may have left
 * there; false: somebody is at that.
 */
static bool
move(const IdemKey *key, const IdemRow *row, TimestampTz now)
{
	Datum		v[IDEM_MAX_COLUMNS];
	bool		n[IDEM_MAX_COLUMNS];
	IdemRow		earlier;

	ledger_probe(IDEM_ARCHIVE, key, &earlier);
	if (earlier.tuple != NULL && !ledger_unchanged(&earlier))
		return false;
	if (earlier.tuple != NULL)
		ledger_delete(&earlier);
	memcpy(v, row->values, sizeof(v));
	memcpy(n, row->nulls, sizeof(n));
	v[Anum_archive_archived_at - 1] = TimestampTzGetDatum(now);
	n[Anum_archive_archived_at - 1] = false;
	ledger_insert(IDEM_ARCHIVE, v, n);
	ledger_delete(row);
	return true;
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
			else if (!move(key, row, sweep->now))
				return;
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

static Action
action_for(const IdemScope *scope, const IdemRow *row, TimestampTz now)
{
	switch (row->table)
	{
		case IDEM_INFLIGHT:
			return inflight_action(scope, row, now);
		case IDEM_AUDIT:
			return audit_action(scope, row, now);
		default:
			return settled_action(scope, row, now);
	}
}

/*
 * Looks at one row; false: leaves it to the next sweep. A block that was begun
 * is looked at to its end, else a block of more rows than may be looked at
 * would never be passed.
 */
static bool
visit(const IdemRow *row, void *arg)
{
	Sweep	   *sweep = arg;
	int			scope_column = row->table == IDEM_INFLIGHT ? Anum_inflight_scope_id :
		row->table == IDEM_AUDIT ? Anum_audit_scope_id : Anum_result_scope_id;
	int32		scope_id = DatumGetInt32(ROW_VALUE(row, scope_column));
	IdemScopeById *entry = hash_search(sweep->scopes, &scope_id, HASH_FIND, NULL);
	Action		action = entry ? action_for(&entry->scope, row, sweep->now) : KEEP;
	BlockNumber block = ItemPointerGetBlockNumber(&row->tuple->t_self);
	MemoryContext caller;

	if ((sweep->looks_left <= 0 && block != sweep->block) ||
		(sweep->changes_left <= 0 && action != KEEP))
		return false;
	sweep->block = block;
	sweep->looks_left--;
	if (action == KEEP)
		return true;
	caller = MemoryContextSwitchTo(sweep->row_context);
	if (row->table != IDEM_AUDIT)
		act_on_key(sweep, scope_id, row,
				   row->table == IDEM_INFLIGHT ? Anum_inflight_key : Anum_result_key, action);
	else if (ledger_unchanged(row))
		act(sweep, scope_id, NULL, row, action);
	MemoryContextSwitchTo(caller);
	MemoryContextReset(sweep->row_context);
	return true;
}

/* ---- the hands ---- */

/* The shortest time after which a row of a table is something to do for a sweep. */
static int64
time_kept(const IdemScope *scope, IdemTable table)
{
	if (scope->retention == IDEM_FOREVER)
		return IDEM_FOREVER;
	if (table == IDEM_RESULT)
		return scope->archive == 'k' ? Min(scope->retention, scope->archive_retention) : scope->retention;
	if (table == IDEM_ARCHIVE && scope->archive == 'n')
		return scope->retention;
	return scope->archive_retention;
}

static int64
shortest_time_kept(HTAB *scopes, IdemTable table)
{
	HASH_SEQ_STATUS status;
	IdemScopeById *entry;
	int64		shortest = IDEM_FOREVER;

	hash_seq_init(&status, scopes);
	while ((entry = hash_seq_search(&status)) != NULL)
		shortest = Min(shortest, time_kept(&entry->scope, table));
	return Max(shortest, 1);
}

/*
 * How many blocks a paced sweep may look at now, so that one turn of the hand
 * takes about the shortest time that a row is kept; where all are kept for
 * ever it stands still. Leases are looked at each time.
 */
static BlockNumber
blocks_due(const Sweep *sweep, IdemTable table, const IdemRow *last)
{
	BlockNumber blocks = ledger_blocks(table);
	int64		turn = shortest_time_kept(sweep->scopes, table);
	TimestampTz since = last->tuple ?
		DatumGetTimestampTz(ROW_VALUE(last, Anum_sweep_last_started)) : sweep->now;

	if (table == IDEM_INFLIGHT)
		return blocks;
	if (turn == IDEM_FOREVER)
		return 0;
	return Min(blocks, PACED_BLOCKS + (BlockNumber) (Min(1.0, (double) (sweep->now - since) / turn) * blocks));
}

/* Walks a table from a hand on; returns where the hand stands then. */
static int64
walk(Sweep *sweep, IdemTable table, int64 hand, BlockNumber blocks)
{
	BlockNumber end;

	sweep->block = InvalidBlockNumber;
	sweep->looks_left = sweep->max_looks;
	end = ledger_walk(table, (BlockNumber) hand, blocks, visit, sweep);
	return end == InvalidBlockNumber ? HAND_AT_END : (int64) end;
}

/* Turns a hand as far as is due, and notes whether that was all. */
static int64
turn_paced(Sweep *sweep, IdemTable table, int64 hand)
{
	BlockNumber *due = &sweep->pace->due[table];

	if (*due > 0)
	{
		int64		start = Max(hand, 0);

		hand = walk(sweep, table, start, *due);
		*due -= Min(*due, (hand == HAND_AT_END ? ledger_blocks(table) : hand) - start);
		if (*due > 0)
			sweep->counts->more = true;
	}
	return hand;
}

/* Turns the hands that are not at the end of their tables; all from the start if all are. */
static void
turn_to_end(Sweep *sweep, int64 *hands)
{
	bool		begin = true;

	for (size_t i = 0; i < lengthof(hand_tables); i++)
		begin = begin && hands[i] == HAND_AT_END;
	for (size_t i = 0; i < lengthof(hand_tables); i++)
	{
		if (begin || hands[i] != HAND_AT_END)
			hands[i] = walk(sweep, hand_tables[i], Max(hands[i], 0), MaxBlockNumber);
		if (hands[i] != HAND_AT_END)
			sweep->counts->more = true;
	}
}

static void
turn_hands(Sweep *sweep, const IdemRow *last, int64 *hands)
{
	for (size_t i = 0; i < lengthof(hand_tables); i++)
		hands[i] = last->tuple ? DatumGetInt64(ROW_VALUE(last, hand_columns[i])) : HAND_AT_END;
	if (sweep->pace == NULL)
	{
		turn_to_end(sweep, hands);
		return;
	}
	for (size_t i = 0; i < lengthof(hand_tables) && !sweep->pace->known; i++)
		sweep->pace->due[hand_tables[i]] = blocks_due(sweep, hand_tables[i], last);
	sweep->pace->known = true;
	for (size_t i = 0; i < lengthof(hand_tables); i++)
		hands[i] = turn_paced(sweep, hand_tables[i], hands[i]);
}

/* Can the tables be written now? While somebody keeps one, there is no sweep. */
static bool
open_tables(void)
{
	if (!ledger_try_open(IDEM_SWEEP))
		return false;
	for (size_t i = 0; i < lengthof(hand_tables); i++)
	{
		if (!ledger_try_open(hand_tables[i]))
			return false;
	}
	return true;
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
 * One sweep in the current transaction, changing at most max_rows rows. With a
 * pace it looks only at what is due. counts->more: there is more to look at.
 */
void
sweep_run(int64 max_rows, IdemSweepPace *pace, IdemSweepCounts *counts)
{
	Sweep		sweep = {
		.now = GetCurrentTimestamp(),
		.changes_left = max_rows,
		.max_looks = max_rows * ROWS_LOOKED_AT,
		.pace = pace,
		.counts = counts
	};
	IdemRow		last;
	int64		hands[lengthof(hand_tables)];
	Datum		v[IDEM_MAX_COLUMNS];
	bool		n[IDEM_MAX_COLUMNS] = {false};
	Interval	duration = {0};

	memset(counts, 0, sizeof(*counts));
	if (!only_sweep() || !open_tables())
		return;
	if (!ledger_read_sweep(&last))
		last.tuple = NULL;
	else if (!ledger_unchanged(&last) ||
			 sweep.now < DatumGetTimestampTz(ROW_VALUE(&last, Anum_sweep_last_started)))
		return;

	sweep.scopes = scope_all();
	sweep.row_context = AllocSetContextCreate(CurrentMemoryContext, "idem sweep row", ALLOCSET_DEFAULT_SIZES);
	turn_hands(&sweep, &last, hands);
	MemoryContextDelete(sweep.row_context);
	hash_destroy(sweep.scopes);

	for (size_t i = 0; i < lengthof(hand_tables); i++)
		v[hand_columns[i] - 1] = Int64GetDatum(hands[i]);
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

	sweep_run(max_rows, NULL, &counts);
	v[0] = Int64GetDatum(counts.reclaimed);
	v[1] = Int64GetDatum(counts.held);
	v[2] = Int64GetDatum(counts.archived);
	v[3] = Int64GetDatum(counts.purged);
	v[4] = BoolGetDatum(counts.more);
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc), v, n)));
}

/*-------------------------------------------------------------------------
 *
 * ledger.c
 *		Rows: the only file that touches heap and index access methods.
 *
 * Rows are read and written straight, without executor or SPI, which halves
 * the cost of a claim. What the executor would have done for a trigger, a
 * rule, a constraint or an index that somebody added does therefore not
 * happen, so a table that got one is refused, not silently bypassed. The
 * check is made when a table is first opened and after every relcache
 * invalidation of it; it also compares the columns with those this library
 * was built for.
 *
 * Whoever calls ledger_probe() to decide, or writes a row of a key, holds the
 * key lock (held.c). A probe uses a dirty snapshot: it sees what other
 * transactions have written and not committed yet, and says whose it is. Under
 * the lock at most one row of a key is not being written or deleted by another
 * transaction, and if one is, the key is that transaction's.
 *
 * Locks on the tables stay to the end of the transaction. RowExclusiveLock is
 * taken for reading too: deleting a scope waits for it (scope.c). It also
 * keeps the table's indexes: whoever drops or rebuilds one, concurrently or
 * not, waits for the transactions that have a lock on the table. So where it
 * matters indexes are opened without a lock of their own.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/multixact.h"
#include "access/relation.h"
#include "access/relscan.h"
#include "access/stratnum.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/index.h"
#include "catalog/indexing.h"
#include "catalog/namespace.h"
#include "catalog/pg_am.h"
#include "catalog/pg_class.h"
#include "catalog/pg_index.h"
#include "catalog/pg_type.h"
#include "executor/executor.h"
#include "executor/tuptable.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "storage/bufmgr.h"
#include "storage/lmgr.h"
#include "storage/procarray.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/guc.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "idem.h"

#define LEDGER_SCHEMA			"idem"

typedef struct LedgerColumn
{
	const char *name;
	Oid			type;			/* InvalidOid: idem_digest */
} LedgerColumn;

static const LedgerColumn scope_columns[] = {
	{"id", INT4OID}, {"name", TEXTOID}, {"owner", REGROLEOID}, {"operators", REGROLEOID},
	{"retention", INTERVALOID}, {"archive", TEXTOID}, {"archive_retention", INTERVALOID},
	{"replay_window", INTERVALOID}, {"lease", INTERVALOID}, {"on_expiry", TEXTOID},
	{"max_attempts", INT4OID}, {"retry_within", INTERVALOID}, {"include", TEXTARRAYOID},
	{"exclude", TEXTARRAYOID}, {"keep_request", TEXTOID}
};

static const LedgerColumn result_columns[] = {
	{"token", INT8OID}, {"created_at", TIMESTAMPTZOID}, {"completed_at", TIMESTAMPTZOID},
	{"scope_id", INT4OID}, {"attempt", INT4OID}, {"form", INT2OID}, {"state", CHAROID},
	{"fingerprint", InvalidOid}, {"key", TEXTOID}, {"response", JSONOID}, {"status_code", INT4OID},
	{"headers", JSONBOID}, {"body", BYTEAOID}, {"request", JSONOID},
	{"archived_at", TIMESTAMPTZOID}	/* idem.archive only */
};

static const LedgerColumn inflight_columns[] = {
	{"token", INT8OID}, {"lease_until", TIMESTAMPTZOID}, {"created_at", TIMESTAMPTZOID},
	{"updated_at", TIMESTAMPTZOID}, {"scope_id", INT4OID}, {"attempt", INT4OID}, {"form", INT2OID},
	{"state", CHAROID}, {"fingerprint", InvalidOid}, {"key", TEXTOID}, {"claimant", TEXTOID},
	{"owner", TEXTOID}, {"recovery_point", TEXTOID}, {"request", JSONOID}, {"checkpoint", JSONBOID}
};

static const LedgerColumn audit_columns[] = {
	{"at", TIMESTAMPTZOID}, {"scope_id", INT4OID}, {"event", TEXTOID}, {"scope", TEXTOID},
	{"key", TEXTOID}, {"who", TEXTOID}, {"application", TEXTOID}, {"fingerprint", InvalidOid},
	{"old", JSONBOID}, {"new", JSONBOID}
};

static const LedgerColumn sweep_columns[] = {
	{"last_started", TIMESTAMPTZOID}, {"last_duration", INTERVALOID}, {"reclaimed", INT8OID},
	{"held", INT8OID}, {"archived", INT8OID}, {"purged", INT8OID}, {"more", BOOLOID},
	{"result_hand", INT8OID}, {"archive_hand", INT8OID}, {"inflight_hand", INT8OID},
	{"audit_hand", INT8OID}, {"only_row", BOOLOID}
};

typedef struct LedgerTable
{
	const char *name;
	const LedgerColumn *columns;
	int			natts;
	int			scope_column;	/* first column of the index we look rows up by */
	int			key_column;		/* second one, or 0 */
	Oid			equal;			/* of the first one's type */
	bool		straight;		/* written by this file alone */

	/* what the last check found; forgotten on invalidation */
	bool		checked;
	SubTransactionId locked_in; /* the subtransaction that last took row_lock() */
	Oid			relid;
	Oid			lookup_index;
	bool		lookup_fits;	/* lookup.c can read it */
	bool		one_index;		/* and there is no other */
	IndexInfo  *index_info;		/* of that one */
	ScanKeyData scan_keys[2];

	/* the table's first columns, by their number; made when needed */
	TupleDesc	short_descs[IDEM_MAX_COLUMNS + 1];
} LedgerTable;

static LedgerTable tables[IDEM_TABLES] = {
	[IDEM_SCOPE] = {"scope", scope_columns, lengthof(scope_columns), Anum_scope_name, 0, F_TEXTEQ, false, .checked = false},
	[IDEM_RESULT] = {"result", result_columns, IDEM_RESULT_COLUMNS, Anum_result_scope_id, Anum_result_key, F_INT4EQ, true, .checked = false},
	[IDEM_INFLIGHT] = {"inflight", inflight_columns, lengthof(inflight_columns), Anum_inflight_scope_id, Anum_inflight_key, F_INT4EQ, true, .checked = false},
	[IDEM_ARCHIVE] = {"archive", result_columns, lengthof(result_columns), Anum_result_scope_id, Anum_result_key, F_INT4EQ, true, .checked = false},
	[IDEM_AUDIT] = {"audit", audit_columns, lengthof(audit_columns), Anum_audit_scope_id, Anum_audit_key, F_INT4EQ, true, .checked = false},
	[IDEM_SWEEP] = {"sweep", sweep_columns, lengthof(sweep_columns), Anum_sweep_only_row, 0, F_BOOLEQ, true, .checked = false},
};

/* ---- opening a table ---- */

static void
tables_invalidate(Datum arg, Oid relid)
{
	for (int i = 0; i < IDEM_TABLES; i++)
	{
		if (relid == InvalidOid || relid == tables[i].relid)
			tables[i].checked = false;
	}
}

void
ledger_init(void)
{
	CacheRegisterRelcacheCallback(tables_invalidate, (Datum) 0);
}

static void
unfit(Relation rel, const char *why, const char *hint)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("cannot use table \"%s.%s\"", LEDGER_SCHEMA, RelationGetRelationName(rel)),
			 errdetail_internal("%s", why),
			 errhint("%s", hint)));
}

static void
check_columns(const LedgerTable *table, Relation rel)
{
	TupleDesc	desc = RelationGetDescr(rel);
	bool		same = desc->natts == table->natts;

	for (int i = 0; same && i < desc->natts; i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i);
		const LedgerColumn *column = &table->columns[i];

		same = !att->attisdropped && strcmp(NameStr(att->attname), column->name) == 0 &&
			(OidIsValid(column->type) ? att->atttypid == column->type : att->attlen == IDEM_DIGEST_LEN);
	}
	if (!same)
		unfit(rel, "Its columns are not the ones that the library of this server was built for.",
			  "Install the library that belongs to the extension's version, or run ALTER EXTENSION idem UPDATE.");
}

static void
check_additions(Relation rel)
{
	const char *hint = "Drop what was added to the table: rows are written without the executor.";

	if (rel->rd_rel->relkind != RELKIND_RELATION || rel->rd_rel->relam != HEAP_TABLE_AM_OID)
		unfit(rel, "It is not a plain heap table.", "Restore the table as the extension made it.");
	if (rel->trigdesc != NULL)
		unfit(rel, "It has a trigger or a foreign key, which would not fire.", hint);
	if (rel->rd_rules != NULL)
		unfit(rel, "It has a rule, which would not apply.", hint);
	if (rel->rd_rel->relrowsecurity)
		unfit(rel, "It has row-level security, which would not apply.", hint);
	if (RelationGetDescr(rel)->constr && RelationGetDescr(rel)->constr->num_check > 0)
		unfit(rel, "It has a check constraint, which would not be checked.", hint);
}

static bool
is_lookup_index(const LedgerTable *table, Relation index)
{
	Form_pg_index form = index->rd_index;

	return form->indisvalid && index->rd_rel->relam == BTREE_AM_OID &&
		heap_attisnull(index->rd_indextuple, Anum_pg_index_indpred, NULL) &&
		form->indnkeyatts == (table->key_column ? 2 : 1) &&
		form->indkey.values[0] == table->scope_column &&
		(table->key_column == 0 || form->indkey.values[1] == table->key_column);
}

/* Finds the index that keys are looked up by; refuses one we could not keep right. */
static void
check_indexes(LedgerTable *table, Relation rel)
{
	List	   *indexes = RelationGetIndexList(rel);
	ListCell   *cell;

	table->lookup_index = InvalidOid;
	table->one_index = list_length(indexes) == 1;
	foreach(cell, indexes)
	{
		Relation	index = index_open(lfirst_oid(cell), AccessShareLock);
		Form_pg_index form = index->rd_index;

		if (is_lookup_index(table, index) &&
			(!OidIsValid(table->lookup_index) || form->indisprimary))
		{
			table->lookup_index = RelationGetRelid(index);
			table->lookup_fits = lookup_fits(index);
		}
		if (table->straight &&
			(!heap_attisnull(index->rd_indextuple, Anum_pg_index_indexprs, NULL) ||
			 !heap_attisnull(index->rd_indextuple, Anum_pg_index_indpred, NULL) ||
			 form->indisexclusion || !form->indimmediate ||
			 (form->indisunique && !form->indisprimary)))
			unfit(rel, psprintf("Index \"%s\" has an expression, a predicate, or a constraint of its own.",
								RelationGetRelationName(index)),
				  "Drop the index; a plain index that is not unique can be added.");
		if (table->one_index && table->straight)
		{
			MemoryContext caller = MemoryContextSwitchTo(CacheMemoryContext);

			if (table->index_info)
				pfree(table->index_info);
			table->index_info = BuildIndexInfo(index);
			MemoryContextSwitchTo(caller);
		}
		index_close(index, AccessShareLock);
	}
	list_free(indexes);
	if (!OidIsValid(table->lookup_index))
		unfit(rel, "It has no index on the columns that keys are looked up by.",
			  "Restore the index that the extension made.");
}

static void
set_scan_keys(LedgerTable *table)
{
	MemoryContext caller = MemoryContextSwitchTo(CacheMemoryContext);

	ScanKeyInit(&table->scan_keys[0], table->scope_column, BTEqualStrategyNumber, table->equal, (Datum) 0);
	if (table->key_column != 0)
		ScanKeyInit(&table->scan_keys[1], table->key_column, BTEqualStrategyNumber, F_TEXTEQ, (Datum) 0);
	MemoryContextSwitchTo(caller);
}

/* Raises if the table is not fit; it is not "checked" then. */
static void
check_table(LedgerTable *table, Relation rel)
{
	PG_TRY();
	{
		check_columns(table, rel);
		if (table->straight)
			check_additions(rel);
		check_indexes(table, rel);
		set_scan_keys(table);
	}
	PG_CATCH();
	{
		table->checked = false;
		PG_RE_THROW();
	}
	PG_END_TRY();
}

static Oid
find_table(const LedgerTable *table)
{
	Oid			schema = get_namespace_oid(LEDGER_SCHEMA, true);
	Oid			relid = OidIsValid(schema) ? get_relname_relid(table->name, schema) : InvalidOid;

	if (!OidIsValid(relid))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("table \"%s.%s\" does not exist", LEDGER_SCHEMA, table->name),
				 errhint("CREATE EXTENSION idem in this database.")));
	return relid;
}

/* The lock that reading and writing rows takes; it stays. */
static LOCKMODE
row_lock(void)
{
	return RecoveryInProgress() ? AccessShareLock : RowExclusiveLock;
}

/* The relation, pinned; what else relation_open() does beside locking it. */
static Relation
pin_relation(Oid relid)
{
	Relation	rel = RelationIdGetRelation(relid);

	if (rel == NULL)
		elog(ERROR, "could not open relation with OID %u", relid);
	pgstat_init_relation(rel);
	return rel;
}

/*
 * Locks and opens a table, checked. Taking the lock accepts invalidations, so
 * that a table still "checked" after it is there and as it was. A lock that
 * the current subtransaction has taken is still held, and need not be asked
 * for again.
 */
static Relation
open_table(IdemTable which, LOCKMODE mode)
{
	LedgerTable *table = &tables[which];
	SubTransactionId subid = GetCurrentSubTransactionId();

	for (;;)
	{
		Relation	rel;

		if (table->checked)
		{
			if (table->locked_in == subid && mode == row_lock())
				return pin_relation(table->relid);
			LockRelationOid(table->relid, mode);
			if (table->checked)
			{
				if (mode == row_lock())
					table->locked_in = subid;
				return pin_relation(table->relid);
			}
			UnlockRelationOid(table->relid, mode);
		}
		table->locked_in = InvalidSubTransactionId;
		table->relid = find_table(table);
		rel = try_relation_open(table->relid, mode);
		CHECK_FOR_INTERRUPTS();
		if (rel == NULL)
			continue;			/* dropped meanwhile: find_table() complains */

		/* opening indexes may invalidate it anew: then it is checked again */
		table->checked = true;
		check_table(table, rel);
		relation_close(rel, NoLock);
		stats_mark_database();
	}
}

/* At the end of a transaction, whose locks go. */
void
ledger_forget_locks(void)
{
	for (int i = 0; i < IDEM_TABLES; i++)
		tables[i].locked_in = InvalidSubTransactionId;
}

/* Locks a table for the rest of the transaction, and accepts invalidations. */
void
ledger_open(IdemTable which)
{
	LedgerTable *table = &tables[which];

	if (!table->checked || table->locked_in != GetCurrentSubTransactionId())
		relation_close(open_table(which, row_lock()), NoLock);
}

/* As ledger_open(), but never waits for the lock; false: it is not to be had now. */
bool
ledger_try_open(IdemTable table)
{
	if (!ConditionalLockRelationOid(find_table(&tables[table]), row_lock()))
		return false;
	ledger_open(table);
	return true;
}

/* The OID of idem.scope, if it was opened since it last changed. */
Oid
ledger_scope_relid(void)
{
	return tables[IDEM_SCOPE].relid;
}

/* ---- reading ---- */

/*
 * A scan for the rows with a key (two columns), of a scope (one), or all
 * (none). The rows of a key are looked up where that can be done.
 */
typedef struct LedgerScan
{
	IdemTable	table;
	Relation	rel;			/* NULL: no row was looked at yet */
	SysScanDesc scan;			/* NULL: they were looked up */
	TupleTableSlot *slot;		/* the row that it is at */

	/* what was looked up */
	Relation	index;
	IdemFound	found;
	int			next;
	ItemPointerData tid;
	bool		again;			/* there may be a newer version behind the same pointer */
	struct IndexFetchTableData *fetch;
	Snapshot	snapshot;
} LedgerScan;

static void
begin_scan(LedgerScan *scan, IdemTable which, LOCKMODE mode, Snapshot snapshot,
		   int count, Datum scope, Datum key)
{
	LedgerTable *table = &tables[which];
	ScanKeyData scan_keys[2];

	scan->table = which;
	scan->rel = open_table(which, mode);
	memcpy(scan_keys, table->scan_keys, sizeof(scan_keys));
	scan_keys[0].sk_argument = scope;
	scan_keys[1].sk_argument = key;
	scan->scan = systable_beginscan(scan->rel, table->lookup_index, true, snapshot, count, scan_keys);
	scan->slot = scan->scan->slot;
}

/* A scan for the rows of a key. */
static void
begin_probe(LedgerScan *scan, IdemTable which, const IdemKey *key, Snapshot snapshot)
{
	ledger_open(which);
	if (tables[which].lookup_fits)
	{
		scan->table = which;
		scan->rel = NULL;
		scan->scan = NULL;
		scan->slot = NULL;
		scan->index = pin_relation(tables[which].lookup_index);
		scan->next = 0;
		scan->again = false;
		scan->snapshot = snapshot;
		if (lookup_key(scan->index, key, &scan->found))
			return;
		RelationClose(scan->index);
	}
	begin_scan(scan, which, row_lock(), snapshot, 2,
			   Int32GetDatum(key->scope_id), PointerGetDatum(key->value));
}

/* As next_row(), of what was looked up. */
static HeapTuple
next_found(LedgerScan *scan)
{
	while (scan->again || scan->next < scan->found.count)
	{
		if (scan->rel == NULL)
		{
			scan->rel = open_table(scan->table, row_lock());
			scan->slot = table_slot_create(scan->rel, NULL);
			scan->fetch = table_index_fetch_begin(scan->rel, 0);
		}
		if (!scan->again)
			scan->tid = scan->found.tids[scan->next++];
		if (table_index_fetch_tuple(scan->fetch, &scan->tid, scan->snapshot, scan->slot, &scan->again, NULL))
		{
			pgstat_count_heap_fetch(scan->index);
			return ExecFetchSlotHeapTuple(scan->slot, false, NULL);
		}
	}
	return NULL;
}

/* The next row, good until the next call; or NULL. */
static HeapTuple
next_row(LedgerScan *scan)
{
	return scan->scan ? systable_getnext(scan->scan) : next_found(scan);
}

static void
end_scan(LedgerScan *scan)
{
	if (scan->scan)
		systable_endscan(scan->scan);
	else
	{
		if (scan->rel)
		{
			table_index_fetch_end(scan->fetch);
			ExecDropSingleTupleTableSlot(scan->slot);
		}
		lookup_end(&scan->found);
		RelationClose(scan->index);
	}
	if (scan->rel)
		relation_close(scan->rel, NoLock);
}

/* Copies the row that a scan is at. */
static void
copy_row(const LedgerScan *scan, HeapTuple tuple, IdemRow *row)
{
	row->table = scan->table;
	row->busy = InvalidTransactionId;
	row->committed = true;
	row->own = TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetXmin(tuple->t_data));
	row->visible = row->own || !IsolationUsesXactSnapshot() ||
		table_tuple_satisfies_snapshot(scan->rel, scan->slot, GetTransactionSnapshot());
	row->tuple = heap_copytuple(tuple);
	heap_deform_tuple(row->tuple, RelationGetDescr(scan->rel), row->values, row->nulls);
}

/*
 * Has a table no block? A database that uses no leases, or archives nothing,
 * does not pay for looking there: asking for the size costs a tenth of
 * descending an empty index. Who writes a row extends the table before giving
 * the key lock back.
 */
static bool
is_empty(IdemTable which)
{
	Relation	rel = open_table(which, row_lock());
	bool		result = RelationGetNumberOfBlocks(rel) == 0;

	relation_close(rel, NoLock);
	return result;
}

/*
 * Looks a key up; row->tuple is NULL if the table has no row of it. If
 * row->busy is set, the row is that transaction's and says nothing yet.
 */
void
ledger_probe(IdemTable which, const IdemKey *key, IdemRow *row)
{
	SnapshotData dirty;
	LedgerScan	scan;
	HeapTuple	tuple;

	row->tuple = NULL;
	if (which != IDEM_RESULT && is_empty(which))
		return;
	InitDirtySnapshot(dirty);
	begin_probe(&scan, which, key, &dirty);
	while ((tuple = next_row(&scan)) != NULL)
	{
		/*
		 * A row that is not busy is the only one. Of a row that is being
		 * changed the index may bring the new version first; the old one is
		 * the one that may speak.
		 */
		if (row->tuple != NULL)
			heap_freetuple(row->tuple);
		copy_row(&scan, tuple, row);
		row->committed = !TransactionIdIsValid(dirty.xmin);
		row->busy = row->committed ? dirty.xmax : dirty.xmin;
		if (row->committed)
			break;
	}
	end_scan(&scan);
}

/* Waits for the transaction that is writing or deleting a row. Never under the key lock. */
void
ledger_wait(const IdemRow *row)
{
	Relation	rel = open_table(row->table, row_lock());

	XactLockTableWait(row->busy, rel, &row->tuple->t_self, XLTW_InsertIndexUnique);
	relation_close(rel, NoLock);
}

/*
 * Calls back for each committed or own row of a scope (of idem.scope: all
 * rows), copied. A snapshot of its own misses none; but under SERIALIZABLE it
 * locks the whole scope against every other key's transaction. A caller that
 * only wants candidates does without: a row that changes meanwhile may be
 * missed or come twice then.
 */
void
ledger_each(IdemTable which, int32 scope_id, bool miss_none, IdemRowCallback callback, void *arg)
{
	Snapshot	snapshot = miss_none ? RegisterSnapshot(GetLatestSnapshot()) : SnapshotSelf;
	LedgerScan	scan;
	HeapTuple	tuple;

	begin_scan(&scan, which, row_lock(), snapshot, which == IDEM_SCOPE ? 0 : 1,
			   Int32GetDatum(scope_id), (Datum) 0);
	while ((tuple = next_row(&scan)) != NULL)
	{
		IdemRow		row;

		CHECK_FOR_INTERRUPTS();
		copy_row(&scan, tuple, &row);
		callback(&row, arg);
		heap_freetuple(row.tuple);
	}
	end_scan(&scan);
	if (miss_none)
		UnregisterSnapshot(snapshot);
}

/* The size of a table. */
BlockNumber
ledger_blocks(IdemTable which)
{
	Relation	rel = open_table(which, row_lock());
	BlockNumber result = RelationGetNumberOfBlocks(rel);

	relation_close(rel, NoLock);
	return result;
}

/*
 * Calls back for each committed or own row in some blocks of a table, until
 * the callback refuses one. The row is good for the call only. Returns the
 * block to go on at, that of the refused row; InvalidBlockNumber at the end of
 * the table.
 */
BlockNumber
ledger_walk(IdemTable which, BlockNumber start, BlockNumber blocks, IdemWalkCallback callback, void *arg)
{
	Relation	rel = open_table(which, row_lock());
	BlockNumber size = RelationGetNumberOfBlocks(rel);
	BlockNumber end = Min((uint64) size, (uint64) start + blocks);
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	TableScanDesc scan;
	ItemPointerData first,
				last;
	BlockNumber refused = InvalidBlockNumber;

	/* an empty range has its end before its start */
	ItemPointerSet(&first, start, FirstOffsetNumber);
	ItemPointerSet(&last, end > 0 ? end - 1 : 0, end > 0 ? MaxOffsetNumber : InvalidOffsetNumber);
	scan = table_beginscan_tidrange(rel, SnapshotSelf, &first, &last, 0);
	while (table_scan_getnextslot_tidrange(scan, ForwardScanDirection, slot))
	{
		IdemRow		row = {.table = which, .committed = true, .visible = true};

		CHECK_FOR_INTERRUPTS();
		row.tuple = ExecFetchSlotHeapTuple(slot, false, NULL);
		heap_deform_tuple(row.tuple, RelationGetDescr(rel), row.values, row.nulls);
		if (!callback(&row, arg))
		{
			refused = ItemPointerGetBlockNumber(&slot->tts_tid);
			break;
		}
	}
	table_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
	relation_close(rel, NoLock);
	return refused != InvalidBlockNumber ? refused : end < size ? end : InvalidBlockNumber;
}

/*
 * Is a row that was read before the key lock was taken still the row of its
 * key, nobody writing or locking it?
 */
bool
ledger_unchanged(const IdemRow *row)
{
	Relation	rel = open_table(row->table, row_lock());
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	SnapshotData dirty;
	bool		result;

	InitDirtySnapshot(dirty);
	result = table_tuple_fetch_row_version(rel, &row->tuple->t_self, &dirty, slot) &&
		!TransactionIdIsValid(dirty.xmin) && !TransactionIdIsValid(dirty.xmax);
	if (result)
	{
		HeapTupleHeader header = ExecFetchSlotHeapTuple(slot, false, NULL)->t_data;
		TransactionId xmax = HeapTupleHeaderGetRawXmax(header);

		if (!(header->t_infomask & HEAP_XMAX_INVALID))
			result = (header->t_infomask & HEAP_XMAX_IS_MULTI) ? !MultiXactIdIsRunning(xmax, true) :
				TransactionIdIsCurrentTransactionId(xmax) || !TransactionIdIsInProgress(xmax);
	}
	ExecDropSingleTupleTableSlot(slot);
	relation_close(rel, NoLock);
	return result;
}

/* Reads the first row with that value as it is now, whatever the transaction's snapshot. */
static bool
read_latest(IdemTable which, LOCKMODE mode, Datum value, IdemRow *row)
{
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	LedgerScan	scan;
	HeapTuple	tuple;

	begin_scan(&scan, which, mode, snapshot, 1, value, (Datum) 0);
	tuple = next_row(&scan);
	if (tuple != NULL)
		copy_row(&scan, tuple, row);
	end_scan(&scan);
	UnregisterSnapshot(snapshot);
	return tuple != NULL;
}

/* Reads the one row of idem.sweep; false: no sweep has been there yet. */
bool
ledger_read_sweep(IdemRow *row)
{
	return read_latest(IDEM_SWEEP, row_lock(), BoolGetDatum(true), row);
}

/* Reads the contract of a scope; false: there is none. */
bool
ledger_read_scope(const text *name, IdemRow *row)
{
	return read_latest(IDEM_SCOPE, AccessShareLock, PointerGetDatum(name), row);
}

/*
 * Does a table have rows of a scope, be they written just now? Keeps others
 * from writing any until the transaction ends.
 */
bool
ledger_scope_in_use(IdemTable which, int32 scope_id)
{
	SnapshotData dirty;
	LedgerScan	scan;
	bool		result;

	InitDirtySnapshot(dirty);
	begin_scan(&scan, which, ShareLock, &dirty, 1, Int32GetDatum(scope_id), (Datum) 0);
	result = next_row(&scan) != NULL;
	end_scan(&scan);
	return result;
}

/* ---- writing ---- */

static void
set_value(Datum *values, bool *nulls, int column, Datum value, bool isnull)
{
	values[column - 1] = value;
	nulls[column - 1] = isnull;
}

/* The first columns of a table, as a table of its own. */
static TupleDesc
truncated_copy(TupleDesc desc, int natts)
{
	TupleDesc	result = CreateTemplateTupleDesc(natts);

	for (AttrNumber i = 1; i <= natts; i++)
		TupleDescCopyEntry(result, i, desc, i);
	TupleDescFinalize(result);
	return result;
}

/*
 * Forms a row that ends with its last value, as rows do that are older than
 * the table's last columns. What follows reads as NULL; with nothing else NULL
 * the row needs no bitmap, which saves eight bytes a key.
 */
static HeapTuple
form_row(LedgerTable *table, Relation rel, const Datum *values, const bool *nulls)
{
	int			natts = table->natts;

	while (nulls[natts - 1])
		natts--;
	if (table->short_descs[natts] == NULL)
	{
		MemoryContext caller = MemoryContextSwitchTo(CacheMemoryContext);

		table->short_descs[natts] = truncated_copy(RelationGetDescr(rel), natts);
		MemoryContextSwitchTo(caller);
	}
	return heap_form_tuple(table->short_descs[natts], unconstify(Datum *, values),
						   unconstify(bool *, nulls));
}

/* Adds a row, with values in the order of the table's columns. */
void
ledger_insert(IdemTable which, const Datum *values, const bool *nulls)
{
	LedgerTable *table = &tables[which];
	Relation	rel = open_table(which, RowExclusiveLock);
	HeapTuple	tuple = form_row(table, rel, values, nulls);

	if (table->one_index)
	{
		Relation	index = pin_relation(table->lookup_index);
		int			second = table->key_column ? table->key_column : table->scope_column;
		Datum		index_values[2] = {values[table->scope_column - 1], values[second - 1]};
		bool		index_nulls[2] = {nulls[table->scope_column - 1], nulls[second - 1]};

		simple_heap_insert(rel, tuple);
		index_insert(index, index_values, index_nulls, &tuple->t_self, rel,
					 index->rd_index->indisunique ? UNIQUE_CHECK_YES : UNIQUE_CHECK_NO,
					 false, table->index_info);
		RelationClose(index);
	}
	else
	{
		CatalogIndexState indexes = CatalogOpenIndexes(rel);

		CatalogTupleInsertWithInfo(rel, tuple, indexes);
		CatalogCloseIndexes(indexes);
	}
	heap_freetuple(tuple);
	relation_close(rel, NoLock);
}

/*
 * Updating and deleting may concern a row that the same statement wrote, which
 * is invisible to the statement until the command counter moves.
 */
void
ledger_update(const IdemRow *row, const Datum *values, const bool *nulls)
{
	Relation	rel = open_table(row->table, RowExclusiveLock);
	HeapTuple	tuple = form_row(&tables[row->table], rel, values, nulls);

	CommandCounterIncrement();
	CatalogTupleUpdate(rel, &row->tuple->t_self, tuple);
	heap_freetuple(tuple);
	relation_close(rel, NoLock);
}

void
ledger_delete(const IdemRow *row)
{
	Relation	rel = open_table(row->table, RowExclusiveLock);

	CommandCounterIncrement();
	simple_heap_delete(rel, &row->tuple->t_self);
	relation_close(rel, NoLock);
}

/* Changes state and deadline of a row of idem.inflight. */
void
ledger_set_state(const IdemRow *row, char state, TimestampTz lease_until, TimestampTz now)
{
	Datum		v[IDEM_MAX_COLUMNS];
	bool		n[IDEM_MAX_COLUMNS];

	memcpy(v, row->values, sizeof(v));
	memcpy(n, row->nulls, sizeof(n));
	set_value(v, n, Anum_inflight_state, CharGetDatum(state), false);
	set_value(v, n, Anum_inflight_lease_until, TimestampTzGetDatum(lease_until), false);
	set_value(v, n, Anum_inflight_updated_at, TimestampTzGetDatum(now), false);
	ledger_update(row, v, n);
	CommandCounterIncrement();
}

/* Takes the data out of the row of a settled key. */
void
ledger_strip(const IdemRow *row)
{
	Datum		v[IDEM_MAX_COLUMNS];
	bool		n[IDEM_MAX_COLUMNS];

	memcpy(v, row->values, sizeof(v));
	memcpy(n, row->nulls, sizeof(n));
	set_value(v, n, Anum_result_headers, (Datum) 0, true);
	set_value(v, n, Anum_result_response, (Datum) 0, true);
	set_value(v, n, Anum_result_body, (Datum) 0, true);
	set_value(v, n, Anum_result_request, (Datum) 0, true);
	ledger_update(row, v, n);
}

/* Deletes the row of a key that the caller, holding the key lock, has seen there. */
void
ledger_delete_key(IdemTable table, const IdemKey *key)
{
	IdemRow		row;

	ledger_probe(table, key, &row);
	if (row.tuple != NULL)
		ledger_delete(&row);
}

/* Writes the row of a settled key. */
void
ledger_settle(const IdemKey *key, const IdemSettlement *settlement, const IdemPayload *payload,
			  TimestampTz now)
{
	Datum		v[IDEM_RESULT_COLUMNS];
	bool		n[IDEM_RESULT_COLUMNS];

	set_value(v, n, Anum_result_token, Int64GetDatum(settlement->token), false);
	set_value(v, n, Anum_result_created_at, TimestampTzGetDatum(settlement->created_at), false);
	set_value(v, n, Anum_result_completed_at, TimestampTzGetDatum(now), false);
	set_value(v, n, Anum_result_scope_id, Int32GetDatum(key->scope_id), false);
	set_value(v, n, Anum_result_attempt, Int32GetDatum(settlement->attempt), false);
	set_value(v, n, Anum_result_status_code, Int32GetDatum(payload->status_code), payload->no_status_code);
	set_value(v, n, Anum_result_form, Int16GetDatum(IDEM_FORM), false);
	set_value(v, n, Anum_result_state, CharGetDatum(settlement->state), false);
	set_value(v, n, Anum_result_fingerprint, IdemDigestPGetDatum(settlement->fingerprint),
			  settlement->fingerprint == NULL);
	set_value(v, n, Anum_result_key, PointerGetDatum(key->value), false);
	set_value(v, n, Anum_result_headers, payload->headers, payload->no_headers);
	set_value(v, n, Anum_result_response, payload->response, payload->no_response);
	set_value(v, n, Anum_result_body, payload->body, payload->no_body);
	set_value(v, n, Anum_result_request, settlement->request, settlement->request == (Datum) 0);
	ledger_insert(IDEM_RESULT, v, n);
}

/* ---- audit ---- */

/* Notes an event; key NULL: it concerns the scope. */
void
ledger_audit(const char *event, int32 scope_id, const char *scope, const IdemKey *key,
			 const IdemDigest *fingerprint, Jsonb *old_value, Jsonb *new_value)
{
	Datum		v[lengthof(audit_columns)];
	bool		n[lengthof(audit_columns)];

	set_value(v, n, Anum_audit_at, TimestampTzGetDatum(GetCurrentTimestamp()), false);
	set_value(v, n, Anum_audit_scope_id, Int32GetDatum(scope_id), false);
	set_value(v, n, Anum_audit_event, CStringGetTextDatum(event), false);
	set_value(v, n, Anum_audit_scope, CStringGetTextDatum(scope), false);
	set_value(v, n, Anum_audit_key, key ? PointerGetDatum(key->value) : (Datum) 0, key == NULL);
	set_value(v, n, Anum_audit_who, CStringGetTextDatum(GetUserNameFromId(GetUserId(), false)), false);
	set_value(v, n, Anum_audit_application, CStringGetTextDatum(application_name ? application_name : ""), false);
	set_value(v, n, Anum_audit_fingerprint, IdemDigestPGetDatum(fingerprint), fingerprint == NULL);
	set_value(v, n, Anum_audit_old, PointerGetDatum(old_value), old_value == NULL);
	set_value(v, n, Anum_audit_new, PointerGetDatum(new_value), new_value == NULL);
	ledger_insert(IDEM_AUDIT, v, n);
}

/* Was this event noted for this key and fingerprint, by a transaction that committed or our own? */
bool
ledger_audited(const char *event, const IdemKey *key, const IdemDigest *fingerprint)
{
	SnapshotData dirty;
	LedgerScan	scan;
	HeapTuple	tuple;
	bool		found = false;

	InitDirtySnapshot(dirty);
	begin_scan(&scan, IDEM_AUDIT, row_lock(), &dirty, 2,
			   Int32GetDatum(key->scope_id), PointerGetDatum(key->value));
	while (!found && (tuple = next_row(&scan)) != NULL)
	{
		TupleDesc	desc = RelationGetDescr(scan.rel);
		bool		isnull;
		Datum		noted = heap_getattr(tuple, Anum_audit_fingerprint, desc, &isnull);

		if (isnull || TransactionIdIsValid(dirty.xmin) || TransactionIdIsValid(dirty.xmax) ||
			memcmp(DatumGetIdemDigestP(noted), fingerprint, IDEM_DIGEST_LEN) != 0)
			continue;
		noted = heap_getattr(tuple, Anum_audit_event, desc, &isnull);
		found = strcmp(TextDatumGetCString(noted), event) == 0;
	}
	end_scan(&scan);
	return found;
}

/* ---- words ---- */

const char *
ledger_state_name(char state)
{
	switch (state)
	{
		case IDEM_PROCESSING:
			return "processing";
		case IDEM_FREE:
			return "free";
		case IDEM_IN_DOUBT:
			return "unknown";
		case IDEM_SUCCEEDED:
			return "succeeded";
		case IDEM_FAILED:
			return "failed";
	}
	elog(ERROR, "unrecognized state \"%c\"", state);
}

/* The fingerprint of a row of a key, or NULL if it is not known. */
const IdemDigest *
ledger_fingerprint(const IdemRow *row)
{
	int			column = row->table == IDEM_INFLIGHT ? Anum_inflight_fingerprint : Anum_result_fingerprint;

	return ROW_IS_NULL(row, column) ? NULL : DatumGetIdemDigestP(ROW_VALUE(row, column));
}

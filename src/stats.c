/*-------------------------------------------------------------------------
 *
 * stats.c
 *		Counters in shared memory.
 *
 * They count what was attempted, also by transactions that rolled back; they
 * do not survive a restart. There are only if the library is preloaded;
 * without it counting does nothing and the view idem.stat is empty.
 *
 * A counter is an atomic integer in a slot of its database and scope. A slot
 * is found by hashing and claimed by compare-and-swap, so counting takes no
 * lock. It is given up when its database is gone, which the launcher (worker.c)
 * tells. When all slots are taken, further scopes of all databases share the
 * last one, which nobody sees.
 *
 * Beside them stand the databases that use the extension, for the launcher,
 * with whether the last sweep there failed.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "common/hashfn.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "port/atomics.h"
#include "port/pg_bitutils.h"
#include "storage/ipc.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"
#include "catalog/pg_type.h"

#include "idem.h"

PG_FUNCTION_INFO_V1(idem_stat);
PG_FUNCTION_INFO_V1(idem_stat_reset);

#define STAT_SLOTS			1024	/* a power of two */
#define STAT_DATABASES		256

/* bucket b counts replays at an age below 2^b seconds, the last one all others */
#define AGE_BUCKETS			26

/* what a slot's owner and a database's oid can be beside the real thing */
#define FREE				0	/* a search ends here */
#define GIVEN_UP			1	/* as the owner of a slot: a search goes on */
#define DATABASE_GIVEN_UP	PG_UINT32_MAX

typedef struct StatSlot
{
	pg_atomic_uint64 owner;		/* database and scope */
	pg_atomic_uint64 reset_at;
	pg_atomic_uint64 counters[IDEM_COUNTERS];
	pg_atomic_uint64 ages[AGE_BUCKETS];
} StatSlot;

typedef struct StatDatabase
{
	pg_atomic_uint32 oid;
	pg_atomic_uint32 failing;
} StatDatabase;

typedef struct StatShared
{
	StatDatabase databases[STAT_DATABASES];
	StatSlot	slots[STAT_SLOTS + 1];
} StatShared;

static StatShared *shared = NULL;
static StatSlot *last_slot = NULL;
static bool database_marked = false;

static shmem_request_hook_type previous_request_hook = NULL;
static shmem_startup_hook_type previous_startup_hook = NULL;

/* ---- shared memory ---- */

static void
stats_request(void)
{
	if (previous_request_hook)
		previous_request_hook();
	RequestAddinShmemSpace(sizeof(StatShared));
}

static void
reset_slot(StatSlot *slot)
{
	pg_atomic_write_u64(&slot->reset_at, (uint64) GetCurrentTimestamp());
	for (int i = 0; i < IDEM_COUNTERS; i++)
		pg_atomic_write_u64(&slot->counters[i], 0);
	for (int i = 0; i < AGE_BUCKETS; i++)
		pg_atomic_write_u64(&slot->ages[i], 0);
}

static void
init_shared(void)
{
	for (int i = 0; i < STAT_DATABASES; i++)
	{
		pg_atomic_init_u32(&shared->databases[i].oid, FREE);
		pg_atomic_init_u32(&shared->databases[i].failing, 0);
	}
	for (int i = 0; i <= STAT_SLOTS; i++)
	{
		StatSlot   *slot = &shared->slots[i];

		pg_atomic_init_u64(&slot->owner, FREE);
		pg_atomic_init_u64(&slot->reset_at, 0);
		for (int j = 0; j < IDEM_COUNTERS; j++)
			pg_atomic_init_u64(&slot->counters[j], 0);
		for (int j = 0; j < AGE_BUCKETS; j++)
			pg_atomic_init_u64(&slot->ages[j], 0);
		reset_slot(slot);
	}
}

static void
stats_startup(void)
{
	bool		found;

	if (previous_startup_hook)
		previous_startup_hook();
	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	shared = ShmemInitStruct("idem", sizeof(StatShared), &found);
	if (!found)
		init_shared();
	LWLockRelease(AddinShmemInitLock);
}

void
stats_init(void)
{
	if (!process_shared_preload_libraries_in_progress)
		return;
	previous_request_hook = shmem_request_hook;
	shmem_request_hook = stats_request;
	previous_startup_hook = shmem_startup_hook;
	shmem_startup_hook = stats_startup;
}

/* ---- counting ---- */

/*
 * A slot by its owner; enter: the first one that is not taken becomes its own.
 * Two that enter the same owner at the same time find the same slot to try.
 */
static StatSlot *
search_slot(uint64 owner, bool enter)
{
	uint32		start = murmurhash32((uint32) owner ^ (uint32) (owner >> 32));

	for (uint32 i = 0; i < STAT_SLOTS; i++)
	{
		StatSlot   *slot = &shared->slots[(start + i) % STAT_SLOTS];
		uint64		found = pg_atomic_read_u64(&slot->owner);

		if (enter && (found == FREE || found == GIVEN_UP) &&
			pg_atomic_compare_exchange_u64(&slot->owner, &found, owner))
			return slot;
		if (found == owner)
			return slot;
		if (found == FREE)
			break;
	}
	return NULL;
}

static StatSlot *
find_slot(int32 scope_id)
{
	uint64		owner = ((uint64) MyDatabaseId << 32) | (uint32) scope_id;
	StatSlot   *slot;

	if (last_slot && pg_atomic_read_u64(&last_slot->owner) == owner)
		return last_slot;
	slot = search_slot(owner, false);
	if (slot == NULL)
		slot = search_slot(owner, true);
	if (slot == NULL)
		return &shared->slots[STAT_SLOTS];
	return last_slot = slot;
}

/* Adds to a counter of a scope of this database. */
void
stats_add(int32 scope_id, IdemCounter counter, int64 n)
{
	if (shared != NULL && idem_track && n != 0)
		pg_atomic_fetch_add_u64(&find_slot(scope_id)->counters[counter], n);
}

/* Notes how old a settled key was when it was replayed. */
void
stats_replay_age(int32 scope_id, int64 microseconds)
{
	uint64		seconds = (uint64) Max(microseconds, 0) / USECS_PER_SEC;
	int			bucket = seconds == 0 ? 0 : pg_leftmost_one_pos64(seconds) + 1;

	if (shared != NULL && idem_track)
		pg_atomic_fetch_add_u64(&find_slot(scope_id)->ages[Min(bucket, AGE_BUCKETS - 1)], 1);
}

/* ---- databases ---- */

static StatDatabase *
find_database(Oid oid, bool enter)
{
	for (int i = 0; shared != NULL && i < STAT_DATABASES; i++)
	{
		StatDatabase *database = &shared->databases[i];
		uint32		found = pg_atomic_read_u32(&database->oid);

		if (enter && (found == FREE || found == DATABASE_GIVEN_UP) &&
			pg_atomic_compare_exchange_u32(&database->oid, &found, oid))
			return database;
		if (found == oid)
			return database;
		if (found == FREE)
			break;
	}
	return NULL;
}

static StatDatabase *
find_or_enter_database(Oid oid)
{
	StatDatabase *database = find_database(oid, false);

	return database ? database : find_database(oid, true);
}

/* Notes that this database uses the extension. */
void
stats_mark_database(void)
{
	if (database_marked || shared == NULL)
		return;
	(void) find_or_enter_database(MyDatabaseId);
	database_marked = true;
}

bool
stats_database_marked(Oid oid)
{
	return find_database(oid, false) != NULL;
}

/* Notes whether sweeping this database fails; true: that has changed. */
bool
stats_set_failing(bool failing)
{
	StatDatabase *database = failing ? find_or_enter_database(MyDatabaseId) : find_database(MyDatabaseId, false);

	if (database == NULL)
		return failing;
	return pg_atomic_exchange_u32(&database->failing, failing) != (uint32) failing;
}

/* The databases that have anything here, in the current memory context. */
List *
stats_databases(void)
{
	List	   *result = NIL;

	for (int i = 0; shared != NULL && i < STAT_DATABASES; i++)
	{
		uint32		oid = pg_atomic_read_u32(&shared->databases[i].oid);

		if (oid != FREE && oid != DATABASE_GIVEN_UP)
			result = list_append_unique_oid(result, oid);
	}
	for (int i = 0; shared != NULL && i < STAT_SLOTS; i++)
	{
		uint64		owner = pg_atomic_read_u64(&shared->slots[i].owner);

		if (owner != FREE && owner != GIVEN_UP)
			result = list_append_unique_oid(result, (Oid) (owner >> 32));
	}
	return result;
}

/* Gives up what a database has here. It is gone: nobody is connected, or will be. */
void
stats_give_up(Oid oid)
{
	StatDatabase *database = find_database(oid, false);

	if (database != NULL)
	{
		pg_atomic_write_u32(&database->failing, 0);
		pg_atomic_write_u32(&database->oid, DATABASE_GIVEN_UP);
	}
	for (int i = 0; shared != NULL && i < STAT_SLOTS; i++)
	{
		StatSlot   *slot = &shared->slots[i];

		if ((Oid) (pg_atomic_read_u64(&slot->owner) >> 32) != oid)
			continue;
		reset_slot(slot);
		pg_atomic_write_u64(&slot->owner, GIVEN_UP);
	}
}

/* ---- what people see ---- */

/* scope_id, the counters, the histogram, when they were reset */
#define STAT_COLUMNS		(IDEM_COUNTERS + 3)

/*
 * idem_stat() → set of (scope_id, counters …, replay_age, stats_reset)
 *
 * The counters of this database; no rows without preload.
 */
Datum
idem_stat(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;

	InitMaterializedSRF(fcinfo, 0);
	for (int i = 0; shared != NULL && i < STAT_SLOTS; i++)
	{
		StatSlot   *slot = &shared->slots[i];
		uint64		owner = pg_atomic_read_u64(&slot->owner);
		Datum		values[STAT_COLUMNS];
		bool		nulls[STAT_COLUMNS] = {false};
		Datum		ages[AGE_BUCKETS];

		if ((Oid) (owner >> 32) != MyDatabaseId)
			continue;
		values[0] = Int32GetDatum((int32) owner);
		for (int j = 0; j < IDEM_COUNTERS; j++)
			values[j + 1] = Int64GetDatum((int64) pg_atomic_read_u64(&slot->counters[j]));
		for (int j = 0; j < AGE_BUCKETS; j++)
			ages[j] = Int64GetDatum((int64) pg_atomic_read_u64(&slot->ages[j]));
		values[STAT_COLUMNS - 2] = PointerGetDatum(construct_array(ages, AGE_BUCKETS, INT8OID, sizeof(int64),
																   FLOAT8PASSBYVAL, TYPALIGN_DOUBLE));
		values[STAT_COLUMNS - 1] = TimestampTzGetDatum((TimestampTz) pg_atomic_read_u64(&slot->reset_at));
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	return (Datum) 0;
}

/*
 * idem_stat_reset()
 *
 * Sets the counters of this database to zero.
 */
Datum
idem_stat_reset(PG_FUNCTION_ARGS)
{
	for (int i = 0; shared != NULL && i < STAT_SLOTS; i++)
	{
		if ((Oid) (pg_atomic_read_u64(&shared->slots[i].owner) >> 32) == MyDatabaseId)
			reset_slot(&shared->slots[i]);
	}
	PG_RETURN_VOID();
}

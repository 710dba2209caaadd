/*-------------------------------------------------------------------------
 *
 * worker.c
 *		The launcher and the sweepers: processes only, what they do is sweep.c's.
 *
 * A process that stays connected to a database keeps it from being dropped,
 * renamed or copied. So the launcher is connected to none; every
 * idem.sweep_interval it lists the databases and starts one sweeper at a time,
 * which sweeps its database for about two seconds at most and is gone. DROP
 * DATABASE waits longer than that for sessions to leave. Databases that have
 * used the extension since the server started are visited each time, others
 * rarely: to find out whether they use it.
 *
 * The launcher ends with an error if it cannot go on, and the postmaster
 * starts it again; a sweeper ends with 0 whatever happened, the interval is
 * its back-off. A failure that lasts is logged when it begins and when it ends.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/pg_database.h"
#include "catalog/pg_extension.h"
#include "commands/dbcommands.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lock.h"
#include "storage/proc.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "idem.h"

#define SWEEP_MILLISECONDS		2000

/* databases not known to use the extension are visited in one cycle of so many */
#define RARELY					60

PGDLLEXPORT void idem_launcher_main(Datum arg);
PGDLLEXPORT void idem_sweeper_main(Datum arg);

static bool worker_enabled = true;
static int	sweep_interval = 10;
static int	sweep_rows = 10000;

static void
register_launcher(void)
{
	BackgroundWorker worker = {0};

	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = 30;
	strlcpy(worker.bgw_library_name, "idem", sizeof(worker.bgw_library_name));
	strlcpy(worker.bgw_function_name, "idem_launcher_main", sizeof(worker.bgw_function_name));
	strlcpy(worker.bgw_name, "idem launcher", BGW_MAXLEN);
	strlcpy(worker.bgw_type, "idem launcher", BGW_MAXLEN);
	RegisterBackgroundWorker(&worker);
}

void
worker_init(void)
{
	DefineCustomBoolVariable("idem.worker",
							 "Sweeps the databases that use idem in the background.",
							 "Takes effect only if the library is in shared_preload_libraries.",
							 &worker_enabled, true, PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomIntVariable("idem.sweep_interval",
							"Sets the time between two background sweeps of a database.",
							NULL,
							&sweep_interval, 10, 1, 86400, PGC_SIGHUP, GUC_UNIT_S, NULL, NULL, NULL);
	DefineCustomIntVariable("idem.sweep_rows",
							"Sets how many rows a background sweep changes in one transaction.",
							NULL,
							&sweep_rows, 10000, 1, 1000000, PGC_SIGHUP, 0, NULL, NULL, NULL);
	if (process_shared_preload_libraries_in_progress && !IsBinaryUpgrade)
		register_launcher();
}

/* ---- the launcher ---- */

/*
 * The databases to visit in this cycle, in the current memory context: all, or
 * those that use the extension. Those that are gone are forgotten; who counted
 * anything before the list was read was on it.
 */
static List *
list_databases(bool all)
{
	MemoryContext caller = CurrentMemoryContext;
	List	   *gone = stats_databases();
	List	   *result = NIL;
	ListCell   *cell;
	Relation	rel;
	SysScanDesc scan;
	HeapTuple	tuple;

	StartTransactionCommand();
	rel = table_open(DatabaseRelationId, AccessShareLock);
	scan = systable_beginscan(rel, InvalidOid, false, NULL, 0, NULL);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Form_pg_database database = (Form_pg_database) GETSTRUCT(tuple);
		MemoryContext transaction = MemoryContextSwitchTo(caller);

		gone = list_delete_oid(gone, database->oid);
		/* a connection limit of -2 marks a database half dropped */
		if (database->datallowconn && !database->datistemplate && database->datconnlimit != -2 &&
			(all || stats_database_marked(database->oid)))
			result = lappend_oid(result, database->oid);
		MemoryContextSwitchTo(transaction);
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	CommitTransactionCommand();
	MemoryContextSwitchTo(caller);
	foreach(cell, gone)
		stats_give_up(lfirst_oid(cell));
	return result;
}

/* Starts a sweeper in a database and waits for its end; false: no slot for it. */
static bool
run_sweeper(Oid database)
{
	BackgroundWorker worker = {0};
	BackgroundWorkerHandle *handle;

	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION | BGWORKER_INTERRUPTIBLE;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = BGW_NEVER_RESTART;
	strlcpy(worker.bgw_library_name, "idem", sizeof(worker.bgw_library_name));
	strlcpy(worker.bgw_function_name, "idem_sweeper_main", sizeof(worker.bgw_function_name));
	strlcpy(worker.bgw_name, "idem sweeper", BGW_MAXLEN);
	strlcpy(worker.bgw_type, "idem sweeper", BGW_MAXLEN);
	worker.bgw_main_arg = ObjectIdGetDatum(database);
	worker.bgw_notify_pid = MyProcPid;
	if (!RegisterDynamicBackgroundWorker(&worker, &handle))
		return false;
	(void) WaitForBackgroundWorkerShutdown(handle);
	return true;
}

static void
visit_databases(bool all)
{
	static bool complained = false;
	List	   *databases = list_databases(all);
	ListCell   *cell;

	foreach(cell, databases)
	{
		bool		started = run_sweeper(lfirst_oid(cell));

		CHECK_FOR_INTERRUPTS();
		if (!started && !complained)
			ereport(LOG,
					(errmsg("could not register background process"),
					 errhint("Consider increasing the configuration parameter \"%s\".", "max_worker_processes")));
		else if (started && complained)
			ereport(LOG,
					(errmsg("background process registered again")));
		complained = !started;
		if (!started)
			break;
	}
}

void
idem_launcher_main(Datum arg)
{
	MemoryContext cycle;
	uint32		wait_event;
	uint64		cycles = 0;

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnection(NULL, NULL, 0);
	wait_event = WaitEventExtensionNew("IdemLauncher");

	cycle = AllocSetContextCreate(TopMemoryContext, "idem launcher cycle", ALLOCSET_DEFAULT_SIZES);
	for (;;)
	{
		TimestampTz started = GetCurrentTimestamp();
		long		left;

		if (worker_enabled)
		{
			MemoryContextSwitchTo(cycle);
			visit_databases(cycles++ % RARELY == 0);
			MemoryContextReset(cycle);
		}

		/* the latch is also set by sweepers that end */
		while ((left = TimestampDifferenceMilliseconds(GetCurrentTimestamp(),
													   TimestampTzPlusMilliseconds(started, sweep_interval * 1000L))) > 0)
		{
			(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, left, wait_event);
			ResetLatch(MyLatch);
			CHECK_FOR_INTERRUPTS();
			if (ConfigReloadPending)
			{
				ConfigReloadPending = false;
				ProcessConfigFile(PGC_SIGHUP);
			}
		}
	}
}

/* ---- a sweeper ---- */

static void
override_setting(const char *name, const char *value)
{
	SetConfigOption(name, value, PGC_SUSET, PGC_S_OVERRIDE);
}

/* What a database or role may have set must not stop a sweep. */
static void
override_settings(void)
{
	override_setting("search_path", "pg_catalog, pg_temp");
	override_setting("default_transaction_read_only", "off");
	override_setting("default_transaction_isolation", "read committed");
	override_setting("default_transaction_deferrable", "off");
	override_setting("statement_timeout", "0");
	/* a sweep does not wait; if it does after all, it must not be what others wait for */
	override_setting("lock_timeout", "1s");
	override_setting("idle_in_transaction_session_timeout", "0");
	if (GetConfigOption("transaction_timeout", true, false) != NULL)	/* from 17 on */
		override_setting("transaction_timeout", "0");
	/* a missing synchronous standby must not stop it either */
	override_setting("synchronous_commit", "local");
}

/*
 * Keeps the extension from being dropped in this transaction; false: there is
 * none, or somebody is about to drop or update it. Never waits for that.
 */
static bool
lock_extension(void)
{
	Oid			oid = get_extension_oid("idem", true);
	LOCKTAG		tag;

	if (!OidIsValid(oid))
		return false;
	SET_LOCKTAG_OBJECT(tag, MyDatabaseId, ExtensionRelationId, oid, 0);
	if (LockAcquire(&tag, AccessShareLock, false, true) == LOCKACQUIRE_NOT_AVAIL)
		return false;
	AcceptInvalidationMessages();
	return get_extension_oid("idem", true) == oid;
}

/* One sweep in a transaction of its own; true: there is more to do. */
static bool
sweep_once(IdemSweepPace *pace)
{
	IdemSweepCounts counts = {0};

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	if (lock_extension())
	{
		stats_mark_database();
		pgstat_report_activity(STATE_RUNNING, "idem_sweep()");
		sweep_run(sweep_rows, pace, &counts);
	}
	PopActiveSnapshot();
	CommitTransactionCommand();
	pgstat_report_activity(STATE_IDLE, NULL);
	pgstat_report_stat(true);
	return counts.more;
}

static void
report_failure(void)
{
	if (stats_set_failing(true))
		EmitErrorReport();
	AbortCurrentTransaction();
	FlushErrorState();
}

static void
name_database(void *arg)
{
	errcontext("sweeping database \"%s\"", (const char *) arg);
}

/* The name of the database, in the current memory context. */
static char *
database_name(void)
{
	MemoryContext caller = CurrentMemoryContext;
	char	   *result;

	StartTransactionCommand();
	result = MemoryContextStrdup(caller, get_database_name(MyDatabaseId));
	CommitTransactionCommand();
	MemoryContextSwitchTo(caller);
	return result;
}

void
idem_sweeper_main(Datum arg)
{
	MemoryContext context;
	TimestampTz started = GetCurrentTimestamp();
	IdemSweepPace pace = {0};
	ErrorContextCallback error_context = {.callback = name_database};
	volatile bool failed = false;

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnectionByOid(DatumGetObjectId(arg), InvalidOid, 0);
	override_settings();
	pgstat_report_appname("idem sweeper");
	context = AllocSetContextCreate(TopMemoryContext, "idem sweeper", ALLOCSET_DEFAULT_SIZES);
	MemoryContextSwitchTo(TopMemoryContext);
	error_context.arg = database_name();
	error_context.previous = error_context_stack;
	error_context_stack = &error_context;

	PG_TRY();
	{
		bool		more;

		do
		{
			MemoryContextSwitchTo(context);
			more = sweep_once(&pace);
			MemoryContextReset(context);
			CHECK_FOR_INTERRUPTS();
		} while (more && !TimestampDifferenceExceeds(started, GetCurrentTimestamp(), SWEEP_MILLISECONDS));
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(context);
		report_failure();
		failed = true;
	}
	PG_END_TRY();
	if (!failed && stats_set_failing(false))
		ereport(LOG,
				(errmsg("background sweep works again")));
	proc_exit(0);
}

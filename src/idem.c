/*-------------------------------------------------------------------------
 *
 * idem.c
 *		The module: magic, settings and start-up.
 *
 * Loading must never raise: pg_upgrade loads every library in a server that
 * has nothing set up.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "utils/guc.h"

#include "idem.h"

#ifdef PG_MODULE_MAGIC_EXT
PG_MODULE_MAGIC_EXT(.name = "idem", .version = IDEM_VERSION);
#else
PG_MODULE_MAGIC;
#endif

bool		idem_track = true;

void		_PG_init(void);

void
_PG_init(void)
{
	ledger_init();
	scope_init();
	held_init();
	stats_init();
	worker_init();
	DefineCustomBoolVariable("idem.track",
							 "Counts claims and settlements.",
							 "Takes effect only if the library is in shared_preload_libraries.",
							 &idem_track, true, PGC_SUSET, 0, NULL, NULL, NULL);
	MarkGUCPrefixReserved("idem");
}

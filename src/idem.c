/*-------------------------------------------------------------------------
 *
 * idem.c
 *		The module: magic and start-up.
 *
 * Loading must never raise: pg_upgrade loads every library in a server that
 * has nothing set up.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "idem.h"

#ifdef PG_MODULE_MAGIC_EXT
PG_MODULE_MAGIC_EXT(.name = "idem", .version = IDEM_VERSION);
#else
PG_MODULE_MAGIC;
#endif

void		_PG_init(void);

void
_PG_init(void)
{
	ledger_init();
	scope_init();
	held_init();
}

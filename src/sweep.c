/*-------------------------------------------------------------------------
 *
 * sweep.c
 *		One bounded sweep.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "idem.h"

PG_FUNCTION_INFO_V1(idem_sweep);

Datum
idem_sweep(PG_FUNCTION_ARGS)
{
	ereport(ERROR,
			(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
			 errmsg("idem_sweep() is not implemented yet")));
}

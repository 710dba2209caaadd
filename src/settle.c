/*-------------------------------------------------------------------------
 *
 * settle.c
 *		Entry points of a holder: complete, fail, release, extend, checkpoint,
 *		unknown.
 *
 * A holder proves itself by being in the transaction that claimed, or by the
 * token of its lease. A token is compared under the key lock with the one in
 * the row; whoever took the key over moved it on. A holder whose token is no
 * longer current gets ID001, and its transaction is doomed (held.c): what it
 * wrote beside the claim must not commit either. Being late alone is no
 * offence: as long as nobody has taken over, the token is current.
 *
 * A holder needs no snapshot to be fenced, so nothing here raises 40001.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "miscadmin.h"
#include "tcop/utility.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "idem.h"

PG_FUNCTION_INFO_V1(idem_complete);
PG_FUNCTION_INFO_V1(idem_complete_json);
PG_FUNCTION_INFO_V1(idem_complete_jsonb);
PG_FUNCTION_INFO_V1(idem_fail);
PG_FUNCTION_INFO_V1(idem_fail_json);
PG_FUNCTION_INFO_V1(idem_fail_jsonb);
PG_FUNCTION_INFO_V1(idem_release);
PG_FUNCTION_INFO_V1(idem_extend);
PG_FUNCTION_INFO_V1(idem_checkpoint);
PG_FUNCTION_INFO_V1(idem_unknown);

/* Who claims to hold what. */
typedef struct Holder
{
	const IdemScope *scope;
	IdemKey		key;
	bool		has_token;
	int64		token;
	IdemClaim  *claim;			/* this transaction's, not settled yet; or NULL */
} Holder;

static void
read_holder(FunctionCallInfo fcinfo, const char *function, int token_arg, Holder *holder)
{
	PreventCommandIfReadOnly(function);
	PreventCommandIfParallelMode(function);
	holder->scope = scope_of_key(fcinfo, &holder->key);
	scope_check_owner(holder->scope);
	holder->has_token = !PG_ARGISNULL(token_arg);
	holder->token = holder->has_token ? PG_GETARG_INT64(token_arg) : 0;
	holder->claim = held_find(&holder->key);
	if (holder->claim && holder->claim->settled)
		holder->claim = NULL;	/* its row says more */
	if (holder->claim && holder->has_token && holder->token != holder->claim->token)
		held_lease_lost(&holder->key);
}

static void
not_held(const Holder *holder, const char *hint)
{
	ereport(ERROR,
			(errcode(ERRCODE_IDEM_NOT_HELD),
			 errmsg("no such claim is held in scope \"%s\"", holder->scope->name),
			 key_errdetail(&holder->key),
			 errhint("%s", hint)));
}

/*
 * Locks the key and finds the one row of it, waiting for whoever is writing
 * it; row->tuple is NULL if there is none.
 */
static void
lock_row(const Holder *holder, IdemRow *row)
{
	for (;;)
	{
		(void) held_lock(&holder->key, true);
		ledger_probe(IDEM_RESULT, &holder->key, row);
		if (row->tuple == NULL)
			ledger_probe(IDEM_INFLIGHT, &holder->key, row);
		if (row->tuple == NULL && holder->scope->archive == 'f')
			ledger_probe(IDEM_ARCHIVE, &holder->key, row);
		if (row->tuple == NULL || !TransactionIdIsValid(row->busy))
			return;
		held_unlock(&holder->key);
		ledger_wait(row);
		heap_freetuple(row->tuple);
	}
}

static bool
holds(const Holder *holder, const IdemRow *row)
{
	int			column = row->table == IDEM_INFLIGHT ? Anum_inflight_token : Anum_result_token;

	return row->tuple != NULL && DatumGetInt64(ROW_VALUE(row, column)) == holder->token;
}

/* ---- settling ---- */

/*
 * Reads what a key is settled with: response, and from status_arg on status
 * code, headers, body; 22P02 for a response that is not JSON.
 */
void
settle_read_payload(FunctionCallInfo fcinfo, IdemDocumentType type, int response_arg, int status_arg,
					IdemPayload *payload)
{
	payload->no_response = PG_ARGISNULL(response_arg);
	payload->no_status_code = PG_ARGISNULL(status_arg);
	payload->no_headers = PG_ARGISNULL(status_arg + 1);
	payload->no_body = PG_ARGISNULL(status_arg + 2);
	payload->response = payload->no_response ? (Datum) 0 : key_json(PG_GETARG_DATUM(response_arg), type, false);
	payload->status_code = payload->no_status_code ? 0 : PG_GETARG_INT32(status_arg);
	payload->headers = payload->no_headers ? (Datum) 0 : PG_GETARG_DATUM(status_arg + 1);
	payload->body = payload->no_body ? (Datum) 0 : PG_GETARG_DATUM(status_arg + 2);
}

static void
count_settled(const Holder *holder, char verdict)
{
	stats_add(holder->key.scope_id,
			  verdict == IDEM_SUCCEEDED ? IDEM_COUNT_SUCCEEDED : IDEM_COUNT_FAILED, 1);
}

/* Settles this transaction's own claim. */
static void
settle_claim(const Holder *holder, char verdict, const IdemPayload *payload)
{
	IdemClaim  *claim = holder->claim;
	IdemSettlement settlement = {
		.token = claim->token,
		.attempt = claim->attempt,
		.created_at = claim->created_at,
		.fingerprint = claim->has_fingerprint ? &claim->fingerprint : NULL,
		.request = claim->request,
		.state = verdict
	};

	if (claim->has_result)
		ledger_delete_key(IDEM_RESULT, &holder->key);
	if (claim->has_inflight)
		ledger_delete_key(IDEM_INFLIGHT, &holder->key);
	if (claim->has_archive)
		ledger_delete_key(IDEM_ARCHIVE, &holder->key);
	ledger_settle(&holder->key, &settlement, payload, GetCurrentTimestamp());
	held_settle(claim, verdict);
	count_settled(holder, verdict);
}

/* Settles the claim that idem_call() made, unless its handler has done so. */
void
settle_handled(const IdemKey *key, const IdemPayload *payload)
{
	Holder		holder = {.key = *key, .claim = held_find(key)};

	if (holder.claim && !holder.claim->settled)
		settle_claim(&holder, IDEM_SUCCEEDED, payload);
}

/* Without a token: only what this transaction has settled already can be settled again. */
static void
settle_again(const Holder *holder, char verdict)
{
	IdemRow		row;

	ledger_probe(IDEM_RESULT, &holder->key, &row);
	if (row.tuple == NULL || !row.own)
		not_held(holder, "A claim ends with its transaction, or must be settled with the token of its lease.");
	if (ROW_STATE(&row, Anum_result_state) != verdict)
		not_held(holder, "The claim was settled with the other verdict.");
}

/*
 * A token that settled the key before: the same verdict is what the caller
 * wants, the other one an error. Where another transaction gave that verdict,
 * this one's writes contradict it and must not commit.
 */
static void
settle_late(const Holder *holder, const IdemRow *row, char verdict)
{
	if (ROW_STATE(row, Anum_result_state) == verdict)
	{
		if (!row->own)
			held_repeat(&holder->key);
		return;
	}
	if (!row->own)
		held_doom(ERRCODE_IDEM_NOT_HELD, "the key was settled with the other verdict", &holder->key);
	not_held(holder, "The key was settled with the other verdict.");
}

/* With a token: settles the claim of a lease. */
static void
settle_lease(const Holder *holder, char verdict, const IdemPayload *payload)
{
	IdemRow		row;

	lock_row(holder, &row);
	if (!holds(holder, &row))
		held_lease_lost(&holder->key);
	if (row.table != IDEM_INFLIGHT)
		settle_late(holder, &row, verdict);
	else
	{
		bool		keep = holder->scope->keep_request == 'a' && !ROW_IS_NULL(&row, Anum_inflight_request);
		IdemSettlement settlement = {
			.token = holder->token,
			.attempt = DatumGetInt32(ROW_VALUE(&row, Anum_inflight_attempt)),
			.created_at = DatumGetTimestampTz(ROW_VALUE(&row, Anum_inflight_created_at)),
			.fingerprint = ledger_fingerprint(&row),
			.request = keep ? PointerGetDatum(PG_DETOAST_DATUM(ROW_VALUE(&row, Anum_inflight_request))) : (Datum) 0,
			.state = verdict
		};

		ledger_delete(&row);
		ledger_settle(&holder->key, &settlement, payload, GetCurrentTimestamp());
		count_settled(holder, verdict);
	}
	held_unlock(&holder->key);
}

static Datum
settle(FunctionCallInfo fcinfo, IdemDocumentType type, char verdict)
{
	Holder		holder;
	IdemPayload payload;

	read_holder(fcinfo, verdict == IDEM_SUCCEEDED ? "idem_complete()" : "idem_fail()", 3, &holder);
	settle_read_payload(fcinfo, type, 2, 4, &payload);
	if (holder.claim)
		settle_claim(&holder, verdict, &payload);
	else if (holder.has_token)
		settle_lease(&holder, verdict, &payload);
	else
		settle_again(&holder, verdict);
	PG_RETURN_TEXT_P(cstring_to_text(ledger_state_name(verdict)));
}

/*
 * idem_complete(scope, key, response, token, status_code, headers, body) → text
 *
 * Settles a claim as succeeded, and returns that state. A claim of this
 * transaction needs no token, one under a lease must give its. Settling again
 * the same way is no error. Raises ID001 (and dooms the transaction) for a
 * token that is no longer current, ID002 for what is not held or was settled
 * the other way, 22P02 for a response that is not JSON, and what
 * idem_claim() raises about its arguments.
 */
Datum
idem_complete(PG_FUNCTION_ARGS)
{
	return settle(fcinfo, IDEM_DOCUMENT_TEXT, IDEM_SUCCEEDED);
}

Datum
idem_complete_json(PG_FUNCTION_ARGS)
{
	return settle(fcinfo, IDEM_DOCUMENT_JSON, IDEM_SUCCEEDED);
}

Datum
idem_complete_jsonb(PG_FUNCTION_ARGS)
{
	return settle(fcinfo, IDEM_DOCUMENT_JSONB, IDEM_SUCCEEDED);
}

/*
 * idem_fail(scope, key, response, token, status_code, headers, body) → text
 *
 * As idem_complete(), settles as finally failed: later calls replay the
 * failure.
 */
Datum
idem_fail(PG_FUNCTION_ARGS)
{
	return settle(fcinfo, IDEM_DOCUMENT_TEXT, IDEM_FAILED);
}

Datum
idem_fail_json(PG_FUNCTION_ARGS)
{
	return settle(fcinfo, IDEM_DOCUMENT_JSON, IDEM_FAILED);
}

Datum
idem_fail_jsonb(PG_FUNCTION_ARGS)
{
	return settle(fcinfo, IDEM_DOCUMENT_JSONB, IDEM_FAILED);
}

/* ---- what a holder does to its lease ---- */

/* A row of idem.inflight being changed. */
typedef struct Change
{
	IdemRow		row;
	Datum		values[IDEM_MAX_COLUMNS];
	bool		nulls[IDEM_MAX_COLUMNS];
	TimestampTz now;
} Change;

/* Locks the holder's row; ID001 if the lease is lost, ID002 if it is settled. */
static void
lock_lease(const Holder *holder, Change *change)
{
	if (holder->claim)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("the claim is transaction-scoped"),
				 key_errdetail(&holder->key),
				 errhint("It has no lease: settle it in this transaction.")));
	if (!holder->has_token)
		not_held(holder, "A claim under a lease needs its token.");
	lock_row(holder, &change->row);
	if (!holds(holder, &change->row))
		held_lease_lost(&holder->key);
	if (change->row.table != IDEM_INFLIGHT)
		not_held(holder, "It is settled.");
	memcpy(change->values, change->row.values, sizeof(change->values));
	memcpy(change->nulls, change->row.nulls, sizeof(change->nulls));
	change->now = GetCurrentTimestamp();
}

static void
change_column(Change *change, int column, Datum value)
{
	change->values[column - 1] = value;
	change->nulls[column - 1] = false;
}

static void
write_change(const Holder *holder, Change *change)
{
	change_column(change, Anum_inflight_updated_at, TimestampTzGetDatum(change->now));
	ledger_update(&change->row, change->values, change->nulls);
	CommandCounterIncrement();
	held_unlock(&holder->key);
}

/* A lease in doubt cannot go on as if nothing had been said. */
static void
refuse_in_doubt(const Holder *holder, const Change *change)
{
	if (ROW_STATE(&change->row, Anum_inflight_state) == IDEM_IN_DOUBT)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("the key is in doubt"),
				 key_errdetail(&holder->key),
				 errhint("Settle it if its outcome is known; else resolve it with idem_resolve().")));
}

/* The lease lasts that long from now on; a free key is its last holder's again. */
static TimestampTz
renew(Change *change, int64 lease)
{
	TimestampTz until = scope_deadline(change->now, lease);

	change_column(change, Anum_inflight_lease_until, TimestampTzGetDatum(until));
	change_column(change, Anum_inflight_state, CharGetDatum(IDEM_PROCESSING));
	return until;
}

/*
 * idem_release(scope, key, token)
 *
 * Gives a claim up, nothing was done: the next call may execute. 55000 for a
 * transaction-scoped claim after a write of the transaction, ID001, ID002.
 */
Datum
idem_release(PG_FUNCTION_ARGS)
{
	Holder		holder;
	Change		change;

	read_holder(fcinfo, "idem_release()", 2, &holder);
	if (holder.claim)
	{
		if (!held_untouched(holder.claim))
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("the transaction has written since it claimed the key"),
					 key_errdetail(&holder.key),
					 errhint("Roll back instead.")));
		held_settle(holder.claim, IDEM_FREE);
		stats_add(holder.key.scope_id, IDEM_COUNT_RELEASED, 1);
		PG_RETURN_VOID();
	}

	lock_lease(&holder, &change);
	change_column(&change, Anum_inflight_state, CharGetDatum(IDEM_FREE));
	change_column(&change, Anum_inflight_token, Int64GetDatum(Max(holder.token + 1, change.now)));
	change_column(&change, Anum_inflight_lease_until, TimestampTzGetDatum(change.now));
	change.nulls[Anum_inflight_claimant - 1] = true;
	write_change(&holder, &change);
	stats_add(holder.key.scope_id, IDEM_COUNT_RELEASED, 1);
	PG_RETURN_VOID();
}

/*
 * idem_extend(scope, key, token, lease) → timestamptz
 *
 * Heartbeat: the lease lasts for lease, or the scope's, from now on; returns
 * its end. 22023 if there is neither, 55000 in doubt, ID001, ID002.
 */
Datum
idem_extend(PG_FUNCTION_ARGS)
{
	Holder		holder;
	Change		change;
	TimestampTz until;
	int64		lease;

	read_holder(fcinfo, "idem_extend()", 2, &holder);
	lease = PG_ARGISNULL(3) ? holder.scope->lease : key_interval(fcinfo, 3, "lease");
	if (lease == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("no lease is given, and scope \"%s\" has none", holder.scope->name)));
	lock_lease(&holder, &change);
	refuse_in_doubt(&holder, &change);
	until = renew(&change, lease);
	write_change(&holder, &change);
	held_require_durable_commit();
	PG_RETURN_TIMESTAMPTZ(until);
}

/*
 * idem_checkpoint(scope, key, token, recovery_point, checkpoint, lease)
 *
 * Records a finished phase, which a later takeover gets back; extends the
 * lease if one is given. 22004 without recovery_point, 55000 in doubt, ID001,
 * ID002.
 */
Datum
idem_checkpoint(PG_FUNCTION_ARGS)
{
	Holder		holder;
	Change		change;
	int64		lease;

	read_holder(fcinfo, "idem_checkpoint()", 2, &holder);
	if (PG_ARGISNULL(3))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("recovery_point must not be null")));
	lease = PG_ARGISNULL(5) ? 0 : key_interval(fcinfo, 5, "lease");
	lock_lease(&holder, &change);
	refuse_in_doubt(&holder, &change);
	change_column(&change, Anum_inflight_recovery_point, PG_GETARG_DATUM(3));
	change_column(&change, Anum_inflight_checkpoint, PG_ARGISNULL(4) ? (Datum) 0 : PG_GETARG_DATUM(4));
	change.nulls[Anum_inflight_checkpoint - 1] = PG_ARGISNULL(4);
	if (lease > 0)
		renew(&change, lease);
	write_change(&holder, &change);
	held_require_durable_commit();
	PG_RETURN_VOID();
}

/*
 * idem_unknown(scope, key, token, detail)
 *
 * The outside effect is in doubt: nobody executes until the key is resolved,
 * or its holder settles it after all. detail is kept in idem.audit. ID001,
 * ID002.
 */
Datum
idem_unknown(PG_FUNCTION_ARGS)
{
	Holder		holder;
	Change		change;

	read_holder(fcinfo, "idem_unknown()", 2, &holder);
	lock_lease(&holder, &change);
	change_column(&change, Anum_inflight_state, CharGetDatum(IDEM_IN_DOUBT));
	change_column(&change, Anum_inflight_lease_until, TimestampTzGetDatum(DT_NOEND));
	ledger_audit("unknown", holder.scope->id, holder.scope->name, &holder.key, NULL, NULL,
				 PG_ARGISNULL(3) ? NULL : PG_GETARG_JSONB_P(3));
	write_change(&holder, &change);
	stats_add(holder.key.scope_id, IDEM_COUNT_IN_DOUBT, 1);
	held_require_durable_commit();
	PG_RETURN_VOID();
}

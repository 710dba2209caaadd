/*-------------------------------------------------------------------------
 *
 * claim.c
 *		Entry points that adjudicate a key: claim, once.
 *
 * The answer to whether the caller may execute is decided under the key lock
 * (held.c) by the decision table (decide.c). What is here is how the lock is
 * come by and waited for.
 *
 * A caller that does not wait and finds the lock taken looks without it. What
 * it finds may be used unless it says "claimed": committed rows that speak are
 * true whoever has the lock, and an answer from them is one that could have
 * been given a moment earlier; but an absence means nothing without the lock.
 * So replays of a hot key never queue behind each other.
 *
 * While waiting for a transaction the key lock is not held, see held.c.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "tcop/utility.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "idem.h"

PG_FUNCTION_INFO_V1(idem_claim);
PG_FUNCTION_INFO_V1(idem_claim_json);
PG_FUNCTION_INFO_V1(idem_claim_jsonb);
PG_FUNCTION_INFO_V1(idem_once);
PG_FUNCTION_INFO_V1(idem_once_json);
PG_FUNCTION_INFO_V1(idem_once_jsonb);

#define WAIT_UNBOUNDED			(-1)

/* ---- waiting ---- */

/* Is there anything to wait for? Never for this transaction itself. */
static bool
worth_waiting(const IdemDecision *d, bool for_leases)
{
	return d->line == IDEM_LINE_BUSY || (for_leases && d->line == IDEM_LINE_LEASE_RUNNING);
}

/*
 * Decides a key, waiting as long as the caller allows; true: the key is locked
 * now. Where it is not, the outcome is not "claimed".
 */
static bool
adjudicate(const IdemQuestion *question, int64 wait, bool for_leases, IdemDecision *d)
{
	TimestampTz deadline = 0;
	int			pause = 0;

	for (;;)
	{
		IdemClaim  *claim = held_find(&question->key);
		bool		locked = false;

		if (claim == NULL || claim->settled)
			locked = held_lock(&question->key, wait == WAIT_UNBOUNDED);
		decide(question, d);
		if (!locked && d->outcome == IDEM_CLAIMED)
		{
			d->outcome = IDEM_IN_PROGRESS;
			d->line = IDEM_LINE_BUSY;
			d->row = NULL;
		}
		if (wait == 0 || !worth_waiting(d, for_leases))
			return locked;

		if (wait != WAIT_UNBOUNDED)
		{
			if (deadline == 0)
				deadline = scope_deadline(d->now, wait);
			else if (d->now >= deadline)
				return locked;
		}
		if (locked)
			held_unlock(&question->key);
		if (wait == WAIT_UNBOUNDED && d->line == IDEM_LINE_BUSY)
			ledger_wait(d->row);
		else
			held_pause(&pause);
		decide_free(d);
	}
}

/* ---- arguments ---- */

static void
refuse_read_only(const char *function)
{
	PreventCommandIfReadOnly(function);
	PreventCommandIfParallelMode(function);
}

/*
 * Reads scope, key (arguments 0 and 1), request (2) and fingerprint; checks
 * that the caller may claim. lease is the caller's to set.
 */
static void
read_question(FunctionCallInfo fcinfo, IdemDocumentType type, int fingerprint_arg,
			  IdemQuestion *question)
{
	question->scope = scope_of_key(fcinfo, &question->key);
	scope_check_owner(question->scope);
	question->has_fingerprint = false;
	question->lease = 0;
	question->claimant = NULL;
	question->request = (Datum) 0;

	if (!PG_ARGISNULL(fingerprint_arg))
	{
		if (!PG_ARGISNULL(2))
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("request and fingerprint cannot both be given")));
		question->fingerprint = *PG_GETARG_IDEM_DIGEST_P(fingerprint_arg);
		question->has_fingerprint = true;
	}
	else if (!PG_ARGISNULL(2))
	{
		Datum		request = PointerGetDatum(PG_DETOAST_DATUM_PACKED(PG_GETARG_DATUM(2)));

		fingerprint_document(request, type, question->scope->pointers, &question->fingerprint);
		question->has_fingerprint = true;
		question->request = request;
	}
}

static int64
read_wait(FunctionCallInfo fcinfo, int arg)
{
	return PG_ARGISNULL(arg) ? WAIT_UNBOUNDED : key_interval(fcinfo, arg, "wait");
}

/* ---- claim ---- */

/* Notes that a key came with another request, once for each such request. */
static void
audit_mismatch(const IdemQuestion *question, const IdemDecision *d)
{
	if (d->row == NULL || ledger_audited("mismatch", &question->key, &question->fingerprint))
		return;
	ledger_audit("mismatch", question->scope->id, question->scope->name, &question->key,
				 &question->fingerprint, NULL, NULL);
}

static Datum
claim(FunctionCallInfo fcinfo, IdemDocumentType type)
{
	IdemQuestion question;
	IdemDecision decision;
	Datum		values[IDEM_ANSWER_COLUMNS];
	bool		nulls[IDEM_ANSWER_COLUMNS];
	Datum		result;
	int64		wait;
	bool		locked;

	refuse_read_only("idem_claim()");
	read_question(fcinfo, type, 5, &question);
	question.lease = PG_ARGISNULL(3) ? question.scope->lease : key_interval(fcinfo, 3, "lease");
	wait = read_wait(fcinfo, 4);
	if (!PG_ARGISNULL(6))
		question.claimant = PG_GETARG_TEXT_PP(6);
	if (question.request && (question.lease > 0 ? question.scope->keep_request != 'n' :
							 question.scope->keep_request == 'a'))
		question.request = key_json(question.request, type, true);

	locked = adjudicate(&question, wait, true, &decision);
	decide_check_visible(&decision);
	if (decision.outcome == IDEM_CLAIMED)
	{
		decide_take(&question, &decision);
		locked = question.lease > 0;	/* the row speaks now; else the lock is the claim */
	}
	else if (decision.outcome == IDEM_MISMATCH)
		audit_mismatch(&question, &decision);

	/* under the lock still: it fetches what is stored out of line */
	decide_answer(&decision, values, nulls);
	result = decide_answer_datum(fcinfo, values, nulls);
	if (locked)
		held_unlock(&question.key);
	return result;
}

/*
 * idem_claim(scope, key, request, lease, wait, fingerprint, claimant) → idem_answer
 *
 * Adjudicates a key. lease: how long the holder may take, 0 for a claim of
 * this transaction, NULL for the scope's. wait: how long to wait for another
 * holder, NULL for as long as it takes. Raises 22004, 22023, 22P02, 42704,
 * 42501, 25006, 40001; never for losing.
 */
Datum
idem_claim(PG_FUNCTION_ARGS)
{
	return claim(fcinfo, IDEM_DOCUMENT_TEXT);
}

Datum
idem_claim_json(PG_FUNCTION_ARGS)
{
	return claim(fcinfo, IDEM_DOCUMENT_JSON);
}

Datum
idem_claim_jsonb(PG_FUNCTION_ARGS)
{
	return claim(fcinfo, IDEM_DOCUMENT_JSONB);
}

/* ---- once ---- */

/* Claims and settles in one go; the caller holds the key lock, and keeps it. */
static void
settle_at_once(const IdemQuestion *question, IdemDecision *d, IdemDocumentType type)
{
	static const IdemPayload nothing = {
		.no_response = true, .no_headers = true, .no_body = true, .no_status_code = true
	};
	IdemSettlement settlement = {.state = IDEM_SUCCEEDED};

	decide_number(d);
	settlement.token = d->token;
	settlement.attempt = d->attempt;
	settlement.created_at = d->created_at;
	if (question->has_fingerprint)
		settlement.fingerprint = &question->fingerprint;
	else if (d->line == IDEM_LINE_TAKEOVER)
		settlement.fingerprint = ledger_fingerprint(&d->inflight);
	if (question->scope->keep_request == 'a')
	{
		/* a takeover keeps what the first holder was asked to do */
		if (d->line == IDEM_LINE_TAKEOVER && !ROW_IS_NULL(&d->inflight, Anum_inflight_request))
			settlement.request = PointerGetDatum(PG_DETOAST_DATUM(ROW_VALUE(&d->inflight, Anum_inflight_request)));
		else if (question->request)
			settlement.request = key_json(question->request, type, true);
	}

	if (d->result.tuple)
		ledger_delete(&d->result);
	if (d->inflight.tuple)
		ledger_delete(&d->inflight);
	if (d->archive.tuple)
		ledger_delete(&d->archive);
	ledger_settle(&question->key, &settlement, &nothing, d->now);
}

static void
refuse_once(const IdemQuestion *question, const IdemDecision *d)
{
	if (d->outcome == IDEM_MISMATCH)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_KEY_REUSED),
				 errmsg("the key was used for another request"),
				 key_errdetail(&question->key)));
	if (d->line == IDEM_LINE_BUSY)
		ereport(ERROR,
				(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
				 errmsg("another transaction is at the key"),
				 key_errdetail(&question->key)));
	ereport(ERROR,
			(errcode(ERRCODE_IDEM_NOT_SETTLED),
			 errmsg(d->outcome == IDEM_UNKNOWN ? "the key is in doubt" : "the key is in progress"),
			 key_errdetail(&question->key),
			 d->outcome == IDEM_UNKNOWN ? errhint("Resolve it with idem_resolve().") :
			 d->line == IDEM_LINE_LEASE_RUNNING ? errhint("It is claimed under a lease.") :
			 errhint("This transaction has claimed it and not settled it yet.")));
}

static Datum
once(FunctionCallInfo fcinfo, IdemDocumentType type)
{
	IdemQuestion question;
	IdemDecision decision;
	bool		locked;

	refuse_read_only("idem_once()");
	read_question(fcinfo, type, 4, &question);
	locked = adjudicate(&question, read_wait(fcinfo, 3), false, &decision);
	decide_check_visible(&decision);
	if (decision.outcome == IDEM_CLAIMED)
		settle_at_once(&question, &decision, type);
	else if (decision.outcome != IDEM_REPLAYED && decision.outcome != IDEM_EXPIRED)
		refuse_once(&question, &decision);
	if (locked)
		held_unlock(&question.key);
	PG_RETURN_BOOL(decision.outcome == IDEM_CLAIMED);
}

/*
 * idem_once(scope, key, request, wait, fingerprint) → boolean
 *
 * True the first time, false for a duplicate. Raises ID004 for another
 * request, ID005 for a key in doubt, under a lease or claimed by this
 * transaction, 55P03 when wait is over, and what idem_claim() raises.
 */
Datum
idem_once(PG_FUNCTION_ARGS)
{
	return once(fcinfo, IDEM_DOCUMENT_TEXT);
}

Datum
idem_once_json(PG_FUNCTION_ARGS)
{
	return once(fcinfo, IDEM_DOCUMENT_JSON);
}

Datum
idem_once_jsonb(PG_FUNCTION_ARGS)
{
	return once(fcinfo, IDEM_DOCUMENT_JSONB);
}

/* ---- not there yet ---- */

PG_FUNCTION_INFO_V1(idem_call);
PG_FUNCTION_INFO_V1(idem_call_json);
PG_FUNCTION_INFO_V1(idem_call_jsonb);
PG_FUNCTION_INFO_V1(idem_explain);
PG_FUNCTION_INFO_V1(idem_explain_json);
PG_FUNCTION_INFO_V1(idem_explain_jsonb);
PG_FUNCTION_INFO_V1(idem_sweep);

static Datum
not_yet(const char *function)
{
	ereport(ERROR,
			(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
			 errmsg("%s is not implemented yet", function)));
}

Datum
idem_call(PG_FUNCTION_ARGS)
{
	return not_yet("idem_call()");
}

Datum
idem_call_json(PG_FUNCTION_ARGS)
{
	return not_yet("idem_call()");
}

Datum
idem_call_jsonb(PG_FUNCTION_ARGS)
{
	return not_yet("idem_call()");
}

Datum
idem_explain(PG_FUNCTION_ARGS)
{
	return not_yet("idem_explain()");
}

Datum
idem_explain_json(PG_FUNCTION_ARGS)
{
	return not_yet("idem_explain()");
}

Datum
idem_explain_jsonb(PG_FUNCTION_ARGS)
{
	return not_yet("idem_explain()");
}

Datum
idem_sweep(PG_FUNCTION_ARGS)
{
	return not_yet("idem_sweep()");
}

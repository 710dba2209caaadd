/*-------------------------------------------------------------------------
 *
 * claim.c
 *		Entry points that adjudicate a key: claim, once, call.
 *
 * The answer to whether the caller may execute is decided under the key lock
 * (held.c) by the decision table (decide.c). What is here is how the lock is
 * come by and waited for.
 *
 * A caller that does not wait and finds the lock taken looks without it. What
 * it finds may be used unless it says "claimed": committed rows that speak are
 * true whoever has the lock, and an answer from them is one that could have
 * been given a moment earlier; but an absence means nothing without the lock.
 * So replays of a hot key never queue behind each other. A session whose last
 * answer was not "claimed" looks that way first: such answers come in storms,
 * and then the lock is not even tried, for which a holder might have to wait
 * when it extends its lease.
 *
 * While waiting for a transaction the key lock is not held, see held.c.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/objectaccess.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "tcop/utility.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/fmgrprotos.h"
#include "utils/lsyscache.h"
#include "utils/regproc.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "idem.h"

PG_FUNCTION_INFO_V1(idem_claim);
PG_FUNCTION_INFO_V1(idem_claim_json);
PG_FUNCTION_INFO_V1(idem_claim_jsonb);
PG_FUNCTION_INFO_V1(idem_once);
PG_FUNCTION_INFO_V1(idem_once_json);
PG_FUNCTION_INFO_V1(idem_once_jsonb);
PG_FUNCTION_INFO_V1(idem_call);
PG_FUNCTION_INFO_V1(idem_call_json);
PG_FUNCTION_INFO_V1(idem_call_jsonb);

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
	static bool look_first = false;
	TimestampTz deadline = 0;
	int			pause = 0;

	if (look_first)
	{
		decide(question, d);
		if (d->outcome != IDEM_CLAIMED && (wait == 0 || !worth_waiting(d, for_leases)))
			return false;
		decide_free(d);
	}
	for (;;)
	{
		IdemClaim  *claim = held_find(&question->key);
		bool		locked = false;

		if (claim == NULL || claim->settled)
			locked = held_lock(&question->key, wait == WAIT_UNBOUNDED);
		decide(question, d);
		if (!locked)
			decide_without_lock(d);
		look_first = d->outcome != IDEM_CLAIMED;
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

static void
count(const IdemQuestion *question, const IdemDecision *d)
{
	stats_add(question->scope->id, (IdemCounter) d->outcome, 1);
	if (d->line == IDEM_LINE_TAKEOVER)
		stats_add(question->scope->id, IDEM_COUNT_TAKEOVERS, 1);
	if (d->outcome == IDEM_REPLAYED)
		stats_replay_age(question->scope->id,
						 d->now - DatumGetTimestampTz(ROW_VALUE(d->row, Anum_result_completed_at)));
}

/* ---- arguments ---- */

static void
refuse_read_only(const char *function)
{
	PreventCommandIfReadOnly(function);
	PreventCommandIfParallelMode(function);
}

/*
 * Reads scope, key (arguments 0 and 1), request (2) and, where there is such
 * an argument, fingerprint; checks that the caller may claim.
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

	if (fingerprint_arg >= 0 && !PG_ARGISNULL(fingerprint_arg))
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
	count(&question, &decision);
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
	stats_add(question->scope->id, IDEM_COUNT_SUCCEEDED, 1);
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
	count(&question, &decision);
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

/* ---- call ---- */

/* A function that idem_call() may run. */
typedef struct Handler
{
	FmgrInfo	flinfo;
	Oid			argument;		/* text, json or jsonb */
	Oid			result;
} Handler;

static void
unfit_handler(Oid oid, const char *detail)
{
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("function %s cannot be a handler", format_procedure(oid)),
			 errdetail("%s", detail)));
}

/* Looks the handler up, as the caller may run it; 42883, 42501, 22023. */
static void
read_handler(FunctionCallInfo fcinfo, int arg, Handler *handler)
{
	Oid			oid = PG_ARGISNULL(arg) ? InvalidOid : PG_GETARG_OID(arg);
	HeapTuple	tuple;
	Form_pg_proc proc;
	AclResult	acl;

	if (PG_ARGISNULL(arg))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("handler must not be null")));
	tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(oid));
	if (!HeapTupleIsValid(tuple))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_FUNCTION),
				 errmsg("function with OID %u does not exist", oid)));
	proc = (Form_pg_proc) GETSTRUCT(tuple);
	if (proc->prokind != PROKIND_FUNCTION || proc->proretset)
		unfit_handler(oid, "It is not a plain function that returns one value.");
	if (proc->pronargs != 1)
		unfit_handler(oid, "It does not take one argument.");
	handler->argument = proc->proargtypes.values[0];
	handler->result = proc->prorettype;
	if (handler->argument != TEXTOID && handler->argument != JSONOID && handler->argument != JSONBOID)
		unfit_handler(oid, "Its argument is not text, json or jsonb.");
	if (get_typtype(handler->result) == TYPTYPE_PSEUDO && handler->result != VOIDOID &&
		handler->result != RECORDOID)
		unfit_handler(oid, "Its result has no type that converts to JSON.");
	ReleaseSysCache(tuple);

	acl = object_aclcheck(ProcedureRelationId, oid, GetUserId(), ACL_EXECUTE);
	if (acl != ACLCHECK_OK)
		aclcheck_error(acl, OBJECT_FUNCTION, get_func_name(oid));
	InvokeFunctionExecuteHook(oid);
	fmgr_info(oid, &handler->flinfo);
}

/* The request as the handler takes it. */
static Datum
handler_argument(const Handler *handler, Datum request, IdemDocumentType type)
{
	if ((type == IDEM_DOCUMENT_JSONB) == (handler->argument == JSONBOID))
		return request;
	if (type == IDEM_DOCUMENT_JSONB)
		return key_json(request, type, true);
	return DirectFunctionCall1(jsonb_in, CStringGetDatum(TextDatumGetCString(request)));
}

/* What the handler returned, as json. */
static Datum
result_as_json(const Handler *handler, Datum result)
{
	FmgrInfo	to_json;

	if (handler->result == JSONOID)
		return result;
	if (handler->result == JSONBOID)
		return key_json(result, IDEM_DOCUMENT_JSONB, true);
	/* to_json() learns the type of its argument from the expression it is in */
	fmgr_info(F_TO_JSON, &to_json);
	fmgr_info_set_expr((Node *) makeFuncExpr(F_TO_JSON, JSONOID,
											 list_make1(makeNullConst(handler->result, -1, InvalidOid)),
											 InvalidOid, InvalidOid, COERCE_EXPLICIT_CALL), &to_json);
	return FunctionCall1(&to_json, result);
}

/*
 * Runs the handler, and fills in what is to be settled with. A claim that
 * waited has an old snapshot; the handler gets a new one where the isolation
 * level allows it, be it STABLE or not.
 */
static void
run_handler(Handler *handler, Datum request, bool no_request, IdemDocumentType type,
			IdemPayload *payload)
{
	LOCAL_FCINFO(call, 1);
	Datum		result;

	if (no_request && handler->flinfo.fn_strict)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("request must not be null for a strict handler")));
	InitFunctionCallInfoData(*call, &handler->flinfo, 1, DEFAULT_COLLATION_OID, NULL, NULL);
	call->args[0].isnull = no_request;
	call->args[0].value = no_request ? (Datum) 0 : handler_argument(handler, request, type);

	PushActiveSnapshot(GetTransactionSnapshot());
	result = FunctionCallInvoke(call);
	payload->no_response = call->isnull || handler->result == VOIDOID;
	payload->response = payload->no_response ? (Datum) 0 : result_as_json(handler, result);
	PopActiveSnapshot();
}

static Datum
call(FunctionCallInfo fcinfo, IdemDocumentType type)
{
	IdemQuestion question;
	IdemDecision decision;
	Handler		handler;
	IdemPayload payload = {.no_headers = true, .no_body = true, .no_status_code = true};
	Datum		values[IDEM_ANSWER_COLUMNS];
	bool		nulls[IDEM_ANSWER_COLUMNS];
	Datum		result;
	bool		locked;

	refuse_read_only("idem_call()");
	read_handler(fcinfo, 3, &handler);
	read_question(fcinfo, type, -1, &question);
	if (question.request && question.scope->keep_request == 'a')
		question.request = key_json(question.request, type, true);

	locked = adjudicate(&question, read_wait(fcinfo, 4), true, &decision);
	count(&question, &decision);
	decide_check_visible(&decision);
	if (decision.outcome == IDEM_CLAIMED)
	{
		decide_take(&question, &decision);
		locked = false;
		if (!PG_ARGISNULL(2))
			run_handler(&handler, PG_GETARG_DATUM(2), false, type, &payload);
		else if (decision.line == IDEM_LINE_TAKEOVER && !ROW_IS_NULL(&decision.inflight, Anum_inflight_request))
			run_handler(&handler, ROW_VALUE(&decision.inflight, Anum_inflight_request), false,
						IDEM_DOCUMENT_JSON, &payload);
		else
			run_handler(&handler, (Datum) 0, true, type, &payload);
		settle_handled(&question.key, &payload);
		ledger_probe(IDEM_RESULT, &question.key, &decision.result);
		/* an older row no longer spoke, and is still there if the handler has released the claim */
		decision.row = decision.result.tuple &&
			DatumGetInt64(ROW_VALUE(&decision.result, Anum_result_token)) >= decision.token ?
			&decision.result : NULL;
		decision.outcome = IDEM_EXECUTED;
	}
	else if (decision.outcome == IDEM_MISMATCH)
		audit_mismatch(&question, &decision);

	decide_answer(&decision, values, nulls);
	result = decide_answer_datum(fcinfo, values, nulls);
	if (locked)
		held_unlock(&question.key);
	return result;
}

/*
 * idem_call(scope, key, request, handler, wait) → idem_answer
 *
 * Claims, runs handler(request) and completes with what it returns; outcome
 * executed when it ran. Without a request, a key taken over is executed with
 * the one it was first claimed with, if that is kept. A handler that settles the claim itself is respected;
 * its error leaves no trace of the claim. Raises 42501 without EXECUTE on the
 * handler, 22023 for a function that cannot be one, 22004 for a NULL handler
 * or a NULL request to a strict one, and what idem_claim() raises.
 */
Datum
idem_call(PG_FUNCTION_ARGS)
{
	return call(fcinfo, IDEM_DOCUMENT_TEXT);
}

Datum
idem_call_json(PG_FUNCTION_ARGS)
{
	return call(fcinfo, IDEM_DOCUMENT_JSON);
}

Datum
idem_call_jsonb(PG_FUNCTION_ARGS)
{
	return call(fcinfo, IDEM_DOCUMENT_JSONB);
}

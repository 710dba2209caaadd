/*-------------------------------------------------------------------------
 *
 * admin.c
 *		Entry points of an operator: status, recover, resolve, forget,
 *		quarantine.
 *
 * Operators write rows of keys like everybody else: under the key lock, never
 * waiting for a transaction while they hold it. What they change is audited.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "nodes/pg_list.h"
#include "tcop/utility.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "idem.h"

PG_FUNCTION_INFO_V1(idem_status);
PG_FUNCTION_INFO_V1(idem_recover);
PG_FUNCTION_INFO_V1(idem_resolve);
PG_FUNCTION_INFO_V1(idem_resolve_json);
PG_FUNCTION_INFO_V1(idem_resolve_jsonb);
PG_FUNCTION_INFO_V1(idem_forget);
PG_FUNCTION_INFO_V1(idem_quarantine);

static void
operator_only(const char *function)
{
	PreventCommandIfReadOnly(function);
	PreventCommandIfParallelMode(function);
}

static const IdemScope *
operators_scope(FunctionCallInfo fcinfo)
{
	text	   *name = key_scope_name(fcinfo, 0);
	const IdemScope *scope;

	ledger_open(IDEM_RESULT);
	scope = scope_lookup(name);
	scope_check_operator(scope);
	return scope;
}

/* JSON for the audit, of values that need no escaping */
static Jsonb *
audit_value(const char *format,...) pg_attribute_printf(1, 2);

static Jsonb *
audit_value(const char *format,...)
{
	StringInfoData buffer;
	va_list		args;
	int			needed;

	initStringInfo(&buffer);
	do
	{
		va_start(args, format);
		needed = appendStringInfoVA(&buffer, format, args);
		va_end(args);
		if (needed != 0)
			enlargeStringInfo(&buffer, needed);
	} while (needed != 0);
	return DatumGetJsonbP(DirectFunctionCall1(jsonb_in, CStringGetDatum(buffer.data)));
}

/* Locks a key and decides it, waiting for whoever is writing a row of it. */
static void
lock_and_decide(IdemQuestion *question, IdemDecision *d)
{
	for (;;)
	{
		(void) held_lock(&question->key, true);
		decide(question, d);
		if (d->line != IDEM_LINE_BUSY)
			return;
		held_unlock(&question->key);
		ledger_wait(d->row);
		decide_free(d);
	}
}

/* ---- status ---- */

/*
 * idem_status(scope, key) → idem_answer
 *
 * What is known of a key. outcome is what a claim would answer now, NULL where
 * it would execute: a status never decides an execution. Reads only, also on a
 * standby. 22004, 22023, 42704; 42501 outside the scope's owner and operators.
 */
Datum
idem_status(PG_FUNCTION_ARGS)
{
	IdemQuestion question = {0};
	IdemDecision decision;
	Datum		values[IDEM_ANSWER_COLUMNS];
	bool		nulls[IDEM_ANSWER_COLUMNS];

	question.scope = scope_of_key(fcinfo, &question.key);
	if (!has_privs_of_role(GetUserId(), question.scope->operators))
		scope_check_owner(question.scope);
	decide(&question, &decision);
	if (held_elsewhere(&question.key))
		decide_without_lock(&decision);
	if (decision.outcome == IDEM_CLAIMED)
		decide_answer_free(&decision, values, nulls);
	else
		decide_answer(&decision, values, nulls);
	return decide_answer_datum(fcinfo, values, nulls);
}

/* ---- recover ---- */

typedef struct Candidate
{
	TimestampTz updated_at;
	text	   *key;
} Candidate;

typedef struct Candidates
{
	TimestampTz now;
	int			count;
	int			allocated;
	Candidate  *list;
} Candidates;

static void
add_candidate(Candidates *candidates, const IdemRow *row)
{
	if (candidates->count == candidates->allocated)
	{
		candidates->allocated = Max(candidates->allocated * 2, 64);
		candidates->list = candidates->list ?
			repalloc_huge(candidates->list, candidates->allocated * sizeof(Candidate)) :
			palloc(candidates->allocated * sizeof(Candidate));
	}
	candidates->list[candidates->count].updated_at =
		DatumGetTimestampTz(ROW_VALUE(row, Anum_inflight_updated_at));
	candidates->list[candidates->count].key =
		DatumGetTextPCopy(ROW_VALUE(row, Anum_inflight_key));
	candidates->count++;
}

static void
add_if_free(const IdemRow *row, void *arg)
{
	Candidates *candidates = arg;

	if (ROW_STATE(row, Anum_inflight_state) == IDEM_FREE ||
		DatumGetTimestampTz(ROW_VALUE(row, Anum_inflight_lease_until)) <= candidates->now)
		add_candidate(candidates, row);
}

static int
older_first(const void *a, const void *b)
{
	TimestampTz x = ((const Candidate *) a)->updated_at;
	TimestampTz y = ((const Candidate *) b)->updated_at;

	return x < y ? -1 : x > y;
}

/* Takes one key over, unless somebody else is at it; true: values are the answer. */
static bool
take_over(IdemQuestion *question, text *key, Datum *values, bool *nulls)
{
	IdemDecision d;
	IdemClaim  *claim;
	bool		taken;

	key_set(&question->key, question->scope->id, key);
	claim = held_find(&question->key);
	if (claim != NULL || !held_lock(&question->key, false))
		return false;
	decide(question, &d);
	taken = d.line == IDEM_LINE_TAKEOVER;
	if (taken)
	{
		decide_check_visible(&d);
		decide_take(question, &d);
		stats_add(question->scope->id, IDEM_COUNT_CLAIMED, 1);
		stats_add(question->scope->id, IDEM_COUNT_TAKEOVERS, 1);
		values[0] = PointerGetDatum(key);
		nulls[0] = false;
		decide_answer(&d, values + 1, nulls + 1);
	}
	held_unlock(&question->key);
	return taken;
}

/*
 * idem_recover(scope, max, lease) → set of key and the columns of idem_answer
 *
 * Takes over up to max keys that are free again or whose lease is over, oldest
 * first; skips those that somebody else is at and those in doubt. 22023
 * without a lease or with a max below 1; 42704, 42501, 25006, 40001.
 */
Datum
idem_recover(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	IdemQuestion question = {0};
	Candidates	candidates = {0};
	int			left = PG_ARGISNULL(1) ? 0 : PG_GETARG_INT32(1);

	operator_only("idem_recover()");
	question.scope = operators_scope(fcinfo);
	question.lease = PG_ARGISNULL(2) ? question.scope->lease : key_interval(fcinfo, 2, "lease");
	if (question.lease == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("no lease is given, and scope \"%s\" has none", question.scope->name)));
	if (left < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max must be at least 1")));

	InitMaterializedSRF(fcinfo, 0);
	candidates.now = GetCurrentTimestamp();
	ledger_each(IDEM_INFLIGHT, question.scope->id, false, add_if_free, &candidates);
	if (candidates.count > 0)
		qsort(candidates.list, candidates.count, sizeof(Candidate), older_first);
	for (int i = 0; i < candidates.count && left > 0; i++)
	{
		Datum		values[IDEM_ANSWER_COLUMNS + 1];
		bool		nulls[IDEM_ANSWER_COLUMNS + 1];

		CHECK_FOR_INTERRUPTS();
		if (take_over(&question, candidates.list[i].key, values, nulls))
		{
			tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
			left--;
		}
	}
	return (Datum) 0;
}

/* ---- resolve ---- */

static char
read_resolution(FunctionCallInfo fcinfo)
{
	char	   *word = PG_ARGISNULL(2) ? NULL : text_to_cstring(PG_GETARG_TEXT_PP(2));

	if (word && strcmp(word, "succeeded") == 0)
		return IDEM_SUCCEEDED;
	if (word && strcmp(word, "failed") == 0)
		return IDEM_FAILED;
	if (word && strcmp(word, "retry") == 0)
	{
		for (int i = 3; i <= 6; i++)
		{
			if (!PG_ARGISNULL(i))
				ereport(ERROR,
						(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
						 errmsg("a key that is retried has no response yet")));
		}
		return IDEM_FREE;
	}
	ereport(ERROR,
			(errcode(word ? ERRCODE_INVALID_PARAMETER_VALUE : ERRCODE_NULL_VALUE_NOT_ALLOWED),
			 word ? errmsg("unrecognized resolution \"%s\"", word) : errmsg("resolution must not be null"),
			 errhint("It is succeeded, failed or retry.")));
}

static void
settle_resolved(IdemQuestion *question, const IdemRow *row, char state, const IdemPayload *payload,
				TimestampTz now)
{
	bool		keep = question->scope->keep_request == 'a' && !ROW_IS_NULL(row, Anum_inflight_request);
	IdemSettlement settlement = {
		.token = DatumGetInt64(ROW_VALUE(row, Anum_inflight_token)),
		.attempt = DatumGetInt32(ROW_VALUE(row, Anum_inflight_attempt)),
		.created_at = DatumGetTimestampTz(ROW_VALUE(row, Anum_inflight_created_at)),
		.fingerprint = ledger_fingerprint(row),
		.request = keep ? ROW_VALUE(row, Anum_inflight_request) : (Datum) 0,
		.state = state
	};

	ledger_delete(row);
	ledger_settle(&question->key, &settlement, payload, now);
}

static Datum
resolve(FunctionCallInfo fcinfo, IdemDocumentType type)
{
	IdemQuestion question = {0};
	IdemDecision d;
	IdemPayload payload;
	char		state;

	operator_only("idem_resolve()");
	question.scope = scope_of_key(fcinfo, &question.key);
	scope_check_operator(question.scope);
	state = read_resolution(fcinfo);
	settle_read_payload(fcinfo, type, 3, 4, &payload);

	lock_and_decide(&question, &d);
	if (d.line != IDEM_LINE_IN_DOUBT)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("the key is not in doubt"),
				 key_errdetail(&question.key)));
	decide_check_visible(&d);
	if (state == IDEM_FREE)
		ledger_set_state(d.row, IDEM_FREE, d.now, d.now);
	else
		settle_resolved(&question, d.row, state, &payload, d.now);
	held_require_durable_commit();
	ledger_audit("resolve", question.scope->id, question.scope->name, &question.key, NULL,
				 audit_value("{\"state\": \"%s\", \"attempt\": %d, \"token\": " INT64_FORMAT "}",
							 ledger_state_name(ROW_STATE(d.row, Anum_inflight_state)),
							 DatumGetInt32(ROW_VALUE(d.row, Anum_inflight_attempt)),
							 DatumGetInt64(ROW_VALUE(d.row, Anum_inflight_token))),
				 audit_value("{\"state\": \"%s\"}", ledger_state_name(state)));
	held_unlock(&question.key);
	PG_RETURN_TEXT_P(cstring_to_text(ledger_state_name(state)));
}

/*
 * idem_resolve(scope, key, resolution, response, status_code, headers, body) → text
 *
 * What a human found out about a key in doubt: 'succeeded' and 'failed' settle
 * it, 'retry' lets the next claim execute once more, be its attempts spent or
 * not. Its token stays current, so that a holder thought dead who did succeed
 * can still say so. Returns the new state. 22023 for another resolution, 55000
 * for a key not in doubt; 42704, 42501, 25006. 40001 where the transaction keeps
 * one snapshot, and the key came to be in doubt after it: what was found out
 * concerns another attempt.
 */
Datum
idem_resolve(PG_FUNCTION_ARGS)
{
	return resolve(fcinfo, IDEM_DOCUMENT_TEXT);
}

Datum
idem_resolve_json(PG_FUNCTION_ARGS)
{
	return resolve(fcinfo, IDEM_DOCUMENT_JSON);
}

Datum
idem_resolve_jsonb(PG_FUNCTION_ARGS)
{
	return resolve(fcinfo, IDEM_DOCUMENT_JSONB);
}

/* ---- forget ---- */

/*
 * Locks a key and finds its settled rows, waiting for whoever is writing one;
 * 55000 if it is in flight.
 */
static void
lock_settled(const IdemKey *key, IdemRow *rows)
{
	static const IdemTable where[] = {IDEM_RESULT, IDEM_ARCHIVE, IDEM_INFLIGHT};
	IdemClaim  *claim = held_find(key);
	bool		in_flight = claim != NULL && !claim->settled;

	for (;;)
	{
		const IdemRow *busy = NULL;

		(void) held_lock(key, true);
		for (int i = 0; i < 3; i++)
		{
			ledger_probe(where[i], key, &rows[i]);
			if (rows[i].tuple && TransactionIdIsValid(rows[i].busy))
				busy = &rows[i];
		}
		if (busy == NULL)
			break;
		held_unlock(key);
		ledger_wait(busy);
	}
	if (in_flight || rows[2].tuple != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("the key is in flight"),
				 key_errdetail(key),
				 errhint("Settle, release or resolve it first.")));
}

/*
 * idem_forget(scope, key, tombstone) → boolean
 *
 * Erases headers, response, body and request of a settled key; its verdict
 * and fingerprint stay unless tombstone is false. False: there is no such key.
 * 55000 for a key in flight; 42704, 42501, 25006.
 */
Datum
idem_forget(PG_FUNCTION_ARGS)
{
	const IdemScope *scope;
	IdemKey		key;
	IdemRow		rows[3];
	bool		tombstone = PG_ARGISNULL(2) || PG_GETARG_BOOL(2);
	bool		found = false;

	operator_only("idem_forget()");
	scope = scope_of_key(fcinfo, &key);
	scope_check_operator(scope);
	lock_settled(&key, rows);
	for (int i = 0; i < 2; i++)
	{
		if (rows[i].tuple == NULL)
			continue;
		if (tombstone)
			ledger_strip(&rows[i]);
		else
			ledger_delete(&rows[i]);
		ledger_audit("forget", scope->id, scope->name, &key, NULL,
					 audit_value("{\"state\": \"%s\"}", ledger_state_name(ROW_STATE(&rows[i], Anum_result_state))),
					 audit_value("{\"tombstone\": %s}", tombstone ? "true" : "false"));
		found = true;
	}
	CommandCounterIncrement();
	held_unlock(&key);
	PG_RETURN_BOOL(found);
}

/* ---- quarantine ---- */

static void
add_always(const IdemRow *row, void *arg)
{
	if (ROW_STATE(row, Anum_inflight_state) != IDEM_IN_DOUBT)
		add_candidate(arg, row);
}

/* Puts one key in doubt, waiting for whoever is writing it. */
static bool
quarantine_key(const IdemKey *key)
{
	IdemRow		row;
	bool		found;

	for (;;)
	{
		(void) held_lock(key, true);
		ledger_probe(IDEM_INFLIGHT, key, &row);
		if (row.tuple == NULL || !TransactionIdIsValid(row.busy))
			break;
		held_unlock(key);
		ledger_wait(&row);
		heap_freetuple(row.tuple);
	}
	found = row.tuple != NULL && ROW_STATE(&row, Anum_inflight_state) != IDEM_IN_DOUBT;
	if (found)
		ledger_set_state(&row, IDEM_IN_DOUBT, DT_NOEND, GetCurrentTimestamp());
	held_unlock(key);
	return found;
}

/*
 * idem_quarantine(scope) → bigint
 *
 * Puts every key in flight in doubt, free ones too, since what was lost may
 * have taken them; returns how many. 42704, 42501, 25006.
 */
Datum
idem_quarantine(PG_FUNCTION_ARGS)
{
	const IdemScope *scope;
	Candidates	candidates = {0};
	int64		count = 0;

	operator_only("idem_quarantine()");
	scope = operators_scope(fcinfo);
	ledger_each(IDEM_INFLIGHT, scope->id, true, add_always, &candidates);
	for (int i = 0; i < candidates.count; i++)
	{
		IdemKey		key;

		CHECK_FOR_INTERRUPTS();
		key_set(&key, scope->id, candidates.list[i].key);
		if (quarantine_key(&key))
			count++;
	}
	held_require_durable_commit();
	ledger_audit("quarantine", scope->id, scope->name, NULL, NULL, NULL,
				 audit_value("{\"keys\": " INT64_FORMAT "}", count));
	PG_RETURN_INT64(count);
}

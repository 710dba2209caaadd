/*-------------------------------------------------------------------------
 *
 * decide.c
 *		The decision table: what a key's rows, the clock and the policy come to.
 *
 * The table is one function, decide_line(). It reads no row and takes no lock:
 * it is given what the probes found. A row past what its policy keeps does not
 * speak, whether a sweep has been there or not, so an answer never depends on
 * the sweep.
 *
 * Probing is lazy. A row in idem.result that speaks excludes one in
 * idem.inflight, because a leased claim deletes a result that no longer
 * speaks at once and settling deletes the inflight row. So idem.result comes
 * first, and a replay probes nothing else; idem.archive is probed only where
 * the policy is full.
 *
 * A row that another transaction is writing is that transaction's, and says
 * nothing. But a settled row that is there and speaks is only ever changed or
 * deleted by an operator's forgetting or by the sweep, never by an execution:
 * while that is under way, what it says is still true. So a replay neither
 * waits for a sweep nor is told that the key is in progress.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"
#include "utils/typcache.h"

#include "idem.h"

/* ---- what speaks ---- */

static bool
result_speaks(const IdemScope *scope, const IdemRow *row, TimestampTz now)
{
	return row->tuple != NULL &&
		scope_speaks(scope, DatumGetTimestampTz(ROW_VALUE(row, Anum_result_completed_at)), now);
}

/*
 * A key that may be executed again, released or with its lease over, is
 * forgotten after the scope's retention: whether a sweep has called it free
 * already makes no difference.
 */
static bool
inflight_speaks(const IdemScope *scope, const IdemRow *row, TimestampTz now)
{
	return row->tuple != NULL &&
		!scope_abandoned(scope, ROW_STATE(row, Anum_inflight_state),
						 DatumGetInt32(ROW_VALUE(row, Anum_inflight_attempt)),
						 DatumGetTimestampTz(ROW_VALUE(row, Anum_inflight_created_at)),
						 DatumGetTimestampTz(ROW_VALUE(row, Anum_inflight_lease_until)), now);
}

static bool
is_busy(const IdemRow *row)
{
	return row->tuple != NULL && TransactionIdIsValid(row->busy);
}

/* A row of a settled key that is true whatever becomes of who is at it. */
static bool
speaks_for_good(const IdemScope *scope, const IdemRow *row, TimestampTz now)
{
	return row->tuple != NULL && (!is_busy(row) || row->committed) && result_speaks(scope, row, now);
}

/* ---- the table ---- */

static bool
other_request(const IdemQuestion *question, const IdemDigest *fingerprint)
{
	return question->has_fingerprint && fingerprint != NULL &&
		memcmp(question->fingerprint.data, fingerprint->data, IDEM_DIGEST_LEN) != 0;
}

static bool
same_claimant(const IdemQuestion *question, const IdemRow *row)
{
	text	   *holder;

	if (question->claimant == NULL || question->lease == 0 || ROW_IS_NULL(row, Anum_inflight_claimant))
		return false;
	holder = DatumGetTextPP(ROW_VALUE(row, Anum_inflight_claimant));
	return VARSIZE_ANY_EXHDR(holder) == VARSIZE_ANY_EXHDR(question->claimant) &&
		memcmp(VARDATA_ANY(holder), VARDATA_ANY(question->claimant), VARSIZE_ANY_EXHDR(holder)) == 0;
}

/*
 * The state that a row in idem.inflight comes to by the clock: what a sweep
 * would write, whether one has been there or not. What this transaction wrote
 * is its own still.
 */
static char
inflight_state(const IdemQuestion *question, const IdemRow *row, TimestampTz now)
{
	char		state = ROW_STATE(row, Anum_inflight_state);

	if (state != IDEM_PROCESSING || row->own ||
		now < DatumGetTimestampTz(ROW_VALUE(row, Anum_inflight_lease_until)))
		return state;
	return scope_in_doubt(question->scope, DatumGetInt32(ROW_VALUE(row, Anum_inflight_attempt)),
						  DatumGetTimestampTz(ROW_VALUE(row, Anum_inflight_created_at)), now) ?
		IDEM_IN_DOUBT : IDEM_FREE;
}

static IdemLine
inflight_line(const IdemQuestion *question, const IdemRow *row, char state)
{
	bool		other = other_request(question, ledger_fingerprint(row));

	/* a lease of this very transaction: its first answer, given again */
	if (row->own && state == IDEM_PROCESSING)
		return other ? IDEM_LINE_OWN_OTHER : IDEM_LINE_OWN;
	if (other)
		return IDEM_LINE_MISMATCH;
	if (state == IDEM_PROCESSING)
		return same_claimant(question, row) ? IDEM_LINE_SAME_CLAIMANT : IDEM_LINE_LEASE_RUNNING;
	return state == IDEM_IN_DOUBT ? IDEM_LINE_IN_DOUBT : IDEM_LINE_TAKEOVER;
}

static IdemLine
settled_line(const IdemQuestion *question, const IdemRow *row, TimestampTz now)
{
	if (other_request(question, ledger_fingerprint(row)))
		return IDEM_LINE_MISMATCH;
	if (scope_within_retention(question->scope,
							   DatumGetTimestampTz(ROW_VALUE(row, Anum_result_completed_at)), now))
		return IDEM_LINE_REPLAY;
	return question->scope->archive == 'f' ? IDEM_LINE_ARCHIVED : IDEM_LINE_TOMBSTONE;
}

/* The decision table: the first line that fits, and the row that spoke. */
static IdemLine
decide_line(const IdemQuestion *question, IdemDecision *d)
{
	d->row = NULL;
	if (d->claim != NULL && !d->claim->settled)
		return other_request(question, d->claim->has_fingerprint ? &d->claim->fingerprint : NULL) ?
			IDEM_LINE_OWN_OTHER : IDEM_LINE_OWN;
	if (speaks_for_good(question->scope, &d->result, d->now))
		d->row = &d->result;
	else if (speaks_for_good(question->scope, &d->archive, d->now))
		d->row = &d->archive;
	if (d->row != NULL)
		return settled_line(question, d->row, d->now);

	if (is_busy(&d->result))
		d->row = &d->result;
	else if (is_busy(&d->inflight))
		d->row = &d->inflight;
	else if (is_busy(&d->archive))
		d->row = &d->archive;
	if (d->row != NULL)
		return IDEM_LINE_BUSY;
	if (inflight_speaks(question->scope, &d->inflight, d->now))
	{
		d->row = &d->inflight;
		d->state = inflight_state(question, d->row, d->now);
		return inflight_line(question, d->row, d->state);
	}
	return IDEM_LINE_NEW;
}

static IdemOutcome
line_outcome(IdemLine line)
{
	switch (line)
	{
		case IDEM_LINE_BUSY:
		case IDEM_LINE_OWN:
		case IDEM_LINE_LEASE_RUNNING:
			return IDEM_IN_PROGRESS;
		case IDEM_LINE_OWN_OTHER:
		case IDEM_LINE_MISMATCH:
			return IDEM_MISMATCH;
		case IDEM_LINE_IN_DOUBT:
			return IDEM_UNKNOWN;
		case IDEM_LINE_REPLAY:
		case IDEM_LINE_ARCHIVED:
			return IDEM_REPLAYED;
		case IDEM_LINE_TOMBSTONE:
			return IDEM_EXPIRED;
		case IDEM_LINE_SAME_CLAIMANT:
		case IDEM_LINE_TAKEOVER:
		case IDEM_LINE_NEW:
			return IDEM_CLAIMED;
	}
	pg_unreachable();
}

/*
 * Probes what has to be probed, and decides by the clock as it is now. Under
 * the key lock the decision is final; without it only one that is not
 * IDEM_CLAIMED may be used.
 */
void
decide(const IdemQuestion *question, IdemDecision *d)
{
	const IdemScope *scope = question->scope;

	d->now = GetCurrentTimestamp();
	d->claim = held_find(&question->key);
	d->result.tuple = d->inflight.tuple = d->archive.tuple = NULL;
	if (d->claim != NULL && !d->claim->settled)
	{
		/* a takeover of this transaction: what it goes on from */
		if (d->claim->attempt > 1)
			ledger_probe(IDEM_INFLIGHT, &question->key, &d->inflight);
	}
	else
	{
		ledger_probe(IDEM_RESULT, &question->key, &d->result);
		if (!is_busy(&d->result) && !result_speaks(scope, &d->result, d->now))
		{
			ledger_probe(IDEM_INFLIGHT, &question->key, &d->inflight);
			if (scope->archive == 'f' && !is_busy(&d->inflight) &&
				!inflight_speaks(scope, &d->inflight, d->now))
				ledger_probe(IDEM_ARCHIVE, &question->key, &d->archive);
		}
	}
	d->line = decide_line(question, d);
	d->outcome = line_outcome(d->line);
}

/*
 * What a decision comes to without the lock, which somebody else has: an
 * absence means nothing then.
 */
void
decide_without_lock(IdemDecision *d)
{
	if (d->outcome != IDEM_CLAIMED)
		return;
	d->outcome = IDEM_IN_PROGRESS;
	d->line = IDEM_LINE_BUSY;
	d->row = NULL;
}

/*
 * Where the transaction keeps one snapshot, an answer must not come from
 * another transaction's row that this snapshot does not see: 40001, as INSERT
 * ... ON CONFLICT raises. "In progress" is no such answer.
 */
void
decide_check_visible(const IdemDecision *d)
{
	if (d->row != NULL && d->outcome != IDEM_IN_PROGRESS && !d->row->visible)
		ereport(ERROR,
				(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
				 errmsg("could not serialize access due to concurrent update"),
				 errhint("The key was claimed or settled after this transaction's snapshot was taken. The transaction might succeed if retried.")));
}

/* Frees what probes found, for a caller that will ask again. */
void
decide_free(IdemDecision *d)
{
	if (d->result.tuple)
		heap_freetuple(d->result.tuple);
	if (d->inflight.tuple)
		heap_freetuple(d->inflight.tuple);
	if (d->archive.tuple)
		heap_freetuple(d->archive.tuple);
}

/* ---- taking what was decided ---- */

/* Who holds a lease, for people: user and application. */
static Datum
holder_name(void)
{
	const char *user = GetUserNameFromId(GetUserId(), false);

	if (application_name == NULL || application_name[0] == '\0')
		return CStringGetTextDatum(user);
	return CStringGetTextDatum(psprintf("%s (%s)", user, application_name));
}

static void
set_column(Datum *values, bool *nulls, int column, Datum value)
{
	values[column - 1] = value;
	nulls[column - 1] = false;
}

/* Writes the claim of a lease: a row of its own, or the last holder's taken over. */
static void
take_lease(const IdemQuestion *question, IdemDecision *d)
{
	Datum		v[IDEM_MAX_COLUMNS];
	bool		n[IDEM_MAX_COLUMNS];
	bool		takeover = d->line == IDEM_LINE_TAKEOVER || d->line == IDEM_LINE_SAME_CLAIMANT;

	if (takeover)
	{
		memcpy(v, d->inflight.values, sizeof(v));
		memcpy(n, d->inflight.nulls, sizeof(n));
	}
	else
	{
		memset(n, true, sizeof(n));
		set_column(v, n, Anum_inflight_form, Int16GetDatum(IDEM_FORM));
		set_column(v, n, Anum_inflight_scope_id, Int32GetDatum(question->key.scope_id));
		set_column(v, n, Anum_inflight_key, PointerGetDatum(question->key.value));
		set_column(v, n, Anum_inflight_created_at, TimestampTzGetDatum(d->created_at));
	}
	set_column(v, n, Anum_inflight_token, Int64GetDatum(d->token));
	set_column(v, n, Anum_inflight_attempt, Int32GetDatum(d->attempt));
	set_column(v, n, Anum_inflight_lease_until,
			   TimestampTzGetDatum(scope_deadline(d->now, question->lease)));
	set_column(v, n, Anum_inflight_updated_at, TimestampTzGetDatum(d->now));
	set_column(v, n, Anum_inflight_state, CharGetDatum(IDEM_PROCESSING));
	set_column(v, n, Anum_inflight_owner, holder_name());
	if (n[Anum_inflight_fingerprint - 1] && question->has_fingerprint)
		set_column(v, n, Anum_inflight_fingerprint, IdemDigestPGetDatum(&question->fingerprint));
	if (n[Anum_inflight_request - 1] && question->request && question->scope->keep_request != 'n')
		set_column(v, n, Anum_inflight_request, question->request);
	n[Anum_inflight_claimant - 1] = true;
	if (question->claimant)
		set_column(v, n, Anum_inflight_claimant, PointerGetDatum(question->claimant));

	if (d->result.tuple)
		ledger_delete(&d->result);
	if (d->archive.tuple)
		ledger_delete(&d->archive);
	if (d->inflight.tuple)
		ledger_update(&d->inflight, v, n);
	else
		ledger_insert(IDEM_INFLIGHT, v, n);
	CommandCounterIncrement();
	held_require_durable_commit();
}

/* Enters a transaction-scoped claim; rows stay as they are until it is settled. */
static void
take_for_transaction(const IdemQuestion *question, IdemDecision *d)
{
	IdemClaim  *claim = held_add(&question->key);
	const IdemDigest *fingerprint = question->has_fingerprint ? &question->fingerprint :
		d->line == IDEM_LINE_TAKEOVER ? ledger_fingerprint(&d->inflight) : NULL;

	claim->token = d->token;
	claim->attempt = d->attempt;
	claim->created_at = d->created_at;
	claim->has_fingerprint = fingerprint != NULL;
	if (fingerprint)
		claim->fingerprint = *fingerprint;
	claim->has_result = d->result.tuple != NULL;
	claim->has_inflight = d->inflight.tuple != NULL;
	claim->has_archive = d->archive.tuple != NULL;
	if (question->scope->keep_request == 'a')
	{
		Datum		request = question->request;

		if (d->line == IDEM_LINE_TAKEOVER && !ROW_IS_NULL(&d->inflight, Anum_inflight_request))
			request = ROW_VALUE(&d->inflight, Anum_inflight_request);
		held_keep_request(claim, request);
	}
}

static int64
last_token(const IdemRow *row, int column)
{
	return row->tuple ? DatumGetInt64(ROW_VALUE(row, column)) : 0;
}

/*
 * Fills in token, attempt and first claim of what was decided to be claimed.
 * A token is the clock in microseconds since 2000, or one more than the last
 * one of the key if that is greater: it only grows for a key, whatever happens
 * to the clock.
 */
void
decide_number(IdemDecision *d)
{
	int64		last = Max(Max(last_token(&d->result, Anum_result_token),
							   last_token(&d->archive, Anum_result_token)),
						   last_token(&d->inflight, Anum_inflight_token));

	if (d->line == IDEM_LINE_SAME_CLAIMANT)
		d->token = last;
	else
		d->token = Max(last + 1, d->now);
	if (d->line == IDEM_LINE_NEW)
	{
		d->attempt = 1;
		d->created_at = d->now;
		return;
	}
	d->attempt = DatumGetInt32(ROW_VALUE(&d->inflight, Anum_inflight_attempt)) +
		(d->line == IDEM_LINE_TAKEOVER ? 1 : 0);
	d->created_at = DatumGetTimestampTz(ROW_VALUE(&d->inflight, Anum_inflight_created_at));
}

/*
 * Takes what decide() found to be IDEM_CLAIMED, under the key lock. The caller
 * gives the lock back if the claim has a lease.
 */
void
decide_take(const IdemQuestion *question, IdemDecision *d)
{
	decide_number(d);
	if (question->lease > 0)
		take_lease(question, d);
	else
		take_for_transaction(question, d);
}

/* ---- the answer ---- */

static const char *
outcome_name(IdemOutcome outcome)
{
	static const char *const names[] = {
		[IDEM_CLAIMED] = "claimed",
		[IDEM_REPLAYED] = "replayed",
		[IDEM_IN_PROGRESS] = "in_progress",
		[IDEM_MISMATCH] = "mismatch",
		[IDEM_EXPIRED] = "expired",
		[IDEM_UNKNOWN] = "unknown",
		[IDEM_EXECUTED] = "executed",
	};

	return names[outcome];
}

/* attributes of idem_answer */
enum
{
	ANSWER_OUTCOME, ANSWER_TOKEN, ANSWER_ATTEMPT, ANSWER_STATE, ANSWER_STATUS_CODE,
	ANSWER_HEADERS, ANSWER_RESPONSE, ANSWER_BODY, ANSWER_REQUEST, ANSWER_RECOVERY_POINT,
	ANSWER_CHECKPOINT, ANSWER_CREATED_AT, ANSWER_COMPLETED_AT, ANSWER_RETRY_AFTER
};

static void
answer(Datum *values, bool *nulls, int attribute, Datum value)
{
	values[attribute] = value;
	nulls[attribute] = false;
}

static void
answer_column(Datum *values, bool *nulls, int attribute, const IdemRow *row, int column)
{
	values[attribute] = ROW_VALUE(row, column);
	nulls[attribute] = ROW_IS_NULL(row, column);
}

static void
answer_state(Datum *values, bool *nulls, char state)
{
	answer(values, nulls, ANSWER_STATE, CStringGetTextDatum(ledger_state_name(state)));
}

static void
answer_settled(const IdemDecision *d, Datum *v, bool *n)
{
	answer_state(v, n, ROW_STATE(d->row, Anum_result_state));
	answer_column(v, n, ANSWER_ATTEMPT, d->row, Anum_result_attempt);
	answer_column(v, n, ANSWER_CREATED_AT, d->row, Anum_result_created_at);
	answer_column(v, n, ANSWER_COMPLETED_AT, d->row, Anum_result_completed_at);
	if (d->outcome != IDEM_REPLAYED && d->outcome != IDEM_EXECUTED)
		return;
	answer_column(v, n, ANSWER_STATUS_CODE, d->row, Anum_result_status_code);
	answer_column(v, n, ANSWER_HEADERS, d->row, Anum_result_headers);
	answer_column(v, n, ANSWER_RESPONSE, d->row, Anum_result_response);
	answer_column(v, n, ANSWER_BODY, d->row, Anum_result_body);
}

static void
answer_inflight(const IdemDecision *d, Datum *v, bool *n)
{
	answer_state(v, n, d->state);
	answer_column(v, n, ANSWER_ATTEMPT, d->row, Anum_inflight_attempt);
	answer_column(v, n, ANSWER_CREATED_AT, d->row, Anum_inflight_created_at);
}

/* What a holder that took a key over goes on from. */
static void
answer_takeover(const IdemRow *row, Datum *v, bool *n)
{
	answer_column(v, n, ANSWER_REQUEST, row, Anum_inflight_request);
	answer_column(v, n, ANSWER_RECOVERY_POINT, row, Anum_inflight_recovery_point);
	answer_column(v, n, ANSWER_CHECKPOINT, row, Anum_inflight_checkpoint);
}

static void
answer_claimed(const IdemDecision *d, Datum *v, bool *n)
{
	answer(v, n, ANSWER_TOKEN, Int64GetDatum(d->token));
	answer(v, n, ANSWER_ATTEMPT, Int32GetDatum(d->attempt));
	answer(v, n, ANSWER_CREATED_AT, TimestampTzGetDatum(d->created_at));
	answer_state(v, n, IDEM_PROCESSING);
	if (d->line != IDEM_LINE_NEW)
		answer_takeover(d->row, v, n);
}

/*
 * In progress: when to ask again, and to the holder itself its token and what
 * it took over, since (idem_claim(...)).* asks once for each column.
 */
static void
answer_in_progress(const IdemDecision *d, Datum *v, bool *n)
{
	Interval   *retry = palloc0(sizeof(Interval));

	retry->time = USECS_PER_SEC;
	if (d->line == IDEM_LINE_OWN && d->claim)
	{
		answer(v, n, ANSWER_TOKEN, Int64GetDatum(d->claim->token));
		answer(v, n, ANSWER_ATTEMPT, Int32GetDatum(d->claim->attempt));
		answer(v, n, ANSWER_CREATED_AT, TimestampTzGetDatum(d->claim->created_at));
		answer_state(v, n, IDEM_PROCESSING);
		if (d->inflight.tuple)
			answer_takeover(&d->inflight, v, n);
	}
	else if (d->line == IDEM_LINE_OWN)
	{
		answer_column(v, n, ANSWER_TOKEN, d->row, Anum_inflight_token);
		if (DatumGetInt32(ROW_VALUE(d->row, Anum_inflight_attempt)) > 1)
			answer_takeover(d->row, v, n);
	}
	if (d->row && d->line != IDEM_LINE_BUSY)
	{
		TimestampTz until = DatumGetTimestampTz(ROW_VALUE(d->row, Anum_inflight_lease_until));

		answer_inflight(d, v, n);
		retry->time = until == DT_NOEND ? USECS_PER_SEC : Max(until - d->now, 0);
	}
	answer(v, n, ANSWER_RETRY_AFTER, IntervalPGetDatum(retry));
}

/*
 * Composes the answer: IDEM_ANSWER_COLUMNS values, which point into what was
 * found. After decide_take() if something was claimed.
 */
void
decide_answer(const IdemDecision *d, Datum *v, bool *n)
{
	memset(n, true, IDEM_ANSWER_COLUMNS * sizeof(bool));
	answer(v, n, ANSWER_OUTCOME, CStringGetTextDatum(outcome_name(d->outcome)));
	switch (d->outcome)
	{
		case IDEM_CLAIMED:
			answer_claimed(d, v, n);
			break;
		case IDEM_IN_PROGRESS:
			answer_in_progress(d, v, n);
			break;
		case IDEM_UNKNOWN:
			answer_inflight(d, v, n);
			break;
		case IDEM_REPLAYED:
		case IDEM_EXPIRED:
			answer_settled(d, v, n);
			break;
		case IDEM_EXECUTED:
			if (d->row)
				answer_settled(d, v, n);
			else
				answer_state(v, n, IDEM_FREE);	/* the handler has released it */
			break;
		case IDEM_MISMATCH:
			if (d->row && d->row->table == IDEM_INFLIGHT)
				answer_inflight(d, v, n);
			else if (d->row)
				answer_settled(d, v, n);
			break;
	}
}

/*
 * The answer about a key that a claim would execute, to somebody who only
 * asks: no outcome, and the state and progress of what is there.
 */
void
decide_answer_free(const IdemDecision *d, Datum *v, bool *n)
{
	memset(n, true, IDEM_ANSWER_COLUMNS * sizeof(bool));
	if (d->row != NULL)
		answer_inflight(d, v, n);
}

/*
 * Makes the composite that a function returns as idem_answer. Attributes that
 * a later version of the type has are NULL. The type is looked up once for
 * each place in a query that calls the function.
 */
Datum
decide_answer_datum(FunctionCallInfo fcinfo, const Datum *values, const bool *nulls)
{
	TupleDesc	desc = fcinfo->flinfo->fn_extra;
	Datum		v[IDEM_ANSWER_COLUMNS_MAX];
	bool		n[IDEM_ANSWER_COLUMNS_MAX];

	if (desc == NULL)
	{
		MemoryContext caller = MemoryContextSwitchTo(fcinfo->flinfo->fn_mcxt);

		desc = lookup_rowtype_tupdesc_copy(get_func_rettype(fcinfo->flinfo->fn_oid), -1);
		MemoryContextSwitchTo(caller);
		if (desc->natts < IDEM_ANSWER_COLUMNS || desc->natts > IDEM_ANSWER_COLUMNS_MAX)
			elog(ERROR, "type idem_answer has %d attributes, at least %d are needed",
				 desc->natts, IDEM_ANSWER_COLUMNS);
		fcinfo->flinfo->fn_extra = desc;
	}
	memcpy(v, values, IDEM_ANSWER_COLUMNS * sizeof(Datum));
	memcpy(n, nulls, IDEM_ANSWER_COLUMNS * sizeof(bool));
	for (int i = IDEM_ANSWER_COLUMNS; i < desc->natts; i++)
		n[i] = true;
	return HeapTupleGetDatum(heap_form_tuple(desc, v, n));
}

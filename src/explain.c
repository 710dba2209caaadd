/*-------------------------------------------------------------------------
 *
 * explain.c
 *		idem_explain(): what a claim would answer, and why, in words.
 *
 * The decision is made by the same function as a claim's (decide.c), without
 * the key lock: explaining must neither wait nor make others wait. Who has the
 * lock, or is writing the row, is read from pg_locks instead. So the words are
 * true of the moment, and a claim right after may answer differently.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/subtrans.h"
#include "access/xlog.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "idem.h"

PG_FUNCTION_INFO_V1(idem_explain);
PG_FUNCTION_INFO_V1(idem_explain_json);
PG_FUNCTION_INFO_V1(idem_explain_jsonb);

/* Who has the key lock ($1, $2: its tag), or has written the row ($3: its xid). */
static const char holder_query[] =
"SELECT pg_catalog.concat_ws(', ',"
"  CASE WHEN l.pid IS NULL THEN 'prepared transaction \"' OPERATOR(pg_catalog.||) p.gid OPERATOR(pg_catalog.||) '\"'"
"       ELSE 'process ' OPERATOR(pg_catalog.||) l.pid::pg_catalog.text END,"
"  'application \"' OPERATOR(pg_catalog.||) NULLIF(a.application_name, '') OPERATOR(pg_catalog.||) '\"',"
"  'since ' OPERATOR(pg_catalog.||) pg_catalog.date_trunc('second', COALESCE(a.xact_start, p.prepared))::pg_catalog.text)"
" FROM pg_catalog.pg_locks AS l"
" LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid OPERATOR(pg_catalog.=) l.pid"
" LEFT JOIN (pg_catalog.pg_prepared_xacts AS p"
"  JOIN pg_catalog.pg_locks AS x ON x.locktype OPERATOR(pg_catalog.=) 'transactionid'"
"   AND x.transactionid OPERATOR(pg_catalog.=) p.transaction AND x.pid IS NULL)"
"  ON l.pid IS NULL AND x.virtualtransaction OPERATOR(pg_catalog.=) l.virtualtransaction"
" WHERE l.granted AND (l.pid IS NULL OR l.pid OPERATOR(pg_catalog.<>) pg_catalog.pg_backend_pid())"
"  AND ((l.locktype OPERATOR(pg_catalog.=) 'advisory' AND l.objsubid OPERATOR(pg_catalog.=) $4"
"        AND l.database OPERATOR(pg_catalog.=) $5"
"        AND l.classid OPERATOR(pg_catalog.=) $1 AND l.objid OPERATOR(pg_catalog.=) $2)"
"   OR (l.locktype OPERATOR(pg_catalog.=) 'transactionid' AND l.transactionid OPERATOR(pg_catalog.=) $3"
"       AND l.mode OPERATOR(pg_catalog.=) 'ExclusiveLock'))"
" LIMIT 1";

/* The holder in words, or NULL if nobody has lock or row any more. */
static char *
find_holder(const IdemKey *key, TransactionId xid)
{
	Oid			types[] = {OIDOID, OIDOID, XIDOID, INT2OID, OIDOID};
	Datum		values[] = {
		ObjectIdGetDatum((Oid) (key->hash >> 32)), ObjectIdGetDatum((Oid) key->hash),
		TransactionIdGetDatum(xid), Int16GetDatum(IDEM_KEY_LOCK_CLASS), ObjectIdGetDatum(MyDatabaseId)
	};
	MemoryContext caller = CurrentMemoryContext;
	char	   *result = NULL;

	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	if (SPI_execute_with_args(holder_query, lengthof(types), types, values,
							  TransactionIdIsValid(xid) ? NULL : "  n  ", true, 1) != SPI_OK_SELECT)
		elog(ERROR, "could not read pg_locks");
	if (SPI_processed > 0)
	{
		char	   *words = SPI_getvalue(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, 1);

		if (words)
			result = MemoryContextStrdup(caller, words);
	}
	SPI_finish();
	return result;
}

static const char *
time_words(Datum time)
{
	return DatumGetCString(DirectFunctionCall1(timestamptz_out, time));
}

static const char *
until_words(TimestampTz end)
{
	return end == DT_NOEND ? "for ever" : psprintf("until %s", time_words(TimestampTzGetDatum(end)));
}

/* Why nobody may take the key over; the policy's reasons in the order of scope_in_doubt(). */
static const char *
doubt_words(const IdemQuestion *question, const IdemRow *row)
{
	const IdemScope *scope = question->scope;

	if (ROW_STATE(row, Anum_inflight_state) == IDEM_IN_DOUBT)
		return "it was put in doubt";
	if (scope->hold)
		return "its lease is over, and on_expiry is hold";
	if (scope->max_attempts > 0 && DatumGetInt32(ROW_VALUE(row, Anum_inflight_attempt)) >= scope->max_attempts)
		return "its lease is over, and max_attempts are spent";
	return "its lease is over, and so is retry_within";
}

static void
explain_own(StringInfo words, const IdemDecision *d)
{
	if (d->row == NULL)
		appendStringInfoString(words, "in_progress: this very transaction holds the claim. Settle it before it ends.");
	else
		appendStringInfo(words, "in_progress: this very transaction holds the claim, under a lease until %s. "
						 "Commit before slow work outside, then settle it with its token.",
						 time_words(ROW_VALUE(d->row, Anum_inflight_lease_until)));
}

static void
explain_mismatch(StringInfo words, const IdemRow *row)
{
	bool		inflight = row->table == IDEM_INFLIGHT;

	appendStringInfo(words, "mismatch: the key was first used at %s for another request (%s); the fingerprints differ. "
					 "Use a new key for a new request, or send the first request again unchanged.",
					 time_words(ROW_VALUE(row, inflight ? Anum_inflight_created_at : Anum_result_created_at)),
					 ledger_state_name(ROW_STATE(row, inflight ? Anum_inflight_state : Anum_result_state)));
}

static void
explain_busy(StringInfo words, const char *holder)
{
	appendStringInfo(words, "in_progress: another transaction is at the key (%s). "
					 "Ask again in a second, or claim with wait. "
					 "If it never ends, end that transaction: the key is free then.",
					 holder ? holder : RecoveryInProgress() ? "the primary knows which" : "it has just ended");
}

static void
explain_inflight(StringInfo words, const IdemQuestion *question, const IdemDecision *d)
{
	const IdemRow *row = d->row;
	char	   *owner = ROW_IS_NULL(row, Anum_inflight_owner) ? "unknown" :
		TextDatumGetCString(ROW_VALUE(row, Anum_inflight_owner));
	int			attempt = DatumGetInt32(ROW_VALUE(row, Anum_inflight_attempt));
	const char *until = time_words(ROW_VALUE(row, Anum_inflight_lease_until));
	const char *since = time_words(ROW_VALUE(row, Anum_inflight_updated_at));

	switch (d->line)
	{
		case IDEM_LINE_LEASE_RUNNING:
			appendStringInfo(words, "in_progress: attempt %d holds a lease until %s (%s, since %s). "
							 "Ask again then; its holder settles it with its token.",
							 attempt, until, owner, since);
			break;
		case IDEM_LINE_IN_DOUBT:
			appendStringInfo(words, "unknown: attempt %d is in doubt (%s, since %s): %s. "
							 "Find out what became of it and call idem_resolve().",
							 attempt, owner, since, doubt_words(question, row));
			break;
		case IDEM_LINE_TAKEOVER:
			appendStringInfo(words, "claimed: %s (attempt %d, %s); a claim would execute as attempt %d.",
							 ROW_STATE(row, Anum_inflight_state) == IDEM_FREE ?
							 psprintf("the key is free again since %s", since) :
							 psprintf("the lease is over since %s", until),
							 attempt, owner, attempt + 1);
			break;
		default:
			break;
	}
}

static void
explain_settled(StringInfo words, const IdemQuestion *question, const IdemDecision *d)
{
	const char *state = ledger_state_name(ROW_STATE(d->row, Anum_result_state));
	TimestampTz completed = DatumGetTimestampTz(ROW_VALUE(d->row, Anum_result_completed_at));
	const char *when = time_words(ROW_VALUE(d->row, Anum_result_completed_at));
	TimestampTz end = scope_deadline(completed, question->scope->retention);

	switch (d->line)
	{
		case IDEM_LINE_REPLAY:
			appendStringInfo(words, "replayed: it %s at %s, and is replayed %s. Use the stored response.",
							 state, when, until_words(end));
			break;
		case IDEM_LINE_ARCHIVED:
			appendStringInfo(words, "replayed: it %s at %s, and is past its retention since %s, but archived. "
							 "Use the stored response.",
							 state, when, time_words(TimestampTzGetDatum(end)));
			break;
		case IDEM_LINE_TOMBSTONE:
			appendStringInfo(words, "expired: it %s at %s; its response is past its retention since %s. "
							 "Do not execute it again; a new operation needs a new key.",
							 state, when, time_words(TimestampTzGetDatum(end)));
			break;
		default:
			break;
	}
}

static void
explain_line(StringInfo words, const IdemQuestion *question, const IdemDecision *d)
{
	char	   *holder;

	switch (d->line)
	{
		case IDEM_LINE_BUSY:
			explain_busy(words, find_holder(&question->key, SubTransGetTopmostTransaction(d->row->busy)));
			break;
		case IDEM_LINE_OWN:
			explain_own(words, d);
			break;
		case IDEM_LINE_OWN_OTHER:
			appendStringInfoString(words, "mismatch: this very transaction holds the claim, for another request. Use another key.");
			break;
		case IDEM_LINE_MISMATCH:
			explain_mismatch(words, d->row);
			break;
		case IDEM_LINE_REPLAY:
		case IDEM_LINE_ARCHIVED:
		case IDEM_LINE_TOMBSTONE:
			explain_settled(words, question, d);
			break;
		case IDEM_LINE_LEASE_RUNNING:
		case IDEM_LINE_IN_DOUBT:
			explain_inflight(words, question, d);
			break;
		case IDEM_LINE_SAME_CLAIMANT:	/* nobody says who he is here */
		case IDEM_LINE_TAKEOVER:
		case IDEM_LINE_NEW:
			holder = find_holder(&question->key, InvalidTransactionId);
			if (holder)
				explain_busy(words, holder);
			else if (d->line == IDEM_LINE_TAKEOVER)
				explain_inflight(words, question, d);
			else
				appendStringInfoString(words, "claimed: nothing speaks for the key; a claim would execute as attempt 1.");
			break;
	}
}

static Datum
explain(FunctionCallInfo fcinfo, IdemDocumentType type)
{
	IdemQuestion question = {0};
	IdemDecision decision;
	StringInfoData words;

	question.scope = scope_of_key(fcinfo, &question.key);
	if (!has_privs_of_role(GetUserId(), question.scope->operators))
		scope_check_owner(question.scope);
	if (!PG_ARGISNULL(2))
	{
		fingerprint_document(PointerGetDatum(PG_DETOAST_DATUM_PACKED(PG_GETARG_DATUM(2))), type,
							 question.scope->pointers, &question.fingerprint);
		question.has_fingerprint = true;
	}
	decide(&question, &decision);
	initStringInfo(&words);
	explain_line(&words, &question, &decision);
	if (RecoveryInProgress())
		appendStringInfoString(&words, " (As far as this standby knows; only the primary decides.)");
	PG_RETURN_TEXT_P(cstring_to_text_with_len(words.data, words.len));
}

/*
 * idem_explain(scope, key, request) → text
 *
 * A dry run of idem_claim() in words: what it would answer, why, who holds the
 * key and until when, and what to do next. Never writes, never waits, also
 * works on a standby. Raises what idem_claim() raises about its arguments.
 */
Datum
idem_explain(PG_FUNCTION_ARGS)
{
	return explain(fcinfo, IDEM_DOCUMENT_TEXT);
}

Datum
idem_explain_json(PG_FUNCTION_ARGS)
{
	return explain(fcinfo, IDEM_DOCUMENT_JSON);
}

Datum
idem_explain_jsonb(PG_FUNCTION_ARGS)
{
	return explain(fcinfo, IDEM_DOCUMENT_JSONB);
}

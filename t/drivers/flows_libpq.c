/*
 * The main flows of idem through libpq; prints TAP.
 *
 *		flows_libpq KEY-PREFIX direct|pooled|unprepared
 *
 * "pooled": through a transaction pooler with two connections to the server;
 * "unprepared": through one that does not know prepared statements. Where the
 * server is, the environment says (PGHOST, PGPORT, PGUSER, PGDATABASE).
 */
#include <arpa/inet.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <libpq-fe.h>

#define REQUEST		"{\"amount\": 100, \"currency\": \"EUR\"}"
/* a response that no parser of JSON gives back as it was */
#define RESPONSE	"{\"amount\": 12.00,   \"id\":9007199254740993 }"

#define TEXTOID		25
#define INT8OID		20
#define BYTEAOID	17
#define JSONOID		114
#define JSONBOID	3802
#define VARCHAROID	1043

/* [README */
/* What is in "outcome" may be trusted only if it returns true: COMMIT answers ROLLBACK if anything failed. */
static bool
pay(PGconn *conn, const char *key, const char *request, char outcome[12])
{
	const char *args[] = {key, request, "{\"amount\": 12.00,   \"id\":9007199254740993 }"};
	const char *done[] = {key, args[2]};
	PGresult   *answer;

	PQclear(PQexec(conn, "BEGIN"));
	answer = PQexecParams(conn, "SELECT outcome, response::text FROM idem_claim('payments', $1, $2)", 2, NULL, args, NULL, NULL, 0);
	snprintf(outcome, 12, "%s", PQntuples(answer) == 1 ? PQgetvalue(answer, 0, 0) : "error");
	PQclear(answer);
	if (strcmp(outcome, "claimed") == 0)
	{
		PQclear(PQexecParams(conn, "INSERT INTO payment SELECT $1, ($2::json->>'amount')::int", 2, NULL, args, NULL, NULL, 0));
		PQclear(PQexecParams(conn, "SELECT idem_complete('payments', $1, $2)", 2, NULL, done, NULL, NULL, 0));
	}
	answer = PQexec(conn, "COMMIT");
	bool		committed = strcmp(PQcmdStatus(answer), "COMMIT") == 0;
	PQclear(answer);
	return committed;
}
/* README] */

static bool pooled;
static bool prepared;
static const char *prefix;
static int	tests;
static int	problems;
static char got[1000];			/* of the last statement: its values, or its SQLSTATE */

static void
ok(bool passed, const char *name)
{
	printf("%s %d - %s\n", passed ? "ok" : "not ok", ++tests, name);
	problems += !passed;
}

static void
same(const char *value, const char *expected, const char *name)
{
	bool		passed = strcmp(value, expected) == 0;

	ok(passed, name);
	if (!passed)
		printf("# got %s, expected %s\n", value, expected);
}

/* A key of this run; good for the next three calls. */
static const char *
key_of(const char *name)
{
	static char keys[4][100];
	static int	next;

	next = (next + 1) % 4;
	snprintf(keys[next], sizeof(keys[next]), "%s %s", prefix, name);
	return keys[next];
}

static PGconn *
connect_server(void)
{
	PGconn	   *conn = PQconnectdb("");

	if (PQstatus(conn) != CONNECTION_OK)
	{
		printf("# %s", PQerrorMessage(conn));
		exit(1);
	}
	return conn;
}

/* Keeps of a result what "got" is for, values joined by bars. */
static const char *
keep(PGresult *result)
{
	const char *sqlstate = PQresultErrorField(result, PG_DIAG_SQLSTATE);
	size_t		length = 0;

	snprintf(got, sizeof(got), "%s", sqlstate ? sqlstate : PQcmdStatus(result));
	if (PQresultStatus(result) == PGRES_TUPLES_OK)
	{
		got[0] = '\0';
		for (int row = 0; row < PQntuples(result); row++)
			for (int column = 0; column < PQnfields(result); column++)
				length += snprintf(got + length, sizeof(got) - length, "%s%s", length > 0 ? "|" : "",
								   PQgetisnull(result, row, column) ? "null" : PQgetvalue(result, row, column));
	}
	PQclear(result);
	return got;
}

/* A statement by the simple protocol. */
static const char *
run(PGconn *conn, const char *query)
{
	return keep(PQexec(conn, query));
}

/* A statement by the extended protocol with n parameters, all of them text without a type. */
static const char *
ask(PGconn *conn, const char *query, int n,...)
{
	const char *values[8];
	va_list		list;

	va_start(list, n);
	for (int i = 0; i < n; i++)
		values[i] = va_arg(list, const char *);
	va_end(list);
	return keep(PQexecParams(conn, query, n, NULL, values, NULL, NULL, 0));
}

#define CLAIM		"SELECT outcome FROM idem_claim('payments', $1, $2)"
#define ANSWER		"SELECT outcome, response::text FROM idem_claim('payments', $1, $2)"
#define COMPLETE	"SELECT idem_complete('payments', $1, $2, $3)"
#define COUNT		"SELECT count(*) FROM payment WHERE key = $1"

static void
test_payment(PGconn *a, PGconn *b)
{
	const char *key = key_of("pay");
	char		outcome[12];

	ok(pay(a, key, REQUEST, outcome), "first request: committed");
	same(outcome, "claimed", "first request: claimed");
	ok(pay(b, key, REQUEST, outcome), "retry: committed");
	same(outcome, "replayed", "retry: replayed");
	same(ask(b, ANSWER, 2, key, REQUEST), "replayed|" RESPONSE, "retry, in autocommit: replayed, byte for byte");
	same(ask(b, ANSWER, 2, key, "{\"currency\":\"EUR\",\"amount\":1e2}"), "replayed|" RESPONSE, "retry, written differently: replayed");
	ok(pay(b, key, "{\"amount\": 200}", outcome), "another request: committed");
	same(outcome, "mismatch", "another request: mismatch");
	same(ask(a, COUNT, 1, key), "1", "one payment was made");
}

static void
test_busy(PGconn *a, PGconn *b)
{
	const char *key = key_of("busy");
	const char *after = key_of("after in_progress");
	char		outcome[12];

	run(a, "BEGIN");
	same(ask(a, CLAIM, 2, key, REQUEST), "claimed", "a claim that stays open");
	run(b, "BEGIN");
	same(ask(b, "SELECT outcome, retry_after FROM idem_claim('payments', $1, $2)", 2, key, REQUEST), "in_progress|00:00:01",
		 "another connection: in_progress, with retry_after");
	ask(b, "INSERT INTO payment VALUES ($1, 0)", 1, after);
	same(run(b, "COMMIT"), "COMMIT", "the transaction that lost goes on");
	same(ask(b, COUNT, 1, after), "1", "and commits");
	run(a, "ROLLBACK");
	ok(pay(b, key, REQUEST, outcome) && strcmp(outcome, "claimed") == 0, "after the rollback: claimed by the other connection");
}

/* The token of a claim under a lease, in binary as the server sent it. */
static int64_t
claim_lease(PGconn *conn, const char *key, const char *lease)
{
	const char *values[] = {key, REQUEST, lease};
	PGresult   *result = PQexecParams(conn, "SELECT token, outcome FROM idem_claim('payments', $1, $2, lease => $3)",
									  3, NULL, values, NULL, NULL, 1);
	uint32_t	halves[2] = {0, 0};

	if (PQntuples(result) == 1 && PQgetlength(result, 0, 0) == 8)
		memcpy(halves, PQgetvalue(result, 0, 0), 8);
	PQclear(result);
	return (int64_t) ((uint64_t) ntohl(halves[0]) << 32 | ntohl(halves[1]));
}

/* Completes with all parameters in binary and of a type. */
static const char *
complete_binary(PGconn *conn, const char *key, int64_t token)
{
	uint32_t	halves[] = {htonl((uint32_t) ((uint64_t) token >> 32)), htonl((uint32_t) token)};
	const char *values[] = {key, RESPONSE, (const char *) halves};
	int			lengths[] = {(int) strlen(key), (int) strlen(RESPONSE), sizeof(halves)};
	int			formats[] = {1, 1, 1};
	Oid			types[] = {TEXTOID, JSONOID, INT8OID};

	return keep(PQexecParams(conn, COMPLETE, 3, types, values, lengths, formats, 1));
}

static void
test_lease(PGconn *a, PGconn *b)
{
	const char *key = key_of("lease");
	int64_t		token = claim_lease(a, key, "5 minutes");
	char		text[30];

	snprintf(text, sizeof(text), "%lld", (long long) token);
	ok(token > 0 && token < INT64_C(1) << 53, "claim under a lease, in autocommit: the token fits a double");
	same(ask(b, CLAIM, 2, key, REQUEST), "in_progress", "seen from another connection: in_progress");
	same(ask(b, "SELECT idem_complete('payments', $1)", 1, key), "ID002", "complete without the token: ID002");
	same(complete_binary(b, key, token), "succeeded", "complete with the token, all in binary, in another connection");
	same(ask(b, COMPLETE, 3, key, RESPONSE, text), "succeeded", "complete again, as if the answer had been lost");
	same(ask(a, ANSWER, 2, key, REQUEST), "replayed|" RESPONSE, "replayed");
}

/* A lost lease: the transaction cannot commit, whatever it does about the error. */
static void
test_lost(PGconn *a, PGconn *b)
{
	const char *key = key_of("lost");
	int64_t		old = claim_lease(a, key, "1 ms");
	int64_t		token;

	usleep(10 * 1000);
	token = claim_lease(b, key, "5 min");
	ok(old > 0 && token > old, "a lease that is over: taken over, with a higher token");
	run(a, "BEGIN");
	ask(a, "INSERT INTO payment VALUES ($1, 100)", 1, key);
	run(a, "SAVEPOINT trap");
	same(complete_binary(a, key, old), "ID001", "complete with the old token: ID001");
	same(run(a, "ROLLBACK TO trap"), "ROLLBACK", "trapped by a savepoint");
	same(run(a, "COMMIT"), "ID001", "and COMMIT fails all the same");
	same(ask(a, COUNT, 1, key), "0", "what the lost holder wrote is gone");
	same(complete_binary(b, key, token), "succeeded", "the new holder completes");
}

static void
test_unsettled(PGconn *a)
{
	const char *key = key_of("unsettled");
	const char *once = "SELECT idem_once('payments', $1, $2)";
	char		query[200];
	PGresult   *result;

	run(a, "BEGIN");
	same(ask(a, CLAIM, 2, key, REQUEST), "claimed", "a claim that is never settled");
	same(run(a, "COMMIT"), "ID003", "COMMIT: ID003");
	same(ask(a, CLAIM, 2, key, REQUEST), "ID003", "autocommit: ID003");
	snprintf(query, sizeof(query), "SELECT outcome FROM idem_claim('payments', '%s')", key);
	same(run(a, query), "ID003", "autocommit, the simple protocol: ID003");
	/* who reads results one by one sees the row before the error */
	PQsendQueryParams(a, query, 0, NULL, NULL, NULL, NULL, 0);
	same(keep(PQgetResult(a)), "claimed", "PQgetResult: the row comes first");
	same(keep(PQgetResult(a)), "ID003", "PQgetResult: then the error");
	while ((result = PQgetResult(a)) != NULL)
		PQclear(result);
	same(ask(a, "SELECT outcome, state FROM idem_status('payments', $1)", 1, key), "null|null", "nothing is left of it");
	same(ask(a, once, 2, key, REQUEST), "t", "autocommit: idem_once: true");
	same(ask(a, once, 2, key, REQUEST), "f", "autocommit: idem_once again: false");
	same(ask(a, once, 2, key, "{}"), "ID004", "autocommit: idem_once, another request: ID004");
}

static void
test_parameters(PGconn *a)
{
	const char *values[] = {key_of("types"), REQUEST};
	char		outcome[12];
	char		jsonb[100] = {1};	/* binary jsonb: a version, then text */
	static const struct
	{
		Oid			type;
		const char *name;
	}			types[] = {{TEXTOID, "text"}, {VARCHAROID, "varchar"}, {JSONOID, "json"}, {JSONBOID, "jsonb"}};

	pay(a, values[0], REQUEST, outcome);
	for (int i = 0; i < 4; i++)
	{
		Oid			oids[] = {VARCHAROID, types[i].type};
		int			lengths[] = {(int) strlen(values[0]), (int) strlen(REQUEST)};
		int			formats[] = {1, 1};
		const char *binary[] = {values[0], values[1]};
		char		name[60];

		snprintf(name, sizeof(name), "request as %s", types[i].name);
		same(keep(PQexecParams(a, CLAIM, 2, oids, values, NULL, NULL, 0)), "replayed", name);
		if (types[i].type == JSONBOID)
		{
			strcpy(jsonb + 1, REQUEST);
			binary[1] = jsonb;
			lengths[1]++;
		}
		snprintf(name, sizeof(name), "request as %s, binary", types[i].name);
		same(keep(PQexecParams(a, CLAIM, 2, oids, binary, lengths, formats, 0)), "replayed", name);
	}
	same(ask(a, CLAIM, 2, values[0], NULL), "replayed", "request NULL");
	same(ask(a, "SELECT outcome FROM idem_claim(scope => 'payments', key => $1, request => $2, wait => $3)", 3, values[0], REQUEST, "1 s"),
		 "replayed", "named arguments");
	run(a, "BEGIN");
	same(ask(a, "SELECT outcome FROM idem_claim('payments', idem_key($1, $2), $3)", 3, prefix, "7", REQUEST), "claimed", "idem_key of parameters");
	run(a, "ROLLBACK");
}

static void
test_payload(PGconn *a, PGconn *b)
{
	const char *key = key_of("payload");
	char		body[256];
	const char *values[] = {key, RESPONSE, body, "{\"a\": \"b\"}"};
	int			lengths[] = {0, 0, sizeof(body), 0};
	int			formats[] = {0, 0, 1, 0};
	Oid			types[] = {0, 0, BYTEAOID, 0};
	PGresult   *result;

	for (int i = 0; i < 256; i++)
		body[i] = (char) i;
	run(a, "BEGIN");
	same(ask(a, CLAIM, 2, key, REQUEST), "claimed", "a claim to be settled with everything there is");
	same(keep(PQexecParams(a, "SELECT idem_fail('payments', $1, $2, status_code => 402, headers => $4, body => $3)",
						   4, types, values, lengths, formats, 0)), "failed", "fail");
	same(run(a, "COMMIT"), "COMMIT", "committed");
	same(ask(b, "SELECT outcome, state, response::text, status_code, headers FROM idem_claim('payments', $1, $2)", 2, key, REQUEST),
		 "replayed|failed|" RESPONSE "|402|{\"a\": \"b\"}", "replayed: state, response, status, headers");
	result = PQexecParams(b, "SELECT body, response FROM idem_claim('payments', $1)", 1, NULL, values, NULL, NULL, 1);
	ok(PQntuples(result) == 1 && PQgetlength(result, 0, 0) == 256 && memcmp(PQgetvalue(result, 0, 0), body, 256) == 0,
	   "replayed: body, in binary");
	ok(PQntuples(result) == 1 && PQgetlength(result, 0, 1) == strlen(RESPONSE) && strcmp(PQgetvalue(result, 0, 1), RESPONSE) == 0,
	   "replayed: response, in binary");
	PQclear(result);
}

static void
test_prepared(PGconn *a)
{
	bool		right = true;

	PQclear(PQprepare(a, "claim", CLAIM, 2, NULL));
	PQclear(PQprepare(a, "complete", "SELECT idem_complete('payments', $1, $2)", 2, NULL));
	for (int i = 0; i < 10; i++)
	{
		char		name[30];
		const char *values[2];

		snprintf(name, sizeof(name), "prepared %d", i);
		values[0] = key_of(name);
		values[1] = REQUEST;
		run(a, "BEGIN");
		right &= strcmp(keep(PQexecPrepared(a, "claim", 2, values, NULL, NULL, 0)), "claimed") == 0;
		right &= strcmp(keep(PQexecPrepared(a, "complete", 2, values, NULL, NULL, 0)), "succeeded") == 0;
		right &= strcmp(keep(PQexecPrepared(a, "claim", 2, values, NULL, NULL, 0)), "replayed") == 0;
		right &= strcmp(run(a, "COMMIT"), "COMMIT") == 0;
	}
	ok(right, "prepared statements, ten times each");
}

/*
 * Prepared, used and deallocated in one transaction: fine with a pooler that
 * knows nothing of prepared statements. One that does gives them names of its
 * own, which DEALLOCATE does not find.
 */
static void
test_prepared_here(PGconn *a)
{
	const char *values[] = {key_of("prepared here"), REQUEST};

	run(a, "BEGIN");
	same(keep(PQprepare(a, "here", CLAIM, 2, NULL)), "", "prepare in a transaction");
	same(keep(PQexecPrepared(a, "here", 2, values, NULL, NULL, 0)), "claimed", "claim");
	ask(a, "SELECT idem_complete('payments', $1)", 1, values[0]);
	for (int i = 0; i < 10; i++)
		keep(PQexecPrepared(a, "here", 2, values, NULL, NULL, 0));
	same(got, "replayed", "replayed, ten times later");
	if (!pooled || !prepared)
		same(run(a, "DEALLOCATE here"), "DEALLOCATE", "deallocate in the same transaction");
	same(run(a, "COMMIT"), "COMMIT", "committed");
}

#ifdef LIBPQ_HAS_PIPELINING
static void
send_payment(PGconn *conn, const char *key, const char *settle)
{
	const char *values[] = {key, REQUEST};

	PQsendQueryParams(conn, CLAIM, 2, NULL, values, NULL, NULL, 0);
	PQsendQueryParams(conn, "INSERT INTO payment VALUES ($1, 100)", 1, NULL, values, NULL, NULL, 0);
	PQsendQueryParams(conn, settle, 1, NULL, values, NULL, NULL, 0);
}

/* The results of everything up to a synchronisation, joined by spaces. */
static const char *
pipeline_results(PGconn *conn)
{
	static char all[300];

	all[0] = '\0';
	for (;;)
	{
		PGresult   *result = PQgetResult(conn);

		if (result == NULL)
			continue;			/* the end of one query */
		if (PQresultStatus(result) == PGRES_PIPELINE_SYNC || strlen(all) > 200)
		{
			PQclear(result);
			return all;
		}
		if (PQresultStatus(result) == PGRES_PIPELINE_ABORTED)
		{
			strcat(all, " aborted");
			PQclear(result);
		}
		else
			strcat(strcat(all, " "), keep(result));
	}
}

/* One round trip for claim, work and completion: without BEGIN they are one transaction. */
static void
test_pipeline(PGconn *a, PGconn *b)
{
	const char *key = key_of("pipeline");
	const char *complete = "SELECT idem_complete('payments', $1)";

	PQenterPipelineMode(a);
	send_payment(a, key, complete);
	PQpipelineSync(a);
	same(pipeline_results(a), " claimed INSERT 0 1 succeeded", "pipeline: claimed and completed");

	/* the same again, by a client that settles without looking at the outcome */
	send_payment(a, key, "SELECT idem_fail('payments', $1)");
	PQpipelineSync(a);
	same(pipeline_results(a), " replayed INSERT 0 1 ID002", "pipeline that does not look at the outcome: the settling fails");

	/* what needs no look: the work depends on the key in the statement itself */
	for (int i = 0; i < 3; i++)
		PQsendQueryParams(a, "INSERT INTO payment SELECT $1, 1 WHERE idem_once('payments', $1, $2)", 2, NULL,
						  (const char *[]) {key_of("once"), REQUEST}, NULL, NULL, 0);
	PQpipelineSync(a);
	same(pipeline_results(a), " INSERT 0 1 INSERT 0 0 INSERT 0 0", "pipeline: three times one message with idem_once");

	PQsendQueryParams(a, CLAIM, 2, NULL, (const char *[]) {key_of("half"), REQUEST}, NULL, NULL, 0);
	PQpipelineSync(a);
	same(pipeline_results(a), " claimed ID003", "pipeline: a claim alone, ID003 after its row");
	PQexitPipelineMode(a);
	same(ask(b, COUNT, 1, key_of("pipeline")), "1", "pipeline: one payment was made");
	same(ask(b, CLAIM, 2, key_of("pipeline"), REQUEST), "replayed", "pipeline: replayed");
}
#endif

static void
test_call(PGconn *a, PGconn *b)
{
	const char *call = "SELECT outcome, response::text FROM idem_call('payments', $1, $2, 'pay(jsonb)')";
	const char *key = key_of("call");
	char		request[200];

	snprintf(request, sizeof(request), "{\"key\": \"%s\", \"amount\": 5}", key);
	same(ask(a, call, 2, key, request), "executed|{\"paid\": 5}", "idem_call: executed");
	same(ask(b, call, 2, key, request), "replayed|{\"paid\": 5}", "idem_call: replayed");
	same(ask(a, COUNT, 1, key), "1", "idem_call: one payment was made");
}

/* Behind a pooler, transactions of one client run in one server process or another. */
static void
test_processes(PGconn *a, PGconn *b)
{
	const char *key = key_of("processes");
	int			pid = atoi(ask(a, "SELECT pg_backend_pid()", 0));
	int64_t		token = claim_lease(a, key, "5 min");

	run(b, "BEGIN; SELECT 1");	/* a pooler gives it the process that is free now */
	ok((atoi(ask(a, "SELECT pg_backend_pid()", 0)) != pid) == pooled, pooled ? "another server process" : "the same server process");
	same(complete_binary(a, key, token), "succeeded", "completes what was claimed");
	run(b, "ROLLBACK");
}

/* A client that goes away without a word. */
static void
test_gone(PGconn *a, PGconn *b)
{
	const char *key = key_of("gone");

	run(a, "BEGIN");
	same(ask(a, CLAIM, 2, key, REQUEST), "claimed", "a client that claims and goes away");
	close(PQsocket(a));
	run(b, "BEGIN");
	same(ask(b, "SELECT outcome FROM idem_claim('payments', $1, wait => '10 s')", 1, key), "claimed", "its key is free");
	run(b, "ROLLBACK");
}

int
main(int argc, char **argv)
{
	PGconn	   *a,
			   *b;

	if (argc != 3)
		return 2;
	prefix = argv[1];
	pooled = strcmp(argv[2], "direct") != 0;
	prepared = strcmp(argv[2], "unprepared") != 0;
	setvbuf(stdout, NULL, _IOLBF, 0);
	a = connect_server();
	b = connect_server();
	printf("# libpq %d\n", PQlibVersion());

	test_payment(a, b);
	test_busy(a, b);
	test_lease(a, b);
	test_lost(a, b);
	test_unsettled(a);
	test_parameters(a);
	test_payload(a, b);
	if (prepared)
		test_prepared(a);
	test_prepared_here(a);
#ifdef LIBPQ_HAS_PIPELINING
	test_pipeline(a, b);
#endif
	test_call(a, b);
	test_processes(a, b);
	test_gone(a, b);
	PQfinish(b);
	printf("1..%d\n", tests);
	return problems > 0;
}

"""The main flows of idem through psycopg2 or psycopg 3; prints TAP.

    flows_psycopg.py psycopg2|psycopg KEY-PREFIX direct|pooled|unprepared

"pooled": through a transaction pooler with two connections to the server;
"unprepared": through one that does not know prepared statements. Where the
server is, the environment says (PGHOST, PGPORT, PGUSER, PGDATABASE).
"""

import datetime
import importlib
import json
import sys
import time

MODULE, PREFIX, PATH = sys.argv[1:]
POOLED = PATH != "direct"
PREPARED = PATH != "unprepared"
psycopg = importlib.import_module(MODULE)
THREE = MODULE == "psycopg"
if THREE:
    from psycopg.types.json import Json, Jsonb
    ADAPTERS = {"Json": Json, "Jsonb": Jsonb}
    HEADERS = Jsonb     # json does not become jsonb by itself
else:
    from psycopg2.extras import Json
    ADAPTERS = {"Json": Json}
    HEADERS = Json      # of no type, in psycopg2
REQUEST = '{"amount": 100, "currency": "EUR"}'
# a response that no parser of JSON gives back as it was
RESPONSE = '{"amount": 12.00,   "id":9007199254740993 }'

# [README
def pay(connection, key, request):
    with connection.cursor() as cursor:
        cursor.execute("SELECT outcome, response::text FROM idem_claim('payments', %s, %s)", (key, request))
        outcome, response = cursor.fetchone()
        if outcome == "claimed":
            cursor.execute("INSERT INTO payment SELECT %s, (%s::json->>'amount')::int", (key, request))
            response = '{"amount": 12.00,   "id":9007199254740993 }'
            cursor.execute("SELECT idem_complete('payments', %s, %s)", (key, response))
        connection.commit()     # an error before or in it: roll back, and pay again with the same key
        return outcome, response
# README]

tests = 0
problems = 0


def ok(passed, name, note=""):
    global tests, problems
    tests += 1
    problems += not passed
    print(f"{'ok' if passed else 'not ok'} {tests} - {name}", flush=True)
    if not passed and note:
        print(f"# {note}", flush=True)


def same(got, expected, name):
    ok(got == expected, name, f"got {got!r}, expected {expected!r}")


def connect():
    connection = psycopg.connect("")
    if THREE and not PREPARED:
        connection.prepare_threshold = None
    return connection


def row(connection, query, *parameters, **options):
    with connection.cursor() as cursor:
        cursor.execute(query, parameters, **options)
        return cursor.fetchone()


def run(connection, query):
    with connection.cursor() as cursor:
        cursor.execute(query)


def one(connection, query, *parameters, **options):
    return row(connection, query, *parameters, **options)[0]


def outcome(connection, key, request=REQUEST):
    return one(connection, "SELECT outcome FROM idem_claim('payments', %s, %s)", key, request)


def payments(connection, key):
    count = one(connection, "SELECT count(*) FROM payment WHERE key = %s", key)
    connection.commit()
    return count


# The error that a call ends with.
def sqlstate(function, *arguments):
    try:
        function(*arguments)
    except psycopg.Error as error:
        return error.sqlstate if THREE else error.pgcode
    return "no error"


a = connect()
b = connect()
print(f"# {MODULE} {psycopg.__version__}")

# --- claim, work, complete, commit; what a retry gets

key = f"{PREFIX} pay"
same(pay(a, key, REQUEST), ("claimed", RESPONSE), "first request: claimed")
same(pay(b, key, REQUEST), ("replayed", RESPONSE), "retry: replayed, byte for byte")
same(pay(b, key, '{"currency":"EUR","amount":1e2}'), ("replayed", RESPONSE), "retry, written differently: replayed")
same(pay(b, key, '{"amount": 200}'), ("mismatch", None), "another request: mismatch")
same(payments(a, key), 1, "one payment was made")
parsed = one(a, "SELECT response FROM idem_claim('payments', %s)", key)
same(parsed, json.loads(RESPONSE), "the response as this driver parses it")
a.commit()

key = f"{PREFIX} busy"
same(outcome(a, key), "claimed", "a claim that stays open")
answer = row(b, "SELECT outcome, retry_after FROM idem_claim('payments', %s, %s)", key, REQUEST)
same(answer, ("in_progress", datetime.timedelta(seconds=1)), "another connection: in_progress, with retry_after")
run(b, f"INSERT INTO payment VALUES ('{PREFIX} after in_progress', 0)")
b.commit()
same(payments(b, f"{PREFIX} after in_progress"), 1, "the transaction that lost goes on")
a.rollback()
same(pay(b, key, REQUEST)[0], "claimed", "after the rollback: claimed by the other connection")

# --- lease: claim in one transaction, complete in another

key = f"{PREFIX} lease"
lease = "SELECT outcome, token FROM idem_claim('payments', %s, %s, lease => %s)"
complete = "SELECT idem_complete('payments', %s, %s, %s)"
result, token = row(a, lease, key, REQUEST, datetime.timedelta(minutes=5))
a.commit()
same(result, "claimed", "claim under a lease, its length a timedelta")
ok(0 < token < 2**53, "the token fits a double")
answer = row(b, "SELECT outcome, retry_after FROM idem_claim('payments', %s, %s)", key, REQUEST)
b.commit()
ok(answer[0] == "in_progress" and answer[1] > datetime.timedelta(minutes=4), "seen from another connection: in_progress")
same(sqlstate(row, b, "SELECT idem_complete('payments', %s)", key), "ID002", "complete without the token: ID002")
b.rollback()
same(one(b, complete, key, RESPONSE, token), "succeeded", "complete with the token, in another connection")
b.commit()
same(one(b, complete, key, RESPONSE, token), "succeeded", "complete again, as if the answer had been lost")
b.commit()
same(pay(a, key, REQUEST), ("replayed", RESPONSE), "replayed")

# --- lease lost: the transaction cannot commit, whatever it does about the error

key = f"{PREFIX} lost"
old = row(a, lease, key, REQUEST, "1 ms")[1]
a.commit()
time.sleep(0.01)
result, token = row(b, lease, key, REQUEST, "5 min")
b.commit()
ok(result == "claimed" and token > old, "a lease that is over: taken over, with a higher token")
run(a, f"INSERT INTO payment VALUES ('{key}', 100)")
run(a, "SAVEPOINT trap")
same(sqlstate(row, a, complete, key, RESPONSE, old), "ID001", "complete with the old token: ID001")
run(a, "ROLLBACK TO trap")
same(sqlstate(a.commit), "ID001", "trapped by a savepoint, and COMMIT fails all the same")
a.rollback()
same(payments(a, key), 0, "what the lost holder wrote is gone")
same(one(b, complete, key, RESPONSE, token), "succeeded", "the new holder completes")
b.commit()

# --- a claim that nobody settles

key = f"{PREFIX} unsettled"
same(outcome(a, key), "claimed", "a claim that is never settled")
same(sqlstate(a.commit), "ID003", "COMMIT: ID003")
a.rollback()
a.autocommit = True
same(sqlstate(outcome, a, key), "ID003", "autocommit: ID003")
same(row(a, "SELECT outcome, state FROM idem_status('payments', %s)", key), (None, None), "nothing is left of it")
same(one(a, "SELECT idem_once('payments', %s, %s)", key, REQUEST), True, "autocommit: idem_once: true")
same(one(a, "SELECT idem_once('payments', %s, %s)", key, REQUEST), False, "autocommit: idem_once again: false")
same(sqlstate(row, a, "SELECT idem_once('payments', %s, '{}')", key), "ID004", "autocommit: idem_once, another request: ID004")
a.autocommit = False

# --- parameters: of no type, and of each that a request may have

key = f"{PREFIX} types"
pay(a, key, REQUEST)
for name, adapter in ADAPTERS.items():
    same(outcome(a, key, adapter(json.loads(REQUEST))), "replayed", f"request as {name}")
for cast in "text", "varchar", "json", "jsonb":
    same(one(a, f"SELECT outcome FROM idem_claim('payments', %s, %s::{cast})", key, REQUEST), "replayed", f"request as {cast}")
same(outcome(a, key, None), "replayed", "request NULL")
named = "SELECT outcome FROM idem_claim(scope => 'payments', key => %s::varchar, request => %s, wait => %s)"
same(one(a, named, key, REQUEST, datetime.timedelta(seconds=1)), "replayed", "named arguments, wait a timedelta")
tenant = "SELECT outcome FROM idem_claim('payments', idem_key(%s, %s), %s)"
same(one(a, tenant, PREFIX, "7", REQUEST), "claimed", "idem_key of parameters")
a.rollback()

key = f"{PREFIX} payload"
body = bytes(range(256))
same(outcome(a, key), "claimed", "a claim to be settled with everything there is")
same(one(a, "SELECT idem_fail('payments', %s, %s, status_code => %s, headers => %s, body => %s)",
         key, RESPONSE, 402, HEADERS({"a": "b"}), body), "failed", "fail")
a.commit()
answer = row(b, "SELECT outcome, state, response::text, status_code, headers, body FROM idem_claim('payments', %s, %s)", key, REQUEST)
b.commit()
same(answer[:5] + (bytes(answer[5]),), ("replayed", "failed", RESPONSE, 402, {"a": "b"}, body), "replayed: state, response, status, headers, body")

# --- prepared statements

if PREPARED and THREE:
    claim = "SELECT outcome FROM idem_claim('payments', %s, %s)"
    results = []
    for i in range(10):
        results.append(one(a, claim, f"{PREFIX} prepared {i}", REQUEST, prepare=True))
        one(a, "SELECT idem_complete('payments', %s, %s)", f"{PREFIX} prepared {i}", RESPONSE, prepare=True)
        results.append(one(a, claim, f"{PREFIX} prepared {i}", REQUEST, prepare=True))
        a.commit()
    same(results, ["claimed", "replayed"] * 10, "prepared by the driver, ten times")
    count = one(a, "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%%idem_claim%%'")
    a.commit()
    ok(count > 0, "they were prepared on the server")

key = f"{PREFIX} PREPARE"
run(a, "PREPARE claim AS SELECT outcome FROM idem_claim('payments', $1, $2)")
results = [one(a, f"EXECUTE claim ('{key}', '{REQUEST}')")]
one(a, "SELECT idem_complete('payments', %s)", key)
results += [one(a, f"EXECUTE claim ('{key}', '{REQUEST}')") for i in range(10)]
run(a, "DEALLOCATE claim")
a.commit()
same(results, ["claimed"] + ["replayed"] * 10, "PREPARE, used and deallocated in one transaction")

# --- a pipeline: one round trip for claim, work and completion

if THREE and not psycopg.Pipeline.is_supported():
    ok(True, "pipeline # SKIP this libpq has none")
elif THREE:
    key = f"{PREFIX} pipeline"
    with a.pipeline(), a.cursor() as claim, a.cursor() as work, a.cursor() as done:
        claim.execute("SELECT outcome FROM idem_claim('payments', %s, %s)", (key, REQUEST))
        work.execute("INSERT INTO payment VALUES (%s, 100)", (key,))
        done.execute("SELECT idem_complete('payments', %s, %s)", (key, RESPONSE))
        same((claim.fetchone()[0], done.fetchone()[0]), ("claimed", "succeeded"), "pipeline: claimed and completed")
    a.commit()
    same(pay(b, key, REQUEST), ("replayed", RESPONSE), "pipeline: replayed")

    def blind():
        with a.pipeline(), a.cursor() as claim, a.cursor() as work, a.cursor() as done:
            claim.execute("SELECT outcome FROM idem_claim('payments', %s, %s)", (key, REQUEST))
            work.execute("INSERT INTO payment VALUES (%s, 100)", (key,))
            done.execute("SELECT idem_fail('payments', %s, %s)", (key, RESPONSE))

    same(sqlstate(blind), "ID002", "pipeline that does not look at the outcome: the completion fails, and all of it")
    a.rollback()
    same(payments(a, key), 1, "pipeline: one payment was made")

# --- a batch of messages, one statement each, and each once

with a.cursor() as cursor:
    cursor.executemany("INSERT INTO payment SELECT %s, 1 WHERE idem_once('payments', %s)",
                       [(f"{PREFIX} batch", f"{PREFIX} message {i % 3}") for i in range(9)])
a.commit()
same(payments(a, f"{PREFIX} batch"), 3, "executemany with idem_once: each message once")

# --- the whole in one call

key = f"{PREFIX} call"
request = json.dumps({"key": key, "amount": 5})
call = "SELECT outcome, response::text FROM idem_call('payments', %s, %s, 'pay(jsonb)')"
same(row(a, call, key, request), ("executed", '{"paid": 5}'), "idem_call: executed")
a.commit()
same(row(b, call, key, request), ("replayed", '{"paid": 5}'), "idem_call: replayed")
b.commit()
same(payments(a, key), 1, "idem_call: one payment was made")

# --- behind a pooler, transactions of one client run in one server process or another

key = f"{PREFIX} processes"
pid, token = row(a, "SELECT pg_backend_pid(), token FROM idem_claim('payments', %s, lease => '5 min')", key)
a.commit()
one(b, "SELECT 1")      # a transaction begins; a pooler gives it the process that is free now
other, state = row(a, "SELECT pg_backend_pid(), idem_complete('payments', %s, %s, %s)", key, RESPONSE, token)
a.commit()
b.rollback()
same((state, other != pid), ("succeeded", POOLED), "claimed and completed by " + ("two server processes" if POOLED else "one server process"))

# --- a client that goes away

key = f"{PREFIX} gone"
same(outcome(a, key), "claimed", "a client that claims and goes away")
a.close()
same(one(b, "SELECT outcome FROM idem_claim('payments', %s, wait => '10 s')", key), "claimed", "its key is free")
b.rollback()
b.close()

print(f"1..{tests}")
sys.exit(problems > 0)

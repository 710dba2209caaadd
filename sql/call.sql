-- idem_call: which functions can be handlers, what becomes of what they take, return, raise and settle
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
\set SHOW_CONTEXT never
CREATE SCHEMA call_test;
SET search_path = call_test, public;
INSERT INTO idem.scope (name) VALUES ('call');
INSERT INTO idem.scope (name, keep_request) VALUES ('call always', 'always');
INSERT INTO idem.scope (name, retention, archive) VALUES ('call none', '0', 'none'), ('call key', '0', 'key');
INSERT INTO idem.scope (name, lease) VALUES ('call lease', '1 hour');
CREATE TABLE ledger (id int GENERATED ALWAYS AS IDENTITY, account text, amount numeric);
CREATE VIEW truth AS SELECT account, sum(amount) AS balance, count(*) AS entries FROM ledger GROUP BY account ORDER BY account;

-- the effect, its response, its replay, and another request
CREATE FUNCTION pay(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO ledger (account, amount) VALUES (request->>'account', (request->>'amount')::numeric);
	RETURN jsonb_build_object('paid', request->'amount');
END $$;
SELECT outcome, attempt, state, status_code, headers, response, body, request, completed_at >= created_at AS times, token, retry_after
FROM idem_call('call', 'pay', '{"account": "a", "amount": 100}', 'pay(jsonb)');
SELECT outcome, attempt, state, status_code, headers, response, body, request, completed_at >= created_at AS times, token, retry_after
FROM idem_call('call', 'pay', '{"amount": 1e2, "account": "a"}', 'pay(jsonb)');
SELECT outcome, state FROM idem_call('call', 'pay', '{"account": "a", "amount": 200}', 'pay(jsonb)');
SELECT event, key, fingerprint = idem_fingerprint('{"account": "a", "amount": 200}') AS offered
FROM idem.audit WHERE scope = 'call';
SELECT * FROM truth;

-- what a handler takes: the request as it was given, from each overload
CREATE FUNCTION take_text(request text) RETURNS text LANGUAGE sql RETURN request;
CREATE FUNCTION take_json(request json) RETURNS text LANGUAGE sql RETURN request::text;
CREATE FUNCTION take_jsonb(request jsonb) RETURNS text LANGUAGE sql RETURN request::text;
\set doc '{ "b":1.0, "a":[ ] }'
SELECT h AS handler, format('%s %s', 'text', h) AS key, (idem_call('call', 'text ' || h, :'doc'::text, h)).response
FROM unnest('{take_text(text),take_json(json),take_jsonb(jsonb)}'::regprocedure[]) AS h;
SELECT h AS handler, (idem_call('call', 'json ' || h, :'doc'::json, h)).response
FROM unnest('{take_text(text),take_json(json),take_jsonb(jsonb)}'::regprocedure[]) AS h;
SELECT h AS handler, (idem_call('call', 'jsonb ' || h, :'doc'::jsonb, h)).response
FROM unnest('{take_text(text),take_json(json),take_jsonb(jsonb)}'::regprocedure[]) AS h;

-- an untyped literal, a parameter without a type, varchar, named arguments
SELECT outcome, response FROM idem_call('call', 'literal', '[1]', 'take_text(text)');
SELECT outcome, response FROM idem_call('call', 'varchar', '[1]'::varchar, 'take_text(text)');
PREPARE untyped AS SELECT outcome, response FROM idem_call($1, $2, $3, $4);
EXECUTE untyped('call', 'prepared', '[1]', 'take_json(json)');
EXECUTE untyped('call', 'prepared', ' [1.0] ', 'take_json(json)');
SELECT name, parameter_types FROM pg_prepared_statements WHERE name = 'untyped';
DEALLOCATE untyped;
SELECT outcome, response FROM idem_call(handler => 'take_jsonb(jsonb)', request => '[1]'::jsonb, key => 'named', scope => 'call', wait => '1 s');
-- a request that is larger than a page
SELECT length(response::text) FROM idem_call('call', 'large', to_json(repeat('x', 100000)), 'take_text(text)');
SELECT length(response::text), md5(response #>> '{}') = md5(to_json(repeat('x', 100000))::text) AS same
FROM idem_call('call', 'large', to_json(repeat('x', 100000)), 'take_text(text)');

-- what a handler returns, and the same from the replay
CREATE TYPE receipt AS (no int, note text, lines int[]);
CREATE DOMAIN document AS jsonb CHECK (VALUE ? 'ok');
CREATE TYPE mood AS ENUM ('fine');
CREATE FUNCTION give_json(json) RETURNS json LANGUAGE sql AS $$SELECT '{ "a":1.0,  "a":"\u00e9" }'::json$$;
CREATE FUNCTION give_jsonb(json) RETURNS jsonb LANGUAGE sql AS $$SELECT '{ "b":1.0,  "a":2 }'::jsonb$$;
CREATE FUNCTION give_text(json) RETURNS text LANGUAGE sql AS $$SELECT E'"quoted"\n{}'::text$$;
CREATE FUNCTION give_void(json) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION give_void_plpgsql(json) RETURNS void LANGUAGE plpgsql AS 'BEGIN END';
CREATE FUNCTION give_null(json) RETURNS int LANGUAGE sql AS 'SELECT NULL::int';
CREATE FUNCTION give_json_null(json) RETURNS json LANGUAGE sql AS $$SELECT 'null'::json$$;
CREATE FUNCTION give_numeric(json) RETURNS numeric LANGUAGE sql AS 'SELECT 12345678901234567890.1230';
CREATE FUNCTION give_nan(json) RETURNS float8 LANGUAGE sql AS $$SELECT 'NaN'::float8$$;
CREATE FUNCTION give_boolean(json) RETURNS boolean LANGUAGE sql AS 'SELECT true';
CREATE FUNCTION give_bigint(json) RETURNS bigint LANGUAGE sql AS 'SELECT 9223372036854775807';
CREATE FUNCTION give_composite(json) RETURNS receipt LANGUAGE sql AS $$SELECT ROW(7, NULL, '{1,2}')::receipt$$;
CREATE FUNCTION give_composite_plpgsql(json) RETURNS receipt LANGUAGE plpgsql AS
	$$DECLARE r receipt; BEGIN r.no := 8; r.lines[1] := 9; RETURN r; END$$;
CREATE FUNCTION give_row(json) RETURNS ledger LANGUAGE sql AS $$SELECT ROW(1, 'x', 2.50)::ledger$$;
CREATE FUNCTION give_record(request json, OUT no int, OUT note text) LANGUAGE plpgsql AS
	$$BEGIN no := 9; note := 'out'; END$$;
CREATE FUNCTION give_record_sql(request json, OUT no int, OUT note text) LANGUAGE sql AS $$SELECT 10, 'out'$$;
CREATE FUNCTION give_array(json) RETURNS text[] LANGUAGE sql AS $$SELECT ARRAY[['a', 'b'], ['c', NULL]]$$;
CREATE FUNCTION give_domain(json) RETURNS document LANGUAGE sql AS $$SELECT '{"ok":  true}'::document$$;
CREATE FUNCTION give_enum(json) RETURNS mood LANGUAGE sql AS $$SELECT 'fine'::mood$$;
CREATE FUNCTION give_timestamptz(json) RETURNS timestamptz LANGUAGE sql AS $$SELECT timestamptz '2026-01-02 03:04:05.678+00'$$;
CREATE FUNCTION give_uuid(json) RETURNS uuid LANGUAGE sql AS $$SELECT '00112233-4455-8677-8899-aabbccddeeff'::uuid$$;
SET timezone = 'UTC';
CREATE TEMP TABLE given AS
	SELECT p.oid::regprocedure AS handler, r.outcome, r.state, r.response::text, r.response IS NULL AS is_null
	FROM pg_proc AS p CROSS JOIN LATERAL idem_call('call', 'give ' || p.proname, '{}', p.oid) AS r
	WHERE p.pronamespace = 'call_test'::regnamespace AND p.proname LIKE 'give%';
SELECT * FROM given ORDER BY handler::text COLLATE "C";
-- byte for byte, whatever the session
SET timezone = 'Asia/Tokyo';
SET extra_float_digits = -15;
SELECT count(*) AS handlers, count(*) FILTER (WHERE r.outcome = 'replayed') AS replayed,
	count(*) FILTER (WHERE r.response::text IS NOT DISTINCT FROM given.response) AS same
FROM given JOIN pg_proc AS p ON p.oid = handler CROSS JOIN LATERAL idem_call('call', 'give ' || p.proname, '{}', p.oid) AS r;
RESET timezone;
RESET extra_float_digits;

-- built-in functions are handlers too
SELECT outcome, response FROM idem_call('call', 'upper', '"x"', 'upper(text)');
SELECT outcome, response FROM idem_call('call', 'typeof', '{"a": 1}', 'jsonb_typeof(jsonb)');

-- no request: NULL to the handler, if it is not strict
CREATE FUNCTION take_null(request jsonb) RETURNS boolean LANGUAGE sql AS 'SELECT $1 IS NULL';
CREATE FUNCTION take_strictly(request jsonb) RETURNS boolean LANGUAGE sql STRICT AS 'SELECT true';
SELECT outcome, response FROM idem_call('call', 'null', NULL, 'take_null(jsonb)');
SELECT outcome, response FROM idem_call('call', 'null', '{"any": "request"}', 'take_null(jsonb)');
SELECT outcome, response FROM idem_call('call', 'strict', NULL, 'take_strictly(jsonb)');
SELECT idem_status('call', 'strict');
SELECT outcome, response FROM idem_call('call', 'strict', 'null', 'take_strictly(jsonb)');
SELECT outcome, response FROM idem_call('call', 'strict', NULL, 'take_strictly(jsonb)');

-- the request is kept where the policy says always
SELECT outcome FROM idem_call('call always', 'text', '{ "n":1 }'::text, 'take_text(text)');
SELECT outcome FROM idem_call('call always', 'json', '{ "n":1 }'::json, 'take_text(text)');
SELECT outcome FROM idem_call('call always', 'jsonb', '{ "n":1 }'::jsonb, 'take_text(text)');
SELECT outcome FROM idem_call('call always', 'null', NULL, 'take_null(jsonb)');
SELECT s.name, key, r.request FROM idem.result AS r JOIN idem.scope AS s ON s.id = scope_id
WHERE s.name = 'call always' OR key = 'json take_json(json)' ORDER BY s.name, key;

-- the claim of this very transaction, whose handler has not run yet: its first answer again
BEGIN;
SELECT outcome, token AS claimed FROM idem_claim('call', 'own', '[1]') \gset
SELECT outcome, token = :claimed AS same_token, attempt, state, retry_after FROM idem_call('call', 'own', '[1]', 'take_text(text)');
SELECT outcome, token FROM idem_call('call', 'own', '[2]', 'take_text(text)');
SELECT idem_complete('call', 'own', '"by hand"');
SELECT outcome, response FROM idem_call('call', 'own', '[1]', 'take_text(text)');
COMMIT;
-- under a lease somebody else is at work, and one that is over is taken over
SELECT outcome FROM idem_claim('call always', 'leased', '[1]', lease => '1 hour');
SELECT outcome, attempt, state, response, retry_after <= '1 hour' AS retry FROM idem_call('call always', 'leased', '[1]', 'take_text(text)', wait => '2 ms');
UPDATE idem.inflight SET lease_until = now() - interval '1 s' WHERE key = 'leased';
SELECT outcome, attempt, state, response FROM idem_call('call always', 'leased', ' [1]', 'take_text(text)');
SELECT count(*) AS in_flight FROM idem.inflight JOIN idem.scope ON id = scope_id WHERE name LIKE 'call%';
-- ... keeping what the first holder was asked to do
SELECT key, attempt, request FROM idem.result WHERE key = 'leased';
-- in doubt nobody executes
SELECT token FROM idem_claim('call', 'doubt', lease => '1 hour') \gset
SELECT idem_unknown('call', 'doubt', :token);
SELECT outcome, state, response FROM idem_call('call', 'doubt', NULL, 'take_null(jsonb)');
SELECT idem_resolve('call', 'doubt', 'failed', '"by hand"');
SELECT outcome, state, response FROM idem_call('call', 'doubt', NULL, 'take_null(jsonb)');

-- past its retention it is not executed again where a tombstone says so
SELECT outcome, state, response FROM idem_call('call key', 'old', '[1]', 'take_text(text)');
SELECT outcome, state, response FROM idem_call('call key', 'old', '[1]', 'take_text(text)');
-- a scope's lease is for claims: a call begins and ends in its transaction
SELECT outcome, state, response FROM idem_call('call lease', 'k', '[1]', 'take_text(text)');
SELECT outcome, state, response FROM idem_call('call lease', 'k', '[1]', 'take_text(text)');
SELECT count(*) AS in_flight FROM idem.operation WHERE scope = 'call lease' AND kept_in = 'inflight';
-- who takes a key over without a request runs the one that was stored, to its handler's type
SELECT outcome FROM idem_claim('call lease', 'over', '{"stored": 1.0}');
UPDATE idem.inflight SET lease_until = now() - interval '1 s' WHERE key = 'over';
SELECT outcome, attempt, response FROM idem_call('call lease', 'over', NULL, 'take_text(text)');
SELECT outcome FROM idem_claim('call lease', 'over too', '{"stored": 1.0}');
UPDATE idem.inflight SET lease_until = now() - interval '1 s' WHERE key = 'over too';
SELECT outcome, attempt, response FROM idem_call('call lease', 'over too', NULL, 'take_jsonb(jsonb)');

-- a handler that raises: the error as it is, and no trace
CREATE FUNCTION raise(request jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO ledger (account, amount) VALUES ('raise', 1);
	RAISE EXCEPTION 'card declined' USING ERRCODE = 'PAY01', DETAIL = request->>'card', HINT = 'Try another card.';
END $$;
\set VERBOSITY default
SELECT idem_call('call', 'raise', '{"card": 1}', 'raise(jsonb)');
\echo :LAST_ERROR_SQLSTATE
SELECT idem_status('call', 'raise');
SELECT count(*) AS key_locks FROM idem.holder WHERE pid = pg_backend_pid();
SELECT outcome, attempt FROM idem_call('call', 'raise', '{"card": 1}', 'take_null(jsonb)');

-- ... trapped by a savepoint, or by an EXCEPTION block: the transaction goes on, and commits without ID003
BEGIN;
SAVEPOINT a;
SELECT idem_call('call', 'savepoint', '{"card": 2}', 'raise(jsonb)');
ROLLBACK TO a;
SELECT count(*) AS key_locks FROM idem.holder WHERE pid = pg_backend_pid();
INSERT INTO ledger (account, amount) VALUES ('after', 1);
COMMIT;
SELECT idem_status('call', 'savepoint');
CREATE FUNCTION try_call(key text, request jsonb, handler regprocedure) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	RETURN (idem_call('call', try_call.key, request, handler)).outcome;
EXCEPTION WHEN OTHERS THEN
	RETURN 'trapped ' || SQLSTATE;
END $$;
BEGIN;
SELECT try_call('block', '{"card": 3}', 'raise(jsonb)');
SELECT try_call('block', '{"account": "block", "amount": 1}', 'pay(jsonb)');
SELECT try_call('block', '{"account": "block", "amount": 1}', 'pay(jsonb)');
COMMIT;
-- executed, and undone with the block around it: executed once more
CREATE FUNCTION call_and_raise() RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_call('call', 'undone', '{"account": "undone", "amount": 1}', 'pay(jsonb)');
	RAISE division_by_zero;
EXCEPTION WHEN division_by_zero THEN
	RETURN 'undone';
END $$;
BEGIN;
SELECT call_and_raise();
SELECT outcome FROM idem_call('call', 'undone', '{"account": "undone", "amount": 1}', 'pay(jsonb)');
SELECT call_and_raise();
COMMIT;
SELECT outcome FROM idem_call('call', 'undone', '{"account": "undone", "amount": 1}', 'pay(jsonb)');
SELECT * FROM truth;
SELECT count(*) AS key_locks FROM idem.holder WHERE pid = pg_backend_pid();

-- a handler that settles by itself is respected, also from within a block of its own; one that fails to is not
CREATE FUNCTION fail(request jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_fail('call', request->>'key', '{"error": "insufficient funds"}', status_code => 402,
		headers => '{"Retry-After": "never"}', body => '\x00ff');
	RETURN 'not this';
END $$;
CREATE FUNCTION complete(request jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	BEGIN
		PERFORM idem_complete('call', request->>'key', '{"id": 1}', status_code => 201);
	EXCEPTION WHEN OTHERS THEN
		RAISE;
	END;
	RETURN 'not this';
END $$;
CREATE FUNCTION fail_undone(request jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	BEGIN
		PERFORM idem_fail('call', request->>'key', status_code => 402);
		RAISE division_by_zero;
	EXCEPTION WHEN division_by_zero THEN
	END;
	RETURN 'this';
END $$;
SELECT outcome, state, status_code, headers, response, body FROM idem_call('call', 'fail', '{"key": "fail"}', 'fail(jsonb)');
SELECT outcome, state, status_code, headers, response, body FROM idem_call('call', 'fail', '{"key": "fail"}', 'fail(jsonb)');
SELECT outcome, state, status_code, response FROM idem_call('call', 'complete', '{"key": "complete"}', 'complete(jsonb)');
SELECT outcome, state, status_code, response FROM idem_call('call', 'complete', '{"key": "complete"}', 'complete(jsonb)');
SELECT outcome, state, status_code, response FROM idem_call('call', 'fail undone', '{"key": "fail undone"}', 'fail_undone(jsonb)');
SELECT outcome, state, status_code, response FROM idem_call('call', 'fail undone', '{"key": "fail undone"}', 'fail_undone(jsonb)');

-- a handler that releases: it ran, and the next one may
CREATE FUNCTION release(request jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_release(request->>'scope', 'release');
	RETURN 'not this';
END $$;
SELECT outcome, state, attempt, response, completed_at FROM idem_call('call', 'release', '{"scope": "call"}', 'release(jsonb)');
SELECT idem_status('call', 'release');
SELECT outcome, state, response FROM idem_call('call', 'release', '{}', 'take_jsonb(jsonb)');
-- ... whatever a row that no longer speaks says
SELECT outcome, response FROM idem_call('call none', 'release', '"stale"', 'take_text(text)');
SELECT outcome, state, attempt, response, completed_at FROM idem_call('call none', 'release', '{"scope": "call none"}', 'release(jsonb)');
-- ... and one that has written before cannot
CREATE FUNCTION release_late(request jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO ledger (account, amount) VALUES ('late', 1);
	PERFORM idem_release('call', 'release late');
END $$;
SELECT idem_call('call', 'release late', NULL, 'release_late(jsonb)');
SELECT idem_status('call', 'release late');

-- recursion: for another key, for the same one, and three deep with an error below
CREATE FUNCTION outer_call(request jsonb) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	r idem_answer := idem_call('call', request->>'key', request->'inner', (request->>'handler')::regprocedure);
BEGIN
	INSERT INTO ledger (account, amount) VALUES ('outer', 1);
	RETURN concat_ws(' ', r.outcome, r.attempt, r.state, r.token IS NOT NULL, r.response);
END $$;
SELECT outcome, response FROM idem_call('call', 'outer', '{"key": "inner", "handler": "pay(jsonb)", "inner": {"account": "inner", "amount": 1}}', 'outer_call(jsonb)');
SELECT outcome, response FROM idem_call('call', 'outer', '{"key": "inner", "handler": "pay(jsonb)", "inner": {"account": "inner", "amount": 1}}', 'outer_call(jsonb)');
SELECT outcome, response FROM idem_call('call', 'outer 2', '{"key": "inner", "handler": "pay(jsonb)", "inner": {"account": "inner", "amount": 1}}', 'outer_call(jsonb)');
SELECT outcome, response FROM idem_call('call', 'same', '{"key": "same", "handler": "raise(jsonb)"}', 'outer_call(jsonb)');
SELECT outcome, response FROM idem_call('call', 'same 2', '{"key": "same 2", "handler": "raise(jsonb)", "inner": 1}', 'outer_call(jsonb)');
SELECT idem_call('call', 'top', '{"key": "middle", "handler": "outer_call(jsonb)", "inner": {"key": "bottom", "handler": "raise(jsonb)", "inner": {"card": 4}}}', 'outer_call(jsonb)');
SELECT key, (idem_status('call', key)).outcome FROM unnest('{top,middle,bottom,inner,outer,same}'::text[]) AS key;
SELECT * FROM truth WHERE account IN ('inner', 'outer', 'raise');
-- into itself without end
CREATE FUNCTION forever(request jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_call('call', 'forever ' || (request->>'n'), jsonb_build_object('n', (request->>'n')::int + 1), 'forever(jsonb)');
END $$;
\set VERBOSITY sqlstate
SELECT idem_call('call', 'forever', '{"n": 1}', 'forever(jsonb)');
\set VERBOSITY default
SELECT count(*) AS settled FROM idem.result WHERE key LIKE 'forever%';

-- a handler cannot end the transaction that claims
CREATE FUNCTION commit(request jsonb) RETURNS void LANGUAGE plpgsql AS 'BEGIN COMMIT; END';
\set VERBOSITY sqlstate
SELECT idem_call('call', 'commit', NULL, 'commit(jsonb)');
\set VERBOSITY default

-- a STABLE handler sees what was written by now, not what was there when the statement began
CREATE FUNCTION write_entry() RETURNS text LANGUAGE plpgsql AS $$BEGIN INSERT INTO ledger (account, amount) VALUES ('stable', 1); RETURN 'written'; END$$;
CREATE FUNCTION entries(request jsonb) RETURNS bigint LANGUAGE sql STABLE AS $$SELECT count(*) FROM ledger WHERE account = 'stable'$$;
CREATE FUNCTION entries_plpgsql(request jsonb) RETURNS bigint LANGUAGE plpgsql STABLE AS
	$$BEGIN RETURN (SELECT count(*) FROM ledger WHERE account = 'stable'); END$$;
SELECT write_entry(), entries_plpgsql(NULL) AS of_the_statement,
	(idem_call('call', 'stable', NULL, 'entries(jsonb)')).response AS of_a_handler,
	(idem_call('call', 'stable plpgsql', NULL, 'entries_plpgsql(jsonb)')).response AS of_another;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT write_entry(), entries_plpgsql(NULL) AS of_the_statement, (idem_call('call', 'stable rr', NULL, 'entries(jsonb)')).response AS of_a_handler;
COMMIT;

-- who may: EXECUTE is the caller's, not the scope's owner's; so is what the handler does
CREATE ROLE regress_idem_call_owner;
CREATE ROLE regress_idem_call_user IN ROLE regress_idem_call_owner;
CREATE ROLE regress_idem_call_other;
GRANT USAGE ON SCHEMA call_test TO PUBLIC;
INSERT INTO idem.scope (name, owner) VALUES ('call rights', 'regress_idem_call_owner');
CREATE FUNCTION whoami(request json) RETURNS text LANGUAGE sql AS 'SELECT current_user::text';
CREATE FUNCTION whoami_definer(request json) RETURNS text LANGUAGE sql SECURITY DEFINER AS
	$$SELECT CASE WHEN current_user = session_user THEN 'definer' END || ' for ' || (SELECT count(*) FROM ledger WHERE account = 'a')$$;
CREATE FUNCTION secret(request json) RETURNS text LANGUAGE sql AS $$SELECT 'secret'$$;
CREATE FUNCTION read_ledger(request json) RETURNS bigint LANGUAGE sql AS 'SELECT count(*) FROM ledger';
REVOKE EXECUTE ON FUNCTION secret(json) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION secret(json) TO regress_idem_call_owner;
SET ROLE regress_idem_call_owner;
SELECT outcome, response FROM idem_call('call rights', 'owner', NULL, 'secret(json)');
RESET ROLE;
REVOKE EXECUTE ON FUNCTION secret(json) FROM regress_idem_call_owner;
GRANT EXECUTE ON FUNCTION secret(json) TO regress_idem_call_other;
SET ROLE regress_idem_call_owner;
SELECT idem_call('call rights', 'secret', NULL, 'secret(json)');
-- ... not even to be told what it has answered before
SELECT idem_call('call rights', 'owner', NULL, 'secret(json)');
RESET ROLE;
SET ROLE regress_idem_call_user;
SELECT outcome, response FROM idem_call('call rights', 'user', NULL, 'whoami(json)');
SELECT outcome, response FROM idem_call('call rights', 'definer', NULL, 'whoami_definer(json)');
SELECT current_user;
\set VERBOSITY sqlstate
SELECT idem_call('call rights', 'ledger', NULL, 'read_ledger(json)');
SELECT idem_call('call', 'rights', NULL, 'whoami(json)');
RESET ROLE;
SET ROLE regress_idem_call_other;
SELECT idem_call('call rights', 'other', NULL, 'secret(json)');
RESET ROLE;
\set VERBOSITY default
SELECT key, response FROM idem.result JOIN idem.scope ON id = scope_id WHERE name = 'call rights' ORDER BY key;

-- a handler with settings of its own, which end with it
CREATE FUNCTION settings(request json) RETURNS text LANGUAGE sql SET search_path = pg_catalog SET work_mem = '12345kB' AS
	$$SELECT current_setting('search_path') || ' ' || current_setting('work_mem')$$;
SELECT outcome, response, current_setting('search_path') AS path, current_setting('work_mem') = '12345kB' AS leaks
FROM idem_call('call', 'settings', NULL, 'settings(json)');

-- what cannot be a handler
CREATE FUNCTION two(a json, b json) RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION two_defaulted(a json, b json DEFAULT NULL) RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION nothing() RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION takes_int(a int) RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION takes_any(a anyelement) RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION takes_array(VARIADIC a text[]) RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION many(a json) RETURNS SETOF int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION many_rows(a json) RETURNS TABLE (n int) LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION fires() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE PROCEDURE proceeds(a json) LANGUAGE sql AS 'SELECT 1';
SELECT idem_call('call', 'unfit', NULL, 'two(json,json)');
SELECT idem_call('call', 'unfit', NULL, 'two_defaulted(json,json)');
SELECT idem_call('call', 'unfit', NULL, 'nothing()');
SELECT idem_call('call', 'unfit', NULL, 'takes_int(int)');
SELECT idem_call('call', 'unfit', NULL, 'takes_any(anyelement)');
SELECT idem_call('call', 'unfit', NULL, 'takes_array(text[])');
SELECT idem_call('call', 'unfit', NULL, 'many(json)');
SELECT idem_call('call', 'unfit', NULL, 'many_rows(json)');
SELECT idem_call('call', 'unfit', NULL, 'fires()');
SELECT idem_call('call', 'unfit', NULL, 'proceeds(json)');
SELECT idem_call('call', 'unfit', NULL, 'max(text)');
SELECT idem_call('call', 'unfit', NULL, 'textin(cstring)');
SELECT idem_call('call', 'unfit', NULL, 'textout(text)');
SELECT idem_call('call', 'unfit', NULL, 'first_value(anyelement)');
SELECT idem_call('call', 'unfit', NULL, NULL);
SELECT idem_call('call', 'unfit', NULL, 0);
\set VERBOSITY sqlstate
SELECT idem_call('call', 'unfit', NULL, 'two(json,json)');
SELECT idem_call('call', 'unfit', NULL, NULL);
SELECT idem_call('call', 'unfit', NULL, 0);
SELECT idem_call('call', 'unfit', NULL, 'nowhere(json)');

-- arguments, as in idem_claim
SELECT idem_call(NULL, 'k', NULL, 'take_null(jsonb)');
SELECT idem_call('call', NULL, NULL, 'take_null(jsonb)');
SELECT idem_call('call', '', NULL, 'take_null(jsonb)');
SELECT idem_call('call', repeat('k', 256), NULL, 'take_null(jsonb)');
SELECT idem_call('nowhere', 'k', NULL, 'take_null(jsonb)');
SELECT idem_call('call', 'k', '{', 'take_null(jsonb)');
SELECT idem_call('call', 'k', '{"a": 1, "a": 2}', 'take_null(jsonb)');
SELECT idem_call('call', 'k', NULL, 'take_null(jsonb)', wait => '-1 s');
BEGIN READ ONLY;
SELECT idem_call('call', 'k', NULL, 'take_null(jsonb)');
ROLLBACK;
\set VERBOSITY default
SELECT idem_status('call', 'k'), idem_status('call', 'unfit');

-- one settled key is one row, and a lock is never left
SELECT count(*) AS key_locks FROM idem.holder WHERE pid = pg_backend_pid();
SELECT count(*) AS twice FROM (SELECT scope_id, key FROM idem.result GROUP BY 1, 2 HAVING count(*) > 1) AS t;

SET client_min_messages = warning;
DROP SCHEMA call_test CASCADE;
RESET search_path;
DELETE FROM idem.result WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'call%');
DELETE FROM idem.scope WHERE name IN ('call', 'call always', 'call none', 'call key', 'call lease', 'call rights');
DROP ROLE regress_idem_call_owner, regress_idem_call_user, regress_idem_call_other;

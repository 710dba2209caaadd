-- Which overload a call resolves to, and that all of them mean the same: an
-- argument without a type, text, json, jsonb, NULL, varchar, a sub-select,
-- named, and a parameter that a driver sends without a type.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;

INSERT INTO idem.scope (name, keep_request) VALUES ('overloads', 'always');

CREATE FUNCTION pg_temp.try(statement text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE statement;
	RETURN 'no error';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE || ': ' || SQLERRM;
END $$;

-- a claim first by one way of writing the request; all others are the same request
BEGIN;
CREATE TABLE pg_temp.requests (t text, v varchar(100), j json, b jsonb, c char(30));
INSERT INTO pg_temp.requests VALUES ('{"b": 1, "a": 2}', '{"b":1.0,"a":2}', '{"a":2,"b":1}', '{"a":2,"b":1}', '{"a":2,"b":1}');
SELECT outcome FROM idem_claim('overloads', 'k', '{"b": 1, "a": 2}');
WITH answers (way, a) AS (
	SELECT 'untyped', idem_claim('overloads', 'k', '{"a":2,"b":1}') UNION ALL
	SELECT 'text', idem_claim('overloads', 'k', '{"a":2,"b":1}'::text) UNION ALL
	SELECT 'json', idem_claim('overloads', 'k', '{"a":2,"b":1}'::json) UNION ALL
	SELECT 'jsonb', idem_claim('overloads', 'k', '{"a":2,"b":1}'::jsonb) UNION ALL
	SELECT 'varchar', idem_claim('overloads', 'k', '{"a":2,"b":1}'::varchar) UNION ALL
	SELECT 'column text', idem_claim('overloads', 'k', t) FROM pg_temp.requests UNION ALL
	SELECT 'column varchar', idem_claim('overloads', 'k', v) FROM pg_temp.requests UNION ALL
	SELECT 'column json', idem_claim('overloads', 'k', j) FROM pg_temp.requests UNION ALL
	SELECT 'column jsonb', idem_claim('overloads', 'k', b) FROM pg_temp.requests UNION ALL
	SELECT 'column char', idem_claim('overloads', 'k', c) FROM pg_temp.requests UNION ALL
	SELECT 'sub-select', idem_claim('overloads', 'k', (SELECT '{"a":2,"b":1}')) UNION ALL
	SELECT 'sub-select json', idem_claim('overloads', 'k', (SELECT j FROM pg_temp.requests)) UNION ALL
	SELECT 'json_build_object', idem_claim('overloads', 'k', json_build_object('b', 1.0, 'a', 2)) UNION ALL
	SELECT 'jsonb_build_object', idem_claim('overloads', 'k', jsonb_build_object('b', 1, 'a', 2.0)) UNION ALL
	SELECT 'named', idem_claim(key => 'k', scope => 'overloads', request => '{"a":2,"b":1}') UNION ALL
	SELECT 'named jsonb', idem_claim(request => '{"a":2,"b":1}'::jsonb, key => 'k', scope => 'overloads') UNION ALL
	SELECT 'fingerprint', idem_claim('overloads', 'k', fingerprint => idem_fingerprint('{"a":2,"b":1}')) UNION ALL
	SELECT 'omitted', idem_claim('overloads', 'k') UNION ALL
	SELECT 'NULL', idem_claim('overloads', 'k', NULL) UNION ALL
	SELECT 'NULL named', idem_claim('overloads', 'k', request => NULL, wait => '0') UNION ALL
	SELECT 'NULL::jsonb', idem_claim('overloads', 'k', NULL::jsonb) UNION ALL
	SELECT 'other', idem_claim('overloads', 'k', '{"a":2,"b":2}') UNION ALL
	SELECT 'other json', idem_claim('overloads', 'k', '{"a":2,"b":2}'::json) UNION ALL
	SELECT 'other jsonb', idem_claim('overloads', 'k', '{"a":2,"b":2}'::jsonb) UNION ALL
	SELECT 'other fingerprint', idem_claim('overloads', 'k', fingerprint => idem_fingerprint('{"a":2,"b":2}')))
SELECT (a).outcome, count(*), string_agg(way, ', ') FROM answers GROUP BY 1 ORDER BY 1;
SELECT idem_complete('overloads', 'k');
COMMIT;

-- the same of idem_once() on the settled key
WITH answers (way, first) AS (
	SELECT 'untyped', idem_once('overloads', 'k', '{"a":2,"b":1}') UNION ALL
	SELECT 'text', idem_once('overloads', 'k', '{"a":2,"b":1}'::text) UNION ALL
	SELECT 'json', idem_once('overloads', 'k', '{"a":2,"b":1}'::json) UNION ALL
	SELECT 'jsonb', idem_once('overloads', 'k', '{"a":2,"b":1}'::jsonb) UNION ALL
	SELECT 'varchar', idem_once('overloads', 'k', '{"a":2,"b":1}'::varchar) UNION ALL
	SELECT 'column', idem_once('overloads', 'k', j) FROM pg_temp.requests UNION ALL
	SELECT 'NULL', idem_once('overloads', 'k', NULL) UNION ALL
	SELECT 'omitted', idem_once('overloads', 'k') UNION ALL
	SELECT 'named', idem_once(key => 'k', request => '{"a":2,"b":1}', scope => 'overloads') UNION ALL
	SELECT 'wait', idem_once('overloads', 'k', wait => '1 s') UNION ALL
	SELECT 'sub-select', idem_once('overloads', 'k', (SELECT b FROM pg_temp.requests)))
SELECT first, count(*), string_agg(way, ', ') FROM answers GROUP BY 1 ORDER BY 1;

-- a response comes back as it was given: text and json byte for byte, jsonb as jsonb prints
CREATE FUNCTION pg_temp.round_trip(way text, call text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	verdict text;
BEGIN
	PERFORM idem_claim('overloads', way);
	EXECUTE 'SELECT ' || format(call, way) INTO verdict;
	RETURN verdict || ' ' || coalesce((idem_claim('overloads', way)).response::text, '-');
END $$;
SELECT way, pg_temp.round_trip(way, call) FROM (VALUES
	('untyped', $$idem_complete('overloads', %L, '{"b": 1,  "a": 1}')$$),
	('text', $$idem_complete('overloads', %L, '{"b": 1,  "a": 1}'::text)$$),
	('json', $$idem_complete('overloads', %L, '{"b": 1,  "a": 1}'::json)$$),
	('jsonb', $$idem_complete('overloads', %L, '{"b": 1,  "a": 1}'::jsonb)$$),
	('varchar', $$idem_complete('overloads', %L, '{"b": 1,  "a": 1}'::varchar)$$),
	('null', $$idem_complete('overloads', %L, NULL)$$),
	('omitted', $$idem_complete('overloads', %L)$$),
	('named', $$idem_complete(response => '{"b": 1,  "a": 1}', key => %L, scope => 'overloads')$$),
	('sub-select', $$idem_complete('overloads', %L, (SELECT t FROM pg_temp.requests))$$),
	('row_to_json', $$idem_complete('overloads', %L, row_to_json(x)) FROM (SELECT 1 AS b, 2 AS a) x$$),
	('fail untyped', $$idem_fail('overloads', %L, '[1,  2]')$$),
	('fail json', $$idem_fail('overloads', %L, '[1,  2]'::json)$$),
	('fail jsonb', $$idem_fail('overloads', %L, '[1,  2]'::jsonb)$$),
	('fail omitted', $$idem_fail('overloads', %L)$$)) AS w (way, call);

-- the request is kept as it was given, too
BEGIN;
SELECT outcome FROM idem_claim('overloads', 'r text', '{"b": 1,  "a": 1}');
SELECT outcome FROM idem_claim('overloads', 'r json', '{"b": 1,  "a": 1}'::json);
SELECT outcome FROM idem_claim('overloads', 'r jsonb', '{"b": 1,  "a": 1}'::jsonb);
SELECT idem_complete('overloads', k) FROM unnest(ARRAY['r text', 'r json', 'r jsonb']) k;
COMMIT;
SELECT key, request FROM idem.result WHERE key LIKE 'r %' AND scope_id = (SELECT id FROM idem.scope WHERE name = 'overloads') ORDER BY key;

-- parameters without types, as drivers send them: text, but bigint for a token and jsonb for headers
PREPARE claim AS SELECT outcome FROM idem_claim($1, $2, $3);
PREPARE claim_named AS SELECT outcome FROM idem_claim(scope => $1, key => $2, request => $3, lease => $4, wait => $5, fingerprint => $6, claimant => $7);
PREPARE complete AS SELECT idem_complete($1, $2, $3, $4, $5, $6, $7);
PREPARE fail AS SELECT idem_fail($1, $2, $3, status_code => $4);
PREPARE once AS SELECT idem_once($1, $2, $3, $4);
PREPARE release AS SELECT idem_release($1, $2, $3);
PREPARE extend AS SELECT idem_extend($1, $2, $3, $4);
PREPARE checkpoint AS SELECT idem_checkpoint($1, $2, $3, $4, $5);
PREPARE unknown AS SELECT idem_unknown($1, $2, $3, $4);
PREPARE resolve AS SELECT idem_resolve($1, $2, $3, $4, $5);
PREPARE recover AS SELECT * FROM idem_recover($1, $2, $3);
PREPARE key AS SELECT idem_key($1, $2);
SELECT name, parameter_types FROM pg_prepared_statements
WHERE name IN ('claim', 'claim_named', 'complete', 'fail', 'once', 'release', 'extend', 'checkpoint', 'unknown', 'resolve', 'recover', 'key')
ORDER BY name;
BEGIN;
EXECUTE claim ('overloads', 'prepared', '{"p": 1}');
EXECUTE claim ('overloads', 'prepared', NULL);
EXECUTE claim_named ('overloads', 'prepared', '{"p":1}', NULL, '0', NULL, NULL);
EXECUTE complete ('overloads', 'prepared', '{"ok":  true}', NULL, 200, '{"h": 1}', '\x01');
COMMIT;
EXECUTE once ('overloads', 'prepared', '{"p":1.0}', NULL);
SELECT outcome, response, status_code, headers, body FROM idem_status('overloads', 'prepared');
DEALLOCATE ALL;

-- what has no overload says so
SELECT left(pg_temp.try($$SELECT idem_claim('overloads', 'k', 1)$$), 5);
SELECT left(pg_temp.try($$SELECT idem_claim('overloads', 1)$$), 5);
SELECT left(pg_temp.try($$SELECT idem_claim('overloads')$$), 5);
SELECT left(pg_temp.try($$SELECT idem_claim('overloads', 'k', '\x00'::bytea)$$), 5);
-- a key of another type is cast by the caller
SELECT idem_once('overloads', '00000000-0000-0000-0000-000000000001'::uuid::text);

-- only the overload for text has a default, so that a call without the argument is not ambiguous
SELECT proname, string_agg(format('%s from argument %s', pg_get_function_arguments(oid)::text ~ '(request|response|handler) json', pronargs - pronargdefaults + 1), ', ' ORDER BY pronargs - pronargdefaults) AS json_defaults
FROM pg_proc WHERE proname IN ('idem_claim', 'idem_complete', 'idem_fail', 'idem_once', 'idem_explain', 'idem_resolve')
GROUP BY proname ORDER BY proname;

DELETE FROM idem.result WHERE scope_id IN (SELECT id FROM idem.scope WHERE name = 'overloads');
DELETE FROM idem.scope WHERE name = 'overloads';
DELETE FROM idem.audit WHERE scope = 'overloads';

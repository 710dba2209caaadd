-- What bad input gets: every function that takes a scope and a key, with what
-- it must refuse, by SQLSTATE and message.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;

INSERT INTO idem.scope (name, include) VALUES ('arguments', NULL), ('arguments leased', NULL), ('arguments include', '{/amount}');
UPDATE idem.scope SET lease = '1 hour' WHERE name = 'arguments leased';

CREATE FUNCTION pg_temp.try(statement text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE statement;
	RETURN 'no error';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE || ': ' || SQLERRM;
END $$;

-- the functions on a key, with a scope and key to be filled in
CREATE TEMP TABLE functions (n int, call text);
INSERT INTO functions VALUES
	(1, 'idem_claim(%s, %s)'), (2, 'idem_claim(%s, %s, ''1''::json)'), (3, 'idem_claim(%s, %s, ''1''::jsonb)'),
	(4, 'idem_complete(%s, %s)'), (5, 'idem_fail(%s, %s)'), (6, 'idem_release(%s, %s)'), (7, 'idem_once(%s, %s)'),
	(8, 'idem_extend(%s, %s, 1, ''1 s'')'), (9, 'idem_checkpoint(%s, %s, 1, ''p'')'), (10, 'idem_unknown(%s, %s, 1)'),
	(11, 'idem_status(%s, %s)'), (12, 'idem_resolve(%s, %s, ''retry'')'), (13, 'idem_forget(%s, %s)');

-- NULL scope, NULL key, empty key, a key of 256 bytes, unknown scope: one and the same answer of all of them
SELECT bad, pg_temp.try('SELECT ' || format(call, s, k)) AS answer, count(*) AS functions
FROM functions, (VALUES
	(1, 'NULL scope', 'NULL', quote_literal('k')), (2, 'NULL key', quote_literal('arguments'), 'NULL'),
	(3, 'empty key', quote_literal('arguments'), quote_literal('')),
	(4, '256 bytes', quote_literal('arguments'), quote_literal(repeat('x', 256))),
	(5, '128 characters of 2 bytes', quote_literal('arguments'), quote_literal(repeat(U&'\00e4', 128))),
	(6, '100000 bytes', quote_literal('arguments'), quote_literal(repeat('x', 100000))),
	(7, 'unknown scope', quote_literal('no such scope'), quote_literal('k')),
	(8, 'empty scope', quote_literal(''), quote_literal('k')),
	(9, 'other case', quote_literal('Arguments'), quote_literal('k')),
	(10, 'prefix', quote_literal('argument'), quote_literal('k')),
	(11, 'longer', quote_literal('arguments '), quote_literal('k'))) AS b (n, bad, s, k)
GROUP BY b.n, bad, answer ORDER BY b.n;
-- a scope's name of more than 255 bytes cannot exist
SELECT left(pg_temp.try(format('SELECT idem_claim(%L, %L)', repeat('s', 300), 'k')), 30);
SELECT left(pg_temp.try(format('SELECT idem_claim(%L, %L)', 'arguments' || repeat('s', 300), 'k')), 30);

-- the hint of an unknown scope shows the INSERT, quoted, and it works
SELECT idem_claim('no ''such\ scope', 'k');
\echo :SQLSTATE
BEGIN;
INSERT INTO idem.scope (name) VALUES (E'no ''such\\ scope');
SELECT outcome FROM idem_claim('no ''such\ scope', 'k');
ROLLBACK;
SELECT pg_temp.try($$SELECT idem_claim('no ''such\ scope', 'k')$$);

-- 255 bytes are a key, of any characters
BEGIN;
SELECT c.outcome FROM idem_claim('arguments', repeat('x', 255)) c;
SELECT c.outcome FROM idem_claim('arguments', repeat(U&'\00e4', 127) || 'x') c;
SELECT c.outcome FROM idem_claim('arguments', repeat(U&'\+01F600', 63) || 'xyz') c;
SELECT c.outcome FROM idem_claim('arguments', E'\n\t '' " \\ \x01') c;
SELECT idem_complete('arguments', repeat('x', 255)), idem_complete('arguments', E'\n\t '' " \\ \x01');
SELECT (idem_status('arguments', E'\n\t '' " \\ \x01')).state;
ROLLBACK;

-- negative wait and lease: 22023; NULL wait is no wait at all where nobody holds the key
SELECT pg_temp.try($$SELECT idem_claim('arguments', 'k', wait => '-1 microsecond')$$);
SELECT pg_temp.try($$SELECT idem_claim('arguments', 'k', lease => '-1 second')$$);
SELECT pg_temp.try($$SELECT idem_once('arguments', 'k', wait => '-1 day')$$);
SELECT pg_temp.try($$SELECT idem_claim('arguments', 'k', wait => '1 day -25 hours')$$);
SELECT pg_temp.try($$SELECT idem_extend('arguments', 'k', 1, '-1 second')$$);
SELECT pg_temp.try($$SELECT idem_checkpoint('arguments', 'k', 1, 'p', lease => '-1 second')$$);
SELECT pg_temp.try($$SELECT idem_recover('arguments', 1, '-1 second')$$);
BEGIN;
SELECT outcome FROM idem_claim('arguments', 'k', wait => NULL);
SELECT outcome FROM idem_claim('arguments', 'k2', lease => '0', wait => '178000000 years');
SELECT outcome FROM idem_claim('arguments leased', 'k', lease => '0', wait => '1 month -29 days');
ROLLBACK;
-- a lease that never ends
SELECT outcome, retry_after FROM idem_claim('arguments', 'endless', lease => '178000000 years');
SELECT lease_until FROM idem.inflight WHERE key = 'endless';
SELECT outcome, retry_after FROM idem_claim('arguments', 'endless');

-- request and fingerprint both given: 22023
SELECT pg_temp.try($$SELECT idem_claim('arguments', 'k', '1', fingerprint => idem_fingerprint('1'))$$);
SELECT pg_temp.try($$SELECT idem_claim('arguments', 'k', '1'::json, fingerprint => idem_fingerprint('1'))$$);
SELECT pg_temp.try($$SELECT idem_claim('arguments', 'k', '1'::jsonb, fingerprint => idem_fingerprint('1'))$$);
SELECT pg_temp.try($$SELECT idem_once('arguments', 'k', '1', fingerprint => idem_fingerprint('1'))$$);

-- a request or response that is not JSON: 22P02; duplicate names in a request: 22030; a response is stored as it is
SELECT left(pg_temp.try($$SELECT idem_claim('arguments', 'k', 'not json')$$), 5);
SELECT left(pg_temp.try($$SELECT idem_claim('arguments', 'k', '')$$), 5);
SELECT left(pg_temp.try($$SELECT idem_once('arguments', 'k', '{"a": }')$$), 5);
SELECT left(pg_temp.try($$SELECT idem_claim('arguments', 'k', '{"a": 1, "a": 1}')$$), 5);
SELECT left(pg_temp.try($$SELECT idem_claim('arguments', 'k', '{"a": 1, "a": 1}'::json)$$), 5);
BEGIN;
SELECT outcome FROM idem_claim('arguments', 'k');
SELECT left(pg_temp.try($$SELECT idem_complete('arguments', 'k', 'not json')$$), 5);
SELECT left(pg_temp.try($$SELECT idem_fail('arguments', 'k', '{')$$), 5);
-- ... and the claim is still held
SELECT idem_complete('arguments', 'k', '{}');
ROLLBACK;
SELECT left(pg_temp.try($$SELECT idem_resolve('arguments', 'endless', 'succeeded', 'not json')$$), 5);
-- an include of which nothing matches: 22023
SELECT left(pg_temp.try($$SELECT idem_claim('arguments include', 'k', '{"amonut": 1}')$$), 5);
SELECT left(pg_temp.try($$SELECT idem_once('arguments include', 'k', '[]'::jsonb)$$), 5);

-- other arguments that must be given
SELECT pg_temp.try($$SELECT idem_checkpoint('arguments', 'endless', 1, NULL)$$);
SELECT pg_temp.try($$SELECT idem_resolve('arguments', 'endless', NULL)$$);
SELECT pg_temp.try($$SELECT idem_resolve('arguments', 'endless', 'Succeeded')$$);
SELECT pg_temp.try($$SELECT idem_resolve('arguments', 'endless', 'retry', '1')$$);
SELECT pg_temp.try($$SELECT idem_resolve('arguments', 'endless', 'retry', status_code => 1)$$);
SELECT pg_temp.try($$SELECT idem_recover('arguments')$$);
SELECT pg_temp.try($$SELECT idem_recover('arguments', 1, '0')$$);
SELECT pg_temp.try($$SELECT idem_recover('arguments', 0, '1 h')$$);
SELECT pg_temp.try($$SELECT idem_recover('arguments', NULL, '1 h')$$);
SELECT pg_temp.try($$SELECT idem_recover(NULL)$$);
SELECT pg_temp.try($$SELECT idem_recover('no such scope')$$);
SELECT pg_temp.try($$SELECT idem_quarantine(NULL)$$);
SELECT pg_temp.try($$SELECT idem_quarantine('no such scope')$$);
-- extend without a lease of either kind, and with none at all
SELECT pg_temp.try($$SELECT idem_extend('arguments', 'endless', 1)$$);
SELECT pg_temp.try($$SELECT idem_extend('arguments leased', 'k', 1, '0')$$);
-- no token for what needs one: ID002
SELECT pg_temp.try($$SELECT idem_extend('arguments', 'endless', NULL, '1 h')$$);
SELECT pg_temp.try($$SELECT idem_checkpoint('arguments', 'endless', NULL, 'p')$$);
SELECT pg_temp.try($$SELECT idem_unknown('arguments', 'endless', NULL)$$);

-- a read-only transaction: 25006 for all that may write; a status reads only
BEGIN READ ONLY;
SELECT pg_temp.try('SELECT ' || format(call, '''arguments''', '''k''')) AS answer FROM functions ORDER BY n;
SELECT pg_temp.try($$SELECT idem_recover('arguments', 1, '1 h')$$);
SELECT pg_temp.try($$SELECT idem_quarantine('arguments')$$);
COMMIT;

-- the truth: nothing but the endless lease was written
SELECT key, kept_in FROM idem.operation WHERE scope LIKE 'arguments%';

DELETE FROM idem.inflight WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'arguments%');
DELETE FROM idem.scope WHERE name LIKE 'arguments%';
DELETE FROM idem.audit WHERE scope LIKE 'arguments%';

-- idem_once(): true the first time, false for a duplicate, and an error where
-- neither would be true.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;

INSERT INTO idem.scope (name, archive, retention, archive_retention, keep_request) VALUES
	('once', 'key', '1 day', '1 day', 'inflight'),
	('once none', 'none', '1 day', '1 day', 'inflight'),
	('once full', 'full', '1 day', '1 day', 'always');
CREATE TEMP TABLE inbox (message text);

CREATE FUNCTION pg_temp.try(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	result text;
BEGIN
	EXECUTE statement INTO result;
	RETURN result;
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE || ': ' || SQLERRM;
END $$;

SELECT idem_once('once', 'a', '{"n": 1}');
SELECT idem_once('once', 'a', '{"n": 1.0}');
SELECT idem_once('once', 'a');
SELECT idem_once('once', 'a', fingerprint => idem_fingerprint('{"n":1}'));
-- what it leaves: one settled row without payload
SELECT token > 0 AS token, attempt, state, created_at <= completed_at AS times, status_code, headers, response, body, request,
	   fingerprint = idem_fingerprint('{"n":1}') AS fingerprint
FROM idem.result WHERE scope_id = (SELECT id FROM idem.scope WHERE name = 'once');

-- ID004: another request
SELECT idem_once('once', 'a', '{"n": 2}');
\echo :SQLSTATE
SELECT pg_temp.try($$SELECT idem_once('once', 'a', fingerprint => idem_fingerprint('{"n":2}'))$$);

-- in a filter: each message once
WITH messages (m) AS (VALUES ('m1'), ('m2'), ('m1'), ('m3'), ('m2'), ('m1'))
INSERT INTO inbox SELECT m FROM messages WHERE idem_once('once', m);
INSERT INTO inbox SELECT m FROM (VALUES ('m3'), ('m4')) v (m) WHERE idem_once('once', m);
SELECT message, count(*) FROM inbox GROUP BY message ORDER BY message;

-- rolled back with the work
BEGIN;
SELECT idem_once('once', 'rolled back');
ROLLBACK;
SELECT idem_once('once', 'rolled back');
BEGIN;
SELECT idem_once('once', 'sub');
SAVEPOINT s;
SELECT idem_once('once', 'sub 2');
ROLLBACK TO s;
SELECT idem_once('once', 'sub 2'), idem_once('once', 'sub');
COMMIT;
SELECT idem_once('once', 'sub 2'), idem_once('once', 'sub');

-- ID005: an own claim that is not settled yet, whatever the wait
BEGIN;
SELECT outcome FROM idem_claim('once', 'own', '1');
SELECT pg_temp.try($$SELECT idem_once('once', 'own', '1')$$), pg_temp.try($$SELECT idem_once('once', 'own', '1', wait => '0')$$);
-- ... and ID004 if the request is another
SELECT pg_temp.try($$SELECT idem_once('once', 'own', '2')$$);
SELECT idem_complete('once', 'own');
SELECT idem_once('once', 'own', '1');
COMMIT;
-- released: the inbox may have it
BEGIN;
SELECT outcome FROM idem_claim('once', 'released');
SELECT idem_release('once', 'released');
SELECT idem_once('once', 'released');
COMMIT;
SELECT idem_once('once', 'released');

-- ID005: a lease, at once, whatever the wait
SELECT token FROM idem_claim('once', 'leased', lease => '1 hour') \gset
SELECT idem_once('once', 'leased');
\echo :SQLSTATE
SELECT pg_temp.try($$SELECT idem_once('once', 'leased', wait => '1 hour')$$);
-- ID005: in doubt
SELECT idem_unknown('once', 'leased', :token);
SELECT idem_once('once', 'leased');
\echo :SQLSTATE
-- a lease that is over is taken over; its row goes
SELECT outcome FROM idem_claim('once full', 'leased', '{"first": true}', lease => '1 hour');
UPDATE idem.inflight SET lease_until = now() - interval '1 second' WHERE scope_id = (SELECT id FROM idem.scope WHERE name = 'once full');
SELECT pg_temp.try($$SELECT idem_once('once full', 'leased', '{"first": false}')$$);
SELECT idem_once('once full', 'leased'), idem_once('once full', 'leased');
SELECT state, attempt, kept_in, fingerprint = idem_fingerprint('{"first":true}') AS fingerprint
FROM idem.operation WHERE scope = 'once full' AND key = 'leased';
-- ... and with it the request of the first holder moves on, where the policy is always
SELECT request FROM idem.result WHERE scope_id = (SELECT id FROM idem.scope WHERE name = 'once full') AND key = 'leased';

-- a finally failed operation is a duplicate too
BEGIN;
SELECT outcome FROM idem_claim('once', 'failed');
SELECT idem_fail('once', 'failed');
COMMIT;
SELECT idem_once('once', 'failed');

-- expired is false; past what is kept it is the first time again
SELECT idem_once('once none', 'old'), idem_once('once full', 'old', '{"kept": 1}'), idem_once('once', 'old');
UPDATE idem.result SET completed_at = completed_at - interval '1 day' WHERE key = 'old';
SELECT idem_once('once none', 'old') AS none, idem_once('once full', 'old') AS full, idem_once('once', 'old') AS key;
WITH moved AS (DELETE FROM idem.result WHERE key = 'old' AND scope_id = (SELECT id FROM idem.scope WHERE name = 'once full') RETURNING *)
INSERT INTO idem.archive SELECT *, now() FROM moved;
SELECT idem_once('once full', 'old') AS full;
UPDATE idem.result SET completed_at = completed_at - interval '1 day' WHERE key = 'old';
UPDATE idem.archive SET completed_at = completed_at - interval '1 day' WHERE key = 'old';
SELECT idem_once('once none', 'old') AS none, idem_once('once full', 'old') AS full, idem_once('once', 'old') AS key;
SELECT idem_once('once none', 'old') AS none, idem_once('once full', 'old') AS full, idem_once('once', 'old') AS key;
SELECT (SELECT count(*) FROM idem.result WHERE key = 'old') AS results, (SELECT count(*) FROM idem.archive WHERE key = 'old') AS archived;

-- it holds no lock beyond its row, however many there are
BEGIN;
SELECT count(*) AS first FROM generate_series(1, 20000) i WHERE idem_once('once', 'many ' || i);
SELECT count(*) AS key_locks FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 7453 AND pid = pg_backend_pid();
SELECT count(*) AS first FROM generate_series(1, 20000) i WHERE idem_once('once', 'many ' || i);
COMMIT;

DELETE FROM idem.result WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'once%');
DELETE FROM idem.inflight WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'once%');
DELETE FROM idem.scope WHERE name LIKE 'once%';
DELETE FROM idem.audit WHERE scope LIKE 'once%';

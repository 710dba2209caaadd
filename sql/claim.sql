-- The decision table of idem_claim(), the lines that need no lease: each is
-- shown once by its name, with the clock turned by moving rows into the past.
-- Then what counts as another request, and what a claim leaves behind.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;

INSERT INTO idem.scope (name, archive, retention, archive_retention, keep_request) VALUES
	('claim none', 'none', '1 day', '10 days', 'inflight'),
	('claim key', 'key', '1 day', '10 days', 'inflight'),
	('claim full', 'full', '1 day', '10 days', 'always'),
	('claim ever', 'none', NULL, NULL, 'inflight');

-- what of an answer does not change from run to run
CREATE FUNCTION pg_temp.show(a idem_answer, OUT outcome text, OUT state text, OUT attempt int, OUT status int,
	OUT response text, OUT token text, OUT retry_after interval, OUT times text)
LANGUAGE sql AS $$
	SELECT a.outcome, a.state, a.attempt, a.status_code, a.response::text,
		   CASE WHEN a.token IS NOT NULL THEN 'yes' END, a.retry_after,
		   concat_ws(' ', CASE WHEN a.created_at <= clock_timestamp() THEN 'created' END,
					 CASE WHEN a.completed_at <= clock_timestamp() THEN 'completed' END)
$$;
-- makes a settled key older
CREATE FUNCTION pg_temp.age(k text, older interval) RETURNS bigint LANGUAGE sql AS $$
	WITH u AS (UPDATE idem.result SET created_at = created_at - older, completed_at = completed_at - older
			   WHERE key = k AND scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'claim %') RETURNING 1)
	SELECT count(*) FROM u
$$;

-- line: nothing -> claimed
BEGIN;
SELECT * FROM pg_temp.show(idem_claim('claim key', 'k1', '{"amount": 1}'));
-- a transaction-scoped claim writes nothing, not even a transaction id
SELECT pg_current_xact_id_if_assigned() IS NULL AS nothing_written;
SELECT count(*) AS rows FROM idem.operation WHERE scope LIKE 'claim %';

-- line: held by this very transaction and not settled -> in_progress, with its token
SELECT * FROM pg_temp.show(idem_claim('claim key', 'k1', '{"amount":1.0}'));
-- line: the same with another request -> mismatch
SELECT * FROM pg_temp.show(idem_claim('claim key', 'k1', '{"amount": 2}'));
-- ... and without one, or with the fingerprint itself, it is the same request
SELECT outcome FROM idem_claim('claim key', 'k1');
SELECT outcome FROM idem_claim('claim key', 'k1', fingerprint => idem_fingerprint('{"amount":1}'));
SELECT outcome FROM idem_claim('claim key', 'k1', fingerprint => idem_fingerprint('{"amount":2}'));
SELECT idem_complete('claim key', 'k1', '{"id":  7}', status_code => 201, headers => '{"Location": "/7"}', body => '\x00ff');
COMMIT;

-- line: result inside its retention -> replayed, byte for byte
SELECT * FROM pg_temp.show(idem_claim('claim key', 'k1', '{"amount":1}'));
SELECT outcome, response, status_code, headers, body, token, request, recovery_point, checkpoint
FROM idem_claim('claim key', 'k1', '{"amount":1}');
-- a replay in an autocommit transaction is no claim: nothing to settle, nothing written
BEGIN;
SELECT outcome FROM idem_claim('claim key', 'k1', '{"amount":1}');
SELECT pg_current_xact_id_if_assigned() IS NULL AS nothing_written;
SELECT count(*) AS key_locks FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 7453 AND pid = pg_backend_pid();
COMMIT;

-- line: a row that speaks, with another fingerprint -> mismatch, audited once for each fingerprint
SELECT * FROM pg_temp.show(idem_claim('claim key', 'k1', '{"amount":3}'));
SELECT outcome FROM idem_claim('claim key', 'k1', '{"amount":3}');
SELECT outcome FROM idem_claim('claim key', 'k1', '{"amount":3.0}');
SELECT outcome FROM idem_claim('claim key', 'k1', '{"amount":4}');
SELECT event, scope, key, who = current_user AS who, application = current_setting('application_name') AS application,
	   fingerprint = idem_fingerprint('{"amount":3}') AS third, fingerprint = idem_fingerprint('{"amount":4}') AS fourth, old, new
FROM idem.audit WHERE scope = 'claim key' ORDER BY at;
-- the own claim of k1 above was not audited: it had no row
SELECT count(*) FILTER (WHERE event = 'mismatch') AS mismatches FROM idem.audit WHERE scope LIKE 'claim %';

-- line: older, archive = key -> expired, with state and times, swept or not
SELECT pg_temp.age('k1', '1 day');
SELECT * FROM pg_temp.show(idem_claim('claim key', 'k1', '{"amount":1}'));
SELECT outcome, status_code, headers, response, body, request FROM idem_claim('claim key', 'k1');
-- a tombstone still tells another request
SELECT outcome FROM idem_claim('claim key', 'k1', '{"amount":4}');
-- as the sweep would leave it
UPDATE idem.result SET headers = NULL, response = NULL, body = NULL, request = NULL WHERE key = 'k1';
SELECT * FROM pg_temp.show(idem_claim('claim key', 'k1', '{"amount":1}'));

-- past completed_at + retention + archive_retention: nothing -> claimed, the old row goes when it is settled
SELECT pg_temp.age('k1', '10 days');
BEGIN;
SELECT * FROM pg_temp.show(idem_claim('claim key', 'k1', '{"amount":99}'));
SELECT count(*) AS old_rows FROM idem.result WHERE key = 'k1' AND completed_at < now() - interval '1 day';
SELECT idem_fail('claim key', 'k1', '"no funds"', status_code => 402);
COMMIT;
SELECT * FROM pg_temp.show(idem_claim('claim key', 'k1', '{"amount":99}'));
SELECT count(*) AS rows, min(completed_at) > now() - interval '1 hour' AS new FROM idem.result WHERE key = 'k1';
-- ... and if it is not settled it stays
SELECT pg_temp.age('k1', '11 days');
BEGIN;
SELECT outcome FROM idem_claim('claim key', 'k1');
ROLLBACK;
SELECT count(*) AS rows FROM idem.result WHERE key = 'k1';

-- retention is exact: a second before its end replayed, at its end not
BEGIN;
SELECT outcome FROM idem_claim('claim none', 'edge');
SELECT idem_complete('claim none', 'edge');
COMMIT;
UPDATE idem.result SET completed_at = now() - interval '1 day' + interval '1 minute' WHERE key = 'edge';
SELECT outcome FROM idem_claim('claim none', 'edge');
UPDATE idem.result SET completed_at = now() - interval '1 day' WHERE key = 'edge';

-- archive = none, past retention: nothing -> claimed
BEGIN;
SELECT outcome FROM idem_claim('claim none', 'edge', '"another request"');
SELECT idem_complete('claim none', 'edge', '2');
COMMIT;
SELECT outcome, response FROM idem_claim('claim none', 'edge', '"another request"');
SELECT count(*) AS rows FROM idem.result WHERE key = 'edge';

-- archive = full, past retention, not swept -> replayed from idem.result
BEGIN;
SELECT outcome FROM idem_claim('claim full', 'k1', '{"full": true}');
SELECT idem_complete('claim full', 'k1', '{"r": 1}', status_code => 200);
COMMIT;
SELECT pg_temp.age('k1', '2 days');
SELECT * FROM pg_temp.show(idem_claim('claim full', 'k1', '{"full": true}'));

-- line: older, archive = full -> replayed, from idem.archive once the sweep has moved it
WITH moved AS (DELETE FROM idem.result r USING idem.scope s WHERE s.id = r.scope_id AND s.name = 'claim full' RETURNING r.*)
INSERT INTO idem.archive SELECT *, now() FROM moved;
SELECT * FROM pg_temp.show(idem_claim('claim full', 'k1', '{"full": true}'));
SELECT outcome FROM idem_claim('claim full', 'k1', '{"full": false}');
-- a holder that did not get the answer settles again: its row is archived
SELECT idem_complete('claim full', 'k1', '{"r": 1}', status_code => 200, token => token) FROM idem.archive WHERE key = 'k1';
-- past archive retention too: nothing -> claimed; settling deletes the archived row
UPDATE idem.archive SET completed_at = completed_at - interval '10 days' WHERE key = 'k1';
BEGIN;
SELECT * FROM pg_temp.show(idem_claim('claim full', 'k1', '{"full": 2}'));
SELECT idem_complete('claim full', 'k1', '{"r": 2}');
COMMIT;
SELECT (SELECT count(*) FROM idem.archive WHERE key = 'k1') AS archived, response, request
FROM idem.result r JOIN idem.scope s ON s.id = r.scope_id WHERE s.name = 'claim full' AND key = 'k1';
-- so does a claim under a lease, at once
WITH moved AS (DELETE FROM idem.result r USING idem.scope s WHERE s.id = r.scope_id AND s.name = 'claim full' RETURNING r.*)
INSERT INTO idem.archive SELECT *, now() FROM moved;
UPDATE idem.archive SET completed_at = completed_at - interval '100 days' WHERE key = 'k1';
SELECT outcome, attempt FROM idem_claim('claim full', 'k1', '{"full": 3}', lease => '1 hour');
SELECT kept_in, state FROM idem.operation WHERE scope = 'claim full' AND key = 'k1';
SELECT idem_complete('claim full', 'k1', '{"r": 3}', token => token) FROM idem.inflight WHERE key = 'k1';

-- retention NULL: for ever
BEGIN;
SELECT outcome FROM idem_claim('claim ever', 'k1');
SELECT idem_complete('claim ever', 'k1', '1');
COMMIT;
UPDATE idem.result r SET completed_at = '-infinity' FROM idem.scope s WHERE s.id = r.scope_id AND s.name = 'claim ever';
SELECT outcome FROM idem_claim('claim ever', 'k1');
UPDATE idem.result r SET completed_at = '1001-01-01' FROM idem.scope s WHERE s.id = r.scope_id AND s.name = 'claim ever';
SELECT outcome, response FROM idem_claim('claim ever', 'k1');

-- fingerprints are compared only if both are known
BEGIN;
SELECT outcome FROM idem_claim('claim key', 'unknown');
SELECT outcome FROM idem_claim('claim key', 'unknown', '{"any": "request"}');
SELECT idem_complete('claim key', 'unknown');
COMMIT;
SELECT outcome FROM idem_claim('claim key', 'unknown', '{"any": "other"}');
SELECT fingerprint IS NULL AS not_known FROM idem.operation WHERE scope = 'claim key' AND key = 'unknown';
BEGIN;
SELECT outcome FROM idem_claim('claim key', 'known', '{"any": "request"}');
SELECT idem_complete('claim key', 'known');
COMMIT;
SELECT outcome FROM idem_claim('claim key', 'known');
SELECT fingerprint = idem_fingerprint('{"any":"request"}') AS known FROM idem.operation WHERE scope = 'claim key' AND key = 'known';
-- a JSON null is a request; an SQL NULL is none
SELECT outcome FROM idem_claim('claim key', 'known', 'null');
SELECT outcome FROM idem_claim('claim key', 'known', NULL);

-- keep_request = always: the request as it was given; inflight: gone once settled
BEGIN;
SELECT outcome FROM idem_claim('claim full', 'kept', '{"b": 1,  "a": 2}');
SELECT outcome FROM idem_claim('claim key', 'kept', '{"b": 1,  "a": 2}');
SELECT idem_complete('claim full', 'kept'), idem_complete('claim key', 'kept');
COMMIT;
SELECT s.name, r.request FROM idem.result r JOIN idem.scope s ON s.id = r.scope_id WHERE key = 'kept' ORDER BY s.name;

-- keys are told apart byte for byte, and by scope
BEGIN;
SELECT count(*) FILTER (WHERE (idem_claim('claim key', k)).outcome = 'claimed') AS different_keys
FROM unnest(ARRAY[U&'\00e4', U&'\00c4', U&'a\0308', 'a', 'A', 'a ', ' a', 'a\0']) k;
SELECT outcome FROM idem_claim('claim none', 'a');
ROLLBACK;

-- the same key twice in one statement, and several evaluations of one call: never two claims
BEGIN;
SELECT (idem_claim('claim key', 'twice')).outcome AS a, (idem_claim('claim key', 'twice')).outcome AS b;
SELECT count(DISTINCT (idem_claim('claim key', 'twice')).token) AS tokens FROM generate_series(1, 5);
CREATE TEMP TABLE expanded AS SELECT (idem_claim('claim key', 'expanded', '{"a":1}')).*;
SELECT outcome, token IS NOT NULL AS token, attempt, state FROM expanded;
SELECT e.token = c.token AS same_token, c.outcome FROM expanded e, idem_claim('claim key', 'expanded') c;
SELECT idem_complete('claim key', k) FROM unnest(ARRAY['twice', 'expanded']) k;
COMMIT;
SELECT key, count(*) AS rows FROM idem.result WHERE key IN ('twice', 'expanded') GROUP BY key ORDER BY key;

-- claim again after completion in one transaction: replayed; other request: mismatch
BEGIN;
SELECT outcome FROM idem_claim('claim key', 'again', '1');
SELECT idem_complete('claim key', 'again', '"done"');
SELECT outcome, response FROM idem_claim('claim key', 'again', '1');
SELECT outcome FROM idem_claim('claim key', 'again', '2');
ROLLBACK;
-- rolled back: new again, and the audit row of the mismatch went too
BEGIN;
SELECT outcome FROM idem_claim('claim key', 'again', '2');
ROLLBACK;
SELECT count(*) AS audited FROM idem.audit WHERE scope = 'claim key' AND key = 'again';

-- claims of many keys in one statement, settled in another
BEGIN;
SELECT count(*) FILTER (WHERE (c).outcome = 'claimed') AS claimed, count(DISTINCT (c).token) > 0 AS tokens
FROM (SELECT idem_claim('claim key', 'm' || i) AS c FROM generate_series(1, 1000) i OFFSET 0) s;
SELECT count(*) AS in_progress FROM generate_series(1, 1000) i, idem_claim('claim key', 'm' || i) c WHERE c.outcome = 'in_progress';
SELECT count(*) AS settled FROM generate_series(1, 1000) i WHERE idem_complete('claim key', 'm' || i, to_json(i)) = 'succeeded';
COMMIT;
SELECT count(*) AS right_answers FROM generate_series(1, 1000) i, idem_claim('claim key', 'm' || i) c
WHERE c.outcome = 'replayed' AND c.response::text = i::text;

-- the transaction's own rows are never a reason for 40001, nor is what its snapshot sees
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT outcome FROM idem_claim('claim key', 'known', '{"any": "request"}');
SELECT outcome FROM idem_claim('claim key', 'serializable', '1');
SELECT idem_complete('claim key', 'serializable', '"own"');
SELECT outcome, response FROM idem_claim('claim key', 'serializable', '1');
SELECT outcome FROM idem_claim('claim key', 'serializable', '2');
SELECT outcome FROM idem_claim('claim key', 'serializable leased', lease => '1 h');
SELECT outcome FROM idem_claim('claim key', 'serializable leased', lease => '1 h');
COMMIT;
DELETE FROM idem.inflight WHERE key = 'serializable leased';

-- a retention of zero: what is settled does not speak for a moment, or only as a tombstone
UPDATE idem.scope SET retention = '0' WHERE name IN ('claim none', 'claim key');
BEGIN;
SELECT idem_once('claim none', 'zero'), idem_once('claim none', 'zero'), idem_once('claim key', 'zero'), idem_once('claim key', 'zero');
SELECT outcome FROM idem_claim('claim none', 'zero');
SELECT idem_complete('claim none', 'zero');
SELECT outcome FROM idem_claim('claim none', 'zero', 'null');
SELECT idem_fail('claim none', 'zero');
COMMIT;
SELECT name, r.state, count(*) FROM idem.result r JOIN idem.scope s ON s.id = r.scope_id WHERE key = 'zero' GROUP BY name, r.state ORDER BY name;
SELECT outcome, state FROM idem_claim('claim key', 'zero');
UPDATE idem.scope SET retention = '1 day' WHERE name IN ('claim none', 'claim key');

-- tokens grow, also beyond a token that is in the far future
UPDATE idem.result SET token = 9007199254740000, completed_at = '2001-01-01' WHERE key = 'edge';
BEGIN;
SELECT outcome, token FROM idem_claim('claim none', 'edge');
ROLLBACK;

DELETE FROM idem.result WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'claim %');
WITH d AS (DELETE FROM idem.scope WHERE name LIKE 'claim %' RETURNING 1) SELECT count(*) AS deleted FROM d;
DELETE FROM idem.audit WHERE scope LIKE 'claim %';

-- What operators do: status, recover, resolve, forget, quarantine; and the audit
-- rows that it leaves.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;

INSERT INTO idem.scope (name, lease, on_expiry, max_attempts, keep_request, archive) VALUES
	('operators', '1 hour', 'retry', NULL, 'always', 'key'),
	('operators hold', '1 hour', 'hold', NULL, 'inflight', 'key'),
	('operators full', NULL, 'retry', NULL, 'inflight', 'full'),
	('operators other', '1 hour', 'retry', NULL, 'inflight', 'key');

CREATE FUNCTION pg_temp.try(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	result text;
BEGIN
	EXECUTE statement INTO result;
	RETURN coalesce(result, 'NULL');
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE || ': ' || SQLERRM;
END $$;
-- a key in a state of one's choice; its token
CREATE FUNCTION pg_temp.make(s text, k text, want "char", request text DEFAULT NULL) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	t bigint := (idem_claim(s, k, request, lease => '1 hour')).token;
	scope int := (SELECT id FROM idem.scope WHERE name = s);
BEGIN
	CASE want
		WHEN 'p' THEN NULL;
		WHEN 'o' THEN UPDATE idem.inflight SET lease_until = now() - interval '1 minute' WHERE key = k AND scope_id = scope;
		WHEN 'e' THEN PERFORM idem_release(s, k, t);
		WHEN 'u' THEN PERFORM idem_unknown(s, k, t);
		WHEN 's' THEN PERFORM idem_complete(s, k, '{"done": true}', t, 200, '{"h": 1}', '\x01');
		WHEN 'f' THEN PERFORM idem_fail(s, k, '{"done": false}', t, 400);
	END CASE;
	RETURN t;
END $$;
CREATE FUNCTION pg_temp.audited(k text) RETURNS TABLE (event text, who boolean, old jsonb, new jsonb, fingerprint boolean) LANGUAGE sql AS $$
	SELECT event, who = current_user, old - 'token', new, fingerprint IS NOT NULL FROM idem.audit WHERE key IS NOT DISTINCT FROM k AND scope LIKE 'operators%' ORDER BY at
$$;

-- status: what a claim would answer now, NULL where it would execute; it writes nothing
SELECT s, pg_temp.make('operators', 'status ' || s, s::"char", '{"r": 1}') > 0 AS made FROM unnest(ARRAY['p', 'o', 'e', 'u', 's', 'f']) s;
SELECT s, (a).outcome, (a).state, (a).attempt, (a).token, (a).status_code, (a).headers, (a).response, (a).body, (a).request, (a).retry_after > '50 minutes' AS retry,
	   (a).completed_at IS NOT NULL AS completed
FROM (SELECT s, idem_status('operators', 'status ' || s) AS a FROM unnest(ARRAY['p', 'o', 'e', 'u', 's', 'f', 'never']) s OFFSET 0) x;
UPDATE idem.result SET completed_at = now() - interval '2 days' WHERE key = 'status s';
UPDATE idem.result SET completed_at = now() - interval '1 year' WHERE key = 'status f';
SELECT s, (a).outcome, (a).state, (a).response FROM (SELECT s, idem_status('operators', 'status ' || s) AS a FROM unnest(ARRAY['s', 'f']) s OFFSET 0) x;
BEGIN;
SELECT outcome FROM idem_claim('operators', 'status own', lease => '0');
SELECT outcome, state, attempt FROM idem_status('operators', 'status own');
ROLLBACK;
-- idem.operation shows rows as they are stored
SELECT key, state, kept_in FROM idem.operation WHERE scope = 'operators' AND key LIKE 'status%' ORDER BY key;

-- resolve: succeeded and failed settle, with what is given, and the request of the holder where it is kept
SELECT pg_temp.make('operators', 'r' || n, 'u', '{"r": 1}') > 0 AS in_doubt FROM generate_series(1, 4) n;
SELECT idem_resolve('operators', 'r1', 'succeeded', '{"by": "hand"}', 201, '{"x": 1}', '\x02');
SELECT outcome, state, attempt, response, status_code, headers, body FROM idem_claim('operators', 'r1', '{"r": 1}');
SELECT outcome FROM idem_claim('operators', 'r1', '{"r": 2}');
SELECT request FROM idem.result WHERE key = 'r1';
SELECT idem_resolve('operators', 'r2', 'failed', '{"by": "hand"}'::json);
SELECT outcome, state, response FROM idem_claim('operators', 'r2');
SELECT idem_resolve('operators', 'r3', 'retry');
SELECT outcome, state, attempt FROM idem_status('operators', 'r3');
SELECT outcome, attempt, request FROM idem_claim('operators', 'r3', '{"r": 1}');
SELECT idem_resolve('operators', 'r4', 'succeeded', '{"by": "hand"}'::jsonb);
SELECT count(*) AS inflight FROM idem.inflight WHERE key IN ('r1', 'r2', 'r4');
SELECT k, a.* FROM unnest(ARRAY['r1', 'r2', 'r3']) k, pg_temp.audited(k) a;
-- the audit names the token, which the outside system may have seen
SELECT (old ->> 'token')::bigint > 0 AS token FROM idem.audit WHERE key = 'r1' AND event = 'resolve';
-- in doubt by the clock alone counts as well
SELECT pg_temp.make('operators hold', 'r5', 'o') > 0 AS over;
SELECT idem_resolve('operators hold', 'r5', 'retry');
SELECT outcome, attempt FROM idem_claim('operators hold', 'r5');
-- a key not in doubt: 55000, in every other state
SELECT s, pg_temp.make('operators', 'not ' || s, s::"char") > 0 AS made FROM unnest(ARRAY['p', 'o', 'e', 's', 'f']) s;
SELECT s, pg_temp.try(format($$SELECT idem_resolve('operators', %L, 'succeeded')$$, 'not ' || s)) FROM unnest(ARRAY['p', 'o', 'e', 's', 'f', 'never']) s;
BEGIN;
SELECT outcome FROM idem_claim('operators', 'own', lease => '0');
SELECT pg_temp.try($$SELECT idem_resolve('operators', 'own', 'succeeded')$$);
ROLLBACK;
-- a late completion is accepted after resolve retry, as long as nobody has taken over; and not after another verdict
SELECT pg_temp.make('operators', 'late', 'u') AS token \gset
SELECT idem_resolve('operators', 'late', 'retry');
SELECT idem_complete('operators', 'late', '"late"', :token);
SELECT pg_temp.make('operators', 'late 2', 'u') AS token \gset
SELECT idem_resolve('operators', 'late 2', 'failed', '"hand"');
SELECT idem_fail('operators', 'late 2', '"late"', :token);
\set VERBOSITY sqlstate
SELECT idem_complete('operators', 'late 2', '"late"', :token);
\set VERBOSITY default
SELECT key, (idem_status('operators', key)).state, (idem_status('operators', key)).response FROM unnest(ARRAY['late', 'late 2']) key;

-- recover: free keys and those whose lease is over, oldest first, up to max, with what their holders had reached
DELETE FROM idem.inflight WHERE scope_id = (SELECT id FROM idem.scope WHERE name = 'operators');
SELECT s, pg_temp.make('operators', 'c' || s, s::"char", '{"n": "' || s || '"}') > 0 AS made FROM unnest(ARRAY['p', 'o', 'e', 'u']) s;
SELECT pg_temp.make('operators other', 'elsewhere', 'e') > 0 AS made;
SELECT pg_temp.make('operators', 'oldest', 'p') AS token \gset
SELECT idem_checkpoint('operators', 'oldest', :token, 'charged', '{"id": 1}');
UPDATE idem.inflight SET lease_until = now() - interval '1 minute', updated_at = now() - interval '10 minutes' WHERE key = 'oldest';
UPDATE idem.inflight SET updated_at = now() - interval '5 minutes' WHERE key = 'ce' AND scope_id = (SELECT id FROM idem.scope WHERE name = 'operators');
SELECT key, outcome, attempt, state, token > :token AS new_token, request, recovery_point, checkpoint, completed_at, retry_after FROM idem_recover('operators');
SELECT key, outcome, attempt, state, request, recovery_point FROM idem_recover('operators', 10, '2 hours');
SELECT key FROM idem_recover('operators', 10);
SELECT key, lease_until > now() + interval '110 minutes' AS two_hours FROM idem.inflight WHERE scope_id = (SELECT id FROM idem.scope WHERE name = 'operators') AND state = 'p' ORDER BY key;
-- ... the recovered token settles, the old one has lost
\set VERBOSITY sqlstate
SELECT idem_complete('operators', 'oldest', '1', :token);
\set VERBOSITY default
SELECT idem_complete('operators', key, '"recovered"', token) FROM idem.operation WHERE scope = 'operators' AND key = 'oldest';
-- ... not what is in doubt by the clock, and not what this transaction has claimed
SELECT pg_temp.make('operators hold', 'held', 'o') > 0 AS over;
SELECT count(*) FROM idem_recover('operators hold', 10);
SELECT pg_temp.make('operators', 'taken', 'e') > 0 AS free;
BEGIN;
SELECT outcome FROM idem_claim('operators', 'taken', lease => '0');
SELECT count(*) FROM idem_recover('operators', 10);
ROLLBACK;
-- ... many, in two goes, each once
INSERT INTO idem.inflight (token, lease_until, created_at, updated_at, scope_id, attempt, form, state, key)
SELECT i, now(), now(), now() - interval '1 hour' + i * interval '1 s', id, 1, 1, 'e', 'many ' || i FROM generate_series(1, 500) i, idem.scope WHERE name = 'operators other';
SELECT count(DISTINCT key) AS first FROM idem_recover('operators other', 300);
SELECT count(DISTINCT key) AS rest FROM idem_recover('operators other', 300);
SELECT count(*) AS inflight, count(DISTINCT token) > 1 AS tokens, max(attempt) AS attempt FROM idem.inflight WHERE key LIKE 'many %';

-- forget: the data goes, the verdict stays; unless told not to
SELECT s, pg_temp.make('operators', 'forget ' || s, s::"char", '{"secret": 1}') > 0 AS made FROM unnest(ARRAY['s', 'f', 'p', 'e', 'u']) s;
SELECT idem_forget('operators', 'forget s');
SELECT outcome, state, status_code, headers, response, body FROM idem_claim('operators', 'forget s', '{"secret": 1}');
SELECT request IS NULL AND response IS NULL AND headers IS NULL AND body IS NULL AS erased, fingerprint IS NOT NULL AS verdict FROM idem.result WHERE key = 'forget s';
SELECT outcome FROM idem_claim('operators', 'forget s', '{"secret": 2}');
SELECT idem_forget('operators', 'forget f', false);
SELECT count(*) AS rows FROM idem.operation WHERE key = 'forget f';
BEGIN;
SELECT outcome FROM idem_claim('operators', 'forget f', '"anything"', lease => '0');
ROLLBACK;
-- ... NULL is the default, the cautious one
SELECT idem_forget('operators', 'forget s', NULL), (SELECT count(*) FROM idem.result WHERE key = 'forget s') AS rows;
SELECT idem_forget('operators', 'forget s', false), idem_forget('operators', 'forget s', false) AS again, idem_forget('operators', 'never');
SELECT k, a.* FROM unnest(ARRAY['forget s', 'forget f']) k, pg_temp.audited(k) a WHERE event = 'forget';
-- ... in flight: 55000, also by a claim of this transaction; just settled by it, the data goes
SELECT s, pg_temp.try(format($$SELECT idem_forget('operators', %L)$$, 'forget ' || s)) FROM unnest(ARRAY['p', 'e', 'u']) s;
BEGIN;
SELECT outcome FROM idem_claim('operators', 'forget own', lease => '0');
SELECT pg_temp.try($$SELECT idem_forget('operators', 'forget own')$$);
SELECT idem_complete('operators', 'forget own', '"secret"');
SELECT idem_forget('operators', 'forget own');
COMMIT;
SELECT outcome, response FROM idem_claim('operators', 'forget own');
-- ... archived keys too
INSERT INTO idem.archive (token, created_at, completed_at, scope_id, attempt, form, state, key, response, archived_at)
SELECT 1, now(), now() - interval '2 days', id, 1, 1, 's', 'archived', '"secret"', now() FROM idem.scope WHERE name = 'operators full';
SELECT idem_forget('operators full', 'archived');
SELECT outcome, response FROM idem_claim('operators full', 'archived');
SELECT idem_forget('operators full', 'archived', false);
SELECT count(*) AS rows FROM idem.archive WHERE key = 'archived';

-- quarantine: everything in flight is in doubt, free keys too; settled ones are not touched
DELETE FROM idem.inflight WHERE scope_id = (SELECT id FROM idem.scope WHERE name = 'operators');
SELECT s, pg_temp.make('operators', 'q' || s, s::"char") > 0 AS made FROM unnest(ARRAY['p', 'o', 'e', 'u', 's']) s;
SELECT idem_quarantine('operators'), idem_quarantine('operators') AS again;
SELECT key, state, lease_until FROM idem.operation WHERE scope = 'operators' AND key LIKE 'q%' ORDER BY key;
SELECT key, (idem_claim('operators', key)).outcome FROM unnest(ARRAY['qp', 'qo', 'qe', 'qu', 'qs']) key;
SELECT * FROM pg_temp.audited(NULL) WHERE event = 'quarantine';
-- ... a holder who did succeed can still say so; the others are resolved
SELECT idem_complete('operators', 'qp', '1', token) FROM idem.inflight WHERE key = 'qp';
SELECT idem_resolve('operators', k, 'retry') FROM unnest(ARRAY['qo', 'qe']) k;
SELECT key, state FROM idem.operation WHERE scope = 'operators' AND key LIKE 'q%' ORDER BY key;
-- ... other scopes are not concerned
SELECT state, count(*) FROM idem.operation WHERE scope = 'operators other' GROUP BY state;
SELECT idem_quarantine('operators full');
-- ... rolled back, nothing happened
BEGIN;
SELECT idem_quarantine('operators other') > 500 AS many;
ROLLBACK;
SELECT count(*) AS in_doubt FROM idem.operation WHERE scope = 'operators other' AND state = 'unknown';

-- what this transaction holds shows in idem.holder, by the hash that the server log names keys with
BEGIN;
SELECT outcome FROM idem_claim('operators', 'holder', lease => '0');
SELECT pid = pg_backend_pid() AS pid, gid, role = session_user AS role, application = current_setting('application_name') AS application,
	   since = now() AS since, session_state, key_hash IS NOT NULL AS key_hash FROM idem.holder WHERE pid = pg_backend_pid();
ROLLBACK;
SELECT count(*) FROM idem.holder WHERE pid = pg_backend_pid();

DELETE FROM idem.inflight WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'operators%');
DELETE FROM idem.result WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'operators%');
DELETE FROM idem.scope WHERE name LIKE 'operators%';
DELETE FROM idem.audit WHERE scope LIKE 'operators%';

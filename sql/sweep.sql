-- The sweep: each transition with the policy that causes it; that no answer
-- depends on whether a sweep has been there; its bounds, its clock guard, who may
-- call it. The clock is turned by moving rows into the past.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;

CREATE FUNCTION pg_temp.try(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	result text;
BEGIN
	EXECUTE statement INTO result;
	RETURN coalesce(result, 'NULL');
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE || ': ' || SQLERRM;
END $$;
-- sweeps until there is no more, as a job would; what was done, and in how many sweeps
CREATE FUNCTION pg_temp.sweep(max_rows int DEFAULT 10000, OUT reclaimed bigint, OUT held bigint, OUT archived bigint, OUT purged bigint, OUT sweeps bigint)
LANGUAGE plpgsql AS $$
DECLARE
	s record;
BEGIN
	reclaimed := 0; held := 0; archived := 0; purged := 0; sweeps := 0;
	LOOP
		SELECT * INTO s FROM idem_sweep(max_rows);
		IF s.reclaimed + s.held + s.archived + s.purged > max_rows THEN
			RAISE 'more than % rows: %', max_rows, s;
		END IF;
		reclaimed := reclaimed + s.reclaimed; held := held + s.held; archived := archived + s.archived; purged := purged + s.purged;
		sweeps := sweeps + 1;
		EXIT WHEN NOT s.more;
		IF sweeps > 10000 THEN
			RAISE 'comes to no end';
		END IF;
	END LOOP;
END $$;
-- lets time pass for the keys of some scopes
CREATE FUNCTION pg_temp.pass(t interval, scopes text DEFAULT 'sweep%') RETURNS void LANGUAGE sql AS $$
	UPDATE idem.inflight SET created_at = created_at - t, updated_at = updated_at - t, lease_until = lease_until - t
	WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE scopes);
	UPDATE idem.result SET created_at = created_at - t, completed_at = completed_at - t
	WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE scopes);
	UPDATE idem.archive SET created_at = created_at - t, completed_at = completed_at - t, archived_at = archived_at - t
	WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE scopes);
	UPDATE idem.audit SET at = at - t WHERE scope LIKE scopes;
$$;
-- what is stored of the keys of a scope
CREATE FUNCTION pg_temp.rows_of(s text) RETURNS TABLE (kept_in text, key text, state text, attempt int, lease text, response text, request text) LANGUAGE sql AS $$
	SELECT o.kept_in, o.key, o.state, o.attempt, CASE WHEN o.lease_until = 'infinity' THEN 'infinity' WHEN o.lease_until > now() THEN 'running' WHEN o.lease_until IS NOT NULL THEN 'over' END,
		   coalesce(r.response, a.response)::text, coalesce(r.request, a.request, i.request)::text
	FROM idem.operation o JOIN idem.scope c ON c.name = o.scope
		LEFT JOIN idem.result r ON o.kept_in = 'result' AND r.scope_id = c.id AND r.key = o.key
		LEFT JOIN idem.archive a ON o.kept_in = 'archive' AND a.scope_id = c.id AND a.key = o.key
		LEFT JOIN idem.inflight i ON o.kept_in = 'inflight' AND i.scope_id = c.id AND i.key = o.key
	WHERE o.scope = s ORDER BY o.key, o.kept_in
$$;

-- a sweep does not wait for a vacuum that cuts a table's end off
ALTER TABLE idem.result SET (vacuum_truncate = off);
ALTER TABLE idem.inflight SET (vacuum_truncate = off);
ALTER TABLE idem.archive SET (vacuum_truncate = off);
ALTER TABLE idem.audit SET (vacuum_truncate = off);
ALTER TABLE idem.sweep SET (vacuum_truncate = off);
-- what other tests have left is not counted
SELECT sweeps > 0 AS swept FROM pg_temp.sweep();

/* ---- settled keys ---- */

INSERT INTO idem.scope (name, retention, archive, archive_retention, keep_request) VALUES
	('sweep none', '1 day', 'none', '90 days', 'always'),
	('sweep key', '1 day', 'key', '90 days', 'always'),
	('sweep full', '1 day', 'full', '90 days', 'always'),
	('sweep ever', NULL, 'key', '90 days', 'always'),
	('sweep key ever', '1 day', 'key', NULL, 'always'),
	('sweep full ever', '1 day', 'full', NULL, 'always');
CREATE FUNCTION pg_temp.settle(s text, k text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	IF (idem_claim(s, k, '{"q": 1}', lease => '0')).outcome <> 'claimed' THEN
		RAISE 'not claimed';
	END IF;
	RETURN idem_complete(s, k, '{"a": 1}', NULL, 200, '{"h": 1}', '\x01');
END $$;
SELECT count(pg_temp.settle(name, 'k')) FROM idem.scope WHERE name LIKE 'sweep%';

-- inside the retention nothing happens
SELECT pg_temp.pass('23 hours');
SELECT * FROM pg_temp.sweep();
-- past it: none goes, key leaves a tombstone, full moves to the archive; for ever stays whole
SELECT pg_temp.pass('2 hours');
SELECT reclaimed, held, archived, purged FROM pg_temp.sweep();
SELECT s, r.* FROM (SELECT name AS s FROM idem.scope WHERE name LIKE 'sweep%' ORDER BY name) x, pg_temp.rows_of(s) r;
SELECT a.headers, a.body, a.status_code, a.token > 0 AS token, a.fingerprint IS NOT NULL AS fingerprint, a.archived_at > a.completed_at AS archived FROM idem.archive a ORDER BY scope_id LIMIT 1;
SELECT headers, body, status_code, token > 0 AS token, fingerprint IS NOT NULL AS fingerprint FROM idem.result WHERE scope_id = (SELECT id FROM idem.scope WHERE name = 'sweep key');
-- there is nothing left to do
SELECT * FROM pg_temp.sweep();
SELECT name, outcome, a.state, response FROM (SELECT name, idem_status(name, 'k') a FROM idem.scope WHERE name LIKE 'sweep%' OFFSET 0) s, LATERAL (SELECT (s.a).*) a ORDER BY name;
-- past the archive's retention: tombstone and archived row go, unless they are for ever
SELECT pg_temp.pass('89 days');
SELECT reclaimed, held, archived, purged FROM pg_temp.sweep();
SELECT pg_temp.pass('2 days');
SELECT reclaimed, held, archived, purged FROM pg_temp.sweep();
SELECT s, r.kept_in, r.response FROM (SELECT name AS s FROM idem.scope WHERE name LIKE 'sweep%' ORDER BY name) x, pg_temp.rows_of(s) r;

-- what comes late goes at once: a result that was never stripped or moved
SELECT count(pg_temp.settle(name, 'late')) FROM idem.scope WHERE name IN ('sweep none', 'sweep key', 'sweep full');
SELECT pg_temp.pass('92 days');
SELECT reclaimed, held, archived, purged FROM pg_temp.sweep();

-- an earlier life of the key in the archive makes way for the later one
SELECT pg_temp.settle('sweep full', 'twice');
SELECT pg_temp.pass('2 days');
SELECT reclaimed, held, archived, purged FROM pg_temp.sweep();
INSERT INTO idem.result (token, created_at, completed_at, scope_id, attempt, form, state, fingerprint, key, response, request)
	SELECT token + 1, created_at, completed_at + interval '12 hours', scope_id, 2, form, state, fingerprint, key, '{"a": 2}', request
	FROM idem.archive WHERE key = 'twice';
SELECT reclaimed, held, archived, purged FROM pg_temp.sweep();
SELECT * FROM pg_temp.rows_of('sweep full') WHERE key = 'twice';
SELECT outcome, response FROM idem_claim('sweep full', 'twice', '{"q": 1}');

-- a large result moves whole, and a stripped one gives its space back
SELECT outcome FROM idem_claim('sweep full', 'large', lease => '1 hour') \gset
SELECT idem_complete('sweep full', 'large', (SELECT json_agg(sha256(i::text::bytea)) FROM generate_series(1, 10000) AS i),
	(SELECT token FROM idem.inflight WHERE key = 'large')) AS stored;
SELECT md5(response::text) AS before FROM idem.result WHERE key = 'large' \gset
SELECT pg_temp.pass('2 days');
SELECT reclaimed, held, archived, purged FROM pg_temp.sweep();
SELECT md5((idem_claim('sweep full', 'large')).response::text) = :'before' AS whole;

/* ---- keys in flight ---- */

INSERT INTO idem.scope (name, lease, retention, on_expiry, max_attempts, retry_within) VALUES
	('sweep retry', '1 hour', '1 day', 'retry', NULL, NULL),
	('sweep hold', '1 hour', '1 day', 'hold', NULL, NULL),
	('sweep attempts', '1 hour', '1 day', 'retry', 2, NULL),
	('sweep within', '1 hour', '1 day', 'retry', NULL, '3 hours'),
	('sweep within longer', '1 hour', '1 hour', 'retry', NULL, '3 hours'),
	('sweep retry ever', '1 hour', NULL, 'retry', NULL, NULL);
CREATE TEMP VIEW leased AS SELECT name FROM idem.scope WHERE lease IS NOT NULL AND name LIKE 'sweep%';
SELECT count((idem_claim(name, 'k', '{"q": 1}')).token) FROM leased;
SELECT count((idem_claim(name, 'released')).token) FROM leased;
SELECT idem_checkpoint('sweep retry', 'k', (SELECT token FROM idem.operation WHERE scope = 'sweep retry' AND key = 'k'), 'half', '{"c": 1}');
SELECT count(idem_release(scope, key, token)) FROM idem.operation WHERE scope IN (TABLE leased) AND key = 'released';
SELECT token AS spent FROM idem_claim('sweep attempts', 'released') \gset
SELECT outcome, (idem_unknown('sweep retry', 'doubt', token, '{"why": "timeout"}')) FROM idem_claim('sweep retry', 'doubt');

-- a running lease stays
SELECT * FROM pg_temp.sweep();
-- lease over: free again, or by policy in doubt; with retry_within it stays as it is until that is over
SELECT pg_temp.pass('61 minutes');
SELECT reclaimed, held, archived, purged FROM pg_temp.sweep();
SELECT s, r.key, r.state, r.attempt, r.lease, r.request FROM (SELECT name AS s FROM leased ORDER BY name) x, pg_temp.rows_of(s) r;
SELECT pg_temp.pass('2 hours');
SELECT reclaimed, held, archived, purged FROM pg_temp.sweep();
SELECT s, r.key, r.state, r.attempt, r.lease FROM (SELECT name AS s FROM leased WHERE name LIKE '%within%' ORDER BY name) x, pg_temp.rows_of(s) r;
-- a takeover finds what the last holder left, and the token goes on
SELECT token AS last FROM idem.operation WHERE scope = 'sweep retry' AND key = 'k' \gset
SELECT outcome, attempt, token > :last AS token, request, recovery_point, checkpoint FROM idem_claim('sweep retry', 'k');
UPDATE idem.inflight SET lease_until = now() - interval '2 hours' WHERE key = 'k' AND scope_id = (SELECT id FROM idem.scope WHERE name = 'sweep retry');
-- who is late but was not replaced still settles, from free and from in doubt
SELECT reclaimed, held, archived, purged FROM pg_temp.sweep();
SELECT idem_complete('sweep hold', 'k', token => (SELECT token FROM idem.operation WHERE scope = 'sweep hold' AND key = 'k'));
SELECT idem_complete('sweep retry', 'k', token => (SELECT token FROM idem.operation WHERE scope = 'sweep retry' AND key = 'k'));
SELECT idem_complete('sweep attempts', 'released', token => :spent);
-- abandoned: what is free goes after the retention, counted from the end of the lease; what is in doubt never goes
SELECT pg_temp.pass('23 hours');
SELECT purged > 0 AS purged FROM pg_temp.sweep();
SELECT s, r.key, r.state, r.attempt FROM (SELECT name AS s FROM leased ORDER BY name) x, pg_temp.rows_of(s) r WHERE r.kept_in = 'inflight';
SELECT pg_temp.pass('1000 years');
SELECT purged > 0 AS purged FROM pg_temp.sweep();
SELECT s, r.key, r.state, r.attempt FROM (SELECT name AS s FROM leased ORDER BY name) x, pg_temp.rows_of(s) r;
-- an abandoned lease that no sweep has called free goes as well
SELECT outcome FROM idem_claim('sweep retry', 'abandoned');
SELECT pg_temp.pass('26 hours');
SELECT outcome, attempt FROM idem_status('sweep retry', 'abandoned');
SELECT reclaimed, held, archived, purged FROM pg_temp.sweep();

/* ---- no answer depends on the sweep ---- */

DELETE FROM idem.inflight WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'sweep%');
DELETE FROM idem.result WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'sweep%');
DELETE FROM idem.archive WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'sweep%');

-- all policies, beside those above; keys in all states, of all ages
INSERT INTO idem.scope (name, lease, retention, archive, archive_retention, on_expiry, max_attempts, retry_within, keep_request)
	SELECT concat_ws(' ', 'sweep', 'all', retention, archive, on_expiry, max_attempts, retry_within), '1 hour', retention, archive, '10 days', on_expiry, max_attempts, retry_within, 'always'
	FROM unnest(ARRAY['30 minutes', '5 hours', '2 days', NULL]::interval[]) retention, unnest(ARRAY['none', 'key', 'full']) archive,
		 unnest(ARRAY['retry', 'hold']) on_expiry, unnest(ARRAY[NULL, 2]) max_attempts, unnest(ARRAY[NULL, '2 hours', '1 day']::interval[]) retry_within;
-- settled, failed, forgotten; leased once and twice, released, in doubt
CREATE FUNCTION pg_temp.make(s text, prefix text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	k text;
	t bigint;
BEGIN
	FOREACH k IN ARRAY ARRAY['done', 'failed', 'forgotten', 'leased', 'twice', 'released', 'doubt'] LOOP
		t := (idem_claim(s, prefix || k, '{"q": 1}', lease => '1 hour')).token;
		CASE k
			WHEN 'done', 'forgotten' THEN PERFORM idem_complete(s, prefix || k, '{"a": 1}', t, 200);
			WHEN 'failed' THEN PERFORM idem_fail(s, prefix || k, '{"a": 0}', t, 400);
			WHEN 'released', 'twice' THEN PERFORM idem_release(s, prefix || k, t);
			WHEN 'doubt' THEN PERFORM idem_unknown(s, prefix || k, t);
			ELSE NULL;
		END CASE;
		IF k = 'forgotten' THEN
			PERFORM idem_forget(s, prefix || k);
		ELSIF k = 'twice' THEN
			PERFORM idem_claim(s, prefix || k, lease => '1 hour');
		END IF;
	END LOOP;
END $$;
CREATE TEMP TABLE ages (age interval);
INSERT INTO ages VALUES ('0'), ('61 minutes'), ('100 minutes'), ('3 hours'), ('25 hours'), ('3 days'), ('12 days'), ('1 year');
CREATE TEMP TABLE answers (turn int, scope text, key text, call text, answer text);
-- asks every key everything, each in a subtransaction that is undone; the answer without what is only a time or a number
CREATE FUNCTION pg_temp.ask_all(turn int) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	c record;
	said text;
	n bigint := 0;
BEGIN
	FOR c IN SELECT s.name AS scope, a.age || ' ' || k AS key, call
		FROM idem.scope s, ages a, unnest(ARRAY['done', 'failed', 'forgotten', 'leased', 'twice', 'released', 'doubt', 'never']) k,
			 unnest(ARRAY['claim', 'claim other', 'lease', 'once', 'status']) call
		WHERE s.name LIKE 'sweep all%'
	LOOP
		BEGIN
			CASE c.call
				WHEN 'claim' THEN
					SELECT concat_ws(', ', outcome, attempt, state, status_code, response, request, created_at < now() - interval '30 minutes')
						INTO said FROM idem_claim(c.scope, c.key, '{"q": 1}', lease => '0');
				WHEN 'claim other' THEN
					SELECT concat_ws(', ', outcome, attempt, state, status_code, response)
						INTO said FROM idem_claim(c.scope, c.key, '{"q": 2}', lease => '0');
				WHEN 'lease' THEN
					SELECT concat_ws(', ', outcome, attempt, state, status_code, response, request)
						INTO said FROM idem_claim(c.scope, c.key, '{"q": 1}');
				WHEN 'once' THEN
					said := idem_once(c.scope, c.key, '{"q": 1}');
				WHEN 'status' THEN
					SELECT concat_ws(', ', outcome, attempt, state, status_code, response) INTO said FROM idem_status(c.scope, c.key);
			END CASE;
			RAISE EXCEPTION 'undo' USING ERRCODE = 'UNDO1';
		EXCEPTION
			WHEN SQLSTATE 'UNDO1' THEN NULL;
			WHEN OTHERS THEN said := SQLSTATE;
		END;
		INSERT INTO answers VALUES (turn, c.scope, c.key, c.call, said);
		n := n + 1;
	END LOOP;
	RETURN n;
END $$;
-- keys of all ages, the oldest first
DO $$
DECLARE
	a interval;
	younger interval;
BEGIN
	FOR a, younger IN SELECT age, lead(age) OVER (ORDER BY age DESC) FROM ages ORDER BY age DESC LOOP
		PERFORM pg_temp.make(name, a || ' ') FROM idem.scope WHERE name LIKE 'sweep all%';
		PERFORM pg_temp.pass(a - coalesce(younger, '0'), 'sweep all%');
	END LOOP;
END $$;
SELECT pg_temp.ask_all(0);
SELECT reclaimed > 0, held > 0, archived > 0, purged > 0, sweeps > 100 AS sweeps FROM pg_temp.sweep(10);
SELECT * FROM pg_temp.sweep();
SELECT pg_temp.ask_all(1);
SELECT b.scope, b.key, b.call, b.answer AS before, a.answer AS after FROM answers b JOIN answers a USING (scope, key, call)
	WHERE b.turn = 0 AND a.turn = 1 AND a.answer IS DISTINCT FROM b.answer ORDER BY 1, 2, 3 LIMIT 20;
-- the answers are all there are
SELECT split_part(answer, ', ', 1) AS outcome, count(*) > 20 AS often FROM answers WHERE turn = 0 AND call LIKE 'claim%' GROUP BY 1 ORDER BY 1;
-- what was swept in one state comes to the same in the next: sweeps at every age, or only at the end
SELECT pg_temp.pass('90 minutes', 'sweep all%');
CREATE TEMP TABLE unswept_inflight AS SELECT * FROM idem.inflight;
SELECT sweeps > 0 AS swept FROM pg_temp.sweep();
SELECT pg_temp.pass('2 hours', 'sweep all%');
SELECT sweeps > 0 AS swept FROM pg_temp.sweep();
SELECT pg_temp.pass('20 hours', 'sweep all%');
SELECT pg_temp.ask_all(2);
DELETE FROM idem.inflight;
INSERT INTO idem.inflight SELECT * FROM unswept_inflight;
UPDATE idem.inflight SET created_at = created_at - interval '22 hours', lease_until = lease_until - interval '22 hours', updated_at = updated_at - interval '22 hours';
SELECT pg_temp.ask_all(3);
SELECT b.scope, b.key, b.call, b.answer AS swept, a.answer AS unswept FROM answers b JOIN answers a USING (scope, key, call)
	WHERE b.turn = 2 AND a.turn = 3 AND a.answer IS DISTINCT FROM b.answer ORDER BY 1, 2, 3 LIMIT 20;
DELETE FROM idem.inflight WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'sweep%');
DELETE FROM idem.result WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'sweep%');
DELETE FROM idem.archive WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'sweep%');
DELETE FROM idem.scope WHERE name LIKE 'sweep all%';

/* ---- bounds and hands ---- */

SELECT count(*) FROM (SELECT idem_once('sweep none', 'n' || n) FROM generate_series(1, 1000) n OFFSET 0) x;
SELECT count(*) FROM (SELECT idem_once('sweep key', 'n' || n) FROM generate_series(1, 1000) n OFFSET 0) x;
UPDATE idem.result SET body = '\x00' WHERE key LIKE 'n%';
SELECT pg_temp.pass('2 days');
-- one row a sweep, from one table after the other; the hand stands where there is more. Which
-- row is the first in the table depends on where there was room.
SELECT reclaimed, held, archived + purged AS changed, more FROM idem_sweep(1);
SELECT more, inflight_hand, result_hand IS NOT NULL AS result_hand, purged + archived AS changed, last_duration >= '0' AS duration, last_started <= clock_timestamp() AS started FROM idem.sweep;
SELECT reclaimed, held, archived + purged AS changed, sweeps > 3 AS in_turns FROM pg_temp.sweep(300);
SELECT count(*) FILTER (WHERE kept_in = 'result') FROM idem.operation WHERE scope LIKE 'sweep%';
SELECT more, inflight_hand, result_hand, archive_hand, audit_hand, only_row FROM idem.sweep;
-- the row's default is bound enough
SELECT reclaimed, held, archived, purged, more FROM idem_sweep();
-- a sweep of the own transaction's rows, undone with it
BEGIN;
SELECT idem_once('sweep none', 'own');
SELECT pg_temp.pass('2 days');
SELECT purged FROM idem_sweep();
SELECT purged FROM idem_sweep();
ROLLBACK;
SELECT count(*) FROM idem.operation WHERE scope = 'sweep none';
-- a claim of this transaction keeps its rows
SELECT idem_once('sweep none', 'mine');
SELECT pg_temp.pass('2 days');
BEGIN;
SELECT outcome FROM idem_claim('sweep none', 'mine');
SELECT purged FROM idem_sweep();
SELECT idem_complete('sweep none', 'mine', '2');
COMMIT;
SELECT outcome, response FROM idem_claim('sweep none', 'mine');

/* ---- audit ---- */

-- kept as long as its scope keeps anything: retention and archive_retention
INSERT INTO idem.scope (name, retention, archive_retention) VALUES ('sweep audit', '1 day', '10 days'), ('sweep audit ever', '1 day', NULL), ('sweep audit gone', '1 day', '10 days');
UPDATE idem.scope SET retention = '2 days' WHERE name LIKE 'sweep audit%';
DELETE FROM idem.scope WHERE name = 'sweep audit gone';
SELECT pg_temp.pass('11 days', 'sweep audit%');
SELECT purged FROM pg_temp.sweep();
SELECT pg_temp.pass('2 days', 'sweep audit%');
SELECT purged FROM pg_temp.sweep();
SELECT scope, event FROM idem.audit WHERE scope LIKE 'sweep audit%' ORDER BY 1, 2;

/* ---- the clock ---- */

SELECT count(*) FROM (SELECT idem_once('sweep none', 'clock ' || n) FROM generate_series(1, 10) n OFFSET 0) x;
SELECT pg_temp.pass('2 days');
SELECT clock_went_back FROM idem.health;
UPDATE idem.sweep SET last_started = now() + interval '1 hour';
SELECT * FROM idem_sweep();
SELECT clock_went_back FROM idem.health;
SELECT count(*) FROM idem.result WHERE key LIKE 'clock%';
-- answers do not wait for it
SELECT outcome, attempt FROM idem_claim('sweep none', 'clock 1', lease => '1 hour');
UPDATE idem.sweep SET last_started = now() - interval '1 hour';
SELECT purged FROM idem_sweep();
SELECT clock_went_back FROM idem.health;

/* ---- arguments and rights ---- */

SELECT pg_temp.try('SELECT idem_sweep(0)');
SELECT pg_temp.try('SELECT idem_sweep(-1)');
SELECT pg_temp.try('SELECT idem_sweep(NULL)');
SELECT pg_temp.try('SELECT idem_sweep(2147483647)');
BEGIN READ ONLY;
SELECT pg_temp.try('SELECT idem_sweep()');
COMMIT;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT more FROM idem_sweep();
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT more FROM idem_sweep();
COMMIT;
CREATE ROLE regress_idem_sweeper;
CREATE ROLE regress_idem_monitor IN ROLE pg_monitor;
SET ROLE regress_idem_sweeper;
SELECT pg_temp.try('SELECT idem_sweep()');
SELECT pg_temp.try('SELECT idem_stat_reset()');
SELECT pg_temp.try('TABLE idem.health');
SELECT pg_temp.try('TABLE idem.stat');
SELECT pg_temp.try('TABLE idem.sweep');
RESET ROLE;
-- the right to sweep needs no right to the tables
GRANT EXECUTE ON FUNCTION idem_sweep(int) TO regress_idem_sweeper;
SELECT idem_once('sweep none', 'granted');
SELECT pg_temp.pass('2 days');
SET ROLE regress_idem_sweeper;
SELECT purged FROM idem_sweep();
RESET ROLE;

/* ---- what an operator sees ---- */

DELETE FROM idem.inflight;
SELECT count((idem_claim('sweep retry', k, lease => l)).token) FROM (VALUES ('a', '1 hour'::interval), ('b', '1 hour'), ('c', '1 hour'), ('d', '1 hour'), ('e', '1 hour')) v (k, l);
UPDATE idem.inflight SET lease_until = '2020-01-03', created_at = '2020-01-02' WHERE key = 'b';
UPDATE idem.inflight SET created_at = '2020-01-01' WHERE key = 'a';
UPDATE idem.inflight SET state = 'e', updated_at = '2020-01-04' WHERE key = 'c';
UPDATE idem.inflight SET state = 'u', lease_until = 'infinity', updated_at = '2020-01-05' WHERE key IN ('d', 'e');
CREATE ROLE regress_idem_gone;
INSERT INTO idem.scope (name, owner) VALUES ('sweep gone', 'regress_idem_gone');
INSERT INTO idem.scope (name, operators) VALUES ('sweep operators gone', 'regress_idem_gone');
SELECT scopes_without_role FROM idem.health;
DROP ROLE regress_idem_gone;
-- for a monitoring role; the histogram's estimate of what no scope keeps any more needs all of them to keep for some time only
BEGIN;
UPDATE idem.scope SET retention = '1 day', archive_retention = '1 day';
DELETE FROM idem.result;
INSERT INTO idem.result (token, created_at, completed_at, scope_id, attempt, form, state, key)
	SELECT 1, now() - age, now() - age, id, 1, 1, 's', 'old ' || n
	FROM idem.scope, generate_series(1, 1000) n, LATERAL (SELECT CASE WHEN n % 2 = 0 THEN interval '1 hour' ELSE interval '10 days' END + n * interval '1 second' AS age) a WHERE name = 'sweep key';
ANALYZE idem.result;
SET ROLE regress_idem_monitor;
SELECT processing, oldest_processing::date, lease_over, oldest_lease_over::date, free, oldest_free::date, in_doubt, oldest_in_doubt::date,
	   holders, oldest_holder, settled_estimate, overdue_estimate BETWEEN 450 AND 550 AS overdue, scopes_without_role, clock_went_back, last_sweep IS NOT NULL AS swept,
	   last_sweep_duration >= '0' AS duration, last_sweep_incomplete, worker_runs IS NOT NULL AS worker
FROM idem.health;
SELECT count(*) FROM idem.health;
RESET ROLE;
ROLLBACK;
BEGIN;
SELECT outcome FROM idem_claim('sweep none', 'held');
SELECT holders, oldest_holder = now() AS oldest FROM idem.health;
ROLLBACK;
SELECT count(*) = 0 OR current_setting('shared_preload_libraries') ~ 'idem' AS empty_without_preload FROM idem.stat;
SELECT idem_stat_reset();

DELETE FROM idem.inflight WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'sweep%');
DELETE FROM idem.result WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'sweep%');
DELETE FROM idem.archive WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'sweep%');
DELETE FROM idem.scope WHERE name LIKE 'sweep%';
DELETE FROM idem.audit WHERE scope LIKE 'sweep%';
ALTER TABLE idem.result RESET (vacuum_truncate);
ALTER TABLE idem.inflight RESET (vacuum_truncate);
ALTER TABLE idem.archive RESET (vacuum_truncate);
ALTER TABLE idem.audit RESET (vacuum_truncate);
ALTER TABLE idem.sweep RESET (vacuum_truncate);
REVOKE ALL ON FUNCTION idem_sweep(int) FROM regress_idem_sweeper;
DROP OWNED BY regress_idem_sweeper, regress_idem_monitor;
DROP ROLE regress_idem_sweeper, regress_idem_monitor;

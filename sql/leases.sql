-- Claims under a lease: the remaining lines of the decision table by name, what
-- tokens and attempts do, what a holder may do in every state, and that who has
-- lost a lease cannot commit. The clock is turned by moving rows into the past.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;

INSERT INTO idem.scope (name, lease, on_expiry, max_attempts, retry_within, keep_request, archive) VALUES
	('leases', '1 hour', 'retry', NULL, NULL, 'inflight', 'key'),
	('leases hold', '1 hour', 'hold', NULL, NULL, 'inflight', 'key'),
	('leases twice', '1 hour', 'retry', 2, NULL, 'never', 'key'),
	('leases within', '1 hour', 'retry', NULL, '2 hours', 'always', 'key'),
	('leases none', NULL, 'retry', NULL, NULL, 'inflight', 'none');
CREATE TABLE public.regress_idem_ledger (entry text);

CREATE FUNCTION pg_temp.try(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	result text;
BEGIN
	EXECUTE statement INTO result;
	RETURN coalesce(result, 'NULL');
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE || ': ' || SQLERRM;
END $$;
-- lets the lease of a key run out
CREATE FUNCTION pg_temp.expire(s text, k text) RETURNS void LANGUAGE sql AS $$
	UPDATE idem.inflight SET lease_until = now() WHERE key = k AND scope_id = (SELECT id FROM idem.scope WHERE name = s)
$$;
CREATE FUNCTION pg_temp.show(a idem_answer, OUT outcome text, OUT state text, OUT attempt int, OUT token text, OUT retry_after text,
	OUT request text, OUT recovery_point text, OUT checkpoint text)
LANGUAGE sql AS $$
	SELECT a.outcome, a.state, a.attempt, CASE WHEN a.token IS NOT NULL THEN 'yes' END,
		   CASE WHEN a.retry_after BETWEEN interval '59 minutes' AND interval '1 hour' THEN 'what is left' ELSE a.retry_after::text END,
		   a.request::text, a.recovery_point, a.checkpoint::text
$$;
CREATE FUNCTION pg_temp.row_of(s text, k text, OUT kept_in text, OUT state text, OUT attempt int, OUT lease text, OUT claimant text, OUT owner boolean)
LANGUAGE sql AS $$
	SELECT o.kept_in, o.state, o.attempt, CASE WHEN o.lease_until = 'infinity' THEN 'infinity' WHEN o.lease_until > clock_timestamp() THEN 'running' WHEN o.lease_until IS NOT NULL THEN 'over' END,
		   o.claimant, o.owner LIKE current_user || ' (%'
	FROM idem.operation o WHERE o.scope = s AND o.key = k
$$;

-- line: nothing -> claimed, and the row is there at once
SELECT * FROM pg_temp.show(idem_claim('leases', 'k', '{"a": 1}'));
SELECT * FROM pg_temp.row_of('leases', 'k');
-- it outlives its transaction, without a key lock
SELECT count(*) AS key_locks FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 7453 AND pid = pg_backend_pid();
-- line: inflight p, lease running -> in_progress, with what is left of the lease; no token for others
SELECT * FROM pg_temp.show(idem_claim('leases', 'k', '{"a":1.0}'));
SELECT * FROM pg_temp.show(idem_claim('leases', 'k'));
-- line: a row that speaks, with another fingerprint -> mismatch while in progress, audited once
SELECT * FROM pg_temp.show(idem_claim('leases', 'k', '{"a": 2}'));
SELECT outcome FROM idem_claim('leases', 'k', '{"a": 2}');
SELECT count(*) AS audited FROM idem.audit WHERE scope = 'leases' AND key = 'k' AND event = 'mismatch';

-- line: held by this very transaction -> in_progress with its token, so that (idem_claim(...)).* is one claim
BEGIN;
SELECT (idem_claim('leases', 'own', '1')).* \gset own_
SELECT outcome, token = :own_token AS same_token, attempt, state FROM idem_claim('leases', 'own', '1');
SELECT outcome FROM idem_claim('leases', 'own', '2');
SELECT idem_complete('leases', 'own', '"done"', :own_token);
SELECT outcome, response FROM idem_claim('leases', 'own', '1');
COMMIT;
SELECT * FROM pg_temp.row_of('leases', 'own');

-- line: inflight p, lease running, the same non-NULL claimant -> claimed again: same token, lease renewed
SELECT token AS first FROM idem_claim('leases', 'same', '1', claimant => 'worker 7') \gset
UPDATE idem.inflight SET lease_until = now() + interval '1 minute' WHERE key = 'same';
SELECT outcome, token = :first AS same_token, attempt FROM idem_claim('leases', 'same', '1', claimant => 'worker 7');
SELECT * FROM pg_temp.row_of('leases', 'same');
SELECT lease_until > now() + interval '59 minutes' AS renewed FROM idem.inflight WHERE key = 'same';
-- ... with another request it is a mismatch, for another claimant and for none it is in progress
SELECT outcome FROM idem_claim('leases', 'same', '2', claimant => 'worker 7');
SELECT outcome FROM idem_claim('leases', 'same', '1', claimant => 'worker 8');
SELECT outcome FROM idem_claim('leases', 'same', '1');
SELECT outcome FROM idem_claim('leases', 'k', claimant => 'worker 7');
-- ... and for a claim without a lease too, since it would not be the same claim
BEGIN;
SELECT outcome FROM idem_claim('leases', 'same', '1', lease => '0', claimant => 'worker 7');
COMMIT;
-- ... once the lease is over it is a takeover like any other
SELECT pg_temp.expire('leases', 'same');
SELECT outcome, token > :first AS new_token, attempt FROM idem_claim('leases', 'same', '1', claimant => 'worker 7');

-- line: inflight p with the lease over -> claimed: new token, next attempt, request, recovery point, checkpoint
SELECT token AS old FROM idem_claim('leases', 'takeover', '{"pay":  1}') \gset
SELECT idem_checkpoint('leases', 'takeover', :old, 'charged', '{"charge": "ch_1"}');
SELECT pg_temp.expire('leases', 'takeover');
SELECT outcome, state FROM idem_status('leases', 'takeover');
SELECT outcome FROM idem_claim('leases', 'takeover', '{"pay": 2}');
SELECT (idem_claim('leases', 'takeover', '{"pay": 1}', claimant => 'second')).* \gset new_
-- ... in each of its columns, although this form asks once for each of them
\echo :new_outcome :new_attempt :new_request :new_recovery_point :new_checkpoint
SELECT :new_token > :old AS new_token;
SELECT * FROM pg_temp.row_of('leases', 'takeover');
-- line: inflight e -> claimed
SELECT idem_release('leases', 'takeover', :new_token);
SELECT * FROM pg_temp.row_of('leases', 'takeover');
SELECT outcome, state, recovery_point FROM idem_status('leases', 'takeover');
SELECT * FROM pg_temp.show(idem_claim('leases', 'takeover'));

-- line: inflight u -> unknown
SELECT token FROM idem_claim('leases', 'doubt', '1') \gset
SELECT idem_unknown('leases', 'doubt', :token, '{"timeout": true}');
SELECT * FROM pg_temp.show(idem_claim('leases', 'doubt', '1'));
SELECT * FROM pg_temp.row_of('leases', 'doubt');
SELECT outcome FROM idem_claim('leases', 'doubt', '2');
SELECT event, key, old, new FROM idem.audit WHERE scope = 'leases' AND event = 'unknown';
-- line: p with the lease over and policy hold -> unknown; the answer is the one after a sweep
SELECT token AS held FROM idem_claim('leases hold', 'k', '1') \gset
SELECT outcome FROM idem_claim('leases hold', 'k', '1');
SELECT pg_temp.expire('leases hold', 'k');
SELECT * FROM pg_temp.show(idem_claim('leases hold', 'k', '1'));
SELECT outcome, state FROM idem_status('leases hold', 'k');
-- ... a released one is free all the same: its holder said that nothing was done
SELECT token FROM idem_claim('leases hold', 'released') \gset
SELECT idem_release('leases hold', 'released', :token);
SELECT outcome, attempt FROM idem_claim('leases hold', 'released');
-- line: p with the lease over and attempts spent -> unknown; attempts are counted through release and takeover
SELECT token FROM idem_claim('leases twice', 'k', '1') \gset
SELECT idem_release('leases twice', 'k', :token);
SELECT outcome, attempt, request FROM idem_claim('leases twice', 'k', '1');
SELECT outcome FROM idem_claim('leases twice', 'k', '1');
SELECT pg_temp.expire('leases twice', 'k');
SELECT * FROM pg_temp.show(idem_claim('leases twice', 'k', '1'));
-- ... resolve grants one more, which is then spent
SELECT idem_resolve('leases twice', 'k', 'retry');
SELECT * FROM pg_temp.show(idem_claim('leases twice', 'k', '1'));
SELECT pg_temp.expire('leases twice', 'k');
SELECT outcome, attempt FROM idem_claim('leases twice', 'k', '1');
-- line: p past retry_within -> unknown, counted from the first claim; inside it a takeover
SELECT outcome FROM idem_claim('leases within', 'k', '{"kept": 1}');
UPDATE idem.inflight SET created_at = now() - interval '119 minutes' WHERE key = 'k' AND scope_id = (SELECT id FROM idem.scope WHERE name = 'leases within');
SELECT pg_temp.expire('leases within', 'k');
SELECT * FROM pg_temp.show(idem_claim('leases within', 'k'));
UPDATE idem.inflight SET created_at = created_at - interval '2 minutes' WHERE key = 'k' AND scope_id = (SELECT id FROM idem.scope WHERE name = 'leases within');
SELECT outcome FROM idem_claim('leases within', 'k');
SELECT pg_temp.expire('leases within', 'k');
SELECT outcome FROM idem_claim('leases within', 'k');

-- what is free again does not speak once its lease has been over for the scope's retention: claimed anew,
-- attempt 1, with any request, whether a sweep has called it free or not; what is in doubt always speaks
SELECT token FROM idem_claim('leases', 'old e', '1') \gset
SELECT idem_release('leases', 'old e', :token);
SELECT (idem_claim('leases', 'old p', '1')).outcome, (idem_claim('leases hold', 'old hold', '1')).outcome;
UPDATE idem.inflight SET lease_until = now() - interval '23 hours' WHERE key LIKE 'old %';
SELECT (idem_claim('leases', k, '2')).outcome FROM unnest(ARRAY['old e', 'old p']) k;
UPDATE idem.inflight SET lease_until = now() - interval '24 hours' WHERE key LIKE 'old %';
SELECT (idem_status('leases', k)).state FROM unnest(ARRAY['old e', 'old p']) k;
SELECT a.* FROM unnest(ARRAY['old e', 'old p']) k, idem_claim('leases', k, '2') c, pg_temp.show(c) a;
SELECT outcome FROM idem_claim('leases hold', 'old hold', '1');
SELECT key, count(*) AS rows FROM idem.inflight WHERE key LIKE 'old %' GROUP BY key ORDER BY key;
-- a leased claim deletes a settled row that no longer speaks at once
SELECT idem_once('leases none', 'gone', '1');
UPDATE idem.result SET completed_at = now() - interval '2 days' WHERE key = 'gone';
SELECT outcome, attempt FROM idem_claim('leases none', 'gone', '2', lease => '1 h');
SELECT (SELECT count(*) FROM idem.result WHERE key = 'gone') AS results, (SELECT count(*) FROM idem.inflight WHERE key = 'gone') AS inflight;

-- lease from the call, from the scope, zero, and none
SELECT outcome FROM idem_claim('leases', 'two hours', lease => '2 hours');
SELECT lease_until > now() + interval '119 minutes' AS of_the_call FROM idem.inflight WHERE key = 'two hours';
BEGIN;
SELECT outcome FROM idem_claim('leases', 'zero', lease => '0');
SELECT * FROM pg_temp.row_of('leases', 'zero');
SELECT idem_complete('leases', 'zero');
COMMIT;
SELECT (idem_claim('leases', 'zero 2', lease => '0')).outcome;
\echo :SQLSTATE

-- settling needs the token: without it ID002, with a wrong, old or foreign one ID001
SELECT token AS old FROM idem_claim('leases', 'settle', '1', lease => '1 h') \gset
SELECT pg_temp.try($$SELECT idem_complete('leases', 'settle')$$), pg_temp.try($$SELECT idem_release('leases', 'settle')$$);
SELECT token AS foreign FROM idem_claim('leases', 'settle 2') \gset
SELECT idem_complete('leases', 'settle', '1', :foreign);
\echo :SQLSTATE
SELECT idem_complete('leases', 'settle', '1', -1);
SELECT idem_fail('leases', 'settle', '1', 9223372036854775807);
SELECT idem_complete('leases', 'never claimed', '1', 1);
SELECT pg_temp.expire('leases', 'settle');
SELECT token AS new FROM idem_claim('leases', 'settle', '1') \gset
\set VERBOSITY sqlstate
SELECT idem_complete('leases', 'settle', '1', :old);
SELECT idem_fail('leases', 'settle', '1', :old);
SELECT idem_release('leases', 'settle', :old);
SELECT idem_extend('leases', 'settle', :old);
SELECT idem_checkpoint('leases', 'settle', :old, 'p');
SELECT idem_unknown('leases', 'settle', :old);
\set VERBOSITY default
SELECT * FROM pg_temp.row_of('leases', 'settle');
SELECT idem_complete('leases', 'settle', '"new"', :new, 200, '{"h": 1}', '\x01');
SELECT outcome, state, attempt, response, status_code, headers, body, request FROM idem_claim('leases', 'settle', '1');
SELECT * FROM pg_temp.row_of('leases', 'settle');
-- settling twice: the same verdict is a no-op, the other one ID002; the old token stays lost
SELECT idem_complete('leases', 'settle', '"again"', :new);
SELECT idem_fail('leases', 'settle', '"again"', :new);
\echo :SQLSTATE
\set VERBOSITY sqlstate
SELECT idem_complete('leases', 'settle', '1', :old);
SELECT idem_extend('leases', 'settle', :new);
SELECT idem_checkpoint('leases', 'settle', :new, 'p');
SELECT idem_release('leases', 'settle', :new);
SELECT idem_unknown('leases', 'settle', :new);
\set VERBOSITY default
SELECT state, response FROM idem_status('leases', 'settle');
-- ... and dooms what contradicts the verdict of another transaction
BEGIN;
INSERT INTO public.regress_idem_ledger VALUES ('contradiction');
SELECT left(pg_temp.try(format($$SELECT idem_fail('leases', 'settle', '"no"', %s)$$, :new)), 5);
COMMIT;
-- ... in one transaction, also without the token
BEGIN;
SELECT token FROM idem_claim('leases', 'one transaction') \gset
SELECT idem_fail('leases', 'one transaction', '1', :token);
SELECT idem_fail('leases', 'one transaction', '2', :token), idem_fail('leases', 'one transaction', '3');
SELECT left(pg_temp.try($$SELECT idem_complete('leases', 'one transaction')$$), 5);
COMMIT;
SELECT state, response FROM idem_status('leases', 'one transaction');

-- late but still current: accepted from p with the lease over, from e, and from u
SELECT token AS p FROM idem_claim('leases', 'late p') \gset
SELECT token AS e FROM idem_claim('leases', 'late e') \gset
SELECT token AS u FROM idem_claim('leases', 'late u') \gset
SELECT pg_temp.expire('leases', 'late p');
UPDATE idem.inflight SET state = 'e' WHERE key = 'late e';
SELECT idem_unknown('leases', 'late u', :u);
SELECT idem_complete('leases', 'late p', '1', :p), idem_complete('leases', 'late e', '1', :e), idem_fail('leases', 'late u', '1', :u);
SELECT key, state FROM idem.operation WHERE key LIKE 'late %' ORDER BY key;
-- ... from u that is resolved to be retried, as long as nobody has taken over
SELECT token FROM idem_claim('leases', 'late retry') \gset
SELECT idem_unknown('leases', 'late retry', :token);
SELECT idem_resolve('leases', 'late retry', 'retry');
SELECT idem_complete('leases', 'late retry', '1', :token);
-- ... but not with a released token
SELECT token FROM idem_claim('leases', 'late release') \gset
SELECT idem_release('leases', 'late release', :token);
\set VERBOSITY sqlstate
SELECT idem_complete('leases', 'late release', '1', :token);
SELECT idem_release('leases', 'late release', :token);
\set VERBOSITY default
SELECT * FROM pg_temp.row_of('leases', 'late release');

-- extend, checkpoint and unknown in every state
CREATE FUNCTION pg_temp.holder(k text, from_state text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	t bigint := (idem_claim('leases', k)).token;
BEGIN
	CASE from_state
		WHEN 'over' THEN PERFORM pg_temp.expire('leases', k);
		WHEN 'e' THEN UPDATE idem.inflight SET state = 'e', lease_until = now() WHERE key = k;
		WHEN 'u' THEN PERFORM idem_unknown('leases', k, t);
		ELSE NULL;
	END CASE;
	RETURN t;
END $$;
SELECT what, s AS state, CASE what
	WHEN 'extend' THEN CASE WHEN x ~ '^\w{5}: ' THEN x ELSE 'extended' END ELSE x END AS answer, r.state AS then, r.lease
FROM (SELECT what, s, pg_temp.try(format(call, what || ' ' || s, pg_temp.holder(what || ' ' || s, s))) AS x
	  FROM (VALUES ('extend', $$SELECT idem_extend('leases', %L, %s)$$), ('checkpoint', $$SELECT idem_checkpoint('leases', %L, %s, 'p', '{"n": 1}')$$),
			('checkpoint lease', $$SELECT idem_checkpoint('leases', %L, %s, 'p', NULL, '1 h')$$), ('unknown', $$SELECT idem_unknown('leases', %L, %s)$$),
			('release', $$SELECT idem_release('leases', %L, %s)$$)) c (what, call),
		   unnest(ARRAY['running', 'over', 'e', 'u']) WITH ORDINALITY st (s, n) ORDER BY what, n OFFSET 0) y,
	LATERAL pg_temp.row_of('leases', what || ' ' || s) r;
-- what extend returns is the end of the lease, from now on
SELECT token FROM idem_claim('leases', 'extend') \gset
SELECT idem_extend('leases', 'extend', :token, '3 hours') AS until \gset
SELECT lease_until = :'until' AS is_the_end, lease_until > now() + interval '170 minutes' AS from_now FROM idem.inflight WHERE key = 'extend';
-- a checkpoint without a lease leaves it, and the last one counts
SELECT idem_checkpoint('leases', 'extend', :token, 'one', '{"n": 1}'), idem_checkpoint('leases', 'extend', :token, 'two');
SELECT recovery_point, checkpoint, lease_until > now() + interval '170 minutes' AS lease_kept FROM idem.inflight WHERE key = 'extend';
-- transaction-scoped claims have no lease to extend: 55000
BEGIN;
SELECT token FROM idem_claim('leases', 'no lease', lease => '0') \gset
SELECT left(pg_temp.try(format(call, 'no lease', :token)), 5) FROM (VALUES ($$SELECT idem_extend('leases', %L, %s)$$),
	($$SELECT idem_checkpoint('leases', %L, %s, 'p')$$), ($$SELECT idem_unknown('leases', %L, %s)$$)) c (call);
ROLLBACK;

-- a transaction-scoped takeover of a leased key leaves the row as it is; it goes when the claim is settled
SELECT token AS zombie FROM idem_claim('leases within', 'taken', '{"r": 1}') \gset
SELECT pg_temp.expire('leases within', 'taken');
BEGIN;
SELECT (idem_claim('leases within', 'taken', lease => '0')).* \gset new_
\echo :new_outcome :new_attempt :new_request
SELECT :new_token > :zombie AS new_token;
SELECT * FROM pg_temp.row_of('leases within', 'taken');
-- the old token is lost already
SAVEPOINT s;
\set VERBOSITY sqlstate
SELECT idem_complete('leases within', 'taken', '1', :zombie);
\set VERBOSITY default
ROLLBACK TO s;
COMMIT;
-- ... that doomed it: the lease is the zombie's still, who is late but current
SELECT * FROM pg_temp.row_of('leases within', 'taken');
BEGIN;
SELECT outcome, attempt FROM idem_claim('leases within', 'taken', lease => '0');
SELECT idem_complete('leases within', 'taken', '"taken"');
COMMIT;
SELECT * FROM pg_temp.row_of('leases within', 'taken');
SELECT response, request, attempt FROM idem.result WHERE key = 'taken';
\set VERBOSITY sqlstate
SELECT idem_complete('leases within', 'taken', '1', :zombie);
\set VERBOSITY default
-- ... released, it leaves the row as it was
SELECT token AS zombie FROM idem_claim('leases', 'taken and released') \gset
SELECT pg_temp.expire('leases', 'taken and released');
BEGIN;
SELECT outcome, attempt FROM idem_claim('leases', 'taken and released', lease => '0');
SELECT idem_release('leases', 'taken and released');
COMMIT;
SELECT * FROM pg_temp.row_of('leases', 'taken and released');

-- ID001, trapped by a savepoint or an EXCEPTION block: the COMMIT fails all the same, and nothing was written
SELECT token AS zombie FROM idem_claim('leases', 'zombie') \gset
SELECT pg_temp.expire('leases', 'zombie');
SELECT token AS current FROM idem_claim('leases', 'zombie') \gset
BEGIN;
INSERT INTO public.regress_idem_ledger VALUES ('savepoint');
SAVEPOINT s;
SELECT idem_complete('leases', 'zombie', '1', :zombie);
ROLLBACK TO s;
INSERT INTO public.regress_idem_ledger VALUES ('after savepoint');
COMMIT;
\echo :SQLSTATE
BEGIN;
INSERT INTO public.regress_idem_ledger VALUES ('exception');
SELECT left(pg_temp.try(format($$SELECT idem_extend('leases', 'zombie', %s)$$, :zombie)), 5);
COMMIT;
\echo :SQLSTATE
-- ... also by PREPARE TRANSACTION
BEGIN;
SELECT left(pg_temp.try(format($$SELECT idem_complete('leases', 'zombie', '1', %s)$$, :zombie)), 5);
PREPARE TRANSACTION 'regress idem zombie';
\echo :SQLSTATE
SELECT format('ROLLBACK PREPARED %L', gid) FROM pg_prepared_xacts WHERE gid = 'regress idem zombie' \gexec
-- ... the next transaction of the session is free of it
INSERT INTO public.regress_idem_ledger VALUES ('next');
SELECT idem_complete('leases', 'zombie', '"current"', :current);
SELECT entry FROM public.regress_idem_ledger;

-- a claim and its completion in different subtransactions, under a lease: rows say it all
BEGIN;
SELECT token FROM idem_claim('leases', 'sub') \gset
SAVEPOINT s;
SELECT idem_complete('leases', 'sub', '1', :token);
ROLLBACK TO s;
SELECT outcome, token = :token AS same_token FROM idem_claim('leases', 'sub');
SELECT idem_fail('leases', 'sub', '2', :token);
SELECT count(*) AS key_locks FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 7453 AND pid = pg_backend_pid();
COMMIT;
SELECT state, response FROM idem_status('leases', 'sub');
-- ... a leased claim that is rolled back never was
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idem_claim('leases', 'sub 2');
ROLLBACK TO s;
SELECT outcome, attempt FROM idem_claim('leases', 'sub 2', lease => '0');
ROLLBACK;
SELECT count(*) AS rows FROM idem.operation WHERE key = 'sub 2';

-- tokens only grow for a key, through everything, and are the clock's microseconds where that is greater
SELECT token AS t1 FROM idem_claim('leases', 'tokens') \gset
SELECT :t1 BETWEEN extract(epoch FROM now() - timestamptz '2000-01-01 UTC') * 1000000 - 60000000 AND extract(epoch FROM now() - timestamptz '2000-01-01 UTC') * 1000000 + 60000000 AS clock;
SELECT idem_release('leases', 'tokens', :t1);
SELECT token > :t1 AS moved_on FROM idem.inflight WHERE key = 'tokens';
UPDATE idem.inflight SET token = 9007199254740000 WHERE key = 'tokens';
SELECT token FROM idem_claim('leases', 'tokens');
SELECT idem_release('leases', 'tokens', 9007199254740001);
SELECT token FROM idem_claim('leases', 'tokens');
SELECT pg_temp.expire('leases', 'tokens');
SELECT token FROM idem_claim('leases', 'tokens');
SELECT idem_complete('leases', 'tokens', '1', 9007199254740004);
UPDATE idem.result SET completed_at = '2001-01-01' WHERE key = 'tokens';
SELECT token, attempt FROM idem_claim('leases', 'tokens');

-- a bounded wait for a running lease ends with in_progress; one that ends before is taken over
SELECT outcome FROM idem_claim('leases', 'waited for', lease => '1 h');
SELECT outcome FROM idem_claim('leases', 'waited for', wait => '10 ms');
UPDATE idem.inflight SET lease_until = clock_timestamp() + interval '200 ms' WHERE key = 'waited for';
SELECT outcome, attempt FROM idem_claim('leases', 'waited for', wait => '1 minute');
UPDATE idem.inflight SET lease_until = clock_timestamp() + interval '200 ms' WHERE key = 'waited for';
SELECT outcome, attempt FROM idem_claim('leases', 'waited for', wait => NULL);

-- settled again with its token: alone that is fine, but work beside it would be done twice
TRUNCATE public.regress_idem_ledger;
SELECT token FROM idem_claim('leases', 'again', lease => '1 h') \gset
BEGIN;
INSERT INTO public.regress_idem_ledger SELECT 'first';
SELECT idem_complete('leases', 'again', '1', :token);
COMMIT;
SELECT idem_complete('leases', 'again', '1', :token);
BEGIN;
INSERT INTO public.regress_idem_ledger SELECT 'before';
SELECT idem_complete('leases', 'again', '1', :token);
COMMIT;
BEGIN;
SELECT idem_complete('leases', 'again', '1', :token);
INSERT INTO public.regress_idem_ledger SELECT 'after';
COMMIT;
-- also in a subtransaction, unless that is rolled back
BEGIN;
SAVEPOINT a;
SELECT idem_complete('leases', 'again', '1', :token);
RELEASE a;
INSERT INTO public.regress_idem_ledger SELECT 'released';
COMMIT;
BEGIN;
SAVEPOINT a;
SELECT idem_complete('leases', 'again', '1', :token);
ROLLBACK TO a;
INSERT INTO public.regress_idem_ledger SELECT 'something else';
COMMIT;
-- two of them
SELECT token AS other FROM idem_claim('leases', 'again too', lease => '1 h') \gset
SELECT idem_complete('leases', 'again too', '2', :other);
BEGIN;
SELECT idem_complete('leases', 'again', '1', :token), idem_complete('leases', 'again too', '2', :other);
COMMIT;
SELECT * FROM public.regress_idem_ledger;

DROP TABLE public.regress_idem_ledger;
DELETE FROM idem.inflight WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'leases%');
DELETE FROM idem.result WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'leases%');
DELETE FROM idem.scope WHERE name LIKE 'leases%';
DELETE FROM idem.audit WHERE scope LIKE 'leases%';

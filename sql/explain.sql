-- idem_explain: the words for each line of the decision table, and that explaining changes nothing
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
\set SHOW_CONTEXT never
SET application_name = 'explain test';
INSERT INTO idem.scope (name) VALUES ('explain'), ('explain other');
INSERT INTO idem.scope (name, retention) VALUES ('explain forever', NULL);
INSERT INTO idem.scope (name, retention, archive, archive_retention) VALUES
	('explain none', '0', 'none', '90 days'), ('explain key', '0', 'key', '90 days'), ('explain full', '0', 'full', NULL),
	('explain gone', '0', 'key', '0');
INSERT INTO idem.scope (name, on_expiry, max_attempts, retry_within) VALUES
	('explain hold', 'hold', NULL, NULL), ('explain spent', 'retry', 2, NULL), ('explain late', 'retry', NULL, '1 hour');

-- what is said, times and user taken out; and what a claim answers at that moment, undone again
CREATE FUNCTION pg_temp.words(said text) RETURNS text LANGUAGE sql AS $$
	SELECT replace(regexp_replace(said, '\w{3} \w{3} +\d+ [\d:.]+ \d{4} \w+', 'TIME', 'g'), current_user || ' (explain test)', 'USER (APP)')
$$;
CREATE FUNCTION pg_temp.line(scope text, key text, request text DEFAULT NULL, OUT explain text, OUT claim text) LANGUAGE plpgsql AS $$
BEGIN
	explain := pg_temp.words(idem_explain(scope, key, request));
	RAISE EXCEPTION USING ERRCODE = 'UNDO0', MESSAGE = (idem_claim(scope, key, request)).outcome;
EXCEPTION WHEN SQLSTATE 'UNDO0' THEN
	claim := SQLERRM;
END $$;
CREATE PROCEDURE pg_temp.lease_over(of_key text) LANGUAGE sql AS $$
	UPDATE idem.inflight SET lease_until = now() - interval '1 s' WHERE key = of_key
$$;
\pset tuples_only on
\pset format unaligned
\pset fieldsep '\n = '

-- nothing
SELECT * FROM pg_temp.line('explain', 'nothing');
SELECT * FROM pg_temp.line('explain', 'nothing', '{"n": 1}');

-- result inside its retention: succeeded, failed, for ever; its overloads
SELECT outcome FROM idem_call('explain', 'done', '{"n": 1}', 'upper(text)');
SELECT * FROM pg_temp.line('explain', 'done', '{"n": 1.0}');
SELECT idem_explain('explain', 'done', '{"n": 1}'::json) = idem_explain('explain', 'done'),
	idem_explain('explain', 'done', '{"n": 1}'::jsonb) = idem_explain('explain', 'done');
BEGIN;
SELECT outcome FROM idem_claim('explain', 'failed');
SELECT idem_fail('explain', 'failed');
SELECT * FROM pg_temp.line('explain', 'failed');
COMMIT;
SELECT * FROM pg_temp.line('explain', 'failed');
SELECT outcome FROM idem_call('explain forever', 'done', '1', 'upper(text)');
SELECT * FROM pg_temp.line('explain forever', 'done');
-- the end of the retention is the one said
SELECT position(' is replayed until ' || (completed_at + interval '24 hours')::text || '.' IN idem_explain('explain', key)) > 0
FROM idem.operation WHERE scope = 'explain' AND key = 'done';

-- a row that speaks, with another fingerprint
SELECT * FROM pg_temp.line('explain', 'done', '{"n": 2}');
SELECT pg_temp.words(idem_explain('explain', 'done', '{"n": 2}'::json));
SELECT pg_temp.words(idem_explain('explain', 'done', '{"n": 2}'::jsonb));

-- older: a tombstone, the archive, nothing
SELECT outcome FROM unnest('{explain key,explain full,explain none,explain gone}'::text[]) AS s, idem_call(s, 'old', '{"n": 1}', 'upper(text)');
SELECT * FROM pg_temp.line('explain key', 'old');
SELECT * FROM pg_temp.line('explain key', 'old', '{}');
SELECT * FROM pg_temp.line('explain full', 'old');
SELECT * FROM pg_temp.line('explain none', 'old');
SELECT * FROM pg_temp.line('explain gone', 'old');
-- ... the same when the row has moved
WITH moved AS (DELETE FROM idem.result WHERE key = 'old' AND scope_id = (SELECT id FROM idem.scope WHERE name = 'explain full') RETURNING *)
INSERT INTO idem.archive SELECT *, now() FROM moved;
SELECT * FROM pg_temp.line('explain full', 'old');

-- held by this very transaction
BEGIN;
SELECT outcome FROM idem_claim('explain', 'own', '{"n": 1}');
SELECT * FROM pg_temp.line('explain', 'own');
SELECT * FROM pg_temp.line('explain', 'own', '{"n": 1}');
SELECT * FROM pg_temp.line('explain', 'own', '{"n": 2}');
ROLLBACK;
BEGIN;
SELECT outcome FROM idem_claim('explain', 'own lease', '{"n": 1}', lease => '1 hour');
SELECT * FROM pg_temp.line('explain', 'own lease', '{"n": 1}');
SELECT * FROM pg_temp.line('explain', 'own lease', '{"n": 2}');
ROLLBACK;
-- ... and given up, or undone
BEGIN;
SELECT outcome FROM idem_claim('explain', 'given up');
SELECT idem_release('explain', 'given up');
SELECT * FROM pg_temp.line('explain', 'given up');
SAVEPOINT a;
SELECT outcome FROM idem_claim('explain', 'undone');
ROLLBACK TO a;
SELECT * FROM pg_temp.line('explain', 'undone');
COMMIT;

-- a lease that runs
SELECT outcome FROM idem_claim('explain', 'leased', '{"n": 1}', lease => '1 hour', claimant => 'me');
SELECT * FROM pg_temp.line('explain', 'leased');
SELECT * FROM pg_temp.line('explain', 'leased', '{"n": 2}');
SELECT position(' holds a lease until ' || lease_until::text || ' (' || owner || ', since ' || updated_at::text || ').' IN idem_explain('explain', key)) > 0
FROM idem.operation WHERE scope = 'explain' AND key = 'leased';
-- ... and a holder without an application
SET application_name = '';
SELECT outcome FROM idem_claim('explain', 'no application', lease => '1 hour');
SELECT idem_explain('explain', 'no application') ~ ('\(' || current_user || ', since [^)]+\)');
SET application_name = 'explain test';

-- one that is over
CALL pg_temp.lease_over('leased');
SELECT * FROM pg_temp.line('explain', 'leased');
SELECT * FROM pg_temp.line('explain', 'leased', '{"n": 2}');
-- a key that is free again, with its attempts
SELECT token FROM idem_claim('explain', 'leased', lease => '1 hour') \gset
SELECT idem_release('explain', 'leased', :token);
SELECT * FROM pg_temp.line('explain', 'leased');
-- ... and one that was so long ago that it is forgotten
UPDATE idem.inflight SET lease_until = now() - interval '25 hours' WHERE key = 'leased';
SELECT * FROM pg_temp.line('explain', 'leased');

-- in doubt: declared, by policy, with its attempts spent, too late for a second try
SELECT token FROM idem_claim('explain', 'declared', lease => '1 hour') \gset
SELECT idem_unknown('explain', 'declared', :token);
SELECT * FROM pg_temp.line('explain', 'declared');
SELECT outcome FROM idem_claim('explain hold', 'held', lease => '1 hour');
CALL pg_temp.lease_over('held');
SELECT * FROM pg_temp.line('explain hold', 'held');
SELECT outcome FROM idem_claim('explain spent', 'spent', lease => '1 hour');
CALL pg_temp.lease_over('spent');
SELECT * FROM pg_temp.line('explain spent', 'spent');
SELECT outcome, attempt FROM idem_claim('explain spent', 'spent', lease => '1 hour');
CALL pg_temp.lease_over('spent');
SELECT * FROM pg_temp.line('explain spent', 'spent');
SELECT outcome FROM idem_claim('explain late', 'late', lease => '1 hour');
CALL pg_temp.lease_over('late');
SELECT * FROM pg_temp.line('explain late', 'late');
UPDATE idem.inflight SET created_at = now() - interval '61 min' WHERE key = 'late';
SELECT * FROM pg_temp.line('explain late', 'late');

-- the key is this scope's
SELECT * FROM pg_temp.line('explain other', 'done');

\pset fieldsep '|'
-- explaining writes nothing: in a read-only transaction, of any line; no xid, no key lock, no row, no mismatch in the audit
CREATE TEMP TABLE rows AS
	SELECT 'result' AS tab, scope_id, key, xmin::text AS x, ctid::text AS tid, token FROM idem.result
	UNION ALL SELECT 'inflight', scope_id, key, xmin::text AS x, ctid::text AS tid, token FROM idem.inflight
	UNION ALL SELECT 'archive', scope_id, key, xmin::text AS x, ctid::text AS tid, token FROM idem.archive;
SELECT count(*) AS mismatches FROM idem.audit WHERE scope LIKE 'explain%' AND event = 'mismatch' \gset
BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY;
SELECT split_part(idem_explain(s.name, k.key, '{"n": 3}'), ':', 1) AS says, count(*)
FROM idem.scope AS s, unnest('{nothing,done,failed,old,leased,declared,held,spent,late,no application}'::text[]) AS k (key)
WHERE s.name LIKE 'explain%' GROUP BY 1 ORDER BY 1;
SELECT pg_current_xact_id_if_assigned() IS NULL;
SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory';
COMMIT;
BEGIN;
SELECT idem_explain('explain', 'new') IS NOT NULL, idem_explain('explain', 'done', '{"n": 3}') IS NOT NULL;
SELECT pg_current_xact_id_if_assigned() IS NULL;
SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory';
COMMIT;
SELECT count(*) FROM rows FULL JOIN (
	SELECT 'result' AS tab, scope_id, key, xmin::text AS x, ctid::text AS tid, token FROM idem.result
	UNION ALL SELECT 'inflight', scope_id, key, xmin::text AS x, ctid::text AS tid, token FROM idem.inflight
	UNION ALL SELECT 'archive', scope_id, key, xmin::text AS x, ctid::text AS tid, token FROM idem.archive) AS now
	USING (tab, scope_id, key, x, tid, token) WHERE now.tab IS NULL OR rows.tab IS NULL;
SELECT count(*) - :mismatches FROM idem.audit WHERE scope LIKE 'explain%' AND event = 'mismatch';

-- who may: members of the owner, and of the operators
CREATE ROLE regress_idem_explain_owner;
CREATE ROLE regress_idem_explain_operator;
CREATE ROLE regress_idem_explain_other;
INSERT INTO idem.scope (name, owner, operators) VALUES ('explain rights', 'regress_idem_explain_owner', 'regress_idem_explain_operator');
SET ROLE regress_idem_explain_owner;
SELECT idem_explain('explain rights', 'k');
SET ROLE regress_idem_explain_operator;
SELECT idem_explain('explain rights', 'k');
SET ROLE regress_idem_explain_other;
\set VERBOSITY sqlstate
SELECT idem_explain('explain rights', 'k');
SELECT idem_explain('explain', 'done');
RESET ROLE;

-- arguments, as in idem_claim
SELECT idem_explain(NULL, 'k');
SELECT idem_explain('explain', NULL);
SELECT idem_explain('explain', '');
SELECT idem_explain('explain', repeat('k', 256));
SELECT idem_explain('nowhere', 'k');
SELECT idem_explain('explain', 'k', '{');
SELECT idem_explain('explain', 'k', '{"a": 1, "a": 2}'::json);
\set VERBOSITY default
SELECT idem_explain('explain', 'k', NULL::json) = idem_explain('explain', 'k');

DELETE FROM idem.result WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'explain%');
DELETE FROM idem.inflight WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'explain%');
DELETE FROM idem.archive WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'explain%');
DELETE FROM idem.scope WHERE name LIKE 'explain%';
DROP ROLE regress_idem_explain_owner, regress_idem_explain_operator, regress_idem_explain_other;

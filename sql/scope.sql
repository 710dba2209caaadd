-- Contracts: what a row of idem.scope may be, what may be changed once a scope
-- has keys, that every change is audited, and that it counts at once.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;

CREATE FUNCTION pg_temp.try(statement text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE statement;
	RETURN 'no error';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE || ': ' || SQLERRM;
END $$;
CREATE FUNCTION pg_temp.try_insert(columns text, "values" text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	state text;
	name text;
BEGIN
	EXECUTE format('INSERT INTO idem.scope (name%s) VALUES (%L%s)', ', ' || nullif(columns, ''), 'scope try', ', ' || nullif("values", ''));
	DELETE FROM idem.scope s WHERE s.name = 'scope try';
	RETURN 'accepted';
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, name = CONSTRAINT_NAME;
	RETURN concat_ws(' ', state, nullif(name, ''));
END $$;

-- defaults
INSERT INTO idem.scope (name) VALUES ('scope');
SELECT owner = current_user::regrole AS owner, operators, retention, archive, archive_retention, replay_window, lease, on_expiry,
	   max_attempts, retry_within, include, exclude, keep_request FROM idem.scope WHERE name = 'scope';

-- the name: 1 to 255 bytes, unique byte for byte
SELECT pg_temp.try($$INSERT INTO idem.scope (name) VALUES ('scope')$$);
SELECT pg_temp.try($$INSERT INTO idem.scope (name) VALUES (NULL)$$);
SELECT pg_temp.try($$INSERT INTO idem.scope (name) VALUES ('')$$);
SELECT left(pg_temp.try(format($$INSERT INTO idem.scope (name) VALUES (%L)$$, repeat(U&'\00e4', 128))), 5);
INSERT INTO idem.scope (name) VALUES ('Scope'), ('scope '), (repeat(U&'\00e4', 127));
BEGIN;
SELECT (idem_claim(n, 'k')).outcome FROM unnest(ARRAY['Scope', 'scope ', repeat(U&'\00e4', 127)]) n;
ROLLBACK;
WITH d AS (DELETE FROM idem.scope WHERE name IN ('Scope', 'scope ', repeat(U&'\00e4', 127)) RETURNING 1) SELECT count(*) FROM d;
-- the id is the database's business
SELECT left(pg_temp.try($$INSERT INTO idem.scope (id, name) VALUES (1, 'x')$$), 5);
SELECT left(pg_temp.try($$UPDATE idem.scope SET id = DEFAULT WHERE name = 'scope'$$), 80);

-- CHECK constraints of every column
SELECT c, v, pg_temp.try_insert(c, v) FROM (VALUES
	('owner', 'NULL'), ('owner', $$'no_such_role'$$), ('operators', $$'pg_monitor'$$),
	('retention', $$'0'$$), ('retention', $$'-1 s'$$), ('retention', 'NULL'), ('retention', $$'1 month -31 days'$$),
	('archive', $$'none'$$), ('archive', $$'full'$$), ('archive', $$'Key'$$), ('archive', 'NULL'),
	('archive_retention', $$'0'$$), ('archive_retention', $$'-1 s'$$), ('archive_retention', 'NULL'),
	('replay_window', $$'-1 s'$$), ('replay_window', $$'91 days -1 s'$$), ('replay_window', $$'91 days'$$), ('replay_window', 'NULL'),
	('replay_window, retention', $$'1000 years', NULL$$), ('replay_window, archive_retention', $$'1000 years', NULL$$),
	('replay_window, archive', $$'23 hours', 'none'$$), ('replay_window, archive', $$'24 hours', 'none'$$),
	('replay_window, archive, archive_retention', $$'24 hours', 'none', NULL$$),
	('lease', $$'1 us'$$), ('lease', $$'0'$$), ('lease', $$'-1 s'$$),
	('on_expiry', $$'hold'$$), ('on_expiry', $$'keep'$$), ('on_expiry', 'NULL'),
	('max_attempts', '1'), ('max_attempts', '0'), ('max_attempts', '-1'),
	('retry_within', $$'1 us'$$), ('retry_within', $$'0'$$), ('retry_within', $$'-1 s'$$),
	('include', $$'{/a,/b/0/*,""}'$$), ('include', $$'{}'$$), ('include', $$'{a}'$$), ('include', $$'{/a~2}'$$), ('include', $$'{NULL}'$$), ('include', $$'{{/a},{/b}}'$$),
	('exclude', $$'{/a,/b~1c}'$$), ('exclude', $$'{}'$$), ('exclude', $$'{""}'$$), ('exclude', $$'{a}'$$), ('exclude', $$'{/a,NULL}'$$),
	('keep_request', $$'never'$$), ('keep_request', $$'always'$$), ('keep_request', $$'sometimes'$$), ('keep_request', 'NULL')) AS t (c, v);
-- infinite durations are no durations (they exist since PostgreSQL 17): NULL is for ever
SELECT count(*) AS columns, count(*) FILTER (WHERE pg_temp.try_insert(c, $$'infinity'$$) NOT LIKE 'accepted') AS refused
FROM unnest(ARRAY['retention', 'archive_retention', 'replay_window', 'lease', 'retry_within']) c;
-- an update is checked like an insert
SELECT pg_temp.try($$UPDATE idem.scope SET include = '{amount}' WHERE name = 'scope'$$);
SELECT left(pg_temp.try($$UPDATE idem.scope SET lease = '0' WHERE name = 'scope'$$), 5);

-- a change counts at once: in this session, and for the claims of the same transaction
DELETE FROM idem.audit WHERE scope LIKE 'scope%';
BEGIN;
SELECT idem_once('scope', 'k1', '{"amount": 1, "note": "a"}');
UPDATE idem.result SET completed_at = completed_at - interval '1 day' WHERE key = 'k1';
SELECT outcome FROM idem_claim('scope', 'k1');
UPDATE idem.scope SET retention = '2 days' WHERE name = 'scope';
SELECT outcome FROM idem_claim('scope', 'k1');
SAVEPOINT s;
UPDATE idem.scope SET retention = '1 hour' WHERE name = 'scope';
SELECT outcome FROM idem_claim('scope', 'k1');
ROLLBACK TO s;
SELECT outcome FROM idem_claim('scope', 'k1');
ROLLBACK;
SELECT idem_once('scope', 'k1', '{"amount": 1, "note": "a"}');
UPDATE idem.result SET completed_at = completed_at - interval '1 day' WHERE key = 'k1';
SELECT outcome FROM idem_claim('scope', 'k1');
-- a scope that is made and rolled back, renamed, swapped
BEGIN;
INSERT INTO idem.scope (name) VALUES ('scope new');
SELECT idem_once('scope new', 'k');
ROLLBACK;
SELECT pg_temp.try($$SELECT idem_once('scope new', 'k')$$);
SELECT pg_temp.try($$INSERT INTO idem.scope (name) VALUES ('scope new'); SELECT idem_once('scope new', 'k'); SELECT 1/0$$);
SELECT pg_temp.try($$SELECT idem_once('scope new', 'k')$$);
INSERT INTO idem.scope (name, retention) VALUES ('scope new', NULL);
SELECT idem_once('scope new', 'k'), idem_once('scope', 'only here');
BEGIN;
UPDATE idem.scope SET name = 'scope swap' WHERE name = 'scope';
UPDATE idem.scope SET name = 'scope' WHERE name = 'scope new';
UPDATE idem.scope SET name = 'scope new' WHERE name = 'scope swap';
SELECT idem_once('scope', 'k') AS moved, idem_once('scope new', 'only here') AS moved, idem_once('scope', 'only here') AS new;
ROLLBACK;
SELECT idem_once('scope', 'k') AS new, idem_once('scope new', 'k') AS old;
UPDATE idem.scope SET name = 'scope renamed' WHERE name = 'scope new';
SELECT idem_once('scope renamed', 'k') AS old, pg_temp.try($$SELECT idem_once('scope new', 'k')$$);
UPDATE idem.scope SET owner = 'pg_monitor', lease = '1 hour' WHERE name = 'scope renamed';
SELECT token IS NOT NULL AS leased FROM idem_claim('scope renamed', 'now leased');

-- every change and deletion is audited with who, old and new; an insert is not
SELECT event, scope, key, who = current_user AS who, (SELECT string_agg(format('%s: %s -> %s', o.key, o.value, n.value), ', ' ORDER BY o.key)
	FROM jsonb_each(old) o JOIN jsonb_each(new) n USING (key) WHERE o.value <> n.value) AS changed
FROM idem.audit WHERE scope LIKE 'scope%' ORDER BY at;

-- a scope with rows is not deleted, whatever table they are in, nor its include and exclude changed
SELECT pg_temp.try($$DELETE FROM idem.scope WHERE name = 'scope'$$);
SELECT pg_temp.try($$UPDATE idem.scope SET include = '{/amount}' WHERE name = 'scope'$$);
SELECT pg_temp.try($$UPDATE idem.scope SET exclude = '{/note}' WHERE name = 'scope'$$);
DELETE FROM idem.scope WHERE name = 'scope';
\echo :SQLSTATE
UPDATE idem.scope SET include = '{/amount}' WHERE name = 'scope';
-- ... setting them to what they are is no change
UPDATE idem.scope SET include = NULL, exclude = NULL WHERE name = 'scope';
-- ... rows in idem.inflight alone
DELETE FROM idem.result WHERE scope_id = (SELECT id FROM idem.scope WHERE name = 'scope renamed');
SELECT pg_temp.try($$DELETE FROM idem.scope WHERE name = 'scope renamed'$$), pg_temp.try($$UPDATE idem.scope SET exclude = '{/a}' WHERE name = 'scope renamed'$$);
-- ... rows in idem.archive alone
DELETE FROM idem.inflight WHERE scope_id = (SELECT id FROM idem.scope WHERE name = 'scope renamed');
INSERT INTO idem.archive (token, created_at, completed_at, scope_id, attempt, form, state, key, archived_at)
SELECT 1, now(), now() - interval '2 days', id, 1, 1, 's', 'archived', now() FROM idem.scope WHERE name = 'scope renamed';
SELECT pg_temp.try($$DELETE FROM idem.scope WHERE name = 'scope renamed'$$), pg_temp.try($$UPDATE idem.scope SET exclude = '{/a}' WHERE name = 'scope renamed'$$);
-- ... a claim of this very transaction
DELETE FROM idem.archive WHERE scope_id = (SELECT id FROM idem.scope WHERE name = 'scope renamed');
BEGIN;
SELECT outcome FROM idem_claim('scope renamed', 'k', lease => '0');
SELECT pg_temp.try($$DELETE FROM idem.scope WHERE name = 'scope renamed'$$), pg_temp.try($$UPDATE idem.scope SET exclude = '{/a}' WHERE name = 'scope renamed'$$);
ROLLBACK;
-- without rows both are allowed, and count
UPDATE idem.scope SET include = '{/amount,/to}', exclude = '{/to/note}' WHERE name = 'scope renamed';
BEGIN;
SELECT outcome FROM idem_claim('scope renamed', 'k', '{"amount": 1, "to": {"iban": "X", "note": 1}, "other": 1}', lease => '0');
SELECT outcome FROM idem_claim('scope renamed', 'k', '{"to": {"note": 2, "iban": "X"}, "amount": 1.0}', lease => '0');
SELECT outcome FROM idem_claim('scope renamed', 'k', '{"to": {"iban": "Y"}, "amount": 1}', lease => '0');
ROLLBACK;
DELETE FROM idem.scope WHERE name = 'scope renamed';
SELECT event, old ->> 'name' AS old, new FROM idem.audit WHERE scope = 'scope renamed' AND event = 'scope deleted';
SELECT pg_temp.try($$SELECT idem_once('scope renamed', 'k')$$);

-- a name that is used again is another scope: nothing of the old one speaks
INSERT INTO idem.scope (name) VALUES ('scope renamed');
SELECT idem_once('scope renamed', 'k'), idem_once('scope renamed', 'k');

-- full -> key while something is archived would forget it: refused; full -> none means to
INSERT INTO idem.scope (name, archive) VALUES ('scope full', 'full');
INSERT INTO idem.archive (token, created_at, completed_at, scope_id, attempt, form, state, key, archived_at)
SELECT 1, now(), now() - interval '2 days', id, 1, 1, 's', 'archived', now() FROM idem.scope WHERE name = 'scope full';
UPDATE idem.scope SET archive = 'key' WHERE name = 'scope full';
\echo :SQLSTATE
SELECT outcome, state FROM idem_claim('scope full', 'archived');
BEGIN;
UPDATE idem.scope SET archive = 'none' WHERE name = 'scope full';
SELECT pg_temp.try($$UPDATE idem.scope SET archive = 'key' WHERE name = 'scope full'$$);
SELECT idem_once('scope full', 'archived') AS new;
ROLLBACK;
DELETE FROM idem.archive WHERE scope_id = (SELECT id FROM idem.scope WHERE name = 'scope full');
UPDATE idem.scope SET archive = 'key' WHERE name = 'scope full';

-- truncation is refused, also with CASCADE
TRUNCATE idem.scope;
\echo :SQLSTATE
SELECT left(pg_temp.try('TRUNCATE idem.scope CASCADE'), 5);
-- the trigger function is no use elsewhere
SELECT left(pg_temp.try('SELECT idem_scope_guard()'), 5);

-- many scopes: each its own
INSERT INTO idem.scope (name, lease) SELECT 'scope many ' || i, i * interval '1 hour' FROM generate_series(1, 300) i;
SELECT count(*) AS claimed FROM generate_series(1, 300) i, idem_claim('scope many ' || i, 'k') c WHERE c.outcome = 'claimed';
SELECT count(*) AS leases, count(*) FILTER (WHERE lease_until BETWEEN now() + s.lease - interval '30 minutes' AND now() + s.lease + interval '1 minute') AS right_lease
FROM idem.inflight i JOIN idem.scope s ON s.id = i.scope_id WHERE s.name LIKE 'scope many %';

DELETE FROM idem.inflight WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'scope%');
DELETE FROM idem.result WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'scope%');
WITH d AS (DELETE FROM idem.scope WHERE name LIKE 'scope%' RETURNING 1) SELECT count(*) AS deleted FROM d;
SELECT count(*) FILTER (WHERE event = 'scope deleted') AS audited FROM idem.audit WHERE scope LIKE 'scope%';
DELETE FROM idem.audit WHERE scope LIKE 'scope%';

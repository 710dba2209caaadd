-- Who may do what: owner, operators, others, PUBLIC, pg_monitor; roles with odd
-- names; and a caller whose search_path is full of traps.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;

CREATE ROLE regress_idem_owner;
CREATE ROLE regress_idem_operators;
CREATE ROLE regress_idem_app IN ROLE regress_idem_owner;
CREATE ROLE regress_idem_noinherit NOINHERIT IN ROLE regress_idem_owner;
CREATE ROLE regress_idem_human IN ROLE regress_idem_operators;
CREATE ROLE regress_idem_other;
CREATE ROLE regress_idem_monitor IN ROLE pg_monitor;
CREATE ROLE regress_idem_admin;
CREATE ROLE "regress ""Idem"" R'ole";
INSERT INTO idem.scope (name, owner, operators, lease) VALUES
	('privileges', 'regress_idem_owner', 'regress_idem_operators', NULL),
	('privileges owner only', 'regress_idem_owner', NULL, '1 hour'),
	('privileges other', 'regress_idem_other', NULL, NULL);
-- temporary functions of one session are the superuser's; this one is for all
CREATE SCHEMA regress_idem;
GRANT USAGE ON SCHEMA regress_idem TO PUBLIC;
CREATE FUNCTION regress_idem.try(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	result text;
BEGIN
	EXECUTE statement INTO result;
	RETURN coalesce(result, 'NULL');
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE;
END $$;

-- keys to act on: settled, in doubt, free
SELECT idem_once('privileges', k) FROM unnest(ARRAY['settled', 'forget owner', 'forget operator']) k;
SELECT (idem_claim('privileges', k, lease => '1 h')).outcome FROM unnest(ARRAY['doubt 1', 'doubt 2', 'free 1', 'free 2']) k;
UPDATE idem.inflight SET state = CASE WHEN key LIKE 'doubt%' THEN 'u' ELSE 'e' END, lease_until = CASE WHEN key LIKE 'doubt%' THEN 'infinity' ELSE lease_until END
WHERE scope_id = (SELECT id FROM idem.scope WHERE name = 'privileges');

CREATE TABLE regress_idem.acts (n serial, act text, statement text);
INSERT INTO regress_idem.acts (act, statement) VALUES
	('claim', $$SELECT outcome FROM idem_claim('privileges', 'settled')$$),
	('once', $$SELECT idem_once('privileges', 'settled')$$),
	('complete', $$SELECT idem_complete('privileges', 'nobody holds it')$$),
	('fail', $$SELECT idem_fail('privileges', 'nobody holds it')$$),
	('release', $$SELECT idem_release('privileges', 'nobody holds it')$$),
	('extend', $$SELECT idem_extend('privileges', 'nobody holds it', NULL, '1 s')$$),
	('checkpoint', $$SELECT idem_checkpoint('privileges', 'nobody holds it', NULL, 'p')$$),
	('unknown', $$SELECT idem_unknown('privileges', 'nobody holds it', NULL)$$),
	('status', $$SELECT outcome FROM idem_status('privileges', 'settled')$$),
	('resolve', $$SELECT idem_resolve('privileges', 'settled', 'retry')$$),
	('recover', $$SELECT count(*) FROM idem_recover('privileges', 1, '1 h')$$),
	('forget', $$SELECT idem_forget('privileges', 'no such key')$$),
	('quarantine', $$SELECT idem_quarantine('privileges') >= 0$$),
	('key', $$SELECT idem_key('a', 'b')$$),
	('child', $$SELECT idem_child('privileges', 'k', 's') IS NOT NULL$$),
	('fingerprint', $$SELECT idem_fingerprint('1') IS NOT NULL$$),
	('read scope', 'SELECT count(*) > 0 FROM idem.scope'), ('read result', 'SELECT count(*) > 0 FROM idem.result'),
	('read inflight', 'SELECT count(*) > 0 FROM idem.inflight'), ('read archive', 'SELECT count(*) >= 0 FROM idem.archive'),
	('read audit', 'SELECT count(*) >= 0 FROM idem.audit'), ('read sweep', 'SELECT count(*) >= 0 FROM idem.sweep'),
	('write scope', $$INSERT INTO idem.scope (name) VALUES ('privileges mine') RETURNING 1$$),
	('delete result', 'DELETE FROM idem.result RETURNING 1'),
	('view operation', $$SELECT string_agg(DISTINCT scope, ', ' ORDER BY scope) FROM idem.operation WHERE scope LIKE 'privileges%'$$),
	('view holder', 'SELECT count(*) >= 0 FROM idem.holder'),
	('view health', 'SELECT count(*) FROM idem.health'), ('view stat', 'SELECT count(*) >= 0 FROM idem.stat'),
	('create in schema', 'CREATE TABLE idem.mine ()');
GRANT SELECT ON regress_idem.acts TO PUBLIC;

-- each role tries everything
SET ROLE regress_idem_app;
SELECT current_user AS role, act, regress_idem.try(statement) AS answer FROM regress_idem.acts ORDER BY n;
RESET ROLE;
SET ROLE regress_idem_human;
SELECT current_user AS role, act, regress_idem.try(statement) AS answer FROM regress_idem.acts ORDER BY n;
RESET ROLE;
SET ROLE regress_idem_other;
SELECT current_user AS role, act, regress_idem.try(statement) AS answer FROM regress_idem.acts ORDER BY n;
RESET ROLE;
SET ROLE regress_idem_noinherit;
SELECT current_user AS role, act, regress_idem.try(statement) AS answer FROM regress_idem.acts WHERE act IN ('claim', 'status', 'view operation', 'view holder', 'view health', 'view stat') ORDER BY n;
RESET ROLE;
SET ROLE regress_idem_monitor;
SELECT current_user AS role, act, regress_idem.try(statement) AS answer FROM regress_idem.acts WHERE act IN ('claim', 'status', 'view operation', 'view holder', 'view health', 'view stat') ORDER BY n;
RESET ROLE;

-- the message, with its hint
SET ROLE regress_idem_other;
SELECT idem_claim('privileges', 'k');
\echo :SQLSTATE
SELECT idem_forget('privileges', 'k');
RESET ROLE;
-- operators NULL: the owner's members
SELECT idem_once('privileges owner only', 'k');
SET ROLE regress_idem_app;
SELECT idem_forget('privileges owner only', 'k');
RESET ROLE;
SET ROLE regress_idem_human;
SELECT regress_idem.try($$SELECT idem_forget('privileges owner only', 'k')$$);
-- operators do what they are for
SELECT idem_forget('privileges', 'forget operator', false);
RESET ROLE;
SELECT who, event, key FROM idem.audit WHERE scope LIKE 'privileges%' AND event = 'forget' ORDER BY at;

-- a membership that is taken away counts at once
REVOKE regress_idem_owner FROM regress_idem_app;
SET ROLE regress_idem_app;
SELECT regress_idem.try($$SELECT idem_once('privileges', 'settled')$$);
RESET ROLE;
GRANT regress_idem_owner TO regress_idem_app;
-- a function of the owner's lends its rights, as usual
CREATE FUNCTION regress_idem.as_owner(k text) RETURNS boolean LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$SELECT idem_once('privileges', k)$$;
ALTER FUNCTION regress_idem.as_owner(text) OWNER TO regress_idem_owner;
SET ROLE regress_idem_other;
SELECT regress_idem.as_owner('settled');
RESET ROLE;

-- an administrator is whoever may write idem.scope; the default owner is the one who writes
GRANT SELECT, INSERT, UPDATE, DELETE ON idem.scope TO regress_idem_admin, "regress ""Idem"" R'ole";
SET ROLE regress_idem_admin;
INSERT INTO idem.scope (name) VALUES ('privileges admin');
UPDATE idem.scope SET lease = '1 h' WHERE name = 'privileges admin';
SELECT (idem_claim('privileges admin', 'k', lease => '0')).outcome, idem_complete('privileges admin', 'k');
SELECT regress_idem.try($$DELETE FROM idem.scope WHERE name = 'privileges admin' RETURNING 1$$);
RESET ROLE;
SET ROLE "regress ""Idem"" R'ole";
INSERT INTO idem.scope (name) VALUES ('privileges odd');
SELECT owner, idem_once(name, 'k') FROM idem.scope WHERE name = 'privileges odd';
SELECT scope, key, state FROM idem.operation;
SELECT token > 0 AS leased FROM idem_claim('privileges odd', 'l', lease => '1 h');
RESET ROLE;
SELECT who, event, scope FROM idem.audit WHERE scope LIKE 'privileges a%' ORDER BY at;
SELECT split_part(owner, ' (', 1) AS owner FROM idem.inflight WHERE key = 'l' AND scope_id = (SELECT id FROM idem.scope WHERE name = 'privileges odd');

-- idem.operation is a security barrier: a leaky function sees no row of another's scope
SET ROLE regress_idem_other;
CREATE FUNCTION pg_temp.leak(text) RETURNS boolean LANGUAGE plpgsql COST 0.0000001 AS $$BEGIN RAISE NOTICE 'leaked %', $1; RETURN true; END$$;
SELECT count(*) FROM idem.operation WHERE pg_temp.leak(key);
RESET ROLE;

-- what PUBLIC may execute: everything of the extension but the sweep, the counters and the trigger
SELECT p.proname, count(*) FROM pg_proc p JOIN pg_depend d ON d.objid = p.oid AND d.classid = 'pg_proc'::regclass AND d.deptype = 'e'
JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'idem'
WHERE NOT has_function_privilege('regress_idem_other', p.oid, 'EXECUTE') GROUP BY p.proname ORDER BY p.proname;
-- no relation is PUBLIC's but the view that looks who asks
SELECT c.relname, CASE WHEN has_table_privilege('regress_idem_other', c.oid, 'SELECT') THEN 'SELECT' END AS public
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'idem' AND c.relkind IN ('r', 'v', 'S')
AND has_table_privilege('regress_idem_other', c.oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER');
-- no function is SECURITY DEFINER
SELECT count(*) AS security_definer FROM pg_proc p JOIN pg_depend d ON d.objid = p.oid AND d.classid = 'pg_proc'::regclass AND d.deptype = 'e'
JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'idem' WHERE p.prosecdef;

-- traps: objects of the same names before ours on the caller's search_path, and operators and functions that
-- say the opposite or raise; a superuser who calls must not run them
CREATE SCHEMA regress_idem_trap;
CREATE FUNCTION regress_idem_trap.trap() RETURNS boolean LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'trapped'; END$$;
CREATE TABLE regress_idem_trap.result (LIKE idem.result);
CREATE TABLE regress_idem_trap.inflight (LIKE idem.inflight);
CREATE TABLE regress_idem_trap.scope (LIKE idem.scope);
CREATE TABLE regress_idem_trap.audit (LIKE idem.audit);
CREATE TYPE regress_idem_trap.idem_answer AS (outcome text);
CREATE FUNCTION regress_idem_trap.texteq(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT regress_idem_trap.trap()';
CREATE FUNCTION regress_idem_trap.inteq(int, int) RETURNS boolean LANGUAGE sql AS 'SELECT regress_idem_trap.trap()';
CREATE OPERATOR regress_idem_trap.= (LEFTARG = text, RIGHTARG = text, FUNCTION = regress_idem_trap.texteq);
CREATE OPERATOR regress_idem_trap.= (LEFTARG = int, RIGHTARG = int, FUNCTION = regress_idem_trap.inteq);
CREATE FUNCTION regress_idem_trap.quote_ident(name) RETURNS text LANGUAGE sql AS $$SELECT regress_idem_trap.trap()::text$$;
CREATE FUNCTION regress_idem_trap.pg_has_role(regrole, text) RETURNS boolean LANGUAGE sql AS 'SELECT regress_idem_trap.trap()';
CREATE FUNCTION regress_idem_trap.array_ndims(text[]) RETURNS int LANGUAGE sql AS 'SELECT regress_idem_trap.trap()::int';
SET search_path = regress_idem_trap, pg_catalog, public;
BEGIN;
SELECT public.idem_once('privileges', 'trap');
SELECT outcome FROM public.idem_claim('privileges', 'trap 2', '{"a": 1}');
SELECT public.idem_complete('privileges', 'trap 2', '1'::jsonb);
SELECT outcome FROM public.idem_claim('privileges', 'trap 2', '{"a": 2}');
SELECT token IS NOT NULL AS token FROM public.idem_claim('privileges', 'trap 3', lease => '1 h');
SELECT public.idem_quarantine('privileges') > 0 AS quarantined;
SELECT public.idem_resolve('privileges', 'trap 3', 'succeeded');
SELECT public.idem_forget('privileges', 'trap 3');
INSERT INTO idem.scope (name, include) VALUES ('privileges trap', '{/a}');
UPDATE idem.scope SET lease = '1 h' WHERE name OPERATOR(pg_catalog.=) 'privileges trap';
DELETE FROM idem.scope WHERE name OPERATOR(pg_catalog.=) 'privileges trap';
SELECT pg_catalog.count(*) OPERATOR(pg_catalog.>) 3 AS seen FROM idem.operation WHERE scope OPERATOR(pg_catalog.=) 'privileges';
SELECT pg_catalog.count(*) AS trapped FROM regress_idem_trap.result;
ROLLBACK;
RESET search_path;
-- temporary objects come before everything else
CREATE TEMP TABLE result (LIKE idem.result);
CREATE TEMP TABLE scope (LIKE idem.scope);
SELECT idem_once('privileges', 'temp'), idem_once('privileges', 'temp');
SELECT count(*) AS in_temp FROM result;
DROP TABLE result, scope;

SET client_min_messages = warning;
DELETE FROM idem.inflight WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'privileges%');
DELETE FROM idem.result WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'privileges%');
DELETE FROM idem.scope WHERE name LIKE 'privileges%';
DELETE FROM idem.audit WHERE scope LIKE 'privileges%';
REVOKE ALL ON idem.scope FROM regress_idem_admin, "regress ""Idem"" R'ole";
DROP FUNCTION pg_temp.leak(text);
DROP SCHEMA regress_idem, regress_idem_trap CASCADE;
DROP ROLE regress_idem_owner, regress_idem_operators, regress_idem_app, regress_idem_noinherit, regress_idem_human, regress_idem_other,
	regress_idem_monitor, regress_idem_admin, "regress ""Idem"" R'ole";

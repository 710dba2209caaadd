-- The extension as an object: what CREATE EXTENSION may and may not do, in a
-- schema of the user's choice full of traps, and that DROP EXTENSION leaves
-- nothing. Everything here is rolled back, or happens in a second database.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;

-- every object says what it is
SELECT pg_describe_object(classid, objid, 0) COLLATE "C" AS without_comment FROM pg_depend d
WHERE refclassid = 'pg_extension'::regclass AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idem') AND deptype = 'e'
AND NOT EXISTS (SELECT FROM pg_description c WHERE c.classoid = d.classid AND c.objoid = d.objid AND c.objsubid = 0)
AND NOT EXISTS (SELECT FROM pg_class c WHERE d.classid = 'pg_class'::regclass AND c.oid = d.objid AND relkind = 'S')
AND NOT EXISTS (SELECT FROM pg_type t WHERE d.classid = 'pg_type'::regclass AND t.oid = d.objid AND (typelem <> 0 OR typrelid <> 0))
AND d.classid NOT IN ('pg_opfamily'::regclass, 'pg_cast'::regclass)
ORDER BY 1;
SELECT attrelid::regclass AS relation, attname AS column_without_comment FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
WHERE (relnamespace = 'idem'::regnamespace AND relkind IN ('r', 'v') OR relname = 'idem_answer') AND attnum > 0
AND col_description(attrelid, attnum) IS NULL ORDER BY 1, 2;
-- nothing of it is in the schema idem but relations, and each of those that keeps data is dumped
SELECT c.relname, c.oid = ANY (e.extconfig) AS dumped FROM pg_class c, pg_extension e
WHERE c.relnamespace = 'idem'::regnamespace AND c.relkind IN ('r', 'S') AND e.extname = 'idem' ORDER BY c.relname;
SELECT count(*) AS functions_in_idem FROM pg_proc WHERE pronamespace = 'idem'::regnamespace;
-- each function states its volatility and parallel safety
SELECT provolatile AS volatile, proparallel AS parallel, count(*) > 0 AS any, string_agg(DISTINCT proname, ' ' ORDER BY proname) AS functions FROM pg_proc
WHERE proname ~ '^idem_' AND proname !~ '^idem_digest' GROUP BY 1, 2 ORDER BY 1, 2;

-- functions of the scope's keys answer their own type, which can gain attributes without a new library
BEGIN;
ALTER TYPE idem_answer ADD ATTRIBUTE later text;
INSERT INTO idem.scope (name) VALUES ('extension');
SELECT outcome, attempt, later FROM idem_claim('extension', 'k');
SELECT (idem_claim('extension', 'k')).*, 'end' AS last \gset a_
\echo :a_outcome :a_last
SELECT outcome, state, later FROM idem_status('extension', 'k');
ROLLBACK;

-- a second database: the target schema is full of traps, and the script runs into none
\set first :DBNAME
SET client_min_messages = warning;
DROP DATABASE IF EXISTS regress_idem_extension;
RESET client_min_messages;
CREATE DATABASE regress_idem_extension TEMPLATE template0;
\c regress_idem_extension
CREATE SCHEMA "Other Schema";
CREATE FUNCTION "Other Schema".trap() RETURNS boolean LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'trapped'; END$$;
CREATE FUNCTION "Other Schema".quote_ident(name) RETURNS text LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'trapped'; END$$;
CREATE FUNCTION "Other Schema".pg_has_role(regrole, text) RETURNS boolean LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'trapped'; END$$;
CREATE FUNCTION "Other Schema".array_ndims(text[]) RETURNS int LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'trapped'; END$$;
CREATE FUNCTION "Other Schema".array_position(text[], text) RETURNS int LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'trapped'; END$$;
CREATE FUNCTION "Other Schema".pg_extension_config_dump(text, text) RETURNS void LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'trapped'; END$$;
CREATE FUNCTION "Other Schema".isfinite(interval) RETURNS boolean LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'trapped'; END$$;
CREATE TABLE "Other Schema".pg_locks (pid int);
CREATE FUNCTION "Other Schema".trap(oid, regrole) RETURNS boolean LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'trapped'; END$$;
CREATE FUNCTION "Other Schema".trap(oid, regclass) RETURNS boolean LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'trapped'; END$$;
CREATE FUNCTION "Other Schema".trap(real, numeric) RETURNS float8 LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'trapped'; END$$;
CREATE FUNCTION "Other Schema".trap(bigint, text) RETURNS bigint LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'trapped'; END$$;
CREATE FUNCTION "Other Schema".trap(bigint, interval) RETURNS bigint LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'trapped'; END$$;
CREATE OPERATOR "Other Schema".= (LEFTARG = oid, RIGHTARG = regrole, FUNCTION = "Other Schema".trap);
CREATE OPERATOR "Other Schema".= (LEFTARG = oid, RIGHTARG = regclass, FUNCTION = "Other Schema".trap);
CREATE OPERATOR "Other Schema".* (LEFTARG = real, RIGHTARG = numeric, FUNCTION = "Other Schema".trap);
CREATE AGGREGATE "Other Schema".array_agg(text) (SFUNC = "Other Schema".trap, STYPE = bigint, INITCOND = 0);
CREATE AGGREGATE "Other Schema".count(interval) (SFUNC = "Other Schema".trap, STYPE = bigint, INITCOND = 0);
CREATE EXTENSION idem SCHEMA "Other Schema";
SELECT extnamespace::regnamespace AS schema, extrelocatable FROM pg_extension WHERE extname = 'idem';
INSERT INTO idem.scope (name, include) VALUES ('other', '{/a}');
SELECT "Other Schema".idem_once('other', 'k', '{"a": 1}'), "Other Schema".idem_once('other', 'k', '{"a": 1, "b": 2}');
SET search_path = "Other Schema";
BEGIN;
SELECT outcome FROM idem_claim('other', 'c', '{"a": 1}', fingerprint => NULL);
SELECT count(*) AS held FROM idem.holder WHERE pid = pg_backend_pid();
SELECT idem_complete('other', 'c', '1'::jsonb);
COMMIT;
SELECT outcome, response FROM idem_claim('other', 'c', '{"a": 2}');
SELECT scope, key, state, fingerprint = idem_fingerprint('{"a": 1}') AS fingerprint FROM idem.operation ORDER BY key;
-- ... health, as those see it whom it is for
SELECT count(*) AS first FROM generate_series(1, 100) i WHERE idem_once('other', 'health ' || i);
UPDATE idem.result SET completed_at = completed_at - interval '1 year' WHERE key LIKE 'health %0';
CREATE ROLE regress_idem_monitor IN ROLE pg_monitor;
CREATE ROLE regress_idem_gone;
INSERT INTO idem.scope (name, owner) VALUES ('gone', 'regress_idem_gone');
DROP ROLE regress_idem_gone;
ANALYZE idem.result;
GRANT USAGE ON SCHEMA "Other Schema" TO regress_idem_monitor;
SET ROLE regress_idem_monitor;
SELECT settled_estimate, overdue_estimate BETWEEN 5 AND 20 AS overdue, holders, scopes_without_role FROM idem.health;
RESET ROLE;
REVOKE USAGE ON SCHEMA "Other Schema" FROM regress_idem_monitor;
DROP ROLE regress_idem_monitor;
DELETE FROM idem.result WHERE key LIKE 'health %';
SELECT count(*) AS counters FROM idem.stat WHERE scope = 'no such scope';
RESET search_path;
\set VERBOSITY sqlstate
ALTER EXTENSION idem SET SCHEMA public;
\set VERBOSITY default

-- DROP EXTENSION leaves nothing
CREATE TABLE public.before_drop AS SELECT count(*) AS n FROM pg_proc WHERE proname ~ '^idem_';
DROP EXTENSION idem;
SELECT n > 20 AS functions_before FROM public.before_drop;
SELECT (SELECT count(*) FROM pg_namespace WHERE nspname = 'idem') AS schemas, (SELECT count(*) FROM pg_proc WHERE proname ~ '^idem_') AS functions,
	   (SELECT count(*) FROM pg_type WHERE typname ~ 'idem') AS types, (SELECT count(*) FROM pg_class WHERE relname ~ 'idem') AS relations,
	   (SELECT count(*) FROM pg_opclass WHERE opcname ~ 'idem') AS operator_classes, (SELECT count(*) FROM pg_opfamily WHERE opfname ~ 'idem') AS families;
-- ... and a new one starts empty, in the same session
CREATE EXTENSION idem;
SELECT count(*) AS scopes FROM idem.scope;
INSERT INTO idem.scope (name) VALUES ('other');
SELECT idem_once('other', 'k') AS new, idem_once('other', 'k') AS new;
-- dropped and made again in one transaction, and rolled back: what was there is there
BEGIN;
SELECT idem_once('other', 'k2') AS new;
DROP EXTENSION idem;
CREATE EXTENSION idem;
INSERT INTO idem.scope (name, retention) VALUES ('other', NULL);
SELECT idem_once('other', 'k') AS new, idem_once('other', 'k2') AS new;
ROLLBACK;
SELECT idem_once('other', 'k') AS new, idem_once('other', 'k2') AS new;
-- functions without the extension's tables say so
BEGIN;
CREATE FUNCTION public.stray_once(text, text, text, interval, text) RETURNS boolean LANGUAGE c AS '$libdir/idem', 'idem_once';
DROP EXTENSION idem;
SELECT public.stray_once('other', 'k', NULL, NULL, NULL);
\echo :SQLSTATE
ROLLBACK;
-- data that somebody refers to is not dropped in passing
BEGIN;
CREATE VIEW public.mine AS SELECT key FROM idem.operation;
\set VERBOSITY sqlstate
DROP EXTENSION idem;
ROLLBACK;
DROP EXTENSION idem;

-- the schema idem must not be there, and cannot be the target
CREATE EXTENSION idem SCHEMA idem;
CREATE SCHEMA idem;
CREATE EXTENSION idem;
CREATE EXTENSION idem SCHEMA idem;
SELECT count(*) AS extensions FROM pg_extension WHERE extname = 'idem';

\c :first
DROP DATABASE regress_idem_extension;

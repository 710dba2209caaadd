-- Rows are written without the executor: whatever somebody adds to a table that
-- would be bypassed is refused (55000), what can be kept right is kept right,
-- and columns that are not the library's are not touched.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;

INSERT INTO idem.scope (name, archive) VALUES ('tables', 'full');

CREATE FUNCTION pg_temp.try(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	detail text;
	hint text;
BEGIN
	EXECUTE statement;
	RETURN 'no error';
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
	RETURN concat_ws(E'\n', SQLSTATE || ': ' || SQLERRM, nullif(detail, ''), nullif(hint, ''));
END $$;
-- makes a change, shows what a call gets, and undoes it
CREATE FUNCTION pg_temp.after(change text, call text DEFAULT $$SELECT idem_once('tables', 'refused')$$) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	answer text;
BEGIN
	BEGIN
		EXECUTE change;
		answer := pg_temp.try(call);
		RAISE EXCEPTION 'undo' USING ERRCODE = 'UNDO1';
	EXCEPTION WHEN SQLSTATE 'UNDO1' THEN
		RETURN answer;
	END;
END $$;
CREATE FUNCTION public.regress_idem_noop() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
SELECT idem_once('tables', 'before');

-- each addition that would be bypassed; with the hint in full for one of them
SELECT pg_temp.after('CREATE TRIGGER mine BEFORE INSERT ON idem.result FOR EACH ROW EXECUTE FUNCTION public.regress_idem_noop()');
SELECT change, split_part(pg_temp.after(change), E'\n', 1) AS error, split_part(pg_temp.after(change), E'\n', 2) AS detail FROM (VALUES
	('CREATE TRIGGER mine AFTER INSERT ON idem.result EXECUTE FUNCTION public.regress_idem_noop()'),
	('CREATE TRIGGER mine BEFORE UPDATE ON idem.inflight FOR EACH ROW EXECUTE FUNCTION public.regress_idem_noop()'),
	('CREATE TRIGGER mine BEFORE INSERT ON idem.archive FOR EACH ROW EXECUTE FUNCTION public.regress_idem_noop()'),
	('CREATE RULE mine AS ON INSERT TO idem.result DO ALSO NOTHING'),
	('ALTER TABLE idem.result ENABLE ROW LEVEL SECURITY'),
	('ALTER TABLE idem.result ADD CHECK (attempt < 3)'),
	('ALTER TABLE idem.result ADD CHECK (attempt < 3) NOT VALID'),
	('ALTER TABLE idem.result ADD FOREIGN KEY (scope_id) REFERENCES idem.scope'),
	('CREATE TABLE public.mine (s int, k text COLLATE "C", FOREIGN KEY (s, k) REFERENCES idem.result)'),
	('CREATE UNIQUE INDEX mine ON idem.result (token)'),
	('ALTER TABLE idem.result ADD UNIQUE (token)'),
	('CREATE INDEX mine ON idem.result (upper(key))'),
	($$CREATE INDEX mine ON idem.result (key) WHERE state = 'f'$$),
	('ALTER TABLE idem.result ADD EXCLUDE USING btree (token WITH =)'),
	('ALTER TABLE idem.result DROP CONSTRAINT result_pkey'),
	('ALTER TABLE idem.inflight DROP CONSTRAINT inflight_pkey')) AS t (change);
-- ... in idem.audit, which is written by few
SELECT split_part(pg_temp.after('DROP INDEX idem.audit_scope_id_key_idx', $$SELECT idem_forget('tables', 'before')$$), E'\n', 1);
SELECT split_part(pg_temp.after('CREATE TRIGGER mine AFTER INSERT ON idem.audit EXECUTE FUNCTION public.regress_idem_noop()',
	$$SELECT idem_forget('tables', 'before')$$), E'\n', 1);

-- columns that are not those the library was built for: an old library over new SQL, or the reverse
SELECT pg_temp.after('ALTER TABLE idem.result ADD COLUMN later int');
SELECT change, split_part(pg_temp.after(change), E'\n', 1) AS error FROM (VALUES
	('ALTER TABLE idem.result DROP COLUMN body'),
	('ALTER TABLE idem.result RENAME COLUMN response TO answer'),
	('ALTER TABLE idem.result ALTER COLUMN headers TYPE json'),
	('ALTER TABLE idem.result RENAME TO results'),
	('ALTER TABLE idem.inflight ADD COLUMN later int'),
	('ALTER TABLE idem.archive ADD COLUMN later int'),
	('ALTER TABLE idem.scope ADD COLUMN later int'),
	('ALTER TABLE idem.scope RENAME COLUMN lease TO leases')) AS t (change);
-- all of that undone: as before
SELECT idem_once('tables', 'before'), idem_once('tables', 'after');

-- what is no danger is allowed: storage parameters, statistics, a publication, comments, a plain index
BEGIN;
ALTER TABLE idem.result SET (fillfactor = 90);
ALTER TABLE idem.result ALTER COLUMN response SET STATISTICS 0, ALTER COLUMN body SET STORAGE EXTERNAL;
SELECT idem_once('tables', 'allowed');
ROLLBACK;

-- plain indexes of any kind are kept right by everything that writes
CREATE INDEX regress_idem_created ON idem.result (created_at, key);
CREATE INDEX regress_idem_headers ON idem.result USING gin (headers);
-- (of a collation that the primary key cannot be used for)
CREATE INDEX regress_idem_hash ON idem.result USING hash (key COLLATE "POSIX");
CREATE INDEX regress_idem_brin ON idem.result USING brin (completed_at);
CREATE INDEX regress_idem_include ON idem.result (token) INCLUDE (key, state);
CREATE INDEX regress_idem_lease ON idem.inflight (lease_until, key);
CREATE INDEX regress_idem_archived ON idem.archive (archived_at, key);
CREATE INDEX regress_idem_event ON idem.audit (event, key);
SELECT count(*) AS first FROM generate_series(1, 50) i WHERE idem_once('tables', 'i' || i);
BEGIN;
SELECT count(*) FILTER (WHERE (idem_claim('tables', 'c' || i, to_json(i))).outcome = 'claimed'
						AND idem_complete('tables', 'c' || i, headers => jsonb_build_object('n', i)) = 'succeeded') AS settled FROM generate_series(1, 50) i;
COMMIT;
SELECT count(*) AS leased FROM generate_series(1, 20) i, idem_claim('tables', 'l' || i, lease => '1 h') c WHERE c.outcome = 'claimed';
SELECT count(idem_extend('tables', key, token, '2 h')) AS extended FROM idem.operation WHERE scope = 'tables' AND key IN ('l1', 'l2', 'l3');
SELECT count(idem_complete('tables', key, token => token, headers => '{"n": 99}')) AS completed FROM idem.operation WHERE scope = 'tables' AND key IN ('l4', 'l5');
SELECT outcome FROM idem_claim('tables', 'c1', '"other"');
SELECT idem_forget('tables', 'c2'), idem_forget('tables', 'c3', false);

-- with only the added indexes to go by, every row is found, and no other
SET enable_seqscan = off;
SET enable_bitmapscan = on;
CREATE FUNCTION pg_temp.uses(index text, query text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	line text;
	found boolean := false;
	n bigint;
BEGIN
	FOR line IN EXECUTE 'EXPLAIN (COSTS OFF) ' || query LOOP
		found := found OR line LIKE '%' || index || '%';
	END LOOP;
	EXECUTE query INTO n;
	RETURN CASE WHEN found THEN 'index: ' ELSE 'NO INDEX: ' END || n;
END $$;
SELECT count(*) AS rows FROM idem.result WHERE scope_id = (SELECT id FROM idem.scope WHERE name = 'tables');
SELECT pg_temp.uses('regress_idem_created', $$SELECT count(*) FROM idem.result WHERE created_at > now() - interval '1 hour' AND scope_id + 0 = (SELECT id FROM idem.scope WHERE name = 'tables')$$) AS created,
	   pg_temp.uses('regress_idem_headers', $$SELECT count(*) FROM idem.result WHERE headers @> '{"n": 99}'$$) AS headers_99,
	   pg_temp.uses('regress_idem_headers', $$SELECT count(*) FROM idem.result WHERE headers @> '{"n": 2}'$$) AS headers_2,
	   pg_temp.uses('regress_idem_hash', $$SELECT count(*) FROM idem.result WHERE key COLLATE "POSIX" = 'i7'$$) AS i7,
	   pg_temp.uses('regress_idem_hash', $$SELECT count(*) FROM idem.result WHERE key COLLATE "POSIX" = 'c3'$$) AS c3,
	   pg_temp.uses('regress_idem_brin', $$SELECT count(*) FROM idem.result WHERE completed_at > now() - interval '1 hour' AND scope_id + 0 = (SELECT id FROM idem.scope WHERE name = 'tables')$$) AS brin,
	   pg_temp.uses('regress_idem_include', $$SELECT count(*) FROM idem.result WHERE token > 0 AND scope_id + 0 = (SELECT id FROM idem.scope WHERE name = 'tables')$$) AS include;
SELECT pg_temp.uses('regress_idem_lease', $$SELECT count(*) FROM idem.inflight WHERE lease_until > now() + interval '90 minutes'$$) AS extended,
	   pg_temp.uses('regress_idem_lease', $$SELECT count(*) FROM idem.inflight WHERE lease_until > now() AND scope_id + 0 = (SELECT id FROM idem.scope WHERE name = 'tables')$$) AS leased,
	   pg_temp.uses('regress_idem_event', $$SELECT count(*) FROM idem.audit WHERE event = 'mismatch' AND scope = 'tables'$$) AS mismatch,
	   pg_temp.uses('regress_idem_event', $$SELECT count(*) FROM idem.audit WHERE event = 'forget' AND scope = 'tables'$$) AS forget;
RESET enable_seqscan;
-- the primary key still answers, and dropping the indexes changes nothing
SELECT count(*) AS replayed FROM generate_series(1, 50) i, idem_claim('tables', 'i' || i) c WHERE c.outcome = 'replayed';
DROP INDEX idem.regress_idem_created, idem.regress_idem_headers, idem.regress_idem_hash, idem.regress_idem_brin, idem.regress_idem_include,
	idem.regress_idem_lease, idem.regress_idem_archived, idem.regress_idem_event;
SELECT idem_once('tables', 'i50'), idem_once('tables', 'i51');
-- an index on idem.scope that is no index to look names up by is never used for it, not even when it comes first
CREATE INDEX regress_idem_hash ON idem.scope USING hash (name);
CREATE INDEX regress_idem_partial ON idem.scope (name) WHERE lease IS NOT NULL;
REINDEX INDEX CONCURRENTLY idem.scope_name_key;
SELECT idem_once('tables', 'i51'), idem_once('tables', 'i51');
DROP INDEX idem.regress_idem_hash, idem.regress_idem_partial;
-- REINDEX, CLUSTER, VACUUM FULL and TRUNCATE between claims of one session
REINDEX TABLE idem.result;
SELECT idem_once('tables', 'i51'), idem_once('tables', 'i52');
CLUSTER idem.result USING result_pkey;
SELECT idem_once('tables', 'i52'), idem_once('tables', 'i53');
VACUUM FULL idem.result, idem.inflight;
SELECT idem_once('tables', 'i53'), idem_once('tables', 'i54');
BEGIN;
SELECT idem_once('tables', 'i55');
TRUNCATE idem.result;
SELECT idem_once('tables', 'i55');
ROLLBACK;
SELECT idem_once('tables', 'i54'), idem_once('tables', 'i55');

DROP FUNCTION public.regress_idem_noop();
DELETE FROM idem.inflight WHERE scope_id = (SELECT id FROM idem.scope WHERE name = 'tables');
DELETE FROM idem.result WHERE scope_id = (SELECT id FROM idem.scope WHERE name = 'tables');
DELETE FROM idem.scope WHERE name = 'tables';
DELETE FROM idem.audit WHERE scope = 'tables';

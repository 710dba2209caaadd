-- Keys are found whatever the index that leads to them looks like: many levels,
-- long and short keys, versions that were rolled back, rebuilt, another order.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;

INSERT INTO idem.scope (name) VALUES ('lookup'), ('lookup 2'), ('lookup 3');

-- a key that was rolled back many times: pointers to dead rows, on one leaf or on more
CREATE FUNCTION pg_temp.settle_in_vain(key text, times int) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1..times LOOP
		BEGIN
			PERFORM idem_once('lookup', settle_in_vain.key);
			RAISE EXCEPTION 'in vain';
		EXCEPTION WHEN raise_exception THEN
		END;
	END LOOP;
END $$;
SELECT pg_temp.settle_in_vain('vain', 16), (idem_status('lookup', 'vain')).state;
SELECT pg_temp.settle_in_vain('vain', 1), (idem_status('lookup', 'vain')).state;
SELECT pg_temp.settle_in_vain(rpad('vain', 200, '!'), 200), (idem_status('lookup', rpad('vain', 200, '!'))).state;
SELECT idem_once('lookup', key), idem_once('lookup', key), (idem_status('lookup', key)).state
FROM (VALUES ('vain'), (rpad('vain', 200, '!'))) AS keys (key);

-- versions that this transaction has written and deleted, which nobody can remove yet: the
-- pointers fill more than a leaf
DO $$
DECLARE
	long text := rpad('versions', 250, '!');
BEGIN
	FOR i IN 1..700 LOOP
		IF idem_once('lookup', long) AND NOT idem_once('lookup', long) AND i < 700 THEN
			PERFORM idem_forget('lookup', long, tombstone => false);
		END IF;
	END LOOP;
END $$;
SELECT (idem_status('lookup', rpad('versions', 250, '!'))).state, (idem_status('lookup', rpad('versions', 249, '!'))).state,
	   (idem_status('lookup', rpad('versions', 251, '!'))).state;

-- keys of all lengths, of all bytes, one the beginning of another; half of them are settled
CREATE TEMP TABLE candidate AS
	SELECT scope, key, row_number() OVER (ORDER BY md5(key || scope)) % 2 = 0 AS settled
	FROM (VALUES ('lookup'), ('lookup 2'), ('lookup 3')) AS scopes (scope),
		 LATERAL (SELECT repeat('k', n) FROM generate_series(1, 255) AS n
				  UNION SELECT repeat('k', 120) || chr(n) FROM generate_series(33, 250) AS n WHERE n NOT BETWEEN 127 AND 160
				  UNION SELECT left(repeat(md5(n::text), 8), 255) FROM generate_series(1, 1500) AS n
				  UNION SELECT left(md5(n::text), 1 + n % 32) FROM generate_series(1, 1500) AS n
				  UNION SELECT n::text FROM generate_series(1, 500) AS n) AS keys (key);

-- what an answer must be, by the table itself; a row is a wrong answer
CREATE FUNCTION pg_temp.wrong() RETURNS TABLE (scope text, key text, settled boolean, state text) LANGUAGE sql AS $$
	SELECT c.scope, c.key, c.settled, (s).state
	FROM candidate AS c, idem_status(c.scope, c.key) AS s
	WHERE c.settled <> ((s).state IS NOT NULL)
$$;

SELECT count(*) FILTER (WHERE idem_once(scope, key)) = count(*) AS new
FROM (SELECT * FROM candidate WHERE settled ORDER BY md5(scope || key)) AS c;
SELECT count(*) FROM pg_temp.wrong();
SELECT count(*) FILTER (WHERE idem_once(scope, key)) AS new, count(*) > 4000 AS many FROM candidate WHERE settled;
-- more than two levels
SELECT pg_relation_size('idem.result_pkey') / current_setting('block_size')::int > 100 AS pages;

-- the index is rebuilt
REINDEX INDEX idem.result_pkey;
SELECT count(*) FROM pg_temp.wrong();

-- and its pages are emptied and deleted
DELETE FROM candidate WHERE NOT settled;
UPDATE candidate SET settled = false WHERE key > '4' AND scope = 'lookup';
SELECT count(*) = count(*) FILTER (WHERE NOT settled AND idem_forget(scope, key, tombstone => false)) AS forgotten FROM candidate WHERE NOT settled;
VACUUM idem.result;
SELECT count(*) FROM pg_temp.wrong();
SELECT count(*) = count(*) FILTER (WHERE idem_once(scope, key)) AS new FROM candidate WHERE NOT settled;
UPDATE candidate SET settled = true;
SELECT count(*) FROM pg_temp.wrong();

-- a row so wide that its key was compressed, which the rebuilt index has as it is
SELECT idem_once('lookup', rpad('', 255, 'wide'));
BEGIN;
SELECT (idem_claim('lookup', rpad('', 254, 'wide'))).outcome;
SELECT idem_complete('lookup', rpad('', 254, 'wide'), to_json(left(string_agg(encode(sha256(n::text::bytea), 'base64'), ''), 1900)), headers => jsonb_build_object('a', repeat('a', 100)))
FROM generate_series(1, 60) AS n;
COMMIT;
SELECT pg_column_size(key) < 254 AS compressed FROM idem.result WHERE key = rpad('', 254, 'wide');
REINDEX INDEX idem.result_pkey;
SELECT n, (idem_status('lookup', rpad('', n, 'wide'))).state FROM generate_series(253, 255) AS n;
SELECT count(*) FROM pg_temp.wrong();

-- a lease and its versions, whose row has one pointer
CREATE TEMP TABLE held AS SELECT (idem_claim('lookup', 'held', lease => '1 hour')).token;
DO $$
BEGIN
	FOR i IN 1..100 LOOP
		PERFORM idem_extend('lookup', 'held', token, i * interval '1 hour') FROM held;
	END LOOP;
END $$;
SELECT (idem_status('lookup', 'held')).state, idem_complete('lookup', 'held', '1', token => token) FROM held;

-- an index of another kind still serves
BEGIN;
ALTER TABLE idem.result DROP CONSTRAINT result_pkey;
CREATE INDEX ON idem.result (scope_id, key DESC);
SELECT count(*) FROM pg_temp.wrong();
SELECT idem_once('lookup', 'other order'), idem_once('lookup', 'other order'), (idem_status('lookup', 'new')).state;
ROLLBACK;
SELECT count(*) FROM pg_temp.wrong();

-- usage of the index is counted
SELECT pg_stat_force_next_flush();
SELECT idx_scan > 10000 AS scans, idx_tup_read > 5000 AS pointers, idx_tup_fetch > 5000 AS rows
FROM pg_stat_user_indexes WHERE indexrelname = 'result_pkey';

DELETE FROM idem.result WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'lookup%');
DELETE FROM idem.scope WHERE name LIKE 'lookup%';

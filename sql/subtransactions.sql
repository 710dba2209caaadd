-- The cases in the header of held.c: a claim and its settling in different
-- subtransactions, rolled back or not, and which locks stay. A key lock is an
-- advisory lock with objsubid 7453.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;

INSERT INTO idem.scope (name, retention, archive) VALUES ('sub', '1 day', 'key'), ('sub zero', '0', 'none');

CREATE VIEW pg_temp.key_locks AS
	SELECT count(*) AS key_locks FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 7453 AND pid = pg_backend_pid();
CREATE FUNCTION pg_temp.try(statement text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE statement;
	RETURN 'no error';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE || ': ' || SQLERRM;
END $$;

-- claim and settling in the same subtransaction: the row speaks, the lock is given back at once
BEGIN;
SELECT outcome FROM idem_claim('sub', 'same');
SELECT * FROM pg_temp.key_locks;
SELECT idem_complete('sub', 'same');
SELECT * FROM pg_temp.key_locks;
SAVEPOINT s;
SELECT outcome FROM idem_claim('sub', 'same in child');
SELECT idem_complete('sub', 'same in child');
SELECT * FROM pg_temp.key_locks;
-- rolled back: new again, as if it had never been
ROLLBACK TO s;
SELECT * FROM pg_temp.key_locks;
SELECT outcome FROM idem_claim('sub', 'same in child');
SELECT idem_complete('sub', 'same in child', '"second"');
COMMIT;
SELECT key, (idem_status('sub', key)).response FROM unnest(ARRAY['same', 'same in child']) key;

-- claim in the parent, completion in a child that rolls back: still held, the lock stays throughout
BEGIN;
SELECT outcome FROM idem_claim('sub', 'parent');
SAVEPOINT s;
SELECT idem_complete('sub', 'parent', '"child"');
SELECT * FROM pg_temp.key_locks;
SELECT outcome, response FROM idem_claim('sub', 'parent');
ROLLBACK TO s;
SELECT * FROM pg_temp.key_locks;
SELECT outcome FROM idem_claim('sub', 'parent');
SELECT idem_fail('sub', 'parent', '"parent"');
SELECT * FROM pg_temp.key_locks;
COMMIT;
SELECT state, response FROM idem_status('sub', 'parent');
-- ... and if nobody settles it then, ID003
BEGIN;
SELECT outcome FROM idem_claim('sub', 'undone');
SAVEPOINT s;
SELECT idem_complete('sub', 'undone');
ROLLBACK TO s;
COMMIT;
\echo :SQLSTATE

-- completion in a child that commits: the lock is given back then
BEGIN;
SELECT outcome FROM idem_claim('sub', 'child commits');
SAVEPOINT s;
SELECT idem_complete('sub', 'child commits', '"child"');
SELECT * FROM pg_temp.key_locks;
RELEASE s;
SELECT * FROM pg_temp.key_locks;
-- the same verdict again, without a token, is a no-op still; the other one ID002
SELECT idem_complete('sub', 'child commits', '"again"');
SELECT pg_temp.try($$SELECT idem_fail('sub', 'child commits')$$);
COMMIT;
SELECT state, response FROM idem_status('sub', 'child commits');
-- ... three levels down, and up again one by one
BEGIN;
SELECT outcome FROM idem_claim('sub', 'deep');
SAVEPOINT a;
SAVEPOINT b;
SAVEPOINT c;
SELECT idem_complete('sub', 'deep');
RELEASE c;
SELECT * FROM pg_temp.key_locks;
RELEASE b;
SELECT * FROM pg_temp.key_locks;
ROLLBACK TO a;
SELECT outcome FROM idem_claim('sub', 'deep');
SELECT idem_fail('sub', 'deep');
RELEASE a;
SELECT * FROM pg_temp.key_locks;
COMMIT;
SELECT state FROM idem_status('sub', 'deep');

-- claim in a child that rolls back: free at once
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idem_claim('sub', 'child');
SELECT * FROM pg_temp.key_locks;
ROLLBACK TO s;
SELECT * FROM pg_temp.key_locks;
SELECT pg_temp.try($$SELECT idem_complete('sub', 'child')$$);
COMMIT;
-- claim in a child that commits to its parent: held by the parent, and settled there
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idem_claim('sub', 'child');
RELEASE s;
SELECT * FROM pg_temp.key_locks;
SELECT outcome FROM idem_claim('sub', 'child');
SELECT idem_complete('sub', 'child');
SELECT * FROM pg_temp.key_locks;
COMMIT;
-- ... or not: ID003
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idem_claim('sub', 'child unsettled');
RELEASE s;
COMMIT;
\echo :SQLSTATE
-- claim in one child, completion in the next, rolled back with their parent
BEGIN;
SAVEPOINT p;
SAVEPOINT a;
SELECT outcome FROM idem_claim('sub', 'siblings');
RELEASE a;
SAVEPOINT b;
SELECT idem_complete('sub', 'siblings');
SELECT * FROM pg_temp.key_locks;
RELEASE b;
SELECT * FROM pg_temp.key_locks;
ROLLBACK TO p;
SELECT * FROM pg_temp.key_locks;
SELECT outcome FROM idem_claim('sub', 'siblings');
ROLLBACK;

-- many claims, of which a child settles some and rolls back: what is open is right
BEGIN;
SELECT count(*) FROM generate_series(1, 10) i, idem_claim('sub', 'n' || i) c WHERE c.outcome = 'claimed';
SAVEPOINT a;
SELECT count(idem_complete('sub', 'n' || i)) FROM generate_series(1, 4) i;
SELECT count(*) FROM generate_series(11, 15) i, idem_claim('sub', 'n' || i) c WHERE c.outcome = 'claimed';
SAVEPOINT b;
SELECT count(idem_fail('sub', 'n' || i)) FROM generate_series(5, 12) i;
SELECT * FROM pg_temp.key_locks;
ROLLBACK TO b;
SELECT string_agg(i || ' ' || c.outcome, ', ' ORDER BY i) FROM generate_series(1, 15) i, idem_claim('sub', 'n' || i) c;
SELECT count(idem_complete('sub', 'n' || i)) FROM generate_series(11, 15) i;
RELEASE a;
SELECT * FROM pg_temp.key_locks;
SELECT count(idem_complete('sub', 'n' || i)) FROM generate_series(1, 15) i;
SELECT * FROM pg_temp.key_locks;
COMMIT;
SELECT count(*) AS succeeded FROM idem.operation WHERE scope = 'sub' AND key LIKE 'n%' AND state = 'succeeded';

-- release in a child that rolls back: held; in one that commits: given up, the lock stays to the end
BEGIN;
SELECT outcome FROM idem_claim('sub', 'release');
SAVEPOINT s;
SELECT idem_release('sub', 'release');
ROLLBACK TO s;
SELECT outcome FROM idem_claim('sub', 'release');
SAVEPOINT s;
SELECT idem_release('sub', 'release');
SELECT pg_temp.try($$SELECT idem_complete('sub', 'release')$$);
RELEASE s;
SELECT * FROM pg_temp.key_locks;
-- claim it again in a child that rolls back: given up still
SAVEPOINT s;
SELECT outcome FROM idem_claim('sub', 'release');
ROLLBACK TO s;
SELECT * FROM pg_temp.key_locks;
COMMIT;
-- released and claimed again in one child, which settles it
BEGIN;
SELECT outcome FROM idem_claim('sub', 'release', '1');
SAVEPOINT s;
SELECT idem_release('sub', 'release');
SELECT outcome FROM idem_claim('sub', 'release', '2');
SELECT idem_complete('sub', 'release');
RELEASE s;
SELECT * FROM pg_temp.key_locks;
COMMIT;
SELECT outcome FROM idem_claim('sub', 'release', '2');
-- ... or rolls back: the parent's claim is what it was, for its first request
BEGIN;
SELECT outcome FROM idem_claim('sub', 'release 2', '1');
SAVEPOINT s;
SELECT idem_release('sub', 'release 2');
SELECT outcome FROM idem_claim('sub', 'release 2', '2');
ROLLBACK TO s;
SELECT outcome FROM idem_claim('sub', 'release 2', '1');
SELECT outcome FROM idem_claim('sub', 'release 2', '2');
ROLLBACK;

-- settled in a child and claimed again there, since nothing is kept: each claim stands and falls by itself
BEGIN;
SELECT token AS first FROM idem_claim('sub zero', 'k') \gset
SAVEPOINT a;
SELECT idem_complete('sub zero', 'k', '1');
SAVEPOINT b;
SELECT outcome, token > :first AS later FROM idem_claim('sub zero', 'k');
SELECT idem_fail('sub zero', 'k', '2');
RELEASE b;
SELECT outcome FROM idem_claim('sub zero', 'k');
SELECT * FROM pg_temp.key_locks;
ROLLBACK TO a;
SELECT outcome, token = :first AS first FROM idem_claim('sub zero', 'k');
SELECT idem_complete('sub zero', 'k', '3', :first);
RELEASE a;
SELECT * FROM pg_temp.key_locks;
SELECT outcome FROM idem_claim('sub zero', 'k');
SELECT idem_complete('sub zero', 'k', '4');
SELECT * FROM pg_temp.key_locks;
COMMIT;
SELECT state, response FROM idem.result WHERE scope_id = (SELECT id FROM idem.scope WHERE name = 'sub zero');

-- EXCEPTION blocks are subtransactions: claim outside, completion inside, which fails or not
CREATE FUNCTION pg_temp.pay(k text, fails boolean) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	c idem_answer;
BEGIN
	c := idem_claim('sub', k);
	IF c.outcome <> 'claimed' THEN
		RETURN c.outcome || ' ' || coalesce(c.response::text, '-');
	END IF;
	BEGIN
		PERFORM idem_complete('sub', k, '"paid"');
		IF fails THEN
			RAISE division_by_zero;
		END IF;
	EXCEPTION WHEN division_by_zero THEN
		PERFORM idem_fail('sub', k, '"refused"');
	END;
	RETURN c.outcome;
END $$;
SELECT pg_temp.pay('e1', false), pg_temp.pay('e2', true);
SELECT pg_temp.pay('e1', false), pg_temp.pay('e2', true);

-- settled out of order, further in: the one claimed in the middle is finished before the other
BEGIN;
SELECT outcome FROM idem_claim('sub', 'outer');
SAVEPOINT a;
SELECT outcome FROM idem_claim('sub', 'middle');
SAVEPOINT b;
SELECT idem_complete('sub', 'middle', '1'), idem_complete('sub', 'outer', '1');
RELEASE b;
SELECT * FROM pg_temp.key_locks;
-- both settlings go, and with its claim the middle one
ROLLBACK TO a;
SELECT * FROM pg_temp.key_locks;
SELECT idem_complete('sub', 'outer', '2');
COMMIT;
SELECT (idem_status('sub', 'outer')).response, (idem_status('sub', 'middle')).response AS none;

-- given up further in, and claimed anew: the first claim is finished below the second
BEGIN;
SELECT outcome FROM idem_claim('sub', 'again');
SAVEPOINT a;
SELECT idem_release('sub', 'again');
SELECT outcome FROM idem_claim('sub', 'again');
SAVEPOINT b;
SELECT idem_release('sub', 'again');
SELECT outcome FROM idem_claim('sub', 'again');
RELEASE b;
RELEASE a;
SELECT idem_complete('sub', 'again', '3');
SELECT * FROM pg_temp.key_locks;
COMMIT;
SELECT (idem_status('sub', 'again')).response;
-- the same, rolled back: the first claim is the key's again
BEGIN;
SELECT outcome FROM idem_claim('sub', 'again and back');
SAVEPOINT a;
SELECT idem_release('sub', 'again and back');
SELECT outcome FROM idem_claim('sub', 'again and back');
ROLLBACK TO a;
SELECT outcome FROM idem_claim('sub', 'again and back');
SELECT idem_complete('sub', 'again and back', '1');
COMMIT;
SELECT (idem_status('sub', 'again and back')).response;

-- 100,000 completions inside EXCEPTION blocks, the claims outside, in one transaction: no lock table overflow
CREATE FUNCTION pg_temp.many(prefix text, n int) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
	most int := 0;
BEGIN
	FOR i IN 1 .. n LOOP
		PERFORM idem_claim('sub', prefix || i);
		BEGIN
			PERFORM idem_complete('sub', prefix || i);
		EXCEPTION WHEN division_by_zero THEN
			RAISE;
		END;
		IF i % 20000 = 0 THEN
			most := greatest(most, (SELECT key_locks FROM pg_temp.key_locks));
		END IF;
	END LOOP;
	RETURN most;
END $$;
SELECT pg_temp.many('exception ', 100000) AS most_key_locks;

-- 100,000 pairs of claim and completion in one transaction: no lock is left, one row each, none of them dead
TRUNCATE idem.result;
BEGIN;
SELECT count(*) FILTER (WHERE (idem_claim('sub', 'pair ' || i)).outcome = 'claimed'
						AND idem_complete('sub', 'pair ' || i, '{"ok": true}') = 'succeeded') AS pairs FROM generate_series(1, 100000) i;
SELECT * FROM pg_temp.key_locks;
-- all open at once would fill the lock table; a thousand do not
SELECT count(*) FROM generate_series(1, 1000) i, idem_claim('sub', 'open ' || i) c WHERE c.outcome = 'claimed';
SELECT * FROM pg_temp.key_locks;
SELECT count(idem_complete('sub', 'open ' || i)) FROM generate_series(1, 1000) i;
SELECT * FROM pg_temp.key_locks;
COMMIT;
-- every line pointer of a page is a live row's: a placeholder or an updated row would have left one more
SELECT sum(live) AS live, sum(last - live) AS not_live
FROM (SELECT max((ctid::text::point)[1]::int) AS last, count(*) AS live FROM idem.result GROUP BY (ctid::text::point)[0]) p;
SELECT count(*) AS rows, count(DISTINCT key) AS keys FROM idem.operation WHERE scope = 'sub';

DELETE FROM idem.result WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'sub%');
DELETE FROM idem.scope WHERE name LIKE 'sub%';
DELETE FROM idem.audit WHERE scope LIKE 'sub%';

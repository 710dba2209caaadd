-- Transaction advisory lock on a hash of the key, SELECT, work, INSERT of the
-- finished row: the pattern of Ruby and Java libraries that put a lock around
-- the request (with_advisory_lock and its kind, JDBC lock registries) and a table behind it.
-- Lock and SELECT cannot be one statement: its snapshot would be older than the lock.
-- One row, no dead one; but every replay takes the lock, too.

-- @tables
CREATE TABLE bench.advisory (
	scope_id int NOT NULL,
	key text COLLATE "C" NOT NULL,
	fingerprint bytea,
	created_at timestamptz NOT NULL,
	response json,
	PRIMARY KEY (scope_id, key)
) WITH (autovacuum_enabled = off);

-- @loop new
PERFORM pg_advisory_xact_lock(hashtextextended(k, 1));
SELECT fingerprint, response INTO row FROM bench.advisory WHERE scope_id = 1 AND key = k;
IF NOT FOUND THEN
	INSERT INTO bench.advisory (scope_id, key, fingerprint, created_at, response) VALUES (1, k, h, now(), r);
END IF;

-- @loop replay
PERFORM pg_advisory_xact_lock(hashtextextended(old, 1));
SELECT fingerprint, response INTO row FROM bench.advisory WHERE scope_id = 1 AND key = old;

-- @client pay
BEGIN;
SELECT pg_advisory_xact_lock(hashtextextended(:k, 1));
SELECT fingerprint, response FROM bench.advisory WHERE scope_id = 1 AND key = :k;
UPDATE bench.account SET balance = balance - 1 WHERE id = :account;
INSERT INTO bench.advisory (scope_id, key, fingerprint, created_at, response) VALUES (1, :k, :h, now(), :r);
COMMIT;

-- @client replay
BEGIN;
SELECT pg_advisory_xact_lock(hashtextextended(:old, 1));
SELECT fingerprint, response FROM bench.advisory WHERE scope_id = 1 AND key = :old;
COMMIT;

-- @client hot
BEGIN;
SELECT pg_advisory_xact_lock(hashtextextended(:hot, 1));
SELECT fingerprint, response FROM bench.advisory WHERE scope_id = 1 AND key = :hot;
COMMIT;

-- @client busy
SELECT pg_try_advisory_xact_lock(hashtextextended('busy', 1));

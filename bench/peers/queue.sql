-- The queue-style lease table: the request becomes a job, a worker takes the next
-- free one with FOR UPDATE SKIP LOCKED and a deadline, and marks it done in a later
-- transaction. This is how job queues in PostgreSQL (and libraries that treat a key as a job)
-- do it. Three transactions, as a job is always put before it is taken.

-- @tables
CREATE TABLE bench.queue (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	key text COLLATE "C" NOT NULL UNIQUE,
	state text NOT NULL DEFAULT 'ready',
	attempts int NOT NULL DEFAULT 0,
	lease_until timestamptz,
	created_at timestamptz NOT NULL DEFAULT now(),
	completed_at timestamptz,
	fingerprint bytea,
	response json
) WITH (autovacuum_enabled = off);
CREATE INDEX ON bench.queue (id) WHERE state = 'ready';

-- @loop lease
INSERT INTO bench.queue (key, fingerprint) VALUES (k, h) ON CONFLICT DO NOTHING;
COMMIT;
UPDATE bench.queue SET state = 'running', attempts = attempts + 1, lease_until = clock_timestamp() + interval '10 minutes'
	WHERE id = (SELECT id FROM bench.queue WHERE state = 'ready' ORDER BY id FOR UPDATE SKIP LOCKED LIMIT 1)
	RETURNING id, attempts INTO row;
COMMIT;
UPDATE bench.queue SET state = 'done', completed_at = now(), response = r WHERE id = row.id AND attempts = row.attempts;

-- Another worker may have taken the job just put: then there is none to do.
-- @client lease
\set id 0
\set attempts 0
INSERT INTO bench.queue (key, fingerprint) VALUES (:k, :h) ON CONFLICT DO NOTHING;
UPDATE bench.queue SET state = 'running', attempts = attempts + 1, lease_until = clock_timestamp() + interval '10 minutes'
	WHERE id = (SELECT id FROM bench.queue WHERE state = 'ready' ORDER BY id FOR UPDATE SKIP LOCKED LIMIT 1)
	RETURNING id, attempts \aset
BEGIN;
UPDATE bench.account SET balance = balance - 1 WHERE id = :account;
UPDATE bench.queue SET state = 'done', completed_at = now(), response = :r WHERE id = :id AND attempts = :attempts;
COMMIT;

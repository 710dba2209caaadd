-- The floor for anything durable that goes through PostgreSQL's executor: one
-- INSERT ... ON CONFLICT DO NOTHING of the very row that idem stores, into a table like
-- idem.result. It decides nothing else: no answer for a replay, no mismatch, and
-- a twin waits for the first one's transaction.

-- @tables
CREATE TABLE bench.result (LIKE idem.result INCLUDING ALL) WITH (autovacuum_enabled = off);

-- @loop new
INSERT INTO bench.result (token, created_at, completed_at, scope_id, attempt, form, state, fingerprint, key, response)
	VALUES (i, now(), now(), 1, 1, 1, 's', f, k, r) ON CONFLICT DO NOTHING;

-- @loop once
INSERT INTO bench.result (token, created_at, completed_at, scope_id, attempt, form, state, fingerprint, key)
	VALUES (i, now(), now(), 1, 1, 1, 's', f, k) ON CONFLICT DO NOTHING;

-- @client pay
BEGIN;
INSERT INTO bench.result (token, created_at, completed_at, scope_id, attempt, form, state, fingerprint, key, response)
	VALUES (1, now(), now(), 1, 1, 1, 's', :f, :k, :r) ON CONFLICT DO NOTHING;
UPDATE bench.account SET balance = balance - 1 WHERE id = :account;
COMMIT;

-- The inbox ("idempotent consumer"): the message's id is inserted in the consumer's
-- own transaction, and the work is done only if the row is new. Messaging
-- frameworks of several languages create this table (inbox state, processed or received
-- messages). No answer, no fingerprint. In a batch it is at its best as one statement over
-- all messages (`batch_set`).

-- @tables
CREATE TABLE bench.inbox (
	consumer_id int NOT NULL,
	message_id text COLLATE "C" NOT NULL,
	received_at timestamptz NOT NULL DEFAULT now(),
	PRIMARY KEY (consumer_id, message_id)
) WITH (autovacuum_enabled = off);

CREATE FUNCTION bench.inbox_batch(first bigint, client int) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 0 .. 499 LOOP
		INSERT INTO bench.inbox (consumer_id, message_id) VALUES (1, (first + i)::text) ON CONFLICT DO NOTHING;
		IF FOUND THEN
			UPDATE bench.account SET balance = balance - 1 WHERE id = 1 + client * 500 + i;
		END IF;
	END LOOP;
END $$;

-- @loop once
INSERT INTO bench.inbox (consumer_id, message_id) VALUES (1, k) ON CONFLICT DO NOTHING;

-- @loop duplicate
INSERT INTO bench.inbox (consumer_id, message_id) VALUES (1, old) ON CONFLICT DO NOTHING;

-- @client consume
BEGIN;
INSERT INTO bench.inbox (consumer_id, message_id) VALUES (1, :k) ON CONFLICT DO NOTHING;
UPDATE bench.account SET balance = balance - 1 WHERE id = :account;
COMMIT;

-- @client batch
SELECT bench.inbox_batch(:first, :client_id);

-- @client batch_set
INSERT INTO bench.inbox (consumer_id, message_id)
	SELECT 1, m::text FROM generate_series(:first::bigint, :first::bigint + 499) AS m ON CONFLICT DO NOTHING;

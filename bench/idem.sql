-- idem itself, in the same form as the patterns in peers/; README.md says what
-- the sections are.

-- @tables
INSERT INTO idem.scope (name, lease) VALUES ('leased', '10 minutes');
INSERT INTO idem.scope (name) VALUES ('bench');		-- last: its new keys are at the end of the index, as the peers' are
ALTER TABLE idem.result SET (autovacuum_enabled = off);
ALTER TABLE idem.inflight SET (autovacuum_enabled = off);

CREATE FUNCTION bench.pay(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	UPDATE bench.account SET balance = balance - (request->>'amount')::int WHERE id = (request->>'account')::int;
	RETURN '{"id": "ch_3NG8Du2eZvKYlo2C", "paid": true}';
END $$;

CREATE FUNCTION bench.idem_batch(first bigint, client int) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 0 .. 499 LOOP
		IF idem_once('bench', (first + i)::text) THEN
			UPDATE bench.account SET balance = balance - 1 WHERE id = 1 + client * 500 + i;
		END IF;
	END LOOP;
END $$;

-- @loop new
a := idem_claim('bench', k, fingerprint => f);
s := idem_complete('bench', k, r);

-- @loop once
b := idem_once('bench', k);

-- @loop call
a := idem_call('bench', k, '{"amount": 1, "account": ' || 1 + i % 10000 || '}', 'bench.pay(jsonb)');

-- @loop lease
a := idem_claim('leased', k, fingerprint => f);
COMMIT;
s := idem_complete('leased', k, r, token => a.token);

-- @loop replay
a := idem_claim('bench', old, fingerprint => f);

-- @loop duplicate
b := idem_once('bench', old);

-- @loop mismatch
a := idem_claim('bench', old, fingerprint => g);

-- @client pay
BEGIN;
SELECT (idem_claim('bench', :k, fingerprint => :f)).outcome;
UPDATE bench.account SET balance = balance - 1 WHERE id = :account;
SELECT idem_complete('bench', :k, :r);
COMMIT;

-- @client call
SELECT (idem_call('bench', :k, '{"amount": 1, "account": ' || :account || '}', 'bench.pay(jsonb)')).response;

-- @client consume
BEGIN;
SELECT idem_once('bench', :k);
UPDATE bench.account SET balance = balance - 1 WHERE id = :account;
COMMIT;

-- @client lease
SELECT (idem_claim('leased', :k, fingerprint => :f)).token \gset
BEGIN;
UPDATE bench.account SET balance = balance - 1 WHERE id = :account;
SELECT idem_complete('leased', :k, :r, token => :token);
COMMIT;

-- @client replay
SELECT outcome, response FROM idem_claim('bench', :old, fingerprint => :f);

-- @client mismatch
SELECT outcome, response FROM idem_claim('bench', :old, fingerprint => :g);

-- @client hot
SELECT outcome, response FROM idem_claim('bench', :hot, fingerprint => :f);

-- @client batch
SELECT bench.idem_batch(:first, :client_id);

-- @client batch_set
SELECT count(*) FROM generate_series(:first::bigint, :first::bigint + 499) AS m WHERE idem_once('bench', m::text);

-- @client busy
SELECT outcome, retry_after FROM idem_claim('bench', 'busy', fingerprint => :f);

-- @client busy_lease
SELECT outcome, retry_after FROM idem_claim('leased', 'busy', fingerprint => :f);

-- @client busy_other
SELECT outcome, retry_after FROM idem_claim('leased', 'other', fingerprint => :f);

-- @client heartbeat
SELECT idem_extend('leased', 'busy', :token);

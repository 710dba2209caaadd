-- The hand-written pair: INSERT as processing, work, UPDATE to done with the
-- response. This is the table that most applications write for themselves, and what
-- posts on idempotent HTTP endpoints show: the primary key decides, the row
-- carries the answer, a fingerprint (made by the application) tells misuse apart.
-- `call` is the same in one PL/pgSQL function, so in one round trip.
--
-- `lease` is its form for slow work outside: the row is committed as processing
-- with a deadline and a token, and settled in a second transaction if the
-- token is still the row's. `lease_durable` commits the intent with synchronous_commit
-- on whatever the server's default is, as idem does: an effect outside must not
-- precede a lost record of it.

-- @tables
CREATE TABLE bench.pair (
	scope_id int NOT NULL,
	key text COLLATE "C" NOT NULL,
	state text NOT NULL DEFAULT 'processing',
	fingerprint bytea,
	created_at timestamptz NOT NULL,
	completed_at timestamptz,
	response json,
	PRIMARY KEY (scope_id, key)
) WITH (autovacuum_enabled = off);

CREATE TABLE bench.pair_lease (
	scope_id int NOT NULL,
	key text COLLATE "C" NOT NULL,
	state text NOT NULL DEFAULT 'processing',
	token bigint NOT NULL DEFAULT 1,
	lease_until timestamptz NOT NULL,
	fingerprint bytea,
	created_at timestamptz NOT NULL,
	completed_at timestamptz,
	response json,
	PRIMARY KEY (scope_id, key)
) WITH (autovacuum_enabled = off);
INSERT INTO bench.pair_lease (scope_id, key, lease_until, fingerprint, created_at) VALUES (1, 'busy', 'infinity', sha256('request'), now());

CREATE FUNCTION bench.pair_pay(the_key text, the_fingerprint bytea, request jsonb) RETURNS json LANGUAGE plpgsql AS $$
DECLARE
	stored bench.pair;
	answer json := '{"id": "ch_3NG8Du2eZvKYlo2C", "paid": true}';
BEGIN
	INSERT INTO bench.pair (scope_id, key, fingerprint, created_at) VALUES (1, the_key, the_fingerprint, now()) ON CONFLICT DO NOTHING;
	IF FOUND THEN
		UPDATE bench.account SET balance = balance - (request->>'amount')::int WHERE id = (request->>'account')::int;
		UPDATE bench.pair SET state = 'succeeded', completed_at = now(), response = answer WHERE scope_id = 1 AND key = the_key;
		RETURN answer;
	END IF;
	SELECT * INTO stored FROM bench.pair WHERE scope_id = 1 AND key = the_key;
	IF stored.fingerprint <> the_fingerprint THEN
		RAISE EXCEPTION 'key reused';
	END IF;
	RETURN stored.response;
END $$;

-- @loop new
INSERT INTO bench.pair (scope_id, key, fingerprint, created_at) VALUES (1, k, h, now()) ON CONFLICT DO NOTHING;
IF FOUND THEN
	UPDATE bench.pair SET state = 'succeeded', completed_at = now(), response = r WHERE scope_id = 1 AND key = k;
END IF;

-- @loop call
r := bench.pair_pay(k, h, ('{"amount": 1, "account": ' || 1 + i % 10000 || '}')::jsonb);

-- @loop lease
INSERT INTO bench.pair_lease (scope_id, key, lease_until, fingerprint, created_at)
	VALUES (1, k, clock_timestamp() + interval '10 minutes', h, now())
	ON CONFLICT (scope_id, key) DO UPDATE SET token = pair_lease.token + 1, lease_until = EXCLUDED.lease_until
		WHERE pair_lease.state = 'processing' AND pair_lease.lease_until < clock_timestamp()
	RETURNING token INTO t;
COMMIT;
UPDATE bench.pair_lease SET state = 'succeeded', completed_at = now(), response = r WHERE scope_id = 1 AND key = k AND token = t;

-- @loop replay
SELECT * INTO row FROM bench.pair WHERE scope_id = 1 AND key = old;

-- @loop mismatch
SELECT * INTO row FROM bench.pair WHERE scope_id = 1 AND key = old;
b := row.fingerprint <> h;

-- @client pay
BEGIN;
INSERT INTO bench.pair (scope_id, key, fingerprint, created_at) VALUES (1, :k, :h, now()) ON CONFLICT DO NOTHING;
UPDATE bench.account SET balance = balance - 1 WHERE id = :account;
UPDATE bench.pair SET state = 'succeeded', completed_at = now(), response = :r WHERE scope_id = 1 AND key = :k;
COMMIT;

-- @client call
SELECT bench.pair_pay(:k, :h, ('{"amount": 1, "account": ' || :account || '}')::jsonb);

-- @client lease
INSERT INTO bench.pair_lease (scope_id, key, lease_until, fingerprint, created_at)
	VALUES (1, :k, clock_timestamp() + interval '10 minutes', :h, now())
	ON CONFLICT (scope_id, key) DO UPDATE SET token = pair_lease.token + 1, lease_until = EXCLUDED.lease_until
		WHERE pair_lease.state = 'processing' AND pair_lease.lease_until < clock_timestamp()
	RETURNING token \gset
BEGIN;
UPDATE bench.account SET balance = balance - 1 WHERE id = :account;
UPDATE bench.pair_lease SET state = 'succeeded', completed_at = now(), response = :r WHERE scope_id = 1 AND key = :k AND token = :token;
COMMIT;

-- @client lease_durable
INSERT INTO bench.pair_lease (scope_id, key, lease_until, fingerprint, created_at)
	SELECT 1, :k, clock_timestamp() + interval '10 minutes', :h, now() FROM set_config('synchronous_commit', 'on', true)
	ON CONFLICT (scope_id, key) DO UPDATE SET token = pair_lease.token + 1, lease_until = EXCLUDED.lease_until
		WHERE pair_lease.state = 'processing' AND pair_lease.lease_until < clock_timestamp()
	RETURNING token \gset
BEGIN;
UPDATE bench.account SET balance = balance - 1 WHERE id = :account;
UPDATE bench.pair_lease SET state = 'succeeded', completed_at = now(), response = :r WHERE scope_id = 1 AND key = :k AND token = :token;
COMMIT;

-- @client replay
SELECT state, fingerprint, response FROM bench.pair WHERE scope_id = 1 AND key = :old;

-- @client replay_insert
INSERT INTO bench.pair (scope_id, key, fingerprint, created_at) VALUES (1, :old, :h, now()) ON CONFLICT DO NOTHING;
SELECT state, fingerprint, response FROM bench.pair WHERE scope_id = 1 AND key = :old;

-- @client mismatch
SELECT state, fingerprint = :h AS fits, response FROM bench.pair WHERE scope_id = 1 AND key = :old;

-- @client hot
SELECT state, fingerprint, response FROM bench.pair WHERE scope_id = 1 AND key = :hot;

-- @client busy_lease
SELECT state, lease_until FROM bench.pair_lease WHERE scope_id = 1 AND key = 'busy';

-- SELECT first, then INSERT, under SERIALIZABLE, with a phase ("recovery point")
-- column: the pattern of the widely copied article on Stripe-like idempotency keys
-- in Ruby and its companion application; columns and indexes are the article's.
-- `pay` is the best case, everything in one transaction; `lease` is the article's
-- own form, a transaction for each phase. A transaction that fails to serialize is
-- tried again.

-- @tables
CREATE TABLE bench.serializable (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	created_at timestamptz NOT NULL DEFAULT now(),
	idempotency_key text COLLATE "C" NOT NULL,
	last_run_at timestamptz NOT NULL DEFAULT now(),
	locked_at timestamptz DEFAULT now(),
	request_params jsonb NOT NULL,
	response_code int,
	response_body jsonb,
	recovery_point text NOT NULL,
	user_id bigint NOT NULL
) WITH (autovacuum_enabled = off);
CREATE UNIQUE INDEX ON bench.serializable (user_id, idempotency_key);

-- @session
SET default_transaction_isolation = 'serializable';

-- @loop new
SELECT id, request_params, recovery_point, locked_at, response_code, response_body INTO row
	FROM bench.serializable WHERE user_id = 1 AND idempotency_key = k;
IF NOT FOUND THEN
	INSERT INTO bench.serializable (idempotency_key, request_params, recovery_point, user_id)
		VALUES (k, q, 'started', 1) RETURNING id INTO t;
	UPDATE bench.serializable SET recovery_point = 'finished', locked_at = NULL, response_code = 201, response_body = rb WHERE id = t;
END IF;

-- @loop lease
SELECT id, request_params, recovery_point, locked_at, response_code, response_body INTO row
	FROM bench.serializable WHERE user_id = 1 AND idempotency_key = k;
IF NOT FOUND THEN
	INSERT INTO bench.serializable (idempotency_key, request_params, recovery_point, user_id)
		VALUES (k, q, 'started', 1) RETURNING id INTO t;
	COMMIT;
	UPDATE bench.serializable SET recovery_point = 'finished', locked_at = NULL, response_code = 201, response_body = rb WHERE id = t;
END IF;

-- @loop replay
SELECT id, request_params, recovery_point, locked_at, response_code, response_body INTO row
	FROM bench.serializable WHERE user_id = 1 AND idempotency_key = old;

-- @client pay
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT id, request_params, recovery_point, locked_at, response_code, response_body
	FROM bench.serializable WHERE user_id = 1 AND idempotency_key = :k;
INSERT INTO bench.serializable (idempotency_key, request_params, recovery_point, user_id)
	VALUES (:k, :q, 'started', 1) RETURNING id \gset
UPDATE bench.account SET balance = balance - 1 WHERE id = :account;
UPDATE bench.serializable SET recovery_point = 'finished', locked_at = NULL, response_code = 201, response_body = :r WHERE id = :id;
COMMIT;

-- @client lease
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT id, request_params, recovery_point, locked_at, response_code, response_body
	FROM bench.serializable WHERE user_id = 1 AND idempotency_key = :k;
INSERT INTO bench.serializable (idempotency_key, request_params, recovery_point, user_id)
	VALUES (:k, :q, 'started', 1) RETURNING id \gset
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
UPDATE bench.account SET balance = balance - 1 WHERE id = :account;
UPDATE bench.serializable SET recovery_point = 'finished', locked_at = NULL, response_code = 201, response_body = :r WHERE id = :id;
COMMIT;

-- @client replay
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT id, request_params, recovery_point, locked_at, response_code, response_body
	FROM bench.serializable WHERE user_id = 1 AND idempotency_key = :old;
COMMIT;

-- The payment without any idempotency: what everything else is added to.

-- @client pay
BEGIN;
UPDATE bench.account SET balance = balance - 1 WHERE id = :account;
COMMIT;

-- @client call
UPDATE bench.account SET balance = balance - 1 WHERE id = :account;

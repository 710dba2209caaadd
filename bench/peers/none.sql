-- The payment without any idempotency: what everything else is added to.

-- @client pay
BEGIN;
UPDATE bench.account SET balance = balance - 1 WHERE id = :account;
COMMIT;

-- as many messages as the patterns take, two of which do nothing: the floor for these
-- @client messages
BEGIN;
SELECT 1;
UPDATE bench.account SET balance = balance - 1 WHERE id = :account;
SELECT 1;
COMMIT;

-- @client call
UPDATE bench.account SET balance = balance - 1 WHERE id = :account;

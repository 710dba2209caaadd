-- The examples of README.md, as they stand there; t/090_readme.pl checks that
-- none is missing.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;

CREATE ROLE shop;
INSERT INTO idem.scope (name, owner) VALUES ('payments', 'shop');

CREATE TABLE payment (tenant text, amount bigint);
BEGIN;
SELECT outcome FROM idem_claim('payments', idem_key('acme', 'order-1'), '{"amount": 100}');
INSERT INTO payment VALUES ('acme', 100);
SELECT idem_complete('payments', idem_key('acme', 'order-1'), '{"paid": true}');
COMMIT;

SELECT outcome, response FROM idem_claim('payments', idem_key('acme', 'order-1'), '{ "amount": 1e2 }');

SELECT outcome FROM idem_claim('payments', idem_key('acme', 'order-1'), '{"amount": 999}');

CREATE FUNCTION pay(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO payment VALUES ('acme', (request->>'amount')::bigint);
    RETURN jsonb_build_object('paid', true);
END $$;
SELECT outcome, response FROM idem_call('payments', idem_key('acme', 'order-2'), '{"amount": 50}', 'pay(jsonb)');
SELECT outcome, response FROM idem_call('payments', idem_key('acme', 'order-2'), '{"amount": 50}', 'pay(jsonb)');

BEGIN;
SELECT idem_once('payments', idem_key('inbox', 'message-17'));
SELECT idem_once('payments', idem_key('inbox', 'message-17'));
COMMIT;

SELECT idem_key('acme', 'order-1'), idem_key('acme:order', '1'), idem_child('payments', 'acme:order-1', 'mail');

SELECT idem_canonical('{"b": 1.50, "a": [1e3, "\u0041\/"]}');
-- {"a":[1000,"A/"],"b":1.5}
SELECT idem_fingerprint('{"b": 1.50, "a": [1e3, "\u0041\/"]}') = idem_fingerprint('{"a":[1000.0,"A/"],"b":15e-1}');
-- t

SELECT idem_fingerprint('{"amount": 5, "sent_at": 1}', exclude => '{/sent_at}')
	= idem_fingerprint('{"amount": 5, "sent_at": 2}', exclude => '{/sent_at}');
-- t

INSERT INTO idem.scope (name, owner, lease, retry_within) VALUES ('charges', 'shop', '2 minutes', '23 hours');
SELECT outcome, attempt, idem_child('charges', 'order-7', 'provider') AS provider_key
  FROM idem_claim('charges', 'order-7', '{"amount": 100}');

SELECT token FROM idem.operation WHERE scope = 'charges' AND key = 'order-7' \gset
SELECT idem_checkpoint('charges', 'order-7', :token, 'charged', '{"receipt": "R-1"}');
BEGIN;
INSERT INTO payment VALUES ('acme', 100);
SELECT idem_complete('charges', 'order-7', '{"receipt": "R-1"}', token => :token);
COMMIT;

SELECT key, token, attempt, request, recovery_point, checkpoint FROM idem_recover('charges', max => 10);

SELECT token FROM idem_claim('charges', 'order-8', '{"amount": 7}') \gset
SELECT idem_unknown('charges', 'order-8', :token, '{"why": "timeout"}');
SELECT outcome FROM idem_claim('charges', 'order-8', '{"amount": 7}');
SELECT idem_resolve('charges', 'order-8', 'succeeded', '{"receipt": "R-2"}');
SELECT outcome, response FROM idem_claim('charges', 'order-8', '{"amount": 7}');

SELECT idem_forget('payments', 'acme:order-1');

SELECT idem_quarantine('charges');

-- what really happened: each payment once
SELECT * FROM payment ORDER BY amount;
SELECT scope, key, state, attempt FROM idem.operation WHERE scope IN ('payments', 'charges') ORDER BY scope, key;

-- leave nothing to the other tests
DELETE FROM idem.result USING idem.scope WHERE scope_id = id AND name IN ('payments', 'charges');
DELETE FROM idem.inflight USING idem.scope WHERE scope_id = id AND name IN ('payments', 'charges');
DELETE FROM idem.scope WHERE name IN ('payments', 'charges');
DROP TABLE payment;
DROP FUNCTION pay(jsonb);
DROP ROLE shop;

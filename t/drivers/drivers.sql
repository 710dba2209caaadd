-- What the programs in this directory work on.
CREATE EXTENSION idem;
INSERT INTO idem.scope (name) VALUES ('payments');

CREATE TABLE payment (key text, amount int);

-- a handler for idem_call()
CREATE FUNCTION pay(request jsonb) RETURNS jsonb LANGUAGE sql BEGIN ATOMIC
	INSERT INTO payment VALUES (request ->> 'key', (request ->> 'amount')::int)
		RETURNING jsonb_build_object('paid', amount);
END;

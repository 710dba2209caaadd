-- idem_child: its vectors computed once more in SQL, and side effects that are applied once each however often a step is tried
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
\set SHOW_CONTEXT never

-- once more by the documented rule: SHA-256 of the joined, escaped parts in UTF-8, cut to 16 bytes, with version and variant
CREATE FUNCTION pg_temp.joined(scope text, key text, step text) RETURNS text LANGUAGE sql RETURN
	array_to_string(ARRAY(SELECT regexp_replace(part, '([:\\])', '\\\1', 'g') FROM unnest(ARRAY[scope, key, step]) WITH ORDINALITY AS u (part, n) ORDER BY n), ':');
CREATE FUNCTION pg_temp.child(scope text, key text, step text) RETURNS uuid LANGUAGE sql RETURN (
	SELECT encode(set_byte(set_byte(digest, 6, get_byte(digest, 6) & 15 | 128), 8, get_byte(digest, 8) & 63 | 128), 'hex')::uuid
	FROM (SELECT substr(sha256(convert_to(pg_temp.joined(scope, key, step), 'UTF8')), 1, 16) AS digest) AS d);

-- no two lists of parts are alike: whatever is moved over a border, escaped, empty, composed, or longer than a key may be
CREATE TEMP TABLE vector (scope text, key text, step text);
INSERT INTO vector VALUES
	('a:b', 'c', 'd'), ('a', 'b:c', 'd'), ('a', 'b', 'c:d'), ('a\', 'b', 'c'), ('a', '\b', 'c'), ('a\:b', 'c', 'd'), ('a\\', ':b', 'c'),
	('a', '', 'b'), ('', 'a', 'b'), ('a', 'b', ''), ('', '', ''), (' a', 'b', 'c'), ('a', 'b', 'c '), ('A', 'b', 'c'),
	(U&'caf\00e9', U&'\20ac', U&'\+01f600'), (U&'cafe\0301', U&'\20ac', U&'\+01f600'),
	(repeat('s', 255), repeat('k', 255), repeat('t', 10000)), (repeat('s', 255), repeat('k', 255), repeat('t', 10001)),
	(repeat(':', 255), repeat('\', 255), ':');
SELECT count(*), count(DISTINCT idem_child(scope, key, step)) AS distinct,
	count(*) FILTER (WHERE idem_child(scope, key, step) = pg_temp.child(scope, key, step)) AS same FROM vector;
-- where idem_key() has room for the parts, its key is what is hashed
SELECT count(*), count(*) FILTER (WHERE pg_temp.joined(scope, key, step) = idem_key(scope, key, step)) AS same
FROM vector WHERE octet_length(pg_temp.joined(scope, key, step)) <= 255;

-- every one of many is a UUID of version 8 and of RFC 9562's variant, and of its own
SELECT count(*), count(DISTINCT u), count(*) FILTER (WHERE u::text ~ '^[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$') AS well_formed,
	count(DISTINCT substr(u::text, 20, 1)) AS variants, count(*) FILTER (WHERE u = pg_temp.child('many', 'key ' || n, 'step ' || n % 7)) AS same
FROM generate_series(1, 1000) AS n, idem_child('many', 'key ' || n, 'step ' || n % 7) AS u;

-- the same for everybody: no scope needs to be there, no right, no setting matters
CREATE ROLE regress_idem_child;
SET ROLE regress_idem_child;
SET timezone = 'Asia/Tokyo';
SET client_encoding = 'LATIN1';
SELECT idem_child('no such scope', 'k', 's'), idem_child('payments', 'order-1', 'charge') = idem_child('payments'::varchar, 'order-1'::name::text, 'charge'::char(10)::text);
RESET client_encoding;
RESET timezone;
RESET ROLE;
DROP ROLE regress_idem_child;
SELECT provolatile, proparallel, prorettype::regtype FROM pg_proc WHERE proname = 'idem_child';

-- parameters without a type
PREPARE child AS SELECT idem_child($1, $2, $3) = idem_child('payments', 'order-1', 'charge');
EXECUTE child('payments', 'order-1', 'charge');
DEALLOCATE child;

-- Side effects. The order is paid by a call to a provider, and mail, points and a message go out for it: each
-- with the key of its step, which whoever receives it takes once. Receivers here are tables that count deliveries.
INSERT INTO idem.scope (name, lease) VALUES ('child orders', '1 hour');
CREATE TEMP TABLE received (what text, key uuid, deliveries int NOT NULL DEFAULT 1, detail text, PRIMARY KEY (what, key));
CREATE FUNCTION pg_temp.send(what text, key uuid, detail text) RETURNS text LANGUAGE sql AS $$
	INSERT INTO received (what, key, detail) VALUES ($1, $2, $3)
	ON CONFLICT ON CONSTRAINT received_pkey DO UPDATE SET deliveries = received.deliveries + 1 RETURNING what || ' ' || deliveries
$$;
CREATE TEMP VIEW effects AS
	SELECT what, count(*) AS effects, sum(deliveries) AS deliveries, string_agg(DISTINCT detail, ', ') AS details,
		bool_and(key = idem_child('child orders', 'order-1', what)) AS its_key
	FROM received GROUP BY what ORDER BY what;
-- one attempt: claims, does the steps up to one, and is gone; what it sent is sent
CREATE FUNCTION pg_temp.attempt(up_to int) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	answer idem_answer := idem_claim('child orders', 'order-1', '{"total": 100}');
	steps text[] := '{charge,mail,points,message}';
	sent text;
BEGIN
	IF answer.outcome <> 'claimed' THEN
		RETURN concat_ws(' ', answer.outcome, answer.response);
	END IF;
	FOR n IN 1 .. up_to LOOP
		sent := concat_ws(', ', sent, pg_temp.send(steps[n], idem_child('child orders', 'order-1', steps[n]), 'for order-1'));
	END LOOP;
	IF up_to = 4 THEN
		PERFORM idem_complete('child orders', 'order-1', '{"done": true}', answer.token);
	END IF;
	RETURN format('attempt %s: %s', answer.attempt, sent);
END $$;
CREATE PROCEDURE pg_temp.lease_over() LANGUAGE sql AS $$UPDATE idem.inflight SET lease_until = now() WHERE key = 'order-1'$$;
SELECT pg_temp.attempt(1);
SELECT pg_temp.attempt(4);
CALL pg_temp.lease_over();
SELECT pg_temp.attempt(2);
CALL pg_temp.lease_over();
SELECT pg_temp.attempt(3);
CALL pg_temp.lease_over();
SELECT pg_temp.attempt(4);
SELECT pg_temp.attempt(4);
SELECT * FROM effects;
-- with a random key for each attempt every delivery would have been an effect
SELECT count(DISTINCT key) AS effects FROM (SELECT gen_random_uuid() AS key FROM received, generate_series(1, deliveries)) AS r;

-- a receiver with an inbox of its own takes the key of the step as its key
INSERT INTO idem.scope (name) VALUES ('child points');
CREATE TEMP TABLE points (customer text, n int);
CREATE FUNCTION pg_temp.credit(key uuid) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
	IF idem_once('child points', key::text) THEN
		INSERT INTO points VALUES ('customer', 10);
		RETURN true;
	END IF;
	RETURN false;
END $$;
SELECT pg_temp.credit(idem_child('child orders', 'order-1', 'points')) FROM generate_series(1, 3);
SELECT pg_temp.credit(idem_child('child orders', 'order-2', 'points'));
SELECT customer, sum(n) FROM points GROUP BY customer;

DELETE FROM idem.result WHERE scope_id IN (SELECT id FROM idem.scope WHERE name LIKE 'child %');
DELETE FROM idem.scope WHERE name LIKE 'child %';

-- schema.sql - the business that scripts/chaos puts under fire.
--
-- Nothing here keeps an intent from taking effect twice: no unique key but
-- idem's, so that a second effect would be seen.

CREATE EXTENSION idem;

-- how idem is used, and for how long answers are kept: long enough, and shorter than the run
INSERT INTO idem.scope (name, retention, archive, lease, on_expiry, exclude) VALUES
	('transfer', '24 hours', 'key', NULL, 'retry', NULL),
	('call', '4 seconds', 'full', NULL, 'retry', '{/attempt}'),
	('lease', '24 hours', 'key', '1.5 seconds', 'retry', NULL),
	('hold', '24 hours', 'key', '1.5 seconds', 'hold', NULL),
	('inbox', '3 seconds', 'key', NULL, 'retry', NULL),
	('greedy', '1 second', 'none', NULL, 'retry', NULL);

CREATE TABLE account (id int PRIMARY KEY, balance bigint NOT NULL);
INSERT INTO account SELECT id, 0 FROM generate_series(0, 63) AS id;

-- an effect: what was done for an intent, and by which attempt of which client
CREATE TABLE posting (intent text NOT NULL, attempt text NOT NULL, token bigint, source int, target int, amount bigint);
CREATE TABLE inbox (intent text NOT NULL, attempt text NOT NULL);

CREATE FUNCTION book(intent text, attempt text, token bigint, source int, target int, amount bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO posting VALUES (intent, attempt, token, source, target, amount);
	UPDATE account SET balance = balance - book.amount WHERE id = source;
	UPDATE account SET balance = balance + book.amount WHERE id = target;
END $$;

-- what idem_call() runs
CREATE FUNCTION handle(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	PERFORM book(request->>'intent', request->>'attempt', NULL, (request->>'source')::int,
				 (request->>'target')::int, (request->>'amount')::bigint);
	RETURN jsonb_build_object('attempt', request->>'attempt');
END $$;

-- for --break plain: the table that people use without idem
CREATE TABLE plain (key text, answer text);

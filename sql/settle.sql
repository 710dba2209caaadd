-- Settling a claim of the same transaction: complete, fail, release; settling
-- again, settling what nobody holds, and a transaction that ends without.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;

INSERT INTO idem.scope (name) VALUES ('settle'), ('settle other');
CREATE TEMP TABLE work (key text);

-- runs a statement, in a subtransaction; what it raises
CREATE FUNCTION pg_temp.try(statement text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE statement;
	RETURN 'no error';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE || ': ' || SQLERRM;
END $$;

-- complete and fail return the stored state, and store what they are given
BEGIN;
SELECT outcome FROM idem_claim('settle', 'ok');
SELECT idem_complete('settle', 'ok', '{"b": 1, "a":  [1.0]}', status_code => -1, headers => '{"b": 1, "a": 2}', body => '\x');
SELECT outcome FROM idem_claim('settle', 'no');
SELECT idem_fail('settle', 'no', 'null');
SELECT outcome FROM idem_claim('settle', 'bare');
SELECT idem_complete('settle', 'bare');
COMMIT;
SELECT key, (a).outcome, (a).state, (a).status_code, (a).headers, (a).response, (a).body
FROM (SELECT key, idem_status('settle', key) AS a FROM unnest(ARRAY['ok', 'no', 'bare']) key OFFSET 0) s;

-- settling again in the same transaction: the same verdict is a no-op, which changes nothing
BEGIN;
SELECT outcome FROM idem_claim('settle', 'twice');
SELECT idem_complete('settle', 'twice', '1');
SELECT idem_complete('settle', 'twice', '2');
SELECT pg_temp.try($$SELECT idem_complete('settle', 'twice', '3')$$);
-- ... the other verdict is ID002
SELECT pg_temp.try($$SELECT idem_fail('settle', 'twice')$$);
SELECT pg_temp.try($$SELECT idem_release('settle', 'twice')$$);
COMMIT;
SELECT outcome, state, response FROM idem_status('settle', 'twice');
-- ... and in a later one there is nothing that this transaction holds, nor holds no longer
SELECT pg_temp.try($$SELECT idem_complete('settle', 'twice', '1')$$);
SELECT pg_temp.try($$SELECT idem_fail('settle', 'twice', '1')$$);
BEGIN;
SELECT outcome FROM idem_claim('settle', 'twice');
SELECT pg_temp.try($$SELECT idem_complete('settle', 'twice', '1')$$);
COMMIT;
SELECT state, response FROM idem_status('settle', 'twice');

-- settling with the own token works too; with another it is ID001 and dooms the transaction
BEGIN;
SELECT token FROM idem_claim('settle', 'token') \gset
SELECT idem_complete('settle', 'token', '1', :token);
SELECT idem_complete('settle', 'token', '1', :token);
COMMIT;
-- the first COMMIT's answer was lost: the same token and verdict succeed, the other verdict does not
SELECT idem_complete('settle', 'token', '2', :token);
BEGIN;
SELECT idem_fail('settle', 'token', '2', :token);
ROLLBACK;
SELECT state, response FROM idem_status('settle', 'token');
BEGIN;
INSERT INTO work VALUES ('wrong token');
SELECT token FROM idem_claim('settle', 'wrong token') \gset
SELECT pg_temp.try(format($$SELECT idem_complete('settle', 'wrong token', '1', %s)$$, :token - 1));
COMMIT;
SELECT count(*) AS work, (SELECT count(*) FROM idem.operation WHERE scope = 'settle' AND key = 'wrong token') AS rows
FROM work WHERE key = 'wrong token';

-- nobody holds it: ID002
SELECT idem_complete('settle', 'never claimed');
\echo :SQLSTATE
SELECT idem_fail('settle', 'never claimed');
SELECT pg_temp.try($$SELECT idem_release('settle', 'never claimed')$$);
-- a claim is one of its scope
BEGIN;
SELECT outcome FROM idem_claim('settle', 'scoped');
SELECT pg_temp.try($$SELECT idem_complete('settle other', 'scoped')$$);
SELECT idem_complete('settle', 'scoped');
COMMIT;
-- what was claimed in a transaction that rolled back is not held
BEGIN;
SELECT outcome FROM idem_claim('settle', 'gone');
ROLLBACK;
SELECT pg_temp.try($$SELECT idem_complete('settle', 'gone')$$);

-- release: nothing was done, the next call may execute; the key stays this transaction's to its end
BEGIN;
SELECT outcome FROM idem_claim('settle', 'released', '1');
SELECT idem_release('settle', 'released');
SELECT count(*) AS key_locks FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 7453 AND pid = pg_backend_pid();
-- released is not held any more
SELECT pg_temp.try($$SELECT idem_release('settle', 'released')$$);
SELECT pg_temp.try($$SELECT idem_complete('settle', 'released')$$);
-- claim again, with another request
SELECT outcome, attempt FROM idem_claim('settle', 'released', '2');
SELECT idem_complete('settle', 'released', '2');
COMMIT;
SELECT outcome, response FROM idem_claim('settle', 'released', '2');
-- releasing alone is no reason for an error at COMMIT
BEGIN;
SELECT token FROM idem_claim('settle', 'release only') \gset
SELECT idem_release('settle', 'release only', :token);
COMMIT;
SELECT count(*) AS rows FROM idem.operation WHERE scope = 'settle' AND key = 'release only';
BEGIN;
SELECT outcome FROM idem_claim('settle', 'release only');
ROLLBACK;

-- release after writing: 55000, by a write of any kind
BEGIN;
SELECT outcome FROM idem_claim('settle', 'written');
INSERT INTO work VALUES ('written');
SELECT idem_release('settle', 'written');
\echo :SQLSTATE
ROLLBACK;
-- ... also where the transaction has written before the claim, and not only the first time
BEGIN;
INSERT INTO work VALUES ('before');
SELECT outcome FROM idem_claim('settle', 'written');
SELECT outcome FROM idem_claim('settle', 'written 2');
SELECT idem_release('settle', 'written');
INSERT INTO work VALUES ('after');
SELECT pg_temp.try($$SELECT idem_release('settle', 'written 2')$$);
SELECT idem_complete('settle', 'written 2');
ROLLBACK;
-- ... and where what was written was rolled back
BEGIN;
SELECT outcome FROM idem_claim('settle', 'written');
SAVEPOINT s;
INSERT INTO work VALUES ('rolled back');
ROLLBACK TO s;
SELECT pg_temp.try($$SELECT idem_release('settle', 'written')$$);
ROLLBACK;
-- settling another key is a write
BEGIN;
SELECT outcome FROM idem_claim('settle', 'written');
SELECT idem_once('settle', 'one more');
SELECT pg_temp.try($$SELECT idem_release('settle', 'written')$$);
ROLLBACK;

-- a transaction that ends with an unsettled claim: ID003 at COMMIT, and nothing of it stays
BEGIN;
SELECT outcome FROM idem_claim('settle', 'forgotten');
INSERT INTO work VALUES ('forgotten');
COMMIT;
\echo :SQLSTATE
SELECT count(*) AS work FROM work WHERE key = 'forgotten';
-- in autocommit too: the statement itself is the transaction; the hint names both ways out
SELECT (idem_claim('settle', 'autocommit')).outcome;
\echo :SQLSTATE
-- claim and completion in one statement are one transaction
SELECT c.outcome, idem_complete('settle', 'autocommit', '1') FROM idem_claim('settle', 'autocommit') c;
-- one of two is forgotten
BEGIN;
SELECT outcome FROM idem_claim('settle', 'f1');
SELECT outcome FROM idem_claim('settle', 'f2');
SELECT idem_complete('settle', 'f1');
COMMIT;
SELECT count(*) AS rows FROM idem.operation WHERE scope = 'settle' AND key LIKE 'f_';
-- the session is sound afterwards, and after COMMIT AND CHAIN
BEGIN;
SELECT outcome FROM idem_claim('settle', 'f1');
SELECT idem_complete('settle', 'f1');
COMMIT AND CHAIN;
SELECT outcome FROM idem_claim('settle', 'f2');
SELECT idem_fail('settle', 'f2');
COMMIT;
SELECT key, state FROM idem.operation WHERE scope = 'settle' AND key LIKE 'f_' ORDER BY key;
-- a procedure that commits
CREATE PROCEDURE pg_temp.pay(k text, settle boolean) LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_claim('settle', k);
	IF settle THEN
		PERFORM idem_complete('settle', k);
	END IF;
	COMMIT;
END $$;
CALL pg_temp.pay('p1', true);
\set VERBOSITY terse
CALL pg_temp.pay('p2', false);
\set VERBOSITY default
SELECT key, state FROM idem.operation WHERE scope = 'settle' AND key LIKE 'p_';

-- what runs at COMMIT still belongs to the transaction: a deferred trigger settles, or claims and does not
CREATE TABLE public.regress_idem_deferred (key text, settle boolean);
CREATE FUNCTION public.regress_idem_deferred() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_claim('settle', NEW.key);
	IF NEW.settle THEN
		PERFORM idem_complete('settle', NEW.key, '"deferred"');
	END IF;
	RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER deferred AFTER INSERT ON public.regress_idem_deferred DEFERRABLE INITIALLY DEFERRED
	FOR EACH ROW EXECUTE FUNCTION public.regress_idem_deferred();
BEGIN;
SELECT outcome FROM idem_claim('settle', 'd1');
INSERT INTO public.regress_idem_deferred VALUES ('d1', true), ('d2', true);
COMMIT;
SELECT key, state FROM idem.operation WHERE scope = 'settle' AND key LIKE 'd_' ORDER BY key;
BEGIN;
INSERT INTO public.regress_idem_deferred VALUES ('d3', false);
COMMIT;
\echo :SQLSTATE
-- ... and so does a cursor that is held over it
BEGIN;
DECLARE c CURSOR WITH HOLD FOR SELECT outcome, idem_complete('settle', 'h1') FROM idem_claim('settle', 'h1');
COMMIT;
FETCH c;
CLOSE c;
BEGIN;
DECLARE c CURSOR WITH HOLD FOR SELECT outcome FROM idem_claim('settle', 'h2');
COMMIT;
\echo :SQLSTATE
SELECT key, state FROM idem.operation WHERE scope = 'settle' AND key ~ '^[dh]\d$' ORDER BY key;
DROP TABLE public.regress_idem_deferred;
DROP FUNCTION public.regress_idem_deferred();

-- a result that is large or odd is kept as it is
BEGIN;
SELECT outcome FROM idem_claim('settle', 'large');
SELECT idem_complete('settle', 'large', to_json(repeat('x', 1000000)), body => decode(repeat('00ff', 500000), 'hex'));
COMMIT;
SELECT outcome, length(response::text) AS response, length(body) AS body, get_byte(body, 999999) AS last FROM idem_claim('settle', 'large');
BEGIN;
SELECT outcome FROM idem_claim('settle', 'zero');
SELECT idem_complete('settle', 'zero', '{"a": "\u0000", "a": 1}');
COMMIT;
SELECT response FROM idem_claim('settle', 'zero');

-- PREPARE TRANSACTION with an unsettled claim is refused like COMMIT; whether prepared transactions are enabled or not
BEGIN;
SELECT outcome FROM idem_claim('settle', 'prepared');
PREPARE TRANSACTION 'idem settle';
\echo :SQLSTATE
SELECT format('ROLLBACK PREPARED %L', gid) FROM pg_prepared_xacts WHERE gid = 'idem settle' \gexec

-- the truth: each key has one row, and no claim or settling left a dead one
SELECT count(*) AS rows, count(DISTINCT key) AS keys, count(*) FILTER (WHERE state = 'f') AS failed
FROM idem.result WHERE scope_id = (SELECT id FROM idem.scope WHERE name = 'settle');
SELECT count(*) AS key_locks FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 7453 AND pid = pg_backend_pid();

DELETE FROM idem.result WHERE scope_id IN (SELECT id FROM idem.scope WHERE name IN ('settle', 'settle other'));
DELETE FROM idem.scope WHERE name IN ('settle', 'settle other');
DELETE FROM idem.audit WHERE scope IN ('settle', 'settle other');

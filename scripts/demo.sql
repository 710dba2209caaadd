-- demo.sql - what scripts/demo does inside the database.
--
-- demo.log is a request log as it arrived. Its keys are dealt to pairs of
-- sessions; both sessions of a pair play the pair's requests in the log's order
-- and in step, so that each request is submitted by two sessions at the same
-- moment. demo.disturb() terminates backends meanwhile.

CREATE EXTENSION idem;
CREATE SCHEMA demo;

-- a line of the log file each, and of the file that says what must come of it
CREATE TABLE demo.log (n bigserial PRIMARY KEY, line json);
CREATE TABLE demo.expected (n bigserial PRIMARY KEY, line text);

-- n: the place in the pair's list
CREATE TABLE demo.request (
	pair int, n int, seq bigint, scope text, key text COLLATE "C", kind text, intent bigint,
	account text, amount bigint, request text,
	PRIMARY KEY (pair, n)
);

-- The business: what must happen once a key. Deliberately without a unique
-- constraint on the key: nothing but idem prevents a second row.
CREATE TABLE demo.ledger (
	receipt bigint GENERATED ALWAYS AS IDENTITY, scope text, key text COLLATE "C", seq bigint,
	account text, amount bigint
);

-- every answer a session got, written in the transaction that made it true
CREATE TABLE demo.answer (
	seq bigint, pair int, twin int, outcome text, receipt bigint
);

CREATE TABLE demo.terminated (pid int, pair int, twin int, n bigint);

CREATE PROCEDURE demo.prepare(pairs int)
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO demo.request
	SELECT pair, row_number() OVER (PARTITION BY pair ORDER BY seq), seq, scope, key, kind, intent, account, amount, request
	FROM (SELECT hashtextextended(line->>'key', 0) & (pairs - 1) AS pair, (line->>'seq')::bigint AS seq,
				 line->>'scope' AS scope, line->>'key' AS key, line->>'kind' AS kind, (line->>'intent')::bigint AS intent,
				 line->>'account' AS account, (line->>'amount')::bigint AS amount, line->>'request' AS request
		  FROM demo.log) AS l;

	-- keys are kept for ever, so that a retry of the next day still replays
	INSERT INTO idem.scope (name, retention) SELECT DISTINCT scope, NULL::interval FROM demo.request;

	-- The place a session is at, for its twin and for its successor to see. A
	-- sequence, because it must be visible before commit and survive a rollback.
	FOR pair IN 0 .. pairs - 1 LOOP
		FOR twin IN 0 .. 1 LOOP
			EXECUTE format('CREATE SEQUENCE demo.at_%s_%s MINVALUE 0', pair, twin);
			PERFORM setval(format('demo.at_%s_%s', pair, twin), 0);
		END LOOP;
	END LOOP;
END
$$;

-- One session: plays its pair's requests, a transaction each, and goes on where
-- its predecessor was. Whether that one's last commit took place is unknown, so
-- that request is sent again: the point of an idempotency key.
CREATE PROCEDURE demo.play(my_pair int, my_twin int)
LANGUAGE plpgsql AS $$
DECLARE
	me regclass := format('demo.at_%s_%s', my_pair, my_twin);
	other regclass := format('demo.at_%s_%s', my_pair, 1 - my_twin);
	my_lock int := my_pair * 2 + my_twin;
	other_lock int := my_pair * 2 + 1 - my_twin;
	place int := greatest(pg_sequence_last_value(me), 1);
	last int := (SELECT count(*) FROM demo.request WHERE pair = my_pair);
	-- of two twins one waits a moment for the other's outcome, one does not
	patience interval := CASE my_twin WHEN 0 THEN '100 ms' ELSE '0' END;
	-- a predecessor's backend may not be quite gone: its successor can wait
	this_wait interval := '10 s';
	r demo.request;
	answer idem_answer;
	new_receipt bigint;
BEGIN
	-- A session holds the lock (itself, n) until it arrives at request n, and its
	-- twin waits for that lock there: so both set off at the same moment. A
	-- backend that dies lets go of its locks; then only its sequence shows that
	-- it has not arrived, and the twin looks at that until a successor comes.
	PERFORM pg_advisory_lock(my_lock, place);
	WHILE place <= last LOOP
		SELECT * INTO r FROM demo.request WHERE request.pair = my_pair AND request.n = place;
		PERFORM pg_advisory_lock(my_lock, place + 1);
		PERFORM setval(me, place);
		PERFORM pg_advisory_unlock(my_lock, place);
		PERFORM pg_advisory_lock_shared(other_lock, place);
		PERFORM pg_advisory_unlock_shared(other_lock, place);
		WHILE pg_sequence_last_value(other) < place LOOP
			PERFORM pg_sleep(0.001);
		END LOOP;

		-- what an application does
		answer := idem_claim(r.scope, r.key, r.request, wait => this_wait);
		IF answer.outcome = 'claimed' THEN
			INSERT INTO demo.ledger (scope, key, seq, account, amount)
			VALUES (r.scope, r.key, r.seq, r.account, r.amount) RETURNING receipt INTO new_receipt;
			PERFORM idem_complete(r.scope, r.key, json_build_object('receipt', new_receipt));
			answer.outcome := 'executed';
			answer.response := json_build_object('receipt', new_receipt);
		END IF;

		INSERT INTO demo.answer
		VALUES (r.seq, my_pair, my_twin, answer.outcome, (answer.response->>'receipt')::bigint);
		COMMIT;
		this_wait := patience;
		place := place + 1;
	END LOOP;
END
$$;

-- How many requests have been reached, of those of all sessions.
CREATE FUNCTION demo.progress() RETURNS bigint
BEGIN ATOMIC
	SELECT sum(pg_sequence_last_value(oid)) FROM pg_class WHERE relnamespace = 'demo'::regnamespace AND relname ~ '^at_';
END;

-- Terminates backends, spread over the whole run, until all sessions are through:
-- now any, now one that has written something it did not commit yet.
CREATE PROCEDURE demo.disturb(kills int)
LANGUAGE plpgsql AS $$
DECLARE
	total bigint := 2 * (SELECT count(*) FROM demo.request);
	reached bigint;
	killed int := 0;
	shown int := 0;
	victim record;
BEGIN
	LOOP
		COMMIT;		-- statistics and snapshots are a transaction's
		reached := demo.progress();
		IF reached * 10 >= total * (shown + 1) THEN
			shown := reached * 10 / total;
			RAISE NOTICE '%', format('%-12s [%s%s] %s of %s submitted twice, %s backends killed', 'Playing',
									 repeat('#', shown * 2), repeat('.', 20 - shown * 2),
									 to_char(reached / 2, 'FM999,999,999'), to_char(total / 2, 'FM999,999,999'), killed);
		END IF;
		EXIT WHEN reached >= total;

		IF killed < kills AND reached * (kills + 1) >= total * (killed + 1) THEN
			SELECT pid, split_part(application_name, ' ', 3)::int AS pair, split_part(application_name, ' ', 4)::int AS twin
			INTO victim FROM pg_stat_activity WHERE application_name LIKE 'demo session %'
			ORDER BY killed % 2 = 1 AND backend_xid IS NULL, random() LIMIT 1;
			IF FOUND AND pg_terminate_backend(victim.pid) THEN
				INSERT INTO demo.terminated
				VALUES (victim.pid, victim.pair, victim.twin,
						pg_sequence_last_value(format('demo.at_%s_%s', victim.pair, victim.twin)::regclass));
				killed := killed + 1;
				COMMIT;
				WHILE EXISTS (SELECT FROM pg_stat_activity WHERE pid = victim.pid) LOOP
					PERFORM pg_sleep(0.001);
					COMMIT;
				END LOOP;
			END IF;
		END IF;
		PERFORM pg_sleep(0.005);
	END LOOP;
END
$$;

-- What became of each line of the log: its twins' answers taken together.
CREATE VIEW demo.outcome AS
SELECT r.*, a.executed, a.in_progress, a.answers,
	   CASE WHEN a.executed > 0 THEN 'executed' WHEN a.mismatch > 0 THEN 'mismatch' WHEN a.replayed > 0 THEN 'replayed' END AS outcome,
	   (a.executed > 0 OR a.replayed > 0) AND a.mismatch > 0 OR a.others > 0 AS contradictory,
	   a.twins
FROM demo.request AS r
LEFT JOIN (SELECT seq, count(*) AS answers, count(DISTINCT twin) AS twins,
				  count(*) FILTER (WHERE outcome = 'executed') AS executed,
				  count(*) FILTER (WHERE outcome = 'replayed') AS replayed,
				  count(*) FILTER (WHERE outcome = 'mismatch') AS mismatch,
				  count(*) FILTER (WHERE outcome = 'in_progress') AS in_progress,
				  count(*) FILTER (WHERE outcome NOT IN ('executed', 'replayed', 'mismatch', 'in_progress')) AS others
		   FROM demo.answer GROUP BY seq) AS a USING (seq);

-- what the log asks for: the first request of a key executes, once
CREATE VIEW demo.due AS
SELECT DISTINCT ON (scope, key) * FROM demo.request ORDER BY scope, key, seq;

CREATE VIEW demo.intent AS
SELECT DISTINCT ON (scope, intent) * FROM demo.due ORDER BY scope, intent, seq;

-- The table for people. Amounts come in the smallest unit of some currency and
-- are summed over all of them: a checksum, not money.
CREATE FUNCTION demo.report() RETURNS SETOF text
LANGUAGE sql AS $$
WITH figure (place, label, scope, value) AS (
	SELECT 1, 'requests in the log', scope, count(*)::numeric FROM demo.request GROUP BY scope
	UNION ALL SELECT 2, 'keys', scope, count(*) FROM demo.due GROUP BY scope
	UNION ALL SELECT 3, NULL, NULL, NULL
	UNION ALL SELECT 4, 'first executions', scope, count(*) FROM demo.outcome WHERE outcome = 'executed' GROUP BY scope
	UNION ALL SELECT 5, 'replays', scope, count(*) FROM demo.outcome WHERE outcome = 'replayed' GROUP BY scope
	UNION ALL SELECT 6, 'mismatches', scope, count(*) FROM demo.outcome WHERE outcome = 'mismatch' GROUP BY scope
	UNION ALL SELECT 7, NULL, NULL, NULL
	UNION ALL SELECT 8, 'answers to both twins', scope, sum(answers) FROM demo.outcome GROUP BY scope
	UNION ALL SELECT 9, '  of these in progress', scope, sum(in_progress) FROM demo.outcome GROUP BY scope
	UNION ALL SELECT 10, '  of these sent again', scope, sum(answers - twins) FROM demo.outcome GROUP BY scope
	UNION ALL SELECT 11, 'backends killed', 'total', count(*) FROM demo.terminated
), whole AS (
	SELECT * FROM figure
	UNION ALL
	SELECT place, label, 'total', sum(value) FROM figure WHERE scope <> 'total' GROUP BY place, label
), shown AS (
	SELECT place, label, scope, to_char(value, 'FM999,999,999,999,999,999,999,999') AS value FROM whole
), columns AS (
	SELECT scope, scope = 'total' AS last, greatest(10, max(length(value)), length(scope)) + 2 AS width
	FROM shown WHERE scope IS NOT NULL GROUP BY scope
)
SELECT rtrim('  ' || rpad('', 26) || string_agg(lpad(scope, width), '' ORDER BY last, scope)) FROM columns
UNION ALL
(SELECT rtrim('  ' || rpad(coalesce(label, ''), 26) || string_agg(
			lpad(CASE WHEN label IS NULL THEN ''
					  ELSE coalesce(value, CASE WHEN label = 'backends killed' THEN '' ELSE '0' END) END, width), '' ORDER BY last, scope))
 FROM (SELECT DISTINCT place, label FROM shown) AS p CROSS JOIN columns AS c
 LEFT JOIN shown USING (place, label, scope)
 GROUP BY place, label ORDER BY place)
UNION ALL
(SELECT rtrim(format('  %-26s%26s', label, to_char(value, 'FM999,999,999,999,999,999,999,999')))
 FROM (SELECT 1, '', NULL
	   UNION ALL SELECT 2, 'sum of distinct intents', sum(amount) FROM demo.intent
	   UNION ALL SELECT 3, '+ again under a new key', coalesce(sum(amount), 0)
		   FROM (SELECT * FROM demo.due EXCEPT SELECT * FROM demo.intent) AS d
	   UNION ALL SELECT 4, 'sum of the ledger', sum(amount) FROM demo.ledger) AS t (place, label, value)
 ORDER BY place)
$$;

-- Whatever is not as it must be, in words; no row: exactly once.
CREATE FUNCTION demo.wrong() RETURNS SETOF text
LANGUAGE sql AS $$
	SELECT format('%s requests were not answered to both sessions', count(*))
	FROM demo.outcome WHERE twins IS DISTINCT FROM 2 HAVING count(*) > 0
	UNION ALL
	SELECT format('%s requests got contradictory or unexpected answers', count(*))
	FROM demo.outcome WHERE contradictory HAVING count(*) > 0
	UNION ALL
	SELECT format('%s requests (%s) came out as %s', count(*), kind, coalesce(outcome, 'undecided'))
	FROM demo.outcome
	WHERE outcome IS DISTINCT FROM CASE WHEN kind IN ('first', 'new_key_same_intent') THEN 'executed'
										WHEN kind = 'mismatch' THEN 'mismatch' ELSE 'replayed' END
	GROUP BY kind, outcome
	UNION ALL
	SELECT format('%s keys took effect %s times', count(*), effects)
	FROM (SELECT count(l.receipt) AS effects FROM demo.due LEFT JOIN demo.ledger AS l USING (scope, key) GROUP BY scope, key) AS e
	WHERE effects <> 1 GROUP BY effects
	UNION ALL
	SELECT format('%s ledger entries are not what the first request of their key asked for', count(*))
	FROM demo.ledger AS l LEFT JOIN demo.due AS d USING (scope, key)
	WHERE (l.seq, l.account, l.amount) IS DISTINCT FROM (d.seq, d.account, d.amount) HAVING count(*) > 0
	UNION ALL
	SELECT format('%s replays did not return the receipt of the execution', count(*))
	FROM demo.answer AS a JOIN demo.request AS r USING (seq) LEFT JOIN demo.ledger AS l USING (scope, key)
	WHERE a.outcome IN ('executed', 'replayed') AND a.receipt IS DISTINCT FROM l.receipt HAVING count(*) > 0
	UNION ALL
	SELECT format('%s keys differ between idem and the ledger', count(*))
	FROM (SELECT scope, key FROM idem.operation WHERE state = 'succeeded') AS o
	FULL JOIN demo.ledger AS l USING (scope, key) WHERE o.key IS NULL OR l.key IS NULL HAVING count(*) > 0
	UNION ALL
	SELECT 'no backend was killed' WHERE NOT EXISTS (SELECT FROM demo.terminated)
$$;

-- The same against the figures of expected.json, where the log has one.
CREATE FUNCTION demo.unexpected() RETURNS SETOF text
LANGUAGE sql AS $$
WITH expected AS (
	SELECT string_agg(line, E'\n' ORDER BY n)::jsonb AS e FROM demo.expected HAVING count(*) > 0
), scope AS (
	SELECT s.key AS scope, s.value FROM expected, jsonb_each(e->'scopes') AS s
), account AS (
	SELECT scope, account, sum(amount) AS sum FROM demo.ledger GROUP BY scope, account
)
SELECT format('%s: %s are %s, expected %s', scope, what, found, expected)
FROM (
	SELECT s.scope, what, (s.value->>what)::bigint AS expected,
		   (SELECT count(*) FROM demo.outcome AS o WHERE o.scope = s.scope AND o.outcome = w.outcome) AS found
	FROM scope AS s, (VALUES ('first_executions', 'executed'), ('replays', 'replayed'), ('mismatches', 'mismatch')) AS w (what, outcome)
) AS c WHERE found <> expected
UNION ALL
SELECT format('%s: the sum of account %s is %s, expected %s', scope, account, found, expected)
FROM (
	SELECT s.scope, a.key AS account, a.value::numeric AS expected FROM scope AS s, jsonb_each_text(s.value->'account_sums') AS a
) AS e FULL JOIN (SELECT scope, account, sum AS found FROM account WHERE EXISTS (SELECT FROM expected)) AS i USING (scope, account)
WHERE found IS DISTINCT FROM expected
UNION ALL
SELECT format('the sum of account %s over all scopes is %s, expected %s', account, found, expected)
FROM (
	SELECT a.key AS account, a.value::numeric AS expected FROM expected, jsonb_each_text(e->'final_sums') AS a
) AS e FULL JOIN (
	SELECT account, sum(CASE scope WHEN 'refunds' THEN -sum ELSE sum END) AS found FROM account
	WHERE EXISTS (SELECT FROM expected) GROUP BY account) AS i USING (account)
WHERE found IS DISTINCT FROM expected
$$;

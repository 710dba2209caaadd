-- What a key may be made of: idem_key() and idem_child(), whose formats are
-- final: these vectors must never change.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;

CREATE FUNCTION pg_temp.try(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	result text;
BEGIN
	EXECUTE statement INTO result;
	RETURN coalesce(result, 'NULL');
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE || ': ' || SQLERRM;
END $$;

-- parts joined by a colon; a colon or a backslash inside a part has a backslash before it
SELECT n, idem_key(VARIADIC parts), idem_key(VARIADIC parts) = expected AS right
FROM (VALUES (1, ARRAY['a'], 'a'), (2, ARRAY['a', 'b'], 'a:b'), (3, ARRAY['a:b'], 'a\:b'), (4, ARRAY['a\', 'b'], 'a\\:b'),
	(5, ARRAY['a\:b'], 'a\\\:b'), (6, ARRAY['', 'a'], ':a'), (7, ARRAY['a', ''], 'a:'), (8, ARRAY['', ''], ':'), (9, ARRAY['', '', ''], '::'),
	(10, ARRAY[':', '\'], '\::\\'), (11, ARRAY['tenant 1', 'order/7', ' x '], 'tenant 1:order/7: x '), (12, ARRAY['a"b', 'c''d', '{e,f}'], 'a"b:c''d:{e,f}'))
	AS v (n, parts, expected) ORDER BY n;
SELECT idem_key(U&'\00e4', U&'\+01F600') = U&'\00e4:\+01F600' AS not_ascii;

-- no two lists of parts collide: all lists of up to 4 parts out of these
WITH RECURSIVE p (x) AS (VALUES (''), ('a'), (':'), ('\'), ('a:'), (':a'), ('\:'), (':\'), ('\\')),
	lists (parts) AS (SELECT ARRAY[x] FROM p UNION ALL SELECT parts || x FROM lists, p WHERE cardinality(parts) < 4)
SELECT count(*) AS lists, count(DISTINCT idem_key(VARIADIC parts)) AS keys FROM lists WHERE parts <> '{""}';

-- other types by their text form, the same as if the caller had cast them
SELECT idem_key('tenant', 7, 8::bigint, 1.50::numeric, true, 'c'::"char", 'n'::name, 'v'::varchar, '00000000-0000-0000-0000-000000000007'::uuid);
SELECT idem_key(7), idem_key(VARIADIC ARRAY[1, 2, 3]), idem_key(VARIADIC ARRAY['00000000-0000-0000-0000-000000000007'::uuid]);
-- an array of varchar is as near to text[] as to "any": it must be cast
SELECT left(pg_temp.try($$SELECT idem_key(VARIADIC ARRAY['a:b', 'c']::varchar[])$$), 5), idem_key(VARIADIC ARRAY['a:b', 'c']::varchar[]::text[]);
SELECT idem_key('x', '{"a": 1}'::jsonb), idem_key('10.0.0.1'::inet, '1'), idem_key(B'101', 'x'), idem_key('x', time '12:34');
CREATE TYPE pg_temp.color AS ENUM ('red:ish');
CREATE DOMAIN pg_temp.id AS int;
CREATE DOMAIN pg_temp.label AS text;
SELECT idem_key('red:ish'::pg_temp.color, 5::pg_temp.id, 'l:'::pg_temp.label);
-- parameters without a type
PREPARE two AS SELECT idem_key($1, $2);
EXECUTE two ('a:', 'b');
DEALLOCATE two;

-- types whose text form depends on the session are refused: 42804
SELECT v, split_part(pg_temp.try(format('SELECT idem_key(%L, %s)', 'x', v)), ' cannot', 1) FROM unnest(ARRAY[
	'now()', 'now()::timestamp', 'current_date', $$interval '1 day'$$, '1.5::float8', '1.5::float4', $$'\x01'::bytea$$, $$1::money$$,
	'ARRAY[1]', 'ROW(1, now())', $$'pg_class'::regclass$$, $$'[1,2)'::int4range$$, $$tstzrange(now(), NULL)$$]) WITH ORDINALITY u (v, n) ORDER BY n;
SELECT idem_key('x', 1.5::float8);
\echo :SQLSTATE
SELECT split_part(pg_temp.try('SELECT idem_key(VARIADIC ARRAY[now()])'), ' cannot', 1);

-- NULL parts, no parts, too long, empty
SELECT pg_temp.try($$SELECT idem_key('a', NULL)$$);
SELECT pg_temp.try($$SELECT idem_key('a', NULL, 1)$$);
SELECT pg_temp.try($$SELECT idem_key(NULL::text)$$);
SELECT pg_temp.try($$SELECT idem_key(VARIADIC NULL::text[])$$);
SELECT pg_temp.try($$SELECT idem_key(VARIADIC NULL::int[])$$);
SELECT pg_temp.try($$SELECT idem_key(VARIADIC '{}'::text[])$$);
SELECT pg_temp.try($$SELECT idem_key(VARIADIC '{}'::int[])$$);
SELECT pg_temp.try($$SELECT idem_key('')$$);
SELECT pg_temp.try($$SELECT length(idem_key(repeat('x', 255)))$$);
SELECT pg_temp.try($$SELECT idem_key(repeat('x', 256))$$);
SELECT pg_temp.try($$SELECT length(idem_key(repeat('x', 127), repeat('y', 127)))$$);
SELECT pg_temp.try($$SELECT idem_key(repeat(':', 128))$$);
SELECT pg_temp.try($$SELECT idem_key(repeat('x', 128), 7, repeat('y', 128))$$);
SELECT left(pg_temp.try($$SELECT idem_key()$$), 5);

-- keys of parts are keys
INSERT INTO idem.scope (name) VALUES ('keys');
SELECT idem_once('keys', idem_key('t1', 'o:1')), idem_once('keys', idem_key('t1:o', '1')), idem_once('keys', idem_key('t1', 'o:1'));

-- a key for a downstream call: 16 bytes of SHA-256 over scope, key and step, escaped like a key's parts, as a version 8 UUID
SELECT idem_child('payments', 'order-1', 'charge'), idem_child('payments', 'order-1', 'refund'), idem_child('', '', '');
SELECT s, k, t, idem_child(s, k, t) = (SELECT encode(set_byte(set_byte(h, 6, get_byte(h, 6) & 15 | 128), 8, get_byte(h, 8) & 63 | 128), 'hex')::uuid
	FROM (SELECT substr(sha256(convert_to(array_to_string(ARRAY(SELECT replace(replace(p, '\', '\\'), ':', '\:') FROM unnest(ARRAY[s, k, t]) WITH ORDINALITY u (p, n) ORDER BY n), ':'), 'UTF8')), 1, 16) AS h) x) AS right
FROM (VALUES ('payments', 'order-1', 'charge'), ('a:b', 'c', 'd'), ('a', 'b:c', 'd'), ('\', ':', ''), ('s', U&'\00e4', 'x')) v (s, k, t);
SELECT idem_child('a:b', 'c', 'd') <> idem_child('a', 'b:c', 'd') AS different;
-- longer than a key may be, since it is none
SELECT idem_child(repeat('s', 255), repeat('k', 255), repeat('t', 10000)) = idem_child(repeat('s', 255), repeat('k', 255), repeat('t', 10000)) AS same;
SELECT pg_temp.try($$SELECT idem_child(NULL, 'k', 's')$$), pg_temp.try($$SELECT idem_child('s', NULL, 's')$$), pg_temp.try($$SELECT idem_child('s', 'k', NULL)$$);

DELETE FROM idem.result WHERE scope_id = (SELECT id FROM idem.scope WHERE name = 'keys');
DELETE FROM idem.scope WHERE name = 'keys';
DELETE FROM idem.audit WHERE scope = 'keys';

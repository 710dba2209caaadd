-- fingerprints, and what include and exclude leave of a request
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
\pset format unaligned
\pset tuples_only on
\set SHOW_CONTEXT never

-- plain SHA-256 of the canonical form, from all three types
SELECT idem_fingerprint(doc) = sha256(convert_to(idem_canonical(doc), 'UTF8'))::idem_digest,
	idem_fingerprint(doc::json) = idem_fingerprint(doc), idem_fingerprint(doc::jsonb) = idem_fingerprint(doc)
FROM (VALUES ('null'), ('[]'), ('{"b":1.50,"a":[true,"\u00e9\n"]}'), (' "x" '), ('[1e3,1e-30,-0.0]'),
	('{"amount":9007199254740993}')) AS v(doc);
SELECT idem_fingerprint('{"b":1,"a":[1.0,"A"]}') = idem_fingerprint(E' {"a" : [1e0,\n"\\u0041"], "b" : 1.00 }');
SELECT idem_fingerprint('{}');
-- requests that must not look alike
SELECT count(DISTINCT idem_fingerprint(doc)), count(*) FROM (VALUES ('{"a":9007199254740993}'), ('{"a":9007199254740992}'),
	('{"a":"1"}'), ('{"a":1}'), ('{"a":true}'), ('{"a":null}'), ('{}'), ('{"a":"12.00"}'), ('{"a":"12.000"}'),
	('{"a":[1]}'), ('{"a":[[1]]}'), ('{"a":{"1":1}}'), ('{"A":1}'), ('[1,2]'), ('[2,1]'), ('[12]'), ('["1,2"]'),
	('["\u00e9"]'), ('["e\u0301"]'), ('[""]'), ('["\u0000"]'), ('[" "]')) AS v(doc);
-- raw bytes are not canonicalised
SELECT idem_fingerprint('\x00ff'::bytea) = sha256('\x00ff')::idem_digest, idem_fingerprint(''::bytea);
-- larger than one buffer of the hash, with and without order, runs and pieces
SELECT idem_fingerprint(doc) = sha256(convert_to(idem_canonical(doc), 'UTF8'))::idem_digest,
	idem_fingerprint(doc::jsonb) = sha256(convert_to(idem_canonical(doc), 'UTF8'))::idem_digest
FROM (SELECT '[' || string_agg(CASE n % 4 WHEN 0 THEN format('{"b" : %s, "a":1}', n) WHEN 1 THEN '"' || repeat('x', n * 10) || '"'
	WHEN 2 THEN format('%s.0', n) ELSE format('{"a":%s,"b":"\u00e9"}', n) END, ',' ORDER BY n) || ']' AS doc
	FROM generate_series(1, 2000) AS n) AS v;

-- NULL for NULL, whatever the rest
SELECT idem_fingerprint(NULL::text) IS NULL, idem_fingerprint(NULL::json, '{/a}') IS NULL,
	idem_fingerprint(NULL::jsonb, NULL, '{bad}') IS NULL, idem_fingerprint(NULL::bytea) IS NULL;

-- what is left, told by its fingerprint
CREATE FUNCTION pg_temp.leaves(doc text, include text[], exclude text[], left_over text) RETURNS boolean LANGUAGE sql AS $$
	SELECT idem_fingerprint(doc, include, exclude) = idem_fingerprint(left_over)
		AND idem_fingerprint(doc::json, include, exclude) = idem_fingerprint(left_over)
		AND idem_fingerprint(doc::jsonb, include, exclude) = idem_fingerprint(left_over)
$$;
\set doc '{"b":[{"c":1,"d":2},{"d":3},{"c":4,"e":{"f":[5,6,7]}}],"a":{"x":1,"y":{"z":2}},"s":"t","":0,"m/n":8,"p~q":9,"*":10,"0":{"1":11}}'
SELECT include, exclude, pg_temp.leaves(:'doc', include, exclude, left_over) FROM (VALUES
	-- members, with their path
	('{/s}'::text[], NULL::text[], '{"s":"t"}'),
	('{/a/y}', NULL, '{"a":{"y":{"z":2}}}'),
	('{/a/y,/s,/none}', NULL, '{"a":{"y":{"z":2}},"s":"t"}'),
	('{/a,/a/y}', NULL, '{"a":{"x":1,"y":{"z":2}}}'),
	('{"/"}', NULL, '{"":0}'),
	('{/m~1n,/p~0q}', NULL, '{"m/n":8,"p~q":9}'),
	-- the whole document
	('{""}', NULL, :'doc'),
	(NULL, '{/none,/s/none,/b/9,/b/-,/b/00}', :'doc'),
	('{}', '{}', :'doc'),
	-- elements, and all of them
	('{/b/0}', NULL, '{"b":[{"c":1,"d":2}]}'),
	('{/b/2/e/f/1}', NULL, '{"b":[{"e":{"f":[6]}}]}'),
	('{/b/*/d}', NULL, '{"b":[{"d":2},{"d":3}]}'),
	('{/b/*/e/f/*}', NULL, '{"b":[{"e":{"f":[5,6,7]}}]}'),
	('{/b/*/c,/b/1}', NULL, '{"b":[{"c":1},{"d":3},{"c":4}]}'),
	-- in an object a token is a name, whatever it is
	('{/*}', NULL, '{"*":10}'),
	('{/0/1}', NULL, '{"0":{"1":11}}'),
	(NULL, '{/*/x,/0/*}', :'doc'),
	-- exclude
	(NULL, '{/b,/a,/,/m~1n,/p~0q,/*,/0}', '{"s":"t"}'),
	(NULL, '{/b/*/c,/b/2/e,/a/y/z,/,/m~1n,/p~0q,/*,/0/1,/s}', '{"b":[{"d":2},{"d":3},{}],"a":{"x":1,"y":{}},"0":{}}'),
	(NULL, '{/b/0,/b/2,/a,/s,/,/m~1n,/p~0q,/*,/0}', '{"b":[{"d":3}]}'),
	-- both: exclude has the last word
	('{/a,/b/*/c}', '{/a/y,/b/0}', '{"a":{"x":1},"b":[{"c":4}]}'),
	('{/a}', '{/a/x,/a/y}', '{"a":{}}')
) AS v(include, exclude, left_over);
SELECT pg_temp.leaves($${"\n\"é":[{"\\":1}],"x":2}$$, ARRAY[E'/\n"é/*/\\'], NULL, $${"\n\"é":[{"\\":1}]}$$);
-- names with escapes, and names that are not ASCII
SELECT pg_temp.leaves($${"\u00e9":1,"q\"\\":2,"\n":3,"k":4}$$, ARRAY['/é', '/q"\', E'/\n'], NULL, $${"\u00e9":1,"q\"\\":2,"\n":3}$$);
-- scalars and arrays at the root
SELECT pg_temp.leaves('5', '{""}', '{/a}', '5'), pg_temp.leaves('[1,2,3]', '{/2,/0}', NULL, '[1,3]'),
	pg_temp.leaves('[1,2,3]', NULL, '{/*}', '[]'), pg_temp.leaves('[[1,2],[3]]', NULL, '{/*/0}', '[[2],[]]');
-- named arguments, and defaults
SELECT idem_fingerprint('{"amount": 5, "sent_at": 1}', exclude => '{/sent_at}') = idem_fingerprint('{"amount":5}'),
	idem_fingerprint('{"amount": 5, "sent_at": 1}', include => '{/amount}') = idem_fingerprint('{"amount":5}');
-- pointers that are not constants
SELECT count(DISTINCT idem_fingerprint('{"a":1,"b":2,"c":1}', ARRAY['/' || k])) FROM unnest('{a,b,c}'::text[]) AS k;
SELECT bool_and(idem_fingerprint(format('{"a":%s,"b":2}', n), '{/b}', '{/c}') = idem_fingerprint('{"b":2}')) FROM generate_series(1, 100) AS n;
DO $$
DECLARE
	pointers text[];
BEGIN
	FOR pointers IN SELECT ARRAY['/' || k] FROM unnest('{a,b,a,b}'::text[]) AS k LOOP
		ASSERT idem_fingerprint('{"a":1,"b":2}', pointers) = idem_fingerprint(format('{"%s":%s}', substr(pointers[1], 2), CASE pointers[1] WHEN '/a' THEN 1 ELSE 2 END));
		ASSERT idem_fingerprint('{"a":1,"b":2}', NULL, pointers) <> idem_fingerprint('{"a":1,"b":2}', pointers);
	END LOOP;
END $$;
-- a duplicate name is an error even where it is left out
\set VERBOSITY sqlstate
SELECT idem_fingerprint('{"a":1,"a":2,"b":3}', NULL, '{/a}');
SELECT idem_fingerprint('{"a":{"x":1,"x":1},"b":3}', '{/b}');
SELECT idem_fingerprint('["\ud800",1]', '{/1}');

-- pointers that cannot mean what their author wants
SELECT idem_fingerprint('{"a":1}', '{/b,/c}');
SELECT idem_fingerprint('{"a":{}}', '{/a/b}');
SELECT idem_fingerprint('5', '{/a}');
SELECT idem_fingerprint('{"a":1}', '{/a}', '{/a}');
SELECT idem_fingerprint('{"a":1}'::jsonb, '{/b}');
SELECT idem_fingerprint('{"a":1}', '{a}');
SELECT idem_fingerprint('{"a":1}', '{/a~}');
SELECT idem_fingerprint('{"a":1}', '{/a~2}');
SELECT idem_fingerprint('{"a":1}', NULL, '{$.a}');
SELECT idem_fingerprint('{"a":1}', NULL, '{""}');
SELECT idem_fingerprint('{"a":1}', '{/a,NULL}');
SELECT idem_fingerprint('{"a":1}', NULL, '{NULL}');
SELECT idem_fingerprint('{"a":1');
SELECT idem_fingerprint('{"a":1}x'::text, '{/a}');
\set VERBOSITY default
SELECT idem_fingerprint('{"amount":1}', '{/amuont}');
SELECT idem_fingerprint('{"a":1}', '{a}');
SELECT idem_fingerprint('{"a":1}', '{/a~b}');
SELECT idem_fingerprint('{"a":1}', NULL, '{""}');
SELECT idem_fingerprint('{"a":1}', NULL, '{NULL}');

-- usable where IMMUTABLE and PARALLEL SAFE count
CREATE TEMP TABLE request (doc jsonb, fingerprint idem_digest GENERATED ALWAYS AS (idem_fingerprint(doc, NULL, '{/sent_at}')) STORED UNIQUE);
INSERT INTO request VALUES ('{"a":1,"sent_at":1}');
\set VERBOSITY sqlstate
INSERT INTO request VALUES ('{"sent_at":2,"a":1.0}');
DROP TABLE request;

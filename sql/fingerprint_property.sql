-- What must hold for any document, over random ones: spelling never changes a
-- fingerprint, meaning always does, text, json and jsonb agree, and include and
-- exclude of the same pointer split a document in two.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
\pset format unaligned

CREATE SCHEMA property;
SET search_path = property, public;

CREATE FUNCTION pick(n int) RETURNS int LANGUAGE sql VOLATILE AS 'SELECT floor(random() * n)::int';

-- a random value as a tree: {"o": [[name, value], ...]}, {"a": [...]}, {"s": string}, {"n": number}, {"l": literal}
CREATE FUNCTION random_name() RETURNS text LANGUAGE sql VOLATILE AS $$
	SELECT CASE pick(4) WHEN 0 THEN (ARRAY['', 'a', 'b', 'id', 'amount', E'\n', '"', '\', '/', '~', 'é', chr(65374), chr(127757), chr(57344)])[pick(14) + 1]
		ELSE repeat('long_name_', pick(3)) || 'k' || pick(1000) END $$;
CREATE FUNCTION random_number() RETURNS numeric LANGUAGE sql VOLATILE AS $$
	SELECT trim_scale(CASE pick(4) WHEN 0 THEN pick(10)::numeric WHEN 1 THEN (random() * 1e18)::numeric(30, 0) + pick(1000)
		WHEN 2 THEN (pick(2000) - 1000)::numeric / 100 ELSE pick(100000) * format('1e%s', pick(60) - 30)::numeric END) $$;
CREATE FUNCTION random_tree(depth int) RETURNS jsonb LANGUAGE plpgsql VOLATILE AS $$
DECLARE kind int := pick(CASE WHEN depth > 0 THEN 8 ELSE 5 END); n int := pick(6); result jsonb := '[]'; i int; names text[] := '{}'; name text;
BEGIN
	IF kind = 0 THEN RETURN jsonb_build_object('s', random_name()); END IF;
	IF kind <= 3 THEN RETURN jsonb_build_object('n', random_number()); END IF;
	IF kind = 4 THEN RETURN jsonb_build_object('l', (ARRAY['true', 'false', 'null'])[pick(3) + 1]); END IF;
	FOR i IN 1 .. n LOOP
		IF kind = 5 THEN
			result := result || jsonb_build_array(random_tree(depth - 1));
		ELSE
			name := random_name();
			CONTINUE WHEN name = ANY (names);
			names := names || name;
			result := result || jsonb_build_array(jsonb_build_array(name, random_tree(depth - 1)));
		END IF;
	END LOOP;
	RETURN jsonb_build_object(CASE kind WHEN 5 THEN 'a' ELSE 'o' END, result);
END $$;

-- a spelling of it: plain, or random
CREATE FUNCTION space() RETURNS text LANGUAGE sql VOLATILE AS $$ SELECT (ARRAY['', '', ' ', E'\n\t', E'\r\n  '])[pick(5) + 1] $$;
CREATE FUNCTION spell_string(value text, wild boolean) RETURNS text LANGUAGE plpgsql VOLATILE AS $$
DECLARE result text := '"'; ch text; code int;
BEGIN
	IF NOT wild THEN RETURN to_json(value)::text; END IF;
	FOREACH ch IN ARRAY regexp_split_to_array(value, '') LOOP
		CONTINUE WHEN ch = '';
		code := ascii(ch);
		IF pick(3) > 0 AND code >= 32 AND ch NOT IN ('"', '\') THEN result := result || ch;
		ELSIF ch IN ('"', '\', '/') THEN result := result || '\' || ch;
		ELSIF code > 65535 THEN result := result || format('\u%s\U%s', to_hex(55296 + (code - 65536) / 1024), to_hex(56320 + (code - 65536) % 1024));
		ELSE result := result || '\u' || lpad(CASE pick(2) WHEN 0 THEN to_hex(code) ELSE upper(to_hex(code)) END, 4, '0');
		END IF;
	END LOOP;
	RETURN replace(result, '\U', '\u') || '"';
END $$;
CREATE FUNCTION spell_number(value numeric, wild boolean) RETURNS text LANGUAGE plpgsql VOLATILE AS $$
DECLARE shift int := pick(40) - 20; result text;
BEGIN
	IF NOT wild OR pick(3) = 0 THEN RETURN value::text; END IF;
	result := trim_scale(value * format('1e%s', shift)::numeric)::text;
	IF pick(2) = 0 THEN result := result || CASE WHEN result LIKE '%.%' THEN '' ELSE '.0' END || repeat('0', pick(3)); END IF;
	RETURN result || (ARRAY['e', 'E'])[pick(2) + 1] || CASE WHEN shift <= 0 AND pick(2) = 0 THEN '+' ELSE '' END || -shift;
END $$;
CREATE FUNCTION spell(tree jsonb, wild boolean) RETURNS text LANGUAGE plpgsql VOLATILE AS $$
DECLARE result text := ''; item jsonb; sp text[];
BEGIN
	IF tree ? 's' THEN RETURN spell_string(tree->>'s', wild); END IF;
	IF tree ? 'n' THEN RETURN spell_number((tree->>'n')::numeric, wild); END IF;
	IF tree ? 'l' THEN RETURN tree->>'l'; END IF;
	FOR item IN SELECT e FROM jsonb_array_elements(COALESCE(tree->'o', tree->'a')) WITH ORDINALITY AS t(e, n)
		ORDER BY CASE WHEN wild AND tree ? 'o' THEN random() ELSE n END LOOP
		sp := CASE WHEN wild THEN ARRAY[space(), space(), space(), space()] ELSE '{"","","",""}' END;
		result := result || CASE result WHEN '' THEN '' ELSE ',' END || sp[1] || CASE WHEN tree ? 'o'
			THEN spell_string(item->>0, wild) || sp[2] || ':' || sp[3] || spell(item->1, wild) ELSE spell(item, wild) END || sp[4];
	END LOOP;
	RETURN CASE WHEN tree ? 'o' THEN '{' || result || '}' ELSE '[' || result || ']' END;
END $$;

-- another document: one value, name, order or nesting is changed somewhere
CREATE FUNCTION change(tree jsonb) RETURNS jsonb LANGUAGE plpgsql VOLATILE AS $$
DECLARE n int := jsonb_array_length(COALESCE(tree->'o', tree->'a')); i int := pick(n); kind text := CASE WHEN tree ? 'o' THEN 'o' ELSE 'a' END; path text[];
BEGIN
	IF pick(8) = 0 THEN RETURN jsonb_build_object('a', jsonb_build_array(tree)); END IF;
	IF tree ? 's' THEN
		RETURN CASE pick(2) WHEN 0 THEN jsonb_build_object('s', (tree->>'s') || ' ') ELSE jsonb_build_object('a', '[]'::jsonb) END;
	ELSIF tree ? 'n' THEN
		RETURN CASE pick(2) WHEN 0 THEN jsonb_build_object('s', tree->>'n')
			ELSE jsonb_build_object('n', (tree->>'n')::numeric + format('1e-%s', scale((tree->>'n')::numeric))::numeric) END;
	ELSIF tree ? 'l' THEN
		RETURN CASE pick(2) WHEN 0 THEN jsonb_build_object('s', tree->>'l')
			ELSE jsonb_build_object('l', CASE tree->>'l' WHEN 'null' THEN 'false' WHEN 'true' THEN 'null' ELSE 'true' END) END;
	ELSIF n = 0 THEN
		RETURN CASE pick(2) WHEN 0 THEN jsonb_build_object(CASE kind WHEN 'o' THEN 'a' ELSE 'o' END, '[]'::jsonb)
			ELSE jsonb_build_object('l', 'null') END;
	END IF;
	IF pick(4) = 0 THEN			-- leave something out
		RETURN tree #- ARRAY[kind, i::text];
	ELSIF kind = 'o' AND pick(3) = 0 THEN	-- another name, which no other member has
		RETURN jsonb_set(tree, ARRAY['o', i::text, '0'], to_jsonb('renamed ' || pick(1000)));
	ELSIF kind = 'a' AND n > 1 AND tree->'a'->0 <> tree->'a'->(n - 1) AND pick(3) = 0 THEN	-- another order
		RETURN jsonb_set(jsonb_set(tree, '{a,0}', tree->'a'->(n - 1)), ARRAY['a', (n - 1)::text], tree->'a'->0);
	END IF;
	path := CASE kind WHEN 'o' THEN ARRAY['o', i::text, '1'] ELSE ARRAY['a', i::text] END;
	RETURN jsonb_set(tree, path, change(tree #> path));
END $$;

SELECT setseed(0.42) \g /dev/null
CREATE TABLE document AS SELECT n, random_tree(4) AS tree FROM generate_series(1, 1000) AS n;
CREATE TABLE spelled AS SELECT n, tree, spell(tree, false) AS plain, spell(tree, true) AS wild, change(tree) AS changed FROM document;
SELECT count(*) AS documents, count(DISTINCT plain) > 500 AS many, max(length(plain)) > 500 AS large,
	count(*) FILTER (WHERE plain <> wild) > 600 AS respelled FROM spelled;

-- spelling never changes it; each count is of failures
SELECT count(*) FILTER (WHERE idem_canonical(plain) <> idem_canonical(wild)) AS canonical,
	count(*) FILTER (WHERE idem_fingerprint(plain) <> idem_fingerprint(wild)) AS text,
	count(*) FILTER (WHERE idem_fingerprint(plain) <> idem_fingerprint(wild::json)) AS json,
	count(*) FILTER (WHERE idem_fingerprint(plain) <> idem_fingerprint(wild::jsonb)) AS jsonb,
	count(*) FILTER (WHERE idem_fingerprint(plain) <> idem_fingerprint(idem_canonical(wild))) AS again,
	count(*) FILTER (WHERE idem_fingerprint(plain)::bytea <> sha256(convert_to(idem_canonical(wild), 'UTF8'))) AS sha256,
	count(*) FILTER (WHERE idem_canonical(plain)::jsonb <> wild::jsonb) AS meaning
FROM spelled;
-- meaning always does: a change of the document, and any two that differ as jsonb
SELECT count(*) FILTER (WHERE idem_fingerprint(plain) = idem_fingerprint(spell(changed, true))) AS changed FROM spelled;
SELECT count(DISTINCT idem_fingerprint(plain)) - count(DISTINCT plain::jsonb) AS jsonb_equality FROM spelled;

-- include and exclude of the same pointer are complementary: a change under it
-- shows in one and only there, a change beside it in the other
CREATE FUNCTION pointer(name text) RETURNS text LANGUAGE sql IMMUTABLE AS $$ SELECT '/' || replace(replace(name, '~', '~0'), '/', '~1') $$;
CREATE TABLE split AS
SELECT s.plain, s.wild, m.member->>0 AS name, pointer(m.member->>0) AS pointer, m.i,
	spell(jsonb_set(tree, ARRAY['o', (m.i - 1)::text, '1'], change(m.member->1)), true) AS under,
	spell(jsonb_set(tree, ARRAY['o', (o.i - 1)::text, '1'], change(o.member->1)), true) AS beside,
	spell(jsonb_build_object('o', jsonb_build_array(m.member)), true) AS kept,
	spell(tree #- ARRAY['o', (m.i - 1)::text], true) AS rest
FROM spelled AS s, jsonb_array_elements(tree->'o') WITH ORDINALITY AS m(member, i), jsonb_array_elements(tree->'o') WITH ORDINALITY AS o(member, i)
WHERE m.i <> o.i;
SELECT count(*) > 1000 AS many,
	count(*) FILTER (WHERE idem_fingerprint(wild, ARRAY[pointer]) <> idem_fingerprint(kept)) AS kept,
	count(*) FILTER (WHERE idem_fingerprint(wild, NULL, ARRAY[pointer]) <> idem_fingerprint(rest)) AS rest,
	count(*) FILTER (WHERE idem_fingerprint(wild::jsonb, ARRAY[pointer]) <> idem_fingerprint(kept)) AS jsonb_kept,
	count(*) FILTER (WHERE idem_fingerprint(wild::jsonb, NULL, ARRAY[pointer]) <> idem_fingerprint(rest)) AS jsonb_rest,
	count(*) FILTER (WHERE idem_fingerprint(plain, ARRAY[pointer]) = idem_fingerprint(under, ARRAY[pointer])) AS under_include,
	count(*) FILTER (WHERE idem_fingerprint(plain, NULL, ARRAY[pointer]) <> idem_fingerprint(under, NULL, ARRAY[pointer])) AS under_exclude,
	count(*) FILTER (WHERE idem_fingerprint(plain, ARRAY[pointer]) <> idem_fingerprint(beside, ARRAY[pointer])) AS beside_include,
	count(*) FILTER (WHERE idem_fingerprint(plain, NULL, ARRAY[pointer]) = idem_fingerprint(beside, NULL, ARRAY[pointer])) AS beside_exclude
FROM split;
SET client_min_messages = warning;
DROP SCHEMA property CASCADE;

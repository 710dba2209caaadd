-- the canonical form
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
\pset format unaligned
\pset tuples_only on
\set SHOW_CONTEXT never

-- RFC 8785, 3.2.2 and 3.2.3, but for a number that no double holds
SELECT idem_canonical($${
  "numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
  "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
  "literals": [null, true, false]
}$$);
SELECT idem_canonical($${
  "\u20ac": "Euro Sign", "\r": "Carriage Return", "\ufb33": "Hebrew Letter Dalet With Dagesh",
  "1": "One", "\ud83d\ude00": "Emoji: Grinning Face", "\u0080": "Control",
  "\u00f6": "Latin Small Letter O With Diaeresis"
}$$);

-- scalars, empty things, white space
SELECT idem_canonical(doc) FROM (VALUES (' null '), ('true'), (E'\t\r\n-1.50\n'), ('""'), ('[]'), (' { } '),
	('[ [ ] , { } ]'), ('{"":{"":{}}}')) AS v(doc);

-- numbers: the exact decimal value, in ECMAScript's layout
SELECT token, idem_canonical(token) FROM (VALUES
	('0'), ('-0'), ('0.0'), ('-0e-5'), ('0e999999999999999999999'),
	('1'), ('1.0'), ('1e0'), ('10e-1'), ('0.1e1'), ('1E+0'), ('1e-0'),
	('-12.340'), ('100e-2'), ('120e1'), ('0.00120e5'),
	('999999999999999999999'), ('1e20'), ('1e21'), ('1000000000000000000000'), ('1234567890123456789012'),
	('123456789012345678901.5'), ('0.000001'), ('1e-6'), ('1e-7'), ('0.0000001'), ('0.00000123'), ('12e-8'),
	('9007199254740992'), ('9007199254740993'), ('0.1000000000000000055511151231257827'),
	('1e999999999'), ('1e-999999999'), ('123e999999999'), ('1e18'), ('5e-324'), ('1.7976931348623157e308'),
	('1e99999999999999999'), ('1e100000000000000000'), ('10e99999999999999999'), ('1e99999999999999999999'),
	('10e99999999999999999999'), ('0.1e100000000000000000000'), ('0.01e-99999999999999999999'),
	('1e-100000000000000000000'), ('10e-100000000000000000000'), ('12.5e00000000000000000000000000000002')
) AS v(token);
-- linear in the digits of the token
SELECT length(idem_canonical(repeat('9', 1000000) || '.' || repeat('9', 1000000) || 'e-2000000'));

-- strings: the shortest escapes, and nothing is normalised
SELECT idem_canonical($$["\u0000\u0001\b\t\n\u000b\f\r\u001f\u007f", "\u0022\u005C\u002f", "\u00e9\u0065\u0301", "\uFFFF\ud800\udc00"]$$);
SELECT idem_canonical('["\/","/"]'), idem_canonical('"<>&''\u2028"');

-- names: UTF-16 order, which is neither that of jsonb nor of UTF-8
SELECT idem_canonical($${"b":1, "aa":2, "a":3, "":4, "A":5, "10":6, "9":7, "\u0000":8, "a\u0000":9, "\"":10, "\\":11, "!":12}$$);
SELECT idem_canonical($${"\uff5e":1, "\ud83c\udf0d":2, "z":3, "\ue000":4, "\ud7ff":5, "\udbff\udfff":6}$$);
-- long common beginnings, escapes beyond them, many members
SELECT idem_canonical($${"prefix_prefix_2":1, "prefix_prefix_10":2, "prefix_p":3, "prefix_":4, "prefix_prefix_\u0031":5, "prefix_prefix_\n":6}$$);
SELECT idem_canonical('{' || string_agg(format('"k%s":%s', n, n), ',' ORDER BY md5(n::text)) || '}')
	= '{' || string_agg(format('"k%s":%s', n, n), ',' ORDER BY ('k' || n) COLLATE "C") || '}'
FROM generate_series(1, 5000) AS n;
-- objects out of order inside objects out of order
SELECT idem_canonical('{"z":{"y":[{"b":{"d":1,"c":2},"a":3}],"x":{}},"a":[],"m":{"k":1,"j":{"i":2,"h":3}}}');

-- what is canonical stays as it is
SELECT bool_and(idem_canonical(idem_canonical(doc)) = idem_canonical(doc)) FROM (VALUES
	('{"b":[1.50,"\u0041"],"a":{"\n":null}}'), ('[1e30,{"z":0,"y":0}]')) AS v(doc);

-- json and jsonb
SELECT idem_canonical('{"b":1.0,"a":"\u0000","c":[{}]}'::json);
SELECT idem_canonical('{"b":1.0,"a":"\t\"\\\u00e9","c":[{"bb":1,"a":2},[],null,true,false],"":{}}'::jsonb);
SELECT idem_canonical('"x"'::jsonb), idem_canonical('-0.0'::jsonb), idem_canonical('1e100'::jsonb), idem_canonical('[]'::jsonb);
SELECT idem_canonical($${"\uff5e":1, "\ud83c\udf0d":2, "bb":3, "c":4, "\"":5}$$::jsonb);
SELECT idem_canonical(NULL::text) IS NULL, idem_canonical(NULL::json) IS NULL, idem_canonical(NULL::jsonb) IS NULL;

-- strict: only what survives an IEEE double
SELECT idem_canonical($$[1.50, 1e22, 1e23, 5e-324, 9007199254740992, 0.1, 12345678901234567e-5, 1.7976931348623157e308, -0, 7.120236347223045e-307, 0e999]$$, true);
\set VERBOSITY sqlstate
SELECT idem_canonical('9007199254740993', true);
SELECT idem_canonical('0.1000000000000000055511151231257827', true);
SELECT idem_canonical('9.999999999999999e22', true);
SELECT idem_canonical('4.9e-324', true);
SELECT idem_canonical('1e309', true);
SELECT idem_canonical('1e-400', true);
SELECT idem_canonical('1e99999999999999999999', true);
SELECT idem_canonical('{"a":[12345678901234567890]}'::json, true);
SELECT idem_canonical('{"a":[12345678901234567890]}'::jsonb, true);
\set VERBOSITY default
SELECT idem_canonical('{"amount":9007199254740993}', true);

-- refused: what is not JSON (with PostgreSQL's own message), half a surrogate pair, a name that occurs twice
\set VERBOSITY sqlstate
SELECT idem_canonical('');
SELECT idem_canonical('   ');
SELECT idem_canonical('{"a":1,}');
SELECT idem_canonical('[1 2]');
SELECT idem_canonical('01');
SELECT idem_canonical('1.');
SELECT idem_canonical('NaN');
SELECT idem_canonical('{"a"}');
SELECT idem_canonical('{a:1}');
SELECT idem_canonical('"\x"');
SELECT idem_canonical('"\u12g4"');
SELECT idem_canonical(E'"\t"');
SELECT idem_canonical('{} {}');
SELECT idem_canonical('"\ud800"');
SELECT idem_canonical('"\ud800x"');
SELECT idem_canonical('"\udc00"');
SELECT idem_canonical('"\ud800\ud800"');
SELECT idem_canonical('"\ud800\u0041"');
SELECT idem_canonical('{"\ud800":1}'::json);
SELECT idem_canonical('{"a":1,"a":1}');
SELECT idem_canonical('{"a":1,"b":2,"\u0061":1}');
SELECT idem_canonical('{"b":1,"a":2,"c":{"x":1,"y":2,"x":3}}'::json);
SELECT idem_canonical('{"\n":1,"\u000a":2}');
\set VERBOSITY default
\set SHOW_CONTEXT always
SELECT idem_canonical('{"a": [1, 2,}');
\set SHOW_CONTEXT never
SELECT idem_canonical('{"b":1,"a":2,"b":3}');
SELECT idem_canonical('["\ud83d"]');

-- nesting: a thousand levels always, too many are an error and never a crash
SELECT idem_canonical(repeat('[', 1000) || repeat(']', 1000)) = repeat('[', 1000) || repeat(']', 1000);
SELECT idem_canonical(repeat('{"a":', 1000) || '1' || repeat('}', 1000)) = repeat('{"a":', 1000) || '1' || repeat('}', 1000);
SELECT idem_canonical((repeat('[{"a":', 500) || '1' || repeat('}]', 500))::jsonb) = repeat('[{"a":', 500) || '1' || repeat('}]', 500);
\set VERBOSITY sqlstate
SELECT idem_canonical(repeat('[', 100000) || repeat(']', 100000));
SELECT idem_canonical(repeat('{"a":', 100000) || '1' || repeat('}', 100000));
SELECT idem_canonical(repeat('[', 1000000));
SELECT idem_fingerprint((repeat('[', 100000) || repeat(']', 100000))::jsonb);
SET max_stack_depth = '200kB';
SELECT idem_canonical(repeat('[', 9999) || repeat(']', 9999));
RESET max_stack_depth;
\set VERBOSITY default
SELECT idem_canonical(repeat('[', 100000));

-- names that are written with escapes sort by what they mean
SELECT idem_canonical('{"\r":1,"\"":2,"\f":3,"\u000b":4,"\n":5,"\\":6,"\t":7,"\b":8,"\u0007":9,"#":10}');
-- a large document can be cancelled
SET statement_timeout = '100ms';
\set VERBOSITY sqlstate
SELECT length(idem_canonical('[' || repeat('{"b":[1,2],"a":{}},', 3000000) || '1]'));
RESET statement_timeout;

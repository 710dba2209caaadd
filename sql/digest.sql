-- the type idem_digest
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
\set VERBOSITY verbose
\set SHOW_CONTEXT never

-- text form: either case in, lower case out
SELECT '00112233445566778899AABBCCDDEEFF00112233445566778899aabbccddeeff'::idem_digest;

-- casts, both explicit only
SELECT octet_length(idem_fingerprint('{}')::bytea) AS bytes,
	idem_fingerprint('{}')::bytea = sha256('{}') AS sha256,
	sha256('{}')::idem_digest = idem_fingerprint('{}') AS back;

-- refused
\set VERBOSITY sqlstate
SELECT ''::idem_digest;
SELECT repeat('0', 63)::idem_digest;
SELECT repeat('0', 65)::idem_digest;
SELECT (repeat('0', 63) || 'g')::idem_digest;
SELECT (' ' || repeat('0', 64))::idem_digest;
SELECT '\x00'::bytea::idem_digest;
SELECT (sha256('') || '\x00')::idem_digest;
SELECT idem_fingerprint('{}') = sha256('{}');
\set VERBOSITY default
SELECT 'abc'::idem_digest;
SELECT '\x00'::bytea::idem_digest;

-- binary form
CREATE TEMP TABLE digest AS
	SELECT n, idem_fingerprint(n::text) AS d FROM generate_series(1, 1000) AS n;
SELECT idem_digest_send(d) = d::bytea AS send FROM digest WHERE n = 1;
CREATE TEMP TABLE received (LIKE digest);
\copy digest TO 'results/digest.bin' (FORMAT binary)
\copy received FROM 'results/digest.bin' (FORMAT binary)
SELECT count(*) FROM digest JOIN received USING (n) WHERE digest.d = received.d;
\set VERBOSITY sqlstate
\copy (SELECT 1, '\x00'::bytea) TO 'results/digest.bin' (FORMAT binary)
\copy received FROM 'results/digest.bin' (FORMAT binary)
\copy (SELECT 1, sha256('') || '\x00'::bytea) TO 'results/digest.bin' (FORMAT binary)
\copy received FROM 'results/digest.bin' (FORMAT binary)
\set VERBOSITY default
DROP TABLE received;

-- order is bytewise, equality and hashes follow it
SELECT bool_and((a.d < b.d) = (a.d::bytea < b.d::bytea)) AS lt,
	bool_and((a.d <= b.d) = (a.d::bytea <= b.d::bytea)) AS le,
	bool_and((a.d = b.d) = (a.d::bytea = b.d::bytea)) AS eq,
	bool_and((a.d <> b.d) = (a.d::bytea <> b.d::bytea)) AS ne,
	bool_and((a.d >= b.d) = (a.d::bytea >= b.d::bytea)) AS ge,
	bool_and((a.d > b.d) = (a.d::bytea > b.d::bytea)) AS gt,
	bool_and(idem_digest_cmp(a.d, b.d) =
		CASE WHEN a.d::bytea < b.d::bytea THEN -1 WHEN a.d::bytea > b.d::bytea THEN 1 ELSE 0 END) AS cmp,
	bool_and((idem_digest_hash(a.d) = idem_digest_hash(b.d)) = (a.d = b.d)) AS hash,
	bool_and((idem_digest_hash_extended(a.d, 7) = idem_digest_hash_extended(b.d, 7)) = (a.d = b.d)) AS extended
FROM digest AS a, digest AS b WHERE a.n <= 40 AND b.n <= 40;
-- with seed 0 the extended hash has the low half of the other
SELECT bool_and(idem_digest_hash_extended(d, 0) & 4294967295 = idem_digest_hash(d)::bigint & 4294967295) AS low_half,
	bool_and(idem_digest_hash_extended(d, 1) <> idem_digest_hash_extended(d, 2)) AS seeded
FROM digest;
-- every byte counts, the last one too
SELECT count(*) FROM generate_series(0, 31) AS i
WHERE set_byte(sha256(''), i, get_byte(sha256(''), i) # 1)::idem_digest <> sha256('')::idem_digest;

-- indexes and joins
CREATE INDEX digest_btree ON digest (d);
CREATE INDEX digest_hash ON digest USING hash (d);
ANALYZE digest;
SET enable_seqscan = off;
SET enable_bitmapscan = off;
SET enable_hashjoin = off;
EXPLAIN (COSTS OFF) SELECT n FROM digest WHERE d = idem_fingerprint('7');
SELECT n FROM digest WHERE d = idem_fingerprint('7');
SELECT count(*) FROM digest AS a JOIN digest AS b USING (d);
RESET enable_hashjoin;
SET enable_mergejoin = off;
SET enable_nestloop = off;
SELECT count(*) FROM digest AS a JOIN digest AS b USING (d);
SELECT count(DISTINCT d) FROM digest;
SELECT opcname, amname, amvalidate(o.oid) FROM pg_opclass AS o JOIN pg_am AS a ON a.oid = opcmethod
WHERE opcname = 'idem_digest_ops' ORDER BY amname;
-- hash partitions use the extended hash
CREATE TEMP TABLE parted (d idem_digest) PARTITION BY HASH (d);
CREATE TEMP TABLE parted_0 PARTITION OF parted FOR VALUES WITH (MODULUS 2, REMAINDER 0);
CREATE TEMP TABLE parted_1 PARTITION OF parted FOR VALUES WITH (MODULUS 2, REMAINDER 1);
INSERT INTO parted SELECT d FROM digest;
SELECT (SELECT count(*) FROM parted_0) BETWEEN 400 AND 600 AS spread, count(*) FROM parted;
DROP TABLE parted, digest;

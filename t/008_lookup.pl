# Keys are looked up in pages that other sessions split, empty, vacuum and reuse
# meanwhile. A table counts what took effect; who finds a key that is not there, or
# misses one that is, breaks its count.

use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('lookup');
$node->init;
$node->append_conf('postgresql.conf', q{
autovacuum = off
synchronous_commit = off
max_wal_size = 2GB
});
$node->start;
$node->safe_psql('postgres', q{
	CREATE EXTENSION idem;
	INSERT INTO idem.scope (name) VALUES ('before'), ('keys'), ('after'), ('stream');

	-- some thirty keys a page, so that there are many pages and levels
	CREATE TABLE effect (id int PRIMARY KEY, key text NOT NULL, times int NOT NULL CHECK (times IN (0, 1)));
	INSERT INTO effect SELECT n, rpad(md5(n::text), 150 + n % 100, '-'), 0 FROM generate_series(1, 6000) AS n;
	SELECT idem_once(scope, key) FROM effect, (VALUES ('before'), ('after')) AS scopes (scope) WHERE id % 10 = 0;

	CREATE FUNCTION execute(wanted int) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		IF (SELECT idem_once('keys', key) FROM effect WHERE id = wanted) THEN
			UPDATE effect SET times = times + 1 WHERE id = wanted;
		END IF;
	END $$;
	CREATE FUNCTION execute_in_vain(wanted int) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM execute(wanted);
		RAISE EXCEPTION 'in vain';
	EXCEPTION WHEN raise_exception THEN
	END $$;
	-- keys that come in order, again and again while they are new: they are on the page that splits
	CREATE SEQUENCE newest;
	CREATE TABLE streamed (id bigint PRIMARY KEY);
	CREATE FUNCTION execute_stream() RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		wanted bigint := nextval('newest') / 4 - (random() * 20)::int;
	BEGIN
		IF idem_once('stream', lpad(wanted::text, 200, '0')) THEN
			INSERT INTO streamed VALUES (wanted);
		END IF;
	END $$;
	CREATE FUNCTION forget(wanted int) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		IF (SELECT idem_forget('keys', key, tombstone => false) FROM effect WHERE id = wanted) THEN
			UPDATE effect SET times = times - 1 WHERE id = wanted;
		END IF;
	END $$;
});

# keys side by side in the index are forgotten together, which empties pages
$node->pgbench(
	'-n -c 6 -j 2 -t 4000 -M prepared',
	0, [qr{processed: 24000/24000}], [qr{^$}],
	'no client fails',
	{
		'008_execute@150' => '\set id random(1, 6000)
SELECT execute(:id);',
		'008_execute_in_vain@40' => '\set id random(1, 6000)
SELECT execute_in_vain(:id);',
		'008_forget@3' => '\set first random(1, 5900)
SELECT forget(id) FROM effect WHERE key > (SELECT key FROM effect WHERE id = :first) ORDER BY key LIMIT 60;',
		'008_vacuum@1' => 'VACUUM idem.result;',
	});

is($node->safe_psql('postgres', q{
	SELECT count(*) FROM effect WHERE times <> (SELECT count(*) FROM idem.result AS r, idem.scope AS s
		WHERE s.name = 'keys' AND r.scope_id = s.id AND r.key = effect.key)}),
	0, 'what took effect is what is settled');
is($node->safe_psql('postgres', q{
	SELECT count(*) FROM effect, (VALUES ('before'), ('keys'), ('after')) AS scopes (scope)
	WHERE (idem_status(scope, key)).state IS NOT NULL <> CASE scope WHEN 'keys' THEN times = 1 ELSE id % 10 = 0 END}),
	0, 'and what answers say');
cmp_ok($node->safe_psql('postgres', q{SELECT sum(times) FROM effect}), '>', 1000, 'keys took effect');
cmp_ok($node->safe_psql('postgres', q{SELECT count(*) FROM idem.audit WHERE event = 'forget'}), '>', 500, 'and were forgotten');

$node->pgbench(
	'-n -c 8 -j 4 -t 3000 -M prepared',
	0, [qr{processed: 24000/24000}], [qr{^$}],
	'no client fails',
	{ '008_stream' => 'SELECT execute_stream();' });
is($node->safe_psql('postgres', q{
	SELECT count(*) FROM streamed FULL JOIN (SELECT * FROM idem.operation WHERE scope = 'stream') AS o ON o.key = lpad(id::text, 200, '0')
	WHERE id IS NULL OR o.key IS NULL}), 0, 'what took effect is what is settled');

$node->stop;
done_testing();

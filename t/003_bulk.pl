# One transaction that settles very many keys: needs a server with the smallest
# lock table there is, another with a large one, and the statistics between them.

use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('bulk');
$node->init;
$node->append_conf('postgresql.conf', q{
max_locks_per_transaction = 10
max_connections = 10
autovacuum = off
shared_buffers = 256MB
max_wal_size = 4GB
synchronous_commit = off
});
$node->start;
$node->safe_psql('postgres', q{
	CREATE EXTENSION idem;
	INSERT INTO idem.scope (name) VALUES ('once'), ('pair'), ('inside'), ('whole'), ('mixed'), ('rolled back'), ('open');
	CREATE VIEW memory AS SELECT sum(total_bytes)::bigint AS bytes FROM pg_backend_memory_contexts;
	CREATE FUNCTION status(scope text, key text) RETURNS text LANGUAGE sql
		RETURN coalesce((idem_status(scope, key)).outcome, 'free');
});

# Runs a block as one transaction, and reports what it held at its end and what
# it left behind.
sub bulk
{
	my ($name, $scope, $keys, $sql) = @_;

	my $before = $node->safe_psql('postgres', q{
		SELECT n_tup_ins, n_tup_upd + n_tup_del, n_dead_tup FROM pg_stat_all_tables WHERE relid = 'idem.result'::regclass});
	my $out = $node->safe_psql('postgres', qq{
		BEGIN;
		SELECT idem_once('$scope', 'first');		-- caches are warm
		SELECT bytes AS before FROM memory \\gset
		$sql;
		SELECT 'memory', bytes - :before FROM memory;
		SELECT 'locks', count(*) FROM pg_locks WHERE pid = pg_backend_pid();
		SELECT 'key locks', count(*) FROM idem.holder;
		COMMIT;
		SELECT pg_stat_force_next_flush()});
	my ($memory) = $out =~ /^memory\|(-?\d+)/m;
	my ($locks) = $out =~ /^locks\|(\d+)/m;
	my ($key_locks) = $out =~ /^key locks\|(\d+)/m;
	my $after = $node->safe_psql('postgres', q{
		SELECT n_tup_ins, n_tup_upd + n_tup_del, n_dead_tup FROM pg_stat_all_tables WHERE relid = 'idem.result'::regclass});
	my @change = map { (split /\|/, $after)[$_] - (split /\|/, $before)[$_] } 0 .. 2;

	note "$name: $memory bytes, $locks locks";
	is($node->safe_psql('postgres', qq{
			SELECT count(*) FROM idem.operation WHERE scope = '$scope' AND state = 'succeeded'}),
		$keys + 1, "$name: all keys are settled");
	cmp_ok($memory, '<', 16 * 1024 * 1024, "$name: memory is bounded");
	cmp_ok($locks, '<', 40, "$name: so are locks");
	is($key_locks, 0, "$name: no key lock is left");
	is($change[0], $keys + 1, "$name: a row a key was written");
	is($change[1] . '+' . $change[2], '0+0', "$name: no row was updated or deleted, no tuple is dead");
}

bulk('1,000,000 keys at once', 'once', 1_000_000, q{
	SELECT count(*) FILTER (WHERE idem_once('once', i::text)) FROM generate_series(1, 1000000) AS i});

bulk('300,000 pairs', 'pair', 300_000, q{
	SELECT count(idem_claim('pair', i::text)), count(idem_complete('pair', i::text, '{"ok": true}'))
	FROM generate_series(1, 300000) AS i});

bulk('100,000 completions in EXCEPTION blocks', 'inside', 100_000, q{
	DO $$
	BEGIN
		FOR i IN 1 .. 100000 LOOP
			PERFORM idem_claim('inside', i::text);
			BEGIN
				PERFORM idem_complete('inside', i::text);
			EXCEPTION WHEN division_by_zero THEN NULL;
			END;
		END LOOP;
	END $$});

bulk('100,000 pairs in EXCEPTION blocks', 'whole', 100_000, q{
	DO $$
	BEGIN
		FOR i IN 1 .. 100000 LOOP
			BEGIN
				PERFORM idem_claim('whole', i::text);
				PERFORM idem_complete('whole', i::text);
			EXCEPTION WHEN division_by_zero THEN NULL;
			END;
		END LOOP;
	END $$});

# Claimed one level down and settled two, and at two levels that both commit.
bulk('20,000 keys in nested blocks', 'mixed', 20_000, q{
	DO $$
	BEGIN
		FOR i IN 1 .. 20000 LOOP
			BEGIN
				PERFORM idem_claim('mixed', i::text);
				BEGIN
					BEGIN
						PERFORM idem_complete('mixed', i::text);
					EXCEPTION WHEN division_by_zero THEN NULL;
					END;
				EXCEPTION WHEN division_by_zero THEN NULL;
				END;
			EXCEPTION WHEN division_by_zero THEN NULL;
			END;
		END LOOP;
	END $$});

# Rolled back one by one: no lock, no claim and no memory stays.
my $out = $node->safe_psql('postgres', q{
	BEGIN;
	SELECT idem_once('rolled back', 'first');
	SELECT bytes AS before FROM memory \gset
	DO $$
	BEGIN
		FOR i IN 1 .. 20000 LOOP
			BEGIN
				PERFORM idem_claim('rolled back', i::text);
				IF i % 2 = 0 THEN
					PERFORM idem_complete('rolled back', i::text);
				END IF;
				PERFORM 1/0;
			EXCEPTION WHEN division_by_zero THEN NULL;
			END;
		END LOOP;
	END $$;
	SELECT 'memory', bytes - :before < 8 * 1024 * 1024 FROM memory;
	SELECT 'key locks', count(*) FROM idem.holder;
	COMMIT});
like($out, qr/memory\|t/, '20,000 blocks rolled back: memory is bounded');
like($out, qr/key locks\|0/, '20,000 blocks rolled back: no lock is left');
is($node->safe_psql('postgres', q{SELECT count(*) FROM idem.operation WHERE scope = 'rolled back'}), '1', '20,000 blocks rolled back: no key is settled');

# --- open claims do need a lock each

my $open = q{
	SELECT count(*) FILTER (WHERE (idem_claim('open', i::text)).outcome = 'claimed') FROM generate_series(1, 100000) AS i};
my ($rc, $stdout, $err) = $node->psql('postgres', qq{
	\\set VERBOSITY verbose
	BEGIN; $open; COMMIT});
like($err, qr/ERROR:  53200: out of shared memory/, '100,000 open claims in a small lock table: 53200');
like($err, qr/HINT: .*max_locks_per_transaction/, '100,000 open claims in a small lock table: the hint says what to do');
is($node->safe_psql('postgres', q{SELECT count(*) FROM idem.holder}), '0', 'all locks are free after it');
is($node->safe_psql('postgres', q{SELECT status('open', '1'), idem_once('open', '0')}), 'free|t', 'and so are the keys');

# an error that a savepoint traps leaves the transaction with what it had before
$out = $node->safe_psql('postgres', q{
	BEGIN;
	SELECT (idem_claim('open', 'before')).outcome;
	DO $$ BEGIN
		PERFORM idem_claim('open', i::text) FROM generate_series(1, 100000) AS i;
		EXCEPTION WHEN out_of_memory THEN RAISE NOTICE 'trapped';
	END $$;
	SELECT count(*) FROM idem.holder;
	SELECT idem_complete('open', 'before');
	COMMIT});
is($out, "claimed\n1\nsucceeded", 'a trapped 53200 leaves the claims made before it');

# Time that grew with the square of the open claims would not get this far: each
# of the four ends below concerns all 100,000 of them.
$node->append_conf('postgresql.conf', "max_locks_per_transaction = 8000\nstatement_timeout = '60s'\n");
$node->restart;
$out = $node->safe_psql('postgres', qq{
	BEGIN; $open;
	SELECT count(*) FROM idem.holder;
	SELECT count(idem_complete('open', i::text)) FROM generate_series(1, 100000) AS i;
	SELECT count(*) FROM idem.holder;
	ROLLBACK;
	BEGIN; $open;
	SAVEPOINT a;
	SELECT count(idem_complete('open', i::text)) FROM generate_series(100000, 1, -1) AS i;
	SELECT count(*) FROM idem.holder;
	ROLLBACK TO a;
	SELECT count(idem_complete('open', i::text)) FROM generate_series(1, 100000) AS i;
	RELEASE a;
	SELECT count(*) FROM idem.holder;
	ROLLBACK});
is($out, join("\n", 100000, 100000, 100000, 0, 100000, 100000, 100000, 100000, 0),
	'100,000 open claims in a larger lock table: claimed, settled, undone, settled again');
($rc, $stdout, $err) = $node->psql('postgres', qq{
	\\set VERBOSITY sqlstate
	BEGIN; $open; COMMIT});
like($err, qr/ID003/, '100,000 open claims at COMMIT: ID003');
is($node->safe_psql('postgres', q{SELECT count(*) FROM idem.operation WHERE scope = 'open'}), '2', 'and none of them is settled');

done_testing();

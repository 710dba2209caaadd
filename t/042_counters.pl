# The counters, which are there only if the library is preloaded.

use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('counters');
$node->init;
$node->append_conf('postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.sweep_interval = 1
idem.worker = off
});
$node->start;
$node->safe_psql('postgres', $_) foreach 'CREATE DATABASE a', 'CREATE DATABASE b';
foreach my $database ('a', 'b')
{
	$node->safe_psql($database, q{
		CREATE EXTENSION idem;
		INSERT INTO idem.scope (name, archive) VALUES ('s', 'none'), ('key', 'key'), ('hold', 'key'), ('unused', 'key');
		UPDATE idem.scope SET on_expiry = 'hold' WHERE name = 'hold'});
}

# The counters of a scope that are not 0
sub counters
{
	my ($scope, $database) = @_;
	return $node->safe_psql($database // 'a', qq{
		SELECT string_agg(key || ' ' || value, ', ' ORDER BY key)
		FROM idem.stat AS s, jsonb_each(to_jsonb(s) - '{scope,replay_age,stats_reset}'::text[])
		WHERE scope = '$scope' AND value <> '0'});
}

# Resets, does something, and says what was counted
sub counted
{
	my ($sql, $scope) = @_;
	$node->safe_psql('a', 'SELECT idem_stat_reset()');
	$node->psql('a', $sql);
	return counters($scope // 's');
}

is($node->safe_psql('a', 'SELECT count(*) FROM idem.stat'), '0', 'nothing was counted yet');

# --- each outcome of a claim, each settlement
is(counted(q{SELECT idem_once('s', 'once')}), 'claimed 1, succeeded 1', 'idem_once: claimed and succeeded');
is(counted(q{SELECT idem_once('s', 'once')}), 'replayed 1', 'a duplicate: replayed');
is(counted(q{BEGIN; SELECT idem_claim('s', 'k', '1'); SELECT idem_complete('s', 'k'); COMMIT}), 'claimed 1, succeeded 1', 'claim and complete');
is(counted(q{SELECT idem_claim('s', 'k', '1')}), 'replayed 1', 'a replay');
is(counted(q{SELECT idem_claim('s', 'k', '2')}), 'mismatch 1', 'a mismatch');
is(counted(q{BEGIN; SELECT idem_claim('s', 'f'); SELECT idem_fail('s', 'f'); COMMIT}), 'claimed 1, failed 1', 'a failure');
is(counted(q{BEGIN; SELECT idem_claim('s', 'r'); SELECT idem_release('s', 'r'); COMMIT}), 'claimed 1, released 1', 'a release');
is(counted(q{SELECT idem_claim('s', 'l', lease => '1 hour')}), 'claimed 1', 'a lease');
is(counted(q{SELECT idem_claim('s', 'l', lease => '1 hour')}), 'in_progress 1', 'in progress');
is(counted(q{SELECT idem_unknown('s', 'l', (SELECT token FROM idem.inflight))}), 'in_doubt 1', 'declared in doubt');
is(counted(q{SELECT idem_claim('s', 'l', lease => '1 hour')}), 'unknown 1', 'a claim of it: unknown');
is(counted(q{SELECT idem_resolve('s', 'l', 'retry'); SELECT idem_claim('s', 'l', lease => '1 hour')}), 'claimed 1, takeovers 1', 'a takeover is a claim as well');
is(counted(q{SELECT idem_complete('s', 'l', token => 1)}), 'leases_lost 1', 'a lease lost');
is(counted(q{SELECT idem_complete('s', 'l', token => (SELECT token FROM idem.inflight))}), 'succeeded 1', 'a leased claim settled');
is(counted(q{SELECT idem_once('unused', 'k'); SELECT idem_once('s', 'other')}), 'claimed 1, succeeded 1', 'each scope counts its own');
$node->safe_psql('a', q{SELECT idem_once('key', 'old'); UPDATE idem.result SET completed_at = now() - interval '2 days', headers = '1'});
is(counted(q{SELECT idem_claim('key', 'old')}, 'key'), 'expired 1', 'a tombstone: expired');

# --- the sweep's
is(counted(q{SELECT idem_sweep()}, 'key'), 'archived 1', 'archived by a sweep');
is(counters('s'), 'purged 5', 'purged by it');
$node->safe_psql('a', q{
	SELECT idem_claim('s', 'over', lease => '1 hour'), idem_claim('hold', 'over', lease => '1 hour');
	UPDATE idem.inflight SET lease_until = now()});
is(counted('SELECT idem_sweep()'), 'reclaimed 1', 'reclaimed by it');
is(counters('hold'), 'held 1', 'held by it');

# --- what was rolled back was attempted
is(counted(q{BEGIN; SELECT idem_once('s', 'undone'); ROLLBACK}), 'claimed 1, succeeded 1', 'a transaction that rolled back');
is(counted(q{BEGIN; SELECT idem_claim('s', 'undone'); SAVEPOINT s; SELECT 1/0; ROLLBACK}), 'claimed 1', 'and one that failed');
is($node->safe_psql('a', q{SELECT count(*) FROM idem.operation WHERE key = 'undone'}), '0', 'though nothing is there');

# --- how old what is replayed was: below 1, 2, 4 ... seconds
$node->safe_psql('a', q{SELECT idem_stat_reset(), idem_once('s', 'age')});
foreach my $age ('0', '0.5 s', '1.5 s', '3 s', '60 s', '1 hour', '23 hours', '-1 hour')
{
	$node->safe_psql('a', qq{
		UPDATE idem.result SET completed_at = clock_timestamp() - interval '$age' WHERE key = 'age';
		SELECT idem_claim('s', 'age')});
}
is($node->safe_psql('a', q{SELECT array_length(replay_age, 1), (SELECT sum(n) FROM unnest(replay_age) n), replay_age[1] >= 2,
		replay_age[7], replay_age[13], replay_age[18] FROM idem.stat WHERE scope = 's'}), '26|8|t|1|1|1', 'the histogram of replays by age');
is(counters('s'), 'claimed 1, replayed 8, succeeded 1', 'as many as were replayed');
$node->safe_psql('a', q{
	UPDATE idem.scope SET retention = NULL WHERE name = 's';
	UPDATE idem.result SET completed_at = '1900-01-01' WHERE key = 'age';
	SELECT idem_claim('s', 'age')});
is($node->safe_psql('a', q{SELECT replay_age[26] FROM idem.stat WHERE scope = 's'}), '1', 'the last one has all that are older');

# --- reset
my $before = $node->safe_psql('a', 'SELECT clock_timestamp()');
$node->safe_psql('b', q{SELECT idem_once('s', 'k')});
$node->safe_psql('a', q{SELECT idem_stat_reset()});
is($node->safe_psql('a', qq{SELECT bool_and(stats_reset > '$before'), sum(claimed), sum((SELECT sum(n) FROM unnest(replay_age) n)) FROM idem.stat}), 't|0|0', 'reset');
is(counters('s', 'b'), 'claimed 1, succeeded 1', 'only in its database');

# --- idem.track
is(counted(q{SET idem.track = off; SELECT idem_once('s', 'untracked')}), '', 'idem.track = off');

# --- a restart
$node->safe_psql('a', q{SELECT idem_once('s', 'before')});
isnt(counters('s'), '', 'counted before');
$node->restart;
is($node->safe_psql('a', 'SELECT count(*) FROM idem.stat'), '0', 'gone after a restart');

# --- more scopes than there is room for, until their database is dropped
$node->safe_psql('postgres', 'CREATE DATABASE many');
is($node->safe_psql('many', q{
	CREATE EXTENSION idem;
	INSERT INTO idem.scope (name) SELECT 's' || n FROM generate_series(1, 1100) n;
	SELECT count(idem_once('s' || n, 'k')) FROM generate_series(1, 1100) n;
	SELECT count(*) FROM idem.stat}), "1100\n1024", 'what there is no room for is not shown');
is($node->safe_psql('a', q{SELECT idem_once('s', 'no room'); SELECT count(*) FROM idem.stat}), "t\n0", 'in no database');
$node->append_conf('postgresql.conf', 'idem.worker = on');
$node->reload;
$node->safe_psql('postgres', 'DROP DATABASE many');
$node->poll_query_until('a', q{SELECT idem_once('s', 'room') IS NOT NULL AND EXISTS (SELECT FROM idem.stat WHERE scope = 's')})
	or die 'no room';
pass('there is room again when the database is dropped');

# --- counting from many sessions at once loses nothing
$node->safe_psql('a', 'SELECT idem_stat_reset()');
$node->pgbench('-n -c 8 -j 2 -t 500', 0, [qr/processed: 4000/], [qr/^$/], 'eight sessions', { '042_counters_once' => q{SELECT idem_once('s', 'room')} }, 'a');
is(counters('s'), 'replayed 4000', 'are all counted');

done_testing();

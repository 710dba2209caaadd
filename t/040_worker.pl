# The background worker's life: it starts and ends with the server, and never
# stands in the way of who creates, drops, renames or copies a database, or drops
# the extension. SQL cannot preload a library, crash or promote a server.

use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $conf = q{
shared_preload_libraries = 'idem'
idem.sweep_interval = 1
max_worker_processes = 8
restart_after_crash = on
log_line_prefix = '%m [%p] %b %a '
};
my $node = PostgreSQL::Test::Cluster->new('worker');
$node->init(allows_streaming => 1);
$node->append_conf('postgresql.conf', $conf);
$node->start;

sub make_database
{
	my ($name, $on) = @_;
	$on //= $node;
	$on->safe_psql('postgres', "CREATE DATABASE $name");
	$on->safe_psql($name, q{
		CREATE EXTENSION idem;
		INSERT INTO idem.scope (name, lease) VALUES ('s', '1 hour')});
}

# Is a lease that is over swept by nobody's call?
sub is_swept
{
	my ($database, $name, $on) = @_;
	$on //= $node;
	$on->safe_psql($database, q{
		DELETE FROM idem.inflight WHERE key = 'probe';
		SELECT idem_claim('s', 'probe');
		UPDATE idem.inflight SET lease_until = now() WHERE key = 'probe'});
	ok($on->poll_query_until($database, q{SELECT state = 'e' FROM idem.inflight WHERE key = 'probe'}), "$name: a lease that is over is swept");
}

# Waits until a database has been swept a few times more.
sub wait_for_sweeps
{
	my ($database, $count) = @_;
	for (1 .. $count)
	{
		my $last = $node->safe_psql($database, q{SELECT coalesce(max(last_started), '-infinity') FROM idem.sweep});
		$node->poll_query_until($database, "SELECT max(last_started) > '$last' FROM idem.sweep") or die 'not swept';
	}
}

# What the server log says since, but what clients did
sub log_since
{
	my ($since) = @_;
	return join '', grep { !/client backend/ && !/^\s/ && !/checkpoint/ } map { "$_\n" } split /\n/, slurp_file($node->logfile, $since);
}

# --- a database that begins to use the extension is found at once, not in the next round of all
make_database('a');
is_swept('a', 'start');
is($node->safe_psql('a', 'SELECT worker_runs, last_sweep IS NOT NULL, clock_went_back FROM idem.health'), 't|t|f', 'the health view says so');
is($node->safe_psql('postgres', q{SELECT datname IS NULL FROM pg_stat_activity WHERE backend_type = 'idem launcher'}), 't', 'the launcher is connected to no database');
ok($node->poll_query_until('a', q{SELECT n_tup_upd > 0 FROM pg_stat_user_tables WHERE relid = 'idem.sweep'::regclass}), 'autovacuum hears of what a sweeper does');

# --- a quiet log
my $since = -s $node->logfile;
wait_for_sweeps('a', 3);
is(log_since($since), '', 'nothing is logged when nothing happens');

# --- after a crash, and a restart
my $pid = $node->safe_psql('postgres', q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'idem launcher'});
$since = -s $node->logfile;
kill 'KILL', $pid;
$node->wait_for_log(qr/database system is ready to accept connections/, $since);
$node->poll_query_until('postgres', 'SELECT true');
is_swept('a', 'after a crash');
$node->restart;
is_swept('a', 'after a restart');

# --- a standby has no worker; once promoted it has
$node->backup('base');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($node, 'base', has_streaming => 1);
$standby->start;
$node->wait_for_catchup($standby);
is($standby->safe_psql('a', 'SELECT worker_runs FROM idem.health'), 'f', 'no worker on a standby');
my ($rc, $out, $err) = $standby->psql('a', 'SELECT idem_sweep()');
like($err, qr/cannot execute idem_sweep\(\) in a read-only transaction/, 'and no sweep by hand');
$standby->promote;
is_swept('a', 'after promotion', $standby);
$standby->stop;

# --- databases come and go while they are swept: there is work for longer than it takes to come and look
make_database('busy');
$node->safe_psql('busy', q{
	SELECT idem_claim('s', 'first');
	INSERT INTO idem.inflight SELECT token, now() - interval '1 hour', created_at, updated_at, scope_id, attempt, form, state, fingerprint, 'k' || n, claimant, owner, recovery_point, request, checkpoint
		FROM idem.inflight, generate_series(1, 100000) n});
$node->safe_psql('postgres', q{
	ALTER DATABASE busy ALLOW_CONNECTIONS false;
	ALTER DATABASE busy IS_TEMPLATE true});

# A copy in which a sweeper is at work
sub make_victim
{
	$node->safe_psql('postgres', 'CREATE DATABASE victim TEMPLATE busy');
	$node->safe_psql('victim', q{SELECT idem_status('s', 'k1')});
	$node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'idem sweeper' AND datname = 'victim' AND state = 'active'})
		or die 'no sweeper';
}

$since = -s $node->logfile;
foreach my $command ('DROP DATABASE victim', 'DROP DATABASE victim WITH (FORCE)', 'ALTER DATABASE victim RENAME TO renamed', 'CREATE DATABASE copy TEMPLATE victim')
{
	make_victim();
	my ($rc, $out, $err) = $node->psql('postgres', $command);
	is($rc . $err, '0', "while a sweeper is in it: $command");
	$node->safe_psql('postgres', 'DROP DATABASE IF EXISTS victim WITH (FORCE)');
}
is_swept('renamed', 'a renamed database');
is($node->safe_psql('copy', q{SELECT count(*) >= 100000 FROM idem.inflight}), 't', 'the copy is whole');
$node->safe_psql('postgres', $_) foreach 'DROP DATABASE renamed WITH (FORCE)', 'DROP DATABASE copy WITH (FORCE)';
unlike(log_since($since), qr/ERROR|PANIC|signal/, 'no error in the log');

# --- the extension is dropped and made again in the middle of a sweep
make_victim();
$since = -s $node->logfile;
$node->safe_psql('victim', q{
	DROP EXTENSION idem CASCADE;
	CREATE EXTENSION idem;
	INSERT INTO idem.scope (name, lease) VALUES ('s', '1 hour')});
is_swept('victim', 'the extension made again');
$node->safe_psql('victim', 'DROP EXTENSION idem CASCADE');
wait_for_sweeps('a', 3);
is(log_since($since), '', 'nothing is logged of a database that has it no more');
$node->safe_psql('postgres', 'DROP DATABASE victim');

# --- a schema that is called idem is not the extension; a database that refuses connections
$node->safe_psql('postgres', 'CREATE DATABASE other');
$node->safe_psql('other', q{
	CREATE SCHEMA idem;
	CREATE TABLE idem.inflight AS SELECT 'p'::"char" AS state;
	CREATE TABLE idem.sweep (last_started int)});
make_database('closed');
is_swept('closed', 'open');
$node->safe_psql('postgres', 'ALTER DATABASE closed ALLOW_CONNECTIONS false');
$node->restart;		# so that all are looked into
$since = -s $node->logfile;
wait_for_sweeps('a', 3);
is(log_since($since), '', 'neither is logged');
is($node->safe_psql('other', 'SELECT (SELECT count(*) FROM idem.inflight) || (SELECT count(*) FROM idem.sweep)::text'), '10', "somebody else's schema is let alone");

# --- pg_upgrade, both servers with the worker, keys in flight
$node->safe_psql('a', q{
	SELECT idem_claim('s', 'running', claimant => 'me');
	SELECT idem_once('s', 'settled')});
$node->safe_psql('postgres', "ALTER DATABASE $_ ALLOW_CONNECTIONS true") foreach 'busy', 'closed';		# pg_upgrade insists
my $token = $node->safe_psql('a', q{SELECT token FROM idem.inflight WHERE key = 'running'});
$node->stop;
my $new = PostgreSQL::Test::Cluster->new('upgraded');
$new->init;
$new->append_conf('postgresql.conf', $conf);
my $bin = $node->config_data('--bindir');
chdir $node->basedir or die $!;		# it leaves files behind
$new->command_ok(
	[
		'pg_upgrade', '--no-sync', '-b', $bin, '-B', $bin, '-d', $node->data_dir, '-D', $new->data_dir,
		'-s', $new->host, '-p', $node->port, '-P', $new->port ],
	'pg_upgrade with the worker preloaded');
$new->start;
is_swept('a', 'after pg_upgrade', $new);
is($new->safe_psql('a', q{SELECT outcome, token = } . $token . q{ FROM idem_claim('s', 'running', claimant => 'me')}), 'claimed|t', 'a key in flight is in flight');
is($new->safe_psql('a', q{SELECT idem_once('s', 'settled')}), 'f', 'a settled key is settled');

done_testing();

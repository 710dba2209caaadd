# What must not stop the background worker, or must stop it quietly: settings,
# locks, failures, missing slots, a clock that went back. SQL cannot preload a
# library.

use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('faults');
$node->init;
$node->append_conf('postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.sweep_interval = 1
log_line_prefix = '%m [%p] %b %a '
log_min_messages = debug1
});
$node->start;

sub make_database
{
	my ($name) = @_;
	$node->safe_psql('postgres', "CREATE DATABASE $name");
	$node->safe_psql($name, q{
		CREATE EXTENSION idem;
		INSERT INTO idem.scope (name, lease) VALUES ('s', '1 hour')});
}

sub make_lease
{
	my ($database) = @_;
	$node->safe_psql($database, q{
		SET default_transaction_read_only = off;
		SET statement_timeout = 0;
		SET lock_timeout = 0;
		SET default_transaction_isolation = 'read committed';
		SET search_path = public;
		DELETE FROM idem.inflight WHERE key = 'probe';
		SELECT idem_claim('s', 'probe');
		UPDATE idem.inflight SET lease_until = now() WHERE key = 'probe'});
}

sub state_of
{
	my ($database) = @_;
	return $node->safe_psql($database, q{SELECT state FROM idem.inflight WHERE key = 'probe'});
}

sub becomes_free
{
	my ($database, $name) = @_;
	ok($node->poll_query_until($database, q{SELECT state = 'e' FROM idem.inflight WHERE key = 'probe'}), $name);
}

sub wait_for_sweeps
{
	my ($database, $count) = @_;
	for (1 .. $count)
	{
		my $last = $node->safe_psql($database, q{SELECT coalesce(max(last_started), '-infinity') FROM idem.sweep});
		$node->poll_query_until($database, "SELECT max(last_started) > '$last' FROM idem.sweep") or die 'not swept';
	}
}

sub times_logged
{
	my ($regex, $since) = @_;
	my @all = slurp_file($node->logfile, $since) =~ /$regex/g;
	return scalar @all;
}

make_database('a');
make_database('b');
make_lease($_), becomes_free($_, "$_: swept") foreach 'a', 'b';

# --- a hundred databases of which two use the extension: the others are visited once, then rarely
my $since = -s $node->logfile;
$node->safe_psql('postgres', join "\n", map { "CREATE DATABASE unused$_;" } 1 .. 98);
$node->restart;		# the first round is of all
$node->poll_query_until('postgres', q{SELECT true});
$since = -s $node->logfile;
my $started = qr/starting background worker process "idem sweeper"/;
make_lease('b');
becomes_free('b', 'a hundred databases: swept in the first round');
wait_for_sweeps('b', 1);
$since = -s $node->logfile;
wait_for_sweeps('b', 4);
my $visits = times_logged($started, $since);
cmp_ok($visits, '>=', 4, 'those that use it are visited');
cmp_ok($visits, '<=', 14, 'the others are not, each time');
$node->safe_psql('postgres', join "\n", map { "DROP DATABASE unused$_;" } 1 .. 98);

# --- settings of a database that would stop a session
$node->safe_psql('a', q{
	CREATE SCHEMA evil;
	CREATE FUNCTION evil.now() RETURNS timestamptz LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil'; END $$;
	CREATE FUNCTION evil.lt(timestamptz, timestamptz) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil'; END $$;
	CREATE OPERATOR evil.< (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = evil.lt);
	CREATE TABLE evil.inflight (state "char")});
$node->safe_psql('postgres', 'ALTER DATABASE a SET search_path = evil, pg_catalog, public');
make_lease('a');
becomes_free('a', 'a hostile search_path');
$node->safe_psql('postgres', 'ALTER DATABASE a RESET ALL');
foreach my $setting ('default_transaction_read_only = on', q{default_transaction_isolation = 'serializable'}, q{statement_timeout = '1ms'}, q{lock_timeout = '1ms'},
	$node->pg_version >= 17 ? q{transaction_timeout = '1ms'} : ())
{
	make_lease('a');
	$node->safe_psql('postgres', "ALTER DATABASE a SET $setting");
	# a session of its own would be stopped: look from inside with the setting overridden
	local $ENV{PGOPTIONS} = '-c default_transaction_read_only=off -c default_transaction_isolation=read\ committed -c statement_timeout=0 -c lock_timeout=0' .
		($node->pg_version >= 17 ? ' -c transaction_timeout=0' : '');
	becomes_free('a', $setting);
	$node->safe_psql('postgres', 'ALTER DATABASE a RESET ALL');
}

# --- a synchronous standby that is not there
make_lease('a');
$node->append_conf('postgresql.conf', q{synchronous_standby_names = 'nobody'});
$node->reload;
becomes_free('a', 'no synchronous standby');
wait_for_sweeps('a', 2);
$node->append_conf('postgresql.conf', q{synchronous_standby_names = ''});
$node->reload;

# --- settings are reloaded, and checked
$node->append_conf('postgresql.conf', 'idem.worker = off');
$node->reload;
$node->poll_query_until('postgres', q{SELECT current_setting('idem.worker') = 'off'});
my $later = $node->safe_psql('postgres', q{SELECT clock_timestamp() + interval '1.5 seconds'});
$node->poll_query_until('postgres', "SELECT clock_timestamp() > '$later'");		# a sweep that was under way
make_lease('a');
$later = $node->safe_psql('postgres', q{SELECT clock_timestamp() + interval '2.5 seconds'});
$node->poll_query_until('postgres', "SELECT clock_timestamp() > '$later'");
is(state_of('a') . $node->safe_psql('a', 'SELECT worker_runs FROM idem.health'), 'pf', 'idem.worker = off: nothing is swept, and the health view says so');
is($node->safe_psql('a', 'SELECT reclaimed FROM idem_sweep()'), '1', 'but by hand');
make_lease('a');
$node->append_conf('postgresql.conf', 'idem.worker = on');
$node->reload;
becomes_free('a', 'idem.worker = on again');
is($node->safe_psql('postgres', q{SELECT string_agg(concat_ws(' ', name, setting, unit, context), ', ' ORDER BY name) FROM pg_settings WHERE name LIKE 'idem.%'}),
	'idem.sweep_interval 1 s sighup, idem.sweep_rows 10000 sighup, idem.track on superuser, idem.worker on sighup', 'the settings');
my ($rc, $out, $err) = $node->psql('postgres', 'ALTER SYSTEM SET idem.sweep_interval = 0');
like($err, qr/0 s is outside the valid range/, 'are checked');

# --- the clock went back: nothing is removed, nothing is logged, the health view says so
make_lease('a');
$node->safe_psql('a', q{UPDATE idem.sweep SET last_started = now() + interval '1 hour'; UPDATE idem.inflight SET state = 'p'});
$since = -s $node->logfile;
wait_for_sweeps('b', 3);
is(state_of('a') . $node->safe_psql('a', 'SELECT clock_went_back FROM idem.health'), 'pt', 'the clock went back: no sweep');
is(times_logged(qr/idem sweeper.*(LOG|WARNING|ERROR)/, $since), 0, 'a quiet log');
$node->safe_psql('a', 'DELETE FROM idem.sweep');
becomes_free('a', 'who knows better deletes the row');

# --- who keeps the tables, or is about to drop the extension, keeps no other database waiting
foreach my $lock ('LOCK TABLE idem.result', 'LOCK TABLE idem.sweep', 'DROP EXTENSION idem CASCADE', 'ALTER EXTENSION idem ADD TABLE mine')
{
	$node->safe_psql('a', 'CREATE TABLE mine ()');
	$since = -s $node->logfile;
	my $session = $node->background_psql('a');
	$session->query_safe('BEGIN');
	$session->query_safe($lock);
	wait_for_sweeps('b', 3);
	is($node->safe_psql('postgres', q{SELECT count(*) FROM pg_locks WHERE NOT granted}), '0', "nobody waits for $lock");
	$session->query_safe('ROLLBACK');
	$session->quit;
	$node->safe_psql('a', 'DROP TABLE mine');
	make_lease('a');
	becomes_free('a', "swept after $lock");
	is(times_logged(qr/idem sweeper.*(LOG|WARNING|ERROR)/, $since), 0, 'nothing is logged');
}

# --- a failure is logged when it begins and when it ends, with the database's name; the others are swept
$since = -s $node->logfile;
$node->safe_psql('a', q{CREATE TRIGGER t BEFORE INSERT ON idem.inflight FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()});
$node->wait_for_log(qr/idem sweeper.*ERROR:  cannot use table "idem.inflight"/, $since);
wait_for_sweeps('b', 3);
is(times_logged(qr/idem sweeper.*ERROR:/, $since), 1, 'a failure is logged once');
is(times_logged(qr/CONTEXT:  sweeping database "a"/, $since), 1, 'with the name of the database');
$node->safe_psql('a', 'DROP TRIGGER t ON idem.inflight');
$node->wait_for_log(qr/idem sweeper.*LOG:  background sweep works again/, $since);
make_lease('a');
becomes_free('a', 'swept again');
is(times_logged(qr/works again/, $since), 1, 'its end is logged once');

# --- no free slot
$node->append_conf('postgresql.conf', "max_worker_processes = 1\nmax_parallel_workers = 0\nmax_logical_replication_workers = 0");
make_lease('a');
$since = -s $node->logfile;
$node->restart;
$node->wait_for_log(qr/could not register background process/, $since);
$later = $node->safe_psql('postgres', q{SELECT clock_timestamp() + interval '3 seconds'});
$node->poll_query_until('postgres', "SELECT clock_timestamp() > '$later'");
is(times_logged(qr/could not register background process/, $since), 1, 'no free slot: logged once');
is(times_logged(qr/Consider increasing the configuration parameter "max_worker_processes"/, $since), 1, 'with what helps');
is($node->safe_psql('a', q{SELECT outcome FROM idem_claim('s', 'session')}), 'claimed', 'sessions do not notice');
$node->append_conf('postgresql.conf', 'max_worker_processes = 0');
$node->restart;
is($node->safe_psql('a', q{SELECT worker_runs FROM idem.health}), 'f', 'none even for the launcher: the health view says so');
$node->append_conf('postgresql.conf', 'max_worker_processes = 8');
$node->restart;
becomes_free('a', 'a slot again');

done_testing();

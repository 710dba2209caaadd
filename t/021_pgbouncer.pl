# The main flows through PgBouncer in transaction mode, with fewer connections to
# the server than clients: a client's transactions land in any server process.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/drivers";
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Drivers;

my ($pgbouncer) = grep { -x $_ } map { "$_/pgbouncer" } split(/:/, $ENV{PATH}), '/usr/sbin';
plan skip_all => 'no pgbouncer (package pgbouncer)' if !defined $pgbouncer;

# Prepared statements that outlive a transaction came with 1.21.
my ($major, $minor) = `$pgbouncer --version` =~ /PgBouncer (\d+)\.(\d+)/;
my $prepared = $major > 1 || $minor >= 21;
note "PgBouncer $major.$minor" . ($prepared ? '' : ', without prepared statements');

my $node = drivers_new_node('pgbouncer');
my $host = $node->host;
my $port = PostgreSQL::Test::Cluster::get_free_port();
my $dir = $node->basedir;
my $ini = "$dir/pgbouncer.ini";
my $user = getpwuid($>);
append_to_file($ini, qq{
[databases]
postgres = host=$host port=@{[ $node->port ]} user=$user
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = $port
unix_socket_dir = $host
auth_type = any
pool_mode = transaction
default_pool_size = 2
logfile = $dir/pgbouncer.log
ignore_startup_parameters = extra_float_digits
} . ($prepared ? "max_prepared_statements = 100\n" : ''));

my $pooler = IPC::Run::start([ $pgbouncer, '-q', $ini ], '<', \undef, '>', '/dev/null', '2>', "$dir/pgbouncer.err");
END
{
	local $?;
	$pooler->kill_kill if $pooler;
}
my $pooled = "host=$host port=$port dbname=postgres user=$user";
my $up = 0;
foreach (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
{
	last if $up = IPC::Run::run([ 'psql', '-XAtc', 'SELECT 1', $pooled ], '>', \my $out, '2>', \my $err);
	select(undef, undef, undef, 0.1);
}
$up or BAIL_OUT('PgBouncer did not start: ' . slurp_file("$dir/pgbouncer.err"));

drivers_run($_, $host, $port, $prepared ? 'pooled' : 'unprepared') foreach drivers_names();

# --- twenty clients on two connections, each key by many of them

foreach my $mode ('simple', 'extended', $prepared ? 'prepared' : ())
{
	# a thread a client: to prepare a statement, pgbench waits, and so would all of a thread's clients
	my $script = "$dir/$mode.sql";
	my ($out, $err);
	append_to_file($script, qq{
\\set n random(1, 50)
BEGIN;
SELECT outcome = 'claimed' AS mine FROM idem_claim('payments', '$mode ' || :n, wait => '10 s') \\gset
\\if :mine
INSERT INTO payment VALUES ('$mode ' || :n, 1);
SELECT idem_complete('payments', '$mode ' || :n);
\\endif
COMMIT;
});
	my $ok = IPC::Run::run([ 'pgbench', '-n', '-c', '20', '-j', '20', '-t', '50', '-M', $mode, '-f', $script, $pooled ],
		'>', \$out, '2>', \$err, IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
	ok($ok, "$mode protocol, twenty clients: no error") or diag $err;
	is($node->safe_psql('postgres', qq{
		SELECT count(*) = 50 AND count(DISTINCT key) = 50 FROM payment WHERE key LIKE '$mode %'}),
		't', "$mode protocol, twenty clients: each key once");
}

is($node->safe_psql('postgres', q{SELECT key FROM payment WHERE key NOT LIKE '% batch' GROUP BY key HAVING count(*) > 1}),
	'', 'no key was paid twice');
is($node->safe_psql('postgres', q{SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'}), '0',
	'no transaction is left open');

done_testing();

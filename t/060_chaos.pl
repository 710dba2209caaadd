# A minute of scripts/chaos, and shorter runs that must fail: servers that
# crash and fail over, clients that are stopped and cut off.

use strict;
use warnings;
use File::Basename qw(dirname);
use FindBin;
use PostgreSQL::Test::Utils;
use Test::More;

# Debian's python3 has Debian's psycopg2; another one may come first in PATH
my ($python) = grep { system("$_ -c 'import psycopg2' 2>/dev/null") == 0 } ('/usr/bin/python3', 'python3');
plan skip_all => 'python3-psycopg2 is not installed' if !$python;

chomp(my $bin = `pg_config --bindir`);
my $runs = 0;

# The last line, and all lines.
sub chaos
{
	my @options = @_;
	my $work = "$PostgreSQL::Test::Utils::tmp_check/chaos." . ++$runs;

	my $out = `'$python' -B '$FindBin::RealBin/../scripts/chaos.d/main.py' --bin '$bin' --work '$work' @options 2>&1`;
	my $status = $? >> 8;
	my ($last) = $out =~ /(.*)\n\z/;
	return ("$last, $status", $out);
}

my ($verdict, $out) = chaos('--seconds 60');
is($verdict, 'exactly once: yes, 0', 'everything took effect exactly once') ? note($out) : diag($out);
foreach my $fault ('failover', 'immediate stop', 'SIGKILL', 'pg_terminate_backend', 'SIGSTOP', 'cut off', 'lock table full',
	'ID001 trapped', 'statement_timeout', 'idle in transaction', 'synchronous_commit = off', 'savepoint', 'sweep')
{
	like($out, qr/^ *[1-9]\d*  .*\Q$fault\E/m, "injected: $fault");
}

# The judge is no yes-man: without idem, and with holders that ignore the fence
foreach my $broken ('plain', 'fence')
{
	($verdict, $out) = chaos("--seconds 6 --break $broken");
	is($verdict, 'exactly once: no, 1', "$broken: things happened twice");
	like($out, qr/took effect 2 times/, "$broken: and the judge says what") or diag($out);
}

done_testing();

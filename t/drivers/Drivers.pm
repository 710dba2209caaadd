# What 020_drivers.pl and 021_pgbouncer.pl share: the programs in this directory
# and how to run them. A program prints TAP; each of its tests becomes one here.

package Drivers;

use strict;
use warnings;
use Exporter 'import';
use File::Basename;
use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;

our @EXPORT = qw(drivers_new_node drivers_names drivers_run drivers_snippets);

my $dir = dirname(__FILE__);

# Each driver: a sub that returns the command to run, or what is missing.
my @drivers = (
	[ 'libpq', \&libpq ],
	[ 'psycopg2', sub { python('psycopg2') } ],
	[ 'psycopg', sub { python('psycopg') } ],
	[ 'jdbc', \&jdbc ],
	[ 'node-postgres', \&node_postgres ]);

sub runs
{
	my ($out, $err);
	return eval { IPC::Run::run([@_], '<', \undef, '>', \$out, '2>', \$err) };
}

sub libpq
{
	my $program = "$PostgreSQL::Test::Utils::tmp_check/flows_libpq";
	my $probe = "$PostgreSQL::Test::Utils::tmp_check/libpq_probe.c";
	chomp(my $include = `pg_config --includedir`);
	chomp(my $lib = `pg_config --libdir`);
	my @cc = ('cc', '-Wall', "-I$include", '-I/usr/include/postgresql');
	my @libs = ("-L$lib", "-Wl,-rpath,$lib", '-lpq');

	unlink $probe;
	append_to_file($probe, "#include <libpq-fe.h>\nint main(void) { return PQlibVersion() == 0; }\n");
	runs(@cc, '-o', $program, $probe, @libs) or return 'no C compiler or no libpq headers (libpq-dev)';
	system(@cc, '-o', $program, "$dir/flows_libpq.c", @libs) == 0 or die 'flows_libpq.c does not compile';
	return [$program];
}

# The first Python that has the module.
sub python
{
	my ($module) = @_;
	my @found = grep { runs($_, '-c', "import $module") } ('python3', '/usr/bin/python3');
	return @found ? [ $found[0], "$dir/flows_psycopg.py", $module ] : "no Python with $module (python3-$module)";
}

sub jdbc
{
	my $jar = '/usr/share/java/postgresql.jar';
	runs('javac', '-version') or return 'no JDK (default-jdk-headless)';
	-e $jar or return "no $jar (libpostgresql-jdbc-java)";
	return [ 'java', '-XX:TieredStopAtLevel=1', '-cp', $jar, "$dir/FlowsJdbc.java" ];
}

sub node_postgres
{
	runs('node', '-e', '') or return 'no node (nodejs)';
	foreach my $path ($ENV{NODE_PATH} // '', '/usr/share/nodejs')
	{
		my @command = ('env', "NODE_PATH=$path", 'node');
		return [ @command, "$dir/flows_pg.js" ] if runs(@command, '-e', 'require("pg")');
	}
	return 'no module pg (node-pg, or npm install pg and NODE_PATH)';
}

# A running server with what the programs need; JDBC needs TCP.
sub drivers_new_node
{
	my ($name) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name);
	# drivers make bytes of text in an SQL_ASCII database, which LANG=C would give
	$node->init(extra => [ '--encoding=UTF8', '--locale=C.UTF-8' ]);
	$node->append_conf('postgresql.conf', "listen_addresses = '127.0.0.1'");
	$node->start;
	$node->safe_psql('postgres', slurp_file("$dir/drivers.sql"));
	return $node;
}

sub drivers_names
{
	return map { $_->[0] } @drivers;
}

# Runs a driver's program: $path is direct, pooled or unprepared.
sub drivers_run
{
	my ($driver, $host, $port, $path) = @_;
	my ($entry) = grep { $_->[0] eq $driver } @drivers;
	my $command = $entry->[1]->();
	my ($out, $err, $seen, $plan) = ('', '', 0, -1);

  SKIP:
	{
		skip "$driver: $command", 1 if !ref $command;

		local $ENV{PGHOST} = $host;
		local $ENV{PGPORT} = $port;
		local $ENV{PGUSER} = getpwuid($>);
		local $ENV{PGDATABASE} = 'postgres';
		my $ok = IPC::Run::run([ @$command, $driver, $path ], '<', \undef, '>', \$out, '2>', \$err,
			IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
		foreach my $line (split /\n/, $out)
		{
			if ($line =~ /^(not )?ok \d+ - (.*)/)
			{
				$seen++;
				ok(!defined $1, "$driver: $2");
			}
			elsif ($line =~ /^1\.\.(\d+)/)
			{
				$plan = $1;
			}
			else
			{
				diag($line) if $line =~ /^# got/;
				note($line);
			}
		}
		# what its tests found was counted above; this is about the program
		is($plan, $seen, "$driver: ran to its end") or diag $err;
	}
}

# What the programs mark as the README's, by file.
sub drivers_snippets
{
	my %snippets;
	foreach my $file (glob "$dir/*")
	{
		next if $file =~ /\.pm$/;
		$snippets{ basename($file) } = $1 if slurp_file($file) =~ m{\[README\b[^\n]*\n(.*?)\n[^\n]*README\]}s;
	}
	return \%snippets;
}

1;

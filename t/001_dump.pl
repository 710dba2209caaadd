# A database with keys in it is dumped and restored and must answer the same.
# Needs pg_dump, pg_restore, pg_upgrade and other servers, none of which SQL can
# start.

use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# Not the encoding of whatever locale the tests run in.
my @initdb = ('--encoding=UTF8', '--locale=C.UTF-8');

# The source may be of an older major: its programs are in IDEM_OLD_INSTALL/bin,
# with idem installed (scripts/matrix --upgrade has this test run that way).
my $old = $ENV{IDEM_OLD_INSTALL};
my $node = PostgreSQL::Test::Cluster->new('source', $old ? (install_path => $old) : ());
$node->init(extra => \@initdb);
$node->start;
my $dir = $node->basedir;

# A role whose name has to be quoted twice over, and one that will be dropped.
$node->safe_psql('postgres', q{
	CREATE ROLE "Quoted ""R'ole";
	CREATE ROLE stranger;
	CREATE DATABASE source;
});

# Not the public schema, and a name to be quoted, so that nothing is found by luck.
my $schema = q{"my Ext"};
$node->safe_psql('source', qq{
	CREATE SCHEMA $schema;
	CREATE EXTENSION idem SCHEMA $schema;
	GRANT USAGE ON SCHEMA $schema TO PUBLIC;
	ALTER DATABASE source SET search_path = $schema, public;
	CREATE ROLE gone;
});

$node->safe_psql('source', <<'SQL');
INSERT INTO idem.scope (name) VALUES ('to be deleted');
DELETE FROM idem.scope;			-- ids do not start at 1, and there is something to audit
INSERT INTO idem.scope (name) VALUES ('plain');
INSERT INTO idem.scope (name, owner, operators)
	VALUES ('quoted', '"Quoted ""R''ole"', '"Quoted ""R''ole"');
INSERT INTO idem.scope (name, retention, archive, archive_retention, keep_request)
	VALUES ('for ever', NULL, 'none', NULL, 'always');
INSERT INTO idem.scope (name, archive, replay_window) VALUES ('full', 'full', '30 days');
INSERT INTO idem.scope (name, lease, on_expiry, max_attempts, retry_within, include, exclude)
	VALUES ('leased', '1 hour', 'retry', 3, '6 hours', '{/order,/items/*/sku}', '{/order/note}');
INSERT INTO idem.scope (name, owner) VALUES ('orphan', 'gone');
UPDATE idem.scope SET retention = '36 hours' WHERE name = 'leased';

DO $$
DECLARE
	a idem_answer;
BEGIN
	PERFORM idem_claim('plain', 'replay', '{"amount": 1}');
	PERFORM idem_complete('plain', 'replay', '{"ok":  true}', status_code => 201,
						  headers => '{"a": ["b", "c"]}', body => '\x00ff5c');
	PERFORM idem_claim('plain', 'failure');
	PERFORM idem_fail('plain', 'failure', '"no money"', status_code => 402);
	PERFORM idem_claim('plain', E'tab\there \\ and "quote" \u20ac');
	PERFORM idem_complete('plain', E'tab\there \\ and "quote" \u20ac',
						  (SELECT json_agg(sha256(i::text::bytea)) FROM generate_series(1, 2000) AS i));
	PERFORM idem_once('plain', 'expired', '{"n": 1}');
	PERFORM idem_once('plain', 'unswept');
	PERFORM idem_once('for ever', 'old', '{"n": 1}');
	PERFORM idem_once('full', 'archived', '{"n": 1}');
	PERFORM idem_once('quoted', 'by an operator');
	PERFORM idem_once('orphan', 'settled');

	a := idem_claim('leased', 'running', '{"order": {"id": 7, "note": "x"}}', claimant => 'worker 1');
	a := idem_claim('leased', 'over', '{"order": 1}');
	PERFORM idem_checkpoint('leased', 'over', a.token, 'charged', '{"charge": 17}');
	a := idem_claim('leased', 'released', '{"order": 2}');
	PERFORM idem_release('leased', 'released', a.token);
	a := idem_claim('leased', 'spent', '{"order": 3}');
	a := idem_claim('leased', 'doubt', '{"order": 4}');
	PERFORM idem_unknown('leased', 'doubt', a.token, '{"why": "timeout"}');
END
$$;
SELECT idem_claim('plain', 'replay', '{"amount": 2}');		-- a mismatch, audited

SELECT idem_sweep();		-- finds nothing yet, but leaves its row

-- time passes
UPDATE idem.result SET completed_at = completed_at - interval '2 days' WHERE key IN ('expired', 'archived', 'old');
UPDATE idem.result SET completed_at = completed_at - interval '200 days' WHERE key = 'unswept';
UPDATE idem.inflight SET lease_until = now() WHERE key = 'over';
UPDATE idem.inflight SET lease_until = now(), attempt = 3 WHERE key = 'spent';
-- what a sweep would do
INSERT INTO idem.archive SELECT *, now() FROM idem.result WHERE key = 'archived';
DELETE FROM idem.result WHERE key = 'archived';
SQL
my $gone = $node->safe_psql('postgres', q{SELECT 'gone'::regrole::oid});
$node->safe_psql('postgres', 'DROP ROLE gone');

# What is asked of every copy. It claims keys, so it is always rolled back.
my @cases = (
	[ plain => 'replay', q{, '{"amount": 1.0}'} ],
	[ plain => 'replay', q{, '{"amount": 2}'} ],
	[ plain => 'replay', q{, '{"amount": 3}'} ],
	[ plain => 'failure', '' ],
	[ plain => q{tab' || E'\t' || 'here \\ and "quote" €}, '' ],
	[ plain => 'expired', q{, '{"n": 1}'} ],
	[ plain => 'unswept', '' ],
	[ plain => 'new', '' ],
	[ 'for ever' => 'old', q{, '{"n": 1}'} ],
	[ full => 'archived', q{, '{"n": 1}'} ],
	[ full => 'archived', q{, '{"n": 2}'} ],
	[ quoted => 'by an operator', '' ],
	[ quoted => 'new', '' ],
	[ leased => 'running', q{, '{"order": {"id": 7, "note": "y"}}'} ],
	[ leased => 'running', q{, '{"order": {"id": 8, "note": "x"}}'} ],
	[ leased => 'running', q{, claimant => 'worker 1'} ],
	[ leased => 'over', q{, '{"order": 1}'} ],
	[ leased => 'released', q{, '{"order": 2}'} ],
	[ leased => 'spent', q{, '{"order": 3}'} ],
	[ leased => 'doubt', q{, '{"order": 4}'} ],
	[ leased => 'new', q{, '{"order": 5}'} ],
	[ orphan => 'settled', '' ]);

my $battery = "BEGIN;\n";
foreach my $case (@cases)
{
	my ($scope, $key, $more) = @$case;
	# a token has grown beyond the one in the row, or is the row's
	$battery .= qq{
		SELECT \$q\$$scope, $key$more:\$q\$, c.outcome, c.attempt, c.state, c.status_code, c.headers, md5(c.response::text),
			   c.body, c.request, c.recovery_point, c.checkpoint, c.completed_at - o.completed_at, c.retry_after > '0',
			   CASE WHEN c.token > o.token THEN 'token grown' WHEN c.token = o.token THEN 'token kept'
					WHEN c.token < o.token THEN 'TOKEN SHRUNK' ELSE 'no token' END
		FROM (SELECT '$key' AS key) AS k
		LEFT JOIN idem.operation AS o ON o.scope = '$scope' AND o.key = k.key,
			 LATERAL $schema.idem_claim('$scope', k.key$more) AS c;\n};
}
$battery .= "ROLLBACK;\n";

my @tables = (
	'scope ORDER BY id', 'inflight ORDER BY scope_id, key', 'result ORDER BY scope_id, key',
	'archive ORDER BY scope_id, key', 'audit ORDER BY at, event, key', 'sweep');

# Everything that must be the same in a copy: rows, answers, the next id.
sub content
{
	my ($server, $database) = @_;
	return join "\n", map { $server->safe_psql($database, "SELECT CASE WHEN length(t::text) > 2000 THEN md5(t::text) ELSE t::text END FROM idem.$_") }
		map { s/^(\w+)/$1 AS t/r } @tables;
}

sub answers
{
	my ($server, $database) = @_;
	return $server->safe_psql($database, $battery);
}

my $content = content($node, 'source');
my $answers = answers($node, 'source');
note $answers;
is(content($node, 'source'), $content, 'asking changes nothing that is dumped');

# The battery would prove nothing if it asked for one thing only.
foreach my $outcome (qw(claimed replayed in_progress mismatch expired unknown))
{
	like($answers, qr/:\|$outcome\|/, "some key of the source answers $outcome");
}
like($answers, qr/over.*\|claimed\|2\|.*"order": 1.*\|charged\|\{"charge": 17\}.*\|token grown/, 'a takeover gets attempt, request and checkpoint');
unlike($answers, qr/SHRUNK/, 'no token shrinks');
is($node->safe_psql('source', q{SELECT string_agg(event, ',' ORDER BY at, event) FROM idem.audit}),
	'scope deleted,scope changed,unknown,mismatch', 'the audit of the source');

# What holds in a copy however it was made.
sub check_copy
{
	my ($server, $database, $how) = @_;

	$server->safe_psql('postgres', "ALTER DATABASE $database SET search_path = $schema, public");
	is(content($server, $database), $content, "$how: all rows are the same, and no audit row is new");
	is(answers($server, $database), $answers, "$how: all answers are the same");
	is($server->safe_psql($database, q{
			WITH new AS (INSERT INTO idem.scope (name) VALUES ('next') RETURNING id)
			SELECT id = (SELECT max(id) + 1 FROM idem.scope) FROM new}),
		't', "$how: ids continue");
	is($server->safe_psql($database, q{
			SELECT idem_claim('plain', 'replay', '{"amount": 2}');
			SELECT count(*) FROM idem.audit WHERE event = 'mismatch'}) =~ s/.*\n//sr,
		'1', "$how: a mismatch that was noted is not noted again");
	is($server->safe_psql($database, q{
			BEGIN;
			SET LOCAL ROLE "Quoted ""R'ole";
			SELECT idem_once('quoted', 'as the owner'), idem_forget('quoted', 'by an operator');
			ROLLBACK}),
		't|t', "$how: the owner with the odd name may claim and operate");
	foreach my $scope ('quoted', 'orphan')
	{
		my ($rc, $out, $err) = $server->psql($database, qq{
			\\set VERBOSITY sqlstate
			SET ROLE stranger;
			SELECT idem_once('$scope', 'as a stranger')});
		like($err, qr/42501/, "$how: a stranger may not use scope $scope");
	}
}

sub restore
{
	my ($database, $how, @commands) = @_;

	$node->safe_psql('postgres', "CREATE DATABASE $database");
	$node->command_ok($_, "$how: $_->[0]") foreach @commands;
	check_copy($node, $database, $how);
}

my @psql = ('psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-o', '/dev/null');

restore('plain', 'plain',
	[ 'pg_dump', '-f', "$dir/plain.sql", 'source' ],
	[ @psql, '-f', "$dir/plain.sql", 'plain' ]);
like(slurp_file("$dir/plain.sql"), qr/set_config\('search_path', '', false\)/, 'the restore ran under an empty search_path');

restore('custom', 'custom format, with two jobs, then over itself',
	[ 'pg_dump', '-Fc', '-f', "$dir/custom.dump", 'source' ],
	[ 'pg_restore', '-j2', '-d', 'custom', "$dir/custom.dump" ],
	[ 'pg_restore', '--clean', '--if-exists', '-d', 'custom', "$dir/custom.dump" ]);

restore('inserts', 'INSERT statements in one transaction',
	[ 'pg_dump', '--inserts', '-f', "$dir/inserts.sql", 'source' ],
	[ @psql, '-1', '-f', "$dir/inserts.sql", 'inserts' ]);

restore('data', 'data only, into an extension that is there',
	[ 'pg_dump', '--data-only', '-f', "$dir/data.sql", 'source' ],
	[ @psql, '-c', "CREATE SCHEMA $schema; GRANT USAGE ON SCHEMA $schema TO PUBLIC; CREATE EXTENSION idem SCHEMA $schema", 'data' ],
	[ @psql, '-f', "$dir/data.sql", 'data' ]);


# A cluster where roles have other OIDs. A dump has only the number of a role
# that is gone. Here it is nobody's; if it were somebody's, that role would own
# the scope, and no restore can tell.
my $other = PostgreSQL::Test::Cluster->new('other');
$other->init(extra => \@initdb);
$other->start;
$other->safe_psql('postgres', 'CREATE ROLE one_more');
$node->command_ok([ 'pg_dumpall', '--roles-only', '-f', "$dir/roles.sql" ], 'pg_dumpall of the roles');
$other->safe_psql('postgres', join "\n", grep { /"Quoted|stranger/ } split /\n/, slurp_file("$dir/roles.sql"));
$other->safe_psql('postgres', 'CREATE DATABASE plain');
$other->command_ok([ @psql, '-f', "$dir/plain.sql", 'plain' ], 'another cluster: psql');
isnt($other->safe_psql('postgres', q{SELECT oid FROM pg_roles WHERE rolname ~ 'Quoted'}),
	$node->safe_psql('postgres', q{SELECT oid FROM pg_roles WHERE rolname ~ 'Quoted'}), 'the OIDs differ');
is($other->safe_psql('postgres', "SELECT count(*) FROM pg_roles WHERE oid = $gone"), '0', 'the number of the role that is gone is nobody');
check_copy($other, 'plain', 'another cluster');

# Since late 2026 the minor releases of older majors mark every column of every
# table with a version, which the first releases of newer majors do not know:
# their pg_upgrade refuses any table at all. Without the mark a table is as one
# that is older than the mark.
my $marked = q{SELECT count(*) > 0 FROM pg_attribute WHERE attoptions::text ~ 'pg_attver'};
if ($node->safe_psql('source', $marked) eq 't' && $other->safe_psql('plain', $marked) eq 'f')
{
	note 'columns are unmarked for this pg_upgrade';
	foreach my $database (split /\n/, $node->safe_psql('postgres', 'SELECT datname FROM pg_database WHERE datallowconn'))
	{
		$node->safe_psql($database, q{
			SET allow_system_table_mods = on;
			UPDATE pg_attribute SET attoptions = NULL WHERE attoptions::text ~ 'pg_attver'});
	}
}
$other->stop;

# pg_upgrade makes the objects of an extension one by one, and moves the files
# of its tables.
$node->stop;
my $new = PostgreSQL::Test::Cluster->new('upgraded');
# from 18 on initdb turns checksums on, and pg_upgrade wants them alike
my $checksums = $node->pg_version < 18 && $new->pg_version >= 18;
$new->init(extra => [ @initdb, $checksums ? '--no-data-checksums' : () ]);
chdir $dir or die $!;		# it leaves files behind
$new->command_ok(
	[
		'pg_upgrade', '--no-sync', '-b', $node->config_data('--bindir'), '-B', $new->config_data('--bindir'), '-d', $node->data_dir, '-D', $new->data_dir,
		'-s', $new->host, '-p', $node->port, '-P', $new->port ],
	'pg_upgrade') or note map { slurp_file($_) } glob($new->data_dir . '/pg_upgrade_output.d/*/log/pg_upgrade_dump_*.log');
$new->start;
check_copy($new, 'source', 'pg_upgrade from ' . $node->pg_version);

done_testing();

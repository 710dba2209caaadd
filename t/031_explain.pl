# Whom idem_explain() names as the holder of a key: another session, by its lock or by its
# row, a prepared transaction, one that is asked about on a standby. One session alone
# cannot show any of it.

use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('explain');
$node->init(allows_streaming => 1);
$node->append_conf('postgresql.conf', q{
max_prepared_transactions = 10
timezone = 'UTC'
datestyle = 'ISO, MDY'
});
$node->start;
$node->safe_psql('postgres', q{
	CREATE EXTENSION idem;
	CREATE ROLE asks;
	CREATE ROLE "Holder ""R'ole" LOGIN;
	INSERT INTO idem.scope (name) VALUES ('s'), ('other');
	INSERT INTO idem.scope (name, owner) VALUES ('shared', 'asks');
	GRANT asks TO "Holder ""R'ole";
	CREATE TABLE ledger (entry text);
});

sub explained
{
	my ($key, $scope) = @_;
	return $node->safe_psql('postgres', sprintf(q{SELECT idem_explain('%s', '%s')}, $scope // 's', $key));
}

sub outcome
{
	my ($key) = @_;
	return $node->safe_psql('postgres', "BEGIN; SELECT (idem_claim('s', '$key')).outcome; ROLLBACK");
}

my $time = qr/\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?\+00/;
my $next = qr/Ask again in a second, or claim with wait\. If it never ends, end that transaction: the key is free then\./;
my $free = 'claimed: nothing speaks for the key; a claim would execute as attempt 1.';

my $holder = $node->background_psql('postgres', on_error_stop => 0);
my $pid = $holder->query_safe(q{SET application_name = 'till 7'; SELECT pg_backend_pid()});
my $who = qr/process $pid, application "till 7", since $time/;

# What a session does to a key, in a transaction; what is said of it then, and
# after a rollback.
my @cases = (
	[ 'a key lock' => q{SELECT idem_claim('s', '%s')} ],
	[ 'a key lock of a subtransaction' => q{SAVEPOINT a; SELECT idem_claim('s', '%s')} ],
	[ 'a key lock that outlived its subtransaction' => q{SAVEPOINT a; SELECT idem_claim('s', '%s'); RELEASE a} ],
	[ 'a settled row' => q{SELECT idem_claim('s', '%s'); SELECT idem_complete('s', '%s')} ],
	[ 'a settled row of a subtransaction' => q{INSERT INTO ledger VALUES ('x'); SAVEPOINT a; SAVEPOINT b; SELECT idem_once('s', '%s')} ],
	[ 'a row settled below the claim' => q{SELECT idem_claim('s', '%s'); SAVEPOINT a; SELECT idem_complete('s', '%s')} ],
	[ 'a leased row' => q{SELECT idem_claim('s', '%s', lease => '1 hour')} ],
	[ 'a leased row of a subtransaction' => q{SAVEPOINT a; SELECT idem_claim('s', '%s', lease => '1 hour')} ],
	[ 'a released claim' => q{SELECT idem_claim('s', '%s'); SELECT idem_release('s', '%s')} ],
	[ 'a call' => q{SELECT idem_call('s', '%s', '1', 'upper(text)')} ]);
foreach my $case (@cases)
{
	my ($what, $sql) = @$case;

	$holder->query_safe('BEGIN; ' . $sql =~ s/%s/$what/gr);
	like(explained($what), qr/^in_progress: another transaction is at the key \($who\)\. $next$/, "$what: the holder is named");
	is(outcome($what), 'in_progress', "$what: and a claim answers so");
	is(explained($what, 'other'), $free, "$what: the key of another scope is free") if $what eq 'a key lock';
	$holder->query_safe('ROLLBACK');
	is(explained($what), $free, "$what: rolled back");
}
# a savepoint that was rolled back names nobody
$holder->query_safe(q{BEGIN; INSERT INTO ledger VALUES ('x'); SAVEPOINT a; SELECT idem_once('s', 'undone'), idem_claim('s', 'undone too'); ROLLBACK TO a});
is(explained('undone'), $free, 'a row rolled back to a savepoint');
is(explained('undone too'), $free, 'a claim rolled back to a savepoint');
$holder->query_safe('ROLLBACK');
is($node->safe_psql('postgres', q{SELECT count(*) FROM idem.result}), '0', 'nothing of it was committed');

# --- rows that are there already, and somebody is changing

my $token = $node->safe_psql('postgres', q{SELECT (idem_claim('s', 'row', lease => '1 hour')).token});
$holder->query_safe(qq{BEGIN; SELECT idem_complete('s', 'row', token => $token)});
like(explained('row'), qr/^in_progress: .*\($who\)/, 'a lease being settled: who settles it');
$holder->query_safe('ROLLBACK');
like(explained('row'), qr/^in_progress: attempt 1 holds a lease until $time \(.*, since $time\)\. Ask again then; its holder settles it with its token\.$/,
	'rolled back: who holds the lease, from the row');
$holder->query_safe(qq{BEGIN; SAVEPOINT a; SELECT idem_extend('s', 'row', $token, '2 hours')});
like(explained('row'), qr/^in_progress: .*\($who\)/, 'a heartbeat: who gives it');
$holder->query_safe('ROLLBACK');
$node->safe_psql('postgres', q{UPDATE idem.inflight SET lease_until = now() WHERE key = 'row'});
$holder->query_safe(q{BEGIN; SELECT idem_claim('s', 'row')});
like(explained('row'), qr/^in_progress: .*\($who\)/, 'a takeover by a lock alone: who takes over');
$holder->query_safe('ROLLBACK');
like(explained('row'), qr/^claimed: the lease is over since $time \(attempt 1, .*\); a claim would execute as attempt 2\.$/, 'rolled back: free to be taken over');
$holder->query_safe(q{BEGIN; SELECT idem_claim('s', 'row', lease => '1 hour')});
like(explained('row'), qr/^in_progress: .*\($who\)/, 'a takeover by a lease: who takes over');
$holder->query_safe('COMMIT');
like(explained('row'), qr/^in_progress: attempt 2 holds a lease until $time \(\S+ \(till 7\), since $time\)/, 'committed: user and application from the row');

# --- explaining neither waits nor is in the way of the holder

$holder->query_safe(q{BEGIN; SELECT idem_claim('s', 'busy')});
is($node->safe_psql('postgres', q{
		BEGIN READ ONLY;
		SET LOCAL statement_timeout = '60s';
		SET LOCAL lock_timeout = '1ms';
		SELECT split_part(idem_explain('s', 'busy'), ':', 1);
		SELECT count(*), pg_current_xact_id_if_assigned() FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory';
		COMMIT}),
	"in_progress\n0|", 'no wait, no lock, no xid, in a read-only transaction');
my $other = $node->background_psql('postgres', on_error_stop => 0);
$other->query_safe(q{BEGIN; SELECT idem_explain('s', 'busy'), idem_explain('s', 'not yet')});
$holder->query_safe(q{SELECT idem_complete('s', 'busy'); COMMIT});
is($holder->query_safe(q{SELECT idem_once('s', 'not yet', wait => '0')}), 't', 'who has explained a key, and not ended, is not in the way');
like($other->query_safe(q{SELECT idem_explain('s', 'busy')}), qr/^replayed: it succeeded at $time, and is replayed until $time/, 'and sees what became of it');
$other->query_safe('COMMIT');

# a session that does not say what application it is; and who waits is not the holder
$holder->query_safe(q{SET application_name = ''; BEGIN; SELECT idem_claim('s', 'anonymous')});
$other->query_until(qr/go/, "\\echo go\nSELECT (idem_claim('s', 'anonymous', wait => NULL)).outcome;\n");
$node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted})
	or die 'nobody waits';
like(explained('anonymous'), qr/^in_progress: another transaction is at the key \(process $pid, since $time\)\./, 'no application, and a waiter beside it');
$holder->query_safe('ROLLBACK');
$other->quit;

# --- what a role may see of another's session

$holder->query_safe(q{
	SET application_name = 'secret';
	BEGIN; SELECT idem_claim('shared', 'of another')});
my $said = $node->safe_psql('postgres', q{
	SET SESSION AUTHORIZATION "Holder ""R'ole";
	SELECT idem_explain('shared', 'of another')});
like($said, qr/^in_progress: another transaction is at the key \(process $pid[,)]/, 'a role without rights on statistics: the process');
unlike($said, qr/since/, 'and not what it may not see');
$holder->query_safe('ROLLBACK');
$node->safe_psql('postgres', q{GRANT pg_read_all_stats TO "Holder ""R'ole"});
$holder->query_safe(q{BEGIN; SELECT idem_claim('shared', 'of another')});
like($node->safe_psql('postgres', q{SET SESSION AUTHORIZATION "Holder ""R'ole"; SELECT idem_explain('shared', 'of another')}),
	qr/\(process $pid, application "secret", since $time\)/, 'pg_read_all_stats: all of it');
$holder->query_safe('ROLLBACK');
$node->safe_psql('postgres', q{
	SET SESSION AUTHORIZATION "Holder ""R'ole";
	SET application_name = 'till 8';
	SELECT idem_claim('shared', 'leased', lease => '1 hour')});
like(explained('leased', 'shared'), qr/\(Holder "R'ole \(till 8\), since $time\)/, 'the holder of a lease, whatever its name');

# --- prepared transactions

my %prepared = (
	'settled' => q{SELECT idem_claim('s', '%s'); SELECT idem_complete('s', '%s')},
	'settled below' => q{INSERT INTO ledger VALUES ('x'); SAVEPOINT a; SELECT idem_once('s', '%s')},
	'leased' => q{SELECT idem_claim('s', '%s', lease => '1 hour')},
	'released' => q{SELECT idem_claim('s', '%s'); SELECT idem_release('s', '%s'); INSERT INTO ledger VALUES ('x')});
my %after = ('settled' => 'replayed', 'settled below' => 'replayed', 'leased' => 'in_progress', 'released' => 'claimed');
foreach my $what (sort keys %prepared)
{
	$node->safe_psql('postgres', 'BEGIN; ' . $prepared{$what} =~ s/%s/2pc $what/gr . "; PREPARE TRANSACTION 'the \"$what\" one'");
}
foreach my $when ('prepared', 'after a restart')
{
	$node->restart if $when ne 'prepared';
	foreach my $what (sort keys %prepared)
	{
		like(explained("2pc $what"), qr/^in_progress: another transaction is at the key \(prepared transaction "the "$what" one", since $time\)\. $next$/,
			"$when: $what: the gid is named, and it alone");
	}
}
foreach my $what (sort keys %prepared)
{
	$node->safe_psql('postgres', "COMMIT PREPARED 'the \"$what\" one'");
	like(explained("2pc $what"), qr/^$after{$what}: (?!another transaction)/, "$what: after COMMIT PREPARED");
}

# --- on a standby: what has been replayed, and it never decides

$node->backup('base');
my $standby = PostgreSQL::Test::Cluster->new('explain_standby');
$standby->init_from_backup($node, 'base', has_streaming => 1);
$standby->start;
$node->wait_for_catchup($standby, 'replay', $node->lsn('insert'));
like($standby->safe_psql('postgres', q{SELECT idem_explain('s', '2pc settled')}), qr/^replayed: it succeeded at $time/, 'standby: a settled key');
like($standby->safe_psql('postgres', q{SELECT idem_explain('s', 'row')}), qr/^in_progress: attempt 2 holds a lease until $time \(\S+ \(till 7\)/, 'standby: a lease');
is($standby->safe_psql('postgres', q{SELECT idem_explain('s', 'nothing')}),
	"$free (As far as this standby knows; only the primary decides.)", 'standby: nothing');
eval { $holder->quit };
$holder = $node->background_psql('postgres', on_error_stop => 0);
$holder->query_safe(q{BEGIN; SELECT idem_once('s', 'on the primary'); SAVEPOINT a; SELECT idem_once('s', 'below on the primary')});
$node->safe_psql('postgres', q{SELECT pg_switch_wal()});
$node->wait_for_catchup($standby, 'replay', $node->lsn('insert'));
foreach my $key ('on the primary', 'below on the primary')
{
	like($standby->safe_psql('postgres', qq{SELECT idem_explain('s', '$key')}),
		qr/^in_progress: another transaction is at the key \(the primary knows which\)/, "standby: $key: not committed there");
}
$holder->query_safe('COMMIT');
$node->wait_for_catchup($standby, 'replay', $node->lsn('insert'));
like($standby->safe_psql('postgres', q{SELECT idem_explain('s', 'below on the primary')}), qr/^replayed: it succeeded/, 'standby: committed');
$holder->quit;

done_testing();

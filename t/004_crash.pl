# What survives a crash, a restart and the death of a backend: the server has to
# be stopped and killed for it.

use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('crash');
$node->init;
# Nobody but a commit that insists flushes the log: the WAL writer will be
# stopped, the others have nothing to do.
$node->append_conf('postgresql.conf', q{
max_prepared_transactions = 10
restart_after_crash = on
autovacuum = off
bgwriter_lru_maxpages = 0
checkpoint_timeout = 1h
wal_writer_delay = 10s
});
$node->start;
$node->safe_psql('postgres', q{
	CREATE EXTENSION idem;
	INSERT INTO idem.scope (name) VALUES ('s');
	INSERT INTO idem.scope (name) VALUES ('quarantined');
	CREATE TABLE plain (what text);
});

sub outcome
{
	my ($key) = @_;
	return $node->safe_psql('postgres', "SELECT coalesce((idem_status('s', '$key')).outcome, 'free')");
}

sub answer
{
	my ($key) = @_;
	return $node->safe_psql('postgres', "BEGIN; SELECT (idem_claim('s', '$key')).outcome; ROLLBACK");
}

# SIGKILL to a process of the server: all others follow, and it recovers.
sub crash
{
	my ($pid) = @_;

	my $started = $node->safe_psql('postgres', q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'checkpointer'});
	kill 'KILL', $pid;
	$node->poll_query_until('postgres', qq{
		SELECT pid <> $started FROM pg_stat_activity WHERE backend_type = 'checkpointer'})
		or die 'the server did not come back';
}

# --- an intent is on disk when its COMMIT answers, whatever synchronous_commit says

my $walwriter = $node->safe_psql('postgres', q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'});
kill('STOP', $walwriter) == 1 or die "could not stop the WAL writer: $!";

# Runs a statement in a transaction without synchronous commit; was its commit
# flushed when it answered?
sub is_flushed
{
	my ($statement) = @_;
	my $out = $node->safe_psql('postgres', qq{
		SET synchronous_commit = off;
		BEGIN;
		$statement;
		SELECT pg_current_wal_insert_lsn() AS lsn \\gset
		COMMIT;
		SELECT 'flushed', pg_current_wal_flush_lsn() > :'lsn'});
	return $out =~ /^flushed\|t/m ? 'flushed' : 'not flushed';
}

my $token = q{(SELECT token FROM idem.inflight WHERE key = '%s')};
my $over = q{UPDATE idem.inflight SET lease_until = now() WHERE key = '%s'};
my @durable = (
	[ 'a claim' => 'claim', q{SELECT idem_claim('s', '%s', lease => '1 hour')} ],
	[ 'a takeover' => 'takeover', q{SELECT idem_claim('s', '%s', lease => '1 hour')}, $over ],
	[ 'the holder asking again' => 'again', q{SELECT idem_claim('s', '%s', lease => '2 hours', claimant => 'me')} ],
	[ 'a heartbeat' => 'extend', qq{SELECT idem_extend('s', '%s', $token, '3 hours')} ],
	[ 'a checkpoint' => 'checkpoint', qq{SELECT idem_checkpoint('s', '%s', $token, 'charged')} ],
	[ 'a doubt' => 'unknown', qq{SELECT idem_unknown('s', '%s', $token)} ],
	[ 'a recovery' => 'recover', q{SELECT * FROM idem_recover('s', lease => '1 hour')}, $over ],
	[ 'a claim in a subtransaction' => 'sub', q{SAVEPOINT a; SELECT idem_claim('s', '%s', lease => '1 hour'); RELEASE a} ],
	[ 'a claim before SET' => 'set', q{SELECT idem_claim('s', '%s', lease => '1 hour'); SET LOCAL synchronous_commit = off} ]);

# what the later ones change is there before
$node->safe_psql('postgres', qq{
	SELECT idem_claim('s', '$_', lease => '1 hour', claimant => 'me')}) foreach qw(takeover again extend checkpoint unknown recover);

foreach my $case (@durable)
{
	my ($what, $key, $statement, $before) = @$case;

	$node->safe_psql('postgres', $before =~ s/%s/$key/r) if $before;
	is(is_flushed($statement =~ s/%s/$key/gr), 'flushed', "$what is flushed");
	is($node->safe_psql('postgres', 'SHOW synchronous_commit'), 'on', "(the default is unchanged)") if $key eq 'claim';
}
is($node->safe_psql('postgres', q{
		SET synchronous_commit = off;
		SELECT (idem_claim('s', 'session', lease => '1 hour')).outcome;
		SHOW synchronous_commit}),
	"claimed\noff", 'the setting of the session is what it was');

# What does not precede an outside effect is not, which also shows that the
# comparison can fail. It comes last: a later flush would take it along.
is(is_flushed(q{SELECT idem_once('s', 'once')}), 'not flushed', 'what is claimed and settled at once is not');
is(is_flushed(q{INSERT INTO plain VALUES ('lost')}), 'not flushed', 'nor is a plain row');
my $before = $node->safe_psql('postgres', q{SELECT key, state, attempt, token, lease_until, recovery_point FROM idem.inflight ORDER BY key});

crash($walwriter);

is($node->safe_psql('postgres', q{SELECT count(*) FROM plain}), '0', 'crash: the plain row is lost');
is(outcome('once'), 'free', 'crash: so is the key that was settled beside it');
is($node->safe_psql('postgres', q{SELECT key, state, attempt, token, lease_until, recovery_point FROM idem.inflight ORDER BY key}),
	$before, 'crash: every intent is there');
is(answer('claim'), 'in_progress', 'crash: a running lease still keeps others out');
is(answer('unknown'), 'unknown', 'crash: a doubt is still one');

# --- an immediate stop

$node->safe_psql('postgres', q{
	SET synchronous_commit = off;
	SELECT idem_claim('s', 'stopped', lease => '1 hour')});
$node->stop('immediate');
$node->start;
is(answer('stopped'), 'in_progress', 'immediate stop: a leased claim is there');

# --- prepared transactions hold their keys over a restart

my %prepared = (
	'settled' => q{SELECT idem_claim('s', '%s'); INSERT INTO plain VALUES ('%s'); SELECT idem_complete('s', '%s', '{"ok": true}')},
	'settled below' => q{SELECT idem_claim('s', '%s'); SAVEPOINT a; SELECT idem_complete('s', '%s', '{"ok": true}')},
	'leased' => q{SELECT idem_claim('s', '%s', lease => '1 hour')},
	'released' => q{SELECT idem_claim('s', '%s'); SELECT idem_release('s', '%s'); INSERT INTO plain VALUES ('%s')},
	'by token' => qq{SELECT idem_complete('s', '%s', '{"ok": true}', $token)});
my %after = (
	'settled' => 'replayed', 'settled below' => 'replayed', 'leased' => 'in_progress', 'released' => 'claimed', 'by token' => 'replayed');

foreach my $end ('COMMIT', 'ROLLBACK')
{
	foreach my $what (sort keys %prepared)
	{
		$node->safe_psql('postgres', "SELECT idem_claim('s', '$what $end', lease => '1 hour')") if $what eq 'by token';
		$node->safe_psql('postgres', "BEGIN; " . $prepared{$what} =~ s/%s/$what $end/gr . "; PREPARE TRANSACTION '$what $end'");
	}
}
my ($rc, $out, $err) = $node->psql('postgres', q{
	\set VERBOSITY sqlstate
	BEGIN; SELECT idem_claim('s', 'unsettled'); PREPARE TRANSACTION 'unsettled'});
like($err, qr/ID003/, 'an unsettled claim cannot be prepared');

sub check_prepared
{
	my ($when) = @_;

	foreach my $what (sort keys %prepared)
	{
		is(answer("$what $_"), 'in_progress', "$when: $what: others are kept out") foreach ('COMMIT', 'ROLLBACK');
	}
	my ($rc, $out, $err) = $node->psql('postgres', q{
		\set VERBOSITY sqlstate
		SELECT idem_once('s', 'settled COMMIT', wait => '0')});
	like($err, qr/55P03/, "$when: idem_once does not get in");
	is($node->safe_psql('postgres', q{SELECT gid FROM idem.holder WHERE pid IS NULL ORDER BY gid}),
		"released COMMIT\nreleased ROLLBACK", "$when: only what speaks by no row has a lock");
}
check_prepared('before the restart');
$node->stop('immediate');
$node->start;
check_prepared('after a crash');
$node->restart;
check_prepared('after a restart');

foreach my $what (sort keys %prepared)
{
	$node->safe_psql('postgres', "COMMIT PREPARED '$what COMMIT'");
	is(answer("$what COMMIT"), $after{$what}, "$what: after COMMIT PREPARED");
	$node->safe_psql('postgres', "ROLLBACK PREPARED '$what ROLLBACK'");
	is(answer("$what ROLLBACK"), $what eq 'by token' ? 'in_progress' : 'claimed', "$what: after ROLLBACK PREPARED");
}
is($node->safe_psql('postgres', q{SELECT string_agg(what, ',' ORDER BY what) FROM plain}), 'released COMMIT,settled COMMIT',
	'what was done beside the keys agrees');
is($node->safe_psql('postgres', q{SELECT count(*) FROM idem.holder}), '0', 'no lock is left');

# --- a backend dies

my $victim = $node->background_psql('postgres', on_error_stop => 0);
my $pid = $victim->query_safe(q{SELECT pg_backend_pid()});
$victim->query_safe(q{BEGIN; SELECT idem_claim('s', 'open'); SELECT idem_claim('s', 'done'); SELECT idem_complete('s', 'done')});
is(answer('open'), 'in_progress', 'a backend holds a key');
is($node->safe_psql('postgres', q{SELECT count(*) FROM idem.holder WHERE pid = } . $pid), '1', 'and its lock shows');
$node->safe_psql('postgres', "SELECT pg_terminate_backend($pid)");
$node->poll_query_until('postgres', "SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = $pid");
is(answer('open'), 'claimed', 'terminated: the key it held is free');
is(answer('done'), 'claimed', 'terminated: so is the one it had settled');
eval { $victim->quit };

# --- and takes the server with it

$victim = $node->background_psql('postgres', on_error_stop => 0);
$pid = $victim->query_safe(q{SELECT pg_backend_pid()});
$node->safe_psql('postgres', q{
	BEGIN; SELECT idem_claim('s', 'kept'); INSERT INTO plain VALUES ('kept'); SELECT idem_complete('s', 'kept', '{"n": 1}'); COMMIT});
$victim->query_safe(q{
	BEGIN;
	SELECT idem_claim('s', 'open'), idem_claim('s', 'leased', lease => '1 hour'), idem_claim('s', 'done');
	INSERT INTO plain VALUES ('done');
	SELECT idem_complete('s', 'done')});
is(answer('leased'), 'in_progress', 'another backend holds keys');
crash($pid);
eval { $victim->quit };
is(join(' ', map { answer($_) } qw(kept open leased done)), 'replayed claimed claimed claimed', 'killed: only what was committed is there');
is($node->safe_psql('postgres', q{SELECT count(*) FROM plain WHERE what IN ('kept', 'done')}), '1', 'killed: and what was done with it');
is($node->safe_psql('postgres', q{SELECT (idem_claim('s', 'kept')).response}), '{"n": 1}', 'killed: the response is replayed');

# rows and their indexes still agree
SKIP:
{
	skip 'amcheck is not installed', 2
		if $node->safe_psql('postgres', q{SELECT count(*) FROM pg_available_extensions WHERE name = 'amcheck'}) eq '0';
	$node->safe_psql('postgres', 'CREATE EXTENSION amcheck');
	is($node->safe_psql('postgres', q{
			SELECT count(bt_index_check(indexrelid, true)::text) >= 3 FROM pg_index
			WHERE indrelid IN ('idem.result'::regclass, 'idem.inflight'::regclass, 'idem.audit'::regclass)}), 't', 'indexes have every row');
	is($node->safe_psql('postgres', q{
			SELECT r, h.* FROM unnest('{idem.result,idem.inflight,idem.audit}'::regclass[]) AS r, verify_heapam(r) AS h}), '', 'and rows are sound');
}

done_testing();

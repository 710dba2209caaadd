# What a standby answers, what is left after the promotion of one that lagged,
# and who waits for a synchronous one: needs a second server that replicates.

use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $primary = PostgreSQL::Test::Cluster->new('primary');
$primary->init(allows_streaming => 1);
$primary->append_conf('postgresql.conf', "autovacuum = off\n");
$primary->start;
$primary->safe_psql('postgres', q{
	CREATE EXTENSION idem;
	INSERT INTO idem.scope (name) VALUES ('s');
	INSERT INTO idem.scope (name, lease, keep_request) VALUES ('pay', '1 hour', 'always');
	INSERT INTO idem.scope (name) VALUES ('unused');
	CREATE TABLE ledger (key text, amount int);
});

# --- who waits for a synchronous standby that is not there

$primary->append_conf('postgresql.conf', "synchronous_standby_names = 'nobody'\n");
$primary->reload;
$primary->poll_query_until('postgres', q{SELECT current_setting('synchronous_standby_names') = 'nobody'});

foreach my $setting (qw(off local))
{
	is($primary->safe_psql('postgres', qq{
			SET synchronous_commit = $setting;
			SELECT idem_once('s', '$setting');
			BEGIN; SELECT (idem_claim('s', 'pair $setting')).outcome; SELECT idem_complete('s', 'pair $setting'); COMMIT}),
		"t\nclaimed\nsucceeded", "$setting: a key settled at once does not wait");
}
my %waiting;
foreach my $setting (qw(off local))
{
	my $key = "leased $setting";
	my $session = $waiting{$key} = $primary->background_psql('postgres', on_error_stop => 0);
	$session->query_safe("SET synchronous_commit = $setting");
	$session->query_safe("SET application_name = '$key'");
	$session->query_until(qr/go/, "\\echo go\nSELECT idem_claim('pay', '$key');\n");
	ok($primary->poll_query_until('postgres', qq{
			SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name = '$key' AND wait_event = 'SyncRep'}),
		"$setting: a leased claim waits");
}
is($primary->safe_psql('postgres', q{SET synchronous_commit = off; SELECT (idem_claim('pay', 'leased off', wait => '0')).outcome}),
	'in_progress', 'while it waits it keeps others out');
$primary->append_conf('postgresql.conf', "synchronous_standby_names = ''\n");
$primary->reload;
foreach my $key (sort keys %waiting)
{
	is($waiting{$key}->query('SELECT 1') =~ s/.*\n//sr, '1', "$key: goes on when nobody is waited for any more");
	is($waiting{$key}->query('SHOW synchronous_commit'), $key =~ s/.* //r, "$key: the setting of the session is what it was");
	$waiting{$key}->quit;
	is($primary->safe_psql('postgres', "SELECT (idem_status('pay', '$key')).outcome"), 'in_progress', "$key: the claim is there");
}

# --- a hot standby

$primary->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'backup', has_streaming => 1);
$standby->start;

$primary->safe_psql('postgres', q{
	SELECT idem_claim('pay', 'done', '{"n": 1}');
	SELECT idem_complete('pay', 'done', '{"ok": true}', (SELECT token FROM idem.inflight WHERE key = 'done'), 200);
	SELECT idem_claim('pay', 'running', '{"n": 1}');
	SELECT idem_claim('pay', 'over', '{"n": 1}', lease => '1 microsecond');
	SELECT idem_claim('pay', 'doubt', '{"n": 1}');
	SELECT idem_unknown('pay', 'doubt', (SELECT token FROM idem.inflight WHERE key = 'doubt'));
	SELECT idem_once('s', 'expired');
	UPDATE idem.result SET completed_at = completed_at - interval '2 days' WHERE key = 'expired';
});
my $open = $primary->background_psql('postgres', on_error_stop => 0);
$open->query_safe(q{BEGIN; SELECT idem_claim('pay', 'uncommitted')});
$open->query_safe(q{SELECT idem_once('s', 'uncommitted')});
$primary->safe_psql('postgres', 'SELECT pg_switch_wal()');
$primary->wait_for_catchup($standby, 'replay', $primary->lsn('write'));

sub status
{
	my ($scope, $key) = @_;
	return $standby->safe_psql('postgres', qq{
		SELECT outcome, state, attempt, status_code, response, token IS NULL FROM idem_status('$scope', '$key')});
}
is(status('pay', 'done'), 'replayed|succeeded|1|200|{"ok": true}|t', 'standby: a settled key');
is(status('pay', 'running'), 'in_progress|processing|1|||t', 'standby: a running lease');
is(status('pay', 'over'), '|free|1|||t', 'standby: a lease that is over; no execution is decided');
is(status('pay', 'doubt'), 'unknown|unknown|1|||t', 'standby: a doubt');
is(status('s', 'expired'), 'expired|succeeded|1|||t', 'standby: an expired key');
is(status('pay', 'nothing'), '|||||t', 'standby: a key of which nothing is known');
like(status('pay', 'uncommitted'), qr/^in_progress\|/, 'standby: a claim that is not committed yet');
like(status('s', 'uncommitted'), qr/^in_progress\|/, 'standby: a settled key that is not committed yet');

my ($rc, $out, $err);
foreach my $call (
	"idem_claim('pay', 'done')", "idem_claim('pay', 'new', lease => '0')", "idem_once('s', 'new')",
	"idem_complete('pay', 'running', token => 1)", "idem_fail('pay', 'running', token => 1)",
	"idem_release('pay', 'running', 1)", "idem_extend('pay', 'running', 1)", "idem_checkpoint('pay', 'running', 1, 'x')",
	"idem_unknown('pay', 'running', 1)", "idem_recover('pay')", "idem_resolve('pay', 'doubt', 'retry')",
	"idem_forget('pay', 'done')", "idem_quarantine('pay')", 'idem_sweep()',
	"idem_call('pay', 'new', '{}', 'jsonb_typeof(jsonb)')")
{
	($rc, $out, $err) = $standby->psql('postgres', "\\set VERBOSITY verbose\nSELECT $call");
	like($err, qr/ERROR:  25006: cannot execute \w+\(\) (during recovery|in a read-only transaction)/, "standby: $call is refused");
}
like($standby->safe_psql('postgres', q{SELECT idem_explain('pay', 'done')}), qr/^replayed: /, 'standby: a settled key is explained');
is($standby->safe_psql('postgres', q{SELECT state FROM idem.operation WHERE key = 'running'}), 'processing', 'standby: the views work');
is($standby->safe_psql('postgres', q{SELECT count(*) FROM idem.holder}), '0', 'standby: nobody holds a key');
$open->query_safe('ROLLBACK');
$open->quit;

# --- failover to a standby that lags
#
# The provider is outside and forgets nothing. It charges once for a key it is
# given, and can be asked what it did. Every amount in it is charged for ever.
my %charged;
my $charges = 0;

sub child
{
	my ($node, $key) = @_;
	return $node->safe_psql('postgres', "SELECT idem_child('pay', '$key', 'charge')");
}

sub charge
{
	my ($node, $key) = @_;
	my $child = child($node, $key);
	$charges++ unless $charged{$child}++;
}

my %token;

sub claim
{
	my ($node, $key) = @_;
	my ($outcome, $token) = split /\|/, $node->safe_psql('postgres', qq{
		SELECT outcome, token FROM idem_claim('pay', '$key', '{"amount": 10}')});
	if ($outcome eq 'claimed')
	{
		ok(!defined $token{$key} || $token > $token{$key}, "the token of $key grows");
		$token{$key} = $token;
	}
	return $outcome;
}

sub complete
{
	my ($node, $key) = @_;
	$node->safe_psql('postgres', qq{
		BEGIN;
		INSERT INTO ledger VALUES ('$key', 10);
		SELECT idem_complete('pay', '$key', '{"charged": true}', $token{$key});
		COMMIT});
}

my @keys = ('settled', 'settled later', 'charged', 'charged later', 'idle', 'taken over later', 'released', 'lost', 'lost charged', 'lost settled');

# replicated
claim($primary, 'settled'); charge($primary, 'settled'); complete($primary, 'settled');
claim($primary, $_) foreach ('settled later', 'charged', 'charged later', 'idle', 'taken over later', 'released');
charge($primary, 'charged');
$primary->safe_psql('postgres', "SELECT idem_release('pay', 'released', $token{released})");
my $session = $standby->background_psql('postgres', on_error_stop => 0);
$primary->wait_for_catchup($standby, 'replay', $primary->lsn('write'));
is($session->query_safe(q{SELECT (idem_status('pay', 'charged')).outcome}), 'in_progress', 'a session on the standby before the failover');

# From here on the standby gets nothing.
$standby->append_conf('postgresql.conf', "primary_conninfo = ''\n");
$standby->reload;
$standby->poll_query_until('postgres', 'SELECT count(*) = 0 FROM pg_stat_wal_receiver')
	or die 'the standby goes on receiving';

charge($primary, 'settled later'); complete($primary, 'settled later');
charge($primary, 'charged later');
$primary->safe_psql('postgres', q{UPDATE idem.inflight SET lease_until = now() WHERE key = 'taken over later'});
claim($primary, 'taken over later');
claim($primary, 'released');		# free on the standby, taken on the primary
charge($primary, 'released');
claim($primary, $_) foreach ('lost', 'lost charged', 'lost settled');
charge($primary, 'lost charged');
charge($primary, 'lost settled'); complete($primary, 'lost settled');
my %old_token = %token;
is($primary->safe_psql('postgres', 'SELECT count(*), sum(amount) FROM ledger'), '3|30', 'what the old primary has done');

$primary->stop('immediate');
$standby->promote;

# First of all.
is($session->query_safe(q{SELECT idem_quarantine('pay')}), '10', 'the first step after the failover, in the same session');
is($session->query_safe(q{SELECT idem_quarantine('pay')}), '0', 'there is nothing left for a second time');
is($session->query_safe(q{SELECT count(*) FROM idem.operation WHERE scope = 'pay' AND kept_in = 'inflight' AND state <> 'unknown'}), '0', 'everything in flight is in doubt');
is($session->query_safe(q{SELECT string_agg(event || ' ' || new::text, ', ' ORDER BY at) FROM idem.audit WHERE event = 'quarantine'}),
	'quarantine {"keys": 10}, quarantine {"keys": 0}', 'it is audited');
is($session->query_safe(q{SELECT idem_quarantine('unused')}), '0', 'an empty scope has nothing to quarantine');
is($session->query_safe(q{SELECT idem_once('s', 'after'), idem_once('s', 'after')}), 't|f', 'a session from before the failover settles keys after it');
$session->quit;

# Nobody executes in doubt; what is settled is replayed as before.
foreach my $key (@keys)
{
	next if $key =~ /^lost/;
	is(claim($standby, $key), $key eq 'settled' ? 'replayed' : 'unknown', "$key: the answer before it is resolved");
}
is($standby->safe_psql('postgres', q{SELECT (idem_claim('pay', 'settled')).response}), '{"charged": true}', 'the replay is what it was');

# Operators ask the provider, key by key.
foreach my $key (grep { !/^(settled|lost.*)$/ } @keys)
{
	if ($charged{child($standby, $key)})
	{
		$standby->safe_psql('postgres', qq{
			BEGIN;
			INSERT INTO ledger VALUES ('$key', 10);
			SELECT idem_resolve('pay', '$key', 'succeeded', '{"charged": true}');
			COMMIT});
	}
	else
	{
		$standby->safe_psql('postgres', "SELECT idem_resolve('pay', '$key', 'retry')");
	}
}

# Clients repeat everything they have asked for. Of the keys that were lost
# nothing is known here, and the provider's key makes up for it.
foreach my $key (@keys)
{
	my $outcome = claim($standby, $key);
	if ($outcome eq 'claimed')
	{
		charge($standby, $key);
		complete($standby, $key);
	}
	is($outcome, $key =~ /^lost|^idle|^taken/ ? 'claimed' : 'replayed', "$key: the answer after it is resolved");
}

# Holders of the old primary come back, with tokens that are not current here.
foreach my $key ('lost', 'lost charged', 'taken over later')
{
	($rc, $out, $err) = $standby->psql('postgres', qq{
		\\set VERBOSITY sqlstate
		BEGIN;
		INSERT INTO ledger VALUES ('$key', 10);
		SELECT idem_complete('pay', '$key', '{"charged": true}', $old_token{$key});
		COMMIT});
	like($err, qr/ID001/, "$key: a holder of the old primary is fenced off");
}

is($charges, scalar @keys, 'truth: every key was charged once');
is($standby->safe_psql('postgres', 'SELECT count(*), count(DISTINCT key), sum(amount) FROM ledger'),
	sprintf('%d|%d|%d', scalar @keys, scalar @keys, 10 * @keys), 'truth: every key was booked once');
is($standby->safe_psql('postgres', q{SELECT count(*) FROM idem.operation WHERE scope = 'pay' AND state = 'succeeded'}),
	@keys + 1, 'truth: every key is settled');

done_testing();

# The server's clock is set back, by ten days, under keys in every state. SQL
# cannot set a clock, so the rows are moved into the future instead, which is the
# same to everything that compares them with it; and then they go through a dump,
# which is how rows come from a server whose clock was ahead.

use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('clock');
$node->init;
$node->start;
$node->safe_psql('postgres', 'CREATE DATABASE ahead');
$node->safe_psql('ahead', q{
	CREATE EXTENSION idem;
	INSERT INTO idem.scope (name, lease) VALUES ('s', '1 hour');
	INSERT INTO idem.scope (name, lease, retry_within, max_attempts) VALUES ('limits', '1 hour', '2 hours', 2);
	INSERT INTO idem.scope (name, retention, archive) VALUES ('forgets', '1 hour', 'none');
	INSERT INTO idem.scope (name, retention, archive, archive_retention) VALUES ('full', '1 hour', 'full', '2 hours');

	DO $$
	DECLARE
		a idem_answer;
		k text;
	BEGIN
		FOREACH k IN ARRAY ARRAY['running', 'mine', 'release', 'complete', 'extend', 'checkpoint', 'doubt', 'retry', 'over', 'once'] LOOP
			a := idem_claim('s', k, claimant => 'me');
		END LOOP;
		a := idem_claim('s', 'free');
		PERFORM idem_release('s', 'free', a.token);
		a := idem_claim('limits', 'limits');
		PERFORM idem_claim('s', 'settled', lease => '0');
		PERFORM idem_complete('s', 'settled', '{"ok": true}');
		PERFORM idem_once('forgets', 'settled');
		PERFORM idem_once('forgets', 'expired');
		PERFORM idem_once('full', 'archived');
	END
	$$;

	-- ten days and, in microseconds, a little more
	UPDATE idem.inflight SET token = token + 10 ^ 12, created_at = created_at + interval '10 days',
		updated_at = updated_at + interval '10 days', lease_until = lease_until + interval '10 days';
	UPDATE idem.result SET token = token + 10 ^ 12, created_at = created_at + interval '10 days',
		completed_at = completed_at + interval '10 days';
	INSERT INTO idem.archive SELECT *, completed_at + interval '2 hours' FROM idem.result WHERE key = 'archived';
	DELETE FROM idem.result WHERE key = 'archived';

	-- what a settled row does not say any more, but its token still counts
	UPDATE idem.result SET completed_at = now() - interval '2 hours' WHERE key = 'expired';
});

# The rows come by a dump as well.
$node->safe_psql('postgres', 'CREATE DATABASE restored');
$node->command_ok([ 'pg_dump', '-Fc', '-f', $node->basedir . '/dump', 'ahead' ], 'pg_dump');
$node->command_ok([ 'pg_restore', '-d', 'restored', $node->basedir . '/dump' ], 'pg_restore');

foreach my $database ('ahead', 'restored')
{
	check($database);
}

sub check
{
	my ($database) = @_;
	my $ask = sub { return $node->safe_psql($database, $_[0]) };
	my $error = sub {
		my ($rc, $out, $err) = $node->psql($database, "\\set VERBOSITY sqlstate\n$_[0]");
		return $err =~ /ERROR:  (\w{5})/ ? $1 : $out;
	};
	# each statement is given the token the key has, and tells how it has changed
	my $token = sub { return $ask->("SELECT token FROM idem.operation WHERE key = '$_[0]' AND scope = '" . ($_[1] // 's') . "'") };
	my $grown = sub {
		my ($key, $call, $name) = @_;
		my $before = $token->($key);
		$ask->($call =~ s/TOKEN/$before/r);
		my $after = $token->($key);
		cmp_ok($after, '>', $before, "$database: $name: the token grows");
		return $after;
	};

	# --- a lease in the future is not free
	foreach my $key (qw(running complete doubt))
	{
		is($ask->("SELECT outcome FROM idem_claim('s', '$key')"), 'in_progress', "$database: $key: a lease in the future is running");
	}
	is($ask->(q{SELECT outcome, retry_after > '10 days' FROM idem_claim('s', 'running')}), 'in_progress|t', "$database: its end is told");
	is($ask->(q{SELECT outcome FROM idem_status('s', 'running')}), 'in_progress', "$database: to a status as well");
	is($ask->(q{SELECT key FROM idem_recover('s', 100)}), 'free', "$database: a recovery takes only what is free");
	is($error->(q{SELECT idem_once('s', 'running')}), 'ID005', "$database: idem_once does not take it either");
	is($ask->(q{SELECT outcome, attempt, token = (SELECT token FROM idem.operation WHERE key = 'mine')
		FROM idem_claim('s', 'mine', claimant => 'me')}), 'claimed|1|t', "$database: its holder gets it again, with its token");
	is($ask->(q{SELECT lease_until < now() + interval '2 hours' FROM idem.inflight WHERE key = 'mine'}), 't', "$database: and a lease by the clock of now");

	# --- tokens grow, whatever the clock says
	my $old = $token->('release');
	my $new = $grown->('release', q{SELECT idem_release('s', 'release', TOKEN)}, 'release');
	is($error->("SELECT idem_complete('s', 'release', token => $old)"), 'ID001', "$database: release: the released token settles nothing");
	$grown->('release', q{SELECT idem_claim('s', 'release')}, 'claim after release');
	is($error->("SELECT idem_complete('s', 'release', token => $new)"), 'ID001', "$database: release: nor does the one it was moved on to");
	is($ask->(qq{SELECT idem_complete('s', 'release', token => } . $token->('release') . ')'), 'succeeded', "$database: release: the new one does");

	$ask->(q{UPDATE idem.inflight SET lease_until = now() WHERE key IN ('over', 'retry')});
	$old = $token->('over');
	$grown->('over', q{SELECT idem_claim('s', 'over')}, 'takeover');
	is($error->("SELECT idem_complete('s', 'over', token => $old)"), 'ID001', "$database: takeover: the zombie is fenced off");
	$ask->(q{UPDATE idem.inflight SET lease_until = now() WHERE key = 'over'});
	$grown->('over', q{SELECT * FROM idem_recover('s')}, 'recovery');
	$ask->(q{UPDATE idem.inflight SET lease_until = now() WHERE key = 'over'});
	$old = $token->('over');
	is($ask->(qq{
			BEGIN;
			SELECT token > $old FROM idem_claim('s', 'over', lease => '0');
			SELECT idem_complete('s', 'over');
			COMMIT}), "t\nsucceeded", "$database: a takeover by a transaction has a greater token");
	cmp_ok($token->('over'), '>', $old, "$database: and settles with it");

	$ask->(q{UPDATE idem.inflight SET lease_until = now() WHERE key = 'once'});
	$grown->('once', q{SELECT idem_once('s', 'once')}, 'idem_once as a takeover');
	is($ask->(q{SELECT attempt FROM idem.operation WHERE key = 'once'}), '2', "$database: which counts as an attempt");

	# --- in doubt and resolved
	$ask->(q{SELECT idem_unknown('s', 'doubt', } . $token->('doubt') . ')');
	is($ask->(q{SELECT idem_resolve('s', 'doubt', 'retry')}), 'free', "$database: a doubt is resolved");
	$old = $token->('doubt');
	is($ask->(q{SELECT outcome FROM idem_claim('s', 'doubt')}), 'claimed', "$database: and claimed");
	cmp_ok($token->('doubt'), '>', $old, "$database: with a greater token");

	# --- what a holder does to a lease in the future
	is($ask->(q{SELECT idem_extend('s', 'extend', } . $token->('extend') . q{, '1 hour') < now() + interval '2 hours'}), 't', "$database: a heartbeat counts from now");
	$ask->(q{SELECT idem_checkpoint('s', 'checkpoint', } . $token->('checkpoint') . q{, 'half', lease => '1 hour')});
	is($ask->(q{SELECT lease_until < now() + interval '2 hours', recovery_point FROM idem.inflight WHERE key = 'checkpoint'}), 't|half', "$database: so does a checkpoint");
	is($ask->(q{SELECT idem_complete('s', 'complete', token => } . $token->('complete') . ')'), 'succeeded', "$database: a holder completes");
	is($ask->(q{SELECT outcome FROM idem_claim('s', 'complete')}), 'replayed', "$database: and is replayed");

	# --- settled in the future
	is($ask->(q{SELECT outcome, response FROM idem_claim('s', 'settled')}), 'replayed|{"ok": true}', "$database: a key settled in the future is replayed");
	is($ask->(q{SELECT idem_once('forgets', 'settled'), idem_once('full', 'archived')}), 'f|f', "$database: a duplicate of it is one");
	$old = $token->('expired', 'forgets');
	is($ask->(q{SELECT idem_once('forgets', 'expired')}), 't', "$database: one that does not speak any more is new");
	cmp_ok($token->('expired', 'forgets'), '>', $old, "$database: with a greater token than the old row's");

	# --- limits that count from a first claim in the future are not over
	$ask->(q{UPDATE idem.inflight SET lease_until = now() WHERE key = 'limits'});
	is($ask->(q{SELECT outcome, attempt FROM idem_claim('limits', 'limits')}), 'claimed|2', "$database: retry_within counts from the first claim");
	$ask->(q{UPDATE idem.inflight SET lease_until = now() WHERE key = 'limits'});
	is($ask->(q{SELECT outcome FROM idem_claim('limits', 'limits')}), 'unknown', "$database: attempts are counted all the same");
}

done_testing();


# The tables replicated to a second server, which then takes over, once in good
# order and once after the first was lost. Needs two servers and their walsenders.

use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my @initdb = ('--encoding=UTF8', '--locale=C.UTF-8');

sub make_server
{
	my ($name) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name);

	$node->init(allows_streaming => 'logical', extra => \@initdb);
	$node->start;
	# not in the same order, so that a role's OID is another on each server
	$node->safe_psql('postgres', "CREATE ROLE $_")
		foreach $name eq 'first' ? ('"The ""owner"', 'shop') : ('shop', 'other', '"The ""owner"');
	$node->safe_psql('postgres', 'CREATE EXTENSION idem');
	return $node;
}

my $first = make_server('first');
my $second = make_server('second');
my $connection = $first->connstr . ' dbname=postgres';

# idem.sweep is each server's own. Nobody else deletes from idem.audit than the
# sweep, and it has no key to find a row by.
$first->safe_psql('postgres', q{
	CREATE PUBLICATION idem_keys FOR TABLE idem.scope, idem.inflight, idem.result, idem.archive;
	CREATE PUBLICATION idem_audit FOR TABLE idem.audit WITH (publish = 'insert');
});

# one part of the rows is there when the subscription is made, the other comes by the stream
sub work
{
	my ($node, $part) = @_;
	$node->safe_psql('postgres', qq{
		INSERT INTO idem.scope (name, owner, lease) VALUES ('$part', '"The ""owner"', '1 hour');
		INSERT INTO idem.scope (name, owner, archive, on_expiry) VALUES ('$part full', 'shop', 'full', 'hold');
		DO \$\$
		DECLARE
			a idem_answer;
		BEGIN
			a := idem_claim('$part', 'settled', '{"n": 1}');
			PERFORM idem_complete('$part', 'settled', '{"ok":  1}', a.token, 201, '{"h": 1}', '\\x00ff');
			a := idem_claim('$part', 'failed', '{"n": 1}');
			PERFORM idem_fail('$part', 'failed', '"no"', a.token);
			a := idem_claim('$part', 'running', '{"n": 2}');
			PERFORM idem_checkpoint('$part', 'running', a.token, 'charged', '{"receipt": 7}');
			a := idem_claim('$part', 'free', '{"n": 3}');
			PERFORM idem_release('$part', 'free', a.token);
			a := idem_claim('$part', 'doubt', '{"n": 4}');
			PERFORM idem_unknown('$part', 'doubt', a.token, '{"why": "timeout"}');
			PERFORM idem_once('$part full', 'old', '{"n": 5}');
			PERFORM idem_once('$part full', 'swept', '{"n": 6}');
			PERFORM idem_claim('$part', 'settled', '{"n": 9}');		-- a mismatch, audited
		END \$\$;
		UPDATE idem.result SET completed_at = completed_at - interval '2 days' WHERE key = 'swept';
		SELECT idem_sweep();
	});
}

my @tables = (
	'scope ORDER BY id', 'inflight ORDER BY scope_id, key', 'result ORDER BY scope_id, key',
	'archive ORDER BY scope_id, key', 'audit ORDER BY at, event, key');

sub content
{
	my ($node) = @_;
	return join "\n", map { $node->safe_psql('postgres', "SELECT t::text FROM idem.$_") } map { s/^(\w+)/$1 AS t/r } @tables;
}

sub status
{
	my ($node) = @_;
	return $node->safe_psql('postgres', q{
		SELECT o.scope, o.key, s.* FROM idem.operation AS o, LATERAL idem_status(o.scope, o.key) AS s ORDER BY 1, 2}) =~ s/\d\d:\d\d:\d\d\.\d+//gr;
}

work($first, 'copied');
$second->safe_psql('postgres', "CREATE SUBSCRIPTION idem CONNECTION '$connection' PUBLICATION idem_keys, idem_audit");
$second->poll_query_until('postgres', q{SELECT count(*) = 5 AND bool_and(srsubstate IN ('r', 's')) FROM pg_subscription_rel})
	or die 'the first copy did not end';
work($first, 'streamed');
$first->wait_for_catchup('idem');

is(content($second), content($first), 'all rows are the same, owners by their names');
is(status($second), status($first), 'and so is what is known of each key');
like(status($first), qr/full\|swept\|replayed/, 'a row was swept into the archive');
isnt($second->safe_psql('postgres', q{SELECT 'shop'::regrole::oid}), $first->safe_psql('postgres', q{SELECT 'shop'::regrole::oid}),
	'roles have other numbers there');

# A session of the second server that has looked a scope up hears of its change.
my $psql = "psql -X -q -d \"$connection\"";
my $seen = $second->safe_psql('postgres', qq{
	SELECT outcome FROM idem_status('copied', 'settled');
	\\! $psql -c "UPDATE idem.scope SET retention = '1 microsecond' WHERE name = 'copied'"
	DO \$\$ BEGIN
		WHILE (SELECT retention > '1 second' FROM idem.scope WHERE name = 'copied') LOOP PERFORM pg_sleep(0.01); COMMIT; END LOOP;
	END \$\$;
	SELECT outcome FROM idem_status('copied', 'settled');
	\\! $psql -c "UPDATE idem.scope SET retention = '1 day' WHERE name = 'copied'"
});
is($seen, "replayed\nexpired", 'a change of a contract reaches sessions of the second server');
$first->wait_for_catchup('idem');
is($second->safe_psql('postgres', q{SELECT count(*) FROM idem.audit WHERE event = 'scope changed'}), '2',
	'it is audited once, by the first server');
is(content($second), content($first), 'and nothing else has changed');

# A holder of the first server has its claim.
my $token = $first->safe_psql('postgres', q{SELECT token FROM idem_claim('streamed', 'moving', '{"n": 7}')});
$first->wait_for_catchup('idem');

# ---- switching over in good order: nobody writes, all has arrived ----

sub take_over
{
	my ($node) = @_;
	$node->safe_psql('postgres', q{
		ALTER SUBSCRIPTION idem DISABLE;
		ALTER SUBSCRIPTION idem SET (slot_name = NONE);
		DROP SUBSCRIPTION idem;
		SELECT setval('idem.scope_id_seq', (SELECT max(id) FROM idem.scope));
	});
}

my $content = content($first);
# what will have been lost when the second server is asked without being up to date
$second->backup('second');
my $lost = PostgreSQL::Test::Cluster->new('lost');
$lost->init_from_backup($second, 'second');

$first->stop;
take_over($second);
is(content($second), $content, 'nothing is lost in a switch-over');
is($second->safe_psql('postgres', qq{SELECT idem_complete('streamed', 'moving', '{"moved": true}', $token)}), 'succeeded',
	'a holder settles on the second server with the token of the first');
is($second->safe_psql('postgres', q{SELECT outcome, response FROM idem_claim('streamed', 'settled', '{"n": 1.0}')}), 'replayed|{"ok":  1}',
	'what was settled is replayed');
is($second->safe_psql('postgres', q{SELECT outcome FROM idem_claim('streamed', 'running', '{"n": 2}')}), 'in_progress',
	'what is in flight is in progress');
is($second->safe_psql('postgres', q{SELECT outcome FROM idem_claim('streamed', 'doubt', '{"n": 4}')}), 'unknown',
	'what was in doubt is in doubt');
is($second->safe_psql('postgres', q{SELECT outcome, attempt FROM idem_claim('streamed', 'free', '{"n": 3}')}), 'claimed|2',
	'what is free can be claimed, as the second attempt');
is($second->safe_psql('postgres', q{
		SELECT outcome FROM idem_claim('copied', 'settled', '{"n": 9}');
		SELECT count(*) FROM idem.audit WHERE event = 'mismatch' AND scope = 'copied'}), "mismatch\n1",
	'a mismatch that was noted is not noted again');
is($second->safe_psql('postgres', q{INSERT INTO idem.scope (name) VALUES ('next') RETURNING id = 5}), 't', 'ids continue');

# ---- after the first server was lost: what arrived last is not known ----

$lost->append_conf('postgresql.conf', 'max_logical_replication_workers = 0');
$lost->start;
take_over($lost);
is($lost->safe_psql('postgres', q{SELECT idem_quarantine('streamed'), idem_quarantine('copied')}), '3|2', 'what is in flight is in quarantine');
is($lost->safe_psql('postgres', q{SELECT outcome FROM idem_claim('streamed', 'running', '{"n": 2}')}), 'unknown',
	'nobody executes until somebody has looked');
is($lost->safe_psql('postgres', q{SELECT outcome FROM idem_claim('streamed', 'free', '{"n": 3}')}), 'unknown',
	'not even what was free: it may have been taken in the lost part');
is($lost->safe_psql('postgres', q{SELECT outcome FROM idem_claim('streamed', 'settled', '{"n": 1}')}), 'replayed',
	'what is settled stays settled');
is($lost->safe_psql('postgres', q{
		SELECT idem_resolve('streamed', 'running', 'retry');
		SELECT outcome, attempt, recovery_point, checkpoint FROM idem_claim('streamed', 'running', '{"n": 2}')}) =~ s/.*\n//sr,
	'claimed|2|charged|{"receipt": 7}', 'resolved, it goes on where its holder was');

done_testing();

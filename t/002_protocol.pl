# What a client gets from an autocommit claim depends on the protocol it speaks,
# and what is logged about it is in the server's log: neither can be seen in SQL.

use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('protocol');
$node->init;
# The statement itself is the administrator's business, and is not logged here.
$node->append_conf('postgresql.conf', q{
log_statement = none
log_min_error_statement = panic
log_error_verbosity = verbose
log_lock_waits = on
deadlock_timeout = 10ms
});
$node->start;
$node->safe_psql('postgres', q{
	CREATE EXTENSION idem;
	INSERT INTO idem.scope (name) VALUES ('s');
	CREATE TABLE ledger (entry text);
});

my $hint = qr/HINT: .*idem_complete\(\) or idem_fail\(\) in the transaction.*, or claim with a lease/;

# Runs a script of pgbench once, over the extended protocol unless told otherwise.
sub bench
{
	my ($script, $mode) = @_;
	my $file = $node->basedir . '/script.sql';
	my ($out, $err);

	unlink $file;
	append_to_file($file, $script);
	my $ok = IPC::Run::run(
		[ 'pgbench', '-n', '-t', '1', '-M', $mode // 'extended', '-f', $file, $node->connstr('postgres') ],
		'>', \$out, '2>', \$err);
	return ($ok, $err);
}

sub ledger
{
	return $node->safe_psql('postgres', q{SELECT coalesce(string_agg(entry, ' ' ORDER BY entry), '') FROM ledger});
}

sub status
{
	my ($key) = @_;
	return $node->safe_psql('postgres', "SELECT coalesce((idem_status('s', '$key')).outcome, 'free')");
}

# --- a claim left unsettled at COMMIT

my ($rc, $out, $err) = $node->psql('postgres', q{
	\set VERBOSITY verbose
	SELECT (idem_claim('s', 'simple')).outcome});
like($err, qr/ERROR:  ID003: transaction ends with an unsettled claim/, 'simple protocol, autocommit: ID003');
like($err, $hint, 'simple protocol, autocommit: the hint names both ways out');
like($err, qr/DETAIL:  Key "simple"/, 'simple protocol, autocommit: the detail names the key');
is(status('simple'), 'free', 'simple protocol, autocommit: nothing is left of the claim');

($rc, $out, $err) = $node->psql('postgres', q{
	\set VERBOSITY verbose
	BEGIN; INSERT INTO ledger VALUES ('lost'); SELECT (idem_claim('s', 'block')).outcome; COMMIT});
like($out, qr/claimed/, 'transaction block: claimed');
like($err, qr/ID003/, 'transaction block: ID003 at COMMIT');
is(ledger(), '', 'transaction block: what was done beside the claim is gone');

# several statements in one message are one transaction
$node->safe_psql('postgres', "SELECT idem_claim('s', 'message')\\; INSERT INTO ledger VALUES ('message')\\; SELECT idem_complete('s', 'message')");
is(status('message'), 'replayed', 'simple protocol: claim and completion in one message are one transaction');

foreach my $mode (qw(extended prepared))
{
	my ($ok, $error) = bench("SELECT outcome FROM idem_claim('s', '$mode');\n", $mode);
	ok(!$ok, "$mode protocol, autocommit: the client fails");
	like($error, qr/ERROR:  transaction ends with an unsettled claim/, "$mode protocol, autocommit: the error");
	like($error, $hint, "$mode protocol, autocommit: the hint names both ways out");
	is(status($mode), 'free', "$mode protocol, autocommit: nothing is left of the claim");
}

# --- pipelines without BEGIN

my ($ok, $error) = bench(q{
\startpipeline
SELECT idem_claim('s', 'pipe', '{"n": 1}');
INSERT INTO ledger VALUES ('pipe');
SELECT idem_complete('s', 'pipe', '{"ok": true}');
\endpipeline
});
ok($ok, 'pipeline: claim, work and completion without BEGIN') or diag $error;
is(status('pipe'), 'replayed', 'pipeline: the key is settled');
is($node->safe_psql('postgres', q{SELECT (idem_claim('s', 'pipe')).response}), '{"ok": true}', 'pipeline: the response is replayed');

($ok, $error) = bench(q{
\startpipeline
INSERT INTO ledger VALUES ('lost');
SELECT idem_claim('s', 'half');
\endpipeline
});
ok(!$ok, 'pipeline: a claim alone fails');
like($error, $hint, 'pipeline: with the hint');
is(status('half'), 'free', 'pipeline: nothing is left of the claim');

# a pipeline in which a later statement fails takes the settled key with it
($ok, $error) = bench(q{
\startpipeline
SELECT idem_claim('s', 'broken');
SELECT idem_complete('s', 'broken');
SELECT 1/0;
\endpipeline
});
ok(!$ok, 'pipeline: an error after the completion');
is(status('broken'), 'free', 'pipeline: the key goes with it');

is(ledger(), 'message pipe', 'what was done was done by settled claims alone');

# --- parameters without a type, as drivers send them
($ok, $error) = bench(q{
\set n 7
SELECT idem_once('s', 'parameter ' || :n, wait => '1 s');
SELECT idem_once('s', :n::text);
SELECT (idem_claim('s', idem_key('tenant', :n::text), '{"n": 1}', lease => '1 hour')).token AS token \gset
SELECT idem_complete('s', idem_key('tenant', :n::text), '{"n": 2}', :token);
}, 'prepared');
ok($ok, 'prepared statements with parameters') or diag $error;
is(status('tenant:7'), 'replayed', 'prepared statements with parameters: settled by token');

# --- what is logged

my $start = -s $node->logfile;
my $secret = 'SECRET';
my $hash = $node->safe_psql('postgres', qq{
	BEGIN; SELECT (idem_claim('s', '$secret key')).outcome; SELECT key_hash FROM idem.holder; ROLLBACK}) =~ s/^claimed\n//r;
like($hash, qr/^-?\d+$/, 'idem.holder knows the hash of the key');

# Every error that knows a key or a body. $body is JSON, $junk is not.
my ($body, $junk) = (qq{{"card": "$secret"}}, qq{{"card": "$secret" "$secret"}});
my %errors = (
	'ID001' => qq{SELECT idem_complete('s', '$secret key', '$body', token => 1)},
	'ID001 at COMMIT' => qq{
		BEGIN; SAVEPOINT a; SELECT idem_complete('s', '$secret key', token => 1); ROLLBACK TO a; COMMIT},
	'ID002' => qq{SELECT idem_complete('s', '$secret key', '$body')},
	'ID003' => qq{SELECT idem_claim('s', '$secret key', '$body')},
	'ID004' => qq{BEGIN; SELECT idem_once('s', '$secret key', '$body'); SELECT idem_once('s', '$secret key', '{}'); ROLLBACK},
	'ID005' => qq{BEGIN; SELECT idem_claim('s', '$secret key', '$body'); SELECT idem_once('s', '$secret key', '$body'); ROLLBACK},
	'55000' => qq{
		BEGIN; SELECT idem_claim('s', '$secret key'); INSERT INTO ledger VALUES ('x'); SELECT idem_release('s', '$secret key'); ROLLBACK},
	'55000 in flight' => qq{
		BEGIN; SELECT idem_claim('s', '$secret key', lease => '1 hour'); SELECT idem_forget('s', '$secret key'); ROLLBACK},
	'55000 not in doubt' => qq{SELECT idem_resolve('s', '$secret key', 'succeeded', '$body')},
	'22P02' => qq{SELECT idem_claim('s', '$secret key', '$junk')},
	'22P02 word' => qq{SELECT idem_claim('s', '$secret key', '$secret')},
	'22P02 surrogate' => qq{SELECT idem_once('s', '$secret key', '{"card": "$secret\\ud800"}')},
	'22P02 response' => qq{BEGIN; SELECT idem_claim('s', '$secret key'); SELECT idem_complete('s', '$secret key', '$junk'); ROLLBACK},
	'22P02 once' => qq{SELECT idem_once('s', '$secret key', '$junk')},
	'22P02 resolve' => qq{SELECT idem_resolve('s', '$secret key', 'succeeded', '$junk')},
	'22030' => qq{SELECT idem_claim('s', '$secret key', '{"$secret": 1, "$secret": 2}')},
	'22030 canonical' => qq{SELECT idem_canonical('{"$secret": 1, "$secret": 2}')},
	'22P02 fingerprint' => qq{SELECT idem_fingerprint('$junk'::text)},
	'22023' => qq{SELECT idem_claim('s', repeat('$secret', 100))},
	'22023 wait' => qq{SELECT idem_claim('s', '$secret key', '$body', wait => '-1 s')},
	'25006' => qq{BEGIN READ ONLY; SELECT idem_claim('s', '$secret key', '$body')},
	'42704' => qq{SELECT idem_claim('nowhere', '$secret key', '$body')},
	'55P03' => undef);
my $client = '';
foreach my $what (sort keys %errors)
{
	next if !defined $errors{$what};
	($rc, $out, $err) = $node->psql('postgres', "\\set VERBOSITY verbose\n$errors{$what}", on_error_stop => 0);
	my ($code) = $what =~ /^(\w+)/;
	like($err, qr/ERROR:  $code:/, "$what is raised");
	is(scalar(() = $err =~ /ID001/g), 2, "$what: trapped once, and raised again") if $what =~ /COMMIT/;
	$client .= $err;
}

# a wait for the lock, long enough to be logged, and one that runs out
my $holder = $node->background_psql('postgres', on_error_stop => 0);
$holder->query_safe("BEGIN; SELECT idem_claim('s', '$secret key', '$body')");
($rc, $out, $err) = $node->psql('postgres', "\\set VERBOSITY verbose\nSELECT idem_once('s', '$secret key', '$body', wait => '0')");
like($err, qr/ERROR:  55P03:/, '55P03 is raised');
$client .= $err;
my $waiter = $node->background_psql('postgres', on_error_stop => 0);
$waiter->query_until(qr/go/, "\\echo go\nSELECT idem_once('s', '$secret key', '$body');\n");
$node->wait_for_log(qr/still waiting for ExclusiveLock on advisory lock/, $start);
$holder->query_safe('ROLLBACK');
$holder->quit;
$waiter->quit;

my $log = substr(slurp_file($node->logfile), $start);
my @errors = $log =~ /ERROR:  \w{5}:/g;
cmp_ok(scalar @errors, '>=', scalar(keys %errors), 'the errors are in the log');
like($client, qr/DETAIL: .*$secret/, 'the client gets the key');
like($log, qr/DETAIL:  Key hash $hash\./, 'the log gets its hash');
my @leaks = grep { /$secret/ } split /\n/, $log;
is(join("\n", @leaks), '', 'no key and no body is in the log');

done_testing();

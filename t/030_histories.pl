# The histories of a payment that can go wrong: 10,000 in the account, 100 to be paid in,
# once. Clients are killed and servers crash between the two halves of something, which
# no SQL script can do to itself. After each history the ledger has the word.

use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('histories');
$node->init(allows_streaming => 1);		# commits can wait for a standby then
$node->append_conf('postgresql.conf', 'autovacuum = off');
$node->start;
$node->safe_psql('postgres', q{
	CREATE EXTENSION idem;
	INSERT INTO idem.scope (name) VALUES ('payments'), ('messages');
	-- what an expired lease of these has done outside, nobody here knows
	INSERT INTO idem.scope (name, on_expiry) VALUES ('charges', 'hold');

	CREATE TABLE account (balance numeric NOT NULL);
	INSERT INTO account VALUES (10000);
	CREATE TABLE ledger (id bigint GENERATED ALWAYS AS IDENTITY, key text, amount numeric);

	CREATE PROCEDURE pay_in(key text, amount numeric) LANGUAGE plpgsql AS $$
	BEGIN
		UPDATE account SET balance = balance + pay_in.amount;
		INSERT INTO ledger (key, amount) VALUES (pay_in.key, pay_in.amount);
	END $$;

	-- claim, work, settle: what an application does in one transaction of its own
	CREATE FUNCTION pay(key text, amount numeric) RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		answer idem_answer := idem_claim('payments', key, jsonb_build_object('amount', amount));
	BEGIN
		IF answer.outcome <> 'claimed' THEN
			RETURN concat_ws(' ', answer.outcome, answer.response);
		END IF;
		CALL pay_in(key, amount);
		PERFORM idem_complete('payments', key, json_build_object('entry', currval('ledger_id_seq'), 'balance', balance)) FROM account;
		RETURN 'executed';
	END $$;
});

# balance, and what the ledger says it must be, and how many entries
sub truth
{
	return $node->safe_psql('postgres', q{
		SELECT balance, 10000 + coalesce(sum(amount), 0), count(amount) FROM account LEFT JOIN ledger ON true GROUP BY balance});
}

sub is_paid
{
	my ($times, $what) = @_;
	my $balance = 10000 + 100 * $times;

	is(truth(), "$balance|$balance|$times", "$what: the ledger has $times");
}

sub query
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

# each history starts from the beginning
sub history
{
	note $_[0];
	query(q{TRUNCATE ledger RESTART IDENTITY; UPDATE account SET balance = 10000});
}

sub crash
{
	$node->stop('immediate');
	$node->start;
}

# Starts a client that plays a script; it is known by its application_name.
sub client
{
	my ($name, $script) = @_;
	my $file = $node->basedir . "/$name.sql";
	my %client = (name => $name, out => '', err => '');

	append_to_file($file, $script);
	$client{run} = IPC::Run::start(
		[ 'psql', '-XAtq', '-d', $node->connstr('postgres') . " application_name=$name", '-f', $file ],
		'<', \undef, '>', \$client{out}, '2>', \$client{err});
	return \%client;
}

sub wait_until_client_waits
{
	my ($client, $for) = @_;
	$node->poll_query_until('postgres', qq{
		SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name = '$client->{name}' AND wait_event = '$for'})
		or die "$client->{name} does not wait for $for";
}

# The client dies as by kill -9; nobody has told it anything more. Whatever its
# backend still does, it has ended afterwards.
sub cut
{
	my ($client, $let_go) = @_;

	$client->{run}->signal('KILL');
	eval { $client->{run}->finish };
	$let_go->();
	$node->poll_query_until('postgres', qq{SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = '$client->{name}'})
		or die "the backend of $client->{name} is still there";
}

my ($rc, $out, $err);

# --- 1. ROLLBACK before COMMIT, then the same request twice: one effect

history('rolled back');
is(query(q{BEGIN; SELECT pay('rolled back', 100); ROLLBACK}), 'executed', 'rolled back: was executed');
is_paid(0, 'rolled back');
is(query(q{SELECT pay('rolled back', 100)}), 'executed', 'rolled back: the first retry executes');
is(query(q{SELECT pay('rolled back', 100)}), 'replayed {"entry" : 2, "balance" : 10100}', 'rolled back: the second is told what the first did');
is_paid(1, 'rolled back');

# the same by a connection that is cut between work and COMMIT
history('cut before COMMIT');
my $gate = $node->background_psql('postgres');
$gate->query_safe(q{SELECT pg_advisory_lock(1)});
my $client = client('before', q{BEGIN; SELECT pay('cut before', 100); SELECT pg_advisory_xact_lock(1); COMMIT; \echo committed});
wait_until_client_waits($client, 'advisory');
is(query(q{SELECT pay('cut before', 100)}), 'in_progress', 'cut before COMMIT: meanwhile a retry is told to wait');
cut($client, sub { $gate->query_safe(q{SELECT pg_advisory_unlock(1)}) });
is($client->{out}, "executed\n", 'cut before COMMIT: was executed, not committed');
is_paid(0, 'cut before COMMIT');
is(query(q{SELECT pay('cut before', 100)}), 'executed', 'cut before COMMIT: the first retry executes');
is(query(q{SELECT pay('cut before', 100)}), 'replayed {"entry" : 2, "balance" : 10100}', 'cut before COMMIT: the second is told');
is_paid(1, 'cut before COMMIT');
$gate->quit;

# --- 2. COMMIT done, its answer lost: the retry is replayed

# The commit waits for a standby that there is not: its record is on disk by
# then, and the client has no answer yet.
sub lost_answer
{
	my ($name, $key, $let_go) = @_;

	query(q{ALTER SYSTEM SET synchronous_standby_names = 'nobody'; SELECT pg_reload_conf()});
	$node->poll_query_until('postgres', q{SELECT current_setting('synchronous_standby_names') = 'nobody'}) or die 'not reloaded';
	my $client = client($name, qq{BEGIN; SELECT pay('$key', 100); COMMIT; \\echo committed});
	wait_until_client_waits($client, 'SyncRep');
	is(query(qq{SELECT pay('$key', 100)}), 'in_progress', "$key: a retry while it is being committed is told to wait");
	cut($client, $let_go);
	is($client->{out}, "executed\n", "$key: the client did not learn that it is committed");
	query(q{SET synchronous_commit = local; ALTER SYSTEM RESET synchronous_standby_names; SELECT pg_reload_conf()});
	$node->poll_query_until('postgres', q{SELECT current_setting('synchronous_standby_names') = ''}) or die 'not reloaded';
}

foreach my $how (
	[ 'answer lost' => sub { query(q{SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'lost'}) } ],
	[ 'answer lost in a crash' => \&crash ])
{
	my ($key, $let_go) = @$how;

	history($key);
	lost_answer($key eq 'answer lost' ? 'lost' : 'crashed', $key, $let_go);
	is_paid(1, $key);
	is(query(qq{SELECT pay('$key', 100)}), 'replayed {"entry" : 1, "balance" : 10100}', "$key: the retry is told what was done");
	is(query(qq{SELECT pay('$key', 100.00)}), 'replayed {"entry" : 1, "balance" : 10100}', "$key: and the next, which writes the amount another way");
	is_paid(1, $key);
}

# --- 3. the same key with 200: mismatch, nothing changed

history('another amount');
is(query(q{SELECT pay('another amount', 100)}), 'executed', 'another amount: 100 is executed');
is(query(q{SELECT pay('another amount', 200)}), 'mismatch', 'another amount: 200 with its key is not') foreach 1, 2;
is_paid(1, 'another amount');
is(query(q{SELECT key, fingerprint = idem_fingerprint('{"amount": 200}') FROM idem.audit WHERE event = 'mismatch'}),
	'another amount|t', 'another amount: it is noted once');
is(query(q{SELECT pay('another amount', 100)}), 'replayed {"entry" : 1, "balance" : 10100}', 'another amount: 100 is still replayed');
is(query(q{SELECT count(*), min(amount) FROM ledger}), '1|100', 'another amount: the entry is of 100');

# --- 4. mark first, work in another transaction, crash between

# with a table of one's own the effect is lost, and every retry is told that it is done
history('marked first, plain table');
query(q{CREATE TABLE seen (key text PRIMARY KEY)});
my $mark = q{WITH mark AS (INSERT INTO seen VALUES ('marked') ON CONFLICT DO NOTHING RETURNING key) SELECT CASE count(*) WHEN 1 THEN 'new' ELSE 'seen' END FROM mark};
is(query($mark), 'new', 'plain table: marked');
crash();
is(query($mark), 'seen', 'plain table: the retry takes it for done');
is_paid(0, 'plain table: lost');

# a claim is no mark: it does not get past its COMMIT alone ...
history('marked first, claim of a transaction');
($rc, $out, $err) = $node->psql('postgres', "\\set VERBOSITY sqlstate\nBEGIN; SELECT (idem_claim('payments', 'marked', '{\"amount\": 100}')).outcome; COMMIT");
like($err, qr/ID003/, 'claim of a transaction: cannot be committed before the work');
crash();
is(query(q{SELECT pay('marked', 100)}), 'executed', 'claim of a transaction: the retry executes');
is(query(q{SELECT pay('marked', 100)}), 'replayed {"entry" : 1, "balance" : 10100}', 'claim of a transaction: once');
is_paid(1, 'claim of a transaction');

# ... or it is one under a lease, which says that there is work to be done, and ends
history('marked first, claim under a lease');
my $token = query(q{SELECT (idem_claim('payments', 'leased', '{"amount": 100}', lease => '1 hour')).token});
crash();
is(query(q{SELECT pay('leased', 100)}), 'in_progress', 'lease: the retry is told that somebody is at it, not that it is done');
is_paid(0, 'lease: crashed');
query(q{UPDATE idem.inflight SET lease_until = now() WHERE key = 'leased'});
is(query(q{SELECT pay('leased', 100)}), 'executed', 'lease over: the retry executes');
is_paid(1, 'lease over');
# the first, thought dead, comes back: what it does beside the lost claim must not commit
($rc, $out, $err) = $node->psql('postgres', qq{
	\\set VERBOSITY sqlstate
	\\set ON_ERROR_STOP 0
	BEGIN; CALL pay_in('leased', 100);
	SAVEPOINT trap; SELECT idem_complete('payments', 'leased', token => $token); ROLLBACK TO trap;
	COMMIT});
is(() = $err =~ /ID001/g, 2, 'lease over: the first holder is refused, and so is its COMMIT');
is_paid(1, 'lease over: the first holder is back');

# what no library can help against: the inbox entry committed before the work is a mark
history('marked first, inbox');
is(query(q{SELECT idem_once('messages', 'marked')}), 't', 'inbox: marked');
crash();
is(query(q{SELECT idem_once('messages', 'marked')}), 'f', 'inbox: committed before the work it is a mark like any other');
is_paid(0, 'inbox: so the work belongs into its transaction');

# --- 5. an outside effect whose answer is lost

# The provider is no part of the database: what it did stays done.
{
	package Provider;

	sub new { return bless { charges => [], by_key => {} }, shift }

	# charges once for a key it knows; without a key, each time
	sub charge
	{
		my ($self, $amount, $key) = @_;

		return $self->{by_key}{$key} if defined $key && $self->{by_key}{$key};
		push @{ $self->{charges} }, $amount;
		my $receipt = 'receipt ' . @{ $self->{charges} };
		$self->{by_key}{$key} = $receipt if defined $key;
		return $receipt;
	}

	sub find_by_key { return $_[0]{by_key}{ $_[1] } }

	sub find_by_receipt
	{
		my ($self, $receipt) = @_;
		return (grep { defined $receipt && "receipt $_" eq $receipt } 1 .. @{ $self->{charges} })[0];
	}

	sub count { return scalar @{ $_[0]{charges} } }
}

sub claim_charge
{
	my ($key, $lease) = @_;
	return query(qq{SELECT outcome, attempt, response FROM idem_claim('charges', '$key', '{"amount": 100}', lease => '$lease')});
}

# The holder has committed its intent, charges, and dies before it learns the
# receipt. Its lease ends; how long it is does not matter.
sub die_after_charge
{
	my ($key, $charge) = @_;

	is(claim_charge($key, '1 ms'), 'claimed|1|', "$key: claimed, committed");
	$charge->();
	crash();
	$node->poll_query_until('postgres', qq{SELECT (idem_status('charges', '$key')).outcome = 'unknown'}) or die 'the lease does not end';
	is(claim_charge($key, '1 hour'), 'unknown|1|', "$key: the outcome is not known, and nobody charges again");
}

sub child
{
	my ($key) = @_;
	return query(qq{SELECT idem_child('charges', '$key', 'charge')});
}

# settles what is known now, together with its entry in the ledger
sub resolve
{
	my ($key, $receipt) = @_;
	return query(qq{
		BEGIN;
		SELECT idem_resolve('charges', '$key', 'succeeded', '"$receipt"');
		CALL pay_in('$key', 100);
		COMMIT});
}

# The provider was given a key that is known before the answer is: ask by it.
history('charged, key known');
my $provider = Provider->new;
die_after_charge('key known', sub { $provider->charge(100, child('key known')) });
is_paid(0, 'key known: not yet');
my $receipt = $provider->find_by_key(child('key known'));
is($receipt, 'receipt 1', 'key known: the provider knows it by the key of the step');
is(resolve('key known', $receipt), 'succeeded', 'key known: unknown becomes succeeded');
is(claim_charge('key known', '1 hour'), 'replayed|1|"receipt 1"', 'key known: the retry is told the receipt');
is_paid(1, 'key known');
is($provider->count, 1, 'key known: charged once');
is($provider->charge(100, child('key known')), 'receipt 1', 'key known: and would be, were it tried again');
is($provider->count, 1, 'key known: charged once still');

# It never arrived: asked by the key, the provider says so, and a second try is safe.
history('not charged, key known');
$provider = Provider->new;
die_after_charge('not arrived', sub { });
is($provider->find_by_key(child('not arrived')), undef, 'not arrived: the provider does not know it');
is(query(q{SELECT idem_resolve('charges', 'not arrived', 'retry')}), 'free', 'not arrived: unknown becomes free');
is(claim_charge('not arrived', '1 hour'), 'claimed|2|', 'not arrived: the retry charges');
$token = query(q{SELECT token FROM idem.inflight WHERE key = 'not arrived'});
$receipt = $provider->charge(100, child('not arrived'));
query(qq{BEGIN; SELECT idem_complete('charges', 'not arrived', '"$receipt"', $token); CALL pay_in('not arrived', 100); COMMIT});
is(claim_charge('not arrived', '1 hour'), 'replayed|2|"receipt 1"', 'not arrived: settled');
is_paid(1, 'not arrived');
is($provider->count, 1, 'not arrived: charged once');

# The provider names what it did by a receipt only, and that is in the lost answer.
history('charged, only the receipt to ask by');
$provider = Provider->new;
my $lost;
die_after_charge('no key', sub { $provider->charge(100) });
is($provider->find_by_key(child('no key')), undef, 'no key: the provider does not know the key');
is($provider->find_by_receipt($lost), undef, 'no key: and there is no receipt to ask by');
is($provider->find_by_receipt('receipt 1'), 1, 'no key: the lost one would do');
crash();
is(claim_charge('no key', '1 hour'), 'unknown|1|', 'no key: it stays unknown');
query(q{UPDATE idem.inflight SET created_at = created_at - interval '1 year', updated_at = updated_at - interval '1 year',
	lease_until = lease_until - interval '1 year' WHERE key = 'no key'});
is(claim_charge('no key', '1 hour'), 'unknown|1|', 'no key: however long');
is(query(q{SELECT count(*) FROM idem.result WHERE key = 'no key'}), '0', 'no key: nothing is settled');
is_paid(0, 'no key');
is($provider->count, 1, 'no key: charged once, and nobody can say so');
# which is why nobody may guess
$provider->charge(100);
is($provider->count, 2, 'no key: a second try would charge twice');

# --- 6. a consumer's offset

query(q{
	CREATE TABLE message (place int PRIMARY KEY, id text, amount numeric);
	INSERT INTO message VALUES (1, 'a', 100), (2, 'b', 100), (3, 'c', 100);
	CREATE TABLE consumer (name text PRIMARY KEY, place int);
	CREATE PROCEDURE move(consumer text) LANGUAGE sql AS $$UPDATE consumer SET place = place + 1 WHERE name = move.consumer$$;
	CREATE PROCEDURE work(consumer text, place int) LANGUAGE plpgsql AS $$
	DECLARE
		m message;
	BEGIN
		SELECT * INTO STRICT m FROM message WHERE message.place = work.place;
		CALL pay_in(m.id, m.amount);
	END $$;
	CREATE PROCEDURE work_once(consumer text, place int) LANGUAGE plpgsql AS $$
	BEGIN
		IF idem_once('messages', (SELECT idem_key(consumer, id) FROM message WHERE message.place = work_once.place)) THEN
			CALL work(consumer, place);
		END IF;
	END $$;
});

# Consumes all messages, each by one or two transactions. At the second message
# the server crashes: between the two, or before the COMMIT of the one.
sub consume
{
	my ($name, @transactions) = @_;
	my $crashed = 0;

	history($name);
	query(qq{INSERT INTO consumer VALUES ('$name', 0)});
	while ((my $place = query(qq{SELECT place FROM consumer WHERE name = '$name'}) + 1) <= 3)
	{
		my @sql = map { s/CONSUMER/'$name'/gr =~ s/PLACE/$place/gr } @transactions;

		if ($place == 2 && !$crashed++)
		{
			my $session = $node->background_psql('postgres');
			$session->query_safe(@sql == 1 ? "BEGIN; $sql[0]" : $sql[0]);
			crash();
			eval { $session->quit };
			next;
		}
		query("BEGIN; $_; COMMIT") foreach @sql;
	}
	return query(q{SELECT string_agg(key, ' ' ORDER BY id) FROM ledger});
}

is(consume('offset first', 'CALL move(CONSUMER)', 'CALL work_once(CONSUMER, PLACE)'), 'a c', 'offset before work: a message is lost');
is_paid(2, 'offset before work');
is(consume('work first', 'CALL work(CONSUMER, PLACE)', 'CALL move(CONSUMER)'), 'a b b c', 'work before offset: a message is paid twice');
is_paid(4, 'work before offset');
is(consume('work once first', 'CALL work_once(CONSUMER, PLACE)', 'CALL move(CONSUMER)'), 'a b c', 'work before offset, through the inbox: once');
is_paid(3, 'work before offset, through the inbox');
is(consume('together', 'CALL work_once(CONSUMER, PLACE); CALL move(CONSUMER)'), 'a b c', 'work and offset in one transaction: once');
is_paid(3, 'work and offset in one transaction');
# a message that is delivered once more, whatever the offset says
query(q{UPDATE consumer SET place = 1 WHERE name = 'together'});
query(q{BEGIN; CALL work_once('together', 2); CALL move('together'); COMMIT});
is_paid(3, 'delivered once more');
# each consumer has its own inbox
is(query(q{SELECT count(*), count(DISTINCT key) FROM idem.operation WHERE scope = 'messages' AND key ~ ':'}), '8|8', 'a key for each consumer and message');

is(query(q{SELECT count(*) FROM idem.holder}), '0', 'no key lock is left');

done_testing();

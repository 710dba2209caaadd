# The worked example of the README: pay through a provider in three short
# transactions, and crash between each two steps. Sessions have to die in the
# middle, and the provider is a second database with its own key table.

use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('provider');
$node->init;
$node->start;
$node->safe_psql('postgres', 'CREATE DATABASE shop; CREATE DATABASE provider');

# The provider charges once for each key that it is given, and says so again.
$node->safe_psql('provider', q{
CREATE TABLE charged (id int GENERATED ALWAYS AS IDENTITY, key uuid PRIMARY KEY, amount int);
CREATE FUNCTION charge_card(k uuid, a int) RETURNS int LANGUAGE sql AS $$
	INSERT INTO charged (key, amount) VALUES (k, a) ON CONFLICT (key) DO NOTHING;
	SELECT id FROM charged WHERE key = k;
$$;
});

$node->safe_psql('shop', q{
CREATE EXTENSION idem;
CREATE TABLE payment (order_id text, amount int, charge int);
INSERT INTO idem.scope (name, lease, retry_within) VALUES ('payment', '1 minute', '24 hours');
});

# --- the steps of one payment; :order, :amount, :token and :charge are the worker's

# 1 claim: from now on the intent is on record
my $claim = q{SELECT outcome, token, recovery_point, checkpoint ->> 'charge' FROM idem_claim('payment', :'order', :'request')};
# 2 ask the provider, outside of any transaction
my $child = q{SELECT idem_child('payment', :'order', 'charge')};
my $charge = q{SELECT charge_card(:'child', :amount)};
# 3 note what it said
my $checkpoint = q{SELECT idem_checkpoint('payment', :'order', :token, 'charged', jsonb_build_object('charge', :charge))};
# 4 book and settle
my $book = q{INSERT INTO payment VALUES (:'order', :amount, :charge)};
my $complete = q{SELECT idem_complete('payment', :'order', json_build_object('charge', :charge), :token)};
# the recovery worker gets what the dead one has left
my $recover = q{SELECT key, token, request ->> 'amount', recovery_point, checkpoint ->> 'charge' FROM idem_recover('payment')};

# Where a worker can die, in order. Whatever comes after "commit" has an effect
# even if the worker never hears of it.
my @points = (
	'before the claim', 'claim: before COMMIT', 'claim: after COMMIT',
	'charge: asked, not answered', 'charge: answered',
	'checkpoint: before COMMIT', 'checkpoint: after COMMIT',
	'booking: begun', 'booking: completed, before COMMIT', 'booking: after COMMIT',
	'nowhere');

# A worker is a session and what it knows.
sub worker
{
	my ($crash) = @_;
	return { session => $node->background_psql('shop', on_error_stop => 0), crash => $crash };
}

# Runs a statement; dies where the worker is to crash, taking its backend along.
sub run_sql
{
	my ($worker, $sql) = @_;
	return $worker->{session}->query($sql =~ s/:'?(\w+)'?/quoted($worker->{$1})/ger);
}

sub quoted { return defined $_[0] ? "'$_[0]'" : 'NULL' }

sub point
{
	my ($worker, $point) = @_;
	return if $worker->{crash} ne $point;
	my $pid = $worker->{session}->query('SELECT pg_backend_pid()');
	$node->safe_psql('postgres', "SELECT pg_terminate_backend($pid)");
	$node->poll_query_until('postgres', "SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = $pid");
	eval { $worker->{session}->quit };
	die "crash\n";
}

sub ask_provider
{
	my ($worker) = @_;
	return $node->safe_psql('provider', $charge =~ s/:'?(\w+)'?/quoted($worker->{$1})/ger);
}

# From wherever the last holder has come to.
sub go_on
{
	my ($worker) = @_;

	if (!$worker->{recovery_point})
	{
		$worker->{child} = run_sql($worker, $child);
		my $answer = ask_provider($worker);
		point($worker, 'charge: asked, not answered');
		$worker->{charge} = $answer;
		point($worker, 'charge: answered');

		run_sql($worker, 'BEGIN');
		run_sql($worker, $checkpoint);
		point($worker, 'checkpoint: before COMMIT');
		run_sql($worker, 'COMMIT');
		point($worker, 'checkpoint: after COMMIT');
	}

	run_sql($worker, 'BEGIN');
	run_sql($worker, $book);
	point($worker, 'booking: begun');
	run_sql($worker, $complete);
	point($worker, 'booking: completed, before COMMIT');
	run_sql($worker, 'COMMIT');
	point($worker, 'booking: after COMMIT');
	return 'paid';
}

# What a client's request comes to.
sub pay
{
	my ($worker, $order, $amount) = @_;

	return eval {
		@$worker{qw(order amount request)} = ($order, $amount, qq({"amount": $amount}));
		point($worker, 'before the claim');
		run_sql($worker, 'BEGIN');
		(my $outcome, @$worker{qw(token recovery_point charge)}) = split /\|/, run_sql($worker, $claim);
		point($worker, 'claim: before COMMIT') if $outcome eq 'claimed';
		run_sql($worker, 'COMMIT');
		point($worker, 'claim: after COMMIT') if $outcome eq 'claimed';
		$outcome eq 'claimed' ? go_on($worker) : $outcome;
	} // ($@ eq "crash\n" ? 'crash' : die $@);
}

# What a recovery worker comes to: it takes what it finds.
sub recover
{
	my ($worker) = @_;

	return eval {
		@$worker{qw(order token amount recovery_point charge)} = split /\|/, run_sql($worker, $recover);
		return 'nothing' if !defined $worker->{order};
		point($worker, 'claim: after COMMIT');
		go_on($worker);
	} // ($@ eq "crash\n" ? 'crash' : die $@);
}

# The minute of the lease goes by.
sub lease_is_over
{
	$node->safe_psql('shop', q{UPDATE idem.inflight SET lease_until = now()});
}

sub truth
{
	my ($order) = @_;
	my $key = $node->safe_psql('shop', "SELECT idem_child('payment', '$order', 'charge')");
	my $charges = $node->safe_psql('provider', "SELECT count(*), sum(amount) FROM charged WHERE key = '$key'");
	my $booked = $node->safe_psql('shop', "SELECT count(*), sum(amount) FROM payment WHERE order_id = '$order'");
	my $state = $node->safe_psql('shop', "SELECT state FROM idem.operation WHERE key = '$order'");
	return "$charges, $booked, $state";
}

sub finish
{
	my ($worker) = @_;
	$worker->{session}->quit if $worker->{session};
}

# --- every crash point, and again for the worker that recovers

my @table;
my $orders = 0;
foreach my $first (@points)
{
	foreach my $second ($first eq 'nowhere' ? 'nowhere' : ($first, 'nowhere'))
	{
		my $order = 'order-' . ++$orders;
		my $amount = 100 + $orders;

		my $worker = worker($first);
		my @story = (pay($worker, $order, $amount));
		finish($worker) if $story[0] ne 'crash';

		lease_is_over();
		$worker = worker($second);
		push @story, recover($worker);
		finish($worker) if $story[1] ne 'crash';

		lease_is_over();
		$worker = worker('nowhere');
		push @story, recover($worker);
		finish($worker);

		# the client has heard nothing, and asks again until it is answered
		$worker = worker('nowhere');
		push @story, pay($worker, $order, $amount);
		push @story, pay($worker, $order, $amount);
		is($node->safe_psql('shop', qq{SELECT response ->> 'charge' FROM idem_claim('payment', '$order')}),
			$node->safe_psql('provider', qq{SELECT id FROM charged WHERE amount = $amount}), "$first, $second: the client gets its charge")
			if $story[-1] eq 'replayed';
		finish($worker);

		is($story[-1], 'replayed', "$first, $second: the last answer is a replay");
		is(truth($order), "1|$amount, 1|$amount, succeeded", "$first, $second: one charge, one booking");
		is($story[0] eq 'crash', $first ne 'nowhere', "$first: the worker dies there, if anywhere");
		push @table, [ $first, $second, @story, truth($order) ];
	}
}

# --- a worker that was only slow, and wakes up at any point

foreach my $point (grep { !/before the claim|before COMMIT|nowhere|begun|booking/ } @points)
{
	my $order = 'order-' . ++$orders;
	my $amount = 100 + $orders;

	# it stops there, and does not die
	my $slow = worker('nowhere');
	@$slow{qw(order amount request)} = ($order, $amount, qq({"amount": $amount}));
	(my $outcome, @$slow{qw(token recovery_point charge)}) = split /\|/, run_sql($slow, $claim);
	if ($point =~ /^(charge|checkpoint)/)
	{
		$slow->{child} = run_sql($slow, $child);
		$slow->{charge} = ask_provider($slow);
		run_sql($slow, $checkpoint) if $point =~ /^checkpoint/;
		$slow->{recovery_point} = 'charged' if $point =~ /^checkpoint/;
	}

	lease_is_over();
	my $worker = worker('nowhere');
	my @story = ("slow at $point", recover($worker));
	finish($worker);

	# now it goes on; its booking must not be committed
	my $offset = -s $node->logfile;
	go_on($slow);
	my $fenced = slurp_file($node->logfile, $offset) =~ /ERROR:  the lease on the key was lost/ ? 'ID001' : 'no error';
	my $charged = truth($order);
	finish($slow);
	$worker = worker('nowhere');
	push @story, pay($worker, $order, $amount);
	finish($worker);

	is($story[1], 'paid', "slow, $point: the other has paid");
	is($fenced, 'ID001', "slow, $point: the slow one is fenced off");
	is($charged, "1|$amount, 1|$amount, succeeded", "slow, $point: one charge, one booking");
	is($story[2], 'replayed', "slow, $point: the client gets an answer");
	push @table, [ "slow: $point", 'nowhere', 'slow', $story[1], $fenced, $story[2], '', truth($order) ];
}

# --- the provider forgets keys after a day: no second try after that

my $worker = worker('charge: asked, not answered');
is(pay($worker, 'late', 7), 'crash', 'late: the worker dies');
lease_is_over();
$node->safe_psql('shop', q{UPDATE idem.inflight SET created_at = created_at - interval '25 hours' WHERE key = 'late'});
$worker = worker('nowhere');
is(recover($worker), 'nothing', 'late: the recovery worker leaves it alone');
is(pay($worker, 'late', 7), 'unknown', 'late: nobody executes what the provider would not recognise');
is($node->safe_psql('shop', q{SELECT idem_resolve('payment', 'late', 'succeeded', '{"charge": "by hand"}')}), 'succeeded', 'late: somebody looks it up');
is(pay($worker, 'late', 7), 'replayed', 'late: and that is the answer');
finish($worker);

is($node->safe_psql('provider', 'SELECT count(*) FROM charged'), $orders + 1, 'truth: one charge an order');
is($node->safe_psql('shop', 'SELECT count(*) = count(DISTINCT order_id) FROM payment'), 't', 'truth: one booking an order');
is($node->safe_psql('shop', 'SELECT count(*) FROM idem.inflight'), '0', 'truth: nothing is left in flight');

note sprintf '%-36s %-36s %-8s %-10s %-10s %-10s %-10s %s', 'the worker dies at', 'the recovery worker at', 'worker', 'recovery', 'again', 'client', 'client', 'charges, bookings, state';
note sprintf '%-36s %-36s %-8s %-10s %-10s %-10s %-10s %s', @$_ foreach @table;

done_testing();

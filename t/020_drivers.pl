# The main flows through the drivers that people use: what they make of parameters,
# prepared statements, pipelines and errors at COMMIT cannot be seen in SQL. A
# driver that is not there is skipped.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/drivers";
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Drivers;

my $node = drivers_new_node('drivers');

drivers_run($_, $node->host, $node->port, 'direct') foreach drivers_names();

# --- plain psql

foreach my $expected (qw(claimed replayed))
{
	my $out = $node->safe_psql('postgres', "\\set key psql\n\\i $FindBin::RealBin/drivers/flows.psql");
	like($out, qr/^$expected\z/m, "psql: $expected");
}
is($node->safe_psql('postgres', q{SELECT count(*) FROM payment WHERE key = 'psql'}), '1', 'psql: one payment was made');

# --- nobody was paid twice, whatever was done above

is($node->safe_psql('postgres', q{SELECT key FROM payment WHERE key NOT LIKE '% batch' GROUP BY key HAVING count(*) > 1}),
	'', 'no key was paid twice');

# --- what the README shows is what was run

my $readme = "$FindBin::RealBin/../README.md";
my $text = -e $readme ? slurp_file($readme) : '';
my $snippets = drivers_snippets();
is(scalar keys %$snippets, 5, 'each program has a part for the README');
foreach my $file (sort keys %$snippets)
{
	my ($snippet, $shown) = ($snippets->{$file}, $text);
	$snippet =~ s/^[ \t]+//mg;
	$shown =~ s/^[ \t]+//mg;

	# the line that starts it, if it is shown at all
	my ($first) = grep { /pay\(|idem_claim/ } split /\n/, $snippet;
	my $tests = index($shown, $first) >= 0;
  SKIP:
	{
		skip "the README does not show $file", 1 if !$tests;
		ok(index($shown, $snippet) >= 0, "the README shows $file as it is");
	}
}

done_testing();

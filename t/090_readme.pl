# Copyright (c) 2026, the idem developers

# The README's examples are run by sql/readme.sql. What SQL cannot show is that
# none of them is missing there.

use strict;
use warnings;
use Test::More;

sub slurp
{
	my ($file) = @_;
	local $/;
	open my $fh, '<', $file or die "$file: $!";
	return <$fh>;
}

sub normal
{
	my ($text) = @_;
	$text =~ s/\s+/ /g;
	$text =~ s/^ | $//g;
	return $text;
}

my $run = normal(slurp('sql/readme.sql'));
my @blocks = slurp('README.md') =~ /^```sql\n(.*?)^```/msg;

cmp_ok(scalar @blocks, '>', 5, 'the README has examples');
foreach my $block (@blocks)
{
	my ($first) = split /\n/, $block;
	ok(index($run, normal($block)) >= 0, "sql/readme.sql runs: $first");
}

done_testing();

# Runs the canonical form over test data that is too large for the repository:
# conformance vectors, real payloads, and the published ES6 number sequence, in
# databases of three encodings.  SQL scripts cannot read files of the client,
# nor change a database's encoding.
#
# The data is in IDEM_TESTDATA, or beside the project in ../shared/testdata.

use strict;
use warnings;

use Digest::SHA qw(sha256_hex);
use File::Basename;
use JSON::PP;
use MIME::Base64;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $data = $ENV{IDEM_TESTDATA}
  || dirname(__FILE__) . '/../../shared/testdata';
plan skip_all => "no test data in $data" unless -d "$data/jcs";

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init(extra => [ '--encoding=UTF8', '--locale=C' ]);
$node->append_conf('postgresql.conf', "fsync = off\n");
$node->start;
$node->safe_psql('postgres', 'CREATE EXTENSION idem');

# SQLSTATE or hexadecimal canonical bytes of what a client sends
$node->safe_psql('postgres', <<'SQL');
CREATE FUNCTION try(input bytea, type text, strict boolean) RETURNS text LANGUAGE plpgsql AS $$
DECLARE result text;
BEGIN
	EXECUTE format('SELECT idem_canonical(convert_from($1, ''UTF8'')::%s, $2)', type)
		INTO result USING input, strict;
	RETURN encode(convert_to(result, 'UTF8'), 'hex');
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE;
END $$;
CREATE FUNCTION digest(input bytea, type text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE result text;
BEGIN
	EXECUTE format('SELECT idem_fingerprint(convert_from($1, ''UTF8'')::%s)', type)
		INTO result USING input;
	RETURN result;
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE;
END $$;
SQL

sub slurp
{
	my $file = shift;
	open(my $handle, '<:raw', $file) or die "$file: $!";
	local $/;
	return <$handle>;
}

# rows of tab-separated fields without special characters, into a table
sub load
{
	my ($table, $columns, $rows) = @_;
	$node->safe_psql('postgres', "CREATE TABLE $table ($columns);\n"
		  . "COPY $table FROM stdin;\n"
		  . join('', map { join("\t", @$_) . "\n" } @$rows)
		  . "\\.\n");
}

sub query
{
	return map { [ split /\|/, $_, -1 ] } split /\n/, $node->safe_psql('postgres', shift);
}

# what a list of problems comes to
sub none
{
	my ($count, $name, @problems) = @_;
	is(scalar(@problems), 0, "$name: $count cases");
	diag("$name: $_") for grep { defined } @problems[ 0 .. 9 ];
}

# ---- documents ----

my @cases;
for my $file ('vectors', 'jsontestsuite', 'reported')
{
	for my $case (@{ decode_json(slurp("$data/jcs/$file.json")) })
	{
		push @cases, { %$case, name => $case->{id} } unless $case->{a};
		push @cases, { %{ $case->{$_} }, name => "$case->{id}/$_" }
		  for grep { $case->{$_} } ('a', 'b');
	}
}
for my $case (@cases)
{
	if (my $gen = $case->{input_gen})
	{
		my $input = $gen->{open} x $gen->{count} . $gen->{leaf} . $gen->{close} x $gen->{count};
		$case->{input_hex} = unpack('H*', $input);
		$case->{canonical_hex} = $case->{input_hex} if $case->{rfc8785} eq 'ok';
	}
}
load('doc', 'n int, input bytea',
	[ map { [ $_, "\\\\x$cases[$_]{input_hex}" ] } 0 .. $#cases ]);
my @got = query('SELECT n, try(input, $$text$$, false), try(input, $$text$$, true),
	try(input, $$json$$, false), try(input, $$jsonb$$, false),
	digest(input, $$text$$), digest(input, $$json$$)
	FROM doc ORDER BY n');

my (@exact, @strict, @json, @jsonb, @digest, %result, $json_checked, $jsonb_checked);
my %class_state = (
	grammar => qr/^22P02$/, utf8 => qr/^22021$/, bom => qr/^22P02$/,
	lone_surrogate => qr/^22P02$/, duplicate_key => qr/^22030$/,
	depth => qr/^(54001|22P02)$/);
for my $row (@got)
{
	my ($n, $exact, $strict, $json, $jsonb, @digests) = @$row;
	my $case = $cases[$n];
	my $want = $case->{exact_hex} // ($case->{rfc8785} eq 'ok' ? $case->{canonical_hex} : undef);
	my $state = $class_state{ $case->{error_class} // '' } // qr/^(?=.....$)(22|54)/;

	# PostgreSQL's text has no zero byte
	$state = qr/^22021$/ if $case->{input_hex} =~ /^(..)*00/;
	if (defined $want ? $exact ne $want : $exact !~ $state)
	{
		push @exact, "$case->{name}: $exact, not " . ($want // $case->{error_class});
	}
	if ($case->{strict} eq 'ok' ? $strict ne $case->{canonical_hex} : $strict !~ /^(?=.....$)(22|54)/)
	{
		push @strict, "$case->{name}: $strict";
	}
	push @strict, "$case->{name}: $strict"
	  if ($case->{strict_error_class} // '') eq 'number_not_exact' && $strict ne '22003';

	# json keeps the text, so it differs only where its input refuses
	$json_checked++;
	push @json, "$case->{name}: $json" if $json ne $exact;

	# jsonb agrees wherever it keeps the value
	my $via = $case->{via_jsonb_hex} // $want;
	if (($case->{pg15_jsonb} // '') eq 'ok' && defined $via)
	{
		$jsonb_checked++;
		push @jsonb, "$case->{name}: $jsonb, not $via" if $jsonb ne $via;
	}
	if (defined $want)
	{
		my $sha = sha256_hex(pack('H*', $want));
		push @digest, "$case->{name}: data" if ($case->{exact_sha256} // $case->{sha256} // $sha) ne $sha;
		push @digest, "$case->{name}: $digests[0]" if $digests[0] ne $sha || $digests[1] ne $sha;
	}
	else
	{
		push @digest, "$case->{name}: $digests[0]" if $digests[0] ne $exact;
	}
	$result{ $case->{name} } = { exact => $digests[0], strict => $strict };
}
none(scalar(@got), 'documents, exact', @exact);
none(scalar(@got), 'documents, strict', @strict);
none($json_checked, 'documents as json', @json);
none($jsonb_checked, 'documents as jsonb', @jsonb);
none(scalar(@got), 'digests', @digest);

my @pairs = grep { $_->{a} } @{ decode_json(slurp("$data/jcs/reported.json")) };
my @wrong;
for my $pair (@pairs)
{
	for my $profile ('exact', 'strict')
	{
		my ($a, $b) = map { $result{"$pair->{id}/$_"}{$profile} } ('a', 'b');
		my $relation = $a =~ /^.{5}$/ || $b =~ /^.{5}$/ ? 'error' : $a eq $b ? 'equal' : 'differ';

		push @wrong, "$pair->{id}: $relation" if $relation ne $pair->{"relation_$profile"};
	}
}
none(scalar(@pairs), 'pairs', @wrong);

# ---- numbers ----

my (undef, @lines) = split /\n/, slurp("$data/jcs/numbers.tsv");
load('number', 'bits text, token text, es6 text, same boolean, class text',
	[ map { [ split /\t/ ] } @lines ]);
# what ECMAScript writes is its own canonical form and survives; the 17 digits
# survive exactly if they are the same decimal
none(scalar(@lines), 'doubles', map { "@$_" } query(<<'SQL'));
SELECT token, es6 FROM number
WHERE idem_canonical(es6, true) <> es6
   OR try(token::bytea, 'text', true) <> CASE WHEN same THEN encode(es6::bytea, 'hex') ELSE '22003' END
   OR idem_fingerprint(token) <> idem_fingerprint(token::jsonb)
SQL

(undef, @lines) = split /\n/, slurp("$data/jcs/number_tokens.tsv");
load('token', 'token text, es6 text, strict text, exact text, class text',
	[ map { [ split /\t/ ] } @lines ]);
none(scalar(@lines), 'number tokens', map { "@$_" } query(<<'SQL'));
SELECT token, strict, exact, idem_canonical(token), try(token::bytea, 'text', true) FROM token
WHERE idem_canonical(token) <> exact
   OR try(token::bytea, 'text', true) <> CASE strict WHEN 'ok' THEN encode(es6::bytea, 'hex') ELSE '22003' END
SQL

# ---- payloads ----

# each file once as it is and once as jsonb writes it: members in another order,
# other white space and other escapes
my (undef, @manifest) = split /\n/, slurp("$data/payloads/manifest.tsv");
my @payloads = map { [ (split /\t/)[ 0, 6 ] ] } @manifest;
load('payload', 'file text, dup_names int, doc text',
	[ map { [ @$_, slurp("$data/payloads/$_->[0]") =~ s/([\\\t\n\r])/"\\" . ($1 eq "\\" ? "\\" : $1 eq "\t" ? "t" : $1 eq "\n" ? "n" : "r")/ger ] } @payloads ]);
none(scalar(@payloads), 'payloads', map { "@$_" } query(<<'SQL'));
SELECT file, digest(convert_to(doc, 'UTF8'), 'text') FROM payload
WHERE CASE WHEN dup_names > 0 THEN digest(convert_to(doc, 'UTF8'), 'text') <> '22030'
	ELSE idem_fingerprint(doc) <> idem_fingerprint(jsonb_pretty(doc::jsonb))
	OR idem_fingerprint(doc) <> idem_fingerprint(doc::json)
	OR idem_fingerprint(doc) <> idem_fingerprint(doc::jsonb)
	OR idem_fingerprint(doc)::bytea <> sha256(convert_to(idem_canonical(doc), 'UTF8')) END
SQL
is( $node->safe_psql('postgres',
		'SELECT count(DISTINCT doc::jsonb) - count(DISTINCT idem_fingerprint(doc)) FROM payload WHERE dup_names = 0'),
	'0', 'payloads are told apart as jsonb does');

# the log of requests: each against the first of its key
my $expected = decode_json(slurp("$data/payloads/expected.json"));
$node->safe_psql('postgres', <<SQL);
CREATE TABLE log (line json);
COPY log FROM '$data/payloads/requests.jsonl' WITH (FORMAT csv, QUOTE E'\x01', DELIMITER E'\x02', ENCODING 'UTF8');
CREATE TABLE request AS
SELECT seq, kind, variant, request, idem_fingerprint(request) = first_value(idem_fingerprint(request)) OVER key AS same,
	idem_fingerprint(request, NULL, '{/sent_at}') = first_value(idem_fingerprint(request, NULL, '{/sent_at}')) OVER key AS same_but_sent_at,
	row_number() OVER key AS n
FROM (SELECT (line->>'seq')::int AS seq, line->>'scope' AS scope, line->>'key' AS key, line->>'kind' AS kind,
	line->>'variant' AS variant, line->>'request' AS request FROM log) AS l
WINDOW key AS (PARTITION BY scope, key ORDER BY seq);
SQL
my $lines = $expected->{total}{lines};
none($lines, 'requests', map { "@$_" } query(<<'SQL'));
SELECT seq, kind, variant FROM request
WHERE same <> (kind <> 'mismatch') OR same_but_sent_at <> (kind <> 'mismatch' OR variant = 'volatile')
SQL
is( $node->safe_psql('postgres', <<'SQL'),
SELECT count(*), count(*) FILTER (WHERE n = 1), count(*) FILTER (WHERE n > 1 AND same), count(*) FILTER (WHERE NOT same) FROM request
SQL
	join('|', map { $expected->{total}{$_} } 'lines', 'first_executions', 'replays', 'mismatches'),
	'executions, replays and mismatches of the log');

# strict refuses just the bodies that a double would change
is( $node->safe_psql('postgres', <<'SQL'),
CREATE FUNCTION doubles(doc jsonb) RETURNS boolean LANGUAGE sql AS $$
	SELECT bool_and(CASE jsonb_typeof(v) WHEN 'number' THEN v::text::numeric = v::text::float8::text::numeric
		WHEN 'object' THEN (SELECT COALESCE(bool_and(doubles(value)), true) FROM jsonb_each(v))
		WHEN 'array' THEN (SELECT COALESCE(bool_and(doubles(value)), true) FROM jsonb_array_elements(v)) ELSE true END)
	FROM (VALUES (doc)) AS t(v) $$;
SELECT count(*) > 0, count(*) FILTER (WHERE result NOT LIKE '7b%' AND result <> '22003'), count(*) FILTER (WHERE doubles <> (result <> '22003'))
FROM (SELECT doubles(request::jsonb), try(convert_to(request, 'UTF8'), 'text', true) AS result FROM request
	WHERE seq % 20 = 0 OR variant = 'amount_big' OR request ~ '[0-9]{16}') AS t
SQL
	't|0|0', 'strict refuses numbers of the log that no double holds');

# ---- the ES6 sequence ----

my %published = map { $_->{lines} => $_->{sha256} }
  @{ decode_json(slurp("$data/jcs/es6_sequence.json"))->{checksums} };
{
	local %ENV = (%ENV, PGHOST => $node->host, PGPORT => $node->port, PGDATABASE => 'postgres');
	my ($out, $err) = run_command([ $^X, dirname(__FILE__) . '/../bench/es6', 1_000_000 ]);
	is($out, "1000000 lines: $published{1000000}", 'ES6 number sequence, 1000000 lines');
	diag($err) if $err ne '';
}

done_testing();

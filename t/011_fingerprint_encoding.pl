# Fingerprints in databases that are not UTF-8: a server encoding belongs to a
# database, and the scripts of pg_regress all run in one.

use strict;
use warnings;

use Digest::SHA;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init(extra => [ '--encoding=UTF8', '--locale=C' ]);
$node->append_conf('postgresql.conf', "fsync = off\n");
$node->start;

for my $encoding ('UTF8', 'LATIN1', 'SQL_ASCII')
{
	$node->safe_psql('postgres', "CREATE DATABASE \"$encoding\" ENCODING '$encoding' TEMPLATE template0");
	$node->safe_psql($encoding, <<'SQL');
CREATE EXTENSION idem;
-- documents come as bytes of the server encoding, whatever the client's
CREATE FUNCTION raw(bytes bytea) RETURNS text LANGUAGE sql AS
	$$ SELECT convert_from(bytes, getdatabaseencoding()) $$;
CREATE FUNCTION try(query text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE result text;
BEGIN
	EXECUTE query INTO result;
	RETURN result;
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE;
END $$;
SQL
}

sub all_types
{
	my ($database, $bytes, $rest) = @_;
	return join ' ', map {
		$node->safe_psql($database, "SELECT try(\$q\$SELECT idem_fingerprint(raw('$bytes')::$_$rest)\$q\$)")
	} 'text', 'json', 'jsonb';
}

# {"é":"ÿ","a":1} in the encoding of each database
my $utf8 = '\x7b22c3a9223a22c3bf222c2261223a317d';
my $latin1 = '\x7b22e9223a22ff222c2261223a317d';
my $escaped = '{"a":1.0,"\u00e9":"\u00ff"}';
my $digest = $node->safe_psql('UTF8', "SELECT idem_fingerprint('$escaped')");
is($digest, unpack('H*', Digest::SHA::sha256("{\"a\":1,\"\xc3\xa9\":\"\xc3\xbf\"}")), 'the digest is of UTF-8');
is(all_types('UTF8', $utf8, ''), "$digest $digest $digest", 'UTF8');
is(all_types('LATIN1', $latin1, ''), "$digest $digest $digest", 'LATIN1 is converted');
is(all_types('SQL_ASCII', $utf8, ''), "$digest $digest $digest", 'SQL_ASCII takes UTF-8');
is(all_types('SQL_ASCII', $latin1, ''), '22021 22021 22021', 'and refuses what is not');

# text and json escapes mean the same everywhere; jsonb cannot keep them all
is($node->safe_psql($_, "SELECT idem_fingerprint('$escaped'), idem_fingerprint('$escaped'::json)"),
	"$digest|$digest", "escapes in $_")
  for 'UTF8', 'LATIN1', 'SQL_ASCII';
is($node->safe_psql('LATIN1', q{SELECT idem_fingerprint('{"x":"\u20ac\ud83d\ude00"}')}),
	$node->safe_psql('UTF8', q{SELECT idem_fingerprint('{"x":"\u20ac\ud83d\ude00"}')}),
	'escapes of what the server encoding does not have');

is($node->safe_psql('LATIN1', q{SELECT try($q$SELECT idem_fingerprint('{"x":"\u20ac"}'::jsonb)$q$)}), '22P05',
	'which jsonb refuses');

# canonical text is text, so it must fit the server encoding
is($node->safe_psql('LATIN1', "SELECT encode(convert_to(idem_canonical(raw('$latin1')), 'LATIN1'), 'hex')"),
	'7b2261223a312c22e9223a22ff227d', 'canonical text in LATIN1');
is($node->safe_psql('LATIN1', q{SELECT try($q$SELECT idem_canonical('"\u20ac"')$q$)}), '22P05',
	'canonical text that LATIN1 does not have');
is($node->safe_psql('SQL_ASCII', "SELECT encode(idem_canonical(raw('$utf8'))::bytea, 'hex')"),
	'7b2261223a312c22c3a9223a22c3bf227d', 'canonical text in SQL_ASCII');

# pointers are text of the server encoding too: /é
my $kept = $node->safe_psql('UTF8', q{SELECT idem_fingerprint('{"\u00e9":"\u00ff"}')});
is(all_types('LATIN1', $latin1, ", ARRAY[raw('\\x2fe9')]"), "$kept $kept $kept", 'include in LATIN1');
is(all_types('SQL_ASCII', $utf8, ", ARRAY[raw('\\x2fc3a9')]"), "$kept $kept $kept", 'include in SQL_ASCII');
is(all_types('SQL_ASCII', $utf8, ", ARRAY[raw('\\x2fe9')]"), '22021 22021 22021', 'include that is not UTF-8');

# messages quote the document in the server's encoding, not half converted
my (undef, undef, $error) = $node->psql('LATIN1', "SELECT idem_canonical(raw('\\x7b22e9227d'))",
	extra_params => [ '-v', 'SHOW_CONTEXT=always' ]);
like($error, qr/invalid input syntax for type json/, 'an error in LATIN1');
like($error, qr/\{"(\xc3\xa9|\xe9|\x{e9})"\}/, 'and what it quotes');
is($node->safe_psql('LATIN1', "SELECT try(\$q\$SELECT idem_canonical(raw('\\x7b22e9223a312c22e9223a327d'))\$q\$)"),
	'22030', 'duplicate names in LATIN1');

done_testing();

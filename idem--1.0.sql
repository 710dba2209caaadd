/* idem--1.0.sql */

-- complain if script is sourced in psql, rather than via CREATE EXTENSION
\echo Use "CREATE EXTENSION idem" to load this file. \quit

-- Relations live in a schema of their own, which must not exist yet: what
-- somebody else prepared under this name is never adopted.
CREATE SCHEMA idem;
COMMENT ON SCHEMA idem IS 'tables and views of the extension idem; functions are in the schema chosen by CREATE EXTENSION';
GRANT USAGE ON SCHEMA idem TO PUBLIC;

/* ---- idem_digest: the fingerprint of a request ---- */

CREATE TYPE @extschema@.idem_digest;

CREATE FUNCTION @extschema@.idem_digest_in(cstring) RETURNS @extschema@.idem_digest
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_digest_in(cstring) IS 'I/O: 64 hexadecimal digits; 22P02 otherwise';
CREATE FUNCTION @extschema@.idem_digest_out(@extschema@.idem_digest) RETURNS cstring
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_digest_out(@extschema@.idem_digest) IS 'I/O: 64 lower-case hexadecimal digits';
CREATE FUNCTION @extschema@.idem_digest_recv(internal) RETURNS @extschema@.idem_digest
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_digest_recv(internal) IS 'I/O: 32 bytes; 22P03 otherwise';
CREATE FUNCTION @extschema@.idem_digest_send(@extschema@.idem_digest) RETURNS bytea
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_digest_send(@extschema@.idem_digest) IS 'I/O: 32 bytes';

CREATE TYPE @extschema@.idem_digest (
	INPUT = @extschema@.idem_digest_in,
	OUTPUT = @extschema@.idem_digest_out,
	RECEIVE = @extschema@.idem_digest_recv,
	SEND = @extschema@.idem_digest_send,
	INTERNALLENGTH = 32,
	ALIGNMENT = char,
	STORAGE = plain
);
COMMENT ON TYPE @extschema@.idem_digest IS 'SHA-256 fingerprint of a request: 32 bytes, written as 64 hexadecimal digits';

CREATE FUNCTION @extschema@.idem_digest_eq(@extschema@.idem_digest, @extschema@.idem_digest) RETURNS boolean
	LANGUAGE C IMMUTABLE STRICT LEAKPROOF PARALLEL SAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_digest_eq(@extschema@.idem_digest, @extschema@.idem_digest) IS 'implementation of = operator';
CREATE FUNCTION @extschema@.idem_digest_ne(@extschema@.idem_digest, @extschema@.idem_digest) RETURNS boolean
	LANGUAGE C IMMUTABLE STRICT LEAKPROOF PARALLEL SAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_digest_ne(@extschema@.idem_digest, @extschema@.idem_digest) IS 'implementation of <> operator';
CREATE FUNCTION @extschema@.idem_digest_lt(@extschema@.idem_digest, @extschema@.idem_digest) RETURNS boolean
	LANGUAGE C IMMUTABLE STRICT LEAKPROOF PARALLEL SAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_digest_lt(@extschema@.idem_digest, @extschema@.idem_digest) IS 'implementation of < operator';
CREATE FUNCTION @extschema@.idem_digest_le(@extschema@.idem_digest, @extschema@.idem_digest) RETURNS boolean
	LANGUAGE C IMMUTABLE STRICT LEAKPROOF PARALLEL SAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_digest_le(@extschema@.idem_digest, @extschema@.idem_digest) IS 'implementation of <= operator';
CREATE FUNCTION @extschema@.idem_digest_gt(@extschema@.idem_digest, @extschema@.idem_digest) RETURNS boolean
	LANGUAGE C IMMUTABLE STRICT LEAKPROOF PARALLEL SAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_digest_gt(@extschema@.idem_digest, @extschema@.idem_digest) IS 'implementation of > operator';
CREATE FUNCTION @extschema@.idem_digest_ge(@extschema@.idem_digest, @extschema@.idem_digest) RETURNS boolean
	LANGUAGE C IMMUTABLE STRICT LEAKPROOF PARALLEL SAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_digest_ge(@extschema@.idem_digest, @extschema@.idem_digest) IS 'implementation of >= operator';
CREATE FUNCTION @extschema@.idem_digest_cmp(@extschema@.idem_digest, @extschema@.idem_digest) RETURNS integer
	LANGUAGE C IMMUTABLE STRICT LEAKPROOF PARALLEL SAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_digest_cmp(@extschema@.idem_digest, @extschema@.idem_digest) IS 'btree order: bytewise';
CREATE FUNCTION @extschema@.idem_digest_hash(@extschema@.idem_digest) RETURNS integer
	LANGUAGE C IMMUTABLE STRICT LEAKPROOF PARALLEL SAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_digest_hash(@extschema@.idem_digest) IS 'hash';
CREATE FUNCTION @extschema@.idem_digest_hash_extended(@extschema@.idem_digest, bigint) RETURNS bigint
	LANGUAGE C IMMUTABLE STRICT LEAKPROOF PARALLEL SAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_digest_hash_extended(@extschema@.idem_digest, bigint) IS 'hash with a seed';

CREATE OPERATOR @extschema@.= (
	LEFTARG = @extschema@.idem_digest, RIGHTARG = @extschema@.idem_digest, FUNCTION = @extschema@.idem_digest_eq,
	COMMUTATOR = OPERATOR(@extschema@.=), NEGATOR = OPERATOR(@extschema@.<>), RESTRICT = eqsel, JOIN = eqjoinsel, HASHES, MERGES
);
CREATE OPERATOR @extschema@.<> (
	LEFTARG = @extschema@.idem_digest, RIGHTARG = @extschema@.idem_digest, FUNCTION = @extschema@.idem_digest_ne,
	COMMUTATOR = OPERATOR(@extschema@.<>), NEGATOR = OPERATOR(@extschema@.=), RESTRICT = neqsel, JOIN = neqjoinsel
);
CREATE OPERATOR @extschema@.< (
	LEFTARG = @extschema@.idem_digest, RIGHTARG = @extschema@.idem_digest, FUNCTION = @extschema@.idem_digest_lt,
	COMMUTATOR = OPERATOR(@extschema@.>), NEGATOR = OPERATOR(@extschema@.>=), RESTRICT = scalarltsel, JOIN = scalarltjoinsel
);
CREATE OPERATOR @extschema@.<= (
	LEFTARG = @extschema@.idem_digest, RIGHTARG = @extschema@.idem_digest, FUNCTION = @extschema@.idem_digest_le,
	COMMUTATOR = OPERATOR(@extschema@.>=), NEGATOR = OPERATOR(@extschema@.>), RESTRICT = scalarlesel, JOIN = scalarlejoinsel
);
CREATE OPERATOR @extschema@.> (
	LEFTARG = @extschema@.idem_digest, RIGHTARG = @extschema@.idem_digest, FUNCTION = @extschema@.idem_digest_gt,
	COMMUTATOR = OPERATOR(@extschema@.<), NEGATOR = OPERATOR(@extschema@.<=), RESTRICT = scalargtsel, JOIN = scalargtjoinsel
);
CREATE OPERATOR @extschema@.>= (
	LEFTARG = @extschema@.idem_digest, RIGHTARG = @extschema@.idem_digest, FUNCTION = @extschema@.idem_digest_ge,
	COMMUTATOR = OPERATOR(@extschema@.<=), NEGATOR = OPERATOR(@extschema@.<), RESTRICT = scalargesel, JOIN = scalargejoinsel
);
COMMENT ON OPERATOR @extschema@.= (@extschema@.idem_digest, @extschema@.idem_digest) IS 'equal';
COMMENT ON OPERATOR @extschema@.<> (@extschema@.idem_digest, @extschema@.idem_digest) IS 'not equal';
COMMENT ON OPERATOR @extschema@.< (@extschema@.idem_digest, @extschema@.idem_digest) IS 'less than';
COMMENT ON OPERATOR @extschema@.<= (@extschema@.idem_digest, @extschema@.idem_digest) IS 'less than or equal';
COMMENT ON OPERATOR @extschema@.> (@extschema@.idem_digest, @extschema@.idem_digest) IS 'greater than';
COMMENT ON OPERATOR @extschema@.>= (@extschema@.idem_digest, @extschema@.idem_digest) IS 'greater than or equal';

CREATE OPERATOR CLASS @extschema@.idem_digest_ops DEFAULT FOR TYPE @extschema@.idem_digest USING btree AS
	OPERATOR 1 @extschema@.<, OPERATOR 2 @extschema@.<=, OPERATOR 3 @extschema@.=,
	OPERATOR 4 @extschema@.>=, OPERATOR 5 @extschema@.>,
	FUNCTION 1 @extschema@.idem_digest_cmp(@extschema@.idem_digest, @extschema@.idem_digest);
CREATE OPERATOR CLASS @extschema@.idem_digest_ops DEFAULT FOR TYPE @extschema@.idem_digest USING hash AS
	OPERATOR 1 @extschema@.=,
	FUNCTION 1 @extschema@.idem_digest_hash(@extschema@.idem_digest),
	FUNCTION 2 @extschema@.idem_digest_hash_extended(@extschema@.idem_digest, bigint);
COMMENT ON OPERATOR CLASS @extschema@.idem_digest_ops USING btree IS 'bytewise order of fingerprints';
COMMENT ON OPERATOR CLASS @extschema@.idem_digest_ops USING hash IS 'hash of fingerprints';

CREATE FUNCTION @extschema@.idem_digest(bytea) RETURNS @extschema@.idem_digest
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idem_digest_from_bytea';
COMMENT ON FUNCTION @extschema@.idem_digest(bytea) IS 'cast: 32 bytes; 22023 for any other length';
CREATE FUNCTION @extschema@.bytea(@extschema@.idem_digest) RETURNS bytea
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idem_digest_to_bytea';
COMMENT ON FUNCTION @extschema@.bytea(@extschema@.idem_digest) IS 'cast: the 32 bytes';
CREATE CAST (bytea AS @extschema@.idem_digest) WITH FUNCTION @extschema@.idem_digest(bytea);
COMMENT ON CAST (bytea AS @extschema@.idem_digest) IS 'a fingerprint from its 32 bytes';
CREATE CAST (@extschema@.idem_digest AS bytea) WITH FUNCTION @extschema@.bytea(@extschema@.idem_digest);
COMMENT ON CAST (@extschema@.idem_digest AS bytea) IS 'the 32 bytes of a fingerprint';

/* ---- fingerprints ---- */

CREATE FUNCTION @extschema@.idem_canonical(request text, strict boolean DEFAULT false) RETURNS text
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME';
CREATE FUNCTION @extschema@.idem_canonical(request json, strict boolean DEFAULT false) RETURNS text
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idem_canonical_json';
CREATE FUNCTION @extschema@.idem_canonical(request jsonb, strict boolean DEFAULT false) RETURNS text
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idem_canonical_jsonb';
COMMENT ON FUNCTION @extschema@.idem_canonical(text, boolean) IS 'canonical JSON (RFC 8785, numbers by their exact decimal value); strict: 22003 for a number that no IEEE double holds; 22P02 for what is not JSON, 22030 for duplicate names';
COMMENT ON FUNCTION @extschema@.idem_canonical(json, boolean) IS 'canonical JSON (RFC 8785, numbers by their exact decimal value); strict: 22003 for a number that no IEEE double holds; 22030 for duplicate names';
COMMENT ON FUNCTION @extschema@.idem_canonical(jsonb, boolean) IS 'canonical JSON (RFC 8785, numbers by their exact decimal value); strict: 22003 for a number that no IEEE double holds';

CREATE FUNCTION @extschema@.idem_fingerprint(request text, include text[] DEFAULT NULL, exclude text[] DEFAULT NULL) RETURNS @extschema@.idem_digest
	LANGUAGE C IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME';
CREATE FUNCTION @extschema@.idem_fingerprint(request json, include text[] DEFAULT NULL, exclude text[] DEFAULT NULL) RETURNS @extschema@.idem_digest
	LANGUAGE C IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'idem_fingerprint_json';
CREATE FUNCTION @extschema@.idem_fingerprint(request jsonb, include text[] DEFAULT NULL, exclude text[] DEFAULT NULL) RETURNS @extschema@.idem_digest
	LANGUAGE C IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'idem_fingerprint_jsonb';
CREATE FUNCTION @extschema@.idem_fingerprint(bytea) RETURNS @extschema@.idem_digest
	LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'idem_fingerprint_bytea';
COMMENT ON FUNCTION @extschema@.idem_fingerprint(text, text[], text[]) IS 'SHA-256 of the canonical form of the members that include (JSON Pointers) names and exclude does not; NULL for NULL; 22P02 for what is not JSON, 22023 for a bad pointer or an include of which nothing matches';
COMMENT ON FUNCTION @extschema@.idem_fingerprint(json, text[], text[]) IS 'SHA-256 of the canonical form of the members that include (JSON Pointers) names and exclude does not; NULL for NULL; 22023 for a bad pointer or an include of which nothing matches';
COMMENT ON FUNCTION @extschema@.idem_fingerprint(jsonb, text[], text[]) IS 'SHA-256 of the canonical form of the members that include (JSON Pointers) names and exclude does not; NULL for NULL; 22023 for a bad pointer or an include of which nothing matches';
COMMENT ON FUNCTION @extschema@.idem_fingerprint(bytea) IS 'SHA-256 of raw bytes, for a request that is not JSON';

/* ---- relations ---- */

CREATE TABLE idem.scope (
	id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	name text COLLATE "C" NOT NULL UNIQUE CHECK (pg_catalog.octet_length(name) BETWEEN 1 AND 255),
	owner regrole NOT NULL DEFAULT pg_catalog.quote_ident(CURRENT_USER)::pg_catalog.regrole,
	operators regrole,
	retention interval DEFAULT '24 hours' CHECK (retention >= '0' AND pg_catalog.isfinite(retention)),
	archive text NOT NULL DEFAULT 'key' CHECK (archive IN ('none', 'key', 'full')),
	archive_retention interval DEFAULT '90 days' CHECK (archive_retention >= '0' AND pg_catalog.isfinite(archive_retention)),
	replay_window interval CHECK (replay_window >= '0' AND pg_catalog.isfinite(replay_window)),
	lease interval CHECK (lease > '0' AND pg_catalog.isfinite(lease)),
	on_expiry text NOT NULL DEFAULT 'retry' CHECK (on_expiry IN ('retry', 'hold')),
	max_attempts int CHECK (max_attempts > 0),
	retry_within interval CHECK (retry_within > '0' AND pg_catalog.isfinite(retry_within)),
	include text[] CHECK (pg_catalog.array_ndims(include) = 1 AND pg_catalog.array_position(include, NULL::text) IS NULL),
	exclude text[] CHECK (pg_catalog.array_ndims(exclude) = 1 AND pg_catalog.array_position(exclude, NULL::text) IS NULL),
	keep_request text NOT NULL DEFAULT 'inflight' CHECK (keep_request IN ('never', 'inflight', 'always')),
	CONSTRAINT scope_replay_window_is_covered CHECK (
		replay_window IS NULL OR retention IS NULL OR
		CASE WHEN archive = 'none' THEN retention > replay_window
			 ELSE archive_retention IS NULL OR retention + archive_retention > replay_window END)
) USING heap;
COMMENT ON TABLE idem.scope IS 'one row is the contract of one scope; written by administrators with plain INSERT, UPDATE, DELETE';
COMMENT ON COLUMN idem.scope.id IS 'what rows of keys refer to; never changes';
COMMENT ON COLUMN idem.scope.name IS 'what callers name, 1 to 255 bytes';
COMMENT ON COLUMN idem.scope.owner IS 'role whose members may claim and settle';
COMMENT ON COLUMN idem.scope.operators IS 'role whose members may resolve, recover, forget and quarantine; NULL: the owner';
COMMENT ON COLUMN idem.scope.retention IS 'how long a settled key is replayed, from its completion on; NULL: for ever; a day is 24 hours, a month 30 days';
COMMENT ON COLUMN idem.scope.archive IS 'what is left of a settled key past its retention: none (the key is new again), key (a tombstone: the answer is expired), full (it is still replayed)';
COMMENT ON COLUMN idem.scope.archive_retention IS 'how long that is kept beyond the retention; NULL: for ever';
COMMENT ON COLUMN idem.scope.replay_window IS 'how late a replay can come by the caller''s own word; what is kept must last longer';
COMMENT ON COLUMN idem.scope.lease IS 'lease of a claim that does not name one; NULL: such a claim is transaction-scoped';
COMMENT ON COLUMN idem.scope.on_expiry IS 'what an expired lease becomes: retry (the next claim takes it over) or hold (in doubt until it is resolved)';
COMMENT ON COLUMN idem.scope.max_attempts IS 'an expired lease of this many attempts is in doubt; NULL: any number';
COMMENT ON COLUMN idem.scope.retry_within IS 'how long the outside system honours the key it was given: a lease that expires later than this after the first claim is in doubt';
COMMENT ON COLUMN idem.scope.include IS 'JSON Pointers of the members that make the fingerprint; NULL: all';
COMMENT ON COLUMN idem.scope.exclude IS 'JSON Pointers of members left out of the fingerprint';
COMMENT ON COLUMN idem.scope.keep_request IS 'whether the request is stored: never, inflight (until settled, for recovery), always';
REVOKE ALL ON idem.scope FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('idem.scope', '');
SELECT pg_catalog.pg_extension_config_dump('idem.scope_id_seq', '');

CREATE TABLE idem.inflight (
	token bigint NOT NULL,
	lease_until timestamptz NOT NULL,
	created_at timestamptz NOT NULL,
	updated_at timestamptz NOT NULL,
	scope_id int NOT NULL,
	attempt int NOT NULL,
	form smallint NOT NULL,
	state "char" NOT NULL,
	fingerprint @extschema@.idem_digest,
	key text COLLATE "C" NOT NULL,
	claimant text,
	owner text,
	recovery_point text,
	request json,
	checkpoint jsonb,
	PRIMARY KEY (scope_id, key)
) USING heap WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 5000,
				   autovacuum_vacuum_insert_threshold = -1);
COMMENT ON TABLE idem.inflight IS 'one row is a key claimed under a lease and not settled yet, free again after a failed attempt, or in doubt';
COMMENT ON COLUMN idem.inflight.token IS 'fencing token of the holder; grows with every claim of the key';
COMMENT ON COLUMN idem.inflight.lease_until IS 'end of the lease; infinity while in doubt';
COMMENT ON COLUMN idem.inflight.created_at IS 'first claim of the key';
COMMENT ON COLUMN idem.inflight.updated_at IS 'last change of the row';
COMMENT ON COLUMN idem.inflight.scope_id IS 'idem.scope.id';
COMMENT ON COLUMN idem.inflight.attempt IS 'number of this claim, 1 for the first';
COMMENT ON COLUMN idem.inflight.form IS 'version of the canonical form the fingerprint was made with';
COMMENT ON COLUMN idem.inflight.state IS 'p processing, e free again, u in doubt';
COMMENT ON COLUMN idem.inflight.fingerprint IS 'fingerprint of the request; NULL: not known';
COMMENT ON COLUMN idem.inflight.key IS 'the key, 1 to 255 bytes, compared byte for byte';
COMMENT ON COLUMN idem.inflight.claimant IS 'what the holder calls itself, to get its own claim again';
COMMENT ON COLUMN idem.inflight.owner IS 'user and application of the holder, for people';
COMMENT ON COLUMN idem.inflight.recovery_point IS 'last finished phase';
COMMENT ON COLUMN idem.inflight.request IS 'the request, unless the scope''s keep_request is never';
COMMENT ON COLUMN idem.inflight.checkpoint IS 'what the holder noted with its recovery point';
REVOKE ALL ON idem.inflight FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('idem.inflight', '');

-- Fixed-width columns come widest first, so that no byte goes to alignment;
-- those that are often NULL come last, since a row ends with its last value.
CREATE TABLE idem.result (
	token bigint NOT NULL,
	created_at timestamptz NOT NULL,
	completed_at timestamptz NOT NULL,
	scope_id int NOT NULL,
	attempt int NOT NULL,
	form smallint NOT NULL,
	state "char" NOT NULL,
	fingerprint @extschema@.idem_digest,
	key text COLLATE "C" NOT NULL,
	response json,
	status_code int,
	headers jsonb,
	body bytea,
	request json,
	PRIMARY KEY (scope_id, key)
) USING heap;
COMMENT ON TABLE idem.result IS 'one row is a settled key: whole inside its retention, after it a tombstone where the policy is key';
COMMENT ON COLUMN idem.result.token IS 'fencing token of the holder that settled it';
COMMENT ON COLUMN idem.result.created_at IS 'first claim of the key';
COMMENT ON COLUMN idem.result.completed_at IS 'when it was settled; retention counts from here';
COMMENT ON COLUMN idem.result.scope_id IS 'idem.scope.id';
COMMENT ON COLUMN idem.result.attempt IS 'number of the claim that settled it, 1 for the first';
COMMENT ON COLUMN idem.result.status_code IS 'as given by the holder';
COMMENT ON COLUMN idem.result.form IS 'version of the canonical form the fingerprint was made with';
COMMENT ON COLUMN idem.result.state IS 's succeeded, f failed';
COMMENT ON COLUMN idem.result.fingerprint IS 'fingerprint of the request; NULL: not known';
COMMENT ON COLUMN idem.result.key IS 'the key, 1 to 255 bytes, compared byte for byte';
COMMENT ON COLUMN idem.result.headers IS 'as given by the holder';
COMMENT ON COLUMN idem.result.response IS 'as given by the holder, byte for byte';
COMMENT ON COLUMN idem.result.body IS 'as given by the holder';
COMMENT ON COLUMN idem.result.request IS 'the request, where the scope''s keep_request is always';
REVOKE ALL ON idem.result FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('idem.result', '');

CREATE TABLE idem.archive (
	token bigint NOT NULL,
	created_at timestamptz NOT NULL,
	completed_at timestamptz NOT NULL,
	scope_id int NOT NULL,
	attempt int NOT NULL,
	form smallint NOT NULL,
	state "char" NOT NULL,
	fingerprint @extschema@.idem_digest,
	key text COLLATE "C" NOT NULL,
	response json,
	status_code int,
	headers jsonb,
	body bytea,
	request json,
	archived_at timestamptz NOT NULL,
	PRIMARY KEY (scope_id, key)
) USING heap;
COMMENT ON TABLE idem.archive IS 'one row is a settled key past its retention, whole, where the policy is full; columns as in idem.result';
COMMENT ON COLUMN idem.archive.token IS 'as in idem.result';
COMMENT ON COLUMN idem.archive.created_at IS 'as in idem.result';
COMMENT ON COLUMN idem.archive.completed_at IS 'as in idem.result';
COMMENT ON COLUMN idem.archive.scope_id IS 'as in idem.result';
COMMENT ON COLUMN idem.archive.attempt IS 'as in idem.result';
COMMENT ON COLUMN idem.archive.status_code IS 'as in idem.result';
COMMENT ON COLUMN idem.archive.form IS 'as in idem.result';
COMMENT ON COLUMN idem.archive.state IS 'as in idem.result';
COMMENT ON COLUMN idem.archive.fingerprint IS 'as in idem.result';
COMMENT ON COLUMN idem.archive.key IS 'as in idem.result';
COMMENT ON COLUMN idem.archive.headers IS 'as in idem.result';
COMMENT ON COLUMN idem.archive.response IS 'as in idem.result';
COMMENT ON COLUMN idem.archive.body IS 'as in idem.result';
COMMENT ON COLUMN idem.archive.request IS 'as in idem.result';
COMMENT ON COLUMN idem.archive.archived_at IS 'when the sweep moved it here';
REVOKE ALL ON idem.archive FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('idem.archive', '');

CREATE TABLE idem.audit (
	at timestamptz NOT NULL,
	scope_id int NOT NULL,
	event text NOT NULL,
	scope text NOT NULL,
	key text COLLATE "C",
	who text NOT NULL,
	application text,
	fingerprint @extschema@.idem_digest,
	old jsonb,
	new jsonb
) USING heap;
CREATE INDEX audit_scope_id_key_idx ON idem.audit (scope_id, key);
COMMENT ON TABLE idem.audit IS 'what people must be able to look up later';
COMMENT ON INDEX idem.audit_scope_id_key_idx IS 'the history of a key; finds a mismatch that was noted already';
COMMENT ON COLUMN idem.audit.at IS 'when, by the server''s clock';
COMMENT ON COLUMN idem.audit.scope_id IS 'idem.scope.id';
COMMENT ON COLUMN idem.audit.event IS 'mismatch, resolve, forget, quarantine, unknown, scope changed, scope deleted';
COMMENT ON COLUMN idem.audit.scope IS 'name of the scope at that time';
COMMENT ON COLUMN idem.audit.key IS 'the key; NULL: the event concerns the scope';
COMMENT ON COLUMN idem.audit.who IS 'the role that did it';
COMMENT ON COLUMN idem.audit.application IS 'application_name of the session';
COMMENT ON COLUMN idem.audit.fingerprint IS 'mismatch: the fingerprint that was offered';
COMMENT ON COLUMN idem.audit.old IS 'what was there before';
COMMENT ON COLUMN idem.audit.new IS 'what took its place';
REVOKE ALL ON idem.audit FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('idem.audit', '');

CREATE TABLE idem.sweep (
	last_started timestamptz NOT NULL,
	last_duration interval NOT NULL,
	reclaimed bigint NOT NULL,
	held bigint NOT NULL,
	archived bigint NOT NULL,
	purged bigint NOT NULL,
	more boolean NOT NULL,
	result_hand bigint NOT NULL,
	archive_hand bigint NOT NULL,
	inflight_hand bigint NOT NULL,
	audit_hand bigint NOT NULL,
	only_row boolean PRIMARY KEY
) USING heap WITH (fillfactor = 10);
COMMENT ON TABLE idem.sweep IS 'one row: the last sweep; written by the sweep, empty until the first one';
COMMENT ON COLUMN idem.sweep.last_started IS 'when the last sweep began';
COMMENT ON COLUMN idem.sweep.last_duration IS 'how long it took';
COMMENT ON COLUMN idem.sweep.reclaimed IS 'expired leases it freed';
COMMENT ON COLUMN idem.sweep.held IS 'expired leases it put in doubt';
COMMENT ON COLUMN idem.sweep.archived IS 'settled keys it stripped of their payload, or moved to the archive';
COMMENT ON COLUMN idem.sweep.purged IS 'rows it removed';
COMMENT ON COLUMN idem.sweep.more IS 'it stopped with work left';
COMMENT ON COLUMN idem.sweep.result_hand IS 'block of idem.result where the next sweep goes on; -1: the hand has come to its end';
COMMENT ON COLUMN idem.sweep.archive_hand IS 'the same for idem.archive';
COMMENT ON COLUMN idem.sweep.inflight_hand IS 'the same for idem.inflight';
COMMENT ON COLUMN idem.sweep.audit_hand IS 'the same for idem.audit';
COMMENT ON COLUMN idem.sweep.only_row IS 'always true';
REVOKE ALL ON idem.sweep FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('idem.sweep', '');

CREATE FUNCTION @extschema@.idem_scope_guard() RETURNS trigger
	LANGUAGE C AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_scope_guard() IS 'trigger of idem.scope: refuses what keys rely on, checks pointers, audits changes, invalidates caches';
REVOKE ALL ON FUNCTION @extschema@.idem_scope_guard() FROM PUBLIC;
CREATE TRIGGER scope_guard AFTER INSERT OR UPDATE OR DELETE ON idem.scope
	FOR EACH ROW EXECUTE FUNCTION @extschema@.idem_scope_guard();
-- also where changes arrive by replication: caches must hear of them
ALTER TABLE idem.scope ENABLE ALWAYS TRIGGER scope_guard;
COMMENT ON TRIGGER scope_guard ON idem.scope IS 'keeps contracts and keys consistent';
CREATE TRIGGER scope_guard_truncate BEFORE TRUNCATE ON idem.scope
	FOR EACH STATEMENT EXECUTE FUNCTION @extschema@.idem_scope_guard();
COMMENT ON TRIGGER scope_guard_truncate ON idem.scope IS 'scopes are deleted one by one';

/* ---- views ---- */

CREATE VIEW idem.operation WITH (security_barrier) AS
	SELECT s.name AS scope, k.key, k.state, k.attempt, k.token, k.created_at, k.updated_at, k.completed_at,
		   k.lease_until, k.claimant, k.owner, k.recovery_point, k.status_code, k.fingerprint, k.kept_in
	FROM (SELECT scope_id, key, CASE state WHEN 'p' THEN 'processing' WHEN 'e' THEN 'free' ELSE 'unknown' END AS state,
				 attempt, token, created_at, updated_at, NULL::timestamptz AS completed_at, lease_until, claimant, owner,
				 recovery_point, NULL::int AS status_code, fingerprint, 'inflight' AS kept_in
		  FROM idem.inflight
		  UNION ALL
		  SELECT scope_id, key, CASE state WHEN 's' THEN 'succeeded' ELSE 'failed' END,
				 attempt, token, created_at, completed_at, completed_at, NULL, NULL, NULL,
				 NULL, status_code, fingerprint, 'result'
		  FROM idem.result
		  UNION ALL
		  SELECT scope_id, key, CASE state WHEN 's' THEN 'succeeded' ELSE 'failed' END,
				 attempt, token, created_at, archived_at, completed_at, NULL, NULL, NULL,
				 NULL, status_code, fingerprint, 'archive'
		  FROM idem.archive) AS k
	JOIN idem.scope AS s ON s.id = k.scope_id
	WHERE pg_catalog.pg_has_role(s.owner::oid, 'USAGE'::text) OR pg_catalog.pg_has_role(s.operators::oid, 'USAGE'::text);
COMMENT ON VIEW idem.operation IS 'every key of the scopes that the current user may use, whatever table it is in';
COMMENT ON COLUMN idem.operation.scope IS 'name of the scope';
COMMENT ON COLUMN idem.operation.key IS 'the key';
COMMENT ON COLUMN idem.operation.state IS 'processing, free, unknown, succeeded or failed, as stored: the clock may have gone past it';
COMMENT ON COLUMN idem.operation.attempt IS 'number of the last claim';
COMMENT ON COLUMN idem.operation.token IS 'its fencing token';
COMMENT ON COLUMN idem.operation.created_at IS 'first claim of the key';
COMMENT ON COLUMN idem.operation.updated_at IS 'last change of the row';
COMMENT ON COLUMN idem.operation.completed_at IS 'when it was settled';
COMMENT ON COLUMN idem.operation.lease_until IS 'end of the lease; infinity while in doubt';
COMMENT ON COLUMN idem.operation.claimant IS 'what the holder calls itself';
COMMENT ON COLUMN idem.operation.owner IS 'user and application of the holder';
COMMENT ON COLUMN idem.operation.recovery_point IS 'last finished phase';
COMMENT ON COLUMN idem.operation.status_code IS 'as given by the holder';
COMMENT ON COLUMN idem.operation.fingerprint IS 'fingerprint of the request';
COMMENT ON COLUMN idem.operation.kept_in IS 'the table: inflight, result or archive';
REVOKE ALL ON idem.operation FROM PUBLIC;
GRANT SELECT ON idem.operation TO PUBLIC;

-- 7453 is the lock tag's field that only key locks have, see held.c
CREATE VIEW idem.holder AS
	SELECT l.pid, p.gid, coalesce(a.usename, p.owner) AS role, a.application_name AS application,
		   coalesce(a.xact_start, p.prepared) AS since, a.state AS session_state,
		   (l.classid::bigint << 32) | l.objid::bigint AS key_hash
	FROM pg_catalog.pg_locks AS l
	LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
	LEFT JOIN (pg_catalog.pg_prepared_xacts AS p
		JOIN pg_catalog.pg_locks AS x ON x.locktype = 'transactionid' AND x.transactionid = p.transaction AND x.pid IS NULL)
		ON l.pid IS NULL AND x.virtualtransaction = l.virtualtransaction
	WHERE l.locktype = 'advisory' AND l.objsubid = 7453 AND l.granted
	  AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database());
COMMENT ON VIEW idem.holder IS 'transaction-scoped claims held right now, from the lock table';
COMMENT ON COLUMN idem.holder.pid IS 'process of the holder; NULL: a prepared transaction';
COMMENT ON COLUMN idem.holder.gid IS 'global identifier of a prepared transaction';
COMMENT ON COLUMN idem.holder.role IS 'its role';
COMMENT ON COLUMN idem.holder.application IS 'its application_name';
COMMENT ON COLUMN idem.holder.since IS 'when its transaction began, or was prepared';
COMMENT ON COLUMN idem.holder.session_state IS 'state of its session, as in pg_stat_activity';
COMMENT ON COLUMN idem.holder.key_hash IS 'hash of scope and key, as in the server log';
REVOKE ALL ON idem.holder FROM PUBLIC;
GRANT SELECT ON idem.holder TO pg_monitor;

/* ---- statistics ---- */

CREATE FUNCTION @extschema@.idem_stat(OUT scope_id int, OUT claimed bigint, OUT replayed bigint, OUT in_progress bigint, OUT mismatch bigint, OUT expired bigint, OUT unknown bigint, OUT takeovers bigint, OUT succeeded bigint, OUT failed bigint, OUT released bigint, OUT in_doubt bigint, OUT leases_lost bigint, OUT reclaimed bigint, OUT held bigint, OUT archived bigint, OUT purged bigint, OUT replay_age bigint[], OUT stats_reset timestamptz) RETURNS SETOF record
	LANGUAGE C VOLATILE PARALLEL RESTRICTED AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_stat() IS 'counters of this database since the server started or they were reset; no rows without preload';
REVOKE ALL ON FUNCTION @extschema@.idem_stat() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION @extschema@.idem_stat() TO pg_monitor;
CREATE FUNCTION @extschema@.idem_stat_reset() RETURNS void
	LANGUAGE C VOLATILE PARALLEL RESTRICTED AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_stat_reset() IS 'sets the counters of this database to zero';
REVOKE ALL ON FUNCTION @extschema@.idem_stat_reset() FROM PUBLIC;

CREATE VIEW idem.stat AS
	SELECT s.name AS scope, c.claimed, c.replayed, c.in_progress, c.mismatch, c.expired, c.unknown, c.takeovers, c.succeeded, c.failed, c.released, c.in_doubt, c.leases_lost, c.reclaimed, c.held, c.archived, c.purged, c.replay_age, c.stats_reset
	FROM @extschema@.idem_stat() AS c JOIN idem.scope AS s ON s.id = c.scope_id;
COMMENT ON VIEW idem.stat IS 'what was attempted, also by transactions that rolled back; empty without preload';
COMMENT ON COLUMN idem.stat.scope IS 'name of the scope';
COMMENT ON COLUMN idem.stat.claimed IS 'claims that might execute';
COMMENT ON COLUMN idem.stat.replayed IS 'claims answered from what was stored';
COMMENT ON COLUMN idem.stat.in_progress IS 'claims that somebody else was at';
COMMENT ON COLUMN idem.stat.mismatch IS 'claims under a key of another request';
COMMENT ON COLUMN idem.stat.expired IS 'claims answered by a tombstone';
COMMENT ON COLUMN idem.stat.unknown IS 'claims of a key in doubt';
COMMENT ON COLUMN idem.stat.takeovers IS 'claims that took a key over';
COMMENT ON COLUMN idem.stat.succeeded IS 'keys settled as succeeded';
COMMENT ON COLUMN idem.stat.failed IS 'keys settled as failed';
COMMENT ON COLUMN idem.stat.released IS 'claims given up';
COMMENT ON COLUMN idem.stat.in_doubt IS 'claims declared in doubt';
COMMENT ON COLUMN idem.stat.leases_lost IS 'holders that were fenced';
COMMENT ON COLUMN idem.stat.reclaimed IS 'expired leases the sweep freed';
COMMENT ON COLUMN idem.stat.held IS 'expired leases the sweep put in doubt';
COMMENT ON COLUMN idem.stat.archived IS 'settled keys the sweep stripped or moved';
COMMENT ON COLUMN idem.stat.purged IS 'rows the sweep removed';
COMMENT ON COLUMN idem.stat.replay_age IS 'histogram of the age of replays: element n counts those younger than 2^(n-1) seconds and not younger than the one before; the last one all that are older';
COMMENT ON COLUMN idem.stat.stats_reset IS 'since when it is counted';
REVOKE ALL ON idem.stat FROM PUBLIC;
GRANT SELECT ON idem.stat TO pg_monitor;

-- the histogram (kind 2) of pg_statistic: pg_stats would hide it from a pg_monitor that cannot read the table
CREATE VIEW idem.health AS
	SELECT w.last_started AS last_sweep, w.last_duration AS last_sweep_duration, w.more AS last_sweep_incomplete,
		   coalesce(pg_catalog.clock_timestamp() < w.last_started, false) AS clock_went_back,
		   EXISTS (SELECT FROM pg_catalog.pg_stat_activity WHERE backend_type = 'idem launcher')
		   AND coalesce(pg_catalog.current_setting('idem.worker', true)::boolean, false) AS worker_runs,
		   i.processing, i.oldest_processing, i.lease_over, i.oldest_lease_over,
		   i.free, i.oldest_free, i.in_doubt, i.oldest_in_doubt,
		   h.holders, h.oldest_holder,
		   r.settled_estimate, r.overdue_estimate,
		   (SELECT pg_catalog.array_agg(s.name ORDER BY s.name) FROM idem.scope AS s
			WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE oid = s.owner::oid)
			   OR s.operators IS NOT NULL AND NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE oid = s.operators::oid)) AS scopes_without_role
	FROM (SELECT count(*) FILTER (WHERE state = 'p' AND lease_until > pg_catalog.clock_timestamp()) AS processing,
				 min(created_at) FILTER (WHERE state = 'p' AND lease_until > pg_catalog.clock_timestamp()) AS oldest_processing,
				 count(*) FILTER (WHERE state = 'p' AND lease_until <= pg_catalog.clock_timestamp()) AS lease_over,
				 min(lease_until) FILTER (WHERE state = 'p' AND lease_until <= pg_catalog.clock_timestamp()) AS oldest_lease_over,
				 count(*) FILTER (WHERE state = 'e') AS free,
				 min(updated_at) FILTER (WHERE state = 'e') AS oldest_free,
				 count(*) FILTER (WHERE state = 'u') AS in_doubt,
				 min(updated_at) FILTER (WHERE state = 'u') AS oldest_in_doubt
		  FROM idem.inflight) AS i,
		 (SELECT count(*) AS holders, min(since) AS oldest_holder FROM idem.holder) AS h,
		 (SELECT greatest(c.reltuples, 0)::bigint AS settled_estimate,
				 (greatest(c.reltuples, 0)::float8 *
				  (SELECT avg((b < pg_catalog.clock_timestamp() - k.kept)::int)::float8
				   FROM pg_catalog.pg_statistic AS p,
						pg_catalog.unnest((CASE 2 WHEN p.stakind1 THEN p.stavalues1::text WHEN p.stakind2 THEN p.stavalues2::text
												WHEN p.stakind3 THEN p.stavalues3::text WHEN p.stakind4 THEN p.stavalues4::text
												WHEN p.stakind5 THEN p.stavalues5::text END)::timestamptz[]) AS b,
						(SELECT max(CASE archive WHEN 'none' THEN retention ELSE retention + archive_retention END) AS kept
						 FROM idem.scope
						 HAVING count(*) = pg_catalog.count(CASE archive WHEN 'none' THEN retention ELSE retention + archive_retention END)) AS k
				   WHERE p.starelid = c.oid AND NOT p.stainherit
					 AND p.staattnum = (SELECT a.attnum FROM pg_catalog.pg_attribute AS a
										WHERE a.attrelid = c.oid AND a.attname = 'completed_at')))::bigint AS overdue_estimate
		  FROM pg_catalog.pg_class AS c WHERE c.oid = 'idem.result'::regclass::oid) AS r
		 LEFT JOIN idem.sweep AS w ON true;
COMMENT ON VIEW idem.health IS 'what an operator alarms on, one row';
COMMENT ON COLUMN idem.health.last_sweep IS 'when the last sweep began; NULL: there was none';
COMMENT ON COLUMN idem.health.last_sweep_duration IS 'how long it took';
COMMENT ON COLUMN idem.health.last_sweep_incomplete IS 'it stopped with work left';
COMMENT ON COLUMN idem.health.clock_went_back IS 'the clock is behind the last sweep: nothing is swept until it has caught up';
COMMENT ON COLUMN idem.health.worker_runs IS 'the launcher is there, and idem.worker is on';
COMMENT ON COLUMN idem.health.processing IS 'keys under a running lease';
COMMENT ON COLUMN idem.health.oldest_processing IS 'first claim of the oldest of them';
COMMENT ON COLUMN idem.health.lease_over IS 'keys whose lease is over, not swept or taken over yet';
COMMENT ON COLUMN idem.health.oldest_lease_over IS 'when the first of those leases ended';
COMMENT ON COLUMN idem.health.free IS 'keys that wait for another attempt';
COMMENT ON COLUMN idem.health.oldest_free IS 'since when the oldest of them waits';
COMMENT ON COLUMN idem.health.in_doubt IS 'keys that wait for idem_resolve()';
COMMENT ON COLUMN idem.health.oldest_in_doubt IS 'since when the oldest of them waits';
COMMENT ON COLUMN idem.health.holders IS 'transaction-scoped claims held right now';
COMMENT ON COLUMN idem.health.oldest_holder IS 'since when the oldest of their transactions runs';
COMMENT ON COLUMN idem.health.settled_estimate IS 'rows in idem.result, by the last ANALYZE or VACUUM';
COMMENT ON COLUMN idem.health.overdue_estimate IS 'those of them that no scope keeps any more and that are still there, by the last ANALYZE; NULL: not known, or a scope keeps for ever';
COMMENT ON COLUMN idem.health.scopes_without_role IS 'scopes whose owner or operators role was dropped';
REVOKE ALL ON idem.health FROM PUBLIC;
GRANT SELECT ON idem.health TO pg_monitor;

/* ---- the interface ---- */

CREATE TYPE @extschema@.idem_answer AS (
	outcome text,
	token bigint,
	attempt int,
	state text,
	status_code int,
	headers jsonb,
	response json,
	body bytea,
	request json,
	recovery_point text,
	checkpoint jsonb,
	created_at timestamptz,
	completed_at timestamptz,
	retry_after interval
);
COMMENT ON TYPE @extschema@.idem_answer IS 'what is known of a key; later versions may append attributes';
COMMENT ON COLUMN @extschema@.idem_answer.outcome IS 'claimed, replayed, in_progress, mismatch, expired, unknown or executed';
COMMENT ON COLUMN @extschema@.idem_answer.token IS 'fencing token, to the holder only: it only grows for a key';
COMMENT ON COLUMN @extschema@.idem_answer.attempt IS 'number of the claim, 1 for the first';
COMMENT ON COLUMN @extschema@.idem_answer.state IS 'processing, free, unknown, succeeded or failed';
COMMENT ON COLUMN @extschema@.idem_answer.status_code IS 'as settled';
COMMENT ON COLUMN @extschema@.idem_answer.headers IS 'as settled';
COMMENT ON COLUMN @extschema@.idem_answer.response IS 'as settled, byte for byte';
COMMENT ON COLUMN @extschema@.idem_answer.body IS 'as settled';
COMMENT ON COLUMN @extschema@.idem_answer.request IS 'claimed by takeover: the request as first claimed, if it is kept';
COMMENT ON COLUMN @extschema@.idem_answer.recovery_point IS 'claimed by takeover: the last finished phase';
COMMENT ON COLUMN @extschema@.idem_answer.checkpoint IS 'claimed by takeover: what was noted with it';
COMMENT ON COLUMN @extschema@.idem_answer.created_at IS 'first claim of the key';
COMMENT ON COLUMN @extschema@.idem_answer.completed_at IS 'when it was settled';
COMMENT ON COLUMN @extschema@.idem_answer.retry_after IS 'in_progress: when to ask again';

CREATE FUNCTION @extschema@.idem_claim(scope text, key text, request text DEFAULT NULL, lease interval DEFAULT NULL, wait interval DEFAULT '0', fingerprint @extschema@.idem_digest DEFAULT NULL, claimant text DEFAULT NULL) RETURNS @extschema@.idem_answer
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_claim(text, text, text, interval, interval, @extschema@.idem_digest, text) IS 'adjudicates a key: may the caller execute (claimed), or what is known of it; lease 0 claims for this transaction, wait NULL waits as long as it takes; 22004 for a NULL scope or key, 22023 for a key not of 1 to 255 bytes, 42704 for an unknown scope, 42501 outside its owner; 22023 for a negative lease or wait, or request and fingerprint together; 22P02 for a request that is not JSON; 25006 in a read-only transaction';

CREATE FUNCTION @extschema@.idem_claim(scope text, key text, request json, lease interval DEFAULT NULL, wait interval DEFAULT '0', fingerprint @extschema@.idem_digest DEFAULT NULL, claimant text DEFAULT NULL) RETURNS @extschema@.idem_answer
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idem_claim_json';
COMMENT ON FUNCTION @extschema@.idem_claim(text, text, json, interval, interval, @extschema@.idem_digest, text) IS 'adjudicates a key: may the caller execute (claimed), or what is known of it; lease 0 claims for this transaction, wait NULL waits as long as it takes; 22004 for a NULL scope or key, 22023 for a key not of 1 to 255 bytes, 42704 for an unknown scope, 42501 outside its owner; 22023 for a negative lease or wait, or request and fingerprint together; 22P02 for a request that is not JSON; 25006 in a read-only transaction';

CREATE FUNCTION @extschema@.idem_claim(scope text, key text, request jsonb, lease interval DEFAULT NULL, wait interval DEFAULT '0', fingerprint @extschema@.idem_digest DEFAULT NULL, claimant text DEFAULT NULL) RETURNS @extschema@.idem_answer
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idem_claim_jsonb';
COMMENT ON FUNCTION @extschema@.idem_claim(text, text, jsonb, interval, interval, @extschema@.idem_digest, text) IS 'adjudicates a key: may the caller execute (claimed), or what is known of it; lease 0 claims for this transaction, wait NULL waits as long as it takes; 22004 for a NULL scope or key, 22023 for a key not of 1 to 255 bytes, 42704 for an unknown scope, 42501 outside its owner; 22023 for a negative lease or wait, or request and fingerprint together; 22P02 for a request that is not JSON; 25006 in a read-only transaction';

CREATE FUNCTION @extschema@.idem_complete(scope text, key text, response text DEFAULT NULL, token bigint DEFAULT NULL, status_code int DEFAULT NULL, headers jsonb DEFAULT NULL, body bytea DEFAULT NULL) RETURNS text
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_complete(text, text, text, bigint, int, jsonb, bytea) IS 'settles a claim as succeeded and returns the stored state; a claim under a lease needs its token; ID001 (the transaction is doomed) for a token that is no longer current, ID002 for a claim that is not held; 22004 for a NULL scope or key, 22023 for a key not of 1 to 255 bytes, 42704 for an unknown scope, 42501 outside its owner';

CREATE FUNCTION @extschema@.idem_complete(scope text, key text, response json, token bigint DEFAULT NULL, status_code int DEFAULT NULL, headers jsonb DEFAULT NULL, body bytea DEFAULT NULL) RETURNS text
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idem_complete_json';
COMMENT ON FUNCTION @extschema@.idem_complete(text, text, json, bigint, int, jsonb, bytea) IS 'settles a claim as succeeded and returns the stored state; a claim under a lease needs its token; ID001 (the transaction is doomed) for a token that is no longer current, ID002 for a claim that is not held; 22004 for a NULL scope or key, 22023 for a key not of 1 to 255 bytes, 42704 for an unknown scope, 42501 outside its owner';

CREATE FUNCTION @extschema@.idem_complete(scope text, key text, response jsonb, token bigint DEFAULT NULL, status_code int DEFAULT NULL, headers jsonb DEFAULT NULL, body bytea DEFAULT NULL) RETURNS text
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idem_complete_jsonb';
COMMENT ON FUNCTION @extschema@.idem_complete(text, text, jsonb, bigint, int, jsonb, bytea) IS 'settles a claim as succeeded and returns the stored state; a claim under a lease needs its token; ID001 (the transaction is doomed) for a token that is no longer current, ID002 for a claim that is not held; 22004 for a NULL scope or key, 22023 for a key not of 1 to 255 bytes, 42704 for an unknown scope, 42501 outside its owner';

CREATE FUNCTION @extschema@.idem_fail(scope text, key text, response text DEFAULT NULL, token bigint DEFAULT NULL, status_code int DEFAULT NULL, headers jsonb DEFAULT NULL, body bytea DEFAULT NULL) RETURNS text
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_fail(text, text, text, bigint, int, jsonb, bytea) IS 'settles a claim as finally failed and returns the stored state; a claim under a lease needs its token; ID001 (the transaction is doomed) for a token that is no longer current, ID002 for a claim that is not held; 22004 for a NULL scope or key, 22023 for a key not of 1 to 255 bytes, 42704 for an unknown scope, 42501 outside its owner';

CREATE FUNCTION @extschema@.idem_fail(scope text, key text, response json, token bigint DEFAULT NULL, status_code int DEFAULT NULL, headers jsonb DEFAULT NULL, body bytea DEFAULT NULL) RETURNS text
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idem_fail_json';
COMMENT ON FUNCTION @extschema@.idem_fail(text, text, json, bigint, int, jsonb, bytea) IS 'settles a claim as finally failed and returns the stored state; a claim under a lease needs its token; ID001 (the transaction is doomed) for a token that is no longer current, ID002 for a claim that is not held; 22004 for a NULL scope or key, 22023 for a key not of 1 to 255 bytes, 42704 for an unknown scope, 42501 outside its owner';

CREATE FUNCTION @extschema@.idem_fail(scope text, key text, response jsonb, token bigint DEFAULT NULL, status_code int DEFAULT NULL, headers jsonb DEFAULT NULL, body bytea DEFAULT NULL) RETURNS text
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idem_fail_jsonb';
COMMENT ON FUNCTION @extschema@.idem_fail(text, text, jsonb, bigint, int, jsonb, bytea) IS 'settles a claim as finally failed and returns the stored state; a claim under a lease needs its token; ID001 (the transaction is doomed) for a token that is no longer current, ID002 for a claim that is not held; 22004 for a NULL scope or key, 22023 for a key not of 1 to 255 bytes, 42704 for an unknown scope, 42501 outside its owner';

CREATE FUNCTION @extschema@.idem_release(scope text, key text, token bigint DEFAULT NULL) RETURNS void
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_release(text, text, bigint) IS 'gives a claim up, nothing was done: the next call may execute; 55000 for a transaction-scoped claim after a write, ID001, ID002; 22004 for a NULL scope or key, 22023 for a key not of 1 to 255 bytes, 42704 for an unknown scope, 42501 outside its owner';

CREATE FUNCTION @extschema@.idem_extend(scope text, key text, token bigint, lease interval DEFAULT NULL) RETURNS timestamptz
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_extend(text, text, bigint, interval) IS 'heartbeat: the lease lasts for lease (default: the scope''s) from now on; returns its end; 22023 without a lease, 55000 in doubt, ID001, ID002; 22004 for a NULL scope or key, 22023 for a key not of 1 to 255 bytes, 42704 for an unknown scope, 42501 outside its owner';

CREATE FUNCTION @extschema@.idem_checkpoint(scope text, key text, token bigint, recovery_point text, checkpoint jsonb DEFAULT NULL, lease interval DEFAULT NULL) RETURNS void
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_checkpoint(text, text, bigint, text, jsonb, interval) IS 'records a finished phase for a later takeover, and extends the lease if one is given; 55000 in doubt, ID001, ID002; 22004 for a NULL scope or key, 22023 for a key not of 1 to 255 bytes, 42704 for an unknown scope, 42501 outside its owner';

CREATE FUNCTION @extschema@.idem_unknown(scope text, key text, token bigint, detail jsonb DEFAULT NULL) RETURNS void
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_unknown(text, text, bigint, jsonb) IS 'the outside effect is in doubt: nobody executes until the key is resolved; ID001, ID002; 22004 for a NULL scope or key, 22023 for a key not of 1 to 255 bytes, 42704 for an unknown scope, 42501 outside its owner';

CREATE FUNCTION @extschema@.idem_once(scope text, key text, request text DEFAULT NULL, wait interval DEFAULT NULL, fingerprint @extschema@.idem_digest DEFAULT NULL) RETURNS boolean
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_once(text, text, text, interval, @extschema@.idem_digest) IS 'inbox: true the first time, false for a duplicate; claims and settles in one call; ID004 for the key with another request, ID005 for a key in doubt, under a lease or claimed by this transaction, 55P03 when wait is over; 22004 for a NULL scope or key, 22023 for a key not of 1 to 255 bytes, 42704 for an unknown scope, 42501 outside its owner';

CREATE FUNCTION @extschema@.idem_once(scope text, key text, request json, wait interval DEFAULT NULL, fingerprint @extschema@.idem_digest DEFAULT NULL) RETURNS boolean
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idem_once_json';
COMMENT ON FUNCTION @extschema@.idem_once(text, text, json, interval, @extschema@.idem_digest) IS 'inbox: true the first time, false for a duplicate; claims and settles in one call; ID004 for the key with another request, ID005 for a key in doubt, under a lease or claimed by this transaction, 55P03 when wait is over; 22004 for a NULL scope or key, 22023 for a key not of 1 to 255 bytes, 42704 for an unknown scope, 42501 outside its owner';

CREATE FUNCTION @extschema@.idem_once(scope text, key text, request jsonb, wait interval DEFAULT NULL, fingerprint @extschema@.idem_digest DEFAULT NULL) RETURNS boolean
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idem_once_jsonb';
COMMENT ON FUNCTION @extschema@.idem_once(text, text, jsonb, interval, @extschema@.idem_digest) IS 'inbox: true the first time, false for a duplicate; claims and settles in one call; ID004 for the key with another request, ID005 for a key in doubt, under a lease or claimed by this transaction, 55P03 when wait is over; 22004 for a NULL scope or key, 22023 for a key not of 1 to 255 bytes, 42704 for an unknown scope, 42501 outside its owner';

CREATE FUNCTION @extschema@.idem_call(scope text, key text, request text, handler regprocedure, wait interval DEFAULT '0') RETURNS @extschema@.idem_answer
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_call(text, text, text, regprocedure, interval) IS 'claims, runs handler(request) and completes with what it returns, in one round trip: outcome executed when it ran; 42501 without EXECUTE on the handler; 22004 for a NULL scope or key, 22023 for a key not of 1 to 255 bytes, 42704 for an unknown scope, 42501 outside its owner';

CREATE FUNCTION @extschema@.idem_call(scope text, key text, request json, handler regprocedure, wait interval DEFAULT '0') RETURNS @extschema@.idem_answer
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idem_call_json';
COMMENT ON FUNCTION @extschema@.idem_call(text, text, json, regprocedure, interval) IS 'claims, runs handler(request) and completes with what it returns, in one round trip: outcome executed when it ran; 42501 without EXECUTE on the handler; 22004 for a NULL scope or key, 22023 for a key not of 1 to 255 bytes, 42704 for an unknown scope, 42501 outside its owner';

CREATE FUNCTION @extschema@.idem_call(scope text, key text, request jsonb, handler regprocedure, wait interval DEFAULT '0') RETURNS @extschema@.idem_answer
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idem_call_jsonb';
COMMENT ON FUNCTION @extschema@.idem_call(text, text, jsonb, regprocedure, interval) IS 'claims, runs handler(request) and completes with what it returns, in one round trip: outcome executed when it ran; 42501 without EXECUTE on the handler; 22004 for a NULL scope or key, 22023 for a key not of 1 to 255 bytes, 42704 for an unknown scope, 42501 outside its owner';

CREATE FUNCTION @extschema@.idem_explain(scope text, key text, request text DEFAULT NULL) RETURNS text
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_explain(text, text, text) IS 'a dry run of idem_claim in words: what it would answer and why, who holds the key and until when, what to do next; never writes, never waits; 22004 for a NULL scope or key, 22023 for a key not of 1 to 255 bytes, 42704 for an unknown scope, 42501 outside its owner';

CREATE FUNCTION @extschema@.idem_explain(scope text, key text, request json) RETURNS text
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idem_explain_json';
COMMENT ON FUNCTION @extschema@.idem_explain(text, text, json) IS 'a dry run of idem_claim in words: what it would answer and why, who holds the key and until when, what to do next; never writes, never waits; 22004 for a NULL scope or key, 22023 for a key not of 1 to 255 bytes, 42704 for an unknown scope, 42501 outside its owner';

CREATE FUNCTION @extschema@.idem_explain(scope text, key text, request jsonb) RETURNS text
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idem_explain_jsonb';
COMMENT ON FUNCTION @extschema@.idem_explain(text, text, jsonb) IS 'a dry run of idem_claim in words: what it would answer and why, who holds the key and until when, what to do next; never writes, never waits; 22004 for a NULL scope or key, 22023 for a key not of 1 to 255 bytes, 42704 for an unknown scope, 42501 outside its owner';

CREATE FUNCTION @extschema@.idem_status(scope text, key text) RETURNS @extschema@.idem_answer
	LANGUAGE C VOLATILE PARALLEL RESTRICTED AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_status(text, text) IS 'what is known of a key; outcome is what a claim would answer now, NULL where it would execute; reads only, also on a standby; 22004 for NULL, 42704 for an unknown scope, 42501 outside its owner and operators';

CREATE FUNCTION @extschema@.idem_recover(scope text, max int DEFAULT 1, lease interval DEFAULT NULL) RETURNS TABLE (key text, outcome text, token bigint, attempt int, state text, status_code int, headers jsonb, response json, body bytea, request json, recovery_point text, checkpoint jsonb, created_at timestamptz, completed_at timestamptz, retry_after interval)
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_recover(text, int, interval) IS 'takes over up to max keys that are free again or whose lease is over, oldest first, skipping those that somebody else is at; 22023 without a lease; 42704, 42501 outside the operators';

CREATE FUNCTION @extschema@.idem_resolve(scope text, key text, resolution text, response text DEFAULT NULL, status_code int DEFAULT NULL, headers jsonb DEFAULT NULL, body bytea DEFAULT NULL) RETURNS text
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_resolve(text, text, text, text, int, jsonb, bytea) IS 'settles a key in doubt as succeeded or failed, or lets the next claim retry; returns its state; audited; 22023 for any other resolution, 55000 for a key not in doubt, 42704, 42501 outside the operators';

CREATE FUNCTION @extschema@.idem_resolve(scope text, key text, resolution text, response json, status_code int DEFAULT NULL, headers jsonb DEFAULT NULL, body bytea DEFAULT NULL) RETURNS text
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idem_resolve_json';
COMMENT ON FUNCTION @extschema@.idem_resolve(text, text, text, json, int, jsonb, bytea) IS 'settles a key in doubt as succeeded or failed, or lets the next claim retry; returns its state; audited; 22023 for any other resolution, 55000 for a key not in doubt, 42704, 42501 outside the operators';

CREATE FUNCTION @extschema@.idem_resolve(scope text, key text, resolution text, response jsonb, status_code int DEFAULT NULL, headers jsonb DEFAULT NULL, body bytea DEFAULT NULL) RETURNS text
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idem_resolve_jsonb';
COMMENT ON FUNCTION @extschema@.idem_resolve(text, text, text, jsonb, int, jsonb, bytea) IS 'settles a key in doubt as succeeded or failed, or lets the next claim retry; returns its state; audited; 22023 for any other resolution, 55000 for a key not in doubt, 42704, 42501 outside the operators';

CREATE FUNCTION @extschema@.idem_forget(scope text, key text, tombstone boolean DEFAULT true) RETURNS boolean
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_forget(text, text, boolean) IS 'erases headers, response, body and request of a settled key, or the whole row without a tombstone; false: there is no such key; audited; 55000 for a key in flight, 42704, 42501 outside the operators';

CREATE FUNCTION @extschema@.idem_quarantine(scope text) RETURNS bigint
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_quarantine(text) IS 'puts everything in flight in doubt and returns how many keys; the first step after a restore or failover that lost commits; audited; 42704, 42501 outside the operators';

CREATE FUNCTION @extschema@.idem_sweep(max_rows int DEFAULT 10000, OUT reclaimed bigint, OUT held bigint, OUT archived bigint, OUT purged bigint, OUT more boolean) RETURNS record
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_sweep(int) IS 'one bounded sweep, never waits: expired leases, settled keys past retention, old tombstones and audit rows; more: there is work left; 25006 on a standby';
REVOKE ALL ON FUNCTION @extschema@.idem_sweep(int) FROM PUBLIC;

/* ---- keys ---- */

CREATE FUNCTION @extschema@.idem_key(VARIADIC parts text[]) RETURNS text
	LANGUAGE C IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_key(VARIADIC text[]) IS 'one key out of parts, no two lists of parts alike: parts joined by a colon, a colon or backslash in a part behind a backslash; 22004 for a NULL part, 22023 over 255 bytes or for an empty key';

CREATE FUNCTION @extschema@.idem_key(VARIADIC parts "any") RETURNS text
	LANGUAGE C STABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'idem_key_any';
COMMENT ON FUNCTION @extschema@.idem_key(VARIADIC "any") IS 'as for text[], the parts by their text form; 42804 for a type whose text form depends on the session';

CREATE FUNCTION @extschema@.idem_child(scope text, key text, step text) RETURNS uuid
	LANGUAGE C IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_child(text, text, text) IS 'the key to give to a downstream call of this step: a version 8 UUID from SHA-256, the same on every retry; 22004 for NULL';

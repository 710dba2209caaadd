-- outside.sql - the outside ledger: somebody else's system, with its own key
-- table. It charges once for each key that it is given, and says so again.

CREATE TABLE charge (
	key uuid PRIMARY KEY,
	id bigint GENERATED ALWAYS AS IDENTITY,
	amount bigint NOT NULL,
	first_token bigint NOT NULL,	-- of the holder that made the charge
	last_token bigint NOT NULL,		-- the highest seen
	calls int NOT NULL DEFAULT 1,
	stale int NOT NULL DEFAULT 0	-- calls with a token lower than one seen before
);

CREATE FUNCTION charge(key uuid, amount bigint, token bigint) RETURNS bigint LANGUAGE sql AS $$
	INSERT INTO charge (key, amount, first_token, last_token) VALUES ($1, $2, $3, $3)
	ON CONFLICT (key) DO UPDATE SET calls = charge.calls + 1, last_token = greatest(charge.last_token, $3),
		stale = charge.stale + ($3 < charge.last_token)::int
	RETURNING id
$$;

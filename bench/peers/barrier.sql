-- The branch barrier of the TCC and saga frameworks: a table beside the business
-- tables, and in a cancelling branch two inserts, first one in the name of the branch to be
-- cancelled (so that it cannot run afterwards), then the branch's own; both
-- ON CONFLICT DO NOTHING (INSERT IGNORE). Columns and indexes are those
-- that such frameworks create.

-- @tables
CREATE TABLE bench.barrier (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	trans_type varchar(45) DEFAULT '',
	gid varchar(128) DEFAULT '',
	branch_id varchar(128) DEFAULT '',
	op varchar(45) DEFAULT '',
	barrier_id varchar(45) DEFAULT '',
	reason varchar(45) DEFAULT '',
	create_time timestamptz DEFAULT now(),
	update_time timestamptz DEFAULT now(),
	UNIQUE (gid, branch_id, op, barrier_id)
) WITH (autovacuum_enabled = off);

-- @loop once
INSERT INTO bench.barrier (trans_type, gid, branch_id, op, barrier_id, reason)
	VALUES ('tcc', k, '01', 'try', '01', 'cancel') ON CONFLICT DO NOTHING;
INSERT INTO bench.barrier (trans_type, gid, branch_id, op, barrier_id, reason)
	VALUES ('tcc', k, '01', 'cancel', '01', 'cancel') ON CONFLICT DO NOTHING;

-- @client consume
BEGIN;
INSERT INTO bench.barrier (trans_type, gid, branch_id, op, barrier_id, reason)
	VALUES ('tcc', :k, '01', 'try', '01', 'cancel') ON CONFLICT DO NOTHING;
INSERT INTO bench.barrier (trans_type, gid, branch_id, op, barrier_id, reason)
	VALUES ('tcc', :k, '01', 'cancel', '01', 'cancel') ON CONFLICT DO NOTHING;
UPDATE bench.account SET balance = balance - 1 WHERE id = :account;
COMMIT;

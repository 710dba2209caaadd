/*
 * The main flows of idem through node-postgres; prints TAP.
 *
 *     flows_pg.js KEY-PREFIX direct|pooled|unprepared
 *
 * "pooled": through a transaction pooler with two connections to the server;
 * "unprepared": through one that does not know prepared statements. Where the
 * server is, the environment says (PGHOST, PGPORT, PGUSER, PGDATABASE).
 */
'use strict';
const { Client } = require('pg');

const [prefix, path] = process.argv.slice(2);
const pooled = path !== 'direct';
const prepared = path !== 'unprepared';
const REQUEST = '{"amount": 100, "currency": "EUR"}';
// a response that no parser of JSON gives back as it was
const RESPONSE = '{"amount": 12.00,   "id":9007199254740993 }';

// [README
async function pay(client, key, request) {
  await client.query('BEGIN');
  try {
    const answer = await client.query("SELECT outcome, response::text FROM idem_claim('payments', $1, $2)", [key, request]);
    let { outcome, response } = answer.rows[0];
    if (outcome === 'claimed') {
      await client.query("INSERT INTO payment SELECT $1, ($2::json->>'amount')::int", [key, request]);
      response = '{"amount": 12.00,   "id":9007199254740993 }';
      await client.query("SELECT idem_complete('payments', $1, $2)", [key, response]);
    }
    await client.query('COMMIT');
    return { outcome, response };
  } catch (error) {             // pay again with the same key
    await client.query('ROLLBACK');
    throw error;
  }
}
// README]

let tests = 0;
let problems = 0;

function ok(passed, name, note) {
  tests++;
  if (!passed) problems++;
  console.log(`${passed ? 'ok' : 'not ok'} ${tests} - ${name}`);
  if (!passed && note) console.log(`# ${note}`);
}

function same(got, expected, name) {
  const [a, b] = [JSON.stringify(got), JSON.stringify(expected)];
  ok(a === b, name, `got ${a}, expected ${b}`);
}

async function connect() {
  const client = new Client();
  await client.connect();
  return client;
}

async function row(client, text, ...values) {
  return (await client.query({ text, values, rowMode: 'array' })).rows[0];
}

async function one(client, text, ...values) {
  return (await row(client, text, ...values))[0];
}

function outcome(client, key, request = REQUEST) {
  return one(client, "SELECT outcome FROM idem_claim('payments', $1, $2)", key, request);
}

async function payments(client, key) {
  return Number(await one(client, 'SELECT count(*) FROM payment WHERE key = $1', key));
}

// The error that a promise ends with.
async function sqlstate(promise) {
  try {
    await promise;
    return 'no error';
  } catch (error) {
    return error.code;
  }
}

async function flows() {
  let a = await connect();
  const b = await connect();
  console.log(`# pg ${require('pg/package.json').version}, node ${process.version}`);

  // --- claim, work, complete, commit; what a retry gets

  let key = `${prefix} pay`;
  same(await pay(a, key, REQUEST), { outcome: 'claimed', response: RESPONSE }, 'first request: claimed');
  same(await pay(b, key, REQUEST), { outcome: 'replayed', response: RESPONSE }, 'retry: replayed, byte for byte');
  same(await pay(b, key, '{"currency":"EUR","amount":1e2}'), { outcome: 'replayed', response: RESPONSE }, 'retry, written differently: replayed');
  same(await pay(b, key, '{"amount": 200}'), { outcome: 'mismatch', response: null }, 'another request: mismatch');
  same(await payments(a, key), 1, 'one payment was made');
  const parsed = await one(a, "SELECT response FROM idem_claim('payments', $1)", key);
  same(parsed.id, 9007199254740992, 'the response as this driver parses it: the id is another');

  key = `${prefix} busy`;
  await a.query('BEGIN');
  same(await outcome(a, key), 'claimed', 'a claim that stays open');
  await b.query('BEGIN');
  let [result, after] = await row(b, "SELECT outcome, retry_after FROM idem_claim('payments', $1, $2)", key, REQUEST);
  same([result, after.seconds], ['in_progress', 1], 'another connection: in_progress, with retry_after');
  await b.query('INSERT INTO payment VALUES ($1, 0)', [`${prefix} after in_progress`]);
  await b.query('COMMIT');
  same(await payments(b, `${prefix} after in_progress`), 1, 'the transaction that lost goes on');
  await a.query('ROLLBACK');
  same((await pay(b, key, REQUEST)).outcome, 'claimed', 'after the rollback: claimed by the other connection');

  // --- lease: claim in one transaction, complete in another

  key = `${prefix} lease`;
  const lease = "SELECT outcome, token FROM idem_claim('payments', $1, $2, lease => $3)";
  const complete = "SELECT idem_complete('payments', $1, $2, $3)";
  let token;
  [result, token] = await row(a, lease, key, REQUEST, '5 minutes');
  same(result, 'claimed', 'claim under a lease, in autocommit');
  same([typeof token, String(Number(token))], ['string', token], 'the token, a string to this driver, is a safe number');
  ok(Number.isSafeInteger(Number(token)), 'which Number.isSafeInteger says too');
  [result, after] = await row(b, "SELECT outcome, extract(epoch FROM retry_after)::float8 FROM idem_claim('payments', $1, $2)", key, REQUEST);
  ok(result === 'in_progress' && after > 240 && after <= 300, 'seen from another connection: in_progress');
  same(await sqlstate(row(b, "SELECT idem_complete('payments', $1)", key)), 'ID002', 'complete without the token: ID002');
  same(await one(b, complete, key, RESPONSE, Number(token)), 'succeeded', 'complete with the token, a number, in another connection');
  same(await one(b, complete, key, RESPONSE, token), 'succeeded', 'complete again, as if the answer had been lost');
  same(await one(b, complete, key, RESPONSE, BigInt(token)), 'succeeded', 'and with a BigInt');
  same(await pay(a, key, REQUEST), { outcome: 'replayed', response: RESPONSE }, 'replayed');

  // --- lease lost: the transaction cannot commit, whatever it does about the error

  key = `${prefix} lost`;
  const old = await one(a, "SELECT token FROM idem_claim('payments', $1, $2, lease => '1 ms')", key, REQUEST);
  await new Promise((resolve) => setTimeout(resolve, 10));
  [result, token] = await row(b, lease, key, REQUEST, '5 min');
  ok(result === 'claimed' && Number(token) > Number(old), 'a lease that is over: taken over, with a higher token');
  await a.query('BEGIN');
  await a.query('INSERT INTO payment VALUES ($1, 100)', [key]);
  await a.query('SAVEPOINT trap');
  same(await sqlstate(row(a, complete, key, RESPONSE, old)), 'ID001', 'complete with the old token: ID001');
  await a.query('ROLLBACK TO trap');
  same(await sqlstate(a.query('COMMIT')), 'ID001', 'trapped by a savepoint, and COMMIT fails all the same');
  same(await payments(a, key), 0, 'what the lost holder wrote is gone');
  same(await one(b, complete, key, RESPONSE, token), 'succeeded', 'the new holder completes');

  // --- a claim that nobody settles

  key = `${prefix} unsettled`;
  await a.query('BEGIN');
  same(await outcome(a, key), 'claimed', 'a claim that is never settled');
  same(await sqlstate(a.query('COMMIT')), 'ID003', 'COMMIT: ID003');
  same(await sqlstate(outcome(a, key)), 'ID003', 'autocommit: ID003');
  same(await sqlstate(a.query(`SELECT idem_claim('payments', '${key}')`)), 'ID003', 'autocommit, the simple protocol: ID003');
  same(await row(a, "SELECT outcome, state FROM idem_status('payments', $1)", key), [null, null], 'nothing is left of it');
  const once = "SELECT idem_once('payments', $1, $2)";
  same(await one(a, once, key, REQUEST), true, 'autocommit: idem_once: true');
  same(await one(a, once, key, REQUEST), false, 'autocommit: idem_once again: false');
  same(await sqlstate(one(a, once, key, '{}')), 'ID004', 'autocommit: idem_once, another request: ID004');

  // --- parameters: of no type, and of each that a request may have

  key = `${prefix} types`;
  await pay(a, key, REQUEST);
  same(await outcome(a, key, JSON.parse(REQUEST)), 'replayed', 'request as a JavaScript object');
  same(await sqlstate(outcome(a, key, [1, 2])), '22P02', 'request as a JavaScript array: an error, this driver makes it {"1","2"}');
  same(await outcome(a, key, JSON.stringify([1, 2])), 'mismatch', 'request as JSON.stringify of an array');
  for (const cast of ['text', 'varchar', 'json', 'jsonb'])
    same(await one(a, `SELECT outcome FROM idem_claim('payments', $1, $2::${cast})`, key, REQUEST), 'replayed', `request as ${cast}`);
  same(await outcome(a, key, null), 'replayed', 'request null');
  same(await one(a, "SELECT outcome FROM idem_claim(scope => 'payments', key => $1::varchar, request => $2, wait => $3)", key, REQUEST, '1 s'),
    'replayed', 'named arguments');
  await a.query('BEGIN');
  same(await one(a, "SELECT outcome FROM idem_claim('payments', idem_key($1, $2), $3)", prefix, 7, REQUEST), 'claimed', 'idem_key of parameters');
  await a.query('ROLLBACK');

  key = `${prefix} payload`;
  const body = Buffer.from(Array.from({ length: 256 }, (_, i) => i));
  await a.query('BEGIN');
  same(await outcome(a, key), 'claimed', 'a claim to be settled with everything there is');
  same(await one(a, "SELECT idem_fail('payments', $1, $2, status_code => $3, headers => $4, body => $5)", key, RESPONSE, 402, { a: 'b' }, body),
    'failed', 'fail');
  await a.query('COMMIT');
  const answer = await row(b, "SELECT outcome, state, response::text, status_code, headers, body FROM idem_claim('payments', $1, $2)", key, REQUEST);
  same(answer, ['replayed', 'failed', RESPONSE, 402, { a: 'b' }, body], 'replayed: state, response, status, headers, body');

  // --- prepared statements

  let results = [];
  if (prepared) {
    const named = (name, text, ...values) => a.query({ name, text, values, rowMode: 'array' });
    for (let i = 0; i < 10; i++) {
      key = `${prefix} prepared ${i}`;
      await a.query('BEGIN');
      results.push((await named('claim', "SELECT outcome FROM idem_claim('payments', $1, $2)", key, REQUEST)).rows[0][0]);
      await named('complete', "SELECT idem_complete('payments', $1, $2)", key, RESPONSE);
      results.push((await named('claim', "SELECT outcome FROM idem_claim('payments', $1, $2)", key, REQUEST)).rows[0][0]);
      await a.query('COMMIT');
    }
    same(results.join(), 'claimed,replayed,'.repeat(10).slice(0, -1), 'prepared by the driver, ten times');
    ok(await one(a, "SELECT count(*) > 0 FROM pg_prepared_statements WHERE statement LIKE '%idem_claim%'"), 'they were prepared on the server');
  }

  key = `${prefix} PREPARE`;
  await a.query('BEGIN');
  await a.query("PREPARE claim_key AS SELECT outcome FROM idem_claim('payments', $1, $2)");
  results = [await one(a, `EXECUTE claim_key ('${key}', '${REQUEST}')`)];
  await a.query("SELECT idem_complete('payments', $1)", [key]);
  for (let i = 0; i < 10; i++) results.push(await one(a, `EXECUTE claim_key ('${key}', '${REQUEST}')`));
  await a.query('DEALLOCATE claim_key');
  await a.query('COMMIT');
  same(results.join(), 'claimed' + ',replayed'.repeat(10), 'PREPARE, used and deallocated in one transaction');

  // --- queries that are queued, not awaited one by one

  key = `${prefix} queue`;
  const queries = ['BEGIN', `SELECT outcome FROM idem_claim('payments', '${key}')`, `INSERT INTO payment VALUES ('${key}', 100)`,
    `SELECT idem_complete('payments', '${key}')`, 'COMMIT'].map((text) => a.query(text));
  same((await Promise.all(queries)).map((answer) => answer.command).join(), 'BEGIN,SELECT,INSERT,SELECT,COMMIT', 'queued: claimed and completed');
  same([await outcome(b, key), await payments(b, key)], ['replayed', 1], 'queued: replayed, one payment was made');

  // --- a batch of messages, one statement, and each once

  await a.query("INSERT INTO payment SELECT $1, 1 FROM unnest($2::text[]) AS message WHERE idem_once('payments', message)",
    [`${prefix} batch`, Array.from({ length: 9 }, (_, i) => `${prefix} message ${i % 3}`)]);
  same(await payments(a, `${prefix} batch`), 3, 'a batch with idem_once: each message once');

  // --- the whole in one call

  key = `${prefix} call`;
  const call = "SELECT outcome, response::text FROM idem_call('payments', $1, $2, 'pay(jsonb)')";
  same(await row(a, call, key, { key, amount: 5 }), ['executed', '{"paid": 5}'], 'idem_call: executed');
  same(await row(b, call, key, { key, amount: 5 }), ['replayed', '{"paid": 5}'], 'idem_call: replayed');
  same(await payments(a, key), 1, 'idem_call: one payment was made');

  // --- behind a pooler, transactions of one client run in one server process or another

  key = `${prefix} processes`;
  let pid, other, state;
  [pid, token] = await row(a, "SELECT pg_backend_pid(), token FROM idem_claim('payments', $1, lease => '5 min')", key);
  await b.query('BEGIN; SELECT 1');     // a pooler gives it the process that is free now
  [other, state] = await row(a, "SELECT pg_backend_pid(), idem_complete('payments', $1, $2, $3)", key, RESPONSE, token);
  await b.query('ROLLBACK');
  same([state, other !== pid], ['succeeded', pooled], `claimed and completed by ${pooled ? 'two server processes' : 'one server process'}`);

  // --- a client that goes away

  key = `${prefix} gone`;
  a.on('error', () => {});
  await a.query('BEGIN');
  same(await outcome(a, key), 'claimed', 'a client that claims and goes away');
  a.connection.stream.destroy();
  await b.query('BEGIN');
  same(await one(b, "SELECT outcome FROM idem_claim('payments', $1, wait => '10 s')", key), 'claimed', 'its key is free');
  await b.query('ROLLBACK');
  await b.end();
}

flows().then(() => {
  console.log(`1..${tests}`);
  process.exit(problems > 0 ? 1 : 0);
}, (error) => {
  console.log(`# ${error.stack}`);
  process.exit(1);
});

"""The clients: careful, and treated badly.

The rule of a careful client: one key for one intent; ask with it until the
answer is definite; a lost connection means that nothing is known, so ask again.
Two things make an answer definite that are easily forgotten:

- After a COMMIT under synchronous_commit = off nothing is definite yet.
- A replay may come from a transaction that has committed here and has not
  reached the standby yet (its own client may still be waiting, or be dead). A
  commit that one waits for, after the replay was seen, makes it certain: it
  comes later in the WAL. See certain().

Every client writes a trace, a JSON array a line, that the judge reads:

  ["i", intent]                                  it began to ask
  ["c", intent, token, before, after, claimant]  it was told "claimed", and that it is committed
  ["a", intent, answer, before, after]           a definite answer
  ["f", attempt]                                 a fenced attempt, must not be found
  ["x", text]                                    what must not happen
  ["n", {name: number}]                          how often what happened, at the end
"""

import collections
import json
import os
import random
import socket
import threading
import time
import traceback
import zlib

import psycopg2

KINDS = ("transfer", "call", "lease", "hold", "inbox")
RUN, DRAIN, STOP = range(3)

# try again in a new transaction: serialization, deadlock, timeouts, no memory for locks, too many connections
AGAIN = {"40001", "40P01", "57014", "53200", "55P03", "53300"}


class Lost(Exception):
    """The connection is gone: what was asked for may have happened."""


class Again(Exception):
    """The transaction was rolled back."""


class Fenced(Exception):
    """ID001: somebody else holds the key."""


class Settled(Exception):
    """ID002: the key is settled, by another transaction."""


class Doubt(Exception):
    """55000: the key is in doubt meanwhile, or is not any more."""


class Died(Exception):
    """The holder goes away and leaves its lease behind."""


Intent = collections.namedtuple("Intent", "kind client number")


class Work:
    """What is to be done for an intent: the same whoever does it."""

    def __init__(self, seed, intent):
        self.scope = intent.kind
        self.key = f"{intent.client}.{intent.number}"
        self.name = f"{intent.kind}:{self.key}"
        dice = zlib.crc32(f"{seed}/{self.name}".encode())
        self.source = dice % 64
        self.target = (self.source + 1 + (dice >> 6) % 63) % 64
        self.amount = 1 + (dice >> 12) % 1000
        self.declined = intent.kind in ("transfer", "lease") and dice % 29 == 0
        self.request = json.dumps({"intent": self.name, "source": self.source, "target": self.target,
                                   "amount": self.amount})


def intent_of(name):
    kind, key = name.split(":")
    client, number = key.split(".")
    return Intent(kind, int(client), int(number))


class Client:
    def __init__(self, shared, number):
        self.shared, self.number = shared, number
        self.random = random.Random(f"{shared.seed}/client {number}")
        self.trace = open(f"{shared.work}/trace.{number}", "w")
        self.count = collections.Counter()
        self.connection = self.outside = None
        self.attempts = self.intents = 0
        self.later = []             # to be asked again
        self.mail = []              # messages not acknowledged yet
        self.answered = collections.deque()
        self.windows = 0
        self.spoiled = collections.Counter()

    # ---- notes ----

    def note(self, *record):
        self.trace.write(json.dumps(record) + "\n")

    def violation(self, text):
        self.note("x", f"client {self.number}: {text}")

    def chance(self, probability):
        return self.random.random() < probability

    # ---- the session ----

    def connect(self):
        """Some sessions do not wait for their commits, some keep one snapshot, some must not idle."""
        options = []
        self.lazy = self.chance(0.2)
        if self.lazy:
            options.append("-c synchronous_commit=off")
            self.count["fault: synchronous_commit = off, sessions"] += 1
        if self.chance(0.1):
            options.append(r"-c default_transaction_isolation=repeatable\ read")
        if self.chance(0.3):
            options.append("-c idle_in_transaction_session_timeout=300")
        sockets = self.shared.sockets
        try:
            self.connection = psycopg2.connect(
                host=f"{sockets},{sockets}", port="5432,5433", user="postgres", dbname="chaos",
                target_session_attrs="read-write", connect_timeout=10, application_name=f"chaos {self.number}",
                options=" ".join(options))
        except psycopg2.Error:
            raise Lost()
        self.connection.autocommit = True
        self.cursor = self.connection.cursor()

    def disconnect(self):
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def run(self, sql, *args):
        if self.connection is None:
            self.connect()
        try:
            self.cursor.execute(sql, args or None)
            return self.cursor.fetchone() if self.cursor.description else None
        except psycopg2.Error as error:
            code = error.pgcode
            if self.connection.closed or code is None or code == "25P03" or code[:2] in ("08",) or code[:4] == "57P0":
                self.disconnect()
                raise Lost()
            if code in AGAIN:
                self.count["refused: " + code] += 1
                raise Again()
            if code == "ID001":
                raise Fenced()
            if code == "ID002":
                raise Settled()
            if code == "55000" and "in doubt" in str(error):
                raise Doubt()
            self.violation(f"{code} {error.pgerror} in {sql}")
            raise Again()

    def begin(self):
        self.run("BEGIN")
        if self.chance(0.06):
            self.count["fault: statement_timeout set"] += 1
            self.run("SET LOCAL statement_timeout = %s", self.random.randint(1, 30))

    def commit(self):
        """Returns if it is committed for sure; the answer may be lost on purpose."""
        self.sent = time.monotonic()
        if not self.chance(0.04):
            self.run("COMMIT")
        else:
            self.cut_off()
        if self.cursor.statusmessage != "COMMIT":
            raise Again()

    def cut_off(self):
        line = socket.socket(fileno=os.dup(self.connection.fileno()))
        timer = threading.Timer(self.random.random() * 0.004, line.shutdown, [socket.SHUT_RDWR])
        timer.start()
        try:
            self.run("COMMIT")
        except Lost:
            self.count["fault: cut off between COMMIT and its answer"] += 1
            raise
        finally:
            timer.join()
            line.close()

    def roll_back(self):
        try:
            if self.connection is not None:
                self.run("ROLLBACK")
        except (Lost, Again):
            self.disconnect()

    def idle(self):
        if self.chance(0.03):
            self.count["fault: idle in transaction, holding a key"] += 1
            time.sleep(self.random.uniform(0.05, 0.8))

    def certain(self, answer):
        """Ends a transaction that was told something; what it was told is durable then."""
        if self.shared.broken != "hasty":
            self.run("SET LOCAL synchronous_commit = on")
            self.run("SELECT pg_logical_emit_message(true, 'chaos', '')")
        self.commit()
        return answer

    def committed(self, answer):
        """Commits what was done; None if that does not make it definite."""
        self.commit()
        return None if self.lazy and self.shared.broken != "hasty" else answer

    # ---- claims ----

    def new_attempt(self):
        self.attempts += 1
        return f"{self.number}.{self.attempts}"

    def key(self, work):
        return work.key + "'" * self.spoiled[work.name]

    def claim(self, work, wait, claimant=None):
        """outcome, token, who has settled it, recovery point"""
        if self.shared.broken == "plain":
            row = self.run("SELECT 'replayed', NULL, answer, NULL FROM plain WHERE key = %s", work.name)
            return row or ("claimed", 1, None, None)
        before = time.monotonic()
        row = self.run("""SELECT outcome, token, coalesce(response->>'attempt', response->>'declined'), recovery_point,
                                 attempt
                          FROM idem_claim(%s, %s, %s, wait => %s, claimant => %s)""",
                       work.scope, self.key(work), work.request, wait, claimant)
        self.claimed = work.name, row[1], before, claimant or ""
        if row[0] == "claimed" and row[4] > 1:
            self.count["takeovers"] += 1
        return row[:4]

    def given(self):
        """
        The last claim is committed: until then its token counts for nothing. A
        crash may undo what it went by (a release need not be durable), and the
        holder before has its token back.
        """
        if self.shared.broken == "plain":
            return
        name, token, before, claimant = self.claimed
        self.note("c", name, token, before, time.monotonic(), claimant)

    def book(self, work, attempt, token):
        self.run("SELECT book(%s, %s, %s, %s, %s, %s)", work.name, attempt, token, work.source, work.target, work.amount)

    def settle(self, work, attempt, token=None):
        verdict, word = ("idem_fail", "declined") if work.declined else ("idem_complete", "attempt")
        if self.shared.broken == "plain":
            self.run("INSERT INTO plain VALUES (%s, %s)", work.name, attempt)
        else:
            self.run(f"SELECT {verdict}(%s, %s, %s, token => %s)", work.scope, self.key(work),
                     json.dumps({word: attempt}), token)

    def wait(self):
        return self.random.choice(("0", "0", "200 ms", None))

    # ---- a transfer: claim, work and settling in one transaction ----

    def transfer(self, work):
        attempt = self.new_attempt()
        style = self.random.random()
        self.begin()
        if style < 0.1:
            self.run("SAVEPOINT a")
            self.claim(work, "0")
            self.run("ROLLBACK TO SAVEPOINT a")
            self.count["fault: savepoint with a claim rolled back"] += 1
        outcome, token, answer, _ = self.claim(work, self.wait())
        if outcome == "replayed":
            self.count["replays"] += 1
            return self.certain(answer)
        if outcome != "claimed":
            return self.not_yet(work, outcome)
        self.idle()
        if 0.1 <= style < 0.3:
            # what is undone here was never done
            self.run("SAVEPOINT a")
            if not work.declined:
                self.book(work, attempt + " undone", token)
            self.settle(work, attempt + " undone")
            self.run("ROLLBACK TO SAVEPOINT a")
            self.count["fault: savepoint with a settled key rolled back"] += 1
        if style > 0.8:
            self.run("SAVEPOINT b")
        if not work.declined:
            self.book(work, attempt, token)
        self.settle(work, attempt)
        if style > 0.9:
            self.run("RELEASE SAVEPOINT b")
        self.idle()
        answer = self.committed(attempt)
        self.given()
        return answer

    # ---- the same in one call ----

    def call(self, work):
        attempt = self.new_attempt()
        if self.shared.broken == "plain":
            return self.transfer(work)
        request = dict(json.loads(work.request), attempt=attempt)
        self.begin()
        outcome, answer = self.run("SELECT outcome, response->>'attempt' FROM idem_call(%s, %s, %s, 'handle(jsonb)', %s)",
                                   work.scope, self.key(work), json.dumps(request), self.wait())
        if outcome == "executed":
            return self.committed(answer)
        if outcome == "replayed":
            self.count["replays"] += 1
            return self.certain(answer)
        return self.not_yet(work, outcome)

    def not_yet(self, work, outcome):
        self.roll_back()
        self.count[outcome.replace("_", " ")] += 1
        if outcome != "in_progress" and not (outcome == "unknown" and work.scope in ("lease", "hold")):
            self.violation(f"{work.name} is {outcome}")
        return None

    # ---- a leased operation against the outside ledger ----

    def lease(self, work):
        claimant = f"client {self.number}" if self.chance(0.5) else None
        self.begin()
        outcome, token, answer, recovery_point = self.claim(work, "0" if self.chance(0.8) else "500 ms", claimant)
        if outcome == "replayed":
            self.count["replays"] += 1
            return self.certain(answer)
        if outcome != "claimed":
            return self.not_yet(work, outcome)
        self.commit()
        self.given()
        return self.carry_on(work, token, recovery_point)

    hold = lease

    def carry_on(self, work, token, recovery_point):
        """The holder of a lease, from wherever the last one has come to."""
        self.shared.holding[self.number] = 1
        try:
            return self.hold_lease(work, token, recovery_point)
        except Fenced:
            self.count["fenced"] += 1
            self.roll_back()
            if self.chance(0.7) and self.shared.broken != "fence":
                self.defy(work, token)
        except Settled:
            self.count["settled by another"] += 1
            self.roll_back()
        except Doubt:
            self.count["holder found its key in doubt"] += 1
            self.roll_back()
        except Died:
            self.count["fault: holder died"] += 1
        finally:
            self.shared.holding[self.number] = 0
        return None

    def defy(self, work, token):
        """A zombie that was told, and goes on to settle nevertheless."""
        try:
            self.settle_once(work, token)
        except (Fenced, Settled, Doubt):
            self.roll_back()
            return
        # where a takeover was lost with the old primary, the token is current again
        if not self.shared.asynchronous:
            self.violation(f"{work.name}: a fenced holder, token {token}, has settled")

    def die(self):
        if self.shared.phase.value == RUN and self.chance(0.04):
            if self.chance(0.3):
                self.disconnect()
            raise Died()

    def dawdle(self):
        """What is done outside takes its time, at times longer than the lease."""
        if self.chance(0.04):
            self.count["fault: holder slower than its lease"] += 1
            time.sleep(self.random.uniform(1.4, 3))
        else:
            time.sleep(self.random.random() * 0.03)

    def hold_lease(self, work, token, recovery_point):
        self.die()
        if not work.declined and recovery_point is None:
            if self.chance(0.02):
                self.run("SELECT idem_release(%s, %s, %s)", work.scope, work.key, token)
                self.count["released"] += 1
                return None
            self.dawdle()
            self.charge(work, token)
            self.dawdle()
            self.die()
            if self.chance(0.02):
                self.run("SELECT idem_unknown(%s, %s, %s, '{}')", work.scope, work.key, token)
                self.count["in doubt"] += 1
                return None
            if self.chance(0.2):
                self.run("SELECT idem_extend(%s, %s, %s)", work.scope, work.key, token)
            if self.chance(0.6):
                self.begin()
                self.run("SELECT idem_checkpoint(%s, %s, %s, 'charged', '{}')", work.scope, work.key, token)
                self.commit()
            self.die()
        return self.settle_lease(work, token)

    def settle_lease(self, work, token):
        if self.chance(0.7):
            self.shared.holding[self.number] = 0    # mostly it is stopped before it settles
        try:
            return self.settle_once(work, token)
        except Lost:
            if self.chance(0.5):
                raise
        # The answer to COMMIT was lost: the transaction is repeated as it is,
        # with the token of the claim. What it comes to is asked for then.
        self.count["settling repeated after a lost answer"] += 1
        self.settle_once(work, token)
        return None

    def settle_once(self, work, token):
        attempt = self.new_attempt()
        if self.shared.broken == "fence":
            return self.settle_unfenced(work, attempt, token)
        trap = self.chance(0.6)
        self.begin()
        if trap:
            self.run("SAVEPOINT trap")
        try:
            steps = [lambda: self.settle(work, attempt, token)]
            if not work.declined:
                steps.insert(self.random.randint(0, 1), lambda: self.book(work, attempt, token))
            for step in steps:
                step()
        except Fenced:
            self.note("f", attempt)
            if trap:
                self.commit_fenced(work, token)
            raise
        return self.committed(attempt)

    def commit_fenced(self, work, token):
        """A zombie that traps ID001 and writes on."""
        attempt = self.new_attempt()
        self.note("f", attempt)
        self.count["fault: ID001 trapped"] += 1
        self.run("ROLLBACK TO SAVEPOINT trap")
        self.book(work, attempt, token)
        self.commit()       # raises Fenced
        self.violation(f"{work.name}: a fenced transaction was committed, attempt {attempt}")

    def settle_unfenced(self, work, attempt, token):
        """For --break fence: does not settle in the transaction that does the work, and ignores ID001."""
        self.begin()
        if not work.declined:
            self.book(work, attempt, token)
        self.commit()
        self.begin()
        try:
            self.settle(work, attempt, token)
        except (Fenced, Settled):
            self.roll_back()
            return None
        self.commit()
        return None

    # ---- the outside ledger ----

    def ask_outside(self, sql, *args):
        for _ in range(2):
            try:
                if self.outside is None:
                    self.outside = psycopg2.connect(host=self.shared.sockets, port=5434, user="postgres",
                                                    dbname="outside", application_name=f"chaos {self.number}")
                    self.outside.autocommit = True
                with self.outside.cursor() as cursor:
                    cursor.execute(sql, args)
                    return cursor.fetchone()
            except psycopg2.Error:
                self.outside = None
        raise Lost()

    def charge(self, work, token):
        child, = self.run("SELECT idem_child(%s, %s, 'charge')::text", work.scope, work.key)
        self.ask_outside("SELECT charge(%s::uuid, %s, %s)", child, work.amount, token)
        if self.chance(0.03):
            self.count["fault: the outside system's answer lost"] += 1
            raise Died()

    # ---- a consumer of messages, in batches ----

    def consume(self):
        """Takes what was left over, some new messages, and some that others have."""
        batch = [self.mail.pop(self.random.randrange(len(self.mail))) for _ in range(min(8, len(self.mail)))]
        if self.shared.phase.value == RUN:
            batch += [self.new_intent("inbox") for _ in range(self.random.randint(1, 5))]
            others = [intent for intent in self.recent() if intent.kind == "inbox"]
            batch += self.random.sample(others, min(len(others), 3))
        batch = list(dict.fromkeys(batch))
        try:
            done = self.consume_batch(self.random.sample(batch, len(batch)))
        except Lost:
            self.count["lost connections"] += 1
            done = []
        except Again:
            self.roll_back()
            done = []
        self.count["retries"] += len(batch) - len(done)
        for intent in batch:
            if intent not in done:
                self.mail.append(intent)
            else:
                self.answer(intent, "")

    def consume_batch(self, batch):
        done = []
        doubles = False
        self.begin()
        for intent in batch:
            work = Work(self.shared.seed, intent)
            self.run("SAVEPOINT message")
            try:
                first = self.once(work)
            except Again:
                # not this one, not now; the rest of the batch goes on, unless it was chosen to end a deadlock
                self.run("ROLLBACK TO SAVEPOINT message")
                continue
            if first:
                self.run("INSERT INTO inbox VALUES (%s, %s)", work.name, self.new_attempt())
                if self.chance(0.15):
                    self.count["fault: message of a batch rolled back"] += 1
                    self.run("ROLLBACK TO SAVEPOINT message")
                    continue
            else:
                doubles = True
                self.count["replays"] += 1
            if self.chance(0.5):
                self.run("RELEASE SAVEPOINT message")
            done.append(intent)
        self.idle()
        if self.chance(0.04):
            self.count["fault: batch rolled back"] += 1
            raise Again()
        if doubles:
            return self.certain(done)
        return self.committed(done) or []

    def once(self, work):
        if self.shared.broken == "plain":
            first = self.run("SELECT FROM plain WHERE key = %s", work.name) is None
            if first:
                self.run("INSERT INTO plain VALUES (%s, '')", work.name)
            return first
        return self.run("SELECT idem_once(%s, %s, %s, %s)", work.scope, self.key(work), work.request,
                        self.random.choice((None, "0", "100 ms")))[0]

    # ---- intents ----

    def new_intent(self, kind):
        self.intents += 1
        intent = Intent(kind, self.number, self.intents)
        self.note("i", f"{kind}:{self.number}.{self.intents}")
        self.trace.flush()
        self.count["intents"] += 1
        self.shared.recent[self.random.randrange(len(self.shared.recent))] = \
            (KINDS.index(kind) + 1) << 48 | self.number << 32 | self.intents
        return intent

    def recent(self):
        """What others have begun lately: the same request reaches us, too."""
        return [Intent(KINDS[(code >> 48) - 1], code >> 32 & 0xffff, code & 0xffffffff)
                for code in self.shared.recent[:] if code]

    def answer(self, intent, answer):
        after = time.monotonic()
        self.note("a", f"{intent.kind}:{intent.client}.{intent.number}", answer, self.sent, after)
        if self.shared.asynchronous:
            self.answered.append((after, intent))
            while self.answered[0][0] < after - 120:
                self.answered.popleft()

    def play(self, intent):
        """Asks until the answer is definite, or puts it off."""
        work = Work(self.shared.seed, intent)
        pause = 0.002
        while True:
            try:
                answer = getattr(self, intent.kind)(work)
            except Lost:
                self.count["lost connections"] += 1
                self.disconnect()
                answer = None
                if self.shared.broken == "lost":
                    self.spoiled[work.name] += 1
            except (Again, Fenced):
                self.roll_back()
                answer = None
            if answer is not None:
                self.answer(intent, answer)
                return
            self.count["retries"] += 1
            time.sleep(self.random.random() * pause)
            pause = min(pause * 2, 0.3)
            if self.chance(0.1):
                self.later.append(intent)
                return

    def ask_again_what_may_be_lost(self):
        """After a failover that lost commits: everything answered since the standby was last in step."""
        while self.windows < self.shared.windows.value:
            since = self.shared.window[self.windows]
            self.windows += 1
            for after, intent in self.answered:
                if after >= since:
                    self.count["asked again after a failover"] += 1
                    (self.mail if intent.kind == "inbox" else self.later).append(intent)

    def step(self):
        self.ask_again_what_may_be_lost()
        if self.connection is not None and self.chance(0.02):
            self.disconnect()
        running = self.shared.phase.value == RUN
        if self.mail and (not running or self.chance(0.15)):
            self.consume()
        elif self.later and (not running or self.chance(0.3)):
            self.play(self.later.pop(self.random.randrange(len(self.later))))
        elif running:
            kind = self.random.choice(self.shared.kinds)
            others = [intent for intent in self.recent() if intent.kind == kind] if self.chance(0.3) else []
            if kind == "inbox":
                self.consume()
            elif others:
                self.count["duplicates"] += 1
                self.play(self.random.choice(others))
            else:
                self.play(self.new_intent(kind))
        return running or self.mail or self.later

    def end(self):
        self.note("n", self.count)
        self.trace.close()

    def main(self):
        """A process of its own; libpq tells its standard error what servers say when they go."""
        os.dup2(os.open(f"{self.shared.work}/clients.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        try:
            while self.step():
                pass
        except BaseException:
            self.violation(traceback.format_exc())
            raise
        finally:
            self.end()


class Recovery(Client):
    """Recovers what holders have left lying, resolves what is in doubt, sweeps."""

    def step(self):
        try:
            for scope in ("lease", "hold"):
                self.recover(scope)
            self.resolve()
            if self.chance(0.5):
                self.run("SELECT idem_sweep(%s)", self.random.choice((10, 1000)))
                self.count["fault: sweep by hand"] += 1
        except Lost:
            self.disconnect()
        except (Again, Fenced, Settled):
            self.roll_back()
        time.sleep(self.random.random() * 0.2)
        return self.shared.phase.value != STOP

    def dawdle(self):
        pass

    def recover(self, scope):
        self.begin()
        before = time.monotonic()
        rows = self.all("SELECT key, token, recovery_point FROM idem_recover(%s, 3, '1.5 seconds')", scope)
        self.commit()
        after = time.monotonic()
        for key, token, recovery_point in rows:
            work = Work(self.shared.seed, intent_of(f"{scope}:{key}"))
            self.note("c", work.name, token, before, after, "")
            self.count["takeovers"] += 1
            self.count["recovered"] += 1
            self.carry_on(work, token, recovery_point)

    def all(self, sql, *args):
        first = self.run(sql, *args)
        return [] if first is None else [first] + self.cursor.fetchall()

    def resolve(self):
        """From what the outside ledger knows."""
        for scope, key in self.all("SELECT scope, key FROM idem.operation WHERE state = 'unknown' LIMIT 5"):
            work = Work(self.shared.seed, intent_of(f"{scope}:{key}"))
            child, = self.run("SELECT idem_child(%s, %s, 'charge')::text", scope, key)
            charged = self.ask_outside("SELECT 1 FROM charge WHERE key = %s::uuid", child)
            attempt = self.new_attempt()
            self.begin()
            try:
                if charged:
                    # as nobody's holder: the key may be in doubt for another attempt by now
                    self.book(work, attempt, None)
                self.run("SELECT idem_resolve(%s, %s, %s, %s::text)", scope, key, "succeeded" if charged else "retry",
                         json.dumps({"attempt": attempt}) if charged else None)
            except Doubt:
                self.roll_back()
                continue
            self.commit()
            self.count["resolved from the outside ledger"] += 1

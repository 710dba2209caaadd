"""The judge: compares what the clients saw with what is in the databases."""

import collections
import json
import re

from client import Work, intent_of

CRASHED = re.compile(r"PANIC:|TRAP:|terminated by signal (?!9:)|invalid page|could not read block")


class Judge:
    """
    With a synchronous standby nothing that was answered may be lost. With one
    that lags ("asynchronous"), what was answered between the time the standby
    was last in step and the loss of the primary may be gone, and is asked for
    again: an intent's effect in the bank may then be another one than was
    answered, never a second one; and what protects the outside ledger from a
    second charge is only the key that it was given.
    """

    def __init__(self, cluster, shared, traces):
        self.cluster, self.shared = cluster, shared
        self.wrong = []
        self.count = collections.Counter()
        self.intents = set()
        self.claims = collections.defaultdict(list)
        self.answers = collections.defaultdict(list)
        self.fenced = set()
        for trace in traces:
            self.read(trace)

    def read(self, trace):
        ended = False
        with open(trace) as file:
            for line in file:
                try:
                    kind, *record = json.loads(line)
                except ValueError:
                    continue        # torn, and reported below
                if kind == "i":
                    self.intents.add(record[0])
                elif kind == "c":
                    self.claims[record[0]].append(record[1:])
                elif kind == "a":
                    self.answers[record[0]].append(record[1:])
                elif kind == "f":
                    self.fenced.add(record[0])
                elif kind == "x":
                    self.complain("violation", record[0])
                elif kind == "n":
                    self.count.update(record[0])
                    ended = True
        if not ended:
            self.complain("client", f"{trace} ends too early")

    def complain(self, what, text):
        self.wrong.append(f"{what}: {text}")

    def query(self, sql, server=None, database="chaos"):
        return (server or self.cluster.primary).query(sql, database=database)

    # ---- the verdict ----

    def judge(self):
        self.effects()
        self.balances()
        self.fenced_holders()
        if self.shared.broken not in ("plain", "lost"):
            self.keys()
            self.outside()
            self.tokens()
            self.in_flight()
        self.logs()
        return self.wrong

    def effects(self):
        """Every intent took effect exactly once, whole, and nothing else did."""
        self.postings = collections.defaultdict(list)
        for intent, *row in self.query("SELECT intent, attempt, token, source, target, amount FROM posting"):
            self.postings[intent].append(row)
        self.consumed = collections.defaultdict(list)
        for intent, attempt in self.query("SELECT intent, attempt FROM inbox"):
            self.consumed[intent].append(attempt)
        for name in self.intents:
            work = Work(self.shared.seed, intent_of(name))
            inbox = work.scope == "inbox"
            found = (self.consumed if inbox else self.postings)[name]
            expected = 0 if work.declined else 1
            if len(found) != expected:
                self.complain("effect", f"{name} took effect {len(found)} times, not {expected}: {found}")
            elif found and not inbox and found[0][2:] != [work.source, work.target, work.amount]:
                self.complain("effect", f"{name} is not what was asked for: {found}")
        for name in (set(self.postings) | set(self.consumed)) - self.intents:
            self.complain("effect", f"{name} was never asked for")
        self.effect_count = sum(map(len, self.postings.values())) + sum(map(len, self.consumed.values()))

    def balances(self):
        expected = collections.Counter()
        for rows in self.postings.values():
            for _, _, source, target, amount in rows:
                expected[source] -= amount
                expected[target] += amount
        balances = dict(self.query("SELECT id, balance FROM account"))
        if sum(balances.values()) != 0:
            self.complain("sum", f"the balances add up to {sum(balances.values())}")
        for account, balance in balances.items():
            if balance != expected[account]:
                self.complain("sum", f"account {account} has {balance}, its postings say {expected[account]}")

    def fenced_holders(self):
        for name, rows in self.postings.items():
            for attempt, *_ in rows:
                if attempt in self.fenced:
                    self.complain("fenced", f"{name}: the fenced attempt {attempt} is there")
                if "undone" in attempt:
                    self.complain("fenced", f"{name}: what was rolled back is there: {attempt}")

    def keys(self):
        """No key lost, none settled twice, all answers are the stored one."""
        stored = {}
        for scope, key, state, token, answer in self.query("""
                SELECT s.name, r.key, r.state::text, r.token, coalesce(r.response->>'attempt', r.response->>'declined')
                FROM (SELECT scope_id, key, state, token, response FROM idem.result
                      UNION ALL SELECT scope_id, key, state, token, response FROM idem.archive) AS r
                JOIN idem.scope AS s ON s.id = r.scope_id"""):
            name = f"{scope}:{key}"
            if name in stored:
                self.complain("key", f"{name} is settled twice")
            stored[name] = state, token, answer
        for name in self.intents:
            work = Work(self.shared.seed, intent_of(name))
            if name not in stored:
                self.complain("key", f"{name} is lost")
                continue
            state, token, answer = stored[name]
            if state != ("f" if work.declined else "s"):
                self.complain("key", f"{name} is settled as {state}")
            for attempt, by, *_ in self.postings[name]:
                if attempt != answer:
                    self.complain("key", f"{name} was settled by {answer}, and took effect by {attempt}")
                if by is not None and by != token:
                    self.complain("key", f"{name} was settled with token {token}, and took effect with {by}")
            if not self.answers[name]:
                self.complain("key", f"{name} was never answered")
            for told, before, after in self.answers[name]:
                if told != (answer or "") and not self.may_be_lost(name, told, before, after):
                    self.complain("key", f"{name} was answered {told}, and is stored as {answer}")
        for name in set(stored) - self.intents:
            self.complain("key", f"{name} was never asked for")

    def may_be_lost(self, name, told, before, after):
        """Was it answered while the standby got nothing, before the primary was lost?"""
        for index in range(self.shared.windows.value):
            if after >= self.shared.window[index] and before <= self.shared.closed[index]:
                self.count["answers lost with the old primary"] += 1
                return True
        return False

    def outside(self):
        """One charge for each leased intent; and its record was there before it, and stayed."""
        keys = self.query("""
            SELECT scope || ':' || key, idem_child(scope, key, 'charge')::text,
                   floor(extract(epoch FROM created_at - '2000-01-01 00:00+00') * 1000000)::bigint
            FROM idem.operation WHERE scope IN ('lease', 'hold')""")
        charges = {row[0]: row[1:] for row in self.query(
            "SELECT key::text, amount, first_token, calls, stale FROM charge", self.cluster.outside, "outside")}
        for name, child, created in keys:
            work = Work(self.shared.seed, intent_of(name))
            charge = charges.pop(child, None)
            if work.declined:
                if charge:
                    self.complain("outside", f"{name} was declined and charged")
                continue
            if charge is None:
                self.complain("outside", f"{name} was not charged")
                continue
            amount, first_token, calls, stale = charge
            self.count["charges repeated"] += calls - 1
            self.count["charges asked for with an old token"] += stale
            if amount != work.amount:
                self.complain("outside", f"{name} was charged {amount}, not {work.amount}")
            if created > first_token:
                self.count["charges whose record was lost, protected by the outside key"] += 1
                if not self.shared.asynchronous:
                    self.complain("outside", f"{name}: the record of the intent was lost after the charge")
        for child in charges:
            self.complain("outside", f"{child} was charged for nothing")

    def tokens(self):
        """
        A claim that began after another one was answered has the greater token;
        the same claimant may be given the same one again.
        """
        for name, claims in self.claims.items():
            ended = sorted(claims, key=lambda claim: claim[2])
            position = 0
            last = None
            for token, before, after, claimant in sorted(claims, key=lambda claim: claim[1]):
                while position < len(ended) and ended[position][2] < before:
                    if last is None or ended[position][0] >= last[0]:
                        last = ended[position]
                    position += 1
                if last and (token < last[0] or token == last[0] and not (claimant and claimant == last[3])):
                    self.complain("token", f"{name} got {token} after {last[0]}")
            self.count["tokens"] += len(claims)

    def in_flight(self):
        for name, in self.query("SELECT scope || ':' || key || ' ' || state FROM idem.operation WHERE kept_in = 'inflight'"):
            self.complain("in flight", name)

    def logs(self):
        for server in (self.cluster.primary, self.cluster.standby):
            with open(server.log, errors="replace") as file:
                for line in file:
                    if CRASHED.search(line):
                        self.complain("server log", line.strip())

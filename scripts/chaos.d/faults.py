"""The enemy: what is done to servers and clients, in an order that the seed decides."""

import collections
import random
import signal
import threading
import time

import psycopg2

from servers import children_of_postmaster, go_on, send

# how often each comes in a deck; the deck is shuffled, played, shuffled again
DECK = {"terminate": 6, "kill": 2, "restart": 1, "zombie": 5, "stop_backend": 2, "stop_standby": 2, "greedy": 2,
        "fail_over": 1}
LEASE = 1.5


class Enemy:
    def __init__(self, cluster, shared, clients):
        self.cluster, self.shared, self.clients = cluster, shared, clients
        self.random = random.Random(f"{shared.seed}/enemy")
        self.count = collections.Counter()
        self.deck = []
        self.greedy_session = None
        self.stopped = []           # (when to go on, process)

    # ---- the course of things ----

    def attack(self, until):
        """Until then; but the first deck is played to its end, so that there was some of everything."""
        decks = 0
        while time.monotonic() < until or decks == 1 and self.deck:
            if not self.deck:
                decks += 1
                self.deck = [name for name, times in DECK.items() for _ in range(times)]
                self.random.shuffle(self.deck)
            name = self.deck.pop()
            try:
                done = getattr(self, name)()
            except psycopg2.Error:
                done = None         # the server is busy dying
            if done:
                self.count[done] += 1
            self.rest(self.random.uniform(0.1, 0.8))

    def rest(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.wake()
            time.sleep(0.05)

    def wake(self, everybody=False):
        now = time.monotonic()
        for when, pid in self.stopped[:]:
            if everybody or when <= now:
                send(pid, signal.SIGCONT)
                self.stopped.remove((when, pid))

    def peace(self):
        """Nobody is stopped, and both servers run."""
        if self.greedy_session:
            self.greedy_session.join()
        self.wake(everybody=True)
        for server in (self.cluster.primary, self.cluster.standby):
            if not server.running():
                server.start()
            go_on(server)

    def stop(self, pid, seconds):
        if send(pid, signal.SIGSTOP):
            self.stopped.append((time.monotonic() + seconds, pid))
            return True
        return False

    # ---- sessions ----

    def backend(self, where="true"):
        rows = self.cluster.primary.query(f"""
            SELECT pid FROM pg_stat_activity
            WHERE (application_name LIKE 'chaos %%' OR backend_type LIKE 'idem %%') AND {where} ORDER BY pid""")
        return self.random.choice(rows)[0] if rows else None

    def terminate(self):
        pid = self.backend("state <> 'idle'") or self.backend()
        if pid and self.cluster.primary.query("SELECT pg_terminate_backend(%s)", pid):
            return "pg_terminate_backend"

    def kill(self):
        pid = self.backend()
        if pid and send(pid, signal.SIGKILL):
            return "SIGKILL of a backend (crash restart)"

    def stop_backend(self):
        """Of a holder, in the middle of its transaction or between two."""
        holders = [number for number in range(len(self.clients)) if self.shared.holding[number]]
        if holders:
            pid = self.backend(f"state LIKE 'idle%%' AND application_name = 'chaos {self.random.choice(holders)}'")
            if pid and self.stop(pid, LEASE + self.random.random()):
                return "backend of a holder stopped past the lease (SIGSTOP)"

    def zombie(self):
        for _ in range(40):
            holders = [number for number in range(len(self.clients)) if self.shared.holding[number]]
            if holders:
                pid = self.clients[self.random.choice(holders)].pid
                if self.stop(pid, LEASE + self.random.uniform(0.3, 2)):
                    return "holder stopped past its lease (SIGSTOP)"
            time.sleep(0.01)

    def greedy(self):
        """One session with open claims until the lock table is full."""
        if self.greedy_session and self.greedy_session.is_alive():
            return None
        self.greedy_session = threading.Thread(target=self.fill_lock_table)
        self.greedy_session.start()
        return None

    def fill_lock_table(self):
        try:
            connection = self.cluster.primary.connect("chaos")
        except psycopg2.Error:
            return
        try:
            with connection.cursor() as cursor:
                cursor.execute("BEGIN")
                full = False
                for size in (1000, 100, 10, 1):
                    for _ in range(20):
                        cursor.execute("SAVEPOINT a")
                        try:
                            cursor.execute("SELECT count(idem_claim('greedy', gen_random_uuid()::text)) FROM generate_series(1, %s)", (size,))
                            cursor.execute("RELEASE SAVEPOINT a")
                        except psycopg2.Error as error:
                            if error.pgcode != "53200":
                                raise
                            full = True
                            cursor.execute("ROLLBACK TO SAVEPOINT a")
                            break
                if full:
                    self.count["lock table full"] += 1
                time.sleep(0.4)
        except psycopg2.Error:
            pass
        finally:
            connection.close()

    # ---- servers ----

    def restart(self):
        self.wake(everybody=True)
        self.cluster.restart()
        return "immediate stop and restart"

    def stop_standby(self):
        """Commits have to wait for it; who is killed meanwhile has committed here and not there."""
        pids = self.cluster.standby.query("SELECT pid FROM pg_stat_get_wal_receiver() WHERE pid IS NOT NULL")
        if pids and self.stop(pids[0][0], self.random.uniform(0.3, 1.2)):
            for _ in range(self.random.randint(0, 2)):
                time.sleep(0.1)
                pid = self.backend("wait_event = 'SyncRep'")
                if pid:
                    self.cluster.primary.query("SELECT pg_terminate_backend(%s)", pid)
                    self.count["pg_terminate_backend while COMMIT waits for the standby"] += 1
            return "standby stopped for a while (SIGSTOP)"

    def fail_over(self):
        if self.cluster.asynchronous:
            return self.fail_over_losing()
        self.wake_servers()
        self.cluster.wait_for_standby()
        if self.random.random() < 0.5:
            self.stop_standby()
        self.cluster.fail_over()
        return "failover to the standby"

    def wake_servers(self):
        for server in (self.cluster.primary, self.cluster.standby):
            pids = set(children_of_postmaster(server))
            for when, pid in [entry for entry in self.stopped if entry[1] in pids]:
                send(pid, signal.SIGCONT)
                self.stopped.remove((when, pid))

    def fail_over_losing(self):
        """
        What was committed before "since" is on the standby; then it gets
        nothing more, the clients go on for a while, and the primary is lost.
        """
        self.wake_servers()
        self.cluster.wait_for_standby()
        since = time.monotonic()
        lsn, = self.cluster.primary.query("SELECT pg_current_wal_insert_lsn()")[0]
        # what nobody waited for gets written by this
        self.cluster.primary.query("SELECT pg_switch_wal()")
        while not self.cluster.primary.query(
                "SELECT 1 FROM pg_stat_replication WHERE flush_lsn >= %s", lsn):
            time.sleep(0.02)
        sender, = self.cluster.primary.query("SELECT pid FROM pg_stat_replication")[0]
        send(sender, signal.SIGSTOP)
        time.sleep(self.random.uniform(0.2, 1.5))
        quarantined = []

        def operator(server):
            self.shared.open_window(since)
            for scope in ("transfer", "call", "lease", "hold", "inbox"):
                quarantined.extend(server.query("SELECT idem_quarantine(%s)", scope, database="chaos",
                                                options="-c default_transaction_read_only=off"))
        self.cluster.fail_over(operator)
        self.count["keys quarantined after it"] += sum(count for count, in quarantined)
        return "failover to a standby that had not got everything"

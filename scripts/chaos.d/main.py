"""scripts/chaos starts this; see there for what it does, and README.md for why."""

import argparse
import glob
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time

from client import DRAIN, RUN, STOP, Client, Recovery
from faults import Enemy
from judge import Judge
from servers import Cluster

DRAIN_SECONDS = 120
RECOVERIES = 2


class Shared:
    """What controller and clients, processes all, have in common."""

    def __init__(self, options, cluster):
        self.work, self.sockets = cluster.work, cluster.sockets
        self.seed, self.asynchronous, self.broken = options.seed, options.asynchronous, options.broken
        self.kinds = options.kinds
        self.phase = multiprocessing.RawValue("i", RUN)
        self.holding = multiprocessing.RawArray("b", options.clients + RECOVERIES)
        self.recent = multiprocessing.RawArray("q", 8 * options.clients)
        # from when to when answers may have been lost, see Judge
        self.windows = multiprocessing.RawValue("i", 0)
        self.window = multiprocessing.RawArray("d", 10000)
        self.closed = multiprocessing.RawArray("d", 10000)

    def open_window(self, since):
        """The primary is gone, and with it what was committed after "since"."""
        self.window[self.windows.value] = since
        self.closed[self.windows.value] = time.monotonic()
        self.windows.value += 1


def arguments():
    parser = argparse.ArgumentParser(prog="chaos", allow_abbrev=False)
    parser.add_argument("--seconds", type=int, default=60, help="how long faults are injected (60)")
    parser.add_argument("--clients", type=int, default=8, help="client processes (8)")
    parser.add_argument("--seed", type=int, help="of all that is random (chosen and printed)")
    parser.add_argument("--async", dest="asynchronous", action="store_true",
                        help="an asynchronous standby, and failovers that lose commits")
    # Without idem, without its fence, clients that take a lost answer for a no, or that believe what is not
    # durable yet: shows that the judge can say "no".
    parser.add_argument("--break", dest="broken", choices=("plain", "fence", "lost", "hasty"), help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--bin", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.clients < 2 or options.seconds < 1:
        parser.error("at least 2 clients and 1 second")
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1, 1000000000)
    options.kinds = {"plain": ("transfer", "inbox"), "fence": ("lease",), "lost": ("transfer", "call")}.get(
        options.broken, ("transfer", "transfer", "call", "lease", "lease", "hold", "inbox"))
    options.bin = options.bin or os.path.dirname(shutil.which("pg_ctl") or "")
    return options


def step(what, text):
    print(f"{what:<12} {text}", flush=True)


def spawn(clients):
    started = []
    for client in clients:
        process = multiprocessing.Process(target=client.main)
        process.start()
        started.append(process)
    return started


def drain(shared, cluster, processes, recoveries):
    """Every client asks until it has all its answers, and what is left in flight is recovered."""
    shared.phase.value = DRAIN
    end = time.monotonic() + DRAIN_SECONDS
    for process in processes:
        process.join(max(0, end - time.monotonic()))
    complaints = [f"client: {number} did not get its answers" for number, process in enumerate(processes)
                  if process.is_alive()]
    while time.monotonic() < end and cluster.primary.query(
            "SELECT 1 FROM idem.inflight LIMIT 1", database="chaos"):
        time.sleep(0.1)
    shared.phase.value = STOP
    for process in recoveries:
        process.join(10)
    for process in processes + recoveries:
        if process.is_alive():
            process.kill()
            process.join()
    return complaints


def report(enemy, judge, cluster, seconds):
    counts = judge.count
    print(f"\nIn {seconds:.0f} s, {cluster.failovers} failovers. Faults:")
    faults = dict(enemy.count)
    faults.update((name[7:], count) for name, count in counts.items() if name.startswith("fault: "))
    for name, count in sorted(faults.items(), key=lambda item: -item[1]):
        print(f"{count:9}  {name}")
    print("What clients saw:")
    first = ("intents", "duplicates", "retries", "replays", "takeovers", "fenced")
    rest = sorted(name for name in counts if name not in first and not name.startswith("fault: "))
    for name in first + tuple(rest):
        print(f"{counts[name]:9}  {name}")
    print(f"{judge.effect_count:9}  effects")


def main():
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    multiprocessing.set_start_method("fork")
    started = time.monotonic()
    cluster = Cluster(options.work, options.bin, options.asynchronous, options.clients)
    shared = Shared(options, cluster)
    processes = recoveries = []
    try:
        step("Starting", "a primary, %s standby, and an outside system"
             % ("an asynchronous" if options.asynchronous else "a synchronous"))
        cluster.start()
        step("Attacking", f"{options.clients} clients for {options.seconds} s, --seed {options.seed}")
        processes = spawn([Client(shared, number) for number in range(options.clients)])
        recoveries = spawn([Recovery(shared, options.clients + number) for number in range(RECOVERIES)])
        enemy = Enemy(cluster, shared, processes)
        began = time.monotonic()
        enemy.attack(began + options.seconds)
        enemy.peace()
        seconds = time.monotonic() - began
        step("Recovering", "what is in flight")
        complaints = drain(shared, cluster, processes, recoveries)
        step("Judging", "what is there")
        judge = Judge(cluster, shared, sorted(glob.glob(f"{options.work}/trace.*")))
        wrong = complaints + judge.judge()
        report(enemy, judge, cluster, seconds)
        print()
        for line in wrong[:40]:
            print(line)
        if len(wrong) > 40:
            print(f"and {len(wrong) - 40} more")
        if wrong:
            print(f"seed {options.seed}, after {time.monotonic() - started:.0f} s; evidence: {options.work}")
        print("exactly once:", "no" if wrong else "yes", flush=True)
        return 1 if wrong else 0
    finally:
        for process in processes + recoveries:
            if process.is_alive():
                process.kill()
        cluster.stop()


if __name__ == "__main__":
    sys.exit(main())

"""The servers: a primary, its standby, and the outside system's."""

import os
import shutil
import signal
import subprocess
import tempfile
import time

import psycopg2

SETTINGS = """
listen_addresses = ''
unix_socket_directories = '{sockets}'
unix_socket_permissions = 0700
port = {port}
fsync = off
max_connections = {connections}
shared_buffers = 64MB
max_wal_size = 2GB
wal_keep_size = 1GB
wal_retrieve_retry_interval = 200ms
wal_receiver_status_interval = 1s
hot_standby = on
deadlock_timeout = 200ms
checkpoint_timeout = 1min
log_line_prefix = '%m [%p] %a '
log_error_verbosity = verbose
autovacuum_naptime = 5s
"""

PRELOADED = """
shared_preload_libraries = 'idem'
idem.sweep_interval = 1s
max_locks_per_transaction = 10
primary_conninfo = 'host={sockets} user=postgres application_name={name} port={other}'
synchronous_standby_names = '{synchronous}'
"""


class Server:
    """One cluster in one directory, on a Unix socket."""

    def __init__(self, cluster, name, port):
        self.cluster, self.name, self.port = cluster, name, port
        self.data = f"{cluster.work}/{name}"
        self.log = f"{cluster.work}/{name}.log"

    def pg(self, program, *args):
        with open(f"{self.cluster.work}/programs.log", "a") as log:
            subprocess.run([f"{self.cluster.bin}/{program}", *args], check=True, stdin=subprocess.DEVNULL,
                           stdout=log, stderr=log)

    def configure(self, text):
        with open(f"{self.data}/chaos.conf", "w") as file:
            file.write(text)

    def initdb(self):
        self.pg("initdb", "-D", self.data, "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8",
                "--locale=C.UTF-8")
        with open(f"{self.data}/postgresql.conf", "a") as file:
            file.write("\ninclude 'chaos.conf'\n")

    def start(self):
        self.pg("pg_ctl", "-D", self.data, "-l", self.log, "-w", "-t", "120", "start")

    def stop(self, mode="immediate"):
        self.pg("pg_ctl", "-D", self.data, "-m", mode, "-w", "-t", "120", "stop")

    def reload(self):
        self.pg("pg_ctl", "-D", self.data, "reload")

    def running(self):
        return subprocess.run([f"{self.cluster.bin}/pg_ctl", "-D", self.data, "status"], stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL).returncode == 0

    def connect(self, database="postgres", **more):
        connection = psycopg2.connect(host=self.cluster.sockets, port=self.port, user="postgres", dbname=database,
                                      application_name="controller", **more)
        connection.autocommit = True
        return connection

    def query(self, sql, *args, database="postgres", **more):
        connection = self.connect(database, **more)
        try:
            with connection.cursor() as cursor:
                cursor.execute(sql, args or None)
                return cursor.fetchall() if cursor.description else []
        finally:
            connection.close()


class Cluster:
    """A primary and its standby, which change places; and the outside system, which nothing happens to."""

    def __init__(self, work, binaries, asynchronous, clients):
        self.work, self.bin, self.asynchronous = work, binaries, asynchronous
        os.makedirs(work, 0o700, exist_ok=True)
        self.sockets = f"{work}/s"
        if len(self.sockets) > 80:      # a socket's path has a limit
            self.sockets = tempfile.mkdtemp(prefix="idem.")
        os.makedirs(self.sockets, 0o700, exist_ok=True)
        self.connections = clients + 20
        self.primary, self.standby = Server(self, "a", 5432), Server(self, "b", 5433)
        self.outside = Server(self, "outside", 5434)
        self.failovers = 0

    def settings(self, server, extra=""):
        other = self.primary if server is self.standby else self.standby
        return (SETTINGS + PRELOADED).format(
            sockets=self.sockets, port=server.port, name=server.name, other=other.port,
            connections=self.connections, synchronous="" if self.asynchronous else "a, b") + extra

    def start(self):
        self.outside.initdb()
        shutil.copytree(self.outside.data, self.primary.data)
        self.outside.configure(SETTINGS.format(sockets=self.sockets, port=self.outside.port,
                                               connections=self.connections))
        self.outside.start()
        self.primary.configure(self.settings(self.primary))
        self.primary.start()
        here = os.path.dirname(os.path.abspath(__file__))
        for server, database, file in ((self.outside, "outside", "outside.sql"), (self.primary, "chaos", "schema.sql")):
            # nobody is there yet to wait for
            server.query(f"CREATE DATABASE {database}", options="-c synchronous_commit=local")
            with open(f"{here}/{file}") as text:
                server.query(text.read(), database=database, options="-c synchronous_commit=local")
        self.make_standby()

    def make_standby(self):
        standby = self.standby
        if os.path.exists(standby.data):
            # the last one that was lost is kept as evidence
            shutil.rmtree(f"{self.work}/lost", ignore_errors=True)
            os.rename(standby.data, f"{self.work}/lost")
        standby.pg("pg_basebackup", "-D", standby.data, "-h", self.sockets, "-p", str(self.primary.port),
                   "-U", "postgres", "-c", "fast", "--no-sync", "-X", "stream")
        standby.configure(self.settings(standby))
        open(f"{standby.data}/standby.signal", "w").close()
        standby.start()

    def wait_for_standby(self):
        end = time.monotonic() + 120
        while self.primary.query("SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'")[0][0] == 0:
            if time.monotonic() > end:
                raise RuntimeError("the standby does not come back")
            time.sleep(0.05)

    def restart(self):
        self.primary.stop()
        self.primary.start()

    def fail_over(self, before_clients=None):
        """The primary is gone for good, the standby takes its place, and a new standby is made."""
        self.failovers += 1
        self.primary.stop()
        self.primary, self.standby = self.standby, self.primary
        go_on(self.primary)     # its WAL receiver may have been stopped; what it has not received is gone
        # nobody's transactions may write until the operator has done what comes first
        if before_clients:
            self.primary.configure(self.settings(self.primary, "default_transaction_read_only = on\n"))
            self.primary.reload()
        self.primary.pg("pg_ctl", "-D", self.primary.data, "-w", "-t", "120", "promote")
        if before_clients:
            before_clients(self.primary)
            self.primary.configure(self.settings(self.primary))
            self.primary.reload()
        self.make_standby()

    def stop(self):
        for server in (self.standby, self.primary, self.outside):
            if os.path.exists(f"{server.data}/postmaster.pid"):
                subprocess.run([f"{self.bin}/pg_ctl", "-D", server.data, "-m", "immediate", "stop"],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if not self.sockets.startswith(self.work):
            shutil.rmtree(self.sockets, ignore_errors=True)


def children_of_postmaster(server):
    """Process ids below a server's postmaster."""
    with open(f"{server.data}/postmaster.pid") as file:
        parent = int(file.readline())
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                if int(file.read().rsplit(")", 1)[1].split()[1]) == parent:
                    found.append(int(name))
        except (OSError, IndexError):
            pass
    return found


def send(pid, number):
    try:
        os.kill(pid, number)
        return True
    except ProcessLookupError:
        return False


def go_on(server):
    """No process of a server stays stopped."""
    for pid in children_of_postmaster(server):
        send(pid, signal.SIGCONT)

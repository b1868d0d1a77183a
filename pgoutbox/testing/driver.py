"""The driver delivers the messages of one outbox when its test says so, and sends nothing. It needs no pytest."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import psycopg
from psycopg.rows import class_row
from pydantic import JsonValue

from pgoutbox.database import connections
from pgoutbox.encryption import decrypted, is_sealed, keyring_of
from pgoutbox.errors import MissingExtraError
from pgoutbox.handlers import CallNext, Handler, Middleware
from pgoutbox.message import Message, Outcome, Sent, State
from pgoutbox.outbox import Outbox
from pgoutbox.settings import RedirectSettings, load_settings
from pgoutbox.text import pluralize
from pgoutbox.transports import Content
from pgoutbox.worker import Worker

if TYPE_CHECKING:
    from sqlalchemy import URL

T = TypeVar("T")

_MISSING = object()
_PACKAGE: Final = str(Path(__file__).parents[1])

# Keys and contents have no foreign keys, so the order does not matter. Queues and topics keep their pauses and limits.
_CLEAR: Final = """
DELETE FROM pgoutbox.message;
DELETE FROM pgoutbox.content;
DELETE FROM pgoutbox.dedupe;
DELETE FROM pgoutbox.key_head;
DELETE FROM pgoutbox.claim;
DELETE FROM pgoutbox.cancel_request;
DELETE FROM pgoutbox.breaker;
"""

# A test's database is often a copy of a template, and the driver sends nothing.
_IS_HOME: Final = "SELECT EXISTS (SELECT FROM pgoutbox.home_view AS h WHERE h.is_here AND h.deployment IS NULL)"
ALLOW_COPIES: Final = """
INSERT INTO pgoutbox.home (server_id, database_id)
VALUES (NULL, NULL)
ON CONFLICT ON CONSTRAINT home_pkey DO UPDATE SET server_id = NULL, database_id = NULL, deployment = NULL
"""


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
        outcome = self.answer(delivery)
        if not isinstance(outcome, Outcome):
            raise TypeError(f"answer_with: return an Outcome such as Sent(), not {outcome!r}")
        return outcome

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


@dataclass(frozen=True, slots=True, eq=False)
class _Expectation(Generic[T]):
    """An expectation of a test, and the messages or exceptions that met it."""

    meets: Callable[[T], bool]
    met: list[T] = field(default_factory=list)


class _ObservedWorker(Worker):
    def observe(self, exceptions: dict[int, BaseException]) -> None:
        self._setup = replace(
            self._setup,
            handlers=without_patience(self._setup.handlers),
            middlewares=(recording(exceptions), *self._setup.middlewares),
        )


def without_patience(handlers: Mapping[str, Handler]) -> dict[str, Handler]:
    """Return handlers of topics whose unreadable messages fail at once: a test has no other version of the worker."""
    return {topic: replace(handler, unreadable_timeout_seconds=0.0) for topic, handler in handlers.items()}


def recording(exceptions: dict[int, BaseException]) -> Middleware:
    """Return a middleware that records the exceptions of handlers by the ids of their messages."""

    async def record(messages: Sequence[Message[object]], call_next: CallNext) -> Sequence[Outcome]:
        outcomes = await call_next()
        for message, outcome in zip(messages, outcomes, strict=True):
            exceptions.pop(message.id, None)
            if (exception := _raised(outcome)) is not None:
                exceptions[message.id] = exception
        return outcomes

    return record


class OutboxDriver:
    """Delivers the messages of one outbox pass by pass, and records the contents.

    `deliveries` has every content that a handler returned, in order. `answer_with` sets the receiver's answers to the
    next deliveries. A message that ends `failed` fails the test at once, unless `expect_failed` expects it, and so does
    an exception of a handler that is not an outcome, unless `expect_raised` does.
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
        self._transports = _EveryScheme(self._capture)
        self._expectations: list[_Expectation[Row]] = []
        self._expected_exceptions: list[_Expectation[BaseException]] = []
        self._exceptions: dict[int, BaseException] = {}

    def answer_with(self, answer: Callable[[Delivery], Outcome]) -> None:
        """Let `answer` decide the outcome of each later delivery. Without it every delivery is `Sent`."""
        self._capture.answer = answer

    def run_pass(self) -> None:
        """Deliver every due message once. A message that is retried is due again only after `make_due`.

        Fails with the error and the handler's traceback if a message ended `failed`, or if a handler raised an
        exception that is not an outcome. This also works in a test with a running event loop.
        """
        failed_before = {row.id for row in self.messages(state=State.FAILED)}
        self._deliver()
        self._check([row for row in self.messages(state=State.FAILED) if row.id not in failed_before])

    def expect_failed(
        self, topic: str | None = None, *, match: str | None = None
    ) -> contextlib.AbstractContextManager[list[Row]]:
        """Expect that messages end `failed` in this block, and yield the list to which their rows are added.

        `match` is a regular expression that is searched in the last error. Exceptions of earlier attempts of these
        messages are expected too. Other messages still fail the test. Fails at the end of the block if no message met
        the expectation.

            with driver.expect_failed("mail.welcome", match="no such user") as failed:
                driver.drain()
            assert failed[0].attempt_count == 1
        """
        wanted = "a message" if topic is None else f"a message of topic {topic!r}"
        error = "" if match is None else f" with an error that matches {match!r}"
        return _expecting(
            self._expectations,
            lambda row: topic in (None, row.topic) and _matches(match, row.last_error or ""),
            complaint=f"expect_failed: {wanted}{error} should have ended failed, but none has",
        )

    def expect_raised(
        self, kind: type[BaseException] = Exception, *, match: str | None = None
    ) -> contextlib.AbstractContextManager[list[BaseException]]:
        """Expect exceptions of handlers in this block, and yield the list to which they are added.

        `match` is a regular expression that is searched in their texts. The messages are retried; one that ends
        `failed` needs `expect_failed`. Fails at the end of the block if no exception met the expectation.

            with driver.expect_raised(ConnectionError):
                driver.run_pass()
        """
        wanted = kind.__name__ if match is None else f"{kind.__name__} that matches {match!r}"
        return _expecting(
            self._expected_exceptions,
            lambda error: isinstance(error, kind) and _matches(match, str(error)),
            complaint=f"expect_raised: a handler should have raised {wanted}, but none has",
        )

    def clear(self) -> None:
        """Delete all messages with their keys and attempts, and forget the deliveries.

        For a database that is not created for each test. Queues and topics keep their limits and pauses.
        `answer_with` is reset.
        """
        with self._connect() as connection:
            connection.execute(_CLEAR)
        self.deliveries.clear()
        self._exceptions.clear()
        self._capture.answer = lambda _: Sent()

    def drain(self, *, limit: int = 100) -> None:
        """Run passes until no message is pending or sending. Retries, snoozed and scheduled messages are made due.

        Fails like `run_pass`, and if messages are still pending after `limit` passes.
        """
        for _ in range(limit):
            self.run_pass()
            if not self.messages(state=State.PENDING):
                return
            self.make_due()
        pending = self.messages(state=State.PENDING)
        raise AssertionError(f"after {limit} passes {len(pending)} messages are pending; the first: {pending[0]}")

    def make_due(self) -> None:
        """Let time pass: make every pending message due, and let every lease expire."""
        with self._connect() as connection:
            connection.execute("UPDATE pgoutbox.message_live SET available_at = now()")
            connection.execute("UPDATE pgoutbox.claim SET lease_expires_at = now()")

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
            raise AssertionError(
                f"{topic}: {len(matching)} messages match, expected {wanted}; of this topic there are:\n{found}"
            )
        return matching

    def _decrypted(self, row: Row) -> Row:
        if self._keyring is None or not is_sealed(row.payload):
            return row
        return replace(row, payload=json.loads(decrypted(row.payload, self._keyring)[1]))

    def _deliver(self) -> None:
        """Run one pass. A driver for another connection overrides it, and `_connect`."""
        with ThreadPoolExecutor(1, thread_name_prefix="pgoutbox-driver") as thread:
            thread.submit(asyncio.run, self._run_once()).result()

    async def _run_once(self) -> None:
        with self._connect() as connection:
            if connection.execute(_IS_HOME).fetchall() != [(True,)]:
                connection.execute(ALLOW_COPIES)
        worker = _ObservedWorker(
            self._outbox, settings=self._settings, queues=self._queues(), transports=self._transports
        )
        worker.observe(self._exceptions)
        await worker.run_once()

    def _queues(self) -> list[str]:
        with self._connect() as connection:
            rows = connection.execute("SELECT DISTINCT queue FROM pgoutbox.message_live ORDER BY queue").fetchall()
        return [queue for (queue,) in rows]

    def _check(self, failed: Sequence[Row]) -> None:
        """Fail the test for messages that ended `failed` unexpectedly, and for unexpected exceptions of handlers."""
        __tracebackhide__ = True
        shown = []
        for row in failed:
            exception = self._exceptions.pop(row.id, None)
            if (expectation := _of(self._expectations, row)) is None:
                shown.append(_describe(row, "failed", f": {row.last_error}", exception))
            else:
                expectation.met.append(row)
        problems = _problem(shown, "message", "ended failed", expect="expect_failed")
        bugs = {number: error for number, error in self._exceptions.items() if not isinstance(error, Outcome)}
        shown = []
        for row in self.messages() if bugs else ():
            if row.id not in bugs:
                continue
            exception = self._exceptions.pop(row.id)
            if (expected := _of(self._expected_exceptions, exception)) is not None:
                expected.met.append(exception)
            elif _of(self._expectations, row) is None:
                shown.append(_describe(row, "raised", ":", exception))
        problems += _problem(shown, "attempt", "raised an exception", expect="expect_raised")
        if problems:
            raise AssertionError("\n".join(problems))

    def _retried(self) -> list[str]:
        """Return the outcomes that the last attempts of messages have raised."""
        return [f"message {number}: {_traceback_of(error)}" for number, error in self._exceptions.items()]

    def _connect(self) -> contextlib.AbstractContextManager[psycopg.Connection]:
        """Return a connection whose transaction ends with the block."""
        return connections.connect(self._dsn, purpose="testing", answer_seconds=None, autocommit=False)


@contextlib.contextmanager
def _expecting(expectations: list[_Expectation[T]], meets: Callable[[T], bool], *, complaint: str) -> Iterator[list[T]]:
    expectation = _Expectation(meets)
    expectations.append(expectation)
    try:
        yield expectation.met
    finally:
        expectations.remove(expectation)
    if not expectation.met:
        raise AssertionError(complaint)


def _of(expectations: Sequence[_Expectation[T]], thing: T) -> _Expectation[T] | None:
    return next((one for one in reversed(expectations) if one.meets(thing)), None)


def _matches(pattern: str | None, text: str) -> bool:
    return pattern is None or re.search(pattern, text) is not None


def _problem(shown: Sequence[str], noun: str, verb: str, *, expect: str) -> list[str]:
    if not shown:
        return []
    return [
        f"{pluralize(len(shown), noun)} {verb}. If the test expects that, deliver in `with driver.{expect}():`",
        *shown,
    ]


def _describe(row: Row, verb: str, text: str, exception: BaseException | None) -> str:
    told = f"message {row.id} ({row.topic}) {verb} at attempt {row.attempt_count}{text}"
    return told if exception is None else f"{told}\n{_traceback_of(exception)}"


def _contains(actual: JsonValue, expected: object) -> bool:
    if isinstance(expected, Mapping) and isinstance(actual, dict):
        return all(name in actual and _contains(actual[name], value) for name, value in expected.items())
    return actual == expected


def _raised(outcome: Outcome) -> BaseException | None:
    """Return the exception of a handler, with its traceback. None for an outcome that was returned."""
    if isinstance(outcome, BaseException):
        return outcome if outcome.__traceback__ is not None else outcome.__cause__
    return None


def _traceback_of(exception: BaseException) -> str:
    """Return the traceback from the first frame outside of this package on."""
    frames = exception.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(exception), exception, frames)).rstrip()


def sqlalchemy_url(dsn: str, *, drivername: str = "postgresql+psycopg") -> URL:
    """Return a libpq connection string as a URL for SQLAlchemy.

    `str(url)` hides the password; `url.render_as_string(hide_password=False)` shows it.
    """
    try:
        from sqlalchemy import URL
    except ImportError as error:
        raise MissingExtraError("a SQLAlchemy URL") from error
    parameters = psycopg.conninfo.conninfo_to_dict(dsn)
    given = {name: str(value) for name, value in parameters.items() if value is not None and str(value).strip(",")}
    user, password, database = (given.pop(name, None) for name in ("user", "password", "dbname"))
    # Hosts and ports may be lists or paths of sockets, which fit only into the query.
    return URL.create(drivername, username=user, password=password, database=database, query=given)

"""Tests a worker's view of breakers, one send at a time: counting, probing, sharing and forgetting.

The database is real. The test controls the clock of the pauses and the answers of the destinations.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, LiteralString

import pytest

from pgoutbox import Message, Permanent, Transient, Unavailable
from pgoutbox.database import sql
from pgoutbox.message import Outcome, Postponed, SendFailure, Sent, Snooze
from pgoutbox.observability.events import LogEvent
from pgoutbox.topics import ALERT_TOPIC
from pgoutbox.worker.breakers import bulkhead, circuit_breakers, shared_breakers
from pgoutbox.worker.breakers.circuit_breakers import CircuitBreakers
from pgoutbox.worker.breakers.shared_breakers import SharedBreakers
from tests.support.line_server import Line
from tests.support.outbox_actions import PATIENCE_SECONDS, settings_for
from tests.support.waiting import until
from tests.support.worker_sql import run_state

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    import psycopg

    from pgoutbox.transports import Content
    from tests.conftest import Connect

HOUR = 3600.0
COOLDOWN_SECONDS = 100.0
PAUSE_SECONDS = 10.0  # A tenth of the pause.
KEY = "line://a"
PART = "line://a sender x"
STATEMENTS = {
    "failed": sql.BREAKER_FAILED,
    "probe": sql.BREAKER_PROBE,
    "read": sql.BREAKERS,
    "close": sql.BREAKER_CLOSE_IF_NEWER,
    "reopen": sql.BREAKER_REOPEN_IF_PROBING,
    "release": sql.BREAKER_RELEASE_IF_PROBING,
    "open_keys": sql.BREAKER_KEYS,
}
SENT = Sent()
DEAD = SendFailure("no answer", outage=True)
REFUSED = Unavailable("the password is refused")
SENDER_REFUSED = Unavailable("the sender is refused", breaker=PART)


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Destination:
    """The answer of one destination: the outcome, or a future outcome."""

    def __init__(self) -> None:
        self.answer: Outcome | BaseException = SENT
        self.received: list[int] = []
        self.silent: set[int] = set()
        self._answers: dict[int, asyncio.Future[Outcome]] = {}

    async def take(self, message: Message[object]) -> Outcome:
        self.received.append(message.id)
        if message.id in self.silent:
            return await self._answers.setdefault(message.id, asyncio.get_running_loop().create_future())
        if isinstance(self.answer, BaseException) and not isinstance(self.answer, (Transient, Unavailable, Permanent)):
            raise self.answer
        return self.answer

    def end(self, message_id: int, outcome: Outcome = SENT) -> None:
        """Answer the pending sends."""
        self._answers[message_id].set_result(outcome)


class Destinations:
    """A transport with a breaker for each destination, whose answers the test decides."""

    schemes = ("line",)

    def __init__(self) -> None:
        self.of: dict[str, Destination] = {}
        self.parts: dict[int, str] = {}

    def __getitem__(self, key: str) -> Destination:
        return self.of.setdefault(key, Destination())

    def breaker_key(self, message: Message[object], content: Content | None) -> str | None:
        return message.destination

    def part_keys(self, message: Message[object], content: Content) -> Sequence[str]:
        return [self.parts[message.id]] if message.id in self.parts else []

    async def send(self, message: Message[object], content: Content) -> Outcome:
        return await self[message.destination or ""].take(message)

    async def aclose(self) -> None: ...


class Member:
    """The breakers of one worker of a fleet."""

    def __init__(self, dsn: str, name: str, clock: Clock, **settings: object) -> None:
        values = {
            "breaker_failures": 1,
            "breaker_cooldown_seconds": COOLDOWN_SECONDS,
            "breaker_max_cooldown_seconds": 8 * COOLDOWN_SECONDS,
            "breaker_probe_timeout_seconds": 60.0,
        }
        self.settings = settings_for(dsn, **values | settings)
        run = run_state(self.settings, name=name)
        self.store = run.store
        self.telemetry = run.telemetry
        self.at = Destinations()
        self.breakers = CircuitBreakers(run, {"line": self.at}, clock=clock)

    async def send(self, message_id: int, key: str = KEY, *, topic: str = "greet", attempt_count: int = 1) -> Outcome:
        sent = message(message_id, key, topic=topic, attempt_count=attempt_count)
        return await self.breakers.send(self.at, sent, Line("hello"))

    async def refusal(self, message_id: int, key: str | None = KEY, *, topic: str = "greet") -> Snooze | None:
        return await self.breakers.refusal(message(message_id, key, topic=topic))

    @asynccontextmanager
    async def sending(
        self, message_id: int, key: str = KEY, *, topic: str = "greet"
    ) -> AsyncIterator[asyncio.Task[Outcome]]:
        """Start a send that has reached its destination, which does not answer until `end`."""
        self.at[key].silent.add(message_id)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.send(message_id, key, topic=topic))
            await until(lambda: message_id in self.at[key].received or task.done())
            yield task

    def count_of(self, event: LogEvent) -> int:
        return self.telemetry.counts[event]


def message(message_id: int, key: str | None = KEY, *, topic: str = "greet", attempt_count: int = 1) -> Message[object]:
    now = datetime.now(UTC)
    return Message(message_id, topic, "default", key, None, {}, attempt_count, 11, now, now, None)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def member(dsn: str, clock: Clock) -> AsyncIterator[Callable[..., Member]]:
    """Create workers of a fleet."""
    members: list[Member] = []

    def make(name: str = "a", **settings: object) -> Member:
        members.append(Member(dsn, name, clock, **settings))
        return members[-1]

    yield make
    for made in members:
        await made.breakers.close()
        await made.store.close()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the breaker queries to the database, by their names in `STATEMENTS`."""
    asked: list[str] = []
    fetch = SharedBreakers._fetch

    async def noted(self: SharedBreakers, statement: LiteralString, link: Any, parameters: Any) -> Any:  # noqa: ANN401 - passed on
        asked.extend(name for name in STATEMENTS if STATEMENTS[name] is statement)
        return await fetch(self, statement, link, parameters)

    monkeypatch.setattr(SharedBreakers, "_fetch", noted)
    return asked


class Gate:
    """Holds back the answer to one query."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()


def hold_back(monkeypatch: pytest.MonkeyPatch, name: str) -> Gate:
    """Hold back the database's answer to this query until the gate opens."""
    gate, fetch = Gate(), SharedBreakers._fetch

    async def held(self: SharedBreakers, statement: LiteralString, link: Any, parameters: Any) -> Any:  # noqa: ANN401 - passed on
        answer = await fetch(self, statement, link, parameters)
        if statement is STATEMENTS[name]:
            gate.reached.set()
            await gate.opened.wait()
        return answer

    monkeypatch.setattr(SharedBreakers, "_fetch", held)
    return gate


def open_elsewhere(
    db: psycopg.Connection, key: str = KEY, *, retry_seconds: float = HOUR, cooldown_seconds: float = COOLDOWN_SECONDS
) -> None:
    """Open the breaker as another worker, and begin its probe if it is due."""
    db.execute(
        "INSERT INTO pgoutbox.breaker AS b"
        " (key, opened_at, retry_at, cooldown_seconds, worker, last_error, probe_id, probe_until)"
        " SELECT %(key)s, now(), now() + make_interval(secs => %(retry)s), %(cooldown)s, 'another', 'refused', p.id,"
        " CASE WHEN p.id IS NOT NULL THEN now() + interval '1 hour' END"
        " FROM (SELECT CASE WHEN %(retry)s <= 0 THEN gen_random_uuid() END) AS p(id)",
        {"key": key, "retry": retry_seconds, "cooldown": cooldown_seconds},
    )


def let_probe(db: psycopg.Connection, clock: Clock) -> None:
    """Make the probe due, by the database's clock and by the worker's."""
    db.execute("UPDATE pgoutbox.breaker SET retry_at = now()")
    clock.now += 10 * COOLDOWN_SECONDS


def row_of(db: psycopg.Connection, key: str = KEY) -> tuple[float, bool] | None:
    """Return the pause, and whether a probe is in progress."""
    return db.execute(
        "SELECT cooldown_seconds, probe_id IS NOT NULL FROM pgoutbox.breaker WHERE key = %s", [key]
    ).fetchone()


def is_open(db: psycopg.Connection, key: str = KEY) -> bool:
    return row_of(db, key) is not None


def is_waited_for(db: psycopg.Connection, holder: psycopg.Connection) -> bool:
    """Return whether a session waits for a lock that `holder` has."""
    waiting = "SELECT FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid)) LIMIT 1"
    return bool(db.execute(waiting, [holder.info.backend_pid]).fetchall())


async def opened(one: Member, db: psycopg.Connection, key: str = KEY) -> None:
    """Open the breaker with one failure."""
    one.at[key].answer = DEAD
    assert isinstance(await one.send(1, key), Snooze)
    assert is_open(db, key)


# --- counting ---------------------------------------------------------------------------------------------------------


async def test_a_failure_with_an_unstorable_text_counts(
    member: Callable[..., Member], db: psycopg.Connection, clock: Clock
) -> None:
    one = member()
    one.at[KEY].answer = SendFailure("no \x00 answer", outage=True)
    await one.send(1)
    assert is_open(db)
    let_probe(db, clock)
    await one.send(2)
    assert row_of(db) == (2 * COOLDOWN_SECONDS, False)


@pytest.mark.parametrize(("topic", "counts"), [("greet", True), (ALERT_TOPIC, False)])
async def test_a_send_that_times_out_counts_unless_it_is_an_alert(
    member: Callable[..., Member], db: psycopg.Connection, topic: str, counts: bool
) -> None:
    one = member()
    async with one.sending(1, topic=topic) as task:
        task.cancel()
    await one.breakers.close()
    assert is_open(db) is counts


async def test_a_send_that_times_out_ends_after_it_has_opened_the_breaker(
    member: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, one = hold_back(monkeypatch, "failed"), member()
    async with one.sending(1) as task:
        task.cancel()
        await gate.reached.wait()
        assert not task.done()
        gate.opened.set()
    assert isinstance(await one.send(2), Snooze)
    assert one.at[KEY].received == [1]


async def test_a_send_cancelled_by_the_stop_of_the_worker_does_not_count(
    member: Callable[..., Member], db: psycopg.Connection
) -> None:
    one = member()
    async with one.sending(1) as task:
        one.breakers.stop()
        task.cancel()
    await one.breakers.close()
    assert not is_open(db)


async def test_an_opening_is_reported_although_its_send_is_cancelled_during_the_query(
    member: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, one = hold_back(monkeypatch, "failed"), member()
    one.at[KEY].answer = DEAD
    sending = asyncio.create_task(one.send(1))
    await gate.reached.wait()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    gate.opened.set()
    await one.breakers.settle()
    assert (one.count_of(LogEvent.BREAKER_OPENED), one.breakers.open_count) == (1, 1)


@pytest.mark.parametrize("by_probe", [False, True], ids=["first failure", "probe"])
@pytest.mark.parametrize("unknown", [True, False])
async def test_a_postponed_message_remembers_whether_it_may_have_been_sent(
    member: Callable[..., Member], db: psycopg.Connection, clock: Clock, unknown: bool, by_probe: bool
) -> None:
    one = member()
    if by_probe:
        await opened(one, db)
        let_probe(db, clock)
    one.at[KEY].answer = SendFailure("no answer to the last line", outage=True, unknown=unknown)
    outcome = await one.send(2)
    assert isinstance(outcome, Postponed)
    assert outcome.unknown_error == ("no answer to the last line" if unknown else None)
    assert is_open(db)


@pytest.mark.parametrize("by_probe", [False, True], ids=["first failure", "probe"])
async def test_a_held_back_message_waits_as_long_as_the_receiver_asks(
    member: Callable[..., Member], db: psycopg.Connection, clock: Clock, by_probe: bool
) -> None:
    one = member()
    if by_probe:
        await opened(one, db)
        let_probe(db, clock)
    one.at[KEY].answer = SendFailure("come back tomorrow", 24 * HOUR, outage=True)
    outcome = await one.send(2)
    assert isinstance(outcome, Snooze)
    assert 24 * HOUR <= outcome.delay_seconds <= 24 * HOUR + 2 * PAUSE_SECONDS


async def test_a_failure_keeps_its_outcome_if_the_database_is_unreachable(
    member: Callable[..., Member], db: psycopg.Connection
) -> None:
    one = member()
    one.at[KEY].answer = DEAD
    db.execute("ALTER TABLE pgoutbox.breaker RENAME TO elsewhere")
    assert await one.send(1) is DEAD
    assert one.count_of(LogEvent.BREAKER_UNKNOWN) == 1
    db.execute("ALTER TABLE pgoutbox.elsewhere RENAME TO breaker")
    assert isinstance(await one.send(2), Snooze)


# --- faults that need a repair ----------------------------------------------------------------------------------------


async def test_an_outage_that_needs_a_repair_opens_at_the_first_failure(
    member: Callable[..., Member], db: psycopg.Connection, clock: Clock
) -> None:
    one = member(breaker_failures=1_000)
    one.at[KEY].answer = Unavailable("the \x00 password is refused", 24 * HOUR)
    outcome = await one.send(1)
    assert isinstance(outcome, Snooze)
    assert outcome.delay_seconds >= 24 * HOUR
    assert is_open(db)
    let_probe(db, clock)
    one.at[KEY].answer = REFUSED
    assert isinstance(await one.send(2), Snooze)
    assert row_of(db) == (2 * COOLDOWN_SECONDS, False)
    let_probe(db, clock)
    one.at[KEY].answer = SENT
    assert await one.send(3) is SENT
    await one.breakers.close()
    assert not is_open(db)


async def test_an_alert_with_such_an_outage_opens_nothing(
    member: Callable[..., Member], db: psycopg.Connection
) -> None:
    one = member()
    one.at[KEY].answer = REFUSED
    assert await one.send(1, topic=ALERT_TOPIC) is REFUSED
    assert not is_open(db)


async def test_such_an_outage_keeps_its_outcome_if_the_database_is_unreachable(
    member: Callable[..., Member], db: psycopg.Connection
) -> None:
    one = member()
    one.at[KEY].answer = REFUSED
    db.execute("ALTER TABLE pgoutbox.breaker RENAME TO elsewhere")
    assert await one.send(1) is REFUSED
    one.at[KEY].answer, one.at.parts = SENDER_REFUSED, {2: PART}
    assert await one.send(2) is SENDER_REFUSED
    assert one.breakers.open_count == 0


async def test_a_broken_part_holds_back_only_its_own_messages(
    member: Callable[..., Member], db: psycopg.Connection, clock: Clock
) -> None:
    one = member()
    one.at.parts = {1: PART, 3: PART, 4: PART, 5: PART}
    one.at[KEY].answer = SENDER_REFUSED
    assert isinstance(await one.send(1), Snooze)
    assert (is_open(db), is_open(db, PART)) == (False, True)
    one.at[KEY].answer = SENT
    assert await one.send(2) is SENT
    assert isinstance(await one.send(3), Snooze)
    let_probe(db, clock)
    one.at[KEY].answer = SENDER_REFUSED
    assert isinstance(await one.send(4), Snooze)
    assert row_of(db, PART) == (2 * COOLDOWN_SECONDS, False)
    let_probe(db, clock)
    one.at[KEY].answer = SENT
    assert await one.send(5) is SENT
    assert one.at[KEY].received == [1, 2, 4, 5]
    await one.breakers.close()
    assert not is_open(db, PART)


async def test_failures_of_the_transport_do_not_count_for_its_parts(
    member: Callable[..., Member], db: psycopg.Connection
) -> None:
    one = member()
    one.at.parts = {1: PART}
    await opened(one, db)
    assert not is_open(db, PART)


async def test_a_send_by_a_part_takes_one_slot(member: Callable[..., Member]) -> None:
    one = member(concurrency=4)
    one.at.parts = {1: PART, 2: PART}
    async with one.sending(1), one.sending(2):
        assert await one.send(3, "line://b") is SENT
        for number in (1, 2):
            one.at[KEY].end(number)


async def test_a_transport_probe_that_meets_a_refused_part_is_released(
    member: Callable[..., Member], db: psycopg.Connection, clock: Clock
) -> None:
    one = member()
    await opened(one, db)
    let_probe(db, clock)
    one.at.parts, one.at[KEY].answer = {2: PART}, SENDER_REFUSED
    assert isinstance(await one.send(2), Snooze)
    await one.breakers.close()
    assert row_of(db) == (COOLDOWN_SECONDS, False)
    assert is_open(db, PART)


@pytest.mark.parametrize("key", [PART, "line:no-transport"])
async def test_a_success_closes_a_breaker_that_a_vanished_worker_left_open(
    member: Callable[..., Member], db: psycopg.Connection, key: str
) -> None:
    one = member()
    one.at.parts = {1: PART}
    open_elsewhere(db, key)
    db.execute("UPDATE pgoutbox.breaker SET retry_at = now()")
    assert await one.send(1, attempt_count=2) is SENT
    await one.breakers.close()
    assert not is_open(db, key)


async def test_a_worker_with_the_transport_is_not_held_back_by_workers_without_it(
    member: Callable[..., Member], db: psycopg.Connection
) -> None:
    one = member()
    open_elsewhere(db, "line:no-transport")
    for number in (1, 2):
        assert await one.send(number, attempt_count=2) is SENT
        await until(lambda: not one.breakers._shared._tasks)
    assert not one.breakers.watches_any
    assert await one.refusal(3) is None


# --- queries ----------------------------------------------------------------------------------------------------------


async def test_a_failure_after_the_opening_queries_nothing(member: Callable[..., Member], asked: list[str]) -> None:
    one = member()
    async with one.sending(1), one.sending(2) as second:
        one.at[KEY].end(1, DEAD)
        await until(lambda: asked)
        await until(lambda: one.breakers.open_count)
        one.at[KEY].end(2, DEAD)
        assert isinstance(await second, Snooze)
    assert asked == ["failed"]


async def test_a_worker_that_loses_the_race_to_open_learns_that_it_is_open(
    member: Callable[..., Member], db: psycopg.Connection, connect: Connect, asked: list[str]
) -> None:
    one, other = member(), connect()
    one.at[KEY].answer = DEAD
    open_elsewhere(other)
    async with asyncio.TaskGroup() as group:
        failing = group.create_task(one.send(1))
        await until(lambda: is_waited_for(db, other))
        other.commit()
    outcome = failing.result()
    assert isinstance(outcome, Snooze)
    assert HOUR - 60 <= outcome.delay_seconds <= HOUR + PAUSE_SECONDS
    assert asked == ["failed"] * 2
    assert one.count_of(LogEvent.BREAKER_OPENED) == 0  # Another worker opened it.


async def test_a_breaker_that_another_session_has_locked_delays_no_claim(
    member: Callable[..., Member], db: psycopg.Connection, connect: Connect
) -> None:
    one, other = member(), connect()
    one.at[KEY].answer = DEAD
    open_elsewhere(other)
    async with asyncio.TaskGroup() as group:
        failing = group.create_task(one.send(1))
        await until(lambda: is_waited_for(db, other))
        await one.store.server_time()  # On the connection of the claims.
        assert is_waited_for(db, other)
        other.commit()
    assert isinstance(failing.result(), Snooze)


async def test_sends_that_succeed_ask_once_a_minute_for_open_breakers(
    member: Callable[..., Member], asked: list[str], clock: Clock
) -> None:
    one = member()
    for number in range(3):
        assert await one.send(1, f"line://{number}") is SENT
    clock.now += 61
    assert await one.send(1) is SENT
    await one.breakers.close()
    assert asked == ["open_keys"] * 2


@pytest.mark.parametrize("attempt_count", [1, 2])
async def test_a_send_that_succeeds_closes_a_breaker_opened_elsewhere(
    member: Callable[..., Member], db: psycopg.Connection, attempt_count: int
) -> None:
    """This worker has seen no failure of its own, and its messages do not wait."""
    one = member()
    open_elsewhere(db, retry_seconds=COOLDOWN_SECONDS)
    assert await one.send(1, "line://other") is SENT
    assert await one.send(2, attempt_count=attempt_count) is SENT
    await until(lambda: not is_open(db))
    assert await one.send(3) is SENT
    await one.breakers.close()  # The log entry comes after the row is gone.
    assert one.count_of(LogEvent.BREAKER_CLOSED) == 1


async def test_a_send_that_began_before_the_failure_closes_nothing(
    member: Callable[..., Member], db: psycopg.Connection, clock: Clock
) -> None:
    one = member()
    async with one.sending(1):
        open_elsewhere(db, retry_seconds=COOLDOWN_SECONDS)
        clock.now += 1
        one.at[KEY].end(1)
    await one.breakers.close()
    assert is_open(db)


async def test_a_check_without_an_answer_of_the_database_changes_nothing(
    member: Callable[..., Member], db: psycopg.Connection
) -> None:
    one = member()
    open_elsewhere(db)
    db.execute("ALTER TABLE pgoutbox.breaker RENAME TO elsewhere")
    assert await one.send(1) is SENT
    await one.breakers.close()
    assert not one.breakers.watches_any
    assert one.count_of(LogEvent.BREAKER_UNKNOWN) == 1


async def test_a_send_cancelled_during_a_query_leaves_the_connection_intact(
    member: Callable[..., Member], db: psycopg.Connection, connect: Connect, clock: Clock
) -> None:
    one, other = member(), connect()
    await opened(one, db)
    let_probe(db, clock)
    sessions = (
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'pgoutbox attempt' AND datname = current_database()"
    )
    before = db.execute(sessions).fetchall()
    other.execute("SELECT FROM pgoutbox.breaker FOR UPDATE")
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(one.send(2))
        await until(lambda: is_waited_for(db, other))
        asking.cancel()
    other.rollback()
    await one.breakers.close()
    assert asking.cancelled()
    await one.send(3)  # A broken connection would have been replaced.
    assert db.execute(sessions).fetchall() == before
    assert len(before) == 1


# --- pauses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cooldown_seconds", "pause_seconds"), [(0.001, 0.05), (20.0, 2.0), (HOUR, 10.0)])
async def test_a_message_beside_another_workers_probe_returns_after_a_tenth_of_the_pause(
    member: Callable[..., Member],
    db: psycopg.Connection,
    clock: Clock,
    asked: list[str],
    cooldown_seconds: float,
    pause_seconds: float,
) -> None:
    one = member()
    one.at[KEY].answer = DEAD
    open_elsewhere(db, retry_seconds=-1, cooldown_seconds=cooldown_seconds)
    delays = []
    for number in range(20):
        outcome = await one.send(number)
        assert isinstance(outcome, Snooze)
        delays.append(outcome.delay_seconds)
    assert pause_seconds * 0.99 <= min(delays) < max(delays) <= 2 * pause_seconds
    assert one.at[KEY].received == [0]
    assert asked.count("probe") == 0
    clock.now += pause_seconds
    for number in range(5):
        assert isinstance(await one.send(number), Snooze)
    assert asked.count("probe") == 1
    assert one.at[KEY].received == [0]


async def test_a_message_beside_a_probe_of_its_own_process_waits_briefly(
    member: Callable[..., Member], db: psycopg.Connection, clock: Clock
) -> None:
    one = member()
    await opened(one, db)
    let_probe(db, clock)
    async with one.sending(2):
        for held in (await one.send(3), await one.refusal(3)):
            assert isinstance(held, Snooze)
            assert PAUSE_SECONDS <= held.delay_seconds <= 2 * PAUSE_SECONDS
        one.at[KEY].end(2)


async def test_a_failed_probe_makes_its_process_wait_for_the_longer_pause(
    member: Callable[..., Member], db: psycopg.Connection, clock: Clock, asked: list[str]
) -> None:
    one = member()
    await opened(one, db)
    let_probe(db, clock)
    assert isinstance(await one.send(2), Snooze)
    held = await one.send(3)
    assert isinstance(held, Snooze)
    assert 2 * COOLDOWN_SECONDS - 1 <= held.delay_seconds <= 2 * COOLDOWN_SECONDS + 2 * PAUSE_SECONDS
    assert asked.count("probe") == 1


# --- probe ------------------------------------------------------------------------------------------------------------


async def test_a_breaker_closed_in_the_meantime_sends_and_counts_from_zero(
    member: Callable[..., Member], db: psycopg.Connection, clock: Clock
) -> None:
    for settings in ({"breaker_failures": 3}, {"breaker_failures": 1_000}):
        one = member(breaker_cooldown_seconds=10, **settings)
        one.at[KEY].answer = DEAD
        while not is_open(db):
            await one.send(1)
        db.execute("DELETE FROM pgoutbox.breaker")
        clock.now += 11  # Within the minute of the error rate.
        assert await one.send(2) is DEAD
        assert not is_open(db)


async def test_a_successful_probe_lets_all_messages_through_before_the_row_is_deleted(
    member: Callable[..., Member],
    db: psycopg.Connection,
    clock: Clock,
    asked: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = member()
    await opened(one, db)
    let_probe(db, clock)
    one.at[KEY].answer = SENT
    gate = hold_back(monkeypatch, "close")
    assert await one.send(2) is SENT
    assert await one.send(3) is SENT
    assert asked.count("probe") == 1
    gate.opened.set()
    await one.breakers.close()
    assert not is_open(db)
    assert one.count_of(LogEvent.BREAKER_CLOSED) == 1


@pytest.mark.parametrize("answer", [Permanent("no such address"), Transient("mailbox full"), RuntimeError("a mistake")])
async def test_a_probe_whose_outcome_does_not_concern_the_destination_is_released(
    member: Callable[..., Member], db: psycopg.Connection, clock: Clock, answer: Outcome | BaseException
) -> None:
    one = member()
    await opened(one, db)
    let_probe(db, clock)
    one.at[KEY].answer = answer
    if isinstance(answer, RuntimeError):
        with pytest.raises(RuntimeError):
            await one.send(2)
    else:
        assert await one.send(2) is answer
    await one.breakers.close()
    assert row_of(db) == (COOLDOWN_SECONDS, False)
    one.at[KEY].answer = SENT
    assert await one.send(3) is SENT


@pytest.mark.parametrize(("is_stopping", "cooldown_seconds"), [(True, COOLDOWN_SECONDS), (False, 2 * COOLDOWN_SECONDS)])
async def test_a_probe_that_times_out_has_failed_unless_the_worker_stops(
    member: Callable[..., Member],
    db: psycopg.Connection,
    clock: Clock,
    asked: list[str],
    is_stopping: bool,
    cooldown_seconds: float,
) -> None:
    one = member()
    await opened(one, db)
    let_probe(db, clock)
    async with one.sending(2) as probe:
        if is_stopping:
            one.breakers.stop()
        probe.cancel()
    assert isinstance(await one.send(3), Snooze)  # This does not depend on the state in the database.
    assert asked.count("probe") == 1
    await one.breakers.close()
    assert row_of(db) == (cooldown_seconds, False)


@pytest.mark.parametrize("when", ["asking for leave", "writing that it failed"])
async def test_without_an_answer_of_the_database_this_process_does_not_probe(
    member: Callable[..., Member], db: psycopg.Connection, clock: Clock, asked: list[str], when: str
) -> None:
    one = member()
    await opened(one, db)
    let_probe(db, clock)
    rename = "ALTER TABLE pgoutbox.breaker RENAME TO elsewhere"
    if when == "asking for leave":
        db.execute(rename)
        assert isinstance(await one.send(2), Snooze)
        assert one.at[KEY].received == [1]
    else:
        async with one.sending(2) as probe:
            db.execute(rename)
            one.at[KEY].end(2, DEAD)
            assert isinstance(await probe, Snooze)
    received = list(one.at[KEY].received)
    for number in (3, 4):
        assert isinstance(await one.send(number), Snooze)
    assert one.at[KEY].received == received
    assert asked.count("probe") == 1


async def test_the_end_of_an_attempt_whose_probe_is_over_does_not_end_the_next_probe(
    member: Callable[..., Member], db: psycopg.Connection, clock: Clock
) -> None:
    one = member()
    await opened(one, db)
    let_probe(db, clock)
    assert await one.refusal(2) is None
    assert await one.refusal(3) is not None
    one.at[KEY].answer = Permanent("no such address")
    assert await one.send(2) is one.at[KEY].answer  # Its probe is over, but its attempt is not.
    assert await one.refusal(4) is None
    one.breakers.end_grant(2, is_sent=False)
    assert await one.refusal(5) is not None
    one.breakers.end_grant(4, is_sent=False)
    assert await one.refusal(5) is None


async def test_an_alert_neither_probes_nor_waits_for_a_probe_nor_changes_a_breaker(
    member: Callable[..., Member], db: psycopg.Connection, clock: Clock, asked: list[str]
) -> None:
    one = member()
    one.at[KEY].answer = DEAD
    assert await one.send(1, topic=ALERT_TOPIC) is DEAD
    assert not is_open(db)
    await opened(one, db)
    assert isinstance(await one.send(2, topic=ALERT_TOPIC), Snooze)
    let_probe(db, clock)
    one.at[KEY].answer = SENT
    async with one.sending(3):
        assert await one.refusal(4, topic=ALERT_TOPIC) is None
        assert await one.send(4, topic=ALERT_TOPIC) is SENT
        one.at[KEY].end(3, Permanent("no such address"))
    assert await one.refusal(5, topic=ALERT_TOPIC) is None
    assert await one.refusal(6) is None, "an alert must not be a probe"
    assert await one.send(5, topic=ALERT_TOPIC) is SENT
    one.breakers.end_grant(6, is_sent=False)
    one.at[KEY].answer = DEAD
    assert isinstance(await one.send(7, topic=ALERT_TOPIC), Unavailable), "an alert must not use up an attempt"
    await one.breakers.close()
    assert is_open(db)
    assert asked.count("probe") == 2


# --- refresh ---------------------------------------------------------------------------------------------------------


async def test_a_refresh_closes_only_the_breakers_without_a_row(
    member: Callable[..., Member], db: psycopg.Connection, clock: Clock
) -> None:
    one = member()
    await opened(one, db)
    await opened(one, db, "line://b")
    db.execute("DELETE FROM pgoutbox.breaker WHERE key = 'line://b'")
    assert isinstance(await one.send(2), Snooze)
    assert one.at[KEY].received == [1]
    one.at["line://b"].answer = SENT
    assert await one.send(3, "line://b") is SENT


async def test_a_longer_pause_seen_by_another_worker_is_learned(
    member: Callable[..., Member], db: psycopg.Connection
) -> None:
    one = member()
    await opened(one, db)
    db.execute("UPDATE pgoutbox.breaker SET retry_at = now() + interval '1 day'")
    await one.send(2)
    held = await one.send(3)
    assert isinstance(held, Snooze)
    assert held.delay_seconds > 23 * HOUR


async def test_a_row_reset_by_an_operator_is_noticed_at_the_next_message(
    member: Callable[..., Member], db: psycopg.Connection, clock: Clock
) -> None:
    one = member()
    await opened(one, db)
    one.at[KEY].answer = SENT
    db.execute("UPDATE pgoutbox.breaker SET retry_at = now()")
    held = await one.send(2)
    assert isinstance(held, Snooze)
    assert await one.send(3) is not SENT
    clock.now += PAUSE_SECONDS
    assert await one.send(4) is SENT


async def test_a_process_does_not_query_the_breaker_during_its_own_probe(
    member: Callable[..., Member], db: psycopg.Connection, clock: Clock, asked: list[str]
) -> None:
    one = member()
    await opened(one, db)
    let_probe(db, clock)
    async with one.sending(2):
        assert isinstance(await one.send(3), Snooze)
        assert await one.refusal(4) is not None
        one.at[KEY].end(2)
    assert "read" not in asked


@pytest.mark.parametrize("is_open_again", [True, False])
async def test_knowledge_gained_during_a_query_is_newer_than_its_answer(
    member: Callable[..., Member],
    db: psycopg.Connection,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    is_open_again: bool,
) -> None:
    one = member()
    await opened(one, db)
    gate = hold_back(monkeypatch, "read")
    if is_open_again:
        db.execute("DELETE FROM pgoutbox.breaker")
    asking = asyncio.create_task(one.send(2))
    await gate.reached.wait()
    db.execute("DELETE FROM pgoutbox.breaker")
    clock.now += 10 * COOLDOWN_SECONDS
    async with one.sending(3):
        if is_open_again:
            one.at[KEY].end(3, DEAD)
            await until(lambda: is_open(db) and one.breakers.open_count)
        one.at[KEY].answer = SENT
        gate.opened.set()
        outcome = await asking
        if is_open_again:
            assert isinstance(outcome, Snooze)
            assert isinstance(await one.send(4), Snooze)
            assert one.at[KEY].received == [1, 3]
        else:
            assert one.breakers.open_count == 0
            assert outcome is SENT
            assert one.at[KEY].received == [1, 3, 2]
            one.at[KEY].end(3)


# --- room -------------------------------------------------------------------------------------------------------------


async def test_messages_that_wait_for_room_continue_with_the_first_answer(
    member: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulkhead, "_STALL_SECONDS", HOUR)
    one = member(concurrency=1)
    async with asyncio.timeout(PATIENCE_SECONDS), one.sending(1), asyncio.TaskGroup() as group:
        waiting = group.create_task(one.send(2))
        await until(lambda: one.breakers._circuits[KEY].room.waiting_count)
        assert one.at[KEY].received == [1]
        one.at[KEY].end(1)
        assert await waiting is SENT


@pytest.mark.parametrize("rendered", [False, True])
async def test_answers_that_arrive_while_the_event_loop_is_blocked_end_the_silence(
    member: Callable[..., Member], clock: Clock, rendered: bool
) -> None:
    one = member(concurrency=4)
    async with one.sending(1), one.sending(2), one.sending(3):
        clock.now += HOUR
        for message_id in (1, 2, 3):
            one.at[KEY].end(message_id)
        assert await (one.send(4) if rendered else one.refusal(4)) is (SENT if rendered else None)


async def test_the_silence_of_a_destination_begins_with_its_last_answer_or_first_send(
    member: Callable[..., Member], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = member(concurrency=4, breaker_failures=5)
    one.at[KEY].answer = DEAD
    await one.send(0)  # Keeps it from being forgotten.
    one.at[KEY].answer = SENT
    clock.now += HOUR
    async with one.sending(1), one.sending(2), one.sending(3), asyncio.TaskGroup() as group:
        waiting = group.create_task(one.send(4))
        await until(lambda: waiting.done() or one.breakers._circuits[KEY].room.waiting_count)
        assert not waiting.done(), "the silence has just begun"
        clock.now += 0.9
        one.at[KEY].end(1)
        assert await waiting is SENT
        async with one.sending(5):
            clock.now += 0.9
            waiting = group.create_task(one.send(6))
            await until(lambda: waiting.done() or one.breakers._circuits[KEY].room.waiting_count)
            assert not waiting.done(), "it has answered recently"
            assert await one.refusal(7) is None
            clock.now += 0.2
            refused = await one.refusal(7)
            assert refused is not None
            assert "answers none of the 3 sends" in (refused.reason or "")
            monkeypatch.setattr(bulkhead, "_RETURN_SECONDS", HOUR)  # Further messages do not wait.
            async with asyncio.timeout(PATIENCE_SECONDS):
                assert isinstance(await one.send(7), Snooze)
            one.at[KEY].end(5)
            await waiting
        one.at[KEY].end(2)
        one.at[KEY].end(3)


# --- forgetting -------------------------------------------------------------------------------------------------------


async def test_a_working_destination_is_forgotten_and_a_failed_one_after_a_minute(
    member: Callable[..., Member], clock: Clock
) -> None:
    one = member(breaker_failures=5)
    await one.send(1)
    assert not one.breakers.watches_any
    one.at[KEY].answer = DEAD
    await one.send(2)
    one.at[KEY].answer = SENT
    await one.send(3)
    assert one.breakers.watches_any
    clock.now += 61
    await one.send(4)
    assert not one.breakers.watches_any


@pytest.mark.parametrize("first_is", ["under way", "waiting for room"])
async def test_a_destination_in_use_by_others_is_not_forgotten(
    member: Callable[..., Member], db: psycopg.Connection, clock: Clock, first_is: str
) -> None:
    one = member(concurrency=1 if first_is == "waiting for room" else 4)
    async with asyncio.TaskGroup() as group, one.sending(1):
        one.at[KEY].silent.add(2)
        second = group.create_task(one.send(2))
        await until(lambda: 2 in one.at[KEY].received or one.breakers._circuits[KEY].room.waiting_count)
        clock.now += 10  # The success began before the failure: it does not close the breaker that the failure opens.
        one.at[KEY].end(1)
        await until(lambda: 2 in one.at[KEY].received)
        one.at[KEY].end(2, DEAD)
        assert isinstance(await second, Snooze)
    assert isinstance(await one.send(3), Snooze)
    assert one.at[KEY].received == [1, 2]


async def test_of_too_many_destinations_the_least_recently_used_are_forgotten(
    member: Callable[..., Member], db: psycopg.Connection, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuit_breakers, "_MAX_CIRCUITS", 4)
    one = member()
    keys = [f"line://{number}" for number in range(3)]
    for key in keys[:2]:
        await opened(one, db, key)
    async with one.sending(1, "line://busy"):
        db.execute("UPDATE pgoutbox.breaker SET retry_at = now() + interval '1 day' WHERE key = 'line://1'")
        one.breakers._shared._refreshed_at = float("-inf")
        await one.send(1, "line://1")  # It learns the longer pause.
        clock.now += 12 * HOUR
        await opened(one, db, keys[2])
        await one.send(1, "line://new")
        assert set(one.breakers._circuits) == {"line://1", "line://2", "line://busy"}
        one.at["line://busy"].end(1)


async def test_a_destination_forgotten_during_its_query_causes_no_error(
    member: Callable[..., Member], db: psycopg.Connection, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuit_breakers, "_MAX_CIRCUITS", 1)
    one = member()
    await opened(one, db)
    db.execute("DELETE FROM pgoutbox.breaker")
    clock.now += HOUR
    gate = hold_back(monkeypatch, "probe")
    one.at[KEY].answer = SENT
    asking = asyncio.create_task(one.send(2))
    await gate.reached.wait()
    await one.send(3, "line://new")
    gate.opened.set()
    assert await asking is SENT


# --- the end ----------------------------------------------------------------------------------------------------------


async def test_the_stop_waits_for_running_writes_only(
    member: Callable[..., Member], db: psycopg.Connection, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_breakers, "_CLOSE_SECONDS", HOUR)
    one = member()
    await opened(one, db)
    let_probe(db, clock)
    one.at[KEY].answer = SENT
    await one.send(2)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await one.breakers.close()
    assert not is_open(db)


async def test_the_stop_waits_for_an_unresponsive_database_only_up_to_its_limit(
    member: Callable[..., Member],
    db: psycopg.Connection,
    clock: Clock,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_breakers, "_CLOSE_SECONDS", 0.05)
    one, other = member(), connect()
    await opened(one, db)
    let_probe(db, clock)
    async with one.sending(2):
        other.execute("SELECT FROM pgoutbox.breaker FOR UPDATE")
        one.at[KEY].end(2)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await one.breakers.close()
    # A task that has just ended may still be in the set.
    left = [task for task in one.breakers._shared._tasks if not task.done()]
    assert left
    assert all(task.cancelling() for task in left)

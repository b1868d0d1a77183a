"""Tests circuit breakers with real workers, a host that dies and recovers, and an SMTP server that misbehaves."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, LiteralString

import pytest

from pgoutbox import Context, Email, Message, Outbox, RetryPolicy
from pgoutbox.database import sql
from pgoutbox.message import SendFailure
from pgoutbox.observability.events import LogEvent
from pgoutbox.transports import SmtpTransport
from pgoutbox.worker import Worker
from pgoutbox.worker.breakers import shared_breakers
from pgoutbox.worker.breakers.shared_breakers import SharedBreakers
from tests.support.line_server import Line, LineHost, LineTransport, Mood, line_host
from tests.support.outbox_actions import attempts_of, enqueue, make_due, reports, row_of, rows_of, running, settings_for
from tests.support.smtp_server import accepting_server, scripted_server
from tests.support.waiting import until
from tests.support.worker_sql import run_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import psycopg

    from pgoutbox.message import Outcome
    from pgoutbox.transports import Content

pytestmark = pytest.mark.slow

HOUR = 3600.0
LONG: dict[str, Any] = {"breaker_cooldown_seconds": HOUR, "breaker_max_cooldown_seconds": 2 * HOUR}
AT_ONCE = RetryPolicy.steps(0)
SOON = RetryPolicy.steps(0.02)
BRIEF: dict[str, Any] = {"breaker_cooldown_seconds": 0.2, "breaker_max_cooldown_seconds": 0.8}


class App:
    """An outbox whose handler renders a line, with a count of the renderings."""

    def __init__(
        self, dsn: str, *, retry: RetryPolicy = SOON, transport: LineTransport | None = None, **settings: object
    ) -> None:
        self.outbox = Outbox(settings_for(dsn, **settings), transports=[transport or LineTransport(timeout_seconds=60)])
        self.rendered: list[int] = []

        @self.outbox.handler("greet", retry=retry)
        async def greet(message: Message, ctx: Context) -> Line:
            self.rendered.append(message.id)
            return Line(str(message.id))

    def worker(self, *queues: str) -> Worker:
        return Worker(self.outbox, queues=queues)


def breaker_of(db: psycopg.Connection, key: str) -> tuple[object, ...] | None:
    return db.execute(
        "SELECT cooldown_seconds, probe_id IS NOT NULL, last_error FROM pgoutbox.breaker WHERE key = %s", [key]
    ).fetchone()


def is_open(db: psycopg.Connection, key: str) -> bool:
    return breaker_of(db, key) is not None


def attempts_left(db: psycopg.Connection, *message_ids: int) -> list[int]:
    return [row.max_attempts - row.attempt_count for row in rows_of(db, *message_ids)]


def outcomes_of(db: psycopg.Connection, message_id: int) -> list[str]:
    return [outcome for _, outcome, _ in attempts_of(db, message_id)]


def has_ended(db: psycopg.Connection, message_id: int) -> bool:
    """Return whether the message's first attempt is over."""
    row = row_of(db, message_id)
    return row.attempt_count > 0 and row.state != "sending"


def states_of(db: psycopg.Connection, *message_ids: int) -> set[str]:
    return {row.state for row in rows_of(db, *message_ids)}


def all_sent(db: psycopg.Connection, ids: Sequence[int]) -> Callable[[], bool]:
    return lambda: states_of(db, *ids) == {"sent"}


async def open_breaker(db: psycopg.Connection, app: App, host: LineHost) -> int:
    """Let a worker open the host's breaker with one message, and return the id."""
    host.mood = Mood.DROP
    message_id = enqueue(db, destination=host.destination)
    async with running(app.worker()):
        await until(lambda: is_open(db, host.key))
        await until(lambda: row_of(db, message_id).state == "pending")
    return message_id


async def test_a_worker_notices_at_the_next_message_that_an_operator_closed_the_breaker(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App(dsn, breaker_failures=1, **LONG)
    worker = app.worker()
    async with line_host(Mood.DROP) as host, running(worker):
        held = [enqueue(db, destination=host.destination) for _ in range(3)]
        await until(lambda: all(row.due_in_seconds > HOUR / 2 for row in rows_of(db, *held)))
        host.mood = Mood.TAKE
        db.execute("DELETE FROM pgoutbox.breaker")
        monkeypatch.setattr(run_of(worker).breakers._shared, "_refreshed_at", -HOUR)  # As if a second had passed.
        await until(all_sent(db, [enqueue(db, destination=host.destination)]))
        assert {row.state for row in rows_of(db, *held)} == {"pending"}


async def test_held_back_messages_query_the_shared_breaker_only_occasionally(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    fetch = SharedBreakers._fetch

    async def note(self: SharedBreakers, statement: LiteralString, link: Any, parameters: Any) -> Any:  # noqa: ANN401 - passed on
        if statement is sql.BREAKERS:
            asked.append(parameters["keys"])
        return await fetch(self, statement, link, parameters)

    monkeypatch.setattr(SharedBreakers, "_fetch", note)
    monkeypatch.setattr(shared_breakers, "_REFRESH_SECONDS", HOUR)
    app = App(dsn, breaker_failures=1, **LONG)
    async with line_host(Mood.DROP) as host, running(app.worker()):
        first = enqueue(db, destination=host.destination)
        await until(lambda: row_of(db, first).due_in_seconds > 1)
        ids = [enqueue(db, destination=host.destination) for _ in range(50)]
        await until(lambda: all(row.due_in_seconds > HOUR / 2 for row in rows_of(db, *ids)))
        assert asked == [[host.key]]
        assert is_open(db, host.key)


# --- open -------------------------------------------------------------------------------------------------------------


async def test_consecutive_failures_open_the_breaker_and_further_attempts_are_not_used_up(
    dsn: str, db: psycopg.Connection
) -> None:
    app = App(dsn, **LONG)
    async with line_host(Mood.DROP) as host:
        with reports() as heard:
            first = enqueue(db, destination=host.destination)
            async with running(app.worker()):
                await heard.wait_for(LogEvent.BREAKER_OPENED)
                await until(lambda: row_of(db, first).due_in_seconds > 1)
                assert len(host.attempts) == 5
                assert outcomes_of(db, first) == ["retry"] * 4 + ["snoozed"]
                assert attempts_left(db, first) == [11 - 4]
                later = [enqueue(db, destination=host.destination) for _ in range(20)]
                await until(lambda: all(row.due_in_seconds > 1 for row in rows_of(db, *later)))
        assert attempts_left(db, *later) == [11] * 20
        assert states_of(db, *later) == {"pending"}
        assert len(host.attempts) == 5, "nothing was sent"
        assert len(app.rendered) == 5, "nothing was rendered"
        ((_, _, error),) = attempts_of(db, later[0])
        assert error is not None
        assert host.key in error
        assert "no answer" in error
        assert heard.events.count(LogEvent.BREAKER_OPENED) == 1


async def test_an_error_rate_opens_the_breaker_despite_some_successes(dsn: str, db: psycopg.Connection) -> None:
    """Nineteen of 39 fail, and no two of them are consecutive; the twentieth failure reaches the limit."""
    app = App(dsn, retry=RetryPolicy.steps(HOUR), concurrency=1, **LONG)
    async with line_host() as host:

        class EverySecond(LineTransport):
            count = 0

            async def send(self, message: Message[object], content: Content) -> Outcome:
                self.count += 1
                host.mood = Mood.DROP if self.count % 2 else Mood.TAKE
                return await super().send(message, content)

        app = App(dsn, retry=RetryPolicy.steps(HOUR), concurrency=1, transport=EverySecond(), **LONG)
        async with running(app.worker()):
            ids = [enqueue(db, destination=host.destination) for _ in range(40)]
            await until(lambda: is_open(db, host.key))
            await until(lambda: "sending" not in states_of(db, *ids))
        assert 20 <= len(host.attempts) < 40


async def test_a_failure_of_one_message_opens_no_breaker(dsn: str, db: psycopg.Connection) -> None:
    app = App(dsn, retry=AT_ONCE)
    async with line_host(Mood.REFUSE) as host, running(app.worker()):
        message_id = enqueue(db, destination=host.destination, max_attempts=8)
        await until(lambda: row_of(db, message_id).state == "failed")
        assert len(host.attempts) == 8
        assert not is_open(db, host.key)


async def test_an_exception_of_a_handler_opens_no_breaker(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn), transports=[LineTransport()])

    @outbox.handler("greet", retry=AT_ONCE)
    async def greet(message: Message, ctx: Context) -> Line:
        raise SendFailure("my own database is down", outage=True)

    async with line_host() as host, running(Worker(outbox)):
        message_id = enqueue(db, destination=host.destination)
        await until(lambda: row_of(db, message_id).state == "failed")
    assert db.execute("SELECT count(*) FROM pgoutbox.breaker").fetchone() == (0,)


async def test_a_send_that_exceeds_the_handlers_timeout_counts_as_a_failure(dsn: str, db: psycopg.Connection) -> None:
    class Counting(LineTransport):
        count = 0

        async def send(self, message: Message[object], content: Content) -> Outcome:
            self.count += 1  # A line may not reach the host before the timeout.
            return await super().send(message, content)

    transport = Counting()
    app = App(dsn, transport=transport, handler_timeout_seconds=0.1, **LONG)
    async with line_host(Mood.HANG) as host, running(app.worker()):
        enqueue(db, destination=host.destination)
        await until(lambda: is_open(db, host.key))
    assert transport.count == 5


async def test_successes_reset_the_count_of_failures(dsn: str, db: psycopg.Connection) -> None:
    app = App(dsn, retry=RetryPolicy.steps(HOUR), concurrency=1)
    async with line_host() as host, running(app.worker()):
        for mood in [Mood.DROP] * 4 + [Mood.TAKE] + [Mood.DROP] * 4:
            host.mood = mood
            message_id = enqueue(db, destination=host.destination)
            await until(partial(has_ended, db, message_id))
        assert not is_open(db, host.key)


async def test_without_breakers_every_message_is_attempted(dsn: str, db: psycopg.Connection) -> None:
    app = App(dsn, retry=AT_ONCE, breaker_enabled=False)
    async with line_host(Mood.DROP) as host, running(app.worker()):
        message_id = enqueue(db, destination=host.destination, max_attempts=8)
        await until(lambda: row_of(db, message_id).state == "failed")
        assert len(host.attempts) == 8
        assert not is_open(db, host.key)


# --- shared -----------------------------------------------------------------------------------------------------------


async def test_another_worker_learns_of_the_open_breaker_at_its_first_failure_at_no_cost(
    dsn: str, db: psycopg.Connection
) -> None:
    """The other worker may have just been started."""
    app = App(dsn, **LONG)
    async with line_host() as host:
        await open_breaker(db, app, host)
        message_id = enqueue(db, destination=host.destination)
        async with running(app.worker()):
            await until(lambda: attempts_of(db, message_id))
        assert outcomes_of(db, message_id) == ["snoozed"]
        assert attempts_left(db, message_id) == [11]
        assert row_of(db, message_id).due_in_seconds > 1


# --- probe ------------------------------------------------------------------------------------------------------------


async def test_the_breaker_closes_by_itself_and_everything_is_delivered_once(dsn: str, db: psycopg.Connection) -> None:
    app = App(dsn, **BRIEF)
    async with line_host(Mood.DROP) as host:
        with reports() as heard:
            async with running(app.worker()), running(app.worker()):
                ids = [enqueue(db, destination=host.destination) for _ in range(30)]
                await heard.wait_for(LogEvent.BREAKER_REOPENED)
                host.mood = Mood.TAKE
                await until(all_sent(db, ids))
                await heard.wait_for(LogEvent.BREAKER_CLOSED)
        assert sorted(map(int, host.taken)) == ids
        assert not is_open(db, host.key)
        assert heard.events.count(LogEvent.BREAKER_CLOSED) == heard.events.count(LogEvent.BREAKER_OPENED) == 1


def knows_as_open(worker: Worker, key: str) -> bool:
    circuit = run_of(worker).breakers._circuits.get(key)
    return circuit is not None and not circuit.breaker.is_closed


async def test_the_whole_fleet_sends_one_message_as_a_probe(dsn: str, db: psycopg.Connection) -> None:
    """The host hangs: during the probe, no other message of any worker goes to it."""
    app = App(dsn, **BRIEF, breaker_probe_timeout_seconds=HOUR)
    async with line_host(Mood.DROP) as host, line_host(Mood.TAKE) as other:
        workers = {queue: app.worker(queue) for queue in ("a", "b", "c")}
        ids = [enqueue(db, queue=queue, destination=host.destination) for queue in workers for _ in range(12)]
        async with running(workers["a"]), running(workers["b"]), running(workers["c"]):
            # A worker learns of the open breaker by its own failure.
            await until(lambda: all(knows_as_open(worker, host.key) for worker in workers.values()))
            await until(lambda: "sending" not in states_of(db, *ids))
            host.mood = Mood.HANG
            sent_count = len(host.attempts)
            await until(lambda: host.hung_count)
            passing = []
            for queue in [*workers] * 3:
                ids += [enqueue(db, queue=queue, destination=host.destination) for _ in range(3)]
                passing.append(enqueue(db, queue=queue, destination=other.destination))
                await until(lambda: set(states_of(db, *passing)) == {"sent"})
            assert (len(host.attempts) - sent_count, host.hung_count) == (1, 1)
        assert "sent" not in states_of(db, *ids)


async def test_a_process_renders_nothing_else_during_its_probe(dsn: str, db: psycopg.Connection) -> None:
    app = App(dsn, **BRIEF, breaker_probe_timeout_seconds=HOUR)
    async with line_host(Mood.DROP) as host, running(app.worker()):
        ids = [enqueue(db, destination=host.destination) for _ in range(6)]
        await until(lambda: is_open(db, host.key))
        await until(lambda: "sending" not in states_of(db, *ids))
        host.mood = Mood.HANG
        await until(lambda: host.hung_count)
        rendered_count = len(app.rendered)
        before = sum(outcomes_of(db, one).count("snoozed") for one in ids)
        await until(lambda: sum(outcomes_of(db, one).count("snoozed") for one in ids) >= before + len(ids))
        assert len(app.rendered) == rendered_count


async def test_an_inconclusive_probe_costs_its_attempt_and_allows_the_next_probe(
    dsn: str, db: psycopg.Connection
) -> None:
    app = App(dsn, retry=RetryPolicy.steps(HOUR), breaker_failures=1, **BRIEF)
    async with line_host(Mood.DROP) as host, running(app.worker()):
        with reports() as heard:
            first = enqueue(db, destination=host.destination)
            await heard.wait_for(LogEvent.BREAKER_OPENED)
            host.mood = Mood.REFUSE
            await until(lambda: "retry" in outcomes_of(db, first))
            await until(lambda: (breaker_of(db, host.key) or (0, True))[1] is False)
            host.mood = Mood.TAKE
            second = enqueue(db, destination=host.destination)
            await until(all_sent(db, [second]))
            await heard.wait_for(LogEvent.BREAKER_CLOSED)


async def test_a_handler_that_delivers_by_itself_is_not_held_back(dsn: str, db: psycopg.Connection) -> None:
    app = App(dsn, **LONG)

    @app.outbox.handler("own")
    async def own(message: Message, ctx: Context) -> None: ...

    async with line_host(Mood.DROP) as host, running(app.worker()):
        enqueue(db, destination=host.destination)
        await until(lambda: is_open(db, host.key))
        await until(all_sent(db, [enqueue(db, "own", destination=host.destination)]))


async def test_a_handler_that_sends_nothing_does_not_block_probes(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn, breaker_failures=1, **BRIEF), transports=[LineTransport()])

    @outbox.handler("greet", retry=SOON)
    async def greet(message: Message, ctx: Context) -> Line | None:
        return Line(str(message.id)) if message.payload is None else None

    async with line_host(Mood.DROP) as host, running(Worker(outbox)):
        with reports() as heard:
            enqueue(db, destination=host.destination)
            await heard.wait_for(LogEvent.BREAKER_OPENED)
            nothing_to_send = enqueue(db, "greet", "nothing", destination=host.destination)
            await until(all_sent(db, [nothing_to_send]))
            host.mood = Mood.TAKE
            last = enqueue(db, destination=host.destination)
            await until(all_sent(db, [last]))


# --- restarts ---------------------------------------------------------------------------------------------------------


async def test_a_new_worker_closes_a_breaker_that_a_vanished_worker_opened(dsn: str, db: psycopg.Connection) -> None:
    app = App(dsn, **LONG)
    async with line_host() as host:
        waiting = await open_breaker(db, app, host)
        host.mood = Mood.TAKE
        db.execute("UPDATE pgoutbox.breaker SET retry_at = now()")
        make_due(db, waiting)
        async with running(app.worker()):
            await until(all_sent(db, [waiting]))
            await until(lambda: not is_open(db, host.key))


# --- room -------------------------------------------------------------------------------------------------------------


async def test_a_hanging_host_leaves_slots_to_others(dsn: str, db: psycopg.Connection) -> None:
    app = App(dsn, concurrency=4)
    async with line_host(Mood.HANG) as silent, line_host() as alive:
        stuck = [enqueue(db, destination=silent.destination) for _ in range(20)]
        going = [enqueue(db, destination=alive.destination) for _ in range(20)]
        async with running(app.worker()):
            await until(all_sent(db, going))
            assert 1 <= silent.hung_count <= 3
            await until(lambda: sum(left == 11 for left in attempts_left(db, *stuck)) == 17)
            assert not is_open(db, silent.key)
            silent.mood = Mood.TAKE
        assert len(silent.attempts) == 3


async def test_a_host_that_answers_slowly_loses_nothing(dsn: str, db: psycopg.Connection) -> None:
    app = App(dsn, concurrency=4)
    async with line_host() as host, running(app.worker()):
        ids = [enqueue(db, destination=host.destination) for _ in range(200)]
        await until(all_sent(db, ids))
    # A slow machine may take the host for stalled, or release messages to other workers: that uses up no attempt.
    assert attempts_left(db, *ids) == [11 - 1] * 200
    assert sorted(map(int, host.taken)) == ids


# --- smtp -------------------------------------------------------------------------------------------------------------


def mail_app(dsn: str, port: int, *, retry: RetryPolicy = SOON, **settings: object) -> Outbox:
    outbox = Outbox(
        settings_for(
            dsn,
            smtp_host="127.0.0.1",
            smtp_port=port,
            smtp_security="none",
            smtp_sender="club@example.org",
            smtp_ehlo_name="app.example.org",
            **settings,
        )
    )

    @outbox.handler("greet", retry=retry)
    async def greet(message: Message, ctx: Context) -> Email:
        return Email(subject="Hello", text="Hi")

    return outbox


@pytest.mark.parametrize(
    ("step", "answer", "opens"),
    [
        ("connect", "421 4.3.2 come back later", True),
        ("MAIL", "451 4.7.1 Service unavailable", True),
        ("RCPT", "451 4.7.1 Service unavailable", False),  # It is one recipient.
        ("RCPT", "452 4.2.2 this mailbox is full", False),
    ],
)
async def test_which_smtp_failures_open_the_breaker_of_the_mail_server(
    dsn: str, db: psycopg.Connection, step: str, answer: str, opens: bool
) -> None:
    async with scripted_server({step: answer}) as server:
        key = f"smtp:127.0.0.1:{server.port}"
        outbox = mail_app(dsn, server.port, retry=AT_ONCE, **LONG)
        message_id = enqueue(db, destination="mailto:ann@example.com", max_attempts=6)
        async with running(Worker(outbox)):
            await until(lambda: len(attempts_of(db, message_id)) == 6 or is_open(db, key))
        assert is_open(db, key) is opens
        assert row_of(db, message_id).state == ("pending" if opens else "failed")


# --- alerts -----------------------------------------------------------------------------------------------------------


def alert_rows(db: psycopg.Connection) -> list[tuple[str, str, str]]:
    return db.execute(
        "SELECT payload ->> 'event', state, destination FROM pgoutbox.message"
        " WHERE topic = 'pgoutbox.alert' ORDER BY id"
    ).fetchall()


async def test_opening_and_closing_are_announced_by_mail(dsn: str, db: psycopg.Connection) -> None:
    async with line_host(Mood.DROP) as host, accepting_server() as inbox:
        outbox = mail_app(dsn, inbox.port, alert_destination="mailto:ops@example.org", **BRIEF)
        mixed = Outbox(outbox.settings, transports=[LineTransport(), SmtpTransport(outbox.settings)])

        @mixed.handler("greet", retry=SOON)
        async def greet(message: Message, ctx: Context) -> Line:
            return Line(str(message.id))

        async with running(Worker(mixed)):
            message_id = enqueue(db, destination=host.destination)
            await until(lambda: len(inbox.received) == 1)
            host.mood = Mood.TAKE
            await until(all_sent(db, [message_id]))
            await until(lambda: len(inbox.received) == 2)
        opened, closed = (received.content.decode() for received in inbox.received)
        assert f"Subject: Circuit breaker open: {host.key}" in opened
        assert "no answer" in opened
        assert f"Subject: Delivery works again: {host.key}" in closed
        assert {recipient for received in inbox.received for recipient in received.recipients} == {"ops@example.org"}


async def test_an_alert_about_the_mail_server_waits_for_it_and_creates_no_other_alert(
    dsn: str, db: psycopg.Connection
) -> None:
    answers = {"connect": ["421 4.3.2 down"] * 9}
    async with scripted_server(answers) as server:
        outbox = mail_app(dsn, server.port, alert_destination="mailto:ops@example.org", **BRIEF)
        ids = [enqueue(db, destination="mailto:ann@example.com") for _ in range(5)]
        async with running(Worker(outbox)):
            await until(all_sent(db, ids))
            await until(lambda: [row[:2] for row in alert_rows(db)][-1] == ("closed", "sent"))
        assert [event for event, _, _ in alert_rows(db)] == ["opened", "closed"]
        assert not is_open(db, f"smtp:127.0.0.1:{server.port}")

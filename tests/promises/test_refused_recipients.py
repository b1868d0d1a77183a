"""A mail server that refuses one recipient, or every recipient, with an answer that blames the sender's side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pgoutbox import Outbox, Settings
from tests.support.dialogues import HOST
from tests.support.smtp_server import Reply, scripted_server
from tests.support.waiting import until

if TYPE_CHECKING:
    import psycopg

    from tests.promises.conftest import StartWorker
    from tests.support.worker_process import WorkerProcess

APPLICATION: Final = """
    from pgoutbox import Context, Email, Message, Outbox, RetryPolicy

    outbox = Outbox()

    @outbox.handler("mail", retry=RetryPolicy.steps(0.05, max_attempts=3))
    async def mail(message: Message, ctx: Context) -> Email:
        return Email(subject="Hello", text="Hello")
"""
DENIED: Final = "554 5.7.1 Relay access denied"
OUTSIDER: Final = "eve@elsewhere.test"


def started(start_worker: StartWorker, port: int, *, pause_seconds: str) -> WorkerProcess:
    """Start a worker that sends by the mail server at `port`; its breaker pauses for so long."""
    return start_worker(
        APPLICATION,
        smtp_host=HOST,
        smtp_port=str(port),
        smtp_security="none",
        smtp_sender="club@example.org",
        poll_interval_seconds="0.1",
        breaker_cooldown_seconds=pause_seconds,
        breaker_max_cooldown_seconds=pause_seconds,
    )


def enqueue(db: psycopg.Connection, *recipients: str) -> list[int]:
    outbox = Outbox(Settings())
    with db.transaction():
        return [
            outbox.on(db).enqueue("mail", None, destination=f"mailto:{recipient}", max_attempts=3).id
            for recipient in recipients
        ]


def states(db: psycopg.Connection, ids: list[int]) -> set[str]:
    found = db.execute("SELECT DISTINCT m.state FROM pgoutbox.message_view AS m WHERE m.id = ANY (%s)", [ids])
    return {state for (state,) in found.fetchall()}


def postponed_count(db: psycopg.Connection, ids: list[int]) -> int:
    """Return how many of the messages have been postponed."""
    query = "SELECT count(DISTINCT a.message_id) FROM pgoutbox.attempt_view AS a WHERE a.outcome = 'snoozed'"
    ((count,),) = db.execute(f"{query} AND a.message_id = ANY (%s)".encode(), [ids]).fetchall()
    return int(count)


async def test_a_message_whose_recipient_alone_is_refused_ends_failed_and_the_others_are_sent(
    db: psycopg.Connection, start_worker: StartWorker
) -> None:
    async with scripted_server({f"RCPT TO:<{OUTSIDER}>": DENIED}) as server:
        started(start_worker, server.port, pause_seconds="0.2")
        refused = enqueue(db, OUTSIDER)
        others = enqueue(db, *(f"member{number}@example.org" for number in range(5)))
        await until(lambda: states(db, others) == {"sent"})
        await until(lambda: states(db, refused) == {"failed"})
    ((error,),) = db.execute("SELECT last_error FROM pgoutbox.message_view WHERE state = 'failed'").fetchall()
    assert "Relay access denied" in error


async def test_a_refused_recipient_does_not_delay_a_message_for_another_one(
    db: psycopg.Connection, start_worker: StartWorker
) -> None:
    """The pause of an hour never ends in this test. A restart forgets whose fault the refusal was."""
    async with scripted_server({f"RCPT TO:<{OUTSIDER}>": DENIED}) as server:
        for number in range(2):
            worker = started(start_worker, server.port, pause_seconds="3600")
            refused = enqueue(db, OUTSIDER)
            await until(lambda refused=refused: postponed_count(db, refused))  # type: ignore[misc] # bound now
            other = enqueue(db, f"member{number}@example.org")
            await until(lambda other=other: states(db, other) == {"sent"})  # type: ignore[misc] # bound now
            assert worker.stop() == 0


async def test_a_server_that_refuses_everybody_uses_up_no_attempt(
    db: psycopg.Connection, start_worker: StartWorker
) -> None:
    answers: dict[str, Reply] = {"RCPT": DENIED}
    async with scripted_server(answers) as server:
        started(start_worker, server.port, pause_seconds="0.2")
        ids = enqueue(db, *(f"member{number}@example.org" for number in range(5)))
        refused = "SELECT count(*) FROM pgoutbox.breaker_view"
        await until(lambda: db.execute(refused).fetchall() == [(1,)])
        await until(lambda: server.verbs.count("RCPT") > 3 * len(ids))
        unspent = (
            "SELECT bool_and(m.max_attempts - m.attempt_count + (m.state = 'sending')::integer = m.attempt_budget)"
            " FROM pgoutbox.message_view AS m WHERE m.state IN ('pending', 'sending')"
        )
        assert db.execute(unspent).fetchall() == [(True,)]
        del answers["RCPT"]
        await until(lambda: states(db, ids) == {"sent"})
        assert db.execute(refused).fetchall() == [(0,)]

"""An attempt ends its message only while the message is in flight in this attempt."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from itertools import product
from typing import TYPE_CHECKING, Final

import pytest

from pgoutbox import (
    Context,
    Failure,
    Message,
    Outbox,
    Outcome,
    Permanent,
    RetryPolicy,
    Sent,
    Skip,
    Snooze,
    Transient,
    Worker,
)
from pgoutbox.operations import Operator
from tests.support.held import Held
from tests.support.messages import LARGE
from tests.support.outbox_actions import enqueue, rows_of, running, settings_for
from tests.support.waiting import until

if TYPE_CHECKING:
    import psycopg

# Each change of an attempt's row but the first one breaks a condition of the fence.
CHANGES: Final = {
    "unchanged": "attempts = attempts",
    "of another worker": "worker = 'another'",
    "in its next attempt": "attempt_count = attempt_count + 1, max_attempts = max_attempts + 1",
    "of another claim": "claimed_at = claimed_at + interval '1 ms'",
    "pending": "state = 'pending', lane = 1, key_in_flight = NULL, available_at = now() + interval '1 h'",
    "sent": "state = 'sent', key_in_flight = NULL, finished_at = now()",
}
OUTCOMES: Final[dict[str, Outcome | None]] = {
    "sent": Sent(),
    "retry": Transient("busy"),
    "snoozed": Snooze(3600),
    "failed": Permanent("no such user"),
    "skipped": Skip("not needed"),
    "released": None,
}
DELETES: Final = pytest.mark.parametrize("deletes", [False, True], ids=["kept", "deleted as they are sent"])
WRITTEN: Final = dict.fromkeys(("retry", "snoozed", "released"), "pending") | {
    name: name for name in ("sent", "failed", "skipped")
}


@DELETES
async def test_a_late_outcome_of_an_old_attempt_changes_nothing(
    dsn: str, db: psycopg.Connection, deletes: bool
) -> None:
    if deletes:
        Operator(db).set_retention("*", "sent", timedelta())
    cases = [*product(CHANGES, OUTCOMES)]
    held = Held(dsn, concurrency=len(cases), shutdown_grace_seconds=0)
    ids = {case: enqueue(db, coalesce_key=str(case)) for case in cases}

    def stale() -> dict[int, tuple[object, ...]]:
        rows = db.execute("SELECT id, m.* FROM pgoutbox.message AS m").fetchall()
        return {row[0]: row for row in rows if row[0] not in own}

    own = {message_id: name for (change, name), message_id in ids.items() if change == "unchanged"}
    async with running(held.worker):
        await held.until_begun(*ids.values())
        for (change, _), message_id in ids.items():
            db.execute(f"UPDATE pgoutbox.message SET {CHANGES[change]} WHERE id = %s".encode(), [message_id])
        before = stale()
        for (_, name), message_id in ids.items():
            if (outcome := OUTCOMES[name]) is not None:
                held.end(message_id, outcome)
        await until(lambda: [own[row.id] for row in rows_of(db, *own) if row.state == "sending"] == ["released"])
    assert stale() == before
    kept = {name: state for name, state in WRITTEN.items() if not (deletes and state == "sent")}
    assert {own[row.id]: row.state for row in rows_of(db, *own)} == kept


async def test_a_late_completion_of_a_transactional_handler_changes_nothing(dsn: str, db: psycopg.Connection) -> None:
    db.execute("CREATE TABLE effect (message_id bigint)")
    outbox = Outbox(settings_for(dsn, concurrency=len(CHANGES)))
    begun: set[int] = set()
    may_end = asyncio.Event()

    @outbox.handler("greet", transactional=True)
    async def greet(message: Message, ctx: Context) -> None:
        await ctx.connection.execute("INSERT INTO effect VALUES (%s)", [message.id])
        begun.add(message.id)
        await may_end.wait()

    ids = {change: enqueue(db, coalesce_key=change) for change in CHANGES}
    own = ids["unchanged"]

    def stale() -> list[tuple[object, ...]]:
        return db.execute("SELECT * FROM pgoutbox.message WHERE id <> %s ORDER BY id", [own]).fetchall()

    def has_ended() -> bool:
        attempts = "SELECT FROM pg_stat_activity WHERE application_name LIKE 'pgoutbox attempt %'"
        return db.execute(attempts + " AND datname = current_database()").rowcount == 0

    async with running(Worker(outbox)):
        await until(lambda: begun == {*ids.values()})
        for change, message_id in ids.items():
            db.execute(f"UPDATE pgoutbox.message SET {CHANGES[change]} WHERE id = %s".encode(), [message_id])
        before = stale()
        may_end.set()
        await until(has_ended)
        assert stale() == before
    assert db.execute("SELECT * FROM effect").fetchall() == [(own,)]
    assert [row.state for row in rows_of(db, own)] == ["sent"]


@DELETES
async def test_an_attempt_that_a_failover_lost_does_not_touch_the_new_message_with_its_id(
    dsn: str, db: psycopg.Connection, deletes: bool
) -> None:
    if deletes:
        Operator(db).set_retention("*", "sent", timedelta())
    endings: list[Outcome] = [outcome for outcome in OUTCOMES.values() if outcome is not None]
    begun: dict[str, dict[int, object]] = {"old": {}, "new": {}}
    may_end = {name: asyncio.Event() for name in begun}
    told: list[int] = []
    text = 10 * LARGE["text"]  # A claim leaves it out.

    def worker_of(name: str, queue: str, slots: int) -> Worker:
        outbox = Outbox(settings_for(dsn, concurrency=slots, batch_size=len(endings) + 1))

        @outbox.handler("greet", retry=RetryPolicy.steps(3600, jitter=0))
        async def greet(message: Message, ctx: Context) -> Outcome:
            begun[name][message.id] = message.payload
            await may_end[name].wait()
            return endings[message.id % len(endings)] if name == "old" else Sent()

        @outbox.on_failed("greet")
        async def tell(message: Message[Failure], ctx: Context) -> None:
            told.append(message.payload.message_id)

        return Worker(outbox, queues=[queue])

    def all_rows() -> list[tuple[object, ...]]:
        return db.execute("SELECT * FROM pgoutbox.message ORDER BY id").fetchall()

    old, new = worker_of("old", "default", len(endings)), worker_of("new", "other", len(endings) + 1)
    async with running(old):
        # One more than there are slots: its payload has not been read yet.
        ids = [enqueue(db, payload={"of": "old", "text": text}) for _ in range(len(endings) + 1)]
        await until(lambda: len(begun["old"]) == len(endings) and {row.state for row in rows_of(db)} == {"sending"})
        with db.transaction():  # The new primary has never had these messages.
            db.execute("DELETE FROM pgoutbox.message_live")
            db.execute("DELETE FROM pgoutbox.claim")
            db.execute("SELECT setval('pgoutbox.message_id_seq', %s, false)", [ids[0]])
            assert [enqueue(db, payload={"of": "new", "text": text}, queue="other") for _ in ids] == ids
        async with running(new):
            await until(lambda: len(begun["new"]) == len(ids))
            before = all_rows()
            may_end["old"].set()
            await until(lambda: old.status().in_flight == 0)
            assert all_rows() == before
            may_end["new"].set()
            await until(lambda: {row.state for row in rows_of(db)} == (set() if deletes else {"sent"}))
    assert begun["new"] == {message_id: {"of": "new", "text": text} for message_id in ids}
    assert len(begun["old"]) == len(endings)
    assert told == []

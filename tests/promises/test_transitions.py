"""Exactly the documented transitions between states occur."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgoutbox import Outcome, Permanent, Sent, Skip, Transient
from pgoutbox.operations import Operator
from tests.support.held import Held, delivered_once
from tests.support.outbox_actions import begin, cancel, enqueue, expire, lapse, redrive, rows_of, running
from tests.support.waiting import until

if TYPE_CHECKING:
    import psycopg

# As docs/explanation/lifecycle.md has them.
TRANSITIONS = {
    "pending": ("sending", "cancelled", "skipped"),
    "sending": ("pending", "sending", "sent", "skipped", "failed", "cancelled"),
    "failed": ("pending", "skipped"),
    "cancelled": ("pending",),
}
NOTE_TRANSITIONS = """
    CREATE TABLE public.seen (before text, after text);
    CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
    BEGIN
        INSERT INTO public.seen VALUES (OLD.state, NEW.state);
        RETURN NEW;
    END $$;
    CREATE TRIGGER note BEFORE UPDATE ON pgoutbox.message FOR EACH ROW
        WHEN (OLD.state <> NEW.state OR OLD.attempt_count <> NEW.attempt_count)
        EXECUTE FUNCTION public.note();
"""


async def test_all_transitions_of_the_state_machine_occur_and_no_others(dsn: str, db: psycopg.Connection) -> None:
    db.execute(NOTE_TRANSITIONS)
    endings: list[Outcome] = [
        Sent(),
        Transient("busy"),
        Permanent("no"),
        Skip("not needed"),
        Permanent("no"),
        Transient("busy"),
    ]
    held = Held(dsn, concurrency=len(endings))
    with db.transaction():
        ids = [enqueue(db) for _ in endings]
    async with running(held.worker):
        await held.until_begun(*ids)
        assert cancel(db, ids[-1]) == "requested"
        for message_id, outcome in zip(ids, endings, strict=True):
            held.end(message_id, outcome)
        await until(lambda: all(row.state != "sending" for row in rows_of(db)))
    assert cancel(db, ids[1]) == "cancelled"
    Operator(db).dismiss(ids[-2], "known")
    for message_id in (ids[1], ids[2]):
        redrive(db, message_id)
    with db.transaction():
        expire(db, enqueue(db))
        dead = enqueue(db, max_attempts=2)  # It may have killed its worker, so it begins alone and at once.
        begin(db, dead)
        lapse(db, dead)
    await delivered_once(dsn, "greet")
    seen = {*db.execute("SELECT before, after FROM public.seen").fetchall()}
    assert seen == {(before, after) for before, afters in TRANSITIONS.items() for after in afters}

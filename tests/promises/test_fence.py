"""An attempt ends its message only while the message is in flight in this attempt."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Final

from pgoutbox import Outcome, Permanent, Sent, Skip, Snooze, Transient
from tests.support.held import Held
from tests.support.outbox_actions import enqueue, rows_of, running
from tests.support.waiting import until

if TYPE_CHECKING:
    import psycopg

# Whatever has happened to the message, its row differs from the attempt in one of these.
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
WRITTEN: Final = dict.fromkeys(("retry", "snoozed", "released"), "pending") | {
    name: name for name in ("sent", "failed", "skipped")
}


async def test_a_late_outcome_of_an_old_attempt_changes_nothing(dsn: str, db: psycopg.Connection) -> None:
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
    assert {own[row.id]: row.state for row in rows_of(db, *own)} == WRITTEN

"""The release of a message from its worker keeps its lease and its keys, and costs no attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, LiteralString

from pgoutbox import Sent
from pgoutbox.operations import Operator
from tests.support.held import Held
from tests.support.outbox_actions import begin, enqueue, rows_of, state_of

if TYPE_CHECKING:
    import psycopg

END_LEASES: Final[LiteralString] = """
    UPDATE pgoutbox.claim SET lease_expires_at = now() - interval '1 ms' WHERE released_from IS NOT NULL
"""


async def test_a_released_message_waits_for_the_lease_of_its_worker(dsn: str, db: psycopg.Connection) -> None:
    last = enqueue(db, max_attempts=1)
    older, first = enqueue(db, coalesce_key="k"), enqueue(db, ordering_key="k")
    careful = enqueue(db, "careful")
    released = [last, older, first, careful]
    for message_id in released:
        begin(db, message_id, worker="owner")
    newer, second = enqueue(db, coalesce_key="k"), enqueue(db, ordering_key="k")
    assert {Operator(db).release(message_id).result.value for message_id in released} == {"released"}
    other = Held(dsn)
    for row in rows_of(db):
        other.end(row.id, Sent())

    await other.run_once()
    assert other.begun == []
    # The worker may have renewed its lease until the release was committed: the message gets that lease, once.
    for _ in range(2):
        assert other.begun == []
        db.execute(END_LEASES)
        await other.run_once()
    assert sorted(other.begun) == sorted([(last, 2), (first, 2), (second, 1), (newer, 1)])
    states = {message_id: state_of(db, message_id) for message_id in (*released, newer, second)}
    assert states == dict.fromkeys((last, first, second, newer), "sent") | {older: "skipped", careful: "failed"}

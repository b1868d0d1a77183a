"""Tests the statements about the messages behind an open breaker; each of their guards has a test that needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from pgoutbox.message import AttemptOutcome
from pgoutbox.operations import Operator
from tests.support.held_messages import DESTINATION, HOLD, open_breaker
from tests.support.outbox_actions import begin, cancel, enqueue, state_of
from tests.support.worker_sql import End, claim, claim_probe, finish, postpone

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from tests.conftest import Connect

LATER: Final = "UPDATE pgoutbox.message_live SET available_at = now() + interval '1 h' WHERE id = %s"
EXPIRED: Final = "UPDATE pgoutbox.message_live SET expires_at = now() - interval '1 s' WHERE id = %s"


def hold(db: psycopg.Connection, **options: object) -> int:
    return enqueue(db, destination=DESTINATION, **options)  # type: ignore[arg-type]


def probed(db: psycopg.Connection) -> list[int]:
    """Begin a probe if there is one, and return its message."""
    return [message_id for message_id, _ in claim_probe(db)]


def expired(db: psycopg.Connection) -> None:
    db.execute(EXPIRED, [hold(db)])


def superseded(db: psycopg.Connection) -> None:
    hold(db, coalesce_key="k")
    db.execute(LATER, [hold(db, coalesce_key="k")])


def beside_its_sibling(db: psycopg.Connection) -> None:
    begin(db, hold(db, coalesce_key="k"))
    hold(db, coalesce_key="k")


def expired_in_order(db: psycopg.Connection) -> None:
    db.execute(EXPIRED, [hold(db, ordering_key="k")])


def second_of_its_key(db: psycopg.Connection) -> None:
    db.execute(LATER, [hold(db, ordering_key="k")])
    hold(db, ordering_key="k")


def behind_one_in_flight(db: psycopg.Connection) -> None:
    begin(db, hold(db, ordering_key="k"))
    hold(db, ordering_key="k")


def behind_a_halt(db: psycopg.Connection) -> None:
    halting = hold(db, ordering_key="k", halts_key=True)
    hold(db, ordering_key="k")
    begin(db, halting)
    assert finish(db, End(halting, 1, AttemptOutcome.FAILED, "no such user")) == {halting: "failed"}


def of_another_topic(db: psycopg.Connection) -> None:
    enqueue(db, "bill", destination=DESTINATION)


@pytest.mark.parametrize(
    "create",
    [
        expired,
        superseded,
        beside_its_sibling,
        expired_in_order,
        second_of_its_key,
        behind_one_in_flight,
        behind_a_halt,
        of_another_topic,
    ],
)
def test_a_message_that_must_not_begin_is_no_probe(
    rolled_back: psycopg.Connection, create: Callable[[psycopg.Connection], None]
) -> None:
    create(rolled_back)
    open_breaker(rolled_back)
    assert probed(rolled_back) == []
    # Any other message of the hold is one.
    message_id = hold(rolled_back)
    rolled_back.execute("DELETE FROM pgoutbox.breaker")
    open_breaker(rolled_back)
    assert probed(rolled_back) == [message_id]


def test_a_breaker_is_probed_after_its_pause_and_by_one_message(rolled_back: psycopg.Connection) -> None:
    ids = [hold(rolled_back) for _ in range(2)]
    open_breaker(rolled_back, retries_in="1 h")
    assert probed(rolled_back) == []
    rolled_back.execute("UPDATE pgoutbox.breaker SET retry_at = now()")
    assert probed(rolled_back) == ids[:1]
    assert probed(rolled_back) == []


def test_a_hold_of_topics_that_others_serve_is_left_to_them(rolled_back: psycopg.Connection) -> None:
    enqueue(rolled_back, "bill", destination=DESTINATION)
    open_breaker(rolled_back)
    rolled_back.execute("UPDATE pgoutbox.breaker SET holds = '{default bill mailto}'")
    assert probed(rolled_back) == []
    assert rolled_back.execute("SELECT holds FROM pgoutbox.breaker").fetchall() == [(["default bill mailto"],)]


def test_a_probe_needs_a_permit_of_its_queue(db: psycopg.Connection, connect: Connect) -> None:
    db.execute("INSERT INTO pgoutbox.queue (name, max_in_flight) VALUES ('default', 5)")
    message_id = hold(db)
    open_breaker(db)
    with connect() as other:
        other.execute("SELECT FROM pgoutbox.queue WHERE name = 'default' FOR UPDATE")  # It claims, and may take all.
        assert probed(db) == []
    assert state_of(db, message_id) == "pending"


def test_held_messages_wait_and_those_that_only_have_to_end_do_end(rolled_back: psycopg.Connection) -> None:
    waiting, late = hold(rolled_back), hold(rolled_back)
    older, newest = (hold(rolled_back, coalesce_key="k") for _ in range(2))
    rolled_back.execute(EXPIRED, [late])
    open_breaker(rolled_back, retries_in="1 h")
    assert sorted((row.id, row.state) for row in claim(rolled_back)) == [(late, "skipped"), (older, "skipped")]
    assert {state_of(rolled_back, one) for one in (waiting, newest)} == {"pending"}


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_message_that_ends_holds_no_others(rolled_back: psycopg.Connection, *, is_cancelled: bool) -> None:
    message_id = hold(rolled_back)
    (row,) = claim(rolled_back)
    open_breaker(rolled_back)
    rolled_back.execute("UPDATE pgoutbox.breaker SET holds = '{}'")
    if is_cancelled:
        cancel(rolled_back, message_id)
    postpone(rolled_back, row.id)
    ((holds,),) = rolled_back.execute("SELECT holds FROM pgoutbox.breaker").fetchall()
    assert (state_of(rolled_back, message_id), holds) == (("cancelled", []) if is_cancelled else ("pending", [HOLD]))


@pytest.mark.parametrize("key", [None, "k"])
def test_a_probe_that_was_due_before_the_pause_of_its_topic_keeps_the_hold(
    rolled_back: psycopg.Connection, key: str | None
) -> None:
    message_id = hold(rolled_back, ordering_key=key)
    open_breaker(rolled_back)
    Operator(rolled_back).pause_topic("greet")
    assert probed(rolled_back) == []
    assert rolled_back.execute("SELECT holds FROM pgoutbox.breaker").fetchall() == [([HOLD],)]
    Operator(rolled_back).resume_topic("greet")
    assert probed(rolled_back) == [message_id]

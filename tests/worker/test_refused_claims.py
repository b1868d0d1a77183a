"""Tests messages whose claim the database refuses: they are set aside, and delay no other message."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from pgoutbox import Context, Message, Outbox
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.worker import Worker
from pgoutbox.worker.set_aside import SetAside
from tests.support.outbox_actions import claim, enqueue, lapse, row_of, rows_of, running, settings_for
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Collection

    import psycopg

logger = logging.getLogger(__name__)

REFUSALS = {
    "a trigger": "RAISE EXCEPTION 'not this one'",
    "a constraint": "RAISE EXCEPTION 'not this one' USING ERRCODE = 'check_violation'",
    "a value that cannot be computed": "PERFORM 1 / 0",
    "damage": "RAISE EXCEPTION 'missing chunk number 0 for toast value 1' USING ERRCODE = 'data_corrupted'",
}


def refuse_claims(db: psycopg.Connection, ids: Collection[int], how: str) -> None:
    """Let a user trigger refuse each change of these messages while they are not final."""
    db.execute(
        f"""
        CREATE FUNCTION refuse_claim() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF NEW.id = ANY ('{{{",".join(map(str, ids))}}}') THEN
                {how};
            END IF;
            RETURN NEW;
        END
        $$;
        CREATE TRIGGER refuse_claim BEFORE UPDATE ON pgoutbox.message_live
            FOR EACH ROW EXECUTE FUNCTION refuse_claim();
        """.encode()
    )


def greeting(outbox: Outbox) -> list[int]:
    """Return the ids of a handler's messages, in order."""
    handed_over = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        handed_over.append(message.id)

    return handed_over


@pytest.mark.parametrize("how", REFUSALS.values(), ids=REFUSALS)
async def test_messages_whose_claim_is_refused_do_not_delay_others(dsn: str, db: psycopg.Connection, how: str) -> None:
    outbox = Outbox(settings_for(dsn))
    handed_over = greeting(outbox)
    plain = [enqueue(db) for _ in range(60)]
    ordered = [enqueue(db, ordering_key=f"member:{n}") for n in range(30)]
    refused = {plain[0], plain[23], plain[24], plain[59], ordered[11], ordered[29]}
    refuse_claims(db, refused, how)
    others = (set(plain) | set(ordered)) - refused
    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: set(handed_over) == others)
        await until(lambda: worker.telemetry.counts[LogEvent.CLAIM_REFUSED] == len(refused))
        fresh = enqueue(db)
        await until(lambda: fresh in handed_over)
    assert len(handed_over) == len(others) + 1
    assert {(row.state, row.attempt_count) for row in rows_of(db, *refused)} == {("pending", 0)}


async def test_messages_behind_a_refused_claim_of_their_ordering_key_wait(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))
    handed_over = greeting(outbox)
    first = enqueue(db, ordering_key="member:7")
    second = enqueue(db, ordering_key="member:7")
    refuse_claims(db, {first}, REFUSALS["a trigger"])
    others = [enqueue(db, ordering_key="member:8"), enqueue(db)]
    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: worker.telemetry.counts[LogEvent.CLAIM_REFUSED] == 1)
        await until(lambda: set(handed_over) == set(others))
    assert {row.state for row in rows_of(db, first, second)} == {"pending"}


async def test_lost_attempts_whose_claim_is_refused_do_not_delay_others(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))
    handed_over = greeting(outbox)
    lost = [enqueue(db, max_attempts=max_attempts) for max_attempts in (1, 5, 1, 5, 1, 5)]
    assert len(claim(db, total=6)) == 6
    for message_id in lost:
        lapse(db, message_id)
    refused = {lost[0], lost[1]}
    refuse_claims(db, refused, REFUSALS["a trigger"])
    plain = enqueue(db)
    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: set(handed_over) == {lost[3], lost[5], plain})
        await until(lambda: {row_of(db, lost[2]).state, row_of(db, lost[4]).state} == {"failed"})
        await until(lambda: worker.telemetry.counts[LogEvent.CLAIM_REFUSED] == len(refused))
    assert {row.state for row in rows_of(db, *refused)} == {"sending"}


async def test_a_superseded_message_of_another_queue_that_cannot_end_stops_no_worker(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(dsn))
    handed_over = greeting(outbox)
    old = enqueue(db, queue="abandoned", coalesce_key="profile:7")
    assert len(claim(db, queue="abandoned")) == 1
    lapse(db, old)
    enqueue(db, coalesce_key="profile:7")
    refuse_claims(db, {old}, REFUSALS["a trigger"])
    plain = enqueue(db)
    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: handed_over == [plain])
    assert worker.telemetry.counts[LogEvent.CLAIM_REFUSED] == 1
    assert row_of(db, old).state == "sending"


async def test_a_message_whose_claim_was_refused_is_delivered_when_it_is_allowed(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgoutbox.worker.set_aside._SECONDS", 0.2)
    outbox = Outbox(settings_for(dsn, poll_interval_seconds=0.2))
    handed_over = greeting(outbox)
    refused = enqueue(db)
    refuse_claims(db, {refused}, REFUSALS["a trigger"])
    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: worker.telemetry.counts[LogEvent.CLAIM_REFUSED] == 1)
        db.execute("DROP FUNCTION refuse_claim CASCADE")
        await until(lambda: handed_over == [refused])
    assert row_of(db, refused).state == "sent"


async def test_a_run_ends_despite_messages_whose_claim_is_refused(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))
    handed_over = greeting(outbox)
    ids = [enqueue(db) for _ in range(10)]
    refuse_claims(db, ids[::2], REFUSALS["a trigger"])
    await Worker(outbox).run_once()
    assert handed_over == ids[1::2]


def test_claims_shrink_until_one_message_is_alone_and_then_grow() -> None:
    aside = SetAside(Telemetry(logger))
    assert aside.within("default", 200) == 200
    sizes = []
    while (total := aside.within("default", 200)) > 1:
        sizes.append(total)
        aside.note_refused("default", total)
    assert sizes == [200, 100, 50, 25, 12, 6, 3]
    assert aside.within("default fresh", 200) == 200
    aside.note_claimed("default", 1)
    assert aside.within("default", 200) == 2
    aside.note_claimed("default", 2)
    assert aside.within("default", 200) == 4
    aside.note_claimed("default", 3)  # The room allows no more.
    assert aside.within("default", 200) == 200


def test_a_refused_message_is_set_aside_for_a_minute_and_reported_once() -> None:
    telemetry = Telemetry(logger)
    aside = SetAside(telemetry)
    aside.add([7], "default", "P0001", now=100.0)
    assert (aside.ids(159.9), aside.ids(160.0)) == ([7], [])
    aside.add([7], "default", "P0001", now=160.0)
    assert aside.ids(219.9) == [7]
    assert telemetry.counts[LogEvent.CLAIM_REFUSED] == 1


def test_a_thousand_consecutive_single_refusals_end_the_worker() -> None:
    aside = SetAside(Telemetry(logger))
    for _ in range(1_000):
        aside.note_refused("default", 1)
    assert not aside.is_hopeless("default")
    aside.note_refused("default", 1)
    assert aside.is_hopeless("default")
    aside.note_claimed("default", 1)
    assert not aside.is_hopeless("default")

"""A rate is the maximum of any period, and a backlog gets all of it, whatever the burst."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import pytest

from pgoutbox import Context, Message, Outbox, Sent, Settings, Worker
from pgoutbox.operations import Operator, Rate
from tests.support import outbox_actions
from tests.support.held import Held
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psycopg

    from tests.conftest import Connect
    from tests.promises.conftest import StartWorker

HOUR: Final = 3600.0
APPLICATION: Final = """
    from pgoutbox import Context, Message, Outbox

    outbox = Outbox()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...
"""


@pytest.fixture
def outbox(dsn: str) -> Outbox:
    outbox = Outbox(Settings(dsn=dsn, maintenance_interval_seconds=0))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    return outbox


def enqueue(db: psycopg.Connection, count: int, queue: str = "default") -> None:
    db.execute("SELECT pgoutbox.enqueue('greet', '1', queue => %s) FROM generate_series(1, %s)", [queue, count])


def begun(db: psycopg.Connection, queue: str = "default") -> list[float]:
    """Return the times at which the attempts began."""
    query = "SELECT extract(epoch FROM m.claimed_at)::float8 FROM pgoutbox.message_view AS m"
    found = db.execute(f"{query} WHERE m.queue = %s AND m.claimed_at IS NOT NULL ORDER BY 1".encode(), [queue])
    return [at for (at,) in found.fetchall()]


def most(times: Sequence[float], seconds: float) -> int:
    """Return the number of attempts of the period that has the most. The times are exact to a microsecond."""
    return max(sum(start <= at < start + seconds - 2e-6 for at in times) for start in times)


def pass_time(db: psycopg.Connection, seconds: float) -> None:
    """Age everything that has a time."""
    with db.transaction():
        for column in ("message SET claimed_at", "rate_claim SET claimed_at", "queue SET tokens_at"):
            change = f"UPDATE pgoutbox.{column} = {column.split()[-1]} - make_interval(secs => %s)"
            db.execute(change.encode(), [seconds])


def pass_time_to_the_next_permit(db: psycopg.Connection) -> None:
    query = "SELECT extract(epoch FROM pgoutbox.next_permit_at('default') - clock_timestamp())::float8"
    ((seconds,),) = db.execute(query).fetchall()
    pass_time(db, max(seconds or 0.0, 0.0))


@pytest.mark.parametrize(
    ("count", "seconds", "burst"),
    [(6, HOUR, None), (6, HOUR, 1), (6, HOUR, 4), (6, HOUR, 6), (1, 60, None), (20, 2, 19), (20, 10, 2)],
)
async def test_a_backlog_gets_the_whole_rate_and_no_period_more(
    outbox: Outbox, db: psycopg.Connection, count: int, seconds: float, burst: int | None
) -> None:
    enqueue(db, 4 * count)
    Operator(db).limit_rate("default", Rate(count, seconds), burst=burst)
    began_at = time.monotonic()
    while len(begun(db)) < 4 * count:
        await Worker(outbox).run_once()
        pass_time_to_the_next_permit(db)
    real_seconds = time.monotonic() - began_at  # It passes beside the played time.
    times = begun(db)
    assert most(times, seconds) == count
    for period in (1, 2, 3):
        assert times[period * count] - times[0] <= period * seconds + real_seconds


async def test_a_burst_may_begin_at_once_after_an_idle_time_and_is_a_part_of_the_rate(
    outbox: Outbox, db: psycopg.Connection
) -> None:
    Operator(db).limit_rate("default", Rate(6, HOUR), burst=4)
    for _ in range(2):
        before = len(begun(db))
        enqueue(db, 8)
        await Worker(outbox).run_once()
        assert len(begun(db)) - before == 4
        while len(begun(db)) < before + 8:
            pass_time_to_the_next_permit(db)
            await Worker(outbox).run_once()
        pass_time(db, 10 * HOUR)
    assert most(begun(db), HOUR) == 6


async def test_the_attempts_of_a_second_may_always_begin_at_once(outbox: Outbox, db: psycopg.Connection) -> None:
    """A worker that looks for permits a few times a second would lose those of a smaller bucket."""
    Operator(db).limit_rate("default", Rate(30, 1.5), burst=1)
    enqueue(db, 30)
    await Worker(outbox).run_once()
    times = begun(db)
    assert times[:20] == times[:1] * 20


async def test_no_period_exceeds_a_rate_that_an_operator_changes_back_and_forth(
    outbox: Outbox, db: psycopg.Connection
) -> None:
    operator = Operator(db)
    enqueue(db, 60)
    for rate, burst in [
        (Rate(6, HOUR), 6),
        (Rate(6, HOUR), 1),
        (Rate(5, 2 * HOUR), 5),
        (Rate(6, HOUR), 6),
        (None, None),
    ]:
        if rate is None:
            operator.pause("default")
        operator.limit_rate("default", rate, burst=burst)
        for _ in range(3):
            await Worker(outbox).run_once()
            pass_time(db, 300)
    operator.limit_rate("default", Rate(6, HOUR), burst=6)
    operator.resume("default")
    for _ in range(12):
        await Worker(outbox).run_once()
        pass_time(db, 600)
    assert most(begun(db), HOUR) == 6


async def test_no_change_of_the_rate_exceeds_the_ceiling(outbox: Outbox, db: psycopg.Connection) -> None:
    operator = Operator(db)
    operator.limit_ceiling("default", Rate(6, HOUR))
    enqueue(db, 60)
    for rate, burst in [(Rate(6, HOUR), 6), (Rate(1, 600), 1), (Rate(100, 24 * HOUR), 100), (Rate(6, HOUR), 3)]:
        operator.limit_rate("default", rate, burst=burst)
        for _ in range(6):
            await Worker(outbox).run_once()
            pass_time(db, 601)
    assert most(begun(db), HOUR) == 6


async def test_several_workers_never_exceed_the_rates_of_their_queues(
    db: psycopg.Connection, start_worker: StartWorker
) -> None:
    bursts = {"b5": 5, "b10": 10, "b19": 19, "b20": 20}
    for queue, burst in bursts.items():
        Operator(db).limit_rate(queue, Rate(20, 1.5), burst=burst)
        enqueue(db, 45, queue)
    queues = [argument for queue in bursts for argument in ("--queue", queue)]
    for _ in range(2):
        start_worker(APPLICATION, *queues, poll_interval_seconds="0.1")
    await until(lambda: all(len(begun(db, queue)) == 45 for queue in bursts))
    assert {queue: most(begun(db, queue), 1.5) <= 20 for queue in bursts} == dict.fromkeys(bursts, True)


async def test_messages_that_end_without_an_attempt_use_up_no_tokens(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    held, holder = Held(dsn), connect()
    ended = [outbox_actions.enqueue(db, coalesce_key=str(number)) for number in range(6)]
    holder.execute("SELECT FROM pgoutbox.message WHERE id = ANY (%s) FOR UPDATE", [ended[:2]])
    for number, message_id in enumerate(ended):
        if number < 2:
            assert outbox_actions.cancel(db, message_id) == "requested"
        elif number < 4:
            outbox_actions.expire(db, message_id)
    holder.rollback()
    newer = [outbox_actions.enqueue(db, coalesce_key=str(number)) for number in (4, 5)]
    later = outbox_actions.enqueue(db)
    Operator(db).limit_rate("default", Rate(2, HOUR), burst=2)
    for message_id in newer:
        held.end(message_id, Sent())
    await held.run_once()
    assert [message_id for message_id, _ in held.begun] == newer
    states = [outbox_actions.state_of(db, message_id) for message_id in (*ended, later)]
    assert states == ["cancelled"] * 2 + ["skipped"] * 4 + ["pending"]

"""Tests fair shares: keys take turns, and no key has more in flight than its limit."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, LiteralString

import pytest

from pgoutbox import Context, Message, Outbox, Permanent, RetryPolicy, Transient, Worker
from pgoutbox.operations import Operator, Rate
from tests.support.outbox_actions import attempts_of, begin, cancel, lapse, redrive, running, settings_for, state_of
from tests.support.waiting import until, until_idle

if TYPE_CHECKING:
    import psycopg

    from tests.conftest import Connect

GIVE = "SELECT admitted_count FROM pgoutbox._give_turns('default', '{greet}', 5)"
IN_FLIGHT = "SELECT fair_key, count(*) FROM pgoutbox.message WHERE state = 'sending' GROUP BY fair_key"


def put(
    db: psycopg.Connection, key: str | None, count: int = 1, *, topic: str = "greet", queue: str = "default"
) -> list[int]:
    rows = db.execute(
        "SELECT pgoutbox.enqueue(%s, to_jsonb(n), fair_key => %s, queue => %s) FROM generate_series(1, %s) AS n",
        [topic, key, queue, count],
    )
    return [int(message_id) for (message_id,) in rows]


def share(
    db: psycopg.Connection,
    key: str = "",
    *,
    weight: int | None = None,
    most: int | None = None,
    rate: tuple[int, int] | tuple[None, None] = (None, None),
) -> None:
    """Set the share of a key of the default queue; without a key, of all its keys."""
    db.execute(
        "INSERT INTO pgoutbox.fair_share (queue, fair_key, weight, max_in_flight, rate_count, rate_seconds)"
        " VALUES ('default', %s, %s, %s, %s, %s) ON CONFLICT ON CONSTRAINT fair_share_pkey DO UPDATE"
        " SET weight = excluded.weight, max_in_flight = excluded.max_in_flight, rate_count = excluded.rate_count,"
        " rate_seconds = excluded.rate_seconds",
        [key, weight, most, *rate],
    )


def admitted(db: psycopg.Connection) -> list[int]:
    """The messages that have their turn."""
    return [
        message_id
        for (message_id,) in db.execute(
            "SELECT id FROM pgoutbox.message WHERE fair_key IS NOT NULL AND lane < 2 AND state = 'pending' ORDER BY id"
        )
    ]


def states(db: psycopg.Connection) -> Counter[str]:
    return Counter(state for (state,) in db.execute("SELECT state FROM pgoutbox.message"))


def noting(outbox: Outbox, db: psycopg.Connection, topic: str = "greet") -> list[str]:
    """A handler that notes the key of each message."""
    begun: list[str] = []

    @outbox.handler(topic)
    async def greet(message: Message, ctx: Context) -> None:
        ((key,),) = db.execute("SELECT fair_key FROM pgoutbox.message WHERE id = %s", [message.id]).fetchall()
        begun.append(key)

    return begun


class Gate:
    """A handler that waits. `most` are the most attempts of a key at once, whatever the worker."""

    def __init__(self, *outboxes: Outbox) -> None:
        self.open = asyncio.Event()
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        for outbox in outboxes:
            outbox.handler("greet")(self.greet)

    async def greet(self, message: Message, ctx: Context) -> None:
        key = message.headers["key"]
        self.running[key] += 1
        self.most[key] = max(self.most[key], self.running[key])
        try:
            await self.open.wait()
            await asyncio.sleep(0)
        finally:
            self.running[key] -= 1


def put_named(db: psycopg.Connection, key: str, count: int) -> None:
    """Messages whose handler can read their key."""
    db.execute(
        "SELECT pgoutbox.enqueue('greet', 'null', fair_key => %s, headers => jsonb_build_object('key', %s::text))"
        " FROM generate_series(1, %s)",
        [key, key, count],
    )


async def test_a_small_tenant_waits_for_one_round(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=5, batch_size=5))
    begun = noting(outbox, db)
    put(db, "big", 600)
    put(db, "small", 2)
    await Worker(outbox).run_once()
    assert Counter(begun) == {"big": 600, "small": 2}
    assert max(place for place, key in enumerate(begun) if key == "small") < 30


async def test_keys_get_messages_by_their_weights(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=5, batch_size=5))
    begun = noting(outbox, db)
    share(db, "gold", weight=3)
    for key in ("bronze", "gold", "silver"):
        put(db, key, 100)
    await Worker(outbox).run_once()
    early = Counter(begun[:100])
    assert len(begun) == 300
    assert 50 < early["gold"] < 70
    assert 15 < early["bronze"] < 26


async def test_a_lone_key_uses_all_slots(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=20, batch_size=20))
    gate = Gate(outbox)
    put_named(db, "lone", 50)
    async with running(Worker(outbox)):
        await until(lambda: gate.running["lone"] == 20)
        gate.open.set()
        await until(lambda: states(db) == {"sent": 50})


async def test_messages_without_a_key_take_no_part(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))
    begun = noting(outbox, db)
    put(db, None, 3)
    put(db, "a", 3)
    await Worker(outbox).run_once()
    assert Counter(begun) == {None: 3, "a": 3}


@pytest.mark.parametrize("worker_count", [1, 4])
async def test_no_key_has_more_in_flight_than_its_limit(dsn: str, db: psycopg.Connection, worker_count: int) -> None:
    outboxes = [Outbox(settings_for(dsn, concurrency=10, batch_size=10)) for _ in range(worker_count)]
    gate = Gate(*outboxes)
    share(db, most=3)
    share(db, "wide", most=7)
    for key in ("a", "b", "wide"):
        put_named(db, key, 60)
    async with AsyncExitStack() as stack:
        for outbox in outboxes:
            await stack.enter_async_context(running(Worker(outbox)))
        await until(lambda: gate.running == {"a": 3, "b": 3, "wide": 7 if worker_count > 1 else 4})
        gate.open.set()
        await until(lambda: states(db) == {"sent": 180})
    assert {key: count for key, count in gate.most.items() if count > 3} in (
        {},
        {"wide": 7},
        {"wide": 6},
        {"wide": 5},
        {"wide": 4},
    )
    assert max(gate.most[key] for key in ("a", "b")) == 3


async def test_a_turn_that_another_worker_frees_is_taken_within_a_second(dsn: str, db: psycopg.Connection) -> None:
    """The first worker has no room for the next message of the key."""
    first, second = (Outbox(settings_for(dsn, concurrency=1, batch_size=1)) for _ in range(2))
    gates = [Gate(first), Gate(second)]
    share(db, most=1)
    put_named(db, "a", 1)
    async with running(Worker(first)):
        await until(lambda: gates[0].running["a"] == 1)
        put_named(db, "a", 1)
        async with running(Worker(second)):
            put(db, "b", 1, topic="other")
            lapse(db, min(i for (i,) in db.execute("SELECT id FROM pgoutbox.message WHERE state = 'sending'")))
            gates[0].open.set()
            gates[1].open.set()
            await until(lambda: states(db)["sent"] == 2)


async def test_a_retry_frees_its_turn_and_waits_for_another(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))
    begun: list[int] = []

    @outbox.handler("greet", retry=RetryPolicy(base=3600))
    async def greet(message: Message, ctx: Context) -> Transient | None:
        begun.append(message.id)
        return Transient("busy") if message.id == first else None

    share(db, most=1)
    first, second = put(db, "a", 2)
    await Worker(outbox).run_once()
    assert begun == [first, second]
    assert [state_of(db, first), state_of(db, second)] == ["pending", "sent"]
    db.execute("UPDATE pgoutbox.message SET available_at = now() WHERE id = %s", [first])
    put(db, "a", 1)
    await Worker(outbox).run_once()
    assert sorted(begun) == [first, first, second, second + 1]


async def test_a_failed_message_that_is_redriven_waits_for_its_turn(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))
    fails = True

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> Permanent | None:
        return Permanent("no") if fails else None

    (message_id,) = put(db, "a")
    await Worker(outbox).run_once()
    assert state_of(db, message_id) == "failed"
    share(db, "a", most=0)
    assert redrive(db, message_id)
    fails = False
    await Worker(outbox).run_once()
    assert state_of(db, message_id) == "pending"
    share(db, "a", most=1)
    await Worker(outbox).run_once()
    assert state_of(db, message_id) == "sent"


async def test_a_key_without_a_share_is_paused_alone(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))
    begun = noting(outbox, db)
    share(db, "a", most=0)
    put(db, "a", 5)
    async with running(Worker(outbox)):
        put(db, "b", 5)
        await until(lambda: states(db) == {"sent": 5, "pending": 5})
        share(db, "a")  # Nobody is told.
        await until(lambda: states(db) == {"sent": 10})
    assert begun[:5] == ["b"] * 5


async def test_a_scheduled_message_gets_its_turn_when_it_falls_due(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))
    begun = noting(outbox, db)
    async with running(Worker(outbox)):
        put(db, "a")
        await until(lambda: begun == ["a"])
        db.execute("SELECT pgoutbox.enqueue('greet', 'null', fair_key => 'b', delay => '0.5 s')")
        await until(lambda: begun == ["a", "b"])
    assert states(db) == {"sent": 2}


async def test_a_locked_message_holds_up_nobody(dsn: str, db: psycopg.Connection, connect: Connect) -> None:
    """A transaction that cancels the first message of a key stays open."""
    outbox = Outbox(settings_for(dsn, concurrency=1, batch_size=1))
    begun = noting(outbox, db)
    first, *_ = put(db, "a", 3)
    put(db, "b", 3)
    other = connect()
    other.autocommit = False
    cancel(other, first)
    async with running(Worker(outbox)):
        await until(lambda: Counter(begun) == {"a": 2, "b": 3})
        other.rollback()
        await until(lambda: len(begun) == 6)


@pytest.mark.parametrize("holds", ["topic", "breaker", "other worker's topic"])
async def test_a_key_that_cannot_be_delivered_takes_no_turn_of_others(
    dsn: str, db: psycopg.Connection, holds: str
) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=2, batch_size=2))
    begun = noting(outbox, db)
    if holds != "other worker's topic":
        noting(outbox, db, "held")
    put(db, "a", 50, topic="held")
    if holds == "topic":
        db.execute("SELECT pgoutbox.pause_topic('held')")
    if holds == "breaker":
        db.execute(
            "INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error, holds) SELECT"
            " 'x', now() + interval '1 h', 1, 'w', 'e', ARRAY[pgoutbox._hold_of('default', 'held', 1::smallint, NULL)]"
        )
    put(db, "a", 5)
    put(db, "b", 5)
    await Worker(outbox).run_once()
    assert Counter(begun) == {"a": 5, "b": 5}


async def test_messages_that_were_ready_before_a_pause_take_no_turn_of_others(dsn: str, db: psycopg.Connection) -> None:
    """They had their turn, and their worker was killed before its claim."""
    outbox = Outbox(settings_for(dsn, concurrency=2, batch_size=2))
    begun = noting(outbox, db)
    noting(outbox, db, "held")
    put(db, "a", 5, topic="held")
    db.execute("SELECT pgoutbox._give_turns('default', '{held}', 5)")
    db.execute("SELECT pgoutbox.pause_topic('held')")
    put(db, "b", 5)
    await Worker(outbox).run_once()
    assert begun == ["b"] * 5


async def test_the_turn_of_a_killed_worker_is_not_lost(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))
    begun = noting(outbox, db)
    share(db, most=1)
    put(db, "a", 2)
    db.execute("SELECT pgoutbox._give_turns('default', '{greet}', 5)")
    await Worker(outbox).run_once()
    assert begun == ["a", "a"]


async def test_a_lapsed_attempt_keeps_its_turn(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))
    begun = noting(outbox, db)
    share(db, most=1)
    put(db, "a", 2)
    db.execute("SELECT pgoutbox._give_turns('default', '{greet}', 5)")
    (first,) = admitted(db)
    begin(db, first)
    await Worker(outbox).run_once()
    assert begun == []
    lapse(db, first)
    await Worker(outbox).run_once()
    assert begun == ["a", "a"]
    assert attempts_of(db, first)[0][1] == "lost"


async def test_two_queues_have_their_own_turns(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))
    begun = noting(outbox, db)
    share(db, most=0)
    put(db, "a", 2)
    put(db, "a", 2, queue="bulk")
    await Worker(outbox, queues=["default", "bulk"]).run_once()
    assert begun == ["a", "a"]
    assert db.execute("SELECT DISTINCT queue FROM pgoutbox.message WHERE state = 'sent'").fetchall() == [("bulk",)]


async def test_a_coalesced_message_takes_turns_too(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))
    begun = noting(outbox, db)
    for _ in range(3):
        db.execute("SELECT pgoutbox.enqueue('greet', 'null', fair_key => 'a', coalesce_key => 'k')")
    await Worker(outbox).run_once()
    assert begun == ["a"]
    assert states(db) == {"sent": 1, "skipped": 2}


@pytest.mark.parametrize("count", [600, 1_500])
async def test_a_key_behind_many_at_their_limit_gets_its_turn(dsn: str, db: psycopg.Connection, count: int) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=2, batch_size=2))
    begun = noting(outbox, db)
    share(db, most=0)
    share(db, "z", most=1)
    db.execute(
        "SELECT pgoutbox.enqueue('greet', 'null', fair_key => 'k' || n) FROM generate_series(1, %s) AS n", [count]
    )
    put(db, "z", 3)
    await Worker(outbox).run_once()
    assert begun == ["z", "z", "z"]
    assert states(db) == {"sent": 3, "pending": count}


async def test_limits_hold_while_workers_come_and_go(dsn: str, db: psycopg.Connection) -> None:
    """Sampled in the database, while attempts end, fail and are released."""
    outboxes = [Outbox(settings_for(dsn, concurrency=5, batch_size=5)) for _ in range(3)]
    for outbox in outboxes:

        @outbox.handler("greet", retry=RetryPolicy(base=0.01, cap=0.02, max_attempts=100))
        async def greet(message: Message, ctx: Context) -> Transient | None:
            await asyncio.sleep(0)
            return Transient("again") if (message.id + message.attempt_count) % 3 == 0 else None

    share(db, most=2)
    for key in "abcd":
        put(db, key, 150)
    samples: list[Counter[str]] = []

    def is_done() -> bool:
        samples.append(Counter(dict(db.execute(IN_FLIGHT).fetchall())))
        return states(db)["pending"] == 0 and states(db)["sending"] == 0

    async with AsyncExitStack() as stack:
        for outbox in outboxes[:2]:
            await stack.enter_async_context(running(Worker(outbox)))
        async with running(Worker(outboxes[2])):
            await until(lambda: is_done() or states(db)["sent"] > 100)
        await until(is_done)
    assert states(db) == {"sent": 600}
    assert max(max(sample.values(), default=0) for sample in samples) == 2


async def test_no_key_gets_turns_beyond_its_rate(dsn: str, db: psycopg.Connection) -> None:
    outboxes = [Outbox(settings_for(dsn)) for _ in range(3)]
    begun: list[tuple[str, float]] = []
    for outbox in outboxes:

        @outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            begun.append((message.headers["key"], asyncio.get_running_loop().time()))

    share(db, rate=(100, 5))
    share(db, "slow", rate=(1, 3600), weight=2)
    put_named(db, "a", 30)
    put_named(db, "b", 30)
    put_named(db, "slow", 5)
    async with AsyncExitStack() as stack:
        for outbox in outboxes:
            await stack.enter_async_context(running(Worker(outbox)))
        await until(lambda: states(db) == {"sent": 62, "pending": 3})
    for key in "ab":
        times = [at for named, at in begun if named == key]
        # One each 50 ms, whichever worker begins it; the first is a turn at once.
        assert times[-1] - times[0] > 29 * 0.05 - 0.1
    keys = "SELECT array_agg(fair_key ORDER BY fair_key) FROM pgoutbox.fair_share"
    assert db.execute(keys).fetchone() == (["", "a", "b", "slow"],)
    moment = "CASE fair_key WHEN 'b' THEN now() + interval '1 h' ELSE now() - interval '1 s' END"
    db.execute(f"UPDATE pgoutbox.fair_share SET spent_at = {moment} WHERE fair_key <> ''".encode())
    db.execute("SELECT pgoutbox._forget_requests()")
    assert db.execute(keys).fetchone() == (["", "b", "slow"],)


@pytest.mark.parametrize(
    "act",
    [
        "SELECT pgoutbox.snooze(ARRAY[%(id)s::bigint], interval '1 h', reason => 'test')",
        "SELECT pgoutbox.reschedule(ARRAY[%(id)s::bigint], now() + interval '1 h')",
        "SELECT pgoutbox.edit(%(id)s, 'ada', available_at => now() + interval '1 h')",
        'SELECT pgoutbox.correct(ARRAY[%(id)s::bigint], \'{"queue": "bulk"}\')',
    ],
    ids=["snooze", "reschedule", "edit", "correct"],
)
def test_an_act_on_a_message_that_has_its_turn_gives_it_back(db: psycopg.Connection, act: LiteralString) -> None:
    share(db, most=1)
    ids = [put(db, "a")[0], put(db, "a")[0]]
    db.execute("UPDATE pgoutbox.message SET owner = 'ada'")
    assert [db.execute(GIVE).fetchone(), db.execute(GIVE).fetchone()] == [(1,), (0,)]
    db.execute(act, {"id": ids[0]})
    assert db.execute(GIVE).fetchone() == (1,)
    assert db.execute("SELECT id FROM pgoutbox.message WHERE lane < 2").fetchall() == [(ids[1],)]


def test_no_more_messages_get_their_turn_than_a_worker_has_room_for(db: psycopg.Connection) -> None:
    put(db, "a", 10)
    assert [db.execute(GIVE).fetchone(), db.execute(GIVE).fetchone()] == [(5,), (0,)]
    for message_id in admitted(db)[:2]:
        begin(db, message_id)
    assert db.execute(GIVE).fetchone() == (2,)


def test_a_message_that_is_not_due_takes_no_turn(db: psycopg.Connection) -> None:
    share(db, most=1)
    db.execute("SELECT pgoutbox.enqueue('greet', 'null', fair_key => 'a', delay => '1 h')")
    (due,) = put(db, "a")
    assert db.execute(GIVE).fetchone() == (1,)
    assert db.execute("SELECT id FROM pgoutbox.message WHERE lane < 2").fetchall() == [(due,)]


def test_the_time_of_the_next_turn_under_a_rate_is_told(db: psycopg.Connection) -> None:
    share(db, rate=(1, 3600), weight=2)
    put(db, "a", 5)
    give = GIVE.replace("admitted_count", "admitted_count, is_waiting, permit_seconds > 3590")
    assert [db.execute(give).fetchone(), db.execute(give).fetchone()] == [(2, True, True), (0, True, True)]


async def test_a_paused_key_waits_until_it_gets_a_limit_and_no_other_key_does(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=5))
    sent: list[int] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        sent.append(message.id)

    operator = Operator(db)
    operator.set_fair_share("default", "paused", max_in_flight=0)
    put(db, "paused", 3)
    put(db, "other", 3)
    await Worker(outbox).run_once()
    assert [(one.key, one.due, one.limit) for one in operator.list_fair_keys("default").keys] == [
        ("paused", 3, "paused")
    ]
    assert len(sent) == 3
    worker = Worker(outbox)
    async with running(worker):
        await until_idle(worker)
        assert len(sent) == 3
        operator.set_fair_share("default", "paused", max_in_flight=1)
        await until(lambda: len(sent) == 6)
    assert db.execute("SELECT count(*) FROM pgoutbox.message_live").fetchall() == [(0,)]


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_change_of_a_share_that_stays_open_holds_back_no_other_message(
    dsn: str, db: psycopg.Connection, connect: Connect, *, is_first: bool
) -> None:
    """The turns of its queue wait for it, and go on after its end."""
    outbox = Outbox(settings_for(dsn, concurrency=5, lock_timeout_seconds=600))
    sent: list[int] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        sent.append(message.id)

    if not is_first:
        Operator(db).set_fair_share("default", weight=2)
    changing = connect()
    changing.execute("SELECT pgoutbox.set_fair_share('default', 'acme', weight => 3)")
    keyed, other, elsewhere = put(db, "acme"), put(db, None), put(db, "acme", queue="mail")
    async with running(Worker(outbox, queues=["default", "mail"])):
        await until(lambda: {*other, *elsewhere} <= {*sent})
        later = put(db, None)
        await until(lambda: {*later} <= {*sent})
        assert not {*keyed} & {*sent}
        changing.commit()
        await until(lambda: {*keyed} <= {*sent})


HOURLY = Rate(1, 3600)
SPENT = "SELECT fair_key, extract(epoch FROM spent_at - now())::float8 FROM pgoutbox.fair_share WHERE fair_key <> ''"


def admitted_now(db: psycopg.Connection) -> int:
    """Give turns, and return the number of messages that got theirs."""
    ((count,),) = db.execute("SELECT admitted_count FROM pgoutbox._give_turns('default', '{greet}', 100)").fetchall()
    return int(count)


def spent_by_key(db: psycopg.Connection) -> dict[str, float]:
    return {str(key): float(seconds) for key, seconds in db.execute(SPENT).fetchall()}


@pytest.mark.parametrize("key", [None, "a"], ids=["queue", "key"])
@pytest.mark.parametrize("act", ["reset", "remove", "faster and back"])
def test_no_change_of_a_rate_gives_a_turn_that_is_spent(db: psycopg.Connection, key: str | None, act: str) -> None:
    operator = Operator(db)
    operator.set_fair_share("default", key, weight=2, rate=HOURLY)
    put(db, "a", 10)
    assert [admitted_now(db), admitted_now(db)] == [2, 0]
    if act == "reset":
        operator.set_fair_share("default", key)
    elif act == "remove":
        operator.set_fair_share("default", key, remove=["rate"])
    else:
        operator.set_fair_share("default", key, rate=Rate(1, 60))
        assert admitted_now(db) == 0
    db.execute("SELECT pgoutbox._forget_requests()")
    operator.set_fair_share("default", key, weight=2, rate=HOURLY)
    assert admitted_now(db) == 0
    assert 7_190 < spent_by_key(db)["a"] <= 7_200


@pytest.mark.parametrize("key", [None, "a"], ids=["queue", "key"])
def test_a_faster_rate_holds_at_once(db: psycopg.Connection, key: str | None) -> None:
    """A message that has spent the slow rate takes a turn of the fast one, and no hour."""
    operator = Operator(db)
    operator.set_fair_share("default", key, rate=HOURLY)
    operator.set_fair_share("default", "slow", rate=HOURLY)
    put(db, "a", 10)
    put(db, "slow", 10)
    assert [admitted_now(db), admitted_now(db)] == [2, 0]
    operator.set_fair_share("default", key, rate=Rate(10, 1))
    spent = spent_by_key(db)
    assert spent["a"] <= 0.1
    assert spent["slow"] > 3_590


def test_a_new_rate_after_none_takes_a_turn_at_most(db: psycopg.Connection) -> None:
    """The old rate is forgotten, and with it how many messages have spent it."""
    operator = Operator(db)
    operator.set_fair_share("default", "a", rate=HOURLY)
    put(db, "a", 10)
    assert admitted_now(db) == 1
    operator.set_fair_share("default", "a")
    operator.set_fair_share("default", "a", weight=3, rate=Rate(1, 60))
    assert admitted_now(db) == 0
    assert 170 < spent_by_key(db)["a"] <= 180


def test_the_own_values_of_a_key_hold_in_place_of_those_of_its_queue(db: psycopg.Connection) -> None:
    operator = Operator(db)
    operator.set_fair_share("default", weight=2, rate=HOURLY)
    operator.set_fair_share("default", "heavy", weight=4)
    operator.set_fair_share("default", "often", rate=Rate(1, 60))
    for key in ("common", "heavy", "often"):
        put(db, key, 10)
    assert admitted_now(db) == 2 + 4 + 2
    counts = db.execute("SELECT fair_key, count(*) FROM pgoutbox.message WHERE lane < 2 GROUP BY 1").fetchall()
    assert dict(counts) == {"common": 2, "heavy": 4, "often": 2}
    minutes = {key: round(seconds / 60) for key, seconds in spent_by_key(db).items()}
    assert minutes == {"common": 120, "heavy": 240, "often": 2}


async def test_a_worker_that_waits_for_a_rate_hears_of_a_faster_one(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))
    begun = noting(outbox, db)
    operator = Operator(db)
    operator.set_fair_share("default", rate=HOURLY)
    put(db, "a", 3)
    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: begun == ["a"])
        await until_idle(worker)
        operator.set_fair_share("default", "a", rate=Rate(1000, 1))
        await until(lambda: begun == ["a"] * 3)


async def test_the_first_message_with_a_key_begins_while_others_keep_its_worker_busy(
    dsn: str, db: psycopg.Connection
) -> None:
    """The worker never sleeps: each message without a key enqueues the next ones, until the one with a key begins."""
    outbox = Outbox(settings_for(dsn, concurrency=5, batch_size=5))
    begun: list[int] = []

    @outbox.handler("greet", transactional=True)
    async def greet(message: Message, ctx: Context) -> None:
        begun.append(message.id)
        if not {*keyed} <= {*begun}:
            await ctx.connection.execute(
                "SELECT pgoutbox.enqueue('greet', 'null') FROM generate_series(1, %s)", [10 if len(begun) < 20 else 1]
            )

    keyed = [-1]
    put(db, None, 20)
    async with running(Worker(outbox)):
        await until(lambda: len(begun) > 100)
        keyed[:] = put(db, "a", 1)
        await until(lambda: {*keyed} <= {*begun})


async def test_a_transactional_handler_that_rolls_back_frees_its_turn(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=5))
    running_now: Counter[str] = Counter()
    db.execute("CREATE TABLE kept (id bigint)")

    @outbox.handler("greet", transactional=True, retry=RetryPolicy(base=0.01, cap=0.01))
    async def greet(message: Message, ctx: Context) -> Transient | None:
        running_now["now"] += 1
        running_now["most"] = max(running_now["most"], running_now["now"])
        await ctx.connection.execute("INSERT INTO public.kept VALUES (%s)", [message.id])
        running_now["now"] -= 1
        return Transient("rolled back") if message.attempt_count == 1 else None

    share(db, most=1)
    ids = put(db, "a", 5)
    async with running(Worker(outbox)):
        await until(lambda: states(db) == {"sent": 5})
    assert sorted(row[0] for row in db.execute("SELECT id FROM kept")) == ids
    assert running_now["most"] == 1

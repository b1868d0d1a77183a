"""Tests that only PostgreSQL's clock counts. A worker with a wrong, jumping or stopped clock claims, retries, renews
and hands over like any other; time zones change no point in time.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import psycopg
import pytest

from pgoutbox import Outbox
from pgoutbox.handlers import Context
from pgoutbox.message import Message, Snooze
from pgoutbox.observability.events import LogEvent
from pgoutbox.retry import RetryPolicy
from pgoutbox.worker import Worker
from tests.support.fleet import SUSPEND_VARIABLE
from tests.support.judge import violations
from tests.support.messages import PUT_SENDING
from tests.support.missing import server_missing
from tests.support.outbox_actions import (
    PATIENCE_SECONDS,
    attempts_of,
    enqueue,
    lapse,
    row_of,
    running,
    settings_for,
    state_of,
)
from tests.support.servers import Workshop, open_workshop
from tests.support.waiting import until, until_idle
from tests.support.worker_sql import claim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.fleet import Fleet


# --- a wrong clock ----------------------------------------------------------------------------------------------------

HOUR = 3600
# Every library of the process gets a wrong time of day. Of the monotonic clocks, the one that also counts during a
# suspension is an hour ahead once the process has slept.
SHIM = r"""
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long skew(void)
{
    static atomic_int calls;
    const char *how = getenv("FAULTS_CLOCK");
    if (how == NULL)
        return 0;
    return strcmp(how, "jumping") == 0 ? (calls++ % 3 - 1) * 3600L : atol(how);
}

static int slept(void)
{
    const char *token = getenv("FAULTS_SLEPT");
    return token != NULL && access(token, F_OK) == 0;
}

static long step(void)
{
    const char *token = getenv("FAULTS_STEPPED");
    return token != NULL && access(token, F_OK) == 0 ? 3600 : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += skew() + step();
    if (!failed && clock == CLOCK_BOOTTIME && slept())
        now->tv_sec += 3600;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    int failed = (int)syscall(SYS_gettimeofday, now, zone);
    if (!failed)
        now->tv_sec += skew() + step();
    return failed;
}

time_t time(time_t *now)
{
    struct timespec read;
    clock_gettime(CLOCK_REALTIME, &read);
    if (now != NULL)
        *now = read.tv_sec;
    return read.tv_sec;
}
"""


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the library that fakes the time."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        server_missing("no C compiler to build a clock that is wrong")
    directory = tmp_path_factory.mktemp("shim")
    (directory / "clock.c").write_text(SHIM)
    library = directory / "clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, directory / "clock.c"], check=True)
    return library


@pytest.mark.parametrize("clock", [str(HOUR), str(-HOUR), "jumping"], ids=["fast", "slow", "jumping"])
def test_a_worker_with_a_wrong_clock_behaves_like_any_other(
    db: psycopg.Connection, fleet: Fleet, shim: Path, clock: str
) -> None:
    db.execute("CREATE TABLE reading (worker_epoch float8, read_at timestamptz)")

    def put(change: str = "", topic: str = "fault.deliver") -> int:
        message_id = enqueue(db, topic)
        if change:
            db.execute(f"UPDATE pgoutbox.message_live SET {change} WHERE id = {message_id}".encode())
        return message_id

    def put_held(lease_seconds: int) -> int:
        message_id = put()
        db.execute(PUT_SENDING, [message_id])
        db.execute("UPDATE pgoutbox.message_live SET worker = 'another' WHERE id = %s", [message_id])
        db.execute(
            "UPDATE pgoutbox.claim SET worker = 'another', lease_expires_at = now() + make_interval(secs => %s)"
            " WHERE worker = 'w'",
            [lease_seconds],
        )
        return message_id

    db.execute("ALTER TABLE pgoutbox.message DISABLE TRIGGER judge")
    due = put("available_at = now() - interval '1 s'")
    scheduled = put("available_at = now() + interval '30 min'")
    expiring = put("expires_at = now() + interval '30 min'")
    expired = put("expires_at = now() - interval '1 s'")
    leased, lapsed = put_held(1800), put_held(-1)
    clocked = put(topic="fault.clock")
    gated = put(topic="fault.gated")
    db.execute("ALTER TABLE pgoutbox.message ENABLE TRIGGER judge")
    worker = fleet.start("--once", environment={"LD_PRELOAD": str(shim), "FAULTS_CLOCK": clock}, concurrency="10")
    # The worker's lease is two seconds long, and is renewed while the handler runs.
    fleet.until(lambda: gated in fleet.deliveries(), "the handler runs")
    fleet.until(
        lambda: (
            db.execute(
                "SELECT claimed_at + interval '4 s' < now() FROM pgoutbox.message WHERE id = %s", [gated]
            ).fetchone()
            == (True,)
        ),
        "two leases have passed",
    )
    assert claim(db, topics=["fault.gated"], worker="thief") == []
    fleet.gate.touch()
    assert worker.wait(PATIENCE_SECONDS) == 0, fleet.log

    skews = [
        float(row[0])
        for row in db.execute("SELECT worker_epoch - extract(epoch FROM read_at)::float8 FROM reading").fetchall()
    ]
    if clock == "jumping":
        assert max(skews) - min(skews) > HOUR / 2
    else:
        assert all(abs(skew - int(clock)) < HOUR / 2 for skew in skews)
    assert fleet.deliveries() == dict.fromkeys([due, expiring, lapsed, gated], 1)
    assert [state_of(db, i) for i in (due, expiring, lapsed, gated)] == ["sent"] * 4
    assert (state_of(db, scheduled), row_of(db, scheduled).attempt_count) == ("pending", 0)
    assert (state_of(db, leased), row_of(db, leased).worker) == ("sending", "another")
    assert (state_of(db, expired), row_of(db, expired).skip_reason) == ("skipped", "expired")
    assert [outcome for _, outcome, _ in attempts_of(db, clocked)] == ["retry"]
    (backoff,) = db.execute(
        "SELECT m.available_at - a.ended_at FROM pgoutbox.message AS m"
        " JOIN pgoutbox.attempt_view AS a ON a.message_id = m.id WHERE m.id = %s",
        [clocked],
    ).fetchone() or (None,)
    assert backoff == timedelta(hours=1)
    (delay,) = db.execute(
        "SELECT available_at - created_at FROM pgoutbox.message WHERE topic = 'fault.later'"
    ).fetchone() or (None,)
    assert delay == timedelta(seconds=60)
    assert violations(db) == []


# --- suspended --------------------------------------------------------------------------------------------------------

FLEET_APP = "tests.support.fleet_app:outbox"
SUSPENDED_APP = "tests.support.suspending_app:outbox"  # Its workers suspend themselves after a claim.


@pytest.mark.parametrize(
    ("where", "topic"),
    [
        ("after the claim", "fault.deliver"),
        ("after the claim", "fault.renders"),
        ("in the handler", "fault.asks"),
        ("in the handler", "fault.renders"),
        ("in the handler", "fault.renders.batch"),
        ("in the handler", "fault.renders.transactional"),
    ],
)
def test_a_worker_suspended_past_its_lease_checks_it_before_the_hand_over(
    db: psycopg.Connection, fleet: Fleet, where: str, topic: str
) -> None:
    message_id = enqueue(db, topic)
    suspended = fleet.start(
        "--drain",
        app=SUSPENDED_APP if where == "after the claim" else FLEET_APP,
        lease_seconds="1",
        environment={SUSPEND_VARIABLE: where},
    )
    suspended.until_suspended()
    fleet.until(
        lambda: db.execute("SELECT lease_expires_at < now() FROM pgoutbox.in_flight_view").fetchone() == (True,),
        "the lease has ended",
    )
    assert fleet.start("--drain").wait(PATIENCE_SECONDS) == 0
    assert [line[:2] for line in fleet.hand_overs()] == [(message_id, 2)]
    before = db.execute("SELECT * FROM pgoutbox.message").fetchall()
    os.killpg(suspended.pid, signal.SIGCONT)
    assert suspended.wait(PATIENCE_SECONDS) == 0
    assert [line[:2] for line in fleet.hand_overs()] == [(message_id, 2)]
    assert db.execute("SELECT * FROM pgoutbox.message").fetchall() == before
    assert state_of(db, message_id) == "sent"
    assert violations(db) == []


def test_a_worker_checks_its_lease_before_the_hand_over_after_the_machine_slept(
    db: psycopg.Connection, fleet: Fleet, shim: Path, tmp_path: Path
) -> None:
    """For the process no time has passed: only one clock shows the suspension."""
    slept = tmp_path / "slept"
    message_id = enqueue(db, "fault.deliver")
    suspended = fleet.start(
        "--drain",
        app=SUSPENDED_APP,
        lease_seconds="600",  # A process that is stopped for one second keeps its lease.
        environment={"LD_PRELOAD": str(shim), "FAULTS_SLEPT": str(slept)},
    )
    suspended.until_suspended()
    lapse(db, message_id)
    assert fleet.start("--drain").wait(PATIENCE_SECONDS) == 0
    slept.touch()
    os.killpg(suspended.pid, signal.SIGCONT)
    assert suspended.wait(PATIENCE_SECONDS) == 0
    assert [line[:2] for line in fleet.hand_overs()] == [(message_id, 2)]
    assert state_of(db, message_id) == "sent"
    assert violations(db) == []


def test_a_worker_in_a_container_with_offset_clocks_behaves_like_any_other(
    db: psycopg.Connection, fleet: Fleet
) -> None:
    shifted = ("unshare", "--time", "--fork", "--kill-child", "--monotonic", "8640000", "--boottime", "86400000")
    try:
        subprocess.run([*shifted, "true"], check=True, capture_output=True, text=True)
    except OSError as error:
        server_missing(f"no program unshare: {error}")
    except subprocess.CalledProcessError as error:
        server_missing(f"time namespaces are not permitted: {error.stderr.strip()}")
    sent, gated = enqueue(db, "fault.deliver"), enqueue(db, "fault.gated")
    worker = fleet.start("--drain", prefix=shifted, lease_seconds="1")
    fleet.until(lambda: gated in fleet.deliveries(), "the handler runs")
    lease = db.execute("SELECT clock_timestamp() + interval '2 s'").fetchone()
    fleet.until(lambda: db.execute("SELECT clock_timestamp() > %s", lease).fetchone() == (True,), "two leases")
    assert claim(db, topics=["fault.gated"], worker="thief") == []
    fleet.gate.touch()
    assert worker.wait(PATIENCE_SECONDS) == 0, fleet.log
    assert fleet.deliveries() == {sent: 1, gated: 1}
    assert violations(db) == []


# --- the server's clock -----------------------------------------------------------------------------------------------


@pytest.fixture
def workshop() -> Iterator[Workshop]:
    """Provide servers that only these tests use."""
    with open_workshop(os.environ) as workshop:
        yield workshop


async def test_a_forward_step_of_the_server_clock_repeats_hand_overs_and_ends_each_message_once(
    workshop: Workshop, shim: Path
) -> None:
    seen: Counter[int] = Counter()
    may_end = asyncio.Event()

    def outbox(dsn: str) -> Outbox:
        # The holder has no free slot: it would claim its messages again, and let its running handlers go on.
        made = Outbox(settings_for(dsn, lease_seconds=60, poll_interval_seconds=0.2, concurrency=3))

        @made.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            seen[message.id] += 1
            await may_end.wait()

        return made

    with workshop.server() as server:
        stepped = server.home / "stepped"
        shutil.copy(shim, server.home / "clock.so")
        server.environment = {"LD_PRELOAD": str(server.home / "clock.so"), "FAULTS_STEPPED": str(stepped)}
        server.start()
        with server.connect() as db:
            ids = [enqueue(db) for _ in range(3)]
            holder, other = Worker(outbox(server.dsn)), Worker(outbox(server.dsn))
            async with running(holder):
                await until(lambda: len(seen) == 3)
                async with running(other):
                    await until_idle(other)
                    stepped.touch()
                    await until(lambda: seen == dict.fromkeys(ids, 2))
                    may_end.set()
                    await until(lambda: {state_of(db, message_id) for message_id in ids} == {"sent"})
            assert [outcome for i in ids for _, outcome, _ in attempts_of(db, i)] == ["lost"] * 3
    assert (holder.telemetry.counts[LogEvent.SENT], other.telemetry.counts[LogEvent.SENT]) == (0, 3)
    assert holder.telemetry.counts[LogEvent.LEASE_LOST] == 3


# --- time zones -------------------------------------------------------------------------------------------------------

BERLIN = ZoneInfo("Europe/Berlin")
# A local time that occurs twice (each fold), one that never occurs, and one in a zone with an odd offset.
INSTANTS = [
    datetime(2034, 10, 29, 2, 30, tzinfo=BERLIN, fold=0),
    datetime(2034, 10, 29, 2, 30, tzinfo=BERLIN, fold=1),
    datetime(2034, 3, 26, 2, 30, tzinfo=BERLIN),
    datetime(2034, 7, 1, 12, tzinfo=ZoneInfo("Pacific/Chatham")),
]
MONTH = 30 * 86_400
HALF_A_YEAR = 180 * 86_400


@pytest.fixture
def in_zone(db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Sets the time zone of the database and of this process."""

    def set_zones(database: str, process: str) -> None:
        db.execute(
            psycopg.sql.SQL("ALTER DATABASE {} SET timezone = {}").format(
                psycopg.sql.Identifier(db.info.dbname), psycopg.sql.Literal(database)
            )
        )
        monkeypatch.setenv("TZ", process)
        time.tzset()

    yield set_zones
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("database_zone", "process_zone"),
    [
        ("America/New_York", "UTC"),
        ("Europe/Berlin", "Pacific/Chatham"),
        ("Pacific/Chatham", "America/New_York"),
        ("UTC", "Europe/Berlin"),
    ],
)
async def test_points_in_time_do_not_depend_on_time_zones(
    dsn: str,
    db: psycopg.Connection,
    in_zone: Callable[[str, str], None],
    database_zone: str,
    process_zone: str,
) -> None:
    in_zone(database_zone, process_zone)
    outbox = Outbox(settings_for(dsn))
    seen: dict[int, datetime] = {}

    @outbox.handler("greet", retry=RetryPolicy.steps(1))
    async def greet(message: Message, ctx: Context) -> None:
        seen[message.id] = message.available_at
        raise Snooze(MONTH)

    with psycopg.connect(dsn) as producer:
        assert producer.execute("SHOW timezone").fetchone() == (database_zone,)
        scheduled = [outbox.on(producer).enqueue("greet", {}, available_at=instant).id for instant in INSTANTS]
        soon = outbox.on(producer).enqueue("greet", {}, available_at=datetime.now(UTC) + timedelta(minutes=30)).id
        local = datetime.now(ZoneInfo(process_zone)) - timedelta(minutes=30)
        snoozed = outbox.on(producer).enqueue("greet", {}, available_at=local).id
        # A time in the past means now.
        ((began,),) = producer.execute("SELECT extract(epoch FROM now())::float8").fetchall()
        # Half a year includes a daylight-saving change in any zone that has them. The number of seconds stays the same.
        delayed = outbox.on(producer).enqueue("greet", {}, delay=HALF_A_YEAR).id
    await Worker(outbox).run_once()
    assert {i: instant.timestamp() for i, instant in seen.items()} == {snoozed: began}
    stored: dict[int, float] = dict(
        db.execute("SELECT id, extract(epoch FROM available_at)::float8 FROM pgoutbox.message").fetchall()
    )
    assert [stored[i] for i in scheduled] == [instant.timestamp() for instant in INSTANTS]
    assert stored.keys() == {*scheduled, soon, snoozed, delayed}
    (snooze_seconds,) = db.execute(
        "SELECT extract(epoch FROM m.available_at)::float8 - extract(epoch FROM a.ended_at)::float8"
        " FROM pgoutbox.message AS m JOIN pgoutbox.attempt_view AS a ON a.message_id = m.id"
    ).fetchone() or (0,)
    (delay_seconds,) = db.execute(
        "SELECT extract(epoch FROM available_at)::float8 - extract(epoch FROM created_at)::float8"
        " FROM pgoutbox.message WHERE id = %s",
        [delayed],
    ).fetchone() or (0,)
    assert (round(snooze_seconds, 3), round(delay_seconds, 3)) == (MONTH, HALF_A_YEAR)

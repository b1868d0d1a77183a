"""Each time of a schedule enqueues its message once, whatever the number of workers, crashes and clocks."""

from __future__ import annotations

import json
import signal
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import psycopg
import pytest
from psycopg.types.json import Jsonb

from pgoutbox import ConfigurationError, Context, Every, Message, MissingExtraError, Outbox, Topic, Worker
from pgoutbox.operations import Operator
from tests.support.command_line import run_process
from tests.support.outbox_actions import rows_of, running, settings_for, state_of
from tests.support.waiting import until, wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.conftest import Connect
    from tests.promises.conftest import StartWorker
    from tests.support.many_databases import Databases

APPLICATION: Final = """
    from pgoutbox import Context, Every, Message, Outbox

    outbox = Outbox()

    for number in range(20):
        outbox.schedule(Every(seconds=1), topic="tick", payload=number, name=f"tick-{number}", missed="all")


    @outbox.handler("tick")
    async def tick(message: Message, ctx: Context) -> None: ...
"""
# The leap days: none begins while a test runs, and the last one has passed.
LEAP_DAYS: Final = "0 0 29 2 *"
MANY: Final = {f"h{number}": "x" for number in range(63)}  # A tick adds two.
TICKS: Final = """
SELECT headers ->> 'schedule', (headers ->> 'scheduled-for')::timestamptz
FROM pgoutbox.message
WHERE topic = 'tick'
ORDER BY 1, 2
"""


def outbox_of(dsn: str, **settings: object) -> Outbox:
    """Return an outbox with a handler of the topic `tick`."""
    outbox = Outbox(settings_for(dsn, **settings))

    @outbox.handler("tick")
    async def tick(message: Message, ctx: Context) -> None: ...

    return outbox


def ticks(db: psycopg.Connection) -> Sequence[tuple[str, datetime]]:
    return db.execute(TICKS.encode()).fetchall()


def schedule(db: psycopg.Connection, name: str = "s", rule: str = LEAP_DAYS, **options: object) -> None:
    """Create a schedule by SQL."""
    given = {"name": name, "rule": rule, "message": Jsonb({"topic": "tick", "payload": 1}), **options}
    names = ", ".join(f"{option} => %({option})s" for option in given)
    db.execute(f"SELECT pgoutbox.set_schedule({names})".encode(), given)


def message(db: psycopg.Connection, columns: str) -> tuple[object, ...]:
    """Return these columns of the only message."""
    (row,) = db.execute(f"SELECT {columns} FROM pgoutbox.message".encode()).fetchall()
    return row


def column(db: psycopg.Connection, name: str, of: str = "s") -> object:
    ((value,),) = db.execute(f"SELECT {name} FROM pgoutbox.schedule WHERE name = %s".encode(), [of]).fetchall()
    return value


def let_pass(db: psycopg.Connection, name: str = "s", since: int = 2024) -> None:
    """Make a schedule as if its leap days since this year had come while no worker ran."""
    late = "UPDATE pgoutbox.schedule SET next_at = make_timestamptz(%s, 2, 29, 0, 0, 0, 'UTC') WHERE name = %s"
    db.execute(late, [since, name])


# --- once -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_of_many_workers_with_crashes_and_pauses_each_time_is_enqueued_once(
    db: psycopg.Connection, start_worker: StartWorker
) -> None:
    workers = [start_worker(APPLICATION) for _ in range(5)]
    for killed in workers[:2]:
        seen = len(ticks(db))
        wait_until(lambda seen=seen: len(ticks(db)) >= seen + 40, lambda: workers[-1].log)  # type: ignore[misc]
        killed.send_signal(signal.SIGKILL)
    workers[2].send_signal(signal.SIGSTOP)
    seen = len(ticks(db))
    wait_until(lambda: len(ticks(db)) >= seen + 60, lambda: workers[-1].log)
    workers[2].send_signal(signal.SIGCONT)
    wait_until(lambda: len(ticks(db)) >= seen + 120, lambda: workers[-1].log)
    for worker in workers[2:]:
        assert worker.stop() == 0
    found = ticks(db)
    assert len({name for name, _ in found}) == 20
    for number in range(20):
        times = [at for name, at in found if name == f"tick-{number}"]
        assert times == [times[0] + timedelta(seconds=after) for after in range(len(times))]


async def test_workers_that_read_the_same_time_enqueue_it_once(dsn: str, db: psycopg.Connection) -> None:
    schedule(db)
    await Worker(outbox_of(dsn)).run_once()
    let_pass(db)
    (known,) = db.execute("SELECT next_at FROM pgoutbox.schedule").fetchone() or (None,)
    tick = "SELECT pgoutbox._tick_schedule('s', 1, %s, ARRAY[%s]::timestamptz[], now() + interval '1 min')"
    assert [db.execute(tick, [known, known]).fetchone() != (None,) for _ in range(2)] == [True, False]
    assert len(ticks(db)) == 1


def test_a_time_is_the_same_in_each_time_zone_of_a_session(db: psycopg.Connection) -> None:
    schedule(db)
    for zone in ("UTC", "Asia/Kolkata"):
        db.execute("SELECT set_config('timezone', %s, false)", [zone])
        db.execute("SELECT pgoutbox._tick_schedule('s', 1, NULL, ARRAY[timestamptz '2026-01-31 07:00Z'], NULL)")
        db.execute("UPDATE pgoutbox.schedule SET ended_at = NULL")
    assert message(db, "dedupe_key") == ("schedule s 2026-01-31T07:00:00Z",)


async def test_a_time_that_comes_again_is_not_enqueued_again(dsn: str, db: psycopg.Connection) -> None:
    """Someone has set the time back by hand, or the server's clock has gone back."""
    schedule(db, missed="all")
    for since in (2024, 2020, 2020, 2024):
        await Worker(outbox_of(dsn)).run_once()
        let_pass(db, since=since)
    await Worker(outbox_of(dsn)).run_once()
    assert [at.year for _, at in ticks(db)] == [2020, 2024]


async def test_a_tick_that_is_rolled_back_is_made_again(dsn: str, db: psycopg.Connection) -> None:
    schedule(db)
    await Worker(outbox_of(dsn)).run_once()
    let_pass(db)
    db.execute("ALTER TABLE pgoutbox.message_live ADD CONSTRAINT refused CHECK (topic <> 'tick') NOT VALID")
    before = column(db, "next_at")
    await Worker(outbox_of(dsn)).run_once()
    assert (ticks(db), column(db, "next_at")) == ([], before)
    assert "refused" in str(column(db, "problem"))
    db.execute("ALTER TABLE pgoutbox.message_live DROP CONSTRAINT refused")
    await Worker(outbox_of(dsn)).run_once()
    assert ticks(db) == [], "it is tried again in a minute"
    db.execute("UPDATE pgoutbox.schedule SET retry_at = now()")
    await Worker(outbox_of(dsn)).run_once()
    assert (len(ticks(db)), column(db, "problem"), column(db, "retry_at")) == (1, None, None)


async def test_schedules_that_are_refused_stop_no_other(dsn: str, db: psycopg.Connection) -> None:
    for number in range(120):  # More than a worker looks at once.
        schedule(db, f"bad-{number}", message=Jsonb({"topic": "tick", "payload": 1, "owner": "bad"}))
    schedule(db, "good")
    await Worker(outbox_of(dsn)).run_once()
    for name, since in (("bad", 2020), ("good", 2024)):
        for (one,) in db.execute("SELECT name FROM pgoutbox.schedule WHERE starts_with(name, %s)", [name]).fetchall():
            let_pass(db, one, since)
    db.execute("ALTER TABLE pgoutbox.message_live ADD CONSTRAINT refused CHECK (owner <> 'bad') NOT VALID")
    worker = Worker(outbox_of(dsn))
    await worker.run_once()
    assert [name for name, _ in ticks(db)] == ["good"]
    assert {str(event): count for event, count in worker.telemetry.counts.items()}["schedule_refused"] == 120


async def test_a_schedule_of_the_code_that_is_refused_stops_no_other(dsn: str, db: psycopg.Connection) -> None:
    db.execute("ALTER TABLE pgoutbox.schedule ADD CONSTRAINT refused CHECK (name <> 'bad')")
    outbox = outbox_of(dsn)
    for name in ("bad", "good"):
        outbox.schedule(LEAP_DAYS, topic="tick", payload=1, name=name)
    schedule(db, "other")
    worker = Worker(outbox)
    await worker.run_once()
    known = db.execute("SELECT name, next_at > now() FROM pgoutbox.schedule ORDER BY name")
    assert known.fetchall() == [("good", True), ("other", True)]
    assert {str(event): count for event, count in worker.telemetry.counts.items()}["schedule_refused"] == 1


async def test_an_open_transaction_on_a_schedule_holds_up_no_other(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    for name in ("held", "free"):
        schedule(db, name)
    await Worker(outbox_of(dsn)).run_once()
    for name in ("held", "free"):
        let_pass(db, name)
    writer = connect(autocommit=False)
    writer.execute("SELECT FROM pgoutbox.schedule WHERE name = 'held' FOR UPDATE")
    await Worker(outbox_of(dsn)).run_once()
    assert [name for name, _ in ticks(db)] == ["free"]
    writer.rollback()
    await Worker(outbox_of(dsn)).run_once()
    assert [name for name, _ in ticks(db)] == ["free", "held"]


@pytest.mark.slow
async def test_a_schedule_does_not_wait_for_the_time_of_another(dsn: str, db: psycopg.Connection) -> None:
    schedule(db, "rare", "0 0 29 2 *")
    schedule(db, "often", "every 1")
    outbox = outbox_of(dsn)
    await Worker(outbox).run_once()
    async with running(Worker(outbox)):
        await until(lambda: len(ticks(db)) >= 10)  # With half a minute between two, the patience ends before.


async def test_a_run_enqueues_all_that_has_come(dsn: str, db: psycopg.Connection) -> None:
    for number in range(130):
        schedule(db, f"s{number}", "0 0 1 1 *")
    await Worker(outbox_of(dsn)).run_once()
    db.execute("UPDATE pgoutbox.schedule SET rule = 'every 3600', next_at = next_at - interval '3 years'")
    await Worker(outbox_of(dsn)).run_once()
    assert len(ticks(db)) == 130


# What another session may do between the look of a worker and its tick.
CHANGES: Final = {
    "changed": "SELECT pgoutbox.set_schedule('s', '0 0 29 2 *', '{\"topic\": \"tick\", \"payload\": 2}')",
    "paused": "SELECT pgoutbox.pause_schedule('s')",
    "ended": "UPDATE pgoutbox.schedule SET ended_at = now(), next_at = NULL",
    "deleted": "SELECT pgoutbox.unset_schedule('s')",
}


@pytest.mark.parametrize("is_new", [False, True], ids=["known", "new"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_tick_of_a_schedule_that_has_changed_does_nothing(db: psycopg.Connection, change: str, is_new: bool) -> None:
    schedule(db)
    known = None
    if not is_new:
        known = datetime.now(UTC).replace(microsecond=0)
        db.execute("UPDATE pgoutbox.schedule SET next_at = %s", [known])
    db.execute(CHANGES[change].encode())
    rows = db.execute("SELECT * FROM pgoutbox.schedule").fetchall()
    tick = "SELECT pgoutbox._tick_schedule('s', 1, %s, ARRAY[now()], now() + interval '1 min')"
    assert db.execute(tick, [known]).fetchone() == (None,)
    assert (ticks(db), db.execute("SELECT * FROM pgoutbox.schedule").fetchall()) == ([], rows)


# --- missed times -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("missed", "expected"), [("latest", 1), ("all", 7), ("none", 0)])
async def test_what_becomes_of_times_while_no_worker_ran(
    dsn: str, db: psycopg.Connection, missed: str, expected: int
) -> None:
    schedule(db, missed=missed)
    await Worker(outbox_of(dsn)).run_once()
    let_pass(db, since=2000)
    await Worker(outbox_of(dsn)).run_once()
    assert len(ticks(db)) == expected
    assert column(db, "next_at > now()") is True


async def test_a_time_that_has_just_come_is_not_missed(dsn: str, db: psycopg.Connection) -> None:
    schedule(db, rule="every 1", missed="none")
    db.execute("UPDATE pgoutbox.schedule SET changed_at = now() - interval '10 min'")
    await Worker(outbox_of(dsn)).run_once()
    (_, at), *_ = ticks(db)  # The run may take more than a second.
    assert db.execute("SELECT %s > now() - interval '1 min'", [at]).fetchone() == (True,)


@pytest.mark.parametrize("begun_by", ["new", "resumed", "changed"])
@pytest.mark.parametrize(("missed", "expected"), [("latest", 1), ("all", 7)])
async def test_the_first_time_may_pass_before_a_worker_looks(
    dsn: str, db: psycopg.Connection, missed: str, expected: int, begun_by: str
) -> None:
    schedule(db, missed=missed)
    if begun_by == "resumed":
        Operator(db).pause_schedule("s")
        Operator(db).resume_schedule("s")
    elif begun_by == "changed":
        await Worker(outbox_of(dsn)).run_once()
        db.execute("UPDATE pgoutbox.schedule SET next_at = '2000-02-28'")  # Of another rule.
        schedule(db, missed=missed, rule="0 0 29 feb *")
    if begun_by != "changed":
        db.execute("UPDATE pgoutbox.schedule SET changed_at = '2000-02-28'")
    await Worker(outbox_of(dsn)).run_once()
    assert len(ticks(db)) == expected


async def test_a_message_with_a_delay_is_due_after_it(dsn: str, db: psycopg.Connection) -> None:
    outbox = outbox_of(dsn)
    schedule(db, "sql", "every 60", message=Jsonb({"topic": "tick", "payload": 1, "delay": 600}))
    outbox.schedule(Every(minutes=1), topic="tick", payload=1, name="code", delay=timedelta(minutes=10))
    await Worker(outbox).run_once()
    db.execute("UPDATE pgoutbox.schedule SET next_at = date_trunc('minute', now())")
    await Worker(outbox).run_once()
    delays = "SELECT DISTINCT available_at - (headers ->> 'scheduled-for')::timestamptz FROM pgoutbox.message"
    assert {name for name, _ in ticks(db)} == {"sql", "code"}
    assert db.execute(delays).fetchall() == [(timedelta(minutes=10),)]


@pytest.mark.parametrize(("missed", "expected"), [("latest", 1), ("all", 4)])
async def test_times_before_a_past_end_are_not_lost(
    dsn: str, db: psycopg.Connection, missed: str, expected: int
) -> None:
    schedule(db, missed=missed, until_at=datetime(2040, 1, 1, tzinfo=UTC))
    await Worker(outbox_of(dsn)).run_once()
    let_pass(db, since=2000)
    db.execute("UPDATE pgoutbox.schedule SET until_at = '2012-03-01'")
    await Worker(outbox_of(dsn)).run_once()
    assert (len(ticks(db)), column(db, "ended_at IS NOT NULL")) == (expected, True)


async def test_a_late_message_says_for_which_time_it_is(dsn: str, db: psycopg.Connection) -> None:
    schedule(db)
    await Worker(outbox_of(dsn)).run_once()
    let_pass(db)
    await Worker(outbox_of(dsn)).run_once()
    ((name, at),) = ticks(db)
    assert (name, at) == ("s", column(db, "last_at"))
    sent = message(db, "id, dedupe_key")
    assert sent == (column(db, "last_message_id"), f"schedule s {at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}")


async def test_no_message_comes_after_the_last_time(dsn: str, db: psycopg.Connection) -> None:
    schedule(db, until_at=datetime(2040, 1, 1, tzinfo=UTC), missed="all")
    await Worker(outbox_of(dsn)).run_once()
    let_pass(db, since=2000)
    db.execute("UPDATE pgoutbox.schedule SET until_at = '2008-02-29Z'")
    await Worker(outbox_of(dsn)).run_once()
    assert [at.year for _, at in ticks(db)] == [2000, 2004, 2008]
    assert column(db, "ended_at IS NOT NULL AND next_at IS NULL") is True
    schedule(db, missed="all")
    await Worker(outbox_of(dsn)).run_once()
    assert column(db, "ended_at IS NULL AND next_at > now()") is True


async def test_the_jitter_of_a_schedule_is_always_the_same(dsn: str, db: psycopg.Connection) -> None:
    for name in ("a", "b"):
        schedule(db, name, "every 60", jitter=timedelta(days=1))
    await Worker(outbox_of(dsn)).run_once()
    for minutes in (0, 1):
        late = "UPDATE pgoutbox.schedule SET next_at = date_trunc('minute', now()) - make_interval(mins => %s)"
        db.execute(late, [minutes])
        await Worker(outbox_of(dsn)).run_once()
    delays = "SELECT DISTINCT available_at - (headers ->> 'scheduled-for')::timestamptz FROM pgoutbox.message"
    found = [delay for (delay,) in db.execute(delays.encode()).fetchall()]
    assert len(found) == 2
    assert all(timedelta() <= delay < timedelta(days=1) for delay in found)


# --- schedules in code ------------------------------------------------------------------------------------------------


async def test_a_schedule_in_code_belongs_to_the_workers_that_have_it(dsn: str, db: psycopg.Connection) -> None:
    outbox = outbox_of(dsn)
    outbox.schedule(LEAP_DAYS, topic="tick", payload={"a": 1}, name="s", owner="o", destination="mailto:a@example.org")
    await Worker(outbox).run_once()
    let_pass(db)
    late = column(db, "next_at")
    await Worker(outbox_of(dsn)).run_once()  # Of another application, or of a release without the schedule.
    assert (ticks(db), column(db, "next_at")) == ([], late)
    await Worker(outbox).run_once()
    expected = ({"a": 1}, "o", "mailto:a@example.org", "sent")
    assert message(db, "payload, owner, destination, state") == expected


async def test_a_restart_keeps_the_next_time_and_a_new_rule_begins_anew(dsn: str, db: psycopg.Connection) -> None:
    def outbox(rule: str | Every, payload: object = 1) -> Outbox:
        one = outbox_of(dsn)
        one.schedule(rule, topic="tick", payload=payload, name="s")
        return one

    await Worker(outbox("0 3 * * *")).run_once()
    db.execute("UPDATE pgoutbox.schedule SET next_at = next_at + interval '1 day'")
    far = column(db, "next_at")
    await Worker(outbox("0 3 * * *")).run_once()
    assert (column(db, "next_at"), column(db, "revision")) == (far, 1)
    await Worker(outbox("0 3 * * *", 2)).run_once()
    assert (column(db, "next_at"), column(db, "revision")) == (far, 2)
    await Worker(outbox(Every(hours=1))).run_once()
    assert column(db, "next_at <= now() + interval '1 h'") is True


async def test_the_definition_of_the_topic_completes_the_message(dsn: str, db: psycopg.Connection) -> None:
    outbox = outbox_of(dsn)
    topic = outbox.define(Topic("note", queue="slow", coalesce_key=lambda payload: f"k{payload['n']}", version=2))
    outbox.schedule(LEAP_DAYS, topic=topic, payload={"n": 7})
    await Worker(outbox).run_once()
    let_pass(db, "note")
    await Worker(outbox).run_once()
    assert message(db, "topic, queue, coalesce_key, payload_version") == ("note", "slow", "k7", 2)


def test_a_worker_without_cronsim_refuses_the_schedules_of_its_code(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = outbox_of(dsn)
    outbox.schedule(Every(hours=1), topic="tick", payload=1)
    monkeypatch.setattr("pgoutbox.worker.schedules.ticker.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'pgoutbox\[schedules\]'"):
        Worker(outbox)


def test_a_topic_whose_messages_cannot_be_scheduled_is_refused(dsn: str) -> None:
    outbox = outbox_of(dsn)
    for topic, error in (
        (Topic("sealed", encrypted=True), "its topic is encrypted"),
        (Topic("once", dedupe_key=str), "its topic has a dedupe_key"),
    ):
        outbox.schedule(Every(hours=1), topic=outbox.define(topic), payload="p")
        with pytest.raises(ConfigurationError, match=f"^schedule '{topic.name}': {error}"):
            Worker(outbox)
        outbox._schedules.clear()


# --- schedules in SQL -------------------------------------------------------------------------------------------------


async def test_a_running_worker_finds_a_new_schedule_and_is_prompt(dsn: str, db: psycopg.Connection) -> None:
    outbox = outbox_of(dsn, poll_interval_seconds=3600)
    async with running(Worker(outbox)):
        schedule(db, rule="every 1")
        await until(lambda: len(ticks(db)) >= 3)
        await until(lambda: all(state_of(db, row.id) == "sent" for row in rows_of(db)[:3]))


def test_a_worker_of_many_databases_is_prompt_in_each(databases: Databases, start_worker: StartWorker) -> None:
    databases.add("one", "two")
    for name in ("one", "two"):
        schedule(databases[name], rule="every 1")
    worker = start_worker(
        APPLICATION.replace("range(20)", "range(0)"), dsn=None, dsns=str(databases.file), poll_interval_seconds="3600"
    )
    sent = "SELECT count(*) >= 3 FROM pgoutbox.message WHERE state = 'sent'"
    for name in ("one", "two"):
        wait_until(lambda name=name: databases[name].execute(sent).fetchone() == (True,), lambda: worker.log)  # type: ignore[misc]
    assert worker.stop() == 0


async def test_a_wrong_rule_is_named_and_stops_no_other(dsn: str, db: psycopg.Connection) -> None:
    schedule(db, "bad", "61 * * * *")
    schedule(db, "nowhere", "0 7 * * *", timezone="EST5EDT4")
    schedule(db, "good")
    outbox = outbox_of(dsn)
    await Worker(outbox).run_once()
    for name in ("bad", "nowhere", "good"):
        let_pass(db, name)
    worker = Worker(outbox)
    await worker.run_once()
    assert {str(event) for event in worker.telemetry.counts} & {"schedule_refused", "schedules_failed"} == set()
    assert [name for name, _ in ticks(db)] == ["good"]
    assert column(db, "problem", "bad") == "the rule '61 * * * *': Bad minute"
    assert column(db, "problem", "nowhere") == "the time zone 'EST5EDT4' is unknown"
    found = [json.loads(line) for line in run_process("doctor", "--json", dsn=dsn).out.splitlines()]
    notes = {one["about"]["schedule"]: one["what"] for one in found if one["code"] == "schedule-idle"}
    assert notes.keys() == {"bad", "nowhere"}
    schedule(db, "bad", "1 * * * *")
    await Worker(outbox).run_once()
    assert (column(db, "problem", "bad"), column(db, "next_at > now()", "bad")) == (None, True)


def test_the_doctor_names_a_schedule_that_no_worker_serves(dsn: str, db: psycopg.Connection) -> None:
    schedule(db)
    db.execute("UPDATE pgoutbox.schedule SET changed_at = now() - interval '3 min'")
    found = [json.loads(line) for line in run_process("doctor", "--json", dsn=dsn).out.splitlines()]
    (note,) = [one for one in found if one["code"] == "schedule-idle"]
    assert note["what"] == "schedule s: no worker has served it for 3 min"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"name": "No"}, "name: must be 1 to 63"),
        ({"name": None}, "name: must not be null"),
        ({"rule": "0 7 * *"}, "rule: must be five fields of cron"),
        ({"rule": "every 0"}, "rule: must be five fields of cron"),
        ({"timezone": "Nowhere/City"}, 'time zone "Nowhere/City" not recognized'),
        ({"missed": "some"}, "missed: must be latest, all or none"),
        ({"jitter": timedelta(days=2)}, "jitter: must be from 0 to a day"),
        ({"message": Jsonb({"topic": "tick"})}, "message\\[0\\].payload: must be given"),
        ({"rule": f"{'1,' * 100}1 * * * *"}, "rule: must not be longer than 200"),
        ({"message": Jsonb([])}, "message: must be a JSON object"),
        ({"message": Jsonb({"topic": "tick", "payload": 1, "headers": 1})}, "headers: must be a JSON object"),
        ({"message": Jsonb({"topic": "tick", "payload": 1, "headers": MANY})}, "headers: must not have more than 64"),
        ({"message": Jsonb({"topic": "No", "payload": 1})}, "topic: must be 1 to 63"),
        ({"message": Jsonb({"topic": "tick", "payload": 1, "dedupe_key": "k"})}, "message: must not have dedupe_key"),
        ({"message": Jsonb({"topic": "tick", "payload": 1, "color": "red"})}, "unknown option color"),
    ],
)
def test_a_mistake_is_refused_by_name_and_changes_nothing(
    db: psycopg.Connection, options: dict[str, object], error: str
) -> None:
    with pytest.raises(psycopg.Error, match=error):
        schedule(db, **options)  # type: ignore[arg-type]
    assert db.execute("SELECT FROM pgoutbox.schedule").fetchall() == []


def test_a_schedule_is_part_of_its_transaction(db: psycopg.Connection, connect: Connect) -> None:
    writer = connect(autocommit=False)
    schedule(writer)
    writer.rollback()
    assert db.execute("SELECT FROM pgoutbox.schedule_view").fetchall() == []
    schedule(db)
    assert db.execute("SELECT pgoutbox.unset_schedule('s'), pgoutbox.unset_schedule('s')").fetchone() == (True, False)


def test_an_erasure_deletes_the_schedules_of_the_person(db: psycopg.Connection) -> None:
    person = {
        "topic": "tick",
        "payload": {"mail": "ada@example.org"},
        "owner": "ada",
        "destination": "mailto:ada@example.org",
    }
    for name, message in (
        ("hers", person),
        ("his", {**person, "owner": "bob", "destination": "mailto:bob@example.org"}),
    ):
        schedule(db, name, message=Jsonb(message))
    mentions = "SELECT relation, field FROM pgoutbox.mentions(ARRAY['ada@example.org'])"
    assert set(db.execute(mentions).fetchall()) == {("schedule", "message")}
    db.execute("SELECT * FROM pgoutbox.erase(ids => '{1}')")
    assert db.execute("SELECT count(*) FROM pgoutbox.schedule").fetchone() == (2,)
    Operator(db).erase(owner="ada")
    assert db.execute("SELECT name FROM pgoutbox.schedule").fetchall() == [("his",)]
    db.execute("SELECT * FROM pgoutbox.erase(destination => 'bob@example.org')")
    assert db.execute("SELECT name FROM pgoutbox.schedule").fetchall() == []


# --- acts -------------------------------------------------------------------------------------------------------------


async def test_a_paused_schedule_lets_its_times_pass(dsn: str, db: psycopg.Connection) -> None:
    schedule(db, missed="all")
    await Worker(outbox_of(dsn)).run_once()
    let_pass(db)
    operator = Operator(db)
    assert [operator.pause_schedule("s"), operator.pause_schedule("s")] == [True, False]
    await Worker(outbox_of(dsn)).run_once()
    assert [operator.resume_schedule("s"), operator.resume_schedule("s")] == [True, False]
    await Worker(outbox_of(dsn)).run_once()
    assert (ticks(db), column(db, "next_at > now()")) == ([], True)
    acts = db.execute("SELECT action, details FROM pgoutbox.audit ORDER BY id").fetchall()
    assert acts == [("pause", {"schedule": "s"}), ("resume", {"schedule": "s"})]


def test_the_command_line_lists_pauses_and_runs_schedules(dsn: str, db: psycopg.Connection) -> None:
    assert run_process("schedule", "list", dsn=dsn).out == "no schedules\n"
    schedule(db, "morning", "0 7 * * mon-fri", timezone="Europe/Berlin")
    assert run_process("schedule", "pause", "morning", dsn=dsn).out == "schedule morning: paused\n"
    assert run_process("schedule", "pause", "morning", dsn=dsn).exit_code == 1
    done = run_process("schedule", "run", "morning", dsn=dsn)
    assert done.out == "schedule morning: enqueued message 1\n"
    assert message(db, "topic, dedupe_key") == ("tick", None)
    assert "paused" in run_process("schedule", "list", dsn=dsn).out
    assert run_process("schedule", "resume", "morning", dsn=dsn).out == "schedule morning: resumed\n"
    (one,) = json.loads(run_process("schedule", "list", "--json", dsn=dsn).out)
    assert (one["name"], one["topic"], one["timezone"], len(one["next_times"])) == (
        "morning",
        "tick",
        "Europe/Berlin",
        5,
    )
    schedule(db, "wrong", "61 * * * *")  # No worker has looked at it.
    assert [one["next_times"] for one in json.loads(run_process("schedule", "list", "w", "--json", dsn=dsn).out)] == [
        []
    ]
    for act, reason in (
        ("run", "there is no such schedule"),
        ("pause", "there is no such schedule, or it is paused already"),
        ("resume", "there is no such schedule, or it is not paused"),
    ):
        missing = run_process("schedule", act, "evening", dsn=dsn)
        told = f"error: schedule evening: {reason}; `pgoutbox schedule list` shows all\n"
        assert (missing.exit_code, missing.err) == (1, told)

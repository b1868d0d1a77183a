"""Tests partitions by time: created ahead, dropped as a whole when no rule keeps any of their messages, without
blocking others."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgoutbox.database import operator_connection, sql
from pgoutbox.message import AttemptOutcome, State
from pgoutbox.operations import Operator, retention
from pgoutbox.operations.retention import MaintenanceRun, PartitionCache, read_maintenance_facts
from pgoutbox.settings import load_settings
from tests.support.messages import ADD_ATTEMPT, put
from tests.support.outbox_actions import enqueue, redrive, row_of, rows_of
from tests.support.partitions import add_partition, drop_partitions, partitions_of, tables_of_partitions
from tests.support.races import until_blocked
from tests.support.waiting import wait_until
from tests.support.worker_sql import End, claim, finish, finish_sent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Connect

SPAWN = multiprocessing.get_context("spawn")
DAY = timedelta(days=1)
MAKE = "SELECT pgoutbox.make_partition()"
DROP = "SELECT pgoutbox._drop_partition(%s)"
BY_TIME = ("sent", "skipped", "cancelled")


@pytest.fixture
def operator(dsn: str) -> Iterator[psycopg.Connection]:
    """Open the connection of an operator, which commits."""
    with operator_connection.connect(load_settings(dsn=dsn)) as connection:
        yield connection


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat a call immediately while it meets a lock."""
    monkeypatch.setattr(retention, "_LOCK_PAUSE_SECONDS", 0)


def keep(db: psycopg.Connection, how_long: timedelta | None = 30 * DAY, topic: str = "*") -> None:
    """Set a retention rule for every state that is partitioned by time."""
    for state in BY_TIME:
        Operator(db).set_retention(topic, state, how_long)


def make_all(db: psycopg.Connection) -> list[str]:
    """Create missing partitions, and return their names."""
    made = []
    while (name := db.execute(MAKE).fetchall()[0][0]) is not None:
        made.append(name)
    return made


def table_of(db: psycopg.Connection, message_id: int) -> str:
    """Return the partition that a message is in."""
    ((name,),) = db.execute(
        "SELECT relname::text FROM pgoutbox.message AS m JOIN pg_class AS c ON c.oid = m.tableoid WHERE m.id = %s",
        [message_id],
    ).fetchall()
    return str(name)


def send(db: psycopg.Connection) -> int:
    """Enqueue a message and finish it as sent."""
    message_id = enqueue(db)
    claim(db)
    assert finish_sent(db, (message_id, 1)) == {message_id}
    return message_id


def mutate(db: psycopg.Connection, function: str, guard: str, instead: str = "") -> None:
    """Remove a guard from a function of the schema."""
    ((definition,),) = db.execute("SELECT pg_get_functiondef(%s::regproc)", [f"pgoutbox.{function}"]).fetchall()
    assert definition.count(guard) == 1
    db.execute(definition.replace(guard, instead).encode())


class TestAhead:
    def test_after_migrate_the_next_days_have_their_partitions(self, db: psycopg.Connection) -> None:
        ((is_gapless, covers_now, covers_week),) = db.execute(
            """
            SELECT
                bool_and(p.lower_at = p.before_at) IS NOT FALSE,
                bool_or(now() >= p.lower_at AND now() < p.upper_at),
                max(p.upper_at) >= date_trunc('day', now(), 'UTC') + interval '7 days'
            FROM (SELECT *, lag(upper_at) OVER (ORDER BY lower_at) AS before_at FROM pgoutbox.partitions()) AS p
            """
        ).fetchall()
        assert (is_gapless, covers_now, covers_week) == (True, True, True)
        assert db.execute(MAKE).fetchall() == [(None,)]
        assert table_of(db, send(db)) == partitions_of(db)[0]

    @pytest.mark.parametrize(
        ("rules", "days"),
        [
            ([], 7),
            ([(state, 62 * DAY) for state in BY_TIME], 1),
            ([(state, 63 * DAY) for state in BY_TIME], 7),
            ([("sent", 30 * DAY), ("skipped", 30 * DAY)], 7),
            ([("sent", 30 * DAY), ("skipped", 30 * DAY), ("cancelled", None)], 7),
        ],
    )
    def test_partitions_are_days_if_all_rules_are_below_two_months_and_weeks_otherwise(
        self, db: psycopg.Connection, rules: list[tuple[str, timedelta | None]], days: int
    ) -> None:
        drop_partitions(db)
        for rule in rules:
            Operator(db).set_retention("*", *rule)
        made = make_all(db)
        assert made == sorted(made) == partitions_of(db)
        # The first one begins today. On a Monday it is a whole week, and the only one that is created ahead.
        widths = [width for (width,) in db.execute("SELECT upper_at - lower_at FROM pgoutbox.partitions()").fetchall()]
        assert widths[0] <= days * DAY
        assert set(widths[1:] or widths) == {days * DAY}

    def test_times_are_utc_in_any_session(self, db: psycopg.Connection) -> None:
        expected = partitions_of(db)
        drop_partitions(db)
        for setting in ("timezone = 'Pacific/Kiritimati'", "datestyle = 'German, DMY'", "search_path = pg_temp"):
            db.execute(f"SET {setting}".encode())
        make_all(db)
        assert partitions_of(db) == expected
        db.execute("RESET ALL")
        ((is_midnight,),) = db.execute(
            "SELECT bool_and(date_trunc('day', lower_at, 'UTC') = lower_at) FROM pgoutbox.partitions()"
        ).fetchall()
        assert is_midnight is True

    def test_finishing_succeeds_without_a_partition(self, db: psycopg.Connection) -> None:
        drop_partitions(db)
        assert table_of(db, send(db)) == "message_done_default"

    def test_a_day_with_messages_in_the_default_partition_gets_no_partition(self, db: psycopg.Connection) -> None:
        today = partitions_of(db)[0]
        drop_partitions(db)
        message_id = send(db)
        made = make_all(db)
        assert made
        assert today not in made
        assert table_of(db, message_id) == table_of(db, send(db)) == "message_done_default"

    @pytest.mark.parametrize("days", [3, 30])
    def test_days_before_partitions_created_by_a_fast_clock_get_theirs_later(
        self, db: psycopg.Connection, days: int
    ) -> None:
        drop_partitions(db)
        add_partition(db, -days, days=7)
        assert read_maintenance_facts(db).lacks_partition
        make_all(db)
        assert not read_maintenance_facts(db).lacks_partition
        ((covered,),) = db.execute(
            """
            SELECT count(*)
            FROM generate_series(now(), now() + interval '6 days', interval '1 day') AS day
            JOIN pgoutbox.partitions() AS p ON p.lower_at <= day AND day < p.upper_at
            """
        ).fetchall()
        assert covered == 7

    def test_a_default_partition_too_large_to_scan_raises_an_error(self, db: psycopg.Connection) -> None:
        drop_partitions(db)
        send(db)
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            db.execute("SELECT pgoutbox.make_partition(0)")
        make_all(db)
        assert db.execute("SELECT pgoutbox.make_partition(0)").fetchall() == [(None,)]

    def test_of_two_sessions_one_creates_it_and_the_other_does_not_wait(
        self, db: psycopg.Connection, connect: Connect
    ) -> None:
        drop_partitions(db)
        first, second = connect(), connect()
        assert first.execute(MAKE).fetchall() != [(None,)]
        assert second.execute(MAKE).fetchall() == [(None,)]
        second.rollback()
        mutate(db, "make_partition", "LOCK TABLE pgoutbox.home IN SHARE ROW EXCLUSIVE MODE NOWAIT", "NULL")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            second.execute(MAKE)

    def test_creating_partitions_blocks_no_enqueue_claim_or_finish(
        self, db: psycopg.Connection, connect: Connect
    ) -> None:
        keep(db)
        drop_partitions(db)
        made = make_all(db)  # One for each day.
        db.execute(b"DROP TABLE pgoutbox." + made[-1].encode())
        maker = connect()
        assert maker.execute(MAKE).fetchall() != [(None,)]
        send(db)
        maker.commit()

    def test_a_long_reader_postpones_the_creation(self, db: psycopg.Connection, connect: Connect) -> None:
        drop_partitions(db)
        reader = connect()
        reader.execute("SELECT count(*) FROM pgoutbox.message")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            db.execute(MAKE)
        assert partitions_of(db) == []


class TestDrop:
    def test_a_partition_without_messages_to_keep_is_dropped(self, operator: psycopg.Connection) -> None:
        keep(operator)
        name = add_partition(operator, 40)
        put(operator, State.SENT, age=40 * DAY)
        totals = Operator(operator).prune_by_retention()
        assert (totals.total, totals.partitions_dropped) == (0, 1)
        assert rows_of(operator) == []
        assert name not in tables_of_partitions(operator)
        acts = operator.execute("SELECT details FROM pgoutbox.audit WHERE action = 'prune'").fetchall()
        assert acts == [({"partition": name},)]

    @pytest.mark.parametrize(
        ("rules", "answer"),
        [
            ([("*", "sent", 30 * DAY)], "dropped"),
            ([("mail", "sent", 30 * DAY)], "dropped"),
            ([], "kept"),
            ([("*", "sent", 41 * DAY)], "kept"),
            ([("*", "sent", None)], "kept"),
            ([("*", "skipped", 30 * DAY)], "kept"),
            ([("*", "sent", 30 * DAY), ("mail", "sent", None)], "kept"),
            ([("*", "sent", 30 * DAY), ("mail", "sent", 60 * DAY)], "kept"),
            ([("*", "sent", 60 * DAY), ("mail", "sent", 30 * DAY)], "dropped"),
            ([("*", "sent", None), ("mail", "sent", 30 * DAY)], "dropped"),
            ([(t, s, 30 * DAY) for t in ("*", "mail") for s in BY_TIME], "dropped"),
            ([("*", s, 30 * DAY) for s in BY_TIME] + [("sms", "sent", 60 * DAY)], "kept"),
        ],
    )
    def test_the_most_specific_rules_of_its_messages_decide(
        self, db: psycopg.Connection, rules: list[tuple[str, str, timedelta | None]], answer: str
    ) -> None:
        for rule in rules:
            Operator(db).set_retention(*rule)
        name = add_partition(db, 40)
        message_id = put(db, State.SENT, age=40 * DAY)
        assert db.execute(DROP, [name]).fetchall() == [(answer,)]
        assert [row.id for row in rows_of(db)] == ([] if answer == "dropped" else [message_id])

    @pytest.mark.slow
    def test_a_clock_that_is_days_ahead_deletes_nothing(self, operator: psycopg.Connection) -> None:
        keep(operator)
        Operator(operator).set_retention("*", "failed", 30 * DAY)
        name = add_partition(operator, 40)
        ids = [put(operator, state, age=40 * DAY) for state in (State.SENT, State.FAILED)]
        ids.append(put(operator, State.SENT, age=50 * DAY))
        facts = read_maintenance_facts(operator)
        turn = MaintenanceRun(facts._replace(asked_at=facts.asked_at + 3 * DAY), PartitionCache())
        turn.take(operator)
        assert sorted(row.id for row in rows_of(operator)) == ids
        assert name in partitions_of(operator)
        assert [str(error) for error in turn.errors] == [
            "the database's clock is 3 days ahead of this machine's, so nothing is deleted; synchronise both by NTP"
        ]
        MaintenanceRun(facts, PartitionCache()).take(operator)
        assert rows_of(operator) == []

    def test_one_message_to_keep_keeps_its_partition(self, operator: psycopg.Connection) -> None:
        keep(operator)
        keep(operator, None, "audit")
        name = add_partition(operator, 40)
        kept = put(operator, State.SENT, topic="audit", age=40 * DAY)
        put(operator, State.SENT, age=40 * DAY)
        put(operator, State.SKIPPED, age=40 * DAY)
        totals = Operator(operator).prune_by_retention()
        assert (totals.total, totals.partitions_dropped) == (2, 0)
        assert [row.id for row in rows_of(operator)] == [kept]
        assert table_of(operator, kept) == name
        mutate(operator, "_drop_partition", "IF pgoutbox._kept_until(part.lower_at, part.upper_at) > now() THEN",
               "IF false THEN")  # fmt: skip
        operator.execute(DROP, [name])
        assert rows_of(operator) == []

    def test_messages_that_a_rule_still_keeps_are_not_read_for_the_end_of_their_partition(
        self, db: psycopg.Connection, connect: Connect
    ) -> None:
        """A rule that deletes sent messages at once keeps their keys, which are read before the drop."""
        keep(db)
        Operator(db).set_retention("code", "sent", timedelta())
        add_partition(db, 20)
        put(db, State.SENT, age=20 * DAY)
        partition = read_maintenance_facts(db).partitions[0]
        connect().execute("LOCK TABLE pgoutbox.message_done IN ACCESS EXCLUSIVE MODE")
        ((kept_until,),) = db.execute(sql.KEPT_UNTIL, partition._asdict()).fetchall()
        assert kept_until == partition.upper_at + 30 * DAY

    def test_the_partition_of_today_stays_under_any_rules(self, operator: psycopg.Connection) -> None:
        keep(operator, timedelta())
        put(operator, State.SENT)
        before = partitions_of(operator)
        assert operator.execute(DROP, [before[0]]).fetchall() == [("kept",)]
        Operator(operator).prune_by_retention()
        assert (rows_of(operator), partitions_of(operator)) == ([], before)

    @pytest.mark.parametrize("name", ["message_done_default", "message_live", "message_done_20000101", "mine", "a'b"])
    def test_other_tables_cannot_be_dropped(self, db: psycopg.Connection, name: str) -> None:
        assert db.execute(DROP, [name]).fetchall() == [("missing",)]

    def test_an_older_snapshot_is_refused(self, connect: Connect) -> None:
        strict = connect()
        strict.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with pytest.raises(psycopg.errors.InvalidTransactionState):
            strict.execute(DROP, ["message_done_20000101"])

    @pytest.mark.parametrize("guarded", [True, False])
    def test_a_commit_during_its_wait_is_seen(self, db: psycopg.Connection, connect: Connect, guarded: bool) -> None:
        Operator(db).set_retention("mail", "sent", 30 * DAY)
        name = add_partition(db, 40)
        message_id = put(db, topic="audit")
        db.execute("ALTER FUNCTION pgoutbox._drop_partition SET lock_timeout = '10s'")
        if not guarded:
            mutate(db, "_drop_partition", "EXECUTE 'LOCK TABLE ONLY pgoutbox.' || quote_ident(partition_name) "
                   "|| ' IN SHARE ROW EXCLUSIVE MODE';")  # fmt: skip
        late, dropping = connect(), connect(autocommit=True)
        late.execute(
            "UPDATE pgoutbox.message SET state = 'cancelled', finished_at = now() - interval '40 days' WHERE id = %s",
            [message_id],
        )
        with ThreadPoolExecutor() as threads:
            answer = threads.submit(lambda: dropping.execute(DROP, [name]).fetchall())
            until_blocked(db, dropping, answer)
            late.commit()
            assert answer.result() == [("kept" if guarded else "dropped",)]
        assert [row.id for row in rows_of(db)] == ([message_id] if guarded else [])

    def test_a_session_that_changes_a_rule_sees_earlier_drops(
        self, db: psycopg.Connection, connect: Connect, operator: psycopg.Connection
    ) -> None:
        keep(db)
        name = add_partition(db, 40)
        dropping = connect()
        assert dropping.execute(DROP, [name]).fetchall() == [("dropped",)]
        with ThreadPoolExecutor() as threads:
            changed = threads.submit(Operator(operator).set_retention, "mail", "sent", None)
            until_blocked(db, operator, changed)
            dropping.commit()
            changed.result()
        assert name not in partitions_of(db)

    def test_dropping_partitions_blocks_no_enqueue_or_claim(self, db: psycopg.Connection, connect: Connect) -> None:
        keep(db)
        name = add_partition(db, 40)
        dropping = connect()
        assert dropping.execute(DROP, [name]).fetchall() == [("dropped",)]
        ids = [
            enqueue(db),
            enqueue(db, dedupe_key="d"),
            enqueue(db, ordering_key="o"),
            enqueue(db, coalesce_key="k", max_delay=DAY),
        ]
        assert [row.id for row in claim(db)] == [ids[0], ids[1], ids[3]]
        dropping.commit()
        assert row_of(db, ids[2]).state == "pending"

    @pytest.mark.slow
    def test_a_long_reader_postpones_the_drop_without_blocking_enqueues(
        self, operator: psycopg.Connection, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keep(operator)
        name = add_partition(operator, 40)
        put(operator, State.SENT, age=40 * DAY)
        reader, writer = connect(), connect(autocommit=True)
        reader.execute("SELECT count(*) FROM pgoutbox.message_done")
        turn = MaintenanceRun(read_maintenance_facts(operator), PartitionCache(), pause=lambda _: enqueue(writer))
        turn.take(operator)
        assert (turn.errors, turn.totals.partitions_dropped) == ([], 0)
        assert name in partitions_of(operator)
        assert [row.state for row in rows_of(writer)] == ["pending"] * (retention._LOCK_TRIALS - 1)
        reader.rollback()
        assert Operator(operator).prune_by_retention().partitions_dropped == 1


class TestRows:
    """Tests which messages are deleted one by one, and which wait for their partition."""

    def test_a_message_waits_for_its_partition_if_that_is_dropped_soon(self, operator: psycopg.Connection) -> None:
        keep(operator)
        Operator(operator).set_retention("sms", "sent", DAY)
        name = add_partition(operator, 30)
        waiting = put(operator, State.SENT, age=30 * DAY)
        put(operator, State.SENT, topic="sms", age=30 * DAY)
        assert Operator(operator).prune_by_retention().messages == {State.SENT: 1}
        assert [row.id for row in rows_of(operator)] == [waiting]
        assert name in partitions_of(operator)

    @pytest.mark.slow
    def test_a_message_waits_for_at_most_a_quarter_of_its_retention(self, operator: psycopg.Connection) -> None:
        keep(operator, 3 * DAY)
        add_partition(operator, 3)
        put(operator, State.SENT, age=3 * DAY)
        assert Operator(operator).prune_by_retention().messages == {State.SENT: 1}

    @pytest.mark.slow
    def test_a_message_does_not_wait_for_a_partition_that_cannot_be_dropped(
        self, operator: psycopg.Connection, connect: Connect
    ) -> None:
        keep(operator)
        name = add_partition(operator, 33)
        put(operator, State.SENT, age=33 * DAY)
        reader = connect()
        reader.execute("SELECT count(*) FROM pgoutbox.message_done")
        totals = Operator(operator).prune_by_retention()
        assert (totals.messages, totals.partitions_dropped) == ({State.SENT: 1}, 0)
        reader.rollback()
        assert Operator(operator).prune_by_retention().partitions_dropped == 1
        assert name not in partitions_of(operator)

    def test_a_fully_pruned_partition_is_not_scanned_again(self, operator: psycopg.Connection) -> None:
        keep(operator, None)
        Operator(operator).set_retention("mail", "sent", DAY)
        add_partition(operator, 9)
        put(operator, State.SENT, age=9 * DAY)
        put(operator, State.SENT, topic="audit", age=9 * DAY)
        memory = PartitionCache()
        facts = read_maintenance_facts(operator)
        turn = MaintenanceRun(facts, memory)
        turn.take(operator)
        assert turn.totals.total == 1
        assert not MaintenanceRun(facts, memory).has_work
        Operator(operator).set_retention("mail", "sent", 2 * DAY)
        assert MaintenanceRun(read_maintenance_facts(operator), memory).has_work


class TestClear:
    def fill(self, db: psycopg.Connection, count: int = 7) -> str:
        keep(db)
        name = add_partition(db, 40)
        for number in range(count):
            message_id = put(db, State.SENT, dedupe_key=f"k{number}")
            db.execute(ADD_ATTEMPT, (message_id, 1))
        db.execute("UPDATE pgoutbox.message SET finished_at = now() - interval '40 days'")
        young = put(db, State.SENT, dedupe_key="young")
        db.execute(ADD_ATTEMPT, (young, 1))
        return name

    def left(self, db: psycopg.Connection) -> tuple[int, list[str]]:
        ((attempts,),) = db.execute("SELECT count(*) FROM pgoutbox.attempt_view").fetchall()
        return attempts, [key for (key,) in db.execute("SELECT dedupe_key FROM pgoutbox.dedupe ORDER BY 1")]

    def test_the_keys_of_its_messages_are_free_at_once_and_deleted_page_by_page(
        self, operator: psycopg.Connection
    ) -> None:
        name = self.fill(operator)
        assert operator.execute(DROP, [name]).fetchall() == [("dropped",)]
        assert name not in tables_of_partitions(operator)
        assert enqueue(operator, "mail", dedupe_key="k1") > 8
        totals = Operator(operator).prune_by_retention(batch_size=3)
        assert totals.dedupe_keys == 6
        assert self.left(operator) == (2, ["k1", "young"])

    def test_a_key_that_its_rule_keeps_outlives_the_partition(self, operator: psycopg.Connection) -> None:
        keep(operator)
        name = add_partition(operator, 40)
        sent = put(operator, State.SENT, dedupe_key="k", age=40 * DAY)
        Operator(operator).set_retention("*", "sent", timedelta())
        assert operator.execute(DROP, [name]).fetchall() == [("kept",)]
        for _ in range(2):
            Operator(operator).prune_by_retention()
        assert (rows_of(operator), name in tables_of_partitions(operator)) == ([], False)
        assert enqueue(operator, "mail", {"to": "ada"}, dedupe_key="k") == sent

    def test_a_cancelled_message_gets_a_free_key_back(self, operator: psycopg.Connection) -> None:
        cancelled = put(operator, State.CANCELLED, dedupe_key="k")
        put(operator, dedupe_key="k")
        operator.execute("DELETE FROM pgoutbox.message WHERE id <> %s", [cancelled])
        assert redrive(operator, cancelled)

    @pytest.mark.slow
    @pytest.mark.parametrize("transactions", [2, 3, 4, 5])
    def test_a_prune_continues_after_a_kill_at_any_point(
        self, operator: psycopg.Connection, dsn: str, transactions: int
    ) -> None:
        name = self.fill(operator)
        doomed = SPAWN.Process(target=prune_and_die, args=(dsn, transactions), daemon=True)
        doomed.start()
        doomed.join(120)
        assert doomed.exitcode == 9
        # The server detects the lost client later; until then its session keeps its locks.
        others = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        sessions = f"{others} AND application_name LIKE 'pgoutbox %'"
        wait_until(lambda: not operator.execute(sessions).fetchall(), lambda: "the session of the dead ends")
        Operator(operator).prune_by_retention()
        assert self.left(operator) == (2, ["young"])
        assert name not in tables_of_partitions(operator)
        assert [row.state for row in rows_of(operator)] == ["sent"]


def prune_and_die(dsn: str, transactions: int) -> None:
    """Prune in pages of two, and end like a SIGKILL when this many transactions have begun."""
    connection: psycopg.Connection[Any]
    with operator_connection.connect(load_settings(dsn=dsn)) as connection:
        facts = read_maintenance_facts(connection)
        count = 0
        execute = connection.execute

        def counted(query: Any, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - passed on
            nonlocal count
            if "pgoutbox" in str(query):
                count += 1
            answer = execute(query, *arguments, **options)
            if count == transactions:
                os._exit(9)  # Before the commit.
            return answer

        connection.execute = counted  # type: ignore[method-assign] # it counts
        MaintenanceRun(facts, PartitionCache(), batch_size=2).take(connection)


@pytest.mark.slow
def test_partitions_come_and_go_while_eight_sessions_enqueue_and_finish(
    operator: psycopg.Connection, connect: Connect
) -> None:
    keep(operator)
    drop_partitions(operator)
    make_all(operator)  # One for each day.
    over = threading.Event()

    def work(connection: psycopg.Connection, number: int) -> list[int]:
        sent: list[int] = []
        while not over.is_set():
            message_id = enqueue(connection, queue=f"q{number}", dedupe_key=f"{number}-{len(sent)}")
            (row,) = claim(connection, queue=f"q{number}", worker=f"w{number}")
            assert row.id == message_id
            # A session that waits for a partition beyond the short limit finishes with the other statement, like a
            # worker.
            try:
                assert finish_sent(connection, (message_id, 1), worker=f"w{number}") == {message_id}
            except psycopg.errors.LockNotAvailable:
                request = End(message_id, 1, AttemptOutcome.SENT)
                assert finish(connection, request, worker=f"w{number}") == {message_id: State.SENT}
            sent.append(message_id)
        return sent

    connections = [connect(autocommit=True) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        works = [threads.submit(work, connection, number) for number, connection in enumerate(connections)]
        try:
            dropped = 0
            for days_ago in range(40, 60):
                for number, name in enumerate([*partitions_of(operator)[1:], add_partition(operator, days_ago)]):
                    if number == 0:
                        operator.execute(b"DROP TABLE pgoutbox." + name.encode())
                dropped += Operator(operator).prune_by_retention().partitions_dropped
        finally:
            over.set()
        sent = [message_id for done in works for message_id in done.result()]
    while (further := Operator(operator).prune_by_retention().partitions_dropped) or operator.execute(
        "SELECT FROM pgoutbox.partitions() WHERE upper_at < now()"
    ).fetchall():
        dropped += further
    assert dropped == 20
    assert len(sent) >= 8
    assert [row.id for row in rows_of(operator) if row.state == "sent"] == sorted(sent)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["pgoutbox_worker", "pgoutbox_operator"])
def test_maintenance_needs_no_ownership_of_the_tables(db: psycopg.Connection, dsn: str, role: str) -> None:
    keep(db)
    db.execute(b"DROP TABLE pgoutbox." + partitions_of(db)[-1].encode())
    name = add_partition(db, 40)
    put(db, State.SENT, age=40 * DAY, dedupe_key="k")
    put(db, State.SENT, age=50 * DAY)
    with operator_connection.connect(load_settings(dsn=f"{dsn}&options=-c%20role%3D{role}")) as connection:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(b"DROP TABLE pgoutbox." + name.encode())
        turn = MaintenanceRun(read_maintenance_facts(connection), PartitionCache())
        turn.take(connection)
    totals = turn.totals
    assert turn.errors == []
    assert (totals.total, totals.partitions_dropped) == (1, 1)
    assert totals.partitions_made >= 1

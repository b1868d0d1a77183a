"""Tests every statement of an operator: its answer, and the guard that keeps it from overwriting concurrent changes."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
import pytest

from pgoutbox.database import operator_connection, sql
from pgoutbox.errors import ArgumentError, ConfigurationError, MessageNotFoundError, SchemaError, StateError
from pgoutbox.message import FINAL_STATES, AttemptOutcome, State
from pgoutbox.operations import (
    ActResult,
    JsonText,
    MessageFilter,
    MessageResult,
    Operator,
    Rate,
    ShownMessage,
)
from pgoutbox.operations.acts import ACTS
from pgoutbox.operations.operator import FAIR_COUNTS
from pgoutbox.settings import load_settings
from tests.support.messages import ADD_ATTEMPT, PUT_SENDING, meanwhile, put
from tests.support.outbox_actions import due_earlier, enqueue
from tests.support.races import until_blocked
from tests.support.worker_sql import End, claim, finish, sleeping_worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Connect, Server

DAY = timedelta(days=1)
TAKE_LONG = """
CREATE FUNCTION take_long() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_sleep(2.5);
    RETURN coalesce(NEW, OLD);
END
$$;
CREATE TRIGGER take_long BEFORE UPDATE OR DELETE ON pgoutbox.message FOR EACH ROW EXECUTE FUNCTION take_long();
"""
UNUSED_ID = 2**40  # Ids of the shared database grow with every test.


def row_of(connection: psycopg.Connection, message_id: int) -> tuple[object, ...]:
    row = connection.execute("SELECT * FROM pgoutbox.message WHERE id = %s", (message_id,)).fetchone()
    assert row is not None
    return row


def state_of(connection: psycopg.Connection, message_id: int) -> str | None:
    row = connection.execute("SELECT state FROM pgoutbox.message WHERE id = %s", (message_id,)).fetchone()
    return None if row is None else str(row[0])


def count(connection: psycopg.Connection, table: str) -> int:
    row = connection.execute(f"SELECT count(*) FROM pgoutbox.{table}").fetchone()
    assert row is not None
    return int(row[0])


@pytest.fixture
def rolled_back(rolled_back: psycopg.Connection) -> psycopg.Connection:
    """Open a transaction, so that the transactions of `maintenance` become savepoints."""
    rolled_back.execute("SELECT")
    return rolled_back


@pytest.fixture
def operator(dsn: str) -> Iterator[psycopg.Connection]:
    """Open the connection of an operator to the test's own database; its actions are committed."""
    with operator_connection.connect(load_settings(dsn=dsn)) as connection:
        yield connection


class TestConnect:
    def test_a_missing_schema_is_refused_with_the_command_to_create_it(self, empty_dsn: str) -> None:
        with (
            pytest.raises(SchemaError, match="pgoutbox migrate"),
            operator_connection.connect(load_settings(dsn=empty_dsn)),
        ):
            pytest.fail("connected")

    def test_a_database_of_another_encoding_is_refused(self, server: Server, empty_dsn: str) -> None:
        with psycopg.connect(empty_dsn, autocommit=True) as connection:
            name = f"{connection.info.dbname}_ascii".encode()
            connection.execute(
                b"CREATE DATABASE " + name + b" ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0",
            )
            try:
                with (
                    pytest.raises(ConfigurationError, match="SQL_ASCII"),
                    operator_connection.connect(load_settings(dsn=server.dsn_for(name.decode()))),
                ):
                    pytest.fail("connected")
            finally:
                connection.execute(b"DROP DATABASE " + name)

    def test_a_read_only_session_is_refused_only_for_writing(self, dsn: str) -> None:
        settings = load_settings(dsn=f"{dsn}&options=-c%20default_transaction_read_only%3Don")
        with (
            pytest.raises(ConfigurationError, match="default_transaction_read_only"),
            operator_connection.connect(settings),
        ):
            pytest.fail("connected")
        with operator_connection.connect(settings, read_only=True) as connection:
            assert Operator(connection).list_messages() == []

    def test_a_connection_for_reading_cannot_write(self, dsn: str) -> None:
        with (
            operator_connection.connect(load_settings(dsn=dsn), read_only=True) as connection,
            pytest.raises(psycopg.errors.ReadOnlySqlTransaction),
        ):
            Operator(connection).pause("default")

    def test_defaults_of_the_role_do_not_matter(self, dsn: str) -> None:
        options = "-c search_path=pg_temp -c default_transaction_isolation=serializable -c statement_timeout=1234"
        settings = load_settings(dsn=f"{dsn}&options={options.replace(' ', '%20').replace('=', '%3D')}")
        with operator_connection.connect(settings) as connection, connection.transaction():
            operator_connection.prepare(connection)
            row = connection.execute(
                """
                SELECT
                    current_setting('transaction_isolation'),
                    current_setting('statement_timeout'),
                    current_setting('lock_timeout'),
                    current_setting('search_path'),
                    current_setting('application_name')
                """
            ).fetchone()
        assert row == ("read committed", "5min", "2s", "pg_catalog, pg_temp", "pgoutbox cli")

    @pytest.mark.slow
    @pytest.mark.parametrize("state", [State.PENDING, None], ids=["redrive", "prune"])
    def test_a_transaction_timeout_of_the_role_does_not_end_long_operations(
        self, dsn: str, connect: Connect, state: State | None
    ) -> None:
        db = connect(autocommit=True)
        has_limit = db.info.server_version >= 170_000
        message_id = put(db, State.FAILED, age=2 * DAY)
        db.execute(TAKE_LONG)
        settings = load_settings(dsn=f"{dsn}&options=-c%20transaction_timeout%3D2s" if has_limit else dsn)
        with operator_connection.connect(settings) as operator:
            assert not has_limit or operator.execute("SHOW transaction_timeout").fetchone() == ("2s",)
            if state is State.PENDING:
                Operator(operator).redrive(message_id)
            else:
                Operator(operator).prune(DAY, states=FINAL_STATES)
        assert state_of(db, message_id) == state

    def test_a_statement_that_lost_a_race_is_repeated(self, operator: psycopg.Connection) -> None:
        trials = []

        def work() -> str:
            trials.append(1)
            if len(trials) < 3:
                operator.execute("DO $$ BEGIN RAISE SQLSTATE '40001'; END $$")
            return "done"

        assert operator_connection.transact(operator, work) == "done"
        assert len(trials) == 3


class TestList:
    def test_messages_come_newest_first_and_page_by_id(self, rolled_back: psycopg.Connection) -> None:
        ids = [put(rolled_back, state) for state in State]
        assert [m.id for m in Operator(rolled_back).list_messages()] == ids[::-1]
        assert [m.id for m in Operator(rolled_back).list_messages(limit=2)] == ids[:3:-1]
        assert [m.id for m in Operator(rolled_back).list_messages(before_id=ids[1])] == [ids[0]]

    def test_each_filter_keeps_matching_messages(self, rolled_back: psycopg.Connection) -> None:
        wanted = put(rolled_back, State.FAILED, topic="sms", queue="bulk", destination="tel:1")
        put(rolled_back)
        for messages in (
            Operator(rolled_back).list_messages(MessageFilter(states=[State.FAILED, State.SENT])),
            Operator(rolled_back).list_messages(MessageFilter(topic="sms")),
            Operator(rolled_back).list_messages(MessageFilter(queue="bulk")),
            Operator(rolled_back).list_messages(MessageFilter(destination="tel:1")),
        ):
            assert [m.id for m in messages] == [wanted]
        assert messages[0].state is State.FAILED
        assert messages[0].last_error == "no such mailbox"

    def test_messages_are_chosen_by_id_and_by_whether_they_are_due(self, rolled_back: psycopg.Connection) -> None:
        due, later, failed = put(rolled_back), put(rolled_back), put(rolled_back, State.FAILED)
        rolled_back.execute(
            "UPDATE pgoutbox.message SET available_at = now() + interval '1 hour' WHERE id = %s", [later]
        )
        for which, wanted in (
            (MessageFilter(due="now"), [due]),
            (MessageFilter(due="later"), [later]),
            (MessageFilter(ids=(due, failed)), [failed, due]),
            (MessageFilter(ids=(due, failed), states=[State.FAILED]), [failed]),
            (MessageFilter(ids=()), []),
        ):
            assert [m.id for m in Operator(rolled_back).list_messages(which)] == wanted

    def test_a_pending_message_says_why_it_waits(self, rolled_back: psycopg.Connection) -> None:
        put(rolled_back, State.FAILED)
        put(rolled_back)
        waits = [(m.waits, m.why_it_waits) for m in Operator(rolled_back).list_messages()]
        assert waits == [
            ("no worker", "no running worker serves its queue; pgoutbox workers lists the queues"),
            (None, None),
        ]


class TestShow:
    def test_show_returns_the_message_and_its_attempts_newest_first(self, rolled_back: psycopg.Connection) -> None:
        message_id = put(rolled_back, State.FAILED)
        for attempt_count in (2, 1):
            rolled_back.execute(ADD_ATTEMPT, (message_id, attempt_count))
        message, attempts = Operator(rolled_back).show_message(message_id)
        assert (message.id, message.state, message.payload) == (message_id, State.FAILED, {"to": "ada"})
        assert [(a.attempt_count, a.outcome, a.error) for a in attempts] == [(2, "retry", "busy"), (1, "retry", "busy")]

    def test_show_returns_every_column_of_the_message(self, rolled_back: psycopg.Connection) -> None:
        cursor = rolled_back.execute("SELECT * FROM pgoutbox.message LIMIT 0")
        columns = {column.name for column in cursor.description or ()}
        counts = {"headers_bytes", "payload_bytes", "content_bytes"}
        # In the tables claim, cancel_request and content, and in the view of waiting messages.
        elsewhere = {"lease_expires_at", "cancel_requested_at", "content", "waits", "waits_for", "waits_until"}
        elsewhere |= {"handled_as", "cap"}
        # They follow from the attempts, the state and the keys, or are returned apart.
        repeated = {"lane", "key_in_flight", "attempts"}
        assert columns == {*ShownMessage._fields, "attempt_budget", *repeated} - counts - elsewhere

    def test_show_reads_a_limited_part_unless_everything_is_requested(self, rolled_back: psycopg.Connection) -> None:
        message_id = put(rolled_back, State.FAILED)
        rolled_back.execute(
            """
            UPDATE pgoutbox.message
            SET payload = jsonb_build_object('secret', 'hidden', 'a long text', repeat('x', 100000)),
                last_error = repeat('e', 100000)
            WHERE id = %s
            """,
            (message_id,),
        )
        message, _ = Operator(rolled_back).show_message(message_id)
        assert message.payload_bytes > 100_000
        assert (len(str(message.payload)), len(message.last_error or "")) == (65_536, 65_536)
        shown = message.redacted(["secret"]).payload
        assert isinstance(shown, JsonText)
        assert shown.startswith('{"secret": (redacted), "a long text": "xxx')
        message, _ = Operator(rolled_back).show_message(message_id, whole=True)
        assert message.payload == {"secret": "hidden", "a long text": "x" * 100_000}

    @pytest.mark.parametrize(
        "payload",
        ['{"x": 1e131071}', "[" * 3000 + "]" * 3000, '{"x":' * 500 + '{"token": "hidden"}' + "}" * 500],
        ids=["a long number", "deep lists", "deep objects"],
    )
    def test_json_that_python_cannot_parse_is_shown_as_text(
        self, rolled_back: psycopg.Connection, payload: str
    ) -> None:
        message_id = put(rolled_back)
        rolled_back.execute("UPDATE pgoutbox.message SET payload = %s::jsonb WHERE id = %s", (payload, message_id))
        message, _ = Operator(rolled_back).show_message(message_id, whole=True)
        shown = message.redacted(["token"]).payload
        assert isinstance(shown, JsonText)
        assert len(shown) >= len(payload) - 100
        assert "hidden" not in shown

    def test_a_missing_message_is_named(self, rolled_back: psycopg.Connection) -> None:
        with pytest.raises(MessageNotFoundError, match=f"no such message: {UNUSED_ID}"):
            Operator(rolled_back).show_message(UNUSED_ID)


class TestCount:
    def test_each_state_has_its_number(self, rolled_back: psycopg.Connection) -> None:
        for state in State:
            put(rolled_back, state)
        put(rolled_back, queue="bulk")
        later = put(rolled_back)
        rolled_back.execute(
            "UPDATE pgoutbox.message SET available_at = now() + interval '1 day' WHERE id = %s", (later,)
        )
        bulk, default = Operator(rolled_back).count_messages()
        assert (bulk.queue, bulk.due) == ("bulk", 1)
        assert default == ("default", "mail", 1, 1, 1, 1, 1, 1, 1, 0.0)
        assert Operator(rolled_back).count_messages(queue="bulk") == [bulk]

    def test_known_queues_come_from_messages_and_settings(self, rolled_back: psycopg.Connection) -> None:
        put(rolled_back, State.SENT, queue="old")
        Operator(rolled_back).pause("held")
        assert Operator(rolled_back).known_queues() == ["held", "old"]
        assert Operator(rolled_back).unknown_queues(["old", "odl", "held"]) == ["odl"]


class TestRedrive:
    @pytest.mark.parametrize("state", [State.FAILED, State.CANCELLED])
    def test_a_redrive_makes_a_held_message_pending_with_a_fresh_budget(
        self, rolled_back: psycopg.Connection, state: State
    ) -> None:
        message_id = put(rolled_back, state)
        assert Operator(rolled_back).redrive(message_id) == MessageResult(message_id, ActResult.REDRIVEN)
        message, _ = Operator(rolled_back).show_message(message_id)
        assert (message.state, message.finished_at) == (State.PENDING, None)
        assert (message.attempt_count, message.max_attempts) == (3, 3 + 4)

    @pytest.mark.parametrize("state", [State.PENDING, State.SENDING, State.SENT, State.SKIPPED])
    def test_a_resend_refuses_any_other_state_and_names_it(self, rolled_back: psycopg.Connection, state: State) -> None:
        message_id = put(rolled_back, state)
        before = row_of(rolled_back, message_id)
        answer = Operator(rolled_back).redrive(message_id)
        assert answer.result is ActResult.WRONG_STATE
        assert answer.explanation == f"is {state}; only failed and cancelled messages can be redriven"
        assert row_of(rolled_back, message_id) == before

    def test_a_redrive_refuses_a_superseded_message_and_names_the_newer_one(
        self, rolled_back: psycopg.Connection
    ) -> None:
        older = put(rolled_back, State.FAILED, coalesce_key="k")
        newer = put(rolled_back, State.SENT, coalesce_key="k")
        answer = Operator(rolled_back).redrive(older)
        assert answer == MessageResult(
            older, ActResult.SUPERSEDED, newer, f"is superseded by message {newer}, which is newer"
        )
        assert state_of(rolled_back, older) == State.FAILED

    def test_each_id_has_its_own_answer(self, rolled_back: psycopg.Connection) -> None:
        failed, sent = put(rolled_back, State.FAILED), put(rolled_back, State.SENT)
        (batch,) = Operator(rolled_back).bulk("redrive", [UNUSED_ID, sent, failed, failed])
        assert [(a.id, a.result) for a in batch.results] == [
            (failed, ActResult.REDRIVEN),
            (sent, ActResult.WRONG_STATE),
            (UNUSED_ID, ActResult.MISSING),
        ]

    def test_a_redrive_does_not_wait_for_a_locked_message(self, operator: psycopg.Connection, connect: Connect) -> None:
        message_id = put(operator, State.FAILED)
        other = connect()
        other.execute("SELECT FROM pgoutbox.message WHERE id = %s FOR UPDATE", (message_id,))
        answer = Operator(operator).redrive(message_id)
        assert answer.result is ActResult.LOCKED

    def test_a_redrive_is_refused_if_another_message_has_taken_the_dedupe_key(
        self, rolled_back: psycopg.Connection
    ) -> None:
        first = put(rolled_back, State.CANCELLED, dedupe_key="k")
        second = put(rolled_back, State.CANCELLED, dedupe_key="k")
        third = put(rolled_back, dedupe_key="k")
        reason = f"has lost its dedupe key to message {third}"
        (batch,) = Operator(rolled_back).bulk("redrive", [first, second])
        assert batch.results == [MessageResult(n, ActResult.DEDUPE_KEY_TAKEN, third, reason) for n in (first, second)]
        cancelled = MessageFilter(states=(State.CANCELLED,))
        totals = Operator(rolled_back).act_on_all("redrive", cancelled)
        assert totals == {"dedupe_key_taken": 2}

    def test_a_redriven_message_gets_its_key_back_after_the_other_message_is_deleted(
        self, rolled_back: psycopg.Connection
    ) -> None:
        first = put(rolled_back, State.CANCELLED, dedupe_key="k")
        put(rolled_back, State.SENT, dedupe_key="k", age=2 * DAY)
        Operator(rolled_back).prune(states=[State.SENT], older_than=DAY)
        assert count(rolled_back, "dedupe") == 0
        assert Operator(rolled_back).redrive(first).is_done
        assert put(rolled_back, dedupe_key="k") == first

    def test_a_redrive_of_all_failures_commits_in_batches(self, operator: psycopg.Connection, connect: Connect) -> None:
        for _ in range(5):
            put(operator, State.FAILED)
        put(operator, State.FAILED, coalesce_key="k")
        put(operator, State.SENT, coalesce_key="k")
        put(operator, State.CANCELLED)
        observer = connect(autocommit=True)
        seen: list[tuple[int, int]] = []

        done: Counter[str] = Counter()
        for batch in Operator(operator).bulk("redrive", MessageFilter(), batch_size=2):
            done.update(result.result for result in batch.results)
            pending = len(Operator(observer).list_messages(MessageFilter(states=[State.PENDING])))
            seen.append((done["redriven"], pending))
        assert done == {"redriven": 5, "superseded": 1}
        assert seen[:3] == [(2, 2), (4, 4), (5, 5)]

    def test_a_message_cancelled_during_a_redrive_of_all_failures_stays_cancelled(
        self, operator: psycopg.Connection, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        message_id = put(operator, State.FAILED)
        other = connect(autocommit=True)

        def redrive_and_cancel() -> None:
            Operator(other).redrive(message_id)
            assert Operator(other).cancel(message_id).result == "cancelled"

        meanwhile(monkeypatch, redrive_and_cancel)
        totals = Operator(operator).act_on_all("redrive", MessageFilter())
        assert totals == {"wrong_state": 1}
        assert state_of(operator, message_id) == State.CANCELLED

    def test_a_message_that_fails_again_during_a_redrive_by_error_stays_failed(
        self, operator: psycopg.Connection, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """This attempt may have handed the message over, and the operator decided on the previous error."""
        message_id = put(operator, State.FAILED)
        other = connect(autocommit=True)

        def fail_anew() -> None:
            Operator(other).redrive(message_id)
            (row,) = claim(other, topics=["mail"])
            finish(other, End(row.id, row.attempt_count, AttemptOutcome.FAILED, "outcome unknown"))

        meanwhile(monkeypatch, fail_anew)
        totals = Operator(operator).act_on_all("redrive", MessageFilter(text="no such mailbox"))
        assert totals == {"changed": 1}
        assert state_of(operator, message_id) == State.FAILED

    def test_a_redrive_reports_the_requested_attempt(
        self, rolled_back: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        same, other = put(rolled_back, State.FAILED), put(rolled_back, State.FAILED)
        act = Operator(rolled_back)
        monkeypatch.setattr(act, "_search", lambda *_: iter([({other: 2, same: 3}, other, other)]))
        (batch,) = act.bulk("redrive", MessageFilter())
        assert batch.results == [
            MessageResult(same, ActResult.REDRIVEN),
            MessageResult(other, ActResult.CHANGED, None, "was attempted again"),
        ]
        assert state_of(rolled_back, other) == State.FAILED

    def test_a_redrive_reports_the_requested_states(self, rolled_back: psycopg.Connection) -> None:
        message_id = put(rolled_back, State.CANCELLED)
        answer = Operator(rolled_back).redrive(message_id, states=[State.FAILED])
        assert answer == MessageResult(
            message_id, ActResult.WRONG_STATE, None, "is cancelled; only failed messages can be redriven"
        )
        assert state_of(rolled_back, message_id) == State.CANCELLED

    def test_all_failed_can_be_narrowed(self, rolled_back: psycopg.Connection) -> None:
        sms = put(rolled_back, State.FAILED, topic="sms")
        bulk = put(rolled_back, State.FAILED, queue="bulk")
        other = put(rolled_back, State.FAILED)
        Operator(rolled_back).act_on_all("redrive", MessageFilter(topic="sms"))
        Operator(rolled_back).act_on_all("redrive", MessageFilter(queue="bulk"))
        states = [state_of(rolled_back, message_id) for message_id in (sms, bulk, other)]
        assert states == [State.PENDING, State.PENDING, State.FAILED]


class TestResend:
    def test_the_audit_records_the_topic_that_was_enqueued(self, rolled_back: psycopg.Connection) -> None:
        """A topic and a payload among the options change nothing."""
        rolled_back.execute(
            """
            SELECT pgoutbox._enqueue_act(
                'mail',
                '1',
                jsonb_populate_record(NULL::pgoutbox.draft, '{"topic": "evil", "payload": 2, "queue": "q"}'),
                true
            )
            """
        )
        rows = rolled_back.execute("SELECT topic, payload, queue FROM pgoutbox.message").fetchall()
        assert rows == [("mail", 1, "q")]
        assert rolled_back.execute("SELECT details ->> 'topic' FROM pgoutbox.audit").fetchall() == [("mail",)]

    def test_a_resend_enqueues_a_copy_and_keeps_the_sent_message(self, rolled_back: psycopg.Connection) -> None:
        source_id = put(rolled_back, State.SENT, queue="bulk", destination="tel:1", coalesce_key="k", dedupe_key="d")
        before = row_of(rolled_back, source_id)
        copy_id = Operator(rolled_back).resend(source_id).other_id
        assert copy_id is not None
        assert row_of(rolled_back, source_id) == before
        copy, _ = Operator(rolled_back).show_message(copy_id)
        assert (copy.id > source_id, copy.state, copy.resend_of) == (True, State.PENDING, source_id)
        assert (copy.topic, copy.queue, copy.destination, copy.payload) == ("mail", "bulk", "tel:1", {"to": "ada"})
        assert (copy.coalesce_key, copy.dedupe_key, copy.attempt_count, copy.max_attempts) == ("k", None, 0, 4)

    @pytest.mark.parametrize("state", sorted(set(State) - {State.SENT}))
    def test_a_resend_refuses_any_other_state_and_names_it(self, rolled_back: psycopg.Connection, state: State) -> None:
        message_id = put(rolled_back, state)
        messages = count(rolled_back, "message")
        answer = Operator(rolled_back).resend(message_id)
        assert (answer.result, answer.is_done) == (ActResult.WRONG_STATE, False)
        assert answer.explanation == f"is {state}; only sent messages can be resent"
        assert count(rolled_back, "message") == messages

    def test_a_resend_refuses_a_superseded_message(self, rolled_back: psycopg.Connection) -> None:
        older = put(rolled_back, State.SENT, coalesce_key="k")
        newer = put(rolled_back, coalesce_key="k")
        answer = Operator(rolled_back).resend(older)
        assert (answer.result, answer.other_id) == (ActResult.SUPERSEDED, newer)
        assert count(rolled_back, "message") == 2

    def test_a_resend_waits_for_a_newer_message_that_is_being_enqueued(
        self, operator: psycopg.Connection, connect: Connect
    ) -> None:
        older = put(operator, State.SENT, coalesce_key="k")
        producer, observer = connect(), connect(autocommit=True)
        newer = put(producer, coalesce_key="k")
        with ThreadPoolExecutor(1) as threads:
            resent = threads.submit(Operator(operator).resend, older)
            while not resent.done():
                (waiting,) = observer.execute(
                    "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'",
                    (operator.info.backend_pid,),
                )
                if waiting[0]:
                    producer.commit()
                    break
            assert (resent.result().result, resent.result().other_id) == (ActResult.SUPERSEDED, newer)

    def test_a_message_that_is_sent_during_a_resend_is_not_refused_as_sent(
        self, operator: psycopg.Connection, connect: Connect
    ) -> None:
        message_id = put(operator, State.SENDING)
        ((definition,),) = operator.execute("SELECT pg_get_functiondef('pgoutbox._state_of'::regproc)").fetchall()
        operator.execute(definition.replace("BEGIN", "BEGIN PERFORM pg_advisory_xact_lock(1);").encode())
        gate, worker, observer = connect(), connect(autocommit=True), connect(autocommit=True)
        gate.execute("SELECT pg_advisory_xact_lock(1)")
        with ThreadPoolExecutor(1) as threads:
            resent = threads.submit(Operator(operator).resend, message_id)
            until_blocked(observer, operator, resent)
            worker.execute(
                "UPDATE pgoutbox.message SET state = 'sent', finished_at = now() WHERE id = %s", [message_id]
            )
            gate.commit()
            assert resent.result().result == ActResult.RESENT

    def test_a_missing_message_is_reported(self, rolled_back: psycopg.Connection) -> None:
        answer = Operator(rolled_back).resend(UNUSED_ID)
        assert answer == MessageResult(UNUSED_ID, ActResult.MISSING, None, "does not exist")

    def test_the_statement_itself_copies_only_sent_messages(self, rolled_back: psycopg.Connection) -> None:
        refused = [put(rolled_back, state) for state in set(State) - {State.SENT}]
        refused.append(put(rolled_back, State.SENT, coalesce_key="k"))
        put(rolled_back, State.SENT, coalesce_key="k")
        for message_id in refused:
            ((_, result, *_),) = rolled_back.execute(ACTS["resend"].statement, {"ids": [message_id]}).fetchall()
            assert result in ("wrong_state", "superseded")

    def test_messages_deleted_before_their_turn_are_not_counted_as_superseded(
        self, operator: psycopg.Connection, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        message_id = put(operator, State.SENT)
        other = connect(autocommit=True)
        delete: LiteralString = "DELETE FROM pgoutbox.message WHERE id = %s"
        meanwhile(monkeypatch, lambda: other.execute(delete, (message_id,)))
        totals = Operator(operator).act_on_all("resend", MessageFilter())
        assert totals == {"missing": 1}


class TestCancel:
    @pytest.mark.parametrize(
        ("state", "result"),
        [
            (State.PENDING, "cancelled"),
            (State.SENDING, "requested"),
            (State.CANCELLED, "already_cancelled"),
            *((state, str(state)) for state in sorted(FINAL_STATES - {State.CANCELLED})),
        ],
    )
    def test_a_cancel_returns_the_previous_state(
        self, rolled_back: psycopg.Connection, state: State, result: str
    ) -> None:
        message_id = put(rolled_back, state)
        answer = Operator(rolled_back).cancel(message_id)
        assert (answer.id, answer.result) == (message_id, ActResult(result))
        assert answer.is_done == (result in ("cancelled", "requested"))

    @pytest.mark.parametrize(("state", "asked_for"), [(State.PENDING, State.SENDING), (State.SENDING, State.PENDING)])
    def test_a_cancel_skips_messages_in_other_states_than_requested(
        self, rolled_back: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, state: State, asked_for: State
    ) -> None:
        message_id = put(rolled_back, state)
        before = row_of(rolled_back, message_id)
        monkeypatch.setattr(Operator, "_search", lambda *_: iter([({message_id: 0}, message_id, message_id)]))
        assert Operator(rolled_back).act_on_all("cancel", MessageFilter(states=[asked_for])) == {state.value: 1}
        assert row_of(rolled_back, message_id) == before

    def test_a_message_claimed_during_a_cancel_of_all_pending_is_not_stopped(
        self, operator: psycopg.Connection, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        message_id = put(operator, State.PENDING)
        other = connect(autocommit=True)
        meanwhile(monkeypatch, lambda: other.execute(PUT_SENDING, (message_id,)))
        totals = Operator(operator).act_on_all("cancel", MessageFilter(states=[State.PENDING]))
        assert totals == {"sending": 1}
        (asked,) = other.execute(
            "SELECT m.cancel_requested_at FROM pgoutbox.message_view AS m WHERE m.id = %s AND m.state = 'sending'",
            [message_id],
        )
        assert asked == (None,)

    def test_of_two_cancels_of_the_same_messages_one_reports_success(
        self, operator: psycopg.Connection, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        message_id = put(operator, State.PENDING)
        other = connect(autocommit=True)
        meanwhile(monkeypatch, lambda: Operator(other).cancel(message_id))
        totals = Operator(operator).act_on_all("cancel", MessageFilter())
        assert totals == {"already_cancelled": 1}
        (act,) = Operator(operator).list_acts()
        assert (act.first_ids, act.details) == ([message_id], None)

    def test_a_message_named_by_both_keys_is_cancelled_once(self, rolled_back: psycopg.Connection) -> None:
        message_id = put(rolled_back, coalesce_key="k", dedupe_key="d")
        answers = Operator(rolled_back).cancel_by_key("mail", coalesce_key="k", dedupe_key="d")
        assert [(answer.id, answer.result) for answer in answers] == [
            (message_id, ActResult.CANCELLED),
            (message_id, ActResult.ALREADY_CANCELLED),
        ]
        (act,) = Operator(rolled_back).list_acts(message_id=message_id)
        assert act.first_ids == [message_id]

    def test_an_application_learns_that_its_message_was_cancelled_before(self, rolled_back: psycopg.Connection) -> None:
        message_id = put(rolled_back, State.PENDING, coalesce_key="k")
        for result in ("cancelled", "already_cancelled"):
            row = rolled_back.execute("SELECT pgoutbox.cancel(%s)", (message_id,)).fetchone()
            assert row == (result,)
        by_key = rolled_back.execute("SELECT * FROM pgoutbox.cancel_by_key('mail', coalesce_key => 'k')")
        assert by_key.fetchall() == [(message_id, "already_cancelled")]

    def test_a_cancel_of_a_missing_message_returns_missing(self, rolled_back: psycopg.Connection) -> None:
        assert Operator(rolled_back).cancel(UNUSED_ID).result == "missing"

    def test_a_key_identifies_its_message(self, rolled_back: psycopg.Connection) -> None:
        put(rolled_back, State.SENT, coalesce_key="k")
        newest = put(rolled_back, coalesce_key="k")
        only = put(rolled_back, dedupe_key="k")
        cancelled = ActResult.CANCELLED
        assert Operator(rolled_back).cancel_by_key("mail", coalesce_key="k") == [MessageResult(newest, cancelled)]
        assert Operator(rolled_back).cancel_by_key("mail", dedupe_key="k") == [MessageResult(only, cancelled)]
        assert Operator(rolled_back).cancel_by_key("sms", dedupe_key="k") == []


class TestPrune:
    def test_a_prune_deletes_old_final_messages(self, rolled_back: psycopg.Connection) -> None:
        for state in State:
            put(rolled_back, state, age=2 * DAY)
        put(rolled_back, State.SENT)
        expected = {State.SENT: 1, State.SKIPPED: 1, State.CANCELLED: 1}
        assert Operator(rolled_back).count_prunable(DAY) == expected
        totals = Operator(rolled_back).prune(DAY)
        assert (totals.messages, totals.total) == (expected, 3)
        left = [m.state for m in Operator(rolled_back).list_messages()]
        assert left == [State.SENT, State.FAILED, State.SENDING, State.PENDING]

    def test_failed_messages_are_pruned_only_on_request(self, rolled_back: psycopg.Connection) -> None:
        put(rolled_back, State.FAILED, age=2 * DAY)
        put(rolled_back, State.SENT, age=2 * DAY)
        assert Operator(rolled_back).prune(DAY, states=[State.FAILED]).messages == {State.FAILED: 1}
        assert [m.state for m in Operator(rolled_back).list_messages()] == [State.SENT]

    def test_a_prune_by_topic_keeps_other_topics(self, rolled_back: psycopg.Connection) -> None:
        put(rolled_back, State.SENT, topic="sms", age=2 * DAY)
        put(rolled_back, State.SENT, age=2 * DAY)
        Operator(rolled_back).prune(DAY, topic="sms")
        assert [m.topic for m in Operator(rolled_back).list_messages()] == ["mail"]

    @pytest.mark.parametrize("state", [State.PENDING, State.SENDING])
    def test_a_prune_of_owed_messages_is_refused(self, rolled_back: psycopg.Connection, state: State) -> None:
        put(rolled_back, state)
        with pytest.raises(StateError, match=f"state {state} are not final"):
            Operator(rolled_back).prune(DAY, states=[state])

    @pytest.mark.parametrize("state", [State.PENDING, State.SENDING])
    def test_the_statement_itself_skips_owed_messages(self, rolled_back: psycopg.Connection, state: State) -> None:
        message_id = put(rolled_back, state, dedupe_key="k")
        rolled_back.execute("ALTER TABLE pgoutbox.message_live DROP CONSTRAINT message_live_sound")
        rolled_back.execute("UPDATE pgoutbox.message SET finished_at = '2001-01-01' WHERE id = %s", (message_id,))
        parameters = {"states": [state.value], "older_than_seconds": 1.0, "topic": None, "limit": 9}
        assert rolled_back.execute(sql.PRUNE, parameters).fetchall() == []
        assert state_of(rolled_back, message_id) == state
        assert count(rolled_back, "dedupe") == 1

    def test_dedupe_keys_are_deleted_with_their_message(self, rolled_back: psycopg.Connection) -> None:
        put(rolled_back, State.SENT, dedupe_key="old", age=2 * DAY)
        young = put(rolled_back, State.SENT, dedupe_key="young")
        Operator(rolled_back).prune(DAY)
        assert count(rolled_back, "dedupe") == 1
        assert put(rolled_back, dedupe_key="young") == young
        assert put(rolled_back, dedupe_key="old") > young

    def test_a_coalesce_key_is_deleted_with_its_last_message(self, rolled_back: psycopg.Connection) -> None:
        put(rolled_back, State.SENT, topic="sms", coalesce_key="k", age=2 * DAY)
        put(rolled_back, coalesce_key="k")
        assert Operator(rolled_back).prune(DAY).key_heads == 1
        assert rolled_back.execute("SELECT scope, key FROM pgoutbox.key_head").fetchall() == [("mail", "k")]

    def test_an_ordering_key_is_deleted_with_its_last_message(self, rolled_back: psycopg.Connection) -> None:
        put(rolled_back, State.SENT, queue="bulk", ordering_key="k", age=2 * DAY)
        put(rolled_back, ordering_key="k")
        Operator(rolled_back).prune(DAY)
        assert rolled_back.execute("SELECT scope, key FROM pgoutbox.key_head").fetchall() == [("/default", "k")]

    def test_a_prune_deletes_at_most_the_requested_number_of_contents_at_once(
        self, rolled_back: psycopg.Connection
    ) -> None:
        for _ in range(2):
            rolled_back.execute("INSERT INTO pgoutbox.content (body) VALUES ('1')")
        parameters: dict[str, object] = {"limit": 1, "after_key": ""}
        (page,) = rolled_back.execute(sql.PRUNE_CONTENT, parameters).fetchall()
        assert page[2:] == (1, 1)
        assert rolled_back.execute(sql.PRUNE_CONTENT, parameters | {"after_key": page[1]}).rowcount == 1
        assert count(rolled_back, "content") == 0

    @pytest.mark.parametrize("name", ["coalesce_key", "ordering_key"])
    def test_a_key_in_use_by_a_producer_is_skipped(
        self, operator: psycopg.Connection, connect: Connect, name: str
    ) -> None:
        producer = connect()
        put(operator, State.SENT, age=2 * DAY, **{name: "k"})
        put(operator)
        put(producer, **{name: "k"})  # type: ignore[arg-type]
        assert Operator(operator).prune(DAY).total == 1
        producer.commit()
        assert count(operator, "key_head") == 1

    def test_a_locked_message_is_skipped(self, operator: psycopg.Connection, connect: Connect) -> None:
        message_id = put(operator, State.SENT, age=2 * DAY)
        other = connect()
        other.execute("SELECT FROM pgoutbox.message WHERE id = %s FOR UPDATE", (message_id,))
        assert Operator(operator).prune(DAY).total == 0

    def test_each_batch_is_committed_separately(self, operator: psycopg.Connection, connect: Connect) -> None:
        for _ in range(5):
            put(operator, State.SENT, age=2 * DAY)
        observer = connect(autocommit=True)
        seen: list[tuple[int, int]] = []
        Operator(operator).prune(
            DAY, batch_size=2, progress=lambda done: seen.append((done, count(observer, "message")))
        )
        assert seen == [(2, 3), (4, 1), (5, 0)]

    @pytest.mark.parametrize("older_than", [timedelta(), -DAY, timedelta(days=36_501)])
    def test_an_invalid_age_is_refused(self, rolled_back: psycopg.Connection, older_than: timedelta) -> None:
        with pytest.raises(ConfigurationError, match="older_than"):
            Operator(rolled_back).prune(older_than)


class TestQueues:
    def test_a_second_pause_keeps_the_first_time(self, operator: psycopg.Connection) -> None:
        paused_at, resume_at = Operator(operator).pause("bulk")
        assert resume_at is None
        assert Operator(operator).pause("bulk") == (paused_at, None)
        assert [(q.queue, q.paused_at) for q in Operator(operator).list_queues()] == [("bulk", paused_at)]

    def test_a_pause_with_an_end_can_be_extended_or_made_unlimited(self, operator: psycopg.Connection) -> None:
        paused_at, first_end = Operator(operator).pause("bulk", duration=timedelta(minutes=1))
        _, second_end = Operator(operator).pause("bulk", duration=timedelta(hours=1))
        assert first_end is not None
        assert second_end is not None
        assert second_end - first_end > timedelta(minutes=58)
        assert Operator(operator).pause("bulk") == (paused_at, None)

    def test_an_expired_pause_does_not_count(self, operator: psycopg.Connection) -> None:
        former, _ = Operator(operator).pause("bulk", duration=timedelta(minutes=1))
        operator.execute("UPDATE pgoutbox.queue SET resume_at = now() - interval '1 s'")
        assert Operator(operator).list_queues() == []
        again, _ = Operator(operator).pause("bulk")
        assert again > former

    def test_resume_reports_if_the_queue_was_paused(self, rolled_back: psycopg.Connection) -> None:
        Operator(rolled_back).pause("bulk")
        assert Operator(rolled_back).resume("bulk")
        assert not Operator(rolled_back).resume("bulk")
        Operator(rolled_back).pause("bulk", duration=DAY)
        rolled_back.execute("UPDATE pgoutbox.queue SET paused_at = now() - interval '2 days', resume_at = now()")
        assert not Operator(rolled_back).resume("bulk")  # The pause has ended by itself.
        assert not Operator(rolled_back).resume("default")
        assert Operator(rolled_back).list_queues() == []

    def test_resume_wakes_a_sleeping_worker(self, operator: psycopg.Connection, connect: Connect) -> None:
        Operator(operator).pause("default")
        with sleeping_worker(connect, "limited") as rings:
            Operator(operator).resume("default")
            assert rings() == ["all default"]


class TestPausedTopics:
    def test_a_second_pause_keeps_the_first_time_and_sets_the_new_end(self, operator: psycopg.Connection) -> None:
        paused_at, resume_at = Operator(operator).pause_topic("mail.digest")
        assert resume_at is None
        again, end = Operator(operator).pause_topic("mail.digest", duration=timedelta(hours=1))
        assert again == paused_at
        assert end is not None
        assert timedelta(minutes=59) < end - paused_at < timedelta(hours=2)
        assert Operator(operator).list_paused_topics() == [("mail.digest", paused_at, end)]
        assert Operator(operator).pause_topic("mail.digest") == (paused_at, None)

    def test_a_pause_that_has_ended_by_itself_does_not_count(self, operator: psycopg.Connection) -> None:
        former, _ = Operator(operator).pause_topic("mail.digest", duration=timedelta(minutes=1))
        operator.execute("UPDATE pgoutbox.topic_pause SET resume_at = now() - interval '1 s'")
        assert Operator(operator).list_paused_topics() == []
        again, _ = Operator(operator).pause_topic("mail.digest")
        assert again > former
        operator.execute("UPDATE pgoutbox.topic_pause SET resume_at = now() - interval '1 s'")
        assert not Operator(operator).resume_topic("mail.digest")

    def test_resume_reports_if_the_topic_was_paused(self, rolled_back: psycopg.Connection) -> None:
        Operator(rolled_back).pause_topic("mail.digest")
        assert not Operator(rolled_back).resume_topic("mail")
        assert Operator(rolled_back).resume_topic("mail.digest")
        assert not Operator(rolled_back).resume_topic("mail.digest")
        assert Operator(rolled_back).list_paused_topics() == []

    @pytest.mark.parametrize(
        ("topic", "seconds", "problem"),
        [
            ("Mail", None, "topic: must be 1 to 63 of"),
            ("mail.*", None, "topic: must be 1 to 63 of"),
            ("m" * 64, None, "topic: must be 1 to 63 of"),
            ("mail", 0.5, "duration: must be from 1 second to 10 years"),
            ("mail", -60, "duration: must be from 1 second to 10 years"),
            ("mail", 1e9, "duration: must be from 1 second to 10 years"),
            ("Mail", 0.5, "topic: must be 1 to 63 of"),
        ],
    )
    def test_an_invalid_pause_is_refused(
        self, rolled_back: psycopg.Connection, topic: str, seconds: float | None, problem: str
    ) -> None:
        duration = None if seconds is None else timedelta(seconds=seconds)
        with pytest.raises(ArgumentError, match=f"^{problem}"):
            Operator(rolled_back).pause_topic(topic, duration=duration)

    def test_a_resume_and_a_pause_with_an_end_wake_the_sleeping_workers_of_all_queues(
        self, operator: psycopg.Connection, connect: Connect
    ) -> None:
        with sleeping_worker(connect) as rings:
            Operator(operator).pause_topic("mail.digest", duration=timedelta(hours=1))
            assert rings() == ["all "]
            Operator(operator).resume_topic("mail.digest")
            assert rings() == ["all "]


class TestFairShares:
    def test_a_share_is_set_in_parts_and_reset(self, operator: psycopg.Connection) -> None:
        acts = Operator(operator)
        assert acts.set_fair_share("default", "acme", weight=5)
        assert acts.set_fair_share("default", "acme", max_in_flight=0)
        assert not acts.set_fair_share("default", "acme", max_in_flight=0)
        assert shares_of(operator) == [("acme", 5, 0, None, None)]
        assert acts.set_fair_share("default", "acme", max_in_flight=20)
        assert acts.set_fair_share("default", weight=2, max_in_flight=50)
        assert shares_of(operator) == [("", 2, 50, None, None), ("acme", 5, 20, None, None)]
        assert acts.set_fair_share("default", "acme", rate=Rate(10, 60))
        assert shares_of(operator)[1] == ("acme", 5, 20, 10, 60)
        assert acts.set_fair_share("default", "acme", weight=4, remove=["rate"])
        assert not acts.set_fair_share("default", "acme", remove=["rate"])
        assert acts.set_fair_share("default", "acme", remove=["max_in_flight"])
        assert shares_of(operator)[1] == ("acme", 4, None, None, None)
        assert acts.set_fair_share("default", "acme")
        assert not acts.set_fair_share("default", "acme")
        assert acts.set_fair_share("default")
        assert shares_of(operator) == []
        assert [(act.action, act.queue, act.details) for act in reversed(acts.list_acts())] == [
            ("limit", "default", {"fair_key": "acme", "weight": 5, "max_in_flight": "none", "rate": "none"}),
            ("pause", "default", {"fair_key": "acme", "weight": 5, "max_in_flight": 0, "rate": "none"}),
            ("resume", "default", {"fair_key": "acme", "weight": 5, "max_in_flight": 20, "rate": "none"}),
            ("limit", "default", {"weight": 2, "max_in_flight": 50, "rate": "none"}),
            ("limit", "default", {"fair_key": "acme", "weight": 5, "max_in_flight": 20, "rate": "10/60s"}),
            ("limit", "default", {"fair_key": "acme", "weight": 4, "max_in_flight": 20, "rate": "none"}),
            ("limit", "default", {"fair_key": "acme", "weight": 4, "max_in_flight": "none", "rate": "none"}),
            ("limit", "default", {"fair_key": "acme", "weight": "none", "max_in_flight": "none", "rate": "none"}),
            ("limit", "default", {"weight": "none", "max_in_flight": "none", "rate": "none"}),
        ]

    def test_the_turn_of_the_keys_survives_all_acts(self, operator: psycopg.Connection) -> None:
        operator.execute("INSERT INTO pgoutbox.fair_share (queue, after_key) VALUES ('default', 'k7')")
        Operator(operator).set_fair_share("default", weight=3)
        Operator(operator).set_fair_share("default")
        assert operator.execute("SELECT after_key FROM pgoutbox.fair_share").fetchall() == [("k7",)]

    @pytest.mark.parametrize(
        ("share", "problem"),
        [
            ({"queue": "Mail"}, "queue: must be 1 to 63 of"),
            ({"queue": "m" * 64}, "queue: must be 1 to 63 of"),
            ({"fair_key": ""}, "fair_key: must not be empty; pass NULL for no key"),
            ({"fair_key": "\u00e9" * 257}, "fair_key: must not be longer than 512 bytes"),
            ({"weight": 0}, "weight: must be from 1 to 1000"),
            ({"weight": 1001}, "weight: must be from 1 to 1000"),
            ({"max_in_flight": -1}, "max_in_flight: must be from 0 to 1000000"),
            ({"max_in_flight": 1_000_001}, "max_in_flight: must be from 0 to 1000000"),
            ({"max_in_flight": 10**30}, "max_in_flight: must be from 0 to 1000000"),
            ({"weight": -(10**30)}, "weight: must be from 1 to 1000"),
            ({"rate": Rate(0, 1)}, "rate_count: must be from 1 to 1000000"),
            ({"rate": Rate(1_000_001, 1)}, "rate_count: must be from 1 to 1000000"),
            ({"rate": Rate(1, 0)}, "rate_seconds: must be from 1 to 2592000"),
            ({"rate": Rate(1, 0.5)}, "rate_seconds: must be a whole number; got 0.5"),
            ({"rate": Rate(1, math.inf)}, "rate_seconds: must be a whole number; got inf"),
            ({"rate": Rate(1, 1e30)}, "rate_seconds: must be from 1 to 2592000"),
            ({"fair_key": "a\0"}, "fair_key: NUL at character 1 is not storable"),
            ({"fair_key": "\udcff"}, "fair_key: lone surrogate U"),
            ({"remove": ["weight"]}, "remove: must not name a value that is given too"),
            ({"remove": ["speed"]}, "remove: must be of weight, max_in_flight and rate"),
        ],
    )
    def test_an_invalid_share_is_refused(
        self, rolled_back: psycopg.Connection, share: dict[str, Any], problem: str
    ) -> None:
        with pytest.raises(ArgumentError, match=f"^{problem}"):
            Operator(rolled_back).set_fair_share(**{"queue": "mail", "weight": 1, **share})

    def test_only_a_share_that_allows_messages_wakes_a_sleeping_worker(
        self, operator: psycopg.Connection, connect: Connect
    ) -> None:
        with sleeping_worker(connect) as rings:
            Operator(operator).set_fair_share("other", "acme", max_in_flight=0)
            Operator(operator).set_fair_share("default", "acme", max_in_flight=3)
            assert rings() == ["all default"]
            Operator(operator).set_fair_share("default", "acme", max_in_flight=0)
            Operator(operator).set_fair_share("default", "acme")
            assert rings() == ["all default"]

    def test_the_keys_that_wait_longest_are_listed_first(self, operator: psycopg.Connection) -> None:
        for key, minutes in (("big", 1), ("big", 3), ("later", -60), ("old", 9), ("small", 2)):
            put_fair(operator, key, minutes)
        operator.execute("UPDATE pgoutbox.message SET lane = 0 WHERE fair_key = 'small'")
        put_fair(operator, "other", 99, queue="other")
        Operator(operator).set_fair_share("default", "paused", max_in_flight=0)
        Operator(operator).set_fair_share("default", weight=4, max_in_flight=7)
        Operator(operator).set_fair_share("default", "big", weight=9)
        found = Operator(operator).list_fair_keys("default")
        assert [(one.key, one.due, one.in_flight, one.weight, one.max_in_flight) for one in found.keys] == [
            ("old", 1, 0, 4, 7),
            ("big", 2, 0, 9, 7),
            ("later", 0, 0, 4, 7),
            ("paused", 0, 0, 4, 0),
            ("small", 0, 1, 4, 7),
        ]
        assert 530 < (found.keys[0].oldest_due_seconds or 0) < 600
        few = Operator(operator).list_fair_keys("default", limit=2)
        assert ([one.key for one in few.keys], few.key_count) == (["old", "big"], 5)

    def test_the_key_that_is_the_prefix_comes_first(self, operator: psycopg.Connection) -> None:
        for key, minutes in (("a", 1), ("ab", 5), ("abc", 9), ("b", 60)):
            put_fair(operator, key, minutes)
        assert [one.key for one in Operator(operator).list_fair_keys("default", prefix="ab").keys] == ["ab", "abc"]
        assert Operator(operator).list_fair_keys("default", prefix="x") == ([], 0)
        with pytest.raises(ArgumentError, match=r"^prefix: NUL"):
            Operator(operator).list_fair_keys("default", prefix="\0")

    def test_the_rate_of_a_key_is_listed_with_the_time_of_its_next_turn(self, operator: psycopg.Connection) -> None:
        acts = Operator(operator)
        for key in ("common", "free", "own", "rested"):
            put_fair(operator, key, 1)
        acts.set_fair_share("default", rate=Rate(10, 900))
        acts.set_fair_share("default", "own", weight=3, rate=Rate(60, 3600))
        operator.execute(
            "INSERT INTO pgoutbox.fair_share (queue, fair_key, spent_at)"
            " VALUES ('default', 'common', now() + interval '90 s'), ('default', 'own', now() + interval '180 s'),"
            " ('default', 'free', now() - interval '1 s'), ('default', 'rested', NULL)"
            " ON CONFLICT ON CONSTRAINT fair_share_pkey DO UPDATE SET spent_at = excluded.spent_at"
        )
        found = {one.key: one for one in acts.list_fair_keys("default").keys}
        assert {key: one.rate for key, one in found.items()} == {
            "common": "10/15m", "free": "10/15m", "own": "60/h", "rested": "10/15m",
        }  # fmt: skip
        ((now,),) = operator.execute("SELECT now()").fetchall()
        waits = {
            key: one.next_turn_at and round((one.next_turn_at - now).total_seconds()) for key, one in found.items()
        }
        assert waits == {"common": 90, "free": None, "own": 60, "rested": None}

    def test_a_key_that_has_only_spent_its_rate_is_not_listed(self, operator: psycopg.Connection) -> None:
        acts = Operator(operator)
        acts.set_fair_share("default", "acme", rate=Rate(1, 3600))
        operator.execute("UPDATE pgoutbox.fair_share SET spent_at = now() + interval '1 h' WHERE fair_key = 'acme'")
        assert [one.rate for one in acts.list_fair_keys("default").keys] == ["1/h"]
        acts.set_fair_share("default", "acme")
        assert operator.execute("SELECT count(*) FROM pgoutbox.fair_share WHERE fair_key = 'acme'").fetchone() == (1,)
        assert acts.list_fair_keys("default") == ([], 0)
        assert not acts.set_fair_share("default", "acme")

    @pytest.mark.parametrize("is_analyzed", [False, True])
    def test_keys_that_have_only_spent_their_rate_are_not_read(
        self, operator: psycopg.Connection, is_analyzed: bool
    ) -> None:
        operator.execute(
            "INSERT INTO pgoutbox.fair_share (queue, fair_key, spent_at)"
            " SELECT 'default', 'k' || n, now() FROM generate_series(1, 2000) AS n"
        )
        operator.execute(
            "INSERT INTO pgoutbox.message_live (id, topic, payload, fair_key, lane)"
            " SELECT nextval('pgoutbox.message_id_seq'), 'mail', '1', 'k' || n, 2 FROM generate_series(1, 300) AS n"
        )
        if is_analyzed:
            operator.execute("ANALYZE pgoutbox.message_live, pgoutbox.fair_share")
        assert Operator(operator).list_fair_keys("default", limit=3).key_count == 300
        assert read_count(operator, "fair_share") < 350

    def test_two_acts_on_a_new_key_lose_no_value(self, connect: Connect, db: psycopg.Connection) -> None:
        first, second = connect(), connect(autocommit=True)
        first.execute("SELECT pgoutbox.set_fair_share('default', 'acme', weight => 5)")
        with ThreadPoolExecutor(1) as threads:
            future = threads.submit(
                second.execute, "SELECT pgoutbox.set_fair_share('default', 'acme', NULL, 7, 10, 60)"
            )
            until_blocked(db, second, future)
            first.commit()
            future.result()
        assert shares_of(db) == [("acme", 5, 7, 10, 60)]

    def test_an_act_waits_for_the_turns_of_a_worker_and_not_in_a_circle(
        self, connect: Connect, db: psycopg.Connection
    ) -> None:
        """The worker has the row of the queue, and takes that of the key only when the act has begun."""
        db.execute("SELECT pgoutbox.set_fair_share('default', 'acme', rate_count => 1, rate_seconds => 60)")
        enqueue(db, "mail", fair_key="acme")
        worker, operator = connect(), connect(autocommit=True)
        worker.execute("SELECT FROM pgoutbox.fair_share WHERE fair_key = '' FOR UPDATE")
        with ThreadPoolExecutor(1) as threads:
            future = threads.submit(operator.execute, "SELECT pgoutbox.set_fair_share('default', 'acme', 2)")
            until_blocked(db, operator, future)
            worker.execute("SELECT pgoutbox._give_turns('default', '{mail}', 5)")
            worker.commit()
            assert future.result().fetchone() == (True,)
        assert db.execute(
            "SELECT weight, spent_at > now() FROM pgoutbox.fair_share WHERE fair_key = 'acme'"
        ).fetchone() == (2, True)

    def test_rates_are_forgotten_without_a_wait_for_a_worker(self, connect: Connect, db: psycopg.Connection) -> None:
        """Both lock several keys, each in an order of its own: if both waited, they could wait in a circle."""
        db.execute(
            "INSERT INTO pgoutbox.fair_share (queue, fair_key, spent_at)"
            " VALUES ('default', 'a', now()), ('default', 'b', now())"
        )
        worker = connect()
        worker.execute("UPDATE pgoutbox.fair_share SET spent_at = now() + interval '1 h' WHERE fair_key = 'a'")
        db.execute("SET lock_timeout = '100ms'")
        db.execute("SELECT pgoutbox._forget_requests()")
        worker.commit()
        assert db.execute("SELECT fair_key FROM pgoutbox.fair_share").fetchall() == [("a",)]

    @pytest.mark.parametrize("is_analyzed", [False, True])
    def test_many_keys_are_read_along_their_indexes(self, operator: psycopg.Connection, is_analyzed: bool) -> None:
        operator.execute(
            "INSERT INTO pgoutbox.message_live (id, topic, payload, fair_key, lane)"
            " SELECT nextval('pgoutbox.message_id_seq'), 'mail', '1', 'k' || n % 500, 2"
            " FROM generate_series(1, 20000) AS n"
        )
        if is_analyzed:
            operator.execute("ANALYZE pgoutbox.message_live")
        found = Operator(operator).list_fair_keys("default", limit=3)
        assert ([one.due for one in found.keys], found.key_count) == ([40] * 3, 500)
        # A row for each key to find it, one for its oldest message, and those that are counted.
        assert 500 <= read_count(operator, "message_live") < 500 * 2 + 3 * 40 + 50


def read_count(connection: psycopg.Connection, table: str) -> float:
    """Return how many rows of a table the list of fair keys reads."""
    parameters = {"queue": "default", "prefix": "", "limit": 3, **FAIR_COUNTS}
    explain = f"EXPLAIN (ANALYZE, FORMAT JSON, TIMING OFF) {sql.LIST_FAIR_KEYS}".encode()
    (([found],),) = connection.execute(explain, parameters).fetchall()
    nodes, count = [found["Plan"]], 0.0
    while nodes:
        node = nodes.pop()
        nodes += node.get("Plans", [])
        if node.get("Relation Name") == table:
            count += node["Actual Loops"] * (node["Actual Rows"] + node.get("Rows Removed by Filter", 0))
    return count


def put_fair(connection: psycopg.Connection, key: str, minutes: float, *, queue: str = "default") -> None:
    """Put a message that has been due for so long."""
    message_id = enqueue(connection, "mail", queue=queue, fair_key=key)
    due_earlier(connection, message_id, 60 * minutes)


def shares_of(connection: psycopg.Connection) -> list[tuple[object, ...]]:
    return connection.execute(
        "SELECT fair_key, weight, max_in_flight, rate_count, rate_seconds FROM pgoutbox.fair_share_view"
        " WHERE num_nonnulls(weight, max_in_flight, rate_count) > 0 ORDER BY queue, fair_key"
    ).fetchall()

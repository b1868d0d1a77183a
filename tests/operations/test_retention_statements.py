"""Tests retention rules: the rule of each message, its duration, and the rows that are deleted with the message."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, LiteralString

import psycopg
import pytest

from pgoutbox.database import operator_connection, sql
from pgoutbox.errors import ConfigurationError
from pgoutbox.message import FINAL_STATES, State
from pgoutbox.operations import Operator, RetentionRule
from pgoutbox.settings import load_settings
from tests.support import races
from tests.support.messages import ADD_ATTEMPT, put
from tests.support.outbox_actions import attempts_of, cancel, enqueue, row_of, rows_of, state_of
from tests.support.roles import login
from tests.support.worker_sql import claim, claimed_ats, forget_sent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Connect

DAY = timedelta(days=1)
ZERO = timedelta()


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


def keys_of(connection: psycopg.Connection) -> list[str]:
    """Return the dedupe keys that are taken."""
    return [row[0] for row in connection.execute("SELECT dedupe_key FROM pgoutbox.dedupe ORDER BY 1").fetchall()]


class TestRules:
    def test_a_rule_is_set_changed_and_removed(self, rolled_back: psycopg.Connection) -> None:
        Operator(rolled_back).set_retention("*", "sent", 30 * DAY)
        Operator(rolled_back).set_retention("mail", "sent", DAY)
        Operator(rolled_back).set_retention("mail", "sent", None)
        Operator(rolled_back).set_retention("mail", "failed", timedelta(hours=36))
        Operator(rolled_back).set_retention("sms", "dedupe_key", ZERO)
        assert Operator(rolled_back).retention_rules() == [
            RetentionRule("mail", "failed", timedelta(hours=36)),
            RetentionRule("mail", "sent", None),
            RetentionRule("sms", "dedupe_key", ZERO),
            RetentionRule("*", "sent", 30 * DAY),
        ]
        assert Operator(rolled_back).unset_retention("mail", "sent")
        assert not Operator(rolled_back).unset_retention("mail", "sent")

    @pytest.mark.parametrize(
        ("topic", "state", "keep", "named"),
        [
            ("Mail", "sent", DAY, "topic: "),
            ("", "sent", DAY, "topic: "),
            ("mail", "pending", DAY, "state='pending'"),
            ("mail", "sending", DAY, "state='sending'"),
            ("mail", "sent", -DAY, "keep=-1 day"),
            ("mail", "sent", 36_501 * DAY, "keep=36501 days"),
        ],
    )
    def test_an_invalid_argument_is_named(
        self, rolled_back: psycopg.Connection, topic: str, state: str, keep: timedelta, named: str
    ) -> None:
        with pytest.raises(ConfigurationError, match=named):
            Operator(rolled_back).set_retention(topic, state, keep)
        assert Operator(rolled_back).retention_rules() == []

    @pytest.mark.parametrize(
        ("topic", "state", "keep", "constraint"),
        [
            ("Mail", "sent", "1 day", "retention_topic_sound"),
            ("**", "sent", "1 day", "retention_topic_sound"),
            ("mail", "pending", "1 day", "retention_state_known"),
            ("mail", "sent", "-1 day", "retention_keep_sound"),
            ("mail", "sent", "102 years", "retention_keep_sound"),
        ],
    )
    def test_the_table_refuses_it_from_any_role(
        self, rolled_back: psycopg.Connection, topic: str, state: str, keep: str, constraint: str
    ) -> None:
        with pytest.raises(psycopg.errors.CheckViolation) as caught:
            rolled_back.execute("INSERT INTO pgoutbox.retention VALUES (%s, %s, %s)", (keep, topic, state))
        assert caught.value.diag.constraint_name == constraint


class TestPrune:
    def test_without_rules_nothing_is_deleted(self, rolled_back: psycopg.Connection) -> None:
        for state in State:
            put(rolled_back, state, age=10_000 * DAY)
        assert Operator(rolled_back).prune_by_retention().total == 0
        assert len(rows_of(rolled_back)) == len(State)

    @pytest.mark.parametrize("ruled", sorted(FINAL_STATES))
    def test_a_rule_deletes_only_older_messages_in_its_state(
        self, rolled_back: psycopg.Connection, ruled: State
    ) -> None:
        Operator(rolled_back).set_retention("mail", ruled, DAY)
        old = {state: put(rolled_back, state, age=2 * DAY) for state in State}
        young = put(rolled_back, ruled, age=DAY / 2)
        foreign = put(rolled_back, ruled, topic="sms", age=2 * DAY)
        assert Operator(rolled_back).prune_by_retention().messages == {ruled: 1}
        assert [row.id for row in rows_of(rolled_back)] == [
            *(old[state] for state in State if state is not ruled), young, foreign,
        ]  # fmt: skip

    @pytest.mark.parametrize("state", sorted(FINAL_STATES))
    def test_zero_deletes_existing_messages(self, rolled_back: psycopg.Connection, state: State) -> None:
        Operator(rolled_back).set_retention("*", state, ZERO)
        put(rolled_back, state)
        assert Operator(rolled_back).prune_by_retention().messages == {state: 1}

    @pytest.mark.parametrize("state", [State.PENDING, State.SENDING])
    def test_owed_messages_stay_under_any_contents_of_the_tables(
        self, rolled_back: psycopg.Connection, state: State
    ) -> None:
        message_id = put(rolled_back, state, dedupe_key="k")
        rolled_back.execute(ADD_ATTEMPT, (message_id, 1))
        for change in (
            "ALTER TABLE pgoutbox.message_live DROP CONSTRAINT message_live_sound",
            "ALTER TABLE pgoutbox.retention DROP CONSTRAINT retention_state_known",
            "UPDATE pgoutbox.message SET finished_at = '2001-01-01'",
        ):
            rolled_back.execute(change.encode())
        rolled_back.execute("INSERT INTO pgoutbox.retention VALUES ('0', '*', %s)", [state])
        assert Operator(rolled_back).prune_by_retention().total == 0
        assert state_of(rolled_back, message_id) == state
        assert (len(attempts_of(rolled_back, message_id)), keys_of(rolled_back)) == (1, ["k"])

    def test_an_owed_message_with_the_id_of_an_old_one_stays(self, rolled_back: psycopg.Connection) -> None:
        Operator(rolled_back).set_retention("*", "sent", DAY)
        old = put(rolled_back, State.SENT, age=2 * DAY)
        rolled_back.execute("INSERT INTO pgoutbox.message_live (id, topic, payload) VALUES (%s, 'mail', '1')", (old,))
        assert Operator(rolled_back).prune_by_retention().messages == {State.SENT: 1}
        assert [row.state for row in rows_of(rolled_back)] == [State.PENDING]

    def test_a_statement_applies_only_the_given_rule(self, rolled_back: psycopg.Connection) -> None:
        for topic, state in (("mail", State.SENT), ("mail", State.FAILED), ("sms", State.SENT)):
            Operator(rolled_back).set_retention(topic, state, DAY)
            put(rolled_back, state, topic=topic, age=2 * DAY)
        parameters = {"topic": "mail", "state": "sent", "limit": 9, "since": "-infinity", "until": "infinity"}
        assert rolled_back.execute(sql.PRUNE_BY_RULE, parameters).fetchall() == [("sent",)]

    def test_a_rule_of_another_state_does_not_exempt_its_topic(self, rolled_back: psycopg.Connection) -> None:
        Operator(rolled_back).set_retention("*", "sent", DAY)
        Operator(rolled_back).set_retention("mail", "failed", None)
        put(rolled_back, State.SENT, topic="mail", age=2 * DAY)
        assert Operator(rolled_back).prune_by_retention().messages == {State.SENT: 1}

    @pytest.mark.parametrize("topic", ["*", "mail"])
    @pytest.mark.parametrize(
        ("statement", "state", "what"),
        [
            pytest.param(sql.PRUNE_BY_RULE, "sent", "message", id="messages"),
            pytest.param(sql.PRUNE_DEDUPE_BY_RULE, "dedupe_key", "dedupe", id="dedupe keys"),
        ],
    )
    def test_a_changed_rule_no_longer_deletes_by_its_old_value(
        self,
        operator: psycopg.Connection,
        connect: Connect,
        statement: LiteralString,
        state: str,
        what: LiteralString,
        topic: str,
    ) -> None:
        db, pruning = connect(autocommit=True), connect()
        Operator(db).set_retention("*", state, DAY)
        old, _ = put(db, State.SENT, dedupe_key="a", age=2 * DAY), put(db, State.SENT, dedupe_key="b", age=2 * DAY)
        if what == "dedupe":
            db.execute("UPDATE pgoutbox.dedupe SET created_at = created_at - interval '2 days', is_kept = true")
            db.execute("DELETE FROM pgoutbox.message WHERE id = %s", [old])
        parameters = {"topic": "*", "state": state, "limit": 1, "since": "-infinity", "until": "infinity"}
        place = {"after_scope": "", "after_key": ""}
        assert pruning.execute(statement, parameters | place).rowcount == 1
        with ThreadPoolExecutor(1) as threads:
            changed = threads.submit(Operator(operator).set_retention, topic, state, None)
            races.until_blocked(db, operator, changed)
            pruning.commit()
            changed.result()
        assert db.execute(b"SELECT count(*) FROM pgoutbox." + what.encode()).fetchall() == [(1,)]

    def test_attempts_and_keys_are_deleted_with_their_message(self, rolled_back: psycopg.Connection) -> None:
        Operator(rolled_back).set_retention("*", "sent", DAY)
        old = put(rolled_back, State.SENT, dedupe_key="old", coalesce_key="old", age=2 * DAY)
        young = put(rolled_back, State.SENT, dedupe_key="young", coalesce_key="young")
        for message_id in (old, young):
            rolled_back.execute(ADD_ATTEMPT, (message_id, 1))
        totals = Operator(rolled_back).prune_by_retention()
        assert (totals.total, totals.key_heads, totals.dedupe_keys) == (1, 1, 0)
        assert (attempts_of(rolled_back, old), len(attempts_of(rolled_back, young))) == ([], 1)
        assert keys_of(rolled_back) == ["young"]

    def test_a_key_freed_by_hand_and_used_again_stays(self, rolled_back: psycopg.Connection) -> None:
        Operator(rolled_back).set_retention("*", "sent", DAY)
        put(rolled_back, State.SENT, dedupe_key="k", age=2 * DAY)
        rolled_back.execute("DELETE FROM pgoutbox.dedupe")
        newer = put(rolled_back, dedupe_key="k")
        assert Operator(rolled_back).prune_by_retention().messages == {State.SENT: 1}
        assert put(rolled_back, dedupe_key="k") == newer

    @pytest.mark.parametrize("by_rule", [True, False])
    def test_a_locked_key_of_a_deleted_message_is_skipped(
        self, operator: psycopg.Connection, connect: Connect, *, by_rule: bool
    ) -> None:
        Operator(operator).set_retention("*", "sent", ZERO)
        Operator(operator).set_retention("*", "dedupe_key", 7 * DAY)
        put(operator, State.SENT, dedupe_key="k")
        Operator(operator).prune_by_retention()
        operator.execute("UPDATE pgoutbox.dedupe SET created_at = now() - interval '9 days'")
        connect().execute("SELECT FROM pgoutbox.dedupe FOR UPDATE")
        totals = Operator(operator).prune_by_retention() if by_rule else Operator(operator).prune(DAY)
        assert totals.dedupe_keys == 0

    def test_keys_of_deleted_messages_have_their_own_rule(self, rolled_back: psycopg.Connection) -> None:
        Operator(rolled_back).set_retention("*", "sent", ZERO)
        for topic, key in (("mail", "new"), ("mail", "old"), ("sms", "old sms")):
            put(rolled_back, State.SENT, topic=topic, dedupe_key=key)
        Operator(rolled_back).prune_by_retention()
        put(rolled_back, dedupe_key="old, with its message")
        rolled_back.execute(
            "UPDATE pgoutbox.dedupe SET created_at = now() - interval '9 days' WHERE dedupe_key LIKE 'old%'"
        )
        assert Operator(rolled_back).prune_by_retention().dedupe_keys == 0
        Operator(rolled_back).set_retention("*", "dedupe_key", 7 * DAY)
        Operator(rolled_back).set_retention("sms", "dedupe_key", None)
        assert Operator(rolled_back).prune_by_retention().dedupe_keys == 1
        assert keys_of(rolled_back) == ["new", "old sms", "old, with its message"]

    def test_a_prune_by_age_deletes_old_keys_of_deleted_messages(self, rolled_back: psycopg.Connection) -> None:
        Operator(rolled_back).set_retention("*", "sent", ZERO)
        put(rolled_back, State.SENT, dedupe_key="old")
        Operator(rolled_back).prune_by_retention()
        put(rolled_back, dedupe_key="live")
        rolled_back.execute("UPDATE pgoutbox.dedupe SET created_at = now() - interval '9 days'")
        assert Operator(rolled_back).prune(DAY, states=[State.FAILED]).dedupe_keys == 0
        assert Operator(rolled_back).prune(10 * DAY).dedupe_keys == 0
        assert Operator(rolled_back).prune(DAY, topic="sms").dedupe_keys == 0
        assert Operator(rolled_back).prune(DAY).dedupe_keys == 1
        assert keys_of(rolled_back) == ["live"]

    def test_old_acts_are_deleted_by_the_rule_of_the_audit(self, rolled_back: psycopg.Connection) -> None:
        operator = Operator(rolled_back)
        operator.set_retention("*", "sent", DAY)
        operator.set_retention("*", "sent", 2 * DAY)
        rolled_back.execute("UPDATE pgoutbox.audit SET acted_at = now() - interval '40 days'")
        assert operator.prune_by_retention().acts == 0
        operator.set_retention("*", "audit", 50 * DAY)
        assert operator.prune_by_retention().acts == 0
        operator.set_retention("*", "audit", 30 * DAY)
        assert operator.prune_by_retention(batch_size=1).acts == 2
        kept = rolled_back.execute("SELECT details->>'state' FROM pgoutbox.audit").fetchall()
        assert kept == [("audit",), ("audit",)]

    @pytest.mark.parametrize(("topic", "keep"), [("mail", 90 * DAY), ("*", 29 * DAY)])
    def test_a_rule_of_the_audit_is_for_all_topics_and_keeps_thirty_days(
        self, rolled_back: psycopg.Connection, topic: str, keep: timedelta
    ) -> None:
        with pytest.raises(ConfigurationError, match="at least 30 days"):
            Operator(rolled_back).set_retention(topic, "audit", keep)
        with pytest.raises(psycopg.errors.CheckViolation, match="retention_audit_sound"):
            rolled_back.execute("INSERT INTO pgoutbox.retention VALUES (%s, %s, 'audit')", [keep, topic])

    @pytest.mark.parametrize("statement", ["INSERT", "UPDATE", "DELETE"])
    def test_an_operator_cannot_change_the_rule_of_the_audit(
        self, dsn: str, db: psycopg.Connection, statement: str
    ) -> None:
        if statement != "INSERT":
            Operator(db).set_retention("*", "audit", 90 * DAY)
        with login(dsn, "pgoutbox_operator") as theirs, psycopg.connect(theirs, autocommit=True) as connection:
            operator = Operator(connection)
            change = (
                functools.partial(operator.unset_retention, "*", "audit")
                if statement == "DELETE"
                else functools.partial(operator.set_retention, "*", "audit", 30 * DAY)
            )
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="only the owner of the schema"):
                change()
            operator.set_retention("*", "sent", DAY)

    def test_a_member_of_the_owner_may_change_the_rule_of_the_audit(self, dsn: str) -> None:
        roles = ("pgoutbox_owner", "pgoutbox_operator")
        with login(dsn, *roles) as theirs, psycopg.connect(theirs, autocommit=True) as connection:
            Operator(connection).set_retention("*", "audit", 30 * DAY)

    def test_each_batch_is_committed_separately(self, operator: psycopg.Connection, connect: Connect) -> None:
        Operator(operator).set_retention("*", "sent", DAY)
        for _ in range(5):
            put(operator, State.SENT, age=2 * DAY)
        observer = connect(autocommit=True)
        seen: list[tuple[int, int]] = []
        Operator(operator).prune_by_retention(
            batch_size=2, progress=lambda done: seen.append((done, len(rows_of(observer))))
        )
        assert seen == [(2, 3), (4, 1), (5, 0)]


class TestFinish:
    """Tests sent messages under a rule that keeps nothing."""

    def sending(self, connection: psycopg.Connection, **options: str) -> int:
        message_id = enqueue(connection, **options)  # type: ignore[arg-type] # only keys are passed
        claim(connection)
        return message_id

    def test_the_row_is_deleted_with_its_history_as_it_is_sent(self, rolled_back: psycopg.Connection) -> None:
        Operator(rolled_back).set_retention("greet", "sent", ZERO)
        message_id = self.sending(rolled_back, dedupe_key="k", coalesce_key="c")
        rolled_back.execute(ADD_ATTEMPT, (message_id, 7))
        assert forget_sent(rolled_back, (message_id, 1)) == {message_id}
        assert (rows_of(rolled_back), attempts_of(rolled_back, message_id)) == ([], [])
        assert enqueue(rolled_back, dedupe_key="k") == message_id

    @pytest.mark.parametrize(
        ("rules", "kept"),
        [
            ([], True),
            ([("*", "sent", ZERO)], False),
            ([("*", "sent", ZERO), ("greet", "failed", None)], False),
            ([("*", "sent", None), ("greet", "sent", ZERO)], False),
            ([("*", "sent", ZERO), ("greet", "sent", None)], True),
            ([("*", "sent", ZERO), ("greet", "sent", timedelta(milliseconds=1))], True),
            ([("other", "sent", ZERO), ("greet", "failed", ZERO), ("*", "skipped", ZERO)], True),
        ],
    )
    def test_the_most_specific_rule_applies(
        self,
        rolled_back: psycopg.Connection,
        rules: list[tuple[str, str, timedelta | None]],
        kept: bool,
    ) -> None:
        for rule in rules:
            Operator(rolled_back).set_retention(*rule)
        message_id = self.sending(rolled_back)
        assert forget_sent(rolled_back, (message_id, 1)) == {message_id}
        assert bool(rows_of(rolled_back)) == kept
        if kept:
            row = row_of(rolled_back, message_id)
            assert (row.state, row.is_finished, row.is_leased) == ("sent", True, False)

    def test_one_statement_both_finishes_and_deletes(self, rolled_back: psycopg.Connection) -> None:
        Operator(rolled_back).set_retention("other", "sent", ZERO)
        first, second = enqueue(rolled_back), enqueue(rolled_back, "other")
        claim(rolled_back, topics=["greet", "other"])
        assert forget_sent(rolled_back, (first, 1), (second, 1)) == {first, second}
        assert [row.id for row in rows_of(rolled_back)] == [first]

    def test_a_message_cancelled_in_flight_is_deleted_like_any_sent_one(self, rolled_back: psycopg.Connection) -> None:
        Operator(rolled_back).set_retention("*", "sent", ZERO)
        message_id = self.sending(rolled_back)
        assert cancel(rolled_back, message_id) == "requested"
        assert forget_sent(rolled_back, (message_id, 1)) == {message_id}
        assert rows_of(rolled_back) == []

    def test_an_open_transaction_that_cancels_a_message_delays_nothing(
        self, operator: psycopg.Connection, connect: Connect
    ) -> None:
        Operator(operator).set_retention("*", "sent", ZERO)
        first, second = enqueue(operator), enqueue(operator)
        claim(operator)
        assert cancel(connect(), second) == "requested"
        assert forget_sent(operator, (first, 1), (second, 1)) == {first, second}

    def test_a_locked_row_is_skipped_and_finished_later(self, operator: psycopg.Connection, connect: Connect) -> None:
        Operator(operator).set_retention("*", "sent", ZERO)
        first, locked = enqueue(operator), enqueue(operator)
        claim(operator)
        holder = connect()
        holder.execute("SELECT FROM pgoutbox.message WHERE id = %s FOR UPDATE", [locked])
        assert forget_sent(operator, (first, 1), (locked, 1)) == {first}
        holder.rollback()
        assert forget_sent(operator, (first, 1), (locked, 1)) == {locked}

    @pytest.mark.parametrize(
        "change", ["attempt_count = 2", "claimed_at = now()", "state = 'pending', worker = NULL, lane = 1"]
    )
    def test_a_message_that_changes_owner_while_the_function_waits_stays(
        self, operator: psycopg.Connection, connect: Connect, change: LiteralString
    ) -> None:
        """A worker may call the function directly, without the lock that the statement takes."""
        Operator(operator).set_retention("*", "sent", ZERO)
        message_id = self.sending(operator)
        claimed_at = claimed_ats(operator, message_id)[message_id]
        other, stale = connect(), connect()
        other.execute(f"UPDATE pgoutbox.message SET {change}")
        forget = "SELECT pgoutbox._forget_sent(%s, %s, %s, 'worker-1')"
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lambda: stale.execute(forget, ([message_id], [1], [claimed_at])).fetchall())
            races.until_blocked(operator, stale, waiting)
            other.commit()
            assert waiting.result() == []
        stale.commit()
        assert [row.id for row in rows_of(operator)] == [message_id]

    def test_only_messages_in_flight_are_deleted(self, operator: psycopg.Connection) -> None:
        Operator(operator).set_retention("*", "sent", ZERO)
        message_id = self.sending(operator)
        claimed_at = claimed_ats(operator, message_id)[message_id]
        operator.execute("UPDATE pgoutbox.message SET state = 'pending', lane = 1")
        forget = "SELECT pgoutbox._forget_sent(%s, %s, %s, 'worker-1')"
        assert operator.execute(forget, ([message_id], [1], [claimed_at])).fetchall() == []

    def test_a_message_named_several_times_is_finished_once(self, operator: psycopg.Connection) -> None:
        Operator(operator).set_retention("other", "sent", ZERO)
        message_id = self.sending(operator)
        assert forget_sent(operator, (message_id, 1), (message_id, 1)) == {message_id}
        assert state_of(operator, message_id) == "sent"

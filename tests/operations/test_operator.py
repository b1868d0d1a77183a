"""Tests `Operator` as applications use it, and their mistakes: wrong DSN, closed object, unknown id, missing right."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
import pytest
import sqlalchemy

from pgoutbox import ArgumentError, Operator, Outbox, SchemaError, State, StateError
from pgoutbox.errors import ConfigurationError, MessageNotFoundError
from pgoutbox.operations import ActResult, MessageFilter, MessageResult, Rate
from pgoutbox.settings import load_settings
from tests.support.messages import before_each_batch, put
from tests.support.outbox_actions import settings_for, state_of
from tests.support.roles import login
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Connect

UNKNOWN_ID = 10**12


@pytest.fixture
def operator(dsn: str) -> Iterator[Operator]:
    with Operator(dsn, actor="ada", origin="runbook 7") as operator:
        yield operator


def backends(db: psycopg.Connection) -> int:
    ((count,),) = db.execute(
        """
        SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND application_name LIKE 'pgoutbox %' AND pid <> pg_backend_pid()
        """
    ).fetchall()
    return int(count)


# --- the object -------------------------------------------------------------------------------------------------------


def test_an_operator_acts_under_its_name_and_origin(operator: Operator, db: psycopg.Connection) -> None:
    message_id = put(db, State.FAILED)
    assert operator.redrive(message_id) == MessageResult(message_id, ActResult.REDRIVEN)
    operator.pause("mail", duration=timedelta(minutes=5))
    operator.limit_rate("mail", Rate(20, 1))
    acts = operator.list_acts()
    assert [(act.action, act.actor, act.origin) for act in acts] == [
        ("limit", "ada", "runbook 7"),
        ("pause", "ada", "runbook 7"),
        ("redrive", "ada", "runbook 7"),
    ]


def test_settings_can_replace_the_connection_string(dsn: str, db: psycopg.Connection) -> None:
    message_id = put(db, State.FAILED)
    with Operator(load_settings(dsn=dsn)) as operator:
        assert operator.redrive(message_id).is_done


def test_without_an_actor_the_role_is_recorded(dsn: str, db: psycopg.Connection) -> None:
    with Operator(dsn) as operator:
        operator.pause("mail")
        (act,) = operator.list_acts()
    assert (act.actor, act.origin) == (db.info.user, None)


def test_two_operators_of_one_thread_keep_their_names(dsn: str, db: psycopg.Connection) -> None:
    first, second = put(db, State.FAILED), put(db, State.FAILED)
    with Operator(dsn, actor="ada") as ada, Operator(dsn, actor="grace") as grace:
        grace.redrive(first)
        ada.redrive(second)
        assert [(act.actor, act.first_ids) for act in ada.list_acts()] == [("ada", [second]), ("grace", [first])]


def test_an_operator_on_your_connection_leaves_it_open(db: psycopg.Connection) -> None:
    with Operator(db, actor="ada") as operator:
        operator.pause("mail")
    assert db.execute("SELECT 1").fetchall() == [(1,)]


def test_acts_become_part_of_your_transaction(connect: Connect, db: psycopg.Connection) -> None:
    mine, message_id = connect(), put(db, State.FAILED)
    assert Operator(mine, actor="ada").redrive(message_id).is_done
    mine.execute("SELECT FROM pgoutbox.message")
    Operator(mine, actor="ada").cancel(message_id)
    mine.rollback()
    assert state_of(db, message_id) == State.PENDING


@pytest.mark.slow
def test_the_package_loads_no_operator_until_it_is_named() -> None:
    program = "import pgoutbox, sys; assert 'pgoutbox.operations' not in sys.modules; pgoutbox.Operator"
    subprocess.run([sys.executable, "-c", program], check=True)


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_a_text_that_is_not_a_connection_string_is_refused() -> None:
    with pytest.raises(psycopg.ProgrammingError):
        Operator("shop")


def test_a_server_that_cannot_be_reached_is_refused(tmp_path: Path) -> None:
    with pytest.raises(psycopg.OperationalError, match="No such file"):
        Operator(f"postgresql:///shop?host={tmp_path}")


def test_a_missing_connection_string_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGOUTBOX_DSN", raising=False)
    with pytest.raises(ConfigurationError, match="PGOUTBOX_DSN"):
        Operator(load_settings())


def test_another_kind_of_connection_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"psycopg\.Connection, not Engine"):
        Operator(sqlalchemy.create_engine("postgresql+psycopg://"))  # type: ignore[arg-type]


def test_a_database_without_the_schema_names_the_command(empty_dsn: str) -> None:
    with pytest.raises(SchemaError, match="pgoutbox migrate"):
        Operator(empty_dsn)


def test_a_closed_operator_says_so(dsn: str) -> None:
    operator = Operator(dsn)
    operator.close()
    operator.close()
    with pytest.raises(psycopg.OperationalError, match="closed"):
        operator.redrive(1)
    with Operator(dsn) as used:
        used.list_messages()
    with pytest.raises(psycopg.OperationalError, match="closed"):
        used.list_messages()


def test_a_refused_connection_is_not_left_open(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as db:
        with pytest.raises(SchemaError):
            Operator(empty_dsn)
        wait_until(lambda: backends(db) == 0, lambda: "the connection stays open")


def test_an_unknown_id_is_reported_by_every_act(operator: Operator) -> None:
    missing = "does not exist"
    assert operator.redrive(UNKNOWN_ID) == MessageResult(UNKNOWN_ID, ActResult.MISSING, None, missing)
    assert operator.resend(UNKNOWN_ID) == MessageResult(UNKNOWN_ID, ActResult.MISSING, None, missing)
    assert operator.cancel(UNKNOWN_ID) == MessageResult(UNKNOWN_ID, ActResult.MISSING, None, missing)
    with pytest.raises(MessageNotFoundError, match=str(UNKNOWN_ID)):
        operator.show_message(UNKNOWN_ID)
    assert operator.list_acts() == []


def test_a_role_that_may_only_enqueue_cancels_and_does_nothing_else(dsn: str, db: psycopg.Connection) -> None:
    failed, pending = put(db, State.FAILED), put(db)
    with login(dsn, "pgoutbox_producer") as their_dsn, Operator(their_dsn) as operator:
        for act in (operator.list_messages, lambda: operator.redrive(failed), lambda: operator.pause("mail")):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                act()
        assert operator.cancel(pending).is_done


def test_a_role_that_may_only_read_changes_nothing(dsn: str, db: psycopg.Connection) -> None:
    message_id = put(db, State.FAILED)
    with login(dsn, "pgoutbox_viewer") as their_dsn, Operator(their_dsn, actor="eve") as operator:
        for act in (
            lambda: operator.redrive(message_id),
            lambda: operator.resend(message_id),
            lambda: operator.pause("mail"),
            lambda: operator.set_retention("*", "sent", timedelta()),
            lambda: operator.prune(timedelta(days=1)),
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                act()
    assert state_of(db, message_id) == State.FAILED
    assert db.execute("SELECT FROM pgoutbox.audit").fetchall() == []


def test_a_reading_operator_cannot_act(dsn: str) -> None:
    with Operator(dsn, read_only=True) as operator, pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        operator.pause("mail")


# --- many messages ----------------------------------------------------------------------------------------------------


def test_a_bulk_act_does_nothing_before_it_is_iterated(operator: Operator, db: psycopg.Connection) -> None:
    message_id = put(db, State.FAILED)
    batches = operator.bulk("redrive", MessageFilter())
    assert state_of(db, message_id) == State.FAILED
    assert next(batches).results == [MessageResult(message_id, ActResult.REDRIVEN)]


def test_a_bulk_act_that_is_not_continued_keeps_its_batches(operator: Operator, db: psycopg.Connection) -> None:
    ids = [put(db, State.FAILED) for _ in range(5)]
    for batch in operator.bulk("redrive", MessageFilter(), batch_size=2):
        assert (batch.reached_id, batch.through_id) == (ids[1], ids[-1])
        break
    assert [state_of(db, message_id) for message_id in ids] == ["pending"] * 2 + ["failed"] * 3


def test_a_bulk_act_ends_at_its_limit(operator: Operator, db: psycopg.Connection) -> None:
    ids = [put(db, State.SENT) for _ in range(5)]
    batches = list(operator.bulk("resend", MessageFilter(), batch_size=2, limit=3))
    assert [answer.id for batch in batches for answer in batch.results] == ids[:3]


def test_a_bulk_act_by_ids_takes_them_in_batches(operator: Operator, db: psycopg.Connection) -> None:
    ids = [put(db) for _ in range(3)]
    batches = list(operator.bulk("cancel", [*ids, UNKNOWN_ID], batch_size=3))
    assert [[answer.result for answer in batch.results] for batch in batches] == [["cancelled"] * 3, ["missing"]]
    assert len({act.act_id for act in operator.list_acts()}) == 1


@pytest.mark.parametrize("action", ["redrive", "resend", "cancel"])
def test_a_bulk_act_on_no_message_is_empty(operator: Operator, action: str) -> None:
    assert [answer for batch in operator.bulk(action, []) for answer in batch.results] == []  # type: ignore[arg-type]
    assert [a for batch in operator.bulk(action, MessageFilter()) for a in batch.results] == []  # type: ignore[arg-type]


def test_a_bulk_resend_leaves_its_own_copies_alone(
    operator: Operator, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(db, State.SENT)
    before_each_batch(monkeypatch, lambda: put(db, State.SENT))
    assert operator.act_on_all("resend", MessageFilter()) == {"resent": 1}


def test_a_bulk_act_searches_a_large_table_part_by_part(
    operator: Operator, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgoutbox.operations.operator._SEARCHED_ROWS", 2)
    for _ in range(5):
        put(db, State.CANCELLED, topic="sms")
    wanted = [put(db, State.CANCELLED, topic="mail") for _ in range(3)]
    batches = list(operator.bulk("redrive", MessageFilter(states=[State.CANCELLED], topic="mail")))
    assert [answer.id for batch in batches for answer in batch.results] == wanted
    assert [] in [batch.results for batch in batches], "the caller cannot stop in a long search"


def test_a_bulk_act_on_a_group_of_failures_leaves_the_others(operator: Operator, db: psycopg.Connection) -> None:
    ids = [put(db, State.FAILED) for _ in range(3)]
    db.execute("UPDATE pgoutbox.message SET last_error = 'user ' || id || ' is unknown' WHERE id <> %s", [ids[0]])
    (group,) = [found.group for found in operator.list_failures() if found.messages == 2]
    which = MessageFilter(error_group=group)
    assert [message.id for message in operator.list_messages(which)] == ids[:0:-1]
    assert operator.count_matching(which, limit=9) == 2
    assert operator.act_on_all("redrive", which) == {"redriven": 2}
    assert state_of(db, ids[0]) == State.FAILED


def test_states_that_an_action_cannot_change_are_refused(operator: Operator) -> None:
    with pytest.raises(StateError, match="only sent messages can be resent, not failed"):
        operator.act_on_all("resend", MessageFilter(states=[State.FAILED]))


def test_a_dry_run_tells_the_results_and_changes_nothing(operator: Operator, db: psycopg.Connection) -> None:
    failed, sent = put(db, State.FAILED), put(db, State.SENT)
    with operator.dry_run():
        assert operator.redrive(failed).is_done
        assert operator.redrive(sent).result is ActResult.WRONG_STATE
        assert operator.resend(sent).is_done
    assert (state_of(db, failed), operator.list_acts()) == (State.FAILED, [])
    assert operator.redrive(failed).is_done


ACTS_BY_SQL = {
    "redrive": ("SELECT * FROM pgoutbox.redrive(%(ids)s, attempt_counts => %(counts)s)", State.FAILED),
    "dismiss": ("SELECT * FROM pgoutbox.dismiss(%(ids)s, 'spam', %(counts)s)", State.FAILED),
    "correct": (
        "SELECT * FROM pgoutbox.correct(%(ids)s, '{\"owner\": \"a\"}', attempt_counts => %(counts)s)", State.FAILED
    ),
    "snooze": ("SELECT * FROM pgoutbox.snooze(%(ids)s, '1 h', 'moves', %(counts)s)", State.PENDING),
    "reschedule": ("SELECT * FROM pgoutbox.reschedule(%(ids)s, now() + interval '1 h')", State.PENDING),
}  # fmt: skip


@pytest.mark.parametrize("name", ["redrive", "dismiss", "correct"])
def test_a_message_that_has_changed_is_not_locked(db: psycopg.Connection, connect: Connect, name: str) -> None:
    call, state = ACTS_BY_SQL[name]
    message_id, holder = put(db, state), connect()
    answers = holder.execute(call.encode(), {"ids": [message_id], "counts": [99]}).fetchall()
    assert answers == [(message_id, "changed", state, None)]
    assert Operator(db).redrive(message_id).result is ActResult.REDRIVEN


@pytest.mark.parametrize("name", ACTS_BY_SQL)
def test_a_change_that_a_trigger_refuses_is_neither_reported_nor_recorded(db: psycopg.Connection, name: str) -> None:
    call, state = ACTS_BY_SQL[name]
    message_id = put(db, state)
    db.execute("CREATE FUNCTION pg_temp.refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
    db.execute("CREATE TRIGGER refuse BEFORE UPDATE ON pgoutbox.message FOR EACH ROW EXECUTE FUNCTION pg_temp.refuse()")
    query: LiteralString = "SELECT m.* FROM pgoutbox.message AS m WHERE m.id = %s"
    before = db.execute(query, [message_id]).fetchall()
    answers = db.execute(call.encode(), {"ids": [message_id], "counts": None}).fetchall()
    assert answers == [(message_id, "locked", state, None)]
    assert db.execute(query, [message_id]).fetchall() == before
    assert Operator(db).list_acts() == []


def test_only_a_superseded_message_names_another_one(db: psycopg.Connection) -> None:
    sent, failed = put(db, State.SENT, coalesce_key="k"), put(db, State.FAILED, coalesce_key="k")
    newer = put(db, coalesce_key="k")
    (batch,) = Operator(db).bulk("redrive", [sent, failed])
    assert [(one.result, one.other_id) for one in batch.results] == [
        (ActResult.WRONG_STATE, None),
        (ActResult.SUPERSEDED, newer),
    ]


@pytest.mark.parametrize(("act", "wakes"), [("dismiss", False), ("snooze", False), ("redrive", True)])
def test_only_an_act_that_makes_messages_claimable_wakes_workers(
    db: psycopg.Connection, connect: Connect, act: str, *, wakes: bool
) -> None:
    call, state = ACTS_BY_SQL[act]
    listener = connect(autocommit=True)
    listener.execute("LISTEN pgoutbox")
    db.execute(call.encode(), {"ids": [put(db, state)], "counts": None})
    db.execute("NOTIFY pgoutbox, 'end'")
    told = [note.payload for note in listener.notifies(timeout=10, stop_after=2 if wakes else 1)]
    assert told == [*(["all default"] if wakes else []), "end"]


def test_arguments_and_states_of_other_acts_are_refused(rolled_back: psycopg.Connection) -> None:
    operator, message_id = Operator(rolled_back), put(rolled_back, State.FAILED)
    with pytest.raises(TypeError, match="reschedule has no argument 'availble_at'"):
        operator.act_on_all("reschedule", MessageFilter(), availble_at=None)  # type: ignore[call-arg]
    with pytest.raises(StateError, match="only failed messages can be dismissed, not cancelled"):
        operator.act_on("dismiss", message_id, states=[State.CANCELLED], reason="spam")
    assert operator.redrive(message_id, states=[]).result is ActResult.WRONG_STATE


@pytest.mark.parametrize("state", [State.PENDING, State.SENDING, State.SENT])
def test_a_redrive_by_sql_changes_no_other_states(rolled_back: psycopg.Connection, state: State) -> None:
    message_id = put(rolled_back, state)
    call = "SELECT * FROM pgoutbox.redrive(%s, %s)"
    assert rolled_back.execute(call, [[message_id], [state]]).fetchall() == [(message_id, "wrong_state", state, None)]


def test_the_content_of_a_fan_out_is_shown_to_its_readers(db: psycopg.Connection, dsn: str) -> None:
    body = {"html": "<p>", "password": "s3cret", "more": "x" * 70_000}
    with db.transaction():
        Outbox(settings_for(dsn)).on(db).enqueue_fanout("news", None, ["mailto:ada@example.org"], content=body)
    ((message_id,),) = db.execute("SELECT m.id FROM pgoutbox.message AS m").fetchall()
    whole, _ = Operator(db).show_message(message_id, whole=True)
    assert whole.content == body
    assert "s3cret" not in str(whole.redacted(["password"]).content)
    first, _ = Operator(db).show_message(message_id)
    assert len(str(first.content)) == 65_536 < (first.content_bytes or 0)
    assert Operator(db).show_message(message_id, with_values=False)[0].content is None
    with login(dsn, "pgoutbox_operator") as its_dsn, psycopg.connect(its_dsn) as connection:
        hidden, _ = Operator(connection).show_message(message_id, whole=True)
        assert (hidden.content, hidden.content_id) == (None, whole.content_id)


def test_an_act_that_does_not_exist_is_named_with_those_that_do(db: psycopg.Connection) -> None:
    wrong: Any = "retry"
    with pytest.raises(ArgumentError, match=r"action: must be one of redrive, .*cancel, not 'retry'"):
        Operator(db).act_on(wrong, put(db))
    with pytest.raises(ArgumentError, match=r"action: must be one of redrive, .*cancel, not 'retry'"):
        Operator(db).act_on_all(wrong, MessageFilter())

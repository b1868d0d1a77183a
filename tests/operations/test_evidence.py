"""Tests that the audit is evidence: what sessions may state in it, and what they cannot forge, hide or flood."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import psycopg
import pytest
from psycopg.errors import CheckViolation, InsufficientPrivilege, InvalidParameterValue

from pgoutbox.message import State
from pgoutbox.operations import Action, MessageFilter, Operator
from tests.support.messages import put as put_message
from tests.support.roles import login

if TYPE_CHECKING:
    from typing import LiteralString

FORGERY: Final = {
    "pgoutbox.act": '{"id": "00000000-0000-0000-0000-000000000001", "actor": "grace", "origin": "web 203.0.113.9"}',
    "pgoutbox.act_id": "00000000-0000-0000-0000-000000000001",
    "pgoutbox.act_actor": "grace",
    "pgoutbox.act_origin": "web 203.0.113.9",
    "pgoutbox.act_details": '{"rate": "unchanged"}',
}
LIMIT: Final = "INSERT INTO pgoutbox.queue (name, rate_count, rate_seconds, burst) VALUES ('mail', 1, 86400, 1)"
ANNOUNCE: Final = "SELECT pgoutbox.announce_act(actor => 'ada', origin => 'psql', stated => '{\"why\": \"test\"}')"


def put(db: psycopg.Connection, state: State = State.PENDING, *, owner: str | None = None, **options: Any) -> int:  # noqa: ANN401 - those of put
    message_id = put_message(db, state, **options)
    db.execute("UPDATE pgoutbox.message SET owner = %s WHERE id = %s", (owner, message_id))
    return message_id


def user_of(dsn: str) -> str:
    return str(psycopg.conninfo.conninfo_to_dict(dsn)["user"])


def rows_of(db: psycopg.Connection) -> list[Any]:
    return db.execute("SELECT a.action, a.actor, a.db_role, a.origin FROM pgoutbox.audit AS a ORDER BY a.id").fetchall()


def forge(session: psycopg.Connection, value: str | None = None) -> None:
    for name, text in FORGERY.items():
        session.execute("SELECT set_config(%s, %s, false)", (name, value or text))


# --- settings ---------------------------------------------------------------------------------------------------------


def test_no_setting_of_a_session_forges_an_act(dsn: str, db: psycopg.Connection) -> None:
    with login(dsn, "pgoutbox_operator") as its_dsn, psycopg.connect(its_dsn, autocommit=True) as session:
        forge(session)
        session.execute(LIMIT)
        (act,) = Operator(db).list_acts()
        assert (act.actor, act.db_role, act.origin) == (user_of(its_dsn), user_of(its_dsn), None)
        assert act.act_id != UUID(FORGERY["pgoutbox.act_id"])
        assert (act.details, act.stated) == ({"rate": "1/86400s", "burst": 1}, None)


def test_a_setting_of_an_announced_act_is_worth_nothing_in_another_transaction(
    dsn: str, db: psycopg.Connection
) -> None:
    """A pooler keeps settings of sessions for the next client."""
    with login(dsn, "pgoutbox_operator") as its_dsn, psycopg.connect(its_dsn) as session:
        with session.transaction():
            session.execute(ANNOUNCE)
            ((seen,),) = session.execute("SELECT current_setting('pgoutbox.act')").fetchall()
        forge(session, seen)
        session.commit()
        session.execute(LIMIT)
        session.commit()
        assert rows_of(db) == [("limit", user_of(its_dsn), user_of(its_dsn), None)]


def test_a_changed_setting_is_worth_nothing_in_its_own_transaction(dsn: str, db: psycopg.Connection) -> None:
    with login(dsn, "pgoutbox_operator") as its_dsn, psycopg.connect(its_dsn) as session:
        with session.transaction():
            session.execute(ANNOUNCE)
            session.execute(
                "SELECT set_config('pgoutbox.act', replace(current_setting('pgoutbox.act'), '\"ada\"', '\"bob\"'), true)"
            )
            session.execute(LIMIT)
        assert [row[1] for row in rows_of(db)] == [user_of(its_dsn)]


# --- announced acts ---------------------------------------------------------------------------------------------------


def test_an_operator_states_an_actor_and_the_row_has_the_role_that_states_it(dsn: str, db: psycopg.Connection) -> None:
    with login(dsn, "pgoutbox_operator") as its_dsn, psycopg.connect(its_dsn) as session:
        with session.transaction():
            session.execute(ANNOUNCE)
            session.execute(LIMIT)
        session.execute("UPDATE pgoutbox.queue SET max_in_flight = 3")
        session.commit()
        assert rows_of(db) == [
            ("limit", "ada", user_of(its_dsn), "psql"),
            ("limit", user_of(its_dsn), user_of(its_dsn), None),
        ]
        later, first = Operator(db).list_acts()
        assert (first.details, first.stated) == ({"rate": "1/86400s", "burst": 1}, {"why": "test"})
        assert (later.stated, first.stated_by, later.stated_by) == (None, user_of(its_dsn), None)


def test_an_announced_act_ends_with_its_savepoint(dsn: str, db: psycopg.Connection) -> None:
    with login(dsn, "pgoutbox_operator") as its_dsn, psycopg.connect(its_dsn) as session:
        with session.transaction(force_rollback=True), session.transaction():
            session.execute(ANNOUNCE)
        with session.transaction():
            with session.transaction(force_rollback=True):
                session.execute(ANNOUNCE)
            session.execute(LIMIT)
        assert rows_of(db) == [("limit", user_of(its_dsn), user_of(its_dsn), None)]


def test_nobody_joins_the_act_of_another_login_or_actor(dsn: str, db: psycopg.Connection) -> None:
    """The batches of one act share their id. A client names it, and it counts only with its login and actor."""
    given = "00000000-0000-0000-0000-000000000007"
    announce: LiteralString = "SELECT pgoutbox.announce_act(actor => %s, act_id => %s)"
    with login(dsn, "pgoutbox_operator") as first_dsn, login(dsn, "pgoutbox_operator") as other_dsn:
        for its_dsn, actor in ((first_dsn, "ada"), (first_dsn, "ada"), (first_dsn, "bob"), (other_dsn, "ada")):
            with psycopg.connect(its_dsn) as session:
                session.execute(announce, (actor, given))
                session.execute("SELECT pgoutbox.set_redirect('@example.org')")
    ids = [act.act_id for act in Operator(db).list_acts()]
    assert (len(ids), len(set(ids)), UUID(given) in ids) == (4, 3, False)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"actor": "a" * 201}, "actor"),
        ({"actor": ""}, "actor"),
        ({"actor": "ada", "origin": "o" * 201}, "origin"),
        ({"actor": "ada", "stated": '{"text": "' + "x" * 8200 + '"}'}, "stated"),
        ({"actor": "ada", "stated": '"text"'}, "stated"),
    ],
)
def test_a_statement_about_an_act_is_bounded(rolled_back: psycopg.Connection, given: dict[str, str], field: str) -> None:
    asked = {"actor": None, "origin": None, "stated": None, **given}
    with pytest.raises(InvalidParameterValue, match=f"pgoutbox.announce_act: {field}: must") as refused:
        rolled_back.execute(
            "SELECT pgoutbox.announce_act(%(actor)s, %(origin)s, %(stated)s::jsonb)", asked
        )
    assert refused.value.diag.column_name == field


@pytest.mark.parametrize("column", ["details", "stated"])
def test_a_row_of_the_audit_is_bounded(rolled_back: psycopg.Connection, column: str) -> None:
    Operator(rolled_back).set_retention("greet", "sent", timedelta(1))
    with pytest.raises(CheckViolation, match="audit_sound"):
        rolled_back.execute(
            f"UPDATE pgoutbox.audit SET {column} = jsonb_build_object('text', repeat('x', 8200))".encode()
        )


# --- logins that are no operators -------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["pgoutbox_producer", "pgoutbox_worker"])
@pytest.mark.parametrize(
    "call",
    [
        "SELECT pgoutbox.cancel(1)",
        "SELECT pgoutbox.cancel_by_key('greet', dedupe_key => 'k')",
        "SELECT pgoutbox.cancel_all(destination => 'mailto:ann@example.org')",
        "SELECT pgoutbox._cancel_each(ARRAY[1], '{pending}')",
        "SELECT pgoutbox.reschedule(ARRAY[1])",
    ],
)
def test_a_producer_or_worker_writes_no_act(dsn: str, db: psycopg.Connection, role: str, call: LiteralString) -> None:
    assert put(db, topic="greet", dedupe_key="k", destination="mailto:ann@example.org") == 1
    with login(dsn, role) as its_dsn, psycopg.connect(its_dsn, autocommit=True) as session:
        forge(session)
        with pytest.raises(InsufficientPrivilege, match="announce_act"):
            session.execute(ANNOUNCE)
        if "_cancel_each" in call and role == "pgoutbox_worker":
            return
        session.execute(call)
    assert db.execute("SELECT cancel_requested_at, available_at > now() FROM pgoutbox.message").fetchall()
    assert rows_of(db) == []


def test_a_producer_cancels_by_the_command_without_an_act(dsn: str, db: psycopg.Connection) -> None:
    message_id = put(db)
    with login(dsn, "pgoutbox_producer") as its_dsn, Operator(its_dsn, actor="ada", origin="web 192.0.2.7") as session:
        assert session.cancel(message_id).is_done
    assert rows_of(db) == []


# --- erasures ---------------------------------------------------------------------------------------------------------

MALLORY: Final = "mallory@evil.example"


def test_an_erasure_leaves_acts_alone_that_are_not_about_a_person(db: psycopg.Connection) -> None:
    operator = Operator(db)
    put(db, owner="100/60s", destination=f"mailto:{MALLORY}")
    put(db, owner="greet", coalesce_key="sent")
    db.execute("INSERT INTO pgoutbox.queue (name, rate_count, rate_seconds, burst) VALUES ('mail', 100, 60, 5)")
    operator.set_retention("greet", "sent", timedelta(1))
    db.execute("SELECT pgoutbox.set_redirect(%s)", (MALLORY,))
    db.execute("SELECT pgoutbox.clear_redirect()")
    before = operator.list_acts()
    for owner in ("100/60s", "greet", "sent"):
        operator.erase(owner=owner)
    operator.erase(destination=f"mailto:{MALLORY}")
    assert operator.list_acts()[-len(before) :] == before


def test_an_erasure_leaves_the_words_of_other_acts_alone(db: psycopg.Connection) -> None:
    """Otherwise an operator erases any word of a colleague's act: no message has to have this owner."""
    operator = Operator(db)
    operator.dismiss(put(db, State.FAILED, owner="7", topic="greet"), "nobody will notice")
    operator.redrive_all(MessageFilter(topic="greet"))
    put(db, State.FAILED, topic="greet", owner="8")
    operator.redrive_all(MessageFilter(topic="greet"))
    before = operator.list_acts()
    for owner in ("notice", "greet", "failed"):
        operator.erase(owner=owner)
    assert operator.list_acts()[-len(before) :] == before
    assert [act.action for act in operator.list_acts(action=Action.ERASE)] == []


def test_an_erasure_finds_a_person_in_acts_on_messages(db: psycopg.Connection) -> None:
    operator = Operator(db)
    mine = put(db, State.FAILED, owner="ada-17", destination="mailto:ada@example.org", topic="greet")
    other = put(db, State.FAILED, topic="greet")
    operator.redrive_all(MessageFilter(destination="mailto:ada@example.org", topic="greet"))
    operator.cancel(mine)
    operator.redrive_all(MessageFilter(text="550 Ada@example.org unknown", states=[State.CANCELLED], topic="greet"))
    db.execute("UPDATE pgoutbox.message SET state = 'failed', finished_at = now() WHERE id = %s", (mine,))
    operator.dismiss(mine, "customer ada-17 has left")
    operator.dismiss(other, "same mailbox as ada@example.org")
    operator.erase(owner="ada-17")
    told = str([(act.details, act.stated) for act in operator.list_acts()])
    assert ("ada@" in told.lower(), "ada-17" in told) == (False, False)
    assert ("has left" in told, "same mailbox as" in told, "'topic': 'greet'" in told) == (True, True, True)

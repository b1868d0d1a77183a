"""Tests that each act of an operator is recorded in its own transaction: the person, the origin and the messages."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, cast

import psycopg
import pytest
from psycopg.errors import CheckViolation

from pgoutbox.database import operator_connection
from pgoutbox.errors import StateError
from pgoutbox.message import State
from pgoutbox.operations import Action, MessageFilter, Operator, Rate
from pgoutbox.operations.acts import ACTS, Act, ActArguments
from pgoutbox.settings import load_settings
from tests.support.messages import put
from tests.support.outbox_actions import state_of
from tests.support.roles import login

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import LiteralString

ADA: Final = {"actor": "ada", "origin": "web 192.0.2.7"}


@pytest.fixture
def operator(dsn: str) -> Iterator[psycopg.Connection]:
    """Open the connection of an operator to the test's own database; its actions are committed."""
    with operator_connection.connect(load_settings(dsn=dsn)) as connection:
        yield connection


def redrive_one(connection: psycopg.Connection, actor: str | None = None, origin: str | None = None) -> int:
    message_id = put(connection, State.FAILED)
    Operator(connection, actor=actor, origin=origin).redrive(message_id)
    return message_id


def resend_one(connection: psycopg.Connection, actor: str | None = None, origin: str | None = None) -> int:
    message_id = put(connection, State.SENT)
    Operator(connection, actor=actor, origin=origin).resend(message_id)
    return message_id


def cancel_one(connection: psycopg.Connection, actor: str | None = None, origin: str | None = None) -> int:
    message_id = put(connection, State.PENDING)
    Operator(connection, actor=actor, origin=origin).cancel(message_id)
    return message_id


@pytest.mark.parametrize(
    ("act", "action"),
    [(redrive_one, "redrive"), (resend_one, "resend"), (cancel_one, "cancel")],
)
def test_an_act_on_a_message_is_found_by_its_id(
    rolled_back: psycopg.Connection, act: Callable[..., int], action: str
) -> None:
    message_id = act(rolled_back, **ADA)
    (row,) = Operator(rolled_back).list_acts(message_id=message_id)
    assert (row.action, row.actor, row.origin, row.first_ids, row.message_count) == (
        action, "ada", "web 192.0.2.7", [message_id], 1,
    )  # fmt: skip


def test_acts_on_queues_and_rules_record_their_arguments(rolled_back: psycopg.Connection) -> None:
    put(rolled_back, State.PENDING)
    Operator(rolled_back).pause("mail", duration=timedelta(minutes=5))
    Operator(rolled_back).resume("mail")
    Operator(rolled_back).limit_rate("mail", Rate(20, 60))
    Operator(rolled_back).limit_in_flight("mail", 7)
    Operator(rolled_back).limit_in_flight("mail", None)
    Operator(rolled_back).limit_in_flight("mail", None)
    Operator(rolled_back).set_retention("greet", "sent", None)
    Operator(rolled_back).unset_retention("greet", "sent")
    Operator(rolled_back).pause_topic("greet")
    Operator(rolled_back).resume_topic("greet")
    paused, *told = [(act.action, act.queue, act.details) for act in reversed(Operator(rolled_back).list_acts())]
    assert (*paused[:2], list(paused[2] or ())) == ("pause", "mail", ["resume_at"])
    assert told == [
        ("resume", "mail", None),
        ("limit", "mail", {"rate": "20/60s", "burst": 2}),
        ("limit", "mail", {"max_in_flight": 7}),
        ("limit", "mail", {"max_in_flight": "none"}),
        ("retention", None, {"topic": "greet", "state": "sent", "keep_seconds": "for ever"}),
        ("retention", None, {"topic": "greet", "state": "sent", "keep_seconds": "no rule"}),
        ("pause", None, {"topic": "greet"}),
        ("resume", None, {"topic": "greet"}),
    ]


def test_an_action_without_effect_is_not_recorded(rolled_back: psycopg.Connection) -> None:
    sent = put(rolled_back, State.SENT)
    Operator(rolled_back).redrive(sent)
    Operator(rolled_back).cancel(sent)
    Operator(rolled_back).cancel(put(rolled_back, State.CANCELLED))
    Operator(rolled_back).resume("mail")
    Operator(rolled_back).resume_topic("mail")
    Operator(rolled_back).unset_retention("greet", "sent")
    Operator(rolled_back).prune(timedelta(days=300))
    Operator(rolled_back).resend(put(rolled_back, State.FAILED))
    assert Operator(rolled_back).list_acts() == []


def test_a_rolled_back_act_is_not_recorded(operator: psycopg.Connection) -> None:
    message_id = put(operator, State.FAILED)
    with operator.transaction(force_rollback=True):
        Operator(operator).redrive(message_id)
    assert Operator(operator).list_acts() == []


def test_a_bulk_is_one_act_with_its_filter_and_a_row_for_each_batch(operator: psycopg.Connection) -> None:
    ids = [put(operator, State.FAILED, topic="mail") for _ in range(5)]
    put(operator, State.FAILED, topic="sms")
    assert len([*Operator(operator).bulk("redrive", MessageFilter(topic="mail"), batch_size=2)]) == 4
    acts = Operator(operator).list_acts()
    assert [act.first_ids for act in reversed(acts)] == [ids[:2], ids[2:4], ids[4:]]
    assert len({act.act_id for act in acts}) == 1
    assert (acts[0].stated, acts[0].details) == ({"topic": "mail", "states": ["failed"]}, None)


def test_a_prune_records_the_number_of_messages(rolled_back: psycopg.Connection) -> None:
    for _ in range(3):
        put(rolled_back, State.SENT, age=timedelta(days=9))
    Operator(rolled_back).prune(timedelta(days=8), topic="mail")
    (act,) = Operator(rolled_back).list_acts(action=Action.PRUNE)
    assert (act.message_count, act.first_ids) == (3, None)
    assert act.stated == {"states": ["cancelled", "sent", "skipped"], "older_than_seconds": 691200.0, "topic": "mail"}


def test_each_operator_acts_under_its_own_name(rolled_back: psycopg.Connection) -> None:
    redrive_one(rolled_back, actor="grace")
    redrive_one(rolled_back, **ADA)
    redrive_one(rolled_back)
    assert [(act.actor, act.origin) for act in reversed(Operator(rolled_back).list_acts())] == [
        ("grace", None),
        ("ada", "web 192.0.2.7"),
        (rolled_back.info.user, None),
    ]
    assert len(Operator(rolled_back).list_acts(actor="ada")) == 1


def test_acts_page_by_id(rolled_back: psycopg.Connection) -> None:
    for _ in range(3):
        redrive_one(rolled_back)
    first = Operator(rolled_back).list_acts(limit=2)
    assert len(first) == 2
    assert [act.id for act in Operator(rolled_back).list_acts(before_id=first[-1].id)] == [first[-1].id - 1]


@pytest.mark.parametrize(
    "change", ["action = ''", "actor = ''", "message_count = 0", "message_ids = '{1,2}'", "origin = ''"]
)
def test_an_empty_audit_row_is_refused(rolled_back: psycopg.Connection, change: str) -> None:
    redrive_one(rolled_back)
    with pytest.raises(CheckViolation):
        rolled_back.execute(f"UPDATE pgoutbox.audit SET {change}".encode())


def test_every_action_can_be_recorded(rolled_back: psycopg.Connection) -> None:
    for action in Action:
        rolled_back.execute("SELECT pgoutbox._record_act(%s)", [action.value])
    assert {act.action for act in Operator(rolled_back).list_acts()} == {action.value for action in Action}


# --- by SQL -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "told"),
    [
        ("SELECT pgoutbox.redrive(%(failed)s, '{failed}', NULL)", ("redrive", None, 2, "failed", None)),
        ("SELECT pgoutbox.resend(%(sent)s)", ("resend", None, 1, "sent", {"copy": 5})),
        ("SELECT pgoutbox.cancel(%(pending)s)", ("cancel", None, 1, "pending", None)),
        ("SELECT pgoutbox.cancel_by_key('mail', 'k')", ("cancel", None, 1, "pending", None)),
        (
            "SELECT pgoutbox.cancel_all(destination => 'mailto:ann@example.org')",
            ("cancel", None, 1, "pending", None),
        ),
        ("SELECT pgoutbox._cancel_each(ARRAY[%(pending)s], '{pending}')", ("cancel", None, 1, "pending", None)),
        ("SELECT pgoutbox.prune('{sent}', '1 day', NULL, 10)", ("prune", None, 1, None, None)),
        ("INSERT INTO pgoutbox.queue (name, paused_at) VALUES ('mail', now())", ("pause", "mail", None, None, None)),
        ("UPDATE pgoutbox.queue SET paused_at = NULL WHERE name = 'bulk'", ("resume", "bulk", None, None, None)),
        (
            "UPDATE pgoutbox.queue SET max_in_flight = 3 WHERE name = 'bulk'",
            ("limit", "bulk", None, None, {"max_in_flight": 3}),
        ),
        (
            "SELECT pgoutbox.set_retention('mail', 'sent', '1 hour')",
            ("retention", None, None, None, {"topic": "mail", "state": "sent", "keep_seconds": 3600}),
        ),
        (
            "SELECT pgoutbox.unset_retention('*', 'sent')",
            ("retention", None, None, None, {"topic": "*", "state": "sent", "keep_seconds": "no rule"}),
        ),
        ("SELECT pgoutbox.pause_topic('mail')", ("pause", None, None, None, {"topic": "mail"})),
        ("SELECT pgoutbox.resume_topic('news')", ("resume", None, None, None, {"topic": "news"})),
        (
            "SELECT pgoutbox.set_fair_share('bulk', 'acme', max_in_flight => 0)",
            ("pause", "bulk", None, None, {"fair_key": "acme", "weight": "none", "max_in_flight": 0, "rate": "none"}),
        ),
        ("SELECT pgoutbox.close_breaker('smtp')", ("breaker", None, None, None, {"key": "smtp"})),
        (
            "SELECT pgoutbox.set_redirect('@t.example', '1 hour')",
            ("redirect", None, None, None, {"target": "@t.example", "seconds": 3600}),
        ),
        ("SELECT pgoutbox.clear_redirect()", ("redirect", None, None, None, {"target": "none"})),
    ],
)  # fmt: skip
def test_an_operators_act_by_sql_is_recorded(dsn: str, act: LiteralString, told: tuple[object, ...]) -> None:
    with psycopg.connect(dsn, autocommit=True) as owner:
        ids = {
            "failed": [put(owner, State.FAILED) for _ in range(2)],
            "sent": put(owner, State.SENT, age=timedelta(days=2)),
            "pending": put(owner, coalesce_key="k", destination="mailto:ann@example.org"),
        }
        owner.execute("INSERT INTO pgoutbox.queue (name, paused_at) VALUES ('bulk', now())")
        owner.execute("INSERT INTO pgoutbox.topic_pause (topic) VALUES ('news')")
        owner.execute("INSERT INTO pgoutbox.retention (topic, state) VALUES ('*', 'sent')")
        owner.execute(
            """
            INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error)
            VALUES ('smtp', now(), 1, 'w', 'dead')
            """
        )
        owner.execute("SELECT pgoutbox.set_redirect('tester@example.org')")
        owner.execute("TRUNCATE pgoutbox.audit")
        with login(dsn, "pgoutbox_operator") as its_dsn:
            with psycopg.connect(its_dsn, autocommit=True) as person:
                person.execute(act, ids)
            (row,) = Operator(owner).list_acts()
            which = ids.get(str(told[3]))
            assert (row.action, row.queue, row.message_count, row.first_ids, row.details) == (
                *told[:3], [which] if isinstance(which, int) else which, told[4],
            )  # fmt: skip
            assert row.actor == row.db_role == psycopg.conninfo.conninfo_to_dict(its_dsn)["user"]


def test_an_act_by_sql_can_name_its_operator(rolled_back: psycopg.Connection) -> None:
    rolled_back.execute("SELECT pgoutbox.announce_act('ada')")
    rolled_back.execute("SELECT pgoutbox.redrive(ARRAY[%s], '{failed}', NULL)", [put(rolled_back, State.FAILED)])
    ((actor, role, me),) = rolled_back.execute("SELECT actor, db_role, session_user FROM pgoutbox.audit").fetchall()
    assert (actor, role) == ("ada", me)


@pytest.mark.parametrize(
    "call",
    ["SELECT pgoutbox.cancel(1)", "SELECT result FROM pgoutbox.cancel_all(destination => 'mailto:a@example.org')"],
)
@pytest.mark.parametrize("role", ["pgoutbox_producer", "pgoutbox_worker", None])
def test_a_cancel_by_an_application_is_not_recorded_as_an_act(dsn: str, role: str | None, call: LiteralString) -> None:
    with psycopg.connect(dsn, autocommit=True) as owner:
        assert put(owner, destination="mailto:a@example.org") == 1
        with login(dsn, *([role, "pgoutbox_operator"] if role else [])) as its_dsn:
            with psycopg.connect(its_dsn if role else dsn) as application:
                answer = application.execute(call).fetchall()
            assert (answer, Operator(owner).list_acts()) == ([("cancelled",)], [])


# --- filters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "which",
    [
        MessageFilter(states=[State.FAILED]),
        MessageFilter(topic="sms"),
        MessageFilter(queue="bulk"),
        MessageFilter(destination="mailto:a%_@example.org"),
        MessageFilter(key="user-7"),
        MessageFilter(key="tenant-7"),
        MessageFilter(text="TENANT"),
        MessageFilter(text="a%_@EXAMPLE"),
        MessageFilter(text="550 no\\such"),
        MessageFilter(created_from=datetime(2026, 3, 1, tzinfo=UTC)),
        MessageFilter(created_from=datetime(2026, 3, 2, tzinfo=UTC), created_before=datetime(2026, 3, 3, tzinfo=UTC)),
    ],
)
def test_each_filter_keeps_matching_acts(rolled_back: psycopg.Connection, which: MessageFilter) -> None:
    wanted = put(rolled_back, State.FAILED, topic="sms", queue="bulk", destination="mailto:a%_@example.org")
    rolled_back.execute(
        "UPDATE pgoutbox.message SET coalesce_key = 'user-7', fair_key = 'tenant-7', created_at = '2026-03-02 00:00Z',"
        " last_error = %s WHERE id = %s",
        ("550 no\\such user", wanted),
    )
    other = put(rolled_back, State.SENT, destination="mailto:axx@example.org")
    rolled_back.execute("UPDATE pgoutbox.message SET created_at = '2026-02-01 00:00Z' WHERE id = %s", (other,))
    assert [m.id for m in Operator(rolled_back).list_messages(which)] == [wanted]
    assert Operator(rolled_back).count_matching(which, limit=10) == 1


def test_a_count_ends_at_its_limit(rolled_back: psycopg.Connection) -> None:
    for _ in range(4):
        put(rolled_back, State.SENT)
    assert Operator(rolled_back).count_matching(MessageFilter(), limit=3) == 3


def test_payloads_are_not_searched(rolled_back: psycopg.Connection) -> None:
    message_id = put(rolled_back, State.FAILED)
    rolled_back.execute("UPDATE pgoutbox.message SET payload = '\"swordfish\"' WHERE id = %s", (message_id,))
    assert Operator(rolled_back).list_messages(MessageFilter(text="swordfish")) == []


def test_a_bulk_cancel_affects_only_owed_messages(operator: psycopg.Connection) -> None:
    owed = [put(operator, State.PENDING, topic="mail") for _ in range(3)]
    sending, sent = put(operator, State.SENDING, topic="mail"), put(operator, State.SENT, topic="mail")
    totals = Operator(operator).act_on_all("cancel", MessageFilter(topic="mail"))
    assert totals == {"cancelled": 3, "requested": 1}
    assert [state_of(operator, message_id) for message_id in (*owed, sending, sent)] == [
        *[State.CANCELLED] * 3, State.SENDING, State.SENT,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("act", "state"), [(act, state) for act in ACTS.values() for state in State if state not in act.states]
)
def test_a_bulk_over_the_wrong_states_is_refused(rolled_back: psycopg.Connection, act: Act, state: State) -> None:
    values: ActArguments = {"reason": "spam", "duration": 60, "correction": {"queue": "low"}, "available_at": None}
    own = cast("ActArguments", {argument.name: values.get(argument.name) for argument in act.arguments})
    with pytest.raises(StateError, match=f"can be {act.done}, not {state}"):
        Operator(rolled_back).act_on_all(act.name, MessageFilter(states=[state]), **own)

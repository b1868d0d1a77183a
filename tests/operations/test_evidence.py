"""Tests that the audit is evidence: what sessions may state in it, and what they cannot forge, hide or flood."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import psycopg
import pytest
from cryptography.fernet import Fernet
from psycopg.errors import (
    CheckViolation,
    InsufficientPrivilege,
    InvalidParameterValue,
    InvalidTransactionState,
)
from psycopg.types.json import Jsonb

from pgoutbox import Context, Failure, Message, Outbox, Permanent, StateError, Topic
from pgoutbox.cli.explain import explain
from pgoutbox.message import State
from pgoutbox.operations import Action, ActResult, MessageFilter, Operator
from pgoutbox.worker import Worker
from tests.support.messages import PUT_FINAL
from tests.support.messages import put as put_message
from tests.support.outbox_actions import settings_for
from tests.support.roles import login

if TYPE_CHECKING:
    from collections.abc import Callable
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
                "SELECT set_config('pgoutbox.act', replace(current_setting('pgoutbox.act'), 'ada', 'bob'), true)"
            )
            session.execute(LIMIT)
        assert [row[1] for row in rows_of(db)] == [user_of(its_dsn)]


def test_no_setting_of_a_session_changes_the_details_of_an_act(dsn: str, db: psycopg.Connection) -> None:
    """They are numbers and times in the database's own notation, which Python reads."""
    put(db)
    settings = {"extra_float_digits": "-15", "timezone": "<x>-150", "datestyle": "German", "intervalstyle": "iso_8601"}
    acts: tuple[LiteralString, ...] = (
        "INSERT INTO pgoutbox.queue (name, paused_at, resume_at) VALUES ('mail', now(), '2027-12-24 00:00Z')",
        "UPDATE pgoutbox.queue SET rate_count = 1, rate_seconds = 149.9, burst = 1",
        "SELECT pgoutbox.set_retention('mail', 'sent', '149 days 1.5 seconds')",
        "SELECT pgoutbox.set_redirect('ann@example.org', '1499999 seconds')",
        "SELECT pgoutbox.reschedule('{1}', '2027-12-24 00:00Z')",
    )
    with login(dsn, "pgoutbox_operator") as its_dsn, psycopg.connect(its_dsn, autocommit=True) as session:
        for name, value in settings.items():
            session.execute("SELECT set_config(%s, %s, false)", (name, value))
        for act in acts:
            session.execute(act)
    assert [act.details for act in reversed(Operator(db).list_acts())] == [
        {"resume_at": "2027-12-24T00:00:00+00:00"},
        {"rate": "1/149.9s", "burst": 1},
        {"topic": "mail", "state": "sent", "keep_seconds": 149 * 86400 + 1.5},
        {"target": "ann@example.org", "seconds": 1499999},
        {"available_at": "2027-12-24T00:00:00+00:00"},
    ]


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
        ({"actor": "ada", "stated": '["text"]'}, "stated"),
        ({"actor": "ada", "stated": '{"n": 1e5000}'}, "stated"),
        ({"actor": "ada", "stated": '{"n": [1e5000]}'}, "stated"),
        ({"actor": "ada", "stated": '{"n": {"a": ["b"]}}'}, "stated"),
        ({"actor": "ada", "stated": '{"n": ' + "[" * 3000 + "]" * 3000 + "}"}, "stated"),
    ],
)
def test_a_statement_about_an_act_is_bounded(
    rolled_back: psycopg.Connection, given: dict[str, str], field: str
) -> None:
    asked = {"actor": None, "origin": None, "stated": None, **given}
    with pytest.raises(InvalidParameterValue, match=f"pgoutbox.announce_act: {field}: must") as refused:
        rolled_back.execute("SELECT pgoutbox.announce_act(%(actor)s, %(origin)s, %(stated)s::jsonb)", asked)
    assert refused.value.diag.column_name == field


@pytest.mark.parametrize("column", ["details", "stated"])
def test_a_row_of_the_audit_is_bounded(rolled_back: psycopg.Connection, column: str) -> None:
    put(rolled_back)
    Operator(rolled_back).set_retention("greet", "sent", timedelta(1))
    with pytest.raises(CheckViolation, match="audit_sound"):
        rolled_back.execute(
            f"UPDATE pgoutbox.audit SET {column} = jsonb_build_object('text', repeat('x', 8200))".encode()
        )


def test_an_operator_frees_no_dedupe_key_without_an_act(dsn: str, db: psycopg.Connection) -> None:
    """After that, a producer that repeats its call sends the message again."""
    for key in ("a", "b"):
        put(db, State.SENT, dedupe_key=key)
    db.execute("DELETE FROM pgoutbox.message")
    with login(dsn, "pgoutbox_operator") as its_dsn, psycopg.connect(its_dsn, autocommit=True) as session:
        for _ in range(2):
            session.execute("SELECT pgoutbox._prune_dedupe('0', NULL, 100)")
    assert [(act.action, act.message_count, act.details) for act in Operator(db).list_acts()] == [
        (Action.PRUNE, None, {"dedupe_keys": 2})
    ]


# --- logins without the role operator ---------------------------------------------------------------------------------


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
    assert db.execute("SELECT cancel_requested_at, available_at > now() FROM pgoutbox.message_view").fetchall()
    assert rows_of(db) == []


def test_a_producer_cancels_by_the_command_without_an_act(dsn: str, db: psycopg.Connection) -> None:
    message_id = put(db)
    with login(dsn, "pgoutbox_producer") as its_dsn, Operator(its_dsn, actor="ada", origin="web 192.0.2.7") as session:
        assert session.cancel(message_id).is_done
    assert rows_of(db) == []


# --- corrected destinations -------------------------------------------------------------------------------------------

CEO: Final = "mailto:ceo@example.org"
EVIL: Final = "mailto:mallory@evil.example"
BLACKOUT: Final = "INSERT INTO pgoutbox.blackout SELECT d, d FROM (SELECT (now() AT TIME ZONE 'UTC')::date) AS t(d)"
COMPARE: Final = """
    SELECT a.db_role, a.message_ids
    FROM pgoutbox.audit AS a
    WHERE a.details ->> %s = pgoutbox.destination_digest(%s)
    ORDER BY a.id
"""


def test_the_owner_finds_who_has_corrected_which_message_to_which_destination(dsn: str, db: psycopg.Connection) -> None:
    """Also after an erasure of both addresses, which an operator can run too."""
    ids = [put(db, State.CANCELLED, destination=to) for to in (CEO, "mailto:cto@example.org", CEO)]
    with login(dsn, "pgoutbox_operator") as its_dsn, psycopg.connect(its_dsn, autocommit=True) as session:
        session.execute(
            "SELECT pgoutbox.correct(%s, '{\"destination\": \"mailto:Mallory@evil.example\"}', '{cancelled}')", (ids,)
        )
        for address in (CEO, EVIL):
            session.execute("SELECT pgoutbox.erase(destination => %s)", (address,))
        name = user_of(its_dsn)
        assert db.execute(COMPARE, ("new_destination_digest", EVIL)).fetchall() == [(name, ids[::2]), (name, [ids[1]])]
        assert db.execute(COMPARE, ("old_destination_digest", CEO)).fetchall() == [(name, ids[::2])]
        seen = session.execute("SELECT string_agg(a::text, '') FROM pgoutbox.audit AS a").fetchall()
        assert ("mallory" in str(seen).lower(), "ceo@" in str(seen)) == (False, False)
        with pytest.raises(InsufficientPrivilege):
            session.execute("SELECT pgoutbox.destination_digest(%s)", (CEO,))


def test_the_enqueue_of_an_operator_leaves_a_digest_of_its_destination(db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(db.info.dsn))
    Operator(db).enqueue(outbox.draft("mail", {"user_id": 1}, destination=EVIL))
    assert [ids for _, ids in db.execute(COMPARE, ("new_destination_digest", EVIL)).fetchall()] == [[1]]


@pytest.mark.slow
@pytest.mark.parametrize("is_blackout", [False, True])
def test_a_blackout_refuses_every_way_to_another_destination(
    dsn: str, db: psycopg.Connection, *, is_blackout: bool
) -> None:
    """No worker runs, and no environment names the blackout."""
    failed = put(db, State.FAILED, destination=CEO)
    draft = Outbox(settings_for(dsn)).draft("mail", {"user_id": 1}, destination=EVIL)
    with (
        login(dsn, "pgoutbox_operator") as its_dsn,
        Operator(its_dsn) as operator,
        psycopg.connect(its_dsn) as early,
    ):
        early.execute("SELECT 1")
        if is_blackout:
            db.execute(BLACKOUT)
        ways: dict[str, Callable[[], object]] = {
            "set_redirect: target": lambda: operator.set_redirect("mallory@evil.example"),
            "correct: destination": lambda: operator.correct(failed, {"destination": EVIL}),
            "enqueue: destination": lambda: operator.enqueue(draft),
        }
        for name, way in ways.items():
            with pytest.raises(StateError, match=f"{name}: refused within") if is_blackout else nullcontext():
                way()
        db.execute(PUT_FINAL, {"id": failed, "state": "failed", "age": timedelta()})
        with (
            pytest.raises(CheckViolation, match="correct: destination: refused within")
            if is_blackout
            else nullcontext()
        ):
            early.execute("SELECT pgoutbox.correct(%s, %s)", ([failed], Jsonb({"destination": EVIL})))
    to = [CEO] if is_blackout else [EVIL, EVIL]
    assert db.execute("SELECT destination FROM pgoutbox.message ORDER BY id").fetchall() == [(one,) for one in to]


def test_a_transaction_that_may_not_see_a_new_blackout_sets_no_destination(dsn: str, db: psycopg.Connection) -> None:
    """Otherwise an operator opens one in advance, and keeps it open."""
    failed = put(db, State.FAILED, destination=CEO)
    with login(dsn, "pgoutbox_operator") as its_dsn, psycopg.connect(its_dsn) as early:
        early.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        early.execute("SELECT 1")
        db.execute(BLACKOUT)
        for call in (
            "SELECT pgoutbox.set_redirect('mallory@evil.example')",
            f"SELECT pgoutbox.correct('{{{failed}}}', '{{\"destination\": \"{EVIL}\"}}')",
        ):
            with pytest.raises(InvalidTransactionState, match="may not see a new blackout"), early.transaction():
                early.execute(call.encode())


@pytest.mark.parametrize(
    ("first", "last", "zone", "is_on"),
    [
        (0, 0, "UTC", True),
        (-1, -1, "UTC", False),
        (1, 1, "UTC", False),
        (-1, -1, "Etc/GMT+12", "before noon"),
        (1, 1, "Etc/GMT-14", "after ten"),
    ],
)
def test_the_days_of_a_blackout_begin_and_end_in_its_time_zone(
    rolled_back: psycopg.Connection, first: int, last: int, zone: str, is_on: bool | str
) -> None:
    ((hour,),) = rolled_back.execute("SELECT extract(hour FROM now() AT TIME ZONE 'UTC')::integer").fetchall()
    expected = {"before noon": hour < 12, "after ten": hour >= 10}.get(str(is_on), is_on)
    rolled_back.execute(
        "INSERT INTO pgoutbox.blackout SELECT d + %s, d + %s, %s FROM CAST(now() AT TIME ZONE 'UTC' AS date) AS t(d)",
        (first, last, zone),
    )
    assert rolled_back.execute("SELECT is_on FROM pgoutbox.blackout_view").fetchall() == [(expected,)]


@pytest.mark.parametrize(
    "days", ["'2026-09-30', '2026-04-01'", "'2026-01-01', 'infinity'", "'1999-01-01', '2026-01-01'", "NULL, now()"]
)
def test_a_blackout_with_impossible_days_is_refused(rolled_back: psycopg.Connection, days: str) -> None:
    with pytest.raises(psycopg.errors.IntegrityError):
        rolled_back.execute(f"INSERT INTO pgoutbox.blackout VALUES ({days})".encode())


def test_a_blackout_in_an_unknown_time_zone_is_refused(rolled_back: psycopg.Connection) -> None:
    with pytest.raises(InvalidParameterValue, match="Mars"):
        rolled_back.execute("INSERT INTO pgoutbox.blackout VALUES ('2026-01-01', '2026-01-02', 'Mars/Base')")


def test_the_owner_takes_the_right_to_another_destination_away(dsn: str, db: psycopg.Connection) -> None:
    """And an upgrade, which grants all rights again, does not give it back."""
    failed = [put(db, State.FAILED, destination=CEO) for _ in range(2)]
    db.execute("REVOKE EXECUTE ON FUNCTION pgoutbox.correct FROM pgoutbox_operator")
    db.execute("SELECT pgoutbox.set_up_roles()")
    with login(dsn, "pgoutbox_operator") as its_dsn, Operator(its_dsn) as operator:
        assert not operator.corrects()
        with pytest.raises(InsufficientPrivilege, match="correct"):
            operator.correct(failed[0], {"destination": EVIL})
        with pytest.raises(InsufficientPrivilege, match="correct"):
            list(operator.bulk("correct", failed, correction={"destination": EVIL}))
        assert operator.redrive(failed[1]).is_done
    db.execute("GRANT EXECUTE ON FUNCTION pgoutbox.correct TO pgoutbox_operator")
    assert db.execute("SELECT destination FROM pgoutbox.message").fetchall() == [(CEO,)] * 2


@pytest.mark.parametrize("size", [1, 20_000])
def test_an_encrypted_message_keeps_its_destination(dsn: str, db: psycopg.Connection, size: int) -> None:
    outbox = Outbox(settings_for(dsn, encryption_keys=Fernet.generate_key().decode()))
    outbox.define(Topic("reset", encrypted=True))
    with db.transaction():
        sealed = outbox.on(db).enqueue("reset", {"code": "x" * size}, destination=CEO).id
    plain = put(db, State.FAILED, destination=CEO)
    db.execute(PUT_FINAL, {"id": sealed, "state": "failed", "age": timedelta()})
    left, done = (
        result
        for batch in Operator(db).bulk("correct", [sealed, plain], correction={"destination": EVIL})
        for result in batch.results
    )
    assert (left.result, left.is_done, done.is_done) == (ActResult.ENCRYPTED, False, True)
    assert "is encrypted for its destination" in left.explanation
    assert Operator(db).redrive(sealed).is_done
    rows = db.execute("SELECT state, destination FROM pgoutbox.message ORDER BY id").fetchall()
    assert rows == [("pending", CEO), ("pending", EVIL)]


async def test_an_encrypted_fan_out_is_delivered_to_another_destination(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn, encryption_keys=Fernet.generate_key().decode()))
    seen = []

    @outbox.handler(Topic("news", encrypted=True))
    async def news(message: Message, ctx: Context) -> None:
        seen.append((message.destination, message.content))

    with db.transaction():
        outbox.on(db).enqueue_fanout("news", {"n": 1}, [CEO], content={"html": "<p>"})
    db.execute(PUT_FINAL, {"id": 1, "state": "failed", "age": timedelta()})
    assert Operator(db).correct(1, {"destination": EVIL}).is_done
    await Worker(outbox).run_once()
    assert seen == [(EVIL, {"html": "<p>"})]


async def test_the_hook_of_an_encrypted_message_keeps_its_destination(dsn: str, db: psycopg.Connection) -> None:
    """Its handler gets the payload of the failed message decrypted."""
    outbox = Outbox(settings_for(dsn, encryption_keys=Fernet.generate_key().decode()))
    seen = []

    @outbox.handler(Topic("reset", encrypted=True))
    async def reset(message: Message, ctx: Context) -> None:
        raise Permanent("no such mailbox")

    @outbox.on_failed("reset")
    async def tell(message: Message[Failure], ctx: Context) -> None:
        seen.append((message.destination, message.payload.payload))
        raise Permanent("no such mailbox")

    with db.transaction():
        outbox.on(db).enqueue("reset", {"code": "x"}, destination=CEO)
    await Worker(outbox).run_once()
    ((hook_id,),) = db.execute("SELECT id FROM pgoutbox.message WHERE failure_of IS NOT NULL").fetchall()
    assert seen == [(None, {"code": "x"})]
    assert Operator(db).correct(hook_id, {"destination": EVIL}).result == ActResult.ENCRYPTED
    assert Operator(db).redrive(hook_id).is_done


def test_an_operator_guesses_no_payload_by_its_dedupe_key(dsn: str, db: psycopg.Connection) -> None:
    """The views show the key and the names in the payload, and a guess is not an act."""
    outbox = Outbox(settings_for(dsn))
    with db.transaction():
        first = outbox.on(db).enqueue("mail", {"code": "4711"}, dedupe_key="k").id
    with login(dsn, "pgoutbox_operator") as its_dsn, Operator(its_dsn) as operator:
        answers = [operator.enqueue(outbox.draft("mail", {"code": c}, dedupe_key="k")) for c in ("4711", "0815")]
    assert [(answer.id, answer.duplicate) for answer in answers] == [(first, True)] * 2


# --- values and locks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "is_read"),
    [
        ("paused_at = now()", True),
        ("paused_at = now(), resume_at = now() + interval '10 years'", True),
        ("paused_at = 'infinity'", False),
        ("paused_at = '-infinity'", False),
        ("paused_at = '0044-03-15 BC'", False),
        ("paused_at = '200000-01-01'", False),
        ("paused_at = now(), resume_at = 'infinity'", False),
        ("paused_at = now(), resume_at = '200000-01-01'", False),
        ("paused_at = now(), resume_at = '0044-03-15 BC'", False),
        ("rate_count = 1, burst = 1, rate_seconds = 'NaN'", False),
        ("rate_count = 1, burst = 1, rate_seconds = 'infinity'", False),
    ],
)
def test_an_operator_writes_no_value_of_a_queue_that_python_cannot_read(
    dsn: str, db: psycopg.Connection, change: str, *, is_read: bool
) -> None:
    db.execute("INSERT INTO pgoutbox.queue (name, paused_at) VALUES ('mail', now())")
    refused = pytest.raises(CheckViolation, match="queue_sound")
    with (
        login(dsn, "pgoutbox_operator") as its_dsn,
        psycopg.connect(its_dsn, autocommit=True) as session,
        nullcontext() if is_read else refused,
    ):
        session.execute(f"UPDATE pgoutbox.queue SET {change}".encode())
    assert [queue.queue for queue in Operator(db).list_queues()] == ["mail"]


@pytest.mark.parametrize(
    ("keep", "is_kept"),
    [
        ("1 year", True),
        ("1200 months", True),
        ("36500 days", True),
        ("36501 days", False),
        ("-1 second", False),
        ("1000000 months -29990000 days", False),
        ("-1000 months 30001 days", False),
    ],
)
def test_an_operator_sets_no_retention_that_queries_cannot_use(
    dsn: str, db: psycopg.Connection, keep: str, *, is_kept: bool
) -> None:
    refused = pytest.raises(CheckViolation, match="retention_keep_sound")
    with (
        login(dsn, "pgoutbox_operator") as its_dsn,
        psycopg.connect(its_dsn, autocommit=True) as session,
        nullcontext() if is_kept else refused,
    ):
        session.execute("SELECT pgoutbox.set_retention('mail', 'sent', %s)", (keep,))
    assert len(Operator(db).retention_rules()) == is_kept
    assert len(db.execute("SELECT now() - keep, now() + keep FROM pgoutbox.retention").fetchall()) == is_kept


LOCKABLE: Final = """
    SELECT c.relname::text
    FROM pg_class AS c
    WHERE c.relnamespace = 'pgoutbox'::regnamespace
        AND c.relkind IN ('r', 'p', 'v')
        AND has_table_privilege(%s, c.oid, 'INSERT, UPDATE, DELETE, TRUNCATE')
"""


@pytest.mark.parametrize("role", ["pgoutbox_operator", "pgoutbox_viewer", "pgoutbox_producer"])
def test_nobody_but_a_worker_locks_a_table_against_others(dsn: str, db: psycopg.Connection, role: str) -> None:
    assert db.execute(LOCKABLE, (role,)).fetchall() == []
    with login(dsn, role) as its_dsn, psycopg.connect(its_dsn, autocommit=True) as session:
        for (name,) in db.execute(LOCKABLE, (db.info.user,)).fetchall():
            with pytest.raises(InsufficientPrivilege), session.transaction():
                session.execute(f"LOCK TABLE pgoutbox.{name} IN SHARE MODE".encode())


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
    operator.dismiss(put(db, State.FAILED, owner="7", topic="greet"), "nobody will notice, ticket 4711")
    operator.act_on_all("redrive", MessageFilter(topic="greet"))
    put(db, State.FAILED, topic="greet", owner="8")
    operator.act_on_all("redrive", MessageFilter(topic="greet"))
    before = operator.list_acts()
    for word in ("notice", "greet", "failed", "4711", "nobody will notice", "will notice, ticket 4711"):
        operator.erase(owner=word)
        operator.erase(destination=f"mailto:{word}")
    assert operator.list_acts()[-len(before) :] == before
    assert [act.action for act in operator.list_acts(action=Action.ERASE)] == []


def test_an_erasure_of_an_owner_leaves_a_topic_of_the_same_name_alone(db: psycopg.Connection) -> None:
    put(db, State.FAILED, owner="greet", topic="greet")
    Operator(db).act_on_all("redrive", MessageFilter(topic="greet", owner="greet"))
    Operator(db).erase(owner="greet")
    (act,) = Operator(db).list_acts(action=Action.REDRIVE)
    assert act.stated == {"topic": "greet", "owner": "(erased)", "states": ["failed"]}


def test_a_search_finds_a_person_in_a_statement(db: psycopg.Connection) -> None:
    put(db, State.FAILED)
    Operator(db).act_on_all("redrive", MessageFilter(topic="mail"))
    db.execute("UPDATE pgoutbox.audit SET stated = jsonb_build_object('text', %s::text)", ("about ada@example.org",))
    assert [(found.table, found.column) for found in Operator(db).mentions("ada@example.org")] == [("audit", "stated")]


def test_a_value_that_python_cannot_read_is_no_fault_of_the_connection(db: psycopg.Connection) -> None:
    with pytest.raises(psycopg.DataError) as unread:
        db.execute("SELECT 'infinity'::timestamptz").fetchall()
    text, exit_code = explain(unread.value)
    assert (text.startswith("Python cannot read a value of the database: timestamp"), exit_code) == (True, 1)
    assert "PGOUTBOX_DSN" not in text


def test_an_erasure_finds_a_person_in_statements_and_reasons(db: psycopg.Connection) -> None:
    operator = Operator(db)
    mine = put(db, State.FAILED, owner="ada-17", destination="mailto:ada@example.org", topic="greet")
    other = put(db, State.FAILED, topic="greet")
    operator.act_on_all("redrive", MessageFilter(destination="mailto:ada@example.org", topic="greet"))
    operator.cancel(mine)
    operator.act_on_all(
        "redrive", MessageFilter(text="550 Ada@example.org unknown", states=[State.CANCELLED], topic="greet")
    )
    db.execute(PUT_FINAL, {"id": mine, "state": "failed", "age": timedelta()})
    operator.dismiss(mine, "customer ada-17 has left")
    operator.dismiss(other, "same mailbox as ada@example.org")
    operator.erase(owner="ada-17")
    told = str([(act.details, act.stated) for act in operator.list_acts()])
    assert ("ada@" in told.lower(), "ada-17" in told) == (False, False)
    assert ("has left" in told, "same mailbox as" in told, "'topic': 'greet'" in told) == (True, True, True)


def test_a_producer_finds_no_topics_by_the_beginning_of_their_names(dsn: str, db: psycopg.Connection) -> None:
    """Operators read the views, and a redirect of `mail.*` warns them if no topic begins so."""
    put(db, topic="mail.secret")
    with login(dsn, "pgoutbox_operator") as its_dsn, Operator(its_dsn) as operator:
        assert [operator.is_known_topic(name) for name in ("mail.*", "sms.*", "mail.secret", "mail")] == [
            True, False, True, False
        ]  # fmt: skip
    with login(dsn, "pgoutbox_producer") as its_dsn, psycopg.connect(its_dsn, autocommit=True) as session:
        ask = "SELECT pgoutbox._is_known_topic(%s)"
        assert [session.execute(ask, [name]).fetchone() for name in ("mail.*", "mail.secret")] == [(False,), (True,)]
        with pytest.raises(InsufficientPrivilege):
            Operator(session).is_known_topic("mail.*")

"""Tests that operators correct messages, with the audit and the rights that this needs."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from cryptography.fernet import Fernet
from psycopg.errors import InsufficientPrivilege, InvalidParameterValue, SerializationFailure
from psycopg.types.json import Jsonb
from pydantic import BaseModel, Field

from pgoutbox import ArgumentError, Context, Message, Outbox, State, StateError, Topic, UnknownTopicError
from pgoutbox.catalogue import correct_message
from pgoutbox.errors import MessageNotFoundError
from pgoutbox.operations import Action, ActResult, Correction, MessageFilter, Operator
from pgoutbox.worker import Worker
from tests.support.messages import PUT_FINAL, meanwhile, put
from tests.support.outbox_actions import enqueue, lapse, running, settings_for, state_of
from tests.support.races import until_blocked
from tests.support.roles import login
from tests.support.waiting import until, until_polled
from tests.support.worker_sql import end_lapsed

if TYPE_CHECKING:
    from tests.conftest import Connect

ALL: Correction = {
    "payload": {"to": "bob"},
    "headers": {"a": "b"},
    "destination": "mailto:bob@example.org",
    "owner": "user-7",
    "queue": "bulk",
}


def fields_of(connection: psycopg.Connection, message_id: int) -> tuple[Any, ...]:
    (row,) = connection.execute(
        "SELECT state, payload, headers, destination, owner, queue FROM pgoutbox.message WHERE id = %s", [message_id]
    ).fetchall()
    return tuple(row)


@pytest.mark.parametrize("state", [State.PENDING, State.FAILED])
def test_all_fields_are_replaced_and_a_failed_message_is_pending(db: psycopg.Connection, state: State) -> None:
    message_id, other = put(db, state), put(db, state)
    before = fields_of(db, other)
    assert Operator(db).correct(message_id, ALL).result is ActResult.CORRECTED
    assert fields_of(db, message_id) == ("pending", *ALL.values())
    assert fields_of(db, other) == before


def test_a_field_that_is_not_named_stays(db: psycopg.Connection) -> None:
    message_id = put(db, destination="mailto:ada@example.org")
    Operator(db).correct(message_id, {"owner": "user-7", "headers": {"a": "b"}})
    kept = ("pending", {"to": "ada"}, {"a": "b"}, "mailto:ada@example.org", "user-7", "default")
    assert fields_of(db, message_id) == kept
    Operator(db).correct(message_id, {"owner": None, "headers": None, "destination": None})
    assert fields_of(db, message_id) == ("pending", {"to": "ada"}, None, None, None, "default")
    Operator(db).correct(message_id, {"payload": None})
    assert fields_of(db, message_id)[1] is None


@pytest.mark.parametrize("state", sorted(set(State) - {State.PENDING, State.FAILED}))
def test_messages_in_other_states_are_left_alone(rolled_back: psycopg.Connection, state: State) -> None:
    message_id = put(rolled_back, state)
    before = fields_of(rolled_back, message_id)
    result = Operator(rolled_back).correct(message_id, ALL)
    assert (result.result, result.explanation) == (
        ActResult.WRONG_STATE,
        f"is {state}; only failed and pending messages can be corrected",
    )
    assert fields_of(rolled_back, message_id) == before
    assert Operator(rolled_back).correct(2**40, ALL).result is ActResult.MISSING


def test_a_cancelled_message_is_corrected_if_asked_for(db: psycopg.Connection) -> None:
    message_id = put(db, State.CANCELLED)
    assert Operator(db).correct(message_id, {"queue": "bulk"}, states=[State.CANCELLED]).is_done
    assert fields_of(db, message_id)[0] == "pending"


@pytest.mark.parametrize("state", [State.PENDING, State.FAILED])
def test_only_messages_in_the_asked_states_are_corrected(db: psycopg.Connection, state: State) -> None:
    message_id, other = put(db, state), State.FAILED if state is State.PENDING else State.PENDING
    assert Operator(db).correct(message_id, ALL, states=[other]).result is ActResult.WRONG_STATE
    assert fields_of(db, message_id)[0] == state
    assert Operator(db).correct(message_id, ALL, states=[state]).is_done


def test_a_message_in_back_off_is_due_and_one_that_waits_for_its_time_is_not(db: psycopg.Connection) -> None:
    tried, moved, scheduled = (put(db) for _ in range(3))
    db.execute("UPDATE pgoutbox.message SET available_at = now() + interval '1 day'")
    db.execute("UPDATE pgoutbox.message SET attempt_count = 1, lane = 1 WHERE id = ANY (%s)", [[tried, moved]])
    for message_id in (tried, scheduled):
        assert Operator(db).correct(message_id, {"destination": "mailto:ada@example.org"}).is_done
    assert Operator(db).correct(moved, {"owner": "user-7", "queue": "bulk"}).is_done
    due = "SELECT id, available_at <= now(), max_attempts FROM pgoutbox.message ORDER BY id"
    assert db.execute(due).fetchall() == [(tried, True, 5), (moved, False, 5), (scheduled, False, 4)]


def test_a_superseded_message_is_left_alone(db: psycopg.Connection) -> None:
    """Also one that failed before, and one that a concurrent enqueue has superseded."""
    failed, pending = put(db, State.FAILED, coalesce_key="k"), put(db, coalesce_key="k")
    with db.transaction():
        db.execute("UPDATE pgoutbox.key_head SET newest_id = newest_id + 1000")
    for message_id, state in ((failed, "failed"), (pending, "pending")):
        result = Operator(db).correct(message_id, ALL)
        assert (result.result, result.other_id) == (ActResult.SUPERSEDED, pending + 1000)
        assert fields_of(db, message_id)[0] == state


@pytest.mark.parametrize("state", [State.PENDING, State.FAILED])
def test_the_place_in_an_ordering_key_belongs_to_its_queue(db: psycopg.Connection, state: State) -> None:
    message_id = put(db, state, ordering_key="k")
    assert Operator(db).correct(message_id, {"queue": "bulk"}).result is ActResult.ORDERED
    assert fields_of(db, message_id)[0] == state
    assert Operator(db).correct(message_id, {"queue": "default", "owner": "user-7"}).is_done


def test_a_message_that_has_lost_its_dedupe_key_stays_failed(db: psycopg.Connection) -> None:
    first = put(db, State.CANCELLED, dedupe_key="k")
    second = put(db, dedupe_key="k")
    result = Operator(db).correct(first, ALL, states=[State.CANCELLED])
    assert (result.result, result.other_id) == (ActResult.DEDUPE_KEY_TAKEN, second)
    assert fields_of(db, first)[0] == "cancelled"


@pytest.mark.parametrize("state", [State.PENDING, State.FAILED])
def test_a_locked_message_is_left_alone(db: psycopg.Connection, connect: Connect, state: State) -> None:
    message_id, holder = put(db, state), connect()
    holder.execute("SELECT FROM pgoutbox.message WHERE id = %s FOR SHARE", [message_id])
    assert Operator(db).correct(message_id, ALL).result is ActResult.LOCKED
    assert fields_of(db, message_id)[0] == state


@pytest.mark.parametrize("state", [State.PENDING, State.FAILED])
@pytest.mark.parametrize("change", [{"payload": {"code": 1}}, {"destination": "mailto:eve@example.org"}])
def test_an_encrypted_message_keeps_payload_and_destination(
    dsn: str, db: psycopg.Connection, change: Correction, state: State
) -> None:
    outbox = Outbox(settings_for(dsn, encryption_keys=Fernet.generate_key().decode()))
    outbox.define(Topic("reset", encrypted=True))
    with db.transaction():
        message_id = outbox.on(db).enqueue("reset", {"code": "4711"}, destination="mailto:ada@example.org").id
    if state is State.FAILED:
        db.execute(PUT_FINAL, {"id": message_id, "state": "failed", "age": timedelta()})
    before = fields_of(db, message_id)
    assert Operator(db).correct(message_id, change).result is ActResult.ENCRYPTED
    assert correct_message(Operator(db), outbox, message_id, change).result is ActResult.ENCRYPTED
    assert fields_of(db, message_id) == before
    assert Operator(db).correct(message_id, {"queue": "bulk"}).is_done


@pytest.mark.parametrize(
    ("correction", "message"),
    [
        ({"destination": "ada"}, "destination: must be a URI"),
        ({"owner": ""}, "owner: must not be empty"),
        ({"queue": "Bulk Mail"}, "queue: must be 1 to 63"),
        ({"headers": {"a": 1}}, r"headers"),
        ({"payload": {"pgoutbox.encrypted": {}}}, "payload.*is reserved"),
        ({"payload": float("nan")}, "payload"),
        ({}, "changes: must be a JSON object with one of"),
        ({"state": "sent"}, "changes: must have no fields but"),
        ({"destination": "mailto:Eve <eve@example.com>"}, "destination: must be a plain address"),
        ({"headers": {"": "a"}}, "headers: must not have empty names"),
        ({"queue": None}, "queue: "),
    ],
)
def test_invalid_values_are_refused(rolled_back: psycopg.Connection, correction: Correction, message: str) -> None:
    message_id = put(rolled_back)
    with pytest.raises(ArgumentError, match=message):
        Operator(rolled_back).correct(message_id, correction)


@pytest.mark.parametrize("state", [State.PENDING, State.FAILED])
def test_what_a_patch_makes_of_the_headers_is_checked_too(db: psycopg.Connection, state: State) -> None:
    message_id = put(db, state)
    sixty = {f"h{number}": "x" for number in range(60)}
    db.execute("UPDATE pgoutbox.message SET headers = %s WHERE id = %s", (Jsonb(sixty), message_id))
    with pytest.raises(ArgumentError, match="headers: must not have more than 64 entries"):
        Operator(db).correct(message_id, {"headers": dict.fromkeys("abcde", "x")})
    assert fields_of(db, message_id)[::2] == (state, sixty, None)
    assert Operator(db).correct(message_id, {"headers": {"h0": None, **dict.fromkeys("abcde", "x")}}).is_done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("null", "changes: must be a JSON object"),
        ("[]", "changes: must be a JSON object"),
        ("{}", "changes: must be a JSON object"),
        ('{"state": "sent"}', "changes: must have no fields but payload"),
        ('{"payload": {"pgoutbox.encrypted": 1}}', "payload: the member pgoutbox.encrypted is reserved"),
        ('{"destination": "mailto:eve%40example.com"}', "destination: must be a plain address"),
        ('{"destination": "MailTo:Eve <eve@example.com>"}', "destination: must be a plain address"),
        ('{"owner": 7}', "owner: must be a text"),
        ('{"destination": ["mailto:a@example.org"]}', "destination: must be a text"),
        ('{"destination": "ada"}', "destination: must be a URI"),
        ('{"queue": null}', "queue: must be a text"),
        ('{"queue": "Bulk"}', "queue: must be 1 to 63"),
        ('{"owner": ""}', "owner: must not be empty"),
        ('{"headers": [1]}', "headers: must be a JSON object"),
    ],
)
def test_the_function_refuses_invalid_changes(rolled_back: psycopg.Connection, changes: str, message: str) -> None:
    with pytest.raises(InvalidParameterValue, match=message):
        rolled_back.execute("SELECT pgoutbox.correct('{1}', %s)", [changes])


def test_all_messages_of_a_filter_go_to_a_queue_with_a_worker(db: psycopg.Connection) -> None:
    moved = [put(db, state, queue="orphaned") for state in (State.PENDING, State.FAILED, State.PENDING)]
    ordered, other = put(db, queue="orphaned", ordering_key="k"), put(db, State.FAILED)
    results = [
        (result.id, str(result.result))
        for batch in Operator(db).bulk("correct", MessageFilter(queue="orphaned"), correction={"queue": "default"})
        for result in batch.results
    ]
    assert sorted(results) == [*((i, "corrected") for i in moved), (ordered, "ordered")]
    assert [fields_of(db, i)[5] for i in moved] == ["default"] * 3
    assert fields_of(db, other)[0] == "failed"
    with pytest.raises(StateError, match="only pending and failed"):
        list(Operator(db).bulk("correct", MessageFilter(states=[State.SENT]), correction={"queue": "default"}))


def test_a_message_that_was_attempted_again_meanwhile_is_left_alone(
    db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [put(db, state) for state in (State.PENDING, State.FAILED)]
    meanwhile(
        monkeypatch, lambda: db.execute("UPDATE pgoutbox.message SET attempt_count = attempt_count + 1, lane = 1")
    )
    batches = list(Operator(db).bulk("correct", MessageFilter(topic="mail"), correction={"owner": "user-7"}))
    results = [(result.id, str(result.result)) for batch in batches for result in batch.results]
    assert sorted(results) == [(i, "changed") for i in ids]


def test_redriven_messages_are_corrected_although_others_are_claimed(db: psycopg.Connection, connect: Connect) -> None:
    """A failed message never becomes pending with its old destination."""
    failed, pending, claimer = put(db, State.FAILED), put(db), connect()
    claimer.execute("SELECT FROM pgoutbox.message WHERE id = %s FOR UPDATE", [pending])
    list(Operator(db).bulk("correct", [failed, pending], correction={"destination": "mailto:bob@example.org"}))
    assert (fields_of(db, failed)[0], fields_of(db, failed)[3]) == ("pending", "mailto:bob@example.org")
    assert fields_of(db, pending)[3] is None


def test_two_operators_who_correct_two_members_lose_none(db: psycopg.Connection, connect: Connect) -> None:
    message_id, first, second = put(db), connect(), connect(autocommit=True)
    first.execute('SELECT pgoutbox.correct(%s, \'{"payload": {"name": "Ada"}}\')', ([message_id],))
    assert Operator(second).correct(message_id, {"payload": {"to": "bob"}}).result is ActResult.LOCKED
    first.commit()
    assert Operator(second).correct(message_id, {"payload": {"to": "bob"}}).is_done
    assert fields_of(db, message_id)[1] == {"to": "bob", "name": "Ada"}


def test_members_that_are_not_corrected_keep_their_exact_values(db: psycopg.Connection) -> None:
    message_id = put(db)
    exact = '{"to": "ada", "amount": 1234567890.12345678901234, "z": 1.10}'
    db.execute("UPDATE pgoutbox.message SET payload = %s WHERE id = %s", [exact, message_id])
    assert correct_message(Operator(db), None, message_id, {"payload": {"to": "bob"}}).is_done
    row = db.execute("SELECT payload::text FROM pgoutbox.message").fetchone()
    assert row == ('{"z": 1.10, "to": "bob", "amount": 1234567890.12345678901234}',)


@pytest.mark.slow
def test_twenty_thousand_messages_are_corrected_by_sql_without_a_square(db: psycopg.Connection) -> None:
    """Each row is visited once: with 20,000 ids, one visit for each pair would be 400 million."""
    db.execute(
        """
        INSERT INTO pgoutbox.message (state, topic, payload, attempt_count, finished_at)
        SELECT 'failed', 'mail', '{}', 1, now() FROM generate_series(1, 20000)
        """
    )
    db.execute("ANALYZE pgoutbox.message")
    with db.transaction():
        db.execute("SET LOCAL statement_timeout = '60s'")
        row = db.execute(
            """
            SELECT count(*) FILTER (WHERE c.result = 'corrected')
            FROM pgoutbox.correct((SELECT array_agg(m.id) FROM pgoutbox.message AS m), '{"owner": "user-7"}') AS c
            """
        ).fetchone()
    assert row == (20_000,)


def test_the_audit_names_the_fields_and_no_values(db: psycopg.Connection) -> None:
    first, second = (put(db, state, destination="mailto:ada@example.org") for state in (State.FAILED, State.PENDING))
    list(Operator(db, actor="bob").bulk("correct", [first, second], correction=ALL))
    (act,) = Operator(db).list_acts(action=Action.CORRECT)
    assert (act.actor, act.first_ids) == ("bob", [first, second])
    assert act.details is not None
    assert sorted(act.details) == ["fields", "new_destination_digest", "old_destination_digest", "queue"]
    assert act.details["fields"] == sorted(ALL, key=lambda name: (len(name), name))
    ((text,),) = db.execute("SELECT string_agg(a::text, '') FROM pgoutbox.audit AS a").fetchall()
    assert not {"ada@", "bob@", "user-7", '"b"'} & set(text.split())
    assert "example.org" not in text


def test_an_operator_without_the_right_to_read_payloads_changes_none(dsn: str, db: psycopg.Connection) -> None:
    message_id, strict = put(db), Outbox(settings_for(dsn))
    strict.define(Topic("mail", payload=Welcome))
    with login(dsn, "pgoutbox_operator") as its_dsn, Operator(its_dsn) as operator:
        for change, value in ALL.items():
            correction: Any = {change: value}
            if change in ("payload", "headers"):
                with pytest.raises(InsufficientPrivilege, match="only a role that may read them"):
                    operator.correct(message_id, correction)
                with pytest.raises(InsufficientPrivilege, match="only a role that may read them"):
                    correct_message(operator, strict, message_id, correction)
            else:
                assert operator.correct(message_id, correction).is_done
        user = psycopg.conninfo.conninfo_to_dict(its_dsn)["user"]
        db.execute(f'GRANT SELECT ON pgoutbox.message TO "{user}"'.encode())
        assert operator.correct(message_id, ALL).is_done
        db.execute(f'REVOKE SELECT ON pgoutbox.message FROM "{user}"'.encode())
    assert fields_of(db, message_id) == ("pending", *ALL.values())


def test_the_right_is_that_of_the_role_that_the_session_has_set(rolled_back: psycopg.Connection) -> None:
    """A login of the owner that has set the role of an operator counts as an operator."""
    message_id = put(rolled_back)
    rolled_back.execute("SET LOCAL ROLE pgoutbox_operator")
    with pytest.raises(InsufficientPrivilege, match="only a role that may read them"), rolled_back.transaction():
        rolled_back.execute("SELECT pgoutbox.correct(%s, %s)", ([message_id], Jsonb({"payload": 1})))
    rolled_back.execute("RESET ROLE")
    assert Operator(rolled_back).correct(message_id, {"payload": 1}).is_done


# --- the worker -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_worker_that_sleeps_delivers_a_corrected_message(dsn: str, db: psycopg.Connection) -> None:
    """It goes to another queue, with an earlier due time than any message that the worker has seen there."""
    outbox = Outbox(settings_for(dsn))
    seen: list[tuple[Any, str | None]] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        seen.append((message.payload, message.destination))

    moved = enqueue(db, queue="orphaned", destination="mailto:ada@exmaple.org")
    first = enqueue(db)
    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: state_of(db, first) == "sent")
        await until_polled(worker, db)
        correction: Correction = {"queue": "default", "destination": "mailto:ada@example.org", "payload": 7}
        assert Operator(db).correct(moved, correction).is_done
        await until(lambda: state_of(db, moved) == "sent")
    assert seen[1:] == [(7, "mailto:ada@example.org")]


def test_a_claim_that_has_the_row_first_wins(db: psycopg.Connection, connect: Connect) -> None:
    """The message is in flight with its old destination, and the correction says so."""
    message_id, claimer, operator = put(db), connect(), connect(autocommit=True)
    claimer.execute("UPDATE pgoutbox.message SET owner = 'x' WHERE id = %s", [message_id])
    assert Operator(operator).correct(message_id, ALL).result is ActResult.LOCKED
    claimer.commit()
    assert Operator(operator).correct(message_id, ALL).is_done


@pytest.mark.parametrize("is_undone", [False, True])
def test_a_claim_never_sees_half_a_correction(db: psycopg.Connection, connect: Connect, *, is_undone: bool) -> None:
    """A correction in an open transaction is committed or rolled back as one."""
    message_id, corrector, other = put(db, State.FAILED), connect(), connect(autocommit=True)
    before = fields_of(db, message_id)
    corrector.execute("SELECT")
    Operator(corrector).correct(message_id, ALL)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(other.execute, "SELECT FROM pgoutbox.message WHERE id = %s FOR UPDATE", [message_id])
        until_blocked(db, other, waiting)
        corrector.rollback() if is_undone else corrector.commit()
        # A failed message moves to another partition. A claim does not look there.
        with nullcontext() if is_undone else pytest.raises(SerializationFailure):
            waiting.result()
    assert fields_of(db, message_id) == (before if is_undone else ("pending", *ALL.values()))


@pytest.mark.slow
@pytest.mark.parametrize("is_handed_over", [False, True], ids=["its attempt runs", "it is handed over"])
async def test_a_process_that_knows_an_earlier_attempt_delivers_the_corrected_payload(
    dsn: str, db: psycopg.Connection, *, is_handed_over: bool
) -> None:
    outbox, opened = Outbox(settings_for(dsn)), asyncio.Event()
    seen: list[object] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        seen.append(message.payload)
        if len(seen) == 1:
            await opened.wait()

    message_id = enqueue(db, payload="old")
    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: seen)
        with db.transaction():
            lapse(db, message_id)
            assert [row.state for row in end_lapsed(db, worker="other")] == ["pending"]
            db.execute("UPDATE pgoutbox.message SET available_at = now() + interval '1 h'")
        if is_handed_over:
            opened.set()
            await until(lambda: not worker.status().in_flight)
        assert Operator(db).correct(message_id, {"payload": "new"}).is_done
        await until(lambda: state_of(db, message_id) == "sent")
        opened.set()
    assert seen == ["old", "new"]


# --- by the definition of the topic -----------------------------------------------------------------------------------


class Welcome(BaseModel):
    user_id: int = Field(gt=0)
    email: str
    name: str | None = None


@pytest.fixture
def outbox(dsn: str) -> Outbox:
    outbox = Outbox(settings_for(dsn))
    outbox.define(Topic("mail.welcome", payload=Welcome))
    return outbox


def welcome(db: psycopg.Connection, outbox: Outbox) -> int:
    with db.transaction():
        payload = Welcome(user_id=7, email="ada@exmaple.org", name="Ada")
        return outbox.on(db).enqueue("mail.welcome", payload, headers={"a": "b", "c": "d"}).id


def test_members_of_the_payload_are_merged_and_checked_by_the_model(db: psycopg.Connection, outbox: Outbox) -> None:
    message_id = welcome(db, outbox)
    correction: Correction = {"payload": {"email": "ada@example.org", "name": None}, "headers": {"a": "x"}}
    assert correct_message(Operator(db), outbox, message_id, correction).is_done
    _, payload, headers, *_ = fields_of(db, message_id)
    assert (payload, headers) == ({"user_id": 7, "email": "ada@example.org"}, {"a": "x", "c": "d"})
    with pytest.raises(ArgumentError, match=r"payload\.user_id: does not fit Welcome"):
        correct_message(Operator(db), outbox, message_id, {"payload": {"user_id": 0}})
    with pytest.raises(ArgumentError, match="payload: does not fit Welcome"):
        correct_message(Operator(db), outbox, message_id, {"payload": []})
    assert fields_of(db, message_id)[1:3] == (payload, headers)


def test_without_an_application_no_model_checks_the_payload(db: psycopg.Connection, outbox: Outbox) -> None:
    message_id = welcome(db, outbox)
    assert correct_message(Operator(db), None, message_id, {"payload": {"user_id": 0}}).is_done
    assert fields_of(db, message_id)[1]["user_id"] == 0


def test_a_topic_that_the_application_does_not_know_is_named(db: psycopg.Connection, outbox: Outbox) -> None:
    message_id = put(db, topic="mail.welcom")
    with pytest.raises(UnknownTopicError, match=r"did you mean mail\.welcome"):
        correct_message(Operator(db), outbox, message_id, {"payload": {"user_id": 0}})
    assert correct_message(Operator(db), outbox, message_id, {"owner": "user-7"}).is_done
    with pytest.raises(MessageNotFoundError):
        correct_message(Operator(db), outbox, 2**40, {"payload": {}})


def test_a_patch_replaces_what_is_no_object(db: psycopg.Connection) -> None:
    message_id = put(db)
    for patch, expected in (
        ({"to": {"name": "ada"}}, {"to": {"name": "ada"}}),
        ({"to": {"age": 7}}, {"to": {"name": "ada", "age": 7}}),
        ([1], [1]),
        ({"a": 1}, {"a": 1}),
    ):
        assert correct_message(Operator(db), None, message_id, {"payload": patch}).is_done  # type: ignore[typeddict-item]
        assert fields_of(db, message_id)[1] == expected


async def test_the_content_of_a_fan_out_stays(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))
    seen: list[object] = []

    @outbox.handler("news")
    async def news(message: Message, ctx: Context) -> None:
        seen.append((message.payload, message.content))

    with db.transaction():
        outbox.on(db).enqueue_fanout("news", {"n": 1}, ["mailto:ada@example.org"], content={"html": "<p>"})
    assert correct_message(Operator(db), outbox, 1, {"payload": {"n": 2}}).is_done
    await Worker(outbox).run_once()
    assert seen == [({"n": 2}, {"html": "<p>"})]


# --- versions of payloads ---------------------------------------------------------------------------------------------


def version_of(db: psycopg.Connection, message_id: int) -> tuple[object, int]:
    ((payload, version),) = db.execute(
        "SELECT payload, payload_version FROM pgoutbox.message WHERE id = %s", [message_id]
    ).fetchall()
    return payload, version


def test_a_correction_keeps_a_member_that_is_null_in_the_new_version(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))
    outbox.define(Topic("mail", version=2, upgrade={1: lambda old: {"name": old["name"], "title": None}}))
    message_id = enqueue(db, "mail", {"name": "Ada Byron"})
    correct_message(Operator(db), outbox, message_id, {"payload": {"name": "Ada Lovelace"}})
    assert version_of(db, message_id) == ({"name": "Ada Lovelace", "title": None}, 2)


@pytest.mark.parametrize(
    ("topic", "problem"),
    [
        (Topic("mail"), "the payload has version 2, and the topic 1"),
        (Topic("mail", version=3), "the payload has version 2, and the topic no upgrade of it"),
        (
            Topic("mail", version=3, upgrade={2: lambda payload: payload["nam"]}),
            "the payload cannot be upgraded from version 2: KeyError: 'nam'",
        ),
    ],
)
def test_a_correction_of_a_payload_that_cannot_be_brought_forward_is_refused(
    dsn: str, db: psycopg.Connection, topic: Topic[Any], problem: str
) -> None:
    outbox = Outbox(settings_for(dsn))
    outbox.define(topic)
    message_id = enqueue(db, "mail", {"first": "Ada", "last": "Byron"}, payload_version=2)
    with pytest.raises(ArgumentError) as refused:
        correct_message(Operator(db), outbox, message_id, {"payload": {"last": "King"}})
    hint = "give payload_version 2 to change members of version 2"
    assert str(refused.value) == f"payload: message {message_id}: {problem}; {hint}"
    corrected = correct_message(Operator(db), outbox, message_id, {"payload": {"last": "King"}, "payload_version": 2})
    assert corrected.result is ActResult.CORRECTED
    assert version_of(db, message_id) == ({"first": "Ada", "last": "King"}, 2)

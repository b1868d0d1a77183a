"""Tests that an application finds the messages of an owner, and changes one that was never attempted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from cryptography.fernet import Fernet
from psycopg import errors
from psycopg.types.json import Jsonb
from pydantic import BaseModel

from pgoutbox import (
    ArgumentError,
    ConfigurationError,
    Context,
    EditResult,
    Message,
    Outbox,
    OwnedMessage,
    State,
    StateError,
    Topic,
    TransactionError,
    UnknownTopicError,
    Worker,
)
from tests.support.messages import put
from tests.support.outbox_actions import Options, enqueue, expire, make_due, row_of, running, settings_for, state_of
from tests.support.roles import login
from tests.support.waiting import until, until_idle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Unpack

    from tests.conftest import AsyncConnect, Connect

ADA, BOB = "account-7", "account-8"
LATER = datetime(2030, 1, 1, 12, tzinfo=UTC)
KEY: Final = Fernet.generate_key().decode()


class Note(BaseModel):
    account_id: int
    text: str


NOTE = Topic("note", payload=Note, owner=lambda p: f"account-{p.account_id}")


def hello(connection: psycopg.Connection, **options: Unpack[Options]) -> int:
    """Enqueue a message of Ada."""
    options.setdefault("owner", ADA)
    return enqueue(connection, "note", {"text": "hello"}, **options)


def ended(connection: psycopg.Connection, state: State) -> int:
    """Put a message of Ada into this state."""
    message_id = put(connection, state)
    connection.execute("UPDATE pgoutbox.message SET owner = %s WHERE id = %s", [ADA, message_id])
    return message_id


def values_of(connection: psycopg.Connection, message_id: int) -> tuple[object, ...]:
    """Return payload, destination, headers and due time of a message."""
    row = connection.execute(
        "SELECT payload, destination, headers, available_at FROM pgoutbox.message WHERE id = %s", [message_id]
    ).fetchone()
    assert row is not None
    return row


def ids(found: list[OwnedMessage]) -> list[int]:
    return [message.id for message in found]


@pytest.fixture
def secret(dsn: str) -> Outbox:
    """An outbox with an encrypted topic, `note`."""
    outbox = Outbox(settings_for(dsn, encryption_keys=KEY))
    outbox.define(Topic("note", encrypted=True))
    return outbox


@pytest.fixture
def producer(dsn: str) -> Iterator[psycopg.Connection]:
    with login(dsn, "pgoutbox_producer") as its_dsn, psycopg.connect(its_dsn) as connection:
        yield connection


# --- find -------------------------------------------------------------------------------------------------------------


def test_the_owed_messages_of_an_owner_are_found_newest_first(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    sending, ended_ids = ended(rolled_back, State.SENDING), [ended(rolled_back, State.SENT)]
    first, second = hello(rolled_back), hello(rolled_back, destination="tel:1", available_at=LATER, dedupe_key="d")
    hello(rolled_back, owner=BOB)
    hello(rolled_back, owner=None)
    found = outbox.on(rolled_back).find(owner=ADA)
    assert ids(found) == [second, first, sending]
    assert (found[0].topic, found[0].queue, found[0].state) == ("note", "default", State.PENDING)
    assert (found[0].destination, found[0].dedupe_key, found[0].available_at) == ("tel:1", "d", LATER)
    assert (found[0].attempt_count, found[2].attempt_count, found[0].payload) == (0, 1, None)
    assert ids(outbox.on(rolled_back).find(owner=ADA, states=[State.SENT])) == ended_ids
    assert len(outbox.on(rolled_back).find(owner=ADA, states=[*State])) == 4


def test_a_topic_limits_the_search(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    note = hello(rolled_back)
    other = enqueue(rolled_back, "other", owner=ADA)
    assert ids(outbox.on(rolled_back).find(owner=ADA, topics=[NOTE])) == [note]
    assert ids(outbox.on(rolled_back).find(owner=ADA, topics=["note", "other"])) == [other, note]
    assert outbox.on(rolled_back).find(owner=ADA, topics=[]) == []


def test_pages_have_each_message_once(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    wanted = [ended(rolled_back, state) for state in State for _ in range(3)]
    found, before_id = list[int](), None
    while page := outbox.on(rolled_back).find(owner=ADA, states=[*State], before_id=before_id, limit=4):
        found += ids(page)
        before_id = page[-1].id
    assert found == wanted[::-1]


def test_one_message_is_found_only_for_its_owner(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    message_id, newer = hello(rolled_back), hello(rolled_back)
    assert ids(outbox.on(rolled_back).find(owner=ADA, message_id=message_id)) == [message_id]
    assert outbox.on(rolled_back).find(owner=BOB, message_id=message_id) == []
    assert outbox.on(rolled_back).find(owner=ADA, message_id=newer, before_id=newer) == []


def test_a_message_that_ended_has_its_time_and_reason(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    failed, skipped, sent = (ended(rolled_back, state) for state in (State.FAILED, State.SKIPPED, State.SENT))
    rolled_back.execute("UPDATE pgoutbox.message SET last_error = '535 password=hunter2' WHERE id = %s", [failed])
    found = {message.id: message for message in outbox.on(rolled_back).find(owner=ADA, states=[*State])}
    assert found[failed].reason == "535 password=(redacted)"
    assert (found[skipped].reason, found[sent].reason) == ("expired", None)
    assert found[sent].finished_at is not None


def test_a_secret_in_a_destination_is_redacted(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    hello(rolled_back, destination="https://example.org/hook?token=hunter2")
    (found,) = outbox.on(rolled_back).find(owner=ADA)
    assert found.destination == "https://example.org/hook?token=(redacted)"


def test_the_message_for_a_hook_is_not_the_owners(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    failure = {"topic": "note", "queue": "default", "message_id": 1, "owner": ADA}
    row = rolled_back.execute("SELECT pgoutbox._enqueue_failure(%s, 3)", [Jsonb(failure)]).fetchone()
    assert row is not None
    assert outbox.on(rolled_back).find(owner=ADA) == []
    assert outbox.on(rolled_back).edit(row[0], owner=ADA, delay=60) is EditResult.MISSING


def test_a_page_reads_no_more_than_itself(outbox: Outbox, connection: psycopg.Connection) -> None:
    connection.execute(
        """
        INSERT INTO pgoutbox.message (topic, payload, owner, state, attempt_count, worker, claimed_at, finished_at)
        SELECT 'note', '1', %s, 'sent', 1, 'w', now(), now() FROM generate_series(1, 2000)
        """,
        [ADA],
    )
    newest = hello(connection)
    connection.commit()
    read = """
        SELECT sum(seq_scan) = 0 AND sum(idx_tup_fetch) < 500
        FROM pg_stat_xact_user_tables
        WHERE relname LIKE 'message\\_%'
    """
    for states in ([State.PENDING], [*State]):
        for _ in range(12):  # PostgreSQL may choose a generic plan after five executions.
            assert outbox.on(connection).find(owner=ADA, states=states, limit=10)[0].id == newest
            assert ids(outbox.on(connection).find(owner=ADA, states=[*State], message_id=newest)) == [newest]
        assert connection.execute(read).fetchone() == (True,)
        connection.rollback()


def test_a_producer_reads_payloads_only_by_a_right_of_its_own(
    outbox: Outbox, db: psycopg.Connection, producer: psycopg.Connection
) -> None:
    hello(db)
    assert [message.payload for message in outbox.on(producer).find(owner=ADA)] == [None]
    for owner in (ADA, "nobody"):
        with pytest.raises(errors.InsufficientPrivilege, match="read_payloads"):
            outbox.on(producer).find(owner=owner, payloads=True)
        producer.rollback()
    db.execute(f"GRANT EXECUTE ON FUNCTION pgoutbox.read_payloads TO {producer.info.user}".encode())
    assert [message.payload for message in outbox.on(producer).find(owner=ADA, payloads=True)] == [{"text": "hello"}]
    assert outbox.on(producer).find(owner=BOB, payloads=True) == []


def test_the_payload_of_another_owner_is_not_read(rolled_back: psycopg.Connection) -> None:
    mine, other, unowned = hello(rolled_back), hello(rolled_back, owner=BOB), hello(rolled_back, owner=None)
    read = rolled_back.execute("SELECT * FROM pgoutbox.read_payloads(%s, %s)", [[mine, other, unowned], ADA])
    assert read.fetchall() == [(mine, {"text": "hello"}, 1)]


def test_an_encrypted_payload_is_decrypted(secret: Outbox, db: psycopg.Connection) -> None:
    with db.transaction():
        message_id = secret.on(db).enqueue("note", {"text": "hello"}, owner=ADA, destination="tel:1").id
    (found,) = secret.on(db).find(owner=ADA, payloads=True)
    assert found.payload == {"text": "hello"}
    with pytest.raises(
        ConfigurationError, match=f"the payload of message {message_id} is encrypted: add its key to PGOUTBOX_ENC"
    ):
        Outbox(settings_for(db.info.dsn)).on(db).find(owner=ADA, payloads=True)


def test_a_payload_that_was_encrypted_for_another_message_is_not_shown(secret: Outbox, db: psycopg.Connection) -> None:
    with db.transaction():
        secret.on(db).enqueue("note", {"text": "hello"}, owner=BOB)
    db.execute("SELECT pgoutbox.enqueue('mine', m.payload, owner => %s) FROM pgoutbox.message AS m", [ADA])
    with pytest.raises(StateError, match="was encrypted for another message: its topic differs"):
        secret.on(db).find(owner=ADA, payloads=True)


async def test_an_async_connection_finds_and_edits(outbox: Outbox, aconnect: AsyncConnect) -> None:
    connection = await aconnect()
    enqueued = await outbox.on(connection).enqueue("note", 1, owner=ADA)
    assert await outbox.on(connection).edit(enqueued.id, owner=ADA, payload=2) is EditResult.EDITED
    assert [message.payload for message in await outbox.on(connection).find(owner=ADA, payloads=True)] == [2]


@pytest.mark.parametrize(
    ("search", "problem"),
    [
        ({"owner": ""}, "owner: must not be empty"),
        ({"topics": "note"}, "topics: must be several"),
        ({"topics": ["Note"]}, "topics: must be 1 to 63"),
        ({"states": []}, "states: must be some of pending, sending"),
        ({"states": ["done"]}, "states: must be some of pending, sending"),
        ({"message_id": 0}, "message_id: must be a whole number"),
        ({"before_id": 0}, "before_id: must be a whole number"),
        ({"limit": 1_001}, "limit: must be a whole number from 1 to 1000"),
    ],
)
def test_an_invalid_search_is_refused(
    outbox: Outbox, rolled_back: psycopg.Connection, search: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ArgumentError, match=problem):
        outbox.on(rolled_back).find(**{"owner": ADA, **search})


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("NULL", "owner: must not be null"),
        ("'a', states => '{done}'", "states: must be some of pending"),
        ("'a', states => '{}'", "states: must be some of pending"),
        ("'a', states => NULL", "states: must be some of pending"),
        ("'a', max_count => 1001", "max_count: must be from 1 to 1000"),
        ("'a', max_count => NULL", "max_count: must be from 1 to 1000"),
    ],
)
def test_the_function_refuses_an_invalid_search(rolled_back: psycopg.Connection, arguments: str, problem: str) -> None:
    with pytest.raises(psycopg.DataError, match=rf"pgoutbox\.find: {problem}"):
        rolled_back.execute(f"SELECT FROM pgoutbox.find({arguments})".encode())


# --- edit -------------------------------------------------------------------------------------------------------------


def test_a_producer_edits_in_its_transaction(
    outbox: Outbox, db: psycopg.Connection, producer: psycopg.Connection
) -> None:
    message_id = hello(db)
    before = values_of(db, message_id)
    for end, changed in ((producer.rollback, False), (producer.commit, True)):
        result = outbox.on(producer).edit(message_id, owner=ADA, payload={"text": "bye"}, available_at=LATER)
        assert result is EditResult.EDITED
        end()
        assert values_of(db, message_id) == (({"text": "bye"}, None, None, LATER) if changed else before)
    with pytest.raises(errors.InsufficientPrivilege):
        producer.execute("SELECT FROM pgoutbox.message")


async def test_the_new_payload_is_sent_and_the_old_one_is_not(dsn: str, db: psycopg.Connection) -> None:
    outbox, sent = Outbox(settings_for(dsn)), list[object]()

    @outbox.handler("note")
    async def send(message: Message, ctx: Context) -> None:
        sent.append(message.payload)

    message_id = hello(db, available_at=LATER)
    with db.transaction():
        assert outbox.on(db).edit(message_id, owner=ADA, payload={"text": "bye"}, delay=0) is EditResult.EDITED
    await Worker(outbox).run_once()
    assert (sent, state_of(db, message_id)) == ([{"text": "bye"}], "sent")


async def test_an_edit_wakes_an_idle_worker(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("note")
    async def send(message: Message, ctx: Context) -> None: ...

    message_id, worker = hello(db, available_at=LATER), Worker(outbox)
    async with running(worker):
        await until_idle(worker)
        with db.transaction():
            assert outbox.on(db).edit(message_id, owner=ADA, delay=0) is EditResult.EDITED
        await until(lambda: state_of(db, message_id) == "sent")


def test_a_value_that_is_not_given_stays(outbox: Outbox, connection: psycopg.Connection) -> None:
    enqueued = outbox.on(connection).enqueue(
        "note", 1, owner=ADA, destination="tel:1", headers={"a": "b"}, available_at=LATER
    )
    assert outbox.on(connection).edit(enqueued.id, owner=ADA, payload=2) is EditResult.EDITED
    assert values_of(connection, enqueued.id) == (2, "tel:1", {"a": "b"}, LATER)
    assert outbox.on(connection).edit(enqueued.id, owner=ADA, delay=timedelta(hours=1)) is EditResult.EDITED
    payload, *_, due = values_of(connection, enqueued.id)
    assert payload == 2
    assert due != LATER


def test_a_past_due_time_means_now(outbox: Outbox, connection: psycopg.Connection) -> None:
    message_id = hello(connection, available_at=LATER)
    assert outbox.on(connection).edit(message_id, owner=ADA, available_at=LATER.replace(year=2001)) is EditResult.EDITED
    assert connection.execute("SELECT now()").fetchone() == values_of(connection, message_id)[3:]


def test_a_new_destination_gets_neither_the_old_payload_nor_the_old_headers(
    outbox: Outbox, connection: psycopg.Connection
) -> None:
    message_id = outbox.on(connection).enqueue("note", 1, owner=ADA, destination="tel:1", headers={"a": "b"}).id
    with pytest.raises(ArgumentError, match="destination: give the payload, too"):
        outbox.on(connection).edit(message_id, owner=ADA, destination="tel:2")
    assert outbox.on(connection).edit(message_id, owner=ADA, payload=2, destination="tel:1") is EditResult.EDITED
    assert values_of(connection, message_id)[:3] == (2, "tel:1", {"a": "b"})
    assert outbox.on(connection).edit(message_id, owner=ADA, payload=3, destination="tel:2") is EditResult.EDITED
    assert values_of(connection, message_id)[:3] == (3, "tel:2", None)


def test_a_shared_content_stays_with_its_destination(outbox: Outbox, connection: psycopg.Connection) -> None:
    (message_id,) = outbox.on(connection).enqueue_fanout("note", 1, ["tel:1"], content="secret", owner=ADA).ids
    assert outbox.on(connection).edit(message_id, owner=ADA, payload=2, destination="tel:2") is EditResult.SHARED
    assert outbox.on(connection).edit(message_id, owner=ADA, delay=60) is EditResult.EDITED
    assert values_of(connection, message_id)[:2] == (1, "tel:1")


@pytest.mark.parametrize("state", sorted(set(State) - {State.PENDING}))
def test_only_a_pending_message_is_edited(outbox: Outbox, rolled_back: psycopg.Connection, state: State) -> None:
    message_id = ended(rolled_back, state)
    before = values_of(rolled_back, message_id)
    assert outbox.on(rolled_back).edit(message_id, owner=ADA, payload=1) is EditResult.WRONG_STATE
    assert outbox.on(rolled_back).edit(message_id, owner=ADA, delay=60) is EditResult.WRONG_STATE
    assert values_of(rolled_back, message_id) == before


def test_after_an_attempt_only_the_due_time_is_changed(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    """The attempt may have sent the old payload, and its worker may have lost the answer."""
    message_id = hello(rolled_back)
    rolled_back.execute("UPDATE pgoutbox.message_live SET attempt_count = 1, lane = 1 WHERE id = %s", [message_id])
    assert outbox.on(rolled_back).edit(message_id, owner=ADA, payload=1) is EditResult.ATTEMPTED
    assert outbox.on(rolled_back).edit(message_id, owner=ADA, available_at=LATER) is EditResult.EDITED
    assert values_of(rolled_back, message_id) == ({"text": "hello"}, None, None, LATER)


def test_a_message_of_another_owner_is_missing_and_not_locked(
    outbox: Outbox, db: psycopg.Connection, connect: Connect
) -> None:
    message_id, other = hello(db), connect()
    assert outbox.on(other).edit(message_id, owner=BOB, payload=1) is EditResult.MISSING
    assert outbox.on(other).edit(message_id, owner=BOB, delay=60) is EditResult.MISSING
    assert outbox.on(other).edit(2**40, owner=ADA, delay=60) is EditResult.MISSING
    with db.transaction():
        assert outbox.on(db).edit(message_id, owner=ADA, delay=60) is EditResult.EDITED


def test_a_superseded_message_is_left_alone(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    older, newer = (hello(rolled_back, coalesce_key="k") for _ in range(2))
    assert outbox.on(rolled_back).edit(older, owner=ADA, payload=1) is EditResult.SUPERSEDED
    assert outbox.on(rolled_back).edit(newer, owner=ADA, payload=1) is EditResult.EDITED


def test_a_message_that_expires_before_its_due_time_is_left_alone(
    outbox: Outbox, rolled_back: psycopg.Connection
) -> None:
    message_id = hello(rolled_back, expires_at=LATER)
    assert outbox.on(rolled_back).edit(message_id, owner=ADA, available_at=LATER) is EditResult.EXPIRES
    expire(rolled_back, message_id)
    assert outbox.on(rolled_back).edit(message_id, owner=ADA, payload=1) is EditResult.EXPIRES


def test_a_locked_message_is_left_alone(outbox: Outbox, db: psycopg.Connection, connect: Connect) -> None:
    message_id, holder, producer = hello(db), connect(), connect()
    holder.execute("SELECT FROM pgoutbox.message WHERE id = %s FOR SHARE", [message_id])
    assert outbox.on(producer).edit(message_id, owner=ADA, payload=1) is EditResult.LOCKED


def test_the_definition_of_the_topic_checks_and_completes_the_payload(
    outbox: Outbox, connection: psycopg.Connection
) -> None:
    topic = outbox.define(
        Topic(
            "note",
            payload=Note,
            owner=NOTE.owner,
            destination=lambda p: f"tel:{len(p.text)}" if len(p.text) > 1 else None,
            dedupe_key=lambda p: p.text[:1],
        )
    )
    message_id = outbox.on(connection).enqueue(topic, Note(account_id=7, text="hello")).id
    edit = outbox.on(connection).edit
    with pytest.raises(ArgumentError, match=r"payload\.text: does not fit Note"):
        edit(message_id, owner=ADA, payload={"account_id": 7})
    with pytest.raises(ArgumentError, match=f"payload: gives message {message_id} another dedupe_key; cancel it"):
        edit(message_id, owner=ADA, payload=Note(account_id=7, text="bye"))
    with pytest.raises(ArgumentError, match=f"payload: gives message {message_id} another owner; cancel it"):
        edit(message_id, owner=ADA, payload=Note(account_id=8, text="hello"))
    with pytest.raises(ArgumentError, match=f"payload: gives message {message_id} no destination; cancel it"):
        edit(message_id, owner=ADA, payload=Note(account_id=7, text="h"))
    with pytest.raises(ArgumentError, match="destination: belongs to the definition of topic 'note'"):
        edit(message_id, owner=ADA, payload=Note(account_id=7, text="hi"), destination="tel:1")
    assert edit(message_id, owner=ADA, payload=Note(account_id=7, text="hi")) is EditResult.EDITED
    assert values_of(connection, message_id)[:2] == ({"account_id": 7, "text": "hi"}, "tel:2")


def test_a_strict_outbox_edits_only_its_topics(dsn: str, rolled_back: psycopg.Connection) -> None:
    message_id = hello(rolled_back)
    with pytest.raises(UnknownTopicError):
        Outbox(settings_for(dsn), strict=True).on(rolled_back).edit(message_id, owner=ADA, payload=1)


def test_the_first_enqueue_is_a_duplicate_after_an_edit(outbox: Outbox, connection: psycopg.Connection) -> None:
    message_id = outbox.on(connection).enqueue("note", 1, owner=ADA, dedupe_key="d").id
    assert outbox.on(connection).edit(message_id, owner=ADA, payload=2) is EditResult.EDITED
    assert outbox.on(connection).enqueue("note", 1, owner=ADA, dedupe_key="d") == (message_id, True, State.PENDING)


@pytest.mark.parametrize("destination", [None, "tel:2"])
async def test_an_encrypted_payload_is_encrypted_again(
    secret: Outbox, db: psycopg.Connection, destination: str | None
) -> None:
    sent: list[object] = []

    @secret.handler("note")
    async def send(message: Message, ctx: Context) -> None:
        sent.append((message.destination, message.payload))

    with db.transaction():
        message_id = (
            secret.on(db).enqueue("note", {"text": "hello"}, owner=ADA, destination="tel:1", coalesce_key="k").id
        )
        result = secret.on(db).edit(message_id, owner=ADA, payload={"text": "bye"}, destination=destination)
        assert result is EditResult.EDITED
    assert "bye" not in str(values_of(db, message_id)[0])
    await Worker(secret).run_once()
    assert sent == [(destination or "tel:1", {"text": "bye"})]


def test_an_encrypted_payload_is_not_stored_for_another_destination(secret: Outbox, db: psycopg.Connection) -> None:
    """The producer sees a redacted destination, and cannot encrypt for the true one."""
    hook = "https://example.org/hook?token=hunter2"
    with db.transaction():
        message_id = secret.on(db).enqueue("note", 1, owner=ADA, destination=hook).id
        before = values_of(db, message_id)
        assert secret.on(db).edit(message_id, owner=ADA, payload=2) is EditResult.ENCRYPTED
        assert values_of(db, message_id) == before
        assert secret.on(db).edit(message_id, owner=ADA, payload=2, destination=hook) is EditResult.EDITED


def test_a_plain_payload_does_not_replace_an_encrypted_one(
    outbox: Outbox, secret: Outbox, db: psycopg.Connection
) -> None:
    with db.transaction():
        message_id = secret.on(db).enqueue("note", 1, owner=ADA).id
        assert outbox.on(db).edit(message_id, owner=ADA, payload=2) is EditResult.ENCRYPTED


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        ({}, "payload: give a payload, a due time, or both"),
        ({"payload": object()}, "payload: not JSON"),
        ({"payload": 1, "destination": "ada"}, "destination: must be a URI"),
        ({"delay": -1}, "delay: must be from 0"),
        ({"delay": 1, "available_at": LATER}, "delay: give delay or available_at, not both"),
        ({"delay": 1, "owner": ""}, "owner: must not be empty"),
        ({"delay": 1, "message_id": 0}, "message_id: must be a whole number"),
    ],
)
def test_an_invalid_edit_is_refused(
    outbox: Outbox, rolled_back: psycopg.Connection, edit: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ArgumentError, match=problem):
        outbox.on(rolled_back).edit(**{"message_id": hello(rolled_back), "owner": ADA, **edit})


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("NULL, 'a', '1'", "message_id: must not be null"),
        ("1, NULL, '1'", "owner: must not be null"),
        ("1, 'a'", "payload: must not be null"),
        ("1, 'a', destination => 'tel:1', available_at => now()", "destination: must not be given without"),
        ("1, 'a', payload_version => 2, available_at => now()", "payload_version: must not be given without"),
        ("1, 'a', '1', destination => 'ada'", "destination: must be a URI"),
        ("1, 'a', available_at => 'infinity'", "available_at: must be finite"),
        ("1, 'a', available_at => '2126-01-01'", "available_at: must not be more than 10 years ahead"),
    ],
)
def test_the_function_refuses_an_invalid_edit(rolled_back: psycopg.Connection, arguments: str, problem: str) -> None:
    with pytest.raises(psycopg.DataError, match=rf"pgoutbox\.edit: {problem}"):
        rolled_back.execute(f"SELECT pgoutbox.edit({arguments})".encode())


def test_an_edit_needs_a_transaction_and_a_search_does_not(outbox: Outbox, db: psycopg.Connection) -> None:
    message_id = hello(db)
    assert ids(outbox.on(db).find(owner=ADA)) == [message_id]
    with pytest.raises(TransactionError):
        outbox.on(db).edit(message_id, owner=ADA, payload=1)
    assert outbox.on(db).edit(message_id, owner=ADA, payload=1, require_transaction=False) is EditResult.EDITED


def test_an_edit_is_no_act_of_an_operator(outbox: Outbox, connection: psycopg.Connection) -> None:
    message_id = hello(connection)
    make_due(connection, message_id)
    assert outbox.on(connection).edit(message_id, owner=ADA, payload=1) is EditResult.EDITED
    assert connection.execute("SELECT count(*) FROM pgoutbox.audit").fetchone() == (0,)
    assert row_of(connection, message_id).due_in_seconds <= 0

"""Tests encrypted topics on a real database: the contents of the row, the handler's payload, and duplicates."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import pytest
from cryptography.fernet import Fernet
from pydantic import BaseModel, SecretStr
from typing_extensions import Unpack

from pgoutbox import ArgumentError, Outbox, Topic
from pgoutbox.database import operator_connection
from pgoutbox.encryption import SEALED, Identity, Keyring
from pgoutbox.enqueue.calls import Enqueued
from pgoutbox.errors import ConfigurationError, DedupeConflictError
from pgoutbox.handlers import Context, SyncContext
from pgoutbox.message import Message
from pgoutbox.operations import Operator
from pgoutbox.options import MessageOptions
from pgoutbox.retry import RetryPolicy
from pgoutbox.testing import OutboxDriver
from pgoutbox.topics import NewMessage
from pgoutbox.worker import Worker
from tests.support.outbox_actions import attempts_of, enqueue, make_due, row_of, settings_for, state_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psycopg

CANARY = "c4n4ry-s3cret"
OLD, NEW = Fernet.generate_key().decode(), Fernet.generate_key().decode()
MUCH_LATER = RetryPolicy.steps(3600, jitter=0)


class Reset(BaseModel):
    """A payload."""

    user: int
    code: str


def outbox_with(dsn: str, *keys: str) -> Outbox:
    """Build an outbox whose topic `reset` is encrypted."""
    outbox = Outbox(settings_for(dsn, encryption_keys=",".join(keys) or None))
    outbox.define(Topic("reset", payload=Reset, encrypted=True))
    return outbox


def put(outbox: Outbox, db: psycopg.Connection, code: str = CANARY, **options: Unpack[MessageOptions]) -> Enqueued:
    with db.transaction():
        return outbox.on(db).enqueue("reset", Reset(user=7, code=code), **options)


def everything_in(db: psycopg.Connection) -> str:
    """Return the contents of all message tables as text."""
    texts = []
    for table in ("message", "dedupe", "key_head"):
        texts += [row[0] for row in db.execute(f"SELECT t::text FROM pgoutbox.{table} AS t".encode()).fetchall()]
    return "\n".join(texts)


KINDS = ("async", "sync", "batch", "transactional", "transactional sync")


def register(outbox: Outbox, kind: str) -> list[object]:
    """Register a handler of this kind, and return the payloads that it receives."""
    got: list[object] = []
    if kind in ("async", "transactional"):

        @outbox.handler("reset", transactional=kind != "async", retry=MUCH_LATER)
        async def handle(message: Message, ctx: Context) -> None:
            got.append(message.payload)

    elif kind == "batch":

        @outbox.batch_handler("reset", retry=MUCH_LATER)
        async def handle_all(messages: Sequence[Message], contexts: Sequence[Context]) -> None:
            got.extend(message.payload for message in messages)

    else:

        @outbox.handler("reset", transactional=kind != "sync", retry=MUCH_LATER)
        def handle_in_thread(message: Message, ctx: SyncContext) -> None:
            got.append(message.payload)

    return got


@pytest.mark.parametrize("kind", KINDS)
async def test_the_row_is_encrypted_and_the_handler_gets_the_model(dsn: str, db: psycopg.Connection, kind: str) -> None:
    outbox = outbox_with(dsn, OLD)
    got = register(outbox, kind)
    message_id = put(outbox, db, dedupe_key="reset-7", coalesce_key="7").id
    assert CANARY not in everything_in(db)
    await Worker(outbox).run_once()
    assert got == [Reset(user=7, code=CANARY)]
    assert state_of(db, message_id) == "sent"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", [(), (NEW,)], ids=["without keys", "with another key"])
async def test_a_worker_without_the_key_retries_and_the_next_worker_delivers(
    dsn: str, db: psycopg.Connection, caplog: pytest.LogCaptureFixture, kind: str, keys: tuple[str, ...]
) -> None:
    caplog.set_level(logging.DEBUG)
    message_id = put(outbox_with(dsn, OLD), db).id
    (token,) = db.execute("SELECT payload #>> %s FROM pgoutbox.message", [[SEALED, "token"]]).fetchone() or ("",)
    blind = outbox_with(dsn, *keys)
    got = register(blind, kind)
    await Worker(blind).run_once()
    row = row_of(db, message_id)
    assert (got, row.state) == ([], "pending")
    assert "PGOUTBOX_ENCRYPTION_KEYS" in str(row.last_error)
    for shown in (str(row.last_error), str(attempts_of(db, message_id)), caplog.text):
        assert not any(secret in shown for secret in (CANARY, token, OLD, NEW))
    make_due(db, message_id)
    mended = outbox_with(dsn, *keys, OLD)
    got = register(mended, kind)
    await Worker(mended).run_once()
    assert (got, state_of(db, message_id)) == ([Reset(user=7, code=CANARY)], "sent")


async def test_an_unreadable_message_does_not_affect_others_of_its_batch(dsn: str, db: psycopg.Connection) -> None:
    closed = put(outbox_with(dsn, NEW), db).id
    outbox = outbox_with(dsn, OLD)
    got = register(outbox, "batch")
    opened = put(outbox, db).id
    await Worker(outbox).run_once()
    assert [state_of(db, closed), state_of(db, opened), len(got)] == ["pending", "sent", 1]


async def test_a_message_enqueued_before_the_topic_was_encrypted_is_delivered(dsn: str, db: psycopg.Connection) -> None:
    outbox = outbox_with(dsn, OLD)
    got = register(outbox, "async")
    enqueue(db, "reset", {"user": 7, "code": "plain"})
    await Worker(outbox).run_once()
    assert got == [Reset(user=7, code="plain")]


def test_under_one_dedupe_key_the_same_payload_is_a_duplicate_and_another_a_conflict(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox = outbox_with(dsn, OLD)
    first = put(outbox, db, dedupe_key="k")
    assert put(outbox, db, dedupe_key="k") == Enqueued(first.id, True)
    with pytest.raises(DedupeConflictError) as caught:
        put(outbox, db, code="another", dedupe_key="k")
    assert CANARY not in str(caught.value)


def test_duplicates_are_recognized_in_bulk(dsn: str, db: psycopg.Connection) -> None:
    outbox = outbox_with(dsn, OLD)
    first = put(outbox, db, dedupe_key="k")
    with db.transaction():
        again, fresh = outbox.on(db).enqueue_many(
            [
                NewMessage("reset", Reset(user=7, code=CANARY), dedupe_key="k"),
                NewMessage("reset", Reset(user=8, code=CANARY)),
            ],
        )
    assert (again, fresh.duplicate) == (Enqueued(first.id, True), False)
    assert CANARY not in everything_in(db)


def test_duplicates_are_recognized_during_a_key_rotation(dsn: str, db: psycopg.Connection) -> None:
    first = put(outbox_with(dsn, OLD), db, dedupe_key="k")
    for keys in ((OLD, NEW), (NEW, OLD)):
        assert put(outbox_with(dsn, *keys), db, dedupe_key="k") == Enqueued(first.id, True)
    second = put(outbox_with(dsn, NEW, OLD), db, dedupe_key="l")
    assert put(outbox_with(dsn, OLD, NEW), db, dedupe_key="l") == Enqueued(second.id, True)


@pytest.mark.parametrize(
    "payload",
    [
        {SEALED: None},
        {SEALED: "x"},
        {SEALED: {"digests": "x"}},
        {SEALED: {"digests": []}},
        {SEALED: {"digests": [None, {}]}},
        [{SEALED: {"digests": ["x"]}}],
    ],
)
def test_without_usable_digests_the_payload_itself_is_compared(db: psycopg.Connection, payload: object) -> None:
    first = enqueue(db, payload=payload, dedupe_key="k")
    assert enqueue(db, payload=payload, dedupe_key="k") == first
    (stored,) = db.execute(
        "SELECT payload_digest = sha256(payload::text::bytea) FROM pgoutbox.dedupe, pgoutbox.message"
    )
    assert stored == (True,)


def test_a_payload_with_the_text_of_a_digest_cannot_forge_it(db: psycopg.Connection) -> None:
    first = enqueue(db, payload={SEALED: {"digests": ["5"]}}, dedupe_key="k")
    assert enqueue(db, payload={SEALED: {"digests": ["4", "5"]}}, dedupe_key="k") == first
    for other in (5, "5"):
        with pytest.raises(Exception, match="another payload"):
            enqueue(db, payload=other, dedupe_key="k")


async def test_the_content_of_a_fan_out_is_encrypted_too(dsn: str, db: psycopg.Connection) -> None:
    outbox = outbox_with(dsn, OLD)
    got: list[object] = []

    @outbox.handler("reset")
    async def handle(message: Message, ctx: Context) -> None:
        got.append((message.payload, message.content))

    with db.transaction():
        outbox.on(db).enqueue_fanout(
            "reset",
            Reset(user=7, code=CANARY),
            ["mailto:a@example.org", "mailto:b@example.org"],
            content={"x": CANARY},
        )
    assert CANARY not in everything_in(db)
    assert CANARY not in str(db.execute("SELECT body FROM pgoutbox.content").fetchall())
    await Worker(outbox).run_once()
    assert got == [(Reset(user=7, code=CANARY), {"x": CANARY})] * 2


async def test_a_content_is_decrypted_once_for_all_of_its_messages(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[Identity, str] | None] = []
    decrypt = Keyring.open

    def note(self: Keyring, token: str) -> tuple[Identity, str] | None:
        opened.append(decrypt(self, token))
        return opened[-1]

    monkeypatch.setattr(Keyring, "open", note)
    outbox = outbox_with(dsn, OLD)
    got: list[object] = []

    @outbox.handler("reset")
    async def handle(message: Message, ctx: Context) -> None:
        got.append(message.content)

    addresses = [f"mailto:{number}@example.org" for number in range(20)]
    with db.transaction():
        outbox.on(db).enqueue_fanout("reset", Reset(user=7, code=CANARY), addresses, content={"html": "x" * 1_000})
    await Worker(outbox, settings=settings_for(dsn, encryption_keys=OLD, batch_size=5)).run_once()
    assert got == [{"html": "x" * 1_000}] * 20
    assert len([found for found in opened if found and "html" in found[1]]) == 1


@pytest.mark.parametrize(
    ("topic", "destination", "problem"),
    [
        ("public.hook", "mailto:a@example.org", "topic"),
        ("reset", "https://attacker.example/", "destination"),
        ("reset", "mailto:a@example.org", None),
    ],
)
async def test_a_payload_copied_to_another_topic_by_sql_does_not_decrypt(
    dsn: str, db: psycopg.Connection, topic: str, destination: str, problem: str | None
) -> None:
    outbox = outbox_with(dsn, OLD)
    got = register(outbox, "async")

    @outbox.handler("public.hook")
    async def post(message: Message, ctx: Context) -> None:
        got.append(message.payload)

    put(outbox, db, destination="mailto:a@example.org")
    ((copy_id,),) = db.execute(
        "SELECT pgoutbox.enqueue(%s, m.payload, destination => %s) FROM pgoutbox.message AS m", [topic, destination]
    ).fetchall()
    await Worker(outbox).run_once()
    if problem is None:
        assert state_of(db, copy_id) == "sent"
    else:
        assert state_of(db, copy_id) == "failed"
        assert row_of(db, copy_id).last_error == f"the payload was encrypted for another message: its {problem} differs"
        assert got == [Reset(user=7, code=CANARY)]


async def test_payload_and_content_of_a_fan_out_do_not_decrypt_in_another_topic(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox = outbox_with(dsn, OLD)
    got = register(outbox, "async")

    @outbox.handler("public.hook")
    async def post(message: Message, ctx: Context) -> None:
        got.append((message.payload, message.content))

    with db.transaction():
        outbox.on(db).enqueue_fanout("reset", Reset(user=7, code=CANARY), ["mailto:a@example.org"], content=CANARY)
    for payload in ("m.payload", "'1'"):
        db.execute(
            "SELECT f.id FROM pgoutbox.message AS m JOIN pgoutbox.content AS c ON c.id = m.content_id"
            " CROSS JOIN LATERAL pgoutbox.enqueue_fanout("
            f"jsonb_build_object('topic', 'public.hook', 'payload', {payload}),"
            """ '["mailto:b@example.org"]', content => c.body) AS f"""
            " WHERE m.topic = 'reset'".encode()
        )
    await Worker(outbox).run_once()
    assert got == [Reset(user=7, code=CANARY)]
    errors = db.execute("SELECT last_error FROM pgoutbox.message WHERE state = 'failed' ORDER BY id").fetchall()
    assert errors == [
        (f"the {what} was encrypted for another message: its topic differs",) for what in ("payload", "content")
    ]


async def test_an_unreadable_content_ends_only_its_own_messages(dsn: str, db: psycopg.Connection) -> None:
    outbox = outbox_with(dsn, OLD)
    got = register(outbox, "async")
    with db.transaction():
        outbox.on(db).enqueue_fanout("reset", Reset(user=7, code=CANARY), ["mailto:a@example.org"], content=1)
    (torn,) = db.execute("SELECT max(id) FROM pgoutbox.message").fetchone() or (0,)
    body = Keyring(SecretStr(OLD)).seal("{torn", Identity("content", "reset"), dedupe_key=None)
    db.execute("UPDATE pgoutbox.content SET body = %s", [body])
    whole = put(outbox, db).id
    await Worker(outbox).run_once()
    assert [state_of(db, message_id) for message_id in (torn, whole)] == ["failed", "sent"]
    assert (row_of(db, torn).last_error or "").startswith("content: cannot be read as JSON: ")
    assert got == [Reset(user=7, code=CANARY)]


def test_a_content_of_the_reserved_form_is_refused(dsn: str, db: psycopg.Connection) -> None:
    with db.transaction(), pytest.raises(ArgumentError, match="content"):
        outbox_with(dsn).on(db).enqueue_fanout("plain", 1, ["mailto:a@example.org"], content={SEALED: 1})


def test_without_keys_nothing_is_written_and_the_transaction_stays_usable(dsn: str, db: psycopg.Connection) -> None:
    with db.transaction():
        with pytest.raises(ConfigurationError, match="set PGOUTBOX_ENCRYPTION_KEYS"):
            outbox_with(dsn).on(db).enqueue("reset", Reset(user=7, code=CANARY))
        assert db.execute("SELECT count(*) FROM pgoutbox.message").fetchone() == (0,)


def test_a_payload_of_the_reserved_form_is_refused(dsn: str, db: psycopg.Connection) -> None:
    with db.transaction(), pytest.raises(ArgumentError, match="payload"):
        outbox_with(dsn, OLD).on(db).enqueue("plain", {SEALED: {"token": "x"}})


@pytest.mark.slow
def test_a_resent_copy_is_decrypted_like_its_source(dsn: str, db: psycopg.Connection) -> None:
    outbox = outbox_with(dsn, OLD)
    got = register(outbox, "async")
    driver = OutboxDriver(outbox, dsn)
    message_id = put(outbox, db, dedupe_key="k").id
    driver.run_pass()
    with operator_connection.connect(settings_for(dsn)) as operator:
        Operator(operator).resend(message_id)
    driver.run_pass()
    assert got == [Reset(user=7, code=CANARY)] * 2


def test_the_test_driver_decrypts_the_payload(dsn: str, db: psycopg.Connection) -> None:
    outbox = outbox_with(dsn, OLD)
    put(outbox, db)
    (row,) = OutboxDriver(outbox, dsn).assert_enqueued("reset", payload={"code": CANARY})
    assert row.payload == {"user": 7, "code": CANARY}
    assert CANARY not in json.dumps(db.execute("SELECT payload FROM pgoutbox.message").fetchall())

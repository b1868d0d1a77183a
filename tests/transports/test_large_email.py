"""Tests large e-mails from the database to the mail server: as the content of a fan-out, and from the application's
table."""

from __future__ import annotations

import base64
import random
from typing import TYPE_CHECKING, Final

import pytest

from pgoutbox import ArgumentError, Context, Message, Outbox, RawEmail
from pgoutbox.worker import Worker
from tests.support.outbox_actions import row_of, settings_for
from tests.support.smtp_server import accepting_server, mail_settings

if TYPE_CHECKING:
    import psycopg

pytestmark = pytest.mark.slow

LARGEST_PAYLOAD: Final = 16_777_216
HEADERS: Final = b"Subject: Large\r\nContent-Type: text/plain\r\n\r\n"


def mail_of(size: int) -> bytes:
    """Return an encoded e-mail of about this many bytes, which do not compress well."""
    line_count = size // 1_000
    letters = base64.b64encode(random.Random(7).randbytes(line_count * 750)).ljust(line_count * 998, b"A")
    return HEADERS + b"".join(letters[n : n + 998] + b"\r\n" for n in range(0, line_count * 998, 998))


def outbox_for(dsn: str, port: int) -> Outbox:
    outbox = Outbox(settings_for(dsn, **mail_settings(port) | {"max_payload_bytes": LARGEST_PAYLOAD}))

    @outbox.handler("relay")
    async def relay(message: Message, ctx: Context) -> RawEmail:
        content = message.content
        assert isinstance(content, str)
        return RawEmail(data=base64.b64decode(content), envelope_sender="bounces@example.org")

    @outbox.handler("relay.stored", transactional=True)
    async def relay_stored(message: Message, ctx: Context) -> RawEmail:
        found = await ctx.connection.execute(
            "DELETE FROM outgoing_mail WHERE id = %s RETURNING data", (message.payload["mail_id"],), binary=True
        )
        row = await found.fetchone()
        assert row is not None
        return RawEmail(data=row[0])

    return outbox


async def test_an_email_of_ten_megabytes_reaches_each_recipient_of_a_fan_out(dsn: str, db: psycopg.Connection) -> None:
    data = mail_of(10_000_000)
    async with accepting_server() as inbox:
        outbox = outbox_for(dsn, inbox.port)
        with db.transaction():
            addresses = ["mailto:ann@example.com", "mailto:bob@example.com"]
            made = outbox.on(db).enqueue_fanout("relay", {}, addresses, content=base64.b64encode(data).decode())
        await Worker(outbox).run_once()
    assert {row_of(db, message_id).state for message_id, *_ in made} == {"sent"}
    assert sorted(received.recipients for received in inbox.received) == [["ann@example.com"], ["bob@example.com"]]
    assert [received.content == data for received in inbox.received] == [True, True]


async def test_a_larger_email_is_read_from_the_applications_table_and_deleted_when_it_is_sent(
    dsn: str, db: psycopg.Connection
) -> None:
    data = mail_of(25_000_000)
    async with accepting_server() as inbox:
        outbox = outbox_for(dsn, inbox.port)
        with (
            db.transaction(),
            pytest.raises(ArgumentError, match=r"content: has \d+ bytes as JSON, the limit is 16777216"),
        ):
            outbox.on(db).enqueue_fanout("relay", {}, ["mailto:a@example.com"], content=base64.b64encode(data).decode())
        with db.transaction():
            db.execute("CREATE TABLE outgoing_mail (id bigint PRIMARY KEY, data bytea NOT NULL)")
            db.execute("INSERT INTO outgoing_mail VALUES (1, %b)", (data,))
            outbox.on(db).enqueue("relay.stored", {"mail_id": 1}, destination="mailto:ann@example.com")
        await Worker(outbox).run_once()
    assert [received.content == data for received in inbox.received] == [True]
    assert db.execute("SELECT count(*) FROM outgoing_mail").fetchone() == (0,)

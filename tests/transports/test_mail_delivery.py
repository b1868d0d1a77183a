"""Tests e-mail from the row to the server: effects of invalid e-mails, and server answers on the message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pgoutbox import Context, Email, Message, Outbox, RetryPolicy, Templates
from pgoutbox.worker import Worker
from tests.support.outbox_actions import enqueue, make_due, row_of, settings_for
from tests.support.smtp_server import Misbehaviour, accepting_server, mail_settings, parsed, scripted_server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import psycopg

    from pgoutbox.transports import Content

MUCH_LATER = RetryPolicy.steps(3600, jitter=0)
DESTINATION = "mailto:ann@example.com"
HELLO = Email(subject="Hello", text="Hi")


def outbox_for(
    dsn: str, port: int, content: Content | Callable[[Message[Any]], Content], **overrides: object
) -> Outbox:
    """Build an outbox whose handler returns this content, or renders it; its e-mail goes to a server on this
    machine."""
    outbox = Outbox(settings_for(dsn, **mail_settings(port) | overrides))

    @outbox.handler("greet", retry=MUCH_LATER)
    async def greet(message: Message, ctx: Context) -> Content:
        return content(message) if callable(content) else content

    return outbox


# --- permanent failures -----------------------------------------------------------------------------------------------

UNSAFE = {
    "another header": "x\r\nBcc: eve@example.com",
    "a lone carriage return": "x\ry",
    "a lone line feed": "x\ny",
    "NUL": "x\0y",
    "the next line of Unicode": "x\x85y",
    "an encoded word that decodes to a line end": "=?utf-8?q?x=0D=0ABcc=3A_eve=40example=2Ecom?=",
}


@pytest.mark.parametrize("unsafe", UNSAFE.values(), ids=UNSAFE.keys())
@pytest.mark.parametrize("field", ["subject", "to", "header"])
async def test_a_possible_header_injection_fails_at_once_and_reaches_no_server(
    dsn: str, db: psycopg.Connection, field: str, unsafe: str
) -> None:
    name, email = {
        "subject": ("email.subject", lambda _: Email(subject=unsafe, text="Hi")),
        "to": ("email.to", lambda _: Email(to=f"{unsafe} <ann@example.com>", subject="Hello", text="Hi")),
        "header": ("email.headers['X-Tag']", lambda _: Email(subject="Hello", text="Hi", headers={"X-Tag": unsafe})),
    }[field]
    message_id = enqueue(db, destination=DESTINATION)
    async with scripted_server() as server:
        await Worker(outbox_for(dsn, server.port, email)).run_once()
    row = row_of(db, message_id)
    assert (row.state, row.attempt_count, server.connection_count) == ("failed", 1, 0)
    assert (row.last_error or "").startswith(f"{name}: contains ")


async def test_ten_thousand_recipients_fail_at_once_and_reach_no_server(dsn: str, db: psycopg.Connection) -> None:
    addresses = [f"user{number}@example.com" for number in range(10_000)]
    message_id = enqueue(db)
    async with scripted_server() as server:
        await Worker(outbox_for(dsn, server.port, lambda _: Email(to=addresses, subject="Hello", text="Hi"))).run_once()
    row = row_of(db, message_id)
    assert (row.state, row.attempt_count, server.connection_count) == ("failed", 1, 0)
    assert row.last_error == "email.to: 10000 addresses are more than 1000"


# --- server answers ---------------------------------------------------------------------------------------------------


async def test_a_connection_lost_after_the_final_dot_is_retried_with_the_same_message_id(
    dsn: str, db: psycopg.Connection
) -> None:
    message_id = enqueue(db, destination=DESTINATION)
    async with scripted_server({".": [Misbehaviour.DROP]}) as server:
        outbox = outbox_for(dsn, server.port, HELLO)
        await Worker(outbox).run_once()
        row = row_of(db, message_id)
        assert row.state == "pending"
        assert (row.last_error or "").startswith("outcome unknown: connection lost after DATA")
        make_due(db, message_id)
        await Worker(outbox).run_once()
    assert row_of(db, message_id).state == "sent"
    first, second = (parsed(content)["Message-ID"] for content in server.contents)
    assert first == second


@pytest.mark.parametrize(
    ("answer", "state"), [("451 4.7.1 greylisted", "pending"), ("550 5.1.1 no such user", "failed")]
)
async def test_the_refusal_of_the_server_is_in_the_row(
    dsn: str, db: psycopg.Connection, answer: str, state: str
) -> None:
    message_id = enqueue(db, destination=DESTINATION)
    async with scripted_server({"RCPT": answer}) as server:
        await Worker(outbox_for(dsn, server.port, HELLO)).run_once()
    row = row_of(db, message_id)
    assert (row.state, row.last_error) == (state, f"RCPT ann@example.com: {answer}")


# --- templates --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_an_undefined_template_variable_fails_and_a_missing_template_is_retried(
    dsn: str, db: psycopg.Connection, tmp_path: Path
) -> None:
    (tmp_path / "welcome.subject.txt").write_text("Welcome, {{ name }}")
    templates = Templates(tmp_path)
    lacking, waiting = (enqueue(db, payload=context, destination=DESTINATION) for context in ({}, {"name": "Ann"}))
    async with accepting_server() as inbox:
        outbox = outbox_for(dsn, inbox.port, lambda message: Email.from_template(templates, "welcome", message.payload))
        await Worker(outbox).run_once()
        assert row_of(db, lacking).last_error == "template welcome.txt: not found, and welcome.html neither"
        (tmp_path / "welcome.txt").write_text("Hello {{ name }}")
        for message_id in (lacking, waiting):
            assert row_of(db, message_id).state == "pending"
            make_due(db, message_id)
        await Worker(outbox).run_once()
    row = row_of(db, lacking)
    assert (row.state, row.last_error) == ("failed", "template welcome.subject.txt: line 1: 'name' is undefined")
    assert row_of(db, waiting).state == "sent"
    assert [parsed(received.content)["Subject"] for received in inbox.received] == ["Welcome, Ann"]

"""Tests that examples/relay.py loses no mail that it has accepted, with the commands of its docstring."""

from __future__ import annotations

import asyncio
import smtplib
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import psycopg
import pytest

from tests.support.example_process import running
from tests.support.example_shell import states
from tests.support.ports import free_port
from tests.support.smtp_server import parsed, scripted_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.example_process import ExampleProcess
    from tests.support.example_shell import Shell
    from tests.support.smtp_server import ScriptedServer

pytestmark = pytest.mark.slow

# Header order, a folded header, bytes beyond ASCII, and lines that begin with dots must arrive as they are.
MAIL = (
    b"received: by client.example.org\r\nSubject: =?utf-8?q?Gr=C3=BC=C3=9Fe?=\r\n\tfrom Ann\r\n"
    b"Message-ID: <1@example.org>\r\nContent-Transfer-Encoding: 8bit\r\n\r\n"
    b"Gr\xc3\xbc\xc3\x9fe\r\n.\r\n..two dots\r\n\r\nlast line \t\r\n"
)
ADA, BOB, GREY, GONE = "ada@example.org", "bob+news@example.org", "grey@example.org", "gone@example.org"
ANSWERS = {
    f"RCPT TO:<{GREY}>": ["451 4.7.1 greylisted"],
    f"RCPT TO:<{GONE}>": "550 5.1.1 no such user",
}


@asynccontextmanager
async def next_hop(shell: Shell) -> AsyncIterator[ScriptedServer]:
    """Run the server to which the workers relay, by one connection at a time."""
    async with scripted_server(ANSWERS, extensions=["8BITMIME"]) as hop:
        shell.environment.update(PGOUTBOX_SMTP_PORT=str(hop.port), PGOUTBOX_SMTP_CONNECTIONS="1")
        yield hop


@asynccontextmanager
async def serving(shell: Shell, output: Path) -> AsyncIterator[tuple[ExampleProcess, int]]:
    """Run the server of the example, and return its port."""
    async with running(shell, output, "examples.relay", "0") as server:
        await server.until(lambda: server.lines)
        yield server, int(server.lines[0].removeprefix("listening on 127.0.0.1:"))


async def send(port: int, sender: str, *recipients: str, data: bytes = MAIL) -> tuple[int, str]:
    """Send a mail like a client, and return the server's answer to its content."""

    def converse() -> tuple[int, str]:
        with smtplib.SMTP("127.0.0.1", port, timeout=60) as client:
            client.ehlo()
            assert client.mail(sender)[0] == 250
            assert {client.rcpt(recipient)[0] for recipient in recipients} == {250}
            code, text = client.data(data)
            return code, text.decode()

    return await asyncio.to_thread(converse)


def received(hop: ScriptedServer) -> dict[str, tuple[str, bytes]]:
    """Return the sender and the bytes for each recipient whom the next hop accepted."""
    contents = iter(hop.contents)
    found: dict[str, tuple[str, bytes]] = {}
    sender = recipient = ""
    for command in hop.commands:
        if command.startswith("MAIL FROM:"):
            sender = command.partition("<")[2].partition(">")[0]
        elif command.startswith("RCPT TO:"):
            recipient = command.partition("<")[2].partition(">")[0]
        elif command == "DATA":
            assert recipient not in found
            # SMTP doubles a dot at the start of a line.
            lines = [line[1:] if line.startswith(b".") else line for line in next(contents).split(b"\r\n")]
            found[recipient] = sender, b"\r\n".join(lines)
    return found


def states_of(dsn: str) -> dict[str, str]:
    """Return the state of the message for each recipient."""
    with psycopg.connect(dsn) as connection:
        rows = connection.execute("SELECT destination, state FROM pgoutbox.message WHERE destination IS NOT NULL")
        return {destination.removeprefix("mailto:"): state for destination, state in rows}


def content_count(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        ((count,),) = connection.execute("SELECT count(*) FROM pgoutbox.content").fetchall()
        return int(count)


async def test_each_recipient_of_an_accepted_mail_has_its_own_fate(shell: Shell, dsn: str, tmp_path: Path) -> None:
    async with serving(shell, tmp_path / "relay.log") as (server, port):
        assert await send(port, "ann@example.org", ADA, BOB, GREY, GONE, ADA) == (250, "2.0.0 accepted")
        await server.kill()
    # The mail is committed: four messages, and its bytes once.
    assert states_of(dsn) == dict.fromkeys((ADA, BOB, GREY, GONE), "pending")
    assert content_count(dsn) == 1

    async with next_hop(shell) as hop:
        await shell.deliver("relay")
        await shell.deliver("relay")
        assert states_of(dsn) == {ADA: "sent", BOB: "sent", GREY: "pending", GONE: "failed"}
        listed = await shell.run("-m", "pgoutbox", "list", "--destination", f"mailto:{GREY}", "--json")
        assert "451 4.7.1 greylisted" in listed
        assert listed.count("\n") == 1

        rescheduled = await shell.run("-m", "pgoutbox", "reschedule", "--destination", f"mailto:{GREY}", "--yes")
        assert rescheduled == "1 rescheduled\n"
        await shell.deliver("relay")
        assert states_of(dsn) == {ADA: "sent", BOB: "sent", GREY: "sent", GONE: "failed"}

        got = received(hop)
        bounce_sender, bounce = got.pop("ann@example.org")
        assert got == dict.fromkeys((ADA, BOB, GREY), ("ann@example.org", MAIL))
        assert bounce_sender == ""
        assert hop.commands.count(f"RCPT TO:<{GONE}>") == 1
        assert hop.commands.count(f"RCPT TO:<{GREY}>") == 2
    body = parsed(bounce).get_body()
    assert body is not None
    assert parsed(bounce)["Auto-Submitted"] == "auto-replied"
    assert "550 5.1.1 no such user" in body.get_content()
    assert f"mailto:{GONE}" in body.get_content()
    assert "Message-ID: <1@example.org>" in body.get_content()
    assert states(dsn) == {"sent": 4, "failed": 1}

    # The content goes away with its last recipient.
    for state in ("sent", "skipped"):
        await shell.run("-m", "pgoutbox", "retention", "set", "*", state, "0")
    await shell.run("-m", "pgoutbox", "prune")
    assert states(dsn) == {"failed": 1}
    assert content_count(dsn) == 1
    await shell.run("-m", "pgoutbox", "dismiss", "--destination", f"mailto:{GONE}", "--reason", "told", "--yes")
    await shell.run("-m", "pgoutbox", "prune")
    assert states(dsn) == Counter()
    assert content_count(dsn) == 0


async def test_a_mail_without_a_sender_gets_no_bounce(shell: Shell, dsn: str, tmp_path: Path) -> None:
    async with serving(shell, tmp_path / "relay.log") as (_, port):
        assert (await send(port, "", GONE, ADA))[0] == 250
    async with next_hop(shell) as hop:
        await shell.deliver("relay")
        await shell.deliver("relay")
        assert received(hop) == {ADA: ("", MAIL)}
    assert states_of(dsn) == {ADA: "sent", GONE: "failed"}
    assert states(dsn) == {"sent": 1, "failed": 1, "skipped": 1}


async def test_a_cancelled_recipient_gets_nothing(shell: Shell, dsn: str, tmp_path: Path) -> None:
    async with serving(shell, tmp_path / "relay.log") as (_, port):
        assert (await send(port, "ann@example.org", ADA, BOB))[0] == 250
    cancelled = await shell.run("-m", "pgoutbox", "cancel", "--destination", f"mailto:{BOB}", "--yes")
    assert cancelled == "1 cancelled\n"
    async with next_hop(shell) as hop:
        await shell.deliver("relay")
        assert received(hop).keys() == {ADA}
    assert states_of(dsn) == {ADA: "sent", BOB: "cancelled"}


async def test_a_mail_whose_transaction_fails_is_not_accepted(shell: Shell, dsn: str, tmp_path: Path) -> None:
    async with serving(shell, tmp_path / "relay.log") as (server, port):
        with psycopg.connect(dsn, autocommit=True) as connection:
            # The statements of the transaction succeed, and its commit fails.
            connection.execute(
                """
                CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'disk full'; END $$;
                CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON pgoutbox.content
                DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse();
                """
            )
            assert await send(port, "ann@example.org", ADA) == (451, "4.3.0 try again later")
            assert states(dsn) == Counter()
            connection.execute("DROP TRIGGER refuse ON pgoutbox.content")
        assert await send(port, "ann@example.org", ADA) == (250, "2.0.0 accepted")
        assert states_of(dsn) == {ADA: "pending"}
        assert any("disk full" in line for line in server.lines)


async def test_a_mail_is_not_accepted_without_a_database(shell: Shell, tmp_path: Path) -> None:
    shell.environment["PGOUTBOX_DSN"] = f"postgresql://postgres@127.0.0.1:{free_port()}/nothing"
    async with serving(shell, tmp_path / "relay.log") as (_, port):
        assert await send(port, "ann@example.org", ADA) == (451, "4.3.0 try again later")


async def test_a_mail_that_does_not_fit_is_refused_for_good(shell: Shell, dsn: str, tmp_path: Path) -> None:
    shell.environment["PGOUTBOX_MAX_PAYLOAD_BYTES"] = "4096"
    head = b"Subject: Large\r\n\r\n"
    largest = 4096 // 4 * 3 - 3
    lines = b"x" * 70 + b"\r\n"
    fits = head + lines * ((largest - len(head)) // len(lines))
    async with serving(shell, tmp_path / "relay.log") as (_, port):
        assert (await send(port, "ann@example.org", ADA, data=fits.ljust(largest - 2, b"x") + b"\r\n"))[0] == 250
        assert (await send(port, "ann@example.org", BOB, data=fits.ljust(largest - 1, b"x") + b"\r\n"))[0] == 552
    assert states_of(dsn) == {ADA: "pending"}

"""Tests that examples/channels.py survives an outage of its gateway, played with the commands of its docstring."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import psycopg
import pytest

from examples.channels import E_MAILS, NUMBERS, ROUTINE, URGENT, WRONG_NUMBERS
from tests.support.example_process import running
from tests.support.example_shell import states
from tests.support.ports import free_port
from tests.support.smtp_server import parsed

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.example_shell import Shell
    from tests.support.smtp_server import Inbox

pytestmark = pytest.mark.slow

ALARM, DRILL = "Leave the river bank now.", "The next drill is on Saturday at 10:00."
BREAKER = "sms:127.0.0.1"
BREAKER_FAILURES = 5
QUEUES = ("--queue", "urgent", "--queue", "routine")
WORKER = ("pgoutbox", "worker", "--app", "examples.channels:outbox", *QUEUES, "--concurrency", "4")


def subjects(inbox: Inbox) -> dict[str, list[str]]:
    """Return the subjects of the e-mails that each recipient got."""
    found: dict[str, list[str]] = {}
    for received in inbox.received:
        for recipient in received.recipients:
            found.setdefault(recipient, []).append(str(parsed(received.content)["Subject"]))
    return found


def used_attempts(dsn: str) -> list[int]:
    """Return the number of used attempts of each text message that waits. A snooze gives its attempt back, so the
    attempt of a probe in flight does not count."""
    with psycopg.connect(dsn) as connection:
        rows = connection.execute(
            "SELECT topic, max_attempts - attempt_count + (state = 'sending')::integer FROM pgoutbox.message"
            " WHERE state <> 'sent' AND destination LIKE 'sms:%'"
        )
        policies = {topic.name: topic.retry for topic in (URGENT, ROUTINE)}
        return [policy.max_attempts - left for name, left in rows if (policy := policies[name]) is not None]


def waiting(dsn: str) -> int:
    """Count the messages that are not final."""
    found = states(dsn)
    return found["pending"] + found["sending"]


def problems(dsn: str) -> dict[str, str]:
    """Return the marked addresses with their errors."""
    with psycopg.connect(dsn) as connection:
        return dict(connection.execute("SELECT address, problem FROM contact WHERE problem IS NOT NULL").fetchall())


async def failed_ids(shell: Shell, *options: str) -> list[str]:
    listed = await shell.run("-m", "pgoutbox", "list", "--state", "failed", "--json", *options)
    return [str(json.loads(line)["id"]) for line in listed.splitlines()]


async def test_an_outage_of_the_gateway_loses_no_message(shell: Shell, inbox: Inbox, dsn: str, tmp_path: Path) -> None:
    port = free_port()
    shell.environment.update(
        SMS_GATEWAY_URL=f"http://127.0.0.1:{port}/",
        SMS_GATEWAY_KEY="secret",
        PGOUTBOX_ALERT_DESTINATION="mailto:admin@club.test",
        PGOUTBOX_BREAKER_FAILURES=str(BREAKER_FAILURES),
        PGOUTBOX_BREAKER_COOLDOWN_SECONDS="0.5",
        PGOUTBOX_BREAKER_MAX_COOLDOWN_SECONDS="1",
    )
    assert await shell.example("channels") == [
        "notice.routine 3 mailto 22 sms",
        "notice.urgent 3 mailto 22 sms",
    ]
    texts = [(number, text) for number in (*NUMBERS, *WRONG_NUMBERS) for text in (ALARM, DRILL)]

    async with running(shell, tmp_path / "worker.log", *WORKER) as worker:
        # The gateway is down: the admin gets an alert, e-mail goes on, and text messages wait.
        await worker.until(lambda: states(dsn)["sent"] == 2 * len(E_MAILS) + 1)
        got = subjects(inbox)
        assert got.pop("admin@club.test") == [f"Circuit breaker open: {BREAKER}"]
        assert {f"mailto:{address}" for address in got} == set(E_MAILS)
        assert all(sorted(subject) == ["Drill", "Flood warning"] for subject in got.values())
        assert waiting(dsn) == len(texts)
        stats = await shell.run("-m", "pgoutbox", "stats")
        assert f"circuit breaker {BREAKER} is open for" in " ".join(stats.split())
        used = used_attempts(dsn)
        assert len(used) == len(texts)
        assert sum(used) < BREAKER_FAILURES

        # The gateway is repaired: all texts go out, and the addresses that it refuses are marked.
        async with running(shell, tmp_path / "gateway.log", "examples.channels", "gateway", str(port)) as gateway:
            await worker.until(lambda: f"Delivery works again: {BREAKER}" in subjects(inbox)["admin@club.test"])
            await worker.until(lambda: not waiting(dsn))
            assert sorted(gateway.lines) == sorted(
                f"{'refused' if number in WRONG_NUMBERS else 'sent'} {number.removeprefix('sms:')} {text}"
                for number, text in texts
            )
            assert problems(dsn) == dict.fromkeys(WRONG_NUMBERS, "SMS gateway: 422")

            # One number had a typing error, and one person is gone.
            wrong = await failed_ids(shell, "--destination", WRONG_NUMBERS[0])
            assert len(wrong) == 2
            corrected = "sms:+491701234599"
            await shell.run("-m", "pgoutbox", "correct", *wrong, "--set", f"destination={corrected}")
            dismissal = ("--destination", WRONG_NUMBERS[1], "--reason", "moved away", "--yes")
            assert await shell.run("-m", "pgoutbox", "dismiss", *dismissal) == "2 dismissed\n"
            await worker.until(lambda: len(gateway.lines) == len(texts) + 2)
            await worker.until(lambda: not waiting(dsn))
            assert sorted(gateway.lines[-2:]) == [f"sent {corrected.removeprefix('sms:')} {t}" for t in (ALARM, DRILL)]
        assert await worker.stop() == 0

    # The alerts and the hooks are messages too.
    alerts = subjects(inbox)["admin@club.test"]
    hooks = 4
    sent = 2 * len(E_MAILS) + 2 * len(NUMBERS) + 2
    assert states(dsn) == {"sent": sent + hooks + len(alerts), "skipped": 2}
    with psycopg.connect(dsn) as connection:
        reasons = connection.execute("SELECT skip_reason FROM pgoutbox.message WHERE state = 'skipped'").fetchall()
        acts = connection.execute("SELECT DISTINCT action FROM pgoutbox.audit ORDER BY 1").fetchall()
    assert all("moved away" in reason for (reason,) in reasons)
    assert acts == [("correct",), ("dismiss",), ("redrive",)]

    # Marked addresses get no further messages.
    assert (await shell.example("channels"))[0] == "notice.routine 3 mailto 20 sms"


async def test_without_a_gateway_text_messages_wait_and_emails_are_sent(shell: Shell, dsn: str) -> None:
    await shell.example("channels")
    await shell.deliver("channels", *QUEUES)
    assert states(dsn) == {"sent": 2 * len(E_MAILS), "pending": 2 * len((*NUMBERS, *WRONG_NUMBERS))}
    assert not any(used_attempts(dsn))

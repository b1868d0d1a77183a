"""A message that no attempt ends is told to a person, whatever the reason and its due time."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from typing import TYPE_CHECKING, Final

from tests.support.command_line import run_process
from tests.support.ports import free_ports
from tests.support.waiting import until

if TYPE_CHECKING:
    import psycopg

    from tests.promises.conftest import StartWorker

APPLICATION: Final = """
    from pgoutbox import Context, Message, Outbox, Snooze

    outbox = Outbox()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> Snooze:
        return Snooze(3600)
"""


def undelivered_seconds(port: int) -> float:
    """Return the value of the gauge for the queue of the test."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        page = answer.read().decode()
    (value,) = re.findall(r'^pgoutbox_oldest_undelivered_seconds\{queue="default"\} (\S+)$', page, re.MULTILINE)
    return float(value)


async def test_a_message_that_is_postponed_for_days_is_told_by_the_doctor_and_by_a_gauge(
    dsn: str, db: psycopg.Connection, start_worker: StartWorker
) -> None:
    (port,) = free_ports(1)
    start_worker(APPLICATION, metrics_address=f"127.0.0.1:{port}", metrics_cache_seconds="0.1")
    ((message_id,),) = db.execute("SELECT pgoutbox.enqueue('greet', '1')").fetchall()
    db.execute("SELECT pgoutbox.enqueue('greet', '2', delay => interval '30 days')")
    postponed = "SELECT FROM pgoutbox.attempt_view WHERE outcome = 'snoozed'"
    await until(lambda: db.execute(postponed).fetchall())
    before = await asyncio.to_thread(run_process, "doctor", "--json", "--strict", dsn=dsn)
    assert "undelivered-for-long" not in {finding["code"] for finding in before.lines}
    assert undelivered_seconds(port) < 86_400
    db.execute(
        "UPDATE pgoutbox.message SET created_at = created_at - interval '9 days',"
        " attempts = jsonb_set(attempts, '{0,started_at}', to_jsonb(claimed_at - interval '9 days'))"
    )
    after = await asyncio.to_thread(run_process, "doctor", "--json", "--strict", dsn=dsn)
    (finding,) = [finding for finding in after.lines if finding["code"] == "undelivered-for-long"]
    assert (finding["check"], finding["level"], finding["about"]) == ("undelivered", "warning", {"queue": "default"})
    assert f"1 message undelivered for more than 24 h, message {message_id} for 9 days" in finding["what"]
    assert after.exit_code == 1
    await until(lambda: undelivered_seconds(port) > 8 * 86_400)

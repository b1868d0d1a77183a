"""Each look at a backlog shows messages that wait for the turn of their fair key like any others."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest

from pgoutbox.dashboard import reads
from pgoutbox.dashboard.history import LAST_HOUR, History
from pgoutbox.database import operator_connection, sql
from pgoutbox.observability.backlog import Backlog
from pgoutbox.observability.measures import MESSAGES, OLDEST_DUE, OLDEST_UNDELIVERED
from pgoutbox.settings import load_settings
from tests.support.command_line import run_process
from tests.support.outbox_actions import enqueue, settings_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

APPLICATION: Final = """
    from pydantic import BaseModel

    from pgoutbox import Outbox, Topic


    class Mail(BaseModel):
        nickname: str


    outbox = Outbox()


    @outbox.handler(Topic("greet", payload=Mail))
    async def greet(message, ctx):
        pass
"""
ATTEMPTED: Final = """
    UPDATE pgoutbox.message_live SET attempt_count = 1, lane = 1, created_at = now() - interval '9 days',
        attempts = jsonb_build_array((
            1, 1, %s, 'w', now() - interval '9 days', now() - interval '9 days', 'no', NULL, %s, %s
        )::pgoutbox.attempt)
    WHERE id = %s
"""


def fill(db: psycopg.Connection) -> None:
    """Enqueue one for each kind of waiting: fresh, for later, retried, retried later, and behind a slow receiver."""
    fresh, later, retried, again, stalled = (enqueue(db, queue="mail", destination="sms:123") for _ in range(5))
    for message_id, age in ((fresh, "90 m"), (later, "-1 d"), (retried, "70 m"), (again, "-3 h"), (stalled, "-10 m")):
        db.execute(
            "UPDATE pgoutbox.message_live SET available_at = now() - %s::interval WHERE id = %s", [age, message_id]
        )
    for message_id, *attempt in (
        (retried, "retry", None, None),
        (again, "retry", None, None),
        (stalled, "snoozed", "stalled", "sms:gateway"),
    ):
        db.execute(ATTEMPTED, [*attempt, message_id])


# --- the looks --------------------------------------------------------------------------------------------------------


def doctor(dsn: str, module: str) -> object:
    """The unreadable payloads, the missing transport, the late and the undelivered messages, and the slow receiver."""
    found = run_process("doctor", "--json", "--app", f"{module}:outbox", dsn=dsn).lines
    told = {one["code"]: one["what"] for one in found if one["level"] in ("warning", "problem")}
    expected = {"due-without-worker", "undelivered-for-long", "receiver-stalled", "payloads-unreadable"}
    assert expected <= told.keys()
    return told


def gauges(dsn: str, _: str) -> object:
    samples = Backlog(settings_for(dsn)).ask().result().samples
    found = {
        (metric.name, *one.labels): round(one.value / 100)
        for metric in (MESSAGES, OLDEST_DUE, OLDEST_UNDELIVERED)
        for one in samples[metric]
    }
    assert sorted(found.values())[-2:] == [54, 7776]
    return found


def queues(dsn: str, _: str) -> object:
    return run_process("queues", "--json", dsn=dsn).json


def a_run(dsn: str, module: str) -> object:
    done = run_process(
        "worker", "--once", "--app", f"{module}:outbox", dsn=dsn, PGOUTBOX_LOG_FORMAT="json", PGOUTBOX_LOG_LEVEL="INFO"
    )
    (record,) = [one for one in map(json.loads, done.err.splitlines()) if one["event"] == "run_done"]
    assert (record["left_due"], record["left_queues"]) == (2, ["mail"])
    return record["left_due"]


def report(dsn: str, _: str) -> object:
    """The first report of a worker without the handler."""
    with psycopg.connect(dsn) as connection:
        connection.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        rows = connection.execute(
            sql.REPORT_WORKER,
            {
                "worker": "w", "queues": ["mail"], "topics": ["other"], "redirect_to": None, "version": "1",
                "slots": 50, "watched": ["mail"], "late_seconds": 60,
            },
        ).fetchall()  # fmt: skip
        connection.rollback()
    ((*told, seconds),) = rows
    assert told == ["handler", "mail", ["greet"], 2]
    return told, round(seconds / 100)


def dashboard(dsn: str, _: str) -> object:
    with operator_connection.connect(load_settings(dsn=dsn), read_only=True) as connection:
        pending = reads.count_pending(connection, "now", "later", "again")
        assert {part: count.messages for part, count in pending.items()} == {"now": 2, "later": 3, "again": 3}
        (queue,) = reads.queues(connection, ["mail"], 100)
        assert (queue["due"], queue["scheduled"]) == (2, 3)
        ranked = [one._replace() for one in reads.rank_queues(connection)]
        depth = History().depth(connection, reads.now(connection), LAST_HOUR, "mail", 100)
        assert list(depth.values())[-1] == 5
        return pending, queue["due"], queue["scheduled"], len(ranked), {*depth.values()}


@pytest.mark.parametrize("look", [doctor, gauges, queues, a_run, report, dashboard])
def test_messages_that_wait_for_their_turn_look_like_others(
    dsn: str, db: psycopg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[[str, str], Any]
) -> None:
    (tmp_path / "fair_backlog_app.py").write_text(textwrap.dedent(APPLICATION))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    fill(db)
    before = look(dsn, "fair_backlog_app")
    db.execute("UPDATE pgoutbox.message_live SET fair_key = 'acme', lane = 2")
    assert look(dsn, "fair_backlog_app") == before

"""Tests statements of the ticker that meet a change of another session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgoutbox.database import sql

if TYPE_CHECKING:
    import psycopg

    from tests.conftest import Connect

TICK = "SELECT pgoutbox._tick_schedule('s', 1, NULL, '{}', now() + interval '1 h')"


def set_schedule(db: psycopg.Connection, rule: str = "every 60") -> None:
    db.execute("""SELECT pgoutbox.set_schedule('s', %s, '{"topic": "mail", "payload": 1}')""", [rule])


def test_a_schedule_that_was_corrected_meanwhile_is_not_refused(rolled_back: psycopg.Connection) -> None:
    for rule in ("61 * * * *", "1 * * * *"):
        set_schedule(rolled_back, rule)
    refusal = {"name": "s", "problem": "Bad minute", "next_at": None}
    rolled_back.execute(sql.REFUSE_SCHEDULE, {**refusal, "revision": 1})
    problem = "SELECT problem FROM pgoutbox.schedule"
    assert rolled_back.execute(problem).fetchone() == (None,)
    rolled_back.execute(sql.REFUSE_SCHEDULE, {**refusal, "revision": 2, "next_at": "2026-01-01"})
    assert rolled_back.execute(problem).fetchone() == (None,)
    rolled_back.execute(sql.REFUSE_SCHEDULE, {**refusal, "revision": 2})
    assert rolled_back.execute(problem).fetchone() == ("Bad minute",)


def test_a_tick_ends_a_problem(rolled_back: psycopg.Connection) -> None:
    set_schedule(rolled_back)
    rolled_back.execute("UPDATE pgoutbox.schedule SET problem = 'refused', retry_at = now()")
    assert rolled_back.execute(TICK).fetchone() == ([],)
    assert rolled_back.execute("SELECT problem, retry_at FROM pgoutbox.schedule").fetchone() == (None, None)


def test_a_tick_does_not_wait_for_a_schedule_that_another_session_has(db: psycopg.Connection, connect: Connect) -> None:
    set_schedule(db)
    connect(autocommit=False).execute("SELECT FROM pgoutbox.schedule FOR UPDATE")
    db.execute("SET lock_timeout = 1")  # Each wait is an error.
    assert db.execute(TICK).fetchone() == (None,)
    db.execute("RESET lock_timeout")


def test_a_schedule_with_a_problem_is_read_after_those_that_are_due(rolled_back: psycopg.Connection) -> None:
    set_schedule(rolled_back)
    refused = "UPDATE pgoutbox.schedule SET next_at = now() - interval '1 day', retry_at = now() + interval '1 min'"
    rolled_back.execute(refused)
    rolled_back.execute("""SELECT pgoutbox.set_schedule('due', 'every 60', '{"topic": "mail", "payload": 1}')""")
    rolled_back.execute("UPDATE pgoutbox.schedule SET next_at = now() WHERE name = 'due'")
    assert [row[0] for row in rolled_back.execute(sql.NEXT_SCHEDULES, {"declared": []})] == ["due", "s"]

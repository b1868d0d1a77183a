"""Tests statements of the ticker that meet a change of another session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgoutbox.database import sql

if TYPE_CHECKING:
    import psycopg


def test_a_schedule_that_was_corrected_meanwhile_is_not_refused(rolled_back: psycopg.Connection) -> None:
    for rule in ("61 * * * *", "1 * * * *"):
        rolled_back.execute("""SELECT pgoutbox.set_schedule('s', %s, '{"topic": "mail", "payload": 1}')""", [rule])
    refusal = {"name": "s", "problem": "Bad minute", "next_at": None}
    rolled_back.execute(sql.REFUSE_SCHEDULE, {**refusal, "revision": 1})
    problem = "SELECT problem FROM pgoutbox.schedule"
    assert rolled_back.execute(problem).fetchone() == (None,)
    rolled_back.execute(sql.REFUSE_SCHEDULE, {**refusal, "revision": 2, "next_at": "2026-01-01"})
    assert rolled_back.execute(problem).fetchone() == (None,)
    rolled_back.execute(sql.REFUSE_SCHEDULE, {**refusal, "revision": 2})
    assert rolled_back.execute(problem).fetchone() == ("Bad minute",)

"""Tests manually written rows that no enqueue creates: none of them stops its queue."""

from __future__ import annotations

import contextlib

import psycopg
import pytest

from pgoutbox import Context, Message, Outbox
from pgoutbox.worker import Worker
from tests.support.outbox_actions import enqueue, lapse, rows_of
from tests.support.worker_sql import claim

INFINITIES = ["infinity", "-infinity", "294276-12-31 23:59:59.999999Z", "4713-01-01 00:00Z BC", "0001-01-01 00:00Z"]
TIMES = ["created_at", "available_at", "expires_at", "claimed_at"]
NUMBERS = ["attempt_count", "max_attempts", "attempt_budget"]
TEXTS = [
    "destination", "coalesce_key", "dedupe_key", "ordering_key", "worker", "skip_reason", "last_error"
]  # fmt: skip
DOCUMENTS = [
    "'1e100000'",
    "'-0.0'",
    "'[]'",
    "'7'",
    "'null'",
    r"""'"\ud83d\ude00\u2028"'""",
    "(repeat('[', 6000) || repeat(']', 6000))",
    "jsonb_build_object('', repeat('x', 1000000))",
]
STRANGE = [
    *(f"{column} = '{value}'" for column in TIMES for value in INFINITIES),
    *(f"{column} = {value}" for column in NUMBERS for value in (-1, 0, 2**31 - 2, 2**31 - 1)),
    *(f"{column} = {value}" for column in TEXTS for value in ("''", "chr(1) || chr(1114111)", "repeat('x', 2000)")),
    *(f"{column} = {value}::jsonb" for column in ("payload", "headers") for value in DOCUMENTS),
    *(
        f"{column} = {value}"
        for column in ("content_id", "resend_of", "failure_of")
        for value in (-(2**63), 0, 2**63 - 1)
    ),
    "topic = ''",
    "max_attempts = 2147483647, attempt_budget = 1",
    "max_attempts = 2147483647, attempt_count = 2147483646",
]
"""Assignments to each column of a row."""


REFUSALS = (
    psycopg.errors.CheckViolation,
    psycopg.errors.DatetimeFieldOverflow,
    psycopg.errors.ProgramLimitExceeded,
    psycopg.errors.ForeignKeyViolation,
)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["pending", "sending"])
async def test_no_strange_row_stops_its_queue(outbox: Outbox, db: psycopg.Connection, state: str) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    made_count = 0
    for assignment in STRANGE:
        message_id = enqueue(db)
        if state == "sending":
            claim(db)
            lapse(db, message_id)
        with contextlib.suppress(*REFUSALS):
            db.execute(f"UPDATE pgoutbox.message_live SET {assignment} WHERE id = {message_id}".encode())
            made_count += 1
    neighbours = [enqueue(db) for _ in range(10)]
    assert made_count > len(STRANGE) / 2
    await Worker(outbox).run_once()
    assert {row.state for row in rows_of(db, *neighbours)} == {"sent"}

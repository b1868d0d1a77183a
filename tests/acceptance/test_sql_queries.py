"""Tests every query of the page "SQL queries", as a viewer or as the role that the page names, on known rows."""

from __future__ import annotations

import hashlib
import re
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Final, LiteralString
from uuid import UUID

import pytest
from psycopg import sql

from tests.support.messages import CLAIM_ALL

if TYPE_CHECKING:
    import psycopg

PAGE: Final = Path(__file__).parents[2] / "docs/how-to/sql-queries.md"
ADA: Final = "mailto:ada@example.org"

# The clock of a transaction stands still, so ages are exact.
ROWS: Final[LiteralString] = """
INSERT INTO pgoutbox.message (
    id, topic, state, destination, payload, coalesce_key, ordering_key, halts_key, attempt_count,
    created_at, available_at, claimed_at, finished_at, worker, superseded_by, skip_reason, last_error
)
SELECT
    r.id, r.topic, r.state, r.destination, r.payload::jsonb, r.coalesce_key, r.ordering_key,
    coalesce(r.halts_key, false), r.attempt_count,
    now() - r.created, now() - r.available, now() - r.claimed, now() - r.finished,
    CASE WHEN r.attempt_count > 0 THEN 'w' END, r.superseded_by, r.skip_reason, r.last_error
FROM (
    VALUES
        (1, 'mail.welcome', 'sent', 'mailto:ada@example.org', '{"user_id": 7}', NULL, NULL, NULL, 1,
            interval '100 s', interval '100 s', interval '99 s', interval '98 s',
            NULL::bigint, NULL, NULL),
        (2, 'mail.welcome', 'pending', 'mailto:ada@example.org', '{"user_id": 7}', NULL, NULL, NULL, 0,
            '30 s', '30 s', NULL, NULL, NULL, NULL, NULL),
        (3, 'mail.welcome', 'sent', 'mailto:eve@example.org', '{}', NULL, NULL, NULL, 2,
            '200 s', '150 s', '140 s', '138 s', NULL, NULL, NULL),
        (4, 'mail.order', 'failed', 'mailto:eve@example.org', '{}', NULL, 'o', true, 2,
            '2 h', '2 h', '61 min', '1 h', NULL, NULL, '550 no such mailbox 17'),
        (5, 'mail.order', 'pending', NULL, '{}', NULL, 'o', NULL, 0,
            '20 s', '20 s', NULL, NULL, NULL, NULL, NULL),
        (6, 'mail.digest', 'pending', NULL, '{}', NULL, NULL, NULL, 0,
            '10 s', '-1 h', NULL, NULL, NULL, NULL, NULL),
        (7, 'mail.password_reset', 'skipped', NULL, '{}', 'ada@example.org', NULL, NULL, 0,
            '60 s', '60 s', NULL, '50 s', 8, 'superseded by 8', NULL),
        (8, 'mail.password_reset', 'skipped', NULL, '{}', 'ada@example.org', NULL, NULL, 0,
            '55 s', '55 s', NULL, '50 s', 9, 'superseded by 9', NULL),
        (9, 'mail.password_reset', 'sent', NULL, '{}', 'ada@example.org', NULL, NULL, 1,
            '52 s', '52 s', '50 s', '49 s', NULL, NULL, NULL),
        (10, 'mail.password_reset', 'pending', NULL, '{}', 'ada@example.org', NULL, NULL, 0,
            '5 s', '5 s', NULL, NULL, NULL, NULL, NULL),
        (11, 'mail.digest', 'sending', NULL, '{}', NULL, NULL, NULL, 1,
            '40 s', '40 s', '6 s', NULL, NULL, NULL, NULL),
        (12, 'mail.digest', 'cancelled', NULL, '{}', NULL, NULL, NULL, 0,
            '9 s', '9 s', NULL, '8 s', NULL, NULL, NULL),
        (13, 'mail.order', 'failed', NULL, '{}', NULL, NULL, NULL, 1,
            '3 days', '3 days', '3 days', '2 days', NULL, NULL, 'long ago')
) AS r(
    id, topic, state, destination, payload, coalesce_key, ordering_key, halts_key, attempt_count,
    created, available, claimed, finished, superseded_by, skip_reason, last_error
)
"""
OTHERS: Final[LiteralString] = """
UPDATE pgoutbox.message AS m
SET attempts = a.attempts
FROM (
    SELECT r.id, jsonb_agg(
        (
            r.n, 1, r.outcome, r.worker, now() - r.started::interval, now() - r.ended::interval, r.error,
            NULL, NULL, NULL
        )::pgoutbox.attempt ORDER BY r.n
    )
    FROM (
        VALUES
            (3, 1, 'lost', 'v', '190 s', '160 s', 'lease expired, outcome unknown'),
            (4, 1, 'retry', 'w', '110 min', '109 min', '451 busy 4'),
            (4, 2, 'failed', 'w', '61 min', '1 h', '550 no such mailbox 17')
    ) AS r(id, n, outcome, worker, started, ended, error)
    GROUP BY r.id
) AS a(id, attempts)
WHERE m.id = a.id;
INSERT INTO pgoutbox.key_head (newest_id, scope, key)
VALUES (10, 'mail.password_reset', 'ada@example.org');
DELETE FROM pgoutbox.audit;
INSERT INTO pgoutbox.audit (
    acted_at, act_id, actor, db_role, origin, action, queue, message_count, message_ids, details, stated
)
SELECT
    now() - a.age::interval, md5(a.act)::uuid, a.actor, a.db_role, a.origin, a.action, a.queue,
    cardinality(a.ids::bigint[]), a.ids::bigint[], a.details::jsonb, a.stated::jsonb
FROM (
    VALUES
        ('30 days', 'a', 'ada', 'web', NULL, 'redrive', NULL, '{4}', NULL, NULL),
        ('5 h', 'b', 'eve', 'eve', 'cli host', 'pause', 'bulk', NULL, '{"seconds": 60}', NULL),
        ('4 h', 'c', 'ada', 'web', 'web ::1', 'redirect', NULL, NULL,
            '{"target": "@t.example", "seconds": 7200, "topics": ["mail.user.*"]}', NULL),
        ('3 h', 'd', 'ada', 'web', 'web ::1', 'redirect', NULL, NULL, '{"target": "none"}', NULL),
        ('2 h', 'e', 'ada', 'web', 'web ::1', 'redrive', NULL, '{4,5}', NULL, '{"topic": "mail.order"}'),
        ('119 min', 'e', 'ada', 'web', 'web ::1', 'redrive', NULL, '{6}', NULL, '{"topic": "mail.order"}')
) AS a(age, act, actor, db_role, origin, action, queue, ids, details, stated)
"""

TIME: Final = "a time"
BULK: Final = UUID(hashlib.md5(b"e", usedforsecurity=False).hexdigest())


def seconds(count: float) -> timedelta:
    return timedelta(seconds=count)


# By heading, in the order of the page.
ANSWERS: Final[dict[str, list[list[tuple[object, ...]]]]] = {
    "Undelivered messages of a user": [
        [(2, "mail.welcome", "pending", 0, TIME, None)],
        [(2, "mail.welcome", "pending", 0, None)],
    ],
    "Number of messages by topic and state": [
        [
            ("mail.digest", "cancelled", 1, TIME),
            ("mail.digest", "pending", 1, TIME),
            ("mail.digest", "sending", 1, TIME),
            ("mail.order", "failed", 2, TIME),
            ("mail.order", "pending", 1, TIME),
            ("mail.password_reset", "pending", 1, TIME),
            ("mail.password_reset", "sent", 1, TIME),
            ("mail.password_reset", "skipped", 2, TIME),
            ("mail.welcome", "pending", 1, TIME),
            ("mail.welcome", "sent", 2, TIME),
        ]
    ],
    "Due messages": [
        [
            ("default", "mail.welcome", 1, seconds(30)),
            ("default", "mail.order", 1, seconds(20)),
            ("default", "mail.password_reset", 1, seconds(5)),
        ]
    ],
    "Waiting messages and their reasons": [
        [
            ("default", "mail.digest", "scheduled", 1, TIME),
            ("default", "mail.order", "halted", 1, None),
            ("default", "mail.password_reset", "no worker", 1, None),
            ("default", "mail.welcome", "no worker", 1, None),
        ],
    ],
    "Messages in flight and their workers": [[(11, "mail.digest", "w", 1, seconds(6), seconds(54))]],
    "Failures of the last day, by topic and error": [
        [("mail.order", "550 no such mailbox #", 1, TIME)],
        [
            ("mail.order", "451 busy #", "retry", 1),
            ("mail.order", "550 no such mailbox #", "failed", 1),
            ("mail.welcome", "lease expired, outcome unknown", "lost", 1),
        ],
    ],
    "The attempts of a message, with their errors": [
        [
            (1, 1, "lost", "v", TIME, seconds(30), "lease expired, outcome unknown"),
            (2, 1, "sent", "w", TIME, seconds(2), None),
        ]
    ],
    "Possible duplicate hand-overs": [[(3, "mail.welcome", "mailto:eve@example.org", 1, "v", TIME)]],
    "Skipped messages and their reasons": [[("mail.password_reset", "superseded", 2)]],
    "Superseding messages": [
        [(1, 7, "skipped", 8, TIME), (2, 8, "skipped", 9, TIME), (3, 9, "sent", None, TIME)],
    ],
    "Delivery times": [
        [
            ("mail.password_reset", 1, [3.0, 3.0, 3.0], seconds(3)),
            ("mail.welcome", 2, [32.0, 59.0, 61.4], seconds(62)),
        ],
        [
            ("mail.password_reset", 1, 2.0, 2.0, 1.0, 1.0),
            ("mail.welcome", 2, 5.5, 9.91, 1.5, 1.99),
        ],
    ],
    "Throughput": [[(3, 1, 3)]],
    "Acts of operators": [
        [(TIME, "pause", "bulk", "eve", "eve", "cli host", {"seconds": 60})],
        [
            (TIME, "ada", "web", "none", None, None, None),
            (TIME, "ada", "web", "@t.example", timedelta(hours=2), ["mail.user.*"], None),
        ],
        [
            (TIME, "redrive", "ada", "web", None, None, None),
            (TIME, "redrive", "ada", "web", "web ::1", None, {"topic": "mail.order"}),
        ],
        [(BULK, "redrive", "ada", {"topic": "mail.order"}, 2, 3, TIME, timedelta(minutes=1))],
    ],
}


def queries() -> list[tuple[str, int, str, str]]:
    """Return heading, number below it, role and text of every query."""
    found = []
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        heading = section.partition("\n")[0]
        blocks = re.findall(r"(?:^<!-- as (.*?) -->\n)?^```sql\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        found += [(heading, number, role or "pgoutbox_viewer", text) for number, (role, text) in enumerate(blocks)]
    return found


def settled(value: object) -> object:
    """Remove the values that vary from run to run."""
    if isinstance(value, datetime):
        return TIME
    if isinstance(value, float | Decimal):
        return round(float(value), 3)
    return [settled(one) for one in value] if isinstance(value, list) else value


@pytest.fixture
def known(rolled_back: psycopg.Connection) -> psycopg.Connection:
    rolled_back.execute(ROWS)
    rolled_back.execute(CLAIM_ALL, {"lease": "54 s"})
    rolled_back.execute(OTHERS)
    return rolled_back


def test_every_expected_answer_belongs_to_a_query() -> None:
    asked = {heading: number + 1 for heading, number, *_ in queries()}
    assert {heading: len(answers) for heading, answers in ANSWERS.items()} == {
        heading: count for heading, count in asked.items() if heading != "Transactions that block vacuum"
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heading", "number", "role", "text"), [pytest.param(*query, id=f"{query[0]} {query[1]}") for query in queries()]
)
def test_each_query_returns_its_documented_answer(
    known: psycopg.Connection, heading: str, number: int, role: str, text: str
) -> None:
    if role != "the owner":
        known.execute(sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(role)))
    rows = [tuple(map(settled, row)) for row in known.execute(text.encode()).fetchall()]
    if heading == "Transactions that block vacuum":
        assert rows != []
    elif heading == "Throughput":
        # Two of the seeded times may be in different hours.
        totals = zip(*[[count for count in row if isinstance(count, int)] for row in rows], strict=True)
        assert tuple(map(sum, totals)) == ANSWERS[heading][number][0]
    else:
        assert rows == ANSWERS[heading][number]

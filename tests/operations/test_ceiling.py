"""Tests of the ceiling of a queue: operators cannot set a higher rate, in any way, and its owner can."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.errors import CheckViolation, InsufficientPrivilege

from pgoutbox.errors import StateError
from pgoutbox.operations import Operator, QueueControls, Rate
from tests.support.roles import login

if TYPE_CHECKING:
    from collections.abc import Iterator

REFUSAL = (
    r"^{}: the ceiling of queue mail is 60 in 3600 s, which the owner of the schema has set\. "
    r"Set a lower value, or ask the owner to run: pgoutbox limit mail --at-most RATE$"
)


@pytest.fixture
def owner(db: psycopg.Connection) -> Operator:
    """The owner of the schema. The queue has a ceiling of 60 in an hour."""
    owner = Operator(db)
    owner.limit_ceiling("mail", Rate(60, 3600))
    return owner


@pytest.fixture
def theirs(dsn: str, owner: Operator) -> Iterator[psycopg.Connection]:
    """A connection of an operator."""
    with login(dsn, "pgoutbox_operator") as operator, psycopg.connect(operator, autocommit=True) as connection:
        yield connection


def limits(operator: Operator) -> tuple[int | None, float | None, int | None]:
    (queue,) = operator.list_queues()
    return queue.rate_count, queue.rate_seconds, queue.burst


@pytest.mark.parametrize(
    ("rate", "burst", "told"),
    [
        (Rate(61, 3600), None, "rate 61 in 3600 s"),
        (Rate(1, 59), None, "rate 1 in 59 s"),
        (None, None, "rate none"),
    ],
)
def test_an_operator_cannot_exceed_the_ceiling(
    theirs: psycopg.Connection, rate: Rate | None, burst: int | None, told: str
) -> None:
    operator = Operator(theirs)
    before = limits(operator)
    with pytest.raises(StateError, match=REFUSAL.format(told)):
        operator.limit_rate("mail", rate, burst=burst)
    assert limits(operator) == before


@pytest.mark.parametrize(
    ("rate", "burst"),
    [
        (Rate(60, 3600), 5),
        (Rate(60, 3600), 60),
        (Rate(1, 60), 1),
        (Rate(1, 3600), 1),
        (Rate(1440, 86400), 1),
        (Rate(1440, 86400), 1440),
        (Rate(7, 420), 7),
    ],
)
def test_an_operator_may_set_a_rate_up_to_the_ceiling(theirs: psycopg.Connection, rate: Rate, burst: int) -> None:
    operator = Operator(theirs)
    operator.limit_rate("mail", rate, burst=burst)
    assert limits(operator) == (rate.count, rate.seconds, burst)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE pgoutbox.queue SET ceiling_count = 1000",
        "UPDATE pgoutbox.queue SET ceiling_count = NULL, ceiling_seconds = NULL",
        "UPDATE pgoutbox.queue SET name = 'other'",
        "DELETE FROM pgoutbox.queue",
        "INSERT INTO pgoutbox.queue (name, ceiling_count, ceiling_seconds) VALUES ('other', 1, 1)",
        "ALTER TABLE pgoutbox.queue DISABLE TRIGGER queue_ceiling",
        "UPDATE pgoutbox.queue SET tokens = burst",
        "UPDATE pgoutbox.queue SET tokens_at = '-infinity'",
        "UPDATE pgoutbox.queue SET begun_count = 0",
        "DELETE FROM pgoutbox.rate_claim",
        "INSERT INTO pgoutbox.queue (name, tokens) VALUES ('other', 1)",
    ],
)
def test_an_operator_cannot_change_or_evade_a_ceiling_in_sql(theirs: psycopg.Connection, statement: str) -> None:
    with pytest.raises(InsufficientPrivilege):
        theirs.execute(statement.encode())


@pytest.mark.parametrize(
    "change",
    [
        "rate_count = 61",
        "rate_seconds = 3599",
        "rate_count = 1441, rate_seconds = 86400",
        "rate_count = NULL, rate_seconds = NULL, burst = NULL",
    ],
)
def test_sql_cannot_exceed_a_ceiling(theirs: psycopg.Connection, change: str) -> None:
    with pytest.raises(CheckViolation, match="the ceiling of queue mail is 60 in 3600 s") as refused:
        theirs.execute(f"UPDATE pgoutbox.queue SET {change}".encode())
    assert refused.value.diag.constraint_name == "queue_ceiling"


def test_a_new_ceiling_lowers_the_limits_that_are_above_it(db: psycopg.Connection) -> None:
    owner = Operator(db)
    owner.limit_rate("mail", Rate(1000, 3600), burst=500)
    owner.limit_ceiling("mail", Rate(60, 3600))
    assert limits(owner) == (60, 3600, 5)
    owner.limit_ceiling("mail", Rate(10, 60))
    assert limits(owner) == (60, 3600, 5)
    owner.limit_ceiling("mail", Rate(3, 3600))
    assert limits(owner) == (3, 3600, 1)


def test_a_queue_without_a_rate_gets_that_of_its_ceiling(owner: Operator) -> None:
    assert limits(owner) == (60, 3600, 5)
    (queue,) = owner.list_queues()
    assert isinstance(queue, QueueControls)
    assert (queue.ceiling_count, queue.ceiling_seconds, queue.tokens) == (60, 3600, 5)


def test_without_a_ceiling_every_rate_is_allowed_again(owner: Operator, theirs: psycopg.Connection) -> None:
    owner.limit_ceiling("mail", None)
    Operator(theirs).limit_rate("mail", None)
    assert owner.list_queues() == []


def test_a_pause_and_the_limit_in_flight_do_not_touch_the_ceiling(theirs: psycopg.Connection) -> None:
    operator = Operator(theirs)
    operator.pause("mail")
    operator.resume("mail")
    operator.limit_in_flight("mail", 3)
    (queue,) = operator.list_queues()
    assert (queue.max_in_flight, queue.ceiling_count) == (3, 60)


def test_the_audit_records_a_ceiling(owner: Operator, db: psycopg.Connection) -> None:
    db.execute("UPDATE pgoutbox.queue SET ceiling_count = 30")
    assert [act.details for act in owner.list_acts()] == [
        {"rate": "30/3600s", "burst": 3, "at_most": "30/3600s"},
        {"rate": "60/3600s", "burst": 5, "at_most": "60/3600s"},
    ]


def test_claims_do_not_fire_the_trigger_of_the_ceiling(owner: Operator, db: psycopg.Connection) -> None:
    (columns,) = db.execute(
        """
        SELECT array_agg(a.attname::text ORDER BY a.attname) FROM pg_trigger AS t
        JOIN pg_attribute AS a ON a.attrelid = t.tgrelid AND a.attnum = ANY (t.tgattr)
        WHERE t.tgname = 'queue_ceiling'
        """
    ).fetchone() or (None,)
    assert columns == ["burst", "ceiling_count", "ceiling_seconds", "rate_count", "rate_seconds"]

"""Tests that failed messages of one cause are one group: in SQL, for operators, and in `pgoutbox failures`."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from pgoutbox.message import AttemptOutcome, State
from pgoutbox.operations import MessageFilter, Operator
from tests.support.messages import put
from tests.support.outbox_actions import enqueue, make_due, redrive, state_of
from tests.support.worker_sql import End, claim, finish

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from tests.conftest import Connect
    from tests.support.command_line import Done


def fail(db: psycopg.Connection, *errors: str | None, topic: str = "mail") -> list[int]:
    """Put a failed message with each of these errors."""
    ids = [put(db, State.FAILED, topic=topic) for _ in errors]
    for message_id, error in zip(ids, errors, strict=True):
        db.execute("UPDATE pgoutbox.message SET last_error = %s WHERE id = %s", [error, message_id])
    return ids


@pytest.mark.parametrize(
    ("errors", "cause"),
    [
        (
            [
                f"RCPT nobody{n}@example.org: 550 5.1.1 <nobody{n}@example.org>: User unknown"
                for n in (1, 45, 450, 4500)
            ],
            "RCPT (address): 550 #.#.# <(address)>: User unknown",
        ),
        (["order 404 is unknown", "order 7 is unknown", "order 55 is unknown"], "order # is unknown"),
        (["KeyError: 'vat_id'", "KeyError: 'vat_id'"], "KeyError: 'vat_id'"),
        (["KeyError: 'Ada Lovelace'", 'KeyError: "first name"'], "KeyError: (value)"),
        (
            ["AttributeError: 'NoneType' object has no attribute 'email'"] * 2,
            "AttributeError: 'NoneType' object has no attribute 'email'",
        ),
        (
            ["no row 8c3f2f6e-1234-4abc-9def-0123456789ab", "no row 0c3f2f6e-1234-4abc-9def-0123456789aB", "no row 12"],
            "no row #",
        ),
        (["DATA: 451 queue file A1B2C3D4E5", "DATA: 451 queue file FFFF0000AA"], "DATA: 451 queue file #"),
        (["session cs_test_a1B2c3D4e5F6g7H8i9", "session cs_test_9z8Y7x6W5v4U3t2S1r"], "session #"),
        (["timeout after 1.5 s", "timeout after 30.25 s"], "timeout after #.# s"),
        (["it's broken, isn't it", "it's broken, isn't it"], "it's broken, isn't it"),
        (['invalid document "Dear Ada ' + "x" * 500, 'invalid document "Dear Bob" is'], None),
        (["got b'Ada'", "got u'Bob'", 'got "Cid"', "got 'Ada's'"], "got (value)"),
        (["got “Ada”", "got «Bob»", "got ‘Cid’", "got `Dee`", "got »Eve«"], "got (value)"),
        (["RCPT o'brien@x.org: 550 no", "RCPT d'arcy@x.org: 550 no", "RCPT 'ada@x.org': 550 no"], None),
        (["/?to=ada%40example.org", "/?to=bob%40example.org"], "/?to=(address)"),
        (
            ["duplicate key\nDETAIL:  Key (name)=(Ada) exists.", "duplicate key\nDETAIL:  Key (name)=(Bob)."],
            "duplicate key",
        ),
    ],
)
def test_errors_of_one_cause_are_one_group(
    rolled_back: psycopg.Connection, errors: list[str], cause: str | None
) -> None:
    fail(rolled_back, *errors)
    found = [row[0] for row in rolled_back.execute("SELECT DISTINCT cause FROM pgoutbox.message_view").fetchall()]
    assert not any(name in str(found) for name in ("Ada", "ada", "Bob", "brien", "arcy"))
    if cause is not None:
        assert found == [cause]


@pytest.mark.parametrize(
    "errors",
    [
        ["404 Not Found", "503 Service Unavailable", "410 Gone"],
        ["POST https://a.example: 404", "POST https://a.example: 500"],
        ["HTTP 401", "HTTP 403"],
        ["RCPT a@x.org: 550 no", "RCPT a@x.org: 553 no", "MAIL b@x.org: 550 no"],
        ["TypeError: 'x'", "KeyError: 'x'"],
    ],
)
def test_errors_of_different_causes_are_different_groups(rolled_back: psycopg.Connection, errors: list[str]) -> None:
    fail(rolled_back, *errors)
    rows = rolled_back.execute("SELECT DISTINCT cause FROM pgoutbox.message_view").fetchall()
    assert len(rows) == len(errors)


@pytest.mark.slow
def test_five_hundred_bounces_are_one_line(connect: Connect, cli: Callable[..., Done]) -> None:
    with connect(autocommit=True) as db:
        fail(db, *(f"RCPT n{n}@example.org: 550 5.1.1 <n{n}@example.org>: User unknown" for n in range(500)))
        fail(db, "KeyError: 'name'", topic="sms")
    done = cli("failures")
    header, bounces, bug = done.out.splitlines()
    assert header.split("\t")[:5] == ["messages", "last_hour", "hour_before", "failed_again", "topic"]
    assert bounces.startswith("500\t500\t0\t0\tmail\tRCPT (address): 550 #.#.# <(address)>: User unknown\t")
    assert bug.startswith("1\t1\t0\t0\tsms\tKeyError: 'name'\t")


def attempt(db: psycopg.Connection, message_id: int, *outcomes: AttemptOutcome) -> None:
    """Let the next attempts of a message end so."""
    for outcome in outcomes:
        make_due(db, message_id)
        (row,) = claim(db)
        finish(db, End(message_id, row.attempt_count, outcome, "no such mailbox", 0.0))


@pytest.mark.parametrize(
    ("before", "after", "failed_again"),
    [
        ([AttemptOutcome.FAILED], [AttemptOutcome.FAILED], 1),
        ([AttemptOutcome.SNOOZED, AttemptOutcome.FAILED], [AttemptOutcome.SNOOZED, AttemptOutcome.FAILED], 1),
        ([AttemptOutcome.RETRY] * 3, [AttemptOutcome.RETRY] * 3, 1),
        ([AttemptOutcome.FAILED], [], 0),
        ([AttemptOutcome.RETRY, AttemptOutcome.SNOOZED, AttemptOutcome.FAILED], [], 0),
        ([AttemptOutcome.RELEASED, AttemptOutcome.RETRY, AttemptOutcome.RETRY, AttemptOutcome.RETRY], [], 0),
    ],
)
def test_a_group_shows_how_many_messages_failed_again_after_a_redrive(
    connect: Connect,
    cli: Callable[..., Done],
    before: list[AttemptOutcome],
    after: list[AttemptOutcome],
    failed_again: int,
) -> None:
    with connect(autocommit=True) as db:
        message_id = enqueue(db, max_attempts=3)
        attempt(db, message_id, *before)
        if after:
            assert redrive(db, message_id)
            attempt(db, message_id, *after)
        assert state_of(db, message_id) == "failed"
        (group,) = Operator(db).list_failures()
    assert (group.messages, group.failed_again) == (1, failed_again)
    assert cli("failures", "--json").json["failed_again"] == failed_again


def test_new_failures_come_first_and_a_group_has_its_place_and_example(connect: Connect) -> None:
    with connect(autocommit=True) as db:
        old = fail(db, *["user 1 is gone"] * 3)
        db.execute("UPDATE pgoutbox.message SET finished_at = now() - interval '90 min' WHERE id = ANY (%s)", [old])
        (new,) = fail(db, "KeyError: 'name'")
        db.execute(
            """
            UPDATE pgoutbox.message
            SET attempts = pgoutbox._with_attempt(
                NULL, (1, 1, 'failed', 'w', now(), now(), 'x', 'app.py:7 greet', NULL, NULL)::pgoutbox.attempt
            )
            WHERE id = %s
            """,
            [new],
        )
        first, second = Operator(db).list_failures()
        assert (first.cause, first.last_hour, first.hour_before, first.newest_id) == ("KeyError: 'name'", 1, 0, new)
        assert (first.error, first.place) == ("KeyError: 'name'", "app.py:7 greet")
        assert (second.cause, second.last_hour, second.hour_before, second.place) == ("user # is gone", 0, 3, None)
        assert [group.cause for group in Operator(db).list_failures(within=timedelta(hours=1))] == [first.cause]
        assert [message.id for message in Operator(db).list_messages(MessageFilter(error_group=second.group))] == old[
            ::-1
        ]


def test_failures_are_filtered_by_topic_and_time_and_printed_as_json(
    connect: Connect, cli: Callable[..., Done]
) -> None:
    with connect(autocommit=True) as db:
        fail(db, "a", topic="mail")
        fail(db, None, topic="sms")
    (document,) = map(json.loads, cli("failures", "--topic", "sms", "--since", "1d", "--json").out.splitlines())
    assert (document["topic"], document["cause"], document["messages"]) == ("sms", None, 1)


def test_a_group_is_redriven_or_dismissed_alone(connect: Connect, cli: Callable[..., Done]) -> None:
    with connect(autocommit=True) as db:
        fail(db, "user 1 is gone", "user 2 is gone", "KeyError: 'name'")
        groups = {group.cause: group.group for group in Operator(db).list_failures()}
        assert cli("dismiss", "--group", groups["user # is gone"], "--reason", "gone", "--yes").exit_code == 0
        cut = cli("redrive", "--group", groups["KeyError: 'name'"][:10], "--dry-run")
        assert "no failed message has the cause" in cut.out
        assert cli("redrive", "--group", groups["KeyError: 'name'"], "--yes").exit_code == 0
        rows = db.execute("SELECT state, last_error FROM pgoutbox.message ORDER BY id").fetchall()
    assert [state for state, _ in rows] == ["skipped", "skipped", "pending"]


def test_an_empty_error_and_none_are_one_group(connect: Connect) -> None:
    with connect(autocommit=True) as db:
        fail(db, "", None)
        (group,) = Operator(db).list_failures()
        assert (group.cause, group.messages) == (None, 2)
        assert len(Operator(db).list_messages(MessageFilter(error_group=group.group))) == 2


def test_a_secret_is_hidden_in_cause_and_error(connect: Connect) -> None:
    with connect(autocommit=True) as db:
        fail(db, "refused: password=c4n4ry", "refused: password=c4n4ry2")
        (group,) = Operator(db).list_failures()
        assert "c4n4ry" not in str(group)
        assert len(Operator(db).list_messages(MessageFilter(error_group=group.group))) == group.messages == 2


def test_a_group_has_failed_messages_of_one_topic(connect: Connect) -> None:
    with connect(autocommit=True) as db:
        fail(db, "user 1 is gone", topic="mail")
        (sms,) = fail(db, "user 2 is gone", topic="sms")
        sent = put(db, State.SENT, topic="sms")
        db.execute("UPDATE pgoutbox.message SET last_error = 'user 3 is gone' WHERE id = %s", [sent])
        groups = {group.topic: group for group in Operator(db).list_failures()}
        assert {topic: group.messages for topic, group in groups.items()} == {"mail": 1, "sms": 1}
        which = MessageFilter(error_group=groups["sms"].group)
        assert [message.id for message in Operator(db).list_messages(which)] == [sms]


def test_a_viewer_sees_the_causes(rolled_back: psycopg.Connection) -> None:
    fail(rolled_back, "user 1 is gone")
    rolled_back.execute("SET LOCAL ROLE pgoutbox_viewer")
    assert [group.cause for group in Operator(rolled_back).list_failures()] == ["user # is gone"]

"""Tests the hooks of `Outbox.on_failed`: one message for each committed failure, and none for anything else."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.fernet import Fernet
from psycopg.types.json import Jsonb

from pgoutbox import Context, Failure, Message, Outbox, Permanent, RetryPolicy, SyncContext, Topic, Transient, Worker
from pgoutbox.errors import ConfigurationError
from pgoutbox.message import AttemptOutcome
from pgoutbox.operations import Operator
from tests.support.messages import LARGE
from tests.support.outbox_actions import attempts_of, enqueue, lapse, row_of, running, settings_for, state_of
from tests.support.waiting import until
from tests.support.worker_sql import End, claim, finish

if TYPE_CHECKING:
    import psycopg

    from tests.conftest import Connect

HOOKS = json.dumps({"greet": 3})


def hooked(outbox: Outbox) -> list[Message[Failure]]:
    """Register a handler that always fails, and a hook. Return the messages that the hook gets."""
    seen: list[Message[Failure]] = []

    @outbox.handler("greet", retry=RetryPolicy.steps(0))
    async def greet(message: Message, ctx: Context) -> None:
        raise Permanent("refused, password=geheim")

    @outbox.on_failed("greet", retry=RetryPolicy.steps(0, max_attempts=3))
    async def note(message: Message[Failure], ctx: Context) -> None:
        seen.append(message)

    return seen


def failures(db: psycopg.Connection) -> list[dict[str, Any]]:
    """Return the payloads of the messages for hooks, in their order."""
    rows = db.execute(
        "SELECT m.payload FROM pgoutbox.message AS m WHERE m.topic = 'greet.failed' ORDER BY m.id"
    ).fetchall()
    return [payload for (payload,) in rows]


@pytest.mark.slow
async def test_a_hook_runs_once_for_a_message_that_fails(outbox: Outbox, db: psycopg.Connection) -> None:
    seen = hooked(outbox)
    message_id = enqueue(
        db, payload={"user_id": 7}, queue="default", destination="mailto:ann@example.org", owner="member-7"
    )
    await Worker(outbox).run_once()
    ((_, _, error),) = attempts_of(db, message_id)
    (message,) = seen
    failure = message.payload
    assert (message.topic, message.queue, message.destination, message.max_attempts) == (
        "greet.failed",
        "default",
        None,
        3,
    )
    assert (failure.message_id, failure.topic, failure.queue) == (message_id, "greet", "default")
    assert (failure.destination, failure.owner, failure.payload) == (
        "mailto:ann@example.org",
        "member-7",
        {"user_id": 7},
    )
    assert (failure.error, failure.attempt_count) == ("refused, password=(redacted)", 1)
    assert failure.error == error
    assert failure.created_at < failure.failed_at
    assert (row_of(db, message.id).state, failures(db)[0]["message_id"]) == ("sent", message_id)
    assert db.execute("SELECT owner FROM pgoutbox.message WHERE id = %s", (message.id,)).fetchone() == ("member-7",)


async def test_a_message_that_is_retried_and_then_sent_has_no_failure(outbox: Outbox, db: psycopg.Connection) -> None:
    @outbox.handler("greet", retry=RetryPolicy.steps(0))
    async def greet(message: Message, ctx: Context) -> None:
        if message.attempt_count == 1:
            raise Transient("busy")

    @outbox.on_failed("greet")
    async def note(message: Message[Failure], ctx: Context) -> None: ...

    message_id = enqueue(db)
    await Worker(outbox).drain()
    assert (state_of(db, message_id), failures(db)) == ("sent", [])


@pytest.mark.slow
async def test_each_failure_after_a_redrive_has_a_message_of_its_own_and_a_dismissal_none(
    outbox: Outbox, db: psycopg.Connection
) -> None:
    seen = hooked(outbox)
    message_id = enqueue(db)
    await Worker(outbox).run_once()
    Operator(db).redrive(message_id)
    await Worker(outbox).run_once()
    Operator(db).dismiss(message_id, "gone")
    await Worker(outbox).run_once()
    assert [m.payload.attempt_count for m in seen] == [1, 2]
    assert len(failures(db)) == 2


async def test_a_hook_that_fails_ends_failed_without_another_hook(outbox: Outbox, db: psycopg.Connection) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        raise Permanent("refused")

    @outbox.on_failed("greet", retry=RetryPolicy.steps(0, max_attempts=2))
    def note(message: Message[Failure], ctx: SyncContext) -> None:
        raise Transient("the hook is busy")

    enqueue(db)
    await Worker(outbox).drain()
    rows = db.execute("SELECT topic, state, attempt_count FROM pgoutbox.message ORDER BY id").fetchall()
    assert rows == [("greet", "failed", 1), ("greet.failed", "failed", 2)]


async def test_a_transactional_hook_writes_with_its_completion(outbox: Outbox, db: psycopg.Connection) -> None:
    db.execute("CREATE TABLE bounced (address text)")

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        raise Permanent("refused")

    @outbox.on_failed("greet", transactional=True)
    async def note(message: Message[Failure], ctx: Context) -> None:
        await ctx.connection.execute("INSERT INTO bounced VALUES (%s)", (message.payload.destination,))

    enqueue(db, destination="mailto:ann@example.org")
    await Worker(outbox).run_once()
    assert db.execute("SELECT address FROM bounced").fetchall() == [("mailto:ann@example.org",)]


async def test_a_listening_worker_runs_the_hook_without_a_poll_interval(outbox: Outbox, db: psycopg.Connection) -> None:
    seen = hooked(outbox)
    async with running(Worker(outbox)):
        enqueue(db)
        await until(lambda: len(seen) == 1)


async def test_a_payload_that_was_encrypted_stays_so_in_the_row_and_is_decrypted_for_the_hook(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    outbox = Outbox(settings_for(dsn, encryption_keys=Fernet.generate_key().decode()))
    outbox.define(Topic("greet", encrypted=True, coalesce_key=lambda p: p["name"]))
    seen = hooked(outbox)
    with connect() as connection:
        outbox.on(connection).enqueue("greet", {"name": "Ann"}, destination="mailto:ann@example.org")
        connection.commit()
    await Worker(outbox).run_once()
    assert [m.payload.payload for m in seen] == [{"name": "Ann"}]
    (stored,) = failures(db)
    assert list(stored["payload"]) == ["pgoutbox.encrypted"]


async def test_a_large_payload_is_part_of_the_failure(outbox: Outbox, db: psycopg.Connection) -> None:
    seen = hooked(outbox)
    enqueue(db, payload=LARGE)
    await Worker(outbox).run_once()
    assert [m.payload.payload for m in seen] == [LARGE]


NUMBERS = f"[{', '.join(['1e100000'] * 167)}]"
"""A few hundred bytes in PostgreSQL, and more than 16 million characters as text."""


@pytest.mark.slow
@pytest.mark.parametrize("payload", [f'{{"text": "{"x" * 16_777_200}"}}', NUMBERS], ids=["text", "numbers"])
def test_a_payload_near_the_limit_does_not_keep_its_message_from_failing(db: psycopg.Connection, payload: str) -> None:
    ((message_id,),) = db.execute("SELECT pgoutbox.enqueue('greet', %s::jsonb)", [payload]).fetchall()
    claim(db)
    assert finish(db, End(message_id, 1, AttemptOutcome.FAILED, "no"), hooks=HOOKS) == {message_id: "failed"}
    assert [failure["payload"] for failure in failures(db)] == [None]


def test_headers_travel_with_the_failure(db: psycopg.Connection) -> None:
    ((message_id,),) = db.execute(
        "SELECT pgoutbox.enqueue('greet', '{}', headers => %s)", [Jsonb({"tenant": "north"})]
    ).fetchall()
    claim(db)
    finish(db, End(message_id, 1, AttemptOutcome.FAILED, "no"), hooks=HOOKS)
    assert db.execute("SELECT headers FROM pgoutbox.message WHERE topic = 'greet.failed'").fetchone() == (
        {"tenant": "north"},
    )
    assert "headers" not in failures(db)[0]


# --- guards -----------------------------------------------------------------------------------------------------------


def test_a_finish_that_lost_its_fence_announces_nothing(db: psycopg.Connection) -> None:
    message_id = enqueue(db)
    claim(db)
    finish(db, End(message_id, 1, AttemptOutcome.RELEASED), hooks=HOOKS)
    claim(db)
    failed = End(message_id, 1, AttemptOutcome.FAILED, "stale")
    assert finish(db, failed, hooks=HOOKS) == {}
    assert failures(db) == []
    failed = End(message_id, 2, AttemptOutcome.FAILED, "no")
    assert finish(db, failed, hooks=HOOKS) == {message_id: "failed"}
    assert finish(db, failed, hooks=HOOKS) == {}
    assert [failure["error"] for failure in failures(db)] == ["no"]


def test_a_finish_that_is_rolled_back_announces_nothing(db: psycopg.Connection, connect: Connect) -> None:
    message_id = enqueue(db)
    claim(db)
    other = connect()
    finish(other, End(message_id, 1, AttemptOutcome.FAILED, "no"), hooks=HOOKS)
    other.rollback()
    assert (state_of(db, message_id), failures(db)) == ("sending", [])


@pytest.mark.slow
async def test_a_failure_that_cannot_be_announced_is_not_committed(outbox: Outbox, db: psycopg.Connection) -> None:
    seen = hooked(outbox)
    db.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE 'no' USING ERRCODE = '23514'; END $$"
    )
    db.execute(
        "CREATE TRIGGER refuse BEFORE INSERT ON pgoutbox.message_live FOR EACH ROW "
        "WHEN (new.topic = 'greet.failed') EXECUTE FUNCTION refuse()"
    )
    message_id = enqueue(db)
    worker = Worker(outbox)
    run = asyncio.create_task(worker.run())
    await until(lambda: worker.status().outcomes_refused == 1)
    assert state_of(db, message_id) == "sending"
    db.execute("DROP TRIGGER refuse ON pgoutbox.message_live")
    await until(lambda: len(seen) == 1)
    worker.stop()
    await run
    assert (state_of(db, message_id), len(failures(db))) == ("failed", 1)


def test_only_failures_of_topics_with_a_hook_are_announced(db: psycopg.Connection) -> None:
    outcomes = [AttemptOutcome.FAILED, AttemptOutcome.SKIPPED, AttemptOutcome.RETRY, AttemptOutcome.SNOOZED]
    ids = [enqueue(db) for _ in outcomes]
    other = enqueue(db, topic="bill")
    claim(db, topics=["greet", "bill"])
    finish(
        db,
        *(End(i, 1, outcome, "why", 60.0) for i, outcome in zip(ids, outcomes, strict=True)),
        End(other, 1, AttemptOutcome.FAILED, "no"),
        hooks=HOOKS,
    )
    assert [failure["message_id"] for failure in failures(db)] == ids[:1]
    assert db.execute("SELECT count(*) FROM pgoutbox.message").fetchone() == (6,)


@pytest.mark.parametrize("reason", ["no attempt left", "held"])
def test_a_lapsed_attempt_that_ends_failed_is_announced_once(db: psycopg.Connection, reason: str) -> None:
    message_id = enqueue(db, max_attempts=1 if reason == "no attempt left" else 3)
    claim(db)
    lapse(db, message_id)
    hold_topics = ["greet"] if reason == "held" else []
    for _ in range(2):
        claim(db, worker="other", hold_topics=hold_topics, topics=["greet"], hooks=HOOKS)
    (failure,) = failures(db)
    assert (failure["message_id"], failure["error"]) == (
        message_id,
        "attempt 1: lease of worker-1 expired, outcome unknown",
    )


def test_a_lapsed_attempt_that_is_tried_again_is_not_announced(db: psycopg.Connection) -> None:
    message_id = enqueue(db, max_attempts=2)
    claim(db)
    lapse(db, message_id)
    claim(db, worker="other", hooks=HOOKS)
    assert (state_of(db, message_id), failures(db)) == ("sending", [])


async def test_the_minimal_end_of_a_refused_outcome_is_announced(outbox: Outbox, db: psycopg.Connection) -> None:
    hooked(outbox)
    db.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN IF new.last_error LIKE 'refused%' THEN RAISE 'no' USING ERRCODE = '23514'; END IF; RETURN new; END $$"
    )
    db.execute("CREATE TRIGGER refuse BEFORE INSERT ON pgoutbox.message_failed FOR EACH ROW EXECUTE FUNCTION refuse()")
    message_id = enqueue(db)
    worker = Worker(outbox)
    run = asyncio.create_task(worker.run())
    await until(lambda: worker.status().outcomes_refused == 1)
    worker.stop()
    await run
    assert state_of(db, message_id) == "failed"
    assert [failure["message_id"] for failure in failures(db)] == [message_id]


# --- registration -----------------------------------------------------------------------------------------------------


async def note_failure(message: Message[Failure], ctx: Context) -> None:
    """Do nothing."""


def test_a_topic_has_one_hook_and_a_hook_has_none(outbox: Outbox) -> None:
    outbox.on_failed("greet")(note_failure)
    with pytest.raises(ConfigurationError, match=r"topic 'greet' has a hook already"):
        outbox.on_failed("greet")(note_failure)
    with pytest.raises(ConfigurationError, match=r"topic 'greet\.failed' is that of a hook"):
        outbox.on_failed("greet.failed")(note_failure)
    assert dict(outbox.hooks) == {"greet": "greet.failed"}
    outbox.on_failed("bill.failed")(note_failure)
    with pytest.raises(ConfigurationError, match=r"topic 'bill\.failed' has a hook"):
        outbox.on_failed("bill")(note_failure)


def test_a_topic_that_is_too_long_for_a_hook_is_refused(outbox: Outbox) -> None:
    outbox.on_failed("g" * 56)(note_failure)
    with pytest.raises(ConfigurationError, match=r"on_failed: topic 'h{57}': .* more than 63 characters"):
        outbox.on_failed("h" * 57)(note_failure)


def test_a_hook_needs_a_topic_and_the_arguments_of_a_handler(outbox: Outbox) -> None:
    with pytest.raises(ConfigurationError, match=r'on_failed: needs a topic, as in @outbox\.on_failed\("mail'):
        outbox.on_failed(note_failure)  # type: ignore[arg-type]

    async def wrong(message: Message[Failure]) -> None: ...

    with pytest.raises(ConfigurationError, match=r"of topic 'greet\.failed': must take two arguments"):
        outbox.on_failed("greet")(wrong)  # type: ignore[arg-type]


def test_a_topic_is_defined_before_its_hook(outbox: Outbox) -> None:
    outbox.on_failed("greet")(note_failure)
    with pytest.raises(ConfigurationError, match=r"topic 'greet' has a hook already: define the topic before it"):
        outbox.define(Topic("greet"))
    outbox.on_failed(Topic("bill", redact=("iban",)))(note_failure)
    assert outbox.topics["bill.failed"].redact == ("iban",)


def test_a_worker_refuses_a_hook_of_a_topic_that_it_does_not_handle(outbox: Outbox) -> None:
    outbox.on_failed("greet")(note_failure)
    with pytest.raises(ConfigurationError, match=r"topic 'greet' has a hook and no handler"):
        Worker(outbox)

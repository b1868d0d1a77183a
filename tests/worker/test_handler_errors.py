"""An exception of a handler: the log gets its traceback, the attempt its place, and neither gets secrets."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import pytest

from pgoutbox import Context, Message, Outbox, Permanent, RetryPolicy, Skip, SyncContext, Transient, Unavailable
from pgoutbox.cli.console import JsonFormatter, TextFormatter
from pgoutbox.observability.events import LogEvent
from pgoutbox.operations import Operator
from pgoutbox.worker import Worker
from pgoutbox.worker.handler_errors import RepeatedErrors
from tests.support.outbox_actions import attempts_of, enqueue, reports, row_of, settings_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psycopg

LATER = RetryPolicy.steps(3600)


def parse(text: str) -> object:
    """Fail in the standard library, below a frame of the application."""
    return json.loads(text)


def place_in(db: psycopg.Connection, message_id: int) -> str | None:
    """Return the place that the only attempt recorded."""
    _, (attempt,) = Operator(db).show_message(message_id)
    return attempt.error_place


def raised(records: Sequence[logging.LogRecord]) -> list[logging.LogRecord]:
    return [record for record in records if getattr(record, "event", None) == LogEvent.HANDLER_RAISED]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["async", "sync", "transactional"])
async def test_the_innermost_frame_of_the_application_is_stored_and_the_traceback_logged(
    outbox: Outbox, db: psycopg.Connection, kind: str
) -> None:
    if kind == "sync":

        @outbox.handler("greet", retry=LATER)
        def greet_in_thread(message: Message, ctx: SyncContext) -> None:
            parse("{password")

    else:

        @outbox.handler("greet", retry=LATER, transactional=kind == "transactional")
        async def greet(message: Message, ctx: Context) -> None:
            parse("{password")

    message_id = enqueue(db)
    with reports() as heard:
        await Worker(outbox).run_once()
    line = parse.__code__.co_firstlineno + 2
    assert place_in(db, message_id) == f"tests/worker/test_handler_errors.py:{line} parse"
    ((_, outcome, error),) = attempts_of(db, message_id)
    assert (outcome, str(error).partition(":")[0]) == ("retry", "JSONDecodeError")
    (record,) = raised(heard.records)
    assert (record.levelname, record.message_id, record.error_type) == ("WARNING", message_id, "JSONDecodeError")  # type: ignore[attr-defined]
    for text in (TextFormatter().format(record), json.loads(JsonFormatter().format(record))["exception"]):
        assert "Traceback (most recent call last)" in text
        assert f'test_handler_errors.py", line {line}, in parse' in text
    assert "JSONDecodeError: Expecting property name" in logging.Formatter("%(message)s").format(record)


async def test_a_repeated_exception_is_logged_once_a_minute_for_each_topic_and_place(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(dsn))

    async def fail(message: Message, ctx: Context) -> None:
        if message.payload == "elsewhere":
            raise ValueError(message.id)
        raise ValueError(message.id)

    outbox.handler("greet", retry=LATER)(fail)
    outbox.handler("other", retry=LATER)(fail)
    for topic, payload in (("greet", None), ("greet", "elsewhere"), ("other", None)):
        for _ in range(10):
            enqueue(db, topic, payload)
    worker = Worker(outbox)
    with reports() as heard:
        await worker.run_once()
    assert len(raised(heard.records)) == 3
    assert worker.telemetry.counts[LogEvent.HANDLER_RAISED] == 30


def test_the_next_record_has_the_number_of_omitted_ones() -> None:
    now = 0.0
    repeated = RepeatedErrors(lambda: now)
    assert [repeated.admit("greet", "ValueError", "a.py:1 f") for _ in range(3)] == [0, None, None]
    now += 60
    assert [repeated.admit("greet", "ValueError", "a.py:1 f") for _ in range(2)] == [2, None]
    for number in range(2_000):
        repeated.admit("greet", "ValueError", f"a.py:{number} f")
    assert len(repeated._logged_at) <= 1_000


async def test_secrets_in_the_text_of_an_exception_and_of_its_cause_are_redacted_in_the_log(
    outbox: Outbox, db: psycopg.Connection
) -> None:
    @outbox.handler("greet", retry=LATER)
    async def greet(message: Message, ctx: Context) -> None:
        secret = "geheim"
        try:
            raise KeyError(f"password={secret}")  # noqa: TRY301 - the cause of the next exception
        except KeyError as error:
            raise ValueError(f"token={secret}") from error

    enqueue(db)
    with reports() as heard:
        await Worker(outbox).run_once()
    (record,) = raised(heard.records)
    assert str(record.exc_text).count("(redacted)") >= 2
    assert "password=geheim" not in str(record.exc_text)
    assert "token=geheim" not in str(record.exc_text)


async def test_without_error_texts_only_type_place_and_frames_are_stored_and_logged(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(dsn, error_texts=False))
    address = "ann" + "@example.org"

    @outbox.handler("greet", retry=LATER)
    async def greet(message: Message, ctx: Context) -> None:
        try:
            raise KeyError(address)  # noqa: TRY301 - the cause of the next exception
        except KeyError as error:
            raise ValueError(f"no member {address}") from error

    message_id = enqueue(db)
    with reports() as heard:
        await Worker(outbox).run_once()
    assert attempts_of(db, message_id) == [(1, "retry", "ValueError")]
    assert str(place_in(db, message_id)).endswith(".greet")
    (record,) = raised(heard.records)
    text = str(record.exc_text)
    assert address not in text
    assert [line for line in text.splitlines() if line.endswith("Error")] == ["KeyError", "ValueError"]


@pytest.mark.parametrize("error", [ValueError("\x1b[2Jgone"), Transient("\x1b[2Jgone"), Skip("\x1b[2Jgone")])
async def test_control_characters_of_a_handlers_text_are_stored_printable(
    outbox: Outbox, db: psycopg.Connection, error: Exception
) -> None:
    @outbox.handler("greet", retry=LATER)
    async def greet(message: Message, ctx: Context) -> None:
        raise error

    message_id = enqueue(db)
    await Worker(outbox).run_once()
    row, _ = Operator(db).show_message(message_id)
    assert str(row.last_error or row.skip_reason).endswith("\\x1b[2Jgone")


async def test_an_outcome_that_a_handler_raises_is_not_reported_as_an_exception(
    outbox: Outbox, db: psycopg.Connection
) -> None:
    @outbox.handler("greet", retry=LATER)
    async def greet(message: Message, ctx: Context) -> None:
        raise Transient("busy")

    message_id = enqueue(db)
    with reports() as heard:
        await Worker(outbox).run_once()
    assert (raised(heard.records), place_in(db, message_id)) == ([], None)


async def test_the_exception_of_a_batch_is_logged_once(outbox: Outbox, db: psycopg.Connection) -> None:
    @outbox.batch_handler("greet", retry=LATER)
    async def greet(messages: Sequence[Message], contexts: Sequence[Context]) -> None:
        parse("{")

    ids = [enqueue(db) for _ in range(3)]
    with reports() as heard:
        await Worker(outbox).run_once()
    assert len(raised(heard.records)) == 1
    assert len({place_in(db, message_id) for message_id in ids}) == 1


@pytest.mark.parametrize("level", ["DEBUG", "INFO"])
async def test_start_and_end_of_attempts_are_logged_at_debug_only(
    outbox: Outbox, db: psycopg.Connection, level: str
) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    message_id = enqueue(db)
    with reports() as heard:
        logging.getLogger("pgoutbox").setLevel(level)
        logging.getLogger("pgoutbox.worker").setLevel(level)
        try:
            await Worker(outbox).run_once()
        finally:
            logging.getLogger("pgoutbox.worker").setLevel(logging.NOTSET)
    events = [event for event in heard.events if event.startswith("attempt_")]
    if level == "INFO":
        assert events == []
        return
    assert events == [LogEvent.ATTEMPT_STARTED, LogEvent.ATTEMPT_ENDED]
    (ended,) = [r for r, e in zip(heard.records, heard.events, strict=True) if e == LogEvent.ATTEMPT_ENDED]
    assert (ended.message_id, ended.outcome, ended.duration_seconds >= 0) == (message_id, "Sent", True)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("outcome", "event"),
    [
        (Permanent("password=canary is wrong"), LogEvent.FAILED),
        (Unavailable("password=canary is wrong"), LogEvent.SNOOZED),
    ],
)
async def test_the_report_of_a_failure_has_the_reason_that_is_stored(
    outbox: Outbox, db: psycopg.Connection, outcome: Permanent | Unavailable, event: LogEvent
) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> Permanent | Unavailable:
        return outcome

    message_id = enqueue(db)
    with reports() as heard:
        await Worker(outbox).run_once()
    warned = [record.__dict__ for record in heard.records if record.levelname == "WARNING"]
    (reason,) = [fields["reason"] for fields in warned if fields["event"] == event]
    assert "canary" not in reason
    assert reason == row_of(db, message_id).last_error

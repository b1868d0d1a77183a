"""Tests one trace from the enqueuing request to the hand-over: the propagated context, and the spans of attempts."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode
from psycopg.types.json import Jsonb
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from pgoutbox import Context, Email, Message, NewMessage, Outbox, RetryPolicy, SyncContext, Webhook
from pgoutbox.errors import ArgumentError
from pgoutbox.message import Permanent
from pgoutbox.observability.events import LogEvent
from pgoutbox.observability.measures import DATABASE_METRICS, WORKER_METRICS
from pgoutbox.worker import Worker
from tests.support.dialogues import HOST
from tests.support.outbox_actions import enqueue, row_of, running, settings_for
from tests.support.smtp_server import accepting_server
from tests.support.traces import Traces, ids_of, metered, points_of, traced
from tests.support.waiting import until
from tests.support.webhook_server import webhook_server

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

AT_ONCE = RetryPolicy.steps(0, jitter=0)
CANARY = "canary-5e1d"


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traces]:
    with traced(monkeypatch) as found:
        yield found


def headers_of(db: psycopg.Connection, message_id: int) -> dict[str, str]:
    ((headers,),) = db.execute("SELECT headers FROM pgoutbox.message WHERE id = %s", [message_id]).fetchall()
    return headers or {}


class Instrumented:
    """Instrument ASGI: a server span around each request."""

    def __init__(self, app: ASGIApp, traces: Traces) -> None:
        self._app = app
        self._tracer = traces.tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = f"{scope['method']} {scope['path']}"
        with self._tracer.start_as_current_span(name, kind=SpanKind.SERVER):
            await self._app(scope, receive, send)


async def call(app: ASGIApp, path: str) -> int:
    """POST to an ASGI application, and return the status of its response."""
    statuses = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(event: Any) -> None:  # noqa: ANN401 - as ASGI has it
        if event["type"] == "http.response.start":
            statuses.append(event["status"])

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "http_version": "1.1"}
    await app(scope, receive, send)
    return int(statuses[0])


async def test_one_trace_covers_the_request_the_transaction_and_the_smtp_server(
    dsn: str, db: psycopg.Connection, traces: Traces
) -> None:
    async with accepting_server() as inbox:
        settings = settings_for(
            dsn, smtp_host=HOST, smtp_port=inbox.port, smtp_security="none", smtp_sender="club@example.org"
        )
        outbox = Outbox(settings)

        @outbox.handler("mail.welcome")
        async def welcome(message: Message, ctx: Context) -> Email:
            with traces.tracer.start_as_current_span("render"):
                return Email(subject="Welcome", text="Good to have you.")

        async def sign_up(request: Request) -> PlainTextResponse:
            async with await psycopg.AsyncConnection.connect(dsn) as connection:
                with traces.tracer.start_as_current_span("business transaction"):
                    await connection.execute("CREATE TABLE member (email text)")
                    await connection.execute("INSERT INTO member VALUES (%s)", ["ada@example.org"])
                    await outbox.on(connection).enqueue("mail.welcome", None, destination="mailto:ada@example.org")
                    await connection.commit()
            return PlainTextResponse("welcome", status_code=201)

        app = Instrumented(Starlette(routes=[Route("/members", sign_up, methods=["POST"])]), traces)
        assert await call(app, "/members") == 201
        worker = Worker(outbox)
        async with running(worker):
            await until(lambda: worker.telemetry.counts[LogEvent.SENT])
        assert len(inbox.received) == 1
    assert traces.tree() == [
        "POST /members [SERVER]",
        "  business transaction [INTERNAL]",
        "    send mail.welcome [PRODUCER]",
        "      process mail.welcome [CONSUMER]",
        "        render [INTERNAL]",
        "        hand over smtp [CLIENT]",
    ]
    assert len({ids_of(span)[0] for span in traces.spans}) == 1
    (message_id,) = [row for (row,) in db.execute("SELECT id FROM pgoutbox.message").fetchall()]
    (send,) = traces.named("send mail.welcome")
    (process,) = traces.named("process mail.welcome")
    (hand_over,) = traces.named("hand over smtp")
    common = {
        "messaging.system": "pgoutbox",
        "messaging.destination.name": "mail.welcome",
        "messaging.message.id": str(message_id),
    }
    assert send.attributes == common | {"messaging.operation.name": "send", "messaging.operation.type": "send"}
    assert process.attributes == common | {
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.pgoutbox.queue": "default",
        "messaging.pgoutbox.attempt_count": 1,
        "messaging.pgoutbox.outcome": "sent",
    }
    assert hand_over.attributes == {
        "messaging.pgoutbox.scheme": "mailto",
        "messaging.pgoutbox.outcome": "sent",
        "network.protocol.name": "smtp",
        "server.address": HOST,
        "server.port": inbox.port,
    }


async def test_every_attempt_is_a_span_of_the_same_trace_with_its_outcome(
    dsn: str, db: psycopg.Connection, traces: Traces
) -> None:
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet", retry=AT_ONCE)
    async def greet(message: Message, ctx: Context) -> None:
        if message.attempt_count == 1:
            raise ValueError(CANARY)
        if message.attempt_count == 2:
            raise Permanent(CANARY)

    with psycopg.connect(dsn) as connection, traces.tracer.start_as_current_span("request"):
        outbox.on(connection).enqueue("greet", CANARY, destination=f"mailto:{CANARY}@example.org", dedupe_key=CANARY)
    await Worker(outbox).drain()
    attempts = traces.named("process greet")
    (sent,) = traces.named("send greet")
    assert [(span.attributes or {})["messaging.pgoutbox.outcome"] for span in attempts] == ["transient", "permanent"]
    assert [(span.attributes or {})["messaging.pgoutbox.attempt_count"] for span in attempts] == [1, 2]
    assert {span.status.status_code for span in attempts} == {StatusCode.ERROR}
    assert [span.parent and span.parent.span_id for span in attempts] == [ids_of(sent)[1]] * 2
    assert CANARY not in json.dumps([json.loads(span.to_json()) for span in traces.spans])


async def test_a_batch_is_linked_to_the_traces_of_all_its_messages(
    dsn: str, db: psycopg.Connection, traces: Traces
) -> None:
    outbox = Outbox(settings_for(dsn))

    @outbox.batch_handler("index")
    async def index(messages: Sequence[Message], contexts: Sequence[Context]) -> None: ...

    with psycopg.connect(dsn) as connection:
        for name in ("first", "second"):
            with traces.tracer.start_as_current_span(name):
                outbox.on(connection).enqueue("index", name)
        outbox.on(connection).enqueue("index", "untraced")
    with traces.tracer.start_as_current_span("the span that is current at the start of the worker"):
        await Worker(outbox).run_once()
    (batch,) = traces.named("process index")
    assert batch.parent is None
    assert (batch.attributes or {})["messaging.batch.message_count"] == 3
    origins = [ids_of(span)[1] for span in traces.named("send index")]
    assert [link.context.span_id for link in batch.links] == origins


@pytest.mark.parametrize("transactional", [False, True])
async def test_a_handler_in_a_thread_runs_within_the_span_of_its_attempt(
    dsn: str, db: psycopg.Connection, traces: Traces, transactional: bool
) -> None:
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet", transactional=transactional)
    def greet(message: Message, ctx: SyncContext) -> None:
        with traces.tracer.start_as_current_span("in the thread"):
            pass

    enqueue(db)
    await Worker(outbox).run_once()
    assert traces.tree() == ["process greet [CONSUMER]", "  in the thread [INTERNAL]"]


def test_bulk_and_fan_out_have_one_span_whose_context_all_messages_carry(
    dsn: str, db: psycopg.Connection, traces: Traces
) -> None:
    outbox = Outbox(settings_for(dsn))
    with psycopg.connect(dsn) as connection, traces.tracer.start_as_current_span("request"):
        many = outbox.on(connection).enqueue_many([NewMessage("greet", n) for n in range(3)])
        fanned = outbox.on(connection).enqueue_fanout("news", None, ["mailto:a@example.org", "mailto:b@example.org"])
    (bulk,) = traces.named("send")
    (fanout,) = traces.named("send news")
    assert (bulk.attributes or {})["messaging.batch.message_count"] == 3
    assert (fanout.attributes or {})["messaging.batch.message_count"] == 2
    for span, messages in ((bulk, many), (fanout, fanned)):
        span_id = f"{ids_of(span)[1]:016x}"
        assert {headers_of(db, message.id)["traceparent"].split("-")[2] for message in messages} == {span_id}


def test_headers_of_the_caller_are_kept_and_take_precedence(dsn: str, db: psycopg.Connection, traces: Traces) -> None:
    outbox = Outbox(settings_for(dsn))
    own = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}
    full = {f"h{n}": "x" for n in range(64)}
    with psycopg.connect(dsn) as connection, traces.tracer.start_as_current_span("request"):
        kept = outbox.on(connection).enqueue("greet", None, headers=own)
        crowded = outbox.on(connection).enqueue("greet", None, headers=full)
        beside = outbox.on(connection).enqueue("greet", None, headers={"a": "b"})
        with pytest.raises(ArgumentError, match="headers"):
            outbox.on(connection).enqueue("greet", None, headers="nonsense")  # type: ignore[call-overload]
    assert headers_of(db, kept.id) == own
    assert headers_of(db, crowded.id) == full
    assert headers_of(db, beside.id).keys() == {"a", "traceparent"}
    failed = traces.named("send greet")[-1]
    assert ((failed.attributes or {})["error.type"], failed.status.description) == ("ArgumentError", None)
    assert failed.events == (), "the text of an error may quote the payload"


@pytest.mark.parametrize("forbidden", [False, True])
def test_no_context_is_propagated_without_a_span_or_with_tracing_off(
    dsn: str, db: psycopg.Connection, traces: Traces, forbidden: bool
) -> None:
    outbox = Outbox(settings_for(dsn, otel_traces=not forbidden))
    with psycopg.connect(dsn) as connection:
        if forbidden:
            with traces.tracer.start_as_current_span("request"):
                enqueued = outbox.on(connection).enqueue("greet", None)
        else:
            enqueued = outbox.on(connection).enqueue("greet", None)
    assert headers_of(db, enqueued.id) == {}
    assert traces.named("send greet") == []


@pytest.mark.parametrize("traceparent", ["nonsense", 7, ["00"], None, "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
async def test_an_invalid_context_begins_a_new_trace(
    dsn: str, db: psycopg.Connection, traces: Traces, traceparent: object
) -> None:
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    message_id = enqueue(db)
    db.execute(
        "UPDATE pgoutbox.message SET headers = %s WHERE id = %s", [Jsonb({"traceparent": traceparent}), message_id]
    )
    await Worker(outbox).run_once()
    assert row_of(db, message_id).state == "sent"
    (span,) = traces.named("process greet")
    assert span.parent is None


async def test_a_cancelled_enqueue_leaves_the_callers_span_current(dsn: str, traces: Traces) -> None:
    outbox = Outbox(settings_for(dsn))
    async with (
        await psycopg.AsyncConnection.connect(dsn) as blocker,
        await psycopg.AsyncConnection.connect(dsn) as connection,
    ):
        await blocker.execute("LOCK TABLE pgoutbox.message IN ACCESS EXCLUSIVE MODE")
        with traces.tracer.start_as_current_span("request") as request:
            with pytest.raises(TimeoutError) as caught:
                async with asyncio.timeout(0.2):
                    await outbox.on(connection).enqueue("greet", None)
            # The caller still holds the error, and with it the frames that it passed.
            assert trace.get_current_span() is request, caught
        await connection.rollback()
    (span,) = traces.named("send greet")
    assert span.status.status_code is StatusCode.ERROR


def plain_webhooks_to(port: int) -> dict[str, object]:
    """Return settings that let webhooks reach a server on this machine."""
    return {"webhook_allow_http": True, "webhook_ports": str(port), "webhook_allowed_networks": "127.0.0.0/8"}


@pytest.mark.parametrize("asked", [True, False])
async def test_a_webhook_carries_the_trace_only_on_request(
    dsn: str, db: psycopg.Connection, traces: Traces, asked: bool
) -> None:
    async with webhook_server() as server:
        outbox = Outbox(settings_for(dsn, webhook_trace_context=asked, **plain_webhooks_to(server.port)))

        @outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> Webhook:
            return Webhook(body={"n": 1}, signed=False)

        enqueue(db, destination=server.url(scheme="http"))
        await Worker(outbox).run_once()
        (request,) = server.received
    (span,) = [span for span in traces.spans if span.kind is SpanKind.CLIENT]
    carried = request.headers.get("traceparent")
    if asked:
        assert carried is not None
        assert carried.split("-")[2] == f"{ids_of(span)[1]:016x}"
    else:
        assert carried is None


# --- metrics ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_applications_meters_get_the_same_metrics(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    enqueue(db)
    with metered(monkeypatch) as reader:
        worker = Worker(outbox)
        async with running(worker):
            await until(lambda: worker.telemetry.counts[LogEvent.SENT])
            await until(lambda: "pgoutbox.wait_seconds" in points_of(reader))
            points = points_of(reader)
        assert "pgoutbox.slots" not in points_of(reader), "a stopped worker still reports metrics"
    expected = {"topic": "greet", "queue": "default", "outcome": "sent"}
    assert points["pgoutbox.attempts"] == [(expected, 1)]
    assert points["pgoutbox.handler_seconds"] == [({"topic": "greet"}, 1)]
    assert points["pgoutbox.slots"] == [({}, 4)]
    assert points["pgoutbox.backlog_up"] == [({}, 1)]
    assert points.keys() <= {f"pgoutbox.{metric.name}" for metric in (*WORKER_METRICS, *DATABASE_METRICS)}


async def test_with_the_setting_off_there_are_no_metrics_and_no_traces(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, traces: Traces
) -> None:
    outbox = Outbox(settings_for(dsn, otel_metrics=False, otel_traces=False))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    enqueue(db)
    with metered(monkeypatch) as reader:
        worker = Worker(outbox)
        await worker.run_once()
        assert points_of(reader) == {}
    assert worker.telemetry.measures is None
    assert traces.spans == []

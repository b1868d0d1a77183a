"""OpenTelemetry: one trace from an HTTP request through the business transaction to the SMTP server, printed as a tree.

python -m examples.tracing
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import psycopg
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from pgoutbox import Context, Email, Message, Outbox, Worker

# A real application exports its spans by OTLP. This example keeps and prints them.
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
tracer = provider.get_tracer("club")

outbox = Outbox()
Event = MutableMapping[str, Any]


@outbox.handler("mail.welcome")
async def welcome(message: Message, ctx: Context) -> Email:
    """Render the e-mail. In production this runs in another process, but in the same trace."""
    await ctx.ensure_lease()
    with tracer.start_as_current_span("render the e-mail"):
        return Email(subject="Welcome", text=f"Good to have you in the club. (This is e-mail {message.id}.)")


async def app(scope: Event, _: Callable[[], Awaitable[Event]], send: Callable[[Event], Awaitable[None]]) -> None:
    """Handle a request (ASGI). In a real application an instrumentation library creates the server span."""
    with tracer.start_as_current_span(f"{scope['method']} {scope['path']}", kind=SpanKind.SERVER):
        await join("ada@example.org")
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"welcome"})


async def join(email: str) -> None:
    """Insert the member and enqueue the welcome, in one transaction."""
    async with await psycopg.AsyncConnection.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        with tracer.start_as_current_span("business transaction"):
            await connection.execute("CREATE TABLE IF NOT EXISTS member (email text PRIMARY KEY)")
            await connection.execute("INSERT INTO member (email) VALUES (%s) ON CONFLICT DO NOTHING", (email,))
            await outbox.on(connection).enqueue("mail.welcome", None, destination=f"mailto:{email}")
            await connection.commit()


async def request() -> None:
    """Call the application like a web server does for a POST."""

    async def receive() -> Event:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(event: Event) -> None:
        if event["type"] == "http.response.start":
            print("HTTP", event["status"])

    await app({"type": "http", "method": "POST", "path": "/members", "headers": []}, receive, send)


def tree(spans: Sequence[ReadableSpan], parent_id: int | None = None, depth: int = 0) -> list[str]:
    """Return one line for each span, indented below its parent."""
    lines: list[str] = []
    for span in sorted(spans, key=lambda span: span.start_time or 0):
        if (span.parent.span_id if span.parent else None) == parent_id:
            attributes = span.attributes or {}
            told = [attributes.get("messaging.pgoutbox.outcome"), attributes.get("server.address")]
            notes = "".join(f", {note}" for note in told if note)
            milliseconds = ((span.end_time or 0) - (span.start_time or 0)) / 1e6
            lines.append(f"{'  ' * depth}{span.name} ({span.kind.name.lower()}{notes}) {milliseconds:.1f} ms")
            context = span.get_span_context()
            lines += tree(spans, context.span_id if context else None, depth + 1)
    return lines


async def main() -> None:
    """Answer one request, deliver its message, and print the trace."""
    trace.set_tracer_provider(provider)
    await request()
    await Worker(outbox).run_once()
    print("\n".join(tree(exporter.get_finished_spans())))


if __name__ == "__main__":
    asyncio.run(main())

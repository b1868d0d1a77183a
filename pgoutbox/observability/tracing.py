"""Spans for OpenTelemetry, if the application configures it. Otherwise nothing is imported.

The trace of the enqueuing transaction travels in the headers `traceparent` and `tracestate` (W3C Trace Context). Every
attempt continues it, and webhooks can pass it on. Spans contain topic, queue, id and outcome, but never a destination,
a key, a payload or the text of an error.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Final, TypeVar

from pgoutbox.message import Permanent, Transient, Unavailable

if TYPE_CHECKING:
    from opentelemetry.context import Context as TraceContext
    from opentelemetry.trace import Span, Tracer
    from opentelemetry.util.types import AttributeValue

    from pgoutbox.message import Message, Outcome

E = TypeVar("E")

SYSTEM: Final = "pgoutbox"
_NAME_LENGTH: Final = 63
_OUTCOMES: Final = {
    "Postponed": "snooze",
    "RaisedPermanent": "permanent",
    "RaisedTransient": "transient",
    "SendFailure": "transient",
}
_FIELDS: Final = ("traceparent", "tracestate")
_NO_CONTEXT: Final[Mapping[str, str]] = {}


def _is_loaded() -> bool:
    # If the API was never imported, no span can be current and no provider can be set.
    return "opentelemetry.trace" in sys.modules


class Producing:
    """The enqueuing of messages. Without a span, `context` is empty and nothing is recorded."""

    def __init__(self, span: Span | None = None, context: Mapping[str, str] = _NO_CONTEXT) -> None:
        self._span = span
        self.context = context

    def wrote(self, ids: Sequence[int]) -> None:
        """Record the ids of the written messages."""
        if self._span is None:
            return
        if len(ids) == 1:
            self._span.set_attribute("messaging.message.id", str(ids[0]))
        else:
            self._span.set_attribute("messaging.batch.message_count", len(ids))


UNTRACED: Final = nullcontext(Producing())


def producing(topic: object) -> AbstractContextManager[Producing]:
    """Open a span of the caller's trace for enqueuing messages of a topic (None: of several), current within `with`.

    Without a current span in the calling context nothing is traced, and nothing is imported.
    """
    if not _is_loaded():
        return UNTRACED
    from opentelemetry import trace

    if not trace.get_current_span().get_span_context().is_valid:
        return UNTRACED
    # A topic that is not a text is refused later.
    return _producing(topic[:_NAME_LENGTH] if isinstance(topic, str) else None)


@contextmanager
def _producing(topic: str | None) -> Iterator[Producing]:
    from opentelemetry import trace

    span = trace.get_tracer(SYSTEM).start_span(
        _span_name("send", topic), kind=trace.SpanKind.PRODUCER, attributes=_attributes("send", topic)
    )
    with _current(span):
        yield Producing(span, current_context())


@contextmanager
def _current(span: Span) -> Iterator[None]:
    """Make the span current, and end it. An error marks it as failed, without its text."""
    from opentelemetry import trace

    with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        try:
            yield
        except BaseException as error:
            _mark_failed(span, type(error).__name__)
            raise


def current_context() -> Mapping[str, str]:
    """Return `traceparent` and `tracestate` of the current span; empty without one."""
    if not _is_loaded():
        return _NO_CONTEXT
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier


class Tracing:
    """The spans of one worker: one for each attempt, and within it one for each hand-over by a transport."""

    def __init__(self, tracer: Tracer) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def at_start(cls) -> Tracing | None:
        """Return an instance if the application has set a tracer provider, else None to save the costs."""
        if not _is_loaded():
            return None
        from opentelemetry import trace

        provider = trace.get_tracer_provider()
        if isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider)):
            return None
        return cls(provider.get_tracer(SYSTEM))

    async def attempt(
        self, messages: Sequence[Message[object]], run: Callable[[], Awaitable[Sequence[E]]]
    ) -> Sequence[E]:
        """Run an attempt in a span. A message continues its trace; a batch is linked to the traces of its messages."""
        span = self._start_attempt(messages)
        with _current(span):
            results = await run()
            if len(results) == 1:
                _record_outcome(span, results[0])
            elif any(isinstance(result, (Transient, Unavailable, Permanent)) for result in results):
                _mark_failed(span, "partial")
            return results

    def _start_attempt(self, messages: Sequence[Message[object]]) -> Span:
        from opentelemetry import trace
        from opentelemetry.context import Context as TraceContext

        first = messages[0]
        attributes = _attributes("process", first.topic) | {"messaging.pgoutbox.queue": first.queue}
        if len(messages) == 1:
            attributes["messaging.message.id"] = str(first.id)
            attributes["messaging.pgoutbox.attempt_count"] = first.attempt_count
            parent, links = self._context_of(first), []
        else:
            attributes["messaging.batch.message_count"] = len(messages)
            # Empty, so that a span that was current at the start of the worker is not the parent.
            parent = TraceContext()
            links = [
                trace.Link(origin, {"messaging.message.id": str(message.id)})
                for message in messages
                if (origin := trace.get_current_span(self._context_of(message)).get_span_context()).is_valid
            ]
        return self._tracer.start_span(
            _span_name("process", first.topic),
            context=parent,
            kind=trace.SpanKind.CONSUMER,
            attributes=attributes,
            links=links,
        )

    def _context_of(self, message: Message[object]) -> TraceContext:
        from opentelemetry.context import Context as TraceContext

        # The row may have been written by hand, with any value.
        carrier = {name: text for name in _FIELDS if isinstance(text := message.headers.get(name), str)}
        return self._propagator.extract(carrier, context=TraceContext())

    async def send(self, scheme: str, breaker_key: str | None, send: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """Send by a transport, in a span that names the server if the breaker's key contains it."""
        from opentelemetry import trace

        protocol, _, place = (breaker_key or scheme).partition(":")
        host, colon, port = place.rpartition(":")
        attributes: dict[str, AttributeValue] = {"messaging.pgoutbox.scheme": scheme, "network.protocol.name": protocol}
        if colon and port.isdecimal():
            attributes |= {"server.address": host, "server.port": int(port)}
        span = self._tracer.start_span(f"hand over {protocol}", kind=trace.SpanKind.CLIENT, attributes=attributes)
        with _current(span):
            outcome = await send()
            _record_outcome(span, outcome)
            return outcome


def _span_name(operation: str, topic: str | None) -> str:
    return operation if topic is None else f"{operation} {topic}"


def _attributes(operation: str, topic: str | None) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "messaging.system": SYSTEM,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
    }
    if topic is not None:
        attributes["messaging.destination.name"] = topic
    return attributes


def _record_outcome(span: Span, result: object) -> None:
    name = type(result).__name__
    outcome = _OUTCOMES.get(name, name.lower())
    span.set_attribute("messaging.pgoutbox.outcome", outcome)
    if isinstance(result, (Transient, Unavailable, Permanent)):
        _mark_failed(span, outcome)


def _mark_failed(span: Span, error_type: str) -> None:
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", error_type)
    span.set_status(StatusCode.ERROR)

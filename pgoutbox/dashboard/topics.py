"""The page of the topics, and the form with which operators enqueue a message by the definition of its topic."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any, Final

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from pgoutbox.catalogue import describe_topics, draft_message, example_payload, find_topic, open_options
from pgoutbox.dashboard import inputs, reads
from pgoutbox.dashboard.access import operators_only
from pgoutbox.dashboard.charts import depth_lines, ended_lines
from pgoutbox.dashboard.dashboard import Dashboard, dashboard_of, viewer_of
from pgoutbox.dashboard.database import Connection
from pgoutbox.dashboard.pages import Context, Load, show
from pgoutbox.dashboard.rendering import format_json, link, query, render_page
from pgoutbox.enqueue.calls import Enqueued
from pgoutbox.enqueue.payloads import from_json
from pgoutbox.errors import ArgumentError, ConfigurationError, DedupeConflictError, UnknownTopicError
from pgoutbox.operations import FailureGroup, Operator
from pgoutbox.options import MAX_DESTINATION_BYTES
from pgoutbox.outbox import Outbox
from pgoutbox.topics import Topic

_MAX_GROUPS: Final = 20
_TEXT_OPTIONS: Final = ("destination", "owner", "coalesce_key", "dedupe_key", "ordering_key", "fair_key")
_FIELDS: Final = ("payload", *_TEXT_OPTIONS, "delay", "unit")


async def topics(request: Request) -> Response:
    """List the topics of the application and those with messages, or show only the requested one."""
    asked = inputs.text_of(request.query_params, "topic")
    return await show(request, "topics.html" if asked is None else "topic.html", _topics)


def _topics(request: Request) -> Load:
    asked = inputs.text_of(request.query_params, "topic")
    start = inputs.text_of(request.query_params, "start") or ""
    return partial(_load_topics, dashboard_of(request), asked, start)


def _load_topics(dashboard: Dashboard, asked: str | None, start: str, connection: Connection) -> Context:
    outbox = dashboard.outbox
    found, nothing = dashboard.topics(connection)
    known = {} if outbox is None else {facts.topic: facts for facts in describe_topics(outbox)}

    def rank(name: str) -> tuple[bool, bool, bool]:
        # Topics with due or failed messages need attention first: topics whose messages were all sent can fill a page.
        row = found.get(name)
        needs_a_look = row is not None and bool(row["due"].messages or row["failed"].messages)
        return not needs_a_look, row is None, name in known and known[name].handler is not None

    flow = dashboard.history.flow(connection, now := reads.now(connection), "topic", reads.DEPTH_CAP)
    names = {*known, *found, *chain.from_iterable(flow.ended.values())}
    begun = [asked] if asked is not None else sorted(name for name in names if name.startswith(start))
    rows = [found.get(name, nothing | {"topic": name}) for name in sorted(begun, key=rank)[: reads.PAGE_ROWS]]
    shown = [row["topic"] for row in rows]
    return {
        "has_outbox": outbox is not None,
        "problems": () if asked is None else dashboard.findings_about(connection, "topic", asked),
        "start": start,
        "asked": asked,
        "most_groups": _MAX_GROUPS,
        "topics": [(row, known.get(row["topic"])) for row in rows],
        "topic_count": len(begun),
        "rates": reads.rates(connection, "topic", shown),
        "lines": ended_lines(now, flow.ended, shown),
        "depths": depth_lines(now, flow, {row["topic"]: row["waiting"] + row["in_flight"] for row in rows}),
        "messages": {message.id: message for message in dashboard.redacted(reads.of_topics(connection, rows))},
        "pauses": {pause.topic: pause for pause in Operator(connection).list_paused_topics()},
        "groups": () if asked is None else _failures_of(connection, dashboard, rows[0]),
    }


def _failures_of(connection: Connection, dashboard: Dashboard, row: reads.Row) -> list[FailureGroup]:
    # Of more failures than were counted, a search for those of one topic could read millions of others.
    is_few = row["failed"].kind == "exactly"
    found = Operator(connection).list_failures(topic=row["topic"] if is_few else None, newest=reads.GROUP_ROWS)
    return dashboard.redacted([group for group in found if group.topic == row["topic"]][:_MAX_GROUPS])


@operators_only
async def enqueue_form(request: Request) -> Response:
    """Show the form for the topic of the query string, or a choice of topics."""
    outbox = dashboard_of(request).outbox
    name = inputs.text_of(request.query_params, "topic")
    if outbox is None or name is None:
        return await _show(request, outbox)
    try:
        topic = find_topic(outbox, name)
    except (ArgumentError, UnknownTopicError) as error:
        return await _show(request, outbox, error=_error_of(error), status=404)
    return await _show(request, outbox, topic, {"payload": format_json(example_payload(topic))})


@operators_only
async def enqueue(request: Request) -> Response:
    """Enqueue a message and show it; or show the form again with its input and the error."""
    outbox = dashboard_of(request).outbox
    if outbox is None:
        return await _show(request, None, status=409)
    form = await inputs.read_form(request)
    values = {name: form.get(name, "") for name in _FIELDS}
    topic = None
    try:
        topic = find_topic(outbox, form.get("topic", "").strip())
        enqueued = await _enqueue(request, outbox, topic, form)
    except (ArgumentError, UnknownTopicError, DedupeConflictError, ConfigurationError) as error:
        return await _show(request, outbox, topic, values, error=_error_of(error), status=422)
    path = link(request, "message", message_id=enqueued.id)
    return RedirectResponse(path + query(done="duplicate" if enqueued.duplicate else "enqueued"), status_code=303)


async def _enqueue(request: Request, outbox: Outbox, topic: Topic[Any], form: inputs.Given) -> Enqueued:
    options: dict[str, Any] = {
        name: inputs.text_of(form, name, at_most=MAX_DESTINATION_BYTES) for name in _TEXT_OPTIONS
    }
    options["delay"] = inputs.duration_of(form, "delay", at_least=0, unit="seconds")
    # A lone surrogate is refused like any other invalid text.
    payload = from_json(form.get("payload", "").encode("utf-8", "surrogatepass"), "payload")

    # The definition is the application's code, which may block.
    drafted = await anyio.to_thread.run_sync(partial(draft_message, outbox, topic, payload, **options))
    return await dashboard_of(request).database.act(viewer_of(request), lambda operator: operator.enqueue(drafted))


def _error_of(error: Exception) -> dict[str, str | None]:
    """Return the field of the form and the text of an error."""
    field = re.split(r"[.\[]", error.field)[0] if isinstance(error, ArgumentError) else None
    return {"field": field, "text": str(error)}


async def _show(
    request: Request,
    outbox: Outbox | None,
    topic: Topic[Any] | None = None,
    values: Mapping[str, str] | None = None,
    *,
    error: Mapping[str, str | None] | None = None,
    status: int = 200,
) -> Response:
    known = [] if outbox is None else describe_topics(outbox)
    context = {
        "has_outbox": outbox is not None,
        "names": [facts.topic for facts in known],
        "facts": None if topic is None else next(facts for facts in known if facts.topic == topic.name),
        "open": () if topic is None else open_options(topic),
        "values": dict.fromkeys(_FIELDS, "") | {"unit": "minutes"} | dict(values or {}),
        "error": error,
    }
    return await render_page(request, "enqueue.html", context, status=status)


ROUTES: Final = [
    Route("/topics", topics, name="topics"),
    Route("/enqueue", enqueue_form, name="enqueue_form", methods=["GET"]),
    Route("/enqueue", enqueue, name="enqueue", methods=["POST"]),
]

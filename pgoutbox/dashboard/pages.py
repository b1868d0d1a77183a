"""The pages: each parses its parameters, then reads the database in one transaction, for a template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from starlette.authentication import requires
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pgoutbox.dashboard import charts, inputs, reads
from pgoutbox.dashboard.access import is_live
from pgoutbox.dashboard.bulk import MAX_MESSAGES
from pgoutbox.dashboard.dashboard import dashboard_of, viewer_of
from pgoutbox.dashboard.database import Connection, RefusedError
from pgoutbox.dashboard.history import percentiles
from pgoutbox.dashboard.rendering import link, render_page
from pgoutbox.doctor import verdict
from pgoutbox.message import State
from pgoutbox.operations import Action, Operator
from pgoutbox.operations.acts import ACTS
from pgoutbox.operations.operator import FAIR_COUNTS
from pgoutbox.options import check_name
from pgoutbox.redaction import redact_text

_PREVIEW: Final = 10
# The queues on the overview.
_QUEUES: Final = 10
_MORE_FIELDS: Final = ("destination", "owner", "key", "created_from", "created_before")
_SHARES: Final = (0.5, 0.95, 0.99)

Context: TypeAlias = Mapping[str, object]
Load: TypeAlias = Callable[[Connection], Context]
Parse: TypeAlias = Callable[[Request], Load]
"""Parses the parameters of a request, and returns the function that reads the database for them."""

ROUTES: Final[list[Route]] = []


async def show(request: Request, template: str, parse: Parse, *, status: int = 200, **more: object) -> Response:
    """Render a template with `more` and the data that a page loads, in one transaction with the database's time."""
    load = parse(request)
    known = await dashboard_of(request).database.read(
        lambda connection: {"now": reads.now(connection), **load(connection)}
    )
    return await render_page(request, template, {**known, **more}, status=status)


def _page(path: str, *roles: str) -> Callable[[Parse], Parse]:
    """Show the template of the name of the function at this path, to everybody or to these roles."""

    def register(parse: Parse) -> Parse:
        async def answer(request: Request) -> Response:
            return await show(request, f"{parse.__name__}.html", parse)

        ROUTES.append(Route(path, requires(roles)(answer), name=parse.__name__, methods=["GET"]))
        return parse

    return register


async def overview(request: Request) -> Response:
    """Show the overview."""
    dashboard = dashboard_of(request)
    asked = inputs.range_of(request.query_params)

    def load(connection: Connection) -> Context:
        now, ranked = reads.now(connection), dashboard.ranked_queues(connection, seconds=0)
        problems, workers = dashboard.findings(connection), reads.running_workers(connection)
        sent = dashboard.history.sent(connection, now, asked)
        counts = {at: slot.total() for at, slot in sent.items()}
        failed = reads.failed_by_time(connection, asked, now)
        return {
            "now": now,
            "asked_range": asked.name,
            "problems": problems,
            "verdict": redact_text(verdict(problems), dashboard.names_of(None)),
            "states": reads.count_states(connection),
            "queues": reads.queues(connection, [row.queue for row in ranked[:_QUEUES]], reads.QUEUE_CAP),
            "queue_count": len(ranked),
            "oldest_due_at": ranked[0].oldest_due_at if ranked else None,
            "workers": workers,
            "breaker_count": reads.count_breakers(connection),
            "failures": charts.failures_by_topic(connection, now),
            "sent_chart": charts.messages_by_time(asked, now, counts, State.SENT),
            "failed_chart": charts.messages_by_time(asked, now, failed, State.FAILED),
            "latency_chart": charts.latency(asked, now, sent),
            "marks": charts.marks_of(asked, now, connection),
            "percentiles": list(zip(_SHARES, percentiles(sent.values(), _SHARES), strict=True)),
        }

    return await render_page(request, "overview.html", await dashboard.fresh(asked.name, load))


async def messages(request: Request) -> Response:
    """List the newest messages that match a filter, or go to the one with the given id."""
    message_id = inputs.number_of(request.query_params, "id")
    if message_id is not None:
        return RedirectResponse(link(request, "message", message_id=message_id), status_code=303)
    return await show(request, "messages.html", _messages)


def _messages(request: Request) -> Load:
    given, dashboard = request.query_params, dashboard_of(request)
    which = inputs.filter_of(given)
    limit, before_id = inputs.limit_of(given), inputs.number_of(given, "before")

    def load(connection: Connection) -> Context:
        found = reads.search(
            connection,
            which,
            before_id=before_id,
            limit=limit,
            # A live refresh searches only the newest rows, because it runs often.
            is_brief=is_live(request),
            # An act on all matches does not know these names, so an operator sees all matches.
            names_of=dashboard.names_of if viewer_of(request).role == "viewer" else None,
        )
        is_about = which.destination is not None and not (which.states or which.text) and before_id is None
        asked = inputs.asked_for(which)
        return {
            "found": found,
            "messages": dashboard.redacted(found.messages),
            "near": reads.count_near(connection, which) if is_about else None,
            "tabs": dashboard.tabs(connection, which),
            "facets": dashboard.facets(connection, which),
            "which": which,
            "asked": asked,
            "filtered": [name for name, value in asked.items() if value is not None and name not in ("state", "due")],
            "has_more": any(asked.get(name) is not None for name in _MORE_FIELDS),
            "limit": limit,
            "before_id": before_id,
            "bulk_acts": [act for act in ACTS.values() if act.in_lists and set(which.states) <= set(act.states)],
        }

    return load


@_page("/messages/{message_id}")
def message(request: Request) -> Load:
    """Show one message."""
    message_id, dashboard = inputs.message_id_of(request), dashboard_of(request)
    # The login of the dashboard may read the tables, but a viewer sees no more than the views show.
    may_see_values = viewer_of(request).role == "operator"

    def load(connection: Connection) -> Context:
        operator = Operator(connection)
        details, attempts = operator.show_message(message_id, with_values=may_see_values)
        names = dashboard.names_of(details.topic)
        acts = reads.acts_on(connection, message_id)
        return {
            "message": details.redacted(names),
            "acts_here": [act for act in ACTS.values() if details.state in act.states],
            "corrects": operator.corrects(),
            "attempts": [attempt.redacted(names) for attempt in attempts],
            "acts": None if acts is None else dashboard.redacted(acts),
            "supersedes": reads.superseded_by(connection, message_id) if details.coalesce_key is not None else [],
            "has_values": may_see_values and operator.reads_payloads(),
        }

    return load


async def queues(request: Request) -> Response:
    """Show the queues with their backlog and limits, or only the requested queue, even if it is unused."""
    if inputs.text_of(request.query_params, "queue") is not None:
        return await show(request, "queue.html", _queue)
    return await show(request, "queues.html", _queues)


def _queues(request: Request) -> Load:
    prefix, dashboard = inputs.text_of(request.query_params, "start", at_most=63), dashboard_of(request)

    def load(connection: Connection) -> Context:
        ranked = (
            reads.rank_queues(connection, prefix=prefix) if prefix else dashboard.ranked_queues(connection, seconds=0)
        )
        names = [row.queue for row in ranked[: reads.PAGE_ROWS]]
        flow = dashboard.history.flow(connection, now := reads.now(connection), "queue", reads.DEPTH_CAP)
        found = reads.queues(connection, names, reads.QUEUE_CAP)
        return {
            "prefix": prefix,
            "queues": found,
            "total": len(ranked),
            "lines": charts.ended_lines(now, flow.ended, names),
            "depths": charts.depth_lines(now, flow, {row["queue"]: reads.depth_of(row) for row in found}),
        }

    return load


def _queue(request: Request) -> Load:
    given, dashboard = request.query_params, dashboard_of(request)
    name, asked = check_name("queue", inputs.text_of(given, "queue")), inputs.range_of(given)

    def load(connection: Connection) -> Context:
        (found,) = reads.queues(connection, [name], reads.CAP)
        known = dashboard.history.depth(connection, now := reads.now(connection), asked, name, reads.DEPTH_CAP)
        return {
            "asked": name,
            "asked_range": asked.name,
            "problems": dashboard.findings_about(connection, "queue", name),
            "q": found,
            "is_unused": not reads.is_used(connection, found),
            "has_fair_keys": reads.has_fair_keys(connection, name),
            "depth": charts.depth(asked, now, known),
        }

    return load


@_page("/queues/{queue}/keys")
def keys(request: Request) -> Load:
    """Show the fair keys of a queue that wait longest, or those that begin with a text."""
    queue = inputs.name_of(request, "queue")
    start = inputs.key_of(request.query_params, "start")
    return lambda connection: {
        "asked": queue,
        "start": start,
        "found": Operator(connection).list_fair_keys(queue, prefix=start, limit=reads.PAGE_ROWS),
        "most_keys": FAIR_COUNTS["keys"],
    }


@_page("/workers")
def workers(request: Request) -> Load:  # noqa: ARG001 - every page gets it
    """Show the workers and their messages in flight."""
    return lambda connection: {
        "workers": reads.running_workers(connection),
        "running": reads.running_messages(connection),
    }


@_page("/schedules")
def schedules(request: Request) -> Load:
    """Show the schedules that come next, with their next times, or those whose names have this start."""
    start = inputs.text_of(request.query_params, "start", at_most=63) or ""
    return lambda connection: {
        "start": start,
        "schedules": Operator(connection).list_schedules(prefix=start, limit=reads.MAX_SCHEDULES),
    }


@_page("/breakers")
def breakers(request: Request) -> Load:
    """Show the open circuit breakers and the messages that wait for each."""
    return lambda connection: {"breakers": reads.breakers(connection, dashboard_of(request).names_of(None))}


@_page("/failed")
def failed(request: Request) -> Load:
    """Show the failed messages by topic and error."""
    dashboard = dashboard_of(request)

    def load(connection: Connection) -> Context:
        groups = Operator(connection).list_failures(newest=reads.GROUP_ROWS, limit=reads.MAX_GROUPS)
        return {
            "groups": dashboard.redacted(groups),
            "has_more": sum(group.messages for group in groups) >= reads.GROUP_ROWS or len(groups) >= reads.MAX_GROUPS,
            "retrying": next(tab for tab in dashboard.tabs(connection) if tab.due == "again"),
        }

    return load


@_page("/audit")
def audit(request: Request) -> Load:
    """List the acts of operators."""
    given = request.query_params
    limit, before_id = inputs.limit_of(given), inputs.number_of(given, "before")
    actor, action = inputs.text_of(given, "actor"), inputs.choice_of(given, "action", [*Action])

    def load(connection: Connection) -> Context:
        operator = Operator(connection)
        if not operator.reads_audit():
            raise RefusedError("read the audit", "pgoutbox_operator")
        kind = None if action is None else Action(action)
        found = operator.list_acts(actor=actor, action=kind, before_id=before_id, limit=limit + 1)
        return {
            "acts": dashboard_of(request).redacted(found[:limit]),
            "next_before": found[limit - 1].id if len(found) > limit else None,
            "actions": list(Action),
            "actor": actor,
            "action": action,
            "limit": limit,
            "before_id": before_id,
            "asked": {"actor": actor, "action": action},
        }

    return load


@_page("/bulk", "operator")
def bulk_preview(request: Request) -> Load:
    """Preview a bulk action: the number of messages, and the newest ones."""
    given, dashboard = request.query_params, dashboard_of(request)
    act = inputs.act_of(given)
    which = inputs.filter_of(given).limited_to(act.name)

    def load(connection: Connection) -> Context:
        near = reads.count_near(connection, which)
        found = reads.listed(connection, near.ids if which.ids is not None else near.ids[:_PREVIEW])
        cause = reads.cause_of(connection, found[0].id) if found and which.error_group is not None else None
        return {
            "near": near,
            "messages": dashboard.redacted(found),
            "cause": None if cause is None else redact_text(cause, dashboard.names_of(which.topic)),
            "act": act,
            "asked": inputs.asked_for(which),
            "most": MAX_MESSAGES,
            "running": [bulk for bulk in dashboard.bulks.latest() if bulk.is_running],
        }

    return load


async def bulk(request: Request) -> Response:
    """Show the progress of a bulk action."""
    found = dashboard_of(request).bulks.find(request.path_params["bulk_id"])
    context = {"bulk": found, "asked": inputs.asked_for(found.which), "most": MAX_MESSAGES}
    return await render_page(request, "bulk.html", context)


async def live(request: Request) -> ASGIApp:
    """Stream the changes."""
    return dashboard_of(request).feed.stream(viewer_of(request))


ROUTES.extend(
    [
        Route("/", overview, name="overview"),
        Route("/messages", messages, name="messages"),
        Route("/queues", queues, name="queues"),
        Route("/bulk/{bulk_id}", bulk, name="bulk"),
        Route("/live", live, name="live"),
    ]
)

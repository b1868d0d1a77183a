"""The pages: each parses its parameters, reads the database in one transaction and renders a template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pgoutbox.dashboard import charts, inputs, reads
from pgoutbox.dashboard.access import is_live, operators_only
from pgoutbox.dashboard.bulk import MAX_MESSAGES
from pgoutbox.dashboard.dashboard import dashboard_of, viewer_of
from pgoutbox.dashboard.database import Connection, RefusedError
from pgoutbox.dashboard.history import percentiles
from pgoutbox.dashboard.rendering import link, render_page
from pgoutbox.dashboard.tabs import tabs_of
from pgoutbox.doctor import verdict
from pgoutbox.message import State
from pgoutbox.operations import Action, Operator
from pgoutbox.operations.acts import ACTS
from pgoutbox.options import check_name
from pgoutbox.redaction import redact_text

_PREVIEW: Final = 10
# The queues on the overview.
_QUEUES: Final = 10
_MORE_FIELDS: Final = ("destination", "owner", "key", "created_from", "created_before")
_SHARES: Final = (0.5, 0.95, 0.99)


async def _show(
    request: Request,
    template: str,
    load: Callable[[Connection], Mapping[str, object]],
    *,
    status: int = 200,
    **context: object,
) -> Response:
    """Render a page with what it reads, in one transaction with the time of the database."""
    known = await dashboard_of(request).database.read(
        lambda connection: {"now": reads.now(connection), **load(connection)}
    )
    return await render_page(request, template, {**context, **known}, status=status)


async def overview(request: Request) -> Response:
    """Show the overview."""
    dashboard = dashboard_of(request)
    asked = inputs.range_of(request.query_params)

    def load(connection: Connection) -> dict[str, object]:
        now, ranked = reads.now(connection), dashboard.ranked_queues(connection, seconds=0)
        problems, workers = dashboard.findings(connection), reads.running_workers(connection)
        sent = dashboard.history.sent(connection, now, asked)
        counts = {at: slot.total() for at, slot in sent.items()}
        failed = reads.failed_by_time(connection, asked, now)
        return {
            "now": now,
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
            "latency_chart": charts.latency(asked, now, sent, 0.95),
            "marks": charts.marks_of(asked, now, workers),
            "percentiles": list(zip(_SHARES, percentiles(sent.values(), _SHARES), strict=True)),
        }

    known = await dashboard.shared(asked.name, load)
    return await render_page(request, "overview.html", {"asked_range": asked.name, **known})


async def messages(request: Request) -> Response:
    """List the newest messages that match a filter."""
    given = request.query_params
    message_id = inputs.number_of(given, "id")
    if message_id is not None:
        return RedirectResponse(link(request, "message", message_id=message_id), status_code=303)
    which = inputs.filter_of(given)
    limit, before_id = inputs.limit_of(given), inputs.number_of(given, "before")
    dashboard = dashboard_of(request)
    # An act on all matches does not know these names, so an operator sees all matches.
    names_of = dashboard.names_of if viewer_of(request).role == "viewer" else None

    def load(connection: Connection) -> dict[str, object]:
        # A live refresh searches only the newest rows, because it runs often.
        found = reads.search(
            connection, which, before_id=before_id, limit=limit, is_brief=is_live(request), names_of=names_of
        )
        is_about = which.destination is not None and not (which.states or which.text) and before_id is None
        near = reads.count_near(connection, which) if is_about else None
        return {"found": found, "messages": dashboard.redacted(found.messages), "near": near}

    asked = inputs.asked_for(which)
    return await _show(
        request,
        "messages.html",
        load,
        tabs=tabs_of(await dashboard.tabs(), which),
        facets=await dashboard.facets(which),
        which=which,
        asked=asked,
        filtered=[name for name, value in asked.items() if value is not None and name not in ("state", "due")],
        has_more=any(asked.get(name) is not None for name in _MORE_FIELDS),
        limit=limit,
        before_id=before_id,
        bulk_acts=[act for act in ACTS.values() if act.in_lists and set(which.states) <= set(act.states)],
    )


async def message(request: Request) -> Response:
    """Show one message."""
    return await show_message(request, inputs.message_id_of(request))


async def show_message(request: Request, message_id: int, *, refusal: str | None = None) -> Response:
    """Render the page of one message, with a reason if an action was refused."""
    dashboard = dashboard_of(request)
    # The login of the dashboard may read the tables, but a viewer sees no more than the views show.
    may_see_values = viewer_of(request).role == "operator"

    def load(connection: Connection) -> dict[str, object]:
        operator = Operator(connection)
        details, attempts = operator.show_message(message_id, with_values=may_see_values)
        names = dashboard.names_of(details.topic)
        acts = reads.acts_on(connection, message_id)
        supersedes = reads.superseded_by(connection, message_id) if details.coalesce_key is not None else []
        return {
            "message": details.redacted(names),
            "acts_here": [act for act in ACTS.values() if details.state in act.states],
            "corrects": operator.corrects(),
            "attempts": [attempt.redacted(names) for attempt in attempts],
            "acts": None if acts is None else dashboard.redacted(acts),
            "supersedes": supersedes,
            "has_values": may_see_values and operator.reads_payloads(),
        }

    status = 200 if refusal is None else 409
    return await _show(request, "message.html", load, status=status, refusal=refusal)


async def queues(request: Request) -> Response:
    """Show the queues with their backlog and limits, or only the requested queue, even if it is unused."""
    given = request.query_params
    asked, prefix = inputs.text_of(given, "queue"), inputs.text_of(given, "start", at_most=63)
    dashboard = dashboard_of(request)

    def load(connection: Connection) -> dict[str, object]:
        ranked = (
            reads.rank_queues(connection, prefix=prefix) if prefix else dashboard.ranked_queues(connection, seconds=0)
        )
        names = [row.queue for row in ranked[: reads.PAGE_ROWS]]
        found = reads.queues(connection, names, reads.QUEUE_CAP)
        ended = dashboard.history.ended(connection, now := reads.now(connection), "queue")
        return {"queues": found, "total": len(ranked), "lines": charts.ended_lines(now, ended, names)}

    if asked is not None:
        return await _queue(request, check_name("queue", asked))
    return await _show(request, "queues.html", load, prefix=prefix)


async def _queue(request: Request, name: str) -> Response:
    asked = inputs.range_of(request.query_params)

    def load(connection: Connection) -> dict[str, object]:
        now = reads.now(connection)
        (found,) = reads.queues(connection, [name], reads.CAP)
        is_unused = not reads.is_used(connection, found)
        known = dashboard_of(request).history.depth(connection, now, asked, name, reads.DEPTH_CAP)
        return {"q": found, "is_unused": is_unused, "depth": charts.depth(asked, now, known)}

    return await _show(
        request,
        "queue.html",
        load,
        problems=await dashboard_of(request).findings_about("queue", name),
        asked=name,
        asked_range=asked.name,
    )


async def workers(request: Request) -> Response:
    """Show the workers and their messages in flight."""

    def load(connection: Connection) -> dict[str, object]:
        return {"workers": reads.running_workers(connection), "running": reads.running_messages(connection)}

    return await _show(request, "workers.html", load)


async def breakers(request: Request) -> Response:
    """Show the open circuit breakers and the messages that wait for each."""
    hidden = dashboard_of(request).names_of(None)

    def load(connection: Connection) -> dict[str, object]:
        return {"breakers": reads.breakers(connection, hidden)}

    return await _show(request, "breakers.html", load)


async def failed(request: Request) -> Response:
    """Show the failed messages by topic and error."""
    dashboard = dashboard_of(request)

    def load(connection: Connection) -> dict[str, object]:
        groups = Operator(connection).list_failures(newest=reads.GROUP_ROWS, limit=reads.MAX_GROUPS)
        return {
            "groups": dashboard.redacted(groups),
            "has_more": sum(group.messages for group in groups) >= reads.GROUP_ROWS or len(groups) >= reads.MAX_GROUPS,
        }

    retrying = next(tab for tab in await dashboard.tabs() if tab.due == "again")
    return await _show(request, "failed.html", load, retrying=retrying)


async def audit(request: Request) -> Response:
    """List the acts of operators."""
    given = request.query_params
    limit, before_id = inputs.limit_of(given), inputs.number_of(given, "before")
    actor, action = inputs.text_of(given, "actor"), inputs.choice_of(given, "action", [*Action])
    dashboard = dashboard_of(request)

    def load(connection: Connection) -> dict[str, object]:
        operator = Operator(connection)
        if not operator.reads_audit():
            raise RefusedError("read the audit", "pgoutbox_operator")
        kind = None if action is None else Action(action)
        found = operator.list_acts(actor=actor, action=kind, before_id=before_id, limit=limit + 1)
        next_before = found[limit - 1].id if len(found) > limit else None
        return {"acts": dashboard.redacted(found[:limit]), "next_before": next_before}

    return await _show(
        request,
        "audit.html",
        load,
        actions=list(Action),
        actor=actor,
        action=action,
        limit=limit,
        before_id=before_id,
        asked={"actor": actor, "action": action},
    )


@operators_only
async def bulk_preview(request: Request) -> Response:
    """Preview a bulk action: the number of messages, and the newest ones."""
    given = request.query_params
    act = inputs.act_of(given)
    which = inputs.filter_of(given).limited_to(act.name)
    dashboard = dashboard_of(request)

    def load(connection: Connection) -> dict[str, object]:
        near = reads.count_near(connection, which)
        shown = near.matching if which.ids is not None else min(near.matching, _PREVIEW)
        found = reads.search(connection, which, limit=shown).messages if near.matching else []
        cause = reads.cause_of(connection, found[0].id) if found and which.error_group is not None else None
        hidden = dashboard.names_of(which.topic)
        return {
            "near": near,
            "messages": dashboard.redacted(found),
            "cause": None if cause is None else redact_text(cause, hidden),
        }

    return await _show(
        request,
        "bulk_preview.html",
        load,
        act=act,
        asked=inputs.asked_for(which),
        most=MAX_MESSAGES,
        running=[bulk for bulk in dashboard.bulks.latest() if bulk.is_running],
    )


async def bulk(request: Request) -> Response:
    """Show the progress of a bulk action."""
    found = dashboard_of(request).bulks.find(request.path_params["bulk_id"])
    is_own = viewer_of(request).role == "operator"
    context = {
        "bulk": found,
        "results": sorted(found.results.items()),
        "asked": inputs.asked_for(found.which),
        "may_stop": is_own and found.is_running,
        "most": MAX_MESSAGES,
    }
    return await render_page(request, "bulk.html", context)


async def live(request: Request) -> ASGIApp:
    """Stream the changes."""
    return dashboard_of(request).feed.stream(viewer_of(request))


ROUTES: Final = [
    Route("/", overview, name="overview"),
    Route("/messages", messages, name="messages"),
    Route("/messages/{message_id}", message, name="message"),
    Route("/queues", queues, name="queues"),
    Route("/workers", workers, name="workers"),
    Route("/breakers", breakers, name="breakers"),
    Route("/failed", failed, name="failed"),
    Route("/audit", audit, name="audit"),
    Route("/bulk", bulk_preview, name="bulk_preview", methods=["GET"]),
    Route("/bulk/{bulk_id}", bulk, name="bulk"),
    Route("/live", live, name="live"),
]

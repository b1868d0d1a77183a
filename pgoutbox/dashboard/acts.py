"""The actions of operators: each form calls a function of `operations`, which records the viewer in the audit.

An action redirects to the page with its result, so a reload does not repeat the action.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Literal, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from pgoutbox.catalogue import correct_message
from pgoutbox.dashboard import inputs
from pgoutbox.dashboard.access import operators_only
from pgoutbox.dashboard.dashboard import dashboard_of, viewer_of
from pgoutbox.dashboard.pages import message, schedules, show
from pgoutbox.dashboard.rendering import link, query
from pgoutbox.dashboard.responses import sentence
from pgoutbox.errors import ArgumentError, MessageNotFoundError, StateError
from pgoutbox.operations import ActResult, MessageResult, Operator
from pgoutbox.operations.acts import ACTS, Act

_T = TypeVar("_T")
_Answer: TypeAlias = Callable[[Request], Awaitable[Response]]

ROUTES: Final[list[Route]] = []


def _form(path: str, name: str | None = None) -> Callable[[_Answer], _Answer]:
    """Answer the forms that operators send to this path."""

    def register(answer: _Answer) -> _Answer:
        ROUTES.append(Route(path, operators_only(answer), name=name or answer.__name__, methods=["POST"]))
        return answer

    return register


def _add(act: Act) -> None:
    """Answer the form of an act. It changes the message if its state is still one that the page showed."""

    @_form(f"/messages/{{message_id}}/{act.name}", act.name)
    async def answer(request: Request) -> Response:
        form = await inputs.read_form(request)
        # Only a redrive depends on the state that the page showed.
        states = inputs.filter_of(form).states if act.usual != act.states else ()
        changes = inputs.changes_of(form, act, of_one=True)
        return await _act_on_message(
            request,
            lambda operator, message_id: operator.act_on(act.name, message_id, states=states or None, **changes),
        )


for _act_on_one in ACTS.values():
    if _act_on_one.button or _act_on_one.form:
        _add(_act_on_one)


@_form("/messages/{message_id}/correct")
async def correct(request: Request) -> Response:
    """Change fields of one pending or failed message. Its topic's model checks the payload, in an application."""
    outbox, correction = dashboard_of(request).outbox, inputs.correction_of(await inputs.read_form(request))
    return await _act_on_message(
        request, lambda operator, message_id: correct_message(operator, outbox, message_id, correction)
    )


def _add_pause(
    kind: Literal["queue", "topic"], pause: Callable[..., object], resume: Callable[[Operator, str], bool]
) -> None:
    """Answer the forms that pause a queue, or a topic in all queues, for some time or without end, and resume it."""

    @_form(f"/{kind}s/{{{kind}}}/pause", f"pause_{kind}")
    async def answer_pause(request: Request) -> Response:
        name, duration = inputs.name_of(request, kind), inputs.duration_of(await inputs.read_form(request))
        await _act(request, lambda operator: pause(operator, name, duration=duration))
        return _to(request, f"{kind}s", {kind: name, "done": f"{kind}-paused"})

    @_form(f"/{kind}s/{{{kind}}}/resume", f"resume_{kind}")
    async def answer_resume(request: Request) -> Response:
        name = inputs.name_of(request, kind)
        was_paused = await _act(request, lambda operator: resume(operator, name))
        return _to(request, f"{kind}s", {kind: name, "done": f"{kind}-{'resumed' if was_paused else 'not-paused'}"})


_add_pause("queue", Operator.pause, Operator.resume)
_add_pause("topic", Operator.pause_topic, Operator.resume_topic)


@_form("/queues/{queue}/rate")
async def limit_rate(request: Request) -> Response:
    """Limit how many attempts of a queue may begin in a period."""
    queue = inputs.name_of(request, "queue")
    rate, burst = inputs.rate_of(await inputs.read_form(request))
    await _act(request, lambda operator: operator.limit_rate(queue, rate, burst=burst))
    return _to(request, "queues", {"queue": queue, "done": "limited"})


@_form("/queues/{queue}/in-flight")
async def limit_in_flight(request: Request) -> Response:
    """Limit how many attempts of a queue may be in flight."""
    queue = inputs.name_of(request, "queue")
    form = await inputs.read_form(request)
    most = None if form.get("unlimited") else inputs.number_of(form, "in_flight", at_most=1_000_000)
    await _act(request, lambda operator: operator.limit_in_flight(queue, most))
    return _to(request, "queues", {"queue": queue, "done": "limited"})


@_form("/queues/{queue}/share")
async def share(request: Request) -> Response:
    """Set the share of a fair key, or that of all keys of a queue without an own one."""
    queue, form = inputs.name_of(request, "queue"), await inputs.read_form(request)
    new = inputs.share_of(form)
    changed = await _act(
        request,
        lambda operator: operator.set_fair_share(
            queue, new.key, weight=new.weight, max_in_flight=new.max_in_flight, rate=new.rate, remove=new.remove
        ),
    )
    done = query(start=new.key, done="share-changed" if changed else "share-unchanged")
    return RedirectResponse(link(request, "keys", queue=queue) + done, status_code=303)


@_form("/redirect")
async def set_redirect(request: Request) -> Response:
    """Redirect e-mail of all workers, for some time or without end."""
    form = await inputs.read_form(request)
    target, duration = inputs.text_of(form, "target") or "", inputs.duration_of(form)
    topics, exempt_topics = inputs.names_of(form, "topics"), inputs.names_of(form, "exempt_topics")

    def switch(operator: Operator) -> bool:
        operator.set_redirect(target, duration=duration, topics=topics, exempt_topics=exempt_topics)
        return all(operator.is_known_topic(topic) for topic in topics)

    are_known = await _act(request, switch)
    return _to_redirect(request, "redirected" if are_known else "redirected-unknown")


@_form("/redirect/off")
async def clear_redirect(request: Request) -> Response:
    """Switch the redirect off."""
    cleared, rest = await _act(request, lambda operator: (operator.clear_redirect(), operator.redirects()))
    done = "redirect-off" if cleared.was_on else "redirect-not-on"
    return _to_redirect(request, f"{done}-workers" if rest.workers else done)


@_form("/breakers/close")
async def close_breaker(request: Request) -> Response:
    """Close a circuit breaker, and make its messages due."""
    if (key := inputs.text_of(await inputs.read_form(request), "key", at_most=inputs.MAX_KEY)) is None:
        raise ArgumentError("key", "give the key of a circuit breaker")
    closed = await _act(request, lambda operator: operator.close_breaker(key))
    return _to(request, "breakers", {"done": "breaker-closed" if closed.was_open else "breaker-not-open"})


def _add_to_schedule(
    act: str, change: Callable[[Operator, str], object], done: str, otherwise: str = "schedule-unchanged"
) -> None:
    """Answer the form of an act on a schedule."""

    @_form(f"/schedules/{{schedule}}/{act}", f"{act}_schedule")
    async def answer(request: Request) -> Response:
        name = inputs.name_of(request, "schedule")
        try:
            has_changed = await _act(request, lambda operator: change(operator, name))
        except (ArgumentError, StateError) as error:
            return await show(request, "schedules.html", schedules, status=409, refusal=sentence(str(error)))
        return _to(request, "schedules", {"done": done if has_changed else otherwise})


_add_to_schedule("pause", Operator.pause_schedule, "schedule-paused")
_add_to_schedule("resume", Operator.resume_schedule, "schedule-resumed")
_add_to_schedule("run", Operator.run_schedule, "schedule-run", "schedule-missing")


@_form("/bulk")
async def start_bulk(request: Request) -> Response:
    """Start the bulk action of the preview."""
    form = await inputs.read_form(request)
    act, which = inputs.act_of(form), inputs.filter_of(form)
    changes = inputs.changes_of(form, act)
    bulk = dashboard_of(request).bulks.start(act.name, which, viewer_of(request), changes)
    return RedirectResponse(link(request, "bulk", bulk_id=bulk.id), status_code=303)


@_form("/bulk/{bulk_id}/stop")
async def stop_bulk(request: Request) -> Response:
    """Stop a bulk action after its current batch."""
    bulk = dashboard_of(request).bulks.find(request.path_params["bulk_id"])
    bulk.stop.set()
    return RedirectResponse(link(request, "bulk", bulk_id=bulk.id), status_code=303)


async def _act(request: Request, do: Callable[[Operator], _T]) -> _T:
    dashboard = dashboard_of(request)
    try:
        return await dashboard.database.act(viewer_of(request), do)
    finally:
        dashboard.forget()  # The next page shows what it has changed.


async def _act_on_message(request: Request, do: Callable[[Operator, int], MessageResult]) -> Response:
    """Show the message, or the copy of a resent message, with the notice; or the message with the refusal."""
    message_id = inputs.message_id_of(request)
    answer = await _act(request, lambda operator: do(operator, message_id))
    if answer.result == ActResult.MISSING:
        raise MessageNotFoundError(f"no such message: {answer.id}")
    if not answer.is_done:
        refusal = f"Message {answer.id} {answer.explanation}."
        return await show(request, "message.html", message, status=409, refusal=refusal)
    path = link(request, "message", message_id=answer.other_id or answer.id)
    return RedirectResponse(path + query(done=answer.result), status_code=303)


def _to(request: Request, page: str, parameters: Mapping[str, str], part: str = "") -> Response:
    return RedirectResponse(f"{link(request, page)}{query(parameters)}{part}", status_code=303)


def _to_redirect(request: Request, done: str) -> Response:
    return _to(request, "queues", {"done": done}, "#redirect")

"""Dispatch: run the handler of a claimed message and return an outcome. No SQL: other modules write the outcome.

Any behaviour of a handler (an invalid result, an exception that cannot be printed, an exit of the interpreter) becomes
one of the six outcomes. Only a cancellation by the worker passes through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from typing import Final, cast

from pgoutbox.clock import elapsed_clock
from pgoutbox.errors import LeaseLostError
from pgoutbox.handlers import Handler, SyncContext
from pgoutbox.message import Message, Outcome, Permanent, Postponed, SendFailure, Sent, Skip, Snooze
from pgoutbox.text import describe
from pgoutbox.transports import Content, Gate, Transport, current_gate, scheme_of
from pgoutbox.transports.registry import MissingTransport
from pgoutbox.worker.attempt import Attempt
from pgoutbox.worker.handler_errors import outcome_of_exception
from pgoutbox.worker.mailing_lists import MailingLists, is_doubtful, prepared
from pgoutbox.worker.threads import AttemptThreads

MIN_SNOOZE_SECONDS = 1.0

Send = Callable[[Transport, Message[object], Content], Awaitable[Outcome]]

_SENT_ALONE: Final = (Sent(),)


class Dispatcher:
    """Runs handlers and sends the contents that they return."""

    def __init__(
        self,
        transports: Mapping[str, Transport],
        threads: AttemptThreads,
        *,
        send: Send | None = None,
        lists: MailingLists,
    ) -> None:
        self._transports = transports
        self._threads = threads
        self._send = send or send_by
        self.lists = lists

    async def run(self, attempts: Sequence[Attempt]) -> Sequence[Outcome]:
        """Run one attempt of one message. Return a list with its outcome."""
        (attempt,) = attempts
        handler = attempt.handler
        try:
            message = attempt.message
            if handler.payload is not None or message.payload_version != handler.version:
                message = handler.parse(message)
            if handler.mailing_list is not None and (refused := await self.lists.refusals(attempts)):
                return list(refused.values())
            if handler.is_async:
                result = await handler.function(message, attempt)
            else:
                loop = asyncio.get_running_loop()
                context = SyncContext(attempt, loop, attempt.sync_connection)
                result = await in_thread(
                    self._threads, _begin, attempts, self.lists, loop, handler.function, message, context
                )
            if result is None:
                return _SENT_ALONE
            return (await self.conclude(attempt, message, result),)
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is the outcome of its attempt
            return (outcome_of_error(handler, error),)

    async def run_batch(self, attempts: Sequence[Attempt]) -> list[Outcome]:
        """Run one attempt of several messages of one handler. Return an outcome for each, in their order.

        An exception that ends messages does not say which one it is about, so the halves of the batch are tried.
        """
        outcomes = await self.call_batch(attempts)
        if isinstance(outcomes, list):
            return outcomes
        return [outcome for half in halves(attempts) for outcome in await self.run_batch(half)]

    async def call_batch(self, attempts: Sequence[Attempt]) -> list[Outcome] | Permanent | Skip:
        """Call a batch handler once. Return an outcome for each message, or the one that it has raised for several."""
        handler = attempts[0].handler
        outcomes: dict[int, Outcome] = {}
        parsed: list[tuple[Message[object], Attempt]] = []
        for attempt in attempts:
            try:
                parsed.append((handler.parse(attempt.message), attempt))
            except Postponed as unreadable:
                outcomes[attempt.message.id] = unreadable
        if parsed and handler.mailing_list is not None:
            refused = await self.lists.refusals([attempt for _, attempt in parsed])
            outcomes.update((attempt.message.id, refusal) for attempt, refusal in refused.items())
            parsed = [one for one in parsed if one[1] not in refused]
        if parsed:
            messages = [message for message, _ in parsed]
            results = await self._call_batch_handler(handler, messages, [attempt for _, attempt in parsed])
            if isinstance(results, (Permanent, Skip)):
                return results
            for (message, attempt), result in zip(parsed, results, strict=True):
                try:
                    outcomes[message.id] = await self._conclude_safely(attempt, message, result)
                except asyncio.CancelledError:
                    # The contents before this one were sent, this one may have been, and later ones were not.
                    outcomes[message.id] = SendFailure("stopped while it was being sent, outcome unknown", unknown=True)
                    outcomes = {m.id: Snooze(0) for m in messages} | outcomes
                    break
        return [outcomes[attempt.message.id] for attempt in attempts]

    async def _call_batch_handler(
        self,
        handler: Handler,
        messages: list[Message[object]],
        attempts: list[Attempt],
    ) -> Sequence[object] | Permanent | Skip:
        try:
            if handler.is_async:
                results = await handler.function(messages, attempts)
            else:
                loop = asyncio.get_running_loop()
                contexts = [SyncContext(attempt, loop, attempt.sync_connection) for attempt in attempts]
                results = await in_thread(
                    self._threads, _begin, attempts, self.lists, loop, handler.function, messages, contexts
                )
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is the outcome of its attempt
            outcome = outcome_of_error(handler, error)
            if len(messages) > 1 and isinstance(outcome, (Permanent, Skip)):
                return outcome
            return [outcome] * len(messages)
        if results is None:
            return [None] * len(messages)
        if not isinstance(results, Sequence) or isinstance(results, (str, bytes)) or len(results) != len(messages):
            problem = f"the batch handler must return None or {len(messages)} outcomes, one per message, in their order"
            return [SendFailure(problem, unknown=True)] * len(messages)
        return results

    async def _conclude_safely(self, attempt: Attempt, message: Message[object], result: object) -> Outcome:
        try:
            return await self.conclude(attempt, message, result)
        except BaseException as error:  # noqa: BLE001 - one message of a batch never decides about the others
            return outcome_of_error(attempt.handler, error)

    async def conclude(self, attempt: Attempt, message: Message[object], result: object) -> Outcome:
        """Return the outcome of a handler's result, and send a content. `message` has its payload parsed."""
        match result:
            case None:
                return Sent()
            case Snooze():
                return _with_a_pause(result)
            case _ if isinstance(result, Outcome):
                return result
            # `isinstance` with a protocol takes fifty times as long.
            case _ if (scheme := getattr(result, "scheme", None)) is not None:
                gate: Gate = attempt.pass_gate
                if attempt.handler.mailing_list is not None:
                    result = prepared(attempt, cast("Content", result))
                    gate = partial(self.lists.pass_gate, attempt)
                current_gate.set(gate)
                return await self._deliver(message, cast("Content", result), scheme)
            case _:
                # The next release of the handler can deliver the message. Its effects may have happened.
                return SendFailure(
                    f"the handler returned a {type(result).__name__}; it must return None, an outcome, or a content "
                    "such as Email",
                    unknown=True,
                )

    async def _deliver(self, message: Message[object], content: Content, scheme: str) -> Outcome:
        """Send a content by the transport of the message's destination, or without one by that of the scheme."""
        if message.destination is not None:
            scheme = scheme_of(message.destination)
        if not scheme:
            return Permanent(f"destination: the message has none, and its {type(content).__name__} needs one")
        transport = self._transports.get(scheme)
        if transport is None:
            return await self._send(MissingTransport(scheme, self._transports), message, content)
        return await self._send(transport, message, content)


def halves(attempts: Sequence[Attempt]) -> tuple[Sequence[Attempt], Sequence[Attempt]]:
    """Return the first and the second half of these attempts, of which there are at least two."""
    middle = len(attempts) // 2
    return attempts[:middle], attempts[middle:]


def _begin(
    attempts: Sequence[Attempt],
    lists: MailingLists,
    loop: asyncio.AbstractEventLoop,
    function: Callable[..., object],
    *arguments: object,
) -> object:
    """Call a handler in its thread. The wait for the thread may have been long, or the process suspended."""
    now = elapsed_clock()
    for attempt in attempts:
        if attempt.is_in_doubt(now) or (attempt.handler.mailing_list is not None and is_doubtful(attempt)):
            asyncio.run_coroutine_threadsafe(lists.pass_gate(attempt), loop).result()
    return function(*arguments)


async def send_by(transport: Transport, message: Message[object], content: Content) -> Outcome:
    """Call `transport.send`."""
    return await transport.send(message, content)


async def in_thread(threads: AttemptThreads, function: Callable[..., object], *arguments: object) -> object:
    """Run the function in a thread. Return its result, or raise its exception."""
    # The thread has the context of the task, for example the current span.
    thread = threads.submit(copy_context().run, function, *arguments)
    try:
        await threads.returned(thread)
    except asyncio.CancelledError:
        # The thread may have ended just before: then its outcome is known, and only on its way to the task. A content
        # would still have to be sent.
        if thread.cancel() or not thread.done():
            raise
        if thread.exception() is None and not isinstance(thread.result(), Outcome | None):
            raise
    # The await above never raises it: a `GeneratorExit` raised into a task closes every coroutine up to the slot.
    error = thread.exception()
    try:
        if isinstance(error, StopIteration):
            raise RuntimeError(describe(error)) from error  # noqa: TRY004 - what a coroutine would raise
        if error is not None:
            raise error
        return thread.result()
    finally:
        del error, thread  # The traceback has this frame.


def outcome_of_error(handler: Handler, error: BaseException) -> Outcome:
    """Return the outcome of an exception: the raised outcome, `Permanent` for the handler's list, else `Transient`."""
    match error:
        case Snooze():
            return _with_a_pause(error)
        case _ if isinstance(error, Outcome):
            return error
        case asyncio.CancelledError() if _is_being_cancelled():
            raise error
        case LeaseLostError():
            # The finish or the next claim ends the message, if it must end. So no attempt is used up.
            return Snooze(MIN_SNOOZE_SECONDS, describe(error))
        case _:
            return outcome_of_exception(error, is_permanent=isinstance(error, tuple(handler.permanent)))


def _with_a_pause(asked: Snooze) -> Snooze:
    # A message that is due at once would be claimed a thousand times a second, with a row for each attempt.
    return asked if asked.delay_seconds >= MIN_SNOOZE_SECONDS else Snooze(MIN_SNOOZE_SECONDS, asked.reason)


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

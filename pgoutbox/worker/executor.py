"""The executor: runs an attempt from the slot to its result, with all resources of handlers and transports.

It checks the lease first if it may have run out unnoticed, and then the circuit breaker, if there is one. Then it runs
the handler: for one message, for a batch, or in a transaction.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import get_args

from pgoutbox.clock import elapsed_clock
from pgoutbox.handlers import Middleware
from pgoutbox.message import Message, Outcome, SendFailure, Sent, Snooze, Transient
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.observability.tracing import Tracing
from pgoutbox.text import describe
from pgoutbox.transports import Content, Transport, breaker_key, scheme_of
from pgoutbox.worker.attempt import RELEASED, Attempt, RunWork, Work
from pgoutbox.worker.breakers.circuit_breakers import CircuitBreakers
from pgoutbox.worker.dispatcher import Dispatcher, Send, outcome_of_error
from pgoutbox.worker.mailing_lists import MailingLists
from pgoutbox.worker.redirects import Redirects
from pgoutbox.worker.run_state import RunState
from pgoutbox.worker.threads import AttemptThreads
from pgoutbox.worker.transactional.transactions import Transactions


class AttemptExecutor:
    """Runs the attempts of one worker, and closes their resources, including the transports.

    `middleware` wraps each call of a handler, the first one outermost. `on_outcome` takes the outcomes of attempts that
    end before the others of their batch. Without `breakers` nothing is held back. Plain functions run in `threads`.
    """

    def __init__(
        self,
        run: RunState,
        transports: Mapping[str, Transport],
        *,
        middleware: Sequence[Middleware],
        on_outcome: Callable[[Attempt, Outcome], None],
        breakers: CircuitBreakers | None = None,
        threads: AttemptThreads | None = None,
        transactions: type[Transactions] = Transactions,
    ) -> None:
        settings, store, telemetry = run.settings, run.store, run.telemetry
        self._transports = transports
        self._on_outcome = on_outcome
        self._breakers = breakers
        self.redirects = Redirects(settings, store, telemetry)
        send: Send = self.redirects.send
        self._run: RunWork = self._run_handler
        for one in reversed(middleware):
            self._run = partial(_run_through, one, telemetry, call_next=self._run)
        if settings.otel.traces and (tracing := Tracing.at_start()) is not None:
            self._run = partial(_run_traced, tracing, call_next=self._run)
            send = partial(_send_traced, tracing, send)
        if telemetry.logs(logging.DEBUG):
            self._run = partial(_run_logged, telemetry, call_next=self._run)
        self._owns_threads = threads is None
        self._threads = threads or AttemptThreads(settings.concurrency)
        if breakers is not None and settings.breaker.enabled:
            send = partial(breakers.send, by=send)
        lists = MailingLists(settings, store.attempts.fetch)
        self._dispatcher = Dispatcher(transports, self._threads, send=send, lists=lists)
        self._transactions = transactions(run, self._dispatcher)

    def run(self, work: Work) -> Awaitable[Sequence[Outcome]]:
        """Run one attempt for each message of the work. Return their results, in the same order."""
        now = elapsed_clock()
        for attempt in work:
            if attempt.is_in_doubt(now):
                return self._run_if_still_to_be_sent(work)
        breakers = self._breakers
        if breakers is not None and breakers.watches_any and any(breakers.may_refuse(one.message) for one in work):
            return self._run_admitted(work)
        return self._run(work)

    async def close(self, *, keeps: Collection[Transport] = ()) -> None:
        """Close connections, own threads, and the transports except those in `keeps`. Call it after all attempts."""
        await self._transactions.close()
        await self.redirects.close()
        kept = {id(transport) for transport in keeps}
        for transport in {id(t): t for t in self._transports.values() if id(t) not in kept}.values():
            await transport.aclose()
        if self._owns_threads:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run_if_still_to_be_sent(self, work: Work) -> Sequence[Outcome]:
        """Pass the gate before a handler begins: the process was suspended since the claim, or was overloaded."""
        early: dict[Attempt, Outcome] = {}
        for attempt in work:
            attempt.is_at_gate = True
        for attempt in work:
            try:
                await attempt.pass_gate()
            except Snooze:
                early[attempt] = RELEASED  # The finish or the next claim ends the message, if it must end.
        for attempt in work:
            attempt.is_at_gate = False
        return await self._run_rest(work, early, self._run_admitted)

    async def _run_admitted(self, work: Work) -> Sequence[Outcome]:
        """Run the attempts whose circuit breaker lets them pass."""
        refusals: dict[Attempt, Outcome] = {}
        if (breakers := self._breakers) is not None:
            refusals = {a: refusal for a in work if (refusal := await breakers.refusal(a.message)) is not None}
        return await self._run_rest(work, refusals, self._run)

    async def _run_rest(self, work: Work, early: Mapping[Attempt, Outcome], run: RunWork) -> Sequence[Outcome]:
        """Run the attempts without an early result. The early results do not wait for the others of the batch."""
        for attempt, result in early.items():
            attempt.done = True
            self._on_outcome(attempt, result)
        rest = [attempt for attempt in work if attempt not in early]
        results = iter(await run(rest) if rest else ())
        return [early[attempt] if attempt in early else next(results) for attempt in work]

    def _run_handler(self, work: Work) -> Awaitable[Sequence[Outcome]]:
        handler = work[0].handler
        if handler.transactional:
            return self._transactions.run(work)
        if handler.is_batch:
            return self._dispatcher.run_batch(work)
        return self._dispatcher.run(work)


async def _run_through(
    middleware: Middleware, telemetry: Telemetry, work: Work, call_next: RunWork
) -> Sequence[Outcome]:
    """Run the application's middleware around the attempts."""
    results: Sequence[Outcome] | None = None

    async def run() -> Sequence[Outcome]:
        nonlocal results
        if results is not None:
            raise RuntimeError("call_next was called twice; a message must not be sent twice")
        results = await call_next(work)
        return results

    try:
        outcomes = await middleware([attempt.message for attempt in work], run)
        problem = _problem_with(outcomes, len(work))
    except asyncio.CancelledError:
        raise
    except Exception as error:  # noqa: BLE001 - it must not cost the outcome of an attempt
        if results is None:
            return [outcome_of_error(attempt.handler, error) for attempt in work]
        problem = describe(error)
        outcomes = ()
    if problem is None:
        # A transaction that has committed stands.
        return [Sent() if a.is_written else outcome for a, outcome in zip(work, outcomes, strict=True)]
    if results is None:
        return [Transient(f"middleware: {problem}")] * len(work)
    # The messages may have been sent, so their outcomes stand.
    telemetry.report(
        logging.ERROR,
        LogEvent.MIDDLEWARE_FAILED,
        "a middleware failed after its attempt; the outcome stands",
        topic=work[0].message.topic,
        reason=problem,
    )
    return results


def _problem_with(outcomes: object, count: int) -> str | None:
    if not isinstance(outcomes, Sequence) or len(outcomes) != count:
        return f"must return {count} outcomes, one for each message, in their order"
    kinds = get_args(Outcome)
    wrong = next((outcome for outcome in outcomes if not isinstance(outcome, kinds)), None)
    return None if wrong is None else f"must return outcomes, not {type(wrong).__name__}"


async def _run_logged(telemetry: Telemetry, work: Work, call_next: RunWork) -> Sequence[Outcome]:
    """Log start, end and duration of each attempt."""
    began_at = elapsed_clock()
    for attempt in work:
        telemetry.report(
            logging.DEBUG,
            LogEvent.ATTEMPT_STARTED,
            "attempt started",
            message_id=attempt.message.id,
            topic=attempt.message.topic,
            attempt_count=attempt.attempt_count,
        )
    results = await call_next(work)
    for attempt, result in zip(work, results, strict=True):
        telemetry.report(
            logging.DEBUG,
            LogEvent.ATTEMPT_ENDED,
            "attempt ended",
            message_id=attempt.message.id,
            topic=attempt.message.topic,
            attempt_count=attempt.attempt_count,
            outcome=_name_of(result),
            duration_seconds=round(elapsed_clock() - began_at, 6),
        )
    return results


def _name_of(result: Outcome) -> str:
    match result:
        case SendFailure():
            return "Transient"
        case _:
            return type(result).__name__.removeprefix("Raised")


async def _run_traced(tracing: Tracing, work: Work, call_next: RunWork) -> Sequence[Outcome]:
    return await tracing.attempt([attempt.message for attempt in work], lambda: call_next(work))


async def _send_traced(
    tracing: Tracing, send: Send, transport: Transport, message: Message[object], content: Content
) -> Outcome:
    scheme = content.scheme if message.destination is None else scheme_of(message.destination)
    key = breaker_key(transport, message, content)
    return await tracing.send(scheme, key, lambda: send(transport, message, content))

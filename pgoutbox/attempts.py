"""What happens in one attempt, from the slot that takes it to its ending: everything that handlers and transports need.

Before anything is handed over the lease is asked for, where it may have run out unseen, and the breaker, where one is
watched. What remains is a handler to run: alone, with a batch, or in a transaction.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psycopg

from pgoutbox.breaker import Breakers
from pgoutbox.clock import elapsed_clock
from pgoutbox.dispatch import Dispatcher, Send, outcome_of_error, send_by
from pgoutbox.errors import LeaseLostError
from pgoutbox.handlers import Context
from pgoutbox.message import Message, Outcome
from pgoutbox.results import RELEASED, Ending, Runner, ThreadWatch, Work
from pgoutbox.settings import Settings
from pgoutbox.store import Store
from pgoutbox.telemetry import Telemetry
from pgoutbox.tracing import Tracing
from pgoutbox.transactions import Transactions
from pgoutbox.transports import Content, Transport, breaker_key, scheme_of


class Attempts:
    """Runs the attempts of one worker, and closes what they opened, the transports too.

    `alert_queue` is where a breaker that opens enqueues its alert.
    `collect` takes the endings of those that end while others of their batch go on.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        transports: Mapping[str, Transport],
        telemetry: Telemetry,
        *,
        alert_queue: str | None,
        collect: Callable[[Context, Ending], None],
    ) -> None:
        self._transports = transports
        self._collect = collect
        self._stale_seconds = settings.lease_seconds / 2
        self._run: Runner = self._run_handler
        send: Send = send_by
        if settings.otel_traces and (tracing := Tracing.at_start()) is not None:
            self._run = partial(self._run_traced, tracing)
            send = partial(_send_traced, tracing)
        self._threads = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="pgoutbox-handler")
        self.breakers = Breakers(
            store,
            transports,
            settings,
            telemetry,
            alert_queue=alert_queue,
            hand_over=send,
        )
        self._dispatcher = Dispatcher(
            transports,
            self._threads,
            lease_seconds=settings.lease_seconds,
            redirect_to=settings.redirect_to,
            send=self.breakers.send if settings.breaker else send,
        )
        self._transactions = Transactions(settings, store, self._dispatcher, self._threads)

    def run(self, work: Work, watch_thread: ThreadWatch) -> Awaitable[Sequence[Ending]]:
        """One attempt for each message of the work; their endings, in its order."""
        now = elapsed_clock()
        lapsing_at = now - self._stale_seconds
        for context in work:
            if context.leased_at < lapsing_at or context.overtaken is not None or context.expiring_at <= now:
                return self._run_if_still_to_be_sent(work, watch_thread)
        return (self._run_admitted if self.breakers.watches_any else self._run)(work, watch_thread)

    async def close(self) -> None:
        """Close connections, transports and threads; call it when no attempt runs any more."""
        await self._transactions.close()
        await self.breakers.close()
        for transport in {id(t): t for t in self._transports.values()}.values():
            await transport.aclose()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run_admitted(self, work: Work, watch_thread: ThreadWatch) -> Sequence[Ending]:
        refusals = {c: refusal for c in work if (refusal := await self.breakers.refusal(c.message)) is not None}
        admitted = [context for context in work if context not in refusals]
        try:
            return await self._run_rest(work, refusals, self._run, watch_thread)
        finally:
            for context in admitted:
                self.breakers.let_go(context.message)

    async def _run_traced(self, tracing: Tracing, work: Work, watch_thread: ThreadWatch) -> Sequence[Ending]:
        messages = [context.message for context in work]
        return await tracing.attempt(messages, lambda: self._run_handler(work, watch_thread))

    def _run_handler(self, work: Work, watch_thread: ThreadWatch) -> Awaitable[Sequence[Ending]]:
        handler = work[0].handler
        if handler.max_batch is not None:
            return self._dispatcher.run_batch(work, watch_thread)
        if handler.transactional:
            return self._transactions.run(work, watch_thread)
        return self._dispatcher.run(work, watch_thread)

    async def _run_if_still_to_be_sent(self, work: Work, watch_thread: ThreadWatch) -> Sequence[Ending]:
        """The process was suspended between the claim and now, or had too much to do: ask before anything is sent."""
        early: dict[Context, Ending] = {}
        now = elapsed_clock()
        for context in work:
            if context.expiring_at <= now:
                early[context] = RELEASED  # The next claim skips it, by the database's clock.
                continue
            try:
                await context.ensure_lease()
            except LeaseLostError as error:
                early[context] = outcome_of_error(context.handler, error)
            except (psycopg.Error, OSError):
                early[context] = RELEASED
        return await self._run_rest(work, early, self._run_admitted, watch_thread)

    async def _run_rest(
        self, work: Work, early: Mapping[Context, Ending], run: Runner, watch_thread: ThreadWatch
    ) -> Sequence[Ending]:
        """Run what has not ended early. What has does so now, whatever becomes of the others of its batch."""
        for context, ending in early.items():
            context.done = True
            self._collect(context, ending)
        rest = [context for context in work if context not in early]
        endings = iter(await run(rest, watch_thread) if rest else ())
        return [early[context] if context in early else next(endings) for context in work]


async def _send_traced(tracing: Tracing, transport: Transport, message: Message[object], content: Content) -> Outcome:
    scheme = content.scheme if message.destination is None else scheme_of(message.destination)
    key = breaker_key(transport, message, content)
    return await tracing.hand_over(scheme, key, lambda: transport.send(message, content))

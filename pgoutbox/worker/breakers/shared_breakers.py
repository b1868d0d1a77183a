"""The breakers that all workers share: an open breaker is a row of `pgoutbox.breaker`. Times come from the database.

The row is read after a failure, before a probe when a pause is over, at most once a second while messages are held
back, and once a minute, together with all others, while sends succeed. It is not read while there is nothing to send.
The SQL statement decides whether a success may close, or a probe may reopen the breaker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import psycopg

from pgoutbox.database.store import Store
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.settings import BreakerSettings
from pgoutbox.text import clean_text
from pgoutbox.worker.breakers.breaker_rows import BreakerRow, BreakerRows
from pgoutbox.worker.breakers.circuit_breaker import CircuitBreaker

_REFRESH_SECONDS = 1.0
_LIST_SECONDS = 60.0
_CLOSE_SECONDS = 5.0

T = TypeVar("T")


class SharedBreakers:
    """Reads and writes the rows, and applies the answers to the breakers of this process.

    With `alert_queue`, the statement that opens or closes a breaker also enqueues an announcement there.
    """

    def __init__(
        self,
        store: Store,
        settings: BreakerSettings,
        telemetry: Telemetry,
        *,
        alert_queue: str | None,
        clock: Callable[[], float],
    ) -> None:
        self._rows = BreakerRows(store, settings)
        self._telemetry = telemetry
        self._alert_queue = alert_queue
        self._clock = clock
        self.on_close: Callable[[], None] = lambda: None
        """Called when this worker has closed a breaker."""
        self._listed_at = float("-inf")
        self._listing: asyncio.Task[None] | None = None
        self._open_keys: set[str] = set()
        self._refreshed_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self._is_claim_newer = False
        self._tasks: set[asyncio.Task[object]] = set()

    async def record_failure(self, breaker: CircuitBreaker, error: str, *, trips: bool) -> None:
        """Open the breaker if this failure `trips` it, or if it is open for other workers."""
        if not breaker.is_closed:
            return
        row = await self._ask(self._failed(breaker.key, error, trips=trips))
        if row is None and trips:
            # Another worker opened it during the statement, which could not see that row.
            row = await self._ask(self._failed(breaker.key, error, trips=trips))
        if isinstance(row, BreakerRow):
            # Another send may have opened it too. The newest row is right.
            breaker.open(row, self._clock())

    async def _failed(self, key: str, error: str, *, trips: bool) -> BreakerRow | None:
        row = await self._rows.failed(key, trips=trips, error=clean_text(error), alert_queue=self._alert_queue)
        if row is not None and row.opened:
            self._telemetry.report(
                logging.WARNING, LogEvent.BREAKER_OPENED, "breaker opened", breaker=key, retry_seconds=row.retry_seconds
            )
        return row

    async def failures_of_last_run(self) -> dict[str, dict[str, Any]]:
        """Return the memory of the last run, by key. None of it if the database does not answer."""
        failures = await self._ask(self._rows.failures_of_last_run())
        return failures if isinstance(failures, dict) else {}

    async def begin_probe(self, breaker: CircuitBreaker) -> str | None:
        """Return the id of a granted probe. Without one, the breaker is closed, or paused for another time."""
        is_early = breaker.is_paused(self._clock())
        row = await self._ask(self._rows.probe(breaker.key, is_early=is_early))
        # A refresh may have changed the breaker during the statement. This row is newer.
        if isinstance(row, Exception):
            breaker.pause(self._clock())
        elif row is None:
            breaker.close()  # Another worker's probe has succeeded, or an operator closed it.
        elif row.probe_id is None:
            breaker.open(row, self._clock())
        else:
            return row.probe_id
        return None

    async def close(self, key: str, probe_id: str | None, *, send_seconds: float | None = None) -> None:
        """Close the row after a successful probe, or after another send that took `send_seconds`.

        If this fails, the probe counts as lost once its time is over.
        """
        open_seconds = await self._ask(
            self._rows.close(key, probe_id, send_seconds=send_seconds, alert_queue=self._alert_queue)
        )
        if isinstance(open_seconds, float):
            self.on_close()
            self._telemetry.report(
                logging.INFO, LogEvent.BREAKER_CLOSED, "breaker closed", breaker=key, open_seconds=open_seconds
            )

    async def reopen(self, breaker: CircuitBreaker, probe_id: str, error: str) -> None:
        """Extend the pause after a failed probe."""
        breaker.pause(self._clock())
        row = await self._ask(self._rows.reopen(breaker.key, probe_id, error=clean_text(error)))
        if isinstance(row, BreakerRow):
            # A refresh may have read an older row during this statement.
            breaker.open(row, self._clock())
            self._telemetry.report(
                logging.INFO,
                LogEvent.BREAKER_REOPENED,
                "breaker stays open",
                breaker=breaker.key,
                retry_seconds=row.retry_seconds,
            )

    async def release(self, key: str, probe_id: str) -> None:
        """Give a probe without a result back."""
        await self._ask(self._rows.release(key, probe_id))

    async def free(self, key: str, probe_id: str, hold: str) -> None:
        """Give a probe back whose message was sent on another way, and let claims take the messages of its hold."""
        await self._ask(self._rows.free(key, probe_id, hold))

    def note_claim(self) -> None:
        """Read the rows once more before a message of this claim is held back: the claim may have seen newer rows.

        Claims leave out messages behind an open breaker, so the breaker of a claimed message may have closed.
        """
        self._is_claim_newer = True

    def note_success(self, keys: Sequence[str | None], *, began_at: float) -> None:
        """Close the breakers through which a send succeeded, if they are open for other workers.

        The worker that opened one may be gone, or may not know yet that the destination works again.
        """
        now = self._clock()
        if self._listing is None or now >= self._listed_at + _LIST_SECONDS:
            self._listed_at = now
            self._listing = self.start(self._list_open())
        if self._listing.done():
            self._close_open(keys, began_at)
        else:
            self._listing.add_done_callback(lambda _: self._close_open(keys, began_at))

    async def _list_open(self) -> None:
        open_keys = await self._ask(self._rows.open_keys())
        self._open_keys = open_keys if isinstance(open_keys, set) else set()

    def _close_open(self, keys: Sequence[str | None], began_at: float) -> None:
        for key in self._open_keys.intersection(keys):
            self._open_keys.discard(key)
            self.start(self.close(key, None, send_seconds=self._clock() - began_at))

    async def refresh(self, breakers: Iterable[CircuitBreaker], *, is_doubted: bool = False) -> None:
        """Read the rows of paused breakers again, at most once a second. Concurrent callers share one query.

        If they are doubted, read the rows of all open breakers once more after each claim.

        Another worker's probe may have succeeded, or an operator has closed a breaker.
        """
        if self._reading is None:
            now = self._clock()
            is_due = is_doubted and self._is_claim_newer
            paused = [one for one in breakers if (not one.is_closed if is_due else one.is_paused(now))]
            if not paused or not (is_due or now - self._refreshed_at >= _REFRESH_SECONDS):
                return
            self._refreshed_at = now
            self._is_claim_newer = False
            self._reading = self.start(self._read(paused, now))
        await asyncio.shield(self._reading)

    async def _read(self, paused: Sequence[CircuitBreaker], asked_at: float) -> None:
        try:
            rows = await self._ask(self._rows.read([breaker.key for breaker in paused]))
        finally:
            self._reading = None
        if isinstance(rows, dict):
            for breaker in paused:
                # A probe or a failure may have changed the breaker since the query: `refresh` checks it.
                breaker.refresh(rows.get(breaker.key), asked_at=asked_at, now=self._clock())

    async def _ask(self, question: Coroutine[object, object, T]) -> T | Exception:
        """Return the database's answer, or the error if it did not answer.

        The cancellation of a send does not break the connection of this query.
        """
        try:
            return await asyncio.shield(self.start(question))
        except (psycopg.Error, OSError) as error:
            reason = f"{type(error).__name__} {getattr(error, 'sqlstate', None) or ''}".rstrip()
            text = "the shared circuit breaker could not be read"
            self._telemetry.report(logging.WARNING, LogEvent.BREAKER_UNKNOWN, text, reason=reason)
            return error

    def start(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Run this in the background, until `aclose` at the latest."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def settle(self) -> None:
        """Wait briefly until the results of the last probes are written."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _CLOSE_SECONDS
        while self._tasks and (remaining := deadline - loop.time()) > 0:
            await asyncio.wait(self._tasks, timeout=remaining)

    async def aclose(self) -> None:
        """Settle, and give up the rest. A lost result costs another probe."""
        await self.settle()
        for task in list(self._tasks):
            task.cancel()

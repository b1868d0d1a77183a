"""The breakers that all workers share: an open breaker is a row of `pgoutbox.breaker`. Times come from the database.

The row is read after a failure, before a probe when a pause is over, at most once a second while messages are held
back, and once a minute, together with all others, while sends succeed. It is not read while there is nothing to send.
The SQL statement decides whether a success may close, or a probe may reopen the breaker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, LiteralString, TypeVar

import psycopg
from psycopg.rows import TupleRow

from pgoutbox.database import sql
from pgoutbox.database.worker_connection import WorkerConnection, kind_of
from pgoutbox.observability.events import LogEvent
from pgoutbox.text import clean_text
from pgoutbox.worker.breakers.circuit_breaker import BreakerRow, CircuitBreaker
from pgoutbox.worker.run_state import RunState

_REFRESH_SECONDS = 1.0
_LIST_SECONDS = 60.0
_CLOSE_SECONDS = 5.0

T = TypeVar("T")


class SharedBreakers:
    """Reads and writes the rows, and applies the answers to the breakers of this process.

    A run with a handler of alerts announces each breaker that it opens or closes, in the same statement.
    """

    def __init__(self, run: RunState, *, clock: Callable[[], float]) -> None:
        self._run = run
        self._store = store = run.store
        self._parameters = {
            **run.settings.breaker.model_dump(),
            "worker": store.worker,
            "alert_queue": run.alert_queue,
            "alert_destinations": store.alert_destinations,
        }
        self._telemetry = run.telemetry
        self._clock = clock
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
        parameters = {"key": breaker.key, "error": clean_text(error), "trips": trips}
        rows = await self._ask(sql.BREAKER_FAILED, **parameters)
        if rows == [] and trips:
            # Another worker opened it during the statement, which could not see that row.
            rows = await self._ask(sql.BREAKER_FAILED, **parameters)
        if not rows:
            return
        row = BreakerRow._make(rows[0])
        # Another send may have opened it too. The newest row is right.
        breaker.open(row, self._clock())
        if row.opened:
            self._telemetry.report(
                logging.WARNING,
                LogEvent.BREAKER_OPENED,
                "breaker opened",
                breaker=breaker.key,
                retry_seconds=row.retry_seconds,
            )

    async def failures_of_last_run(self) -> dict[str, dict[str, Any]]:
        """Return the memory of each breaker, by its key, that the last run of `run_once` or `drain` hands on.

        None of it if the database does not answer.
        """
        rows = await self._ask(sql.FAILURES_OF_LAST_RUN, self._store.claims)
        return dict(rows[0][0]) if rows else {}

    async def begin_probe(self, breaker: CircuitBreaker) -> str | None:
        """Return the id of a granted probe. Without one, the breaker is closed, or paused for another time."""
        is_early = breaker.is_paused(self._clock())
        rows = await self._ask(sql.BREAKER_PROBE, key=breaker.key, is_early=is_early)
        # A refresh may have changed the breaker during the statement. This row is newer.
        if rows is None:
            breaker.pause(self._clock())
        elif not rows:
            breaker.close()  # Another worker's probe has succeeded, or an operator closed it.
        elif (row := BreakerRow._make(rows[0])).probe_id is not None:
            return row.probe_id
        else:
            breaker.open(row, self._clock())
        return None

    async def close(self, key: str, probe_id: str | None, *, send_seconds: float | None = None) -> None:
        """Close the row after a successful probe, or after another send that took `send_seconds`.

        It stays if the probe was given up, or if the last failure is newer than the send. If this fails, the probe
        counts as lost once its time is over.
        """
        rows = await self._ask(sql.BREAKER_CLOSE_IF_NEWER, key=key, probe_id=probe_id, send_seconds=send_seconds)
        if rows:
            self._run.kernel.want()
            ((seconds,),) = rows
            self._telemetry.report(
                logging.INFO, LogEvent.BREAKER_CLOSED, "breaker closed", breaker=key, open_seconds=seconds
            )

    async def reopen(self, breaker: CircuitBreaker, probe_id: str, error: str) -> None:
        """Extend the pause after a failed probe, unless it was given up."""
        breaker.pause(self._clock())
        parameters = {"key": breaker.key, "probe_id": probe_id, "error": clean_text(error)}
        if rows := await self._ask(sql.BREAKER_REOPEN_IF_PROBING, **parameters):
            row = BreakerRow._make(rows[0])
            # A refresh may have read an older row during this statement.
            breaker.open(row, self._clock())
            self._telemetry.report(
                logging.INFO,
                LogEvent.BREAKER_REOPENED,
                "breaker stays open",
                breaker=breaker.key,
                retry_seconds=row.retry_seconds,
            )

    def release(self, key: str, probe_id: str, freed_hold: str | None = None) -> None:
        """Give a probe without a result back, and let claims take the messages of a hold that was wrong.

        It is written before the next probe is asked for.
        """
        parameters = {"key": key, "probe_id": probe_id, "hold": freed_hold}
        self.start(self._fetch(sql.BREAKER_RELEASE_IF_PROBING, self._store.attempts, parameters))

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
        rows = await self._ask(sql.BREAKER_KEYS, self._store.claims)
        self._open_keys = {key for (key,) in rows or ()}

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
            keys = [breaker.key for breaker in paused]
            rows = await self._ask(sql.BREAKERS, self._store.claims, keys=keys)
        finally:
            self._reading = None
        if rows is not None:
            found = {key: BreakerRow._make(row) for key, *row in rows}
            for breaker in paused:
                # A probe or a failure may have changed the breaker since the query: `refresh` checks it.
                breaker.refresh(found.get(breaker.key), asked_at=asked_at, now=self._clock())

    async def _ask(
        self, statement: LiteralString, link: WorkerConnection | None = None, /, **parameters: object
    ) -> list[TupleRow] | None:
        """Return the database's answer; None without one.

        The cancellation of a send does not break the connection of this query.
        """
        return await asyncio.shield(self.start(self._fetch(statement, link or self._store.attempts, parameters)))

    async def _fetch(
        self, statement: LiteralString, link: WorkerConnection, parameters: Mapping[str, object]
    ) -> list[TupleRow] | None:
        try:
            return await link.fetch(statement, {**self._parameters, **parameters})
        except (psycopg.Error, OSError) as error:
            text = "the shared circuit breaker could not be read"
            self._telemetry.report(logging.WARNING, LogEvent.BREAKER_UNKNOWN, text, reason=kind_of(error))
            return None

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

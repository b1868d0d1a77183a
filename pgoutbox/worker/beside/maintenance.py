"""Maintenance: one worker at a time creates partitions ahead and applies the retention rules.

A worker takes a turn by advancing the time of the next turn in `pgoutbox.maintenance_run`. No worker waits for a turn,
and each step is independent, so a worker that dies in its turn blocks nothing. The turn runs in a thread with a
connection of its own, so that it never delays claims. An error in a turn never ends the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from concurrent.futures import Future
from typing import Final

import psycopg
from psycopg.rows import TupleRow

from pgoutbox.database import operator_connection, sql
from pgoutbox.database.store import Store
from pgoutbox.database.worker_connection import is_transient_error, kind_of
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.operations.retention import MaintenanceFacts, MaintenanceRun, PartitionCache
from pgoutbox.settings import Settings

_FIRST_WITHIN_SECONDS: Final = 60.0
_TURN_SECONDS: Final = 30.0
_BATCH: Final = 2_000
_STOP_SECONDS: Final = 3.0
_EARLY: Final = 0.8
_JITTER: Final = 0.1


class Maintenance:
    """Takes turns of maintenance for this worker."""

    def __init__(self, settings: Settings, store: Store, telemetry: Telemetry) -> None:
        self._settings = settings
        self._store = store
        self._telemetry = telemetry
        self._interval_seconds = settings.maintenance_interval_seconds
        self._cache = PartitionCache()
        self._trouble: str | None = None
        self._stopping = threading.Event()
        self._connection: psycopg.Connection[TupleRow] | None = None
        self._taking: Future[Exception | None] | None = None

    async def stop(self) -> None:
        """Stop after the current transaction, and cancel it if it takes long."""
        self._stopping.set()
        if self._taking is not None and not await self._is_over_within(self._taking, _STOP_SECONDS):
            await self._cancel_statement()
            await self._is_over_within(
                self._taking, _STOP_SECONDS
            )  # The thread is a daemon, so a dead network cannot delay the exit.

    async def keep_taking_turns(self) -> None:
        """Take a turn in each interval, until cancelled. With an interval of 0 there are none."""
        if not self._interval_seconds:
            return
        # Workers often start together, and any of them may take the first turn.
        pause = min(self._interval_seconds, _FIRST_WITHIN_SECONDS) * random.random()
        while True:
            await asyncio.sleep(pause)
            await self.turn()
            pause = self._interval_seconds * random.uniform(1 - _JITTER, 1 + _JITTER)

    async def turn_unless(self, stopping: asyncio.Event) -> None:
        """Take one turn if it is due, until `stopping` is set. The turn ends within half a minute."""
        if not self._interval_seconds or stopping.is_set():
            return
        tasks = [asyncio.create_task(self.turn()), asyncio.create_task(stopping.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def turn(self) -> bool:
        """Take a turn if none is recent. Return whether it was taken. Errors are reported, not raised."""
        try:
            # A little less than the interval, so that a worker that asks once per interval gets every turn.
            rows = await self._store.claims.fetch(
                sql.BEGIN_MAINTENANCE_IF_DUE,
                {"interval_seconds": self._interval_seconds * _EARLY, "worker": self._store.worker},
            )
        except Exception as error:  # noqa: BLE001 - nothing that goes wrong here ends the worker
            if not is_transient_error(error):  # The worker itself reports passing errors of its connection.
                self._report_trouble(error)
            return False
        if not rows:
            return False
        try:
            await self._take(MaintenanceFacts.of_row(rows[0]))
        except Exception as error:  # noqa: BLE001 - nothing that goes wrong here ends the worker
            self._report_trouble(error)
        return True

    async def _take(self, facts: MaintenanceFacts) -> None:
        deadline = time.monotonic() + min(_TURN_SECONDS, self._interval_seconds)
        turn = MaintenanceRun(
            facts,
            self._cache,
            batch_size=_BATCH,
            is_over=lambda: self._stopping.is_set() or time.monotonic() > deadline,
            pause=self._stopping.wait,
        )
        if turn.has_work:
            taking = self._taking = Future[Exception | None]()
            taking.set_running_or_notify_cancel()  # An abandoned turn continues until its next pause.
            threading.Thread(target=self._work, args=(turn, taking), name="pgoutbox-maintenance", daemon=True).start()
            if not await self._is_over_within(taking, 2 * _TURN_SECONDS):
                await self._cancel_statement()
            error = await asyncio.wrap_future(taking)
            if error is not None:
                raise error
        if turn.errors:
            self._report_trouble(turn.errors[0])
        else:
            await self._store.claims.fetch(sql.MAINTENANCE_SUCCEEDED, {})
            if self._trouble is not None:
                self._trouble = None
                self._telemetry.report(logging.INFO, LogEvent.MAINTENANCE_BACK, "maintenance works again")
        self._report(turn)

    def _work(self, turn: MaintenanceRun, taking: Future[Exception | None]) -> None:
        """Run the turn in the thread."""
        try:
            with operator_connection.connect(self._settings, purpose="maintenance") as connection:
                self._connection = connection
                turn.take(connection)
        except Exception as error:  # noqa: BLE001 - it is raised where the turn is awaited, if it still is
            taking.set_result(error)
        else:
            taking.set_result(None)
        finally:
            self._connection = None

    async def _is_over_within(self, taking: Future[Exception | None], seconds: float) -> bool:
        await asyncio.wait([asyncio.wrap_future(taking)], timeout=seconds)
        return taking.done()

    async def _cancel_statement(self) -> None:
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(psycopg.Error):
                # In a thread, because a dead network blocks the caller.
                await asyncio.to_thread(connection.cancel_safe, timeout=_STOP_SECONDS)

    def _report(self, turn: MaintenanceRun) -> None:
        totals = turn.totals
        if totals.total or totals.partitions_made or totals.partitions_dropped or totals.key_heads or totals.acts:
            self._telemetry.report(
                logging.INFO,
                LogEvent.MAINTENANCE_DONE,
                "maintenance done",
                deleted_count=totals.total,
                partitions_made=totals.partitions_made,
                partitions_dropped=totals.partitions_dropped,
                key_heads=totals.key_heads,
                dedupe_keys=totals.dedupe_keys,
                acts=totals.acts,
            )

    def _report_trouble(self, error: Exception) -> None:
        """Report each kind of error once, until a turn succeeds."""
        reason = kind_of(error)
        if reason != self._trouble:
            self._trouble = reason
            hint = error.diag.message_primary if isinstance(error, psycopg.Error) else str(error)
            self._telemetry.report(
                logging.WARNING,
                LogEvent.MAINTENANCE_FAILED,
                "maintenance failed, trying again",
                reason=reason,
                detail=hint,
            )

"""The observability of a worker: metrics, health probes, and notifications to systemd. It takes no part in the work.

Features that are not configured are neither imported nor run. A thread of its own serves the pages, so that a handler
that blocks the event loop can be detected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Final, Self

import psycopg

from pgoutbox.database.worker_connection import is_transient_error
from pgoutbox.observability import systemd
from pgoutbox.observability.backlog import Backlog
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.observability.health import LoopWatch, databases_not_served, reasons_not_ready
from pgoutbox.observability.measures import Measures, WorkerStatus
from pgoutbox.observability.watched import Watched, WatchedDatabases, WatchedWorker
from pgoutbox.settings import Settings, parse_address

if TYPE_CHECKING:
    from pgoutbox.observability.http_server import HttpServer
    from pgoutbox.observability.opentelemetry import Exporter
    from pgoutbox.observability.prometheus import Page

_STALLED_SECONDS: Final = 15.0
_ANCHOR_SECONDS: Final = 30.0
_MAX_ROUND_TRIP_SECONDS: Final = 0.05

_ServerTime = Callable[[], Awaitable[datetime]]


class TelemetryServer:
    """Observes one worker within `async with`. With `serves` it listens on `metrics.address` and notifies systemd.

    Any thread may call `status`, which returns the current state of the worker. In a process with many databases any
    thread may call `workers`, which returns those that have `measures_of` a database. Raises `ConfigurationError` if
    the address is not available, and `MissingExtraError` without the needed extra.
    """

    def __init__(
        self,
        status: Callable[[], WorkerStatus],
        settings: Settings,
        telemetry: Telemetry,
        *,
        serves: bool,
        workers: Callable[[], Mapping[str, WatchedWorker]] | None = None,
    ) -> None:
        self._status = status
        self._settings = settings
        self._telemetry = telemetry
        self._serves = serves
        self._workers = workers
        self._watched: Watched | None = None
        self._server: HttpServer | None = None
        self._exporter: Exporter | None = None
        self._watchdog: asyncio.Task[None] | None = None

    @property
    def port(self) -> int | None:
        """The port of the pages, while they are served."""
        return None if self._server is None else self._server.port

    async def __aenter__(self) -> Self:
        address = self._settings.metrics.address if self._serves else None
        exports = self._settings.otel.metrics and _is_otel_set_up()
        if address is None and not exports:
            return self
        watched: Watched
        if self._workers is not None:
            watched = WatchedDatabases(self._status, self._workers, self._settings)
        else:
            measures = self._telemetry.measures = self._new_measures()
            watched = WatchedWorker(measures, self._status, self._telemetry.event_counts, backlog_of(self._settings))
        self._watched = watched
        if address is not None:
            self._server = self._start_server(watched, *parse_address(address))
        if exports:
            from pgoutbox.observability.opentelemetry import Exporter

            self._exporter = Exporter(watched)
            if self._telemetry.measures is not None:
                self._exporter.record(self._telemetry.measures)
        return self

    def measures_of(self, database: str) -> Measures | None:
        """Return new measures for the worker of one of many databases. None if nothing exports them."""
        if self._watched is None:
            return None
        measures = self._new_measures()
        if self._exporter is not None:
            self._exporter.record(measures, database=database)
        return measures

    def _new_measures(self) -> Measures:
        return Measures(max_label_values=self._settings.metrics.max_label_values)

    async def __aexit__(self, *_: object) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._exporter is not None:
            self._exporter.stop()
        if isinstance(self._watched, WatchedDatabases):
            self._watched.turns.stop()
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)

    def _start_server(self, worker: Watched, host: str, port: int) -> HttpServer:
        from pgoutbox.observability.http_server import HttpServer
        from pgoutbox.observability.prometheus import Exposition, Page

        exposition = Exposition(self._settings, worker=worker)
        watch = LoopWatch(asyncio.get_running_loop(), limit_seconds=_STALLED_SECONDS)

        def answer(path: str, accept: str | None) -> Page | None:
            if path == "/metrics":
                return exposition.answer_blocking(accept)
            if path not in ("/livez", "/readyz"):
                return None
            status = self._status()
            reasons = [reason for reason in (watch.reason_not_alive(), status.failure) if reason]
            lines = reasons or ["ok"]
            if path == "/readyz":
                poll_seconds = self._settings.poll_interval_seconds
                reasons += reasons_not_ready(status, poll_interval_seconds=poll_seconds)
                not_served = databases_not_served(status, poll_interval_seconds=poll_seconds)
                lines = [
                    *(reasons or ["ok"]),
                    *(f"not served: {name}: {reason}" for name, reason in not_served.items()),
                ]
            text = "".join(f"{line}\n" for line in lines)
            return Page(503 if reasons else 200, "text/plain; charset=utf-8", text.encode())

        server = HttpServer(host, port, answer)
        address = f"{host}:{server.port}"
        self._telemetry.report(logging.INFO, LogEvent.METRICS_SERVED, "metrics and probes are served", address=address)
        return server

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Notify systemd while the worker runs."""
        if self._serves:
            systemd.notify(READY=1, STATUS="at work")
            if (seconds := systemd.watchdog_seconds()) is not None:
                self._watchdog = asyncio.create_task(_feed(seconds), name="pgoutbox-watchdog")
        try:
            yield
        finally:
            if self._serves:
                systemd.notify(STOPPING=1, STATUS="stopping, waiting for handlers")


def backlog_of(settings: Settings) -> Backlog | None:
    """Return the reader of a database's gauges, None if they are switched off."""
    return Backlog(settings) if settings.metrics.backlog else None


@contextlib.asynccontextmanager
async def keeping_time(measures: Measures | None, server_time: _ServerTime) -> AsyncIterator[None]:
    """Read the database's time periodically, if there are measures, while a worker runs."""
    if measures is None:
        yield
        return
    await _set_server_time(measures, server_time)
    keeping = asyncio.create_task(_keep_time(measures, server_time), name="pgoutbox-time")
    try:
        yield
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping


async def _keep_time(measures: Measures, server_time: _ServerTime) -> None:
    while True:
        await asyncio.sleep(_ANCHOR_SECONDS)
        await _set_server_time(measures, server_time)


async def _set_server_time(measures: Measures, server_time: _ServerTime) -> None:
    loop = asyncio.get_running_loop()
    asked_at = loop.time()
    try:
        now = await server_time()
    except (psycopg.Error, OSError) as error:
        if not is_transient_error(error):
            raise
        return
    # The query may have waited behind a claim; then its answer is too imprecise.
    if loop.time() - asked_at <= _MAX_ROUND_TRIP_SECONDS or not measures.knows_server_time:
        measures.set_server_time(now, loop.time())


async def _feed(seconds: float) -> None:
    while True:
        systemd.notify(WATCHDOG=1)
        await asyncio.sleep(seconds)


def _is_otel_set_up() -> bool:
    # If the API was never imported, no provider can be set.
    if "opentelemetry.metrics" not in sys.modules:
        return False
    from pgoutbox.observability.opentelemetry import is_set_up

    return is_set_up()

"""The worker: what it delivers, checked before its first run, and the ways to run it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from pgoutbox.encryption import keyring_of
from pgoutbox.errors import ConfigurationError
from pgoutbox.observability.events import Telemetry
from pgoutbox.observability.measures import WorkerStatus
from pgoutbox.observability.server import TelemetryServer, keeping_time
from pgoutbox.outbox import Outbox
from pgoutbox.settings import Settings
from pgoutbox.topics import ALERT_TOPIC
from pgoutbox.transports import Transport
from pgoutbox.transports.redirect import RedirectRules
from pgoutbox.transports.registry import complete
from pgoutbox.worker.alert import handlers_of
from pgoutbox.worker.queues import name_all, parse_queues
from pgoutbox.worker.run import Setup, WorkerRun
from pgoutbox.worker.schedules.ticker import declared_by

_log = logging.getLogger("pgoutbox.worker")


class Worker:
    """Delivers the messages of some queues with the handlers of an outbox.

    `await worker.run()` works until `stop()`; `await worker.run_once()` delivers all due messages and returns;
    `await worker.drain()` also waits for retries. Several workers, on any machines, share the work through the rows.
    Without `settings` and `transports` it takes those of the outbox. `queues` are served strictly in their order, or by
    weights: `["critical:6", "default:1"]`. The name `*` means `default` and all queues that the outbox's topics define.

        asyncio.run(Worker(outbox, queues=["critical", "default"]).run_once())
    """

    telemetry_server: TelemetryServer

    def __init__(
        self,
        outbox: Outbox,
        *,
        settings: Settings | None = None,
        queues: Sequence[str] = ("default",),
        transports: Mapping[str, Transport] | None = None,
        _shared: Any = None,  # noqa: ANN401 - Shared, whose part for Django has no complete type
        _telemetry: Telemetry | None = None,
    ) -> None:
        settings = settings if settings is not None else outbox.settings
        if not outbox.handlers:
            raise ConfigurationError("the outbox has no handlers: register one with @outbox.handler(topic)")
        handlers = handlers_of(outbox, settings)
        for topic in sorted(outbox.hooks.keys() - handlers.keys()):
            raise ConfigurationError(
                f"on_failed: topic {topic!r} has a hook and no handler in this outbox: register both in the same outbox"
            )
        topics = outbox.topics.values()
        defined_queues = sorted({topic.queue for topic in topics if topic.queue is not None})
        shares = name_all(parse_queues(queues), defined_queues)
        served = {share.name for share in shares}
        own = handlers.keys() - {ALERT_TOPIC, *outbox.hooks.values()}  # These follow the queues of others.
        queue_of = {name: topic.queue or "default" for topic in topics for name in (topic.name, *topic.aliases)}
        unserved = {name: q for name in sorted(own) if (q := queue_of.get(name, "default")) not in served}
        RedirectRules.of(settings.redirect)
        self.name: str = ""  # Of the last run. One that is drawn here would be that of all children of a fork.
        self.telemetry: Telemetry = _telemetry or Telemetry(_log, database=settings.database)
        self._stopping = asyncio.Event()
        self._run: WorkerRun | None = None
        self._setup = Setup(
            settings=settings,
            telemetry=self.telemetry,
            handlers=handlers,
            schedules=declared_by(outbox),
            hooks={topic: handlers[hook].retry.max_attempts for topic, hook in outbox.hooks.items()},
            middlewares=outbox.middlewares,
            keyring=keyring_of(settings.encryption_keys),
            transports=transports if transports is not None else complete(outbox.transports, settings),
            shared=_shared,
            fixed_destinations={
                name: t.destination for t in topics if isinstance(t.destination, str) for name in (t.name, *t.aliases)
            },
            queues=shares,
            defined_queues=defined_queues,
            is_default=shares == name_all(parse_queues(outbox.default_queues), defined_queues),
            unserved=unserved,
            own_topics=own - unserved.keys(),
            stopping=self._stopping,
        )

    async def run(self) -> None:
        """Work until `stop()`. Wait first for a server that is down, starting or full, or for the adoption of a copy.

        Raises `ConfigurationError` or `SchemaError` for an unsuitable database, and the driver's error for a permanent
        refusal, such as a wrong password. Raises `PgOutboxError` if half of the slots are lost to handlers that do not
        return after their timeout: the error names their topics, and only a restart of the process helps.
        """
        async with self._at_work(ends_by_itself=False) as run:
            await run.work()

    async def run_once(self, *, max_messages: int | None = None, max_seconds: float | None = None) -> None:
        """Deliver all messages that are due now, then return. Overlapping runs share the work.

        It claims at most `max_messages`, and none after `max_seconds`. Then it stops like a worker: running handlers
        may end within the grace time.

        Unlike `run`, it and `drain` do not wait for the server: they raise an error of the first connection, and
        `SchemaError` in a copy of the database.

        Raises `ValueError` for a bound that is not positive.
        """
        for name, bound in (("max_messages", max_messages), ("max_seconds", max_seconds)):
            if bound is not None and not bound > 0:
                raise ValueError(f"{name}: must be greater than 0, not {bound}")
        async with self._ending_after(max_seconds), self._at_work(ends_by_itself=True) as run:
            claimed_count = await run.deliver_due(most=max_messages)
            if await run.failure_alerts.look():
                left = None if max_messages is None else max_messages - claimed_count
                await run.deliver_due(most=left)

    @contextlib.asynccontextmanager
    async def _ending_after(self, seconds: float | None) -> AsyncIterator[None]:
        if seconds is None:
            yield
            return
        is_over = False

        def end() -> None:
            nonlocal is_over
            is_over = not self._stopping.is_set()
            self.stop()

        timer = asyncio.get_running_loop().call_later(seconds, end)
        try:
            yield
        finally:
            timer.cancel()
            if is_over:
                self._stopping.clear()  # The time of one run does not stop the next one.

    async def drain(self) -> None:
        """Work until no message is due, in flight or waiting for a retry in these queues.

        It does not wait for scheduled messages that were never attempted.
        """
        async with self._at_work(ends_by_itself=True) as run:
            await run.drain()
            if await run.failure_alerts.look():
                await run.deliver_due()  # A drain does not wait for its own alerts.

    def stop(self) -> None:
        """Begin to stop: stop claiming, wait for handlers up to the grace time, release the rest. Idempotent.

        Call it on the event loop.
        """
        if self._run is None:
            self._stopping.set()
        else:
            self._run.state.stop()

    @property
    def has_running_handlers(self) -> bool:
        """Whether a handler still runs after the worker has ended: in a thread, or ignoring its cancellation."""
        return self._run is not None and self._run.pool.has_running_handlers

    def status(self) -> WorkerStatus:
        """The worker's health. It only reads attributes, so that any thread can call it."""
        run = self._run
        return WorkerStatus(is_stopping=self._stopping.is_set()) if run is None else run.status()

    async def rest(self) -> None:
        """Close the connections that are not used, except that of the listener."""
        if self._run is not None:
            await self._run.rest()

    @contextlib.asynccontextmanager
    async def _at_work(self, *, ends_by_itself: bool) -> AsyncIterator[WorkerRun]:
        if self._setup.shared is not None:  # The worker of all databases is observed as a whole.
            run = self._run = self._new_run(ends_by_itself=ends_by_itself)
            async with run.at_work(), keeping_time(self.telemetry.measures, run.state.store.server_time):
                yield run
            return
        async with TelemetryServer(
            self.status, self._setup.settings, self.telemetry, serves=not ends_by_itself
        ) as self.telemetry_server:
            run = self._run = self._new_run(ends_by_itself=ends_by_itself)
            server_time = run.state.store.server_time
            async with (
                run.at_work(),
                self.telemetry_server.at_work(),
                keeping_time(self.telemetry.measures, server_time),
            ):
                yield run

    def _new_run(self, *, ends_by_itself: bool) -> WorkerRun:
        run = WorkerRun(self._setup, ends_by_itself=ends_by_itself)
        # Another run of this worker may be at work, or its handlers may still hold messages in its name.
        self.name = run.state.store.worker
        return run

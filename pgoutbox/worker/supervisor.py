"""Worker processes: signals and exit codes of one process, supervision of several."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, assert_never

from pgoutbox.database.server import OldPackageError
from pgoutbox.observability import systemd
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.outbox import Outbox
from pgoutbox.settings import SUPERVISOR_FD_VARIABLE, Settings
from pgoutbox.text import describe
from pgoutbox.worker.backoff import Backoff
from pgoutbox.worker.multi_worker import MultiWorker
from pgoutbox.worker.threads import leave
from pgoutbox.worker.worker import Worker

_log = logging.getLogger("pgoutbox.worker.supervisor")

_STEADY_SECONDS = 60.0
_USAGE_ERROR = 2
_REFUSED = 3  # Of a child whose package is too old: the supervisor ends with 1.


def run_worker(
    outbox: Outbox,
    settings: Settings,
    *,
    queues: Sequence[str],
    has_many: bool = False,
    mode: Literal["run", "once", "drain"],
    max_messages: int | None = None,
    max_seconds: float | None = None,
) -> int:
    """Run one worker in this process until it is done or stopped. Return the exit code or raise the worker's error.

    With `has_many` it serves all databases of the list. `max_messages` and `max_seconds` are those of
    `Worker.run_once`.

    SIGTERM and SIGINT stop it gracefully, a second signal at once. A handler that still runs after the grace period
    does not keep the process alive.
    """
    worker = (MultiWorker if has_many else Worker)(outbox, settings=settings, queues=queues)
    # Imported modules stay until the end, so the garbage collector need not visit them again.
    gc.freeze()
    work: Callable[[], Awaitable[None]]
    match mode:
        case "run":
            work = worker.run
        case "once":
            work = partial(worker.run_once, max_messages=max_messages, max_seconds=max_seconds)
        case "drain":
            work = worker.drain
        case _:
            assert_never(mode)
    try:
        asyncio.run(_run(worker, work))
    except OldPackageError as error:
        if SUPERVISOR_FD_VARIABLE not in os.environ:
            raise
        Telemetry(_log).report(logging.CRITICAL, LogEvent.WORKER_FAILED, "worker failed", reason=str(error))
        return _REFUSED
    return 0


async def _run(worker: Worker | MultiWorker, work: Callable[[], Awaitable[None]]) -> None:
    loop = asyncio.get_running_loop()
    signals_seen = 0

    def on_signal(number: int) -> None:
        nonlocal signals_seen
        signals_seen += 1
        if signals_seen > 1:
            leave(128 + number)
        worker.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    if isinstance(worker, MultiWorker):
        loop.add_signal_handler(signal.SIGHUP, worker.read_databases)
    supervisor_fd = os.environ.get(SUPERVISOR_FD_VARIABLE)
    if supervisor_fd is not None:
        # The supervisor never writes to the pipe: end of file means that it has ended.
        loop.add_reader(int(supervisor_fd), _stop_orphan, worker, loop, int(supervisor_fd))
    try:
        await work()
    except Exception as error:
        if not worker.has_running_handlers:
            raise
        reason = describe(error).partition("\n")[0]  # Further lines may quote values of rows.
        Telemetry(_log).report(logging.CRITICAL, LogEvent.WORKER_FAILED, "worker failed", reason=reason)
        leave(1)
    if worker.has_running_handlers:
        leave(0)


def _stop_orphan(worker: Worker | MultiWorker, loop: asyncio.AbstractEventLoop, supervisor_fd: int) -> None:
    loop.remove_reader(supervisor_fd)
    worker.stop()


@dataclass(slots=True)
class _Child:
    number: int
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    start_at: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(0.5, 30.0))
    exit_code: int | None = None


def supervise(
    arguments: Sequence[str],
    processes: int,
    *,
    environment_of: Callable[[int], Mapping[str, str]] = lambda _: {},
    passes_reloads: bool = False,
) -> int:
    """Run `python -m pgoutbox worker ARGUMENTS` in several processes. Return the exit code.

    A process that dies is restarted, with growing pauses while it keeps dying. SIGTERM and SIGINT are passed on; a
    second signal kills. A process that exits with 0 is done. Exit code 2, a usage or configuration error, ends all
    processes. They stop by themselves if this process is killed. `environment_of` returns the extra variables of a
    process, by its number from 0. A restarted process keeps the number. With `passes_reloads` SIGHUP is passed on too,
    for workers of several databases.
    """
    return _Supervisor(arguments, processes, environment_of, passes_reloads=passes_reloads).run()


class _Supervisor:
    def __init__(
        self,
        arguments: Sequence[str],
        processes: int,
        environment_of: Callable[[int], Mapping[str, str]],
        *,
        passes_reloads: bool,
    ) -> None:
        self._passes_reloads = passes_reloads
        self._environment_of = environment_of
        self._watchdog_seconds = systemd.watchdog_seconds()
        self._command = [sys.executable, "-m", "pgoutbox", "worker", *arguments]
        self._children = [_Child(number) for number in range(processes)]
        self._telemetry = Telemetry(_log)
        self._signals_seen = 0
        self._event_fd, self._event_writer = os.pipe()
        os.set_blocking(self._event_writer, False)
        self._life_fd, self._life_writer = os.pipe()

    def run(self) -> int:
        former = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        former[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        if self._passes_reloads:
            former[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda number, _: self._signal_all(number))
        former_wakeup = signal.set_wakeup_fd(self._event_writer, warn_on_full_buffer=False)
        try:
            self._start_due()
            systemd.notify(READY=1, STATUS=f"supervises {len(self._children)} worker processes")
            while not self._is_over():
                self._start_due()
                self._wait_for_event()
                self._reap()
        finally:
            signal.set_wakeup_fd(former_wakeup)
            for number, handler in former.items():
                signal.signal(number, handler)
            for fd in (self._event_fd, self._event_writer, self._life_fd, self._life_writer):
                os.close(fd)
        return max((child.exit_code or 0 for child in self._children), default=0)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._signals_seen += 1
        systemd.notify(STOPPING=1, STATUS="stopping")
        self._signal_all(number if self._signals_seen == 1 else signal.SIGKILL)

    def _signal_all(self, number: int) -> None:
        for child in self._children:
            if child.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    child.process.send_signal(number)

    def _is_over(self) -> bool:
        if any(child.process is not None for child in self._children):
            return False
        return self._signals_seen > 0 or all(child.exit_code is not None for child in self._children)

    def _start_due(self) -> None:
        now = time.monotonic()
        for child in self._children:
            waits = child.process is None and child.exit_code is None and self._signals_seen == 0
            if waits and child.start_at <= now:
                child.process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(self._life_fd,),
                    env=self._environment(child),
                    start_new_session=True,
                )
                child.started_at = now
                if self._signals_seen > 0:
                    child.process.terminate()  # The signal came while it was being started.
                self._telemetry.report(
                    logging.INFO, LogEvent.PROCESS_STARTED, "worker process started", pid=child.process.pid
                )

    def _environment(self, child: _Child) -> dict[str, str]:
        # systemd watches this process: a child's messages would hide the state of the others.
        inherited = {name: value for name, value in os.environ.items() if name not in systemd.VARIABLES}
        return {**inherited, **self._environment_of(child.number), SUPERVISOR_FD_VARIABLE: str(self._life_fd)}

    def _wait_for_event(self) -> None:
        import select

        waiting = [c.start_at for c in self._children if c.process is None and c.exit_code is None]
        timeout = max(0.0, min(waiting) - time.monotonic()) if waiting and not self._signals_seen else None
        if (seconds := self._watchdog_seconds) is not None:
            systemd.notify(WATCHDOG=1)
            timeout = seconds if timeout is None else min(timeout, seconds)
        readable, _, _ = select.select([self._event_fd], [], [], timeout)
        if readable:
            os.read(self._event_fd, 4096)

    def _reap(self) -> None:
        for child in self._children:
            if child.process is None or (code := child.process.poll()) is None:
                continue
            pid, child.process = child.process.pid, None
            if code in (0, _USAGE_ERROR, _REFUSED) or self._signals_seen:
                stopped = self._signals_seen > 0 and code == -signal.SIGTERM  # It had no signal handler yet.
                child.exit_code = 0 if stopped else 1 if code == _REFUSED else code if code >= 0 else 128 - code
                if code in (_USAGE_ERROR, _REFUSED):
                    self._end_all()
                continue
            now = time.monotonic()
            if now - child.started_at > _STEADY_SECONDS:
                child.backoff.reset()
            child.start_at = now + child.backoff.next()
            self._telemetry.report(
                logging.ERROR, LogEvent.PROCESS_DIED, "worker process died, starting another", pid=pid, exit_code=code
            )

    def _end_all(self) -> None:
        """Stop without restarts: a mistake in the settings affects all processes."""
        self._signals_seen += 1
        self._signal_all(signal.SIGTERM)

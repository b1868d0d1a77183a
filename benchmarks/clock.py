"""One clock for all systems: from the first handler call of any process until the database has recorded the last end.

The clock needs only a handler of a library, so it is the same for systems in other languages and for several
processes. It does not include start, imports and connection: every process waits for the signal to start.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.processes import Child, ChildError, running
from benchmarks.programs.lifeline import Tally

_DEADLINE_SECONDS = 600.0
# The clock starts to query the database at this share; the queries must not affect the measurement.
_NEARLY_ALL = 0.97
_ASK_EVERY_SECONDS = 0.004


class Drained(NamedTuple):
    """The duration of a drain, and the CPU time of the worker processes. Programs on Node.js do not report theirs."""

    seconds: float
    cpu_seconds: float


@dataclass(slots=True)
class _Progress:
    """The counts that the children have reported so far."""

    first_at: float = float("inf")
    handled_count: int = 0
    total_count: int = 0
    cpu_seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def follow(self, worker: Child) -> None:
        for line in worker.lines():
            with self.lock:
                for name, value in line.items():
                    assert isinstance(value, (int, float))
                    match name:
                        case "first_at":
                            self.first_at = min(self.first_at, float(value))
                        case "handled_count":
                            self.handled_count += int(value)
                        case "total_count":
                            self.total_count += int(value)
                        case "cpu_seconds":
                            self.cpu_seconds += float(value)
                        case _:
                            raise ChildError(f"a worker said {line}")


def drain(
    command: Sequence[str],
    *,
    dsn: str,
    count: int,
    is_unfinished: Callable[[], bool],
    processes: int = 1,
    environment: Mapping[str, str] | None = None,
) -> Drained:
    """Let this number of processes deliver a backlog of `count` messages, which is in the database already.

    `is_unfinished` returns whether work is left. Raise `ChildError` if the handlers were not called exactly `count`
    times.
    """
    progress = _Progress()
    with ThreadPoolExecutor(processes) as threads, contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(running(command[0], command, dsn=dsn, environment=environment))
            for _ in range(processes)
        ]
        for worker in workers:
            worker.read()  # The child is ready.
        followers = [threads.submit(progress.follow, worker) for worker in workers]
        try:
            for worker in workers:
                worker.go()
            ask_from = min(_NEARLY_ALL * count, count - processes * Tally.STEP)
            _wait(followers, lambda: progress.handled_count >= ask_from)
            _wait(followers, lambda: not is_unfinished())
            ended_at = time.monotonic()
        finally:
            for worker in workers:
                worker.interrupt()
        for follower in followers:
            follower.result(timeout=60)
    if progress.total_count != count:
        raise ChildError(f"{' '.join(command[1:])}: {progress.total_count} handler calls for {count} messages")
    return Drained(ended_at - progress.first_at, progress.cpu_seconds)


def _wait(followers: Sequence[Future[None]], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not condition():
        for follower in followers:
            if follower.done():
                follower.result()
                raise ChildError("a worker ended before the backlog was delivered")
        if time.monotonic() > deadline:
            raise ChildError(f"the backlog was not delivered within {_DEADLINE_SECONDS:g} s")
        time.sleep(_ASK_EVERY_SECONDS)

"""Shared by all programs: they end with their parent, send answers, and time a library's calls."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


_go = threading.Event()


def hold_lifeline() -> None:
    """End this process when its standard input ends, that is, when its parent process ends."""
    threading.Thread(target=_wait_for_the_end, name="lifeline", daemon=True).start()


def wait_for_go() -> None:
    """Tell the parent that all modules are imported, and wait for the signal to start."""
    say(ready=True)
    _go.wait()


def _wait_for_the_end() -> None:
    while os.read(sys.stdin.fileno(), 1):
        _go.set()
    os._exit(1)


def say(**fields: object) -> None:
    """Write one line of JSON for the parent."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


class Tally:
    """Count handler calls, and report the first one and every 250 after it to the parent.

    The parent's clock starts with the first call of any process. From the count it knows when to query the database for
    the end. So it works for every system in any language and with any number of processes.
    """

    STEP = 250

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._cpu_before = 0.0

    def count(self) -> None:
        """Count a handler call. Any thread may call it."""
        number = next(self._numbers)
        if number == 0:
            self._cpu_before = time.process_time()
            say(first_at=time.monotonic())
        if (number + 1) % self.STEP == 0:
            say(handled_count=self.STEP)

    def report(self) -> None:
        """Report the total to the parent, and the CPU time since the first call."""
        say(total_count=next(self._numbers), cpu_seconds=time.process_time() - self._cpu_before)


class Meter:
    """The time from the first claim's start to the last finish's end, by the clock and by this process's CPU.

    The measured calls are the same for both libraries: the calls that claim a batch and that write finished messages.
    So the start of the interpreter, the connection and the wait for the end of the queue do not count.
    """

    def __init__(self) -> None:
        self.handled_count = 0
        self.claim_count = 0
        self.finish_count = 0
        self._began: tuple[float, float] | None = None
        self._ended = (0.0, 0.0)

    def begin(self) -> None:
        """Note that a claim is about to start."""
        self.claim_count += 1
        if self._began is None:
            self._began = (time.monotonic(), time.process_time())

    def end(self) -> None:
        """Note that a finish has been answered."""
        self.finish_count += 1
        self._ended = (time.monotonic(), time.process_time())

    @property
    def began_at(self) -> float:
        """Return when the first claim started."""
        return (self._began or self._ended)[0]

    def report(self, **more: object) -> None:
        """Report the times, and other values, to the parent."""
        began = self._began or self._ended
        say(
            seconds=self._ended[0] - began[0],
            cpu_seconds=self._ended[1] - began[1],
            handled_count=self.handled_count,
            claim_count=self.claim_count,
            finish_count=self.finish_count,
            **more,
        )


def before(function: Callable[P, R], note: Callable[[], None]) -> Callable[P, R]:
    """Return the function with a call of `note` when it is called."""

    def noted(*args: P.args, **kwargs: P.kwargs) -> R:
        note()
        return function(*args, **kwargs)

    return noted


def after(function: Callable[P, Awaitable[R]], note: Callable[[], None]) -> Callable[P, Awaitable[R]]:
    """Return the function with a call of `note` when it has returned."""

    async def noted(*args: P.args, **kwargs: P.kwargs) -> R:
        answer = await function(*args, **kwargs)
        note()
        return answer

    return noted


def replace_method(owner: type, name: str, wrapper: Callable[..., object], note: Callable[[], None]) -> None:
    """Replace a method of a class by `wrapper` of it."""
    setattr(owner, name, wrapper(cast("Callable[..., Awaitable[object]]", getattr(owner, name)), note))

"""What all programs share: their end with the parent's end, their answers, and the clock around a library's calls."""

from __future__ import annotations

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
    """End this process when its standard input ends, which is to say with the process that started it."""
    threading.Thread(target=_wait_for_the_end, name="lifeline", daemon=True).start()


def wait_for_go() -> None:
    """Tell the parent that everything is imported, and wait until it says go."""
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
    """Counts handler calls and tells the parent of the first one and of every 250 that follow.

    The parent's clock starts with the first call of any process, and from the count it knows when to ask the database
    whether all is finished. So it fits every system, whatever language it is written in, and any number of processes.
    """

    STEP = 250

    def __init__(self) -> None:
        self._count = 0

    def count(self) -> None:
        """A handler was called."""
        if self._count == 0:
            say(first_at=time.monotonic())
        self._count += 1
        if self._count % self.STEP == 0:
            say(handled_count=self.STEP)

    def report(self) -> None:
        """Tell the parent how many there were in all."""
        say(total_count=self._count)


class Meter:
    """The time from the first claim's start to the last finish's end, by the clock and by this process's CPU.

    It stands at the same place around both libraries: at the calls that claim a batch and that write finished ones. So
    starting the interpreter, connecting and looking for the end of the queue count for none.
    """

    def __init__(self) -> None:
        self.handled_count = 0
        self.claim_count = 0
        self.finish_count = 0
        self._began: tuple[float, float] | None = None
        self._ended = (0.0, 0.0)

    def begin(self) -> None:
        """A claim is about to start."""
        self.claim_count += 1
        if self._began is None:
            self._began = (time.monotonic(), time.process_time())

    def end(self) -> None:
        """A finish has been answered."""
        self.finish_count += 1
        self._ended = (time.monotonic(), time.process_time())

    @property
    def began_at(self) -> float:
        """When the first claim started."""
        return (self._began or self._ended)[0]

    def report(self, **more: object) -> None:
        """Tell the parent, and what else there is to tell."""
        began = self._began or self._ended
        say(
            seconds=self._ended[0] - began[0],
            cpu_seconds=self._ended[1] - began[1],
            handled_count=self.handled_count,
            claim_count=self.claim_count,
            finish_count=self.finish_count,
            **more,
        )


def before(function: Callable[P, Awaitable[R]], note: Callable[[], None]) -> Callable[P, Awaitable[R]]:
    """The same function, with `note` called when it starts."""

    async def noted(*args: P.args, **kwargs: P.kwargs) -> R:
        note()
        return await function(*args, **kwargs)

    return noted


def after(function: Callable[P, Awaitable[R]], note: Callable[[], None]) -> Callable[P, Awaitable[R]]:
    """The same function, with `note` called when it has returned."""

    async def noted(*args: P.args, **kwargs: P.kwargs) -> R:
        answer = await function(*args, **kwargs)
        note()
        return answer

    return noted


def replace_method(owner: type, name: str, wrapper: Callable[..., object], note: Callable[[], None]) -> None:
    """Put `wrapper` around a method of a class."""
    setattr(owner, name, wrapper(cast("Callable[..., Awaitable[object]]", getattr(owner, name)), note))

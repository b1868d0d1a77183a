"""Threads that belong to attempts.

The attempt that submits work to them lasts at least as long as that work. Work that waits for a free thread until the
timeout of its attempt never begins.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Final, NoReturn, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


class ThreadOwner:
    """The caller of an executor. This one is not an attempt: its threads concern nobody."""

    __slots__ = ()

    def watch_thread(self, thread: Future[object], /) -> None:
        """Remember the future of a thread that the caller has started."""

    def may_begin(self) -> Callable[[], bool]:
        """Return a function that tells a thread whether it may still begin the caller's work."""
        return lambda: True

    def pause_timeout(self) -> None:
        """Set no timeout during a wait for the worker itself, which must have a limit of its own."""

    def restart_timeout(self) -> None:
        """Begin the timeout of the attempt again, after `pause_timeout`."""


_NOBODY: Final = ThreadOwner()
# Set by the slot that runs an attempt.
thread_owner: ContextVar[ThreadOwner] = ContextVar("thread_owner", default=_NOBODY)

# The event loop itself submits these. A look-up has no effect that could come too late.
_LOOK_UPS: Final = (socket.getaddrinfo, socket.getnameinfo)


class AttemptThreads(ThreadPoolExecutor):
    """An executor that tells the calling attempt, if there is one, of its work. It uses the threads of `inner`."""

    def __init__(self, max_workers: int | None = None, *, inner: Executor | None = None) -> None:
        super().__init__(max_workers, thread_name_prefix="pgoutbox-handler")
        self._inner = inner

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run the function in a thread, as part of the calling attempt.

        The result is a `TimeoutError` if the attempt has passed its timeout before a thread was free.
        """
        submit = super().submit if self._inner is None else self._inner.submit
        owner = _NOBODY if fn in _LOOK_UPS else thread_owner.get()
        may_begin = owner.may_begin()

        def work() -> R:
            if not may_begin():
                raise TimeoutError("no thread was free before the timeout of the attempt")
            return fn(*args, **kwargs)

        future = submit(work)
        owner.watch_thread(cast("Future[object]", future))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - the base class has it
        """Shut the threads down, including those of `inner`."""
        super().shutdown(wait, cancel_futures=cancel_futures)
        if self._inner is not None:
            self._inner.shutdown(wait, cancel_futures=cancel_futures)


def own_default_threads(max_workers: int) -> None:
    """Make `asyncio.to_thread` part of the attempt that calls it, on the running event loop.

    An application's own default executor goes on working for it, and for the attempts. Without one, there are
    `max_workers` threads: asyncio's own number depends on the processors only.
    """
    loop = asyncio.get_running_loop()
    # Only asyncio's own loops show their executor. That of another loop is replaced.
    present = getattr(loop, "_default_executor", None)
    if not isinstance(present, AttemptThreads):
        loop.set_default_executor(AttemptThreads(max_workers, inner=present))


def leave(code: int) -> NoReturn:
    """End the process without its exit functions: the event loop and the interpreter would wait for hanging threads."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

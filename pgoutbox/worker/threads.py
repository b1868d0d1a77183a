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
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class ThreadOwner:
    """The caller of an executor. This one is not an attempt: its threads concern nobody."""

    __slots__ = ()

    def watch_thread(self, thread: Future[Any], /) -> None:
        """Remember the future of a thread that the caller has started."""

    def may_begin(self) -> Callable[[], bool]:
        """Return a function that tells a thread whether it may still begin the caller's work."""
        return lambda: True

    def pause_timeout(self) -> None:
        """Set no timeout during a wait for the worker itself, which must have a limit of its own."""

    def restart_timeout(self) -> None:
        """Begin the timeout of the attempt again, after `pause_timeout`."""

    def time(self, attempts: Sequence[object]) -> None:
        """Begin the timeout again, for these attempts. Others that wait for them do not time out with them."""


_NOBODY: Final = ThreadOwner()
# Set by the slot that runs an attempt.
thread_owner: ContextVar[ThreadOwner] = ContextVar("thread_owner", default=_NOBODY)

# The event loop itself submits these. A look-up has no effect that could come too late.
_LOOK_UPS: Final = (socket.getaddrinfo, socket.getnameinfo)


class _Work(Future[R]):
    """A call that waits for a thread, and its result."""

    def __init__(self, call: Callable[[], R], may_begin: Callable[[], bool]) -> None:
        super().__init__()
        self._call = call
        self._may_begin = may_begin

    def run(self) -> None:
        """Make the call, unless it was cancelled before."""
        if not self.set_running_or_notify_cancel():
            return
        try:
            result = self._call() if self._may_begin() else _too_late()
        except BaseException as error:  # noqa: BLE001 - raised again by the future
            self.set_exception(error)
            del self  # Its traceback has this frame, and with it what the call has left open.
        else:
            self.set_result(result)


def _too_late() -> NoReturn:
    raise TimeoutError("no thread was free before the timeout of the attempt")


class AttemptThreads(ThreadPoolExecutor):
    """An executor that tells the calling attempt, if there is one, of its work. It uses the threads of `inner`.

    A thread does all the work that it finds, one after the other. Before each one it begins another thread if more work
    waits. So work that blocks delays no other, and much work that ends at once changes threads once and not each time.
    """

    def __init__(self, max_workers: int | None = None, *, inner: Executor | None = None) -> None:
        super().__init__(max_workers, thread_name_prefix="pgoutbox-handler")
        self._inner = inner
        self._begin_thread = super().submit if inner is None else inner.submit
        # No lock: threads that wait for a lock take turns for each message. Work is put here before the mark is read,
        # and a thread resets the mark before it looks for work. So no work is overlooked.
        self._waiting: deque[_Work[Any]] = deque()
        self._is_beginning = False  # A thread will begin, and look for work.
        self._returned: deque[asyncio.Future[None]] = deque()
        self._is_waking = False  # The event loop will look for results.

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run the function in a thread, as part of the calling attempt.

        The result is a `TimeoutError` if the attempt has passed its timeout before a thread was free.
        """
        owner = _NOBODY if fn in _LOOK_UPS else thread_owner.get()
        work = _Work(partial(fn, *args, **kwargs), owner.may_begin())
        self._waiting.append(work)
        if not self._is_beginning:
            try:
                self._begin()
            except BaseException:  # Shut down, or the process can have no more threads.
                work.cancel()
                raise
        owner.watch_thread(work)
        return work

    def _begin(self) -> None:
        self._is_beginning = True
        try:
            beginning = self._begin_thread(self._serve)
        except BaseException:
            self._is_beginning = False
            raise
        beginning.add_done_callback(self._note_end)

    def _note_end(self, thread: Future[None]) -> None:
        if thread.cancelled():  # By a shutdown, maybe of the application's own executor.
            self._is_beginning = False
            self._cancel_waiting()

    def _serve(self) -> None:
        self._is_beginning = False
        while work := self._next():
            work.run()
            if self._inner is not None and self._is_beginning:
                return  # Others who use these threads come first.

    def _next_waiting(self) -> _Work[Any] | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def _next(self) -> _Work[Any] | None:
        work = self._next_waiting()
        if self._waiting and not self._is_beginning:
            with suppress(Exception):  # As in `submit`. This thread does the rest.
                self._begin()
        return work

    def returned(self, thread: Future[Any]) -> asyncio.Future[None]:
        """Return a future of the running event loop that is done when this work has ended. All calls have one loop.

        It is woken once for all work that ends in the meantime, where `asyncio.wrap_future` wakes it each time.
        """
        waiter = asyncio.get_running_loop().create_future()
        thread.add_done_callback(lambda _: self._return(waiter))
        return waiter

    def _return(self, waiter: asyncio.Future[None]) -> None:
        self._returned.append(waiter)
        if not self._is_waking:
            self._is_waking = True
            with suppress(RuntimeError):  # The loop is closed.
                waiter.get_loop().call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_waking = False
        while self._returned:
            waiter = self._returned.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - the base class has it
        """Shut the threads down, including those of `inner`."""
        super().shutdown(wait, cancel_futures=cancel_futures)
        if self._inner is not None:
            self._inner.shutdown(wait, cancel_futures=cancel_futures)

    def _cancel_waiting(self) -> None:
        while work := self._next_waiting():
            work.cancel()


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

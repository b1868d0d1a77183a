"""Threads that belong to attempts: the attempt that submits work to them lasts at least as long as that work."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Final, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

# Set by the slot that runs an attempt. Called with the future of each thread that the attempt starts.
watch_thread: ContextVar[Callable[[Future[object]], None]] = ContextVar("watch_thread", default=lambda _: None)

# The event loop itself submits these. A look-up has no effect that could come too late.
_LOOK_UPS: Final = (socket.getaddrinfo, socket.getnameinfo)


class AttemptThreads(ThreadPoolExecutor):
    """An executor that tells the calling attempt, if there is one, of its work. It uses the threads of `inner`."""

    def __init__(self, max_workers: int | None = None, *, inner: Executor | None = None) -> None:
        super().__init__(max_workers, thread_name_prefix="pgoutbox-handler")
        self._inner = inner

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run the function in a thread, as part of the calling attempt."""
        submit = super().submit if self._inner is None else self._inner.submit
        future = submit(fn, *args, **kwargs)
        if fn not in _LOOK_UPS:
            watch_thread.get()(cast("Future[object]", future))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - the base class has it
        """Shut the threads down, including those of `inner`."""
        super().shutdown(wait, cancel_futures=cancel_futures)
        if self._inner is not None:
            self._inner.shutdown(wait, cancel_futures=cancel_futures)


def own_default_threads() -> None:
    """Make `asyncio.to_thread` part of the attempt that calls it, on the running event loop.

    An application's own default executor goes on working for it, and for the attempts.
    """
    loop = asyncio.get_running_loop()
    # Only asyncio's own loops show their executor. That of another loop is replaced.
    present = getattr(loop, "_default_executor", None)
    if not isinstance(present, AttemptThreads):
        loop.set_default_executor(AttemptThreads(inner=present))

"""Django's connections in a worker: close stale ones around each handler, as Django does around each request.

Django opens one connection per thread and database. Only the signals of a request check whether it is broken or older
than `CONN_MAX_AGE`, and a worker has no requests. Handlers in threads use the connections of their thread. Async
handlers share those of the thread in which asgiref runs all sync code.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextvars import Context
from dataclasses import replace
from typing import Any, Final, cast

from pgoutbox.handlers import Handler
from pgoutbox.worker.threads import AttemptThreads

_log = logging.getLogger("pgoutbox.worker.django_orm")

_CLOSE_SECONDS: Final = 1.0


class DjangoConnections:
    """Wraps the handlers of one worker, and closes the connections that they leave open when the worker ends.

    An error while closing is only logged, and does not change the outcome of the handler.
    """

    @classmethod
    def in_use(cls) -> DjangoConnections | None:
        """Return an instance if the application has loaded and configured Django, else None."""
        if "django.db" not in sys.modules:
            return None
        from django.conf import settings

        return cls() if settings.configured else None

    def __init__(self) -> None:
        from asgiref.sync import SyncToAsync
        from django.db import connections

        if not isinstance(SyncToAsync.single_thread_executor, AttemptThreads):
            SyncToAsync.single_thread_executor = AttemptThreads(inner=SyncToAsync.single_thread_executor)
        self._connections = connections
        self._lock = threading.Lock()
        self._left_open: set[Any] = set()  # Connections of threads in which no handler runs.
        self._is_closed = False
        self._async_count = 0
        self._async_was_used = False
        self._tidying: asyncio.Task[None] | None = None

    def around(self, handler: Handler) -> Handler:
        """Return the handler, wrapped so that stale connections are closed before and after it."""
        if handler.is_async:
            function = cast("Callable[..., Awaitable[object]]", handler.function)
            return replace(handler, function=self._around_async(function))
        return replace(handler, function=self._around_sync(handler.function))

    async def close(self) -> None:
        """Close the connections that handlers left open. A thread that still runs a handler closes its own later."""
        with self._lock:
            self._is_closed = True
            left_open, self._left_open = self._left_open, set()
        if left_open:
            await asyncio.to_thread(_close_of_idle_threads, left_open)
        if self._async_was_used:
            await self._finish_tidying()
            self._tidying = asyncio.create_task(self._run_in_shared_thread(self._close_all))
            await self._finish_tidying()

    # --- threads ------------------------------------------------------------------------------------------------------

    def _around_sync(self, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            with self._lock:
                self._left_open.difference_update(self._of_this_thread())
            self._close_stale()
            try:
                return function(*arguments)
            finally:
                self._close_stale()
                self._leave()

        return call

    def _leave(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._left_open.update(c for c in self._of_this_thread() if c.connection is not None)
                return
        self._close_all()

    # --- async --------------------------------------------------------------------------------------------------------

    def _around_async(self, function: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
        async def call(*arguments: object) -> object:
            self._async_was_used = True
            self._tidy()
            self._async_count += 1
            try:
                await asyncio.sleep(0)  # The check is queued for the shared thread before the handler's own calls.
                return await function(*arguments)
            finally:
                self._async_count -= 1
                self._tidy()

        return call

    def _tidy(self) -> None:
        """Make the shared thread close stale connections, without waiting: another handler may block the thread.

        While other handlers run, only broken connections are closed: an old one may be in use.
        """
        if self._tidying is None or self._tidying.done():
            close = self._close_broken if self._async_count else self._close_stale
            # The empty context: no attempt waits for it.
            work = self._run_in_shared_thread(close)
            self._tidying = asyncio.create_task(work, name="pgoutbox-django", context=Context())

    async def _run_in_shared_thread(self, close: Callable[[], None]) -> None:
        from asgiref.sync import sync_to_async

        await sync_to_async(close)()

    async def _finish_tidying(self) -> None:
        if self._tidying is not None:
            await asyncio.wait([self._tidying], timeout=_CLOSE_SECONDS)

    # --- connections of the calling thread ----------------------------------------------------------------------------

    def _of_this_thread(self) -> list[Any]:
        return list(self._connections.all(initialized_only=True))

    def _close_stale(self) -> None:
        for connection in self._of_this_thread():
            with _logged():
                close_left(connection)

    def _close_broken(self) -> None:
        for connection in self._of_this_thread():
            with _logged():
                if connection.errors_occurred:
                    connection.errors_occurred = not connection.is_usable()
                    if connection.errors_occurred:
                        connection.close()

    def _close_all(self) -> None:
        for connection in self._of_this_thread():
            with _logged():
                connection.close()


def close_left(connection: Any) -> None:  # noqa: ANN401 - Django has no types
    """Close a connection of this thread that is broken, old or in a transaction. The next use opens another one."""
    if not connection.in_atomic_block:
        connection.close_if_unusable_or_obsolete()
        return
    from django.db import connections

    _log.warning("a handler left a transaction of DATABASES[%r] open: it is rolled back", connection.alias)
    connection.close()
    del connections[connection.alias]  # Django opens none again in the block that was left.


def _close_of_idle_threads(left_open: Iterable[Any]) -> None:
    for connection in left_open:
        with _logged():
            connection.inc_thread_sharing()  # Its own thread has ended.
            connection.close()


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    try:
        yield
    except Exception:  # noqa: BLE001 - the outcome of the handler stands, whatever the backend raises
        _log.exception("a Django connection could not be closed")

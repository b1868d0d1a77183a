"""A worker in the process of an ASGI application: FastAPI, Starlette, Litestar.

Application and worker end together. Otherwise the application would enqueue messages that no worker delivers. Under the
pytest plugin there is no worker, because a test decides when to deliver.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.outbox import Outbox
from pgoutbox.text import describe
from pgoutbox.worker.threads import leave
from pgoutbox.worker.worker import Worker

_telemetry = Telemetry(logging.getLogger("pgoutbox.worker"))

# The pytest plugin sets it.
is_under_pytest = False


def lifespan(
    outbox: Outbox, *, queues: Sequence[str] = ("default",)
) -> Callable[[object], contextlib.AbstractAsyncContextManager[None]]:
    """Return a lifespan for an ASGI application. It runs one `Worker` for these queues while the application runs.

        app = FastAPI(lifespan=lifespan(outbox))

    The worker stops after the last request, and its handlers get PGOUTBOX_SHUTDOWN_GRACE_SECONDS to end. If the worker
    fails, for example because the schema is missing, the web server stops as after SIGTERM, or the process exits with 1
    if nothing handles SIGTERM. A test client in a thread of its own goes on. The lifespan ends with the worker's error.

    Under the pytest plugin it logs a warning instead of starting a worker, and reads no settings. A test delivers with
    `run_pass` of the fixture `pgoutbox_driver`.
    """

    @contextlib.asynccontextmanager
    async def run(_app: object) -> AsyncGenerator[None]:
        if is_under_pytest:
            text = "under pytest no worker starts: deliver with `run_pass` of the fixture `pgoutbox_driver`"
            _telemetry.report(logging.WARNING, LogEvent.WORKER_LEFT_OUT, text)
            yield
            return
        worker = Worker(outbox, queues=queues)
        running = asyncio.create_task(worker.run(), name="pgoutbox-worker")
        running.add_done_callback(partial(_stop_server_after_failure, worker))
        try:
            yield
        finally:
            worker.stop()
            await running

    return run


def _stop_server_after_failure(worker: Worker, running: asyncio.Task[None]) -> None:
    """Stop the web server. It does not notice when a lifespan ends early."""
    if running.cancelled() or (error := running.exception()) is None:
        return
    # Further lines may quote values of rows.
    reason = describe(error).partition("\n")[0]
    _telemetry.report(logging.CRITICAL, LogEvent.WORKER_FAILED, "worker failed, the application stops", reason=reason)
    if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN):
        signal.raise_signal(signal.SIGTERM)
    elif threading.current_thread() is threading.main_thread():
        # A process of Hypercorn has no handler, and the signal would end a test run without a word.
        if worker.has_running_handlers:
            leave(1)
        raise SystemExit(1)

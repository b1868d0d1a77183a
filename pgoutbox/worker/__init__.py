"""The worker: claims due messages, runs their handlers and writes the outcomes."""

from pgoutbox.worker.asgi import lifespan
from pgoutbox.worker.direct import asend_directly, send_directly
from pgoutbox.worker.multi_worker import MultiWorker
from pgoutbox.worker.worker import Worker

__all__ = ["MultiWorker", "Worker", "asend_directly", "lifespan", "send_directly"]

"""The worker: claims due messages, runs their handlers and writes the outcomes."""

from pgoutbox.worker.worker import Worker

__all__ = ["Worker"]

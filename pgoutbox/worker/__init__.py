"""The worker: from a row that is due to its next state."""

from pgoutbox.worker.worker import Worker

__all__ = ["Worker"]

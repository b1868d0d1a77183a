"""The worker: claims due messages, runs their handlers and writes the outcomes."""

from pgoutbox.worker.claim_planner import QueueShare
from pgoutbox.worker.worker import Worker

__all__ = ["QueueShare", "Worker"]

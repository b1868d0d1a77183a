"""A worker process whose handler records the time and the message of each call.

The file is the receiver: one whole line for each call, with the machine's monotonic clock. `fail_percent` of the calls
fail before they write a line.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time

from benchmarks.options import TOPIC
from benchmarks.programs.lifeline import hold_lifeline, say
from pgoutbox.handlers import Context
from pgoutbox.message import Message, Transient
from pgoutbox.outbox import Outbox
from pgoutbox.retry import RetryPolicy
from pgoutbox.settings import load_settings
from pgoutbox.worker import Worker


def main(path: str, fail_percent: int) -> int:
    hold_lifeline()
    receiver = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    outbox = Outbox(load_settings(lease_seconds=5.0))

    @outbox.handler(TOPIC, retry=RetryPolicy.steps(*[0.01] * 50, jitter=0))
    async def receive(message: Message, context: Context) -> None:  # noqa: ARG001
        if random.randrange(100) < fail_percent:
            raise Transient("planned")
        os.write(receiver, f"{time.monotonic()} {message.id} {message.ordering_key}\n".encode())

    asyncio.run(_until_stopped(Worker(outbox)))
    return 0


async def _until_stopped(worker: Worker) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    say(ready=True)
    await worker.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))

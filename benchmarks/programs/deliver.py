"""A pgoutbox worker with its default settings and one async handler.

drain: work off what is due, then tell how long it took. run: work until SIGTERM. wait: the same with a handler that
waits for 20 ms, as one that sends something does. stamp: the same with a handler that notes when its calls start, which
is told at the end.
"""

from __future__ import annotations

import asyncio
import sys
import time

from pydantic import JsonValue

from benchmarks.options import TOPIC
from benchmarks.programs.lifeline import Meter, after, before, hold_lifeline, replace_method, say
from pgoutbox.dispatch import Context
from pgoutbox.message import Message
from pgoutbox.outbox import Outbox
from pgoutbox.processes import run_worker
from pgoutbox.settings import load_settings
from pgoutbox.store import Store
from pgoutbox.worker import QueueShare

_WAIT_SECONDS = 0.02
QUEUES = (QueueShare("default"),)


def main(mode: str) -> int:
    hold_lifeline()
    settings = load_settings()
    outbox = Outbox(settings)
    meter = Meter()
    started_at: list[tuple[JsonValue, float]] = []

    if mode == "stamp":

        @outbox.handler(TOPIC)
        async def stamp(message: Message[JsonValue], context: Context) -> None:  # noqa: ARG001
            now = time.monotonic()
            assert isinstance(message.payload, dict)
            started_at.append((message.payload["user_id"], now))
    elif mode == "wait":

        @outbox.handler(TOPIC)
        async def wait(message: Message[JsonValue], context: Context) -> None:  # noqa: ARG001
            await asyncio.sleep(_WAIT_SECONDS)
    else:

        @outbox.handler(TOPIC)
        async def noop(message: Message[JsonValue], context: Context) -> None:  # noqa: ARG001
            meter.handled_count += 1

    if mode == "drain":
        replace_method(Store, "claim", before, meter.begin)
        replace_method(Store, "finish_sent", after, meter.end)
        code = run_worker(outbox, settings, queues=QUEUES, mode="once")
        meter.report()
        return code

    code = run_worker(outbox, settings, queues=QUEUES, mode="run")
    say(started_at=started_at, handled_count=meter.handled_count)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""A pgoutbox worker with its default settings and one handler.

drain: deliver due messages, then report the duration. lanes: the same, and when the last fresh message was handled.
work KIND: work until SIGTERM with a handler of that kind, counting its calls. run: work until SIGTERM. wait: the same
with a handler that waits for 20 ms, like one that sends. stamp: the same with a handler that records when its calls
start, and reports that at the end. The last three take the queues to serve; the default is `default`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Sequence

from pydantic import JsonValue

from benchmarks.options import IO_SECONDS, RETRY_NUMBER, TOPIC
from benchmarks.programs.clients import SUBJECT, TEXT
from benchmarks.programs.lifeline import Meter, Tally, before, hold_lifeline, replace_method, say, wait_for_go
from pgoutbox import CloudEvent, Email, Webhook
from pgoutbox.handlers import Context, SyncContext
from pgoutbox.kernel.run import Run
from pgoutbox.message import Message
from pgoutbox.outbox import Outbox
from pgoutbox.settings import load_settings
from pgoutbox.transports import SmtpTransport
from pgoutbox.worker import Worker
from pgoutbox.worker.kernel_run import KernelAttempts
from pgoutbox.worker.supervisor import run_worker

_WAIT_SECONDS = 0.02


def main(mode: str, *arguments: str) -> int:
    hold_lifeline()
    match mode:
        case "drain" | "lanes":
            return _drain(mode)
        case "work":
            return _work(*arguments)
        case _:
            return _run(mode, arguments)


def _drain(mode: str) -> int:
    settings = load_settings()
    outbox = Outbox(settings)
    meter = Meter()
    last_fresh_at = 0.0

    if mode == "drain":

        @outbox.handler(TOPIC)
        async def noop(message: Message[JsonValue], context: Context) -> None:  # noqa: ARG001
            meter.handled_count += 1
    else:

        @outbox.handler(TOPIC)
        async def note_fresh(message: Message[JsonValue], context: Context) -> None:  # noqa: ARG001
            nonlocal last_fresh_at
            meter.handled_count += 1
            if _number_of(message) != RETRY_NUMBER:
                last_fresh_at = time.monotonic()

    replace_method(Run, "_claim", before, meter.begin)
    replace_method(KernelAttempts, "settle_sent", before, meter.end)
    code = run_worker(outbox, settings, queues=(), mode="once")
    meter.report(fresh_seconds=last_fresh_at - meter.began_at)
    return code


def _work(kind: str = "noop") -> int:
    tally = Tally()
    outbox: Outbox
    if kind == "django":
        from benchmarks.programs import django_mail  # noqa: F401 - it sets Django up
        from pgoutbox.contrib.django import outbox as project

        outbox = project
        replace_method(SmtpTransport, "send", before, tally.count)
    else:
        outbox = Outbox(load_settings())
        _register(outbox, kind, tally.count)
    wait_for_go()
    asyncio.run(_until_stopped(Worker(outbox)))
    tally.report()
    return 0


async def _until_stopped(worker: Worker) -> None:
    # Not `run_worker`: it exits at once if sync handlers have had threads, and the tally would not be reported.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    await worker.run()


def _register(outbox: Outbox, kind: str, count: Callable[[], None]) -> None:  # noqa: C901 - one clause for each kind
    match kind:
        case "noop":

            @outbox.handler(TOPIC)
            async def noop(message: Message[JsonValue], context: Context) -> None:  # noqa: ARG001
                count()

        case "io":

            @outbox.handler(TOPIC)
            async def io(message: Message[JsonValue], context: Context) -> None:  # noqa: ARG001
                count()
                await asyncio.sleep(IO_SECONDS)

        case "sync":

            @outbox.handler(TOPIC)
            def sync(message: Message[JsonValue], context: SyncContext) -> None:  # noqa: ARG001
                count()

        case "batch":

            @outbox.batch_handler(TOPIC)
            async def batch(messages: Sequence[Message[JsonValue]], contexts: Sequence[Context]) -> None:  # noqa: ARG001
                for _ in messages:
                    count()

        case "transactional" | "shared":

            @outbox.handler(TOPIC, transactional=True, max_size=20 if kind == "shared" else None)
            async def transactional(message: Message[JsonValue], context: Context) -> None:
                count()
                await context.connection.execute("INSERT INTO effect (number) VALUES (%s)", (_number_of(message),))

        case "transactional batch":

            @outbox.batch_handler(TOPIC, transactional=True)
            async def write_all(messages: Sequence[Message[JsonValue]], contexts: Sequence[Context]) -> None:
                for _ in messages:
                    count()
                numbers = [_number_of(message) for message in messages]
                insert = "INSERT INTO effect (number) SELECT unnest(%s::bigint[])"
                await contexts[0].connection.execute(insert, (numbers,))

        case "webhook" | "email" | "event":

            @outbox.handler(TOPIC)
            async def send(message: Message[JsonValue], context: Context) -> Webhook | Email | CloudEvent:  # noqa: ARG001
                count()
                if kind == "webhook":
                    return Webhook(body=message.payload)
                if kind == "email":
                    return Email(subject=SUBJECT, text=TEXT.format(_number_of(message)))
                return CloudEvent(message.payload)

        case _:
            raise SystemExit(f"unknown kind of handler: {kind}")


def _run(mode: str, queues: Sequence[str]) -> int:
    settings = load_settings()
    outbox = Outbox(settings)
    started_at: list[tuple[int, float]] = []

    if mode == "stamp":

        @outbox.handler(TOPIC)
        async def stamp(message: Message[JsonValue], context: Context) -> None:  # noqa: ARG001
            now = time.monotonic()
            started_at.append((_number_of(message), now))
    elif mode == "wait":

        @outbox.handler(TOPIC)
        async def wait(message: Message[JsonValue], context: Context) -> None:  # noqa: ARG001
            await asyncio.sleep(_WAIT_SECONDS)
    else:

        @outbox.handler(TOPIC)
        async def noop(message: Message[JsonValue], context: Context) -> None:
            pass

    code = run_worker(outbox, settings, queues=queues, has_many=settings.dsns is not None, mode="run")
    say(started_at=started_at)
    return code


def _number_of(message: Message[JsonValue]) -> int:
    assert isinstance(message.payload, dict)
    number = message.payload["user_id"]
    assert isinstance(number, int)
    return number


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

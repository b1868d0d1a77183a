"""The work of `benchmarks.deliver` without an outbox: client libraries in a loop, with some calls at once.

CLIENT SLOTS COUNT: deliver COUNT messages, then set the rows of `job` to done, and wait for the signal to end. The
programs of other systems use the same clients. BENCH_DESTINATION and settings of pgoutbox say where the receivers are.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import ssl
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from functools import partial
from typing import Any, TypeVar

import psycopg

from benchmarks.options import IO_SECONDS
from benchmarks.programs.lifeline import Tally, hold_lifeline, wait_for_go

C = TypeVar("C")
Send = Callable[[int], Awaitable[object]]

SUBJECT = "Activate your account"
TEXT = "Hello,\n\nfollow this link to activate your account:\n\nhttps://club.example.org/activate/{}\n"
FOUR_KB = random.Random(4).randbytes(2_000).hex()
_EVENT = {"specversion": "1.0", "source": "https://club.example.org", "type": "mail.activation"}


def _taking_turns(clients: list[C], use: Callable[[C, int], Awaitable[object]]) -> Send:
    """Return a function that waits for a free client and uses it."""
    free: asyncio.Queue[C] = asyncio.Queue()
    for client in clients:
        free.put_nowait(client)

    async def send(number: int) -> None:
        client = await free.get()
        await use(client, number)
        free.put_nowait(client)

    return send


async def _executor(stack: AsyncExitStack, slots: int) -> Send:
    threads = stack.enter_context(ThreadPoolExecutor(slots))
    loop = asyncio.get_running_loop()
    return lambda _: loop.run_in_executor(threads, bool)


async def _waits(stack: AsyncExitStack, _: int) -> Send:
    """Wait for 10 ms. Those that end at once are written by one statement, while the next ones wait."""
    connect = psycopg.AsyncConnection.connect(os.environ["PGOUTBOX_DSN"], autocommit=True)
    connection = await stack.enter_async_context(await connect)
    ended: list[int] = []
    has_ended = asyncio.Event()

    async def write() -> None:
        while await has_ended.wait():
            has_ended.clear()
            numbers, ended[:] = ended[:], []
            await connection.execute("UPDATE job SET done = true WHERE id = ANY (%s)", [numbers])

    async def send(number: int) -> None:
        await asyncio.sleep(IO_SECONDS)
        ended.append(number)
        has_ended.set()

    stack.callback(asyncio.ensure_future(write()).cancel)
    return send


async def _transactions(stack: AsyncExitStack, slots: int) -> Send:
    async def use(connection: psycopg.AsyncConnection[Any], number: int) -> None:
        async with connection.pipeline(), connection.transaction():
            await connection.execute("UPDATE job SET done = true WHERE id = %s", [number])
            await connection.execute("INSERT INTO effect (number) VALUES (%s)", [number])

    connect = partial(psycopg.AsyncConnection.connect, os.environ["PGOUTBOX_DSN"])
    return _taking_turns([await stack.enter_async_context(await connect()) for _ in range(slots)], use)


async def _webhook(stack: AsyncExitStack, slots: int, **more: str) -> Send:
    import aiohttp

    from pgoutbox.webhooks import key_of, sign

    url, keys = os.environ["BENCH_DESTINATION"], [key_of(os.environ["PGOUTBOX_WEBHOOK_SECRETS"])]
    context = ssl.create_default_context(cafile=os.environ["PGOUTBOX_WEBHOOK_CA_FILE"])
    connector = aiohttp.TCPConnector(limit=slots, ssl=context)
    session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))

    async def send(number: int) -> None:
        body, webhook_id, now = json.dumps({"user_id": number, **more}).encode(), str(number), int(time.time())
        headers = {
            "content-type": "application/json",
            "webhook-id": webhook_id,
            "webhook-timestamp": str(now),
            "webhook-signature": sign(keys, webhook_id, now, body),
        }
        async with session.post(url, data=body, headers=headers) as answer:
            answer.raise_for_status()

    return send


async def _email(stack: AsyncExitStack, slots: int) -> Send:
    import aiosmtplib

    async def use(client: aiosmtplib.SMTP, number: int) -> None:
        message = EmailMessage()
        message["From"], message["To"] = os.environ["PGOUTBOX_SMTP_SENDER"], "ann@example.org"
        message["Subject"], message["Date"], message["Message-ID"] = SUBJECT, formatdate(), make_msgid("", "localhost")
        message.set_content(TEXT.format(number))
        await client.send_message(message)

    port = int(os.environ["PGOUTBOX_SMTP_PORT"])
    clients = [aiosmtplib.SMTP(hostname="127.0.0.1", port=port, start_tls=False) for _ in range(slots)]
    return _taking_turns([await stack.enter_async_context(client) for client in clients], use)


async def _django(stack: AsyncExitStack, _: int) -> Send:
    from django.core import mail

    from benchmarks.programs.django_mail import email

    backend = stack.enter_context(mail.get_connection("django.core.mail.backends.smtp.EmailBackend"))

    async def send(number: int) -> None:
        backend.send_messages([email(number)])

    return send


def _event(number: int) -> bytes:
    return json.dumps({**_EVENT, "id": str(number), "data": {"user_id": number}}).encode()


async def _redis(stack: AsyncExitStack, slots: int) -> Send:
    from redis.asyncio import Redis

    client = Redis.from_url(os.environ["PGOUTBOX_REDIS_URL"], max_connections=slots)
    await stack.enter_async_context(client)
    return lambda number: client.xadd("bench", {"id": str(number), "data": _event(number)})


async def _nats(stack: AsyncExitStack, _: int) -> Send:
    import nats

    client = await nats.connect(os.environ["PGOUTBOX_NATS_URL"])
    stack.push_async_callback(client.close)
    await client.jetstream().add_stream(name="bench", subjects=["bench"])
    # JetStream would drop an id that another round has used as a duplicate.
    run = os.getpid()
    publish = partial(client.jetstream().publish, "bench")
    return lambda number: publish(_event(number), headers={"Nats-Msg-Id": f"{run}-{number}"})


async def _rabbitmq(stack: AsyncExitStack, _: int) -> Send:
    import aiormq
    from pamqp.commands import Basic

    connection = await aiormq.connect(os.environ["PGOUTBOX_RABBITMQ_URL"])
    stack.push_async_callback(connection.close)
    channel = await connection.channel(publisher_confirms=True)
    await channel.queue_declare("bench")
    properties = Basic.Properties(content_type="application/json", delivery_mode=2)
    publish = partial(channel.basic_publish, routing_key="bench", properties=properties, mandatory=True)
    return lambda number: publish(_event(number))


async def _kafka(stack: AsyncExitStack, _: int) -> Send:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": os.environ["PGOUTBOX_KAFKA_SERVERS"], "enable.idempotence": True})
    stack.callback(producer.flush)

    async def send(number: int) -> None:
        producer.produce("bench", _event(number))
        producer.poll(0)

    return send


CLIENTS: Mapping[str, Callable[[AsyncExitStack, int], Awaitable[Send]]] = {
    "executor": _executor,
    "waits": _waits,
    "transactions": _transactions,
    "webhook": _webhook,
    "webhook of 4 kB": partial(_webhook, text=FOUR_KB),
    "email": _email,
    "django": _django,
    "redis": _redis,
    "nats": _nats,
    "rabbitmq": _rabbitmq,
    "kafka": _kafka,
}


async def _deliver(client: str, slots: int, count: int) -> Tally:
    tally, numbers = Tally(), iter(range(count))

    async def work(send: Send) -> None:
        for number in numbers:
            tally.count()
            await send(number)

    async with AsyncExitStack() as stack:
        send = await CLIENTS[client](stack, slots)
        await asyncio.gather(*(work(send) for _ in range(slots)))
    return tally


def main(client: str, slots: str, count: str) -> int:
    hold_lifeline()
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    with psycopg.connect(os.environ["PGOUTBOX_DSN"], autocommit=True) as connection:
        wait_for_go()
        tally = asyncio.run(_deliver(client, int(slots), int(count)))
        connection.execute("UPDATE job SET done = true WHERE NOT done")
    tally.report()
    told.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

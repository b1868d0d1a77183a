"""Tests that the answers of a hostile broker become outcomes, and that no answer fills the memory."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pgoutbox.message import SendFailure
from pgoutbox.transports.brokers.events import CloudEvent
from pgoutbox.transports.brokers.nats_jetstream import NatsTransport
from pgoutbox.transports.brokers.rabbitmq import RabbitMQTransport
from pgoutbox.transports.brokers.redis_streams import RedisTransport
from tests.support.brokers import HOST
from tests.support.sends import outgoing
from tests.support.settings import settings_with

# More than the longest accepted answer and the buffers of both sockets, and less than an answer of these tests.
MOST_BYTES = 16_000_000
ANSWER_BYTES = 64_000_000
CHUNK = b"x" * 64_000
FLOOD = [CHUNK] * (ANSWER_BYTES // len(CHUNK))
EVENT = CloudEvent({"order_id": 7}, source="https://club.example.org")
NATS_INFO = b'INFO {"server_id":"x","version":"2.10.0","max_payload":1048576,"headers":true,"proto":1}\r\n'


class HostileBroker:
    """A server that waits for each of its cues, and then sends its answer as fast as the client reads."""

    def __init__(self, answers: list[tuple[bytes, list[bytes]]]) -> None:
        self._answers = answers
        self.sent_bytes = 0
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Talk to one client until it disconnects."""
        try:
            for cue, answer in self._answers:
                if cue:
                    await reader.readuntil(cue)
                for chunk in answer:
                    writer.write(chunk)
                    self.sent_bytes += len(chunk)
                    await writer.drain()
            await reader.read()
        except (OSError, asyncio.IncompleteReadError):
            return  # The client has disconnected.
        finally:
            writer.close()


@asynccontextmanager
async def hostile(*answers: tuple[bytes, list[bytes]]) -> AsyncIterator[HostileBroker]:
    broker = HostileBroker(list(answers))
    async with await asyncio.start_server(broker.serve, HOST, 0) as server:
        broker.port = server.sockets[0].getsockname()[1]
        yield broker


def transport_of(scheme: str, port: int) -> RedisTransport | NatsTransport | RabbitMQTransport:
    given = {"broker_timeout_seconds": 5}
    if scheme == "redis":
        return RedisTransport(settings_with(redis_url=f"redis://{HOST}:{port}", **given))
    if scheme == "nats":
        return NatsTransport(settings_with(nats_url=f"nats://{HOST}:{port}", **given))
    return RabbitMQTransport(settings_with(rabbitmq_url=f"amqp://ann:x@{HOST}:{port}", **given))


NESTED = [b"*1\r\n" * 200_000]
LONG_ARRAY = [b"*1000000000\r\n", *[b":1\r\n" * 16_000] * 1_000]
LONG = [b"$786000000\r\n", *FLOOD]
REDIS_READY = [(b"SETINFO", [b"+OK\r\n"]), (b"SETINFO", [b"+OK\r\n"])]
NATS_READY = [(b"", [NATS_INFO]), (b"PING\r\n", [b"PONG\r\n"])]
AMQP_FRAME = struct.pack(">BHI", 1, 0, 0xF000_0000)
CASES = {
    "redis: nested arrays": ("redis", True, [*REDIS_READY, (b"XADD", NESTED)]),
    "redis: a long answer": ("redis", True, [*REDIS_READY, (b"XADD", LONG)]),
    "redis: a long array": ("redis", True, [*REDIS_READY, (b"XADD", LONG_ARRAY)]),
    "redis: an endless line": ("redis", True, [*REDIS_READY, (b"XADD", [b"+", *FLOOD])]),
    "redis: a length that is not a number": ("redis", True, [*REDIS_READY, (b"XADD", [b"$x\r\n"])]),
    "redis: nested arrays at the sign-in": ("redis", False, [(b"SETINFO", NESTED)]),
    "nats: an endless INFO": ("nats", False, [(b"", [b"INFO ", *FLOOD])]),
    "nats: an INFO that is not JSON": ("nats", False, [(b"", [b"INFO " + b"[" * 30_000 + b"\r\n"])]),
    "nats: a long answer": ("nats", True, [*NATS_READY, (b"HPUB", [b"MSG x 1 786000000\r\n", *FLOOD])]),
    "nats: an endless line": ("nats", True, [*NATS_READY, (b"HPUB", FLOOD)]),
    "rabbitmq: a long frame": ("rabbitmq", False, [(b"AMQP", [AMQP_FRAME, *FLOOD])]),
    "rabbitmq: no AMQP": ("rabbitmq", False, [(b"AMQP", [b"HTTP/1.1 400 Bad Request\r\n\r\n", *FLOOD])]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
async def test_a_hostile_answer_is_an_outage_and_is_not_kept(case: str) -> None:
    scheme, is_unknown, answers = CASES[case]
    async with hostile(*answers) as broker:
        transport = transport_of(scheme, broker.port)
        outcome = await transport.send(outgoing(destination=f"{scheme}:orders"), EVENT)
        await transport.aclose()
    assert isinstance(outcome, SendFailure)
    assert (outcome.outage, outcome.unknown) == (True, is_unknown)
    assert broker.sent_bytes < MOST_BYTES


@pytest.mark.parametrize("case", [case for case in CASES if "sign-in" in case or "INFO" in case or "frame" in case])
async def test_the_doctor_names_a_hostile_broker(case: str) -> None:
    scheme, _, answers = CASES[case]
    async with hostile(*answers) as broker:
        transport = transport_of(scheme, broker.port)
        assert str(await transport.check()).startswith("connect: ")
        await transport.aclose()

"""Tests a network that stalls, slows down or loses session state: the worker notices by its own deadlines, makes no
further requests on an abandoned connection, and works on. The fence decides the outcome of statements in transit.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ipaddress
import os
import select
import shutil
import socket
import subprocess
import threading
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgoutbox import Outbox
from pgoutbox.handlers import Context
from pgoutbox.message import Message
from pgoutbox.observability.events import LogEvent
from pgoutbox.worker import Worker
from tests.support.missing import server_missing
from tests.support.outbox_actions import attempts_of, enqueue, lapse, reports, row_of, rows_of, running, settings_for
from tests.support.proxy import Proxy, proxy_to
from tests.support.waiting import until, until_idle, until_polled
from tests.support.worker_sql import claim, ids_in_flight

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

# The next poll is an hour away. A message found without a ring shows that the worker knows that its listener is gone.
# Statements that are not stalled must get their answer in time on a slow machine too.
QUICK = {"listener_heartbeat_seconds": 2, "listener_heartbeat_timeout_seconds": 2, "connect_timeout_seconds": 5}
# The sessions that write outcomes. The kernel writes them in the session that claims.
FINISHES = "pgoutbox claim"
SHORT_OF_TIME = {"statement_timeout_seconds": 1, "connect_timeout_seconds": 2}


class Receiver:
    """An outbox that runs the test's callback first and then records the delivery."""

    def __init__(self, dsn: str, **settings: object) -> None:
        self.outbox = Outbox(settings_for(dsn, **settings))
        self.delivered: list[int] = []
        self.first: Callable[[Message], Awaitable[None]] | None = None

        @self.outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            if self.first is not None:
                await self.first(message)
            self.delivered.append(message.id)


# --- the listener -----------------------------------------------------------------------------------------------------


@pytest.fixture
def port() -> Iterator[socket.socket]:
    """Open a listening TCP socket on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


async def test_a_listener_behind_a_stalled_middlebox_is_replaced_after_the_heartbeat_deadline(
    dsn: str, db: psycopg.Connection, port: socket.socket
) -> None:
    with proxy_to(dsn, port) as proxy, reports() as heard:
        receiver = Receiver(proxy.dsn, **QUICK)
        worker = Worker(receiver.outbox)
        async with running(worker):
            await until_idle(worker)
            with proxy.stalled("pgoutbox listen"):
                unheard = enqueue(db)
                await heard.wait_for(LogEvent.LISTENER_LOST)
                await until(lambda: receiver.delivered == [unheard])
                late = enqueue(db)
                await until(lambda: receiver.delivered == [unheard, late])
            await heard.wait_for(LogEvent.LISTENER_BACK)
            # The driver would ask the server to cancel the heartbeat, and wait for the answer on the same dead network.
            assert proxy.cancel_request_count == 0
            await until(lambda: proxy.open_count("pgoutbox listen") == 1)
            await until_polled(worker, db)
            heard_of = enqueue(db)
            await until(lambda: receiver.delivered == [unheard, late, heard_of])


async def test_keepalives_alone_never_detect_a_stalled_middlebox(
    dsn: str, db: psycopg.Connection, port: socket.socket
) -> None:
    """While the doorbell's heartbeat finds its listener dead, the kernel reports another such connection as alive."""
    keepalives = "keepalives_idle=1 keepalives_interval=1 keepalives_count=1 tcp_user_timeout=1000"
    with proxy_to(dsn, port) as proxy, reports() as heard:
        receiver = Receiver(proxy.dsn, listener_heartbeat_seconds=3, listener_heartbeat_timeout_seconds=3)
        worker = Worker(receiver.outbox)
        async with running(worker):
            await until_idle(worker)
            with contextlib.closing(psycopg.connect(f"{proxy.dsn} {keepalives}", autocommit=True)) as vouched_for:
                vouched_for.execute("LISTEN pgoutbox")
                with proxy.stalled():
                    await heard.wait_for(LogEvent.LISTENER_LOST)
                    assert select.select([vouched_for.fileno()], [], [], 0)[0] == []
                    assert vouched_for.pgconn.socket >= 0


@pytest.mark.parametrize("statement", ["DISCARD ALL", "UNLISTEN *"])
async def test_a_session_reset_by_another_client_of_a_pooler_listens_again(
    proxy: Proxy, db: psycopg.Connection, statement: str
) -> None:
    receiver = Receiver(proxy.dsn, **QUICK)
    worker = Worker(receiver.outbox)
    with reports() as heard:
        async with running(worker):
            await until_idle(worker)
            assert proxy.slip_in("pgoutbox listen", statement) == 1
            unheard = enqueue(db)
            await heard.wait_for(LogEvent.LISTENER_LOST)
            await heard.wait_for(LogEvent.LISTENER_BACK)
            await until(lambda: receiver.delivered == [unheard])
            await until_polled(worker, db)
            heard_of = enqueue(db)
            await until(lambda: receiver.delivered == [unheard, heard_of])


# --- a network of its own ---------------------------------------------------------------------------------------------

# A network of four addresses for this process, from the range reserved for benchmarks (RFC 2544), so it is unused.
_NETWORK = ipaddress.ip_address("198.18.0.0") + os.getpid() % 2**15 * 4
HERE, THERE = str(_NETWORK + 1), str(_NETWORK + 2)
_NEW_NETWORK = 0x40000000


def ip(*words: str) -> None:
    """Run `ip`."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


def listen_in(namespace: str) -> socket.socket:
    """Open a listening socket in a network namespace; it stays there for any user."""
    made: list[socket.socket] = []

    def listen() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(f"/run/netns/{namespace}").open() as network:
            if libc.setns(network.fileno(), _NEW_NETWORK) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        made.append(socket.create_server((THERE, 0)))

    # Only the calling thread changes its namespace.
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    return made[0]


@pytest.fixture
def namespace() -> Iterator[str]:
    """Create a network namespace with a cable to it."""
    name, here = f"pgoutbox-{os.getpid()}", f"pgo{os.getpid()}"
    if shutil.which("ip") is None:
        server_missing("no program ip: it comes with iproute2")
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        server_missing(f"network namespaces are not permitted: {error.stderr.decode().strip()}")
    try:
        ip("link", "add", here, "type", "veth", "peer", "name", "cable", "netns", name)
        ip("address", "add", f"{HERE}/30", "dev", here)
        ip("link", "set", here, "up")
        ip("-n", name, "address", "add", f"{THERE}/30", "dev", "cable")
        ip("-n", name, "link", "set", "cable", "up")
        yield name
    finally:
        ip("netns", "delete", name)


async def test_a_listener_in_a_black_hole_is_abandoned_and_work_continues_without_it(
    dsn: str, db: psycopg.Connection, namespace: str
) -> None:
    with listen_in(namespace) as listening, proxy_to(dsn, listening) as proxy, reports() as heard:
        receiver = Receiver(dsn, listen_dsn=proxy.dsn, **QUICK)
        worker = Worker(receiver.outbox)
        async with running(worker):
            await until_idle(worker)
            ip("-n", namespace, "link", "set", "cable", "down")
            unheard = enqueue(db)
            await heard.wait_for(LogEvent.LISTENER_LOST)
            await until(lambda: receiver.delivered == [unheard])
            late = enqueue(db)
            await until(lambda: receiver.delivered == [unheard, late])
            ip("-n", namespace, "link", "set", "cable", "up")
            await heard.wait_for(LogEvent.LISTENER_BACK)
            await until_polled(worker, db)
            heard_of = enqueue(db)
            await until(lambda: receiver.delivered == [unheard, late, heard_of])
        assert proxy.cancel_request_count == 0


# --- claims and finishes ----------------------------------------------------------------------------------------------


async def test_a_claim_with_a_stalled_answer_is_abandoned_and_its_message_released(
    proxy: Proxy, db: psycopg.Connection
) -> None:
    receiver = Receiver(proxy.dsn, **SHORT_OF_TIME)
    worker = Worker(receiver.outbox)
    async with running(worker):
        # The first statement of its kind would stall while it is prepared, and claim nothing.
        await until_polled(worker, db)
        first_id = enqueue(db)
        await until(lambda: row_of(db, first_id).state == "sent")
        await until_polled(worker, db)
        receiver.delivered.clear()
        with proxy.stalled("pgoutbox claim", replies_only=True, open_connections_only=True):
            message_id = enqueue(db)
            await until(lambda: row_of(db, message_id).state == "sending")
            assert receiver.delivered == []
            await until(lambda: row_of(db, message_id).state == "sent")
        await until(lambda: proxy.open_count("pgoutbox claim") == 1)
    assert receiver.delivered == [message_id]
    assert row_of(db, message_id).attempt_count == 2
    assert attempts_of(db, message_id) == [(1, "released", None)]
    assert proxy.cancel_request_count == 0


async def test_a_worker_that_stops_during_its_first_claim_wakes_an_idle_one_for_its_messages(
    proxy: Proxy, dsn: str, db: psycopg.Connection
) -> None:
    first, second = Receiver(proxy.dsn, **SHORT_OF_TIME), Receiver(dsn)
    stopped, remaining = Worker(first.outbox), Worker(second.outbox)
    async with AsyncExitStack() as stack, running(stopped):
        await until_idle(stopped)
        with proxy.stalled("pgoutbox claim", replies_only=True, open_connections_only=True):
            message_id = enqueue(db)
            await until(lambda: row_of(db, message_id).state == "sending")
            await stack.enter_async_context(running(remaining))
            await until_idle(remaining)
            stopped.stop()
            await until(lambda: row_of(db, message_id).state == "sent")
    assert (first.delivered, second.delivered) == ([], [message_id])


async def test_a_claim_that_never_arrives_is_abandoned_and_repeated_on_another_connection(
    proxy: Proxy, db: psycopg.Connection
) -> None:
    receiver = Receiver(proxy.dsn, **SHORT_OF_TIME)
    worker = Worker(receiver.outbox)
    async with running(worker):
        await until_idle(worker)
        with proxy.stalled("pgoutbox claim", open_connections_only=True):
            message_id = enqueue(db)
            await until(lambda: row_of(db, message_id).state == "sent")
        await until(lambda: proxy.open_count("pgoutbox claim") == 1)
    assert (receiver.delivered, row_of(db, message_id).attempt_count) == ([message_id], 1)
    assert proxy.cancel_request_count == 0


@pytest.mark.parametrize("replies_only", [True, False], ids=["its answer is held back", "it never arrives"])
async def test_an_unanswered_finish_is_repeated_and_takes_effect_once(
    proxy: Proxy, db: psycopg.Connection, replies_only: bool
) -> None:
    receiver = Receiver(proxy.dsn, **SHORT_OF_TIME)
    worker = Worker(receiver.outbox)
    with ExitStack() as stack:

        async def stall(message: Message) -> None:
            if message.payload == "stall":
                stall = proxy.stalled(FINISHES, replies_only=replies_only, open_connections_only=True)
                stack.enter_context(stall)

        receiver.first = stall
        async with running(worker):
            opens_the_connection = enqueue(db)
            await until(lambda: row_of(db, opens_the_connection).state == "sent")
            message_id = enqueue(db, payload="stall")
            await until(lambda: worker.telemetry.counts[LogEvent.SENT] == 2)
            # The held-back bytes arrive now, from a connection that the worker has abandoned.
            stack.close()
            await until(lambda: proxy.open_count(FINISHES) == 1)
    assert receiver.delivered == [opens_the_connection, message_id]
    assert (row_of(db, message_id).state, row_of(db, message_id).attempt_count) == ("sent", 1)
    assert attempts_of(db, message_id) == []
    assert worker.telemetry.counts[LogEvent.LEASE_LOST] == 0
    assert proxy.cancel_request_count == 0


async def test_a_late_finish_changes_nothing_while_another_attempt_holds_the_message(
    proxy: Proxy, db: psycopg.Connection
) -> None:
    receiver = Receiver(proxy.dsn, **SHORT_OF_TIME)
    worker = Worker(receiver.outbox)
    with ExitStack() as stack:

        async def lose(message: Message) -> None:
            if message.payload == "lose":
                stack.enter_context(proxy.stalled(FINISHES, open_connections_only=True))
                lapse(db, message.id)
                assert ids_in_flight(claim(db, worker="other")) == [message.id]

        receiver.first = lose
        async with running(worker):
            opens_the_connection = enqueue(db)
            await until(lambda: row_of(db, opens_the_connection).state == "sent")
            message_id = enqueue(db, payload="lose")
            await until(lambda: worker.telemetry.counts[LogEvent.LEASE_LOST] == 1)
            before = row_of(db, message_id)
            stack.close()
            await until(lambda: proxy.open_count(FINISHES) == 1)
            after = row_of(db, message_id)
    assert (before.state, before.attempt_count, before.worker) == ("sending", 2, "other")
    assert (after.state, after.attempt_count, after.worker, after.is_finished) == ("sending", 2, "other", False)


# --- a slow network ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("delay_seconds", "bytes_per_second", "lease_seconds"),
    [(0.1, None, 3.0), (0.1, 8_000, 6.0)],
    ids=["a round trip of 200 ms", "and 64 kbit/s"],
)
async def test_a_slow_network_keeps_leases_and_delivers_everything_once(
    proxy: Proxy,
    db: psycopg.Connection,
    delay_seconds: float,
    bytes_per_second: float | None,
    lease_seconds: float,
) -> None:
    proxy.delay_seconds, proxy.bytes_per_second = delay_seconds, bytes_per_second
    receiver = Receiver(proxy.dsn, lease_seconds=lease_seconds, concurrency=20)
    worker = Worker(receiver.outbox)
    lapses: list[int] = []

    def has_outlived_its_first_lease(message: Message) -> bool:
        ((is_old, is_lapsed),) = db.execute(
            """
            SELECT now() > claimed_at + make_interval(secs => %s), lease_expires_at <= now()
            FROM pgoutbox.in_flight_view
            WHERE id = %s
            """,
            [1.5 * lease_seconds, message.id],
        ).fetchall()
        if is_lapsed:
            lapses.append(message.id)
        return bool(is_old)

    async def hold(message: Message) -> None:
        if message.payload == "long":
            await until(lambda: has_outlived_its_first_lease(message))

    receiver.first = hold
    ids = [enqueue(db, payload="long"), *(enqueue(db) for _ in range(49))]
    async with running(worker):
        await until(lambda: worker.telemetry.counts[LogEvent.SENT] == len(ids))
    assert lapses == []
    assert sorted(receiver.delivered) == ids
    assert {(row.state, row.attempt_count) for row in rows_of(db, *ids)} == {("sent", 1)}
    assert worker.telemetry.counts[LogEvent.LEASE_LOST] == 0


# --- the end of the worker --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_pooled", [False, True], ids=["direct", "pooled"])
async def test_a_worker_whose_database_never_answers_again_stops(
    proxy: Proxy, db: psycopg.Connection, is_pooled: bool
) -> None:
    """The deadline of a statement is an hour away: the stop has one of its own."""
    limits = {"statement_timeout_seconds": 3_600, "shutdown_grace_seconds": 0, "connect_timeout_seconds": 2}
    receiver = Receiver(proxy.dsn, **limits, lease_seconds=2, poll_interval_seconds=1, listen=not is_pooled)
    has_begun = asyncio.Event()

    async def hang(_: Message) -> None:
        has_begun.set()
        await asyncio.Event().wait()

    receiver.first = hang
    is_dead = asyncio.Event()
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:  # The network is dead until the worker has ended.

        def die(application: str, _: str) -> None:
            if application == "pgoutbox lease" and has_begun.is_set() and not is_dead.is_set():
                stack.enter_context(proxy.stalled())
                loop.call_soon_threadsafe(is_dead.set)

        proxy.on_statement = die
        async with running(Worker(receiver.outbox)):
            message_id = enqueue(db)
            await is_dead.wait()
    assert row_of(db, message_id).state == "sending"

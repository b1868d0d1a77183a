"""The application of the fault tests' worker processes. Its handlers record each hand-over in a ledger."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from pgoutbox import Context, Message, Outbox, RetryPolicy, Sent, SyncContext, Transient
from tests.support.fleet import GATE_VARIABLE, SUSPEND_VARIABLE
from tests.support.ledger import told_ledger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgoutbox.message import Outcome
    from pgoutbox.transports import Content

AT_ONCE = RetryPolicy.steps(0, jitter=0)


class Post:
    """A transport whose side effect is a line in the ledger."""

    schemes = ("postcard",)

    async def send(self, message: Message[object], content: Content) -> Outcome:
        """Hand the content over."""
        hand_over(message)
        return Sent()

    async def aclose(self) -> None:
        """Do nothing: this transport keeps nothing open."""


outbox = Outbox(transports=[Post()])


def hand_over(message: Message[Any]) -> None:
    """Append one record to the ledger on disk. No transaction covers this side effect, and no kill undoes it."""
    told_ledger().write("handed_over", str(message.id), attempt_count=message.attempt_count)


@outbox.handler("fault.deliver")
def deliver(message: Message, ctx: SyncContext) -> None:
    """Hand over immediately."""
    hand_over(message)


@outbox.handler("fault.slow")
def slow(message: Message, ctx: SyncContext) -> None:
    """Sleep before and after the hand-over, so that a kill at any moment can hit the handler."""
    time.sleep(0.02)
    hand_over(message)
    time.sleep(0.02)


@outbox.handler("fault.gated")
def gated(message: Message, ctx: SyncContext) -> None:
    """Hand over, then wait until the test opens the gate."""
    hand_over(message)
    gate = Path(os.environ[GATE_VARIABLE])
    while not gate.exists():
        time.sleep(0.01)  # The polling interval, in seconds.


@outbox.handler("fault.segv", retry=AT_ONCE)
async def segv(message: Message, ctx: Context) -> None:
    """Read address 0, like a faulty extension module."""
    ctypes.string_at(0)


@outbox.handler("fault.killed", retry=AT_ONCE)
async def killed(message: Message, ctx: Context) -> None:
    """End like a process that the kernel's out-of-memory killer ends."""
    os.kill(os.getpid(), signal.SIGKILL)


def limit_memory() -> None:
    """Limit the memory of this process to 64 MiB more than its current use."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 64 * 2**20, resource.RLIM_INFINITY))


@outbox.handler("fault.memory", retry=AT_ONCE)
async def memory(message: Message, ctx: Context) -> None:
    """Allocate more memory than the limit of the process."""
    limit_memory()
    hoard = []
    while True:
        hoard.append(bytearray(2**20))


@outbox.handler("fault.transactional", transactional=True)
async def transactional(message: Message, ctx: Context) -> None:
    """Write in the transaction of the completion. The first attempt dies before the commit."""
    await ctx.connection.execute("INSERT INTO effect VALUES (%s)", [message.id])
    if message.attempt_count == 1:
        os._exit(9)


@outbox.handler("fault.clock", retry=RetryPolicy.steps(3600))
async def tell_the_time(message: Message, ctx: Context) -> None:
    """Record the local time of this process, enqueue a message with a delay, and ask for a retry in an hour."""
    async with await psycopg.AsyncConnection.connect(outbox.settings.require_dsn()) as connection:
        for _ in range(6):
            await connection.execute("INSERT INTO reading VALUES (%s, clock_timestamp())", [time.time()])
        await outbox.on(connection).enqueue("fault.later", {}, delay=60)
    await ctx.ensure_lease()
    raise Transient("busy")


# --- suspended --------------------------------------------------------------------------------------------------------


def suspend() -> None:
    """Stop every process of the group, like a suspended machine, until the test wakes it."""
    os.killpg(0, signal.SIGSTOP)


class Postcard:
    """An example content."""

    scheme = "postcard"


@outbox.handler("fault.asks")
def ask(message: Message, ctx: SyncContext) -> None:
    """Suspend halfway through the handler, and check the lease before the side effect."""
    if os.environ.get(SUSPEND_VARIABLE) == "in the handler":
        suspend()
    ctx.ensure_lease()
    hand_over(message)


@outbox.handler("fault.renders")
async def render(message: Message, ctx: Context) -> Postcard:
    """Suspend while rendering."""
    if os.environ.get(SUSPEND_VARIABLE) == "in the handler":
        suspend()
    return Postcard()


@outbox.batch_handler("fault.renders.batch")
async def render_batch(messages: Sequence[Message], contexts: Sequence[Context]) -> list[Postcard]:
    """Suspend while rendering a batch."""
    if os.environ.get(SUSPEND_VARIABLE) == "in the handler":
        suspend()
    return [Postcard() for _ in messages]


@outbox.handler("fault.renders.transactional", transactional=True)
def render_in_transaction(message: Message, ctx: SyncContext) -> Postcard:
    """Suspend while rendering in a transaction."""
    if os.environ.get(SUSPEND_VARIABLE) == "in the handler":
        suspend()
    return Postcard()

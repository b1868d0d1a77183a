"""The outbox of the club, and its handlers: each greets a member with the ORM."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.django_club.settings")
django.setup()

from django.db import connection  # noqa: E402 - Django is set up before its models are imported
from django.db.models import F  # noqa: E402

from pgoutbox import Context, Message, Outbox, RetryPolicy, SyncContext  # noqa: E402
from tests.django_club.models import Member  # noqa: E402

AT_ONCE = RetryPolicy.steps(0, max_attempts=3, jitter=0)

outbox = Outbox()
is_listing = asyncio.Event()
was_passed = asyncio.Event()


def greet(message: Message) -> None:
    """Count the greeting in the member's row."""
    Member.objects.filter(email=message.payload).update(greeting_count=F("greeting_count") + 1)


@outbox.handler("greet.sync", retry=AT_ONCE)
def greet_in_thread(message: Message, ctx: SyncContext) -> None:
    """Greet in a thread."""
    greet(message)


@outbox.handler("greet.async", retry=AT_ONCE)
async def greet_async(message: Message, ctx: Context) -> None:
    """Greet on the event loop."""
    await Member.objects.filter(email=message.payload).aupdate(greeting_count=F("greeting_count") + 1)


@outbox.batch_handler("greet.batch", retry=AT_ONCE)
def greet_batch(messages: Sequence[Message], contexts: Sequence[SyncContext]) -> None:
    """Greet several members in a thread."""
    for message in messages:
        greet(message)


@outbox.handler("greet.transactional", retry=AT_ONCE, transactional=True)
def greet_beside_a_transaction(message: Message, ctx: SyncContext) -> None:
    """Greet with the ORM, in a handler that also has its own connection."""
    greet(message)


@outbox.handler("cut.sync", retry=AT_ONCE)
def cut_in_thread(message: Message, ctx: SyncContext) -> None:
    """Lose the connection in the first attempt, then greet."""
    if message.attempt_count == 1:
        cut()
    greet(message)


@outbox.handler("cut.async", retry=AT_ONCE)
async def cut_async(message: Message, ctx: Context) -> None:
    """Do the same on the event loop, in the thread that runs asynchronous queries."""
    from asgiref.sync import sync_to_async

    if message.attempt_count == 1:
        await sync_to_async(cut)()
    await greet_async(message, ctx)


@outbox.handler("list", retry=AT_ONCE)
async def list_members(message: Message, ctx: Context) -> None:
    """Read the members one by one with a server-side cursor, while other messages are handled."""
    emails = []
    async for member in Member.objects.order_by("email").aiterator(chunk_size=1):
        emails.append(member.email)
        is_listing.set()
        await was_passed.wait()
    if emails != message.payload:
        raise ValueError(f"listed {emails}")


@outbox.handler("pass", retry=AT_ONCE)
async def pass_by(message: Message, ctx: Context) -> None:
    """Begin and end while the members are listed; the second one begins when the list is open."""
    await is_listing.wait()
    if message.payload == 2:
        was_passed.set()


@outbox.handler("lock", retry=AT_ONCE, timeout=0.2)
async def lock(message: Message, ctx: Context) -> None:
    """Wait for the member's row, in the thread that runs asynchronous queries."""
    await greet_async(message, ctx)


def cut() -> None:
    """Terminate the server's side of this thread's connection."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

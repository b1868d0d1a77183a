"""Handlers of each kind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Final

from asgiref.sync import sync_to_async
from django.db import connection, transaction
from django.db.models import F

from pgoutbox import (
    CallNext,
    Context,
    Email,
    Message,
    Outcome,
    Permanent,
    RetryPolicy,
    Sent,
    Skip,
    Snooze,
    SyncContext,
    Topic,
    Transient,
)
from pgoutbox.contrib.django import outbox

from .models import Member

seen: Final[list[object]] = []


def _greet(message: Message) -> None:
    Member.objects.filter(pk=message.payload["pk"]).update(greeting_count=F("greeting_count") + 1)


@outbox.handler("mail.welcome")
def welcome(message: Message, ctx: SyncContext) -> Email:
    seen.append(threading.get_ident())
    ctx.ensure_lease()
    _greet(message)
    return Email(to=Member.objects.get(pk=message.payload["pk"]).email, subject="Welcome", text="Hello")


@outbox.handler("closes")
def close(message: Message, ctx: SyncContext) -> None:
    connection.close()


@outbox.handler("mail.async")
async def welcome_async(message: Message, ctx: Context) -> Email:
    await ctx.ensure_lease()
    await sync_to_async(_greet)(message)
    member = await Member.objects.aget(pk=message.payload["pk"])
    return Email(to=member.email, subject="Welcome", text="Hello")


@outbox.batch_handler("greet.batch", max_size=2)
def greet_all(messages: Sequence[Message], contexts: Sequence[SyncContext]) -> list[Outcome]:
    seen.append(len(messages))
    for message in messages:
        _greet(message)
    return [Sent() for _ in messages]


@outbox.handler("greet.shared", transactional=True, max_size=10)
@outbox.handler("greet.transactional", transactional=True)
def greet_in_transaction(message: Message, ctx: SyncContext) -> Outcome:
    ctx.ensure_lease()
    row = ctx.connection.execute(
        "UPDATE members_member SET greeting_count = greeting_count + 1 WHERE id = %s RETURNING '{\"n\": 1}'::jsonb",
        (message.payload["pk"],),
    ).fetchone()
    assert row == ({"n": 1},)
    return Permanent("refused") if message.payload.get("refuse") else Sent()


@outbox.batch_handler("greet.transactional.batch", transactional=True)
def greet_all_in_transaction(messages: Sequence[Message], contexts: Sequence[SyncContext]) -> list[Outcome]:
    return [greet_in_transaction(message, ctx) for message, ctx in zip(messages, contexts, strict=True)]


@outbox.handler("greet.transactional.async", transactional=True)
async def greet_in_transaction_async(message: Message, ctx: Context) -> Outcome:
    await ctx.ensure_lease()
    await ctx.connection.execute(
        "UPDATE members_member SET greeting_count = greeting_count + 1 WHERE id = %s", (message.payload["pk"],)
    )
    return Permanent("refused") if message.payload.get("refuse") else Sent()


@outbox.handler("try", retry=RetryPolicy.steps(60, max_attempts=3))
def try_again(message: Message, ctx: SyncContext) -> Outcome:
    seen.append(message.attempt_count)
    match message.payload, message.attempt_count:
        case "transient", 1 | 2:
            raise Transient("busy")
        case "snooze", 1:
            return Snooze(3600)
        case "permanent", _:
            return Permanent("no such user")
        case "skip", _:
            return Skip("not wanted")
        case "raise", _:
            raise KeyError("nope")
    return Sent()


@outbox.handler("break", retry=RetryPolicy.steps(60, max_attempts=2))
def break_the_transaction(message: Message, ctx: SyncContext) -> None:
    if message.attempt_count == 1:
        with transaction.atomic() if message.payload == "atomic" else connection.cursor():
            Member.objects.create(email="twice")
            Member.objects.create(email="twice")


@outbox.handler("super")
def supersede_itself(message: Message, ctx: SyncContext) -> None:
    seen.append(message.payload)
    if message.payload == "old":
        outbox.on(connection).enqueue("super", "new", coalesce_key="k")
        ctx.ensure_lease()
        seen.append("not reached")


@outbox.handler("slow", timeout=2, retry=RetryPolicy.steps(60, max_attempts=2))
async def be_slow(message: Message, ctx: Context) -> None:
    if message.attempt_count == 1:
        await asyncio.Event().wait()


@outbox.handler("late")
def do_it_on_commit(message: Message, ctx: SyncContext) -> None:
    transaction.on_commit(lambda: seen.append("committed"))


@outbox.handler("relay")
def enqueue_another(message: Message, ctx: SyncContext) -> None:
    with transaction.atomic():
        outbox.on(connection).enqueue("try", "relayed", queue="other")


outbox.define(Topic("secret", encrypted=True))


@outbox.handler("secret")
def keep_secret(message: Message, ctx: SyncContext) -> None:
    seen.append(message.payload)


@outbox.middleware
async def note_the_topic(messages: Sequence[Message], call_next: CallNext) -> Sequence[Outcome]:
    if messages[0].topic == "greet.batch":
        seen.append("middleware")
    return await call_next()

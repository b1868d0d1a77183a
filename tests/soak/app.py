"""The application of the tested workers. A message's payload defines the course of each of its attempts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from pgoutbox import (
    Context,
    Email,
    Failure,
    Message,
    Outbox,
    Permanent,
    RetryPolicy,
    Snooze,
    SyncContext,
    Transient,
    Webhook,
)
from tests.soak.host import NotedLineTransport
from tests.soak.postbox import headers_of
from tests.support.ledger import KEY, told_ledger
from tests.support.line_server import Line

EFFECT_TOPICS = ("soak.effect", "soak.effect.shared", "soak.effect.batch")
TOPICS = ("soak.async", "soak.sync", "soak.batch", *EFFECT_TOPICS)
ORDERED_TOPICS = ("soak.ordered", "soak.arranged")
OWNERS = 100
"""Each owner has some of the messages without a dedupe key."""
LONELY_QUEUE = "lonely"
"""Only one process serves this queue."""
STEADY_QUEUE = "steady"
"""Only one process serves this queue too. Its messages succeed at once and never end, so no silence or retry rescues a
message that a claim has passed over."""
THREAD_TIMEOUT_SECONDS = 1.0
ACCOUNTS = 500
"""Rows of the application that transactional handlers write."""

outbox = Outbox(transports=[NotedLineTransport(timeout_seconds=1.0)])
TEXT = "5 € für 漢字 🙂"
"""Used in payloads and errors. Only Unicode encodings have all of its characters."""
_RETRY = RetryPolicy(max_attempts=1000, base=0.05, cap=1.0)
_TIMEOUT_SECONDS = 4.0
_handed_over = set[tuple[int, datetime, int]]()


def facts(message: Message) -> dict[str, Any]:
    """Return the payload, which the producers make."""
    assert isinstance(message.payload, dict)
    return message.payload


def step(message: Message) -> str:
    """Return the step of this attempt. The last step of the plan applies to all further attempts."""
    plan = facts(message)["plan"]
    return str(plan[min(message.attempt_count, len(plan)) - 1])


def answer(message: Message) -> Transient | Permanent | Snooze | None:
    """Run the step up to its outcome. None is a success that is not written yet."""
    match step(message):
        case "ok":
            return None
        case "transient":
            return Transient("planned")
        case "permanent":
            return Permanent("planned")
        case "snooze":
            return Snooze(0.1)
        case "error":
            raise RuntimeError(f"planned: \x00 \ud800 {TEXT}")
        case "die":
            os._exit(137)
        case "die_after":
            hand_over(message)
            os._exit(137)
        case unknown:
            raise ValueError(f"no such step: {unknown}")


def safe_answer(message: Message) -> Transient | Permanent | Snooze | None:
    """Run the step up to its outcome. An error concerns this message only."""
    try:
        return answer(message)
    except RuntimeError as error:
        return Transient(str(error))


def hand_over(message: Message) -> None:
    """Simulate the external effect of a real handler."""
    told_ledger().hand_over(message.payload, message.attempt_count)


def hand_over_once(message: Message) -> None:
    """Hand over, unless this attempt has: messages that share a transaction are tried again in parts of it."""
    if (attempt := (message.id, message.created_at, message.attempt_count)) not in _handed_over:
        _handed_over.add(attempt)
        hand_over(message)


def running(message: Message) -> contextlib.AbstractContextManager[None]:
    """Record how long the handler runs."""
    return told_ledger().running(message.payload, message.attempt_count)


@outbox.handler("soak.async", retry=_RETRY, timeout=_TIMEOUT_SECONDS)
@outbox.handler("soak.ordered", retry=_RETRY, timeout=_TIMEOUT_SECONDS)
@outbox.handler("soak.arranged", retry=_RETRY, timeout=_TIMEOUT_SECONDS)
@outbox.handler("soak.halted", retry=_RETRY, timeout=_TIMEOUT_SECONDS)
@outbox.handler("soak.forgotten", retry=_RETRY, timeout=_TIMEOUT_SECONDS)
async def on_async(message: Message, ctx: Context) -> Transient | Permanent | Snooze | None:
    """Wait like for a slow server, check the lease, hand over."""
    with running(message):
        await asyncio.sleep(facts(message)["seconds"])
        if step(message) == "hang":
            await asyncio.sleep(3600)
        outcome = answer(message)
        if outcome is None:
            await ctx.ensure_lease()
            hand_over(message)
        return outcome


@outbox.handler("soak.sync", retry=_RETRY)
def on_sync(message: Message, ctx: SyncContext) -> Transient | Permanent | Snooze | None:
    """Block a thread, hand over."""
    with running(message):
        time.sleep(facts(message)["seconds"])
        outcome = answer(message)
        if outcome is None:
            hand_over(message)
        return outcome


@outbox.handler("soak.thread", retry=_RETRY, timeout=THREAD_TIMEOUT_SECONDS)
def on_thread(message: Message, ctx: SyncContext) -> Transient | Permanent | Snooze | None:
    """Block a thread, every second time for longer than the timeout, and hand over all the same."""
    with running(message):
        time.sleep(facts(message)["seconds"] if message.attempt_count % 2 else 0.1)
        outcome = answer(message)
        if outcome is None:
            hand_over(message)
        return outcome


@outbox.handler("soak.errand", retry=_RETRY, timeout=THREAD_TIMEOUT_SECONDS)
async def on_errand(message: Message, ctx: Context) -> Transient | Permanent | Snooze | None:
    """Hand over in a thread of its own, which may outlast the timeout and a stop."""

    def errand() -> Transient | Permanent | Snooze | None:
        with running(message):
            time.sleep(facts(message)["seconds"] if message.attempt_count % 2 else 0.1)
            outcome = answer(message)
            if outcome is None:
                hand_over(message)
            return outcome

    return await asyncio.to_thread(errand)


@outbox.batch_handler("soak.batch", max_size=20, retry=_RETRY, timeout=_TIMEOUT_SECONDS)
async def on_batch(
    messages: Sequence[Message], contexts: Sequence[Context]
) -> list[Transient | Permanent | Snooze | None]:
    """Hand over the messages whose plan says so; the others have their own outcomes."""
    outcomes = []
    for message in messages:
        with running(message):
            outcome = safe_answer(message)
            if outcome is None:
                hand_over(message)
            outcomes.append(outcome)
    return outcomes


@outbox.handler("soak.effect", retry=_RETRY, transactional=True)  # A timeout would end a deadlock.
async def on_effect(message: Message, ctx: Context) -> Transient | Permanent | Snooze | None:
    """Write the effect in the transaction that ends the attempt: exactly once in any case.

    Every second handler writes it in a block of the driver's own `transaction()`, as users do.
    """
    with running(message):
        async with ctx.connection.transaction() if message.id % 2 else contextlib.nullcontext():
            await write_effect(message, ctx)
        await asyncio.sleep(facts(message)["seconds"])
        outcome = answer(message)
        if outcome is None:
            hand_over(message)
        return outcome


@outbox.handler("soak.effect.shared", retry=_RETRY, transactional=True, max_size=20)
async def on_shared_effect(message: Message, ctx: Context) -> Transient | Permanent | Snooze | None:
    """Write the effect in a savepoint of a transaction that ends several attempts."""
    with running(message):
        await write_effect(message, ctx)
        outcome = answer(message)
        if outcome is None:
            hand_over_once(message)
        return outcome


@outbox.batch_handler("soak.effect.batch", max_size=20, retry=_RETRY, transactional=True)
async def on_batch_of_effects(
    messages: Sequence[Message], contexts: Sequence[Context]
) -> list[Transient | Permanent | Snooze | None]:
    """Write all effects, or none: if a message is not sent, this runs again without it."""
    outcomes = []
    for message, ctx in zip(messages, contexts, strict=True):
        with running(message):
            await write_effect(message, ctx)
            outcomes.append(safe_answer(message))
    for message, outcome in zip(messages, outcomes, strict=True):
        if outcome is None:
            hand_over_once(message)
    return outcomes


async def write_effect(message: Message, ctx: Context) -> None:
    """Insert a row, and change one that other messages also change."""
    await ctx.connection.execute(
        "INSERT INTO soak_effect (message_id, attempt_count) VALUES (%s, %s)", (message.id, message.attempt_count)
    )
    await ctx.connection.execute(
        "UPDATE soak_account SET change_count = change_count + 1 WHERE id = %s", (message.id % ACCOUNTS,)
    )


@outbox.on_failed("soak.sync", retry=_RETRY, transactional=True, timeout=_TIMEOUT_SECONDS)
@outbox.on_failed("soak.batch", retry=_RETRY, transactional=True, timeout=_TIMEOUT_SECONDS)
async def on_failure(message: Message[Failure], ctx: Context) -> None:
    """Write the effect of the hook in the transaction that ends its attempt."""
    await ctx.connection.execute(
        "INSERT INTO soak_effect (message_id, attempt_count) VALUES (%s, %s)", (message.id, message.attempt_count)
    )


@outbox.handler("soak.fanout", retry=_RETRY, timeout=_TIMEOUT_SECONDS)
async def on_fanout(message: Message, ctx: Context) -> Transient | Permanent | Snooze | None:
    """Hand over the shared content to one destination, with the ledger key of that destination."""
    if message.content != {"of": facts(message)[KEY]}:
        return Permanent("the content is not that of the message")
    payload = {KEY: fanout_key(facts(message)[KEY], str(message.destination))}
    with told_ledger().running(payload, message.attempt_count):
        await ctx.ensure_lease()
        told_ledger().hand_over(payload, message.attempt_count)
        return None


def fanout_key(key: str, destination: str) -> str:
    """Return the ledger key of one message of a fan-out, whose messages share one payload."""
    return f"{key}/{destination}"


@outbox.handler("soak.line", retry=_RETRY, timeout=_TIMEOUT_SECONDS)
async def on_line(message: Message, ctx: Context) -> Line:
    """Leave the hand-over to the transport, and to the breaker of its destination."""
    return Line(str(message.id))


@outbox.handler("soak.mail", retry=_RETRY)
async def on_mail(message: Message, ctx: Context) -> Email:
    """Leave the hand-over to the SMTP transport, whose one connection makes e-mails wait for their turn."""
    return Email(subject="planned", to="ada@example.org", text=TEXT, headers=headers_of(message))


@outbox.handler("soak.webhook", retry=_RETRY)
async def on_webhook(message: Message, ctx: Context) -> Webhook:
    """Leave the hand-over to the webhook transport, whose connections stay open for the next one."""
    return Webhook(body={"text": facts(message)["text"]}, headers=headers_of(message))

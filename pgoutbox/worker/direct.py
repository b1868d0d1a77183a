"""Direct sends: one attempt of a message that is not stored. The caller gets the answer.

The attempt takes the way of a worker's attempt: handler, middleware, redirect, transport. There is no row, so nothing
is retried, nothing is left for a worker, and no circuit breaker changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, TypedDict

import psycopg
from typing_extensions import Unpack

from pgoutbox.clock import elapsed_clock
from pgoutbox.database.store import Store
from pgoutbox.encryption import keyring_of
from pgoutbox.enqueue.payloads import Serializer, to_json
from pgoutbox.errors import ConfigurationError, UnknownTopicError
from pgoutbox.handlers import Handler
from pgoutbox.message import Message, Outcome, P, SendFailure, Transient, Unavailable
from pgoutbox.observability.events import Telemetry
from pgoutbox.outbox import Outbox
from pgoutbox.settings import Settings
from pgoutbox.text import describe, one_line
from pgoutbox.topics import Topic
from pgoutbox.transports.registry import complete
from pgoutbox.worker.attempt import Attempt, Claim
from pgoutbox.worker.executor import AttemptExecutor
from pgoutbox.worker.payloads import read_json, read_payload
from pgoutbox.worker.queues import Turns, parse_queues
from pgoutbox.worker.run_state import RunState
from pgoutbox.worker.transactional.django_orm import DjangoConnections

_log = logging.getLogger("pgoutbox.worker")

# The sequence of messages starts at 1 and never comes here. So no row has the id, or the key, of a direct send.
_FIRST_ID: Final = 2**62

# One instance of a transport serves one event loop at a time, and each sync call has its own.
_own_transports = threading.Lock()


class DirectOptions(TypedDict, total=False):
    """The options of a direct send."""

    destination: str | None
    headers: Mapping[str, str] | None
    content: object
    serializer: Serializer | None
    settings: Settings | None


async def asend_directly(
    outbox: Outbox, topic: str | Topic[P], payload: P, **options: Unpack[DirectOptions]
) -> Outcome:
    """Run the topic's handler once, send what it returns, and return the outcome. Nothing is stored.

    The caller waits, for example for a button "send a test mail". A message that must arrive is enqueued:
    after a failure, a crash or a cancelled call, nobody tries a direct send again.

    `destination` and `headers` are those of `Producer.enqueue`, `content` is the shared content of a fan-out. The
    timeout is that of the handler, else PGOUTBOX_HANDLER_TIMEOUT_SECONDS. Redirects and blackouts apply as in a worker.
    From a copy of the database nothing is sent, nor while the database does not answer: the outcome is `Unavailable`
    then. The login of PGOUTBOX_DSN needs the role of a producer. A caller's transaction is not seen: commit before.

    Returns a refusal instead of raising it. Raises `ArgumentError` like `enqueue`, `UnknownTopicError` without a
    handler, and `ConfigurationError` for a transactional handler or an unusable setting. Transports that the outbox was
    created with stay open, because a worker of this process may use them.

        outcome = await asend_directly(outbox, "mail.test", {}, destination="mailto:ada@example.org")
        if not isinstance(outcome, Sent):
            show(str(outcome))
    """
    sending = _DirectSend(outbox, topic, payload, options)
    # A task has its own context: what middleware and handlers set there does not reach the caller.
    return await asyncio.create_task(sending.run(), name="pgoutbox-direct-send")


def send_directly(outbox: Outbox, topic: str | Topic[P], payload: P, **options: Unpack[DirectOptions]) -> Outcome:
    """Send directly from a thread without an event loop, with the contract of `asend_directly`.

    The handler runs on an event loop of this call, or in a thread. Transports that the outbox was created with are
    closed at the end, so no worker of this process may use them; concurrent calls wait for each other then.

        outcome = send_directly(outbox, "mail.test", {}, destination="mailto:ada@example.org")
    """
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        raise TypeError("send_directly would block the event loop of this thread; use: await asend_directly(...)")
    sending = _DirectSend(outbox, topic, payload, options)
    with _own_transports if outbox.transports else contextlib.nullcontext():
        return asyncio.run(sending.run(closes_all=True))


class _DirectSend:
    """A checked message, and its one attempt."""

    def __init__(self, outbox: Outbox, topic: str | Topic[Any], payload: object, options: DirectOptions) -> None:
        self._outbox = outbox
        self._settings = settings = options.get("settings") or outbox.settings
        settings.require_dsn()
        draft = outbox.draft(
            topic,
            payload,
            serializer=options.get("serializer"),
            destination=options.get("destination"),
            headers=options.get("headers"),
        )
        self._handler = _handler_of(outbox, draft.topic)
        content = to_json(
            options.get("content"),
            max_bytes=settings.max_payload_bytes,
            serializer=options.get("serializer"),
            field="content",
        )
        now = datetime.now(UTC)
        self._message = Message[object](
            id=_FIRST_ID + secrets.randbelow(_FIRST_ID),
            topic=draft.topic,
            queue=draft.options.get("queue", "default"),
            destination=draft.options.get("destination"),
            payload=None,
            headers=draft.options.get("headers", {}),
            attempt_count=1,
            max_attempts=1,
            created_at=now,
            available_at=now,
            coalesce_key=draft.options.get("coalesce_key"),
            ordering_key=draft.options.get("ordering_key"),
            payload_version=draft.options.get("payload_version", 1),
            content=read_json(content),
        )
        self._payload_json = draft.payload

    async def run(self, *, closes_all: bool = False) -> Outcome:
        """Run the attempt, and close what it has opened. With `closes_all`, also the outbox's own transports."""
        keyring = keyring_of(self._settings.encryption_keys)
        payload, problem = read_payload(self._payload_json, self._message, self._handler, keyring)
        if problem is not None:
            return problem
        message = replace(self._message, payload=payload)
        settings, transports = self._settings, complete(self._outbox.transports, self._settings)
        run = RunState(
            settings,
            Store(settings, worker=f"{socket.gethostname()}:{os.getpid()}", purpose="direct"),
            Telemetry(_log),
            queues=Turns(parse_queues(())),
            topics=[message.topic],
            stopping=asyncio.Event(),
        )
        executor = AttemptExecutor(run, transports, middleware=self._outbox.middlewares, on_outcome=lambda *_: None)
        kept = () if closes_all else tuple(self._outbox.transports.values())
        handler, django = self._handler, DjangoConnections.in_use()
        # A cancellation may come while it closes, for example while the mail server does not answer QUIT.
        async with contextlib.AsyncExitStack() as opened:
            opened.push_async_callback(run.store.close)
            if django is not None:
                opened.push_async_callback(django.close)
                handler = django.around(handler)
            opened.push_async_callback(executor.close, keeps=kept)
            if (refusal := await _refusal_of(run.store)) is not None:
                return refusal
            return await self._attempt(
                executor, Attempt(message, handler, Claim(message.created_at), elapsed_clock(), _hold)
            )

    async def _attempt(self, executor: AttemptExecutor, attempt: Attempt) -> Outcome:
        seconds = self._handler.timeout_seconds or self._settings.handler_timeout_seconds
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                (outcome,) = await executor.run((attempt,))
        except TimeoutError:
            if not limit.expired():
                raise
            return SendFailure(f"timed out after {seconds:g} s, outcome unknown", unknown=True)
        except Exception as error:  # noqa: BLE001 - as in a worker, any error is the outcome
            return Transient(describe(error))
        return outcome


def _handler_of(outbox: Outbox, topic: str) -> Handler:
    handler = outbox.handlers.get(topic)
    if handler is None:
        raise UnknownTopicError(f"topic {topic!r} has no handler in this outbox, so it cannot be sent directly")
    if handler.transactional:
        raise ConfigurationError(
            f"topic {topic!r} has a transactional handler, which commits with its message; enqueue the message instead"
        )
    return handler


async def _refusal_of(store: Store) -> Unavailable | None:
    """Return the reason why this database does not allow to send: it is a copy, or does not answer."""
    try:
        await store.server_time()
    except (psycopg.Error, OSError) as error:
        if isinstance(error, psycopg.ProgrammingError) and error.sqlstate is None:
            raise  # The DSN is wrong.
        text = getattr(getattr(error, "diag", None), "message_primary", None) or str(error) or type(error).__name__
        return Unavailable(f"not sent: {one_line(text)}")
    return None


async def _hold(_: Attempt) -> None:
    """Let every gate pass: without a row nobody else can have the message."""

"""The application's side of pgoutbox: it registers topics and handlers, and enqueues on the caller's connection.

Nothing here opens, commits or closes a connection. The sync and the async methods take the same steps.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeVar, cast, overload

from pydantic import BaseModel
from typing_extensions import Unpack

from pgoutbox.clock import Duration, seconds_of
from pgoutbox.database import sql
from pgoutbox.encryption import Keyring, keyring_of
from pgoutbox.enqueue.adapters import (
    Answer,
    AsyncConnection,
    ClosedError,
    SyncConnection,
    answer_of,
    async_adapter,
    sync_adapter,
)
from pgoutbox.enqueue.generators import (
    Cancelled,
    CancelResult,
    Enqueued,
    EnqueuedMany,
    RescheduleResult,
    Steps,
    UnprotectedError,
    arun,
    cancel_each,
    cancel_one,
    in_savepoint,
    insert,
    insert_all,
    insert_fanout,
    new_time_of,
    reschedule_one,
    run,
    target_of,
    targets_of,
    transaction,
)
from pgoutbox.enqueue.payloads import Serializer
from pgoutbox.enqueue.validation import Bulk, Draft, Route, carrying, prepare, prepare_fanout
from pgoutbox.errors import ArgumentError, ConfigurationError, PgOutboxError, UnknownTopicError
from pgoutbox.handlers import Context, Handler, Middleware, OnUnknown, SyncContext
from pgoutbox.message import Failure, Message, Outcome, P
from pgoutbox.observability.events import LogEvent
from pgoutbox.observability.tracing import UNTRACED, Producing, producing
from pgoutbox.options import check_name
from pgoutbox.redaction import redact_text
from pgoutbox.retry import DEFAULT_MAX_ATTEMPTS, RetryPolicy
from pgoutbox.settings import Settings, load_settings
from pgoutbox.signatures import is_async
from pgoutbox.text import MAX_NAME_LENGTH, describe, one_line
from pgoutbox.topics import FanoutOptions, MessageOptions, NewMessage, Recipient, Topic
from pgoutbox.transports import Content, Transport

_logger = logging.getLogger(__name__)

# The names of a message in the log of a failed enqueue, besides its topic.
_KEYS: Final = ("coalesce_key", "dedupe_key", "ordering_key", "owner")
# What that log adds to an error of PostgreSQL.
_NEXT_STEPS: Final[Mapping[str, str]] = {
    "40001": "; its key was used after this transaction's snapshot: repeat the whole transaction",
    "55P03": "; another session held a table of the outbox for a second, or a lock for the caller's lock_timeout",
}
_FAILED: Final = ".failed"  # The end of a hook's topic; _enqueue_failure() appends it too.

Result: TypeAlias = Outcome | Content | None
R = TypeVar("R")
M = TypeVar("M", bound=Middleware)
F = TypeVar("F", bound="Callable[..., object]")
ResultT = TypeVar("ResultT", bound=Result)
ResultsT = TypeVar("ResultsT", bound="Sequence[Result] | None")


class EnqueueOptions(MessageOptions, total=False):
    """The options of `Outbox.enqueue` and `Outbox.aenqueue`."""

    serializer: Serializer | None
    notify: bool
    require_transaction: bool


class Outbox:
    """The topics and handlers of one application. It enqueues messages for them.

    Without `settings` the environment is read when a setting is first needed, so that importing the application needs
    no settings. `transports` send the contents that handlers return. The transports of SMTP, Apprise and the brokers
    are created automatically when their settings name a server, and `https` when the extra `webhook` is installed. With
    `strict` a topic that is neither defined nor handled raises `UnknownTopicError`.

        outbox = Outbox()

        @outbox.handler("mail.welcome")
        async def welcome(message: Message, ctx: Context) -> Email: ...

        with psycopg.connect(dsn) as connection:
            outbox.enqueue(connection, "mail.welcome", {"user_id": 7})
    """

    def __init__(
        self, settings: Settings | None = None, *, transports: Sequence[Transport] = (), strict: bool = False
    ) -> None:
        if settings is not None and not isinstance(settings, Settings):
            # The value is not shown: it may be a DSN with a password.
            raise ConfigurationError(
                f"settings: must be Settings, not {type(settings).__name__}; "
                "set PGOUTBOX_DSN, or pass Outbox(Settings(dsn=...))"
            )
        if isinstance(transports, (str, Mapping)) or not isinstance(transports, Iterable):
            raise ConfigurationError(f"transports: must be a list of transports, not {type(transports).__name__}")
        if not isinstance(strict, bool):
            raise ConfigurationError(f"strict: must be True or False, got {strict!r}")
        self._settings = settings
        self._strict = strict
        self._topics: dict[str, Topic[Any]] = {}
        self._handlers: dict[str, Handler] = {}
        self._hooks: dict[str, str] = {}
        self._middlewares: list[Middleware] = []
        self._transports: dict[str, Transport] = {}
        for index, transport in enumerate(transports):
            if isinstance(transport, type) or not hasattr(transport, "schemes") or not hasattr(transport, "send"):
                raise ConfigurationError(
                    f"transports[{index}]: must be an object with `schemes` and `send`, got {transport!r}"
                )
            for scheme in transport.schemes:
                if self._transports.setdefault(scheme, transport) is not transport:
                    raise ConfigurationError(f"transports: two serve the scheme {scheme!r}")

    @property
    def settings(self) -> Settings:
        """The given settings, or else those of the environment, read once."""
        if self._settings is None:
            self._settings = load_settings()
        return self._settings

    # --- registry -----------------------------------------------------------------------------------------------------

    @property
    def topics(self) -> Mapping[str, Topic[Any]]:
        """The defined topics by name."""
        return MappingProxyType(self._topics)

    @property
    def transports(self) -> Mapping[str, Transport]:
        """The given transports by scheme. A worker adds those whose servers the settings name, and `https`."""
        return MappingProxyType(self._transports)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The registered handlers by topic."""
        return MappingProxyType(self._handlers)

    @property
    def hooks(self) -> Mapping[str, str]:
        """The topics with a hook for failed messages, each with the topic of the hook: see `on_failed`."""
        return MappingProxyType(self._hooks)

    @property
    def default_queues(self) -> Sequence[str]:
        """The queues that the command `worker` serves if it names none."""
        return ("default",)

    def define(self, topic: Topic[P]) -> Topic[P]:
        """Register the definition and return it. Call sites can then use its name alone.

        Define each name once, and before the topic's handler, or this raises `ConfigurationError`. Defining the same
        object again is fine.
        """
        known = self._topics.get(topic.name)
        if known is not None and known is not topic:
            raise ConfigurationError(f"topic {topic.name!r} is already defined")
        if known is None and topic.name in self._handlers:
            raise ConfigurationError(f"topic {topic.name!r} has a handler already: define the topic before it")
        if known is None and topic.name in self._hooks:
            raise ConfigurationError(f"topic {topic.name!r} has a hook already: define the topic before it")
        self._topics[topic.name] = topic
        return topic

    @property
    def middlewares(self) -> Sequence[Middleware]:
        """The registered middlewares, the outermost one first."""
        return tuple(self._middlewares)

    def middleware(self, function: M) -> M:
        """Register an async function that runs around each call of a handler; the first one is the outermost.

        It gets the messages (several for a batch handler) and `call_next`, and returns an outcome for each message, in
        their order. Context variables that it sets are set in the handler, also in a thread. The exception behind an
        outcome is its `__cause__`.

            @outbox.middleware
            async def report_errors(messages, call_next):
                outcomes = await call_next()
                for outcome in outcomes:
                    if isinstance(outcome, Exception) and outcome.__cause__ is not None:
                        sentry_sdk.capture_exception(outcome.__cause__)
                return outcomes

        An exception before `call_next` ends the attempts as if the handler had raised it. After `call_next` it is
        logged, and the outcomes stand: the messages may have been sent. The outcome of a transactional handler that has
        committed cannot be changed.
        """
        if not is_async(function):
            raise ConfigurationError(f"middleware {function!r}: must be an async function")
        self._middlewares.append(function)
        return function

    def handler(
        self,
        topic: str | Topic[P],
        *,
        retry: RetryPolicy | None = None,
        timeout: Duration | None = None,
        on_unknown: OnUnknown = "retry",
        transactional: bool = False,
        permanent: Sequence[type[BaseException]] = (),
    ) -> HandlerDecorator[P]:
        """Register the decorated function as the topic's handler, and return it unchanged.

        An `async def` gets `(Message, Context)` on the worker's event loop, a `def` gets `(Message, SyncContext)` in a
        thread. It returns nothing (sent), an outcome, or a content to deliver. It runs at least once per message; a
        retry gets the same `message.idempotency_key`. `timeout` (seconds or a timedelta) is per attempt. With
        `on_unknown="hold"`, a message whose lease expired ends as `failed` instead of being tried again. A
        `transactional` handler writes with `ctx.connection`, and its writes and the completion commit together.
        Exceptions of the `permanent` types are not retried.

        Raises `ConfigurationError` for a second handler of a topic, for a function of another signature, for a
        generator, and for annotations that contradict what a worker passes.

            @outbox.handler(activation, retry=RetryPolicy.steps(60, 300, 900, 3600))
            async def activate(message: Message[Activation], ctx: Context) -> Email: ...
        """
        make = partial(Handler, on_unknown=on_unknown, transactional=transactional, permanent=permanent)
        return self._decorator("handler", topic, retry, timeout, make)

    def batch_handler(
        self,
        topic: str | Topic[P],
        *,
        max_size: int = 100,
        retry: RetryPolicy | None = None,
        timeout: Duration | None = None,
        on_unknown: OnUnknown = "retry",
        permanent: Sequence[type[BaseException]] = (),
    ) -> BatchHandlerDecorator[P]:
        """Register the decorated function as the topic's handler of up to `max_size` messages at once.

        It gets a list of messages and a list of contexts. It returns None (all sent) or one result for each message, in
        their order. If it raises, the exception is the outcome of every message of the batch; an exception that ends
        messages, such as `Permanent`, is first tried again with each half. Everything else is as in `handler`.

            @outbox.batch_handler("search.index", max_size=500)
            async def index(messages: Sequence[Message], contexts: Sequence[Context]) -> None: ...
        """
        make = partial(Handler, on_unknown=on_unknown, max_size=max_size, permanent=permanent)
        return self._decorator("batch_handler", topic, retry, timeout, make)

    def on_failed(
        self,
        topic: str | Topic[Any],
        *,
        retry: RetryPolicy | None = None,
        timeout: Duration | None = None,
        on_unknown: OnUnknown = "retry",
        transactional: bool = False,
        permanent: Sequence[type[BaseException]] = (),
    ) -> HandlerDecorator[Failure]:
        """Register the decorated function as the hook of a topic: it runs when a message of the topic ends `failed`.

        The hook is a handler of its own topic, `<topic>.failed`. The transaction that ends a message as failed enqueues
        one message of that topic, in the same queue. So the hook runs at least once for each failure that was
        committed, with its own retries, and never for another. A message that is redriven and fails again has another
        failure. A hook that fails has no hook itself: its message ends `failed` like any other. The options are those
        of `handler`.

        Register the hook in the outbox that has the topic's handler. Raises `ConfigurationError` for a second hook of a
        topic, for the hook of a hook, and for a topic of more than 56 characters.

            @outbox.on_failed("mail.welcome", transactional=True)
            async def mark_address(message: Message[Failure], ctx: Context) -> None:
                await ctx.connection.execute(
                    "UPDATE member SET bounced_at = now() WHERE id = %s", (message.payload.payload["member_id"],)
                )
        """
        _require_topic("on_failed", topic)
        make = partial(Handler, on_unknown=on_unknown, transactional=transactional, permanent=permanent)

        def register(function: F) -> F:
            definition = self.define(topic) if isinstance(topic, Topic) else self._topics.get(topic) or Topic(topic)
            hook_topic = self._topic_of_hook(definition)
            self._decorator("on_failed", hook_topic, retry, timeout, make)(function)
            self._hooks[definition.name] = hook_topic.name
            return function

        return register

    def _topic_of_hook(self, failing: Topic[Any]) -> Topic[Failure]:
        """Return the topic of the messages for a new hook. Their payload contains that of the failed message."""
        name = failing.name
        if name in self._hooks:
            raise ConfigurationError(f"on_failed: topic {name!r} has a hook already")
        if name in self._hooks.values():
            raise ConfigurationError(f"on_failed: topic {name!r} is that of a hook, which can have no hook itself")
        if name + _FAILED in self._hooks:
            raise ConfigurationError(f"on_failed: topic {name + _FAILED!r} has a hook, which can have no hook itself")
        if len(name + _FAILED) > MAX_NAME_LENGTH:
            raise ConfigurationError(
                f"on_failed: topic {name!r}: its hook's topic {name + _FAILED!r} would have more than "
                f"{MAX_NAME_LENGTH} characters; shorten the topic to {MAX_NAME_LENGTH - len(_FAILED)}"
            )
        return Topic(name + _FAILED, payload=Failure, redact=failing.redact)

    def _decorator(
        self,
        name: str,
        topic: str | Topic[Any],
        retry: RetryPolicy | None,
        timeout: Duration | None,
        make: Callable[..., Handler],
    ) -> Callable[[F], F]:
        _require_topic(name, topic)
        timeout_seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout

        def register(function: F) -> F:
            topic_name = topic.name if isinstance(topic, Topic) else topic
            if topic_name in self._handlers:
                raise ConfigurationError(f"topic {topic_name!r} has a handler already")
            definition = self.define(topic) if isinstance(topic, Topic) else self._topics.get(topic) or Topic(topic)
            if definition.retry is not None and retry is not None:
                raise ConfigurationError(
                    f"handler of topic {topic_name!r}: retry: belongs to the definition of the topic"
                )
            self._handlers[topic_name] = make(
                topic_name,
                function,
                retry=retry or definition.retry or RetryPolicy(),
                timeout_seconds=timeout_seconds,
                payload=cast("type[BaseModel] | None", definition.payload),
                redact=definition.redact,
                unreadable_timeout_seconds=seconds_of(definition.unreadable_timeout),
            )
            return function

        return register

    # --- enqueue ------------------------------------------------------------------------------------------------------

    @overload
    def enqueue(
        self,
        connection: SyncConnection,
        topic: str | Topic[P],
        payload: P,
        *,
        best_effort: Literal[False] = False,
        **options: Unpack[EnqueueOptions],
    ) -> Enqueued: ...
    @overload
    def enqueue(
        self,
        connection: SyncConnection,
        topic: str | Topic[P],
        payload: P,
        *,
        best_effort: bool,
        **options: Unpack[EnqueueOptions],
    ) -> Enqueued | None: ...
    def enqueue(
        self,
        connection: SyncConnection,
        topic: str | Topic[P],
        payload: P,
        *,
        serializer: Serializer | None = None,
        notify: bool = True,
        require_transaction: bool = True,
        best_effort: bool = False,
        **options: Unpack[MessageOptions],
    ) -> Enqueued | None:
        """Write one message in the transaction of the caller's connection. It exists if and only if that commits.

        Takes a psycopg `Connection`, SQLAlchemy's `Connection` or `Session` (on psycopg), or Django's `connection`.
        Never commits, and makes no savepoint unless `best_effort` is set. Of the messages with one topic and
        `coalesce_key` only the newest committed one is delivered; transactions that enqueue for one key wait for each
        other. If another message has the `dedupe_key`, the result is a duplicate with that message's id and state:
        calling again, for example after a lost reply to COMMIT, is harmless. If that message was cancelled or skipped,
        the new message takes the key. Without either key each call writes a separate message. Messages with one queue
        and `ordering_key` are delivered one after the other, in the order of their commits. For other messages the
        order is not guaranteed.

        `delay` (seconds or a timedelta) counts on PostgreSQL's clock; `available_at` and `expires_at` are datetimes
        with a time zone. A pydantic model is dumped as JSON; `serializer` is called with other values that are not
        JSON. With `notify=False` the next poll finds the message; a transaction for `PREPARE TRANSACTION` needs it.
        `require_transaction=False` accepts autocommit.

        Raises `ArgumentError` naming the field, usually before any SQL; `DedupeConflictError` if the message with the
        dedupe key has another payload, unless `on_duplicate="ignore"`; `UnknownTopicError` from a strict outbox;
        `TransactionError` outside a transaction, or in an aborted one; `SchemaError` without the schema, or if the
        sequence of ids is behind the messages; `ConfigurationError` if the connection's encoding lacks a character;
        `TypeError` for another kind of connection. The driver's own errors pass through. With `best_effort` all but the
        `TypeError` are logged instead, with the keys and the owner, rolled back to a savepoint, and None is returned:
        the caller's transaction stays usable. Such a call waits at most a second for a locked table, and for a key, or
        the ended message that has it, as every call does: up to the caller's `lock_timeout` and `statement_timeout`. An
        error that ends the whole transaction, such as a lost connection, is still raised: None never hides the loss of
        the caller's own writes.

            with psycopg.connect(dsn) as connection:
                connection.execute("INSERT INTO account ...")
                outbox.enqueue(connection, "mail.welcome", {"user_id": 7}, dedupe_key="welcome-7")
        """
        adapter = sync_adapter(connection, function="enqueue", async_function="aenqueue")
        with self._producing(topic) as span:
            steps = self._enqueue(
                carrying(NewMessage(topic, payload, **options), span.context),
                serializer=serializer,
                notify=notify,
                require_transaction=require_transaction,
                best_effort=best_effort,
            )
            enqueued = run(adapter, steps)
            span.wrote([] if enqueued is None else [enqueued.id])
        return enqueued

    @overload
    async def aenqueue(
        self,
        connection: AsyncConnection,
        topic: str | Topic[P],
        payload: P,
        *,
        best_effort: Literal[False] = False,
        **options: Unpack[EnqueueOptions],
    ) -> Enqueued: ...
    @overload
    async def aenqueue(
        self,
        connection: AsyncConnection,
        topic: str | Topic[P],
        payload: P,
        *,
        best_effort: bool,
        **options: Unpack[EnqueueOptions],
    ) -> Enqueued | None: ...
    async def aenqueue(
        self,
        connection: AsyncConnection,
        topic: str | Topic[P],
        payload: P,
        *,
        serializer: Serializer | None = None,
        notify: bool = True,
        require_transaction: bool = True,
        best_effort: bool = False,
        **options: Unpack[MessageOptions],
    ) -> Enqueued | None:
        """Enqueue on an async connection, with the contract of `enqueue`.

        Takes a psycopg `AsyncConnection`, SQLAlchemy's `AsyncConnection` or `AsyncSession` (on psycopg or asyncpg), or
        an asyncpg `Connection`.

            async with connection.transaction():
                await outbox.aenqueue(connection, "mail.welcome", {"user_id": 7})
        """
        adapter = async_adapter(connection, function="aenqueue", sync_function="enqueue")
        with self._producing(topic) as span:
            steps = self._enqueue(
                carrying(NewMessage(topic, payload, **options), span.context),
                serializer=serializer,
                notify=notify,
                require_transaction=require_transaction,
                best_effort=best_effort,
            )
            enqueued = await arun(adapter, steps)
            span.wrote([] if enqueued is None else [enqueued.id])
        return enqueued

    def enqueue_many(
        self,
        connection: SyncConnection,
        items: Iterable[NewMessage[Any]],
        *,
        serializer: Serializer | None = None,
        notify: bool = True,
        require_transaction: bool = True,
    ) -> EnqueuedMany:
        """Write many messages in the transaction of the caller's connection; the answers are in the order of the items.

        The contract of `enqueue` applies to each item. All items are checked before the first statement, so that an
        invalid item, or an iterator that raises, leaves no rows; the error names the item: `items[4711].payload.x`.
        A statement has up to 5,000 items without keys, or all those with keys, whose keys it locks in one order: two
        transactions that make one call each never deadlock, unless the items with keys have more than 40 million
        characters. Without items no statement is sent.

            outbox.enqueue_many(connection, [NewMessage("search.index", {"id": n}) for n in changed])
        """
        adapter = sync_adapter(connection, function="enqueue_many", async_function="aenqueue_many")
        with self._producing(None) as span:
            bulk = self._prepare_all(items, serializer, span.context)
            enqueued = run(adapter, insert_all(bulk, notify=notify, require_transaction=require_transaction))
            span.wrote(enqueued.ids)
        return enqueued

    async def aenqueue_many(
        self,
        connection: AsyncConnection,
        items: Iterable[NewMessage[Any]],
        *,
        serializer: Serializer | None = None,
        notify: bool = True,
        require_transaction: bool = True,
    ) -> EnqueuedMany:
        """Enqueue on an async connection, with the contract of `enqueue_many`.

        await outbox.aenqueue_many(connection, [NewMessage("search.index", {"id": n}) for n in changed])
        """
        adapter = async_adapter(connection, function="aenqueue_many", sync_function="enqueue_many")
        with self._producing(None) as span:
            bulk = self._prepare_all(items, serializer, span.context)
            enqueued = await arun(adapter, insert_all(bulk, notify=notify, require_transaction=require_transaction))
            span.wrote(enqueued.ids)
        return enqueued

    def enqueue_fanout(
        self,
        connection: SyncConnection,
        topic: str | Topic[P],
        payload: P,
        destinations: Iterable[str | Recipient],
        *,
        content: object = None,
        serializer: Serializer | None = None,
        notify: bool = True,
        require_transaction: bool = True,
        **options: Unpack[FanoutOptions],
    ) -> EnqueuedMany:
        """Write one message for each destination in the transaction of the caller's connection.

        Each message has its own state, retries and idempotency key. The shared `content`, a JSON value, is stored once:
        a handler finds it in `message.content`, and it is deleted with the last message. The messages have no keys. A
        `Recipient` instead of a text gives one destination a payload, headers, a time or an owner of its own. The
        answers are in the order of the destinations. Without destinations no statement is sent. Raises like `enqueue`;
        an error names the destination: `destinations[4711]`.

            outbox.enqueue_fanout(connection, "newsletter", {"issue": 12}, addresses, content={"html": html})
        """
        adapter = sync_adapter(connection, function="enqueue_fanout", async_function="aenqueue_fanout")
        with self._producing(topic) as span:
            message = carrying(NewMessage(topic, payload, **options), span.context)
            fanout = prepare_fanout(message, self._route(topic, serializer), destinations, content)
            enqueued = run(adapter, insert_fanout(fanout, notify=notify, require_transaction=require_transaction))
            span.wrote(enqueued.ids)
        return enqueued

    async def aenqueue_fanout(
        self,
        connection: AsyncConnection,
        topic: str | Topic[P],
        payload: P,
        destinations: Iterable[str | Recipient],
        *,
        content: object = None,
        serializer: Serializer | None = None,
        notify: bool = True,
        require_transaction: bool = True,
        **options: Unpack[FanoutOptions],
    ) -> EnqueuedMany:
        """Enqueue on an async connection, with the contract of `enqueue_fanout`.

        await outbox.aenqueue_fanout(connection, "newsletter", {"issue": 12}, addresses, content={"html": html})
        """
        adapter = async_adapter(connection, function="aenqueue_fanout", sync_function="enqueue_fanout")
        with self._producing(topic) as span:
            message = carrying(NewMessage(topic, payload, **options), span.context)
            fanout = prepare_fanout(message, self._route(topic, serializer), destinations, content)
            steps = insert_fanout(fanout, notify=notify, require_transaction=require_transaction)
            enqueued = await arun(adapter, steps)
            span.wrote(enqueued.ids)
        return enqueued

    def cancel(
        self,
        connection: SyncConnection,
        message_id: int | None = None,
        *,
        topic: str | Topic[Any] | None = None,
        coalesce_key: str | None = None,
        dedupe_key: str | None = None,
        require_transaction: bool = True,
    ) -> CancelResult:
        """Cancel a message in the transaction of the caller's connection, and return the result.

        Name it by id, by topic and coalesce key (the newest one), or by topic and dedupe key: exactly one of the three,
        or this raises `ArgumentError`. A pending message is not delivered after the transaction commits. The handler of
        a message in flight is notified (`ctx.should_stop`, `ctx.ensure_lease()`). The message is not retried, but may
        still be handed over. Idempotent. Waits for no lock. Raises like `enqueue`.

            outbox.cancel(connection, topic="mail.reminder", coalesce_key="event-7")
        """
        adapter = sync_adapter(connection, function="cancel", async_function="acancel")
        target = target_of(message_id, topic, coalesce_key, dedupe_key)
        return run(adapter, cancel_one(target, require_transaction=require_transaction))

    async def acancel(
        self,
        connection: AsyncConnection,
        message_id: int | None = None,
        *,
        topic: str | Topic[Any] | None = None,
        coalesce_key: str | None = None,
        dedupe_key: str | None = None,
        require_transaction: bool = True,
    ) -> CancelResult:
        """Cancel on an async connection, with the contract of `cancel`.

        await outbox.acancel(connection, 4711)
        """
        adapter = async_adapter(connection, function="acancel", sync_function="cancel")
        target = target_of(message_id, topic, coalesce_key, dedupe_key)
        return await arun(adapter, cancel_one(target, require_transaction=require_transaction))

    def cancel_all(
        self,
        connection: SyncConnection,
        *,
        owner: str | None = None,
        destination: str | None = None,
        topic: str | Topic[Any] | None = None,
        require_transaction: bool = True,
    ) -> list[Cancelled]:
        """Cancel all messages of an owner, or to a destination, in the transaction of the caller's connection.

        Each message that is pending or in flight is cancelled as by `cancel`; with a `topic`, only messages of this
        topic. Returns the id and the result of each, oldest first. A message that another transaction has enqueued
        and not yet committed is not cancelled: lock the row of the owner in both transactions. The time of a search by
        destination grows with the number of pending messages; a search by owner uses an index. Raises like `enqueue`.

            connection.execute("UPDATE account SET active = false WHERE id = 7")
            outbox.cancel_all(connection, owner="account-7")
        """
        adapter = sync_adapter(connection, function="cancel_all", async_function="acancel_all")
        target = targets_of(owner, destination, topic)
        return run(adapter, cancel_each(target, require_transaction=require_transaction))

    async def acancel_all(
        self,
        connection: AsyncConnection,
        *,
        owner: str | None = None,
        destination: str | None = None,
        topic: str | Topic[Any] | None = None,
        require_transaction: bool = True,
    ) -> list[Cancelled]:
        """Cancel on an async connection, with the contract of `cancel_all`.

        await outbox.acancel_all(connection, owner="account-7")
        """
        adapter = async_adapter(connection, function="acancel_all", sync_function="cancel_all")
        target = targets_of(owner, destination, topic)
        return await arun(adapter, cancel_each(target, require_transaction=require_transaction))

    def reschedule(
        self,
        connection: SyncConnection,
        message_id: int,
        *,
        available_at: datetime | None = None,
        delay: Duration | None = None,
        require_transaction: bool = True,
    ) -> RescheduleResult:
        """Make a pending message due at another time, in the transaction of the caller's connection.

        Without a time it is due at once. `delay` (seconds or a timedelta) counts on PostgreSQL's clock. The message
        keeps its attempts and its keys. Waits for no lock. Raises like `enqueue`.

            outbox.reschedule(connection, 4711, delay=timedelta(hours=1))
        """
        adapter = sync_adapter(connection, function="reschedule", async_function="areschedule")
        target = new_time_of(message_id, available_at, delay)
        return run(adapter, reschedule_one(target, require_transaction=require_transaction))

    async def areschedule(
        self,
        connection: AsyncConnection,
        message_id: int,
        *,
        available_at: datetime | None = None,
        delay: Duration | None = None,
        require_transaction: bool = True,
    ) -> RescheduleResult:
        """Reschedule on an async connection, with the contract of `reschedule`.

        await outbox.areschedule(connection, 4711)
        """
        adapter = async_adapter(connection, function="areschedule", sync_function="reschedule")
        target = new_time_of(message_id, available_at, delay)
        return await arun(adapter, reschedule_one(target, require_transaction=require_transaction))

    def draft(
        self,
        topic: str | Topic[P],
        payload: P,
        *,
        serializer: Serializer | None = None,
        **options: Unpack[MessageOptions],
    ) -> Draft:
        """Check a message like `enqueue`, and complete it from its topic's definition, without a connection.

        The result is for `Operator.enqueue`. Raises like `enqueue`.

            operator.enqueue(outbox.draft("mail.welcome", {"user_id": 7}))
        """
        return prepare(NewMessage(topic, payload, **options), self._route(topic, serializer))

    def _enqueue(
        self,
        message: NewMessage[P],
        *,
        serializer: Serializer | None,
        notify: bool,
        require_transaction: bool,
        best_effort: bool,
    ) -> Steps[Enqueued | None]:
        known: NewMessage[P] | Draft = message
        try:
            known = draft = prepare(message, self._route(message.topic, serializer))
            inside = yield from transaction(required=require_transaction)
            write = insert(draft, notify=notify, statement=sql.ENQUEUE_BEST_EFFORT if best_effort else sql.ENQUEUE)
            return (yield from (in_savepoint(write) if best_effort and inside else write))
        except UnprotectedError as unprotected:
            # The caller gets the same error as without best effort: the driver's error with the driver's cause.
            raise unprotected.error from unprotected.error.__cause__
        except Exception as error:  # best effort: the caller continues after any error
            if not best_effort or isinstance(error, ClosedError):
                raise
            self._log_lost(known, error)
            return None

    def _log_lost(self, message: NewMessage[Any] | Draft, error: Exception) -> None:
        """Log a message that a best-effort call could not enqueue, without parts of its payload."""
        answer = answer_of(error)
        topic = message.topic.name if isinstance(message.topic, Topic) else str(message.topic)
        options = message.options if isinstance(message, Draft) else {name: getattr(message, name) for name in _KEYS}
        keys = {name: one_line(str(value)) for name in _KEYS if (value := options.get(name)) is not None}
        error_type, sqlstate = type(error).__name__, None if answer is None else answer.sqlstate
        # The names of a payload's members may be values, so only the first part of a path is logged.
        field = re.split(r"[.\[]", error.field)[0] if isinstance(error, ArgumentError) else None
        text = self._text_of(error, answer)
        _logger.error(
            "a message could not be enqueued; the caller continues without it: %s: %s",
            ", ".join(f"{name} {value}" for name, value in {"topic": one_line(topic), **keys}.items()),
            ": ".join(filter(None, (error_type, sqlstate, field, text))),
            extra={
                "event": LogEvent.ENQUEUE_FAILED.value,
                "topic": topic,
                "coalesce_key": keys.get("coalesce_key"),
                "dedupe_key": keys.get("dedupe_key"),
                "ordering_key": keys.get("ordering_key"),
                "owner": keys.get("owner"),
                "error_type": error_type,
                "sqlstate": sqlstate,
                "field": field,
                "error": text,
            },
        )

    def _text_of(self, error: Exception, answer: Answer | None) -> str | None:
        """Return the error's text for a log, redacted; None if the settings forbid it."""
        try:
            settings = self.settings
        except ConfigurationError as invalid:
            return str(invalid)  # Without settings no message can be written.
        if not settings.error_texts:
            return None
        if isinstance(error, PgOutboxError):
            text = error.reason if isinstance(error, ArgumentError) else str(error)
        elif answer is not None:
            # Without the detail, which may be a whole row, and the statement's parameters.
            text = f"{answer.message}{_NEXT_STEPS.get(answer.sqlstate, '')}"
        else:
            text = describe(error)
        return one_line(redact_text(text, settings.redacted_names))

    def _producing(self, topic: str | Topic[P] | None) -> AbstractContextManager[Producing]:
        """Open a span for enqueuing, if tracing is on."""
        if not self._traces:
            return UNTRACED
        return producing(topic.name if isinstance(topic, Topic) else topic)

    @cached_property
    def _traces(self) -> bool:
        try:
            return self.settings.otel.traces
        except ConfigurationError:
            return False  # An invalid setting raises its error at its first use.

    def _prepare_all(
        self, items: Iterable[NewMessage[Any]], serializer: Serializer | None, context: Mapping[str, str]
    ) -> Bulk:
        routes: dict[object, Route] = {}
        bulk = Bulk()
        for index, item in enumerate(items):
            try:
                if not isinstance(item, NewMessage):
                    raise TypeError(f"items[{index}] must be a NewMessage, not {type(item).__name__}")
                key = item.topic if type(item.topic) is str else id(item.topic)
                if key not in routes:
                    routes[key] = self._route(item.topic, serializer)
                draft = prepare(carrying(item, context) if context else item, routes[key])
            except ArgumentError as error:
                raise ArgumentError(f"items[{index}].{error.field}", error.reason) from error.__cause__
            bulk.add(draft)
        return bulk

    @cached_property
    def _keyring(self) -> Keyring | None:
        return keyring_of(self.settings.encryption_keys)

    def _route(self, topic: str | Topic[P], serializer: Serializer | None) -> Route:
        definition = self._definition(topic)
        handler = self._handlers.get(definition.name)
        retry = definition.retry or (None if handler is None else handler.retry)
        # The default of the database needs no argument.
        max_attempts = None if retry is None or retry.max_attempts == DEFAULT_MAX_ATTEMPTS else retry.max_attempts
        keyring = self._keyring if definition.encrypted else None
        return Route(definition, max_attempts, self.settings.max_payload_bytes, serializer, keyring)

    def _definition(self, topic: str | Topic[P]) -> Topic[P]:
        """Return the topic's own definition, or the one registered under its name."""
        name = check_name("topic", topic.name if isinstance(topic, Topic) else topic)
        known = self._topics.get(name)
        if known is None and self._strict and name not in self._handlers:
            raise UnknownTopicError(f"topic {name!r} is neither defined nor handled by this outbox")
        if not isinstance(topic, Topic):
            return known or Topic(name)
        if known is not None and known != topic:
            raise ConfigurationError(f"topic {name!r} has another definition in this outbox")
        return topic


def _require_topic(name: str, topic: object) -> None:
    """Refuse a decorator without a topic, with an example."""
    if not isinstance(topic, (str, Topic)):
        function_name = getattr(topic, "__qualname__", None) if callable(topic) else None
        got = repr(topic) if function_name is None else f"the function {function_name}"
        raise ConfigurationError(f'{name}: needs a topic, as in @outbox.{name}("mail.welcome"); got {got}')


class HandlerDecorator(Protocol[P]):
    """The decorator that `Outbox.handler` returns."""

    @overload
    def __call__(
        self, function: Callable[[Message[P], Context], Coroutine[object, object, ResultT]], /
    ) -> Callable[[Message[P], Context], Coroutine[object, object, ResultT]]: ...
    @overload
    def __call__(
        self, function: Callable[[Message[P], SyncContext], ResultT], /
    ) -> Callable[[Message[P], SyncContext], ResultT]: ...


class BatchHandlerDecorator(Protocol[P]):
    """The decorator that `Outbox.batch_handler` returns."""

    @overload
    def __call__(
        self, function: Callable[[Sequence[Message[P]], Sequence[Context]], Coroutine[object, object, ResultsT]], /
    ) -> Callable[[Sequence[Message[P]], Sequence[Context]], Coroutine[object, object, ResultsT]]: ...
    @overload
    def __call__(
        self, function: Callable[[Sequence[Message[P]], Sequence[SyncContext]], ResultsT], /
    ) -> Callable[[Sequence[Message[P]], Sequence[SyncContext]], ResultsT]: ...

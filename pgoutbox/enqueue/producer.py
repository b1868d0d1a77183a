"""Producers: they write and cancel messages on a connection of the caller, as `Outbox.on` returns them.

Each call is a coroutine, which a `Producer` runs and an `AsyncProducer` returns.
Nothing here opens, commits or closes a connection.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import Any, Final, Generic, Literal, LiteralString, TypeAlias, TypeVar, overload

from typing_extensions import Unpack

from pgoutbox.clock import Duration
from pgoutbox.database import sql
from pgoutbox.enqueue.adapters import Adapter, Answer, ClosedError, adapter_of, answer_of, refusal, run
from pgoutbox.enqueue.calls import (
    Cancelled,
    CancelResult,
    Enqueued,
    EnqueuedMany,
    RescheduleResult,
    UnprotectedError,
    due_time_of,
    in_savepoint,
    insert,
    insert_all,
    insert_fanout,
    target_of,
    targets_of,
    text_of,
)
from pgoutbox.enqueue.owned import EditResult, OwnedMessage, content_of, opened, search_of
from pgoutbox.enqueue.payloads import Serializer
from pgoutbox.enqueue.routes import Router
from pgoutbox.enqueue.validation import Draft, carrying, prepare, prepare_fanout
from pgoutbox.errors import ArgumentError, ConfigurationError, PgOutboxError, TransactionError
from pgoutbox.message import OWED, P, State
from pgoutbox.observability.events import LogEvent
from pgoutbox.options import (
    KEYS,
    FanoutOptions,
    MessageOptions,
    SuppressionReason,
    check_address,
    check_destination,
    check_id,
    if_given,
)
from pgoutbox.redaction import redact_text
from pgoutbox.text import describe, one_line
from pgoutbox.topics import NewMessage, Recipient, Topic, name_of

_logger = logging.getLogger(__name__)

# The names of a message in the log of a failed enqueue, besides its topic.
_NAMES: Final = (*KEYS, "owner")
# What that log adds to an error of PostgreSQL.
_NEXT_STEPS: Final[Mapping[str, str]] = {
    "40001": "; its key was used after this transaction's snapshot: repeat the whole transaction",
    "55P03": "; another session held a table of the outbox for a second, or a lock for the caller's lock_timeout",
}

R = TypeVar("R")
# What the calls return: results, or coroutines of them.
EnqueuedT = TypeVar("EnqueuedT")
MaybeT = TypeVar("MaybeT")
ManyT = TypeVar("ManyT")
CancelT = TypeVar("CancelT")
CancelledT = TypeVar("CancelledT")
RescheduleT = TypeVar("RescheduleT")
FindT = TypeVar("FindT")
EditT = TypeVar("EditT")
SuppressT = TypeVar("SuppressT")


class EnqueueOptions(MessageOptions, total=False):
    """The options of `enqueue`, besides `best_effort`."""

    serializer: Serializer | None
    notify: bool
    require_transaction: bool


class Calls(Generic[EnqueuedT, MaybeT, ManyT, CancelT, CancelledT, RescheduleT, FindT, EditT, SuppressT]):
    """The calls of both kinds of producer. They differ in what a call returns: its result, or a coroutine of it."""

    def __init__(self, router: Router, adapter: Adapter, answer: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._router = router
        self._adapter = adapter
        self._answer = answer

    @overload
    def enqueue(
        self,
        topic: str | Topic[P],
        payload: P,
        *,
        best_effort: Literal[False] = False,
        **options: Unpack[EnqueueOptions],
    ) -> EnqueuedT: ...
    @overload
    def enqueue(
        self, topic: str | Topic[P], payload: P, *, best_effort: bool, **options: Unpack[EnqueueOptions]
    ) -> MaybeT: ...
    def enqueue(
        self,
        topic: str | Topic[P],
        payload: P,
        *,
        serializer: Serializer | None = None,
        notify: bool = True,
        require_transaction: bool = True,
        best_effort: bool = False,
        **options: Unpack[MessageOptions],
    ) -> EnqueuedT | MaybeT:
        """Write one message in the transaction of the connection. It exists if and only if that commits.

        Never commits, and makes no savepoint unless `best_effort` is set. Of the messages with one topic and
        `coalesce_key` only the newest committed one is delivered; transactions that enqueue for one key wait for each
        other. If another message has the `dedupe_key`, the result is a duplicate with that message's id and state:
        calling again, for example after a lost reply to COMMIT, is harmless. If that message was cancelled or skipped,
        the new message takes the key. Without either key each call writes a separate message. Messages with one queue
        and `ordering_key` are delivered one after the other, in the order of their commits. For other messages the
        order is not guaranteed.

        A pydantic model is dumped as JSON; `serializer` is called with other values that are not JSON. With
        `notify=False` the next poll finds the message; a transaction for `PREPARE TRANSACTION` needs it.
        `require_transaction=False` accepts autocommit.

        Raises `ArgumentError` naming the field, usually before any SQL; `DedupeConflictError` if the message with the
        dedupe key has another payload of the same version, unless `MessageOptions` ignore that; `UnknownTopicError`
        from a strict outbox; `TransactionError` outside a transaction, or in an aborted one; `SchemaError` without the
        schema, or if the sequence of ids is behind the messages; `ConfigurationError` if the connection's encoding
        lacks a character. The driver's own errors pass through. With `best_effort` all are logged instead, with the
        keys and the owner, rolled back to a savepoint, and None is returned: the caller's transaction stays usable.
        Such a call waits at most a second for a locked table, and for a key, or the ended message that has it, as every
        call does: up to the caller's `lock_timeout` and `statement_timeout`. An error that ends the whole transaction,
        such as a lost connection, is still raised: None never hides the loss of the caller's own writes.

            with psycopg.connect(dsn) as connection:
                connection.execute("INSERT INTO account ...")
                outbox.on(connection).enqueue("mail.welcome", {"user_id": 7}, dedupe_key="welcome-7")
        """

        async def call() -> Enqueued | None:
            # Best effort does not cover the caller's earlier statements.
            await self._adapter.settle()
            with self._router.producing(topic) as span:
                known: NewMessage[P] | Draft = message
                try:
                    known = draft = prepare(carrying(message, span.context), self._router.route(topic, serializer))
                    inside = await self._in_transaction(required=require_transaction)
                    statement = sql.ENQUEUE_BEST_EFFORT if best_effort else sql.ENQUEUE
                    write = partial(insert, self._adapter, draft, notify=notify, statement=statement)
                    enqueued = await (in_savepoint(self._adapter, write) if best_effort and inside else write())
                except UnprotectedError as unprotected:
                    # The caller gets the same error as without best effort: the driver's error with the driver's cause.
                    raise unprotected.error from unprotected.error.__cause__
                except Exception as error:  # best effort: the caller continues after any error
                    if not best_effort or isinstance(error, ClosedError):
                        raise
                    self._log_lost(known, error)
                    return None
                span.wrote([enqueued.id])
                return enqueued

        message = NewMessage(topic, payload, **options)
        result: EnqueuedT | MaybeT = self._answer(call())
        return result

    def enqueue_many(
        self,
        items: Iterable[NewMessage[Any]],
        *,
        serializer: Serializer | None = None,
        notify: bool = True,
        require_transaction: bool = True,
    ) -> ManyT:
        """Write many messages in the transaction of the connection; the answers are in the order of the items.

        The contract of `enqueue` applies to each item. All items are checked before the first statement, so that an
        invalid item, or an iterator that raises, leaves no rows; the error names the item: `items[4711].payload.x`.
        A statement has up to 5,000 items without keys, or all those with keys, whose keys it locks in one order: two
        transactions that make one call each never deadlock, unless the items with keys have more than 40 million
        characters. Without items no statement is sent.

            outbox.on(connection).enqueue_many([NewMessage("search.index", {"id": n}) for n in changed])
        """

        async def call() -> EnqueuedMany:
            with self._router.producing(None) as span:
                bulk = self._router.prepare_all(items, serializer, span.context)
                if not bulk:
                    return EnqueuedMany([])
                await self._begin(require_transaction=require_transaction)
                enqueued = await insert_all(self._adapter, bulk, notify=notify)
                span.wrote(enqueued.ids)
                return enqueued

        many: ManyT = self._answer(call())
        return many

    def enqueue_fanout(
        self,
        topic: str | Topic[P],
        payload: P,
        destinations: Iterable[str | Recipient],
        *,
        content: object = None,
        serializer: Serializer | None = None,
        notify: bool = True,
        require_transaction: bool = True,
        **options: Unpack[FanoutOptions],
    ) -> ManyT:
        """Write one message for each destination in the transaction of the connection.

        Each message has its own state, retries and idempotency key. The shared `content`, a JSON value, is stored once:
        a handler finds it in `message.content`, and it is deleted with the last message. The messages have no keys. A
        `Recipient` instead of a text gives one destination a payload, headers, a time or an owner of its own. The
        answers are in the order of the destinations. Without destinations no statement is sent. Raises like `enqueue`;
        an error names the destination: `destinations[4711]`.

            outbox.on(connection).enqueue_fanout("newsletter", {"issue": 12}, addresses, content={"html": html})
        """

        async def call() -> EnqueuedMany:
            with self._router.producing(topic) as span:
                message = carrying(NewMessage(topic, payload, **options), span.context)
                fanout = prepare_fanout(message, self._router.route(topic, serializer), destinations, content)
                if not fanout.size:
                    return EnqueuedMany([])
                await self._begin(require_transaction=require_transaction)
                enqueued = await insert_fanout(self._adapter, fanout, notify=notify)
                span.wrote(enqueued.ids)
                return enqueued

        many: ManyT = self._answer(call())
        return many

    def cancel(
        self,
        message_id: int | None = None,
        *,
        topic: str | Topic[Any] | None = None,
        coalesce_key: str | None = None,
        dedupe_key: str | None = None,
        require_transaction: bool = True,
    ) -> CancelT:
        """Cancel a message in the transaction of the connection, and return the result.

        Name it by id, by topic and coalesce key (the newest one), or by topic and dedupe key: exactly one of the three,
        or this raises `ArgumentError`. A pending message is not delivered after the transaction commits. The handler of
        a message in flight is notified (`ctx.should_stop`, `ctx.ensure_lease()`). The message is not retried, but may
        still be handed over. Idempotent. Waits for no lock. Raises like `enqueue`.

            outbox.on(connection).cancel(topic="mail.reminder", coalesce_key="event-7")
        """

        async def call() -> CancelResult:
            target = target_of(message_id, topic, coalesce_key, dedupe_key)
            await self._begin(require_transaction=require_transaction)
            rows = await self._adapter.fetch(sql.CANCEL, *target)
            return CancelResult(rows[0][1]) if rows else CancelResult.MISSING

        result: CancelT = self._answer(call())
        return result

    def cancel_all(
        self,
        *,
        owner: str | None = None,
        destination: str | None = None,
        topic: str | Topic[Any] | None = None,
        require_transaction: bool = True,
    ) -> CancelledT:
        """Cancel all messages of an owner, or to a destination, in the transaction of the connection.

        Each message that is pending or in flight is cancelled as by `cancel`; with a `topic`, only messages of this
        topic. Returns the id and the result of each, oldest first. A message that another transaction has enqueued
        and not yet committed is not cancelled: lock the row of the owner in both transactions. The time of a search by
        destination grows with the number of pending messages; a search by owner uses an index. Raises like `enqueue`.

            connection.execute("UPDATE account SET active = false WHERE id = 7")
            outbox.on(connection).cancel_all(owner="account-7")
        """

        async def call() -> list[Cancelled]:
            target = targets_of(owner, destination, topic)
            await self._begin(require_transaction=require_transaction)
            rows = await self._adapter.fetch(sql.CANCEL_ALL, *target)
            return [Cancelled(message_id, CancelResult(result)) for message_id, result in rows]

        cancelled: CancelledT = self._answer(call())
        return cancelled

    def reschedule(
        self,
        message_id: int,
        *,
        available_at: datetime | None = None,
        delay: Duration | None = None,
        require_transaction: bool = True,
    ) -> RescheduleT:
        """Make a pending message due at another time, in the transaction of the connection.

        Without a time it is due at once. `delay` (seconds or a timedelta) counts on PostgreSQL's clock. The message
        keeps its attempts and its keys. Waits for no lock. Raises like `enqueue`.

            outbox.on(connection).reschedule(4711, delay=timedelta(hours=1))
        """

        async def call() -> RescheduleResult:
            target = (check_id("message_id", message_id), *due_time_of(available_at, delay))
            await self._begin(require_transaction=require_transaction)
            ((result,),) = await self._adapter.fetch(sql.RESCHEDULE_ONE, *target)
            return RescheduleResult(result)

        rescheduled: RescheduleT = self._answer(call())
        return rescheduled

    def find(
        self,
        *,
        owner: str,
        message_id: int | None = None,
        topics: Collection[str | Topic[Any]] | None = None,
        states: Collection[State] = OWED,
        before_id: int | None = None,
        limit: int = 100,
        payloads: bool = False,
    ) -> FindT:
        """Return up to `limit` messages of an owner, newest first: at most 1,000.

        Without `states` those that are pending or in flight; with `topics` only messages of these; with `message_id`
        this message alone. `before_id` is the last id of a page, and gives the next one. Messages for the hooks of
        failed messages are left out. Destinations and reasons are redacted.

        The role of producers may not read payloads: `payloads=True` raises the driver's error 42501 until the owner of
        the schema runs `GRANT EXECUTE ON FUNCTION pgoutbox.read_payloads TO ...`. An encrypted payload is decrypted;
        without its key this raises `ConfigurationError`. A payload of an earlier version is brought forward by the
        upgrade of its topic; if that fails this raises `StateError`. Needs no transaction. Raises like `enqueue`
        otherwise.

            for message in outbox.on(connection).find(owner="account-7", payloads=True):
                print(message.available_at, message.payload["text"])
        """

        async def call() -> list[OwnedMessage]:
            search = search_of(owner, message_id, topics, states, before_id, limit)
            await self._begin(require_transaction=False)
            if payloads:
                return await self._find(sql.FIND_WITH_PAYLOADS, *search, owner)
            return await self._find(sql.FIND, *search)

        found: FindT = self._answer(call())
        return found

    def edit(
        self,
        message_id: int,
        *,
        owner: str,
        payload: object = None,
        destination: str | None = None,
        available_at: datetime | None = None,
        delay: Duration | None = None,
        serializer: Serializer | None = None,
        require_transaction: bool = True,
    ) -> EditT:
        """Change a pending message of an owner, in the transaction of the connection, and return the result.

        None leaves a value as it is. A payload replaces the old one. It is checked, completed and encrypted by the
        definition of its topic, which must give it the same keys and owner. A message that was never attempted can get
        one, so only one of its payloads is ever sent. A new destination needs a new payload, and removes the headers. A
        due time is given as for `enqueue`, and is allowed after attempts, too. The message keeps its id, its expiry and
        the digest of its dedupe key: the first enqueue, repeated, is still a duplicate. Waits for no lock. Raises like
        `enqueue`.

            outbox.on(connection).edit(4711, owner="account-7", payload={"text": "See you at 9"}, delay=3600)
        """

        async def call() -> EditResult:
            if payload is None and destination is not None:
                raise ArgumentError("destination", "give the payload, too: a new destination must not get the old one")
            if payload is None and available_at is None and delay is None:
                raise ArgumentError("payload", "give a payload, a due time, or both")
            due_time = due_time_of(available_at, delay)
            search = search_of(owner, check_id("message_id", message_id), None, tuple(State), None, 1)
            if_given(check_destination, "destination", destination)
            await self._begin(require_transaction=require_transaction)
            content: tuple[str | int | None, ...] = (None, None, None, None)
            if payload is not None:
                found = await self._find(sql.FIND, *search)
                if not found:
                    return EditResult.MISSING
                route = self._router.route(found[0].topic, serializer)
                content = content_of(found[0], owner, payload, destination, route)
            text, new_destination, sealed_for, version = content
            change = (message_id, owner, text, new_destination, *due_time, sealed_for, version)
            ((result,),) = await self._adapter.fetch(sql.EDIT, *change)
            return EditResult(text_of(result))

        edited: EditT = self._answer(call())
        return edited

    def suppress(
        self,
        address: str,
        reason: SuppressionReason,
        *,
        mailing_list: str | None = None,
        require_transaction: bool = True,
    ) -> SuppressT:
        """Stop the mail of a mailing list, or of every list, to an address, in the transaction of the connection.

        After the commit no handler of such a message begins: the message ends `skipped`. Mail of topics without a
        mailing list passes. A bounce and a complaint stop every list. A `mailto:` destination is an address too. Only
        a digest of it is stored. Idempotent: returns False if that is so already. Raises like `enqueue`.

            outbox.on(connection).suppress("ada@example.org", "unsubscribe", mailing_list="news")
        """
        return self._suppress(sql.SUPPRESS, address, reason, mailing_list, in_transaction=require_transaction)

    def unsuppress(
        self, address: str, *, mailing_list: str | None = None, require_transaction: bool = True
    ) -> SuppressT:
        """End the suppression of an address for a mailing list, in the transaction of the connection.

        Without a list it ends the one for every list, and not those for single lists. Links to unsubscribe in earlier
        mails are refused from then on. Idempotent: returns False if there is none. Raises like `enqueue`.

            outbox.on(connection).unsuppress("ada@example.org", mailing_list="news")
        """
        return self._suppress(sql.UNSUPPRESS, address, mailing_list, in_transaction=require_transaction)

    def _suppress(self, statement: LiteralString, address: str, *others: str | None, in_transaction: bool) -> SuppressT:
        async def call() -> bool:
            checked = check_address("address", address)
            await self._begin(require_transaction=in_transaction)
            ((has_changed,),) = await self._adapter.fetch(statement, checked, *others)
            return bool(has_changed)

        changed: SuppressT = self._answer(call())
        return changed

    async def _begin(self, *, require_transaction: bool) -> None:
        """Wait for the caller's earlier statements, and check the transaction."""
        await self._adapter.settle()
        await self._in_transaction(required=require_transaction)

    async def _in_transaction(self, *, required: bool) -> bool:
        inside = await self._adapter.in_transaction()
        if required and not inside:
            raise TransactionError(
                "the connection commits each statement by itself: begin a transaction, or pass"
                " require_transaction=False"
            )
        return inside

    async def _find(self, statement: LiteralString, *search: object) -> list[OwnedMessage]:
        return [opened(text, self._router) for (text,) in await self._adapter.fetch(statement, *search)]

    def _log_lost(self, message: NewMessage[Any] | Draft, error: Exception) -> None:
        """Log a message that a best-effort call could not enqueue, without parts of its payload."""
        answer = answer_of(error)
        topic = str(name_of(message.topic))
        keys = {name: one_line(str(value)) for name in _NAMES if (value := message.options.get(name)) is not None}
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
            settings = self._router.source.settings
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


class Producer(
    Calls[
        Enqueued,
        Enqueued | None,
        EnqueuedMany,
        CancelResult,
        list[Cancelled],
        RescheduleResult,
        list[OwnedMessage],
        EditResult,
        bool,
    ]
):
    """Writes, finds, changes and cancels messages on a sync connection, and suppresses addresses."""


_Awaited: TypeAlias = Coroutine[Any, Any, R]


class AsyncProducer(
    Calls[
        _Awaited[Enqueued],
        _Awaited[Enqueued | None],
        _Awaited[EnqueuedMany],
        _Awaited[CancelResult],
        _Awaited[list[Cancelled]],
        _Awaited[RescheduleResult],
        _Awaited[list[OwnedMessage]],
        _Awaited[EditResult],
        _Awaited[bool],
    ]
):
    """Writes, finds, changes and cancels messages on an async connection.

    Each call is awaited, and is otherwise that of `Producer`.
    """


def producer_on(connection: object, router: Router) -> Producer | AsyncProducer:
    """Return the producer on a connection. Raise `TypeError` for an unknown kind of connection."""
    kind: type = type(connection)
    adapter, is_async = adapter_of(kind)
    if adapter is None:
        raise refusal(connection)
    if is_async:
        return AsyncProducer(router, adapter(connection), lambda call: call)
    return Producer(router, adapter(connection), run)

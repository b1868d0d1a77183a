"""What the calls of producers have in common: results, checks of arguments, and the coroutines that write messages.

Nothing here commits, and only `in_savepoint` affects the caller's transaction beyond its own rows.
"""

from __future__ import annotations

import asyncio
import enum
import operator
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, ClassVar, LiteralString, NamedTuple, TypeVar, overload

from pgoutbox.clock import Duration
from pgoutbox.database import sql
from pgoutbox.enqueue.adapters import Adapter, ItemRefusedError
from pgoutbox.enqueue.validation import Bulk, Draft, Fanout
from pgoutbox.errors import ArgumentError, TransactionError
from pgoutbox.message import State
from pgoutbox.options import (
    check_available_at,
    check_delay,
    check_destination,
    check_id,
    check_key,
    check_name,
    check_owner,
    if_given,
)
from pgoutbox.topics import Topic, name_of

R = TypeVar("R")


class Enqueued(NamedTuple):
    """The id of the message. It is a duplicate if a message with its dedupe key existed before.

    `state` is then the state of that message, or None if it is deleted.
    """

    id: int
    duplicate: bool
    state: State | None = State.PENDING


class EnqueuedMany(Sequence[Enqueued]):
    """The results of a bulk in the order of its items, each created when it is read. `ids` are the message ids.

    It equals a list of the same results. `duplicates` are the states of the duplicates by their position.
    """

    __slots__ = ("duplicates", "ids")

    def __init__(self, ids: list[int], duplicates: Mapping[int, State | None] | None = None) -> None:
        self.ids: list[int] = ids
        self.duplicates: Mapping[int, State | None] = duplicates or {}

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Enqueued: ...

    @overload
    def __getitem__(self, index: slice) -> list[Enqueued]: ...

    def __getitem__(self, index: int | slice) -> Enqueued | list[Enqueued]:
        positions = range(len(self.ids))[index]
        if isinstance(positions, int):
            if positions in self.duplicates:
                return Enqueued(self.ids[positions], True, self.duplicates[positions])
            return Enqueued(self.ids[positions], False)
        return [self[position] for position in positions]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EnqueuedMany | list) and len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__: ClassVar[None]  # type: ignore[assignment] # as a list has none

    def __repr__(self) -> str:
        return f"EnqueuedMany({list(self)})"


class CancelResult(enum.StrEnum):
    """The result of `cancel`.

    `cancelled`: the message was pending and will not be delivered. `requested`: the attempt in flight is notified and
    is the last one. `already_cancelled`, `sent`, `failed`, `skipped`: the message had ended before. `pending`,
    `sending`: an operator's cancel excluded this state. `missing`: no such message exists.
    """

    CANCELLED = "cancelled"
    REQUESTED = "requested"
    ALREADY_CANCELLED = "already_cancelled"
    SENT = "sent"
    FAILED = "failed"
    SKIPPED = "skipped"
    PENDING = "pending"
    SENDING = "sending"
    MISSING = "missing"


class RescheduleResult(enum.StrEnum):
    """The result of `reschedule`.

    `rescheduled`: the message is due at the new time. `missing`: no such message exists. `wrong_state`: it is not
    pending. `superseded`: a newer message of its coalesce key exists. `expires`: it would expire before that time.
    `locked`: another transaction has locked its row; try again.
    """

    RESCHEDULED = "rescheduled"
    MISSING = "missing"
    WRONG_STATE = "wrong_state"
    SUPERSEDED = "superseded"
    EXPIRES = "expires"
    LOCKED = "locked"


class Cancelled(NamedTuple):
    """The effect of `cancel_all` on one message."""

    id: int
    result: CancelResult


async def insert(adapter: Adapter, draft: Draft, *, notify: bool, statement: LiteralString = sql.ENQUEUE) -> Enqueued:
    """Write one message by `sql.ENQUEUE`, or by another statement with the same parameters and columns."""
    parameters = (draft.topic, draft.payload, draft.options_json, notify)
    ((message_id, duplicate, state),) = await adapter.fetch(statement, *parameters)
    return Enqueued(message_id, True, _state_of(state)) if duplicate else Enqueued(message_id, False)


def _state_of(text: str | bytes | None) -> State | None:
    return State(text_of(text)) if text else None


def text_of(text: str | bytes) -> str:
    """Return the text of a row. A connection without an encoding gives bytes."""
    return text.decode() if isinstance(text, bytes) else text


async def insert_all(adapter: Adapter, bulk: Bulk, *, notify: bool) -> EnqueuedMany:
    """Write many messages. The results are in the order of the messages."""
    ids = [0] * len(bulk)
    duplicates: dict[int, State | None] = {}
    for positions, messages in bulk.chunks():
        try:
            ((id_texts, duplicate_texts),) = await adapter.fetch(sql.ENQUEUE_MANY, messages, notify)
        except ItemRefusedError as error:
            raise ArgumentError(f"items[{positions[error.index]}].{error.field}", error.reason) from error.__cause__
        for position, id_text in zip(positions, text_of(id_texts).split(","), strict=True):
            ids[position] = int(id_text)
        if duplicate_texts is not None:
            for text in text_of(duplicate_texts).split(","):
                index_text, state_text = text.split(":")
                duplicates[positions[int(index_text)]] = _state_of(state_text)
    return EnqueuedMany(ids, duplicates)


async def insert_fanout(adapter: Adapter, fanout: Fanout, *, notify: bool) -> EnqueuedMany:
    """Write one message for each destination, in their order."""
    ids = [0] * fanout.size
    try:
        rows = await adapter.fetch(sql.ENQUEUE_FANOUT, fanout.message, fanout.destinations, fanout.content, notify)
    except ItemRefusedError as error:
        field = "" if error.field == "destination" else f".{error.field}"
        raise ArgumentError(f"destinations[{error.index}]{field}", error.reason) from error.__cause__
    for index, message_id in rows:
        ids[index] = message_id
    return EnqueuedMany(ids)


class UnprotectedError(Exception):
    """`error` ended the caller's transaction: there was no savepoint, or the rollback to it failed."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


async def in_savepoint(adapter: Adapter, call: Callable[[], Awaitable[R]]) -> R:
    """Make the call within a savepoint, and roll back on an error or a cancellation.

    Raise `UnprotectedError` if that fails too.
    """
    try:
        await adapter.fetch(sql.SAVEPOINT, has_rows=False)
    except TransactionError:
        raise  # The transaction was aborted before, so a savepoint is useless.
    except Exception as error:
        raise UnprotectedError(error) from error
    try:
        result = await call()
    except (Exception, asyncio.CancelledError) as error:
        with _unprotected(error):
            await adapter.fetch(sql.ROLL_BACK_TO_SAVEPOINT, has_rows=False)
            await adapter.fetch(sql.RELEASE_SAVEPOINT, has_rows=False)
        raise
    with _unprotected():
        await adapter.fetch(sql.RELEASE_SAVEPOINT, has_rows=False)
    return result


@contextmanager
def _unprotected(first: BaseException | None = None) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise UnprotectedError(first or error) from error


def target_of(
    message_id: int | None, topic: str | Topic[Any] | None, coalesce_key: str | None, dedupe_key: str | None
) -> tuple[object, ...]:
    """Return the parameters of `sql.CANCEL`, for exactly one way of naming a message."""
    given = [way for way in (message_id, coalesce_key, dedupe_key) if way is not None]
    if len(given) != 1 or (message_id is None) == (topic is None):
        raise ArgumentError(
            "message_id", "name the message by its id, by topic and coalesce_key, or by topic and dedupe_key"
        )
    return (
        if_given(check_id, "message_id", message_id),
        if_given(check_name, "topic", topic and name_of(topic)),
        if_given(check_key, "coalesce_key", coalesce_key),
        if_given(check_key, "dedupe_key", dedupe_key),
    )


def targets_of(owner: str | None, destination: str | None, topic: str | Topic[Any] | None) -> tuple[object, ...]:
    """Return the parameters of `sql.CANCEL_ALL`."""
    if (owner is None) == (destination is None):
        raise ArgumentError("owner", "give either an owner or a destination")
    return (
        if_given(check_owner, "owner", owner),
        if_given(check_destination, "destination", destination),
        if_given(check_name, "topic", topic and name_of(topic)),
    )


def due_time_of(available_at: datetime | None, delay: Duration | None) -> tuple[datetime | None, float | None]:
    """Return the checked due time, which is given in at most one way."""
    if available_at is not None and delay is not None:
        raise ArgumentError("delay", "give delay or available_at, not both")
    return if_given(check_available_at, "available_at", available_at), if_given(check_delay, "delay", delay)

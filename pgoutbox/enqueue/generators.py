"""Enqueue and cancel on the caller's connection, as generators that serve sync and async connections alike.

A generator yields its statements and receives their rows; `run` and `arun` run them on the connection. Nothing here
commits, and only `in_savepoint` affects the caller's transaction beyond its own rows.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, ClassVar, Final, LiteralString, NamedTuple, TypeAlias, TypeVar, cast, overload

from pgoutbox.clock import Duration
from pgoutbox.database import sql
from pgoutbox.enqueue.adapters import AsyncAdapter, Call, ItemRefusedError, Rows, SyncAdapter
from pgoutbox.enqueue.validation import Bulk, Draft, Fanout
from pgoutbox.errors import ArgumentError, TransactionError
from pgoutbox.message import State
from pgoutbox.options import (
    MAX_ID,
    check_available_at,
    check_delay,
    check_destination,
    check_key,
    check_name,
    check_owner,
    check_whole,
    if_given,
)
from pgoutbox.topics import Topic

R = TypeVar("R")

_SAVEPOINT: Final = Call(sql.SAVEPOINT, has_rows=False)
_RELEASE_SAVEPOINT: Final = Call(sql.RELEASE_SAVEPOINT, has_rows=False)
_ROLL_BACK_TO_SAVEPOINT: Final = Call(sql.ROLL_BACK_TO_SAVEPOINT, has_rows=False)


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


class ConnectionQuery(enum.Enum):
    """Requests of a generator to the connection, besides statements."""

    IN_TRANSACTION = enum.auto()


# A generator yields a statement and receives its rows, or yields a question and receives the answer.
Steps: TypeAlias = Generator[Call | ConnectionQuery, Any, R]


def run(adapter: SyncAdapter, steps: Steps[R]) -> R:
    """Run the generator on a sync connection. An error is raised at the statement that caused it."""
    adapter.settle()
    try:
        step = next(steps)
        while True:
            try:
                answer = adapter.in_transaction() if isinstance(step, ConnectionQuery) else adapter.fetch(step)
            except BaseException as error:  # noqa: BLE001 - the step decides, and a cancelled one ends its span
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as stop:
        return cast("R", stop.value)


async def arun(adapter: AsyncAdapter, steps: Steps[R]) -> R:
    """Run the generator on an async connection. An error is raised at the statement that caused it."""
    await adapter.settle()
    try:
        step = next(steps)
        while True:
            try:
                answer = await (adapter.in_transaction() if isinstance(step, ConnectionQuery) else adapter.fetch(step))
            except BaseException as error:  # noqa: BLE001 - the step decides, and a cancelled one ends its span
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as stop:
        return cast("R", stop.value)


def transaction(*, required: bool) -> Steps[bool]:
    """Whether the next statement runs in a transaction. Raise `TransactionError` if it must and does not."""
    inside = cast("bool", (yield ConnectionQuery.IN_TRANSACTION))
    if required and not inside:
        raise TransactionError(
            "the connection commits each statement by itself: begin a transaction, or pass require_transaction=False"
        )
    return inside


def insert(draft: Draft, *, notify: bool, statement: LiteralString = sql.ENQUEUE) -> Steps[Enqueued]:
    """Write one message by `sql.ENQUEUE`, or by another statement with the same parameters and columns."""
    ((message_id, duplicate, state),) = yield Call(statement, (draft.topic, draft.payload, draft.options_json, notify))
    return Enqueued(message_id, True, _state_of(state)) if duplicate else Enqueued(message_id, False)


def _state_of(text: str | bytes | None) -> State | None:
    return State(text_of(text)) if text else None


def text_of(text: str | bytes) -> str:
    """Return the text of a row. A connection without an encoding gives bytes."""
    return text.decode() if isinstance(text, bytes) else text


def insert_all(bulk: Bulk, *, notify: bool, require_transaction: bool) -> Steps[EnqueuedMany]:
    """Write many messages. The results are in the order of the messages."""
    if not bulk:
        return EnqueuedMany([])
    yield from transaction(required=require_transaction)
    ids = [0] * len(bulk)
    duplicates: dict[int, State | None] = {}
    for positions, messages in bulk.chunks():
        try:
            ((id_texts, duplicate_texts),) = yield Call(sql.ENQUEUE_MANY, (messages, notify))
        except ItemRefusedError as error:
            raise ArgumentError(f"items[{positions[error.index]}].{error.field}", error.reason) from error.__cause__
        for position, id_text in zip(positions, text_of(id_texts).split(","), strict=True):
            ids[position] = int(id_text)
        if duplicate_texts is not None:
            for text in text_of(duplicate_texts).split(","):
                index_text, state_text = text.split(":")
                duplicates[positions[int(index_text)]] = _state_of(state_text)
    return EnqueuedMany(ids, duplicates)


def insert_fanout(fanout: Fanout, *, notify: bool, require_transaction: bool) -> Steps[EnqueuedMany]:
    """Write one message for each destination, in their order. Without destinations, run no statement."""
    if not fanout.size:
        return EnqueuedMany([])
    yield from transaction(required=require_transaction)
    ids = [0] * fanout.size
    try:
        rows = yield Call(sql.ENQUEUE_FANOUT, (fanout.message, fanout.destinations, fanout.content, notify))
    except ItemRefusedError as error:
        field = "" if error.field == "destination" else f".{error.field}"
        raise ArgumentError(f"destinations[{error.index}]{field}", error.reason) from error.__cause__
    for index, message_id in rows:
        ids[index] = message_id
    return EnqueuedMany(ids)


def cancel_one(target: tuple[object, ...], *, require_transaction: bool) -> Steps[CancelResult]:
    """Cancel the message that `target_of` names."""
    yield from transaction(required=require_transaction)
    rows = cast("Rows", (yield Call(sql.CANCEL, target)))
    return CancelResult(cast("str", rows[0][1])) if rows else CancelResult.MISSING


class Cancelled(NamedTuple):
    """The effect of `cancel_all` on one message."""

    id: int
    result: CancelResult


def cancel_each(target: tuple[object, ...], *, require_transaction: bool) -> Steps[list[Cancelled]]:
    """Cancel the messages that `targets_of` names."""
    yield from transaction(required=require_transaction)
    rows = cast("Rows", (yield Call(sql.CANCEL_ALL, target)))
    return [Cancelled(cast("int", message_id), CancelResult(cast("str", result))) for message_id, result in rows]


def reschedule_one(target: tuple[object, ...], *, require_transaction: bool) -> Steps[RescheduleResult]:
    """Reschedule the message that `new_time_of` names."""
    yield from transaction(required=require_transaction)
    ((result,),) = yield Call(sql.RESCHEDULE_ONE, target)
    return RescheduleResult(result)


class UnprotectedError(Exception):
    """`error` ended the caller's transaction: there was no savepoint, or the rollback to it failed."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def in_savepoint(steps: Steps[R]) -> Steps[R]:
    """Run the generator within a savepoint, and roll back on an error. Raise `UnprotectedError` if that fails too."""
    try:
        yield _SAVEPOINT
    except TransactionError:
        raise  # The transaction was aborted before, so a savepoint is useless.
    except Exception as error:
        raise UnprotectedError(error) from error
    try:
        result = yield from steps
    except Exception as error:
        with _unprotected(error):
            yield _ROLL_BACK_TO_SAVEPOINT
            yield _RELEASE_SAVEPOINT
        raise
    with _unprotected():
        yield _RELEASE_SAVEPOINT
    return result


@contextmanager
def _unprotected(first: Exception | None = None) -> Iterator[None]:
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
    if message_id is not None:
        return (check_whole("message_id", message_id, most=MAX_ID), None, None, None)
    name = check_name("topic", topic.name if isinstance(topic, Topic) else topic)
    if coalesce_key is not None:
        return (None, name, check_key("coalesce_key", coalesce_key), None)
    return (None, name, None, check_key("dedupe_key", dedupe_key))


def targets_of(owner: str | None, destination: str | None, topic: str | Topic[Any] | None) -> tuple[object, ...]:
    """Return the parameters of `sql.CANCEL_ALL`."""
    if (owner is None) == (destination is None):
        raise ArgumentError("owner", "give either an owner or a destination")
    name = topic.name if isinstance(topic, Topic) else topic
    return (
        if_given(check_owner, "owner", owner),
        if_given(check_destination, "destination", destination),
        if_given(check_name, "topic", name),
    )


def new_time_of(message_id: int, available_at: datetime | None, delay: Duration | None) -> tuple[object, ...]:
    """Return the parameters of `sql.RESCHEDULE_ONE`."""
    if available_at is not None and delay is not None:
        raise ArgumentError("delay", "give delay or available_at, not both")
    return (
        check_whole("message_id", message_id, most=MAX_ID),
        if_given(check_available_at, "available_at", available_at),
        if_given(check_delay, "delay", delay),
    )

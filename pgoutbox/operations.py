"""What an operator does to messages and queues, each a function on a connection made by `session.connect`.

Every call is one transaction of its own, or one for each batch of a bulk, so that an interruption loses nothing that
was reported done. Every write is guarded in SQL by the state that it expects: what a worker or another operator did
meanwhile is answered, never overwritten.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, NamedTuple, cast

import psycopg
from psycopg.rows import TupleRow
from pydantic import JsonValue

from pgoutbox import sql
from pgoutbox.encryption import is_sealed
from pgoutbox.errors import MessageNotFoundError, StateError
from pgoutbox.message import State
from pgoutbox.redaction import redact, redact_text
from pgoutbox.session import Progress, fetch, transact

_REDRIVE_BATCH: Final = 500
_USUAL_BURST: Final = 5
_ENCRYPTED: Final = "(encrypted)"


class ListedMessage(NamedTuple):
    """A message as a list shows it, without payload, in the order of LIST_MESSAGES."""

    id: int
    topic: str
    queue: str
    destination: str | None
    state: State
    attempt_count: int
    max_attempts: int
    created_at: datetime
    available_at: datetime
    finished_at: datetime | None
    coalesce_key: str | None
    dedupe_key: str | None
    skip_reason: str | None
    last_error: str | None


class ShownMessage(NamedTuple):
    """Everything about one message, in the order of SHOW_MESSAGE."""

    id: int
    topic: str
    queue: str
    destination: str | None
    state: State
    attempt_count: int
    max_attempts: int
    created_at: datetime
    available_at: datetime
    expires_at: datetime | None
    claimed_at: datetime | None
    lease_expires_at: datetime | None
    cancel_requested_at: datetime | None
    finished_at: datetime | None
    worker: str | None
    coalesce_key: str | None
    dedupe_key: str | None
    ordering_key: str | None
    on_failed: str | None
    superseded_by: int | None
    resend_of: int | None
    content_id: int | None
    skip_reason: str | None
    last_error: str | None
    headers: dict[str, JsonValue] | None
    payload: JsonValue


class ShownAttempt(NamedTuple):
    """One attempt that did not end `sent`, in the order of SHOW_ATTEMPTS."""

    attempt_count: int
    outcome: str
    worker: str
    started_at: datetime
    ended_at: datetime
    error: str | None


class TopicCounts(NamedTuple):
    """How many messages of one topic stand where in one queue, in the order of STATS.

    `due` and `scheduled` are the pending ones; `oldest_due_seconds` is how long the first of the due ones has waited.
    """

    queue: str
    topic: str
    due: int
    scheduled: int
    sending: int
    sent: int
    failed: int
    skipped: int
    cancelled: int
    oldest_due_seconds: float | None


class QueueControls(NamedTuple):
    """A queue that is paused or has limits, in the order of LIST_QUEUES.

    Up to `rate_count` attempts may begin in `rate_seconds`, `burst` of them at once, `tokens` of them now.
    """

    queue: str
    paused_at: datetime | None
    resume_at: datetime | None
    rate_count: int | None
    rate_seconds: float | None
    burst: int | None
    tokens: float | None
    max_in_flight: int | None
    in_flight: int


@dataclass(frozen=True, slots=True)
class Rate:
    """So many attempts in a period."""

    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Redriven:
    """What redrive made of one message: `refusal` is None if it is pending again, or else why it is not."""

    id: int
    refusal: str | None
    superseded_by: int | None = None


@dataclass(frozen=True, slots=True)
class RedriveTotals:
    """What a redrive of all failed messages did. The locked ones can be tried again; the superseded ones never will."""

    redriven: int
    superseded: int
    locked: int


class Cancelled(NamedTuple):
    """What cancel met: `cancelled`, `requested` (in flight, told to stop), a final state, `locked` or `missing`."""

    id: int
    result: str


def list_messages(
    connection: psycopg.Connection[TupleRow],
    *,
    states: Collection[State] = (),
    topic: str | None = None,
    queue: str | None = None,
    destination: str | None = None,
    before_id: int | None = None,
    limit: int = 50,
) -> list[ListedMessage]:
    """The newest messages that match, newest first. The next page has the last id of this one as `before_id`."""
    rows = fetch(
        connection,
        sql.LIST_MESSAGES,
        {
            "states": [state.value for state in states] or None,
            "topic": topic,
            "queue": queue,
            "destination": destination,
            "before_id": before_id,
            "limit": limit,
        },
    )
    return [ListedMessage._make(row)._replace(state=State(row[4])) for row in rows]


def show_message(connection: psycopg.Connection[TupleRow], message_id: int) -> tuple[ShownMessage, list[ShownAttempt]]:
    """One message and the attempts that did not end `sent`, oldest first.

    Both are as they were stored: `redact_message` and `redact_attempt` make them fit for a person. Raises
    `MessageNotFoundError`.
    """
    rows = fetch(connection, sql.SHOW_MESSAGE, {"id": message_id})
    if not rows:
        raise _no_such_message(message_id)
    attempts = fetch(connection, sql.SHOW_ATTEMPTS, {"id": message_id})
    message = ShownMessage._make(rows[0])
    return message._replace(state=State(message.state)), [ShownAttempt._make(row) for row in attempts]


def count_messages(connection: psycopg.Connection[TupleRow], *, queue: str | None = None) -> list[TopicCounts]:
    """The numbers of messages by queue and topic."""
    return [TopicCounts._make(row) for row in fetch(connection, sql.STATS, {"queue": queue})]


def list_queues(connection: psycopg.Connection[TupleRow]) -> list[QueueControls]:
    """The queues that are paused or have limits, by name."""
    return [QueueControls._make(row) for row in fetch(connection, sql.LIST_QUEUES, {})]


def known_queues(connection: psycopg.Connection[TupleRow]) -> list[str]:
    """Every queue that a message or a setting names. Reads all messages."""
    return [row[0] for row in fetch(connection, sql.KNOWN_QUEUES, {})]


def unknown_queues(connection: psycopg.Connection[TupleRow], queues: Sequence[str]) -> list[str]:
    """Those of `queues` that neither a message nor a setting names: likely misspelt, or new."""
    return [row[0] for row in fetch(connection, sql.UNKNOWN_QUEUES, {"queues": list(queues)})]


def redact_message(message: ShownMessage, names: Collection[str]) -> ShownMessage:
    """The message as a person may see it: what is kept under one of `names` is replaced, and an encrypted payload."""
    return message._replace(
        destination=_redact_text(message.destination, names),
        skip_reason=_redact_text(message.skip_reason, names),
        last_error=_redact_text(message.last_error, names),
        headers=cast("dict[str, JsonValue] | None", redact(message.headers, names)),
        payload=_ENCRYPTED if is_sealed(message.payload) else redact(message.payload, names),
    )


def redact_listed(message: ListedMessage, names: Collection[str]) -> ListedMessage:
    """The same for a message of a list."""
    return message._replace(
        destination=_redact_text(message.destination, names),
        skip_reason=_redact_text(message.skip_reason, names),
        last_error=_redact_text(message.last_error, names),
    )


def redact_attempt(attempt: ShownAttempt, names: Collection[str]) -> ShownAttempt:
    """The same for an attempt."""
    return attempt._replace(error=_redact_text(attempt.error, names))


def _redact_text(text: str | None, names: Collection[str]) -> str | None:
    return None if text is None else redact_text(text, names)


def redrive(connection: psycopg.Connection[TupleRow], message_ids: Collection[int]) -> list[Redriven]:
    """Make failed and cancelled messages pending again, each with the budget of attempts that it was enqueued with.

    Refused for one that does not exist, stands in another state, or is superseded by a newer message of its key. All
    in one transaction; the answers are ordered by id.
    """
    rows = fetch(connection, sql.REDRIVE, {"ids": list(message_ids)})
    return [_redriven(message_id, done, state, superseded_by) for message_id, done, state, superseded_by, _ in rows]


def _redriven(message_id: int, done: bool, state: str | None, superseded_by: int | None) -> Redriven:  # noqa: FBT001
    if done:
        return Redriven(message_id, None)
    if state is None:
        return Redriven(message_id, "no such message")
    if state not in (State.FAILED, State.CANCELLED):
        return Redriven(message_id, f"is {state}; only failed and cancelled messages can be redriven")
    if superseded_by is not None:
        return Redriven(message_id, f"superseded by message {superseded_by}, which is newer", superseded_by)
    return Redriven(message_id, "locked by another transaction; try again")


def redrive_failed(
    connection: psycopg.Connection[TupleRow],
    *,
    topic: str | None = None,
    queue: str | None = None,
    batch_size: int = _REDRIVE_BATCH,
    progress: Progress | None = None,
) -> RedriveTotals:
    """Redrive every failed message that matches, in batches that are committed one by one, in the order of ids."""
    redriven = superseded = locked = 0
    after_id = 0
    while True:
        parameters = {"topic": topic, "queue": queue, "after_id": after_id, "limit": batch_size}
        ids = [row[0] for row in fetch(connection, sql.LIST_FAILED_IDS, parameters)]
        if not ids:
            return RedriveTotals(redriven, superseded, locked)
        after_id = ids[-1]
        for answer in redrive(connection, ids):
            redriven += answer.refusal is None
            superseded += answer.superseded_by is not None
            locked += answer.refusal is not None and answer.superseded_by is None
        if progress is not None:
            progress(redriven)


def resend(connection: psycopg.Connection[TupleRow], message_id: int) -> int:
    """Enqueue a copy of a sent message, marked as `resend_of` it, and return the copy's id.

    Refused (`StateError`) for a message in another state and for one that a newer message of its key supersedes.
    """

    def copy() -> int:
        rows = connection.execute(sql.RESEND, {"id": message_id}).fetchall()
        if not rows:
            raise _no_such_message(message_id)
        ((copy_id, state, superseded_by),) = rows
        if state != State.SENT:
            raise StateError(f"message {message_id} is {state}; only sent messages can be resent")
        if superseded_by is not None:
            raise StateError(f"message {message_id} is superseded by message {superseded_by}, which is newer")
        connection.execute(sql.MARK_RESEND, {"id": copy_id, "source_id": message_id})
        return int(copy_id)

    return transact(connection, copy)


def cancel(connection: psycopg.Connection[TupleRow], message_id: int) -> Cancelled:
    """Cancel one message, as the SQL function `pgoutbox.cancel` does."""
    (row,) = fetch(connection, sql.CANCEL, (message_id, None, None, None, None))
    return Cancelled._make(row)


def cancel_by_key(
    connection: psycopg.Connection[TupleRow],
    topic: str,
    *,
    coalesce_key: str | None = None,
    dedupe_key: str | None = None,
) -> list[Cancelled]:
    """Cancel the newest message of a coalesce key and the message of a dedupe key; empty if there is none."""
    rows = fetch(connection, sql.CANCEL, (None, topic, coalesce_key, topic, dedupe_key))
    return [Cancelled._make(row) for row in rows]


def pause_queue(
    connection: psycopg.Connection[TupleRow], queue: str, *, duration: timedelta | None = None
) -> tuple[datetime, datetime | None]:
    """Stop all claims of a queue, for some time or until `resume_queue`; returns since when and until when.

    What is in flight goes on, and enqueue is not affected.
    """
    seconds = None if duration is None else duration.total_seconds()
    ((paused_at, resume_at),) = fetch(connection, sql.PAUSE_QUEUE, {"queue": queue, "seconds": seconds})
    return paused_at, resume_at


def resume_queue(connection: psycopg.Connection[TupleRow], queue: str) -> bool:
    """Allow claims again and wake a worker; False if the queue was not paused."""
    return bool(fetch(connection, sql.RESUME_QUEUE, {"queue": queue}))


def limit_rate(
    connection: psycopg.Connection[TupleRow], queue: str, rate: Rate | None, *, burst: int | None = None
) -> None:
    """Let no more attempts of a queue begin in a period, in the whole fleet; None takes the limit away.

    Up to `burst` of them begin at once when nothing was sent for a while; when not given, 5, or the rate's count if
    that is smaller. Effective at the next claim of every worker.
    """
    parameters: dict[str, object]
    if rate is None:
        parameters = {"queue": queue, "count": None, "seconds": None, "burst": None}
    else:
        usual = min(rate.count, _USUAL_BURST)
        parameters = {
            "queue": queue,
            "count": rate.count,
            "seconds": rate.seconds,
            "burst": usual if burst is None else burst,
        }
    fetch(connection, sql.LIMIT_RATE, parameters)


def limit_in_flight(connection: psycopg.Connection[TupleRow], queue: str, max_in_flight: int | None) -> None:
    """Let no more attempts of a queue be in flight at once, in the whole fleet; None takes the limit away."""
    fetch(connection, sql.LIMIT_IN_FLIGHT, {"queue": queue, "max_in_flight": max_in_flight})


def _no_such_message(message_id: int) -> MessageNotFoundError:
    return MessageNotFoundError(f"no such message: {message_id}")

"""Operations on messages: functions on a connection made by `operator_connection.connect`.

Each call is a transaction of its own; a bulk operation commits each batch. So an interruption loses no reported
result. Every write checks the expected state in SQL: it reports a concurrent change by a worker or another operator,
and never overwrites it.
"""

from __future__ import annotations

import contextlib
import enum
import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, LiteralString, NamedTuple, cast
from uuid import UUID

import psycopg
from psycopg.rows import TupleRow
from pydantic import JsonValue

from pgoutbox.database import sql
from pgoutbox.database.operator_connection import Parameters, Progress, fetch, transact
from pgoutbox.encryption import SEALED, is_sealed
from pgoutbox.enqueue.generators import CancelResult
from pgoutbox.errors import MessageNotFoundError, StateError
from pgoutbox.message import State
from pgoutbox.operations.audit import Action, OperatorAction
from pgoutbox.redaction import redact, redact_text

_BATCH: Final = 500
_OWED: Final = (State.PENDING, State.SENDING)
_REDRIVABLE: Final = (State.FAILED, State.CANCELLED)
_ENCRYPTED: Final = "(encrypted)"
_SHOWN_ATTEMPTS: Final = 100
_SHOWN_CHARACTERS: Final = 65_536
_ALL: Final = 2**31 - 1
# Far below Python's recursion limit, whatever the caller's depth.
_MOST_LEVELS: Final = 100


class JsonText(str):
    """JSON text that is shown unparsed: it is cut off, nested too deeply, or has a number too long for Python."""

    __slots__ = ()


class ListedMessage(NamedTuple):
    """A message in a list, without its payload, in the order of LIST_MESSAGES."""

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
    """All data of one message, in the order of SHOW_MESSAGE.

    `attempt_rows` counts its rows in `attempt`, up to 10,001. Headers and payload can be a `JsonText`. Their sizes are
    the sizes of the whole JSON text.
    """

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
    coalesces_pending: bool | None
    dedupe_key: str | None
    ordering_key: str | None
    on_failed: str | None
    superseded_by: int | None
    resend_of: int | None
    content_id: int | None
    skip_reason: str | None
    last_error: str | None
    attempt_rows: int
    headers: JsonValue
    headers_bytes: int | None
    payload: JsonValue
    payload_bytes: int


class ShownAttempt(NamedTuple):
    """One attempt that did not end `sent`, in the order of SHOW_ATTEMPTS."""

    attempt_count: int
    outcome: str
    worker: str
    started_at: datetime
    ended_at: datetime
    error: str | None
    reason_code: str | None
    breaker_key: str | None


class TopicCounts(NamedTuple):
    """The numbers of messages of one topic in one queue by state, in the order of STATS.

    `due` and `scheduled` messages are pending. `oldest_due_seconds` is the waiting time of the oldest due message.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFilter:
    """A filter for messages: a message matches if it fulfils all given conditions.

    `destination` may omit `mailto:`. `key` is a coalesce, dedupe or ordering key. `text` is searched in the
    destination, the keys, the skip reason and the last error, ignoring case and without wildcards. Payloads are not
    searched. The times are enqueue times, the first one inclusive.
    """

    states: Collection[State] = ()
    topic: str | None = None
    queue: str | None = None
    destination: str | None = None
    key: str | None = None
    text: str | None = None
    created_from: datetime | None = None
    created_before: datetime | None = None

    def given(self) -> dict[str, JsonValue]:
        """Return the given conditions, for display and for the audit."""
        told: dict[str, JsonValue] = {
            "topic": self.topic,
            "queue": self.queue,
            "destination": self.destination,
            "key": self.key,
            "text": self.text,
            "created_from": None if self.created_from is None else self.created_from.isoformat(),
            "created_before": None if self.created_before is None else self.created_before.isoformat(),
            "states": [state.value for state in sorted(self.states)] or None,
        }
        return {name: value for name, value in told.items() if value is not None}

    def parameters(self) -> dict[str, object]:
        """Return the parameters of the statements that take a filter."""
        return {
            "states": [state.value for state in self.states] or None,
            "topic": self.topic,
            "queue": self.queue,
            "destination": self.destination,
            "key": self.key,
            "text": self.text,
            "created_from": self.created_from,
            "created_before": self.created_before,
        }


class RedriveResult(enum.StrEnum):
    """The effect of a redrive on one message, or the reason why it left the message alone.

    `redriven`: the message is pending again. `missing`: no such message exists. `wrong_state`: its state is not one of
    the given states. `changed`: it was attempted again since it was listed. `superseded`: a newer message of its
    coalesce key exists. `dedupe_key_taken`: another message has its dedupe key. `locked`: another transaction has
    locked its row; try again.
    """

    REDRIVEN = "redriven"
    MISSING = "missing"
    WRONG_STATE = "wrong_state"
    CHANGED = "changed"
    SUPERSEDED = "superseded"
    DEDUPE_KEY_TAKEN = "dedupe_key_taken"
    LOCKED = "locked"


@dataclass(frozen=True, slots=True)
class Redriven:
    """The result of a redrive for one message. `explanation` tells people why the message was left alone.

    `other_id` is the newer message that supersedes it, or the message that has its dedupe key.
    """

    id: int
    result: RedriveResult
    explanation: str = ""
    other_id: int | None = None


@dataclass(frozen=True, slots=True)
class RedriveTotals:
    """The results of a redrive by filter.

    `superseded` messages have a successor: a newer message of their coalesce key, or another message with their dedupe
    key. Try `locked` messages again. `changed` messages no longer matched.
    """

    redriven: int
    superseded: int
    locked: int
    changed: int


@dataclass(frozen=True, slots=True)
class ResendTotals:
    """The results of a resend by filter. `superseded` messages were left alone; `changed` ones have been deleted."""

    resent: int
    superseded: int
    changed: int


@dataclass(frozen=True, slots=True)
class CancelTotals:
    """The results of a cancel by filter. Try `locked` messages again; `changed` messages no longer matched."""

    cancelled: int
    requested: int
    locked: int
    changed: int


class AuditRow(NamedTuple):
    """One batch of one act, in the order of LIST_ACTS. It lists the first twenty messages."""

    id: int
    act_id: UUID
    acted_at: datetime
    actor: str
    origin: str | None
    db_role: str
    action: str
    queue: str | None
    message_count: int | None
    first_ids: list[int] | None
    details: dict[str, JsonValue] | None


class Cancelled(NamedTuple):
    """The result of a cancel for one message."""

    id: int
    result: CancelResult


def list_messages(
    connection: psycopg.Connection[TupleRow],
    which: MessageFilter | None = None,
    *,
    before_id: int | None = None,
    limit: int = 50,
) -> list[ListedMessage]:
    """Return the newest matching messages, newest first. For the next page, pass the last id as `before_id`."""
    parameters = (which or MessageFilter()).parameters() | {"before_id": before_id, "limit": limit}
    rows = fetch(connection, sql.LIST_MESSAGES, parameters)
    return [ListedMessage._make(row)._replace(state=State(row[4])) for row in rows]


def count_matching(connection: psycopg.Connection[TupleRow], which: MessageFilter, *, limit: int) -> int:
    """Return the number of matching messages, counted up to `limit`."""
    ((count,),) = fetch(connection, sql.COUNT_MATCHING, which.parameters() | {"limit": limit})
    return int(count)


def list_acts(
    connection: psycopg.Connection[TupleRow],
    *,
    message_id: int | None = None,
    actor: str | None = None,
    action: Action | None = None,
    before_id: int | None = None,
    limit: int = 50,
) -> list[AuditRow]:
    """Return the acts of operators, newest first: all, or of one message, of one actor, of one kind."""
    parameters = {
        "message_id": message_id,
        "actor": actor,
        "action": None if action is None else action.value,
        "before_id": before_id,
        "limit": limit,
    }
    return [AuditRow._make(row) for row in fetch(connection, sql.LIST_ACTS, parameters)]


def reads_payloads(connection: psycopg.Connection[TupleRow]) -> bool:
    """Whether the connection's role may read payloads and headers, and not only the views, which hide all values."""
    ((may,),) = fetch(connection, sql.READS_PAYLOADS, {})
    return bool(may)


def reads_audit(connection: psycopg.Connection[TupleRow]) -> bool:
    """Whether the connection's role may read the audit."""
    ((may,),) = fetch(connection, sql.READS_AUDIT, {})
    return bool(may)


def show_message(
    connection: psycopg.Connection[TupleRow], message_id: int, *, whole: bool = False
) -> tuple[ShownMessage, list[ShownAttempt]]:
    """Return one message and its attempts that did not end `sent`, newest first.

    Without `whole`: the newest 100 attempts, and the first 65,536 characters of headers, payload and each error.

    Neither is redacted: pass them through `redact_message` and `redact_attempt` before you show them. A role that may
    not read the table gets the payload and headers of `pgoutbox.message_view`. Raises `MessageNotFoundError`.
    """
    statement = sql.SHOW_MESSAGE if reads_payloads(connection) else sql.SHOW_MESSAGE_VIEW
    bounds = (_ALL, _ALL) if whole else (_SHOWN_CHARACTERS, _SHOWN_ATTEMPTS)
    parameters = {"id": message_id, "characters": bounds[0], "limit": bounds[1]}
    rows = fetch(connection, statement, parameters)
    if not rows:
        raise _no_such_message(message_id)
    attempts = fetch(connection, sql.SHOW_ATTEMPTS, parameters)
    message = ShownMessage._make(rows[0])
    message = message._replace(
        state=State(message.state),
        headers=_json_of(message.headers, message.headers_bytes),
        payload=_json_of(message.payload, message.payload_bytes),
    )
    return message, [ShownAttempt._make(row) for row in attempts]


def _json_of(text: JsonValue, size: int | None) -> JsonValue:
    if not isinstance(text, str):
        return None
    if len(text.encode()) == size:
        with contextlib.suppress(ValueError, RecursionError):
            value = cast("JsonValue", json.loads(text))
            if not _is_deep(value):
                return value
    return JsonText(text)


def _is_deep(value: JsonValue) -> bool:
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [item for one in level if isinstance(one, dict | list) for item in _items(one)]
    return bool(level)


def _items(value: dict[str, JsonValue] | list[JsonValue]) -> Collection[JsonValue]:
    return value.values() if isinstance(value, dict) else value


def count_messages(connection: psycopg.Connection[TupleRow], *, queue: str | None = None) -> list[TopicCounts]:
    """Return the numbers of messages by queue and topic."""
    return [TopicCounts._make(row) for row in fetch(connection, sql.STATS, {"queue": queue})]


def redact_message(message: ShownMessage, names: Collection[str]) -> ShownMessage:
    """Return the redacted message: without an encrypted payload, and without values whose name matches `names`."""
    return message._replace(
        destination=_redact_text(message.destination, names),
        skip_reason=_redact_text(message.skip_reason, names),
        last_error=_redact_text(message.last_error, names),
        headers=_redact_json(message.headers, names),
        payload=_redact_json(message.payload, names),
    )


def _redact_json(value: JsonValue, names: Collection[str]) -> JsonValue:
    if isinstance(value, JsonText):
        return _ENCRYPTED if f'"{SEALED}"' in value else JsonText(redact_text(value, names))
    return _ENCRYPTED if is_sealed(value) else redact(value, names)


def redact_listed(message: ListedMessage, names: Collection[str]) -> ListedMessage:
    """Return the redacted message of a list."""
    return message._replace(
        destination=_redact_text(message.destination, names),
        skip_reason=_redact_text(message.skip_reason, names),
        last_error=_redact_text(message.last_error, names),
    )


def redact_attempt(attempt: ShownAttempt, names: Collection[str]) -> ShownAttempt:
    """Return the redacted attempt."""
    return attempt._replace(error=_redact_text(attempt.error, names))


def redact_act(act: AuditRow, names: Collection[str]) -> AuditRow:
    """Return the redacted act: the text of a filter may be sensitive."""
    if act.details is None:
        return act
    told: dict[str, JsonValue] = {
        name: redact_text(value, names) if isinstance(value, str) else value for name, value in act.details.items()
    }
    return act._replace(details=cast("dict[str, JsonValue]", redact(told, names)))


def _redact_text(text: str | None, names: Collection[str]) -> str | None:
    return None if text is None else redact_text(text, names)


def redrive(
    connection: psycopg.Connection[TupleRow],
    message_ids: Collection[int],
    *,
    states: Collection[State] = _REDRIVABLE,
    attempt_counts: Sequence[int] | None = None,
    act: OperatorAction | None = None,
) -> list[Redriven]:
    """Make failed and cancelled messages pending again, each with its original budget of attempts.

    A message is left alone if it does not exist, is in none of `states`, or is superseded by a newer message of its
    key. So is a cancelled message if a later message has its dedupe key. With `attempt_counts`, one for each id, a
    message that was attempted again is left alone too. Everything runs in one transaction; results are ordered by id.
    """
    act = act or OperatorAction()
    known = {} if attempt_counts is None else dict(zip(message_ids, attempt_counts, strict=True))
    parameters = {"ids": list(message_ids), "states": list(states), "attempt_counts": attempt_counts}

    def redriven() -> list[Redriven]:
        act.announce(connection)
        rows = connection.execute(sql.REDRIVE, parameters).fetchall()
        return [
            _redriven(message_id, done, state, by, key_of, states, is_same=known.get(message_id, count) == count)
            for message_id, done, state, by, count, key_of in rows
        ]

    return transact(connection, redriven)


def _redriven(
    message_id: int,
    done: bool,  # noqa: FBT001
    state: str | None,
    superseded_by: int | None,
    dedupe_key_of: int | None,
    states: Collection[State],
    *,
    is_same: bool,
) -> Redriven:
    if done:
        return Redriven(message_id, RedriveResult.REDRIVEN)
    if state is None:
        return Redriven(message_id, RedriveResult.MISSING, "no such message")
    if state not in states:
        explanation = f"is {state}; only {' and '.join(states)} messages can be redriven"
        return Redriven(message_id, RedriveResult.WRONG_STATE, explanation)
    if not is_same:
        return Redriven(message_id, RedriveResult.CHANGED, "was attempted again")
    if superseded_by is not None:
        explanation = f"superseded by message {superseded_by}, which is newer"
        return Redriven(message_id, RedriveResult.SUPERSEDED, explanation, superseded_by)
    if dedupe_key_of is not None:
        explanation = f"message {dedupe_key_of} has its dedupe key now"
        return Redriven(message_id, RedriveResult.DEDUPE_KEY_TAKEN, explanation, dedupe_key_of)
    return Redriven(message_id, RedriveResult.LOCKED, "locked by another transaction; try again")


def redrive_matching(
    connection: psycopg.Connection[TupleRow],
    which: MessageFilter,
    *,
    batch_size: int = _BATCH,
    progress: Progress | None = None,
) -> RedriveTotals:
    """Redrive all matching messages in the order of ids. Each batch is committed separately.

    Without `which.states` only failed messages match.
    """
    states = frozenset(which.states or (State.FAILED,))
    if not states.issubset(_REDRIVABLE):
        raise StateError(f"only failed and cancelled messages can be redriven, not {', '.join(sorted(states))}")
    which = replace(which, states=states)
    act = OperatorAction(**which.given())
    results: Counter[RedriveResult] = Counter()
    for found in _batches(connection, which, batch_size):
        answers = redrive(connection, list(found), states=states, attempt_counts=list(found.values()), act=act)
        results.update(answer.result for answer in answers)
        if progress is not None:
            progress(results[RedriveResult.REDRIVEN])
    redriven, locked = results[RedriveResult.REDRIVEN], results[RedriveResult.LOCKED]
    superseded = results[RedriveResult.SUPERSEDED] + results[RedriveResult.DEDUPE_KEY_TAKEN]
    return RedriveTotals(redriven, superseded, locked, results.total() - redriven - superseded - locked)


def _batches(
    connection: psycopg.Connection[TupleRow], which: MessageFilter, batch_size: int
) -> Iterator[dict[int, int]]:
    """Return the matching ids, each with its number of attempts."""
    after_id = 0
    ((last_id,),) = fetch(connection, sql.LAST_ID, {})
    while True:
        parameters = which.parameters() | {"after_id": after_id, "last_id": last_id, "limit": batch_size}
        found: dict[int, int] = dict(fetch(connection, sql.LIST_MATCHING_IDS, parameters))
        if not found:
            return
        yield found
        after_id = max(found)


def resend(connection: psycopg.Connection[TupleRow], message_id: int, *, act: OperatorAction | None = None) -> int:
    """Enqueue a copy of a sent message, marked as `resend_of` it, and return the copy's id.

    Raises `StateError` if the message is in another state, or superseded by a newer message of its key.
    """

    act = act or OperatorAction()

    def copy() -> int:
        act.announce(connection)
        rows = connection.execute(sql.RESEND, {"id": message_id}).fetchall()
        if not rows:
            raise _no_such_message(message_id)
        ((copy_id, state, superseded_by),) = rows
        if state != State.SENT:
            raise StateError(f"message {message_id} is {state}; only sent messages can be resent")
        if superseded_by is not None:
            raise StateError(f"message {message_id} is superseded by message {superseded_by}, which is newer")
        if copy_id is None:
            raise StateError(f"message {message_id} is superseded by a newer message, which is deleted")
        return int(copy_id)

    return transact(connection, copy)


def resend_matching(
    connection: psycopg.Connection[TupleRow],
    which: MessageFilter,
    *,
    batch_size: int = _BATCH,
    progress: Progress | None = None,
) -> ResendTotals:
    """Resend all matching sent messages in the order of ids, each in a transaction of its own.

    Copies made by this call are not copied again, even if they are sent during the call.
    """
    if not frozenset(which.states) <= {State.SENT}:
        raise StateError("only sent messages can be resent")
    which = replace(which, states=[State.SENT])
    act = OperatorAction(**which.given())
    resent = superseded = changed = 0
    for ids in _batches(connection, which, batch_size):
        for message_id in ids:
            try:
                resend(connection, message_id, act=act)
            except StateError:
                superseded += 1
            except MessageNotFoundError:
                changed += 1
            else:
                resent += 1
        if progress is not None:
            progress(resent)
    return ResendTotals(resent, superseded, changed)


def explain_cancel(result: CancelResult) -> str:
    """Return the reason why a cancel left a message alone, as a predicate to the message, for people."""
    match result:
        case CancelResult.MISSING:
            return "does not exist"
        case CancelResult.LOCKED:
            return "is locked by another transaction; try again"
        case CancelResult.ALREADY_CANCELLED:
            return "is already cancelled"
        case _:
            return f"is already {result}"


def cancel(connection: psycopg.Connection[TupleRow], message_id: int) -> Cancelled:
    """Cancel one message, as the SQL function `pgoutbox.cancel` does."""
    (met,) = cancel_each(connection, [message_id])
    return met


def cancel_each(
    connection: psycopg.Connection[TupleRow],
    message_ids: Collection[int],
    *,
    states: Collection[State] = _OWED,
    act: OperatorAction | None = None,
) -> list[Cancelled]:
    """Cancel the messages that are in one of `states`, in one transaction. The results are ordered by id."""
    parameters = {"ids": list(message_ids), "states": list(states)}
    return _cancelled(connection, sql.CANCEL_EACH, parameters, act or OperatorAction())


def cancel_by_key(
    connection: psycopg.Connection[TupleRow],
    topic: str,
    *,
    coalesce_key: str | None = None,
    dedupe_key: str | None = None,
) -> list[Cancelled]:
    """Cancel the newest message of a coalesce key and the message of a dedupe key. Return none if there is none.

    With the rule `pending`, cancel all pending messages of the coalesce key and the one in flight, newest first.
    """
    parameters = {"topic": topic, "coalesce_key": coalesce_key, "dedupe_key": dedupe_key}
    act = OperatorAction(topic=topic, coalesce_key=coalesce_key, dedupe_key=dedupe_key)
    return _cancelled(connection, sql.CANCEL_BY_KEY, parameters, act)


def _cancelled(
    connection: psycopg.Connection[TupleRow], statement: LiteralString, parameters: Parameters, act: OperatorAction
) -> list[Cancelled]:
    def cancelled() -> list[Cancelled]:
        act.announce(connection)
        rows = connection.execute(statement, parameters)
        return [Cancelled(message_id, CancelResult(result)) for message_id, result in rows]

    return transact(connection, cancelled)


def cancel_matching(
    connection: psycopg.Connection[TupleRow],
    which: MessageFilter,
    *,
    batch_size: int = _BATCH,
    progress: Progress | None = None,
) -> CancelTotals:
    """Cancel all matching messages that are pending or in flight. Each batch is committed separately."""
    states = frozenset(which.states or _OWED)
    if not states.issubset(_OWED):
        others = ", ".join(sorted(states.difference(_OWED)))
        raise StateError(f"only pending and sending messages can be cancelled, not {others}")
    which = replace(which, states=states)
    act = OperatorAction(**which.given())
    results: Counter[CancelResult] = Counter()
    for ids in _batches(connection, which, batch_size):
        results.update(met.result for met in cancel_each(connection, list(ids), states=states, act=act))
        if progress is not None:
            progress(results[CancelResult.CANCELLED] + results[CancelResult.REQUESTED])
    cancelled, requested = results[CancelResult.CANCELLED], results[CancelResult.REQUESTED]
    locked = results[CancelResult.LOCKED]
    return CancelTotals(cancelled, requested, locked, results.total() - cancelled - requested - locked)


def _no_such_message(message_id: int) -> MessageNotFoundError:
    return MessageNotFoundError(f"no such message: {message_id}")

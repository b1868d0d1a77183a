"""The queries of the pages. Each function runs inside a transaction of `Database.read`."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from pgoutbox.dashboard.database import allowing_bitmaps
from pgoutbox.database import sql
from pgoutbox.message import State
from pgoutbox.operations import AuditRow, FailureGroup, ListedMessage, MessageFilter, Operator
from pgoutbox.text import Count, CountKind

if TYPE_CHECKING:
    from pgoutbox.dashboard.history import Range
    from pgoutbox.dashboard.types import Connection

CAP: Final = 10_000
QUEUE_CAP: Final = 1_000
SEARCH_ROWS: Final = 25_000
# The error of each row is normalised, which is the slowest query here.
GROUP_ROWS: Final = 3_000
SEARCH_SECONDS: Final = 3.0
MAX_QUEUES: Final = 100
QUEUE_NAMES: Final = 10_000
_RANK_CAP: Final = 100
# The rate of a queue is that of this time.
RATE_SECONDS: Final = 300
_RATE_ROWS: Final = 50_000
DEPTH_CAP: Final = 50_000
FAILED_CAP: Final = 100_000
MAX_BREAKERS: Final = 100
_RUNNING: Final = 20
_GROUPS: Final = 100
_SUPERSEDED: Final = 20

# Ids are drawn in the order of enqueue, but a message is dated by the start of its transaction.
_LONGEST_TRANSACTION: Final = timedelta(days=1)


class StateCount(NamedTuple):
    """The number of messages in a state: exact (`exactly`), capped (`at least`) or estimated (`about`)."""

    state: State
    messages: int
    kind: CountKind


class QueueRow(NamedTuple):
    """A queue with messages, a pause or limits; columns in the order of LIVE_QUEUES, and the rate of ended messages."""

    queue: str
    due: int
    scheduled: int
    sending: int
    lapsed: int
    next_due_at: datetime | None
    paused_at: datetime | None
    resume_at: datetime | None
    rate_count: int | None
    rate_seconds: float | None
    burst: int | None
    tokens: float | None
    max_in_flight: int | None
    ceiling_count: int | None
    ceiling_seconds: float | None
    serving_count: int
    per_second: float | None

    @property
    def seconds_to_empty(self) -> float | None:
        """The time in which the due messages end at the present rate; None if there are none or the rate is unknown."""
        return self.due / self.per_second if self.due and self.per_second else None


class Queues(NamedTuple):
    """The queues that need a look first, the number of all queues, up to `QUEUE_NAMES`, and their oldest due time."""

    rows: list[QueueRow]
    total: int
    oldest_due_at: datetime | None


class TopicCount(NamedTuple):
    """Unfinished and failed messages of a topic; columns in the order of COUNT_BY_TOPIC."""

    topic: str
    unfinished: int
    failed: int


class WorkerRow(NamedTuple):
    """A worker that runs or holds leases, or the last run; columns in the order of RUNNING_WORKERS."""

    worker: str
    in_flight: int
    lapsed: int
    oldest_claim_at: datetime | None
    last_lease_at: datetime | None
    queues: list[str]
    topics: list[str]
    version: str | None
    slots: int | None
    started_at: datetime | None
    seen_at: datetime | None
    ended_at: datetime | None


class RunningMessage(NamedTuple):
    """A message in flight; columns in the order of RUNNING_MESSAGES."""

    worker: str
    id: int
    topic: str
    queue: str
    claimed_at: datetime
    lease_expires_at: datetime


class BreakerRow(NamedTuple):
    """A circuit breaker and the messages that wait for it; columns in the order of LIST_BREAKERS.

    The messages are counted among the first ones that wait for any reason. With `is_sample` there may be more.
    """

    key: str
    opened_at: datetime
    retry_at: datetime
    probe_until: datetime | None
    cooldown_seconds: float
    worker: str
    last_error: str
    waiting_count: int
    is_sample: bool


class FailedMinute(NamedTuple):
    """The number of recent failures of a topic in a minute; columns in the order of FAILED_LATELY."""

    topic: str
    minute: datetime
    messages: int


@dataclass(frozen=True, slots=True)
class Found:
    """One page of a search. `next_before` means more rows, or perhaps more if `looked_at` rows did not fill the page.

    A search `is_deep` if it read more than the newest rows.
    """

    messages: list[ListedMessage]
    next_before: int | None
    looked_at: int | None
    is_deep: bool = False


def now(connection: Connection) -> datetime:
    """Return the time of the database."""
    ((moment,),) = connection.execute(sql.NOW)
    return cast("datetime", moment)


def count_states(connection: Connection) -> list[StateCount]:
    """Count the messages of each state. Large numbers of final messages are estimates of the last ANALYZE."""
    ((pending, sending, failed),) = connection.execute(sql.COUNT_OPEN, {"cap": CAP + 1})
    done: dict[State, int] = dict.fromkeys((State.SENT, State.SKIPPED, State.CANCELLED), 0)
    done.update({State(state): count for state, count in connection.execute(sql.COUNT_DONE, {"cap": CAP + 1})})
    kind: CountKind = "exactly"
    if sum(done.values()) > CAP:
        estimates = {State(state): count for state, count in connection.execute(sql.ESTIMATE_DONE)}
        kind = "about" if sum(estimates.values()) > CAP else "at least"
        done = {state: max(count, estimates.get(state, 0)) for state, count in done.items()}
    opened = {State.PENDING: pending, State.SENDING: sending, State.FAILED: failed}
    counts = [
        StateCount(state, min(count, CAP), "exactly" if count <= CAP else "at least") for state, count in opened.items()
    ]
    counts += [StateCount(state, count, kind) for state, count in done.items()]
    return sorted(counts, key=lambda count: list(State).index(count.state))


def count_due(connection: Connection) -> tuple[Count, Count, Count]:
    """Count the pending messages that are due now, those that are due later, and those that have been tried.

    In a large backlog the sample may contain only one kind, so the queues are counted too.
    """
    ((due, later, tried),) = connection.execute(sql.COUNT_DUE, {"cap": CAP + 1})
    if due + later <= CAP:
        return Count(due, "exactly"), Count(later, "exactly"), Count(tried, "exactly")
    found = queues(connection)
    is_all = len(found.rows) == found.total
    return (
        _count_in_queues(due, [queue.due for queue in found.rows], is_all=is_all),
        _count_in_queues(later, [queue.scheduled for queue in found.rows], is_all=is_all),
        Count(min(tried, CAP), "at least"),
    )


def _count_in_queues(sample: int, counts: list[int], *, is_all: bool) -> Count:
    is_exact = is_all and max(counts, default=0) <= QUEUE_CAP
    return Count(sum(counts), "exactly") if is_exact else Count(min(max(sample, sum(counts)), CAP), "at least")


def queues(connection: Connection, *, prefix: str = "", limit: int = MAX_QUEUES) -> Queues:
    """Return the queues with messages, a pause or limits whose names begin with `prefix`.

    Queues with a late message are first, then those with the most due messages.
    """
    parameters = {"prefix": prefix, "queues": QUEUE_NAMES + 1, "cap": _RANK_CAP, "limit": limit}
    ranked = connection.execute(sql.RANK_QUEUES, parameters).fetchall()
    names = [row[0] for row in ranked]
    found = {row.queue: row for row in _live_queues(connection, names, QUEUE_CAP)}
    total, oldest_due_at = ranked[0][1:] if ranked else (0, None)
    return Queues([found[name] for name in names], total, oldest_due_at)


def queue(connection: Connection, name: str) -> QueueRow:
    """Return one queue, even if nothing uses it."""
    (found,) = _live_queues(connection, [name], CAP)
    return found


def _live_queues(connection: Connection, names: list[str], cap: int) -> list[QueueRow]:
    rows = connection.execute(sql.LIVE_QUEUES, {"queues": names, "cap": cap + 1}).fetchall()
    parameters = {"queues": names, "seconds": RATE_SECONDS, "cap": _RATE_ROWS}
    with allowing_bitmaps(connection):
        rates = {row[0]: row[1] / row[2] for row in connection.execute(sql.ENDED_BY_QUEUE, parameters)}
    return [QueueRow._make((*row, rates.get(row[0]))) for row in rows]


def count_failed_of_day(connection: Connection) -> int:
    """Return the number of messages that failed within the last day and are still failed, up to one above `CAP`."""
    ((count,),) = connection.execute(sql.COUNT_FAILED_OF_DAY, {"cap": CAP + 1})
    return int(count)


def running_workers(connection: Connection) -> list[WorkerRow]:
    """Return the workers that run or hold leases, and the last run, by name."""
    return [WorkerRow._make(row) for row in connection.execute(sql.RUNNING_WORKERS, {"cap": CAP})]


def running_messages(connection: Connection) -> dict[str, list[RunningMessage]]:
    """Return the messages in flight by worker, those that have run longest first, a few of each worker."""
    found: dict[str, list[RunningMessage]] = {}
    for row in connection.execute(sql.RUNNING_MESSAGES, {"cap": CAP, "limit": _RUNNING}):
        message = RunningMessage._make(row)
        found.setdefault(message.worker, []).append(message)
    return found


def breakers(connection: Connection) -> list[BreakerRow]:
    """Return the breakers that are not closed, newest first, with the number of the messages behind each."""
    rows = connection.execute(sql.LIST_BREAKERS, {"cap": CAP, "limit": MAX_BREAKERS})
    return [BreakerRow._make(row) for row in rows]


def count_breakers(connection: Connection) -> int:
    """Return the number of breakers that are not closed."""
    return sum(count for _, _, count in connection.execute(sql.COUNT_BREAKERS))


def failed_by_time(connection: Connection, asked: Range, now: datetime) -> dict[datetime, int]:
    """Return the failed messages of a range by slot, the newest `FAILED_CAP` at most."""
    parameters = {"width": asked.width.total_seconds(), "from": asked.slots(now)[0], "cap": FAILED_CAP}
    return {at.astimezone(UTC): messages for at, messages in connection.execute(sql.FAILED_BY_TIME, parameters)}


def failed_lately(connection: Connection) -> list[FailedMinute]:
    """Return the newest failures by topic and minute."""
    return [FailedMinute._make(row) for row in connection.execute(sql.FAILED_LATELY, {"cap": CAP})]


def failed_groups(connection: Connection) -> list[FailureGroup]:
    """Return the newest failures by topic and cause, those with the most failures in the last hour first."""
    return Operator(connection).list_failures(limit=_GROUPS)


def cause_of(connection: Connection, which: MessageFilter, names: Collection[str]) -> str | None:
    """Return the cause of the filter's group of failures, with sensitive values hidden."""
    if which.error_group is None:
        return None
    groups = Operator(connection).list_failures(topic=which.topic)
    return next((group.redacted(names).cause for group in groups if group.group == which.error_group), None)


def count_by_topic(connection: Connection) -> list[TopicCount]:
    """Return the numbers of unfinished and failed messages by topic, among the newest ones of each."""
    return [TopicCount._make(row) for row in connection.execute(sql.COUNT_BY_TOPIC, {"cap": CAP})]


def superseded_by(connection: Connection, message_id: int) -> list[int]:
    """Return the messages that this one supersedes, among those with ids near it."""
    parameters = {"id": message_id, "rows": SEARCH_ROWS, "limit": _SUPERSEDED}
    return [row[0] for row in connection.execute(sql.SUPERSEDED_BY, parameters)]


def is_used(connection: Connection, queue: QueueRow) -> bool:
    """Return whether the queue has messages, a pause or limits, or one of the newest messages. If not, its name may be
    misspelt."""
    owes = queue.due or queue.scheduled or queue.sending or queue.lapsed
    has_controls = queue.paused_at or queue.rate_count or queue.max_in_flight
    return bool(owes or has_controls or search(connection, MessageFilter(queue=queue.queue), limit=1).messages)


def acts_on(connection: Connection, message_id: int) -> list[AuditRow] | None:
    """Return the acts on one message, newest first; None if the dashboard's role cannot read the audit."""
    operator = Operator(connection)
    if not operator.reads_audit():
        return None
    with allowing_bitmaps(connection):
        return operator.list_acts(message_id=message_id)


def newest_id(connection: Connection) -> int:
    """Return the last id of the sequence."""
    ((found,),) = connection.execute(sql.NEWEST_ID)
    return int(found)


def is_copy(connection: Connection) -> bool:
    """Return whether the schema belongs to another database."""
    ((found,),) = connection.execute(sql.IS_COPY)
    return bool(found)


def search(
    connection: Connection, which: MessageFilter, *, before_id: int | None = None, limit: int, seconds: float = 0.0
) -> Found:
    """Return the newest matches below `before_id`, newest first.

    Searches `rows_of(which)` rows at a time, until the page is full or `seconds` have passed.
    """
    found = _search(connection, which, before_id, limit, seconds)
    waits = Operator(connection).why_they_wait([message.id for message in found.messages])
    return replace(found, messages=[message._replace(waits=waits.get(message.id)) for message in found.messages])


def _search(connection: Connection, which: MessageFilter, before_id: int | None, limit: int, seconds: float) -> Found:
    before_id, not_below_id = _bounds(connection, which, before_id)
    over_at = time.monotonic() + seconds
    rows = rows_of(which)
    parameters = {**which.parameters(), "not_below_id": not_below_id, "rows": rows}
    held_only = set(which.states) == {State.SENDING} and which.error_group is None
    statement = sql.SEARCH_SENDING if held_only else sql.SEARCH_MESSAGES
    messages: list[ListedMessage] = []
    looked_at = 0
    while True:
        parameters |= {"before_id": before_id, "limit": limit + 1 - len(messages)}
        found = connection.execute(statement, parameters)
        messages += [ListedMessage(*row)._replace(state=State(row[4])) for row in found]
        if len(messages) > limit:
            return Found(messages[:limit], messages[limit - 1].id, None, is_deep=looked_at > 0)
        ended_at = None if held_only else connection.execute(sql.SEARCHED, parameters).fetchone()
        if ended_at is None:
            return Found(messages, None, None, is_deep=looked_at > 0)
        looked_at += rows
        before_id = ended_at[0]
        if time.monotonic() >= over_at:
            return Found(messages, before_id, looked_at, is_deep=looked_at > rows)


def count_near(connection: Connection, which: MessageFilter) -> tuple[int, bool]:
    """How many of the newest rows match, and whether those are all rows there are."""
    before_id, not_below_id = _bounds(connection, which, None)
    parameters = {
        **which.parameters(),
        "before_id": before_id,
        "not_below_id": not_below_id,
        "rows": rows_of(which),
    }
    ((matching, looked_at),) = connection.execute(sql.COUNT_SEARCHED, parameters)
    return int(matching), looked_at < rows_of(which)


def rows_of(which: MessageFilter) -> int:
    """Return the number of rows that one page searches."""
    return SEARCH_ROWS if which.error_group is None else GROUP_ROWS


def _bounds(connection: Connection, which: MessageFilter, before_id: int | None) -> tuple[int | None, int | None]:
    """Return the range of ids for the times of the filter, so that a search starts there."""
    not_below_id = None
    if which.created_from is not None:
        not_below_id = _first_id_since(connection, which.created_from - _LONGEST_TRANSACTION)
    if which.created_before is not None:
        first_after = _first_id_since(connection, which.created_before + _LONGEST_TRANSACTION)
        before_id = first_after if before_id is None else min(before_id, first_after)
    return before_id, not_below_id


def _first_id_since(connection: Connection, moment: datetime) -> int:
    """Return an id below which all messages were enqueued before this time, by binary search."""
    low, high = 1, newest_id(connection) + 1
    while low < high:
        middle = (low + high) // 2
        row = connection.execute(sql.FIRST_FROM, {"id": middle}).fetchone()
        if row is None or row[0] >= high or row[1] >= moment:
            high = middle
        else:
            low = row[0] + 1
    return high

"""The queries of the pages. Each function runs inside a transaction of `Database.read`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, cast

import psycopg

from pgoutbox.dashboard.database import allowing_bitmaps
from pgoutbox.database import sql
from pgoutbox.doctor.context import RankedQueue
from pgoutbox.message import State
from pgoutbox.operations import AuditRow, FailureGroup, ListedMessage, MessageFilter, Operator
from pgoutbox.operations.window import Window
from pgoutbox.text import Count, CountKind

if TYPE_CHECKING:
    from pgoutbox.dashboard.history import Range
    from pgoutbox.dashboard.types import Connection

CAP: Final = 10_000
QUEUE_CAP: Final = 1_000
SEARCH_ROWS: Final = 25_000
# The error of each row is normalised, which takes up to a quarter of a millisecond.
GROUP_ROWS: Final = 1_000
SEARCH_SECONDS: Final = 3.0
MAX_QUEUES: Final = 100
# A page of queues or topics has at most about 100 KB.
PAGE_ROWS: Final = 60
QUEUE_NAMES: Final = 10_000
TOPIC_NAMES: Final = 10_000
# The rate of a queue is that of this time.
RATE_SECONDS: Final = 300
_RATE_ROWS: Final = 50_000
DEPTH_CAP: Final = 10_000
FAILED_CAP: Final = 100_000
MAX_BREAKERS: Final = 75
# Ten times so many rows in all, if the queues are few.
EACH_QUEUE: Final[dict[str, Any]] = {"prefix": "", "queues": QUEUE_NAMES, "rows": QUEUE_CAP}
_RUNNING: Final = 5
MAX_GROUPS: Final = 60
_SUPERSEDED: Final = 20

# Ids are drawn in the order of enqueue, but a message is dated by the start of its transaction.
_LONGEST_TRANSACTION: Final = timedelta(days=1)


Part: TypeAlias = Literal["now", "later", "again"]
"""A part of the pending messages, as in `MessageFilter.due`."""

NamesOf: TypeAlias = Callable[[str], Collection[str]]
"""The names whose values are hidden in messages of a topic."""


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


class TopicRow(NamedTuple):
    """A topic with its messages.

    `first_id` is the pending message that is due first. `error_ids` are the newest pending message of which an attempt
    has failed, and the newest failed one.
    """

    topic: str
    waiting: Count
    due: Count
    in_flight: Count
    failed: Count
    first_id: int | None = None
    error_ids: Sequence[int] = ()


class Topics(NamedTuple):
    """The topics by name. `nothing` has the numbers of a topic that is not among them."""

    rows: dict[str, TopicRow]
    nothing: TopicRow


class TopicRate(NamedTuple):
    """The ended messages of a topic; columns in the order of RATES_BY_TOPIC.

    `waited` and `handled` are the median and the 95th percentile of the sent messages, in seconds.
    """

    topic: str
    per_second: float
    waited: Sequence[float] | None
    handled: Sequence[float] | None


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

    The messages are counted among those of each queue that are due first. With `is_sample` there may be more.
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


class Near(NamedTuple):
    """The numbers of matches among the newest rows by state, with the newest one; and whether those are all rows there
    are.
    """

    states: dict[State, tuple[int, int]]
    looked_at: int
    is_all: bool

    @property
    def matching(self) -> int:
        """The number of matches in all states."""
        return sum(messages for messages, _ in self.states.values())


def now(connection: Connection) -> datetime:
    """Return the time of the database."""
    ((moment,),) = connection.execute(sql.NOW)
    return cast("datetime", moment)


def count_open(connection: Connection) -> dict[State, Count]:
    """Count the pending, in-flight and failed messages, each up to `CAP`."""
    (counts,) = connection.execute(sql.COUNT_OPEN, {"cap": CAP + 1})
    return {
        state: Count(min(count, CAP), "exactly" if count <= CAP else "at least")
        for state, count in zip((State.PENDING, State.SENDING, State.FAILED), counts, strict=True)
    }


def count_states(connection: Connection) -> dict[State, Count]:
    """Count the messages of each state. Large numbers of final messages are estimates of the last ANALYZE."""
    done: dict[State, int] = dict.fromkeys((State.SENT, State.SKIPPED, State.CANCELLED), 0)
    done.update({State(state): count for state, count in connection.execute(sql.COUNT_DONE, {"cap": CAP + 1})})
    kind: CountKind = "exactly"
    if sum(done.values()) > CAP:
        estimates = {State(state): count for state, count in connection.execute(sql.ESTIMATE_DONE)}
        kind = "about" if sum(estimates.values()) > CAP else "at least"
        done = {state: max(count, estimates.get(state, 0)) for state, count in done.items()}
    counts = count_open(connection) | {state: Count(count, kind) for state, count in done.items()}
    return {state: counts[state] for state in State}


def count_pending(connection: Connection, *parts: Part) -> dict[Part, Count]:
    """Count the pending messages of these parts, each up to `CAP`."""
    rows = connection.execute(
        sql.COUNT_PENDING, {"prefix": "", "queues": QUEUE_NAMES, "cap": CAP + 1, "parts": list(parts)}
    )
    return {part: Count(min(messages, CAP), "exactly" if is_all else "at least") for part, messages, is_all in rows}


def capped(messages: int) -> Count:
    """Return a number of messages of a queue, which was counted up to one above `QUEUE_CAP`."""
    return Count(min(messages, QUEUE_CAP), "at least" if messages > QUEUE_CAP else "exactly")


def rank_queues(connection: Connection, *, prefix: str = "") -> list[RankedQueue]:
    """Return the queues with messages, a pause or limits whose names begin with `prefix`, late ones first.

    At most one above `QUEUE_NAMES`.
    """
    parameters = {"prefix": prefix, "queues": QUEUE_NAMES + 1}
    return [RankedQueue._make(row) for row in connection.execute(sql.RANK_QUEUES, parameters).fetchall()]


def queues(connection: Connection, ranked: Sequence[RankedQueue], *, limit: int = MAX_QUEUES) -> Queues:
    """Return the first `limit` of these queues with their numbers."""
    names = [row.queue for row in ranked[:limit]]
    found = {row.queue: row for row in _live_queues(connection, names, QUEUE_CAP)}
    return Queues([found[name] for name in names], len(ranked), ranked[0].oldest_due_at if ranked else None)


def few_queues(connection: Connection) -> list[QueueRow]:
    """Return the queues with messages, a pause or limits if they are at most `MAX_QUEUES`, else none."""
    names = [row[0] for row in connection.execute(sql.LIVE_QUEUE_NAMES, {"prefix": "", "queues": MAX_QUEUES + 1})]
    return _live_queues(connection, names, QUEUE_CAP) if len(names) <= MAX_QUEUES else []


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
    rows = connection.execute(sql.LIST_BREAKERS, EACH_QUEUE | {"limit": MAX_BREAKERS})
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
    return Operator(connection).list_failures(newest=GROUP_ROWS, limit=MAX_GROUPS)


def cause_of(connection: Connection, message_id: int) -> str | None:
    """Return the cause for which a message failed, None without an error or if it is no longer failed."""
    row = connection.execute(sql.SHOW_CAUSE, {"id": message_id}).fetchone()
    return None if row is None else row[0]


def held_topics(connection: Connection) -> Topics:
    """Return the topics with messages in flight and failed ones, with the numbers of these."""
    return _topics_of(connection, {})


def topics(connection: Connection, ranked: Sequence[RankedQueue]) -> Topics:
    """Return the topics with messages that wait, are in flight or have failed.

    Of each of these queues the messages that are due first are counted. If there are more, no number of waiting ones is
    exact.
    """
    names = [row.queue for row in ranked[: EACH_QUEUE["queues"]]]
    rows = connection.execute(sql.WAITING_TOPICS, EACH_QUEUE | {"names": names, "topics": TOPIC_NAMES}).fetchall()
    return _topics_of(connection, {row[0]: row[1:] for row in rows})


def _topics_of(connection: Connection, waiting: Mapping[str, Sequence[Any]]) -> Topics:
    held = {row[0]: row[1:] for row in connection.execute(sql.COUNT_BY_TOPIC, {"cap": CAP}).fetchall()}

    def kind(*, is_capped: bool) -> CountKind:
        return "at least" if is_capped else "exactly"

    waits = kind(is_capped=any(is_capped for *_, is_capped in waiting.values()))
    flies = kind(is_capped=sum(in_flight for in_flight, *_ in held.values()) >= CAP)
    fails = kind(is_capped=sum(failed for _, failed, _ in held.values()) >= CAP)

    def row(name: str) -> TopicRow:
        messages, due, first_id, tried_id, _ = waiting.get(name, (0, 0, None, None, False))
        in_flight, failed, failed_id = held.get(name, (0, 0, None))
        return TopicRow(
            name,
            Count(messages, waits),
            Count(due, waits),
            Count(in_flight, flies),
            Count(failed, fails),
            first_id,
            [error_id for error_id in (tried_id, failed_id) if error_id is not None],
        )

    return Topics({name: row(name) for name in {*waiting, *held}}, row(""))


def rates(connection: Connection, names: Sequence[str]) -> dict[str, TopicRate]:
    """Return the rates of those of these topics of which messages ended in the last minutes."""
    with allowing_bitmaps(connection):
        parameters = {"topics": list(names), "seconds": RATE_SECONDS, "cap": _RATE_ROWS}
        return {row[0]: TopicRate._make(row) for row in connection.execute(sql.RATES_BY_TOPIC, parameters)}


def of_topics(connection: Connection, rows: Iterable[TopicRow]) -> dict[int, ListedMessage]:
    """Return the messages that the rows name, by id."""
    ids = {wanted for row in rows for wanted in (row.first_id, *row.error_ids) if wanted is not None}
    which = MessageFilter(ids=tuple(sorted(ids)))
    return {found.id: found for found in search(connection, which, limit=len(ids)).messages} if ids else {}


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
    connection: Connection,
    which: MessageFilter,
    *,
    before_id: int | None = None,
    limit: int,
    is_brief: bool = True,
    names_of: NamesOf | None = None,
) -> Found:
    """Return the newest matches below `before_id`, newest first.

    Searches until the page is full, or `SEARCH_SECONDS` have passed, or, if brief, `rows_of(which)` rows are read. With
    `names_of` a text is only found where it is visible without the values of these names.
    """
    if which.text is None:
        names_of = None
    found = _search(connection, which, before_id, limit, is_brief=is_brief, names_of=names_of)
    return replace(found, messages=Operator(connection).with_waits(found.messages))


def _search(
    connection: Connection,
    which: MessageFilter,
    before_id: int | None,
    limit: int,
    *,
    is_brief: bool,
    names_of: NamesOf | None,
) -> Found:
    before_id, not_below_id = _bounds(connection, which, before_id)
    over_at = time.monotonic() + SEARCH_SECONDS
    most = rows_of(which)
    window = Window(most)
    parameters = {**which.parameters(), "not_below_id": not_below_id}
    held_only = set(which.states) == {State.SENDING} and which.error_group is None
    statement = sql.SEARCH_SENDING if held_only else sql.SEARCH_MESSAGES
    messages: list[ListedMessage] = []
    looked_at = 0
    while True:
        # Messages in flight have an index of their own.
        rows = most if held_only else window.rows
        # Hidden matches leave room for others of the same rows.
        most_matches = rows if names_of is not None else limit + 1 - len(messages)
        parameters |= {"before_id": before_id, "limit": most_matches, "rows": rows}
        try:
            with window.read(), connection.transaction():
                found = connection.execute(statement, parameters).fetchall()
                ended_at = None if held_only else connection.execute(sql.SEARCHED, parameters).fetchone()
        except psycopg.errors.QueryCanceled:
            if held_only or rows == 1:
                raise
            # A search that has read nothing has nowhere to continue.
            if looked_at and time.monotonic() >= over_at:
                return Found(messages, before_id, looked_at, is_deep=looked_at > most)
            continue
        matches = [ListedMessage(*row)._replace(state=State(row[4])) for row in found]
        if names_of is not None and which.text is not None:
            matches = _visible(connection, matches, which.text, names_of)
        messages += matches
        if len(messages) > limit:
            return Found(messages[:limit], messages[limit - 1].id, None, is_deep=looked_at >= most)
        if ended_at is None:
            return Found(messages, None, None, is_deep=looked_at >= most)
        looked_at += rows
        before_id = ended_at[0]
        if (is_brief and looked_at >= most) or time.monotonic() >= over_at:
            return Found(messages, before_id, looked_at, is_deep=looked_at > most)


def _visible(connection: Connection, matches: list[ListedMessage], text: str, names_of: NamesOf) -> list[ListedMessage]:
    """Return the matches whose text is visible. The schema knows no names of a topic: a viewer could guess their values
    letter by letter."""
    doubtful = []
    for match in matches:
        shown = match.redacted(names_of(match.topic))
        texts = "\n".join(filter(None, (shown.destination, shown.skip_reason, shown.last_error)))
        if shown != match and text.lower() not in texts.lower():
            doubtful.append(match.id)
    if not doubtful:
        return matches
    keyed = {row[0] for row in connection.execute(sql.SEARCH_KEYS, {"ids": doubtful, "text": text})}
    return [match for match in matches if match.id not in doubtful or match.id in keyed]


def count_near(connection: Connection, which: MessageFilter) -> Near:
    """Count the matches among the newest rows: `rows_of(which)`, or as many as are read in `SEARCH_SECONDS`."""
    before_id, not_below_id = _bounds(connection, which, None)
    over_at = time.monotonic() + SEARCH_SECONDS
    most = rows_of(which)
    window = Window(most)
    states: dict[State, tuple[int, int]] = {}
    looked_at = 0
    while True:
        rows = min(window.rows, most - looked_at)
        parameters = {**which.parameters(), "before_id": before_id, "not_below_id": not_below_id, "rows": rows}
        try:
            with window.read(), connection.transaction():
                found = connection.execute(sql.COUNT_SEARCHED, parameters).fetchall()
        except psycopg.errors.QueryCanceled:
            if rows == 1:
                raise
            if looked_at and time.monotonic() >= over_at:
                return Near(states, looked_at, is_all=False)
            continue
        for state, matching, newest_id, _, _ in found:
            before, newest_before = states.get(State(state), (0, newest_id))
            if matching:
                states[State(state)] = before + matching, newest_before
        read = sum(row_count for *_, row_count, _ in found)
        looked_at += read
        if read < rows or looked_at >= most or time.monotonic() >= over_at:
            return Near(states, looked_at, is_all=read < rows)
        before_id = min(last_id for *_, last_id in found)


def rows_of(which: MessageFilter) -> int:
    """Return the number of rows that a refresh or a preview searches."""
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

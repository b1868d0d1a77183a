"""The queries of the pages. Each function runs inside a transaction of `Database.read`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, Final, Literal, LiteralString, NamedTuple, TypeAlias, cast

import psycopg
from psycopg.rows import dict_row

from pgoutbox.dashboard.database import Connection, allowing_bitmaps
from pgoutbox.dashboard.history import Range
from pgoutbox.database import sql
from pgoutbox.doctor.context import RankedQueue
from pgoutbox.message import State
from pgoutbox.operations import AuditRow, ListedMessage, MessageFilter, Operator
from pgoutbox.operations.window import Window
from pgoutbox.redaction import redact_text
from pgoutbox.text import Count, CountKind

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
MAX_SCHEDULES: Final = 50
# Ten times so many rows in all, if the queues are few.
EACH_QUEUE: Final[dict[str, Any]] = {"prefix": "", "queues": QUEUE_NAMES, "rows": QUEUE_CAP}
_RUNNING: Final = 5
MAX_GROUPS: Final = 60
MAX_SHOWN: Final = 100
_SUPERSEDED: Final = 20

# Ids are drawn in the order of enqueue, but a message is dated by the start of its transaction.
_LONGEST_TRANSACTION: Final = timedelta(days=1)


Part: TypeAlias = Literal["now", "later", "again"]
"""A part of the pending messages, as in `MessageFilter.due`."""

Row: TypeAlias = dict[str, Any]
"""The columns of a row by name, as its statement returns them."""

Topics: TypeAlias = tuple[dict[str, Row], Row]
"""The topics by name, and the numbers of a topic that is not among them."""

NamesOf: TypeAlias = Callable[[str], Collection[str]]
"""The names whose values are hidden in messages of a topic."""


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
    """The numbers of matches among the newest rows by state, with the newest one, and the newest `MAX_SHOWN` of all.

    With `is_all` those are all rows there are.
    """

    states: dict[str, tuple[int, int]]
    ids: list[int]
    looked_at: int
    is_all: bool

    @property
    def matching(self) -> int:
        """The number of matches in all states."""
        return sum(messages for messages, _ in self.states.values())


def rows(connection: Connection, statement: LiteralString, parameters: Mapping[str, object]) -> list[Row]:
    """Return the rows of a statement."""
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(statement, parameters).fetchall()


def value(connection: Connection, statement: LiteralString, parameters: Mapping[str, object] | None = None) -> Any:  # noqa: ANN401 - of any type of the database
    """Return the only value of a statement."""
    ((found,),) = connection.execute(statement, parameters)
    return found


def now(connection: Connection) -> datetime:
    """Return the time of the database."""
    return cast("datetime", value(connection, sql.NOW))


def capped(messages: int, cap: int) -> Count:
    """Return a number of messages that was counted up to one above `cap`."""
    return Count(min(messages, cap), "at least" if messages > cap else "exactly")


def depth_of(queue: Row) -> Count:
    """Return the number of live messages of a queue that was read with `QUEUE_CAP`."""
    return capped(sum(queue[name] for name in ("due", "scheduled", "sending", "lapsed")), QUEUE_CAP)


def count_open(connection: Connection) -> dict[State, Count]:
    """Count the pending, in-flight and failed messages, each up to `CAP`."""
    (counts,) = rows(connection, sql.COUNT_OPEN, {"cap": CAP + 1})
    return {State(state): capped(messages, CAP) for state, messages in counts.items()}


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
    parameters = {"prefix": "", "queues": QUEUE_NAMES, "cap": CAP + 1, "parts": list(parts)}
    found = connection.execute(sql.COUNT_PENDING, parameters)
    return {part: Count(min(messages, CAP), "exactly" if is_all else "at least") for part, messages, is_all in found}


def rank_queues(connection: Connection, *, prefix: str = "") -> list[RankedQueue]:
    """Return the queues with messages, a pause or limits whose names begin with `prefix`, late ones first.

    At most one above `QUEUE_NAMES`.
    """
    parameters = {"prefix": prefix, "queues": QUEUE_NAMES + 1}
    return [RankedQueue._make(row) for row in connection.execute(sql.RANK_QUEUES, parameters).fetchall()]


def queues(connection: Connection, names: Sequence[str], cap: int) -> list[Row]:
    """Return these queues, used or not, with their numbers up to one above `cap`, and their rates."""
    parameters = {"queues": list(names), "cap": cap + 1}
    ended = rates(connection, "queue", names)
    return [row | {"rate": ended.get(row["queue"])} for row in rows(connection, sql.LIVE_QUEUES, parameters)]


def rates(connection: Connection, by: Literal["queue", "topic"], names: Sequence[str]) -> dict[str, Row]:
    """Return the rates of those of these queues or topics of which messages ended in the last minutes, by name."""
    parameters = {"by": by, "names": list(names), "seconds": RATE_SECONDS, "cap": _RATE_ROWS}
    with allowing_bitmaps(connection):
        return {row["name"]: row for row in rows(connection, sql.ENDED_RATES, parameters)}


def has_fair_keys(connection: Connection, queue: str) -> bool:
    """Whether a queue has messages with a fair key, or a share of one."""
    first = {"queue": queue, "prefix": "", "limit": 1, "keys": 1, "cap": 1}
    return connection.execute(sql.LIST_FAIR_KEYS, first).fetchone() is not None


def running_workers(connection: Connection) -> list[Row]:
    """Return the workers that run or hold leases, and the last run, by name."""
    return rows(connection, sql.RUNNING_WORKERS, {"cap": CAP})


def worker_events(connection: Connection, since: datetime) -> list[Row]:
    """Return the starts and the ends of workers since this time, the newest ones."""
    return rows(connection, sql.WORKER_EVENTS, {"since": since})


def running_messages(connection: Connection) -> dict[str, list[Row]]:
    """Return the messages in flight by worker, those that have run longest first, a few of each worker."""
    found = rows(connection, sql.RUNNING_MESSAGES, {"cap": CAP, "limit": _RUNNING})
    return {worker: list(messages) for worker, messages in groupby(found, lambda row: str(row["worker"]))}


def breakers(connection: Connection, hidden: Collection[str]) -> list[Row]:
    """Return the breakers that are not closed, newest first, with the number of the messages behind each.

    The messages are counted among those of each queue that are due first. With `is_sample` there may be more. `hidden`
    names are redacted.
    """
    found = rows(connection, sql.LIST_BREAKERS, EACH_QUEUE | {"limit": MAX_BREAKERS})
    return [row | {"last_error": redact_text(row["last_error"], hidden)} for row in found]


def count_breakers(connection: Connection) -> int:
    """Return the number of breakers that are not closed."""
    return sum(count for _, _, count in connection.execute(sql.COUNT_BREAKERS))


def failed_by_time(connection: Connection, asked: Range, now: datetime) -> dict[datetime, int]:
    """Return the failed messages of a range by slot, the newest `FAILED_CAP` at most."""
    parameters = {"width": asked.width.total_seconds(), "from": asked.slots(now)[0], "cap": FAILED_CAP}
    return {at.astimezone(UTC): messages for at, messages in connection.execute(sql.FAILED_BY_TIME, parameters)}


def cause_of(connection: Connection, message_id: int) -> str | None:
    """Return the cause for which a message failed, None without an error or if it is no longer failed."""
    row = connection.execute(sql.SHOW_CAUSE, {"id": message_id}).fetchone()
    return None if row is None else row[0]


def topics(connection: Connection, ranked: Sequence[RankedQueue]) -> Topics:
    """Return the topics with messages that wait in these queues, are in flight or have failed.

    Of each queue the messages that are due first are counted. If there are more, no number of waiting ones is exact.
    `first_id` is the one that is due first, `error_ids` are the newest one of which an attempt has failed, and the
    newest failed one.
    """
    names = [row.queue for row in ranked[: EACH_QUEUE["queues"]]]
    parameters = EACH_QUEUE | {"names": names, "topics": TOPIC_NAMES}
    waiting = {row["topic"]: row for row in rows(connection, sql.WAITING_TOPICS, parameters)}
    held = {row["topic"]: row for row in rows(connection, sql.COUNT_BY_TOPIC, {"cap": CAP})}
    is_capped = dict.fromkeys(("waiting", "due"), any(row["is_capped"] for row in waiting.values()))
    for column in ("in_flight", "failed"):
        is_capped[column] = sum(row[column] for row in held.values()) >= CAP

    def row_of(name: str) -> Row:
        found = waiting.get(name, {}) | held.get(name, {})
        return {
            "topic": name,
            "first_id": found.get("first_id"),
            "error_ids": [found[column] for column in ("tried_id", "failed_id") if found.get(column) is not None],
            **{
                column: Count(found.get(column, 0), "at least" if more else "exactly")
                for column, more in is_capped.items()
            },
        }

    return {name: row_of(name) for name in {*waiting, *held}}, row_of("")


def of_topics(connection: Connection, rows: Iterable[Row]) -> list[ListedMessage]:
    """Return the messages that the rows name."""
    return listed(connection, {one for row in rows for one in (row["first_id"], *row["error_ids"]) if one is not None})


def superseded_by(connection: Connection, message_id: int) -> list[int]:
    """Return the messages that this one supersedes, among those with ids near it."""
    parameters = {"id": message_id, "rows": SEARCH_ROWS, "limit": _SUPERSEDED}
    return [row[0] for row in connection.execute(sql.SUPERSEDED_BY, parameters)]


def is_used(connection: Connection, queue: Row) -> bool:
    """Return whether the queue has messages, a pause or limits, or one of the newest messages. If not, its name may be
    misspelt."""
    signs = ("due", "scheduled", "sending", "lapsed", "paused_at", "rate_count", "max_in_flight")
    newest = MessageFilter(queue=queue["queue"])
    return any(queue[sign] for sign in signs) or bool(search(connection, newest, limit=1).messages)


def acts_on(connection: Connection, message_id: int) -> list[AuditRow] | None:
    """Return the acts on one message, newest first; None if the dashboard's role cannot read the audit."""
    operator = Operator(connection)
    if not operator.reads_audit():
        return None
    with allowing_bitmaps(connection):
        return operator.list_acts(message_id=message_id)


def listed(connection: Connection, ids: Collection[int]) -> list[ListedMessage]:
    """Return these messages, newest first, with the reasons why they wait."""
    return Operator(connection).list_messages(MessageFilter(ids=tuple(ids)), limit=len(ids)) if ids else []


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
    ids: list[int] = []
    looked_at = 0
    # Hidden matches leave room for others of the same rows.
    most_matches = limit + 1 if names_of is None or which.text is None else None
    for found, next_before, looked_at in _windows(connection, which, before_id, most_matches):
        before_id = next_before
        matches = sorted((one for row in found for one in row["ids"] or ()), reverse=True)
        ids += _visible(connection, matches, which.text, names_of)
        if len(ids) > limit or (is_brief and looked_at >= rows_of(which)):
            break
    is_full = len(ids) > limit
    return Found(
        listed(connection, ids[:limit]),
        ids[limit - 1] if is_full else before_id,
        None if is_full else looked_at,
        is_deep=looked_at > rows_of(which),
    )


def _visible(connection: Connection, ids: list[int], text: str | None, names_of: NamesOf | None) -> list[int]:
    """Return the messages whose text is visible. The schema knows no names of a topic: a viewer could guess their
    values letter by letter."""
    if text is None or names_of is None or not ids:
        return ids
    asked = MessageFilter(ids=ids).parameters() | {"before_id": None, "limit": len(ids)}
    doubtful: set[int] = set()
    for row in connection.execute(sql.LIST_MESSAGES, asked).fetchall():
        match = ListedMessage(*row)
        shown = match.redacted(names_of(match.topic))
        texts = "\n".join(filter(None, (shown.destination, shown.skip_reason, shown.last_error)))
        if shown != match and text.lower() not in texts.lower():
            doubtful.add(match.id)
    keyed = {row[0] for row in connection.execute(sql.SEARCH_KEYS, {"ids": list(doubtful), "text": text})}
    return [one for one in ids if one not in doubtful or one in keyed]


def count_near(connection: Connection, which: MessageFilter) -> Near:
    """Count the matches among the newest rows: `rows_of(which)`, or as many as are read in `SEARCH_SECONDS`."""
    near = Near({}, [], 0, is_all=False)
    for found, next_before, looked_at in _windows(connection, which, None, MAX_SHOWN):
        for row in found:
            before, newest_id = near.states.get(row["state"], (0, row["ids"] and row["ids"][0]))
            if row["matching"]:
                near.states[row["state"]] = before + row["matching"], newest_id
        ids = sorted((one for row in found for one in row["ids"] or ()), reverse=True)
        near = Near(near.states, [*near.ids, *ids][:MAX_SHOWN], looked_at, next_before is None)
        if looked_at >= rows_of(which):
            break
    return near


def _windows(
    connection: Connection, which: MessageFilter, before_id: int | None, most_matches: int | None
) -> Iterator[tuple[list[Row], int | None, int]]:
    """Search windows of rows, the newest ones first, until there are no more, or for a time.

    Yields what a window contains by state, the id below which the next window begins, None at the end, and the number
    of rows read so far. The first windows end exactly after `rows_of(which)` rows.
    """
    over_at = time.monotonic() + SEARCH_SECONDS
    before_id, not_below_id = _bounds(connection, which, before_id)
    parameters = {**which.parameters(), "not_below_id": not_below_id, "limit": most_matches}
    most, looked_at = rows_of(which), 0
    window = Window(most)
    while True:
        size = min(window.rows, most - looked_at) if looked_at < most else window.rows
        asked = parameters | {"before_id": before_id, "rows": size}
        try:
            with window.read(), connection.transaction():
                if set(which.states) == {State.SENDING}:
                    # They are few, and have an index of their own.
                    asked["ids"] = [one for (one,) in connection.execute(sql.IN_FLIGHT_IDS, asked).fetchall()]
                found = rows(connection, sql.SEARCH_WINDOW, asked)
        except psycopg.errors.QueryCanceled:
            if size == 1:
                raise
            # A search that has read nothing has nowhere to continue.
            if looked_at and time.monotonic() >= over_at:
                return
            continue
        row_count = sum(row["row_count"] for row in found)
        looked_at += row_count
        before_id = min(row["last_id"] for row in found) if row_count == size else None
        yield found, before_id, looked_at
        if before_id is None or time.monotonic() >= over_at:
            return


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
    low, high = 1, value(connection, sql.NEWEST_ID) + 1
    while low < high:
        middle = (low + high) // 2
        row = connection.execute(sql.FIRST_FROM, {"id": middle}).fetchone()
        if row is None or row[0] >= high or row[1] >= moment:
            high = middle
        else:
            low = row[0] + 1
    return int(high)

"""The data that all pages of a dashboard share: database, redacted names, bulk actions and cached counts."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, cast

import anyio
import psycopg
from starlette.requests import Request

from pgoutbox.dashboard import reads
from pgoutbox.dashboard.bulk import Bulks
from pgoutbox.dashboard.credentials import VIEWER, Viewer
from pgoutbox.dashboard.database import ANSWER_SECONDS, Connection, Database, UnavailableError
from pgoutbox.dashboard.history import History
from pgoutbox.dashboard.live import ChangeFeed
from pgoutbox.dashboard.rendering import dashboard_in
from pgoutbox.database import sql
from pgoutbox.doctor import Finding, Level, examine_delivery
from pgoutbox.doctor.context import RankedQueue
from pgoutbox.doctor.runner import FINDING_PROBLEMS
from pgoutbox.errors import PgOutboxError
from pgoutbox.message import State
from pgoutbox.operations import AuditRow, FailureGroup, ListedMessage, MessageFilter, Operator, Redirects
from pgoutbox.outbox import Outbox
from pgoutbox.redaction import redact_text
from pgoutbox.settings import Settings
from pgoutbox.text import Count

# The overview is cached for this time, because all viewers refresh at once when something changes.
_FRESH_SECONDS: Final = 1.0
_FRESH_TOTALS_SECONDS: Final = 5.0
_WAIT_FOR_TOTALS_SECONDS: Final = 1.0
# The checks of the doctor that have findings about one queue or topic.
_CHECKS_ABOUT: Final = {"queue": ("due", "undelivered"), "topic": ("due", "failed")}

_FACETS: Final = 8
_COUNTED: Final[Mapping[tuple[tuple[State, ...], reads.Part | None], tuple[str, tuple[str, ...]]]] = {
    ((State.PENDING,), "now"): ("due", ("due",)),
    ((State.PENDING,), None): ("waiting", ("due", "scheduled")),
    ((State.SENDING,), None): ("in_flight", ("sending", "lapsed")),
    ((State.FAILED,), None): ("failed", ()),
}
"""The number of a topic, and those of a queue together, that count their messages in a tab."""

_T = TypeVar("_T")
_Shown = TypeVar("_Shown", ListedMessage, FailureGroup, AuditRow)


Facets: TypeAlias = dict[str, list[tuple[str, Count | None]]]
"""The values to choose from by parameter, with their numbers in the tab, without regard to other filters."""


class Tab(NamedTuple):
    """A part of the messages. `total` counts its messages without regard to other filters."""

    name: str
    states: tuple[State, ...]
    due: reads.Part | None
    total: Count | None = None


class Notices(NamedTuple):
    """The warnings of every page."""

    redirects: Redirects
    is_copy: bool


class Dashboard:
    """The state of one dashboard application. Requests get it from `dashboard_of`."""

    def __init__(self, settings: Settings, outbox: Outbox | None) -> None:
        self.settings = settings
        self.database = Database(settings)
        self.bulks = Bulks(self.database)
        self.feed = ChangeFeed(settings)
        self.outbox = outbox
        self.history = History()
        self._known: dict[str, tuple[float, Any]] = {}
        self._one_reads: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)

    def names_of(self, topic: str | None) -> Sequence[str]:
        """Return the names that are hidden in messages of this topic; None means text that belongs to no topic."""
        names = self.settings.redacted_names
        topics = {} if self.outbox is None else self.outbox.topics
        if topic is None:
            return (*names, *(name for known in topics.values() for name in known.redact))
        return (*names, *topics[topic].redact) if topic in topics else names

    def redacted(self, rows: Iterable[_Shown]) -> list[_Shown]:
        """Return the rows without the values that are hidden in their topics."""
        return [row.redacted(self.names_of(getattr(row, "topic", None))) for row in rows]

    async def fresh(self, name: str, load: Callable[[Connection], _T], *, seconds: float = _FRESH_SECONDS) -> _T:
        """Return what `load` has read under this name within these seconds. One request at a time reads it."""
        try:
            # One timeout for the wait and the query: if a query fails, waiting requests do not each wait in turn.
            with anyio.fail_after(ANSWER_SECONDS):
                async with self._one_reads[name]:
                    read_at, found = self._known.get(name, (-math.inf, None))
                    if time.monotonic() - read_at <= seconds:
                        return cast("_T", found)
                    return await self.database.read(lambda one: self._kept(name, seconds, lambda: load(one)))
        except TimeoutError:
            raise UnavailableError("the database did not answer in time; try again") from None

    async def notices(self) -> Notices:
        """Return the redirects that are on, and whether the database is a copy, at most a second old."""
        return await self.fresh(
            "notices",
            lambda connection: Notices(Operator(connection).redirects(), reads.value(connection, sql.IS_COPY)),
        )

    async def totals(self) -> Mapping[str, Any] | None:
        """Return the numbers in the header of every page, at most five seconds old.

        No page depends on them: if the database does not tell them within a second, they are those of the last answer,
        or None.
        """
        with anyio.move_on_after(_WAIT_FOR_TOTALS_SECONDS):
            with contextlib.suppress(PgOutboxError, psycopg.Error):
                return await self.fresh("totals", self._load_totals, seconds=_FRESH_TOTALS_SECONDS)
        _, last = self._known.get("totals", (0.0, None))
        self._known["totals"] = time.monotonic(), last  # The next pages do not wait again.
        return cast("Mapping[str, Any] | None", last)

    def _load_totals(self, connection: Connection) -> Mapping[str, Any]:
        found = self.findings(connection, FINDING_PROBLEMS, seconds=_FRESH_TOTALS_SECONDS)
        opened = reads.count_open(connection)
        return {
            "problems": sum(finding.level is Level.PROBLEM for finding in found),
            "due": reads.count_pending(connection, "now")["now"],
            "in_flight": opened[State.SENDING],
            "failed": opened[State.FAILED],
            "breakers": reads.count_breakers(connection),
        }

    def findings_about(self, connection: Connection, what: Literal["queue", "topic"], name: str) -> list[Finding]:
        """Return the findings about a queue or a topic, at most five seconds old."""
        found = self.findings(connection, _CHECKS_ABOUT[what], seconds=_FRESH_TOTALS_SECONDS)
        return [finding for finding in found if name in finding.about.get(what, "").split(", ")]

    def findings(
        self, connection: Connection, checks: Collection[str] | None = None, *, seconds: float = _FRESH_SECONDS
    ) -> list[Finding]:
        """Return the findings of the last seconds, or those of now by these checks, by default all.

        Their first sentences are redacted.
        """

        def load() -> list[Finding]:
            queues, hidden = self.ranked_queues(connection, seconds=seconds), self.names_of(None)
            found = examine_delivery(connection, self.settings, self.outbox, queues=queues, checks=checks)
            return [dataclasses.replace(finding, what=redact_text(finding.what, hidden)) for finding in found]

        return self._kept("findings", seconds, load, keeps=checks is None)

    def ranked_queues(self, connection: Connection, *, seconds: float = _FRESH_SECONDS) -> list[RankedQueue]:
        """Return the queues as they were within these seconds, late ones first. The parts of a page share them."""
        return self._kept("ranked queues", seconds, lambda: reads.rank_queues(connection))

    def tabs(self, connection: Connection, which: MessageFilter | None = None) -> list[Tab]:
        """Return the tabs of the messages with their counts, at most a second old.

        One more without a count, if the filter has states that no tab has.
        """
        counted = self._kept("tabs", _FRESH_SECONDS, lambda: _count_tabs(connection))
        if which is None or any((tab.states, tab.due) == (tuple(which.states), which.due) for tab in counted):
            return counted
        return [*counted, Tab(", ".join(which.states) or "pending", tuple(which.states), which.due)]

    def topics(self, connection: Connection, *, seconds: float = _FRESH_SECONDS) -> reads.Topics:
        """Return the topics with messages, at most so many seconds old."""
        return self._kept(
            "topics", seconds, lambda: reads.topics(connection, self.ranked_queues(connection, seconds=seconds))
        )

    def facets(self, connection: Connection, which: MessageFilter) -> Facets:
        """Return the topics and queues to choose from for this filter, at most five seconds old."""
        of_topic, of_queue = _COUNTED.get((tuple(which.states), which.due), ("", ()))
        seconds = _FRESH_TOTALS_SECONDS
        topics: Mapping[str, reads.Row] = {}
        queues: Sequence[reads.Row] = ()
        if of_topic in ("due", "waiting"):
            topics, _ = self.topics(connection, seconds=seconds)
        elif of_topic:
            topics, _ = self._kept("held topics", seconds, lambda: reads.topics(connection, ()))
        if of_queue:
            queues = self._kept("queues", seconds, lambda: self._few_queues(connection))
        by_topic = {name: row[of_topic] for name, row in topics.items()}
        by_queue = {row["queue"]: reads.capped(sum(row[name] for name in of_queue), reads.QUEUE_CAP) for row in queues}
        return {"topic": _most(by_topic, which.topic), "queue": _most(by_queue, which.queue)}

    def _few_queues(self, connection: Connection) -> list[reads.Row]:
        """Return the queues with messages, a pause or limits if they are at most `MAX_QUEUES`, else none."""
        names = [row.queue for row in self.ranked_queues(connection, seconds=_FRESH_TOTALS_SECONDS)]
        return reads.queues(connection, names, reads.QUEUE_CAP) if len(names) <= reads.MAX_QUEUES else []

    def _kept(self, name: str, seconds: float, load: Callable[[], _T], *, keeps: bool = True) -> _T:
        """Return the value that was loaded under this name in the last `seconds`, or load it now."""
        asked_at, known = time.monotonic(), self._known
        read_at, found = known.get(name, (-math.inf, None))
        if asked_at - read_at > seconds:
            found = load()
            if keeps:
                known[name] = asked_at, found  # An act meanwhile has replaced it.
        return cast("_T", found)

    def forget(self) -> None:
        """Drop the cached data."""
        self._known = {}

    def close(self) -> None:
        """Stop bulk actions and close idle connections. Committed changes remain."""
        self.bulks.stop()
        self.database.close()


def _count_tabs(connection: Connection) -> list[Tab]:
    """Return the tabs with their counts."""
    states = reads.count_states(connection)
    pending = reads.count_pending(connection, "now", "later", "again")
    return [
        Tab("all", (), None, sum(states.values(), start=Count(0))),
        Tab("due", (State.PENDING,), "now", pending["now"]),
        Tab("scheduled", (State.PENDING,), "later", pending["later"]),
        Tab("retrying", (State.PENDING,), "again", pending["again"]),
        Tab("in flight", (State.SENDING,), None, states[State.SENDING]),
        *(
            Tab(state.value, (state,), None, states[state])
            for state in (State.FAILED, State.SENT, State.SKIPPED, State.CANCELLED)
        ),
    ]


def _most(counts: Mapping[str, Count], chosen: str | None) -> list[tuple[str, Count | None]]:
    """Return the names with the most messages first, and the chosen one; none if there is nothing to choose from."""
    names = sorted((name for name in counts if counts[name].messages), key=lambda name: -counts[name].messages)
    shown: list[tuple[str, Count | None]] = [(name, counts[name]) for name in names[:_FACETS]]
    if chosen is not None and all(name != chosen for name, _ in shown):
        shown.append((chosen, counts.get(chosen)))
    return shown if len(shown) > 1 or chosen is not None else []


def dashboard_of(request: Request) -> Dashboard:
    """Return the dashboard of a request."""
    return cast("Dashboard", dashboard_in(request))


def viewer_of(request: Request) -> Viewer:
    """Return the viewer of a request."""
    return cast("Viewer", request.scope[VIEWER])

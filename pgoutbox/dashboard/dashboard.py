"""The state that the pages of one application share: database, redacted names, bulk actions, overview."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar, cast

import anyio
import psycopg

from pgoutbox.dashboard import reads
from pgoutbox.dashboard.bulk import Bulks
from pgoutbox.dashboard.charts import TopicFailures, failures_by_topic
from pgoutbox.dashboard.database import ANSWER_SECONDS, Database, UnavailableError
from pgoutbox.dashboard.history import History
from pgoutbox.dashboard.live import ChangeFeed
from pgoutbox.dashboard.tabs import Facets, Tab, count_tabs, facets_of
from pgoutbox.doctor import Finding, Level, examine_delivery
from pgoutbox.doctor.runner import FINDING_PROBLEMS
from pgoutbox.errors import PgOutboxError
from pgoutbox.message import State
from pgoutbox.operations import Operator
from pgoutbox.redaction import redact_text
from pgoutbox.text import Count

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from datetime import datetime

    from starlette.requests import Request

    from pgoutbox.dashboard.history import Latencies, Range
    from pgoutbox.dashboard.types import Connection, Viewer
    from pgoutbox.doctor.context import RankedQueue
    from pgoutbox.operations import MessageFilter, Redirects
    from pgoutbox.outbox import Outbox
    from pgoutbox.settings import Settings

# The overview is cached for this time, because all viewers refresh at once when something changes.
_FRESH_SECONDS: Final = 1.0
_FRESH_TOTALS_SECONDS: Final = 5.0
_WAIT_FOR_TOTALS_SECONDS: Final = 1.0
_QUEUES: Final = 10
# Those that have findings about one queue or topic.
_CHECKS_ABOUT: Final = {"queue": ("due", "undelivered"), "topic": ("due", "failed")}

_T = TypeVar("_T")


class Overview(NamedTuple):
    """The data of the overview page."""

    now: datetime
    problems: list[Finding]
    states: Mapping[State, Count]
    queues: reads.Queues
    workers: list[reads.WorkerRow]
    breaker_count: int
    failures: list[TopicFailures]
    sent: Mapping[datetime, Latencies]
    failed: Mapping[datetime, int]


class Notices(NamedTuple):
    """The warnings of every page."""

    redirects: Redirects
    is_copy: bool


class Totals(NamedTuple):
    """The numbers in the header of every page."""

    problems: int
    due: Count
    in_flight: Count
    failed: Count
    breakers: int


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
        self._one_reads = anyio.Lock()
        self._one_counts = anyio.Lock()

    def names_of(self, topic: str | None) -> Sequence[str]:
        """Return the names that are hidden in messages of this topic; None means text that belongs to no topic."""
        names = self.settings.redacted_names
        topics = {} if self.outbox is None else self.outbox.topics
        if topic is None:
            return (*names, *(name for known in topics.values() for name in known.redact))
        return (*names, *topics[topic].redact) if topic in topics else names

    async def overview(self, asked: Range) -> Overview:
        """Return the data of the overview page with a chart of this range, at most a second old."""
        try:
            # One timeout for the wait and the query: if a query fails, waiting requests do not each wait in turn.
            with anyio.fail_after(ANSWER_SECONDS):
                async with self._one_reads:
                    return await self._fresh(asked.name, lambda connection: self._load_overview(connection, asked))
        except TimeoutError:
            raise UnavailableError("the database did not answer in time; try again") from None

    def _load_overview(self, connection: Connection, asked: Range) -> Overview:
        now, ranked = reads.now(connection), self.ranked_queues(connection, seconds=0)
        return Overview(
            now,
            self.findings(connection),
            reads.count_states(connection),
            reads.queues(connection, ranked, limit=_QUEUES),
            reads.running_workers(connection),
            reads.count_breakers(connection),
            failures_by_topic(reads.failed_lately(connection), now),
            self.history.sent(connection, now, asked),
            reads.failed_by_time(connection, asked, now),
        )

    async def notices(self) -> Notices:
        """Return the redirects that are on, and whether the database is a copy, at most a second old."""
        return await self._fresh("notices", _read_notices)

    async def totals(self) -> Totals | None:
        """Return the numbers in the header of every page, at most five seconds old.

        No page depends on them: if the database does not tell them within a second, they are those of the last answer,
        or None.
        """
        with anyio.move_on_after(_WAIT_FOR_TOTALS_SECONDS):
            async with self._one_counts:
                with contextlib.suppress(PgOutboxError, psycopg.Error):
                    return await self._fresh("totals", self._load_totals, seconds=_FRESH_TOTALS_SECONDS)
        _, last = self._known.get("totals", (0.0, None))
        self._known["totals"] = time.monotonic(), last  # The next pages do not wait again.
        return cast("Totals | None", last)

    def _load_totals(self, connection: Connection) -> Totals:
        found = self.findings(connection, FINDING_PROBLEMS, seconds=_FRESH_TOTALS_SECONDS)
        problems = sum(finding.level is Level.PROBLEM for finding in found)
        due, opened = reads.count_pending(connection, "now")["now"], reads.count_open(connection)
        breakers = reads.count_breakers(connection)
        return Totals(problems, due, opened[State.SENDING], opened[State.FAILED], breakers)

    async def findings_about(self, what: Literal["queue", "topic"], name: str) -> list[Finding]:
        """Return the findings about a queue or a topic, without hidden values, at most five seconds old."""
        checks = _CHECKS_ABOUT[what]
        found = await self.database.read(
            lambda connection: self.findings(connection, checks, seconds=_FRESH_TOTALS_SECONDS)
        )
        return self.redacted([finding for finding in found if finding.about.get(what) == name])

    def redacted(self, findings: Sequence[Finding]) -> list[Finding]:
        """Return the findings without hidden values."""
        hidden = self.names_of(None)
        return [dataclasses.replace(finding, what=redact_text(finding.what, hidden)) for finding in findings]

    def findings(
        self, connection: Connection, checks: Collection[str] | None = None, *, seconds: float = _FRESH_SECONDS
    ) -> list[Finding]:
        """Return the findings of so many seconds ago at most, or those of now by these checks, by default all."""

        def load() -> list[Finding]:
            queues = self.ranked_queues(connection, seconds=seconds)
            return examine_delivery(connection, self.settings, self.outbox, queues=queues, checks=checks)

        return self._kept("findings", seconds, load, keeps=checks is None)

    def ranked_queues(self, connection: Connection, *, seconds: float = _FRESH_SECONDS) -> list[RankedQueue]:
        """Return the queues of so many seconds ago at most, late ones first: the parts of a page share them."""
        return self._kept("ranked queues", seconds, lambda: reads.rank_queues(connection))

    def _kept(self, name: str, seconds: float, load: Callable[[], _T], *, keeps: bool = True) -> _T:
        asked_at = time.monotonic()
        read_at, found = self._known.get(name, (-math.inf, None))
        if asked_at - read_at > seconds:
            found = load()
            if keeps:
                self._known[name] = asked_at, found
        return cast("_T", found)

    async def tabs(self) -> list[Tab]:
        """Return the tabs of the messages with their counts, at most a second old."""
        return await self._fresh("tabs", count_tabs)

    async def topics(self, *, seconds: float = _FRESH_SECONDS) -> reads.Topics:
        """Return the topics with messages, at most so many seconds old."""

        def load(connection: Connection) -> reads.Topics:
            return reads.topics(connection, self.ranked_queues(connection, seconds=seconds))

        return await self._fresh("topics", load, seconds=seconds)

    async def facets(self, which: MessageFilter) -> Facets:
        """Return the topics and queues to choose from for this filter, at most five seconds old."""
        queues: Sequence[reads.QueueRow] = ()
        if which.states in [(State.PENDING,), (State.SENDING,)]:
            queues = await self._fresh("queues", reads.few_queues, seconds=_FRESH_TOTALS_SECONDS)
        match which.states:
            case (State.PENDING,):
                topics = (await self.topics(seconds=_FRESH_TOTALS_SECONDS)).rows
            case (State.SENDING,) | (State.FAILED,):
                held = await self._fresh("held topics", reads.held_topics, seconds=_FRESH_TOTALS_SECONDS)
                topics = held.rows
            case _:
                topics = {}
        return facets_of(topics, queues, which)

    async def _fresh(self, name: str, load: Callable[[Connection], _T], *, seconds: float = _FRESH_SECONDS) -> _T:
        """Return what `load` has read under this name so many seconds ago at most, or reads now."""
        asked_at = time.monotonic()
        read_at, found = self._known.get(name, (-math.inf, None))
        if asked_at - read_at > seconds:
            found = await self.database.read(load)
            self._known[name] = asked_at, found
        return cast("_T", found)

    def forget(self) -> None:
        """Drop the cached data."""
        self._known.clear()

    def close(self) -> None:
        """Stop bulk actions and close idle connections. Committed changes remain."""
        self.bulks.stop()
        self.database.close()


def _read_notices(connection: Connection) -> Notices:
    return Notices(Operator(connection).redirects(), reads.is_copy(connection))


def dashboard_of(request: Request) -> Dashboard:
    """Return the dashboard of a request."""
    return cast("Dashboard", request.app.state.dashboard)


def viewer_of(request: Request) -> Viewer:
    """Return the viewer of a request."""
    viewer: Viewer = request.scope["pgoutbox.viewer"]
    return viewer

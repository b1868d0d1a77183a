"""The state that the pages of one application share: database, redacted names, bulk actions, overview."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import anyio

from pgoutbox.dashboard import reads
from pgoutbox.dashboard.bulk import Bulks
from pgoutbox.dashboard.charts import Chart, TopicFailures, failures_by_minute, failures_by_topic
from pgoutbox.dashboard.database import ANSWER_SECONDS, Database, UnavailableError
from pgoutbox.dashboard.history import History, Minute
from pgoutbox.dashboard.live import ChangeFeed
from pgoutbox.dashboard.tabs import Tab, count_tabs
from pgoutbox.doctor import Finding, examine_delivery
from pgoutbox.operations import Operator

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from starlette.requests import Request

    from pgoutbox.dashboard.charts import TopicFailures
    from pgoutbox.dashboard.types import Connection, Viewer
    from pgoutbox.operations import Redirects
    from pgoutbox.outbox import Outbox
    from pgoutbox.settings import Settings

# The overview is cached for this time, because all viewers refresh at once when something changes.
_FRESH_SECONDS: Final = 1.0


class Overview(NamedTuple):
    """The data of the overview page."""

    now: datetime
    problems: list[Finding]
    states: list[reads.StateCount]
    queues: list[reads.QueueRow]
    workers: list[reads.WorkerRow]
    breakers: list[reads.BreakerRow]
    failures: list[TopicFailures]
    failed_chart: Chart
    minutes: list[Minute]


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
        self._history = History()
        self._overview: tuple[float, Overview] | None = None
        self._notices: tuple[float, Notices] | None = None
        self._tabs: tuple[float, list[Tab]] | None = None
        self._one_reads = anyio.Lock()

    def names_of(self, topic: str | None) -> Sequence[str]:
        """Return the names that are hidden in messages of this topic; None means text that belongs to no topic."""
        names = self.settings.redacted_names
        topics = {} if self.outbox is None else self.outbox.topics
        if topic is None:
            return (*names, *(name for known in topics.values() for name in known.redact))
        return (*names, *topics[topic].redact) if topic in topics else names

    async def overview(self) -> Overview:
        """Return the data of the overview page, at most a second old."""
        try:
            # One timeout for the wait and the query: if a query fails, waiting requests do not each wait in turn.
            with anyio.fail_after(ANSWER_SECONDS):
                async with self._one_reads:
                    known = self._overview
                    if known is None or time.monotonic() - known[0] > _FRESH_SECONDS:
                        known = (time.monotonic(), await self.database.read(self._load_overview))
                        self._overview = known
                    return known[1]
        except TimeoutError:
            raise UnavailableError("the database did not answer in time; try again") from None

    def _load_overview(self, connection: Connection) -> Overview:
        now = reads.now(connection)
        failed = reads.failed_lately(connection)
        return Overview(
            now,
            examine_delivery(connection, self.settings, self.outbox),
            reads.count_states(connection),
            reads.live_queues(connection),
            reads.running_workers(connection),
            reads.breakers(connection),
            failures_by_topic(failed, now),
            failures_by_minute(failed, now),
            self._history.of_last_hour(connection, now),
        )

    async def notices(self) -> Notices:
        """Return the redirects that are on, and whether the database is a copy, at most a second old."""
        known = self._notices
        if known is None or time.monotonic() - known[0] > _FRESH_SECONDS:
            asked_at = time.monotonic()
            known = (asked_at, await self.database.read(_read_notices))
            self._notices = known
        return known[1]

    async def tabs(self) -> list[Tab]:
        """Return the tabs of the messages with their counts, at most a second old."""
        known = self._tabs
        if known is None or time.monotonic() - known[0] > _FRESH_SECONDS:
            asked_at = time.monotonic()
            known = (asked_at, await self.database.read(count_tabs))
            self._tabs = known
        return known[1]

    def forget(self) -> None:
        """Drop the cached data."""
        self._overview = None
        self._notices = None
        self._tabs = None

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

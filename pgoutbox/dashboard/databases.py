"""The dashboards of many databases: the list of them on the first page, and one of each below its name.

A database that is slow or down delays neither the list nor the others: the list shows the last look at each, and a view
of it begins to look again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple, cast

import anyio.to_thread
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pgoutbox.dashboard import reads
from pgoutbox.dashboard.dashboard import Dashboard
from pgoutbox.dashboard.database import Connection
from pgoutbox.dashboard.rendering import DASHBOARD, DATABASE, ROOT, render
from pgoutbox.dashboard.responses import TELEMETRY, sentence
from pgoutbox.database import sql
from pgoutbox.databases import read_databases, settings_of
from pgoutbox.doctor import Level, verdict
from pgoutbox.doctor.runner import FINDING_PROBLEMS
from pgoutbox.errors import PgOutboxError
from pgoutbox.message import State
from pgoutbox.observability.events import LogEvent
from pgoutbox.outbox import Outbox
from pgoutbox.redaction import redact_text
from pgoutbox.settings import Settings
from pgoutbox.text import Count, describe

_LIST_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 60.0
_IDLE_SECONDS: Final = 60.0
_WAIT_SECONDS: Final = 0.5  # For a few fast databases, so that the first view has them.
_AT_ONCE: Final = 4
_CHECKS: Final = ("workers", *FINDING_PROBLEMS)


class Look(NamedTuple):
    """The result of a look at a database. It has numbers if the database has answered."""

    is_up: bool
    level: Level
    verdict: str
    workers: int = 0
    due: Count = Count(0)
    failed: Count = Count(0)
    oldest_due_seconds: float | None = None
    looked_at: float = 0.0

    @property
    def age_seconds(self) -> float:
        """The age of the look, in seconds."""
        return time.monotonic() - self.looked_at


class Databases:
    """The dashboards of all databases by their names, and the last look at each."""

    def __init__(self, settings: Settings, outbox: Outbox | None) -> None:
        self._settings = settings
        self._outbox = outbox
        self._dashboards: dict[str, Dashboard] = {}
        self._used_at: dict[str, float] = {}
        self.looks: dict[str, Look] = {}
        self._round: asyncio.Future[list[None]] | None = None
        self._listed_at = -math.inf
        self._follow(self._read_list())

    @property
    def names(self) -> list[str]:
        """The names of all databases, the worst first."""
        return sorted(self._dashboards, key=lambda name: (_urgency(self.looks.get(name)), name))

    async def find(self, name: str) -> Dashboard | None:
        """Return the dashboard of a database. Close the connections of those that nobody has used for a minute."""
        await self.read_list()
        now = time.monotonic()
        if name in self._dashboards:
            self._used_at[name] = now
        for other, used_at in list(self._used_at.items()):
            if now - used_at > _IDLE_SECONDS:
                del self._used_at[other]
                self._dashboards[other].database.close()
        return self._dashboards.get(name)

    async def read_list(self) -> None:
        """Read the list of databases again if it is older than half a minute."""
        if time.monotonic() - self._listed_at < _LIST_SECONDS:
            return
        self._listed_at = time.monotonic()  # Other requests do not wait for it.
        try:
            self._follow(await anyio.to_thread.run_sync(self._read_list))
        except Exception as error:  # noqa: BLE001 - the last list still counts
            text = "the list of databases cannot be read, going on with the last one"
            TELEMETRY.report(logging.ERROR, LogEvent.DATABASES_UNKNOWN, text, reason=describe(error))

    def _read_list(self) -> dict[str, str]:
        return read_databases(self._settings, self._outbox) or {}

    def _follow(self, wanted: dict[str, str]) -> None:
        self._listed_at = time.monotonic()
        for name, dashboard in list(self._dashboards.items()):
            if wanted.get(name) != dashboard.settings.require_dsn():
                self._dashboards.pop(name).close()
                self._used_at.pop(name, None)
                self.looks.pop(name, None)
        for name, dsn in wanted.items():
            if name not in self._dashboards:
                self._dashboards[name] = Dashboard(settings_of(self._settings, name, dsn), self._outbox)

    async def look_again(self) -> None:
        """Begin to look at the databases without a look within a minute, unless a round runs. Wait for a moment."""
        stale = [
            name for name in self._dashboards if name not in self.looks or self.looks[name].age_seconds > _LOOK_SECONDS
        ]
        if stale and (self._round is None or self._round.done()):
            turns = asyncio.Semaphore(_AT_ONCE)
            stale.sort(key=lambda name: self.looks[name].looked_at if name in self.looks else 0.0)
            self._round = asyncio.ensure_future(asyncio.gather(*(self._look_at(name, turns) for name in stale)))
        if self._round is not None:
            await asyncio.wait([self._round], timeout=_WAIT_SECONDS)

    async def _look_at(self, name: str, turns: asyncio.Semaphore) -> None:
        async with turns:
            dashboard = self._dashboards.get(name)
            if dashboard is None:
                return
            try:
                found = await dashboard.database.read(partial(_look, dashboard))
            except PgOutboxError as error:
                found = Look(False, Level.PROBLEM, sentence(str(error)))
            except Exception as error:  # noqa: BLE001 - the others are looked at
                found = Look(False, Level.PROBLEM, f"It cannot be read: {type(error).__name__}.")
            if name not in self._used_at:
                dashboard.database.close()
            if self._dashboards.get(name) is dashboard:
                self.looks[name] = found._replace(looked_at=time.monotonic())

    def close(self) -> None:
        """Close all dashboards."""
        if self._round is not None:
            self._round.cancel()
        for dashboard in self._dashboards.values():
            dashboard.close()


def _look(dashboard: Dashboard, connection: Connection) -> Look:
    ranked = dashboard.ranked_queues(connection)
    findings = dashboard.findings(connection, _CHECKS)
    opened = reads.count_open(connection)
    levels = {finding.level for finding in findings}
    is_copy = bool(reads.value(connection, sql.IS_COPY))
    text = "It is a copy, so workers send nothing from it." if is_copy else verdict(findings)
    return Look(
        True,
        Level.PROBLEM if is_copy or Level.PROBLEM in levels else Level.WARNING if findings else Level.OK,
        redact_text(text, dashboard.names_of(None)),
        workers=sum(worker["ended_at"] is None for worker in reads.running_workers(connection)),
        due=reads.count_pending(connection, "now")["now"],
        failed=opened[State.FAILED],
        oldest_due_seconds=ranked[0].oldest_seconds if ranked and ranked[0].oldest_due_at else None,
    )


def _urgency(look: Look | None) -> tuple[int, int, float]:
    if look is None:
        return 2, 0, 0
    place = {Level.PROBLEM: 0, Level.WARNING: 1}.get(look.level, 3)
    return place, look.is_up, -(look.oldest_due_seconds or 0)


async def show_list(request: Request) -> Response:
    """Show all databases, the worst first."""
    databases = _databases_of(request)
    await databases.read_list()
    await databases.look_again()
    looks = [(name, databases.looks.get(name)) for name in databases.names]
    return render(request, "databases.html", {"looks": looks, "is_reading": any(look is None for _, look in looks)})


async def _show_one(request: Request) -> Response:
    """Add the slash at the end."""
    name = request.path_params["database"]
    await _found(_databases_of(request), name)
    return RedirectResponse(f"{request.scope[ROOT]}/{name}/", status_code=307)


def _databases_of(request: Request) -> Databases:
    return cast("Databases", request.app.state.dashboard)


async def _found(databases: Databases, name: str) -> Dashboard:
    dashboard = await databases.find(name)
    if dashboard is None:
        raise HTTPException(404, f"there is no database {name}")
    return dashboard


class _Chosen:
    """Lets the pages of one dashboard serve the database that the path names."""

    def __init__(self, app: ASGIApp, databases: Databases) -> None:
        self._app = app
        self._databases = databases

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["database"]
        scope[DASHBOARD] = await _found(self._databases, name)
        scope[DATABASE] = name
        await self._app(scope, receive, send)


def routes_of(databases: Databases, pages: Sequence[BaseRoute]) -> list[BaseRoute]:
    """Return the routes of the list, and those of the pages of each database."""
    return [
        Route("/", show_list, name="databases"),
        Route("/{database}", _show_one),
        Mount("/{database}", routes=pages, middleware=[Middleware(_Chosen, databases)]),
    ]

"""The sessions of transactional handlers: how many there may be, and who gets the next one.

An attempt begins with its transaction: no earlier error, and no wait for a connection, may use up an attempt. With too
few connections fewer handlers run, so that the worker's own statements never wait for them. Behind a pooler a handler
therefore begins only while another session of the server is free.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Final

import psycopg

from pgoutbox.database.server import OldPackageError
from pgoutbox.observability.events import LogEvent
from pgoutbox.text import describe
from pgoutbox.worker.backoff import Backoff
from pgoutbox.worker.run_state import RunState
from pgoutbox.worker.transactional.handler_session import HandlerSession

PATIENCE_SECONDS: Final = 5.0
# While there are too few sessions, other messages need the slots.
_SHORT_PATIENCE_SECONDS: Final = 1.0
# So long a pooler may take to give the worker a session, while all others might be used by handlers.
_POOLER_SECONDS: Final = 1.0
_OPENED_AT_ONCE: Final = 4
# A refused login would otherwise be repeated at once, as long as a message waits.
_REFUSED_PAUSE_SECONDS: Final = 0.2
_IDLE_SECONDS: Final = 60.0
# A transaction begins by one short round trip. While it takes twice as long as the shortest one, the process or the
# server has enough to do. If handlers also do little else than talk to the server, another session costs more than it
# helps.
_CROWDED: Final = 2.0
_TALK: Final = 10.0
# If no transaction has begun for so long, all sessions are with slow handlers.
_CROWDED_SECONDS: Final = 0.05
# The shortest round trip is forgotten slowly: the server may have moved.
_FORGOTTEN: Final = 1.001


class NoSessionError(Exception):
    """There is no session for the transaction of an attempt now."""


class HandlerSessions:
    """Opens up to `concurrency` sessions as they are needed and help, and keeps them for a minute."""

    def __init__(self, run: RunState) -> None:
        self._settings = settings = run.settings
        self._telemetry = run.telemetry
        self._stop = run.stop
        self._idle: list[HandlerSession] = []
        self._waiting_count = 0
        self._turn = asyncio.Lock()  # Fair: the attempt that has waited longest gets the next session.
        self._changed = asyncio.Event()
        self._opening: set[asyncio.Task[None]] = set()
        self._open_count = 0  # With those that are being opened.
        self._taken_count = 0
        self._begun_count = 0
        self._limit = settings.concurrency
        self._limited_until = -math.inf
        self._backoff = Backoff(1.0, 60.0)
        self._pooler_turn = asyncio.Lock()
        self._reserve: HandlerSession | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._refusal: str | None = None
        self._least_seconds = math.inf  # The shortest round trip that has begun a transaction,
        self._usual_seconds = 0.0  # an average one,
        self._held_seconds = 0.0  # and an average transaction.
        self._begun_at = -math.inf
        self._look_again: asyncio.TimerHandle | None = None

    async def begin(self, name: str) -> HandlerSession:
        """Return a session with an open transaction under this name. Return it by `put_back` or `abandon`.

        Raises `NoSessionError` after `PATIENCE_SECONDS` at most.
        """
        is_short = self._allowed_count < self._settings.concurrency
        until = _now() + (_SHORT_PATIENCE_SECONDS if is_short else PATIENCE_SECONDS)
        lost_count = 0
        while True:
            session = await self._take(until)
            is_begun = False
            try:
                await self._begin(session, name, until)
                is_begun = True
            except (psycopg.Error, OSError) as error:
                # Sessions may have ended while they were idle, and one connection may break.
                lost_count += not session.was_idle
                if lost_count > 1 or isinstance(error, TimeoutError) or _now() >= until:
                    raise NoSessionError(describe(error)) from error
            finally:
                if not is_begun:
                    self._give_back(session)
            if is_begun:
                self._begun_count += 1
                if self._begun_count > self._limit:  # The shortage is over.
                    self._limit = self._settings.concurrency
                    self._backoff.reset()
                return session

    def put_back(self, session: HandlerSession) -> None:
        """Take back a session whose transaction has ended."""
        self._held_seconds += (_now() - session.begun_at - self._held_seconds) / 10
        self._begun_count -= 1
        self._give_back(session)

    def abandon(self, session: HandlerSession) -> None:
        """Break a session that its handler may still use."""
        session.abandon()
        self._begun_count -= 1
        self._taken_count -= 1
        self._open_count -= 1
        self._changed.set()

    async def close(self) -> None:
        """Close the sessions. Those of running handlers are closed when they come back."""
        self._is_closed = True
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._look_again is not None:
            self._look_again.cancel()
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for session in (*self._idle, *([self._reserve] if self._reserve else [])):
            session.close()
        self._idle.clear()

    @property
    def _allowed_count(self) -> int:
        is_short = self._limit < self._settings.concurrency and _now() < self._limited_until
        return self._limit if is_short else self._settings.concurrency

    @property
    def _has_one(self) -> bool:
        return bool(self._idle) and self._taken_count < self._allowed_count

    async def _take(self, until: float) -> HandlerSession:
        if self._waiting_count or not self._has_one:
            await self._wait_for_one(until)
        self._taken_count += 1
        return self._idle.pop()

    async def _wait_for_one(self, until: float) -> None:
        self._waiting_count += 1
        try:
            async with asyncio.timeout_at(until):
                self._open_more()  # Others may have the turn.
                async with self._turn:
                    while not self._has_one:
                        self._open_more()
                        self._changed.clear()
                        await self._changed.wait()
        except TimeoutError:
            raise NoSessionError(self._refusal or "no connection is free") from None
        finally:
            self._waiting_count -= 1

    def _open_more(self) -> None:
        while (
            not self._idle
            and len(self._opening) < min(self._waiting_count, _OPENED_AT_ONCE)
            and self._open_count < self._allowed_count
            and not self._is_closed
            and not self._is_crowded()
        ):
            self._open_count += 1
            task = asyncio.create_task(self._open(), name="pgoutbox-handler-session")
            self._opening.add(task)

    def _is_crowded(self) -> bool:
        """Whether another session would not help now. The attempt that waits asks again in a moment."""
        is_crowded = (
            self._usual_seconds > self._least_seconds * _CROWDED
            and self._held_seconds < self._usual_seconds * _TALK
            and _now() - self._begun_at < _CROWDED_SECONDS
        )
        if is_crowded and self._look_again is None:
            self._look_again = asyncio.get_running_loop().call_later(_CROWDED_SECONDS, self._ask_again)
        return is_crowded

    def _ask_again(self) -> None:
        self._look_again = None
        self._changed.set()

    async def _open(self) -> None:
        """Open one more session. If that fails, no more are opened for a while, unless there is none."""
        task = asyncio.current_task()
        session = None
        try:
            session = await HandlerSession.open(self._settings)
        except (psycopg.Error, OSError) as error:
            self._refusal = describe(error)
            self._limit_to(self._open_count - 1, error)
            await asyncio.sleep(_REFUSED_PAUSE_SECONDS)
        finally:
            self._opening = {one for one in self._opening if one is not task}
            if session is None:
                self._open_count -= 1
            else:
                self._refusal = None
                self._idle.append(session)
            self._changed.set()

    async def _begin(self, session: HandlerSession, name: str, until: float) -> None:
        if not session.is_pooled:
            await self._begin_in_time(session, name, until - _now())
            return
        # One after the other: if the pooler has no session left beside those that begin, none of them could go on.
        async with asyncio.timeout_at(until):
            await self._pooler_turn.acquire()
        try:
            if self._begun_count >= self._allowed_count:
                raise NoSessionError("the pooler has no session left for the worker itself")
            await self._begin_in_time(session, name, min(until - _now(), _POOLER_SECONDS))
            try:
                await self._prove_reserve(until)
            except BaseException as error:
                session.close()
                if not isinstance(error, (psycopg.Error, OSError)):
                    raise
                self._limit_to(self._begun_count, error)
                raise NoSessionError(describe(error)) from error
        finally:
            self._pooler_turn.release()

    async def _begin_in_time(self, session: HandlerSession, name: str, seconds: float) -> None:
        began_at = _now()
        try:
            await session.begin(name, seconds=max(seconds, 0.01))
        except BaseException as error:
            session.close()
            if isinstance(error, TimeoutError):
                self._limit_to(self._begun_count, error)
            raise
        self._begun_at = _now()
        seconds = self._begun_at - began_at
        self._least_seconds = min(seconds, self._least_seconds * _FORGOTTEN)
        self._usual_seconds += (seconds - self._usual_seconds) / 10
        session.begun_at = self._begun_at

    async def _prove_reserve(self, until: float) -> None:
        """Prove that the pooler has one more session: claims, leases and outcomes need it while handlers run."""
        try:
            if self._reserve is None:
                async with asyncio.timeout_at(until):
                    self._reserve = await HandlerSession.open(self._settings)
            await self._reserve.require_home(seconds=_POOLER_SECONDS)
        except BaseException:
            reserve, self._reserve = self._reserve, None
            if reserve is not None:
                reserve.close()
            raise

    def _limit_to(self, count: int, error: BaseException) -> None:
        """Run no more handlers than this for a while. End the run if the schema refuses this package."""
        if isinstance(error, OldPackageError):
            self._stop(error)
            return
        self._limit = max(1, count)
        if _now() >= self._limited_until:
            self._limited_until = _now() + self._backoff.next()
            self._telemetry.report(
                logging.WARNING,
                LogEvent.HANDLERS_LIMITED,
                "too few connections for transactional handlers, fewer run at once",
                limit=self._limit,
                reason=describe(error),
            )

    def _give_back(self, session: HandlerSession) -> None:
        self._taken_count -= 1
        if not session.is_free or self._is_closed or self._open_count > self._allowed_count:
            session.close()
            self._open_count -= 1
        else:
            session.was_idle = True
            session.idle_since = _now()
            self._idle.append(session)
            if self._idle_timer is None:
                self._idle_timer = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._close_idle)
        self._changed.set()

    def _close_idle(self) -> None:
        long_ago = _now() - _IDLE_SECONDS
        while self._idle and self._idle[0].idle_since <= long_ago:
            self._idle.pop(0).close()
            self._open_count -= 1
        later = None
        if self._idle:
            later = asyncio.get_running_loop().call_at(self._idle[0].idle_since + _IDLE_SECONDS, self._close_idle)
        self._idle_timer = later


def _now() -> float:
    return asyncio.get_running_loop().time()

"""Redirects of one worker: each content passes here right before its transport, and follows the redirect of its topic.

The redirect of the settings is fixed. An operator's redirect is a row of `pgoutbox.redirect`. Nothing is handed over by
an answer of the database that is older than two seconds. So a redirect holds for every hand-over that begins more than
two seconds after its commit. The row is read at most once a second, and only while contents are handed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import psycopg

from pgoutbox.clock import elapsed_clock
from pgoutbox.database import sql
from pgoutbox.database.store import Store
from pgoutbox.database.worker_connection import kind_of
from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Message, Outcome, Snooze, Suppressed
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.settings import Settings
from pgoutbox.transports import Content, Transport, current_gate, scheme_of
from pgoutbox.transports.redirect import REDIRECT_SECONDS, Redirect, RedirectRules, covering, held_back

_REFRESH_SECONDS = 1.0


class RedirectUnknownError(Exception):
    """The database did not answer, or the target that it names is invalid. Nothing may be handed over."""


class Redirects:
    """The redirects of one run of a worker."""

    def __init__(
        self, settings: Settings, store: Store, telemetry: Telemetry, *, clock: Callable[[], float] = elapsed_clock
    ) -> None:
        self._store = store
        self._telemetry = telemetry
        self._clock = clock
        self._rules = RedirectRules.of(settings.redirect)
        self._redirects: tuple[Redirect, ...] = ()
        self._read_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self._noted: tuple[str, str, str | None] | None = None

    async def close(self) -> None:
        """Stop reading."""
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, RedirectUnknownError):
                await self._reading

    async def send(self, transport: Transport, message: Message[object], content: Content) -> Outcome:
        """Call the transport, with the gate of its attempt. The gate also holds contents back because of a redirect."""
        ensure_lease = current_gate.get()
        follows = getattr(transport, "follows_redirect", False)  # See `FollowsRedirect`.

        async def gate() -> Redirect | None:
            # Either answer may be late. Meanwhile the lease can be lost, and a redirect be switched on.
            while True:
                try:
                    await self.current()
                except RedirectUnknownError as error:
                    raise held_back(message, str(error)) from error
                await ensure_lease()
                if self._clock() - self._read_at < REDIRECT_SECONDS:
                    break
            redirect = covering(self._redirects, message.topic) if self._redirects else None
            if redirect is not None and not follows:
                # Kept, not skipped: if the redirect is a mistake, all messages are sent after its end.
                scheme = content.scheme if message.destination is None else scheme_of(message.destination)
                text = f"not sent: a redirect is on, and the transport of {scheme!r} does not follow it"
                raise held_back(message, text)
            return redirect

        token = current_gate.set(gate)
        try:
            await gate()
            return await transport.send(message, content)
        except (Snooze, Suppressed) as refusal:
            return refusal
        finally:
            current_gate.reset(token)

    async def current(self) -> tuple[Redirect, ...]:
        """Return the redirects that are on, the most important one first. Raises `RedirectUnknownError`.

        Concurrent callers share one query.
        """
        if self._clock() - self._read_at >= _REFRESH_SECONDS:
            if self._reading is None:
                self._reading = asyncio.create_task(self._read())
                self._reading.add_done_callback(lambda task: task.cancelled() or task.exception())
            # The cancellation of a send does not break the connection of this query.
            await asyncio.shield(self._reading)
            # The age counts from the start of the query: a commit during the query may be missing in its answer.
            if self._clock() - self._read_at >= REDIRECT_SECONDS:
                raise RedirectUnknownError("not sent: the redirect is unknown, because the database answers too slowly")
        return self._redirects

    async def _read(self) -> None:
        asked_at = self._clock()
        try:
            ((target, topics, exempt_topics, blackout),) = await self._store.claims.fetch(sql.READ_REDIRECT, {})
            redirects = self._rules.redirects(
                target, tuple(topics or ()), tuple(exempt_topics or ()), blackout=blackout
            )
        except (psycopg.Error, OSError, ConfigurationError) as error:
            self._note_unknown(error)
            raise RedirectUnknownError(f"not sent: the redirect is unknown: {type(error).__name__}") from error
        finally:
            self._reading = None
        self._redirects, self._read_at = redirects, asked_at
        self._note(redirects[0] if redirects else None)

    def _note(self, redirect: Redirect | None) -> None:
        """Log a change of the redirect, once."""
        noted = self._noted
        self._noted = None if redirect is None else (redirect.target, redirect.mail, redirect.blackout)
        if noted == self._noted:
            return
        if redirect is None:
            self._telemetry.report(logging.INFO, LogEvent.REDIRECT_ENDED, "the redirect is off")
            return
        fields = {"target": redirect.target, "mail": redirect.mail}
        if redirect.blackout is None:
            text = "e-mail is redirected, the rest held back"
            self._telemetry.report(logging.WARNING, LogEvent.REDIRECTING, text, **fields)
        else:
            text = "a blackout forbids the redirect that is on; e-mail is held back"
            fields["blackout"] = redirect.blackout
            self._telemetry.report(logging.WARNING, LogEvent.REDIRECT_REFUSED, text, **fields)

    def _note_unknown(self, error: Exception) -> None:
        text = "the redirect could not be read"
        self._telemetry.report(logging.WARNING, LogEvent.REDIRECT_UNKNOWN, text, reason=kind_of(error))

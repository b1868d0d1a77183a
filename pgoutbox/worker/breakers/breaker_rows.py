"""The rows of breakers: each open breaker is a row of `pgoutbox.breaker`, and its statements decide about changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pgoutbox.database import sql
from pgoutbox.database.store import Store
from pgoutbox.settings import BreakerSettings


class BreakerRow(NamedTuple):
    """An open breaker in the database. `retry_seconds` is not positive when it may be probed.

    `opened`: this statement opened it. `probe_id`: this statement granted a probe.
    """

    retry_seconds: float
    cooldown_seconds: float
    last_error: str
    opened: bool
    probe_id: str | None


class BreakerRows:
    """The statements on the rows, each a method. A change may wait for a row that an operator's session has locked."""

    def __init__(self, store: Store, settings: BreakerSettings) -> None:
        self._store = store
        self._settings = settings

    async def failed(self, key: str, *, trips: bool, error: str, alert_queue: str | None) -> BreakerRow | None:
        """Record one failure. Returns the breaker if it is open; `opened` if this call opened it."""
        settings = self._settings
        rows = await self._store.attempts.fetch(
            sql.BREAKER_FAILED,
            {
                "key": key,
                "trips": trips,
                "error": error,
                "cooldown_seconds": settings.cooldown_seconds,
                "max_cooldown_seconds": settings.max_cooldown_seconds,
                "worker": self._store.worker,
                "alert_queue": alert_queue,
                "alert_destinations": self._store.alert_destinations,
            },
        )
        return BreakerRow._make(rows[0]) if rows else None

    async def failures_of_last_run(self) -> dict[str, dict[str, Any]]:
        """Return the memory of each breaker, by its key, that the last run of `run_once` or `drain` hands on."""
        rows = await self._store.claims.fetch(sql.FAILURES_OF_LAST_RUN, {})
        return dict(rows[0][0]) if rows else {}

    async def probe(self, key: str, *, is_early: bool) -> BreakerRow | None:
        """Ask for a probe: granted if the answer has a `probe_id`. None if the breaker is closed.

        It may be granted during the pause only if `is_early`.
        """
        rows = await self._store.attempts.fetch(
            sql.BREAKER_PROBE,
            {
                "key": key,
                "is_early": is_early,
                "probe_timeout_seconds": self._settings.probe_timeout_seconds,
                "worker": self._store.worker,
            },
        )
        return BreakerRow._make(rows[0]) if rows else None

    async def read(self, keys: Sequence[str]) -> dict[str, BreakerRow]:
        """Return those of these breakers that are open."""
        rows = await self._store.claims.fetch(sql.BREAKERS, {"keys": keys})
        return {row[0]: BreakerRow._make(row[1:]) for row in rows}

    async def open_keys(self) -> set[str]:
        """Return the keys of the open breakers."""
        return {key for (key,) in await self._store.claims.fetch(sql.BREAKER_KEYS, {})}

    async def close(
        self, key: str, probe_id: str | None, *, send_seconds: float | None, alert_queue: str | None
    ) -> float | None:
        """Close the breaker after a successful probe, or after another send that took `send_seconds`.

        Returns its open seconds, or None if the probe was given up or the last failure is newer than the send.
        """
        rows = await self._store.attempts.fetch(
            sql.BREAKER_CLOSE_IF_NEWER,
            {
                "key": key,
                "probe_id": probe_id,
                "send_seconds": send_seconds,
                "alert_queue": alert_queue,
                "alert_destinations": self._store.alert_destinations,
            },
        )
        return float(rows[0][0]) if rows else None

    async def reopen(self, key: str, probe_id: str, *, error: str) -> BreakerRow | None:
        """Extend the pause after a failed probe. None if the probe was given up."""
        rows = await self._store.attempts.fetch(
            sql.BREAKER_REOPEN_IF_PROBING,
            {
                "key": key,
                "probe_id": probe_id,
                "error": error,
                "max_cooldown_seconds": self._settings.max_cooldown_seconds,
            },
        )
        return BreakerRow._make(rows[0]) if rows else None

    async def release(self, key: str, probe_id: str) -> None:
        """Let another session probe."""
        await self._store.attempts.fetch(sql.BREAKER_RELEASE_IF_PROBING, {"key": key, "probe_id": probe_id})

    async def free(self, key: str, probe_id: str, hold: str) -> None:
        """Give a probe back whose message was not sent through the breaker, and let claims take those of its hold."""
        await self._store.attempts.fetch(sql.BREAKER_FREE_IF_PROBING, {"key": key, "probe_id": probe_id, "hold": hold})

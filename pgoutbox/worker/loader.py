"""The loader: turns claimed rows into work for the attempt pool.

It reads payloads and contents, and forms batches.

A problem of one row (an unreadable payload, a missing key, a missing content) is the outcome of its own attempt and
does not affect the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final, cast

import psycopg
from pydantic import JsonValue

from pgoutbox.database import sql
from pgoutbox.database.store import ClaimedRow
from pgoutbox.encryption import Keyring
from pgoutbox.handlers import Handler
from pgoutbox.kernel.seams import Keys
from pgoutbox.message import Message, Outcome, Permanent, Sent, State, Transient
from pgoutbox.observability.events import LogEvent
from pgoutbox.text import describe
from pgoutbox.worker.attempt import RELEASED, Attempt, Claim, Released, Work
from pgoutbox.worker.leases import LeaseKeeper
from pgoutbox.worker.outcomes import Outcomes
from pgoutbox.worker.payloads import Content, missing_content, read_content, read_json, read_payload
from pgoutbox.worker.pool import AttemptPool
from pgoutbox.worker.run_state import RunState

_SENDING: Final = State.SENDING  # Looking up an enum member costs more than a comparison.
_KEPT_CONTENTS: Final = 16
_EMPTY_HEADERS: Final[Mapping[str, str]] = {}
# By id. None: the content is large, and the slot of the attempt reads it.
_Contents = Mapping[int, Content | Released | None]


class Loader:
    """Takes claimed rows over for one worker, and puts their attempts into `in_flight`."""

    def __init__(
        self,
        run: RunState,
        handlers: Mapping[str, Handler],
        *,
        keyring: Keyring | None,
        pool: AttemptPool,
        outcomes: Outcomes,
        lease_keeper: LeaseKeeper,
    ) -> None:
        self._database = run.settings.database
        self._store = run.store
        self._in_flight = run.in_flight
        self._outage = run.outage
        self._telemetry = run.telemetry
        self._handlers = handlers
        self._keyring = keyring
        self._pool = pool
        self._outcomes = outcomes
        self._ensure_lease = lease_keeper.ensure
        self._contents: _Contents = {}

    async def take_over(self, rows: Sequence[ClaimedRow], leased_at: float) -> None:
        """Put the rows of one claim into the pool, or finish them. `leased_at` is its start, on `elapsed_clock`."""
        contents = await self._contents_of(rows)
        begun = [row for row in rows if row.state == _SENDING]
        self._telemetry.count(LogEvent.CLAIMED, len(begun))
        if begun:
            self._begin(begun, contents, Claim(cast("datetime", begun[0].claimed_at)), leased_at)
        if unattempted := [row for row in rows if row.state != _SENDING]:
            self._outcomes.report_unattempted(unattempted)

    def _begin(self, rows: Sequence[ClaimedRow], contents: _Contents, claim: Claim, leased_at: float) -> None:
        works: list[Work] = []
        batches: dict[str, list[Attempt]] = {}
        for row in rows:
            if self._take_over_in_flight(row, claim, leased_at):
                continue
            attempt, result = self._load_row(row, contents, claim, leased_at)
            if result is not None:
                self._outcomes.collect(attempt, result)
            elif attempt.handler.max_size is None or attempt.is_incomplete:
                works.append((attempt,))
            else:
                batches.setdefault(row.topic, []).append(attempt)
        for attempts in batches.values():
            size = attempts[0].handler.max_size or 1
            works.extend(attempts[start : start + size] for start in range(0, len(attempts), size))
        self._pool.put(works)

    def _take_over_in_flight(self, row: ClaimedRow, claim: Claim, leased_at: float) -> bool:
        """Let an earlier attempt continue under this claim, and return whether there is one.

        Its lease had lapsed, or a failover has lost the commit of its first claim. One that has handed its message over
        is only written again.
        """
        attempt = self._in_flight.get(row.id)
        if attempt is None and self._in_flight.lost:
            attempt = self._in_flight.lost.pop(row.id, None)
            if attempt and (row.attempt_count, row.max_attempts) != (attempt.attempt_count + 1, attempt.max_attempts):
                return False  # An operator may have acted before an attempt in between.
        if attempt is None:
            return False
        if not attempt.may_go_on(row.created_at, row.destination, row.attempt_count, row.max_attempts):
            attempt.done = True
            attempt.overtaken = "lease lost"
            return False
        if attempt.done and not attempt.sent and row.attempt_count > attempt.attempt_count:
            return False  # It was finished and claimed again before the answer to the finish was read.
        is_lost = row.id not in self._in_flight
        self._in_flight.forget(attempt)
        attempt.take_over(row.attempt_count, row.max_attempts, claim, leased_at)
        if row.superseded:
            attempt.overtaken = "superseded"
        self._in_flight[row.id] = attempt
        if is_lost:
            self._outcomes.collect(attempt, Sent())
        return True

    def _load_row(
        self, row: ClaimedRow, contents: _Contents, claim: Claim, leased_at: float
    ) -> tuple[Attempt, Outcome | None]:
        """Begin the attempt of a row. Return it, and its result if it must end before its handler runs."""
        handler = self._handlers[row.topic]
        payload, problem = None, None
        if row.payload_json is not None:
            payload, problem = read_payload(row.payload_json, row, handler, self._keyring)
        headers, headers_problem = _EMPTY_HEADERS, None
        if row.headers_json is not None:
            headers, headers_problem = _read_headers(row.headers_json)
        content, content_problem = (None, None) if row.content_id is None else _find_content(row.content_id, contents)
        message: Message[object] = Message(
            row.id,
            row.topic,
            row.queue,
            row.destination,
            payload,
            headers,
            row.attempt_count,
            row.max_attempts,
            row.created_at,
            row.available_at,
            row.coalesce_key,
            row.ordering_key,
            content,
            row.payload_version,
            self._database,
        )
        used_count = row.attempt_count - row.max_attempts + row.attempt_budget
        attempt = Attempt(message, handler, claim, leased_at, self._ensure_lease, used_count)
        attempt.in_flight = self._in_flight
        attempt.is_payload_large = row.payload_json is None
        if row.coalesce_key is not None or row.ordering_key is not None:
            attempt.keys = Keys(row.id, row.topic, row.queue, row.coalesce_key, row.ordering_key)
        if row.content_id is not None and contents.get(row.content_id, "") is None:
            attempt.large_content_id = row.content_id
        if row.expires_in_seconds is not None:
            attempt.expiring_at = leased_at + row.expires_in_seconds
        # Superseded since the claim began: the finish turns a retry into `skipped`.
        result: Outcome | None = problem or headers_problem or content_problem
        if row.superseded:
            result = Transient("superseded")
        attempt.done = result is not None
        self._in_flight[row.id] = attempt
        return attempt, result

    async def _contents_of(self, rows: Sequence[ClaimedRow]) -> _Contents:
        """Return the existing contents of these rows, each decrypted and parsed once for all of its messages.

        Messages whose content the database did not return are released.
        """
        topics = {row.content_id: row.topic for row in rows if row.content_id is not None and row.state == _SENDING}
        contents = {content_id: self._contents[content_id] for content_id in topics.keys() & self._contents.keys()}
        if missing := sorted(topics.keys() - contents.keys()):
            try:
                found: dict[int, str | None] = dict(await self._store.claims.fetch(sql.CONTENTS, {"ids": missing}))
            except (psycopg.Error, OSError) as error:
                await self._outage.pause_or_raise(error)
                return {**contents, **dict.fromkeys(missing, RELEASED)}
            contents.update(
                (n, None if text is None else read_content(text, topics[n], self._keyring)) for n, text in found.items()
            )
            # The messages of a fan-out are claimed together, so the last contents are likely to be needed next.
            self._contents = dict(list({**self._contents, **contents}.items())[-_KEPT_CONTENTS:])
        return contents


def _find_content(content_id: int, contents: _Contents) -> tuple[JsonValue, Outcome | None]:
    """Return the content of a fan-out, or the outcome if it is missing."""
    if content_id not in contents:
        return None, missing_content(content_id)
    found = contents[content_id]
    return (None, found) if isinstance(found, (Permanent, Transient, Released)) else (found, None)


def _read_headers(text: str) -> tuple[Mapping[str, str], Permanent | None]:
    try:
        return cast("Mapping[str, str]", read_json(text)) or _EMPTY_HEADERS, None
    except (ValueError, RecursionError) as error:
        return _EMPTY_HEADERS, Permanent(f"headers: cannot be read as JSON: {describe(error)}")

"""The connections of a worker, and those of its statements that several of its parts need.

It makes no decisions. Every statement that writes a message is fenced, so that it can be repeated after an unknown
answer.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from pgoutbox.database import sql
from pgoutbox.database.round_trip import Step
from pgoutbox.database.server import PACKAGE_VERSION, ServerFacts, judge_schema, judge_server, refusals
from pgoutbox.database.worker_connection import WorkerConnection, connect
from pgoutbox.kernel import statements
from pgoutbox.message import AttemptOutcome, FencingToken
from pgoutbox.settings import Settings

_PERMIT_PAUSE_SECONDS = 0.25
_RETENTION_SECONDS = 30.0
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_SHOWN_NAME_LENGTH = 48  # With "pgoutbox claim " the 63 bytes that PostgreSQL keeps of an application_name.


class ClaimedRow(NamedTuple):
    """One message that a claim touched, in the order of the statement's RETURNING list."""

    id: int
    topic: str
    destination: str | None
    payload_json: str | None
    headers_json: str | None
    attempt_count: int
    max_attempts: int
    attempt_budget: int
    created_at: datetime
    available_at: datetime
    coalesce_key: str | None
    ordering_key: str | None
    content_id: int | None
    claimed_at: datetime | None
    state: str
    expires_in_seconds: float | None
    superseded: bool
    """Whether a newer message has superseded this one since the claim."""
    queue: str
    lost_session: str | None = None
    """The name of the sessions that the previous attempt may have shared, if it was lost: see `name_shared_session`."""
    lane: int = 0
    """Where the kernel has found it: fresh messages (0), retries (1), known ordering keys (2), all of them (3)."""
    payload_version: int = 1


class DueRow(NamedTuple):
    """One queue in the answer of `NEXT_DUE`, in the order of its columns. Seconds count from the query."""

    queue: str
    has_ordered: bool
    permit_seconds: float | None
    """When the next attempt may begin, infinity for a pause without an end; None for a queue without limits."""
    first_due_seconds: float | None
    other_due_seconds: float | None

    @property
    def due_seconds(self) -> float | None:
        """When to claim from it; None if nothing is scheduled."""
        known = [seconds for seconds in (self.first_due_seconds, self.other_due_seconds) if seconds is not None]
        if not known or self.permit_seconds is None:
            return min(known, default=None)
        # If a message is due and there is a permit, another worker is claiming it: poll again soon.
        return None if math.isinf(self.permit_seconds) else max(min(known), self.permit_seconds, _PERMIT_PAUSE_SECONDS)


class HeldRow(NamedTuple):
    """The answer of `watch` about an attempt that still holds its message."""

    id: int
    cancelled: bool
    superseded: bool
    in_lease: bool


class Store:
    """The connections of one worker. The trips of the kernel have one: `claims`.

    What running attempts read and write has another one, `attempts`: large payloads take time, and changes of breakers
    may wait for a row that a session of an operator has locked.

    `hooks` are the topics whose failures are announced to a hook, each with the `max_attempts` of that message. The
    `purpose` is in the name of the main session: "claim" means a worker.

    If the server has only one free connection, all of them share it, so that a worker that can claim can also finish.
    Otherwise it would hand over messages again and again without ending any of them.

    `on_lost` is called whenever one of its connections is lost, maybe in another thread.
    """

    def __init__(
        self, settings: Settings, *, worker: str, hooks: Mapping[str, int] | None = None, purpose: str = "claim"
    ) -> None:
        sql.load_all()
        self.worker = worker
        self._settings = settings
        self.on_lost: Callable[[], None] = lambda: None
        self._connections: list[WorkerConnection] = []
        self._give_up_at = math.inf
        self.hooks = json.dumps(dict(hooks or {}))
        # Without a destination, the application's own handler sends the alerts.
        self.alert_destinations: list[str | None] = [*settings.alert_destinations] or [None]
        self.claims = self.new_connection(f"{purpose} {worker[-_SHOWN_NAME_LENGTH:]}")
        self.attempts = self.new_connection("attempt", spare=self.claims)
        self.alerts = self.new_connection("alerts", spare=self.claims)
        self._forgotten_topics: frozenset[str] = frozenset()
        self._retention_turn = asyncio.Lock()
        self._retention_read_at = -math.inf

    def new_connection(self, purpose: str, *, spare: WorkerConnection | None = None) -> WorkerConnection:
        """Return a connection for statements of this worker."""
        connection = WorkerConnection(
            self._settings.require_dsn(), self._settings, purpose=purpose, spare=spare, on_lost=self._note_lost
        )
        self._connections.append(connection)
        connection.give_up_at(self._give_up_at)  # After it is in the list: another thread may set the time meanwhile.
        return connection

    def give_up_at(self, at: float) -> None:
        """Let no connection of the worker wait for an answer after this time, by the monotonic clock."""
        self._give_up_at = at
        for connection in self._connections:
            connection.give_up_at(at)

    def _note_lost(self) -> None:
        self.on_lost()

    async def server_time(self) -> datetime:
        """Return the time of the database's clock."""
        now: datetime
        ((now,),) = await self.claims.fetch(sql.SERVER_TIME, {})
        return now

    async def release_unanswered(self, held: Collection[int], *, after: datetime | None) -> int:
        """Release attempts of this worker that it began after a claim, except those in `held`. Return their number.

        `after` is the time of that claim by the server's clock; None for all claims.
        """
        rows = await self.claims.fetch(sql.UNANSWERED_ATTEMPTS, {"worker": self.worker, "after": after})
        tokens = [FencingToken._make(row) for row in rows if row[0] not in held]
        if not tokens:
            return 0
        nothing = [None] * len(tokens)
        rows = await self.claims.fetch(
            statements.FINISH,
            {
                **fence(tokens, self.worker),
                "outcomes": [AttemptOutcome.RELEASED.value] * len(tokens),
                "delays": [0.0] * len(tokens),
                "hooks": self.hooks,
                **dict.fromkeys(("reasons", "reason_codes", "breaker_keys", "error_places", "fails_after"), nothing),
                "held_delays": nothing,
            },
        )
        claims = {"worker": self.worker, "claimed_ats": list({token.claimed_at for token in tokens})}
        await self.claims.fetch(statements.END_CLAIMS, claims)
        return len(rows)

    async def forgotten_topics(self, *, within_seconds: float | None = None) -> frozenset[str]:
        """Return the topics of rules that delete sent messages at once, as of the last half minute; `*` is all topics.

        They are read only to finish: an idle worker does not query them. Raises the error of a database that does not
        answer, and `TimeoutError` if it does not answer within this time.
        """
        if time.monotonic() - self._retention_read_at > _RETENTION_SECONDS:
            # Concurrent callers share one query.
            async with asyncio.timeout(within_seconds), self._retention_turn:
                if time.monotonic() - self._retention_read_at > _RETENTION_SECONDS:
                    # A cancelled query would close the connection, which all claims use.
                    await asyncio.shield(self._read_forgotten_topics())
        return self._forgotten_topics

    async def _read_forgotten_topics(self) -> None:
        rows = await self.claims.fetch(sql.FORGOTTEN_TOPICS, {})
        self._forgotten_topics = frozenset(topic for (topic,) in rows)
        self._retention_read_at = time.monotonic()

    async def rest(self, seconds: float) -> None:
        """Close the connections that have not been used for so long. The next statement opens one again."""
        for connection in (self.claims, self.attempts, self.alerts):
            await connection.rest(seconds)

    async def close(self) -> None:
        """Close all connections."""
        for connection in (self.claims, self.attempts, self.alerts):
            await connection.close()


def name_session(message_id: int, attempt_count: int) -> str:
    """Return the `application_name` of the transaction of an attempt. `end_attempts.sql` has the same name."""
    return f"pgoutbox attempt {message_id}/{attempt_count}"


def name_shared_session(worker: str, claimed_at: datetime) -> str:
    """Return the `application_name` of the transactions that attempts of a claim share. `lapsed.sql` has the same name.

    A worker's name ends with a random number.
    """
    return f"pgoutbox attempts {worker[-8:]} {(claimed_at - _EPOCH) // _MICROSECOND}"


async def check_server(settings: Settings) -> None:
    """Refuse an old server, a standby, a database without the schema, an old schema, and an old package.

    On a connection of its own: the session of a worker cannot be prepared without the schema.
    """
    connection, _ = await connect(settings.require_dsn(), settings, purpose="start")
    async with connection:
        (facts,) = await (await connection.execute(sql.SERVER_FACTS, prepare=False)).fetchall()
        judge_server(ServerFacts._make(facts), writes=True)
        with refusals():
            cursor = await connection.execute(sql.SCHEMA_VERSION, {"package": PACKAGE_VERSION}, prepare=False)
        ((found,),) = await cursor.fetchall()
        judge_schema(found)


async def watch(
    link: WorkerConnection,
    tokens: Sequence[FencingToken],
    *,
    worker: str,
    renewed_claims: Collection[datetime] = (),
    lease_seconds: float = 0.0,
) -> dict[int, HeldRow]:
    """Return which of these attempts still hold their message, after the leases of `renewed_claims` are renewed."""
    steps: list[Step] = [(sql.WATCH_IF_HELD, fence(tokens, worker))]
    if renewed_claims:
        renewal = {"worker": worker, "claimed_ats": list(renewed_claims), "lease_seconds": lease_seconds}
        steps.insert(0, (sql.RENEW_CLAIMS, renewal))
    rows = (await link.trip(steps))[-1]
    return {row[0]: HeldRow._make(row) for row in rows}


def fence(tokens: Iterable[FencingToken], worker: str) -> dict[str, object]:
    """Return the parameters of `_fence.sql`: arrays in the order of the ids."""
    ordered = sorted(tokens)
    return {
        "ids": _array_of(token.id for token in ordered),
        "attempt_counts": _array_of(token.attempt_count for token in ordered),
        "claimed_ats": _array_of(token.claimed_at.isoformat() for token in ordered),
        "worker": worker,
    }


def _array_of(values: Iterable[int | str]) -> str:
    """Return an array in PostgreSQL's text format. The driver's own conversion takes forty times as long."""
    return f"{{{','.join(map(str, values))}}}"

"""Tests a dashboard with many viewers beside a worker: neither side affects the other."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import httpx
import psycopg
from psycopg.conninfo import conninfo_to_dict
from starlette.routing import Match

from pgoutbox import Outbox, RetryPolicy
from pgoutbox.dashboard import create_app, live, pages
from pgoutbox.handlers import Context
from pgoutbox.message import Message, Permanent, Transient
from pgoutbox.worker import Worker
from tests.support.outbox_actions import attempts_of, enqueue, row_of, running, settings_for
from tests.support.roles import login
from tests.support.waiting import PROCESS_PATIENCE_SECONDS, wait_until
from tests.support.web_server import OPERATOR_TOKEN, be_patient, serving, web_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

PEOPLE: Final = 6  # More viewers than the dashboard has connections.
STREAMS: Final = 3
BATCHES: Final = 8
BATCH_SIZE: Final = 30
CONNECTIONS: Final = 4 + 1  # The page connections and the one for following changes; see docs/how-to/dashboard.md.
PAGES: Final[dict[str, tuple[int, ...]]] = {
    "/": (200,),
    "/messages": (200,),
    "/messages?text=no+such+text&state=failed": (200,),
    "/messages?state=sending": (200,),
    "/messages?created_from=2026-01-01T00:00": (200,),
    "/messages/1": (200,),
    "/messages/999999999": (404,),
    "/queues": (200,),
    "/queues?queue=nobody": (200,),
    "/queues/nobody/keys": (200,),
    "/failed": (200,),
    "/workers": (200,),
    "/breakers": (200,),
    "/schedules": (200,),
    "/audit": (200,),
    "/bulk?do=redrive": (200,),
    "/bulk/none": (404,),
    "/messages?limit=x": (422,),
    "/static/pgoutbox.js": (200,),
    "/healthz": (200,),
}

# The locks of the dashboard's sessions at this moment. Viewing needs only the weakest table lock, which every statement
# takes, and no transaction ID, which only a write assigns. A new session also locks its database.
SESSIONS: Final = """
SELECT
    a.pid,
    a.backend_xid IS NOT NULL AS writes,
    ARRAY(
        SELECT DISTINCT l.locktype || ' ' || l.mode
        FROM pg_locks AS l
        WHERE l.pid = a.pid
            AND l.locktype <> 'virtualxid'
            AND l.mode <> 'AccessShareLock'
            AND (l.classid, l.mode) IS DISTINCT FROM ('pg_database'::regclass, 'RowExclusiveLock')
    ) AS locks
FROM pg_stat_activity AS a
WHERE a.usename = %s
"""
# Transactions, and snapshots that keep dead rows, which began before a given moment and have not ended.
OPEN_SINCE: Final = """
SELECT a.pid, a.state, a.query
FROM pg_stat_activity AS a
WHERE a.usename = %(user)s
    AND (a.xact_start <= %(moment)s OR age(a.backend_xmin) > age(%(transaction)s::xid))
"""


@dataclass
class Crowd:
    """The viewers and the responses that they got."""

    url: str
    dsn: str
    user: str
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    sessions: set[int] = field(default_factory=set)
    most_at_once: int = 0
    held: set[str] = field(default_factory=set)
    told: Counter[int] = field(default_factory=Counter)
    seen: Counter[int] = field(default_factory=Counter)
    errors: list[BaseException] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Let all viewers browse until the block ends."""
        threads = [threading.Thread(target=self._caught, args=(self._look, n)) for n in range(PEOPLE)]
        threads += [threading.Thread(target=self._caught, args=(self._follow, n)) for n in range(STREAMS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join(PROCESS_PATIENCE_SECONDS)
        assert not self.errors
        assert not any(thread.is_alive() for thread in threads)

    def have_seen(self, before: Counter[int], *, more: int) -> bool:
        """Return whether each viewer has seen this many more pages, or a viewer has failed."""
        return bool(self.errors) or all(self.seen[person] >= before[person] + more for person in range(PEOPLE))

    def have_been_told(self) -> bool:
        """Return whether each follower got a change after the first event, or a viewer has failed."""
        return bool(self.errors) or all(self.told[person] > 1 for person in range(STREAMS))

    def _caught(self, work: Callable[[int], None], person: int) -> None:
        try:
            work(person)
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.errors.append(error)

    def _client(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {OPERATOR_TOKEN}", "Accept": "text/html"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PROCESS_PATIENCE_SECONDS)

    def _look(self, person: int) -> None:
        with self._client() as client, psycopg.connect(self.dsn, autocommit=True) as watcher:
            while not self._over.is_set():
                for path in PAGES:
                    self.answers[path, client.get(path).status_code] += 1
                    self._note(watcher.execute(SESSIONS, [self.user]).fetchall())
                    self.seen[person] += 1

    def _note(self, rows: list[tuple[int, bool, list[str]]]) -> None:
        with self._lock:
            self.sessions |= {pid for pid, _, _ in rows}
            self.most_at_once = max(self.most_at_once, len(rows))
            self.held |= {lock for _, _, locks in rows for lock in locks}
            self.held |= {"a transaction number" for _, writes, _ in rows if writes}

    def _follow(self, person: int) -> None:
        with self._client() as client, client.stream("GET", "/live") as stream:
            assert stream.status_code == 200
            for line in stream.iter_lines():
                self.told[person] += line.startswith("event: change")
                if self._over.is_set():
                    return


class Ledger:
    """Hand-overs of a handler, by message number."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.hand_overs: Counter[int] = Counter()
        self.order: dict[str, list[int]] = defaultdict(list)
        self.outbox.handler("greet", retry=RetryPolicy.steps(0, jitter=0))(self._greet)

    async def _greet(self, message: Message, ctx: Context) -> None:
        number = int(str(message.payload))
        self.hand_overs[number] += 1
        if message.ordering_key is not None:
            self.order[message.ordering_key].append(number)
        if number % 11 == 3:
            raise Permanent(f"550 number {number} is unknown")
        if number % 7 == 2 and self.hand_overs[number] == 1:
            raise Transient("busy")

    def of_all(self, db: psycopg.Connection, ids: dict[int, int]) -> dict[int, tuple[object, ...]]:
        """Return the result of each message: state, attempts, error, superseding message, history, and number of
        hand-overs."""
        found: dict[int, tuple[object, ...]] = {}
        for number, message_id in ids.items():
            row = row_of(db, message_id)
            newer = None if row.superseded_by is None else row.superseded_by - message_id
            found[number] = (
                row.state, row.attempt_count, row.last_error, newer, attempts_of(db, message_id),
                self.hand_overs[number],
            )  # fmt: skip
        return found


def enqueue_batch(db: psycopg.Connection, first: int) -> dict[int, int]:
    """Enqueue the next messages in one transaction. Of three with one coalesce key, the last is sent in every run."""
    ids = {}
    with db.transaction():
        for number in range(first, first + BATCH_SIZE):
            key = {"coalesce_key": f"k{number // 3}"} if number % BATCH_SIZE < 9 else {}
            if number % BATCH_SIZE >= 20:
                key = {"ordering_key": f"o{number % 2}"}
            ids[number] = enqueue(db, payload=number, **key)  # type: ignore[arg-type] # one of both
    return ids


async def deliver(
    db: psycopg.Connection, dsn: str, *, crowd: Crowd | None = None
) -> tuple[dict[int, tuple[object, ...]], dict[str, list[int]]]:
    """Enqueue batches while a worker runs, each after every viewer has seen another page."""
    ledger = Ledger()
    ids: dict[int, int] = {}
    async with running(Worker(ledger.outbox, settings=settings_for(dsn))):
        for batch in range(BATCHES):
            ids |= enqueue_batch(db, batch * BATCH_SIZE)
            if crowd is not None:
                await meanwhile(crowd.have_seen, crowd.seen.copy(), more=2)
        await meanwhile(lambda: db.execute("SELECT FROM pgoutbox.message_live LIMIT 1").fetchone() is None)
    return ledger.of_all(db, ids), dict(ledger.order)


async def meanwhile(condition: Callable[..., bool], *args: object, **kwargs: object) -> None:
    """Wait until the condition holds, without blocking the event loop."""
    await asyncio.to_thread(
        wait_until, functools.partial(condition, *args, **kwargs), lambda: f"{condition}: {args} {kwargs}"
    )


def nothing_is_open(db: psycopg.Connection, user: str) -> bool:
    """Return whether everything that this role has begun by now ends while the role begins new work."""
    ((moment, transaction),) = db.execute("SELECT clock_timestamp(), pg_current_xact_id()::xid::text")
    since = {"user": user, "moment": moment, "transaction": transaction}
    return wait_until(
        lambda: db.execute(OPEN_SINCE, since).fetchone() is None, lambda: str(db.execute(OPEN_SINCE, since).fetchall())
    )


def test_the_load_covers_every_page() -> None:
    reached = set()
    for path in PAGES:
        for route in pages.ROUTES:
            match, _ = route.matches({"type": "http", "method": "GET", "path": path.partition("?")[0]})
            reached |= {route.name} if match is Match.FULL else set()
    assert reached | {"live"} >= {route.name for route in pages.ROUTES}


async def test_many_viewers_delay_no_delivery_and_hold_no_locks(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch)  # The test expects refusals and open connections, not slow answers.
    monkeypatch.setattr(live, "_HEARTBEAT_SECONDS", 0.2)

    alone = await deliver(db, dsn)
    with login(dsn, "pgoutbox_operator") as its_dsn:
        user = str(conninfo_to_dict(its_dsn)["user"])
        settings = web_settings(dsn=its_dsn)
        app = create_app(settings)
        with serving(app, settings) as url:
            crowd = Crowd(url, dsn, user)
            with crowd.looking():
                beside = await deliver(db, dsn, crowd=crowd)
                await meanwhile(crowd.have_seen, Counter(), more=len(PAGES))
                await meanwhile(crowd.have_been_told)
                assert await asyncio.to_thread(nothing_is_open, db, user)

    assert beside == alone
    assert {state for state, *_ in beside[0].values()} == {"sent", "failed", "skipped"}
    assert {(path, status) for path, status in crowd.answers if status not in PAGES[path]} == set()
    assert crowd.held == set()
    assert crowd.most_at_once <= CONNECTIONS
    assert len(crowd.sessions) <= CONNECTIONS, "every connection stays usable after any response"
    assert db.execute("SELECT message_id, what FROM violation").fetchall() == []

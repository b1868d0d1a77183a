"""The dashboard with millions of messages in mixed states, 5,000 queues and 2,000 topics: the time and the size of each
page, and the plans of its statements.

It has only an operator's rights, so it reads everything from the views.
"""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlencode

import httpx
import psycopg
from psycopg.conninfo import make_conninfo

from benchmarks.options import Options
from benchmarks.report import Result, Table, Verdict, median, percentile
from benchmarks.server import Server
from pgoutbox.dashboard import create_app
from pgoutbox.dashboard.database import STATEMENT_SECONDS
from pgoutbox.dashboard.reads import CAP, EACH_QUEUE, GROUP_ROWS, QUEUE_CAP, SEARCH_ROWS
from pgoutbox.database import sql
from pgoutbox.operations import MessageFilter
from pgoutbox.settings import load_settings

_TOKEN = "benchmark-" * 4
_TARGET_MS = 300
_TARGET_KB = 100
_ROUNDS = 9
_QUEUES = ["default", "mail", "bulk", "webhooks"]
# States are spread over the ids as in an old table: most of the old messages are finished, some have failed.
_FILL = """
INSERT INTO pgoutbox.message (
    id, topic, queue, destination, payload, headers, state, coalesce_key, key_in_flight, dedupe_key, attempt_count,
    lane, created_at, available_at, claimed_at, worker, finished_at, skip_reason, superseded_by, last_error
)
SELECT
    n,
    CASE
        WHEN n %% 3 = 0 THEN 'tenant.' || n / 3 %% 2000
        ELSE (
            ARRAY['mail.welcome', 'mail.receipt', 'mail.newsletter', 'webhook.order', 'sms.code', 'event.audit']
        )[1 + n %% 6]
    END,
    CASE
        WHEN n %% 3 = 0 THEN 'tenant-' || n / 3 %% 5000
        ELSE (ARRAY['default', 'mail', 'bulk', 'webhooks'])[1 + n %% 4]
    END,
    'mailto:user' || n %% 50000 || '@example.org',
    jsonb_build_object('user_id', n, 'text', repeat('x', 120)),
    CASE WHEN n %% 3 = 0 THEN '{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}'::jsonb END,
    s.state,
    CASE WHEN n %% 5 = 0 THEN 'user-' || n END,
    CASE WHEN n %% 5 = 0 AND s.state = 'sending' THEN 'user-' || n END,
    CASE WHEN n %% 7 = 0 THEN 'once-' || n END,
    CASE s.state WHEN 'pending' THEN n %% 2 WHEN 'failed' THEN 11 ELSE 1 + (n %% 20 = 0)::int END,
    CASE s.state WHEN 'pending' THEN n %% 2 ELSE 0 END,
    s.at,
    CASE WHEN s.state = 'pending' AND n %% 9 = 0 THEN now() + n * interval '1 s' ELSE s.at END,
    s.at,
    'worker-' || n %% 8,
    CASE WHEN s.state NOT IN ('pending', 'sending') THEN s.at + (n %% 1000) * interval '2 ms' END,
    CASE WHEN s.state = 'skipped' THEN 'superseded' END,
    CASE WHEN s.state = 'skipped' THEN n + 5 END,
    CASE
        WHEN s.state = 'failed' THEN (
            ARRAY[
                '550 5.1.1 user' || n || ' unknown', 'HTTP 503 from receiver ' || n %% 40,
                'timed out after ' || n %% 60 || ' s', 'KeyError: ''user_' || n || ''''
            ]
        )[1 + n %% 4]
    END
FROM (
    SELECT
        i AS n,
        now() - (%(count)s - i) * %(hours)s / %(count)s::float8 * interval '1 hour' AS at,
        CASE
            WHEN i > %(count)s - %(sending)s THEN 'sending'
            WHEN i > %(count)s * 0.8 THEN 'pending'
            WHEN i %% 10 = 0 THEN 'failed'
            WHEN i %% 11 = 0 THEN 'skipped'
            WHEN i %% 97 = 0 THEN 'cancelled'
            ELSE 'sent'
        END AS state
    FROM generate_series(1, %(count)s::bigint) AS i
) AS s
"""
_CLAIM = """
INSERT INTO pgoutbox.claim (claimed_at, lease_expires_at, queue, worker, ids)
SELECT m.claimed_at, now() + (min(m.id) % 60 - 5) * interval '1 s', m.queue, m.worker, array_agg(m.id)
FROM pgoutbox.message_live AS m
WHERE m.state = 'sending'
GROUP BY m.claimed_at, m.queue, m.worker
"""


def fill(connection: psycopg.Connection[tuple[object, ...]], count: int, *, hours: float = 3.0) -> None:
    """Insert this number of messages in mixed states, enqueued one after the other in these hours."""
    connection.execute(_FILL, {"count": count, "hours": hours, "sending": min(500, count // 100)})
    connection.execute(_CLAIM)
    connection.execute("SELECT setval('pgoutbox.message_id_seq', %s)", [count])
    connection.execute("VACUUM (ANALYZE) pgoutbox.message")


def run(server: Server, options: Options) -> Result:
    """Request every page, and the most expensive filters, one at a time."""
    count = options.dashboard_messages
    result = Result("dashboard", {"messages": count, "rounds": _ROUNDS})
    with server.database() as dsn:
        with psycopg.connect(dsn, autocommit=True) as connection:
            fill(connection, count)
        operators_dsn = make_conninfo(dsn, options="-c role=pgoutbox_operator")
        times, sizes = asyncio.run(_time_pages(operators_dsn, count))
        with psycopg.connect(operators_dsn, autocommit=True, prepare_threshold=None) as connection:
            result.texts += [(f"sql.{name}", _plan(connection, name, given)) for name, given in _looks(count).items()]
    rows = [(what, median(taken), percentile(taken, 90), max(taken), sizes[what]) for what, taken in times.items()]
    columns = "page", "median", "p90", "max", "size, KB"
    result.tables.append(Table("milliseconds of a page, in a client", columns, rows))
    # A search without a match reads until its time is over, and offers to continue.
    known = {what: median(taken) for what, taken in times.items() if not _is_search(what)}
    result.verdicts.append(Verdict("slowest page, median", max(known.values()), _TARGET_MS, "at most", "ms"))
    result.verdicts.append(Verdict("largest page", max(sizes.values()), _TARGET_KB, "at most", "KB"))
    result.samples = {f"{what}, ms": taken for what, taken in times.items()}
    result.notes.append("The overview counts the last hour first, and the rest at later requests if it lacks time.")
    return result


def _pages(count: int) -> list[str]:
    filters: list[dict[str, object]] = [
        {},
        {"topic": "no.such"},
        {"text": "stands nowhere"},
        {"state": "sent", "text": "stands nowhere"},
        {"state": "cancelled", "queue": "bulk"},
        {"state": "failed", "text": "stands nowhere"},
        {"state": "failed", "group": "0" * 12},
        {"state": "sending"},
        {"state": "pending", "due": "now"},
        {"before": count // 2, "key": "no-such-key"},
        {"created_before": "2020-01-01T00:00"},
    ]
    pages = [
        "/",
        "/?range=6h",
        "/?range=14d",
        "/status.json",
        "/queues",
        "/queues?queue=bulk",
        "/queues?queue=tenant-4321",
        "/queues?queue=bulk&range=14d",
        "/queues?start=tenant-4",
        "/topics",
        "/topics?start=tenant.4",
        "/topics?topic=mail.welcome",
        "/workers",
        "/breakers",
        "/failed",
        "/audit",
        f"/messages/{count // 2}",
        f"/messages/{count - 1}",
    ]
    pages += [f"/messages?{urlencode(given)}" for given in filters]
    return [*pages, "/bulk?do=redrive", "/bulk?do=cancel&topic=no.such"]


def _is_search(what: str) -> bool:
    return what == "/ at first" or (what.startswith(("/messages?", "/bulk?")) and "=" in what.replace("state=", ""))


async def _time_pages(dsn: str, count: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    app = create_app(load_settings(dsn=dsn, web={"operator_tokens": f"ada:{_TOKEN}"}))
    times: dict[str, list[float]] = {}
    sizes: dict[str, float] = {}
    headers = {"Authorization": f"Bearer {_TOKEN}", "Accept": "text/html"}
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:

        async def get(page: str, what: str) -> None:
            began_at = time.perf_counter()
            answer = await client.get(page)
            times.setdefault(what, []).append(1e3 * (time.perf_counter() - began_at))
            sizes[what] = len(answer.content) / 1024
            if answer.status_code != 200:
                raise SystemExit(f"{page}: {answer.status_code}")

        await get("/audit", "the first page of a process")
        await get("/", "/ at first")
        for _ in range(_ROUNDS):
            for page in _pages(count):
                # The numbers of the overview are cached for a second, so this request queries them again.
                app.state.dashboard.forget()
                await get(page, page)
    app.state.dashboard.close()
    return times, sizes


def _looks(count: int) -> dict[str, dict[str, object]]:
    nowhere = MessageFilter(topic="no.such")
    search = {"before_id": None, "not_below_id": None, "limit": 51}
    names = [*_QUEUES, *(f"tenant-{number}" for number in range(5_000))]
    return {
        "COUNT_OPEN": {"cap": CAP + 1},
        "COUNT_DONE": {"cap": CAP + 1},
        "COUNT_PENDING": {"prefix": "", "queues": 10_001, "cap": CAP + 1, "parts": ["now", "later", "again"]},
        "RANK_QUEUES": {"prefix": "", "queues": 10_001},
        "DUE_FOR_LONG": {"names": names[:50], "seconds": 60, "rows": 10_000},
        "UNDELIVERED": {"names": names, "seconds": 86_400, "rows": 10_000},
        "LIVE_QUEUES": {"queues": _QUEUES, "cap": QUEUE_CAP + 1},
        "RUNNING_WORKERS": {"cap": CAP},
        "RUNNING_MESSAGES": {"cap": CAP, "limit": 20},
        "FAILED_LATELY": {"cap": CAP},
        "LIST_FAILURES": {"topic": None, "seconds": None, "cap": GROUP_ROWS, "limit": 100},
        "SEARCH_WINDOW": {**nowhere.parameters(), **search, "rows": SEARCH_ROWS},
        "IN_FLIGHT_IDS": {"ids": None, **search, "rows": SEARCH_ROWS},
        "SEARCH_AHEAD": {**nowhere.parameters(), "after_id": 0, "through_id": count, "rows": 20_000},
        "SUPERSEDED_BY": {"id": count // 2, "rows": SEARCH_ROWS, "limit": 20},
        "FIRST_FROM": {"id": count // 2},
        "LIST_BREAKERS": {**EACH_QUEUE, "limit": 100},
        "WAITING_TOPICS": {**EACH_QUEUE, "names": names, "topics": 10_000},
        "COUNT_BY_TOPIC": {"cap": CAP},
        "ENDED_RATES": {"by": "topic", "names": ["mail.welcome"], "seconds": 300, "cap": 50_000},
        "ESTIMATE_DONE": {},
        "NEWEST_ID": {},
        "PULSE": {},
    }


def _plan(connection: psycopg.Connection[tuple[object, ...]], name: str, given: dict[str, object]) -> str:
    """Run EXPLAIN like a page: with the parameters in place, under the settings of a page."""
    with connection.transaction():
        connection.execute(sql.PREPARE_OPERATION, {"statement_timeout": f"{STATEMENT_SECONDS * 5}s"})
        connection.execute(sql.PREPARE_PAGE)
        explain = f"EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF) {getattr(sql, name)}"
        return "\n".join(str(line) for (line,) in connection.execute(explain.encode(), given))

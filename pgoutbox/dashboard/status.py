"""The status of the outbox as JSON, for an application's own page and for scripts. Its names are stable."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Final

from starlette.responses import Response
from starlette.routing import Route

from pgoutbox.dashboard import reads
from pgoutbox.dashboard.dashboard import dashboard_of
from pgoutbox.dashboard.history import RANGES
from pgoutbox.doctor import Level, verdict
from pgoutbox.redaction import redact_text
from pgoutbox.text import iso_utc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from pgoutbox.dashboard.dashboard import Notices, Overview
    from pgoutbox.dashboard.types import Connection


async def status(request: Request) -> Response:
    """Return the data of the overview, the queues and the breakers, with sensitive values hidden."""
    dashboard = dashboard_of(request)
    hidden = dashboard.names_of(None)
    found, notices = await dashboard.overview(RANGES["1h"]), await dashboard.notices()
    details = await dashboard.database.read(lambda connection: _details(connection, found.now, hidden))
    body = json.dumps({**_overview(found, notices, hidden), **details}, default=_json_value)
    return Response(f"{body}\n", media_type="application/json")


def _overview(found: Overview, notices: Notices, hidden: Sequence[str]) -> dict[str, object]:
    levels = {finding.level for finding in found.problems} | ({Level.PROBLEM} if notices.is_copy else set())
    return {
        "time": found.now,
        "status": next((level for level in (Level.PROBLEM, Level.WARNING) if level in levels), Level.OK),
        "verdict": redact_text(verdict(found.problems), hidden),
        "findings": [
            _part(finding, "check", "level", "code", "why", "fix")
            | {
                "messages": {"count": finding.messages.messages, "kind": finding.messages.kind},
                "what": redact_text(finding.what, hidden),
                "about": {name: redact_text(value, hidden) for name, value in finding.about.items()},
            }
            for finding in found.problems
        ],
        "messages": {state: {"count": count.messages, "kind": count.kind} for state, count in found.states.items()},
        "redirects": notices.redirects.as_json(),
        "is_copy": notices.is_copy,
        "workers": [_part(worker, "worker", "queues", "topics", "in_flight", "ended_at") for worker in found.workers],
    }


def _details(connection: Connection, now: datetime, hidden: Sequence[str]) -> dict[str, object]:
    queues = reads.queues(connection)
    return {
        "failed_of_day": min(reads.count_failed_of_day(connection), reads.CAP),
        "oldest_due_seconds": _waiting_seconds(queues.oldest_due_at, now),
        "queues": [
            _part(queue, "queue", "paused_at", "resume_at")
            | {
                "due": min(queue.due, reads.QUEUE_CAP),
                "scheduled": min(queue.scheduled, reads.QUEUE_CAP),
                "sending": min(queue.sending + queue.lapsed, reads.QUEUE_CAP),
                "oldest_due_seconds": _waiting_seconds(queue.next_due_at, now),
            }
            for queue in queues.rows
        ],
        "breakers": [
            _part(breaker, "key", "opened_at", "retry_at") | {"last_error": redact_text(breaker.last_error, hidden)}
            for breaker in reads.breakers(connection)
        ],
    }


def _part(row: object, *names: str) -> dict[str, object]:
    return {name: getattr(row, name) for name in names}


def _waiting_seconds(due_at: datetime | None, now: datetime) -> float | None:
    """Return how long the oldest due message waits; None without one."""
    return None if due_at is None or due_at > now else round((now - due_at).total_seconds(), 3)


def _json_value(value: object) -> str:
    return iso_utc(value) if isinstance(value, datetime) else str(value)


ROUTES: Final = [Route("/status.json", status, name="status")]

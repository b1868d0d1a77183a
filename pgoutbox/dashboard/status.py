"""The status of the outbox as JSON, for an application's own page and for scripts. Its names are stable."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pgoutbox.dashboard import reads
from pgoutbox.dashboard.dashboard import dashboard_of
from pgoutbox.dashboard.database import Connection
from pgoutbox.database import sql
from pgoutbox.doctor import Level, verdict
from pgoutbox.redaction import redact_text
from pgoutbox.text import Count, iso_utc


async def status(request: Request) -> Response:
    """Return the findings, and the numbers of messages, queues, breakers and workers, with sensitive values hidden."""
    dashboard = dashboard_of(request)
    hidden = dashboard.names_of(None)
    notices = await dashboard.notices()

    def load(connection: Connection) -> dict[str, object]:
        now, ranked = reads.now(connection), dashboard.ranked_queues(connection)
        findings = dashboard.findings(connection)
        levels = {finding.level for finding in findings} | ({Level.PROBLEM} if notices.is_copy else set())
        return {
            "status": next((level for level in (Level.PROBLEM, Level.WARNING) if level in levels), Level.OK),
            "verdict": redact_text(verdict(findings), hidden),
            "findings": [
                {name: getattr(finding, name) for name in ("check", "level", "code", "what", "why", "fix")}
                | {
                    "messages": _count(finding.messages),
                    "about": {name: redact_text(value, hidden) for name, value in finding.about.items()},
                }
                for finding in findings
            ],
            "redirects": notices.redirects.as_json(),
            "is_copy": notices.is_copy,
            "time": now,
            "messages": {state: _count(count) for state, count in reads.count_states(connection).items()},
            "workers": [
                _part(worker, "worker", "queues", "topics", "in_flight", "ended_at")
                for worker in reads.running_workers(connection)
            ],
            "failed_of_day": reads.value(connection, sql.COUNT_FAILED_OF_DAY, {"cap": reads.CAP}),
            "oldest_due_seconds": _waiting_seconds(ranked[0].oldest_due_at if ranked else None, now),
            "queues": [
                _part(queue, "queue", "paused_at", "resume_at")
                | {
                    "due": min(queue["due"], reads.QUEUE_CAP),
                    "scheduled": min(queue["scheduled"], reads.QUEUE_CAP),
                    "sending": min(queue["sending"] + queue["lapsed"], reads.QUEUE_CAP),
                    "oldest_due_seconds": _waiting_seconds(queue["next_due_at"], now),
                }
                for queue in reads.queues(
                    connection, [row.queue for row in ranked[: reads.MAX_QUEUES]], reads.QUEUE_CAP
                )
            ],
            "breakers": [
                _part(breaker, "key", "opened_at", "retry_at", "last_error")
                for breaker in reads.breakers(connection, hidden)
            ],
        }

    body = json.dumps(await dashboard.database.read(load), default=_json_value)
    return Response(f"{body}\n", media_type="application/json")


def _count(count: Count) -> dict[str, object]:
    return {"count": count.messages, "kind": count.kind}


def _part(row: reads.Row, *names: str) -> dict[str, object]:
    return {name: row[name] for name in names}


def _waiting_seconds(due_at: datetime | None, now: datetime) -> float | None:
    """Return how long the oldest due message waits; None without one."""
    return None if due_at is None or due_at > now else round((now - due_at).total_seconds(), 3)


def _json_value(value: object) -> str:
    return iso_utc(value) if isinstance(value, datetime) else str(value)


ROUTES: Final = [Route("/status.json", status, name="status")]

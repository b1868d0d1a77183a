"""The list of checks, in the order in which you would fix their findings."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import psycopg

from pgoutbox.doctor import delivery, server, transports
from pgoutbox.doctor.context import DoctorContext, Limits, RankedQueue, connected
from pgoutbox.doctor.environment import check_settings, check_tls
from pgoutbox.doctor.findings import Finding, Findings, Level, error_text, run_check, skipped
from pgoutbox.errors import PgOutboxError
from pgoutbox.outbox import Outbox
from pgoutbox.settings import Settings

# What a page that is open all night asks every few seconds, with fewer rows.
_WATCHED_LIMITS: Final = Limits(failures_read=1_000)
_WATCHED_SECONDS: Final = 2.0

Check = Callable[[DoctorContext], Findings]

_SERVER_CHECKS: Final[Mapping[str, Check]] = {
    "server": server.check_server,
    "pooler": server.check_pooler,
    "listener": server.check_listener,
    "clock": server.check_clock,
    "durability": server.check_durability,
    "transactions": server.check_transactions,
    "slots": server.check_slots,
    "notify": server.check_notify,
}

_SCHEMA_CHECKS: Final[Mapping[str, Check]] = {
    "rights": server.check_rights,
    "copy": server.check_copy,
    "sequence": server.check_sequence,
    "vacuum": server.check_vacuum,
    "partitions": delivery.check_partitions,
    "retention": delivery.check_retention,
    "workers": delivery.check_workers,
    "handlers": delivery.check_handlers,
    "leases": delivery.check_leases,
    "encryption": delivery.check_encryption,
    "payloads": delivery.check_payloads,
    "due": delivery.check_due,
    "undelivered": delivery.check_undelivered,
    "breakers": delivery.check_breakers,
    "receivers": delivery.check_receivers,
    "shares": delivery.check_shares,
    "schedules": delivery.check_schedules,
    "unsubscribe": delivery.check_unsubscribe,
    "redirect": delivery.check_redirect,
    "failed": delivery.check_failed,
    "destinations": delivery.check_destinations,
}

_DELIVERY_CHECKS: Final = ("workers", "due", "undelivered", "breakers", "receivers", "redirect", "failed")
# The findings that a finding about the same breaker or topic replaces.
_TELLS: Final[Mapping[str, Sequence[str]]] = {
    "due-behind-breaker": ("breaker-open", "transport-unavailable"),
    "due-without-handler": ("messages-without-handler",),
    "due-without-worker": ("no-worker",),
    "transport-unavailable": ("breaker-open",),
}
FINDING_PROBLEMS: Final = ("due", "redirect")
"""The checks of delivery that find problems. The others find only warnings."""


def examine(
    settings: Settings,
    outbox: Outbox | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    clock: Callable[[], float] = time.time,
    checks_transports: bool = True,
) -> Iterator[Finding]:
    """Run every check, and yield each finding at once, each cause once. A fault is a finding and never raises.

    Without the application's `outbox`, the checks do not know its topics and handlers. `environment` is searched for
    misspelt settings; `clock` is compared with the server's clock. Of many databases with the same transports, let only
    one examination check those. Blocks, for some seconds if a server does not
    answer: do not call it on an event loop.

        problems = [finding for finding in examine(load_settings()) if finding.level is Level.PROBLEM]
    """

    def each() -> Iterator[Finding]:
        yield from run_check("settings", check_settings, settings, environment or {})
        yield from run_check("tls", check_tls, settings)
        with contextlib.ExitStack() as stack:
            try:
                connection = stack.enter_context(connected(settings.require_dsn(), settings))
            except (PgOutboxError, psycopg.Error, OSError) as error:
                yield Finding(
                    "database",
                    Level.PROBLEM,
                    "database-unreachable",
                    f"PGOUTBOX_DSN: {error_text(error)}",
                    "without the database, no message is enqueued or delivered",
                    "check host, port, user and password in PGOUTBOX_DSN, and that the server runs and accepts this "
                    "user",
                )
            else:
                context = DoctorContext(
                    settings=settings, outbox=outbox, connection=connection, limits=limits or Limits(), clock=clock
                )
                yield from _check_database(context)
        for name, check in transports.CHECKS.items() if checks_transports else ():
            yield from run_check(name, check, settings, outbox)

    yield from _without_repetitions(each())


def examine_delivery(
    connection: psycopg.Connection[Any],
    settings: Settings,
    outbox: Outbox | None = None,
    *,
    queues: Sequence[RankedQueue] = (),
    checks: Collection[str] | None = None,
) -> list[Finding]:
    """Return the problems and warnings of delivery, each cause once, the worst first: what a person on call must know.

    Runs in the transaction of the connection, if there is one. `queues` are those of a few seconds ago, if they are
    known. Only these `checks` run, by default all of delivery.
    """
    context = DoctorContext(
        settings=settings,
        outbox=outbox,
        connection=connection,
        limits=_WATCHED_LIMITS,
        statement_seconds=_WATCHED_SECONDS,
        ranked=list(queues),
    )
    asked = [name for name in _DELIVERY_CHECKS if checks is None or name in checks]
    found = [finding for name in asked for finding in run_check(name, _SCHEMA_CHECKS[name], context)]
    faults = [finding for finding in found if finding.level in (Level.PROBLEM, Level.WARNING)]
    return sorted(_without_repetitions(faults), key=lambda finding: finding.urgency)


def _without_repetitions(found: Iterable[Finding]) -> Iterator[Finding]:
    """Leave out the findings of a cause that another one names together with the messages that it holds back.

    Those that may be left out come last. Of an open breaker whose transport fails here too, the problem of the
    transport stays.
    """
    told = set[tuple[str, str | None]]()
    left = []
    for finding in found:
        told.update((code, _subject(finding)) for code in _TELLS.get(finding.code, ()))
        if any(finding.code in codes for codes in _TELLS.values()):
            left.append(finding)
        else:
            yield finding
    yield from (finding for finding in left if (finding.code, _subject(finding)) not in told)


def _subject(finding: Finding) -> str | None:
    return finding.about.get("breaker") or finding.about.get("topic")


def _check_database(context: DoctorContext) -> Iterator[Finding]:
    info = context.connection.info
    yield Finding(
        "database",
        Level.OK,
        "database-connected",
        f"connected to {info.dbname} at {info.host or 'a local socket'} as {info.user}",
    )
    for name, check in _SERVER_CHECKS.items():
        yield from run_check(name, check, context)
    has_schema = True
    for finding in run_check("schema", server.check_schema, context):
        has_schema &= finding.level is not Level.PROBLEM
        yield finding
    for name, check in _SCHEMA_CHECKS.items():
        yield from run_check(name, check if has_schema else _without_schema, context)


def _without_schema(_: DoctorContext) -> Findings:
    return [
        skipped("schema-first", "not checked, because the schema has a problem", "fix the finding of `schema` first")
    ]

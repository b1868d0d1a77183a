"""Which checks are made, and in which order: that in which one would mend what they find."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import psycopg

from pgoutbox.doctor import delivery, server, transports
from pgoutbox.doctor import environment as surroundings
from pgoutbox.doctor.context import Limits, Patient, connected
from pgoutbox.doctor.findings import Finding, Level, Notes, examined, said
from pgoutbox.errors import PgOutboxError
from pgoutbox.outbox import Outbox
from pgoutbox.settings import Settings

Check = Callable[[Patient], Notes]

_OF_THE_SERVER: Final[Mapping[str, Check]] = {
    "server": server.check_server,
    "pooler": server.check_pooler,
    "listener": server.check_listener,
    "clock": server.check_clock,
    "durability": server.check_durability,
    "transactions": server.check_transactions,
    "slots": server.check_slots,
    "notify": server.check_notify,
}

_OF_THE_SCHEMA: Final[Mapping[str, Check]] = {
    "rights": server.check_rights,
    "sequence": server.check_sequence,
    "vacuum": server.check_vacuum,
    "partitions": delivery.check_partitions,
    "retention": delivery.check_retention,
    "workers": delivery.check_workers,
    "handlers": delivery.check_handlers,
    "leases": delivery.check_leases,
    "encryption": delivery.check_encryption,
    "due": delivery.check_due,
    "breakers": delivery.check_breakers,
    "failed": delivery.check_failed,
    "destinations": delivery.check_destinations,
}


def examine(
    settings: Settings,
    outbox: Outbox | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    clock: Callable[[], float] = time.time,
) -> Iterator[Finding]:
    """Make every check, and yield each finding as it is made. Raises nothing for what is wrong.

    `outbox` is the application's; without it nothing can be said of its topics and handlers. `environment` is searched
    for misspelt settings, `clock` compared with the server's. Blocks, for some seconds where servers do not answer, and
    must not be run on an event loop.

        problems = [finding for finding in examine(load_settings()) if finding.level is Level.PROBLEM]
    """
    yield from examined("settings", lambda: surroundings.check_settings(settings, environment or {}))
    yield from examined("tls", lambda: surroundings.check_tls(settings))
    with contextlib.ExitStack() as stack:
        try:
            connection = stack.enter_context(connected(settings.require_dsn(), settings))
        except (PgOutboxError, psycopg.Error, OSError) as error:
            yield Finding(
                "database",
                Level.PROBLEM,
                f"PGOUTBOX_DSN: {said(error)}",
                "without the database nothing is enqueued and nothing delivered",
                "check host, port, user and password in PGOUTBOX_DSN, and that the server runs and lets you in",
            )
        else:
            patient = Patient(
                settings=settings, outbox=outbox, connection=connection, limits=limits or Limits(), clock=clock
            )
            yield from _of_the_database(patient)
    for check, ask in transports.CHECKS.items():
        yield from examined(check, lambda ask=ask: ask(settings, outbox))  # type: ignore[misc] # bound now


def _of_the_database(patient: Patient) -> Iterator[Finding]:
    info = patient.connection.info
    yield Finding("database", Level.OK, f"connected to {info.dbname} at {info.host or 'a local socket'} as {info.user}")
    for check, ask in _OF_THE_SERVER.items():
        yield from examined(check, lambda ask=ask: ask(patient))  # type: ignore[misc] # bound now
    has_schema = True
    for finding in examined("schema", lambda: server.check_schema(patient)):
        has_schema &= finding.level is not Level.PROBLEM
        yield finding
    for check, ask in _OF_THE_SCHEMA.items():
        if has_schema:
            yield from examined(check, lambda ask=ask: ask(patient))  # type: ignore[misc] # bound now
        else:
            yield Finding(check, Level.SKIPPED, "the schema comes first", None, "mend what `schema` names")

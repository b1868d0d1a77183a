"""The command that delivers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Annotated, Final, Literal

import psycopg
import typer

from pgoutbox.cli.arguments import App, Dsn, load_outbox
from pgoutbox.cli.console import configure_logging, print_warning
from pgoutbox.cli.program import app, describe_known_queues, read_settings
from pgoutbox.database import operator_connection
from pgoutbox.errors import ConfigurationError
from pgoutbox.operations import queue_controls
from pgoutbox.settings import Settings, parse_address

_MAX_PORT: Final = 65_535


@app.command()
def worker(
    *,
    where: App = None,
    queues: Annotated[
        list[str] | None,
        typer.Option("--queue", metavar="NAME[:WEIGHT]", help="A queue to work on, in this order or by these weights."),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, max=256, help="Worker processes to supervise.")] = 1,
    concurrency: Annotated[int | None, typer.Option(help="Attempts under way at once in one process.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Work off what is due, then exit.")] = False,
    drain: Annotated[bool, typer.Option("--drain", help="Work off what is due and its retries, then exit.")] = False,
    no_listen: Annotated[
        bool, typer.Option("--no-listen", help="Poll instead of waiting for NOTIFY (behind a transaction pooler).")
    ] = False,
    name: Annotated[str | None, typer.Option(help="Name in the column worker; host and process if not given.")] = None,
    dsn: Dsn = None,
) -> None:
    """Claim messages and run their handlers.

    Until SIGTERM or SIGINT, which wait for the handlers under way; a second one does not.
    """
    if once and drain:
        raise typer.BadParameter("--once and --drain exclude each other")
    if processes > 1 and (once or drain):
        raise typer.BadParameter("--processes supervises workers that run on; it excludes --once and --drain")
    from pgoutbox.worker.claim_planner import parse_queues
    from pgoutbox.worker.supervisor import run_worker

    settings = read_settings(
        dsn, app=where, concurrency=concurrency, listen=False if no_listen else None, worker_name=name
    )
    settings.require_dsn()
    shares = parse_queues(queues or ())
    if settings.app is None:
        raise ConfigurationError("no outbox given: set PGOUTBOX_APP, or pass --app module:attribute")
    outbox = load_outbox(settings.app)
    configure_logging(settings)
    _warn_of_unknown_queues(settings, [share.name for share in shares] if queues else [])
    if processes > 1:
        raise typer.Exit(_supervise(settings, queues or [], processes, dsn=dsn))
    mode: Literal["run", "once", "drain"] = "once" if once else "drain" if drain else "run"
    raise typer.Exit(run_worker(outbox, settings, queues=shares, mode=mode))


def _supervise(settings: Settings, queues: Sequence[str], processes: int, *, dsn: str | None) -> int:
    from pgoutbox.worker.supervisor import supervise

    if dsn is not None:
        # The children inherit it here, out of everyone's sight.
        os.environ["PGOUTBOX_DSN"] = dsn
    arguments = ["--app", str(settings.app), "--concurrency", str(settings.concurrency)]
    for queue in queues:
        arguments += ["--queue", queue]
    if not settings.listen:
        arguments.append("--no-listen")
    if settings.worker_name is not None:
        arguments += ["--name", settings.worker_name]
    return supervise(arguments, processes, environment_of=_environments(settings, processes))


def _environments(settings: Settings, processes: int) -> Callable[[int], dict[str, str]]:
    """Each process has a port of its own for its metrics, and the first one alone counts for the whole database."""
    if settings.metrics_address is None:
        return lambda _: {}
    host, first_port = parse_address(settings.metrics_address)
    if first_port + processes - 1 > _MAX_PORT:
        raise ConfigurationError(
            f"PGOUTBOX_METRICS_ADDRESS={settings.metrics_address}: "
            f"--processes {processes} needs as many ports from this one on"
        )

    def environment(number: int) -> dict[str, str]:
        port = first_port + number if first_port else 0
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        counts = settings.metrics_backlog and number == 0
        return {"PGOUTBOX_METRICS_ADDRESS": address, "PGOUTBOX_METRICS_BACKLOG": str(counts).lower()}

    return environment


def _warn_of_unknown_queues(settings: Settings, queues: list[str]) -> None:
    # A queue that is new has no messages yet, so this is no error. A server that is away is the worker's to wait for.
    if not queues:
        return
    with contextlib.suppress(psycopg.Error), operator_connection.connect(settings, read_only=True) as connection:
        for queue in queue_controls.unknown_queues(connection, queues):
            print_warning(f"queue {queue!r} has no messages so far; {describe_known_queues(connection)}")

"""The command `worker`."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Annotated, Final, Literal

import psycopg
import typer

from pgoutbox.cli.arguments import duration_option, load_outbox
from pgoutbox.cli.console import configure_logging
from pgoutbox.cli.databases import serves_all
from pgoutbox.cli.options import (
    App,
    DatabaseOptions,
    command,
    open_operator,
    read_settings,
    warn_of_unknown_variables,
)
from pgoutbox.cli.program import warn_of_unknown
from pgoutbox.errors import ConfigurationError
from pgoutbox.settings import Settings, load_settings, parse_address

_MAX_PORT: Final = 65_535


@command()
def worker(
    *,
    where: App = None,
    queues: Annotated[
        list[str] | None,
        typer.Option(
            "--queue",
            metavar="NAME[:WEIGHT]",
            help="Queue to serve, in this order or by weight; '*' for all. Repeatable.",
        ),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, max=256, help="Number of worker processes.")] = 1,
    concurrency: Annotated[int | None, typer.Option(help="Maximum number of concurrent attempts per process.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Deliver all due messages, then exit.")] = False,
    drain: Annotated[
        bool, typer.Option("--drain", help="Deliver all due messages and their retries, then exit.")
    ] = False,
    max_messages: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --once: claim at most N messages.")
    ] = None,
    max_time: Annotated[
        timedelta | None, duration_option("--max-time", "With --once: claim nothing after DURATION.")
    ] = None,
    no_listen: Annotated[
        bool, typer.Option("--no-listen", help="Poll instead of waiting for NOTIFY (behind a transaction pooler).")
    ] = False,
    name: Annotated[str | None, typer.Option(help="Name of the worker (default: host and process id).")] = None,
    place: DatabaseOptions,
) -> None:
    """Claim messages and run their handlers.

    Runs until SIGTERM or SIGINT, then waits for running handlers. A second signal ends it at once.

    For hosts that must not send: with PGOUTBOX_WORKER_ENABLED=false it says so and ends with exit code 0.
    """
    if once and drain:
        raise typer.BadParameter("--once and --drain exclude each other")
    if not once and (max_messages is not None or max_time is not None):
        raise typer.BadParameter("--max-messages and --max-time need --once")
    if processes > 1 and (once or drain):
        raise typer.BadParameter("--processes excludes --once and --drain")
    from pgoutbox.worker.queues import ALL_QUEUES, parse_queues
    from pgoutbox.worker.supervisor import run_worker

    overrides = {
        "app": where,
        "concurrency": concurrency,
        "listen": False if no_listen else None,
        "worker_name": name,
    }
    settings = load_settings(**overrides)
    # Cron sends an e-mail if a command writes anything. A person at a terminal should see the counts and warnings.
    is_quiet = (once or drain) and not sys.stderr.isatty()
    if not settings.worker_enabled:
        configure_logging(settings, is_quiet=is_quiet, is_run=is_quiet)
        logging.getLogger("pgoutbox.worker").info("no worker runs on this host: PGOUTBOX_WORKER_ENABLED is false")
        raise typer.Exit
    if settings.app is None and settings.dsns is None and place.dsn is None:
        settings.require_dsn()  # Nothing is set: this is the first thing to set.
    shares = parse_queues(queues or ())
    outbox = load_outbox(settings.app)
    has_many = serves_all(settings, outbox, names_one=place.dsn is not None or place.database is not None)
    if has_many:
        warn_of_unknown_variables()
    else:
        settings = read_settings(place.dsn, place.database, **overrides)
        settings.require_dsn()
    configure_logging(settings, is_quiet=is_quiet, is_run=is_quiet)
    if queues and not is_quiet and not has_many:
        defined = {topic.queue for topic in outbox.topics.values()}
        named = {share.name for share in shares} - {ALL_QUEUES}
        _warn_of_unknown_queues(settings, sorted(name for name in named if name not in defined))
    if processes > 1:
        raise typer.Exit(_supervise(settings, queues or [], processes, dsn=place.dsn, has_many=has_many))
    mode: Literal["run", "once", "drain"] = "once" if once else "drain" if drain else "run"
    raise typer.Exit(
        run_worker(
            outbox,
            settings,
            queues=queues or outbox.default_queues,
            has_many=has_many,
            mode=mode,
            max_messages=max_messages,
            max_seconds=None if max_time is None else max_time.total_seconds(),
        )
    )


def _supervise(settings: Settings, queues: Sequence[str], processes: int, *, dsn: str | None, has_many: bool) -> int:
    from pgoutbox.worker.supervisor import supervise

    if dsn is not None:
        # Child processes inherit the variable, which the process list does not show.
        os.environ["PGOUTBOX_DSN"] = dsn
        os.environ.pop("PGOUTBOX_DSNS", None)
        os.environ.pop("PGOUTBOX_DATABASE", None)
    elif settings.database is not None:
        os.environ["PGOUTBOX_DATABASE"] = settings.database
    arguments = ["--app", str(settings.app), "--concurrency", str(settings.concurrency)]
    for queue in queues:
        arguments += ["--queue", queue]
    if not settings.listen:
        arguments.append("--no-listen")
    if settings.worker_name is not None:
        arguments += ["--name", settings.worker_name]
    environment_of = _environments(settings, processes)
    return supervise(arguments, processes, environment_of=environment_of, passes_reloads=has_many)


def _environments(settings: Settings, processes: int) -> Callable[[int], dict[str, str]]:
    """Return the environment of each process: its own metrics port; only the first process counts the backlog."""
    if settings.metrics.address is None:
        return lambda _: {}
    host, first_port = parse_address(settings.metrics.address)
    if first_port + processes - 1 > _MAX_PORT:
        raise ConfigurationError(
            f"PGOUTBOX_METRICS_ADDRESS={settings.metrics.address}: "
            f"--processes {processes} needs that many ports, the last would be above {_MAX_PORT}"
        )

    def environment(number: int) -> dict[str, str]:
        port = first_port + number if first_port else 0
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        counts = settings.metrics.backlog and number == 0
        return {"PGOUTBOX_METRICS_ADDRESS": address, "PGOUTBOX_METRICS_BACKLOG": str(counts).lower()}

    return environment


def _warn_of_unknown_queues(settings: Settings, queues: list[str]) -> None:
    # A new queue has no messages, so this is only a warning. If the server is down, the worker waits for it later.
    if not queues:
        return
    with contextlib.suppress(psycopg.Error), open_operator(settings, read_only=True) as operator:
        warn_of_unknown(operator, "queue", queues)

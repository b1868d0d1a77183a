"""The database that a command looks at: the only one, one of a list by its name, or each of the list."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import copy_context
from difflib import get_close_matches
from queue import SimpleQueue
from typing import Final, NamedTuple, TypeVar

import psycopg
import typer

from pgoutbox.cli.arguments import load_outbox
from pgoutbox.cli.console import print_error, print_note
from pgoutbox.cli.explain import chosen_database, explain
from pgoutbox.database.operator_connection import limiting
from pgoutbox.databases import read_databases, settings_of
from pgoutbox.doctor.findings import join_names
from pgoutbox.errors import ConfigurationError, PgOutboxError
from pgoutbox.outbox import Outbox
from pgoutbox.settings import Settings, load_settings

_AT_ONCE: Final = 8
_MOST_NAMES: Final = 10
_NO_LIST: Final = "there is no list of databases; set PGOUTBOX_DSNS, or PGOUTBOX_APP to an outbox with `databases`"

T = TypeVar("T")


class Failure(NamedTuple):
    """Why a database of the list could not be used, and the exit code for it."""

    text: str
    exit_code: int


def load_database(dsn: str | None, database: str | None, **overrides: object) -> Settings:
    """Return the settings of the database that --dsn, --database or the environment names.

    Raises `ConfigurationError` with the known names if there is a list, and no name of it is given.
    """
    if dsn is not None:
        if database is not None:
            raise ConfigurationError("--dsn and --database exclude each other")
        return load_settings(dsn=dsn, **overrides).model_copy(update={"dsns": None, "database": None})
    settings = load_settings(database=database, **overrides)
    if settings.dsns is None and settings.dsn is not None:
        if settings.database is not None:
            raise ConfigurationError(
                f"PGOUTBOX_DSN and database {settings.database!r} of a list are both given: unset one of them"
            )
        return settings
    databases = _listed(settings)
    if databases is None and settings.database is None:
        return settings
    if databases is None:
        raise ConfigurationError(f"database {settings.database!r}: {_NO_LIST}")
    name = settings.database
    if name is None or name not in databases:
        known = f"{len(databases)} databases: {join_names(databases, most=_MOST_NAMES)}"
        if name is None:
            raise ConfigurationError(f"name one of {known}; give it as --database NAME or PGOUTBOX_DATABASE")
        nearest = "".join(f"; did you mean {near!r}?" for near in get_close_matches(name, databases, n=1))
        raise ConfigurationError(f"no database {name!r} among {known}{nearest}")
    chosen = settings_of(settings, name, databases[name])
    chosen_database.set(chosen)
    if sys.stderr.isatty():
        print_note(f"database {name}")
    return chosen


def load_databases(dsn: str | None, database: str | None, **overrides: object) -> dict[str, Settings]:
    """Return the settings of each database of the list, by its name."""
    if dsn is not None or database is not None:
        raise ConfigurationError("all databases are asked for: omit --dsn and --database")
    settings = load_settings(**overrides)
    databases = _listed(settings)
    if databases is None:
        raise ConfigurationError(_NO_LIST)
    return {name: settings_of(settings, name, dsn) for name, dsn in databases.items()}


def serves_all(settings: Settings, outbox: Outbox | None, *, names_one: bool) -> bool:
    """Whether a command serves all databases of the list: neither its options nor the environment name one."""
    return not names_one and settings.database is None and read_databases(settings, outbox) is not None


def _listed(settings: Settings) -> dict[str, str] | None:
    # With a list in the environment, a command need not import the application.
    is_asked = settings.dsns is None and settings.app is not None
    return read_databases(settings, load_outbox(settings.app) if is_asked else None)


def each_database(
    databases: Mapping[str, Settings], work: Callable[[Settings], T]
) -> Iterator[tuple[str, T | Failure]]:
    """Run `work` for each database, up to eight at once in threads, and yield each result as soon as it is there.

    A database that cannot be used yields a `Failure`, and the others go on.
    """
    waiting = iter(list(databases.items()))  # Threads may share the iterator of a list.
    ended: SimpleQueue[tuple[str, T | Failure | BaseException]] = SimpleQueue()

    def run() -> None:
        for name, settings in waiting:
            try:
                ended.put((name, work(settings)))
            except (PgOutboxError, psycopg.Error) as error:
                ended.put((name, Failure(*explain(error, settings))))
            except BaseException as error:  # noqa: BLE001 - the main thread raises it
                ended.put((name, error))

    for _ in range(_AT_ONCE):
        # At Ctrl-C the process ends at once, as it does for one database.
        threading.Thread(target=copy_context().run, args=[run], daemon=True).start()
    try:
        for _ in databases:
            name, result = ended.get()
            if isinstance(result, BaseException):
                raise result
            yield name, result
    finally:
        for _ in waiting:
            pass


@contextlib.contextmanager
def look_everywhere(
    databases: Mapping[str, Settings], read: Callable[[Settings], T]
) -> Iterator[list[tuple[str | None, T]]]:
    """Yield what `read` returns for each database, in the order of the list.

    After the `with` block, report the databases that could not be read. Then the command ends with the worst exit code.
    """
    with limiting(min(settings.statement_timeout_seconds for settings in databases.values())):
        ended = dict(each_database(databases, read))
    found: list[tuple[str | None, T]] = []
    failed = {}
    for name in databases:
        match ended[name]:
            case Failure() as failure:
                failed[name] = failure
            case value:
                found.append((name, value))
    yield found
    report_failures(failed, len(databases))


def report_failures(failed: Mapping[str, Failure], count: int) -> None:
    """Print an error for each of these databases, and exit with the worst code. Do nothing if there are none."""
    if not failed:
        return
    for name, failure in failed.items():
        print_error(f"{name}: {failure.text}")
    print_error(f"{len(failed)} of {count} databases failed")
    raise typer.Exit(max(failure.exit_code for failure in failed.values()))


def flat(found: list[tuple[str | None, list[T]]]) -> tuple[list[T], list[str] | None]:
    """Return all rows, and the name of each row's database; None for the only database."""
    rows = [row for _, rows in found for row in rows]
    names = [name for name, rows in found for _ in rows if name is not None]
    return rows, None if any(name is None for name, _ in found) else names

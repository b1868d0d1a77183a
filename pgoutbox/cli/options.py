"""The options that commands share, and what they give: the settings, the operator, the filter, the form of the output.

A parameter of a command that is one of these dataclasses stands for its fields.
"""

from __future__ import annotations

import functools
import getpass
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from functools import cached_property
from inspect import Signature, get_annotations, signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

import typer

from pgoutbox.cli.arguments import load_outbox, parse_id, parse_past_time
from pgoutbox.cli.console import print_documents, print_json, print_line, print_table, print_warning
from pgoutbox.cli.databases import load_database, load_databases, look_everywhere
from pgoutbox.cli.program import app
from pgoutbox.message import State
from pgoutbox.operations import MessageFilter, Operator
from pgoutbox.settings import SUPERVISOR_FD_VARIABLE, Settings, load_settings, renamed_variables, unknown_variables

T = TypeVar("T")

App = Annotated[
    str | None,
    typer.Option("--app", metavar="MODULE:ATTRIBUTE", help="The outbox of the application (default: PGOUTBOX_APP)."),
]
Dsn = Annotated[
    str | None,
    typer.Option(
        "--dsn",
        metavar="DSN",
        help="Connection string. Visible in the process list: prefer PGOUTBOX_DSN.",
    ),
]
Database = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="NAME",
        help="One of the databases in PGOUTBOX_DSNS (default: PGOUTBOX_DATABASE).",
    ),
]
Everywhere = Annotated[bool, typer.Option("--all-databases", help="Look at all databases in PGOUTBOX_DSNS.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, with times in UTC.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
InTopic = Annotated[str | None, typer.Option("--topic", help="Only messages of this topic.")]
InQueue = Annotated[str | None, typer.Option("--queue", help="Only messages of this queue.")]
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of rows.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the effect without changes.")]
Ids = Annotated[list[int] | None, typer.Argument(parser=parse_id, metavar="ID", help="Message ids.")]
IdFile = Annotated[
    Path | None,
    typer.Option("--file", metavar="FILE", help="Read the ids from this file, one per line; - means stdin."),
]
RuleTopic = Annotated[str, typer.Argument(metavar="TOPIC", help="A topic, or * for all topics without their own rule.")]
RuleState = Annotated[
    str,
    typer.Argument(
        metavar="STATE",
        help="sent, failed, skipped or cancelled; dedupe_key, for keys of deleted messages; or audit, for old acts.",
    ),
]

# The person of `pgoutbox --as`.
stated_person: ContextVar[str | None] = ContextVar("stated_person", default=None)


def command(name: str | None = None, *, of: typer.Typer = app) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command, by the name of its function if no other is given."""
    return lambda run: of.command(name)(expanded(run))


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """Declare each field of a parameter that is a dataclass as an option of the command, after its own options."""
    every = signature(command, eval_str=True).parameters.values()
    shared: dict[str, Any] = {one.name: one.annotation for one in every if is_dataclass(one.annotation)}
    parameters = [one for one in every if one.name not in shared]
    for options in shared.values():
        declared, hints = signature(options).parameters, get_type_hints(options, include_extras=True)
        names = [name for kind in options.__mro__ for name in get_annotations(kind)]
        parameters += [declared[name].replace(annotation=hints[name]) for name in names]

    @functools.wraps(command)
    def call(**given: object) -> None:
        for name, options in shared.items():
            given[name] = options(**{field.name: given.pop(field.name) for field in fields(options)})
        command(**given)

    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return call


def read_settings(dsn: str | None, database: str | None = None, **overrides: object) -> Settings:
    """Return the settings of the command's database, as `load_database`. Warn of misspelt variables."""
    warn_of_unknown_variables()
    return load_database(dsn, database, **overrides)


def warn_of_unknown_variables() -> None:
    """Warn of variables with a former name, and of unknown ones, with the most similar setting."""
    if SUPERVISOR_FD_VARIABLE not in os.environ:  # The supervisor has already warned.
        for variable, name in renamed_variables(os.environ):
            print_warning(f"setting {variable} is now {name}; set {name} instead")
        for variable, nearest in unknown_variables(os.environ):
            print_warning(f"unknown setting {variable}; did you mean {nearest}?")


def open_operator(settings: Settings, *, read_only: bool = False) -> Operator:
    """Connect as the person of --as, else as the account of this machine. The audit also records account and host."""
    try:
        account = getpass.getuser()
    except (KeyError, OSError):
        account = f"uid {os.getuid()}"
    person = stated_person.get()
    place = socket.gethostname() if person is None else f"{account}@{socket.gethostname()}"
    return Operator(settings, actor=(person or account)[:200], origin=f"cli {place}"[:200], read_only=read_only)


@dataclass(frozen=True, kw_only=True)
class DatabaseOptions:
    """The options of every command that uses a database."""

    dsn: Dsn = None
    database: Database = None


@dataclass(frozen=True, kw_only=True)
class Options(DatabaseOptions):
    """The options of every command that prints rows or results of the database."""

    context: typer.Context
    as_json: Json = False

    @cached_property
    def settings(self) -> Settings:
        """The settings. The group of the command may name the database."""
        is_named = self.dsn is not None or self.database is not None or self.context.obj is None
        named: DatabaseOptions = self if is_named else self.context.obj
        return read_settings(named.dsn, named.database, **self._overrides())

    def _overrides(self) -> dict[str, object]:
        return {}

    def databases(self, **overrides: object) -> dict[str, Settings]:
        """Return the settings of each database of the list."""
        warn_of_unknown_variables()
        return load_databases(self.dsn, self.database, **self._overrides(), **overrides)

    def looking(
        self, read: Callable[[Settings], T], *, everywhere: bool
    ) -> AbstractContextManager[list[tuple[str | None, T]]]:
        """Return what `read` returns for the database, without a name, or as `look_everywhere`."""
        if everywhere:
            return look_everywhere(self.databases(), read)
        return nullcontext([(None, read(self.settings))])

    def print(self, document: object, text: str) -> None:
        """Print a result: the JSON document, or the line of text."""
        if self.as_json:
            print_json(document)
        else:
            print_line(text)

    def print_rows(
        self, columns: Sequence[str], rows: Sequence[NamedTuple], *, of: Sequence[str] | None = None
    ) -> None:
        """Print rows: one JSON document for each, or a table of these columns. `of` names the database of each row."""
        if self.as_json:
            print_documents(rows, of=of)
        else:
            print_table(columns, [[getattr(row, column) for column in columns] for row in rows], of=of)


@dataclass(frozen=True, kw_only=True)
class AppOptions(Options):
    """The options of every such command that may know the topics of the application."""

    where: App = None

    def _overrides(self) -> dict[str, object]:
        return {"app": self.where}

    @cached_property
    def app(self) -> str | None:
        """The outbox of the application. Names no database."""
        return load_settings(app=self.where).app

    def redacted_names(self) -> Callable[[str], tuple[str, ...]]:
        """Return a function from a topic to the names that are hidden in its messages."""
        names = load_settings().redacted_names
        topics = {} if self.app is None else load_outbox(self.app).topics
        return lambda topic: names + (topics[topic].redact if topic in topics else ())


@dataclass(frozen=True, kw_only=True)
class FilterOptions(AppOptions):
    """The options of every command that selects messages: the fields of a filter, and `AppOptions`."""

    states: Annotated[list[State] | None, typer.Option("--state", help="Only messages in this state. Repeatable.")] = (
        None
    )
    topic: InTopic = None
    queue: InQueue = None
    destination: Annotated[str | None, typer.Option(help="Only messages to this URI or e-mail address.")] = None
    owner: Annotated[str | None, typer.Option(help="Only messages of this owner.")] = None
    key: Annotated[str | None, typer.Option(help="Only messages with this coalesce, dedupe, ordering or fair key.")] = (
        None
    )
    text: Annotated[
        str | None, typer.Option(help="Only messages with this text in the destination, the owner, a key or the error.")
    ] = None
    error_group: Annotated[
        str | None, typer.Option("--group", metavar="GROUP", help="Only failed messages of this group; see failures.")
    ] = None
    breaker: Annotated[
        str | None, typer.Option(metavar="BREAKER", help="Only pending messages behind this open circuit breaker.")
    ] = None
    created_from: Annotated[
        datetime | None,
        typer.Option(
            "--since",
            parser=parse_past_time,
            metavar="TIME",
            help="Only messages enqueued since this time, such as 2026-11-21T10:00Z, or 2h for two hours ago.",
        ),
    ] = None
    created_before: Annotated[
        datetime | None,
        typer.Option(
            "--until", parser=parse_past_time, metavar="TIME", help="Only messages enqueued before this time."
        ),
    ] = None

    def filter(self) -> MessageFilter:
        """Return the filter for messages."""
        given = {field.name: getattr(self, field.name, None) for field in fields(MessageFilter)}
        return MessageFilter(**{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class BulkOptions(FilterOptions):
    """The arguments and options of every command that changes messages."""

    message_ids: Ids = None
    file: IdFile = None
    every: Annotated[bool, typer.Option("--all", help="Select all messages that match the filter, if any.")] = False
    dry_run: DryRun = False
    yes: Yes = False

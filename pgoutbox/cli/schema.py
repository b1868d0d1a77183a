"""The commands on the schema."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final, TypeVar

import typer

from pgoutbox import migrate as migrations
from pgoutbox import migration_plan
from pgoutbox.cli.console import FAILED, print_json, print_line, print_note
from pgoutbox.cli.databases import Failure, each_database, flat, report_failures
from pgoutbox.cli.options import Options, Yes, command, expanded, open_operator, read_settings
from pgoutbox.cli.program import app, confirm, interruptible, shorten
from pgoutbox.migration_plan import PlannedStep
from pgoutbox.operations import Home
from pgoutbox.settings import Settings
from pgoutbox.text import pluralize

_QUESTION = (
    "Name of this deployment, such as production, so that cloned servers send nothing. Its workers need it as "
    "PGOUTBOX_DEPLOYMENT (Enter: no name)"
)

_PLAN_COLUMNS: Final = ("relation", "lock", "size_bytes", "seconds", "statement")

T = TypeVar("T")

migrate_app = typer.Typer(rich_markup_mode=None)
app.add_typer(migrate_app, name="migrate")


@migrate_app.callback(invoke_without_command=True)
@expanded
def migrate(
    *,
    sql: Annotated[bool, typer.Option("--sql", help="Print the SQL script instead of running it.")] = False,
    revisions: Annotated[
        str | None,
        typer.Option(
            "--revisions",
            metavar="FIRST:SECOND",
            help="With --sql: only the steps from one revision to another, such as pgoutbox_0001:head. [default: "
            "base:head]",
        ),
    ] = None,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Show the locks on existing tables, with sizes and times, and change nothing."),
    ] = False,
    deployment: Annotated[
        str | None,
        typer.Option(
            "--deployment",
            metavar="NAME",
            help="Name of a new schema's deployment: only workers with this PGOUTBOX_DEPLOYMENT send from it. "
            "[default: PGOUTBOX_DEPLOYMENT]",
        ),
    ] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="All databases in PGOUTBOX_DSNS, up to eight at once. Goes on after a failure."),
    ] = False,
    options: Options,
) -> None:
    """Create or upgrade the schema pgoutbox.

    Uses one transaction for each revision. Changes nothing if the schema is up to date. On a terminal, it asks for the
    name of a new schema's deployment, without --all. --plan estimates the time of a statement that reads a whole table.
    --sql connects to no database, so name the revision of a migrated one: --revisions pgoutbox_0001:head.
    """
    options.context.obj = options
    if every and (sql or options.context.invoked_subcommand is not None):
        raise typer.BadParameter("--all: only for `pgoutbox migrate` and for --plan")
    if revisions is not None and not sql:
        raise typer.BadParameter("--revisions: only with --sql")
    if options.context.invoked_subcommand is not None:
        return
    if sql:
        sys.stdout.write(migrations.upgrade_sql(revisions or "head"))
        return
    if every and plan:
        _plan_all(options)
        return
    if every:
        _migrate_all(options, deployment)
        return
    settings = read_settings(options.dsn, options.database, deployment=deployment)
    target = settings.require_dsn()
    if plan:
        _print_plan(target, options)
        return
    with interruptible("the current revision was not applied; run `pgoutbox migrate` again"):
        before = migrations.current(target)
        if before is None and settings.deployment is None and sys.stdin.isatty() and not options.as_json:
            answer = typer.prompt(_QUESTION, default="", show_default=False, err=True)
            settings = read_settings(options.dsn, options.database, deployment=answer or None)
        migrations.upgrade(target, report=print_note, deployment=settings.deployment)
        _print_revision(before, migrations.current(target), options)
    _print_deployment(migrations.deployment_of(target), settings.deployment)


@command(of=migrate_app)
def downgrade(
    revision: Annotated[str, typer.Argument(help="Target revision; base removes the schema with all messages.")],
    *,
    delete_messages: Annotated[
        bool, typer.Option("--delete-messages", help="Delete messages that are not delivered too.")
    ] = False,
    yes: Yes = False,
    options: Options,
) -> None:
    """Downgrade the schema, in one transaction.

    Changes nothing while a worker runs, or while messages are pending, in flight or failed, unless --delete-messages
    is given.
    """
    target = options.settings.require_dsn()
    with interruptible("nothing was changed; run the command again"):
        lost = "the data of later revisions"
        if revision == "base":
            counts = [f"{count:,} {name}" for name, count in sorted(migrations.count_rows(target).items())]
            lost = f"all messages and the audit ({', '.join(counts) or 'no rows'})"
        confirm(f"downgrade the schema to {revision} and delete {lost}", yes=yes)
        before = migrations.current(target)
        migrations.downgrade(target, revision, delete_messages=delete_messages, report=print_note)
        _print_revision(before, migrations.current(target), options)


@command(of=migrate_app)
def current(options: Options) -> None:
    """Print the revision of the database, and the newest revision of this version.

    The JSON names the Alembic history that migrated the database, pgoutbox or application, and a fault that no
    migration corrects.
    """
    found, newest = migrations.state(options.settings.require_dsn()), migrations.head()
    notes = ["up to date" if found.revision == newest else f"newest: {newest}"]
    if found.fault is not None:
        notes = [found.fault]
    elif found.history == "application":
        notes.append("migrated by the application's own Alembic history: upgrade it with `alembic upgrade heads`")
    options.print(
        {"revision": found.revision, "head": newest, "history": found.history, "fault": found.fault},
        f"{found.revision or 'not migrated'} ({'; '.join(notes)})",
    )


@command(of=migrate_app)
def indexes(options: Options) -> None:
    """Build the large indexes of the next revision, while messages flow.

    For an application's own Alembic history, before `alembic upgrade`, and for a DBA before the SQL script. `pgoutbox
    migrate` does the same.
    """
    target = options.settings.require_dsn()
    with interruptible("run `pgoutbox migrate indexes` again; it builds the remaining ones"):
        migrations.build_indexes(target, report=print_note)
    options.print({}, "large indexes of the next revision: all exist")


@command(of=migrate_app)
def grants(options: Options) -> None:
    """Create missing roles, and grant each role its rights.

    Run it as the owner of the schema after somebody else has created the roles. `pgoutbox migrate` does the same while
    a role has no rights. If roles are missing and cannot be created, it prints the SQL to create them and exits with 1.
    """
    with interruptible("nothing was changed; run the command again"):
        missing = migrations.grants(options.settings.require_dsn())
    sql = migrations.create_roles_sql(missing)
    text = sql if missing else "roles of pgoutbox: all exist and have their rights"
    options.print({"missing": missing, "sql": sql}, text)
    if missing:
        raise typer.Exit(FAILED)


def _migrate_all(options: Options, deployment: str | None) -> None:
    databases = options.databases(deployment=deployment)

    def migrate_one(settings: Settings) -> tuple[str | None, str | None]:
        target, before = settings.require_dsn(), migrations.current(settings.require_dsn())
        migrations.upgrade(
            target, report=lambda text: print_note(f"{settings.database}: {text}"), deployment=settings.deployment
        )
        return before, migrations.current(target)

    with interruptible("some databases are migrated; run the command again for the others"):
        done, failed = _with_progress(databases, migrate_one, lambda change: _change(*change), options)
    if options.as_json:
        for name, (before, after) in done.items():
            print_json({"database": name, "before": before, "revision": after})
    is_unnamed = all(settings.deployment is None for settings in databases.values())
    if is_unnamed and any(before is None for before, _ in done.values()):
        _print_deployment(None, None)
    report_failures(failed, len(databases))
    print_note(f"{pluralize(len(databases), 'database')} up to date")


def _plan_all(options: Options) -> None:
    databases = options.databases()

    def plan_one(settings: Settings) -> tuple[str | None, list[PlannedStep]]:
        target = settings.require_dsn()
        return migrations.current(target), migration_plan.plan(target)

    done, failed = _with_progress(databases, plan_one, lambda planned: _planned_change(*planned), options)
    steps, names = flat([(name, done[name][1]) for name in databases if name in done])
    if steps:
        options.print_rows(_PLAN_COLUMNS, _shortened(steps, options), of=names)
    report_failures(failed, len(databases))


def _with_progress(
    databases: Mapping[str, Settings], work: Callable[[Settings], T], tell: Callable[[T], str], options: Options
) -> tuple[dict[str, T], dict[str, Failure]]:
    """Run `work` for each database, and print a line as soon as one is done. Return the results and the failures."""
    done: dict[str, T] = {}
    failed: dict[str, Failure] = {}
    for number, (name, result) in enumerate(each_database(databases, work), start=1):
        match result:
            case Failure() as failure:
                failed[name], told = failure, "failed"
            case value:
                done[name], told = value, tell(value)
        if not options.as_json:
            print_line(f"[{number}/{len(databases)}] {name}: {told}")
            sys.stdout.flush()
    return done, failed


def _print_plan(target: str, options: Options) -> None:
    before, steps = migrations.current(target), migration_plan.plan(target)
    if not steps and not options.as_json:
        options.print({}, f"schema pgoutbox: {_planned_change(before, steps)}")
        return
    if not options.as_json:
        print_note(f"{_planned_change(before, steps)}, one transaction for each revision: a lock lasts until its end")
    options.print_rows(_PLAN_COLUMNS, _shortened(steps, options))


def _shortened(steps: Sequence[PlannedStep], options: Options) -> Sequence[PlannedStep]:
    """Return the steps as a table on a terminal has them."""
    if options.as_json:
        return steps
    short = [
        step._replace(relation=step.relation.removeprefix("pgoutbox."), statement=shorten(step.statement) or "")
        for step in steps
    ]
    if any(step.statement.endswith("…") for step in short):
        print_note("some statements are cut: --json shows them as a whole")
    return short


def _planned_change(before: str | None, steps: Sequence[PlannedStep]) -> str:
    newest = migrations.head()
    if before == newest:
        return "up to date"
    return f"{before or 'base'} -> {newest}{'' if steps else ', no lock on an existing table'}"


def _print_revision(before: str | None, after: str | None, options: Options) -> None:
    options.print({"before": before, "revision": after}, f"schema pgoutbox: {_change(before, after)}")


def _change(before: str | None, after: str | None) -> str:
    return f"up to date at {after or 'base'}" if before == after else f"{before or 'base'} -> {after or 'base'}"


def _print_deployment(recorded: str | None, given: str | None) -> None:
    if recorded is not None and recorded != os.environ.get("PGOUTBOX_DEPLOYMENT"):
        print_note(f"only workers with PGOUTBOX_DEPLOYMENT={recorded} send from this database")
    elif recorded is None:
        name = "a name" if given is None else given
        print_note(
            "this deployment has no name, so workers of a cloned server would send, too. To name it, set "
            f"PGOUTBOX_DEPLOYMENT to {name} for all workers; then run: pgoutbox adopt"
        )


@command()
def adopt(*, yes: Yes = False, options: Options) -> None:
    """Let workers send from this database, which is a copy.

    Records this database and PGOUTBOX_DEPLOYMENT, if it is set. Then only workers with the same value send from it.
    """
    settings = options.settings
    with open_operator(settings) as operator, interruptible("see `pgoutbox doctor`"):
        home = operator.home()
        if not (home.is_here and home.deployment == settings.deployment):
            senders = "any worker" if settings.deployment is None else f"workers of deployment {settings.deployment}"
            confirm(
                f"let {senders} send from {_content_of(home)}. "
                "If the original sends these messages too, their receivers get them twice",
                yes=yes,
            )
            operator.adopt(settings.deployment)
            home = operator.home()
    options.print(home._asdict(), f"workers send from {_content_of(home)}")


def _content_of(home: Home) -> str:
    return (
        f"database {home.database_name}: {pluralize(home.due, 'due message')}, "
        f"{home.in_flight} in flight, {home.scheduled} scheduled"
    )

"""The commands on the schema."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pgoutbox import migrate as migrations
from pgoutbox.cli.arguments import Dsn, Json, Yes
from pgoutbox.cli.console import print_json, print_line, print_note
from pgoutbox.cli.program import app, confirm, interruptible, read_settings

migrate_app = typer.Typer(rich_markup_mode=None)
app.add_typer(migrate_app, name="migrate")


@migrate_app.callback(invoke_without_command=True)
def migrate(
    context: typer.Context,
    *,
    sql: Annotated[bool, typer.Option("--sql", help="Print the SQL script instead of running it.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Create or upgrade the schema pgoutbox.

    One transaction; nothing to do if the schema is up to date.
    """
    context.obj = dsn
    if context.invoked_subcommand is not None:
        return
    if sql:
        sys.stdout.write(migrations.upgrade_sql())
        return
    target = read_settings(dsn).require_dsn()
    with interruptible("nothing was changed; run `pgoutbox migrate` again"):
        before = migrations.current(target)
        migrations.upgrade(target, report=print_note)
        _print_revision(before, migrations.current(target), as_json=as_json)


@migrate_app.command()
def downgrade(
    context: typer.Context,
    revision: Annotated[str, typer.Argument(help="Where to go back to; `base` removes the schema and every message.")],
    *,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Take revisions back, in one transaction."""
    target = read_settings(dsn or context.obj).require_dsn()
    confirm(f"take the schema back to {revision}, with the data of the later revisions", yes=yes)
    with interruptible("nothing was changed; run it again"):
        before = migrations.current(target)
        migrations.downgrade(target, revision, report=print_note)
        _print_revision(before, migrations.current(target), as_json=as_json)


@migrate_app.command()
def current(context: typer.Context, *, dsn: Dsn = None, as_json: Json = False) -> None:
    """Print the revision of the database, and the newest one that this version brings."""
    revision, newest = migrations.current(read_settings(dsn or context.obj).require_dsn()), migrations.head()
    if as_json:
        print_json({"revision": revision, "head": newest})
    else:
        print_line(f"{revision or 'not migrated'} ({'up to date' if revision == newest else f'newest: {newest}'})")


@migrate_app.command()
def grants(context: typer.Context, *, dsn: Dsn = None, as_json: Json = False) -> None:
    """Create the roles that are missing, and grant each what it needs.

    Run it as the owner of the schema after the roles have come to be in another way; `pgoutbox migrate` does the same.
    Ends with 1 if roles are missing, and prints the SQL for somebody who may create them.
    """
    with interruptible("nothing was changed; run it again"):
        missing = migrations.grants(read_settings(dsn or context.obj).require_dsn())
    if as_json:
        print_json({"missing": missing, "sql": migrations.create_roles_sql(missing)})
    elif missing:
        print_line(migrations.create_roles_sql(missing))
    else:
        print_line("roles of pgoutbox: all there, and granted what they need")
    if missing:
        raise typer.Exit(1)


def _print_revision(before: str | None, after: str | None, *, as_json: bool) -> None:
    if as_json:
        print_json({"before": before, "revision": after})
    elif before == after:
        print_line(f"schema pgoutbox: nothing to do, at {after or 'base'}")
    else:
        print_line(f"schema pgoutbox: {before or 'base'} -> {after or 'base'}")

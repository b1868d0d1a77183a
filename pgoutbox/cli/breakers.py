"""The commands on circuit breakers."""

from __future__ import annotations

from typing import Annotated

import typer

from pgoutbox.cli.arguments import Dsn, Json
from pgoutbox.cli.console import FAILED, print_documents, print_error, print_json, print_line, print_table
from pgoutbox.cli.program import app, interruptible, open_operator, read_settings

breaker_app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="List and close circuit breakers.")
app.add_typer(breaker_app, name="breaker")


@breaker_app.command("list")
def list_breakers(*, dsn: Dsn = None, as_json: Json = False) -> None:
    """List the open circuit breakers, oldest first, at most 20."""
    settings = read_settings(dsn)
    with open_operator(settings, read_only=True) as operator:
        found = [breaker.redacted(settings.redacted_names) for breaker in operator.list_open_breakers()]
    if as_json:
        print_documents(found)
    elif found:
        rows = [(breaker.key, f"{breaker.open_seconds:.0f} s", breaker.last_error) for breaker in found]
        print_table(("breaker", "open for", "last error"), rows)
    else:
        print_line("all circuit breakers are closed")


@breaker_app.command()
def close(
    key: Annotated[str, typer.Argument(metavar="BREAKER", help="The breaker, as `pgoutbox breaker list` shows it.")],
    *,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Close a circuit breaker, and send the messages that it postponed.

    The breaker opens again if the next sends fail.
    """
    with (
        open_operator(read_settings(dsn)) as operator,
        interruptible("the breaker may be closed; run it again to send the rest"),
    ):
        closed = operator.close_breaker(key)
    if as_json:
        print_json({"breaker": key, **closed._asdict()})
    elif closed.was_open or closed.message_count:
        print_line(f"breaker {key}: closed; {closed.message_count} postponed messages are due")
    else:
        print_error(f"no open breaker has the name {key}; `pgoutbox breaker list` shows the open ones")
    if not (closed.was_open or closed.message_count):
        raise typer.Exit(FAILED)

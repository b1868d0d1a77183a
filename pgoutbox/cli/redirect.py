"""The commands on the redirect of e-mail."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from pgoutbox.cli.arguments import Dsn, Json, duration_option
from pgoutbox.cli.console import print_json, print_line, print_result
from pgoutbox.cli.program import app, interruptible, open_operator, read_settings, warn_of_unknown

redirect_app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="Redirect e-mail to testers, and show the redirects."
)
app.add_typer(redirect_app, name="redirect")


@redirect_app.command()
def show(*, dsn: Dsn = None, as_json: Json = False) -> None:
    """Show the redirect of the operators, and the redirects and blackouts of workers."""
    with open_operator(read_settings(dsn), read_only=True) as operator:
        found = operator.redirects()
    if as_json:
        print_json(found.as_json())
        return
    for line in found.warnings() or ["no redirect is on: e-mail goes to its real recipients"]:
        print_line(line)
    if found.blackout is not None and not found.warnings():
        print_line(f"the blackout {found.blackout} forbids to redirect it today")


@redirect_app.command("set")
def set_redirect(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="An address, or @ and a domain.")],
    *,
    duration: Annotated[
        timedelta | None, duration_option("--for", "Switch it off automatically, such as after 2h.")
    ] = None,
    topics: Annotated[
        list[str] | None,
        typer.Option(
            "--topic",
            metavar="TOPIC",
            help="Only this topic; 'mail.user.*' stands for several (default: all). Repeatable.",
        ),
    ] = None,
    exempt_topics: Annotated[
        list[str] | None,
        typer.Option("--exempt-topic", metavar="TOPIC", help="Not this topic, in the same form. Repeatable."),
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Redirect e-mail of all workers: all, that of some topics, or that of all but some.

    Waits for two seconds. Then no worker begins to hand this e-mail over to its real recipients.
    """
    with (
        open_operator(read_settings(dsn)) as operator,
        interruptible("the redirect may be on; see `pgoutbox redirect show`"),
    ):
        warn_of_unknown(operator, "topic", topics or ())
        switched = operator.set_redirect(
            target, duration=duration, topics=topics or (), exempt_topics=exempt_topics or ()
        )
    until = "" if switched.until_at is None else f" until {switched.until_at.isoformat(timespec='seconds')}"
    print_result(switched._asdict(), f"{switched.mail} goes to {switched.target}{until}", as_json=as_json)


@redirect_app.command()
def off(*, dsn: Dsn = None, as_json: Json = False) -> None:
    """Switch the redirect off, and send the messages that it held back.

    A redirect in the environment of a worker stays on.
    """
    with (
        open_operator(read_settings(dsn)) as operator,
        interruptible("the redirect may be off; run it again to send the rest"),
    ):
        cleared = operator.clear_redirect()
        rest = operator.redirects()
    if as_json:
        print_json(cleared._asdict())
        return
    state = "off" if cleared.was_on else "was not on"
    print_line(f"redirect: {state}; {cleared.message_count} held-back messages are due")
    for line in rest.warnings():
        print_line(line)
    others = " of other workers" if rest.workers else ""
    print_line(f"e-mail{others} goes to its real recipients")

"""The commands for schedules."""

from __future__ import annotations

from typing import Annotated

import typer

from pgoutbox.cli.console import FAILED, print_error, print_json, print_line, print_table
from pgoutbox.cli.options import Limit, Options, command, open_operator
from pgoutbox.cli.program import app

schedule_app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="List, pause and run schedules.")
app.add_typer(schedule_app, name="schedule")

ScheduleName = Annotated[
    str, typer.Argument(metavar="SCHEDULE", help="The schedule, as `pgoutbox schedule list` shows it.")
]


@command("list", of=schedule_app)
def list_schedules(
    start: Annotated[str, typer.Argument(metavar="[START]", help="Only schedules whose names begin so.")] = "",
    *,
    limit: Limit = 100,
    options: Options,
) -> None:
    """List the schedules with their next times, the next one first."""
    with open_operator(options.settings, read_only=True) as operator:
        found = operator.list_schedules(prefix=start, limit=limit)
    if options.as_json:
        print_json([{**one._asdict(), "next_times": one.next_times()} for one in found])
    elif found:
        rows = [(one.name, one.topic, one.rule, one.timezone, one.next_time, one.last_at) for one in found]
        print_table(("schedule", "topic", "rule", "zone", "next", "last"), rows)
    else:
        print_line("no schedules")


@command(of=schedule_app)
def pause(name: ScheduleName, *, options: Options) -> None:
    """Let the times of a schedule pass. Messages that are enqueued already continue."""
    with open_operator(options.settings) as operator:
        has_changed = operator.pause_schedule(name)
    _tell(name, "paused" if has_changed else None, options, otherwise="or it is paused already")


@command(of=schedule_app)
def resume(name: ScheduleName, *, options: Options) -> None:
    """End the pause of a schedule. It goes on with its next time from now on."""
    with open_operator(options.settings) as operator:
        has_changed = operator.resume_schedule(name)
    _tell(name, "resumed" if has_changed else None, options, otherwise="or it is not paused")


@command(of=schedule_app)
def run(name: ScheduleName, *, options: Options) -> None:
    """Enqueue the message of a schedule now, beside its times. Prints the id of the message."""
    with open_operator(options.settings) as operator:
        message_id = operator.run_schedule(name)
    _tell(name, None if message_id is None else f"enqueued message {message_id}", options, message_id=message_id)


def _tell(name: str, result: str | None, options: Options, *, otherwise: str = "", **facts: object) -> None:
    """Print the result. Without one the schedule is missing, `otherwise` it is in that state already: exit code 1."""
    if options.as_json:
        print_json({"schedule": name, "changed": result is not None, **facts})
    elif result is not None:
        print_line(f"schedule {name}: {result}")
    else:
        reason = ", ".join(filter(None, ("there is no such schedule", otherwise)))
        print_error(f"schedule {name}: {reason}; `pgoutbox schedule list` shows all")
    if result is None:
        raise typer.Exit(FAILED)

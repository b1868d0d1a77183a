"""All commands. Each reads its arguments, calls one function of the package and prints the result.

Data goes to stdout, everything else to stderr. A command raises `PgOutboxError`, and `main` prints one line and
returns an exit code.
"""

from pgoutbox.cli import (  # noqa: F401 - each registers its commands
    about,
    acts,
    control,
    deletion,
    doctor,
    messages,
    schedules,
    schema,
    shares,
    suppressions,
    watch,
    worker,
)
from pgoutbox.cli.program import app
from pgoutbox.cli.web import web_app

app.add_typer(web_app, name="web")

__all__ = ["app"]

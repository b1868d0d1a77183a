"""The commands of the command line: each reads its arguments, calls one function below it and writes the answer.

Data goes to stdout, everything else to stderr. What a command refuses it raises as a `PgOutboxError`, which `cli` turns
into one line and an exit code.
"""

from pgoutbox.cli import about, acts, breakers, deletion, doctor, messages, queues, schema, watch, worker
from pgoutbox.cli.program import app
from pgoutbox.cli.web import web_app

app.add_typer(web_app, name="web")

__all__ = ["about", "acts", "app", "breakers", "deletion", "doctor", "messages", "queues", "schema", "watch", "worker"]

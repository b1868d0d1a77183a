"""The commands of the command line: each reads its arguments, calls one function below it and writes the answer.

Data goes to stdout, everything else to stderr. What a command refuses it raises as a `PgOutboxError`, which `cli` turns
into one line and an exit code.
"""

from pgoutbox.commands import about, deletion, messages, queues, schema, worker
from pgoutbox.commands.program import app

__all__ = ["about", "app", "deletion", "messages", "queues", "schema", "worker"]

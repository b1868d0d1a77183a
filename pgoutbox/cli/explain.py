"""The text and the exit code of each expected error. It does not need the extra `cli`."""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import Final

import psycopg

from pgoutbox.cli.console import FAILED, MISUSED, mask, secrets_in
from pgoutbox.database.server import is_tls_refusal, missing_object
from pgoutbox.errors import ArgumentError, ConfigurationError, NotReadyError, PgOutboxError
from pgoutbox.operations.acts import ACTS
from pgoutbox.settings import Settings, secret_values
from pgoutbox.text import one_line

# The settings of the database that --database or PGOUTBOX_DATABASE names.
chosen_database: ContextVar[Settings | None] = ContextVar("chosen_database", default=None)

_BAD_DSN: Final = (
    "PGOUTBOX_DSN is not a connection string; give one such as postgresql://app@localhost/app, "
    "with special characters of the password percent-encoded"
)

_CHECK_SERVER: Final = "check PGOUTBOX_DSN and that the server is running"
_CHECK_TLS: Final = "check sslmode and the certificate files in PGOUTBOX_DSN, and the certificate of the server"

# The next step for server errors with a usual cause.
_NEXT_STEPS: Final = {
    "28000": "check the user in PGOUTBOX_DSN",
    "28P01": "check the password in PGOUTBOX_DSN",
    "3D000": "check the database in PGOUTBOX_DSN",
    "53300": "the server has no free connections; try again",
    "55P03": "another transaction holds the lock; try again",
    "57P01": "the server is going down, or somebody has ended the session; try again",
    "57014": "the statement took too long; try again with a narrower filter",
    "25006": "the session is read-only; check that PGOUTBOX_DSN leads to the primary",
}

_MISSING: Final = ("42P01", "42883", "3F000")

# The role with the right on an object of pgoutbox; the first match counts.
_ROLES: Final = (
    (r"enqueue\w*|is_known_topic", "pgoutbox_producer"),
    (r"\w+_view|done_estimate|redacted_\w+", "pgoutbox_viewer or pgoutbox_operator"),
    (
        (
            rf"{'|'.join(ACTS)}|close_breaker|\w+_redirect|adopt|prune\w*|cancel\w*|queue|retention|audit|erase"
            r"|selected_\w+|address_digest|\w+_suppressions|set_fair_share|(pause|resume)_topic"
        ),
        "pgoutbox_operator",
    ),
    (
        r"message\w*|maintenance_run|worker|content|key_head|permits|\w+_partition",
        "pgoutbox_worker",
    ),
    (r"pgoutbox|require_package", "pgoutbox_worker, pgoutbox_operator or pgoutbox_viewer"),
)


def explain(error: PgOutboxError | psycopg.Error, database: Settings | None = None) -> tuple[str, int]:
    """Return the text of an error for the operator, and the exit code: 2 if only a change of the command helps.

    Leaves out the DETAIL of a driver's error, which can quote values of rows. `database` is one of PGOUTBOX_DSNS.
    """
    text, exit_code = _explain(error)
    if database is not None:
        text = mask(about_database(text, database), secrets_in(secret_values(database)))
    return text, exit_code


def about_database(text: str, database: Settings) -> str:
    """Return a text about PGOUTBOX_DSN, so that it is about the DSN of this database of the list."""
    return text if database.database is None else re.sub(r"PGOUTBOX_DSN\b", f"the DSN of {database.database}", text)


def _explain(error: PgOutboxError | psycopg.Error) -> tuple[str, int]:
    if isinstance(error, (ConfigurationError, ArgumentError)) and not isinstance(error, NotReadyError):
        return str(error), MISUSED
    if isinstance(error, PgOutboxError):
        return str(error), FAILED
    if error.sqlstate is None and isinstance(error, psycopg.ProgrammingError):
        return _BAD_DSN, MISUSED
    if error.diag.message_primary is None and isinstance(error, psycopg.DataError):
        return f"Python cannot read a value of the database: {one_line(str(error))}; correct it by SQL", FAILED
    if error.diag.message_primary is None:
        return f"{one_line(str(error))}; {_CHECK_TLS if is_tls_refusal(str(error)) else _CHECK_SERVER}", FAILED
    if error.sqlstate in _MISSING and (lacking := missing_object(error.diag.message_primary)):
        return str(lacking), FAILED
    step = _grant(error.diag.message_primary) if error.sqlstate == "42501" else _NEXT_STEPS.get(error.sqlstate or "")
    text = f"PostgreSQL: {one_line(error.diag.message_primary)} [{error.sqlstate}]"
    return (f"{text}; {step}" if step else text), FAILED


def _grant(message: str) -> str:
    """Return the next step for a missing right. In most languages of the server, the object is the last word."""
    object_name = message.rsplit(maxsplit=1)[-1].strip('"').removeprefix("_")
    role = next((role for pattern, role in _ROLES if re.fullmatch(pattern, object_name)), None)
    if role is None:
        return "ask the owner to grant the right, or use another role in PGOUTBOX_DSN"
    return (
        f"the user in PGOUTBOX_DSN needs the role {role}: GRANT it. If the user has it, have the schema's owner run: "
        "pgoutbox migrate grants"
    )

"""Requirements of servers and schemas, and the errors for unsuitable ones. Runs no statement."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from importlib.metadata import version
from typing import Final, NamedTuple

import psycopg

from pgoutbox.errors import ConfigurationError, NotReadyError, SchemaError

# Texts of libpq, which has no SQLSTATE for them. They are in English, because Python does not set LC_MESSAGES. The
# directory of a socket may contain any word. A pooler that goes down during the handshake has not refused TLS.
_TLS_REFUSAL: Final = re.compile(
    r"failed: (?!connection to )"
    r"(?:.*(?:certificate|private key file)|server does not support SSL|SSL error: (?!unexpected eof))"
)
PACKAGE_VERSION: Final = version("pgoutbox")
MINIMUM_SERVER_VERSION: Final = 150_000
REQUIRED_SCHEMA_VERSION: Final = 1
MIGRATE_HINT: Final = (
    "run: pgoutbox migrate (or: alembic upgrade heads, where your application's history includes it; if that does "
    "nothing, run: pgoutbox doctor)"
)


class CopyError(SchemaError, psycopg.OperationalError):
    """The database is a copy: the schema belongs to another one. It is transient, because an operator may adopt it."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(f"workers send nothing from this database: {problem}. To send from it, run: pgoutbox adopt")


class OldPackageError(SchemaError, psycopg.DatabaseError):
    """The schema needs a later version of the package."""


class ServerFacts(NamedTuple):
    """Facts about the server."""

    server_version: int
    in_recovery: bool
    read_only: bool
    encoding: str
    has_schema: bool


def judge_server(facts: ServerFacts, *, writes: bool) -> None:
    """Raise `ConfigurationError` or `SchemaError` for a server without read access, or with `writes` write access."""
    if facts.server_version < MINIMUM_SERVER_VERSION:
        raise ConfigurationError(f"PostgreSQL {facts.server_version // 10_000} is too old: pgoutbox needs 15 or newer")
    if facts.in_recovery and writes:
        raise NotReadyError("PGOUTBOX_DSN leads to a standby, which is read-only: give the DSN of the primary")
    if facts.read_only and writes:
        raise NotReadyError("PGOUTBOX_DSN leads to a read-only session: check default_transaction_read_only")
    if facts.encoding != "UTF8":
        raise ConfigurationError(f"the database's encoding is {facts.encoding}: pgoutbox needs UTF8")
    if not facts.has_schema:
        raise SchemaError(f"the database has no schema pgoutbox; {MIGRATE_HINT}")


def judge_schema(version: int) -> None:
    """Raise `SchemaError` for a schema older than this package needs."""
    if version < REQUIRED_SCHEMA_VERSION:
        raise SchemaError(
            f"the schema pgoutbox has version {version}, this package needs {REQUIRED_SCHEMA_VERSION}; {MIGRATE_HINT}"
        )


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Raise the schema's refusal of a session as `CopyError` or `OldPackageError`."""
    try:
        yield
    except psycopg.Error as error:
        message = str(error.diag.message_primary)
        match error.sqlstate:
            case "OB001":  # Of pgoutbox._require_home.
                raise CopyError(message) from error
            case "OB004":  # Of pgoutbox._require_package.
                raise OldPackageError(f"{message}; install it: pip install -U pgoutbox") from error
            case _:
                raise


def is_tls_refusal(message: str) -> bool:
    """Whether libpq's message says that a connection has no TLS by its settings: a missing file, a certificate that is
    refused, or a server without TLS."""
    return _TLS_REFUSAL.search(message) is not None


def missing_object(message: str) -> SchemaError | None:
    """Return the error for PostgreSQL's message about a missing relation, function or schema of pgoutbox.

    Return None if the name does not belong to pgoutbox. The message contains the name in every language of the server.
    """
    name = re.search(r"\bpgoutbox(\.\w+)?", message)
    if name is None:
        return None
    return SchemaError(
        f"{name[0]} does not exist: if the schema is missing or too old, {MIGRATE_HINT}; "
        "if only a part of it is missing, restore that part from a backup. `pgoutbox doctor` lists the missing parts"
    )

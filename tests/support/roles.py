"""Login roles with one of the roles of pgoutbox, for the duration of a test."""

from __future__ import annotations

import contextlib
import os
from itertools import count
from typing import TYPE_CHECKING, Final, LiteralString

import psycopg
from psycopg import sql as composable
from psycopg.conninfo import make_conninfo

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLES: Final = ("pgoutbox_producer", "pgoutbox_worker", "pgoutbox_operator", "pgoutbox_viewer")
_PASSWORD: Final = "pgoutbox-test"
_numbers = count(1)


@contextlib.contextmanager
def login(dsn: str, *roles: str, options: LiteralString = "") -> Iterator[str]:
    """Return the DSN of a new login role with these granted roles. It can connect, and has no other rights."""
    name = f"pgoutbox_test_{os.getpid()}_{next(_numbers)}"
    role = composable.Identifier(name)
    with psycopg.connect(dsn, autocommit=True) as superuser:
        superuser.execute(
            composable.SQL("CREATE ROLE {} LOGIN PASSWORD {} " + options).format(role, composable.Literal(_PASSWORD))
        )
        try:
            for granted in roles:
                superuser.execute(composable.SQL("GRANT {} TO {}").format(composable.Identifier(granted), role))
            yield make_conninfo(dsn, user=name, password=_PASSWORD)
        finally:
            superuser.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", [name])
            superuser.execute(composable.SQL("DROP OWNED BY {}").format(role))
            superuser.execute(composable.SQL("DROP ROLE {}").format(role))


def with_another_name(connection: psycopg.Connection, role: str, name: str) -> None:
    """Make `set_up_roles` use a role name that no other test uses and that does not exist."""
    (definition,) = connection.execute(
        "SELECT pg_get_functiondef('pgoutbox.set_up_roles()'::regprocedure)"
    ).fetchone() or ("",)
    connection.execute(definition.replace(role, name).encode())

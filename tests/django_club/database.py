"""The DSN of Django's database, for code that connects by itself."""

from __future__ import annotations

from typing import Any

from psycopg.conninfo import make_conninfo


def dsn_of(connection: Any) -> str:  # noqa: ANN401 - Django ships no types
    """Return the DSN of a connection of Django."""
    connection.ensure_connection()
    info = connection.connection.info
    return make_conninfo(info.dsn, password=info.password)

"""Tests that every connection to PostgreSQL has the options of `database.connections`: no module connects directly."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

import pgoutbox
from pgoutbox.database.connections import conninfo_for

PACKAGE = Path(pgoutbox.__file__).parent
# The demo's own connection belongs to its application, not to the package.
MODULES = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if path != PACKAGE / "database" / "connections.py"
    and not {"migrations", "demo"} & set(path.relative_to(PACKAGE).parts)
)
OPENERS = {"psycopg.connect", "Connection.connect", "AsyncConnection.connect"}
POOLS = {"ConnectionPool", "AsyncConnectionPool", "NullConnectionPool", "AsyncNullConnectionPool"}
ENGINES = {"create_engine", "create_async_engine"}


def unguarded_connections(source: str) -> list[str]:
    """Return the calls that open a connection, or a pool, without the common options."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        last = name.rpartition(".")[2]
        is_opener = any(name.endswith(opener) for opener in OPENERS)
        is_pool = last in POOLS and not (node.args and ast.unparse(node.args[0]).startswith("conninfo_for("))
        is_engine = last in ENGINES and not any(keyword.arg == "creator" for keyword in node.keywords)
        if is_opener or is_pool or is_engine:
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_opens_a_connection_without_the_common_options(path: Path) -> None:
    assert unguarded_connections(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "psycopg.connect(dsn)",
        "psycopg.AsyncConnection.connect(dsn)",
        "psycopg_pool.ConnectionPool(dsn, open=False)",
        "AsyncConnectionPool(settings.require_dsn())",
        "create_engine(url)",
    ],
)
def test_the_check_finds_a_connection_without_the_common_options(source: str) -> None:
    assert len(unguarded_connections(source)) == 1


def test_the_common_options_take_precedence_over_those_of_the_dsn() -> None:
    conninfo = conninfo_for(
        "host=db client_encoding=LATIN1 keepalives=0 tcp_user_timeout=0", purpose="claim", connect_timeout_seconds=7
    )
    assert conninfo_to_dict(conninfo) == {
        "host": "db",
        "application_name": "pgoutbox claim",
        "client_encoding": "UTF8",
        "connect_timeout": "7",
        "keepalives": "1",
        "keepalives_idle": "15",
        "keepalives_interval": "5",
        "keepalives_count": "3",
        "tcp_user_timeout": "20000",
    }

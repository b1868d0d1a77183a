"""Tests that no statement is built at run time: no f-string, `format`, percent sign or join."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import pgoutbox

PACKAGE = Path(pgoutbox.__file__).parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "migrations" not in path.relative_to(PACKAGE).parts)
STATEMENT = re.compile(
    r"\s*(SELECT\s|INSERT\s+INTO\s|UPDATE\s+[\w.\"{}]+\s|DELETE\s+FROM\s|WITH\s+\w+\s|CREATE\s|ALTER\s|DROP\s|GRANT\s|SET\s+LOCAL\s)"
)
# Utility statements take no parameters. The number is computed there, and a name is quoted as `Identifier`.
ALLOWED = {
    ("migrate.py", "SET LOCAL lock_timeout = '"),
    ("migrate.py", "CREATE ROLE "),  # Shown to a person, not executed.
    # The names are a revision's own, or the catalog has quoted them.
    ("index_builds.py", "CREATE INDEX IF NOT EXISTS "),
    ("index_builds.py", "CREATE INDEX CONCURRENTLY "),
    ("index_builds.py", "DROP INDEX CONCURRENTLY "),
    ("server.py", "ALTER TABLE pgoutbox."),  # Also shown: the fixes of the doctor's findings.
}


def built_statements(source: str) -> list[str]:
    """Return the beginnings of all statements in a source that are built from non-constant parts."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.JoinedStr(values=[ast.Constant(value=str(first)), *_]):
                found.append(first)
            case ast.BinOp(op=ast.Mod(), left=ast.Constant(value=str(first))):
                found.append(first)
            case ast.BinOp(op=ast.Add(), left=ast.Constant(value=str(first)), right=right) if not _is_constant(right):
                found.append(first)
            case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(first)), attr="format" | "join")):
                found.append(first)
            case _:
                pass
    return [text for text in found if STATEMENT.match(text)]


def _is_constant(node: ast.expr) -> bool:
    """Return whether this is a text, or a constant's name in capital letters."""
    match node:
        case ast.Constant():
            return True
        case ast.Name(id=name):
            return name.lstrip("_").isupper()
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return _is_constant(left) and _is_constant(right)
        case _:
            return False


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_statement_is_built_at_run_time(path: Path) -> None:
    assert [text for text in built_statements(path.read_text()) if (path.name, text) not in ALLOWED] == []


@pytest.mark.parametrize(
    "source",
    [
        "f'SELECT * FROM {table}'",
        "'DELETE FROM pgoutbox.message WHERE id = %s' % number",
        "'SELECT 1 FROM ' + name",
        "'UPDATE pgoutbox.{} SET'.format(name)",
        "f'''\n    INSERT INTO {table}'''",
    ],
)
def test_the_check_finds_statements_built_at_run_time(source: str) -> None:
    assert len(built_statements(source)) == 1

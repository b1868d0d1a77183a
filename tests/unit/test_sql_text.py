"""No statement is put together at run time: not by an f-string, by `format`, by a percent sign or by joining texts."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import pgoutbox

PACKAGE = Path(pgoutbox.__file__).parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "migrations" not in path.parts)
STATEMENT = re.compile(
    r"\s*(SELECT\s|INSERT\s+INTO\s|UPDATE\s+[\w.\"{}]+\s|DELETE\s+FROM\s|WITH\s+\w+\s|CREATE\s|ALTER\s|DROP\s|GRANT\s|SET\s+LOCAL\s)"
)
# Utility statements take no parameters. The number is reckoned there, and a name is quoted as `Identifier`.
ALLOWED = {
    ("migrate.py", "SET LOCAL lock_timeout = '"),
    ("migrate.py", "CREATE ROLE "),  # Shown to a person, not run.
    ("server.py", "ALTER TABLE pgoutbox."),  # As well: how to mend what the doctor found.
}


def built_statements(source: str) -> list[str]:
    """The beginnings of all statements in a source that are built of parts which are no constants."""
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
    """A text, or a name in capital letters, which is one."""
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
def test_the_test_before_finds_them(source: str) -> None:
    assert len(built_statements(source)) == 1

"""The reference has every public name, and the page on the core shows the statements of the kernel."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Final

import pytest

import pgoutbox
from tools import reference

STATEMENTS: Final = reference.ROOT / "pgoutbox" / "kernel" / "sql"
API: Final = (reference.ROOT / "docs/reference/api.md").read_text()
CORE: Final = (reference.ROOT / "docs/explanation/core.md").read_text()


@pytest.mark.parametrize("module", ["pgoutbox", *pgoutbox.PUBLIC_MODULES])
def test_each_public_name_has_an_entry(module: str) -> None:
    names = {*getattr(importlib.import_module(module), "__all__", ())} - {"examine_delivery", "verdict"}
    assert [name for name in names if not re.search(rf"^#{{3,4}} `{name}`$", API, re.MULTILINE)] == []


def test_each_statement_of_the_kernel_is_shown_or_named() -> None:
    shown = re.findall(r"```sql\n(.*?)```", CORE, re.DOTALL)
    left_out = [
        file.name for file in STATEMENTS.glob("*.sql") if file.read_text() not in shown and f"{file.name}`" not in CORE
    ]
    assert left_out == []


def test_only_the_first_insert_of_a_function_is_shown(tmp_path: Path) -> None:
    function = tmp_path / "enqueue.sql"
    function.write_text("CREATE FUNCTION f()\n    -- why\n    INSERT INTO a\n        VALUES (1);\n    INSERT INTO b;\n")
    assert reference.statement(str(function)) == "```sql\nINSERT INTO a\n    VALUES (1)\n```"
    function.write_text("CREATE FUNCTION f()\n    RETURN 1;\n")
    with pytest.raises(ValueError, match="has no INSERT"):
        reference.statement(str(function))

"""The page on the core shows the statements of the kernel, whole."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import pytest

from tools import generate

if TYPE_CHECKING:
    from pathlib import Path

STATEMENTS: Final = generate.ROOT / "pgoutbox" / "kernel" / "sql"
PAGE: Final = generate.CORE.read_text()


def test_the_page_shows_the_current_statements() -> None:
    assert generate.core_page() == PAGE, "run `make docs`"


@pytest.mark.parametrize("name", ["claim", "finish_sent", "finish", "lapsed"])
def test_a_statement_is_shown_whole_with_its_comments(name: str) -> None:
    blocks = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
    assert (STATEMENTS / f"{name}.sql").read_text() in blocks


def test_a_changed_statement_changes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "core.md"
    page.write_text(PAGE.replace("SET state = 'sent'", "SET state = 'failed'"))
    monkeypatch.setattr(generate, "CORE", page)
    assert generate.core_page() == PAGE


def test_each_other_statement_of_the_kernel_is_named() -> None:
    assert {
        file.stem for file in STATEMENTS.glob("*.sql") if f"`{file.name}`" not in PAGE and f"/{file.name}" not in PAGE
    } == set()


def test_only_the_first_insert_of_a_function_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = tmp_path / "enqueue.sql"
    function.write_text("CREATE FUNCTION f()\n    -- why\n    INSERT INTO a\n        VALUES (1);\n    INSERT INTO b;\n")
    page = tmp_path / "core.md"
    page.write_text(f"<!-- from: {function} -->\n```sql\nold\n```\n")
    monkeypatch.setattr(generate, "CORE", page)
    assert "```sql\nINSERT INTO a\n    VALUES (1)\n```" in generate.core_page()
    function.write_text("CREATE FUNCTION f()\n    RETURN 1;\n")
    with pytest.raises(ValueError, match="has no INSERT"):
        generate.core_page()

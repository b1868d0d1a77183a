"""The page on the core shows the real statements, and its statements and sentences fit one screen."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import pytest

from pgoutbox.database import sql
from tools import generate

if TYPE_CHECKING:
    from pathlib import Path

SCREEN: Final = 90  # lines
PAGE: Final = generate.CORE.read_text()


def test_the_page_shows_the_current_statements() -> None:
    assert generate.core_page() == PAGE, "run `make docs`"


def test_a_changed_statement_changes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "core.md"
    page.write_text(PAGE.replace("SET state = 'sent'", "SET state = 'failed'"))
    monkeypatch.setattr(generate, "CORE", page)
    assert generate.core_page() == PAGE


def test_the_statements_and_six_sentences_are_on_one_screen() -> None:
    screen, _, rest = PAGE.partition("\n## ")
    assert screen.count("\n") <= SCREEN
    assert re.findall(r"^(\d)\. ", screen, re.MULTILINE) == list("123456")
    assert rest != ""


def test_each_line_of_a_statement_is_one_that_runs() -> None:
    (_, claim, finish) = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
    for shown, run in ((claim, sql.CLAIM_FRESH), (finish, sql.FINISH_SENT_IF_HELD)):
        lines = [line for line in shown.splitlines() if not line.lstrip().startswith("--")]
        assert [line for line in run.splitlines() if line in lines] == lines


def test_each_fragment_that_is_left_out_is_named() -> None:
    assert {name for name in generate.LEFT_OUT if f"-- {name}: " not in PAGE} == set()


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

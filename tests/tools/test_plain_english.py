"""The linter finds the turns that the rules forbid, in prose and in nothing else, and names their lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.plain_english import LONGEST_SENTENCE, RULES, findings_in, folders_of, prose_of


def found(text: str, suffix: str = ".md") -> list[tuple[int, str]]:
    """Line and rule of each finding in a file of this kind."""
    path = Path("page").with_suffix(suffix)
    return [(finding.line, finding.rule.name) for finding in findings_in(path, prose_of(path, text))]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("What is kept", "headless"),
        ("of what was sent", "headless"),
        ("Who comes second", "headless"),
        ("whoever has it", "headless"),
        ("See what is due", "headless"),
        ("what no longer holds", "headless"),
        ("It is no hash", "is no X"),
        ("tried anew", "anew"),
        ("mended by hand", "mend"),
        ("kept for ever", "for ever"),
        ("it tells of losses", "tell of"),
        ("a few, say, ten", "`say`"),
        ("telling names", "telling name"),
        ("held to be", None),
        ("are held to be", "held to be"),
        ("What is new?", None),
        ("people who are here", None),
        ("users who\nhave signed", None),
        ("What the worker does", None),
        ("There is no table", None),
        ("it is no longer", None),
        ("They say, ten", None),
        ("recommended, amended", None),
        ("`what is kept`", None),
        ("Worse than somewhat is", None),
    ],
)
def test_a_forbidden_turn_is_found_and_its_plain_relatives_are_not(text: str, rule: str | None) -> None:
    names = [name for _, name in found(text)]
    assert len(names) == (rule is not None)
    assert all(rule is not None and rule in name for name in names)


def test_a_clause_that_goes_over_the_end_of_a_line_is_found_where_it_begins() -> None:
    assert [line for line, _ in found("Keep it.\n\nDelete what\nis old.")] == [3]
    assert [line for line, _ in found("# Delete what\n# is old.\n", ".py")] == [1]


def test_words_of_two_paragraphs_make_no_sentence() -> None:
    half = "word " * (LONGEST_SENTENCE // 2 + 1)
    (advice,) = [rule for rule in RULES if rule.is_advice]
    assert found(f"{half}\n\n{half}") == found(f"- {half}\n- {half}") == []
    assert found(f"{half}\n{half}") == [(1, advice.name)]


def test_code_in_markdown_is_not_prose() -> None:
    assert found("\n".join(["```sh", "echo what is kept", "```", "", "what is kept"])) == [(5, RULES[0].name)]


def test_python_has_prose_in_comments_docstrings_and_long_strings() -> None:
    source = [
        '"""Count what is',
        'kept."""',
        "",
        "is_it = 1  # what has changed",
        'LABEL = "what is"',
        "if what is who:",
        "    raise ValueError(",
        '"now what is new"',
    ]
    assert [line for line, _ in found("\n".join([*source, "    )", ""]), ".py")] == [1, 4]
    source[-1] = source[-1].replace("new", "new now")
    assert [line for line, _ in found("\n".join([*source, "    )", ""]), ".py")] == [1, 4, 8]


def test_sql_has_prose_in_its_comments() -> None:
    source = ["SELECT what is null", "-- what is kept", ";", "COMMENT ON TABLE a IS", "'what is kept,", "for ever';"]
    assert [line for line, _ in found("\n".join(source), ".sql")] == [2, 5, 6]


def test_a_template_has_prose_between_its_tags() -> None:
    source = ["{% if what is none %}", '<p title="what is">Shows', "what is {{ what is }}", "</p>{# what is #}"]
    assert [line for line, _ in found("\n".join(source), ".html")] == [3]


def test_files_of_other_kinds_have_no_prose() -> None:
    assert found("# what is kept\n", ".toml") == []


def test_a_folder_is_over_its_limit_by_findings_for_a_thousand_lines(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/page.md").write_text("Keep what is new.\n" + "A line.\n\n" * 499)
    (tmp_path / "README.md").write_text(("word " * (LONGEST_SENTENCE + 1)) + ".")
    (tmp_path / "link.md").symlink_to("docs/page.md")
    paths = [Path(name) for name in ("docs/page.md", "README.md", "link.md", "gone.md")]
    top, docs = folders_of(tmp_path, paths, {"default": 3, "docs": 1})
    assert (top.name, top.lines, top.rate, top.limit) == (".", 1, 0, 3)
    assert (docs.name, docs.lines, docs.rate, docs.limit) == ("docs", 500, 2, 1)

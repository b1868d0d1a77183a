"""The links of the pages work on the site, and llms.txt lists the pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import site


@pytest.mark.parametrize(
    ("file", "link", "expected"),
    [
        ("README.md", "docs/how-to/email.md#render", "how-to/email.md#render"),
        ("README.md", "docs/README.md", "contents.md"),
        ("README.md", "https://site.test/how-to/email.html#render", "how-to/email.md#render"),
        ("README.md", "CONTRIBUTING.md", "https://code.test/blob/main/CONTRIBUTING.md"),
        ("docs/README.md", "tutorial.md", "tutorial.md"),
        ("docs/agents.md", "../README.md#quick-start", "index.md#quick-start"),
        ("docs/how-to/cron.md", "../tutorial.md", "../tutorial.md"),
        ("docs/how-to/cron.md", "img/dashboard.webp", "img/dashboard.webp"),
        ("docs/how-to/cron.md", "../../examples/club/README.md", "https://code.test/blob/main/examples/club/README.md"),
        ("docs/how-to/cron.md", "#run", "#run"),
        ("docs/how-to/cron.md", "https://www.postgresql.org/docs", "https://www.postgresql.org/docs"),
    ],
)
def test_links_work_on_the_site(file: str, link: str, expected: str) -> None:
    assert (
        site.site_text(f"See [a\npage]({link}).", Path(file), "https://code.test", "https://site.test/")
        == f"See [a\npage]({expected})."
    )


def test_blocks_are_left_alone_and_comments_are_removed() -> None:
    block = "```html\n<!-- kept -->\n[x](../../y.py)\n```"
    text = f"A\n\n<!-- run: this -->\n{block}\n\n<!-- not\nrun -->\n```sh\nls\n```\n"
    assert (
        site.site_text(text, Path("docs/how-to/cron.md"), "", "https://site.test/")
        == f"A\n\n{block}\n\n```sh\nls\n```\n"
    )


def test_the_index_has_titles_and_first_sentences() -> None:
    texts = {
        "index.md": "# Club\n\n![A picture](club.svg)\n\nThe [club](club.md)\nruns `1.5`. More.\n",
        "decisions/0001.md": "# 1. One table\n\n- Date: today\n\n**Context.** It is fast.\n",
    }
    assert site.index_of({"Start": ["index.md"], "Why": ["decisions/0001.md"]}, texts) == (
        "# pgoutbox\n\n> The club runs `1.5`.\n\n"
        "## Start\n\n- [Club](index.md): The club runs `1.5`.\n\n"
        "## Why\n\n- [1. One table](decisions/0001.md): It is fast.\n"
    )


def test_files_that_a_reader_saves_are_shown(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    for name in ("a.py", "b.py"):
        (tmp_path / "examples" / name).write_text(f"print({name!r})\n")
    text = (
        "Save [a.py](../../examples/a.py) and\n[b.py](../../examples/b.py). Go:\n\nSee [a.py](../../examples/a.py).\n"
    )
    paragraph, blocks, last = site.with_files(text, tmp_path).partition("\n`a.py`:\n\n```python\nprint('a.py')\n```\n")
    assert blocks
    assert paragraph.endswith("Go:\n")
    assert last == "\n`b.py`:\n\n```python\nprint('b.py')\n```\n\nSee [a.py](../../examples/a.py).\n"

"""The pages of the documentation and their fenced blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
GENERATED: Final = frozenset(DOCS.glob("reference/*.md"))
PAGES: Final = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "tests").rglob("*.md"), *(ROOT / "examples").rglob("*.md"), *DOCS.rglob("*.md")]
)
WRITTEN: Final = [page for page in PAGES if page not in GENERATED]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DIRECTIVE = re.compile(r"<!-- ([^\n]*) -->\n\Z")


def title(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    directive: str

    @property
    def place(self) -> str:
        return f"{title(self.page)}:{self.line}"

    @property
    def file_name(self) -> str | None:
        """Return the file name in its first line, under which the reader saves it."""
        named = re.match(r"# (\w+\.py)\n", self.text)
        return None if named is None else named[1]


def blocks_of(page: Path, *languages: str) -> list[Block]:
    text = page.read_text()
    found = []
    for fence in FENCE.finditer(text):
        directive = DIRECTIVE.search(text[: fence.start()])
        line = text.count("\n", 0, fence.start()) + 1
        found.append(Block(page, line, fence[1], fence[2], "" if directive is None else directive[1]))
    return [block for block in found if not languages or block.language in languages]


def all_blocks(*languages: str) -> list[Block]:
    return [block for page in WRITTEN for block in blocks_of(page, *languages)]


def prose_of(page: Path) -> str:
    return FENCE.sub("", page.read_text())

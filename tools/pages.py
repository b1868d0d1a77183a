"""Check the pages against each other and against the names of the tests.

`python -m tools.pages` prints each fault of the repository, and returns 1 if there are any. Rumdl checks the links, and
tests/acceptance/test_docs.py whether the pages match the code.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tools import site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT: Final = Path(__file__).parents[1]

_FENCE: Final = re.compile(r"^```\w*\n.*?^```$", re.MULTILINE | re.DOTALL)
_FOREIGN: Final = re.compile(
    r"\b(?:jobs?|consumer groups?|dead.letters?|visibility timeouts?|task queues?|acks?|nacks?)\b", re.IGNORECASE
)
_DECISION: Final = r"\[decision \d+\]\(\d{4}-[a-z0-9-]+\.md\)"
_DECISION_HEAD: Final = re.compile(
    r"# (\d+)\. (.+)\n\n- Date: \d{4}-\d\d-\d\d\n"
    rf"- Status: (?:accepted(?:, amended by {_DECISION})?|superseded by {_DECISION})\n\n"
)
_FEATURES: Final = {"A": 14, "B": 10, "C": 6, "D": 8, "E": 14, "F": 24}
_FEATURE_TEST: Final = re.compile(r"\[([^\]]+)\]\((\w[^):]+\.py)\)")
_SCREEN_LINES: Final = 60


def pages_of(root: Path) -> list[Path]:
    """Return the Markdown files that users and contributors read."""
    return sorted([*root.glob("*.md"), *(root / "examples").rglob("*.md"), *(root / "docs").rglob("*.md")])


def written_pages_of(root: Path) -> list[Path]:
    """Return the pages that are not generated."""
    return [page for page in pages_of(root) if page.parent != root / "docs/reference"]


def unlisted_pages(root: Path) -> Iterator[str]:
    """Yield each page that neither the index nor the list of decisions has."""
    docs = root / "docs"
    links = re.findall(
        r"\]\(([^)#\s]+)\)", "".join((docs / name).read_text() for name in ("README.md", "decisions.md"))
    )
    listed = {(docs / link).resolve() for link in links} | {docs / "README.md"}
    for page in sorted(set(docs.rglob("*.md")) - listed):
        yield f"{page.relative_to(root)}: not in the index docs/README.md"


def misplaced_pages(root: Path) -> Iterator[str]:
    """Yield each page that is not in one group of the site's navigation, and each name there without a page."""
    named = [page for pages in site.groups_of(root).values() for page in pages]
    pages = site.pages_of(root)
    for page, file in pages.items():
        if named.count(page) != 1:
            yield f"{file}: name it once, as {page}, in a group of {site.CONFIGURATION}"
    for page in sorted(set(named) - pages.keys()):
        yield f"{site.CONFIGURATION}: there is no page {page}"


def foreign_terms(root: Path) -> Iterator[str]:
    """Yield each term of other systems for which the glossary has its own."""
    for page in written_pages_of(root):
        for term in _FOREIGN.findall(_prose_of(page)):
            yield f"{page.relative_to(root)}: `{term}` is not a term of the glossary"


def missing_tests(root: Path) -> Iterator[str]:
    """Yield each test that the guarantees, the table of faults or another page names and that does not exist."""
    for page in written_pages_of(root):
        for name in re.findall(r"`(tests/\w+/\w+\.py)`", page.read_text()):
            if not (root / name).exists():
                yield f"{page.relative_to(root)}: {name} does not exist"
    guarantees = root / "docs/explanation/guarantees.md"
    quoted = re.findall(r"`(tests/\w+/\w+\.py)`\s+\(([^)]*)\)", guarantees.read_text())
    if not quoted:
        yield f"{guarantees.relative_to(root)}: names no test"
    for name, sentences in quoted:
        for sentence in (" ".join(part.split()) for part in sentences.split(";")):
            # A scenario of the guards is a function without `test`.
            if {sentence.replace(" ", "_"), _test_of(sentence)}.isdisjoint(_functions_in(root / name)):
                yield f"{guarantees.relative_to(root)}: no test of {name} says: {sentence}"
    faults = root / "docs/explanation/reliability.md"
    named = set(re.findall(r"`(test_\w+)`", faults.read_text()))
    if not named:
        yield f"{faults.relative_to(root)}: names no test"
    source = "".join(path.read_text() for path in sorted((root / "tests").rglob("*.py")))
    for name in sorted(named - set(re.findall(r"def (test_\w+)\(", source))):
        yield f"{faults.relative_to(root)}: {name} does not exist"


def wrong_decisions(root: Path) -> Iterator[str]:
    """Yield each decision with a gap in its number, a wrong head, or no line in the index."""
    index = re.sub(r"\n +", " ", (root / "docs/decisions.md").read_text()).splitlines()
    for expected, page in enumerate(sorted((root / "docs/decisions").glob("*.md")), start=1):
        name = page.relative_to(root)
        head = _DECISION_HEAD.match(page.read_text())
        if head is None:
            yield f"{name}: must begin with its number and title, date and status"
        elif not int(head[1]) == int(page.name[:4]) == expected:
            yield f"{name}: must have the number {expected}"
        elif f"{head[1]}. [{head[2]}](decisions/{page.name})" not in index:
            yield f"{name}: its number and title are not in docs/decisions.md"


def wrong_summary(root: Path) -> Iterator[str]:
    """Yield the faults of the page on features: it has the groups of the matrix, and fits one screen."""
    page, matrix = root / "docs/explanation/features.md", root / "tests/features.md"
    name = page.relative_to(root)
    groups, expected = (re.findall(r"^## (.+)$", found.read_text(), re.MULTILINE) for found in (page, matrix))
    if groups != expected:
        yield f"{name}: must have the groups of {matrix.relative_to(root)}"
    if page.read_text().count("\n") > _SCREEN_LINES:
        yield f"{name}: must have at most {_SCREEN_LINES} lines"


def wrong_features(root: Path) -> Iterator[str]:
    """Yield each line of the matrix of features that is missing, repeated or empty, or names a test that is missing."""
    page = root / "tests/features.md"
    name = page.relative_to(root)
    lines = [f"{letter}{number}" for letter, count in _FEATURES.items() for number in range(1, count + 1)]
    rows = re.findall(r"^\| ([A-F]\d+ \|.*) \|$", page.read_text(), re.MULTILINE)
    cells = [tuple(cell.strip() for cell in row.split("|")) for row in rows]
    descriptions, checks = ([row for row in cells if len(row) == count] for count in (4, 3))
    for title, table in (("descriptions", descriptions), ("checks", checks)):
        if [row[0] for row in table] != lines:
            yield f"{name}: the {title} must have the lines {lines[0]} to {lines[-1]} once, in order"
        for row in table:
            if not row[1] or not row[2]:
                yield f"{name}: {row[0]} has an empty cell"
    for line, tests, _ in checks:
        named = _FEATURE_TEST.findall(tests)
        if not named or len(named) != tests.count("["):
            yield f"{name}: {line} must name tests, and only tests"
        for sentence, path in named:
            if _test_of(sentence) not in _functions_in((page.parent / path).resolve()):
                yield f"{name}: {line}: no test of {path} says: {sentence}"


CHECKS: Final[tuple[Callable[[Path], Iterator[str]], ...]] = (
    unlisted_pages,
    misplaced_pages,
    foreign_terms,
    missing_tests,
    wrong_decisions,
    wrong_features,
    wrong_summary,
)


def _prose_of(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


@cache
def _functions_in(path: Path) -> frozenset[str]:
    """Return the names of the functions in a file."""
    if not path.exists():
        return frozenset()
    nodes = ast.walk(ast.parse(path.read_text()))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _test_of(sentence: str) -> str:
    """Return the name of the test that says this sentence."""
    return f"test_{sentence[:1].lower()}{sentence[1:]}".replace(" ", "_")


def main(root: Path = ROOT) -> int:
    """Print the faults of the pages; return 1 if there are any."""
    faults = [fault for check in CHECKS for fault in check(root)]
    for fault in faults:
        print(fault)
    return int(faults != [])


if __name__ == "__main__":
    sys.exit(main())

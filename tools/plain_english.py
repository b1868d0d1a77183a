"""Check the prose of the repository against the rules of plain English.

The prose is Markdown, the text of HTML templates, comments of Python and SQL files, and the docstrings and long strings
of Python files. `python -m tools.plain_english` checks each top-level folder against its limit in pyproject.toml, in
findings for 1,000 lines of prose. With paths as arguments it prints the findings of these files only.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

ROOT: Final = Path(__file__).parents[1]
TOP: Final = "."  # Stands for the files of the top level in the table of limits.
LONGEST_SENTENCE: Final = 40
_SHORT_STRING: Final = 3  # A string with more spaces is prose.

_VERB: Final = (
    "is|was|are|were|has|had|have|does|did|must|may|can|cannot|should|will|would|comes?|came|ends?|ended|waits?|waited|"
    "goes|went|falls|fell|holds?|held|stands?|stood|stays|needs?|wants?|looks?|asks?|knows|reads|makes|takes?"
)
# "People who wait" has a subject, so it is not counted.
_ANTECEDENTS: Final = "those|people|person|all|one|somebody|anybody|everybody|nobody|someone|anyone|everyone|users?"


class Line(NamedTuple):
    """A line of prose; an empty text ends a paragraph."""

    number: int
    text: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A turn of phrase to avoid. Advice is listed for named files, and counts towards no limit."""

    name: str
    pattern: re.Pattern[str]
    is_advice: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """A place in a file that breaks a rule."""

    path: Path
    line: int
    rule: Rule
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule.name}: {self.text}"


def _rule(name: str, pattern: str, *, is_advice: bool = False) -> Rule:
    return Rule(name, re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE), is_advice)


RULES: Final = (
    _rule(
        "headless clause (name the subject with a noun)",
        rf"(?<![?\w])(?:(?:{_ANTECEDENTS}) who\b|(?P<hit>what|who|whoever|whatever|whichever)"
        rf"(?: else| never| no longer| already| still)? (?:{_VERB})\b)",
    ),
    _rule(
        "`is no X` (write `is not a X` or `is not X`)",
        r"\b(?<!there\s)(?:is|are|was|were) no (?!longer\b|more\b|less\b|fewer\b|later\b|earlier\b|better\b|worse\b)\w",
    ),
    _rule("`anew` (write `again`)", r"\banew\b"),
    _rule("`mend` (write `fix` or `repair`)", r"\bmend(?:s|ed|ing)?\b"),
    _rule("`for ever` (write `forever`, `unlimited` or `without end`)", r"\bfor ever\b"),
    _rule("`tell of` (write `report`, `log` or `describe`)", r"\b(?:tell|tells|told|telling) (?:of|so)\b"),
    _rule("`say` (write `for example`)", r"(?:, |\()say(?:,| \d)"),
    _rule("`telling name` (write `sensitive name`)", r"\btelling names?\b"),
    _rule("`held to be` (write `considered`)", r"\b(?:is|are|was|were) held to be\b"),
    _rule(
        f"sentence of more than {LONGEST_SENTENCE} words (make two)",
        rf"(?:[^\s.?!:|]\S*(?<![.?!:|])(?:[^\S\n]|\n(?![^\S\n]*\n))+){{{LONGEST_SENTENCE},}}\S+",
        is_advice=True,
    ),
)

_QUESTION: Final = re.compile(r"[^.?!\n]*\?(?!\w)")
_INLINE_CODE: Final = re.compile(r"`[^`\n]*`")
_FENCED: Final = re.compile(r"^ *(```|~~~).*?^ *\1[^\n]*$", re.DOTALL | re.MULTILINE)
_TEMPLATE_CODE: Final = re.compile(r"\{%.*?%\}|\{#.*?#\}|<(script|style)\b.*?</\1>|<[^>]*>", re.DOTALL | re.IGNORECASE)
_TEMPLATE_VALUE: Final = re.compile(r"\{\{.*?\}\}", re.DOTALL)
_SQL_COMMENT: Final = re.compile(r"--(.*)|\bCOMMENT ON [^;]*?\bIS\s+'((?:[^']|'')*)'", re.IGNORECASE)
_MARK: Final = re.compile(r"^\s*(?:#+|[-*>|]|\d+\.)\s+")


def prose_of(path: Path, text: str) -> list[Line]:
    """The lines of prose in one file, without code and without questions. Files of other kinds have none."""
    read = _READERS.get(path.suffix)
    if read is None:
        return []
    return [Line(line.number, _INLINE_CODE.sub("`x`", line.text)) for line in read(text)]


def count_lines(lines: Iterable[Line]) -> int:
    """The number of lines with text."""
    return sum(bool(line.text.strip()) for line in lines)


def findings_in(path: Path, lines: Sequence[Line], rules: Iterable[Rule] = RULES) -> list[Finding]:
    """The places in the prose of one file that break one of `rules`, in the order of its lines."""
    starts = list(accumulate((len(line.text) + 1 for line in lines), initial=0))
    prose = "\n".join(line.text for line in lines)
    found = []
    for rule in rules:
        for match in rule.pattern.finditer(prose):
            if match.groupdict().get("hit", "") is None:
                continue  # The longer alternative has matched, a clause with its subject.
            line = lines[bisect_right(starts, match.start()) - 1]
            found.append(Finding(path, line.number, rule, line.text.strip()))
    return sorted(found, key=lambda finding: finding.line)


def _blanked(pattern: re.Pattern[str], text: str) -> str:
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def _markdown(text: str) -> Iterator[Line]:
    for number, line in enumerate(_blanked(_QUESTION, _blanked(_FENCED, text)).splitlines(), 1):
        if _MARK.match(line):
            yield Line(number, "")
        yield Line(number, line)


def _html(text: str) -> Iterator[Line]:
    text = _TEMPLATE_VALUE.sub(lambda match: "x" + "\n" * match[0].count("\n"), text)
    text = _blanked(_QUESTION, _blanked(_TEMPLATE_CODE, text))
    yield from (Line(number, line) for number, line in enumerate(text.splitlines(), 1))


def _sql(text: str) -> Iterator[Line]:
    end = 0
    for match in _SQL_COMMENT.finditer(text):
        if text.count("\n", end, match.start()) > 1:
            yield Line(0, "")
        end = match.end()
        group = 1 if match[1] is not None else 2
        number = text.count("\n", 0, match.start(group)) + 1
        yield from (
            Line(number + index, line) for index, line in enumerate(_blanked(_QUESTION, match[group]).splitlines())
        )


def _python(text: str) -> Iterator[Line]:
    previous = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[token.type]
        is_text = name == "STRING" and ('"""' in token.string or token.string.count(" ") > _SHORT_STRING)
        if name != "COMMENT" and name != "FSTRING_MIDDLE" and not is_text:
            continue
        number = token.start[0]
        if name != "COMMENT" or number != previous + 1:
            yield Line(number, "")
        previous = number
        content = token.string.removeprefix("#") if name == "COMMENT" else token.string.strip("\"'")
        for index, line in enumerate(_blanked(_QUESTION, content).splitlines()):
            yield Line(number + index, line)


_READERS: Final[dict[str, Callable[[str], Iterable[Line]]]] = {
    ".md": _markdown,
    ".html": _html,
    ".sql": _sql,
    ".py": _python,
}


@dataclass(slots=True)
class Folder:
    """The findings of one top-level folder."""

    name: str
    limit: float
    lines: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Findings for 1,000 lines of prose."""
        return 1000 * len(self.findings) / max(self.lines, 1)


def folders_of(root: Path, paths: Iterable[Path], limits: dict[str, float]) -> list[Folder]:
    """Count the findings of all `paths`, which are relative to `root`, by top-level folder."""
    folders: dict[str, Folder] = {}
    counted = [rule for rule in RULES if not rule.is_advice]
    for path in paths:
        if path.suffix not in _READERS or (root / path).is_symlink() or not (root / path).is_file():
            continue
        name = path.parts[0] if len(path.parts) > 1 else TOP
        folder = folders.setdefault(name, Folder(name, limits.get(name, limits["default"])))
        lines = prose_of(path, (root / path).read_text())
        folder.lines += count_lines(lines)
        folder.findings += findings_in(path, lines, counted)
    return sorted(folders.values(), key=lambda folder: folder.name)


def _files_of_the_repository() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return [Path(name) for name in subprocess.check_output(command, cwd=ROOT, text=True).splitlines()]


def main(arguments: list[str] | None = None) -> int:
    """Print findings; return 1 if a folder is over its limit."""
    parser = argparse.ArgumentParser(prog="python -m tools.plain_english", description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, help="files to list, instead of the check of all folders")
    options = parser.parse_args(arguments)
    if options.paths:
        for path in options.paths:
            for finding in findings_in(path, prose_of(path, path.read_text())):
                print(finding)
        return 0
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["plain-english"]["limits"]
    folders = folders_of(ROOT, _files_of_the_repository(), limits)
    over = [folder for folder in folders if folder.rate > folder.limit]
    for folder in over:
        print(*folder.findings, sep="\n")
    print("folder       lines of prose  findings  per 1,000  limit")
    for folder in folders:
        print(f"{folder.name:12} {folder.lines:14,} {len(folder.findings):9} {folder.rate:10.1f} {folder.limit:6}")
    for folder in over:
        print(f"{folder.name}: {folder.rate:.1f} findings for 1,000 lines of prose, at most {folder.limit} are allowed")
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())

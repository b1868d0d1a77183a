"""Build the documentation site from README.md, CHANGELOG.md and docs: `python -m tools.site`.

The directory build/site has one folder for each published version, and the newest also as `latest`. The module copies
the pages to build/pages with links that work on the site, and Zensical renders them; a warning is an error. Zensical's
own Markdown is made from the HTML, without the languages of the blocks. So this module writes the pages as Markdown,
and llms.txt, the index of these.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pgoutbox import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[1]
BUILD: Final = ROOT / "build"
CONFIGURATION: Final = Path("docs/zensical.toml")
LATEST: Final = "latest"
_START: Final = (
    '<!doctype html><meta charset="utf-8"><title>pgoutbox</title>'
    f'<meta http-equiv="refresh" content="0; url={LATEST}/">\n'
)

_FENCE: Final = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_COMMENT: Final = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)  # For tests and for Cog.
_TARGET: Final = re.compile(r"(?<=\]\()[^)#\s]+")
_CODE: Final = re.compile(r"`[^`\n]+`")
_SAVED: Final = re.compile(r"^Save (?:.+\n)+", re.MULTILINE)  # The paragraph that tells a reader which files to save.
_EXAMPLE: Final = re.compile(r"\(\.\./\.\./(examples/(\w+\.py))\)")
_LINK: Final = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


def place_of(file: Path) -> Path | None:
    """Return where a file of the repository is on the site, or None if it is not there."""
    match file.parts:
        case ("README.md",):
            return Path("index.md")
        case ("CHANGELOG.md",):
            return Path("changelog.md")
        case ("docs", "README.md"):
            return Path("contents.md")
        case ("docs", *rest):
            return Path(*rest)
        case _:
            return None


def pages_of(root: Path) -> dict[str, Path]:
    """Return the pages of the site, each with its file in the repository."""
    files = [root / "README.md", root / "CHANGELOG.md", *sorted((root / "docs").rglob("*.md"))]
    return {str(place_of(file.relative_to(root))): file.relative_to(root) for file in files}


def groups_of(root: Path) -> dict[str, list[str]]:
    """Return the groups of the navigation, each with its pages."""
    navigation = tomllib.loads(_configuration(root))["project"]["nav"]
    return {title: list(_flat(items)) for group in navigation for title, items in group.items()}


def site_text(text: str, file: Path, repository: str, address: str) -> str:
    """Return the text of a page with links that work on the site, without comments."""

    # The README is also the page of the package on PyPI, so its picture and its links have absolute addresses.
    raw = repository.replace("https://github.com/", "https://raw.githubusercontent.com/") + "/main/"

    def moved(link: re.Match[str]) -> str:
        if link[0].startswith(raw):
            target = Path(link[0].removeprefix(raw))
        elif link[0].startswith(address):
            return str(Path(link[0].removeprefix(address)).with_suffix(".md"))
        elif "://" in link[0]:
            return link[0]
        else:
            target = Path(os.path.normpath(file.parent / link[0]))
        place, page = place_of(target), place_of(file)
        if place is None or page is None:
            return f"{repository}/blob/main/{target}"
        return os.path.relpath(place, page.parent)

    parts = _FENCE.split(text)
    parts[::2] = [_TARGET.sub(moved, _COMMENT.sub("", prose)) for prose in parts[::2]]
    return "".join(parts)


def with_files(text: str, root: Path) -> str:
    """Return the text of a page with the files of examples/ that its reader saves."""

    def shown(paragraph: re.Match[str]) -> str:
        files = _EXAMPLE.findall(paragraph[0])
        return paragraph[0] + "".join(
            f"\n`{name}`:\n\n```python\n{(root / file).read_text()}```\n" for file, name in files
        )

    return _SAVED.sub(shown, text)


def index_of(groups: dict[str, list[str]], texts: dict[str, str]) -> str:
    """Return llms.txt: each page with its title and its first sentence."""
    lines = ["# pgoutbox", "", f"> {_sentence(texts['index.md'])}"]
    for group, pages in groups.items():
        lines += ["", f"## {group}", ""]
        lines += [f"- [{_title(texts[page])}]({page}): {_sentence(texts[page])}" for page in pages]
    return "\n".join([*lines, ""])


def publish(built: Path, target: Path) -> None:
    """Copy a built site into the directory of all versions, as this version and as the latest.

    The theme reads `versions.json` there, and shows the versions on each page.
    """
    target.mkdir(parents=True, exist_ok=True)
    for folder in (target / __version__, target / LATEST):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(built, folder)
    list_of_versions = target / "versions.json"
    known = json.loads(list_of_versions.read_text()) if list_of_versions.exists() else []
    others = [one | {"aliases": []} for one in known if one["version"] != __version__]
    newest = {"version": __version__, "title": __version__, "aliases": [LATEST]}
    list_of_versions.write_text(json.dumps([newest, *others], indent=2) + "\n")
    (target / "index.html").write_text(_START)


def build(root: Path, target: Path) -> None:
    """Build the site of a repository in the directory `target/html`."""
    urls = tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]
    for folder in ("pages", "html"):
        shutil.rmtree(target / folder, ignore_errors=True)
    unwanted = shutil.ignore_patterns("*.md", CONFIGURATION.name)
    shutil.copytree(root / "docs", target / "pages", ignore=unwanted)
    sources = pages_of(root).items()
    texts = {
        page: site_text(with_files((root / file).read_text(), root), file, urls["Repository"], urls["Documentation"])
        for page, file in sources
    }
    # In the code of a table, GitHub needs a backslash before a pipe, and Zensical would show it.
    _write(target / "pages", {p: _CODE.sub(lambda code: code[0].replace(r"\|", "|"), t) for p, t in texts.items()})
    configuration = _configuration(root).replace("{repository}", urls["Repository"])
    (target / CONFIGURATION.name).write_text(configuration.replace("{address}", urls["Documentation"]))
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(target / CONFIGURATION.name)]
    subprocess.run(command, check=True)
    _write(target / "html", texts | {"llms.txt": index_of(groups_of(root), texts)})


def _configuration(root: Path) -> str:
    decisions = [f'"{page}"' for page in pages_of(root) if page.startswith("decisions/")]
    text = (root / CONFIGURATION).read_text()
    return text.replace('"decisions/*"', ", ".join(decisions)).replace("{version}", __version__)


def _flat(items: object) -> Iterator[str]:
    match items:
        case str():
            yield items
        case list():
            for item in items:
                yield from _flat(item)
        case dict():
            yield from _flat([*items.values()])


def _title(text: str) -> str:
    return text.removeprefix("# ").partition("\n")[0]


def _sentence(text: str) -> str:
    prose = next((part for part in text.split("\n\n")[1:] if part[:1].isalpha() or part[:1] in "`[*"), "")
    plain = _LINK.sub(r"\1", " ".join(prose.split())).removeprefix("**Context.** ")
    return re.split(r"(?<=\.) ", plain, maxsplit=1)[0]


def _write(directory: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


if __name__ == "__main__":
    build(ROOT, BUILD)
    publish(BUILD / "html", BUILD / "site")

"""The statements of workers, producers, commands, dashboard and doctor, one in a file; without those of the kernel.

`sql.STATS` is the statement in `operators/stats.sql`. Those of one capability of the worker, such as `BREAKERS`,
are in its folder, `worker/breakers`. A statement is read without its comments, at its first use or by
`load_all`. A line `\\ir _name.sql` includes a fragment, as in psql. Names are unique in all folders. The calls
of acts on messages are in `operations/acts.py`. No statement is built from values.

Rules for every statement:

- All names are qualified.
- Time is the database's `now()`, except the name of a claim and the tokens of a queue.
- A write of a message names the expected state, and the attempt or the place of the locked row.
- Locked rows are skipped, because a wait fails with 40001 if the row moves to another partition.
- Locks for which a statement waits are taken in the order breaker, key_head, message, queue, claim.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, LiteralString

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_INCLUDE = re.compile(r"( *)\\ir (?:\S+/)?(\w+)\.sql")


def __getattr__(name: str) -> LiteralString:
    if name not in (names := __dir__()):
        import difflib

        raise AttributeError(f"unknown statement {name}, similar names: {difflib.get_close_matches(name, names)}")
    statement = globals()[name] = "\n".join(_lines_of(name))
    return statement


def __dir__() -> list[str]:
    return [name for name in _files() if not name.startswith("_")]


def load_all() -> None:
    """Read every statement now: a process must not read files that an upgrade replaced or removed after its start."""
    for name in __dir__():
        if name not in globals():
            __getattr__(name)


@cache
def _files() -> dict[str, Traversable]:
    """Return all statements and fragments. A fragment's name begins with an underscore."""
    folders = (files(__name__), files("pgoutbox") / "worker")
    groups = (group for folder in folders for group in folder.iterdir() if group.is_dir())
    found = {file.name: file for group in groups for file in group.iterdir() if file.name.endswith(".sql")}
    return {name.removesuffix(".sql").upper(): found[name] for name in sorted(found)}


def _lines_of(name: str) -> list[str]:
    """Return the lines of a file without comments, and with its included fragments, indented like their line."""
    lines: list[str] = []
    for line in _files()[name].read_text(encoding="utf-8").splitlines():
        if include := _INCLUDE.fullmatch(line):
            lines += [include[1] + included for included in _lines_of(include[2].upper())]
        elif line.strip() and not line.lstrip().startswith("--"):
            lines.append(line)
    return lines

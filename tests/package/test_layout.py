"""The layout of the package: public modules, and the page that describes its folders.

Applications import from `pgoutbox` and its public modules. So do the examples and the pages that show how.
"""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from pathlib import Path

import pytest

import pgoutbox

ROOT = Path(__file__).parents[2]
PUBLIC = {"pgoutbox", *pgoutbox.PUBLIC_MODULES}
PROGRAMS = sorted((ROOT / "examples").rglob("*.py"))
PROMISES = sorted((ROOT / "tests/promises").rglob("*.py"))
HELPERS = sorted({*(ROOT / "tests").rglob("*.py")} - {*(ROOT / "tests").rglob("test_*.py")})
PAGES = sorted([ROOT / "README.md", ROOT / "docs/tutorial.md", *(ROOT / "docs/how-to").rglob("*.md")])
IN_SQL = {"pgoutbox.enqueue", "pgoutbox.message"}  # A function and a table have the names of private modules.
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
ARCHITECTURE = ROOT / "docs/explanation/architecture.md"
INNER_PARTS = (
    "pgoutbox.worker",
    "pgoutbox.database.sql",
    "pgoutbox.database.store",
    "pgoutbox.database.worker_connection",
    "tests.support.suspending_app",
    "tests.support.worker_sql",
)


def imported_by(source: str) -> set[str]:
    """The modules of pgoutbox that a program names in its import statements, submodules among them."""
    return {name for name in modules_imported_by(source) if name.partition(".")[0] == "pgoutbox"}


def modules_imported_by(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in inner if is_module(name)} or {node.module}
    return found


def inner_parts_imported_by(source: str) -> set[str]:
    """The inner parts of the worker that a program imports, and the helpers that know them."""
    found = modules_imported_by(source) - {"pgoutbox.worker"}  # `Worker` is public, its modules are not.
    return {name for name in found if f"{name}.".startswith(tuple(f"{part}." for part in INNER_PARTS))}


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def module_of(name: str) -> str:
    """The module of a dotted name. `pgoutbox.cancel` is a function in SQL: only the package has a part of its name."""
    while not is_module(name):
        name = name.rpartition(".")[0]
    return name


def title(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("name", pgoutbox.PUBLIC_MODULES)
def test_a_public_module_can_be_imported(name: str) -> None:
    importlib.import_module(name)


def test_the_public_modules_are_sorted_and_differ() -> None:
    assert sorted({*pgoutbox.PUBLIC_MODULES}) == [*pgoutbox.PUBLIC_MODULES]


@pytest.mark.parametrize("path", PROGRAMS, ids=title)
def test_an_example_imports_from_public_modules_only(path: Path) -> None:
    assert imported_by(path.read_text()) - PUBLIC == set()


@pytest.mark.parametrize("path", PROMISES, ids=title)
def test_a_test_of_a_promise_imports_from_public_modules_only(path: Path) -> None:
    assert imported_by(path.read_text()) - PUBLIC == set()


def test_few_helpers_import_inner_parts_of_the_worker() -> None:
    """Then tests of promises run beside any worker."""
    imported = {title(path): inner_parts_imported_by(path.read_text()) for path in {*HELPERS, *PROMISES}}
    knowing = {name for name, parts in imported.items() if parts}
    assert knowing == {f"tests/support/{name}.py" for name in ("suspending_app", "worker_sql")}


@pytest.mark.parametrize("path", PAGES, ids=title)
def test_a_page_names_public_modules_only(path: Path) -> None:
    programs = [textwrap.dedent(match[2]) for match in BLOCK.finditer(path.read_text())]
    assert set().union(*map(imported_by, programs)) - PUBLIC == set()
    names = re.findall(r"`(pgoutbox(?:\.[a-z_]+)+)", path.read_text())
    assert {module_of(name) for name in names} - PUBLIC - IN_SQL == set()


def test_the_reference_describes_public_modules_only() -> None:
    named = set(re.findall(r"^### (pgoutbox[\w.]+)$", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE))
    assert "pgoutbox.testing" in named
    assert named - PUBLIC == set()


def test_imports_of_private_modules_are_found() -> None:
    program = "from pgoutbox.worker import loader, Worker\nimport pgoutbox.database.store\nfrom pgoutbox import sql"
    assert imported_by(program) == {"pgoutbox.worker.loader", "pgoutbox.database.store", "pgoutbox"}
    assert imported_by("from pgoutbox.worker import Worker") == {"pgoutbox.worker"}


def test_imports_of_inner_parts_are_found() -> None:
    program = "import pgoutbox.worker.worker\nfrom pgoutbox.database import sql, store\nfrom pgoutbox import Worker"
    assert inner_parts_imported_by(program) == {
        "pgoutbox.worker.worker",
        "pgoutbox.database.sql",
        "pgoutbox.database.store",
    }
    program = "from tests.support.worker_sql import claim\nfrom pgoutbox.worker import loader"
    assert inner_parts_imported_by(program) == {"tests.support.worker_sql", "pgoutbox.worker.loader"}
    program = "from pgoutbox.worker import Worker\nfrom tests.support.outbox_actions import enqueue"
    assert inner_parts_imported_by(program) == set()


def test_the_package_has_few_modules_of_its_own() -> None:
    assert len([*(ROOT / "pgoutbox").glob("*.py")]) <= 22


def test_the_architecture_lists_every_folder() -> None:
    tree = ARCHITECTURE.read_text().partition("```text\n")[2].partition("```")[0]
    parent = ""
    listed = set()
    for indent, name in re.findall(r"^( *)(\w+)/ ", tree, re.MULTILINE):
        parent = parent if indent else name
        listed.add(f"{parent}/{name}" if len(indent) == 2 else name)
    folders = [
        title(path)
        for path in (ROOT / "pgoutbox").iterdir()
        if (path / "__init__.py").exists() and not path.is_symlink()
    ]
    assert {*folders} - listed == set()


def test_files_that_the_architecture_names_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)`", ARCHITECTURE.read_text().partition("## The way")[2])
    assert len(named) > 20
    assert [name for name in named if not (ROOT / "pgoutbox" / name).exists()] == []

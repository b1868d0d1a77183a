"""Every statement is a file that is found by its name, used, and sent without comments."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import pgoutbox
from pgoutbox.database import sql
from pgoutbox.kernel import statements

PACKAGE = Path(pgoutbox.__file__).parent
FOLDER = Path(sql.__file__).parent
FILES = sorted([*FOLDER.rglob("*.sql"), *(PACKAGE / "worker").rglob("*.sql")])
KERNEL_FOLDER = Path(statements.__file__).parent
KERNEL_FILES = sorted(KERNEL_FOLDER.rglob("*.sql"))
KERNEL_STATEMENTS = {name: text for name, text in vars(statements).items() if name.isupper()}
TEXTS = {name: getattr(sql, name) for name in dir(sql)} | KERNEL_STATEMENTS
USERS = sorted(path for part in ("pgoutbox", "tests", "benchmarks") for path in (PACKAGE.parent / part).rglob("*.py"))
INCLUDE = re.compile(r"^ *\\ir (\S+)$", re.MULTILINE)


def statements_named_in(source: str) -> set[str]:
    """The statements that a module names: `sql.NAME` after an import of our `sql`, or a name imported from it."""
    nodes = list(ast.walk(ast.parse(source)))
    imports = [n for n in nodes if isinstance(n, ast.ImportFrom) and (n.module or "").split(".")[0] == "pgoutbox"]
    names = {
        alias.name
        for node in imports
        if str(node.module).endswith(".sql")
        for alias in node.names
        if alias.name.isupper()
    }
    if any(alias.name == "sql" and alias.asname is None for node in imports for alias in node.names):
        names |= {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "sql"
            and node.attr.isupper()
        }
    return names


@pytest.mark.slow
def test_every_statement_that_a_module_names_exists() -> None:
    assert {name for path in USERS for name in statements_named_in(path.read_text())} - set(dir(sql)) == set()


@pytest.mark.slow
def test_the_package_uses_every_statement() -> None:
    used = {name for path in PACKAGE.rglob("*.py") for name in statements_named_in(path.read_text())}
    assert set(dir(sql)) - used == set()


def test_the_kernel_has_a_file_for_each_statement_and_uses_each() -> None:
    """The others are such files with other parts left out."""
    variants = {"CLAIM_WITHOUT_KEYS", "CLAIM_PROBE", "FINISH_AND_HOLD"}
    assert {path.stem.upper() for path in KERNEL_FILES} == KERNEL_STATEMENTS.keys() - variants
    source = "".join(path.read_text() for path in KERNEL_FOLDER.glob("*.py"))
    assert [name for name in KERNEL_STATEMENTS if not re.search(rf"\bsql\.{name}\b", source)] == []


@pytest.mark.parametrize(
    "source",
    [
        "from pgoutbox.database import sql\nsql.NOWHERE",
        "from pgoutbox.database.sql import NOWHERE, load_all",
    ],
)
def test_a_named_statement_is_found_in_a_source(source: str) -> None:
    assert statements_named_in(source) == {"NOWHERE"}


def test_an_unknown_name_is_an_attribute_error_with_similar_names() -> None:
    with pytest.raises(AttributeError, match=r"RENEW_CLAIM.*RENEW_CLAIMS"):
        getattr(sql, "RENEW_CLAIM")  # noqa: B009


def test_a_fragment_is_not_a_statement() -> None:
    (name, *_) = (path.stem.upper() for path in FILES if path.stem.startswith("_"))
    assert name not in dir(sql)
    with pytest.raises(AttributeError):
        getattr(sql, name)


def test_the_names_of_files_are_unique_in_all_folders() -> None:
    assert len({path.name for path in FILES}) == len(FILES)


def test_psql_finds_the_same_fragments_and_several_files_include_each() -> None:
    included = [(path.parent / name).resolve() for path in FILES for name in INCLUDE.findall(path.read_text())]
    fragments = {path.resolve() for path in FILES if path.stem.startswith("_")}
    assert {path for path in included if included.count(path) > 1} == fragments


def test_every_file_begins_with_a_comment() -> None:
    assert [path.name for path in (*FILES, *KERNEL_FILES) if not path.read_text().startswith("-- ")] == []


def test_statements_are_sent_without_comments_includes_and_empty_lines() -> None:
    assert [name for name, text in TEXTS.items() if re.search(r"--|\\ir|^\s*$", text, re.MULTILINE)] == []


def test_each_percent_sign_is_part_of_a_placeholder() -> None:
    placeholder = re.compile(r"%\(\w+\)s|%s|%%")
    assert [name for name, text in TEXTS.items() if "%" in placeholder.sub("", text)] == []


def test_no_line_is_longer_than_130_characters() -> None:
    wide = [
        f"{path.name}:{number}"
        for path in (*FILES, *KERNEL_FILES)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > 130
    ]
    assert wide == []


def run(program: str, path: Path) -> str:
    """The output of a program in a new interpreter with this path."""
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """The statements and the module that reads them, in a zip archive."""
    path = tmp_path / "archive.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for package in ("pgoutbox", "pgoutbox/database"):
            archive.writestr(f"{package}/__init__.py", "")
        for file in (FOLDER / "__init__.py", *FILES):
            archive.write(file, file.relative_to(PACKAGE.parent))
    return path


def test_statements_are_read_from_a_zip_archive(archive: Path) -> None:
    assert (
        run("from pgoutbox.database import sql; print(sql.RENEW_CLAIMS, sql.BREAKERS)", archive)
        == f"{sql.RENEW_CLAIMS} {sql.BREAKERS}\n"
    )


def test_loaded_statements_do_not_need_their_files(archive: Path) -> None:
    program = f"""
import os
from pgoutbox.database import sql
sql.load_all()
os.remove({str(archive)!r})
print(sql.RENEW_CLAIMS, sql.BREAKERS)
"""
    assert run(program, archive) == f"{sql.RENEW_CLAIMS} {sql.BREAKERS}\n"


def test_statements_that_are_replaced_before_the_load_stay_replaced(archive: Path) -> None:
    program = "from pgoutbox.database import sql; sql.LISTEN = 'SELECT 1'; sql.load_all(); print(sql.LISTEN)"
    assert run(program, archive) == "SELECT 1\n"


@pytest.mark.slow
def test_a_worker_that_starts_loads_all_statements() -> None:
    program = """
from pgoutbox import Settings
from pgoutbox.database import sql
from pgoutbox.database.store import Store
Store(Settings(dsn="host=127.0.0.1 port=1"), worker="worker-1")
print(sorted(set(dir(sql)) - vars(sql).keys()))
"""
    assert run(program, PACKAGE.parent) == "[]\n"

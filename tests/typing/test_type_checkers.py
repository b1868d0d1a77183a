"""Tests that mypy and pyright, both in strict mode, accept the documented programs and know all public types."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

import pgoutbox
from tests.support.pages import DOCS, ROOT, blocks_of

pytestmark = pytest.mark.slow

PAGES: Final = (ROOT / "README.md", DOCS / "tutorial.md", *sorted((DOCS / "how-to").glob("*.md")))
# These ship no types. tests/typing/check_public_api.py has the shapes of the type stubs of asyncpg and Django.
# The settings of Django are the end of a file.
UNTYPED: Final = re.compile(r"^(?:import|from) (?:asyncpg|celery|django|members)\b|^# club/settings\.py", re.MULTILINE)


def run(*command: str, directory: Path) -> str:
    """Return the output of a checker, which sees the package of this checkout."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MYPYPATH": str(ROOT), "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    return done.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the Python blocks of the pages, each in a file of its own."""
    directory = tmp_path_factory.mktemp("programs")
    for page in PAGES:
        for block in blocks_of(page, "python"):
            if UNTYPED.search(block.text) is not None:
                continue
            name = block.file_name or f"{page.stem.replace('-', '_')}_line_{block.line}.py"
            (directory / name).write_text(block.text)
    for starter in (ROOT / "examples").glob("*_app.py"):  # Readers save them beside the blocks.
        shutil.copy(starter, directory)
    # The examples, which two pages import, are annotated but not an installed package.
    strict = {"typeCheckingMode": "strict", "pythonVersion": "3.11", "reportMissingTypeStubs": False}
    (directory / "pyrightconfig.json").write_text(json.dumps(strict))
    assert len(list(directory.glob("*.py"))) > 40
    return directory


def test_mypy_accepts_the_documented_programs(programs: Path) -> None:
    # The settings and the cache of `make check`, which has checked the package and the libraries.
    settings = [f"--config-file={ROOT / 'pyproject.toml'}", f"--cache-dir={ROOT / '.mypy_cache'}"]
    output = run("mypy", *settings, ".", directory=programs)
    assert output.startswith("Success"), output


def test_pyright_accepts_the_documented_programs(programs: Path) -> None:
    output = run("pyright", "--pythonpath", sys.executable, directory=programs)
    assert output.startswith("0 errors"), output


def test_every_public_name_has_a_complete_type(tmp_path: Path) -> None:
    command = ["--verifytypes", "pgoutbox", "--ignoreexternal", "--outputjson", "--pythonpath", sys.executable]
    report = json.loads(run("pyright", *command, directory=tmp_path))["typeCompleteness"]
    modules: list[str] = sorted((module["name"] for module in report["modules"]), key=len, reverse=True)
    exporting = {getattr(pgoutbox, name).__module__ for name in pgoutbox.__all__}
    public = {"pgoutbox", *pgoutbox.PUBLIC_MODULES, *exporting}

    def module_of(symbol: dict[str, Any]) -> str:
        return next(m for m in modules if f"{symbol['name']}.".startswith(f"{m}."))

    symbols = [symbol for symbol in report["symbols"] if module_of(symbol) in public]
    assert len(symbols) > 500
    incomplete = {s["name"]: s["diagnostics"] for s in symbols if s["isTypeAmbiguous"] or not s["isTypeKnown"]}
    of_django = incomplete.pop("pgoutbox.contrib.django.test.OutboxTestCase")  # Django ships no types.
    assert {one["message"] for one in of_django} == {"Type of metaclass unknown", "Type of base class unknown"}
    assert incomplete == {}

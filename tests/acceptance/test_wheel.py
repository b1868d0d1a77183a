"""Tests the wheel, alone in a new virtual environment: it contains everything that users need."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

import pgoutbox
from tests.support.brokers import accepts
from tests.support.pages import ROOT, blocks_of
from tests.support.ports import free_port
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

UV: Final = str(Path(sys.executable).with_name("uv"))

APP = """
from pathlib import Path

from pgoutbox import Context, Message, Outbox

outbox = Outbox()


@outbox.handler("wheel.test")
async def write_down(message: Message, ctx: Context) -> None:
    Path("delivered").write_text(message.payload["text"])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the source archive, like a release."""
    directory = tmp_path_factory.mktemp("dist")
    build(ROOT, directory)
    (built,) = directory.glob("*.whl")
    return built


def build(source: Path, directory: Path) -> None:
    command = [sys.executable, "-m", "build", "--installer", "uv", "--outdir", str(directory), str(source)]
    subprocess.run(command, check=True, capture_output=True)


def test_the_wheel_contains_exactly_the_package_its_types_statements_and_migrations(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    migrations = (path for path in (ROOT / "migrations").rglob("*") if path.suffix in (".py", ".sql"))
    shipped = {f"pgoutbox/{path.relative_to(ROOT)}" for path in migrations}
    assert {"pgoutbox/migrations/env.py", "pgoutbox/migrations/sql/tables/message.sql"} <= shipped
    assert {"pgoutbox/py.typed", *shipped} <= {*names}
    for part in ("database", "kernel"):
        assert {str(path.relative_to(ROOT)) for path in (ROOT / "pgoutbox" / part).rglob("*.sql")} <= {*names}
    assert len(names) == len(set(names))
    assert {Path(name).parts[0].split("-")[0] for name in names} == {"pgoutbox"}


def test_the_unpacked_source_archive_builds_the_same_files(wheel: Path, tmp_path: Path) -> None:
    (archive,) = wheel.parent.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    build(unpacked, tmp_path / "dist")
    for path in (wheel, archive):
        assert (tmp_path / "dist" / path.name).read_bytes() == path.read_bytes()


def test_pypi_accepts_and_shows_the_metadata(wheel: Path) -> None:
    files = [str(path) for path in wheel.parent.iterdir()]
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout.count("PASSED")) == (0, 2), checked.stdout + checked.stderr
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    fields, _, description = metadata.partition("\n\n")
    urls = dict(re.findall(r"^Project-URL: (\w+), (\S+)$", fields, re.MULTILINE))
    assert urls.keys() == {"Documentation", "Repository", "Issues", "Changelog"}
    links = re.findall(r"\]\((\S+?)\)|\b(?:src|href)=\"(\S+?)\"", description)
    assert links
    assert [link for pair in links for link in pair if link and not link.startswith("https://")] == []


def test_the_release_runs_only_actions_that_a_commit_names() -> None:
    used = re.findall(r"uses: (.*)", (ROOT / ".github/workflows/release.yml").read_text())
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", action)] == []


def test_the_version_of_the_wheel_is_that_of_the_package(wheel: Path) -> None:
    assert wheel.name.startswith(f"pgoutbox-{pgoutbox.__version__}-")


def test_the_wheel_alone_migrates_a_database_and_delivers_a_message(
    wheel: Path, empty_dsn: str, tmp_path: Path, run_in_new_environment: Callable[..., str]
) -> None:
    (tmp_path / "shop.py").write_text(APP)
    run_in_new_environment("uv", "pip", "install", "--quiet", "--python", "venv", str(wheel))
    run_in_new_environment("pgoutbox", "migrate", PGOUTBOX_DSN=empty_dsn)
    enqueue = ("pgoutbox", "enqueue", "wheel.test", '{"text": "from the wheel"}')
    run_in_new_environment(*enqueue, PGOUTBOX_DSN=empty_dsn)
    run_in_new_environment("pgoutbox", "worker", "--app", "shop:outbox", "--once", PGOUTBOX_DSN=empty_dsn)
    assert (tmp_path / "delivered").read_text() == "from the wheel"
    answer = run_in_new_environment("pgoutbox", "stats", "--json", PGOUTBOX_DSN=empty_dsn)
    assert '"sent": 1' in answer


def test_the_quick_start_of_the_readme_delivers_an_e_mail_and_has_strict_types(
    wheel: Path, empty_dsn: str, tmp_path: Path, run_in_new_environment: Callable[..., str]
) -> None:
    """Types the commands of the README, with this wheel, this database and a free port."""
    (program,) = [block for block in blocks_of(ROOT / "README.md") if block.file_name == "shop.py"]
    (commands,) = [block for block in blocks_of(ROOT / "README.md") if block.directive == "run: quick start"]
    (tmp_path / "shop.py").write_text(program.text)
    port = str(free_port())
    typed = commands.text.replace("pip install pgoutbox ", f"pip install {wheel} ").replace("8025", port)
    typed = re.sub(r"PGOUTBOX_DSN=\S+", f"PGOUTBOX_DSN={shlex.quote(empty_dsn)}", typed)
    before, server, after = re.split(r"^(.*aiosmtpd --nosetuid.*) &\n", typed, flags=re.MULTILINE)
    run_in_new_environment("bash", "-ec", before)
    exports = "".join(line for line in before.splitlines(keepends=True) if line.startswith("export "))
    with (tmp_path / "mails").open("w") as mails:
        mail_server = subprocess.Popen(
            [str(tmp_path / "venv" / "bin" / "python"), "-u", *shlex.split(server)[1:]], stdout=mails
        )
        try:
            wait_until(lambda: accepts(int(port)), lambda: f"no mail server at {port}")
            run_in_new_environment("bash", "-ec", exports + after)
        finally:
            mail_server.terminate()
            mail_server.wait()
    received = (tmp_path / "mails").read_text()
    assert received.count("MESSAGE FOLLOWS") == 1
    assert "To: ada@example.org" in received
    assert "Order 7 is on its way." in received
    interpreter = tmp_path / "venv" / "bin" / "python"
    checked = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--config-file=",
            "--strict",
            "--python-executable",
            str(interpreter),
            "shop.py",
        ],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.stdout.startswith("Success"), checked.stdout + checked.stderr


@pytest.fixture
def run_in_new_environment(tmp_path: Path) -> Callable[..., str]:
    """Run a program in an empty directory, with the programs of a new virtual environment first in PATH."""
    environment = tmp_path / "venv"
    subprocess.run([UV, "venv", "--quiet", "--seed", "--python", sys.executable, str(environment)], check=True)

    def run(program: str, *arguments: str, **variables: str) -> str:
        inherited = {n: v for n, v in os.environ.items() if not n.startswith(("PGOUTBOX_", "PYTHON"))}
        path = os.pathsep.join((str(environment / "bin"), str(Path(UV).parent), os.environ["PATH"]))
        found = shutil.which(program, path=path)
        assert found is not None, program
        done = subprocess.run(
            [found, *arguments],
            cwd=tmp_path,
            env=inherited | variables | {"PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run

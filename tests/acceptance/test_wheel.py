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

import pytest

import pgoutbox
from tests.support.brokers import accepts
from tests.support.pages import ROOT, blocks_of
from tests.support.ports import free_port
from tests.support.waiting import wait_until
from tests.support.wheels import UV, build

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the source archive, like a release."""
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def test_the_wheel_contains_exactly_the_package_its_types_statements_and_migrations(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    migrations = (path for path in (ROOT / "migrations").rglob("*") if path.suffix in (".py", ".sql"))
    shipped = {f"pgoutbox/{path.relative_to(ROOT)}" for path in migrations}
    assert {"pgoutbox/migrations/env.py", "pgoutbox/migrations/sql/tables/message.sql"} <= shipped
    assert {"pgoutbox/py.typed", *shipped} <= {*names}
    parts = (path for path in (ROOT / "pgoutbox").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert {str(path.relative_to(ROOT)) for path in parts} <= {*names}
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


def installed(environment: Path, package: str) -> dict[str, str]:
    """Install this package alone into a new virtual environment, and return the variables for its programs."""
    for command in (
        ["venv", "--python", sys.executable, str(environment)],
        ["pip", "install", "--python", str(environment), package],
    ):
        subprocess.run([UV, "--quiet", *command], check=True)
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(("PGOUTBOX_", "PYTHON"))}
    return inherited | {"PATH": os.pathsep.join((str(environment / "bin"), os.environ["PATH"]))}


def test_the_quick_start_of_the_readme_delivers_an_e_mail_with_the_wheel_alone(
    wheel: Path, empty_dsn: str, tmp_path: Path
) -> None:
    """Types the commands of the README, with this wheel, this database and a free port.

    The environment has the wheel and what it needs, and nothing else: the mail server runs outside it.
    """
    (program,) = [block for block in blocks_of(ROOT / "README.md") if block.file_name == "shop.py"]
    (commands,) = [block for block in blocks_of(ROOT / "README.md") if block.directive == "run: quick start"]
    (tmp_path / "shop.py").write_text(program.text)
    port = str(free_port())
    typed = commands.text.replace("8025", port)
    typed = re.sub(r"PGOUTBOX_DSN=\S+", f"PGOUTBOX_DSN={shlex.quote(empty_dsn)}", typed)
    install, rest = typed.split("\n", 1)
    assert install == "pip install pgoutbox aiosmtpd"
    before, server, after = re.split(r"^(.*aiosmtpd --nosetuid.*) &\n", rest, flags=re.MULTILINE)
    environment = installed(tmp_path / "venv", str(wheel))
    with (tmp_path / "mails").open("w") as mails:
        mail_server = subprocess.Popen([sys.executable, "-u", *shlex.split(server)[1:]], stdout=mails)
        try:
            wait_until(lambda: accepts(int(port)), lambda: f"no mail server at {port}")
            done = subprocess.run(
                ["bash", "-ec", before + after],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
        finally:
            mail_server.terminate()
            mail_server.wait()
    received = (tmp_path / "mails").read_text()
    assert received.count("MESSAGE FOLLOWS") == 1
    assert "To: ada@example.org" in received
    assert "Order 7 is on its way." in received


def test_the_other_commands_of_the_readme_run_with_the_wheel_and_its_demo(
    wheel: Path, empty_dsn: str, tmp_path: Path
) -> None:
    demo, night = (
        block.text
        for block in blocks_of(ROOT / "README.md")
        if block.language == "sh" and block.directive != "run: quick start"
    )
    install, demo = demo.split("\n", 1)
    assert install == "pip install 'pgoutbox[demo]'"
    environment = installed(tmp_path / "venv", f"{wheel}[demo]") | {"PGOUTBOX_DSN": empty_dsn}

    def run(commands: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", commands], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    shown = run(demo)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "The ledger adds up." in shown.stdout
    assert run("pgoutbox migrate").returncode == 0
    answers = {command.split()[1]: run(command) for command in night.splitlines()}
    assert [done.stderr for done in answers.values() if "Traceback" in done.stderr] == []
    assert {name: done.returncode for name, done in answers.items()} == {
        "doctor": 1,  # No worker runs.
        "failures": 0,
        "show": 1,
        "redrive": 0,
    }, answers
    assert "4711" in answers["show"].stderr

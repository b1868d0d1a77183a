"""Tests that a worker exits with 1 for a fault that waiting may repair, and with 2 for others.

The unit file in examples/deploy restarts a worker after 1, and leaves it stopped after 2.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from configparser import RawConfigParser
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
import trustme

from pgoutbox import migrate
from tests.support.pooler import pooled
from tests.support.ports import free_port
from tests.support.waiting import wait_until
from tests.support.worker_process import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from tests.conftest import Server

pytestmark = pytest.mark.slow

UNIT = Path(__file__).parents[2] / "examples/deploy/pgoutbox-worker@.service"
APP = """
from pgoutbox import Outbox

outbox = Outbox()

@outbox.handler("greet")
async def greet(message, ctx):
    pass
"""


class Start(Protocol):
    """Starts a worker with the outbox `app:outbox` of the test's directory."""

    def __call__(self, app: str = "app:outbox", **settings: str) -> WorkerProcess: ...


@pytest.fixture
def start(empty_dsn: str, tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "app.py").write_text(APP)
    processes: list[WorkerProcess] = []

    def start_one(app: str = "app:outbox", **settings: str) -> WorkerProcess:
        path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        log = tmp_path / f"log-{len(processes)}"
        process = WorkerProcess(app, log=log, settings={"dsn": empty_dsn, **settings}, environment=path)
        processes.append(process)
        return process

    yield start_one
    for process in processes:
        process.end()


@dataclass(frozen=True, slots=True)
class Scene:
    """The material of a fault: an empty database, a directory with modules, and a TCP socket that does not listen.

    `server` has the database. `rest` ends after the second worker.
    """

    dsn: str
    directory: Path
    tcp: socket.socket
    server: Server
    rest: contextlib.ExitStack

    def pooler(
        self, *, port: int, certificate: trustme.LeafCert | None = None
    ) -> contextlib.AbstractContextManager[str]:
        """Run a pooler before the database, with TLS if it has a certificate."""
        return pooled(self.dsn, self.server, mode="session", size=10, port=port, certificate=certificate)


@dataclass(frozen=True, slots=True)
class Broken:
    """What a worker is started with, the begin of its error, and the next step in it."""

    reason: str
    app: str = "app:outbox"
    settings: dict[str, str] = field(default_factory=dict)
    step: str = ""


@contextlib.contextmanager
def no_schema(scene: Scene) -> Iterator[Broken]:
    yield Broken("the database has no schema pgoutbox")
    migrate.upgrade(scene.dsn)


@contextlib.contextmanager
def no_module(scene: Scene) -> Iterator[Broken]:
    migrate.upgrade(scene.dsn)
    yield Broken("no module 'late'", "late.app:outbox")
    (scene.directory / "late").mkdir()
    (scene.directory / "late/app.py").write_text(APP)


@contextlib.contextmanager
def connection_refused_at_import(scene: Scene) -> Iterator[Broken]:
    migrate.upgrade(scene.dsn)
    connect = f"import socket\nsocket.create_connection({scene.tcp.getsockname()!r})\n"
    (scene.directory / "connecting.py").write_text(connect + APP)
    yield Broken("module 'connecting' failed on import: ConnectionRefusedError", "connecting:outbox")
    scene.tcp.listen()


@contextlib.contextmanager
def no_ca_file(scene: Scene) -> Iterator[Broken]:
    migrate.upgrade(scene.dsn)
    file = scene.directory / "ca.pem"
    yield Broken("PGOUTBOX_WEBHOOK_CA_FILE=", settings={"webhook_ca_file": str(file)})
    trustme.CA().cert_pem.write_to_path(str(file))


@contextlib.contextmanager
def no_templates(scene: Scene) -> Iterator[Broken]:
    migrate.upgrade(scene.dsn)
    templates = scene.directory / "templates"
    code = f"from pgoutbox import Templates\nTemplates({str(templates)!r})\n"
    (scene.directory / "templates_app.py").write_text(code + APP)
    yield Broken("templates: ", "templates_app:outbox")
    templates.mkdir()


@contextlib.contextmanager
def port_in_use(scene: Scene) -> Iterator[Broken]:
    migrate.upgrade(scene.dsn)
    scene.tcp.listen()
    address = "{}:{}".format(*scene.tcp.getsockname())
    yield Broken("PGOUTBOX_METRICS_ADDRESS: cannot listen on 127.0.0.1", settings={"metrics_address": address})
    scene.tcp.close()


def without_tls(dsn: str, file: Path, reason: str) -> Broken:
    """A worker that verifies the server by the authority in the file, and its error."""
    _, _, port = dsn.rpartition("port=")
    place = f'connection failed: connection to server at "127.0.0.1", port {port} failed: '
    return Broken(
        place + reason,
        settings={"dsn": f"{dsn}&sslmode=verify-full&sslrootcert={file}"},
        step="; check sslmode and the certificate files in PGOUTBOX_DSN",
    )


@contextlib.contextmanager
def no_root_certificate(scene: Scene) -> Iterator[Broken]:
    migrate.upgrade(scene.dsn)
    authority, file = trustme.CA(), scene.directory / "root.pem"
    dsn = scene.rest.enter_context(scene.pooler(port=free_port(), certificate=authority.issue_cert("127.0.0.1")))
    yield without_tls(dsn, file, f'root certificate file "{file}" does not exist')
    authority.cert_pem.write_to_path(str(file))


@contextlib.contextmanager
def a_certificate_of_another_authority(scene: Scene) -> Iterator[Broken]:
    migrate.upgrade(scene.dsn)
    authority, file = trustme.CA(), scene.directory / "root.pem"
    trustme.CA().cert_pem.write_to_path(str(file))
    dsn = scene.rest.enter_context(scene.pooler(port=free_port(), certificate=authority.issue_cert("127.0.0.1")))
    yield without_tls(dsn, file, "SSL error: certificate verify failed")
    authority.cert_pem.write_to_path(str(file))


@contextlib.contextmanager
def a_server_without_tls(scene: Scene) -> Iterator[Broken]:
    migrate.upgrade(scene.dsn)
    authority, file, port = trustme.CA(), scene.directory / "root.pem", free_port()
    authority.cert_pem.write_to_path(str(file))
    with scene.pooler(port=port) as dsn:
        yield without_tls(dsn, file, "server does not support SSL, but SSL was required")
    scene.rest.enter_context(scene.pooler(port=port, certificate=authority.issue_cert("127.0.0.1")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        no_schema,
        no_module,
        connection_refused_at_import,
        no_ca_file,
        no_templates,
        port_in_use,
        no_root_certificate,
        a_certificate_of_another_authority,
        a_server_without_tls,
    ],
)
def test_a_worker_exits_with_1_for_a_fault_that_may_pass_and_starts_after_it(
    start: Start,
    server: Server,
    empty_dsn: str,
    tmp_path: Path,
    fault: Callable[[Scene], AbstractContextManager[Broken]],
) -> None:
    with socket.socket() as tcp, contextlib.ExitStack() as rest:
        tcp.bind(("127.0.0.1", 0))
        with fault(Scene(empty_dsn, tmp_path, tcp, server, rest)) as broken:
            refused = start(broken.app, **broken.settings)
            assert refused.wait() == 1, refused.log
            assert f"error: {broken.reason}" in refused.log
            assert broken.step in refused.log
        started = start(broken.app, **broken.settings)
        wait_until(lambda: "worker_started" in started.events() or started.has_ended, lambda: started.log)
        assert started.stop() == 0, started.log


@pytest.mark.parametrize(
    ("app", "settings"),
    [
        ("app:outbox", {"lease_seconds": "abc"}),
        ("app:outbox", {"metrics_address": "127.0.0.1:91810"}),
        ("app:outbox", {"dsn": "postgresql://nowhere.invalid/club?sslmode=verify"}),
        ("app:outbox", {"dsn": "postgresql://127.0.0.1:1/club?sslmode=require&sslrootcert=system"}),
        ("app:absent", {}),
        ("misdefined:outbox", {}),
    ],
)
def test_a_worker_exits_with_2_for_a_fault_that_stays(
    start: Start, tmp_path: Path, app: str, settings: dict[str, str]
) -> None:
    (tmp_path / "misdefined.py").write_text(APP.replace("greet", "No Topic", 1))
    refused = start(app, **settings)
    assert refused.wait() == 2, refused.log
    assert re.search("^error: ", refused.log, re.MULTILINE), refused.log


def test_the_unit_file_restarts_a_worker_after_every_exit_code_but_2() -> None:
    unit = RawConfigParser(strict=False)
    unit.read(UNIT)
    assert (unit["Service"]["Restart"], unit["Service"]["RestartPreventExitStatus"]) == ("always", "2")

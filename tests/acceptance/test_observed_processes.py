"""Tests worker processes from the view of Prometheus, Kubernetes and systemd."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import psycopg
import pytest

from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.acceptance.conftest import Progress, StartWorker
    from tests.conftest import Connect
    from tests.support.worker_process import WorkerProcess

pytestmark = pytest.mark.slow


@pytest.fixture
def database(connect: Connect) -> psycopg.Connection:
    return connect(autocommit=True)


def get(address: str, path: str) -> tuple[int, str]:
    """Return status and body; 0 if nothing answers."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read().decode()
    except OSError:
        return 0, ""


def addresses(worker: WorkerProcess) -> list[str]:
    """Return the addresses of a worker's processes from its log."""
    records = [json.loads(line) for line in worker.log.splitlines() if line.startswith("{") and line.endswith("}")]
    return sorted(record["address"] for record in records if record.get("event") == "metrics_served")


def free_ports(count: int) -> int:
    """Return the first of this many consecutive free ports."""
    for first in range(21_000, 31_000, count):
        sockets = []
        try:
            for port in range(first, first + count):
                sockets.append(socket.create_server(("127.0.0.1", port)))  # noqa: PERF401 - those before a failure close
        except OSError:
            continue
        else:
            return first
        finally:
            for one in sockets:
                one.close()
    raise AssertionError("no free ports")


def test_each_process_has_its_own_port_and_only_the_first_reads_the_database(start_worker: StartWorker) -> None:
    first = free_ports(2)
    worker = start_worker("--processes", "2", metrics_address=f"127.0.0.1:{first}")
    expected = [f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}"]
    wait_until(lambda: addresses(worker) == expected, lambda: worker.log)
    wait_until(lambda: [get(address, "/readyz")[0] for address in expected] == [200, 200], lambda: worker.log)
    bodies = [get(address, "/metrics")[1] for address in expected]
    assert ["pgoutbox_backlog_up 1.0" in body for body in bodies] == [True, False]
    assert all("pgoutbox_slots " in body for body in bodies)
    assert worker.stop() == 0


def test_a_replacement_process_takes_over_the_port(start_worker: StartWorker) -> None:
    first = free_ports(2)
    worker = start_worker("--processes", "2", metrics_address=f"127.0.0.1:{first}")
    wait_until(lambda: get(f"127.0.0.1:{first + 1}", "/readyz")[0] == 200, lambda: worker.log)
    pids = [json.loads(line)["pid"] for line in worker.log.splitlines() if '"process_started"' in line]
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: worker.log.count('"process_started"') == 3, lambda: worker.log)
    wait_until(lambda: get(f"127.0.0.1:{first + 1}", "/readyz")[0] == 200, lambda: worker.log)
    assert worker.stop() == 0


def test_too_few_ports_for_the_processes_are_refused(start_worker: StartWorker) -> None:
    worker = start_worker("--processes", "3", metrics_address="127.0.0.1:65534")
    assert worker.wait() == 2
    assert "--processes 3 needs that many ports, the last would be above 65535" in worker.log


@pytest.mark.slow
def test_a_process_with_a_blocked_event_loop_serves_metrics_and_becomes_not_alive(
    database: psycopg.Connection, progress: Progress, start_worker: StartWorker
) -> None:
    worker = start_worker(metrics_address="127.0.0.1:0")
    wait_until(lambda: addresses(worker), lambda: worker.log)
    (address,) = addresses(worker)
    wait_until(lambda: get(address, "/readyz")[0] == 200, lambda: worker.log)
    database.execute("SELECT pgoutbox.enqueue('test.blocking', '{}')")
    progress.wait_for("blocking")
    assert get(address, "/livez") == (200, "ok\n"), "not blocked for long enough yet"
    status, body = get(address, "/metrics")
    assert status == 200
    assert "pgoutbox_in_flight 1.0" in body
    wait_until(lambda: get(address, "/livez")[0] == 503, lambda: worker.log)
    assert get(address, "/livez")[1].startswith("the event loop has been blocked for ")


def test_a_supervisor_notifies_systemd_for_its_processes(
    start_worker: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as init:
        init.bind(str(tmp_path / "notify"))
        init.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "1000000")
        worker = start_worker("--processes", "2")
        assert init.recv(4096) == b"READY=1\nSTATUS=supervises 2 worker processes"
        assert {init.recv(4096) for _ in range(3)} == {b"WATCHDOG=1"}
        while worker.events().count("worker_started") < 2:
            assert init.recv(4096) == b"WATCHDOG=1"
        worker.terminate()
        while (heard := init.recv(4096)) == b"WATCHDOG=1":
            pass
        assert heard == b"STOPPING=1\nSTATUS=stopping"
        assert worker.wait() == 0


def test_the_log_goes_to_the_file_named_in_the_environment(start_worker: StartWorker, tmp_path: Path) -> None:
    path = tmp_path / "elsewhere.log"
    worker = start_worker("--processes", "2", log_file=str(path))
    wait_until(lambda: path.exists() and path.read_text().count('"worker_started"') == 2, lambda: worker.log)
    assert worker.stop() == 0
    assert worker.log == ""
    assert all(json.loads(line)["level"] for line in path.read_text().splitlines())

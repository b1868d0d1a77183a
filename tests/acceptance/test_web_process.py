"""Tests `pgoutbox web` as a process: refusals at the start, output, secrets, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import argon2
import httpx
import pytest

from tests.support.forks import run_command
from tests.support.waiting import PROCESS_PATIENCE_SECONDS, wait_until
from tests.support.web_server import CANARY, OPERATOR_TOKEN, VIEWER_TOKEN
from tests.support.worker_process import environment_with

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

SECRET = CANARY * 3


class WebProcess(subprocess.Popen[bytes]):
    """A `pgoutbox web` process on a port of its own choice, with its output in files."""

    def __init__(self, folder: Path, *arguments: str, **settings: str) -> None:
        self._out, self._log = folder / "stdout", folder / "stderr"
        with self._out.open("wb") as out, self._log.open("wb") as log:
            super().__init__(
                [sys.executable, "-m", "pgoutbox", "web", "--port", "0", *arguments],
                env=environment_with(**settings),
                stdout=out,
                stderr=log,
            )

    @property
    def output(self) -> str:
        """Return all its output."""
        return self._out.read_text() + self._log.read_text()

    def url(self) -> str:
        """Return the URL that it prints. Its log tells the URL a moment earlier."""
        wait_until(lambda: self._out.read_text().endswith("\n") or self.poll() is not None, lambda: self.output)
        assert self.poll() is None, self.output
        return self._out.read_text().split()[-1].rstrip("/")


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[WebProcess]]:
    """Run processes that end with the test."""
    processes: list[WebProcess] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def refusal(*arguments: str, exit_code: int = 2, **settings: str) -> str:
    """Return the error output of a `pgoutbox web` that refuses to start, by default because of a wrong setting."""
    command = ("-m", "pgoutbox", "web", "--port", "0", *arguments)
    environment = environment_with(**({"dsn": "host=/nowhere"} | settings))
    result = run_command(*command, cwd=Path.cwd(), env=environment)
    assert (result.returncode, result.stdout) == (exit_code, "")
    assert CANARY not in result.stderr
    return result.stderr


def test_it_refuses_to_start_without_credentials_or_with_invalid_ones() -> None:
    assert "set PGOUTBOX_WEB_OPERATOR_TOKENS" in refusal()
    assert "entry 1 has no token of 20" in refusal(web_operator_tokens=CANARY)
    assert "PGOUTBOX_WEB_SECRET" in refusal(web_operator_tokens=OPERATOR_TOKEN, web_secret=CANARY)


def test_it_lists_the_databases_of_a_fleet(dsn: str, tmp_path: Path, started: list[WebProcess]) -> None:
    web = WebProcess(tmp_path, "--insecure", dsns=f"acme {dsn}\ndead host=127.0.0.1 port=9 dbname=none")
    started.append(web)
    listed = httpx.get(f"{web.url()}/").text
    assert ['href="/acme/"' in listed, 'href="/dead/"' in listed] == [True, True]
    assert "<h1>Overview</h1>" in httpx.get(f"{web.url()}/acme/").text


def test_it_serves_the_links_to_unsubscribe_without_a_sign_in(
    dsn: str, tmp_path: Path, started: list[WebProcess]
) -> None:
    links = {
        "unsubscribe_url": "https://club.example.org/leave",
        "unsubscribe_keys": f"{CANARY} of 32 characters at least",
    }
    web = WebProcess(tmp_path, dsn=dsn, web_operator_tokens=OPERATOR_TOKEN, **links)
    started.append(web)
    assert "This link is not valid." in httpx.get(f"{web.url()}/leave/x").text
    assert httpx.get(f"{web.url()}/messages").status_code in (303, 401)
    assert CANARY not in web.output


def test_it_refuses_links_to_unsubscribe_without_a_path() -> None:
    keys = "a key of 32 characters for tests"
    told = refusal("--insecure", unsubscribe_url="https://leave.example.org", unsubscribe_keys=keys)
    assert "PGOUTBOX_UNSUBSCRIBE_URL: needs a path" in told


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_it_refuses_anonymous_access_off_loopback(host: str) -> None:
    assert "is not a loopback address" in refusal("--insecure", "--host", host)


def test_it_refuses_anonymous_access_with_credentials_or_an_unknown_role() -> None:
    assert "omit --insecure" in refusal("--insecure", web_viewer_tokens=VIEWER_TOKEN)
    assert "'root' is not one of 'viewer', 'operator'" in refusal("--insecure", "--role", "root")


def test_an_address_of_another_machine_is_named_in_the_error() -> None:
    for host in ("192.0.2.1", "nowhere.invalid"):  # The machine may get the address, or the name, later.
        assert f"--host {host}" in refusal("--host", host, exit_code=1, web_viewer_tokens=VIEWER_TOKEN)


@pytest.mark.parametrize(
    ("missing", "arguments", "feature"),
    [
        ("uvicorn", ["web"], "the dashboard"),
        ("python_multipart", ["web", "--insecure"], "the dashboard"),
        ("argon2", ["web", "hash-password"], "the hash of a password"),
    ],
)
def test_a_missing_extra_is_reported_with_its_install_command(missing: str, arguments: list[str], feature: str) -> None:
    program = (
        f"import sys; sys.modules[{missing!r}] = None; from pgoutbox.cli.main import main; sys.exit(main({arguments}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=environment_with(dsn="host=/nowhere"),
        capture_output=True,
        text=True,
        check=False,
        timeout=PROCESS_PATIENCE_SECONDS,
    )
    assert result.returncode == 2
    assert (
        result.stderr.splitlines()[-1] == f"error: {feature} needs an optional dependency: pip install 'pgoutbox[web]'"
    )


def test_it_serves_prints_its_url_and_never_shows_a_secret(dsn: str, tmp_path: Path, started: list[WebProcess]) -> None:
    tokens = {"web_operator_tokens": f"ada:{OPERATOR_TOKEN}", "web_viewer_tokens": VIEWER_TOKEN, "web_secret": SECRET}
    process = WebProcess(tmp_path, dsn=dsn, log_level="DEBUG", **tokens)
    started.append(process)
    url = process.url()
    with httpx.Client(base_url=url, timeout=PROCESS_PATIENCE_SECONDS) as client:
        assert url.startswith("http://127.0.0.1:")
        assert client.get("/healthz").status_code == 200
        assert client.get("/").status_code == 401
        assert client.get("/", headers={"Host": "evil.example"}).status_code == 400
        assert client.get("/", headers={"Authorization": f"Bearer wrong-{CANARY}"}).status_code == 401
        wrong = client.post(
            "/login", data={"name": CANARY, "secret": CANARY}, headers={"Sec-Fetch-Site": "same-origin"}
        )
        assert wrong.status_code == 401
        shown = [wrong.text]
        for token in (OPERATOR_TOKEN, VIEWER_TOKEN):
            page = client.get("/", headers={"Authorization": f"Bearer {token}"})
            assert page.status_code == 200
            shown.append(page.text + str(page.headers))
    shown.append(Path(f"/proc/{process.pid}/cmdline").read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(PROCESS_PATIENCE_SECONDS) == 0
    assert CANARY not in "".join(shown) + process.output
    assert "web_sign_in_refused" in process.output


def test_the_log_says_who_signed_in_and_shows_no_token(dsn: str, tmp_path: Path, started: list[WebProcess]) -> None:
    process = WebProcess(tmp_path, dsn=dsn, web_operator_tokens=f"ada:{OPERATOR_TOKEN},on:{VIEWER_TOKEN}")
    started.append(process)
    with httpx.Client(base_url=process.url(), timeout=PROCESS_PATIENCE_SECONDS) as client:
        for token in (OPERATOR_TOKEN, VIEWER_TOKEN):
            answer = client.post("/login", data={"secret": token}, headers={"Sec-Fetch-Site": "same-origin"})
            assert answer.status_code == 303
    wait_until(lambda: process.output.count("web_signed_in") == 2, lambda: process.output)
    assert '"viewer": "ada", "role": "operator"' in process.output
    assert '"viewer": "on", "role": "operator"' in process.output
    assert OPERATOR_TOKEN not in process.output


def test_anonymous_users_on_loopback_can_view_but_not_act(dsn: str, tmp_path: Path, started: list[WebProcess]) -> None:
    process = WebProcess(tmp_path, "--insecure", dsn=dsn)
    started.append(process)
    with httpx.Client(base_url=process.url(), timeout=PROCESS_PATIENCE_SECONDS) as client:
        page = client.get("/")
        assert page.status_code == 200
        assert "(viewer)" in page.text
        assert client.get("/", headers={"Host": "evil.example"}).status_code == 400
    assert "no sign-in" in process.output
    process.send_signal(signal.SIGINT)
    assert process.wait(PROCESS_PATIENCE_SECONDS) == 0


def test_a_password_is_hashed_and_only_its_hash_is_printed() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pgoutbox", "web", "hash-password"],
        env={**os.environ},
        input=f"{SECRET}\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=PROCESS_PATIENCE_SECONDS,
    )
    assert argon2.PasswordHasher().verify(result.stdout.strip(), SECRET)
    assert CANARY not in result.stdout + result.stderr

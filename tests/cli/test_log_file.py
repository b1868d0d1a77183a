"""Tests the command line's log file when it is moved, unavailable or full; and secrets in logs."""

from __future__ import annotations

import json
import logging
import os
import stat
from typing import TYPE_CHECKING, Any

import pytest

from pgoutbox.cli.console import configure_logging
from tests.support.settings import settings_with

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pgoutbox import Settings


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Restore the handlers of the process after the test."""
    root = logging.getLogger()
    former, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = former
    root.setLevel(level)


def log(text: str, **extra: object) -> None:
    logging.getLogger("pgoutbox.test").info(text, extra=extra)


def records_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_log_is_appended_to_the_file_and_stderr_stays_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "worker.log"
    path.write_text('{"message": "before"}\n')
    configure_logging(settings_with(log_file=str(path), log_format="json"))
    log("hello", event="greeted", message_id=7)
    before, hello = records_of(path)
    assert before == {"message": "before"}
    assert (hello["message"], hello["event"], hello["message_id"]) == ("hello", "greeted", 7)
    assert capsys.readouterr().err == ""


def test_a_moved_file_is_created_again(tmp_path: Path) -> None:
    path, moved = tmp_path / "worker.log", tmp_path / "worker.log.1"
    configure_logging(settings_with(log_file=str(path), log_format="json"))
    log("first")
    path.rename(moved)
    log("second")
    assert [record["message"] for record in records_of(moved)] == ["first"]
    assert [record["message"] for record in records_of(path)] == ["second"]


def test_an_unavailable_file_logs_a_warning_and_the_log_goes_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing" / "worker.log"
    configure_logging(settings_with(log_file=str(path)))
    warning = f"warning: PGOUTBOX_LOG_FILE={path}: No such file or directory; the log goes to stderr\n"
    assert capsys.readouterr().err == warning
    log("hello")
    log("again")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("pgoutbox.test: ")[2] for line in lines] == ["hello", "again"]


def test_a_file_that_is_available_again_is_used_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "logs"
    directory.mkdir()
    path = directory / "worker.log"
    configure_logging(settings_with(log_file=str(path), log_format="json"))
    log("first")
    directory.rename(tmp_path / "away")
    log("meanwhile")
    assert "meanwhile" in capsys.readouterr().err
    directory.mkdir()
    log("back")
    assert [record["message"] for record in records_of(path)] == ["back"]
    assert capsys.readouterr().err == ""


def test_a_full_disk_loses_no_records_and_ends_no_worker(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(settings_with(log_file="/dev/full"))
    log("hello")
    warning, line = capsys.readouterr().err.splitlines()
    assert "No space left on device" in warning
    assert line.endswith("pgoutbox.test: hello")


def test_a_record_that_cannot_be_formatted_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    path = tmp_path / "worker.log"
    configure_logging(settings_with(log_file=str(path)))
    logging.getLogger("pgoutbox.test").info("%d", "no number")
    log("hello \ud800")
    assert path.read_text().count("\n") == 1


# --- runs from cron ---------------------------------------------------------------------------------------------------


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Set the state directory and the temporary directory, and return the log's place in each."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return tmp_path / "state/pgoutbox/worker.log", tmp_path / f"tmp/pgoutbox-worker-{os.getuid()}.log"


def log_a_run(settings: Settings) -> None:
    configure_logging(settings, is_quiet=True, is_run=True)
    log("run done", event="run_done")
    logging.getLogger("pgoutbox.test").warning("failed")


def test_a_run_without_log_settings_keeps_its_log_and_tells_warnings_on_stderr(
    places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        log_a_run(settings_with(log_format="json"))
        assert [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()] == ["failed"]
    path, second = places
    assert [record["message"] for record in records_of(path)] == ["run done", "failed"] * 2
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)
    assert not second.exists()


def test_the_default_place_is_below_the_home_of_the_user(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", given)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        log_a_run(settings_with(log_format="json"))
    assert len(records_of(tmp_path / "home/.local/state/pgoutbox/worker.log")) == 4


@pytest.mark.parametrize("settings", [{"log_level": "INFO"}, {"log_file": "/dev/null"}])
def test_with_a_setting_of_the_log_there_is_no_default_file(
    places: tuple[Path, Path], settings: dict[str, object]
) -> None:
    log_a_run(settings_with(**settings))
    assert [path.exists() for path in places] == [False, False]


def test_a_default_place_that_cannot_be_written_is_replaced_silently(
    places: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/state")
    log_a_run(settings_with(log_format="json"))
    assert [record["message"] for record in records_of(places[1])] == ["run done", "failed"]
    assert stat.S_IMODE(places[1].stat().st_mode) == 0o600
    monkeypatch.setenv("TMPDIR", "/dev/null/tmp")
    log_a_run(settings_with(log_format="json"))
    assert [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()] == ["failed"] * 2


@pytest.mark.parametrize(("file", "reason"), [("/dev/null/log", "Not a directory"), ("/dev/full", "No space left")])
def test_a_chosen_file_that_cannot_be_written_is_replaced_with_one_line_on_stderr(
    places: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    reason: str,
) -> None:
    log_a_run(settings_with(log_file=file, log_format="json"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: PGOUTBOX_LOG_FILE={file}: {reason}")
    assert line.endswith(f"; the log goes to {places[1]}")
    assert [record["message"] for record in records_of(places[1])] == ["run done", "failed"]
    monkeypatch.setenv("TMPDIR", "/dev/null/tmp")
    log_a_run(settings_with(log_file=file, log_format="json"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == f"warning: /dev/null/tmp/{places[1].name}: Not a directory; the log goes to stderr"
    assert [json.loads(line)["message"] for line in lines[2:]] == ["run done", "failed"]


@pytest.mark.parametrize(
    "trap",
    [
        "link", "hard link", "fifo", "directory",
        pytest.param("owner", marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")),
    ],
)  # fmt: skip
def test_nothing_of_another_user_is_written_to_in_the_temporary_directory(
    places: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], trap: str
) -> None:
    victim, second = tmp_path / "victim", places[1]
    victim.write_text("precious")
    if trap == "link":
        second.symlink_to(victim)
    elif trap == "hard link":
        second.hardlink_to(victim)
    elif trap == "fifo":
        os.mkfifo(second)
    elif trap == "directory":
        second.mkdir()
    else:
        second.write_text("")
        os.chown(second, 65_534, -1)
    log_a_run(settings_with(log_file="/dev/null/log", log_format="json"))
    assert victim.read_text() == "precious"
    assert len(capsys.readouterr().err.splitlines()) == 4  # Two warnings, and the records.


def test_a_large_default_file_is_moved_aside(places: tuple[Path, Path]) -> None:
    path, _ = places
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 5_000_001)
    log_a_run(settings_with(log_format="json"))
    assert len(records_of(path)) == 2
    assert path.with_name("worker.log.1").stat().st_size == 5_000_001


class RefusedError(Exception):
    """Raise an error like PostgreSQL's."""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_omits_the_detail_that_quotes_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], log_format: str
) -> None:
    configure_logging(settings_with(log_format=log_format))
    text = (
        'duplicate key value violates unique constraint "member_pkey"\n'
        "DETAIL:  Key (email)=(canary@example.org) already exists.\nand canary on a second line\n"
        "HINT:  Try another."
    )
    try:
        raise RefusedError(text)  # noqa: TRY301 - it is its traceback that is logged
    except RefusedError:
        logging.getLogger("app").exception("sign-up failed")
    written = capsys.readouterr().err
    assert "member_pkey" in written
    assert "Try another." in written
    assert "canary" not in written
    logging.getLogger("app").error("sign-up failed: %s", text)
    assert "canary" not in capsys.readouterr().err

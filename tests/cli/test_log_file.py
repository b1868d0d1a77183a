"""Tests the command line's log file when it is moved, unavailable or full; and secrets in logs."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from pgoutbox.cli.console import configure_logging
from tests.support.settings import settings_with

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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

"""The check of commit messages reads the history of a repository and names the commits that break the convention."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tools.commit_subjects import LONGEST_SUBJECT, fault_of, main, recent_messages

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "message",
    [
        "claims: stop taking rate tokens twice",
        "docs, README: name the test commands\n\nThe times were missing.\n",
        "pgoutbox.testing: accept a DSN",
        "x: " + "y" * (LONGEST_SUBJECT - 3),
    ],
)
def test_a_message_of_the_convention_has_no_fault(message: str) -> None:
    assert fault_of(message) is None


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ("x: " + "y" * (LONGEST_SUBJECT - 2), "73 characters"),
        ("Fix the claim", "part: what"),
        ("claims:fix", "part: what"),
        ("claims: fix it.", "full stop"),
        ("claims: fix it\nwith a body", "blank line"),
    ],
)
def test_a_fault_is_named(message: str, fault: str) -> None:
    assert fault in (fault_of(message) or "")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit before its tag, and two after it."""
    run_git(tmp_path, "init", "--quiet")
    commit(tmp_path, "Before the convention")
    run_git(tmp_path, "tag", "v1")
    commit(tmp_path, "docs: add a page\n\nWith a body.\n\nIn two parts.")
    commit(tmp_path, "worker: stop once")
    return tmp_path


def run_git(directory: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(directory), *identity, *arguments], check=True)


def commit(directory: Path, message: str) -> None:
    run_git(directory, "commit", "--quiet", "--allow-empty", "--no-verify", "--message", message)


def test_the_commits_since_the_last_tag_are_checked(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = [message for _, message in recent_messages(repository)]
    assert messages == ["worker: stop once", "docs: add a page\n\nWith a body.\n\nIn two parts."]
    assert main(repository) == 0
    commit(repository, "No part")
    assert main(repository) == 1
    assert "No part: the subject must have the form" in capsys.readouterr().out


def test_a_directory_without_history_passes(tmp_path: Path) -> None:
    assert main(tmp_path) == 0
    run_git(tmp_path, "init", "--quiet")
    assert main(tmp_path) == 0

"""Check the subjects of recent commits: `part: what`, at most 72 characters, and a blank line before a body.

It looks at the commits since the last tag, at most the newest 50, and leaves out merges. Without a history, as in an
unpacked archive, there is nothing to check.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

LONGEST_SUBJECT: Final = 72
_NEWEST: Final = 50
_SUBJECT: Final = re.compile(r"[a-z0-9_.][\w.,/ -]*: \S.*[^.\s]")


def fault_of(message: str) -> str | None:
    """The fault of a commit message; None if it follows the convention."""
    subject, _, rest = message.strip().partition("\n")
    if len(subject) > LONGEST_SUBJECT:
        return f"the subject has {len(subject)} characters, at most {LONGEST_SUBJECT} are allowed"
    if not _SUBJECT.fullmatch(subject):
        return "the subject must have the form `part: what`, without a full stop"
    if rest and not rest.startswith("\n"):
        return "a blank line must separate the subject from the body"
    return None


def recent_messages(repository: Path) -> list[tuple[str, str]]:
    """The short hashes and messages of the commits to check, newest first."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(repository), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    try:
        tag = git("describe", "--tags", "--abbrev=0")
        commits = f"{tag.stdout.strip()}..HEAD" if tag.returncode == 0 else "HEAD"
        log = git("log", "--no-merges", f"--max-count={_NEWEST}", "--format=%h %B%x00", commits)
    except FileNotFoundError:
        return []
    if log.returncode != 0:
        return []
    found = []
    for entry in log.stdout.split("\0"):
        commit, _, message = entry.strip().partition(" ")
        if commit:
            found.append((commit, message))
    return found


def main(repository: Path = Path(__file__).parents[1]) -> int:
    """Print the commits that break the convention; return 1 if there are any."""
    faults = 0
    for commit, message in recent_messages(repository):
        if fault := fault_of(message):
            faults += 1
            print(f"{commit} {message.partition(chr(10))[0]}: {fault}")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())

"""The job of RQ's worker, which imports it by name; a separate module, so that there is one count."""

from __future__ import annotations

from benchmarks.programs.lifeline import Tally

tally = Tally()


def record(_user_id: int) -> None:
    """Count the call."""
    tally.count()

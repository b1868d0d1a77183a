"""The job of RQ's worker, which it imports by its name: a module of its own, so that there is one count."""

from __future__ import annotations

from benchmarks.programs.lifeline import Tally

tally = Tally()


def record(_user_id: int) -> None:
    """Do nothing but count."""
    tally.count()

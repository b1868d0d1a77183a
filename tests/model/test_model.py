"""Tests that every interleaving of the protocol keeps its promises, and that every guard is needed.

Leaving out a guard must lead to a fault with a known shortest trace: a model that is too coarse to notice fails
here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model import breaker, cases, delivery, doorbell, limits, ordering, retention
from tests.model.cases import Case, explored, row_of, trace_of

PAGE = Path(__file__).resolve().parent / "results.md"
SHOWN = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]


def check(case: Case, fault: str, length: int) -> None:
    """Assert that the case ends with its fault after its number of steps, and that the page shows this. Each case is
    explored once."""
    found = explored(case)
    assert (found.fault, len(found.trace)) == (fault, length), trace_of(case)
    assert SHOWN.count(row_of(case)) == 1, "run `python -m tests.model --write`"


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases.HOLD])
def test_the_promises_hold_in_every_state(case: Case) -> None:
    check(case, "", 0)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases.BREAK])
def test_a_promise_breaks_without_a_guard_after_the_expected_steps(case: Case) -> None:
    check(case, case.fault, case.length)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases.TWICE_GUARDED])
def test_a_promise_with_two_guards_holds_until_both_are_gone(case: Case) -> None:
    check(case, case.fault, case.length)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases.LIMITS])
def test_a_wake_up_is_missed_if_only_the_periodic_poll_can_help(case: Case) -> None:
    check(case, case.fault, case.length)


def test_each_guard_is_left_out_in_one_case() -> None:
    taken_out = {guard for case in cases.CASES for guard in case.without}
    every = (
        delivery.Guard,
        doorbell.Guard,
        ordering.Guard,
        limits.Guard,
        breaker.Guard,
        retention.Guard,
    )
    assert taken_out == {guard for guards in every for guard in guards}


def test_the_page_shows_exactly_these_results() -> None:
    heads = [line for _, head in cases.TABLES for line in head]
    assert [line for line in SHOWN if line in heads] == heads, "run `python -m tests.model --write`"
    assert len(SHOWN) == len(heads) + len(cases.CASES), "run `python -m tests.model --write`"

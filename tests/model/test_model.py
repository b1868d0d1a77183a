"""Every interleaving of the protocol keeps its promises, and none of its guards can be taken out unnoticed.

A guard that is taken out has to be found by its shortest trace: a model that is too coarse to see it fails here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model import breaker, cases, delivery, doorbell, limits, ordering, retention
from tests.model.cases import Case, explored, trace_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "model.md"


def outcome_of(case: Case) -> tuple[str, int]:
    """The fault that was found, and in how many steps."""
    found = explored(case)
    return found.fault, len(found.trace)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases.HOLD])
def test_the_promises_hold_in_every_state(case: Case) -> None:
    assert outcome_of(case) == ("", 0), trace_of(case)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases.BREAK])
def test_without_a_guard_a_promise_breaks_in_so_many_steps(case: Case) -> None:
    assert outcome_of(case) == (case.fault, case.length), trace_of(case)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases.TWICE_GUARDED])
def test_what_is_guarded_twice_holds_until_both_guards_are_gone(case: Case) -> None:
    assert outcome_of(case) == (case.fault, case.length), trace_of(case)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases.LIMITS])
def test_a_wake_up_is_missed_where_only_the_sweep_can_help(case: Case) -> None:
    assert outcome_of(case) == (case.fault, case.length), trace_of(case)


def test_every_guard_is_taken_out_once() -> None:
    taken_out = {guard for case in cases.CASES for guard in case.without}
    every = (delivery.Guard, doorbell.Guard, ordering.Guard, limits.Guard, breaker.Guard, retention.Guard)
    assert taken_out == {guard for guards in every for guard in guards}


def test_the_page_shows_these_results() -> None:
    page = PAGE.read_text()
    assert "\n".join(cases.tables()) in page, "run `python -m tests.model --write`"

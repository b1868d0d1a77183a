"""Tests that no kind of work costs more for a message than the budget, at two sizes, and that no cost grows.

A change that raises a cost writes the book again (`python -m tests.budget --write`), and its commit says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pgoutbox.errors import ConfigurationError, MissingExtraError
from tests.budget.book import exceeded, least, read_book
from tests.budget.meter import KINDS, Meter, measure, running_meter
from tests.support.missing import server_missing

if TYPE_CHECKING:
    from collections.abc import Iterator

_MORE_ROUNDS = 5  # A busy machine makes claims smaller; one round without a disturbance is enough.


@pytest.fixture(scope="module")
def meter() -> Iterator[Meter]:
    try:
        with running_meter() as meter:
            yield meter
    except (ConfigurationError, MissingExtraError) as error:
        server_missing(f"no embedded server: {error}")


@pytest.mark.parametrize("name", KINDS)
def test_a_message_costs_no_more_than_its_budget(meter: Meter, name: str) -> None:
    kind, budget = KINDS[name], read_book()[name]
    costs = measure(meter, kind)
    for _ in range(_MORE_ROUNDS):
        if not exceeded(kind, costs, budget):
            break
        again = measure(meter, kind)
        # A fast round of the small size alone would let the large one seem to grow.
        costs = least(costs, again) if exceeded(kind, again, budget) else again
    assert exceeded(kind, costs, budget) == []


def test_the_book_has_each_kind_and_size() -> None:
    sizes = {name: {str(size) for size in kind.sizes} for name, kind in KINDS.items()}
    assert {name: set(budget) for name, budget in read_book().items()} == sizes


@pytest.mark.parametrize("name", ["dead rows", "index entries", "WAL bytes"])
def test_a_mail_of_a_list_writes_no_more_than_another(name: str) -> None:
    book = read_book()
    for size, cost in book["e-mails of a mailing list"].items():
        # Beside it are the claims, which are smaller and so more.
        assert cost[name] <= 1.05 * book["e-mails"][size][name]

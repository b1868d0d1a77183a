"""The answers of a bulk read like a list."""

from __future__ import annotations

import pytest

from pgoutbox import Enqueued, EnqueuedMany

ANSWERS = [Enqueued(7, False), Enqueued(5, True), Enqueued(9, False)]


@pytest.fixture
def enqueued() -> EnqueuedMany:
    return EnqueuedMany([7, 5, 9], [1])


def test_it_has_the_answers_of_a_list(enqueued: EnqueuedMany) -> None:
    assert (list(enqueued), len(enqueued), enqueued.ids) == (ANSWERS, 3, [7, 5, 9])
    assert (enqueued[0], enqueued[1], enqueued[-1]) == (ANSWERS[0], ANSWERS[1], ANSWERS[2])
    assert (enqueued[1:], enqueued[::-1]) == (ANSWERS[1:], ANSWERS[::-1])
    with pytest.raises(IndexError):
        enqueued[3]


def test_it_is_equal_to_the_same_answers_and_to_no_others(enqueued: EnqueuedMany) -> None:
    assert enqueued == ANSWERS
    assert enqueued == EnqueuedMany([7, 5, 9], [1])
    assert enqueued != EnqueuedMany([7, 5, 9])
    assert enqueued != ANSWERS[:2]
    assert enqueued != tuple(ANSWERS)


def test_it_shows_its_answers() -> None:
    assert repr(EnqueuedMany([7])) == "EnqueuedMany([Enqueued(id=7, duplicate=False)])"

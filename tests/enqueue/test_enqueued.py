"""Tests that the answers of a bulk behave like a list."""

from __future__ import annotations

import pytest

from pgoutbox import Enqueued, EnqueuedMany, State

ANSWERS = [Enqueued(7, False), Enqueued(5, True, State.SENT), Enqueued(9, False)]


@pytest.fixture
def enqueued() -> EnqueuedMany:
    return EnqueuedMany([7, 5, 9], {1: State.SENT})


def test_the_answers_are_a_sequence(enqueued: EnqueuedMany) -> None:
    assert (list(enqueued), len(enqueued), enqueued.ids) == (ANSWERS, 3, [7, 5, 9])
    assert (enqueued[0], enqueued[1], enqueued[-1]) == (ANSWERS[0], ANSWERS[1], ANSWERS[2])
    assert (enqueued[1:], enqueued[::-1]) == (ANSWERS[1:], ANSWERS[::-1])
    with pytest.raises(IndexError):
        enqueued[3]


def test_equality_compares_the_answers(enqueued: EnqueuedMany) -> None:
    assert enqueued == ANSWERS
    assert enqueued == EnqueuedMany([7, 5, 9], {1: State.SENT})
    assert enqueued != EnqueuedMany([7, 5, 9])
    assert enqueued != ANSWERS[:2]
    assert enqueued != tuple(ANSWERS)


def test_the_repr_shows_the_answers() -> None:
    assert (
        repr(EnqueuedMany([7])) == "EnqueuedMany([Enqueued(id=7, duplicate=False, state=<State.PENDING: 'pending'>)])"
    )

"""Tests the history of a message's attempts, which is in its row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psycopg.types.json import Jsonb

if TYPE_CHECKING:
    import psycopg

ADD = """
    SELECT pgoutbox._with_attempt(
        %s::jsonb, (%s, 1, %s, 'w', now(), now(), %s, NULL, NULL, NULL)::pgoutbox.attempt
    )
"""


def history_of(connection: psycopg.Connection, *ended: tuple[str, str]) -> list[dict[str, Any]]:
    """Return the history after attempts with these outcomes and errors."""
    history: list[dict[str, Any]] = []
    for number, (outcome, error) in enumerate(ended, 1):
        known = Jsonb(history) if history else None
        ((history,),) = connection.execute(ADD, [known, number, outcome, error]).fetchall()
    return history


def numbers(history: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(attempt["attempt_count"], attempt["times"]) for attempt in history]


def test_attempts_that_were_postponed_alike_are_one_entry(rolled_back: psycopg.Connection) -> None:
    open_breaker = [("snoozed", "the breaker is open")] * 100
    history = history_of(rolled_back, ("retry", "busy"), *open_breaker, ("snoozed", "paused"), *open_breaker[:2])
    assert numbers(history) == [(1, 1), (101, 100), (102, 1), (104, 2)]


def test_other_outcomes_are_entries_of_their_own(rolled_back: psycopg.Connection) -> None:
    assert numbers(history_of(rolled_back, *[("retry", "busy")] * 2, *[("lost", "gone")] * 2)) == [
        (number, 1) for number in range(1, 5)
    ]


def test_a_history_keeps_the_first_and_the_last_nineteen_entries(rolled_back: psycopg.Connection) -> None:
    expected = [(number, 1) for number in (1, *range(12, 31))]
    assert numbers(history_of(rolled_back, *[("retry", "busy")] * 30)) == expected


def test_a_long_error_is_cut(rolled_back: psycopg.Connection) -> None:
    assert history_of(rolled_back, ("retry", "x" * 5_000))[0]["error"] == "x" * 1_000

"""Scenes whose connection is cut at each of their statements.

Each scene runs repeatedly with the cut one statement later, until a run ends without reaching the cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, islice, pairwise
from typing import TYPE_CHECKING

import psycopg

from tests.support.proxy import Moment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.proxy import Proxy

_UNCUT_COUNT = 3  # On a busy machine a play may need a round of claims more: the shortest one counts.


@dataclass(frozen=True, slots=True)
class Cut:
    """The place where a scene was cut, and the error that its player got."""

    moment: Moment
    number: int
    is_last: bool
    statement: str
    error: psycopg.OperationalError | None

    @property
    def is_in_time(self) -> bool:
        """Return whether the scene's last statement cannot have committed."""
        return self.moment is Moment.BEFORE or not self.is_last

    @property
    def is_too_late(self) -> bool:
        """Return whether its last statement, which commits, was certainly executed."""
        return self.moment is Moment.REPLY_LOST and self.is_last


def cuts(proxy: Proxy, play: Callable[[str], object], *, at_most: int | None = None) -> Iterator[Cut]:
    """Play the scene without a cut to count its statements, then with a cut at each of them, in every way.

    `play` gets a new name each time. In a long scene that repeats itself, at most `at_most` statements are cut: the
    first and the last, where its transactions begin and end, and others in equal steps.
    """
    names = (f"uncut-{number}" for number in count())

    def count_statements() -> int:
        """Return the number of statements of the shortest of several plays without a cut."""
        lengths = [len(proxy.statements)]
        for name in islice(names, _UNCUT_COUNT):
            play(name)
            lengths.append(len(proxy.statements))
        return min(end - begin for begin, end in pairwise(lengths))

    statement_count = count_statements()
    assert statement_count > 0
    for moment in Moment:
        for number in count(1) if at_most is None else spread(statement_count, at_most):
            proxy.cut_at(number, moment)
            begun_at = len(proxy.statements)
            error = None
            try:
                play(f"{moment.name.lower()}-{number}")
            except psycopg.OperationalError as lost:
                error = lost
            if not proxy.has_cut():
                proxy.withdraw_cut()
                if number <= 0.8 * statement_count:
                    # The machine was busier at first, and each play took a round of claims more.
                    statement_count = min(statement_count, count_statements())
                # A pool works in the background, and may be slightly later than the last time.
                assert (number > 0.8 * statement_count, error) == (True, None)
                break
            proxy.wait_for_cut()
            yield Cut(moment, number, number == statement_count, proxy.statements[begun_at + number - 1], error)


def spread(length: int, at_most: int) -> list[int]:
    """Return this many of 1 to `length`: a quarter from each end, the others in equal steps between."""
    end = at_most // 4
    if length <= at_most:
        return list(range(1, length + 1))
    inside = length - 2 * end
    steps = at_most - 2 * end
    between = [end + 1 + inside * step // steps for step in range(steps)]
    return [*range(1, end + 1), *between, *range(length - end + 1, length + 1)]

"""The number of rows that one statement of a search reads."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import psycopg

if TYPE_CHECKING:
    from collections.abc import Iterator

_FIRST_ROWS: Final = 100
_WANTED_SECONDS: Final = 0.3
_LARGEST_STEP: Final = 8.0
_AFTER_TIMEOUT: Final = 8


class Window:
    """Rows of a search by one statement: few at first, then as many as are read in a third of a second.

    The time for a row depends on the filter: a search for a text hides the secrets of each text before it compares. A
    fixed number of rows would exceed the statement timeout for one filter, or need many statements for another. Rows
    with long texts can follow many short ones: after a statement timeout the window has fewer rows.
    """

    def __init__(self, most: int) -> None:
        self.rows: int = min(_FIRST_ROWS, most)
        self._most = most

    @contextmanager
    def read(self) -> Iterator[int]:
        """Give the number of rows for the statements inside, and choose the next number by their duration."""
        began = time.monotonic()
        try:
            yield self.rows
        except psycopg.errors.QueryCanceled:
            self.rows = max(1, self.rows // _AFTER_TIMEOUT)
            raise
        seconds = max(time.monotonic() - began, 1e-6)
        self.rows = max(1, min(self._most, int(self.rows * min(_LARGEST_STEP, _WANTED_SECONDS / seconds))))

"""Tests the cache of fan-out contents in a worker: its limits in number and in memory."""

from __future__ import annotations

import pytest

from pgoutbox.worker.loader import newest_contents

MILLION = 1_000_000


@pytest.mark.parametrize(
    ("lengths", "kept"),
    [
        ({}, []),
        (dict.fromkeys(range(20), 100), list(range(4, 20))),
        ({1: 9 * MILLION, 2: 9 * MILLION, 3: 7 * MILLION}, [2, 3]),
        ({1: 100, 2: 20 * MILLION}, [2]),
        ({1: 20 * MILLION, 2: 100}, [2]),
    ],
)
def test_a_worker_caches_the_last_contents_up_to_their_number_and_size(
    lengths: dict[int, int], kept: list[int]
) -> None:
    assert list(newest_contents(lengths)) == kept
    assert newest_contents(lengths).items() <= lengths.items()

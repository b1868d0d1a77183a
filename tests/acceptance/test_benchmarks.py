"""What the benchmarks run of the package's inner parts still fits them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from benchmarks.options import CLAIM_PARAMETERS, TOPIC
from benchmarks.processes import answer_of
from pgoutbox import sql
from tests.outbox_actions import enqueue, rows_of

if TYPE_CHECKING:
    from tests.conftest import Connect


def test_the_claim_of_the_benchmarks_has_all_parameters() -> None:
    assert set(re.findall(r"%\((\w+)\)s", sql.CLAIM)) == set(CLAIM_PARAMETERS)


def test_the_bare_loop_delivers_everything(dsn: str, connect: Connect) -> None:
    db = connect(autocommit=True)
    for _ in range(25):
        enqueue(db, TOPIC)
    answer_of("bare", "10", dsn=dsn)
    assert {row.state for row in rows_of(db)} == {"sent"}

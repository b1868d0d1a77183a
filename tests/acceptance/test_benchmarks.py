"""What the benchmarks run of the package's inner parts still fits them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from benchmarks.options import CLAIM_PARAMETERS, TOPIC
from benchmarks.processes import answer_of
from benchmarks.programs.floor import TABLES
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


def test_the_floor_loop_delivers_everything(dsn: str, connect: Connect) -> None:
    db = connect(autocommit=True)
    db.execute(TABLES)
    db.execute("INSERT INTO floor.live (topic, queue, payload) SELECT 't', 'default', '{}' FROM generate_series(1, 25)")
    assert answer_of("floor", "10", dsn=dsn)["handled_count"] == 25
    assert db.execute("SELECT count(*) FROM floor.done WHERE attempt_count = 1").fetchall() == [(25,)]

"""Tests that the benchmarks still match the package's internals that they use."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from benchmarks import wal
from benchmarks.clock import seconds_to_drain
from benchmarks.options import CLAIM_PARAMETERS, TOPIC
from benchmarks.processes import answer_of
from benchmarks.programs.floor import TABLES
from benchmarks.systems import REDIS_SYSTEMS, System
from pgoutbox.kernel import statements
from tests.support.brokers import program_of
from tests.support.outbox_actions import enqueue, rows_of

if TYPE_CHECKING:
    from tests.conftest import Connect

pytestmark = pytest.mark.slow


def test_the_benchmarks_pass_all_parameters_of_the_claim() -> None:
    assert set(re.findall(r"%\((\w+)\)s", statements.CLAIM_WITHOUT_KEYS)) == set(CLAIM_PARAMETERS)


def test_the_bare_loop_delivers_everything(dsn: str, connect: Connect) -> None:
    db = connect(autocommit=True)
    for _ in range(25):
        enqueue(db, TOPIC)
    answer_of("bare", "10", dsn=dsn)
    assert {row.state for row in rows_of(db)} == {"sent"}


def test_the_steps_with_measured_wal_deliver_everything(dsn: str, connect: Connect) -> None:
    db = connect(autocommit=True)
    ids = [enqueue(db, TOPIC) for _ in range(3)]
    batches: list[list[tuple[object, ...]]] = []
    wal.claim(db, batches)
    wal.finish(db, batches)
    assert [(row.id, row.state) for row in rows_of(db)] == [(message_id, "sent") for message_id in ids]
    assert db.execute("SELECT count(*) FROM pgoutbox.claim").fetchone() == (0,)


def test_the_floor_loop_delivers_everything(dsn: str, connect: Connect) -> None:
    db = connect(autocommit=True)
    db.execute(TABLES)
    db.execute("INSERT INTO floor.live (topic, queue, payload) SELECT 't', 'default', '{}' FROM generate_series(1, 25)")
    assert answer_of("floor", "10", dsn=dsn)["handled_count"] == 25
    assert db.execute("SELECT count(*) FROM floor.done WHERE attempt_count = 1").fetchall() == [(25,)]


@pytest.mark.parametrize("system", [pytest.param(system, id=system.name) for system in REDIS_SYSTEMS])
def test_a_peer_on_redis_handles_every_message_once(system: System) -> None:
    program_of("redis-server")
    assert system.reason_to_skip() is None
    with system.database(None) as url, system.asking(url) as is_unfinished:
        system.load(50, dsn=url)
        assert is_unfinished()
        assert seconds_to_drain(system.command("work"), dsn=url, count=50, is_unfinished=is_unfinished) > 0

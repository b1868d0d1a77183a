"""Tests that the benchmarks still match the package's internals that they use."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from benchmarks import wal
from benchmarks.clock import drain
from benchmarks.deliver import DELIVERIES, RIVALS, benches
from benchmarks.options import CLAIM_PARAMETERS, TOPIC
from benchmarks.processes import ChildError, answer_of
from benchmarks.programs.floor import TABLES
from benchmarks.server import Server
from benchmarks.systems import REDIS_SYSTEMS, System, available_systems
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
        assert drain(system.command("work"), dsn=url, count=50, is_unfinished=is_unfinished).seconds > 0


@pytest.fixture
def measured(dsn: str) -> Server:
    """The server of the tests, whose processes the benchmark does not see."""
    return Server(dsn, "18", None)


@pytest.mark.parametrize("name", ["webhook, TLS, 4 kB", "e-mail", "e-mail of Django", "event to Kafka"])
def test_a_worker_and_the_client_alone_deliver_every_message(measured: Server, name: str) -> None:
    delivery = next(one for one in DELIVERIES if one.name == name)
    with benches(measured, {delivery.receiver}) as bench_of:
        for variant in (None, "bare"):
            assert bench_of[delivery.receiver].measure(delivery, variant, 20).rate > 0


@pytest.mark.parametrize("name", RIVALS)
def test_another_system_delivers_every_message_with_the_same_client(measured: Server, name: str) -> None:
    program_of("redis-server")
    (system,), _ = available_systems(name, on_redis=True)
    delivery = next(one for one in DELIVERIES if one.name == "e-mail")
    with benches(measured, {"smtp"}) as bench_of:
        assert bench_of["smtp"].measure(delivery, system, 20).rate > 0


def test_a_delivery_that_does_not_arrive_ends_the_run(measured: Server) -> None:
    with pytest.raises(ChildError, match="0 of 1 messages for smtp have arrived"):  # noqa: SIM117 - the outer one raises
        with benches(measured, {"smtp"}) as bench_of:
            bench_of["smtp"].sent_count += 1

"""How much to measure: the sizes of a full run, and of a quick one that only shows that everything works."""

from __future__ import annotations

from dataclasses import dataclass

TOPIC = "mail.activation"


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes. Rounds alternate between what is compared, so that a slow spell of the machine meets all alike."""

    rounds: int = 5
    drain_messages: int = 50_000
    pgbench_seconds: int = 5
    pgbench_clients: tuple[int, ...] = (32, 64)
    doorbell_backlog: int = 300_000
    latency_rate: float = 20.0
    latency_seconds: float = 20.0
    idle_seconds: float = 60.0
    bulk_messages: int = 100_000
    finished_messages: int = 1_000_000
    pending_messages: int = 100_000
    claims: int = 50


QUICK = Options(
    rounds=1,
    drain_messages=5_000,
    pgbench_seconds=2,
    pgbench_clients=(32,),
    doorbell_backlog=60_000,
    latency_seconds=5.0,
    idle_seconds=15.0,
    bulk_messages=20_000,
    finished_messages=50_000,
    pending_messages=10_000,
    claims=10,
)

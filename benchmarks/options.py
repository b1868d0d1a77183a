"""The sizes of a full run, and of a quick run that only shows that everything works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

_T = TypeVar("_T")

TOPIC: Final = "mail.activation"

CLAIM_PARAMETERS: Final[Mapping[str, Any]] = {
    "served": ["default"],
    "queues": ["default"],
    "lanes": [0],
    "after_ats": [None],
    "after_ids": [0],
    "since_seconds": [1e9],
    "after_keys": [None],
    "topics": [TOPIC],
    "total": 500,
    "worker": "benchmark",
    "lease_seconds": 60.0,
}
"""A claim of fresh messages from the beginning, like that of a worker with default settings."""
# The payload marks a message that is a retry.
RETRY_NUMBER = -1
IO_SECONDS = 0.01
"""How long a handler waits that stands for one of a remote service."""


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes. Rounds alternate between the variants, so that a slow period of the machine affects all of them."""

    rounds: int = 5
    drain_messages: int = 50_000
    pgbench_seconds: int = 4
    pgbench_clients: tuple[int, ...] = (32, 64)
    doorbell_backlog: int = 400_000
    latency_rate: float = 20.0
    latency_seconds: float = 20.0
    latency_phases: int = 4
    load_seconds: float = 15.0
    waking_seconds: float = 20.0
    beside_messages: int = 300_000
    beside_deliveries: int = 200_000
    beside_keys: int = 200_000
    beside_seconds: float = 4.0
    beside_phases: int = 5
    idle_seconds: float = 60.0
    bulk_messages: int = 100_000
    finished_messages: int = 5_000_000
    scheduled_messages: int = 1_000_000
    due_retries: int = 100_000
    fresh_messages: int = 5_000
    single_seconds: float = 5.0
    peer_rounds: int = 3
    peer_messages: int = 50_000
    long_messages: int = 200_000
    peer_processes: tuple[int, ...] = (1, 2, 4)
    own_processes: tuple[int, ...] = (1, 2, 4, 8)
    explain_finished_messages: int = 1_000_000
    pending_messages: int = 100_000
    claims: int = 50
    limited_messages: int = 600
    ordered_keys: int = 20
    ordered_messages: int = 5_000
    fanout_destinations: int = 10_000
    fair_messages: int = 60_000
    fair_keys: tuple[int, ...] = (10, 1_000, 50_000)
    retention_messages: int = 1_000_000
    retention_seconds: float = 8.0
    dashboard_messages: int = 1_000_000
    wal_messages: int = 5_000
    databases: int = 200
    scale_messages: int = 50_000


QUICK = Options(
    fair_messages=4_000,
    fair_keys=(10, 100),
    retention_messages=20_000,
    retention_seconds=2.0,
    limited_messages=60,
    ordered_messages=50,
    fanout_destinations=500,
    dashboard_messages=20_000,
    wal_messages=1_000,
    databases=5,
    scale_messages=2_000,
    rounds=1,
    drain_messages=2_000,
    pgbench_seconds=2,
    pgbench_clients=(32,),
    doorbell_backlog=50_000,
    latency_seconds=2.0,
    latency_phases=1,
    load_seconds=2.0,
    waking_seconds=3.0,
    beside_messages=5_000,
    beside_deliveries=2_000,
    beside_keys=2_000,
    beside_seconds=0.5,
    beside_phases=1,
    idle_seconds=8.0,
    bulk_messages=20_000,
    finished_messages=50_000,
    scheduled_messages=20_000,
    due_retries=10_000,
    fresh_messages=1_000,
    single_seconds=1.0,
    peer_rounds=1,
    peer_messages=2_000,
    long_messages=4_000,
    peer_processes=(1, 2),
    own_processes=(1, 2, 4),
    explain_finished_messages=50_000,
    pending_messages=10_000,
    claims=10,
)


def rotated(variants: Sequence[_T], turn: int) -> Sequence[_T]:
    """Yield all variants, starting with another one in each round, so that their order changes."""
    first = turn % len(variants)
    return [*variants[first:], *variants[:first]]

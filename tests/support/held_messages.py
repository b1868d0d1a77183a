"""Messages behind an open breaker, for tests that play the kernel's statements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pgoutbox.kernel import statements
from pgoutbox.message import AttemptOutcome, ReasonCode
from tests.support.outbox_actions import LEASE_SECONDS
from tests.support.worker_sql import fence_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psycopg

KEY: Final = "smtp:mail.example.org:587"
DESTINATION: Final = "mailto:ada@example.org"
HOLD: Final = "default greet mailto"


def open_breaker(db: psycopg.Connection, *, holds: Sequence[str] = (HOLD,), retries_in: str = "0 s") -> None:
    """Write an open breaker that may be probed after this time."""
    db.execute(
        "INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error, holds)"
        " VALUES (%s, now() + %s::interval, 30, 'w', 'refused', %s)",
        (KEY, retries_in, [*holds]),
    )


def claim_probe(connection: psycopg.Connection) -> list[tuple[int, str]]:
    """Begin a probe. Return the message and the id of the probe."""
    parameters = {
        "queues": ["default"],
        "topics": ["greet"],
        "worker": "worker-1",
        "lease_seconds": LEASE_SECONDS,
        "probe_seconds": 60.0,
    }
    return [(row[0], row[-2]) for row in connection.execute(statements.CLAIM_PROBE, parameters).fetchall()]


def postpone(connection: psycopg.Connection, message_id: int) -> None:
    """Finish the first attempt of a message, which the breaker holds back."""
    connection.execute(
        statements.FINISH_AND_HOLD,
        {
            **fence_of(connection, [(message_id, 1)], "worker-1"),
            "outcomes": [AttemptOutcome.SNOOZED],
            "reasons": ["open"],
            "reason_codes": [ReasonCode.CIRCUIT_OPEN],
            "breaker_keys": [KEY],
            "error_places": [None],
            "delays": [30.0],
            "fails_after": [None],
            "held_delays": [0.0],
            "hooks": "{}",
        },
    )

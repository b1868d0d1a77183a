"""Messages behind an open breaker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

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

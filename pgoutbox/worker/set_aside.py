"""Messages whose claim PostgreSQL refuses: they are found and set aside for a while, and the others continue.

If a trigger, a constraint or a damaged value refuses one row, the whole claim with this row fails. So claims get
smaller until one contains this row alone. It is set aside for a minute, then it is tried again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from typing import Final

from pgoutbox.observability.events import LogEvent, Telemetry

_SECONDS: Final = 60.0
_MAX_IN_A_ROW: Final = 1_000


class SetAside:
    """The messages that one worker has set aside, and the limits on the size of its claims.

    Each `kind` of claim has a limit of its own. `now` is in seconds.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._until: dict[int, float] = {}
        self._limits: dict[str, int] = {}
        self._refused_in_a_row: Counter[str] = Counter()

    def ids(self, now: float) -> list[int]:
        """Return the messages that are not claimed now."""
        return [message_id for message_id, until in self._until.items() if until > now]

    def within(self, kind: str, room: int) -> int:
        """Return the maximum size of the next claim of a kind, at most `room`."""
        return min(room, self._limits.get(kind, room))

    def note_claimed(self, kind: str, total: int) -> None:
        """Remember that a claim of up to `total` messages was accepted: the next one may be larger."""
        if not self._limits:
            return
        self._refused_in_a_row.pop(kind, None)
        if total >= self._limits.get(kind, total + 1):
            self._limits[kind] = 2 * total
        else:
            self._limits.pop(kind, None)

    def note_refused(self, kind: str, total: int) -> None:
        """Remember that a claim of up to `total` messages was refused: the next one is smaller."""
        self._limits[kind] = max(1, total // 2)
        self._refused_in_a_row[kind] += total == 1

    def is_hopeless(self, kind: str) -> bool:
        """Whether many single messages were refused in a row, so that the messages are not the cause."""
        return self._refused_in_a_row[kind] > _MAX_IN_A_ROW

    def add(self, message_ids: Collection[int], queue: str, reason: str, now: float) -> None:
        """Set messages aside, and report each message the first time."""
        for message_id in message_ids:
            if message_id not in self._until:
                self._telemetry.report(
                    logging.ERROR,
                    LogEvent.CLAIM_REFUSED,
                    "the database refuses to let this message be claimed; it is tried again once a minute",
                    message_id=message_id,
                    queue=queue,
                    reason=reason,
                )
            self._until[message_id] = now + _SECONDS

"""The queues of a worker: which it serves, and in which order.

Queues without weights are served strictly in their order. With weights they take turns.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pgoutbox.errors import ConfigurationError
from pgoutbox.text import NAME

ALL_QUEUES: Final = "*"


@dataclass(frozen=True, slots=True)
class QueueShare:
    """A queue that a worker serves, and its share of the claims if the queues have weights."""

    name: str
    weight: int | None = None


def parse_queues(values: Sequence[str]) -> tuple[QueueShare, ...]:
    """Read `name` or `name:weight`; all or none have a weight. Without values it is `default`.

    `*` stands for `default` and all queues that the outbox's topics define. Without a weight they take turns.

    >>> parse_queues(["critical:6", "bulk:1"])
    (QueueShare(name='critical', weight=6), QueueShare(name='bulk', weight=1))
    """
    if isinstance(values, str):
        raise ConfigurationError(f"queues: must be a list of names, not the text {values!r}")
    shares = []
    for value in values:
        match = re.fullmatch(rf"({NAME.pattern}|\*)(?::([1-9][0-9]{{0,3}}))?", value)
        if match is None:
            raise ConfigurationError(
                f"queue {value!r}: give NAME or NAME:WEIGHT, the name of a-z, 0-9, underscore, dot and hyphen or *, "
                "the weight from 1 to 9999"
            )
        shares.append(QueueShare(match[1], int(match[2]) if match[2] else None))
    if len({share.name for share in shares}) < len(shares):
        raise ConfigurationError(f"queues {', '.join(values)}: each may be named once")
    if len({share.weight is None for share in shares}) > 1:
        raise ConfigurationError(f"queues {', '.join(values)}: give all of them a weight, or none")
    if len(shares) > 1 and shares[0].weight is None and ALL_QUEUES in values:
        raise ConfigurationError(f"queues {', '.join(values)}: give * alone, or give all of them a weight")
    return tuple(shares) or (QueueShare("default"),)


def name_all(shares: Sequence[QueueShare], defined: Collection[str]) -> list[QueueShare]:
    """Return the shares with the queues that `*` stands for: `default` and the `defined` ones, except those named.

    >>> name_all([QueueShare("critical", 6), QueueShare("*", 1)], ["bulk", "critical"])
    [QueueShare(name='critical', weight=6), QueueShare(name='bulk', weight=1), QueueShare(name='default', weight=1)]
    """
    named = {share.name for share in shares}
    others = sorted({"default", *defined} - named)
    return [
        expanded
        for share in shares
        for expanded in (
            [share] if share.name != ALL_QUEUES else [QueueShare(name, share.weight or 1) for name in others]
        )
    ]


class Turns:
    """The order of the queues for the next claim: smooth weighted round robin, if they have weights."""

    def __init__(self, shares: Sequence[QueueShare]) -> None:
        self.names = [share.name for share in shares]
        self._weights = {share.name: share.weight or 0 for share in shares}
        self._has_weights = any(self._weights.values())
        self._credits = dict.fromkeys(self._weights, 0)
        self._idle: set[str] = set()

    def order(self) -> list[str]:
        """Return the names of the queues: that with the most credit first."""
        return sorted(self._weights, key=lambda name: -self._credits[name] - self._weights[name])

    def record(self, counts: Mapping[str, int]) -> None:
        """Note how many messages a claim has found, in its order. The first queue with messages pays for all with some.

        An empty queue saves no credit: it would displace the others later, and its share would be nobody's now. Nor
        does a claim without messages give any: nobody would pay for it.
        """
        if not self._has_weights:
            return
        payer = next((name for name, count in counts.items() if count), None)
        if payer is not None:
            for name, weight in self._weights.items():
                self._credits[name] += weight
        for name, count in counts.items():
            if count:
                self._idle.discard(name)
            else:
                self._idle.add(name)
                self._credits[name] = 0
        if payer is not None:
            self._credits[payer] -= sum(w for name, w in self._weights.items() if name not in self._idle)

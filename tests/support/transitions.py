"""The state machine of messages, as the schema has it and docs/explanation/lifecycle.md shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pgoutbox.message import State

TRANSITIONS: Final[Mapping[State, frozenset[State]]] = {
    State.PENDING: frozenset({State.SENDING, State.SKIPPED, State.CANCELLED}),
    State.SENDING: frozenset(
        {State.SENDING, State.SENT, State.PENDING, State.FAILED, State.SKIPPED, State.CANCELLED},
    ),
    State.SENT: frozenset(),
    State.FAILED: frozenset({State.PENDING, State.SKIPPED}),
    State.SKIPPED: frozenset(),
    State.CANCELLED: frozenset({State.PENDING}),
}

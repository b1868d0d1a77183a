"""The tabs of the messages: one for each state, with the number of its messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from pgoutbox.dashboard import reads
from pgoutbox.message import State
from pgoutbox.text import Count, CountKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgoutbox.dashboard.types import Connection
    from pgoutbox.operations import MessageFilter

_KINDS: Final[Sequence[CountKind]] = ("exactly", "about", "at least")


class Tab(NamedTuple):
    """A part of the messages. `total` counts its messages without regard to other filters."""

    name: str
    states: tuple[State, ...]
    due: Literal["now", "later", "again"] | None
    total: Count | None = None


def count_tabs(connection: Connection) -> list[Tab]:
    """Return the tabs with their counts."""
    states = {count.state: Count(count.messages, count.kind) for count in reads.count_states(connection)}
    due, later, tried = reads.count_due(connection)
    kind = max((count.kind for count in states.values()), key=_KINDS.index)
    return [
        Tab("all", (), None, Count(sum(count.messages for count in states.values()), kind)),
        Tab("due", (State.PENDING,), "now", due),
        Tab("scheduled", (State.PENDING,), "later", later),
        Tab("retrying", (State.PENDING,), "again", tried),
        Tab("in flight", (State.SENDING,), None, states[State.SENDING]),
        *(
            Tab(state.value, (state,), None, states[state])
            for state in (State.FAILED, State.SENT, State.SKIPPED, State.CANCELLED)
        ),
    ]


def tabs_of(counted: Sequence[Tab], which: MessageFilter) -> list[Tab]:
    """Return the tabs for a page: one more if the filter has states that no tab has."""
    given = (tuple(which.states), which.due)
    if any((tab.states, tab.due) == given for tab in counted):
        return list(counted)
    return [*counted, Tab(", ".join(which.states) or "pending", *given)]

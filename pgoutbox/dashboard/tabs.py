"""The tabs of the messages: one for each state, with the number of its messages, and its topics and queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from pgoutbox.dashboard import reads
from pgoutbox.dashboard.database import Connection
from pgoutbox.message import State
from pgoutbox.operations import MessageFilter
from pgoutbox.text import Count, CountKind

_FACETS: Final = 8
COUNTED: Final[Mapping[tuple[tuple[State, ...], reads.Part | None], tuple[str, tuple[str, ...]]]] = {
    ((State.PENDING,), "now"): ("due", ("due",)),
    ((State.PENDING,), None): ("waiting", ("due", "scheduled")),
    ((State.SENDING,), None): ("in_flight", ("sending", "lapsed")),
    ((State.FAILED,), None): ("failed", ()),
}
"""The number of a topic, and those of a queue together, that count their messages in a tab."""
_KINDS: Final[Sequence[CountKind]] = ("exactly", "about", "at least")


Facets: TypeAlias = dict[str, list[tuple[str, Count | None]]]
"""The values to choose from by parameter, with their numbers in the tab, without regard to other filters."""


class Tab(NamedTuple):
    """A part of the messages. `total` counts its messages without regard to other filters."""

    name: str
    states: tuple[State, ...]
    due: reads.Part | None
    total: Count | None = None


def count_tabs(connection: Connection) -> list[Tab]:
    """Return the tabs with their counts."""
    states = reads.count_states(connection)
    pending = reads.count_pending(connection, "now", "later", "again")
    kind = max((count.kind for count in states.values()), key=_KINDS.index)
    return [
        Tab("all", (), None, Count(sum(count.messages for count in states.values()), kind)),
        Tab("due", (State.PENDING,), "now", pending["now"]),
        Tab("scheduled", (State.PENDING,), "later", pending["later"]),
        Tab("retrying", (State.PENDING,), "again", pending["again"]),
        Tab("in flight", (State.SENDING,), None, states[State.SENDING]),
        *(
            Tab(state.value, (state,), None, states[state])
            for state in (State.FAILED, State.SENT, State.SKIPPED, State.CANCELLED)
        ),
    ]


def most(counts: Mapping[str, Count], chosen: str | None) -> list[tuple[str, Count | None]]:
    """Return the names with the most messages first, and the chosen one; none if there is nothing to choose from."""
    names = sorted((name for name in counts if counts[name].messages), key=lambda name: -counts[name].messages)
    shown: list[tuple[str, Count | None]] = [(name, counts[name]) for name in names[:_FACETS]]
    if chosen is not None and all(name != chosen for name, _ in shown):
        shown.append((chosen, counts.get(chosen)))
    return shown if len(shown) > 1 or chosen is not None else []


def tabs_of(counted: Sequence[Tab], which: MessageFilter) -> list[Tab]:
    """Return the tabs for a page: one more if the filter has states that no tab has."""
    given = (tuple(which.states), which.due)
    if any((tab.states, tab.due) == given for tab in counted):
        return list(counted)
    return [*counted, Tab(", ".join(which.states) or "pending", *given)]

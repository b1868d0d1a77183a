"""The tabs of the messages: one for each state, with the number of its messages, and its topics and queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from pgoutbox.dashboard import reads
from pgoutbox.message import State
from pgoutbox.text import Count, CountKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pgoutbox.dashboard.types import Connection
    from pgoutbox.operations import MessageFilter

_FACETS: Final = 8
_KINDS: Final[Sequence[CountKind]] = ("exactly", "about", "at least")


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


class Facets(NamedTuple):
    """The topics and queues of the messages of a tab, those with the most messages first, and the chosen ones.

    The numbers are those of the tab, without regard to other filters.
    """

    topic: list[tuple[str, Count | None]]
    queue: list[tuple[str, Count | None]]


def facets_of(topics: Mapping[str, reads.TopicRow], queues: Sequence[reads.QueueRow], which: MessageFilter) -> Facets:
    """Return the topics and queues to choose from for this filter, with their numbers in its tab."""
    by_topic: dict[str, Count] = {}
    by_queue: dict[str, int] = {}
    match which.states, which.due:
        case (State.PENDING,), "now":
            by_topic = {row.topic: row.due for row in topics.values()}
            by_queue = {row.queue: row.due for row in queues}
        case (State.PENDING,), None:
            by_topic = {row.topic: row.waiting for row in topics.values()}
            by_queue = {row.queue: row.due + row.scheduled for row in queues}
        case (State.SENDING,), _:
            by_topic = {row.topic: row.in_flight for row in topics.values()}
            by_queue = {row.queue: row.sending + row.lapsed for row in queues}
        case (State.FAILED,), _:
            by_topic = {row.topic: row.failed for row in topics.values()}
    counted = {name: reads.capped(messages) for name, messages in by_queue.items()}
    return Facets(_most(by_topic, which.topic), _most(counted, which.queue))


def _most(counts: Mapping[str, Count], chosen: str | None) -> list[tuple[str, Count | None]]:
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

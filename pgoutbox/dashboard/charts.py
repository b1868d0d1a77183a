"""Charts by time. Templates draw them as SVG, in slots of time and in units of their values, without a script."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from pgoutbox.dashboard import reads
from pgoutbox.dashboard.database import Connection
from pgoutbox.dashboard.history import LAST_HOUR, MINUTE, MINUTES, Flow, Latencies, Range, percentiles
from pgoutbox.dashboard.rendering import format_seconds
from pgoutbox.database import sql
from pgoutbox.message import State
from pgoutbox.text import Count

_LABELS: Final = 4


class Value(NamedTuple):
    """A value at a slot, with a text for the mouse. The start or the end of a worker has no value."""

    x: float
    y: float
    title: str = ""


class Chart(NamedTuple):
    """Bars or a line, with a text label for screen readers.

    A small line has no axes: the text of the highest value, and the times below. `since` is the first counted time,
    None if all are counted. `total` is the sum of bars, or the last value of a line.
    """

    label: str
    width: float
    values: Sequence[Value]
    top: str = ""
    times: Sequence[datetime] = ()
    since: datetime | None = None
    total: float = 0

    @property
    def height(self) -> float:
        """The highest value, or 1 for an empty chart."""
        return _highest(self.values) or 1

    @property
    def points(self) -> str:
        """The corners of a line."""
        return " ".join(f"{value.x:.4g},{self.height - value.y:.4g}" for value in self.values)


def messages_by_time(asked: Range, now: datetime, counts: Mapping[datetime, int], state: State) -> Chart:
    """Draw the numbers of messages by time as bars."""
    slots = asked.slots(now)
    values = [
        Value(number, counts[at], f"{_utc(at)}: {counts[at]:,} {state}")
        for number, at in enumerate(slots)
        if counts.get(at)
    ]
    total, top = sum(value.y for value in values), f"{_highest(values):,}"
    label = f"{total:,} {state} in {asked.name}, at most {top} in {_length(asked.width)}"
    return Chart(label, len(slots), values, top, _times(slots), _since(slots, counts, now), total)


def latency(asked: Range, now: datetime, sent: Mapping[datetime, Latencies]) -> Chart:
    """Draw the 95th percentile of the latency by time as a line."""
    slots = asked.slots(now)
    found = {number: percentiles([sent[at]], [0.95])[0] for number, at in enumerate(slots) if at in sent}
    values = [
        Value(number + 0.5, seconds, f"{_utc(slots[number])}: {format_seconds(seconds)}")
        for number, seconds in found.items()
        if seconds is not None
    ]
    top = format_seconds(_highest(values))
    label = f"percentile 95 of the latency, at most {top} in {_length(asked.width)}"
    return Chart(label if values else "no messages sent", len(slots), values, top, _times(slots))


def depth(asked: Range, now: datetime, known: Mapping[datetime, int]) -> Chart:
    """Draw the depth of a queue by time as a line, up to now. It begins at the first time that is counted."""
    slots = asked.slots(now)
    values = [
        Value((at - slots[0]) / asked.width, count, f"{_utc(at)}: {Count(count)}")
        for at, count in sorted(known.items())
    ]
    top = f"{_highest(values):,}"
    label = f"{Count(known[now])} now, at most {top} in {asked.name}"
    return Chart(label, values[-1].x, values, top, _times(slots), _since(slots, known, now), known[now])


def marks_of(asked: Range, now: datetime, connection: Connection) -> list[Value]:
    """Return the starts and the ends of workers in a range of time."""
    begin = asked.slots(now)[0]
    events = reads.worker_events(connection, begin)
    return [Value((row["at"] - begin) / asked.width, 0, _title_of(row)) for row in reversed(events)]


def _title_of(event: reads.Row) -> str:
    version = f", version {event['version'] or 'unknown'}" if event["event"] == "started" else ""
    return f"{_utc(event['at'])}: worker {event['name']} {event['event']}{version}"


def ended_lines(now: datetime, ended: Mapping[datetime, Counter[str]], names: Collection[str]) -> dict[str, Chart]:
    """Draw the numbers of ended messages of these names by time. A line begins at the first time that is counted."""
    # The current slot is not over: with it, each line would fall at its end.
    slots = LAST_HOUR.slots(now)[:-1]
    since = _since(slots, ended, slots[-1])
    when = f"since {since:%H:%M} UTC" if since else "in the last hour"
    counted = {name: [(number, ended[at][name]) for number, at in enumerate(slots) if at in ended] for name in names}
    return {
        name: _line(counts, f"ended {when}", LAST_HOUR.width)
        for name, counts in counted.items()
        if any(count for _, count in counts)
    }


def depth_lines(now: datetime, flow: Flow, depths: Mapping[str, Count]) -> dict[str, Chart]:
    """Draw the numbers of live messages of these names by time, where they have changed, back from those of now."""
    slots = LAST_HOUR.slots(now)
    lines = {}
    for name, depth in depths.items():
        values = [Value((now - slots[0]) / LAST_HOUR.width, depth.messages)]
        for number in reversed(range(len(slots))):
            at = slots[number]
            if at not in flow.enqueued:
                break
            values.append(Value(number, values[-1].y + flow.ended[at][name] - flow.enqueued[at][name]))
        lowest = min(0, *(value.y for value in values))  # Below zero only if not all live ones are counted.
        values = [Value(value.x, value.y - lowest) for value in reversed(values)]
        if len({value.y for value in values}) > 1:
            when = "in the last hour" if slots[0] in flow.enqueued else f"since {slots[int(values[0].x)]:%H:%M} UTC"
            most = f", at most {_highest(values):,} {when}" if depth.kind == "exactly" else f", by time {when}"
            label = f"{'at least ' if depth.kind != 'exactly' else ''}{depth.messages:,} live now{most}"
            lines[name] = Chart(label, values[-1].x, values)
    return lines


def failures_by_topic(connection: Connection, now: datetime) -> list[tuple[str, int, Chart]]:
    """Return the newest failures by topic, the largest group first, each with its line of the last hour."""
    last = now.astimezone(UTC).replace(second=0, microsecond=0)
    by_minute: defaultdict[str, Counter[datetime]] = defaultdict(Counter)
    for topic, minute, messages in connection.execute(sql.FAILED_LATELY, {"cap": reads.CAP}):
        by_minute[topic][minute.astimezone(UTC)] += messages
    begun = [last - age * MINUTE for age in reversed(range(MINUTES))]
    largest = sorted(by_minute.items(), key=lambda item: -item[1].total())[:20]
    return [
        (
            topic,
            counts.total(),
            _line([(number, counts[at]) for number, at in enumerate(begun)], "failed in the last hour", MINUTE),
        )
        for topic, counts in largest
    ]


def _line(counts: Sequence[tuple[int, int]], what: str, width: timedelta) -> Chart:
    """Draw the counts of slots of this width up to the last one, on a scale of their own."""
    values = [Value(slot, count) for slot, count in counts]
    total = sum(value.y for value in values)
    label = f"{total:,} {what}, at most {_highest(values):,} in {_length(width)}"
    return Chart(label, values[-1].x, values)


def _highest(values: Sequence[Value]) -> float:
    return max((value.y for value in values), default=0)


def _since(slots: Sequence[datetime], counted: Container[datetime], now: datetime) -> datetime | None:
    since = next((at for at in slots if at in counted), now)
    return None if since == slots[0] else since


def _times(slots: Sequence[datetime]) -> list[datetime]:
    return [slots[len(slots) * number // _LABELS] for number in range(_LABELS)]


def _utc(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _length(width: timedelta) -> str:
    minutes = width // timedelta(minutes=1)
    if minutes == 1:
        return "a minute"
    return f"{minutes} minutes" if minutes < 60 else f"{minutes // 60} hours"

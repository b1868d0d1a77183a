"""Charts by time, as shapes that a template renders as SVG without a script."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from pgoutbox.dashboard.history import LAST_HOUR, MINUTE, MINUTES, percentiles
from pgoutbox.dashboard.rendering import format_seconds

if TYPE_CHECKING:
    from pgoutbox.dashboard.history import Latencies, Range
    from pgoutbox.dashboard.reads import FailedMinute, WorkerRow
    from pgoutbox.message import State

LINE_SIZE: Final = (120, 24)
WIDE_WIDTH: Final = 720
WIDE_HEIGHT: Final = 120
_LABELS: Final = 4
# A single failure beside thousands of sent messages must not disappear.
_LEAST_HEIGHT: Final = 2.0


class Bar(NamedTuple):
    """A rectangle on the ground line, with a text for the mouse."""

    x: str
    y: str
    width: str
    height: str
    title: str = ""


class Line(NamedTuple):
    """A small line, with a text label for screen readers."""

    label: str
    points: str


class WideChart(NamedTuple):
    """A chart with axes: the greatest value, and the times below. `since` is the first counted time, None if all are
    counted.

    `areas` give the values of a line under the pointer, `marks` the starts and ends of workers. `total` is the sum of
    bars, or the last value of a line.
    """

    label: str
    highest: str
    times: Sequence[datetime]
    since: datetime | None
    bars: Sequence[Bar] = ()
    points: str = ""
    areas: Sequence[Bar] = ()
    marks: Sequence[Bar] = ()
    total: int = 0


class TopicFailures(NamedTuple):
    """The number of recent failures of a topic, and their line of the last hour."""

    topic: str
    messages: int
    line: Line


def messages_by_time(
    asked: Range, now: datetime, counts: Mapping[datetime, int], state: State, marks: Sequence[Bar] = ()
) -> WideChart:
    """Draw the numbers of messages by time, on a scale of their own."""
    slots = asked.slots(now)
    highest = max((counts.get(at, 0) for at in slots), default=0)
    room = WIDE_WIDTH / len(slots)
    drawn = [
        _bar(room * (number + 0.1), room * 0.8, counts[at], highest, f"{_utc(at)}: {counts[at]:,} {state}")
        for number, at in enumerate(slots)
        if counts.get(at)
    ]
    total = sum(counts.get(at, 0) for at in slots)
    label = f"{total:,} {state} in {asked.name}, at most {highest:,} in {_length(asked.width)}"
    since = next((at for at in slots if at in counts), now)
    return WideChart(
        label,
        f"{highest:,}",
        _times(slots),
        None if since == slots[0] else since,
        drawn,
        marks=marks,
        total=total,
    )


def latency(
    asked: Range, now: datetime, sent: Mapping[datetime, Latencies], share: float, marks: Sequence[Bar] = ()
) -> WideChart:
    """Draw a percentile of the latency by time."""
    slots = asked.slots(now)
    room = WIDE_WIDTH / len(slots)
    found = {at: percentiles([sent[at]], [share])[0] for at in slots if at in sent}
    known = {at: seconds for at, seconds in found.items() if seconds is not None}
    highest = max(known.values(), default=0.0)
    points, areas = [], []
    for number, at in enumerate(slots):
        if at in known:
            points.append(f"{room * (number + 0.5):.1f},{WIDE_HEIGHT - (WIDE_HEIGHT - 2) * known[at] / highest:.1f}")
            areas.append(_area(room * number, room, f"{_utc(at)}: {format_seconds(known[at])}"))
    label = (
        f"percentile {share * 100:g} of the latency, at most {format_seconds(highest)} in {_length(asked.width)}"
        if known
        else "no messages sent"
    )
    return WideChart(label, format_seconds(highest), _times(slots), None, (), " ".join(points), areas, marks)


def depth(asked: Range, now: datetime, known: Mapping[datetime, int]) -> WideChart:
    """Draw the depth of a queue by time. The line begins at the first time that is counted."""
    slots = asked.slots(now)
    highest = max(known.values(), default=0)
    span = (now - slots[0]).total_seconds()
    room = WIDE_WIDTH / len(slots)
    xs = {at: WIDE_WIDTH * (at - slots[0]).total_seconds() / span for at in known}
    points = " ".join(f"{xs[at]:.1f},{_y(count, highest):.1f}" for at, count in sorted(known.items()))
    areas = [
        _area(max(0.0, xs[at] - room / 2), room, f"{_utc(at)}: {count:,} messages")
        for at, count in sorted(known.items())
    ]
    label = f"{known[now]:,} messages now, at most {highest:,} in {asked.name}"
    since = min(known)
    return WideChart(
        label,
        f"{highest:,}",
        _times(slots),
        None if since == slots[0] else since,
        points=points,
        areas=areas,
        total=known[now],
    )


def marks_of(asked: Range, now: datetime, workers: Sequence[WorkerRow]) -> list[Bar]:
    """Return the starts and ends of these workers in a range of time."""
    slots = asked.slots(now)
    span = asked.width * asked.slot_count
    moments = [
        (at, f"{_utc(at)}: worker {row.worker} {what}")
        for row in workers
        for at, what in ((row.started_at, f"started, version {row.version or 'unknown'}"), (row.ended_at, "ended"))
        if at is not None and at >= slots[0]
    ]
    return [_area(WIDE_WIDTH * ((at - slots[0]) / span), 1, title) for at, title in sorted(moments)]


def _area(x: float, width: float, title: str) -> Bar:
    return Bar(f"{x:.1f}", "0", f"{width:.1f}", str(WIDE_HEIGHT), title)


def _bar(x: float, width: float, count: int, highest: int, title: str) -> Bar:
    y = min(_y(count, highest), WIDE_HEIGHT - _LEAST_HEIGHT)
    return Bar(f"{x:.1f}", f"{y:.1f}", f"{width:.1f}", f"{WIDE_HEIGHT - y:.1f}", title)


def _y(count: int, highest: int) -> float:
    return WIDE_HEIGHT * (1 - count / max(1, highest))


def _utc(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _length(width: timedelta) -> str:
    minutes = width // timedelta(minutes=1)
    if minutes == 1:
        return "a minute"
    return f"{minutes} minutes" if minutes < 60 else f"{minutes // 60} hours"


def _times(slots: Sequence[datetime]) -> list[datetime]:
    return [slots[len(slots) * number // _LABELS] for number in range(_LABELS)]


def ended_lines(now: datetime, ended: Mapping[datetime, Counter[str]], names: Collection[str]) -> dict[str, Line]:
    """Draw the numbers of ended messages of these names by time. A line begins at the first time that is counted."""
    # The current slot is not over: with it, each line would fall at its end.
    slots = LAST_HOUR.slots(now)[:-1]
    since = next((at for at in slots if at in ended), slots[-1])
    when = "in the last hour" if since == slots[0] else f"since {since:%H:%M} UTC"
    lines = {}
    for name in names:
        counts = [ended[at][name] if at in ended else None for at in slots]
        if any(counts):
            lines[name] = _line(counts, f"ended {when}", LAST_HOUR.width)
    return lines


def _line(counts: Sequence[int | None], what: str, width: timedelta) -> Line:
    """Draw the counts of slots of this width, on a scale of their own. None is not counted."""
    known = [(slot, count) for slot, count in enumerate(counts) if count is not None]
    highest = max((count for _, count in known), default=0)
    right, bottom = LINE_SIZE
    points = [
        f"{right * slot / (len(counts) - 1):.0f},{bottom - (bottom - 1) * count / max(1, highest):.0f}"
        for slot, count in known
    ]
    total = sum(count for _, count in known)
    return Line(f"{total:,} {what}, at most {highest:,} in {_length(width)}", " ".join(points))


def failures_by_topic(failed: Sequence[FailedMinute], now: datetime) -> list[TopicFailures]:
    """Group the newest failures by topic, the largest group first."""
    last = now.astimezone(UTC).replace(second=0, microsecond=0)
    wanted = [last - minutes * MINUTE for minutes in range(MINUTES)][::-1]
    totals: Counter[str] = Counter()
    by_minute: defaultdict[str, Counter[datetime]] = defaultdict(Counter)
    for topic, minute, messages in failed:
        totals[topic] += messages
        by_minute[topic][minute.astimezone(UTC)] += messages
    return [
        TopicFailures(topic, count, _line([by_minute[topic][at] for at in wanted], "failed in the last hour", MINUTE))
        for topic, count in totals.most_common(20)
    ]

"""Charts by time, as shapes that a template renders as SVG without a script."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from pgoutbox.dashboard.history import MINUTES, Minute, percentiles
from pgoutbox.message import State

if TYPE_CHECKING:
    from pgoutbox.dashboard.history import Range
    from pgoutbox.dashboard.reads import FailedMinute

WIDTH: Final = 240
HEIGHT: Final = 40
WIDE_WIDTH: Final = 720
WIDE_HEIGHT: Final = 120
_SLOT: Final = WIDTH / MINUTES
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


class Chart(NamedTuple):
    """Bars or a line, with a text label for screen readers."""

    label: str
    bars: Sequence[Bar] = ()
    points: str = ""


class Series(NamedTuple):
    """The bars of one state, and their sum."""

    state: State
    total: int
    bars: Sequence[Bar]


class WideChart(NamedTuple):
    """A chart with axes: the greatest value, and the times below. `since` is the first counted time, None if all are
    counted. `now` is the last value of a line.
    """

    label: str
    highest: int
    times: Sequence[datetime]
    since: datetime | None
    series: Sequence[Series] = ()
    points: str = ""
    now: int = 0


class TopicFailures(NamedTuple):
    """The number of recent failures of a topic, and a chart of the last hour."""

    topic: str
    messages: int
    chart: Chart


def activity(asked: Range, now: datetime, sent: Mapping[datetime, int], failed: Mapping[datetime, int]) -> WideChart:
    """Draw sent beside failed messages by time. `sent` has only the slots that are counted already."""
    slots = asked.slots(now)
    counts = {State.SENT: sent, State.FAILED: failed}
    highest = max((count.get(at, 0) for count in counts.values() for at in slots), default=0)
    room = WIDE_WIDTH / len(slots)
    series = []
    for place, (state, count) in enumerate(counts.items()):
        drawn = [
            _bar(room * (number + 0.1 + 0.4 * place), room * 0.4, count[at], highest, _title(at, count[at], state))
            for number, at in enumerate(slots)
            if count.get(at)
        ]
        series.append(Series(state, sum(count.get(at, 0) for at in slots), drawn))
    told = " and ".join(f"{one.total:,} {one.state}" for one in series)
    label = f"{told} in {asked.name}, at most {highest:,} in {_length(asked.width)}"
    since = next((at for at in slots if at in sent), None)
    return WideChart(label, highest, _times(slots), None if since == slots[0] else since, series)


def depth(asked: Range, now: datetime, known: Mapping[datetime, int]) -> WideChart:
    """Draw the depth of a queue by time. The line begins at the first time that is counted."""
    slots = asked.slots(now)
    highest = max(known.values(), default=0)
    span = (now - slots[0]).total_seconds()
    points = " ".join(
        f"{WIDE_WIDTH * (at - slots[0]).total_seconds() / span:.1f},{_y(count, highest):.1f}"
        for at, count in sorted(known.items())
    )
    label = f"{known[now]:,} messages now, at most {highest:,} in {asked.name}"
    since = min(known)
    return WideChart(label, highest, _times(slots), None if since == slots[0] else since, points=points, now=known[now])


def _bar(x: float, width: float, count: int, highest: int, title: str) -> Bar:
    y = min(_y(count, highest), WIDE_HEIGHT - _LEAST_HEIGHT)
    return Bar(f"{x:.1f}", f"{y:.1f}", f"{width:.1f}", f"{WIDE_HEIGHT - y:.1f}", title)


def _y(count: int, highest: int) -> float:
    return WIDE_HEIGHT * (1 - count / max(1, highest))


def _title(at: datetime, count: int, state: State) -> str:
    return f"{at:%Y-%m-%d %H:%M} UTC: {count:,} {state}"


def _length(width: timedelta) -> str:
    minutes = width // timedelta(minutes=1)
    if minutes == 1:
        return "a minute"
    return f"{minutes} minutes" if minutes < 60 else f"{minutes // 60} hours"


def _times(slots: Sequence[datetime]) -> list[datetime]:
    return [slots[len(slots) * number // _LABELS] for number in range(_LABELS)]


def _bars(counts: Sequence[int], what: str) -> Chart:
    """Draw a bar for each minute with a count."""
    highest = max(counts, default=0)
    drawn = []
    for slot, count in enumerate(counts):
        if count:
            height = max(1.0, HEIGHT * count / highest)
            drawn.append(
                Bar(f"{slot * _SLOT + 0.5:.1f}", f"{HEIGHT - height:.1f}", f"{_SLOT - 1:.1f}", f"{height:.1f}")
            )
    return Chart(f"{sum(counts):,} {what}, at most {highest:,} in a minute", bars=drawn)


def latency(minutes: Sequence[Minute], share: float) -> Chart:
    """Chart a percentile of the latency, by minute."""
    found = [percentiles([minute], [share])[0] for minute in minutes]
    known = [seconds for seconds in found if seconds is not None]
    if not known:
        return Chart("no messages sent")
    highest = max(known)
    first = MINUTES - len(found)
    points = " ".join(
        f"{(slot + 0.5) * _SLOT:.1f},{HEIGHT - (HEIGHT - 2) * seconds / highest:.1f}"
        for slot, seconds in enumerate(found, start=first)
        if seconds is not None
    )
    return Chart(f"percentile {share * 100:g} by minute, at most {highest:.3g} seconds", points=points)


def failures_by_topic(failed: Sequence[FailedMinute], now: datetime) -> list[TopicFailures]:
    """Group the newest failures by topic, the largest group first."""
    last = now.astimezone(UTC).replace(second=0, microsecond=0)
    wanted = [last - minutes * timedelta(minutes=1) for minutes in range(MINUTES)][::-1]
    totals: Counter[str] = Counter()
    by_minute: defaultdict[str, Counter[datetime]] = defaultdict(Counter)
    for topic, minute, messages in failed:
        totals[topic] += messages
        by_minute[topic][minute.astimezone(UTC)] += messages
    return [
        TopicFailures(topic, count, _bars([by_minute[topic][at] for at in wanted], "failed in the last hour"))
        for topic, count in totals.most_common(20)
    ]

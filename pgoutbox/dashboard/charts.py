"""Small charts of the last hour, as shapes that a template renders as SVG without a script."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from pgoutbox.dashboard.history import MINUTES, Minute, percentiles
from pgoutbox.message import State

if TYPE_CHECKING:
    from pgoutbox.dashboard.reads import FailedMinute

WIDTH: Final = 240
HEIGHT: Final = 40
_SLOT: Final = WIDTH / MINUTES


class Bar(NamedTuple):
    """A rectangle on the ground line."""

    x: str
    y: str
    width: str
    height: str


class Chart(NamedTuple):
    """Bars or a line, with a text label for screen readers."""

    label: str
    bars: Sequence[Bar] = ()
    points: str = ""


class TopicFailures(NamedTuple):
    """The number of recent failures of a topic, and a chart of the last hour."""

    topic: str
    messages: int
    chart: Chart


def throughput(minutes: Sequence[Minute], state: State) -> Chart:
    """Chart the messages that ended in a state, by minute; the newest on the right."""
    counts = [minute.states[state] for minute in minutes]
    return bars(counts, f"{state.value} in the last {len(counts)} minutes")


def bars(counts: Sequence[int], what: str) -> Chart:
    """Draw a bar for each minute with a count."""
    highest = max(counts, default=0)
    first = MINUTES - len(counts)
    drawn = []
    for slot, count in enumerate(counts, start=first):
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


def _last_hour(now: datetime) -> list[datetime]:
    last = now.astimezone(UTC).replace(second=0, microsecond=0)
    return [last - minutes * timedelta(minutes=1) for minutes in range(MINUTES)][::-1]


def failures_by_minute(failed: Sequence[FailedMinute], now: datetime) -> Chart:
    """Chart the newest failures of all topics, by minute."""
    counts: Counter[datetime] = Counter()
    for _, minute, messages in failed:
        counts[minute.astimezone(UTC)] += messages
    return bars([counts[at] for at in _last_hour(now)], "failed in the last hour")


def failures_by_topic(failed: Sequence[FailedMinute], now: datetime) -> list[TopicFailures]:
    """Group the newest failures by topic, the largest group first."""
    wanted = _last_hour(now)
    totals: Counter[str] = Counter()
    by_minute: defaultdict[str, Counter[datetime]] = defaultdict(Counter)
    for topic, minute, messages in failed:
        totals[topic] += messages
        by_minute[topic][minute.astimezone(UTC)] += messages
    return [
        TopicFailures(topic, count, bars([by_minute[topic][at] for at in wanted], "failed in the last hour"))
        for topic, count in totals.most_common(20)
    ]

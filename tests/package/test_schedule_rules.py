"""Tests the times of rules: zones with changes of the clock, passed times, and rules that cannot be read."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from itertools import pairwise, takewhile
from zoneinfo import ZoneInfo

import pytest

from pgoutbox import Every, Outbox, Topic
from pgoutbox.errors import ArgumentError, ConfigurationError
from pgoutbox.schedules import MOST_MISSED, Rule, RuleError

YEAR = datetime(2026, 1, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)
# Europe and America change by an hour, at another local time each; Lord Howe by half an hour; Kolkata and UTC never.
ZONES = ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "America/Sao_Paulo"]


def times_of(rule: Rule, begin: datetime = YEAR[0], end: datetime = YEAR[1]) -> list[datetime]:
    return list(takewhile(lambda time: time < end, rule.after(begin)))


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("time", ["0 0", "30 1", "15 2", "30 2", "45 1", "59 23"])
def test_a_daily_time_comes_once_on_each_day_of_the_zone(zone: str, time: str) -> None:
    days = [found.astimezone(ZoneInfo(zone)).date() for found in times_of(Rule(f"{time} * * *", zone))]
    first = days[0]
    assert days == [first + timedelta(days=number) for number in range(len(days))]
    assert days[-1] >= date(2026, 12, 30)


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("month", [3, 4, 10, 11])  # Those with a change.
def test_periods_go_on_evenly_through_a_change_of_the_clock(zone: str, month: int) -> None:
    begin = datetime(2026, month, 1, tzinfo=UTC)
    times = times_of(Rule("*/15 * * * *", zone), begin, begin + timedelta(days=31))
    assert {later - earlier for earlier, later in pairwise(times)} == {timedelta(minutes=15)}


def test_a_time_that_a_change_skips_comes_after_the_gap() -> None:
    berlin = Rule("30 2 * * *", "Europe/Berlin")
    assert next(berlin.after(datetime(2026, 3, 28, 12, tzinfo=UTC))) == datetime(2026, 3, 29, 1, 0, tzinfo=UTC)


def test_working_days_and_a_time_in_a_zone() -> None:
    rule = Rule("0 7 * * mon-fri", "Europe/Berlin")
    friday = datetime(2026, 10, 23, 4, tzinfo=UTC)
    times = rule.after(friday)
    assert [next(times), next(times)] == [datetime(2026, 10, 23, 5, tzinfo=UTC), datetime(2026, 10, 26, 6, tzinfo=UTC)]


def test_each_full_period_counts_from_1970() -> None:
    rule = Rule(Every(hours=1, minutes=30).rule)
    begin = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)
    first = next(rule.after(begin))
    assert (first - datetime(1970, 1, 1, tzinfo=UTC)) % timedelta(minutes=90) == timedelta()
    assert begin < first <= begin + timedelta(minutes=90)


@pytest.mark.parametrize("text", ["every 7", "*/3 * * * *", "0 0 1 * *", "* * * 1 *"])
def test_the_times_that_have_passed_are_those_of_the_rule(text: str) -> None:
    rule = Rule(text)
    june = datetime(2026, 6, 1, tzinfo=UTC)
    for since in (june - timedelta(minutes=9), june - timedelta(days=12), june - timedelta(days=140)):
        now = june if "every" not in text else since + timedelta(days=4)
        every = times_of(rule, since - timedelta(microseconds=1), now + timedelta(microseconds=1))
        assert rule.passed(since, now) == every[-MOST_MISSED:]


@pytest.mark.parametrize(
    ("text", "zone", "error"),
    [
        ("0 7 * *", "UTC", "needs five fields"),
        ("0 0 7 * * *", "UTC", "needs five fields"),
        ("61 7 * * *", "UTC", "Bad minute"),
        ("0 7 31 2 *", "UTC", "Bad day-of-month"),
        ("every 0", "UTC", "needs five fields"),
        ("0 7 * * *", "Europe/Berlinn", "time zone 'Europe/Berlinn' is unknown"),
        ("0 7 * * *", "../etc/passwd", "time zone '../etc/passwd' is unknown"),
    ],
)
def test_a_rule_that_cannot_be_read_says_why(text: str, zone: str, error: str) -> None:
    with pytest.raises(RuleError, match=error):
        Rule(text, zone)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"rule": "0 7 * *"}, "rule: the rule '0 7 \\* \\*': needs five fields"),
        ({"rule": 5}, "rule: must be five fields of cron or Every"),
        ({"timezone": "Berlin"}, "timezone: the time zone 'Berlin' is unknown"),
        ({"missed": "some"}, "missed: must be latest, all or none"),
        ({"jitter": 90_000}, "jitter: must be from 0 to a day"),
        ({"until": datetime(2026, 1, 1)}, "until: must be a datetime with a time zone"),  # noqa: DTZ001
        ({"name": "No Name"}, "name: must be 1 to 63"),
        ({"dedupe_key": "k"}, "dedupe_key: belongs to each message"),
    ],
)
def test_a_mistake_in_a_schedule_is_refused_at_its_definition(arguments: dict[str, object], error: str) -> None:
    given: dict[str, object] = {"rule": "0 7 * * *", "topic": "digest", "payload": {}, **arguments}
    with pytest.raises(ConfigurationError, match=f"^schedule .*: {error}"):
        Outbox().schedule(given.pop("rule"), **given)  # type: ignore[arg-type]


def test_two_schedules_of_a_topic_need_two_names() -> None:
    outbox = Outbox()
    topic = outbox.define(Topic("digest"))
    outbox.schedule("0 7 * * *", topic=topic, payload={})
    with pytest.raises(ConfigurationError, match="'digest' is already defined"):
        outbox.schedule("0 8 * * *", topic="digest", payload={})
    outbox.schedule("0 8 * * *", topic="digest", payload={}, name="late")
    assert list(outbox.schedules) == ["digest", "late"]


@pytest.mark.parametrize("parts", [{}, {"seconds": -1}, {"minutes": 0.5}, {"days": 2_000}])
def test_a_period_is_a_positive_whole_number(parts: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match="Every"):
        Every(**parts)

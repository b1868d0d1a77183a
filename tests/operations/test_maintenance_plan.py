"""Tests which partitions a turn of maintenance checks and drops, and which messages it deletes row by row."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

import pytest

from pgoutbox.operations import RetentionRule
from pgoutbox.operations.retention import (
    Deletion,
    MaintenanceFacts,
    MaintenancePlan,
    Partition,
    PartitionCache,
    plan_maintenance,
)

DAY: Final = timedelta(days=1)
HOUR: Final = timedelta(hours=1)
NOON: Final = datetime(2026, 6, 11, 12, tzinfo=UTC)


def day(number: int) -> datetime:
    return datetime(2026, 6, number, tzinfo=UTC)


def of_day(number: int) -> Partition:
    return Partition(f"message_done_202606{number:02}", day(number), day(number + 1))


def facts(*rules: RetentionRule, at: datetime = NOON, default_bytes: int = 0) -> MaintenanceFacts:
    """The facts with a partition for each day from 1 June until a week after 11 June."""
    return MaintenanceFacts(at, default_bytes, [of_day(number) for number in range(1, 19)], rules)


SENT: Final = RetentionRule("*", "sent", 8 * DAY)
SHORT: Final = RetentionRule("mail", "sent", 2 * DAY)
FAILED: Final = RetentionRule("*", "failed", 8 * DAY)
FOREVER: Final = RetentionRule("*", "sent", None)
KEYS: Final = RetentionRule("*", "dedupe_key", DAY)

FIRST: Final = of_day(1)
NAME: Final = FIRST.name
ALL_TIME: Final = (datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 1, 1, tzinfo=UTC))


def of_first(rule: RetentionRule, since: datetime = FIRST.lower_at) -> Deletion:
    return Deletion(rule, since, FIRST.upper_at, NAME)


@pytest.mark.parametrize(
    ("rules", "kept_until", "at", "plan"),
    [
        pytest.param((), None, NOON, MaintenancePlan([], [], []), id="no rules"),
        pytest.param((FOREVER,), None, NOON, MaintenancePlan([], [], []), id="a rule that never deletes"),
        pytest.param((KEYS,), None, NOON, MaintenancePlan([], [], []), id="a rule for keys"),
        pytest.param(
            (FAILED,), None, NOON, MaintenancePlan([], [], [Deletion(FAILED, *ALL_TIME)]), id="failed messages"
        ),
        pytest.param((SENT,), None, day(9) - HOUR, MaintenancePlan([], [], []), id="before the first message expires"),
        pytest.param(
            (SENT,), None, day(9), MaintenancePlan([FIRST], [], [of_first(SENT)]), id="the retention end is unknown"
        ),
        pytest.param((SENT,), day(10), day(9), MaintenancePlan([], [], []), id="the drop replaces the deletion"),
        pytest.param((SENT,), day(10), day(10), MaintenancePlan([], [FIRST], []), id="at the retention end"),
        pytest.param(
            (SENT,),
            day(10),
            day(10) + HOUR,
            MaintenancePlan([], [FIRST], [of_first(SENT)]),
            id="the drop is an hour late",
        ),
        pytest.param(
            (SENT,),
            day(20),
            day(9),
            MaintenancePlan([], [], [of_first(SENT)]),
            id="another rule keeps the partition longer",
        ),
        pytest.param(
            (SHORT,),
            day(4),
            day(3),
            MaintenancePlan([], [], [of_first(SHORT)]),
            id="the drop would delay the deletion by half of the rule",
        ),
    ],
)
def test_the_plan_for_the_first_partition(
    rules: tuple[RetentionRule, ...], kept_until: datetime | None, at: datetime, plan: MaintenancePlan
) -> None:
    cache = PartitionCache(kept_until={} if kept_until is None else {NAME: kept_until})
    found = plan_maintenance(facts(*rules, at=at)._replace(partitions=[FIRST, of_day(18)]), cache)
    assert found == plan


def test_the_partition_of_today_is_emptied_but_not_dropped() -> None:
    hourly = RetentionRule("*", "sent", HOUR)
    today = of_day(11)
    plan = plan_maintenance(facts(hourly)._replace(partitions=[today]), PartitionCache())
    assert plan == MaintenancePlan([], [], [Deletion(hourly, *today[1:], today.name)])


def test_a_deletion_continues_where_the_last_one_ended() -> None:
    cache = PartitionCache(done_until={(NAME, SENT): day(1) + HOUR})
    assert of_first(SENT, since=day(1) + HOUR) in plan_maintenance(facts(SENT), cache).delete
    cache.done_until[NAME, SENT] = FIRST.upper_at
    assert NAME not in {deletion.partition for deletion in plan_maintenance(facts(SENT), cache).delete}


def test_the_default_partition_is_searched_outside_of_the_other_partitions_if_it_is_not_empty() -> None:
    partitions = [of_day(3), of_day(5)]
    gaps = [(ALL_TIME[0], day(3)), (day(4), day(5)), (day(6), ALL_TIME[1])]
    empty = plan_maintenance(facts(SENT)._replace(partitions=partitions), PartitionCache())
    assert [deletion for deletion in empty.delete if not deletion.partition] == []
    full = plan_maintenance(facts(SENT, default_bytes=8192)._replace(partitions=partitions), PartitionCache())
    assert [deletion for deletion in full.delete if not deletion.partition] == [Deletion(SENT, *gap) for gap in gaps]


def test_a_dropped_partition_is_left_alone() -> None:
    cache = PartitionCache(kept_until={NAME: day(2)})
    assert plan_maintenance(facts(SENT), cache).drop == [FIRST]
    plan = plan_maintenance(facts(SENT), cache, {NAME})
    assert FIRST not in plan.check + plan.drop
    assert NAME not in {deletion.partition for deletion in plan.delete}

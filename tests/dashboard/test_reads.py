"""Tests that the reads of a dashboard page are limited by its request, with any tables and statistics."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from pgoutbox.dashboard import history, reads
from pgoutbox.dashboard.history import percentiles
from pgoutbox.database import operator_connection, sql
from pgoutbox.message import State
from pgoutbox.operations import MessageFilter, Operator
from pgoutbox.text import Count
from tests.support.messages import CLAIM_ALL, put
from tests.support.waiting import PROCESS_PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import psycopg

CAP = 20
ROWS = 50
IN_FLIGHT_COUNT = 1_500
"""They are still in the index of their lane, so a read of a lane passes over them."""

FILL = """
INSERT INTO pgoutbox.message (
    topic, payload, state, attempt_count, lane, ordering_key, available_at, claimed_at, worker, finished_at, last_error
)
SELECT
    'greet',
    '{}',
    s.state,
    CASE WHEN s.state = 'pending' THEN i %% 2 ELSE 1 END,
    CASE WHEN s.state = 'pending' THEN i %% 2 ELSE 0 END,
    CASE WHEN s.state = 'pending' AND i %% 3 = 0 THEN 'key-' || i END,
    now() + (i %% 2) * interval '1 day' - interval '1 hour',
    now() - i / 100 * interval '1 ms',
    'w',
    CASE WHEN s.state NOT IN ('pending', 'sending') THEN now() END,
    CASE WHEN s.state = 'failed' THEN 'error ' || i END
FROM generate_series(1, 6000) AS i,
    LATERAL (SELECT (ARRAY['pending', 'sent', 'failed', 'sending'])[1 + (i / 3) %% 4]) AS s(state)
"""


def prepare(connection: psycopg.Connection) -> None:
    """Give the transaction the settings of a page."""
    with operator_connection.limiting(30):
        operator_connection.prepare(connection)
    connection.execute(sql.PREPARE_PAGE)


@pytest.fixture(params=["with statistics", "without statistics"])
def full(rolled_back: psycopg.Connection, request: pytest.FixtureRequest) -> psycopg.Connection:
    """Create thousands of messages, in a transaction under a page's settings in which parallel workers cost nothing."""
    rolled_back.execute(FILL, {})
    rolled_back.execute(CLAIM_ALL, {"lease": "1 hour"})
    rolled_back.execute("INSERT INTO pgoutbox.queue (name, max_in_flight) VALUES ('default', 5)")
    rolled_back.execute(
        "INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error)"
        " VALUES ('smtp', now(), 60, 'w', 'refused')"
    )
    if request.param == "with statistics":
        rolled_back.execute("ANALYZE pgoutbox.message, pgoutbox.claim")
    prepare(rolled_back)
    rolled_back.execute("SET LOCAL parallel_setup_cost = 0")
    rolled_back.execute("SET LOCAL parallel_tuple_cost = 0")
    rolled_back.execute("SET LOCAL min_parallel_table_scan_size = 0")
    return rolled_back


NOWHERE = MessageFilter(topic="nowhere")
IN_FAILED = MessageFilter(states=(State.FAILED,), text="nowhere")
IN_GROUP = MessageFilter(error_group="0" * 12)
# The application stores them far apart from each other.
SELECTED = MessageFilter(ids=(1, 5, 10**12))
EACH_QUEUE = {"prefix": "", "names": ["default"], "queues": 10, "rows": CAP}
NEAR = {"before_id": None, "not_below_id": None, "rows": ROWS, "limit": 11}


def steps_of(connection: psycopg.Connection, name: str, parameters: dict[str, object]) -> dict[str, Any]:
    """Return the plan of an executed statement."""
    return plan_of(connection, getattr(sql, name), parameters)


def plan_of(connection: psycopg.Connection, statement: str, parameters: dict[str, object]) -> dict[str, Any]:
    explained = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON, TIMING OFF) {statement}"
    ((plans,),) = connection.execute(explained.encode(), parameters)
    plan: dict[str, Any] = plans[0]["Plan"]
    return plan


def pages_read(plan: dict[str, Any]) -> int:
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def most_read(plan: dict[str, Any]) -> int:
    """Return the maximum number of rows that one step of the plan read at once, including filtered rows."""

    def of(plan: dict[str, Any]) -> float:
        removed = plan.get("Rows Removed by Filter", 0) + plan.get("Rows Removed by Index Recheck", 0)
        return max([float(plan["Actual Rows"] + removed), *map(of, plan.get("Plans", ()))])

    return int(of(plan))


@pytest.mark.parametrize(
    ("name", "parameters", "bound"),
    [
        ("LIVE_QUEUES", {"queues": ["default"], "cap": CAP}, 8 * CAP + IN_FLIGHT_COUNT),
        ("RANK_QUEUES", EACH_QUEUE, 10),
        ("RANK_QUEUES", EACH_QUEUE | {"prefix": "d"}, 10),
        ("RUNNING_WORKERS", {"cap": CAP}, CAP),
        ("RUNNING_MESSAGES", {"cap": CAP, "limit": 5}, CAP),
        ("LIST_BREAKERS", {**EACH_QUEUE, "limit": 5}, 3 * 10 * CAP + IN_FLIGHT_COUNT),
        ("WAITING_TOPICS", {**EACH_QUEUE, "topics": 5}, 3 * 10 * CAP + IN_FLIGHT_COUNT),
        ("COUNT_BY_TOPIC", {"cap": CAP}, 2 * CAP),
        ("ENDED_RATES", {"by": "topic", "names": ["greet"], "seconds": 300, "cap": CAP}, CAP),
        ("LIVE_LATELY", {"by": "queue", "width": 60, "since": "-infinity", "cap": CAP}, CAP),
        ("LIVE_BY_TIME", {"queue": "default", "width": 60, "since": "-infinity", "cap": CAP}, 3 * CAP),
        ("FAILED_BY_TIME", {"width": 60, "from": "-infinity", "cap": CAP}, CAP),
        ("COUNT_DONE", {"cap": CAP}, CAP),
        ("FAILED_LATELY", {"cap": CAP}, CAP),
        ("COUNT_FAILED_OF_DAY", {"cap": CAP}, CAP),
        ("LIST_FAILURES", {"topic": None, "seconds": None, "cap": CAP, "limit": 10}, CAP),
        ("SEARCH_WINDOW", {**NOWHERE.parameters(), **NEAR}, ROWS),
        ("SEARCH_WINDOW", {**IN_FAILED.parameters(), **NEAR}, ROWS),
        ("SEARCH_WINDOW", {**IN_GROUP.parameters(), **NEAR}, ROWS),
        ("IN_FLIGHT_IDS", {**NOWHERE.parameters(), **NEAR}, IN_FLIGHT_COUNT),
        ("SEARCH_KEYS", {"ids": [1, 2, 3], "text": "x"}, 3),
        ("SEARCH_AHEAD", {**NOWHERE.parameters(), "rows": ROWS, "after_id": 0, "through_id": 10**12}, ROWS),
        ("SEARCH_WINDOW", {**SELECTED.parameters(), **NEAR, "rows": 10**6}, 3),
        ("LIST_MESSAGES", {**SELECTED.parameters(), **NEAR}, 3),
        ("SEARCH_AHEAD", {**SELECTED.parameters(), "rows": 10**6, "after_id": 0, "through_id": 10**12}, 3),
        ("COUNT_PENDING", {**EACH_QUEUE, "cap": CAP, "parts": ["now", "later", "again"]}, CAP + IN_FLIGHT_COUNT),
        ("WHY_THEY_WAIT", {"ids": list(range(1, ROWS))}, ROWS),
        ("SUPERSEDED_BY", {"id": 10**12, "rows": ROWS, "limit": 5}, ROWS),
        ("SHOW_CAUSE", {"id": 1}, 1),
        ("FIRST_FROM", {"id": 1}, 1),
        ("SHOW_MESSAGE", {"id": 10**12, "characters": 10}, 1),
    ],
)
def test_no_read_exceeds_its_limit_of_rows(
    full: psycopg.Connection, name: str, parameters: dict[str, object], bound: int
) -> None:
    plan = steps_of(full, name, parameters)
    assert most_read(plan) <= bound
    assert "Gather" not in str(plan), "the plan uses parallel workers"


@pytest.mark.parametrize(("by", "computes_times"), [("queue", False), ("topic", True)])
def test_the_rates_of_queues_compute_no_times_of_messages(
    full: psycopg.Connection, by: str, *, computes_times: bool
) -> None:
    parameters = {"by": by, "names": ["default", "greet"], "seconds": 300, "cap": CAP}
    steps = full.execute(f"EXPLAIN (VERBOSE) {sql.ENDED_RATES}".encode(), parameters).fetchall()
    assert bool(re.search(r"finished_at - m\w*\.claimed_at", str(steps))) == computes_times


def test_the_times_of_a_topic_are_those_of_its_sent_messages(rolled_back: psycopg.Connection) -> None:
    for state, seconds in ((State.SENT, 2), (State.FAILED, 60)):
        message_id = put(rolled_back, state)
        rolled_back.execute(
            "UPDATE pgoutbox.message SET attempt_count = 1, finished_at = now(),"
            " claimed_at = now() - make_interval(secs => %(seconds)s),"
            " available_at = now() - make_interval(secs => 2 * %(seconds)s) WHERE id = %(id)s",
            {"seconds": seconds, "id": message_id},
        )
    prepare(rolled_back)
    (rate,) = reads.rates(rolled_back, "topic", ["mail"]).values()
    assert (rate["waited"], rate["handled"]) == ([2, 2], [2, 2])
    assert rate["per_second"] == 2 / reads.RATE_SECONDS


@pytest.mark.parametrize("state", ["pending", "sending"])
@pytest.mark.parametrize("name", ["SHOW_MESSAGE", "SHOW_MESSAGE_VIEW"])
def test_showing_a_message_reads_no_backlog(full: psycopg.Connection, name: str, state: str) -> None:
    """The limit of its queue counts the messages in flight."""
    newest = "SELECT max(id) FROM pgoutbox.message_view WHERE state = %s AND ordering_key IS NULL"
    ((message_id,),) = full.execute(newest, [state])
    assert most_read(steps_of(full, name, {"id": message_id, "characters": 10})) <= IN_FLIGHT_COUNT


def test_the_names_of_queues_are_found_without_reading_their_messages(db: psycopg.Connection) -> None:
    """A search for the next queue with a retry would read all fresh messages of those that have none."""
    db.execute(
        "INSERT INTO pgoutbox.message (topic, queue, payload) SELECT 'mail', 'queue-' || n % 50, '{}' "
        "FROM generate_series(1, 10000) AS n"
    )
    db.execute("VACUUM ANALYZE pgoutbox.message_live")
    with db.transaction():
        prepare(db)
        plan = steps_of(db, "RANK_QUEUES", {"prefix": "", "queues": 1000})
    assert pages_read(plan) < 50 * 40


@pytest.fixture
def tenants(rolled_back: psycopg.Connection) -> psycopg.Connection:
    """Create 100 queues with 200 messages each, half of them retries, under the settings of a page."""
    rolled_back.execute(
        "INSERT INTO pgoutbox.message (topic, queue, payload, destination, attempt_count, lane, available_at, attempts)"
        " SELECT 'mail', 'queue-' || n % 100, '{}', 'mailto:' || n || '@example.org', n / 100 % 2, n / 100 % 2,"
        " now() - interval '2 days', '[{}]' FROM generate_series(1, 20000) AS n"
    )
    rolled_back.execute(
        "INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error, holds)"
        " SELECT 'https://' || n || '.example.org', now(), 60, 'w', 'refused', ARRAY['queue-' || n || ' mail mailto']"
        " FROM generate_series(1, 100) AS n"
    )
    rolled_back.execute("ANALYZE pgoutbox.message_live, pgoutbox.breaker")
    prepare(rolled_back)
    return rolled_back


def all_steps(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the step and all below it."""
    yield plan
    for below in plan.get("Plans", ()):
        yield from all_steps(below)


@pytest.mark.parametrize(
    ("name", "parameters", "most"),
    [
        # The names, and the first message of each lane.
        ("RANK_QUEUES", {}, 3),
        # While a breaker is open, each message is read again.
        ("DUE_FOR_LONG", {"seconds": 60, "rows": 500}, 2 * 2 * 5),
        ("WAITING_TOPICS", {"rows": 1, "topics": 10}, 2 * 5),
        ("PENDING_SCHEMES", {"rows": 1}, 2 * 5),
        ("UNDELIVERED", {"seconds": 60, "rows": 1}, 2 * 5),
        ("OLDEST_UNDELIVERED", {"rows": 1, "max_label_values": 10, "other": "other"}, 1 + 20 + 1),
        # A message that a breaker can hold is read again.
        ("LIST_BREAKERS", {"rows": 1, "limit": 5}, 4 * 5 + 1),
        # The first queue is enough.
        ("COUNT_PENDING", {"cap": 20, "parts": ["now"]}, 1),
    ],
)
def test_queues_share_the_rows_that_are_read(
    tenants: psycopg.Connection, name: str, parameters: dict[str, object], most: int
) -> None:
    """Of 100 queues with 200 messages each, at most so many of each queue."""
    names = [f"queue-{number}" for number in range(100)]
    plan = steps_of(tenants, name, {"prefix": "", "queues": 1000, "names": names} | parameters)
    reads = [step for step in all_steps(plan) if step.get("Relation Name") == "message_live"]
    rows = sum((step["Actual Rows"] + step.get("Rows Removed by Filter", 0)) * step["Actual Loops"] for step in reads)
    assert 0 < rows < most * 100 + 1  # A plan rounds the rows of a loop.
    compared = sum(step.get("Rows Removed by Join Filter", 0) * step["Actual Loops"] for step in all_steps(plan))
    assert compared <= most * 100, "each message is compared with each breaker"


def test_only_the_newest_failures_are_read_under_a_generic_plan(db: psycopg.Connection) -> None:
    """A pooled connection gets this plan from its sixth page on. Old messages failed last."""
    db.execute(
        "INSERT INTO pgoutbox.message (topic, payload, state, attempt_count, finished_at, last_error)"
        " SELECT 'mail', '{}', 'failed', 1, now() - n * interval '1 min', 'error' FROM generate_series(1, 20000) AS n"
    )
    db.execute("VACUUM ANALYZE pgoutbox.message_failed")
    with db.transaction():
        prepare(db)
        db.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        db.execute("SELECT FROM pgoutbox.failures(newest => 1)")  # Fills the caches of the catalog.
        plan = plan_of(db, "SELECT FROM pgoutbox.failures(newest => 10)", {})
    assert pages_read(plan) < 60


def test_minutes_that_take_too_long_together_are_counted_one_by_one(
    db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_BUDGET_SECONDS", 0)
    seconds = "CASE WHEN %(to)s::timestamptz - %(from)s::timestamptz > interval '1 min' THEN 600 ELSE 0 END"
    monkeypatch.setattr(sql, "SENT_BY_TIME", f"SELECT %(from)s::timestamptz, 1, 1 FROM pg_sleep({seconds})")
    with db.transaction():
        prepare(db)
        found = history.History().sent(db, datetime.now(UTC), history.RANGES["1h"])
    assert len(found) > 2, "the last two minutes are counted again by the next request"
    assert all(counts == {1: 1} for counts in found.values())


def test_the_end_of_a_count_is_not_a_part_of_its_time(
    db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A RELEASE that is cancelled leaves the page without a transaction."""
    monkeypatch.setattr(history, "_BUDGET_SECONDS", 0)
    with db.transaction():
        prepare(db)
        with (tmp_path / "trace").open("w+") as trace:
            db.pgconn.trace(trace.fileno())
            history.History().sent(db, datetime.now(UTC), history.RANGES["1h"])
            db.pgconn.untrace()
            trace.seek(0)
            steps = re.findall(r"RELEASE|ROLLBACK TO|[0-9]+ms(?=')", trace.read())
    # A step that took too long is rolled back, which restores the timeout too.
    assert {"10ms", "300000ms", "RELEASE"} <= {*steps}
    assert ("10ms", "RELEASE") not in itertools.pairwise(steps)


@pytest.mark.parametrize("place", [0, 4, 9])
def test_a_minute_is_counted_at_its_end_and_when_it_is_settled(
    db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """A finish can commit after its minute. Between the two counts, no request counts the minute."""
    monkeypatch.setattr(history, "_BUDGET_SECONDS", PROCESS_PATIENCE_SECONDS)
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    minute = today - timedelta(minutes=30 - place)
    counted = history.History()

    def messages(after: timedelta, asked: str) -> int:
        with db.transaction():
            prepare(db)
            found = counted.sent(db, minute + after, history.RANGES[asked])
        return sum(latencies.total() for latencies in found.values())

    for asked in ("1h", "6h"):
        assert messages(timedelta(seconds=70), asked) == 0
    put(db, State.SENT)
    db.execute("UPDATE pgoutbox.message SET finished_at = %s", [minute])
    for asked in ("1h", "6h"):
        assert messages(timedelta(seconds=110), asked) == 0
        assert messages(timedelta(seconds=190), asked) == 1
    db.execute("DELETE FROM pgoutbox.message")
    for asked in ("1h", "6h"):
        assert messages(timedelta(minutes=20), asked) == 1, "a settled minute is not counted again"


def test_an_act_begins_a_new_count_of_the_depth(db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """A redriven message is pending again, so it must not count as an ended one, too."""
    monkeypatch.setattr(history, "_BUDGET_SECONDS", PROCESS_PATIENCE_SECONDS)
    failed = put(db, State.FAILED, age=timedelta(minutes=20))
    db.execute("UPDATE pgoutbox.message SET created_at = now() - interval '40 min'")
    counted = history.History()

    def highest() -> int:
        with db.transaction():
            prepare(db)
            return max(counted.depth(db, reads.now(db), history.RANGES["1h"], "default", 10).values())

    assert highest() == 1
    Operator(db).redrive(failed)
    assert highest() == 1


def test_a_search_counts_the_rows_that_it_has_read(db: psycopg.Connection) -> None:
    for _ in range(3):
        put(db)
    assert reads.search(db, NOWHERE, limit=1).looked_at == 3
    assert reads.count_near(db, NOWHERE).looked_at == 3


def test_only_messages_that_have_failed_an_attempt_count_as_retrying(db: psycopg.Connection) -> None:
    put(db)
    again, snoozed = put(db), put(db)
    db.execute("UPDATE pgoutbox.message SET lane = 1, attempt_count = 1 WHERE id = ANY (%s)", [[again, snoozed]])
    db.execute("UPDATE pgoutbox.message SET max_attempts = max_attempts + 1 WHERE id = %s", [snoozed])
    assert reads.count_pending(db, "again", "now") == {"again": Count(1), "now": Count(3)}


def test_the_cause_is_that_of_a_message_that_is_still_failed(db: psycopg.Connection) -> None:
    failed = put(db, State.FAILED)
    assert reads.cause_of(db, failed) is not None
    Operator(db).redrive(failed)
    assert reads.cause_of(db, failed) is None


def test_percentiles_exceed_the_exact_value_by_a_few_per_cent_at_most() -> None:
    assert percentiles([Counter()], [0.5]) == [None]
    half, most, all_of_them = percentiles([Counter({0: 98}), Counter({12: 1, 24: 1})], [0.5, 0.99, 1.0])
    assert half == pytest.approx(2 ** (1 / 12))
    assert most == pytest.approx(2 * 2 ** (1 / 12))
    assert all_of_them == pytest.approx(4 * 2 ** (1 / 12))

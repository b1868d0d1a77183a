"""Tests that the hot statements use their indexes under any statistics: no sequential scan, no sort of the backlog.

A plan is read from EXPLAIN. GENERIC_PLAN is newer than PostgreSQL 15, so the statements are prepared, and the
worker's own session settings (`sql.PREPARE_SESSION`) force the generic plan, before and after ANALYZE.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, LiteralString

import psycopg
import pytest
from pydantic import BaseModel, Field

from pgoutbox.database import operator_connection, sql
from pgoutbox.database.worker_connection import session_parameters
from pgoutbox.kernel import statements
from pgoutbox.settings import load_settings
from tests.support.messages import CLAIM_ALL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.conftest import Server

DONE_COUNT = 20_000
PENDING_COUNT = 2_000

FILL: LiteralString = """
INSERT INTO pgoutbox.message (
    id, topic, queue, payload, state, coalesce_key, key_in_flight, attempt_count, lane, claimed_at, worker, finished_at
)
SELECT
    i,
    'greet',
    CASE WHEN i %% 2 = 0 THEN 'default' ELSE 'bulk' END,
    '{}',
    s.state,
    CASE WHEN i %% 3 = 0 THEN 'k' || i END,
    CASE WHEN i %% 3 = 0 AND s.state = 'sending' THEN 'k' || i END,
    CASE WHEN s.state = 'pending' AND i %% 4 < 2 THEN 0 ELSE 1 END,
    CASE WHEN i %% 4 < 2 THEN 0 ELSE 1 END,
    now() - i / 50 * interval '1 ms',
    'w',
    CASE WHEN s.state = 'sent' THEN now() END
FROM (
    SELECT i, CASE WHEN i <= %(done)s THEN 'sent' WHEN i %% 10 = 0 THEN 'sending' ELSE 'pending' END AS state
    FROM generate_series(1, %(done)s + %(pending)s) AS i
) AS s
"""

HEADS: LiteralString = """
INSERT INTO pgoutbox.key_head (newest_id, scope, key)
SELECT m.id, m.topic, m.coalesce_key FROM pgoutbox.message AS m WHERE m.coalesce_key IS NOT NULL
"""

REQUESTS: LiteralString = """
INSERT INTO pgoutbox.cancel_request (message_id, message_created_at) SELECT i, now() FROM generate_series(1, 2000) AS i
"""

CLAIM_PARAMETERS: Mapping[str, object] = {
    "served": ["default", "bulk"],
    "queues": ["default", "default", "default", "bulk"],
    "lanes": [0, 1, 3, 0],
    "after_ats": [None] * 4,
    "after_ids": [0] * 4,
    "since_seconds": [1e9] * 4,
    "after_keys": [None, None, "", None],
    "known_lanes": [3],
    "known_keys": ["k1"],
    "key_limit": 500,
    "topics": ["greet", "bill"],
    "total": 200,
    "worker": "w",
    "lease_seconds": 60.0,
}
PROBE_PARAMETERS: Mapping[str, object] = {
    "queues": ["default", "bulk"],
    "topics": ["greet", "bill"],
    "worker": "w",
    "lease_seconds": 60.0,
    "probe_seconds": 60.0,
}
LAPSED_PARAMETERS: Mapping[str, object] = {
    "queues": ["default"],
    "topics": ["greet", "bill"],
    "hold_topics": [],
    "in_flight": "{}",
    "worker": "w",
    "total": 100,
    "suspects": 1,
    "lease_seconds": 60.0,
    "distance_seconds": 0.05,
    "hooks": "{}",
}
HELD_PARAMETERS: Mapping[str, object] = {
    "worker": "w",
    "ids": list(range(DONE_COUNT, DONE_COUNT + 200)),
    "attempt_counts": [1] * 200,
    "attempt_count": 1,
    "claimed_ats": [datetime.now(UTC)] * 200,
    "lease_seconds": 60.0,
    "after": None,
}
FINISH_PARAMETERS: Mapping[str, object] = {
    **HELD_PARAMETERS,
    "outcomes": ["retry"] * 200,
    "reasons": ["why"] * 200,
    "reason_codes": [None] * 200,
    "breaker_keys": [None] * 200,
    "error_places": [None] * 200,
    "delays": [1.0] * 200,
    "fails_after": [None] * 200,
    "held_delays": [1.0] * 200,
    "hooks": "{}",
}
SUCCESSOR_PARAMETERS: Mapping[str, object] = {
    "ids": [1, 2],
    "topics": ["greet", "greet"],
    "queues": ["default", "default"],
    "coalesce_keys": ["k3", None],
    "ordering_keys": [None, "o3"],
    "own_queues": ["default"],
    "own_topics": ["greet"],
}
DUE_PARAMETERS: Mapping[str, object] = {
    "queues": ["default", "bulk"],
    "topics": ["greet", "bill"],
    "since_seconds": 0,
    "others_since_seconds": 0,
}


class Node(BaseModel):
    """One node of a plan, as EXPLAIN (FORMAT JSON) writes it."""

    type: str = Field(alias="Node Type")
    relation: str | None = Field(None, alias="Relation Name")
    alias: str | None = Field(None, alias="Alias")
    index: str | None = Field(None, alias="Index Name")
    rows: float = Field(0, alias="Actual Rows")
    condition: str = Field("", alias="Index Cond")
    presorted: list[str] = Field([], alias="Presorted Key")
    children: list[Node] = Field([], alias="Plans")

    def walk(self) -> Iterator[Node]:
        """Yield this node and all nodes below it."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, slots=True)
class Plan:
    """All nodes of one plan."""

    nodes: tuple[Node, ...]

    def types(self) -> set[str]:
        """Return the kinds of its nodes."""
        return {node.type for node in self.nodes}

    def relations(self) -> set[str]:
        """Return the tables that it reads."""
        return {node.relation for node in self.nodes if node.relation is not None and "Scan" in node.type}

    def reads(self, relation: str, alias: str = "") -> list[Node]:
        """Return the scans of a table under the aliases that begin with `alias`."""
        return [
            node
            for node in self.nodes
            if node.relation == relation and (node.alias or "").startswith(alias) and "Scan" in node.type
        ]


@pytest.fixture(scope="module", params=["analyzed", "never analyzed"])
def filled(
    server: Server, template_of_today: Callable[[], str], request: pytest.FixtureRequest
) -> Iterator[psycopg.Connection]:
    """Open a worker's session on a database with many finished rows and a backlog."""
    with server.database(template=template_of_today()) as database:
        connection = psycopg.connect(server.dsn_for(database), autocommit=True)
        with connection:
            connection.execute("ALTER TABLE pgoutbox.message_live SET (autovacuum_enabled = off)")
            connection.execute("ALTER TABLE pgoutbox.message_done_default SET (autovacuum_enabled = off)")
            connection.execute("ALTER TABLE pgoutbox.key_head SET (autovacuum_enabled = off)")
            connection.execute(FILL, {"done": DONE_COUNT, "pending": PENDING_COUNT})
            connection.execute(HEADS)
            connection.execute("ALTER TABLE pgoutbox.claim SET (autovacuum_enabled = off)")
            connection.execute(CLAIM_ALL, {"lease": "0"})
            connection.execute("ALTER TABLE pgoutbox.cancel_request SET (autovacuum_enabled = off)")
            connection.execute(REQUESTS)
            if request.param == "analyzed":
                connection.execute("ANALYZE")
            connection.execute(sql.PREPARE_SESSION, session_parameters(load_settings()))
            yield connection
        connection.close()


@pytest.fixture(scope="module")
def empty(server: Server, template_of_today: Callable[[], str]) -> Iterator[psycopg.Connection]:
    """Open a worker's session on a database whose statistics say that there are no messages."""
    with server.database(template=template_of_today()) as database:
        connection = psycopg.connect(server.dsn_for(database), autocommit=True)
        with connection:
            connection.execute("VACUUM (ANALYZE) pgoutbox.message_live, pgoutbox.key_head")
            connection.execute(sql.PREPARE_SESSION, session_parameters(load_settings()))
            yield connection
        connection.close()


def plan_of(connection: psycopg.Connection, statement: LiteralString, parameters: Mapping[str, object]) -> Plan:
    """Return the generic plan of a statement, as the worker's prepared statement runs it."""
    names: list[str] = []

    def numbered(match: re.Match[str]) -> str:
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    text = re.sub(r"%\((\w+)\)s", numbered, statement)
    connection.execute(f"PREPARE hot AS {text}".encode())
    try:
        literals = b", ".join(psycopg.sql.Literal(parameters[name]).as_bytes(connection) for name in names)
        arguments = b"(" + literals + b")" if names else b""
        ((plans,),) = connection.execute(b"EXPLAIN (FORMAT JSON) EXECUTE hot " + arguments).fetchall()
    finally:
        connection.execute("DEALLOCATE hot")
    return Plan(tuple(Node.model_validate(plans[0]["Plan"]).walk()))


CLAIMS = [
    pytest.param(statements.CLAIM, CLAIM_PARAMETERS, id="claim"),
    pytest.param(statements.CLAIM_WITHOUT_KEYS, CLAIM_PARAMETERS, id="claim without keys"),
]
PROBE = pytest.param(statements.CLAIM_PROBE, PROBE_PARAMETERS, id="probe")
LAPSED = pytest.param(statements.LAPSED, LAPSED_PARAMETERS, id="lapsed")
FORGET_LAPSED = pytest.param(statements.FORGET_LAPSED, {}, id="forget lapsed")
FINISHES = [
    pytest.param(statements.FINISH_SENT, HELD_PARAMETERS, id="finish sent"),
    pytest.param(statements.FORGET_SENT, HELD_PARAMETERS, id="forget sent"),
    pytest.param(statements.FINISH, FINISH_PARAMETERS, id="finish"),
    pytest.param(statements.FINISH_AND_HOLD, FINISH_PARAMETERS, id="finish and hold"),
    pytest.param(sql.WATCH_IF_HELD, HELD_PARAMETERS, id="watch"),
]
OF_CLAIMS = [
    pytest.param(statements.END_CLAIMS, HELD_PARAMETERS, id="end claims"),
    pytest.param(sql.RENEW_CLAIMS, HELD_PARAMETERS, id="renew"),
    pytest.param(sql.UNANSWERED_ATTEMPTS, HELD_PARAMETERS, id="unanswered attempts"),
]
LIVE = [
    *CLAIMS,
    LAPSED,
    FORGET_LAPSED,
    *FINISHES,
    *OF_CLAIMS,
    pytest.param(statements.OVERTAKEN, HELD_PARAMETERS, id="overtaken"),
    pytest.param(statements.TELL_SUCCESSORS, SUCCESSOR_PARAMETERS, id="tell successors"),
    pytest.param(statements.NEXT_DUE, DUE_PARAMETERS, id="next due"),
    PROBE,
]
HOT = [*LIVE, pytest.param(statements.STATES, HELD_PARAMETERS, id="states")]
hot = pytest.mark.parametrize(("statement", "parameters"), HOT)
claims = pytest.mark.parametrize(("statement", "parameters"), CLAIMS)


@hot
def test_no_hot_statement_reads_a_whole_table(
    filled: psycopg.Connection, statement: LiteralString, parameters: Mapping[str, object]
) -> None:
    plan = plan_of(filled, statement, parameters)
    scanned = {node.relation for node in plan.nodes if node.type in {"Seq Scan", "Bitmap Heap Scan"}}
    # They have a row for each open breaker and each paused topic.
    assert scanned <= {"breaker", "topic_pause"}


@hot
def test_a_plan_for_an_empty_table_reads_no_whole_index_later(
    empty: psycopg.Connection, statement: LiteralString, parameters: Mapping[str, object]
) -> None:
    plan = plan_of(empty, statement, parameters)
    reads = [node for table in ("message_live", "message_failed", "claim", "key_head") for node in plan.reads(table)]
    # The sample has a limited number of pages.
    assert {"Index Scan", "Index Only Scan", "Tid Scan", "Sample Scan"} >= {node.type for node in reads}
    assert all(node.condition or node.type in {"Tid Scan", "Sample Scan"} for node in reads)


@pytest.mark.parametrize(("statement", "parameters"), LIVE)
def test_statements_for_live_messages_never_touch_finished_rows(
    filled: psycopg.Connection, statement: LiteralString, parameters: Mapping[str, object]
) -> None:
    plan = plan_of(filled, statement, parameters)
    # A failed message halts its ordering key.
    halting = {"message_failed"} if statement in (statements.CLAIM, statements.CLAIM_PROBE) else set()
    small = {"queue", "breaker", "topic_pause"}
    assert plan.relations() <= {"message_live", "key_head", "claim", "cancel_request"} | small | halting


@claims
def test_a_claim_reads_only_its_lanes_from_their_own_index(
    filled: psycopg.Connection, statement: LiteralString, parameters: Mapping[str, object]
) -> None:
    plan = plan_of(filled, statement, parameters)
    (lane,) = (node for node in plan.reads("message_live", "m") if node.index == "message_live_lane")
    assert "queue = lane.queue" in lane.condition
    assert "lane = lane.number" in lane.condition
    assert "<= now()" in lane.condition
    assert "> ROW(COALESCE(lane.after_at" in lane.condition, "the position is not an index condition"


def test_a_page_of_ordering_keys_leaps_along_their_index(filled: psycopg.Connection) -> None:
    """Under statistics that know no ordered messages too: the index of due times would read all keys of a queue."""
    plan = plan_of(filled, statements.CLAIM, CLAIM_PARAMETERS)
    ordered = [node for node in plan.reads("message_live") if node.index == "message_live_ordered"]
    # PostgreSQL before version 17 shows a number for the key.
    found = re.findall(r"ordering_key ([>=]) (?:v\w*\.key|\$\d+)", " ".join(node.condition for node in ordered))
    assert sorted(found) == ["=", ">"]
    (failed,) = plan.reads("message_failed")
    assert (failed.index, "ordering_key = " in failed.condition) == ("message_failed_ordered", True)
    assert {node.index for node in plan.reads("message_live", "s")} == {
        "message_live_in_flight",
        "message_live_ordered_in_flight",
    }


@pytest.mark.parametrize(("statement", "parameters"), [*CLAIMS, LAPSED])
def test_rows_are_written_by_their_place_and_heads_found_by_their_keys(
    filled: psycopg.Connection, statement: LiteralString, parameters: Mapping[str, object]
) -> None:
    plan = plan_of(filled, statement, parameters)
    assert [node.type for node in plan.reads("message_live")][-1] == "Tid Scan"
    assert {node.index for node in plan.reads("key_head")} == {"key_head_pkey"}


@claims
def test_a_claim_looks_up_siblings_in_flight_by_their_keys(
    filled: psycopg.Connection, statement: LiteralString, parameters: Mapping[str, object]
) -> None:
    plan = plan_of(filled, statement, parameters)
    siblings = [node for node in plan.reads("message_live", "s") if "topic" in node.condition]
    assert [node.index for node in siblings] == ["message_live_in_flight"]


@claims
def test_a_claim_sorts_only_its_locked_batch(
    filled: psycopg.Connection, statement: LiteralString, parameters: Mapping[str, object]
) -> None:
    plan = plan_of(filled, statement, parameters)
    below = [{n.type for n in node.walk() if n.relation} for node in plan.nodes if "Sort" in node.type]
    assert set() in below
    assert all(types <= {"Sample Scan", "Index Only Scan"} for types in below), "more than the locked batch is sorted"


def test_the_messages_of_one_lapsed_claim_after_the_other_are_sorted(filled: psycopg.Connection) -> None:
    """Until the batch is full."""
    plan = plan_of(filled, statements.LAPSED, LAPSED_PARAMETERS)
    (node,) = (node for node in plan.nodes if node.type in {"Sort", "Incremental Sort"})
    assert (node.type, node.presorted) == ("Incremental Sort", ["c.lease_expires_at"])


@pytest.mark.parametrize(("statement", "parameters"), [LAPSED, FORGET_LAPSED])
def test_lapsed_claims_are_found_by_their_lease_and_others_by_their_worker(
    filled: psycopg.Connection, statement: LiteralString, parameters: Mapping[str, object]
) -> None:
    plan = plan_of(filled, statement, parameters)
    found = [node for node in plan.reads("claim") if node.type != "Tid Scan"]
    assert {node.index for node in found} == {"claim_lease", "claim_pkey"}
    assert all(node.condition for node in found), "all claims are read"


def test_the_next_due_time_is_read_from_the_head_of_each_lane(filled: psycopg.Connection) -> None:
    plan = plan_of(filled, statements.NEXT_DUE, DUE_PARAMETERS)
    assert [node.index for node in plan.reads("claim")] == ["claim_lease"]
    reads = plan.reads("message_live")
    assert {node.index for node in reads} == {
        "message_live_lane",
        "message_live_ordered",
        "message_live_ordered_due",
    }
    assert all("queue = asked.name" in node.condition for node in reads)
    assert not plan.types() & {"Sort", "Incremental Sort"}


@pytest.mark.parametrize(("statement", "parameters"), [*FINISHES, *OF_CLAIMS[::2], LAPSED, FORGET_LAPSED])
def test_attempts_in_flight_are_found_by_primary_key(
    filled: psycopg.Connection, statement: LiteralString, parameters: Mapping[str, object]
) -> None:
    plan = plan_of(filled, statement, parameters)
    reads = [node for node in plan.reads("message_live") if node.type != "Tid Scan"]
    assert {node.index for node in reads} == {"message_live_pkey"}
    assert all(node.condition for node in reads), "the whole index is read"


@pytest.mark.slow
@pytest.mark.parametrize(("statement", "parameters"), [*FINISHES, *OF_CLAIMS[:2]])
def test_a_finish_sorts_nothing_and_finds_claims_by_primary_key(
    filled: psycopg.Connection, statement: LiteralString, parameters: Mapping[str, object]
) -> None:
    plan = plan_of(filled, statement, parameters)
    # A dollar sign shows that this is the generic plan, as the worker runs it.
    assert any("$" in node.condition for node in plan.nodes)
    found = [node for node in plan.reads("claim") if node.type != "Tid Scan"]
    assert {node.index for node in found} <= {"claim_pkey"}
    if statement != sql.RENEW_CLAIMS:  # PostgreSQL 15 reads the claims of the worker, which are few, once.
        assert all(node.condition.count("=") >= 2 for node in found), "all claims of the worker are read"
    # Only the holds of its batch are sorted, of which only a batch with failures has any.
    assert statement == statements.FINISH_AND_HOLD or not plan.types() & {"Sort", "Incremental Sort"}


IN_FLIGHT_COUNT = 1_699
GAUGE_PARAMETERS: Mapping[str, object] = {
    "max_label_values": 100,
    "other": "other",
    "prefix": "",
    "queues": 100_000,
    "rows": 100_000,
    "served": ["hooks"],
    "cap": 1_000,
}


@pytest.fixture(params=["analyzed", "never analyzed"])
def monitored(rolled_back: psycopg.Connection, request: pytest.FixtureRequest) -> psycopg.Connection:
    """Return a transaction of the gauges on a database with a backlog and failed messages."""
    rolled_back.execute(FILL, {"done": 10, "pending": 20_000})
    rolled_back.execute(
        "UPDATE pgoutbox.message SET state = 'failed', finished_at = now() - (id - 999) * interval '1 min',"
        " attempt_count = 1,"
        " key_in_flight = NULL WHERE id BETWEEN 1000 AND 4000"
    )
    rolled_back.execute(CLAIM_ALL, {"lease": "0"})
    if request.param == "analyzed":
        rolled_back.execute("ANALYZE pgoutbox.message, pgoutbox.claim")
    with operator_connection.limiting(30):
        operator_connection.prepare(rolled_back)
    rolled_back.execute(sql.PREPARE_PAGE)
    return rolled_back


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "indexes", "most"),
    [
        pytest.param(
            sql.OLDEST_DUE,
            {
                "message_live_lane",
                "message_live_ordered",
                "message_live_ordered_due",
                "message_live_waiting",
            },
            1,
            id="oldest due",
        ),
        pytest.param(
            sql.OLDEST_UNDELIVERED,
            {
                "message_live_lane",
                "message_live_ordered",
                "message_live_ordered_due",
            },
            1_000,
            id="oldest undelivered",
        ),
        pytest.param(
            sql.COUNT_DUE_ELSEWHERE,
            {
                "message_live_lane",
                "message_live_ordered",
                "message_live_ordered_due",
            },
            1_000,
            id="due elsewhere",
        ),
        pytest.param(sql.OLDEST_ATTEMPTS, {"message_live_pkey"}, IN_FLIGHT_COUNT, id="oldest attempts"),
        pytest.param(sql.COUNT_LATELY_FAILED, {"message_failed_finished_at"}, 60, id="lately failed"),
    ],
)
def test_the_gauges_of_alerts_read_few_rows_of_a_backlog(
    monitored: psycopg.Connection, statement: LiteralString, indexes: set[str], most: int
) -> None:
    explain = f"EXPLAIN (ANALYZE, FORMAT JSON, TIMING OFF) {statement}".encode()
    ((plans,),) = monitored.execute(explain, GAUGE_PARAMETERS).fetchall()
    nodes = list(Node.model_validate(plans[0]["Plan"]).walk())
    reads = [node for node in nodes if node.relation in ("message_live", "message_failed")]
    assert {node.index for node in reads} == indexes
    assert max(node.rows for node in reads) <= most

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
    "queue": "default",
    "topics": ["greet", "bill"],
    "hold_topics": [],
    "total": 200,
    "after_due_at": None,
    "after_id": 0,
    "since_seconds": 1e9,
    "in_flight": "{}",
    "queues": ["default"],
    "distance_seconds": 0.05,
    "worker": "w",
    "lease_seconds": 60.0,
    "hooks": "{}",
}

HELD_PARAMETERS: Mapping[str, object] = {
    "worker": "w",
    "ids": list(range(DONE_COUNT, DONE_COUNT + 200)),
    "attempt_counts": [1] * 200,
    "attempt_count": 1,
    "claimed_ats": [datetime.now(UTC)] * 200,
    "lease_seconds": 60.0,
    "ended_claims": [],
    "after": None,
    "lock_timeout": "20ms",
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
    "hooks": "{}",
}
SUCCESSOR_PARAMETERS: Mapping[str, object] = {
    "ids": [1, 2],
    "topics": ["greet", "greet"],
    "queues": ["default", "default"],
    "coalesce_keys": ["k3", None],
    "ordering_keys": [None, "o3"],
    "own_topics": ["greet"],
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
            connection.execute("VACUUM (ANALYZE) pgoutbox.message_live")
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


LANES = [
    pytest.param(sql.CLAIM_FRESH, "message_live_lane", id="fresh"),
    pytest.param(sql.CLAIM_FRESH_BY_PERMITS, "message_live_lane", id="fresh by permits"),
    pytest.param(sql.CLAIM_RETRIES, "message_live_lane", id="retries"),
    pytest.param(sql.CLAIM_RETRIES_BY_PERMITS, "message_live_lane", id="retries by permits"),
    pytest.param(sql.CLAIM_LAPSED, "claim_lease", id="lapsed"),
    pytest.param(sql.END_LAPSED, "claim_lease", id="end lapsed"),
]


@pytest.mark.parametrize(("statement", "index"), LANES)
def test_a_claim_reads_only_its_lane_from_its_own_index(
    filled: psycopg.Connection, statement: LiteralString, index: str
) -> None:
    plan = plan_of(filled, statement, CLAIM_PARAMETERS)
    *found, updated = plan.reads("message_live", "m")
    (lane,) = plan.reads("claim", "c") if index == "claim_lease" else found
    assert (lane.index, updated.type) == (index, "Tid Scan")
    # A dollar sign shows that this is the generic plan, as the worker runs it.
    assert index == "claim_lease" or re.search(r"queue = \$\d", lane.condition)
    assert "<= now()" in lane.condition
    if index == "message_live_lane":
        assert re.search(r"> ROW\(COALESCE\(\$\d", lane.condition), "the position is not an index condition"


@pytest.mark.parametrize(
    ("statement", "parameters"),
    [
        *(pytest.param(lane.values[0], CLAIM_PARAMETERS, id=f"claim {lane.id}") for lane in LANES),
        pytest.param(sql.FINISH_SENT_IF_HELD, HELD_PARAMETERS, id="finish sent"),
        pytest.param(sql.OVERTAKEN, HELD_PARAMETERS, id="overtaken"),
        pytest.param(sql.FINISH_SENT_AND_FORGET_IF_HELD, HELD_PARAMETERS, id="finish sent and forget"),
        pytest.param(sql.FINISH_IF_HELD, FINISH_PARAMETERS, id="finish"),
        pytest.param(sql.WATCH_IF_HELD, HELD_PARAMETERS, id="watch"),
        pytest.param(sql.CLAIM_ORDERED, {**CLAIM_PARAMETERS, "ids": [1, 2, 3]}, id="claim ordered"),
        pytest.param(sql.FIND_NEW_ORDERED, {**CLAIM_PARAMETERS, "key_limit": 100}, id="find new ordered"),
        pytest.param(sql.UNANSWERED_ATTEMPTS, HELD_PARAMETERS, id="unanswered attempts"),
        pytest.param(sql.FORGET_LAPSED, CLAIM_PARAMETERS, id="forget lapsed"),
        pytest.param(sql.CURRENT_STATES, HELD_PARAMETERS, id="current states"),
        pytest.param(sql.QUEUES_OF_SUCCESSORS, SUCCESSOR_PARAMETERS, id="queues of successors"),
    ],
)
def test_a_plan_for_an_empty_table_reads_no_whole_index_later(
    empty: psycopg.Connection, statement: LiteralString, parameters: Mapping[str, object]
) -> None:
    plan = plan_of(empty, statement, parameters)
    reads = [*plan.reads("message_live"), *plan.reads("message_failed")]
    assert {"Index Scan", "Index Only Scan", "Tid Scan"} >= {node.type for node in reads}
    assert all(node.condition or node.type == "Tid Scan" for node in reads)


@pytest.mark.parametrize(("statement", "index"), LANES)
def test_a_claim_looks_up_siblings_in_flight_and_heads_by_their_keys(
    filled: psycopg.Connection, statement: LiteralString, index: str
) -> None:
    plan = plan_of(filled, statement, CLAIM_PARAMETERS)
    if index != "claim_lease":
        assert {node.index for node in plan.reads("message_live", "s")} == {"message_live_in_flight"}
    assert {node.index for node in plan.reads("key_head", "head")} == {"key_head_pkey"}


@pytest.mark.parametrize(("statement", "index"), LANES)
def test_a_claim_sorts_only_its_locked_batch(filled: psycopg.Connection, statement: LiteralString, index: str) -> None:
    plan = plan_of(filled, statement, CLAIM_PARAMETERS)
    (node,) = (node for node in plan.nodes if node.type in {"Sort", "Incremental Sort"})
    if index == "claim_lease":
        # The messages of one lapsed claim after the other are sorted, until the batch is full.
        assert (node.type, node.presorted) == ("Incremental Sort", ["c.lease_expires_at"])
    else:
        assert all(below.relation is None for below in node.walk()), "more than the locked batch is sorted"


def test_the_next_due_time_is_read_from_the_head_of_each_lane(filled: psycopg.Connection) -> None:
    plan = plan_of(
        filled,
        sql.NEXT_DUE,
        {"queues": ["default", "bulk"], "since_seconds": 0, "others_since_seconds": 0},
    )
    assert [node.index for node in plan.reads("claim")] == ["claim_lease"]
    assert {node.index for node in plan.reads("message_live")} == {
        "message_live_lane",
        "message_live_ordered",
        "message_live_ordered_due",
    }
    assert not plan.types() & {"Sort", "Incremental Sort"}


@pytest.mark.parametrize(
    ("statement", "parameters"),
    [
        pytest.param(sql.FINISH_SENT_IF_HELD, HELD_PARAMETERS, id="finish sent"),
        pytest.param(sql.FINISH_SENT_AND_FORGET_IF_HELD, HELD_PARAMETERS, id="finish sent and forget"),
        pytest.param(sql.FINISH_IF_HELD, FINISH_PARAMETERS, id="finish"),
        pytest.param(sql.WATCH_IF_HELD, HELD_PARAMETERS, id="watch"),
        pytest.param(sql.UNANSWERED_ATTEMPTS, HELD_PARAMETERS, id="unanswered attempts"),
        pytest.param(sql.CLAIM_LAPSED, CLAIM_PARAMETERS, id="claim lapsed"),
        pytest.param(sql.END_LAPSED, CLAIM_PARAMETERS, id="end lapsed"),
        pytest.param(sql.FORGET_LAPSED, CLAIM_PARAMETERS, id="forget lapsed"),
    ],
)
def test_attempts_in_flight_are_found_by_primary_key(
    filled: psycopg.Connection, statement: LiteralString, parameters: Mapping[str, object]
) -> None:
    plan = plan_of(filled, statement, parameters)
    reads = [node for node in plan.reads("message_live") if node.type != "Tid Scan"]
    assert {node.index for node in reads} == {"message_live_pkey"}
    assert all(node.condition for node in reads), "the whole index is read"


@pytest.mark.slow
@pytest.mark.parametrize(
    "statement",
    [
        pytest.param(sql.FINISH_SENT_IF_HELD, id="finish sent"),
        pytest.param(sql.FINISH_SENT_AND_FORGET_IF_HELD, id="finish sent and forget"),
        pytest.param(sql.FINISH_IF_HELD, id="finish"),
        pytest.param(sql.WATCH_IF_HELD, id="watch"),
        pytest.param(sql.RENEW_CLAIMS, id="renew"),
        pytest.param(sql.END_CLAIMS, id="end claims"),
    ],
)
def test_a_finish_sorts_nothing_and_finds_claims_by_primary_key(
    filled: psycopg.Connection, statement: LiteralString
) -> None:
    plan = plan_of(filled, statement, FINISH_PARAMETERS)
    found = [node for node in plan.reads("claim") if node.type != "Tid Scan"]
    assert {node.index for node in found} <= {"claim_pkey"}
    if statement != sql.RENEW_CLAIMS:  # PostgreSQL 15 reads the claims of the worker, which are few, once.
        assert all(node.condition.count("=") >= 2 for node in found), "all claims of the worker are read"
    assert not plan.types() & {"Sort", "Incremental Sort"}


def test_an_ordering_key_is_looked_up_by_its_index_alone(filled: psycopg.Connection) -> None:
    """Under statistics that know no ordered messages too: the index of due times would read all keys of a queue."""
    plan = plan_of(filled, sql.CLAIM_ORDERED, {**CLAIM_PARAMETERS, "ids": [DONE_COUNT + 1]})
    (earlier,) = plan.reads("message_live", "earlier")
    assert earlier.index == "message_live_ordered"
    assert "ordering_key = " in earlier.condition


@pytest.mark.parametrize(
    ("statement", "parameters"),
    [
        pytest.param(sql.CLAIM_FRESH, CLAIM_PARAMETERS, id="claim fresh"),
        pytest.param(sql.CLAIM_RETRIES_BY_PERMITS, CLAIM_PARAMETERS, id="claim retries by permits"),
        pytest.param(sql.CLAIM_LAPSED, CLAIM_PARAMETERS, id="claim lapsed"),
        pytest.param(sql.END_LAPSED, CLAIM_PARAMETERS, id="end lapsed"),
        pytest.param(
            sql.NEXT_DUE,
            {"queues": ["default"], "since_seconds": 0, "others_since_seconds": 0},
            id="next due",
        ),
        pytest.param(sql.FINISH_SENT_IF_HELD, HELD_PARAMETERS, id="finish sent"),
        pytest.param(sql.FINISH_SENT_AND_FORGET_IF_HELD, HELD_PARAMETERS, id="finish sent and forget"),
        pytest.param(sql.FINISH_IF_HELD, FINISH_PARAMETERS, id="finish"),
        pytest.param(sql.CURRENT_STATES, HELD_PARAMETERS, id="current states"),
        pytest.param(sql.QUEUES_OF_SUCCESSORS, SUCCESSOR_PARAMETERS, id="queues of successors"),
        pytest.param(sql.RENEW_CLAIMS, HELD_PARAMETERS, id="renew"),
        pytest.param(sql.END_CLAIMS, HELD_PARAMETERS, id="end claims"),
        pytest.param(sql.FORGET_LAPSED, CLAIM_PARAMETERS, id="forget lapsed"),
        pytest.param(sql.UNANSWERED_ATTEMPTS, HELD_PARAMETERS, id="unanswered attempts"),
        pytest.param(sql.WATCH_IF_HELD, HELD_PARAMETERS, id="watch"),
    ],
)
def test_no_hot_statement_reads_a_whole_table(
    filled: psycopg.Connection, statement: LiteralString, parameters: Mapping[str, object]
) -> None:
    plan = plan_of(filled, statement, parameters)
    assert not plan.types() & {"Seq Scan", "Bitmap Heap Scan"}


@pytest.mark.parametrize(
    ("statement", "parameters"),
    [
        pytest.param(sql.CLAIM_FRESH, CLAIM_PARAMETERS, id="claim fresh"),
        pytest.param(sql.CLAIM_RETRIES_BY_PERMITS, CLAIM_PARAMETERS, id="claim retries by permits"),
        pytest.param(sql.CLAIM_LAPSED, CLAIM_PARAMETERS, id="claim lapsed"),
        pytest.param(sql.END_LAPSED, CLAIM_PARAMETERS, id="end lapsed"),
        pytest.param(sql.FINISH_SENT_IF_HELD, HELD_PARAMETERS, id="finish sent"),
        pytest.param(sql.FINISH_IF_HELD, FINISH_PARAMETERS, id="finish"),
    ],
)
def test_statements_for_live_messages_never_touch_finished_rows(
    filled: psycopg.Connection, statement: LiteralString, parameters: Mapping[str, object]
) -> None:
    plan = plan_of(filled, statement, parameters)
    assert plan.relations() <= {"message_live", "key_head", "queue", "claim", "cancel_request"}


IN_FLIGHT_COUNT = 1_699
GAUGE_PARAMETERS: Mapping[str, object] = {"max_label_values": 100, "other": "other", "prefix": "", "queues": 100_000}


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

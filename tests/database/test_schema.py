"""Tests the guarantees of the schema itself for any writer: valid rows, known outcomes, comments, no privileges for
PUBLIC."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, LiteralString

import psycopg
import pytest

from pgoutbox.message import FINAL_STATES, AttemptOutcome, State
from pgoutbox.operations import Operator
from tests.support.messages import PUT_SENDING
from tests.support.outbox_actions import cancel, enqueue, lapse, redrive, state_of
from tests.support.transitions import TRANSITIONS
from tests.support.worker_sql import End, claim, finish, finish_sent

if TYPE_CHECKING:
    from collections.abc import Callable

SOUND_ROWS: dict[str, LiteralString] = {
    "pending": "INSERT INTO pgoutbox.message (id, topic, payload) VALUES (-1, 't', '1')",
    "sending": """
        INSERT INTO pgoutbox.message (id, topic, payload, state, attempt_count, claimed_at, worker)
        VALUES (-1, 't', '1', 'sending', 1, now(), 'w')
    """,
    "sent": """
        INSERT INTO pgoutbox.message (id, topic, payload, state, attempt_count, claimed_at, worker, finished_at)
        VALUES (-1, 't', '1', 'sent', 1, now(), 'w', now())
    """,
    "failed": """
        INSERT INTO pgoutbox.message (id, topic, payload, state, attempt_count, finished_at)
        VALUES (-1, 't', '1', 'failed', 1, now())
    """,
    "skipped": """
        INSERT INTO pgoutbox.message (id, topic, payload, state, skip_reason, finished_at)
        VALUES (-1, 't', '1', 'skipped', 'superseded by 7', now())
    """,
    "cancelled": """
        INSERT INTO pgoutbox.message (id, topic, payload, state, finished_at)
        VALUES (-1, 't', '1', 'cancelled', now())
    """,
}

UNSOUND_CHANGES: list[tuple[str, LiteralString, str]] = [
    ("pending", "key_in_flight = 'k', coalesce_key = 'k'", "message_live_sound"),
    ("pending", "lane = 1", "message_live_sound"),
    ("pending", "attempt_count = 1", "message_live_sound"),
    ("pending", "finished_at = now()", "message_live_sound"),
    ("pending", "available_at = 'infinity'", "message_live_sound"),
    ("pending", "available_at = '-infinity'", "message_live_sound"),
    ("sending", "coalesce_key = 'k'", "message_live_sound"),
    ("sending", "ordering_key = 'k'", "message_live_sound"),
    ("sending", "key_in_flight = 'k'", "message_live_sound"),
    ("sending", "claimed_at = NULL", "message_live_sound"),
    ("sending", "worker = NULL", "message_live_sound"),
    ("sending", "attempt_count = 0", "message_live_sound"),
    ("sending", "finished_at = now()", "message_live_sound"),
    ("sent", "key_in_flight = 'k'", "message_done_sound"),
    ("sent", "attempt_count = 0", "message_done_sound"),
    ("sent", "worker = NULL", "message_done_sound"),
    ("sent", "claimed_at = NULL", "message_done_sound"),
    ("sent", "skip_reason = 'why'", "message_done_sound"),
    ("sent", "superseded_by = 7", "message_done_sound"),
    ("failed", "finished_at = NULL", "message_failed_sound"),
    ("failed", "key_in_flight = 'k'", "message_failed_sound"),
    ("failed", "attempt_count = 0", "message_failed_sound"),
    ("failed", "skip_reason = 'why'", "message_failed_sound"),
    ("skipped", "skip_reason = NULL", "message_done_sound"),
    ("skipped", "superseded_by = id", "message_done_sound"),
    ("skipped", "superseded_by = id - 1", "message_done_sound"),
    ("cancelled", "skip_reason = 'why'", "message_done_sound"),
    ("cancelled", "superseded_by = 7", "message_done_sound"),
    ("cancelled", "key_in_flight = 'k'", "message_done_sound"),
]


@pytest.mark.parametrize("state", list(State))
def test_a_valid_row_of_every_state_is_accepted(rolled_back: psycopg.Connection, state: State) -> None:
    rolled_back.execute(SOUND_ROWS[state])
    assert state_of(rolled_back, -1) == state


@pytest.mark.parametrize(("state", "change", "constraint"), UNSOUND_CHANGES)
def test_an_invalid_row_is_refused(
    rolled_back: psycopg.Connection, state: str, change: LiteralString, constraint: str
) -> None:
    rolled_back.execute(SOUND_ROWS[state])
    with pytest.raises(psycopg.errors.CheckViolation) as caught:
        rolled_back.execute(f"UPDATE pgoutbox.message SET {change} WHERE id = -1")
    assert caught.value.diag.constraint_name == constraint


@pytest.mark.parametrize("state", [State.SENT, State.SKIPPED, State.CANCELLED])
def test_a_final_row_has_the_time_of_its_end(rolled_back: psycopg.Connection, state: State) -> None:
    rolled_back.execute(SOUND_ROWS[state])
    with pytest.raises(psycopg.errors.NotNullViolation):
        rolled_back.execute("UPDATE pgoutbox.message SET finished_at = NULL WHERE id = -1")


def test_a_row_with_an_unknown_state_is_refused(rolled_back: psycopg.Connection) -> None:
    with pytest.raises(psycopg.errors.CheckViolation, match="no partition"):
        rolled_back.execute("INSERT INTO pgoutbox.message (id, topic, payload, state) VALUES (-1, 't', '1', 'lost')")


@pytest.mark.parametrize(
    ("column", "index"),
    [("coalesce_key", "message_live_in_flight"), ("ordering_key", "message_live_ordered_in_flight")],
)
def test_two_messages_of_one_key_cannot_be_in_flight(
    rolled_back: psycopg.Connection, column: LiteralString, index: str
) -> None:
    rolled_back.execute(SOUND_ROWS["sending"])
    rolled_back.execute(f"UPDATE pgoutbox.message SET {column} = 'k', key_in_flight = 'k' WHERE id = -1")
    with pytest.raises(psycopg.errors.UniqueViolation) as caught:
        rolled_back.execute(
            f"""
            INSERT INTO pgoutbox.message
                (id, topic, payload, state, attempt_count, claimed_at, worker, {column}, key_in_flight)
            VALUES (-2, 't', '1', 'sending', 1, now(), 'w', 'k', 'k')
            """
        )
    assert caught.value.diag.constraint_name == index


def test_a_coalesce_key_and_an_equal_ordering_key_can_be_in_flight_at_once(rolled_back: psycopg.Connection) -> None:
    coalesced = enqueue(rolled_back, "t", coalesce_key="k", queue="t")
    ordered = enqueue(rolled_back, "t", ordering_key="k", queue="t")
    rolled_back.execute(PUT_SENDING, [coalesced])
    rolled_back.execute(PUT_SENDING, [ordered])
    assert [state_of(rolled_back, message_id) for message_id in (coalesced, ordered)] == ["sending", "sending"]


def test_the_partitions_cover_the_states_of_the_state_machine(rolled_back: psycopg.Connection) -> None:
    bounds: dict[str, str] = dict(
        rolled_back.execute(
            """
            SELECT c.relname::text, pg_get_expr(c.relpartbound, c.oid)
            FROM pg_inherits AS i
            JOIN pg_class AS c ON c.oid = i.inhrelid
            WHERE i.inhparent = 'pgoutbox.message'::regclass
            """
        ).fetchall()
    )
    held = {name: set(re.findall(r"'(\w+)'", bound)) for name, bound in bounds.items()}
    assert held == {
        "message_live": set(State) - FINAL_STATES,
        "message_failed": {State.FAILED},
        "message_done": FINAL_STATES - {State.FAILED},
    }


def test_every_state_has_its_transitions_and_those_without_one_are_final() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {state for state, targets in TRANSITIONS.items() if not targets} <= FINAL_STATES
    assert TRANSITIONS[State.SENT] == frozenset()


def _observed_transitions(connection: psycopg.Connection) -> set[tuple[str, str]]:
    """Return every change of state that the statements make of messages in each situation."""
    seen: set[tuple[str, str]] = set()

    def observe(message_id: int, act: Callable[[], object]) -> None:
        before = state_of(connection, message_id)
        act()
        seen.add((before, state_of(connection, message_id)))

    def fresh(**options: str) -> int:
        return enqueue(connection, coalesce_key=options.get("coalesce_key"))

    def held() -> int:
        message_id = fresh()
        observe(message_id, lambda: claim(connection))
        return message_id

    for outcome in (AttemptOutcome.RETRY, AttemptOutcome.FAILED, AttemptOutcome.SKIPPED):
        message_id = held()
        observe(message_id, lambda: finish(connection, End(message_id, 1, outcome, "why", 3600.0)))  # noqa: B023 - runs at once
    observe(message_id := held(), lambda: finish_sent(connection, (message_id, 1)))

    message_id = held()
    lapse(connection, message_id)
    observe(message_id, lambda: claim(connection))

    message_id = held()
    cancel(connection, message_id)
    observe(message_id, lambda: finish(connection, End(message_id, 1, AttemptOutcome.RETRY, "why")))
    observe(message_id, lambda: redrive(connection, message_id))
    observe(message_id, lambda: cancel(connection, message_id))

    message_id = held()
    finish(connection, End(message_id, 1, AttemptOutcome.FAILED, "why"))
    observe(message_id, lambda: redrive(connection, message_id))

    message_id = held()
    finish(connection, End(message_id, 1, AttemptOutcome.FAILED, "why"))
    observe(message_id, lambda: Operator(connection).dismiss(message_id, "why"))

    message_id = fresh(coalesce_key="k")
    fresh(coalesce_key="k")
    observe(message_id, lambda: claim(connection))
    return seen


def test_the_statements_make_exactly_the_transitions_of_the_state_machine(rolled_back: psycopg.Connection) -> None:
    allowed = {(state.value, target.value) for state, targets in TRANSITIONS.items() for target in targets}
    assert _observed_transitions(rolled_back) == allowed


def test_every_table_column_and_public_function_has_a_comment(rolled_back: psycopg.Connection) -> None:
    bare = rolled_back.execute(
        """
        SELECT c.oid::regclass::text
        FROM pg_class AS c
        WHERE c.relnamespace = 'pgoutbox'::regnamespace
            AND c.relkind IN ('r', 'p')
            AND c.relname <> 'alembic_version'
            AND c.relname !~ '^message_done_([0-9]{8}|default)$'
            AND obj_description(c.oid, 'pg_class') IS NULL
        UNION ALL
        SELECT format('%s.%s', c.oid::regclass, a.attname)
        FROM pg_class AS c
        JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
        WHERE c.relnamespace = 'pgoutbox'::regnamespace
            AND c.relkind IN ('r', 'p')
            AND NOT c.relispartition
            AND c.relname <> 'alembic_version'
            AND col_description(c.oid, a.attnum) IS NULL
        UNION ALL
        SELECT p.oid::regprocedure::text
        FROM pg_proc AS p
        WHERE p.pronamespace = 'pgoutbox'::regnamespace
            AND p.proname !~ '^_'
            AND obj_description(p.oid, 'pg_proc') IS NULL
        """
    ).fetchall()
    assert bare == []


def test_every_body_of_a_function_is_valid(rolled_back: psycopg.Connection) -> None:
    """The migration creates them without this check, because they call each other."""
    rolled_back.execute("SET LOCAL check_function_bodies = on")
    definitions = rolled_back.execute(
        "SELECT pg_get_functiondef(p.oid) FROM pg_proc AS p WHERE p.pronamespace = 'pgoutbox'::regnamespace"
    ).fetchall()
    assert len(definitions) > 100
    for (definition,) in definitions:
        rolled_back.execute(definition.encode())


def test_only_the_owner_calls_a_function_that_resolves_names_in_its_callers_path(
    rolled_back: psycopg.Connection,
) -> None:
    """The names of a body without quotes are resolved when the function is created."""
    open_to = rolled_back.execute(
        """
        SELECT p.proname::text, r.rolname::text
        FROM pg_proc AS p
        CROSS JOIN pg_roles AS r
        WHERE p.pronamespace = 'pgoutbox'::regnamespace
            AND p.prosqlbody IS NULL
            AND NOT coalesce(p.proconfig @> ARRAY['search_path=pg_catalog, pg_temp'], false)
            AND r.rolname IN ('pgoutbox_producer', 'pgoutbox_worker', 'pgoutbox_operator', 'pgoutbox_viewer')
            AND has_function_privilege(r.oid, p.oid, 'EXECUTE')
        """
    ).fetchall()
    # The first runs for each row, and a pin of the second would undo its RESET ALL: they qualify their names instead.
    assert {name for name, _ in open_to} == {"_redacted_text", "_reset_session"}


def test_no_statement_of_a_function_without_sequential_scans_is_compiled(rolled_back: psycopg.Connection) -> None:
    """Before PostgreSQL 18, one such scan exceeds the cost from which a server with JIT compiles, in each call."""
    functions = {
        name: "jit=off" in settings
        for name, settings in rolled_back.execute(
            "SELECT p.proname::text, p.proconfig FROM pg_proc AS p"
            " WHERE p.pronamespace = 'pgoutbox'::regnamespace AND p.proconfig @> ARRAY['enable_seqscan=off']"
        ).fetchall()
    }
    assert "_enqueue" in functions
    assert [name for name, is_pinned in functions.items() if not is_pinned] == []


def test_live_messages_have_no_more_indexes_than_claims_need(rolled_back: psycopg.Connection) -> None:
    indexes = rolled_back.execute(
        "SELECT indexname::text FROM pg_indexes WHERE schemaname = 'pgoutbox' AND tablename = 'message_live' ORDER BY 1"
    ).fetchall()
    assert [name for (name,) in indexes] == [
        "message_live_admitted",  # Partial: messages without a fair key are neither in it nor in message_live_waiting.
        "message_live_content_id_idx",
        "message_live_in_flight",
        "message_live_lane",
        "message_live_ordered",
        "message_live_ordered_due",
        "message_live_ordered_in_flight",
        "message_live_owner_id_idx",  # Partial: messages without an owner are not in it.
        "message_live_pkey",
        "message_live_waiting",
    ]


def test_every_indexed_text_has_the_collation_c(rolled_back: psycopg.Connection) -> None:
    """The order of any other collation changes with the server's libraries, and indexes then hold keys twice."""
    rows = rolled_back.execute(
        """
        SELECT format('%s.%s', c.relname, a.attname), a.attcollation = '"C"'::regcollation
        FROM pg_index AS i
        JOIN pg_class AS c ON c.oid = i.indrelid
        CROSS JOIN unnest(i.indkey::smallint[]) WITH ORDINALITY AS key(number, place)
        JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = key.number
        WHERE c.relnamespace = 'pgoutbox'::regnamespace AND a.attcollation <> 0 AND c.relname <> 'alembic_version'
            -- An included column has no order.
            AND key.place <= i.indnkeyatts
        """
    ).fetchall()
    columns: dict[str, bool] = dict(rows)
    assert [column for column, is_c in columns.items() if not is_c] == []
    assert {
        "key_head.scope", "key_head.key", "dedupe.topic", "dedupe.dedupe_key",
        "message_live.topic", "message_live.key_in_flight", "message_live.queue",
        "message_live.ordering_key", "message_failed.queue", "message_failed.ordering_key", "queue.name",
        "claim.queue", "claim.worker", "retention.topic", "breaker.key",
    } <= columns.keys()  # fmt: skip
    kept: dict[str, bool] = dict(
        rolled_back.execute(
            """
            SELECT a.attname, bool_and(a.attcollation = '"C"'::regcollation)
            FROM pg_attribute AS a
            JOIN pg_class AS c ON c.oid = a.attrelid
            WHERE c.relnamespace = 'pgoutbox'::regnamespace AND c.relkind IN ('r', 'p')
                AND a.attname IN ('coalesce_key', 'dedupe_key', 'ordering_key', 'topic', 'queue')
                AND c.relname <> 'audit'
            GROUP BY a.attname
            """
        ).fetchall()
    )
    assert kept == dict.fromkeys(["coalesce_key", "dedupe_key", "ordering_key", "topic", "queue"], True)

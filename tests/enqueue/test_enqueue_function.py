"""Tests the SQL functions enqueue and enqueue_many, as a trigger, psql or another language calls them. The options have
their own tests in test_options.py."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, LiteralString, NamedTuple

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import errors
from psycopg.rows import namedtuple_row

from pgoutbox import Outbox, migrate
from pgoutbox.database import sql
from pgoutbox.embedded import embedded_server
from pgoutbox.enqueue.adapters import answer_of
from pgoutbox.errors import SchemaError
from pgoutbox.message import State
from tests.support.drafts import enqueue_many
from tests.support.messages import put
from tests.support.outbox_actions import enqueue, running, settings_for
from tests.support.pages import DOCS, blocks_of
from tests.support.worker_sql import WatchedWorker, ask_for_locks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pgoutbox import Context, Message
    from tests.conftest import Connect

ENQUEUE: LiteralString = """
SELECT pgoutbox.enqueue(
    topic => %(topic)s::text,
    payload => %(payload)s::jsonb,
    queue => %(queue)s::text,
    destination => %(destination)s::text,
    coalesce_key => %(coalesce_key)s::text,
    dedupe_key => %(dedupe_key)s::text,
    available_at => %(available_at)s::text::timestamptz,
    expires_at => %(expires_at)s::text::timestamptz,
    headers => %(headers)s::jsonb,
    max_attempts => %(max_attempts)s::integer,
    ordering_key => %(ordering_key)s::text
)
"""

# A valid item first, so that the index in the answer is not 0.
ENQUEUE_MANY: LiteralString = """
SELECT * FROM pgoutbox.enqueue_many(%(messages)s::text::jsonb)
"""

# The door of Python.
RECEIPT: LiteralString = """
SELECT pgoutbox._enqueue_receipt(
    %(topic)s::text, %(payload)s::jsonb, jsonb_populate_record(NULL::pgoutbox.draft, %(options)s::text::jsonb), true
)
"""

SOUND: Mapping[str, object] = {
    "topic": "mail",
    "payload": "{}",
    "queue": "default",
    "destination": None,
    "coalesce_key": None,
    "dedupe_key": None,
    "available_at": None,
    "expires_at": None,
    "headers": None,
    "max_attempts": 11,
    "ordering_key": None,
}

BAD_NAMES = (
    "", " ", "a\n", "\na", "'; drop", 'a"', "$$", "a\\", "a" * 64, "é", "a\U0001f600", "a\u202eb", "_a", "9a", "A",
    "a b",
)  # fmt: skip
BAD_HEADERS: tuple[object, ...] = (
    [], "a", 1, {"a": 1}, {"a": None}, {"a": {"b": "c"}}, {"": "a"}, {"a\n": "b"}, {"a": "b\r\nBcc: c"},
    {"a": "\x7f"}, {f"h{n}": "" for n in range(65)}, {"a": "x" * 65_536},
)  # fmt: skip
BAD_ARGUMENTS: list[tuple[str, object, str]] = [
    ("topic", None, "22004"),
    *(("topic", name, "22023") for name in BAD_NAMES),
    *(("queue", name, "22023") for name in BAD_NAMES),
    ("payload", json.dumps("x" * 2**24), "22023"),
    *((key, text, "22023") for key in ("coalesce_key", "dedupe_key", "ordering_key") for text in ("", "é" * 257)),
    *(
        ("destination", uri, "22023")
        for uri in ("", "a@b", ":x", "mailto:", "1x:y", "mailto:a\n", "m:a\r\nBcc: b", "m:\x7f", "m:" + "x" * 2047)
    ),
    ("destination", "MailTo:a@b,c@d", "22023"),
    ("available_at", "infinity", "22023"),
    ("available_at", "-infinity", "22023"),
    ("available_at", "9999-12-31 23:59:59+00", "22023"),
    ("expires_at", "infinity", "22023"),
    ("expires_at", "-infinity", "22023"),
    ("expires_at", "9999-12-31 23:59:59+00", "22023"),
    ("expires_at", "2000-01-01 00:00:00+00", "22023"),
    *(("headers", json.dumps(headers), "22023") for headers in BAD_HEADERS),
    *(("max_attempts", count, "22023") for count in (0, -1, 10_001)),
]  # fmt: skip


class Found(NamedTuple):
    """The row that enqueue wrote, without constant columns."""

    topic: str
    queue: str
    destination: str | None
    coalesce_key: str | None
    dedupe_key: str | None
    payload: object
    headers: object
    state: str
    attempt_count: int
    max_attempts: int
    due_in: timedelta
    expires_in: timedelta | None


def found(connection: psycopg.Connection, message_id: int) -> Found:
    row = connection.execute(
        """
        SELECT
            topic, queue, destination, coalesce_key, dedupe_key, payload, headers, state, attempt_count, max_attempts,
            available_at - created_at, expires_at - created_at
        FROM pgoutbox.message
        WHERE id = %s
        """,
        (message_id,),
    ).fetchone()
    assert row is not None
    return Found._make(row)


def scalar(connection: psycopg.Connection, statement: LiteralString, *parameters: object) -> object:
    row = connection.execute(statement, parameters).fetchone()
    assert row is not None
    return row[0]


def count(connection: psycopg.Connection) -> object:
    return scalar(connection, "SELECT count(*) FROM pgoutbox.message")


def with_json(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments, and as JSON texts its options and a bulk with its message. Payload and headers are JSON."""
    texts = {
        name: str(value) if name in ("payload", "headers") else json.dumps(value)
        for name, value in arguments.items()
        if value is not None or name == "topic"
    }
    members = [f'"{name}": {text}' for name, text in texts.items()]
    options = [f'"{name}": {text}' for name, text in texts.items() if name not in ("topic", "payload")]
    return {
        **arguments,
        "options": f"{{{', '.join(options)}}}",
        "messages": f'[{{"topic": "sound", "payload": 1}}, {{{", ".join(members)}}}]',
    }


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("argument", "value", "sqlstate"), BAD_ARGUMENTS)
def test_every_function_refuses_the_same_arguments_with_sqlstate_and_name(
    rolled_back: psycopg.Connection, argument: str, value: object, sqlstate: str
) -> None:
    arguments = with_json({**SOUND, argument: value})
    for statement, place in ((ENQUEUE, ""), (ENQUEUE_MANY, "messages[1]."), (RECEIPT, "")):
        with pytest.raises(psycopg.Error) as caught, rolled_back.transaction():
            rolled_back.execute(statement, arguments)
        diag = caught.value.diag
        assert (diag.sqlstate, diag.schema_name, diag.column_name) == (sqlstate, "pgoutbox", argument)
        assert (diag.message_primary or "").startswith(f"pgoutbox.enqueue: {place}{argument}: ")
    assert count(rolled_back) == 0


@pytest.mark.parametrize("statement", [ENQUEUE, RECEIPT])
@pytest.mark.parametrize("options", [None, "{}"])
def test_a_payload_of_null_is_refused(
    rolled_back: psycopg.Connection, statement: LiteralString, options: str | None
) -> None:
    with pytest.raises(errors.NullValueNotAllowed, match=r"^pgoutbox\.enqueue: payload: must not be null") as caught:
        rolled_back.execute(statement, {**SOUND, "payload": None, "options": options})
    assert caught.value.diag.column_name == "payload"


def test_an_item_without_a_payload_is_refused(rolled_back: psycopg.Connection) -> None:
    with pytest.raises(errors.InvalidParameterValue, match=r"messages\[1\]\.payload: must be given") as caught:
        enqueue_many(rolled_back, {"topic": "a", "payload": None}, {"topic": "a"})
    assert caught.value.diag.column_name == "payload"


@pytest.mark.parametrize(
    ("table", "row"),
    [
        ("key_head", "(newest_id, scope, key) VALUES (1, 'mail', '')"),
        ("key_head", "(newest_id, scope, key) VALUES (1, '/default', '')"),
        ("dedupe", "(message_id, topic, dedupe_key, payload_digest) VALUES (1, 'mail', '', '')"),
    ],
)
def test_no_key_table_accepts_an_empty_key(
    rolled_back: psycopg.Connection, table: LiteralString, row: LiteralString
) -> None:
    with pytest.raises(errors.CheckViolation, match=f"{table}_sound"):
        rolled_back.execute(f"INSERT INTO pgoutbox.{table} {row}")


def outcome(connection: psycopg.Connection, options: str | None, arguments: Mapping[str, object]) -> object:
    """Return the row that _enqueue_receipt wrote, without its id, or its error. Leave nothing behind."""
    with connection.transaction(force_rollback=True):
        try:
            connection.execute(RECEIPT, {**arguments, "options": options})
        except psycopg.Error as error:
            return error.sqlstate, error.diag.message_primary
        return connection.execute("SELECT to_jsonb(m) - 'id' FROM pgoutbox.message AS m").fetchall()


NAMES = st.sampled_from((None, "a" * 63, "a" * 64)) | st.text("aZ9_.- \né", max_size=4)
PAYLOADS = st.sampled_from((None, "null", "{}", json.dumps("x" * 900), json.dumps("x" * 70_000)))


KEYS = st.none() | st.sampled_from(("", "k", "x" * 512, "é" * 257))


@pytest.mark.slow
@given(NAMES, PAYLOADS, st.fixed_dictionaries(dict.fromkeys(("coalesce_key", "ordering_key", "dedupe_key"), KEYS)))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_short_checks_agree_with_the_full_check(
    rolled_back: psycopg.Connection, topic: str | None, payload: str | None, keys: dict[str, str | None]
) -> None:
    """A message with no more than keys has a shorter check, which decides like the full one."""
    arguments = {"topic": topic, "payload": payload}
    rolled_back.execute("SELECT")
    full = outcome(rolled_back, json.dumps({**keys, "queue": "default"}), arguments)
    assert outcome(rolled_back, json.dumps(keys), arguments) == full


@pytest.mark.parametrize(
    ("function", "statement"),
    [
        ("_draft_error", "SELECT count(pgoutbox._draft_error(d)) FROM unnest('{}'::pgoutbox.draft[]) AS d"),
        ("_scope_of", "SELECT pgoutbox._scope_of(m.topic, m.queue, m.ordering_key) FROM pgoutbox.message_live AS m"),
    ],
)
def test_a_function_that_each_message_passes_is_inlined(
    rolled_back: psycopg.Connection, function: str, statement: LiteralString
) -> None:
    plan = rolled_back.execute("EXPLAIN (VERBOSE) " + statement).fetchall()
    assert not [line for (line,) in plan if f"{function}(" in line]


@pytest.mark.parametrize("statement", [ENQUEUE, ENQUEUE_MANY, RECEIPT])
def test_headers_that_are_the_json_value_null_mean_none(
    rolled_back: psycopg.Connection, statement: LiteralString
) -> None:
    rolled_back.execute(statement, with_json({**SOUND, "headers": "null"}))
    assert scalar(rolled_back, "SELECT bool_and(m.headers IS NULL) FROM pgoutbox.message AS m") is True


@pytest.mark.parametrize("statement", [ENQUEUE, ENQUEUE_MANY])
@pytest.mark.parametrize("payload", ["{", "", "{'a': 1}", '{"a": NaN}', '"\\u0000"', '"\\ud800"'])
def test_malformed_json_raises_the_servers_own_error(
    rolled_back: psycopg.Connection, statement: LiteralString, payload: str
) -> None:
    with pytest.raises(psycopg.DataError) as caught:
        rolled_back.execute(statement, with_json({**SOUND, "payload": payload}))
    assert caught.value.sqlstate in ("22P02", "22P05")
    assert caught.value.diag.schema_name is None


@pytest.mark.parametrize(
    ("messages", "sqlstate"),
    [
        (None, "22004"),
        *((text, "22023") for text in ("null", "7", '"a"', "true", "{}", '{"topic": "a", "payload": 1}')),
        *((f'[{{"topic": "a", "payload": 1}}, {item}]', "22023") for item in ("null", "7", '"a"', "[]", "[{}]")),
    ],
)
def test_a_bulk_that_is_not_an_array_of_objects_is_refused(
    rolled_back: psycopg.Connection, messages: str | None, sqlstate: str
) -> None:
    with pytest.raises(psycopg.DataError, match=r"^pgoutbox\.enqueue: messages") as caught, rolled_back.transaction():
        rolled_back.execute(ENQUEUE_MANY, {"messages": messages})
    diag = caught.value.diag
    assert (diag.sqlstate, diag.schema_name, diag.column_name) == (sqlstate, "pgoutbox", "messages")
    assert count(rolled_back) == 0


def test_the_first_of_several_invalid_items_is_named(rolled_back: psycopg.Connection) -> None:
    with pytest.raises(errors.InvalidParameterValue, match=r"messages\[1\]\.topic"), rolled_back.transaction():
        enqueue_many(rolled_back, *({"topic": topic, "payload": 1} for topic in "aBC"))
    with pytest.raises(errors.InvalidParameterValue, match=r"messages\[1\]\.queue"):
        enqueue_many(rolled_back, *({"topic": "a", "payload": 1, "queue": queue} for queue in ("a", 1, 2)))


def test_an_item_with_a_wrong_type_is_named_before_one_with_an_invalid_value(rolled_back: psycopg.Connection) -> None:
    with pytest.raises(errors.InvalidParameterValue, match=r"messages\[1\]\.queue"):
        enqueue_many(rolled_back, {"topic": "A", "payload": 1}, {"topic": "a", "payload": 1, "queue": 7})


def test_no_items_return_no_rows(rolled_back: psycopg.Connection) -> None:
    assert enqueue_many(rolled_back) == []


@pytest.mark.slow
def test_a_large_payload_is_accepted_up_to_its_limit(rolled_back: psycopg.Connection) -> None:
    for statement in (ENQUEUE, ENQUEUE_MANY):
        rolled_back.execute(statement, with_json({**SOUND, "payload": json.dumps("x" * (2**24 - 2))}))
    sizes = rolled_back.execute("SELECT octet_length(m.payload::text) FROM pgoutbox.message AS m WHERE topic = 'mail'")
    assert sizes.fetchall() == [(2**24,), (2**24,)]


@pytest.mark.slow
def test_a_compressed_payload_is_measured_by_its_text(rolled_back: psycopg.Connection) -> None:
    rolled_back.execute("CREATE TEMP TABLE source AS SELECT to_jsonb(repeat('x', 17000000)) AS payload")
    assert scalar(rolled_back, "SELECT pg_column_size(payload) < 1000000 FROM source")
    for call in (
        "pgoutbox.enqueue('mail', payload)",
        "pgoutbox._enqueue_receipt('mail', payload, NULL, true)",
        "pgoutbox.enqueue_many(jsonb_build_array(jsonb_build_object('topic', 'mail', 'payload', payload)))",
    ):
        too_large = pytest.raises(errors.InvalidParameterValue, match="payload: must not have more than 16777216 bytes")
        with too_large, rolled_back.transaction():
            scalar(rolled_back, f"SELECT {call} FROM source")


def test_the_content_of_a_fan_out_has_the_size_limit_of_a_payload(rolled_back: psycopg.Connection) -> None:
    with pytest.raises(errors.InvalidParameterValue, match="content: must not have more than 16777216 bytes"):
        rolled_back.execute(
            """
            SELECT pgoutbox.enqueue_fanout(
                '{"topic": "mail", "payload": 1}', '["tel:1"]', content => to_jsonb(repeat('x', 17000000))
            )
            """
        )


# --- rows -------------------------------------------------------------------------------------------------------------


def test_two_arguments_are_enough(rolled_back: psycopg.Connection) -> None:
    message_id = scalar(rolled_back, "SELECT pgoutbox.enqueue('mail', '{\"a\": [1]}')")
    assert isinstance(message_id, int)
    assert found(rolled_back, message_id) == Found(
        "mail", "default", None, None, None, {"a": [1]}, None, "pending", 0, 11, timedelta(0), None
    )


def test_an_available_at_in_the_past_means_now(rolled_back: psycopg.Connection) -> None:
    rolled_back.execute(ENQUEUE, {**SOUND, "available_at": "0044-03-15 12:00:00+00 BC"})
    rolled_back.execute(ENQUEUE_MANY, with_json({**SOUND, "available_at": "1970-01-01 00:00:00+00"}))
    assert scalar(rolled_back, "SELECT bool_and(available_at = now()) FROM pgoutbox.message") is True


def test_unkeyed_messages_of_a_bulk_have_ids_in_the_order_of_the_items(rolled_back: psycopg.Connection) -> None:
    rows = enqueue_many(rolled_back, *[{"topic": "a", "payload": 1}] * 50)
    assert [row[1] for row in rows] == sorted(row[1] for row in rows)
    assert [row[0] for row in rows] == list(range(50))


# --- dedupe key -------------------------------------------------------------------------------------------------------


def test_a_taken_dedupe_key_returns_the_existing_message(rolled_back: psycopg.Connection) -> None:
    arguments = {**SOUND, "dedupe_key": "k", "payload": '{"a": 1, "b": 2}'}
    first = rolled_back.execute(ENQUEUE, arguments).fetchone()
    assert rolled_back.execute(ENQUEUE, {**arguments, "payload": '{"b":2,  "a":1e0}'}).fetchone() == first
    assert count(rolled_back) == 1


def test_a_dedupe_key_is_free_in_another_topic(rolled_back: psycopg.Connection) -> None:
    for topic in ("a", "b"):
        rolled_back.execute(ENQUEUE, {**SOUND, "topic": topic, "dedupe_key": "k"})
    assert count(rolled_back) == 2


@pytest.mark.parametrize("state", [State.PENDING, State.SENDING, State.SENT, State.FAILED])
def test_an_owed_sent_or_failed_message_keeps_its_dedupe_key(rolled_back: psycopg.Connection, state: State) -> None:
    first = put(rolled_back, state, dedupe_key="k")
    assert put(rolled_back, dedupe_key="k") == first


@pytest.mark.parametrize("statement", [ENQUEUE, ENQUEUE_MANY])
@pytest.mark.parametrize("state", [State.CANCELLED, State.SKIPPED])
def test_a_cancelled_or_skipped_message_passes_its_dedupe_key_on(
    rolled_back: psycopg.Connection, state: State, statement: LiteralString
) -> None:
    first = put(rolled_back, state, dedupe_key="k", age=timedelta(days=1))
    arguments = with_json({**SOUND, "dedupe_key": "k", "payload": '"another"'})
    *_, second = rolled_back.execute(statement, arguments).fetchall()
    *_, repeated = rolled_back.execute(statement, arguments).fetchall()
    second_id = second[0] if statement is ENQUEUE else second[1]
    assert second_id > first
    assert second[1:] == (() if statement is ENQUEUE else (second_id, False))
    assert repeated == (second_id,) if statement is ENQUEUE else (1, second_id, True)
    keys = rolled_back.execute("SELECT message_id, created_at = now() FROM pgoutbox.dedupe")
    assert keys.fetchall() == [(second_id, True)]


def test_a_passed_on_key_names_the_message_with_the_id_of_its_other_key(
    rolled_back: psycopg.Connection,
) -> None:
    put(rolled_back, State.CANCELLED, dedupe_key="k", coalesce_key="c")
    second = put(rolled_back, dedupe_key="k", coalesce_key="c")
    assert scalar(rolled_back, "SELECT message_id FROM pgoutbox.dedupe") == second == newest(rolled_back, "c")


def test_a_dedupe_key_pruned_during_the_conflict_is_taken_again(rolled_back: psycopg.Connection) -> None:
    """A trigger deletes the row between the conflicting INSERT and the query for it, as another session may."""
    arguments = {**SOUND, "dedupe_key": "k"}
    first = rolled_back.execute(ENQUEUE, arguments).fetchone()
    rolled_back.execute(
        "CREATE FUNCTION public.prune_it() RETURNS trigger LANGUAGE plpgsql AS"
        f" 'BEGIN DELETE FROM pgoutbox.dedupe WHERE message_id = {(first or (0,))[0]}; RETURN NULL; END'".encode()
    )
    rolled_back.execute(
        "CREATE TRIGGER prune_it AFTER INSERT ON pgoutbox.dedupe FOR EACH STATEMENT EXECUTE FUNCTION public.prune_it()"
    )
    second = rolled_back.execute(ENQUEUE, {**arguments, "payload": '"another"'}).fetchone()
    assert second != first
    assert rolled_back.execute("SELECT message_id FROM pgoutbox.dedupe").fetchall() == [second]


# --- coalesce key -----------------------------------------------------------------------------------------------------


def newest(connection: psycopg.Connection, key: str) -> object:
    return scalar(connection, "SELECT newest_id FROM pgoutbox.key_head WHERE key = %s", key)


def test_the_head_names_the_newest_message_of_its_key(rolled_back: psycopg.Connection) -> None:
    ids = [enqueue(rolled_back, coalesce_key="k") for _ in range(3)]
    other = enqueue(rolled_back, coalesce_key="K")
    assert ids == sorted(ids)
    assert newest(rolled_back, "k") == ids[-1]
    assert newest(rolled_back, "K") == other


def test_messages_without_a_key_do_not_coalesce(rolled_back: psycopg.Connection) -> None:
    for _ in range(2):
        rolled_back.execute(ENQUEUE, SOUND)
    assert scalar(rolled_back, "SELECT count(*) FROM pgoutbox.key_head") == 0


def test_a_message_with_both_keys_has_one_id(rolled_back: psycopg.Connection) -> None:
    arguments = {**SOUND, "coalesce_key": "c", "dedupe_key": "d"}
    first = rolled_back.execute(ENQUEUE, arguments).fetchone()
    assert first is not None
    assert rolled_back.execute(ENQUEUE, arguments).fetchone() == first
    assert newest(rolled_back, "c") == first[0] == scalar(rolled_back, "SELECT message_id FROM pgoutbox.dedupe")


# --- privileges and sessions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "has_options"),
    [("pgoutbox.enqueue($1, $2)", False), ("pgoutbox.enqueue($1, $2, queue => 'bulk', notify => false)", True)],
)
def test_enqueue_is_inlined_into_its_call(
    rolled_back: psycopg.Connection, call: LiteralString, has_options: bool
) -> None:
    """Without options, the call builds no draft."""
    rolled_back.execute("SET LOCAL plan_cache_mode = force_generic_plan")
    rolled_back.execute("PREPARE plain(text, jsonb) AS SELECT " + call)
    plan = rolled_back.execute("EXPLAIN (VERBOSE, COSTS off) EXECUTE plain('mail', '{}')").fetchall()
    output = "\n".join(line for (line,) in plan)
    assert "pgoutbox._enqueue_receipt(" in output
    assert "pgoutbox.enqueue(" not in output
    assert ("::pgoutbox.draft" in output and "NULL::pgoutbox.draft" not in output) is has_options


def test_a_trigger_enqueues_in_the_business_transaction(rolled_back: psycopg.Connection) -> None:
    rolled_back.execute(
        """
        CREATE TEMP TABLE account (id bigint);
        CREATE FUNCTION pg_temp.announce() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM pgoutbox.enqueue('account.opened', jsonb_build_object('id', NEW.id), dedupe_key => NEW.id::text);
            RETURN NULL;
        END
        $$;
        CREATE TRIGGER announce AFTER INSERT ON account FOR EACH ROW EXECUTE FUNCTION pg_temp.announce();
        INSERT INTO account SELECT generate_series(1, 3);
        """
    )
    with rolled_back.cursor(row_factory=namedtuple_row) as cursor:
        rows = cursor.execute("SELECT topic, payload, dedupe_key FROM pgoutbox.message ORDER BY id").fetchall()
    assert rows == [("account.opened", {"id": n}, str(n)) for n in (1, 2, 3)]


# --- the bell ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper(connect: Connect) -> psycopg.Connection:
    """Open a session that listens, and has armed the bells of two queues."""
    session = connect(autocommit=True)
    session.execute(sql.LISTEN)
    ask_for_locks(session, "default", "bulk")
    return session


def rings(sleeper: psycopg.Connection) -> list[str]:
    """Return the rings so far: notifications from before this session's last answer have arrived."""
    sleeper.execute("SELECT")
    return sorted(notification.payload for notification in sleeper.notifies(timeout=0))


def test_a_committed_enqueue_notifies_once_per_transaction_and_queue(
    sleeper: psycopg.Connection, connection: psycopg.Connection
) -> None:
    for _ in range(3):
        connection.execute(ENQUEUE, SOUND)
    connection.execute(ENQUEUE_MANY, with_json({**SOUND, "queue": "bulk", "coalesce_key": "k"}))
    assert rings(sleeper) == []
    connection.commit()
    assert rings(sleeper) == ["bulk", "default"]


def test_a_rolled_back_enqueue_or_one_without_notify_does_not_notify(
    sleeper: psycopg.Connection, connection: psycopg.Connection
) -> None:
    connection.execute(ENQUEUE, SOUND)
    connection.rollback()
    connection.execute("SELECT pgoutbox.enqueue('mail', '1', notify => false)")
    connection.execute("""SELECT pgoutbox.enqueue_many('[{"topic": "mail", "payload": 1}]', notify => false)""")
    connection.commit()
    assert rings(sleeper) == []


@pytest.mark.parametrize(
    "call",
    [
        "pgoutbox.enqueue('mail', '1', notify => NULL)",
        "pgoutbox.enqueue('mail', '1', coalesce_key => 'k', notify => NULL)",
        """pgoutbox.enqueue_many('[{"topic": "mail", "payload": 1}]', notify => NULL)""",
        """pgoutbox.enqueue_fanout('{"topic": "mail", "payload": 1}', '["tel:1"]', notify => NULL)""",
    ],
)
def test_notify_of_null_means_true(
    sleeper: psycopg.Connection, connection: psycopg.Connection, call: LiteralString
) -> None:
    connection.execute(f"SELECT {call}")
    connection.commit()
    assert rings(sleeper) == ["default"]


# --- the sequence of ids ----------------------------------------------------------------------------------------------

SEQUENCE_IS_BEHIND = (
    r"sequence pgoutbox\.message_id_seq is behind the messages: it gave \d+, .* run: (.*); and reconnect"
)


def set_back(first: psycopg.Connection, second: psycopg.Connection) -> None:
    """Set the sequence back, as after a restore of the data without the sequence."""
    first.execute("SELECT setval('pgoutbox.message_id_seq', 1000)")
    enqueue_keyed(second)
    first.execute("SELECT setval('pgoutbox.message_id_seq', 7)")


def hand_out_in_stocks(first: psycopg.Connection, second: psycopg.Connection) -> None:
    """Give each session its own cached ids; the second session has the greater ones."""
    first.execute("ALTER SEQUENCE pgoutbox.message_id_seq CACHE 100")
    enqueue(first)
    enqueue_keyed(second)


def enqueue_keyed(connection: psycopg.Connection) -> None:
    enqueue(connection, coalesce_key="k")
    enqueue(connection, ordering_key="k")


@pytest.mark.parametrize("damage", [set_back, hand_out_in_stocks])
@pytest.mark.parametrize("key", ["coalesce_key", "ordering_key"])
def test_an_id_below_the_greatest_of_its_key_is_refused_with_the_command_to_fix_it(
    connect: Connect, key: str, damage: Callable[[psycopg.Connection, psycopg.Connection], None]
) -> None:
    first, second = connect(autocommit=True), connect(autocommit=True)
    damage(first, second)
    keyed: dict[str, Any] = {key: "k"}
    with pytest.raises(SchemaError, match=SEQUENCE_IS_BEHIND) as caught:
        Outbox().on(first).enqueue("greet", 1, require_transaction=False, **keyed)
    answer = answer_of(caught.value)
    assert answer is not None
    assert answer.sqlstate == "55000"
    ((before,),) = second.execute("SELECT max(id) FROM pgoutbox.message").fetchall()
    fix = re.search(SEQUENCE_IS_BEHIND, str(caught.value))
    assert fix is not None
    second.execute(fix[1].encode())
    assert Outbox().on(connect(autocommit=True)).enqueue("greet", 1, require_transaction=False, **keyed).id > before


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """Create a directory that the server's account can enter; `tmp_path` is not one when root runs the tests."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.fixture
def preparing_dsn(open_directory: Path) -> Iterator[str]:
    """Return the DSN of a migrated database on a server that allows prepared transactions."""
    data = open_directory / "data"
    with embedded_server(data, durable=False) as server, psycopg.connect(server.dsn, autocommit=True) as connection:
        migrate.upgrade(server.dsn)
        connection.execute("ALTER SYSTEM SET max_prepared_transactions = 2")
    with embedded_server(data, durable=False) as server:
        yield server.dsn


@pytest.mark.slow
def test_the_documented_two_phase_commit_enqueues(preparing_dsn: str) -> None:
    (block,) = [b for b in blocks_of(DOCS / "how-to/drivers.md", "python") if "tpc_prepare" in b.text]
    page: dict[str, Any] = {}
    exec(compile(block.text, block.place, "exec"), page)
    with psycopg.connect(preparing_dsn) as connection:
        connection.execute("CREATE TABLE member (email text)")
        connection.commit()
        page["sign_up"](connection, "ada@example.org")
        assert connection.execute("SELECT destination FROM pgoutbox.message").fetchall() == [
            ("mailto:ada@example.org",)
        ]


@pytest.mark.slow
async def test_a_prepared_transaction_must_not_notify_and_the_next_poll_finds_its_message(preparing_dsn: str) -> None:
    outbox = Outbox(settings_for(preparing_dsn, poll_interval_seconds=0.1))
    seen: asyncio.Queue[object] = asyncio.Queue()

    @outbox.handler("mail")
    async def send(message: Message, ctx: Context) -> None:
        seen.put_nowait(message.payload)

    worker = WatchedWorker(outbox)
    with psycopg.connect(preparing_dsn, autocommit=True) as producer:
        async with running(worker):
            await worker.sleeping.wait()
            producer.execute("BEGIN")
            outbox.on(producer).enqueue("mail", "rings")
            with pytest.raises(errors.FeatureNotSupported, match="NOTIFY"):
                producer.execute("PREPARE TRANSACTION 'rings'")
            producer.execute("BEGIN")
            outbox.on(producer).enqueue("mail", "silent", notify=False)
            producer.execute("PREPARE TRANSACTION 'silent'")
            producer.execute("COMMIT PREPARED 'silent'")
            assert await seen.get() == "silent"
        assert scalar(producer, "SELECT string_agg(state, ' ') FROM pgoutbox.message") == "sent"


@pytest.mark.parametrize("unpinned", [None, "_skip_superseded", "_take_used_dedupe_key", "_enqueue"])
def test_a_plan_for_empty_tables_scans_no_table(db: psycopg.Connection, unpinned: str | None) -> None:
    """A session that enqueues first while the tables are empty keeps its plans. Without a pin, they scan a table."""
    if unpinned is not None:
        db.execute(f"ALTER FUNCTION pgoutbox.{unpinned} RESET enable_seqscan".encode())
    db.execute("VACUUM pgoutbox.message_live, pgoutbox.dedupe, pgoutbox.key_head")
    with db.transaction():
        for options in ("coalesce_key => 'k'", "dedupe_key => 'd'", "coalesce_key => 'w', max_delay => '1 h'"):
            for _ in range(2):
                db.execute(f"SELECT pgoutbox.enqueue('mail', '1', {options})".encode())
        scanned = db.execute(
            "SELECT s.relname::text FROM pg_stat_xact_user_tables AS s"
            " WHERE s.schemaname = 'pgoutbox' AND s.seq_scan > 0 AND s.relname <> 'id_floor'"
        ).fetchall()
    assert (scanned == []) is (unpinned is None), scanned

"""Tests large payloads: they are in the row of their message like others, in every state."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, LiteralString

import pytest
from psycopg import errors
from psycopg.types.json import Jsonb

from pgoutbox.database import sql
from pgoutbox.message import State
from pgoutbox.operations import Operator
from tests.support.messages import LARGE, PUT_FINAL
from tests.support.outbox_actions import cancel, enqueue, redrive, state_of
from tests.support.worker_sql import claim, finish_sent

if TYPE_CHECKING:
    import psycopg

DAY = timedelta(days=1)
BULK: LiteralString = """
SELECT pgoutbox.enqueue_many(jsonb_build_array(jsonb_build_object('topic', 'greet', 'payload', %(payload)s::jsonb
"""
ENQUEUES: dict[str, LiteralString] = {
    "enqueue": "SELECT pgoutbox.enqueue('greet', %(payload)s::jsonb)",
    "enqueue with a key": "SELECT pgoutbox.enqueue('greet', %(payload)s::jsonb, ordering_key => 'k')",
    "enqueue_many": f"{BULK})))",
    "enqueue_many with a key": f"{BULK}, 'coalesce_key', 'k')))",
    "enqueue_many with a dedupe key": f"{BULK}, 'dedupe_key', 'k')))",
    "enqueue_many with an ordering key": f"{BULK}, 'ordering_key', 'k')))",
    "enqueue_fanout": """
        SELECT pgoutbox.enqueue_fanout(
            jsonb_build_object('topic', 'greet', 'payload', %(payload)s::jsonb), '["a:1", "a:2"]'
        )
    """,
}


@pytest.fixture
def rolled_back(rolled_back: psycopg.Connection) -> psycopg.Connection:
    """Open a transaction, so that the transactions of `maintenance` become savepoints."""
    rolled_back.execute("SELECT")
    return rolled_back


def payloads(connection: psycopg.Connection) -> list[object]:
    return [row[0] for row in connection.execute("SELECT m.payload FROM pgoutbox.message AS m ORDER BY m.id")]


def end(connection: psycopg.Connection, message_id: int, state: State = State.SENT, *, age: timedelta = 2 * DAY) -> int:
    connection.execute(PUT_FINAL, {"id": message_id, "state": state.value, "age": age})
    return message_id


class TestStored:
    @pytest.mark.parametrize("statement", [pytest.param(s, id=name) for name, s in ENQUEUES.items()])
    @pytest.mark.parametrize("payload", [{"user_id": 7}, {"text": "x" * 900}, LARGE], ids=["small", "medium", "large"])
    def test_a_payload_of_any_size_is_in_its_row(
        self, rolled_back: psycopg.Connection, statement: LiteralString, payload: object
    ) -> None:
        rolled_back.execute(statement, {"payload": Jsonb(payload)})
        found = payloads(rolled_back)
        assert found == [payload] * len(found) != []

    def test_json_null_is_a_normal_payload(self, rolled_back: psycopg.Connection) -> None:
        enqueue(rolled_back)
        assert rolled_back.execute("SELECT payload::text FROM pgoutbox.message").fetchall() == [("null",)]

    def test_a_repetition_with_a_dedupe_key_is_recognized(self, rolled_back: psycopg.Connection) -> None:
        message_id = enqueue(rolled_back, payload=LARGE, dedupe_key="k")
        assert enqueue(rolled_back, payload=LARGE, dedupe_key="k") == message_id
        with pytest.raises(errors.UniqueViolation), rolled_back.transaction():
            enqueue(rolled_back, payload={"text": "y" * 5_000}, dedupe_key="k")
        assert payloads(rolled_back) == [LARGE]

    def test_a_payload_is_in_its_row_in_every_state(self, rolled_back: psycopg.Connection) -> None:
        message_id = enqueue(rolled_back, payload=LARGE)
        for step in (lambda: claim(rolled_back), lambda: finish_sent(rolled_back, (message_id, 1))):
            step()
            assert payloads(rolled_back) == [LARGE]
        assert state_of(rolled_back, message_id) == State.SENT


class TestRead:
    def test_a_claim_returns_a_large_payload(self, rolled_back: psycopg.Connection) -> None:
        large, small = enqueue(rolled_back, payload=LARGE), enqueue(rolled_back, payload={"user_id": 7})
        assert {row.id: json.loads(row.payload_json or "") for row in claim(rolled_back)} == {
            large: LARGE,
            small: {"user_id": 7},
        }

    def test_views_show_large_payloads_like_others(self, rolled_back: psycopg.Connection) -> None:
        message_id = enqueue(rolled_back, payload=LARGE)
        message, _ = Operator(rolled_back).show_message(message_id)
        assert message.payload == LARGE
        shown = rolled_back.execute("SELECT payload FROM pgoutbox.message_view").fetchall()
        assert shown == [({"text": "(redacted)"},)]

    def test_the_doctor_recognises_an_encrypted_large_payload(self, rolled_back: psycopg.Connection) -> None:
        enqueue(rolled_back, payload={"sealed": "x" * 5_000})
        for statement in (sql.SEALED_PAYLOADS, sql.SEALED_TOPICS):
            assert len(rolled_back.execute(statement, {"member": "sealed"}).fetchall()) == 1

    def test_a_resent_message_has_a_copy(self, rolled_back: psycopg.Connection) -> None:
        source_id = end(rolled_back, enqueue(rolled_back, payload=LARGE))
        assert Operator(rolled_back).resend(source_id).other_id is not None
        assert payloads(rolled_back) == [LARGE, LARGE]

    def test_a_redriven_message_keeps_its_payload_and_its_dedupe_key(self, rolled_back: psycopg.Connection) -> None:
        message_id = enqueue(rolled_back, payload=LARGE, dedupe_key="k")
        cancel(rolled_back, message_id)
        rolled_back.execute("DELETE FROM pgoutbox.dedupe")
        redrive(rolled_back, message_id)
        assert enqueue(rolled_back, payload=LARGE, dedupe_key="k") == message_id
        assert payloads(rolled_back) == [LARGE]

"""Messages in any state, for the tests of operators' actions."""

from __future__ import annotations

from base64 import b64encode
from datetime import timedelta
from random import Random
from typing import TYPE_CHECKING

from pgoutbox.message import State
from pgoutbox.operations import Operator

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import LiteralString

    import psycopg
    import pytest

LARGE = {"text": b64encode(Random(1).randbytes(4_000)).decode()}
"""A payload that is stored apart from its message, and that compression cannot shrink."""

PUT_SENDING = """
    WITH claim AS (
        INSERT INTO pgoutbox.claim (claimed_at, lease_expires_at, queue, worker, ids)
        SELECT clock_timestamp(), now() + interval '1 hour', m.queue, 'w', ARRAY[m.id]
        FROM pgoutbox.message_live AS m
        WHERE m.id = %s
        RETURNING worker, claimed_at, ids
    )
    UPDATE pgoutbox.message AS m
    SET state = 'sending',
        lane = 0,
        attempt_count = 1,
        worker = c.worker,
        claimed_at = c.claimed_at,
        key_in_flight = coalesce(m.coalesce_key, m.ordering_key)
    FROM claim AS c
    WHERE m.id = ANY (c.ids)
"""
CLAIM_ALL: LiteralString = """
    INSERT INTO pgoutbox.claim (claimed_at, lease_expires_at, queue, worker, ids)
    SELECT m.claimed_at, now() + %(lease)s::interval, m.queue, m.worker, array_agg(m.id)
    FROM pgoutbox.message_live AS m
    WHERE m.state = 'sending'
    GROUP BY m.claimed_at, m.queue, m.worker
"""
"""The claims of attempts in flight that were inserted as rows."""
PUT_FINAL = """
    UPDATE pgoutbox.message
    SET state = %(state)s,
        attempt_count = 3,
        worker = 'w',
        claimed_at = now(),
        finished_at = now() - %(age)s::interval,
        last_error = 'no such mailbox',
        skip_reason = CASE WHEN %(state)s = 'skipped' THEN 'expired' END
    WHERE id = %(id)s
"""
ADD_ATTEMPT = """
    UPDATE pgoutbox.message AS m
    SET attempts = pgoutbox._with_attempt(
        m.attempts, (g.attempt_count, 1, 'retry', 'w', now(), now(), 'busy', NULL, NULL, NULL)::pgoutbox.attempt
    )
    FROM (VALUES (%s::bigint, %s::integer)) AS g(id, attempt_count)
    WHERE m.id = g.id
"""
SET_LAST_ERROR = """
    UPDATE pgoutbox.message SET attempts = jsonb_set(attempts, '{-1,error}', to_jsonb(%s::text)) WHERE id = ANY (%s)
"""


def put(
    connection: psycopg.Connection,
    state: State = State.PENDING,
    *,
    topic: str = "mail",
    queue: str = "default",
    destination: str | None = None,
    coalesce_key: str | None = None,
    dedupe_key: str | None = None,
    ordering_key: str | None = None,
    fair_key: str | None = None,
    age: timedelta = timedelta(),
) -> int:
    """Enqueue a message and bring it to `state`, as if that had happened `age` ago."""
    row = connection.execute(
        """
        SELECT pgoutbox.enqueue(
            %s, '{"to": "ada"}', queue => %s, destination => %s, coalesce_key => %s, dedupe_key => %s,
            ordering_key => %s, fair_key => %s, max_attempts => 4
        )
        """,
        (topic, queue, destination, coalesce_key, dedupe_key, ordering_key, fair_key),
    ).fetchone()
    assert row is not None
    message_id = int(row[0])
    if state is State.SENDING:
        connection.execute(PUT_SENDING, (message_id,))
    elif state is not State.PENDING:
        connection.execute(PUT_FINAL, {"id": message_id, "state": state.value, "age": age})
    return message_id


def before_each_batch(patch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Run something between the search of a bulk act and each batch."""
    take = Operator._take

    def take_late(*arguments: object) -> object:
        do()
        return take(*arguments)  # type: ignore[arg-type]

    patch.setattr(Operator, "_take", take_late)


def meanwhile(patch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Run a concurrent change once, between the search of a bulk act and its first batch."""
    pending = [do]
    before_each_batch(patch, lambda: pending.pop()() if pending else None)

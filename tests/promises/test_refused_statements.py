"""A statement that the server refuses for a moment is repeated, and costs no attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pgoutbox import Context, Message, Outbox, Worker
from tests.support.outbox_actions import enqueue, rows_of, running, settings_for
from tests.support.waiting import until

if TYPE_CHECKING:
    import psycopg

# A sequence counts on when the transaction rolls back. About every other statement is refused, with shifts in between:
# otherwise the second statement of a trip that is repeated would be refused each time.
REFUSE = """
CREATE SEQUENCE public.asked;
CREATE SEQUENCE public.refused;
CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    number constant bigint := nextval('public.asked');
BEGIN
    IF (number + number / 7) % 2 = 1 THEN
        PERFORM nextval('public.refused');
        RAISE 'refused' USING ERRCODE = TG_ARGV[0];
    END IF;
    RETURN NULL;
END $$;
"""


@pytest.mark.parametrize("sqlstate", ["55P03", "40P01"])
async def test_a_refused_statement_costs_no_attempt(dsn: str, db: psycopg.Connection, sqlstate: str) -> None:
    outbox, attempts, ids = Outbox(settings_for(dsn)), list[tuple[int, int]](), list[int]()

    @outbox.handler("mail")
    async def mail(message: Message, ctx: Context) -> None:
        attempts.append((message.id, message.attempt_count))

    db.execute(REFUSE)
    db.execute(
        "CREATE TRIGGER refuse AFTER INSERT OR UPDATE OR DELETE ON pgoutbox.message"
        f" FOR EACH STATEMENT EXECUTE FUNCTION public.refuse('{sqlstate}')".encode()
    )
    db.execute("SET session_replication_role = replica")  # The test itself is not refused.
    async with running(Worker(outbox)):
        for _ in range(3):
            ids.append(enqueue(db, "mail"))
            db.execute("NOTIFY pgoutbox, 'all default'")
            await until(lambda: {row.state for row in rows_of(db, *ids)} == {"sent"})
    assert attempts == [(message_id, 1) for message_id in ids]
    ((refused_count,),) = db.execute("SELECT last_value FROM public.refused").fetchall()
    assert refused_count >= 3

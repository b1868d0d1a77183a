"""Defaults of a role do no harm to a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from psycopg import sql

from tests.support.outbox_actions import enqueue, rows_of

if TYPE_CHECKING:
    import psycopg

    from tests.promises.conftest import StartWorker

APPLICATION = """
    from pgoutbox import Outbox

    outbox = Outbox()


    @outbox.handler("greet")
    async def greet(message, ctx):
        pass


    @outbox.handler("pay", transactional=True)
    async def pay(message, ctx):
        pass
"""
NOTE_SESSION = """
    CREATE TABLE public.seen (session text, isolation text, search_path text);
    GRANT INSERT ON public.seen TO PUBLIC;
    CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO public.seen
        SELECT split_part(current_setting('application_name'), ' ', 2), current_setting('transaction_isolation'),
            current_setting('search_path');
        RETURN NULL;
    END $$;
    CREATE TRIGGER note AFTER UPDATE OR DELETE ON pgoutbox.message
        FOR EACH STATEMENT EXECUTE FUNCTION public.note();
    CREATE TRIGGER note AFTER INSERT ON pgoutbox.claim
        FOR EACH STATEMENT EXECUTE FUNCTION public.note();
"""


@pytest.mark.parametrize("listen", ["true", "false"], ids=["direct", "pooled"])
def test_a_worker_claims_and_finishes_in_its_own_isolation_and_search_path(
    db: psycopg.Connection, start_worker: StartWorker, listen: str
) -> None:
    db.execute(NOTE_SESSION)
    user, database = sql.Identifier(db.info.user), sql.Identifier(db.info.dbname)
    for default in ("default_transaction_isolation = serializable", "search_path = hostile"):
        role = sql.SQL("ALTER ROLE {} IN DATABASE {} SET ").format(user, database)
        db.execute(role + sql.SQL(default))
    ids = [enqueue(db, topic) for topic in ("greet", "pay")]
    worker = start_worker(APPLICATION, "--drain", listen=listen)
    assert worker.wait() == 0, worker.log
    assert [(row.state, row.attempt_count) for row in rows_of(db, *ids)] == [("sent", 1)] * 2
    seen = {*db.execute("SELECT * FROM public.seen").fetchall()}
    assert seen == {(session, "read committed", "pg_catalog, pg_temp") for session in ("claim", "attempt")}

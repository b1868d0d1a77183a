"""One worker of a fleet maintains at a time, and neither its death nor a statement that hangs delays a delivery."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from pgoutbox import State
from pgoutbox.operations import Operator
from tests.support.messages import put
from tests.support.outbox_actions import enqueue, rows_of, state_of
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    import psycopg

    from tests.promises.conftest import StartWorker

APPLICATION: Final = """
    from pgoutbox import Outbox

    outbox = Outbox()


    @outbox.handler("greet")
    async def greet(message, ctx):
        pass
"""
DAY: Final = timedelta(days=1)
# Deletions hang, or fail.
SCENE: Final = """
    CREATE FUNCTION public.linger() RETURNS trigger LANGUAGE plpgsql
    AS 'BEGIN PERFORM pg_sleep(600); RETURN OLD; END';
    CREATE TRIGGER linger BEFORE DELETE ON pgoutbox.message_failed
        FOR EACH ROW EXECUTE FUNCTION public.linger();
    CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''no''; END';
    CREATE TRIGGER refuse BEFORE DELETE ON pgoutbox.message_failed FOR EACH ROW EXECUTE FUNCTION public.refuse();
    ALTER TABLE pgoutbox.message_failed DISABLE TRIGGER refuse;
    CREATE TABLE public.turn (began_at timestamptz, worker text);
    CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql
    AS 'BEGIN INSERT INTO public.turn VALUES (NEW.began_at, NEW.worker); RETURN NULL; END';
    CREATE TRIGGER note AFTER INSERT OR UPDATE OF began_at ON pgoutbox.maintenance_run
        FOR EACH ROW EXECUTE FUNCTION public.note();
"""
HANGING: Final = (
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name = 'pgoutbox maintenance' AND wait_event = 'PgSleep'"
)
LAST_TURN: Final = "SELECT split_part(worker, ':', 2)::int FROM public.turn ORDER BY began_at DESC LIMIT 1"


def test_a_hanging_turn_and_the_death_of_its_worker_block_nobody(
    db: psycopg.Connection, start_worker: StartWorker
) -> None:
    db.execute(SCENE)
    Operator(db).set_retention("*", "failed", DAY)
    put(db, State.FAILED, age=2 * DAY)
    queues = {
        start_worker(APPLICATION, "--queue", queue, maintenance_interval_seconds="1"): queue
        for queue in ("a", "b", "c")
    }
    workers = {worker.pid: worker for worker in queues}

    def logs() -> str:
        return "".join(worker.log for worker in workers.values())

    def deliver() -> None:
        ids = [enqueue(db, queue=queue) for worker, queue in queues.items() if not worker.has_ended]
        wait_until(lambda: {row.state for row in rows_of(db, *ids)} == {"sent"}, logs)

    def hanging() -> set[int]:
        return {pid for (pid,) in db.execute(HANGING).fetchall()}

    first = wait_until(hanging, logs)
    deliver()
    ((dead,),) = db.execute(LAST_TURN).fetchall()
    workers[dead].end()
    wait_until(lambda: db.execute(LAST_TURN).fetchone() != (dead,), logs)
    second = put(db, State.FAILED, age=2 * DAY)
    wait_until(lambda: hanging() - first, logs)
    deliver()
    stopping = queues.keys() - {workers[dead]}
    for worker in stopping:
        worker.terminate()
    assert {worker.wait() for worker in stopping} == {0}
    assert hanging() <= first  # The other worker has cancelled its statement.
    assert state_of(db, second) == "failed"
    begun = [began_at for (began_at,) in db.execute("SELECT began_at FROM public.turn ORDER BY 1").fetchall()]
    assert min(after - before for before, after in pairwise(begun)) >= timedelta(seconds=0.8)


def test_a_failure_of_maintenance_is_told_once_and_so_is_its_end(
    db: psycopg.Connection, start_worker: StartWorker
) -> None:
    db.execute(SCENE)
    Operator(db).set_retention("*", "failed", DAY)
    old = put(db, State.FAILED, age=2 * DAY)
    db.execute("ALTER TABLE pgoutbox.message_failed DISABLE TRIGGER linger, ENABLE TRIGGER refuse")
    worker = start_worker(APPLICATION, maintenance_interval_seconds="1")
    wait_until(lambda: db.execute("SELECT FROM public.turn").rowcount > 2, lambda: worker.log)
    assert state_of(db, old) == "failed"
    db.execute("ALTER TABLE pgoutbox.message_failed DISABLE TRIGGER refuse")
    wait_until(lambda: "maintenance_back" in worker.events(), lambda: worker.log)
    assert worker.stop() == 0
    told = [event for event in worker.events() if event.startswith("maintenance_")]
    assert told == ["maintenance_failed", "maintenance_back", "maintenance_done"]
    assert rows_of(db) == []

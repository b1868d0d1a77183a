"""A worker in the test's process whose attempts end when and as the test decides."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, LiteralString

from pgoutbox import Outbox, RetryPolicy, Worker
from tests.support.outbox_actions import PATIENCE_SECONDS, settings_for
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psycopg

    from pgoutbox import Context, Message, Outcome


STOP_CLAIMS: Final[LiteralString] = """
    CREATE FUNCTION public.stop() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF NEW.worker LIKE 'slow:%' THEN
            PERFORM pg_advisory_xact_lock(1);
        END IF;
        RETURN NEW;
    END
    $$;
    CREATE TRIGGER stop BEFORE INSERT ON pgoutbox.claim FOR EACH ROW EXECUTE FUNCTION public.stop()
"""
"""Stops the claims of a worker named `slow` after they have chosen their rows, while a session has the lock 1."""


class Held:
    """An outbox whose handler waits for the outcome of its message, and a worker of it.

    A retry is due in an hour. Unknown outcomes of the topic `careful` are held, and those of `greet` are retried.
    """

    def __init__(self, dsn: str, *, queues: Sequence[str] = ("default",), **settings: object) -> None:
        self.outbox = Outbox(settings_for(dsn, **settings))
        self.begun: list[tuple[int, int]] = []
        """The message and the number of each attempt that has begun."""
        self._outcomes: dict[int, asyncio.Future[Outcome]] = {}

        @self.outbox.handler("greet", retry=RetryPolicy.steps(3600, jitter=0))
        @self.outbox.handler("careful", retry=RetryPolicy.steps(3600, jitter=0), on_unknown="hold")
        async def greet(message: Message, ctx: Context) -> Outcome:
            self.begun.append((message.id, message.attempt_count))
            return await asyncio.shield(self._outcome_of(message.id))

        self.worker = Worker(self.outbox, queues=queues)

    async def run_once(self) -> None:
        """Run the worker once. A handler that waits for an outcome which does not come fails the test."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.worker.run_once()

    def end(self, message_id: int, outcome: Outcome) -> None:
        """End the attempt of this message, and its later ones."""
        self._outcome_of(message_id).set_result(outcome)

    async def until_begun(self, *message_ids: int, attempt_count: int = 1) -> None:
        """Wait until an attempt of each of these messages has begun."""
        await until(lambda: {(message_id, attempt_count) for message_id in message_ids} <= {*self.begun})

    def _outcome_of(self, message_id: int) -> asyncio.Future[Outcome]:
        if message_id not in self._outcomes:
            self._outcomes[message_id] = asyncio.get_running_loop().create_future()
        return self._outcomes[message_id]


async def delivered_once(dsn: str, topic: str) -> list[int]:
    """Run a worker once, and return the messages that it has delivered, in their order."""
    outbox = Outbox(settings_for(dsn, concurrency=1))
    delivered: list[int] = []

    @outbox.handler(topic)
    async def record(message: Message, ctx: Context) -> None:
        delivered.append(message.id)

    await Worker(outbox).run_once()
    return delivered


def waiting_count(db: psycopg.Connection) -> int:
    """Count the sessions in this database that wait for a lock."""
    ((count,),) = db.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    ).fetchall()
    return int(count)

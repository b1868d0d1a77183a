"""A worker beside acts of producers and operators: no rule breaks, and only the documented transitions occur."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING, Final

import psycopg
import pytest

from pgoutbox import (
    Context,
    EditResult,
    Message,
    Outbox,
    Outcome,
    Permanent,
    RetryPolicy,
    Sent,
    Skip,
    State,
    Transient,
    Worker,
)
from pgoutbox.operations import MessageResult, Operator
from tests.support.held import Held, delivered_once
from tests.support.judge import install_judge, violations
from tests.support.outbox_actions import (
    PATIENCE_SECONDS,
    begin,
    cancel,
    enqueue,
    expire,
    lapse,
    make_due,
    redrive,
    rows_of,
    running,
    settings_for,
)
from tests.support.proxy import Proxy, proxy_to
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pydantic import JsonValue

    from tests.conftest import Connect

FINAL: Final = (State.SENT, State.FAILED, State.CANCELLED, State.SKIPPED)
LATER: Final = datetime.now(UTC) + timedelta(days=1)
CORRECTED: Final[dict[str, JsonValue]] = {"corrected": True}
EDITED: Final = {"edited": True}
Act = Callable[[psycopg.Connection, "Scene"], object]

ACTS: Final[dict[str, Act]] = {
    "enqueue": lambda session, scene: scene.enqueue(session),
    "enqueue coalesced": lambda session, scene: scene.enqueue(session, coalesce_key="k"),
    "enqueue deduped": lambda session, scene: scene.enqueue(session, dedupe_key="d"),
    "cancel": lambda session, scene: Operator(session).cancel(scene.message_id),
    "reschedule": lambda session, scene: Operator(session).reschedule(scene.message_id, LATER),
    "snooze": lambda session, scene: Operator(session).snooze(scene.message_id, timedelta(hours=1), "moves"),
    "correct": lambda session, scene: Operator(session).correct(scene.message_id, {"payload": CORRECTED}),
    "edit": lambda session, scene: Outbox().on(session).edit(scene.message_id, owner="ada", payload=EDITED),
    "redrive": lambda session, scene: Operator(session).redrive(scene.message_id),
    "resend": lambda session, scene: scene.resend(session),
    "prune": lambda session, scene: Operator(session).prune(timedelta(microseconds=1), states=FINAL, topic=scene.name),
}
# The first trip of the worker that writes: a claim of a message in this state, or the finish of its attempt.
CLAIMED: Final = ("pending", "retried", "lapsed")
FINISHED: Final[dict[str, Outcome]] = {"sent": Sent(), "retry": Transient("busy"), "failed": Permanent("no")}
HELD: Final = """
    SELECT
        a.backend_xid IS NOT NULL AND EXISTS (
            SELECT FROM pg_locks AS l
            WHERE l.pid = a.pid AND l.mode = 'RowExclusiveLock' AND l.relation = 'pgoutbox.message_live'::regclass
        )
    FROM pg_stat_activity AS a
    WHERE datname = current_database() AND application_name LIKE 'pgoutbox claim%'
        AND state = 'active' AND wait_event = 'ClientRead'
"""
WAITS: Final = """
    SELECT FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event_type IN ('Lock', 'Timeout') AND backend_type = 'client backend'
"""
_ENOUGH_STATEMENTS: Final = 12
_LOOKS: Final = 5
_numbers = count(1)


@dataclass(slots=True)
class Scene:
    """One message with both kinds of key, in its own topic and queue, and its history so far."""

    dsn: str
    name: str = field(default_factory=lambda: f"scene.{next(_numbers)}")
    message_id: int = 0
    enqueued: set[int] = field(default_factory=set)
    tries: list[tuple[int, bool, object]] = field(default_factory=list)
    """Each attempt in order: its message, whether it handed the message over, and the payload."""
    answer: str | None = None
    """What the committed act on the message has answered."""
    tried_before: int = 0
    """How many attempts had ended when it answered."""
    first_outcome: asyncio.Future[Outcome] | None = None
    """What the handler of the first attempt waits for."""
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    def enqueue(self, session: psycopg.Connection, **keys: str) -> int:
        return enqueue(session, self.name, queue=self.name, **keys)  # type: ignore[arg-type] # keys alone are given

    def resend(self, session: psycopg.Connection) -> int | None:
        answer = Operator(session).resend(self.message_id)
        return answer.other_id if answer.is_done else None

    def worker(self, dsn: str | None = None, *, retry_seconds: int = 0) -> Worker:
        """A worker of this scene, through the proxy if its DSN is given."""
        outbox = Outbox(settings_for(dsn or self.dsn))

        @outbox.handler(self.name, retry=RetryPolicy.steps(retry_seconds, jitter=0))
        async def hand_over(message: Message, ctx: Context) -> Outcome:
            outcome: Outcome = Sent()
            if self.first_outcome is not None:
                waiting, self.first_outcome = self.first_outcome, None
                self.has_begun.set()
                outcome = await waiting
            self.tries.append((message.id, isinstance(outcome, Sent), message.payload))
            return outcome

        return Worker(outbox, queues=[self.name])

    async def build(self, db: psycopg.Connection, state: str) -> None:
        self.message_id = self.enqueue(db, coalesce_key="k", dedupe_key="d", owner="ada")
        self.enqueued.add(self.message_id)
        if state == "retried":
            self.first_outcome = asyncio.get_running_loop().create_future()
            self.first_outcome.set_result(Transient("busy"))
            await self.worker(retry_seconds=3600).run_once()
            make_due(db, self.message_id)
        elif state == "lapsed":
            begin(db, self.message_id, worker="dead")
            lapse(db, self.message_id)


@dataclass(slots=True)
class Stage:
    """The sessions of all scenes: an observer, a producer or operator, and a proxy for the worker."""

    dsn: str
    db: psycopg.Connection
    other: psycopg.Connection
    proxy: Proxy
    thread: ThreadPoolExecutor

    async def worker_first(self, scene: Scene, work: asyncio.Task[None], act: str, *, commits: bool) -> None:
        """Act while the worker's transaction is open."""
        await self._until_held(work)
        acting = asyncio.get_running_loop().run_in_executor(self.thread, self._act, scene, act)
        await until(lambda: acting.done() or self.db.execute(WAITS).rowcount > 0)
        self.proxy.end_held(commits=commits)
        self._account(scene, await acting)
        await work

    async def _until_held(self, work: asyncio.Task[None]) -> None:
        """Let pass the transactions of the worker that write no message."""
        looks = 0

        def is_held() -> bool:
            nonlocal looks
            assert not work.done(), work.result()
            held = self.db.execute(HELD).fetchall() if self.proxy.is_holding() else []
            # On a busy machine the server may not have read the last statements yet, and seem to wait for them.
            looks = looks + 1 if held == [(False,)] else 0
            if looks == _LOOKS:
                looks = 0
                self.proxy.hold_open("pgoutbox claim")
            return held == [(True,)]

        await until(is_held)

    async def act_first(self, scene: Scene, work: asyncio.Task[None], act: str, *, commits: bool) -> None:
        """Let the worker work while the transaction of the act is open."""
        statements = self.proxy.statements
        enough = len(statements) + _ENOUGH_STATEMENTS
        await until(lambda: work.done() or len(statements) >= enough or self.db.execute(WAITS).rowcount > 0)
        if commits:
            self.other.commit()
        else:
            self.other.rollback()
        await work

    def _begin(self, scene: Scene, act: str) -> object:
        self.other.execute("SELECT")  # The act takes part in this transaction.
        return ACTS[act](self.other, scene)

    def _act(self, scene: Scene, act: str) -> object:
        result = ACTS[act](self.other, scene)
        self.other.commit()
        return result

    @staticmethod
    def _account(scene: Scene, result: object) -> None:
        if isinstance(result, (MessageResult, EditResult)):
            scene.answer = str(result.result if isinstance(result, MessageResult) else result)
            scene.tried_before = len(scene.tries)
        elif isinstance(result, int):
            scene.enqueued.add(result)

    async def play(self, scene: Scene, trip: str, act: str, *, worker_first: bool, commits: bool) -> None:
        outcome: asyncio.Future[Outcome] | None = None
        if trip in FINISHED:
            scene.first_outcome = outcome = asyncio.get_running_loop().create_future()
        elif worker_first:
            self.proxy.hold_open("pgoutbox claim")
        result: object = None
        if not worker_first and outcome is None:
            result = self._begin(scene, act)
        work = asyncio.create_task(scene.worker(self.proxy.dsn).run_once())
        try:
            if outcome is not None:
                await asyncio.wait_for(scene.has_begun.wait(), PATIENCE_SECONDS)
                if worker_first:
                    self.proxy.hold_open("pgoutbox claim")
                else:
                    result = await asyncio.to_thread(self._begin, scene, act)
                outcome.set_result(FINISHED[trip])
            async with asyncio.timeout(PATIENCE_SECONDS):
                if worker_first:
                    await self.worker_first(scene, work, act, commits=commits)
                else:
                    await self.act_first(scene, work, act, commits=commits)
                    if commits:
                        self._account(scene, result)
        finally:
            self.proxy.end_held(commits=True)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            self.other.rollback()

    async def finish(self, scene: Scene) -> None:
        """End the lease of an attempt that nobody can finish, and deliver the owed messages."""
        for message_id in scene.enqueued:
            lapse(self.db, message_id)
        make_due(self.db, *scene.enqueued)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await scene.worker().drain()


def broken_answers(scene: Scene, act: str, state: str | None) -> list[str]:
    """Return the contradictions to the answer of the act, before any other act on its message."""
    since = [payload for i, _, payload in scene.tries[scene.tried_before :] if i == scene.message_id]
    match act, scene.answer:
        case "cancel", "cancelled" if since or state != "cancelled":
            return [f"{len(since)} attempts after a cancel, and the message is {state}"]
        case "cancel", "requested" if len(since) > 1 or state == "pending":
            return [f"{len(since)} attempts after a request to cancel, and the message is {state}"]
        case "cancel", "pending" | "sending":
            return ["a cancel has left an owed message alone"]
        case ("reschedule", "rescheduled") | ("snooze", "snoozed") if since:
            return ["tried before its new time"]
        case "correct", "corrected" if any(payload != CORRECTED for payload in since):
            return [f"tried with {since} after the correction"]
        case "edit", "edited" if any(payload != EDITED for i, _, payload in scene.tries if i == scene.message_id):
            return ["two payloads of an edited message were tried"]
        case _:
            return []


def broken_rules(db: psycopg.Connection, scene: Scene, act: str) -> list[str]:
    """Return the broken rules after every owed message has been delivered."""
    rows = {row.id: row for row in rows_of(db, *scene.enqueued)}
    in_topic = {i for (i,) in db.execute("SELECT id FROM pgoutbox.message WHERE topic = %s", [scene.name])}
    problems = [str(violation) for violation in violations(db)]
    if act != "prune":
        problems += [f"message {i} is lost" for i in scene.enqueued - in_topic]
    problems += [f"message {i} was never enqueued" for i in in_topic - scene.enqueued]
    problems += [f"message {row.id} is {row.state}" for row in rows.values() if row.state not in FINAL]
    sent = [i for i, is_sent, _ in scene.tries if is_sent]
    problems += [f"message {i} is handed over {sent.count(i)} times" for i in {*sent} if sent.count(i) > 1]
    problems += [
        f"message {row.id} is not handed over" for row in rows.values() if row.state == "sent" and row.id not in sent
    ]
    problems += [
        f"message {i} is handed over, and {rows[i].state}" for i in {*sent} if i in rows and rows[i].state != "sent"
    ]
    keyed = {
        i
        for (i,) in db.execute("SELECT id FROM pgoutbox.message WHERE topic = %s AND coalesce_key = 'k'", [scene.name])
    }
    in_order = [i for i, *_ in scene.tries if i in keyed]
    if in_order != sorted(in_order):
        problems.append(f"an older message is tried after a newer one: {in_order}")
    if keyed and max(keyed) in rows and rows[max(keyed)].state == "skipped":
        problems.append("the newest message of the key is skipped")
    return problems


@pytest.fixture
def stage(dsn: str, db: psycopg.Connection, connect: Connect, tmp_path: Path) -> Iterator[Stage]:
    install_judge(db)
    with proxy_to(dsn, tmp_path) as proxy, ThreadPoolExecutor(1) as thread:
        yield Stage(dsn, db, connect(), proxy, thread)


@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
@pytest.mark.parametrize("worker_first", [True, False], ids=["the worker first", "the act first"])
@pytest.mark.parametrize("trip", [*CLAIMED, *FINISHED])
async def test_a_claim_or_finish_and_an_act_on_one_message_keep_all_rules_in_either_order(
    stage: Stage, trip: str, worker_first: bool, commits: bool
) -> None:
    problems = {}
    # A transaction that rolls back changes nothing, so fewer scenes are enough: each act with one of the trips.
    trips = [*CLAIMED, *FINISHED]
    for act in ACTS if commits else [*ACTS][trips.index(trip) :: len(trips)]:
        scene = Scene(stage.dsn)
        await scene.build(stage.db, trip)
        await stage.play(scene, trip, act, worker_first=worker_first, commits=commits)
        found = broken_answers(scene, act, {row.id: row.state for row in rows_of(stage.db)}.get(scene.message_id))
        await stage.finish(scene)
        if found := found + broken_rules(stage.db, scene, act):
            problems[act] = found
    assert problems == {}


# As docs/explanation/lifecycle.md has them.
TRANSITIONS = {
    "pending": ("sending", "cancelled", "skipped"),
    "sending": ("pending", "sending", "sent", "skipped", "failed", "cancelled"),
    "failed": ("pending", "skipped"),
    "cancelled": ("pending",),
}
NOTE_TRANSITIONS = """
    CREATE TABLE public.seen (before text, after text);
    CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
    BEGIN
        INSERT INTO public.seen VALUES (OLD.state, NEW.state);
        RETURN NEW;
    END $$;
    CREATE TRIGGER note BEFORE UPDATE ON pgoutbox.message FOR EACH ROW
        WHEN (OLD.state <> NEW.state OR OLD.attempt_count <> NEW.attempt_count)
        EXECUTE FUNCTION public.note();
"""


async def test_all_transitions_of_the_state_machine_occur_and_no_others(dsn: str, db: psycopg.Connection) -> None:
    db.execute(NOTE_TRANSITIONS)
    endings: list[Outcome] = [
        Sent(),
        Transient("busy"),
        Permanent("no"),
        Skip("not needed"),
        Permanent("no"),
        Transient("busy"),
    ]
    held = Held(dsn, concurrency=len(endings))
    with db.transaction():
        ids = [enqueue(db) for _ in endings]
    async with running(held.worker):
        await held.until_begun(*ids)
        assert cancel(db, ids[-1]) == "requested"
        for message_id, outcome in zip(ids, endings, strict=True):
            held.end(message_id, outcome)
        await until(lambda: all(row.state != "sending" for row in rows_of(db)))
    assert cancel(db, ids[1]) == "cancelled"
    Operator(db).dismiss(ids[-2], "known")
    for message_id in (ids[1], ids[2]):
        redrive(db, message_id)
    with db.transaction():
        expire(db, enqueue(db))
        dead = enqueue(db, max_attempts=2)  # It may have killed its worker, so it begins alone and at once.
        begin(db, dead)
        lapse(db, dead)
    await delivered_once(dsn, "greet")
    seen = {*db.execute("SELECT before, after FROM public.seen").fetchall()}
    assert seen == {(before, after) for before, afters in TRANSITIONS.items() for after in afters}

"""Tests concurrent sessions: every pair of operations in both orders, and crowds at one row or at the whole table.

In every order of commits, no rule of the table breaks, nothing deadlocks, and no message is lost.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import psycopg
import pytest

from pgoutbox import Outbox
from pgoutbox.database import operator_connection as session
from pgoutbox.database import sql
from pgoutbox.handlers import Context
from pgoutbox.kernel import statements
from pgoutbox.message import FINAL_STATES, AttemptOutcome, Message, State
from pgoutbox.operations import ActResult, MessageFilter, Operator
from pgoutbox.retry import RetryPolicy
from pgoutbox.worker import Worker
from pgoutbox.worker.kernel_run import Link
from tests.support.judge import violations
from tests.support.outbox_actions import (
    PATIENCE_SECONDS,
    attempts_of,
    enqueue,
    first_of,
    lapse,
    row_of,
    rows_of,
    running,
    settings_for,
    state_of,
    stumble,
)
from tests.support.waiting import until
from tests.support.worker_sql import End, claim, finish, finish_sent, ids_in_flight, renew

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from pgoutbox.database.store import ClaimedRow
    from pgoutbox.kernel.seams import Row, Step
    from tests.conftest import Connect


# --- every pair -------------------------------------------------------------------------------------------------------

SCENES = ("pending", "sending", "lapsed", "retried", "failed", "sent", "cancelled")
OLD = timedelta(hours=1)


@dataclass(slots=True)
class Scene:
    """One message in a given state, with both kinds of key, in its own topic and queue, and its later history."""

    number: int
    message_id: int
    worker: str = ""
    enqueued: set[int] = field(default_factory=set)
    claimed: list[int] = field(default_factory=list)
    lost_races: Counter[str] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        """Create the topic and the queue."""
        return f"scene.{self.number}"

    def enqueue(self, session: psycopg.Connection, **keys: str) -> int:
        """Enqueue one more message here."""
        return enqueue(session, self.name, queue=self.name, **keys)  # type: ignore[arg-type] # keys alone are given

    def claim(self, session: psycopg.Connection, worker: str | None = None) -> list[int]:
        """Claim here, and return the messages in hand-over order."""
        name = worker or f"worker-{session.info.backend_pid}"
        rows = claim(session, queue=self.name, topics=[self.name], worker=name)
        return [row.id for row in rows if row.state == State.SENDING and not row.superseded]


def build(db: psycopg.Connection, number: int, state: str) -> Scene:
    """Build a scene with the package's own statements."""
    scene = Scene(number, 0, f"worker-{db.info.backend_pid}")
    scene.message_id = scene.enqueue(db, coalesce_key="k", dedupe_key="d")
    scene.enqueued.add(scene.message_id)
    if state not in {"pending", "cancelled"}:
        scene.claimed += scene.claim(db)
    match state:
        case "lapsed":
            lapse(db, scene.message_id)
        case "retried":
            finish(db, End(scene.message_id, 1, AttemptOutcome.RETRY, "busy"), worker=scene.worker)
        case "failed":
            finish(db, End(scene.message_id, 1, AttemptOutcome.FAILED, "no"), worker=scene.worker)
        case "sent":
            finish_sent(db, (scene.message_id, 1), worker=scene.worker)
        case "cancelled":
            Operator(db).cancel(scene.message_id)
    db.execute(
        "UPDATE pgoutbox.message SET finished_at = finished_at - interval '1 day' "
        "WHERE id = %s AND finished_at IS NOT NULL",
        [scene.message_id],
    )
    return scene


def resend_if_sent(session: psycopg.Connection, scene: Scene) -> int | None:
    """Resend as an operator. Return the copy."""
    answer = Operator(session).resend(scene.message_id)
    return answer.other_id if answer.is_done else None


OPERATIONS: dict[str, Callable[[psycopg.Connection, Scene], object]] = {
    "enqueue": lambda s, scene: scene.enqueue(s),
    "enqueue coalesced": lambda s, scene: scene.enqueue(s, coalesce_key="k"),
    "enqueue deduped": lambda s, scene: scene.enqueue(s, dedupe_key="d"),
    "cancel": lambda s, scene: Operator(s).cancel(scene.message_id),
    "claim": lambda s, scene: scene.claim(s),
    "finish sent": lambda s, scene: finish_sent(s, (scene.message_id, 1), worker=scene.worker),
    "finish retry": lambda s, scene: finish(
        s, End(scene.message_id, 1, AttemptOutcome.RETRY, "busy"), worker=scene.worker
    ),
    "renew": lambda s, scene: renew(s, (scene.message_id, 1), worker=scene.worker),
    "redrive": lambda s, scene: Operator(s).redrive(scene.message_id),
    "resend": resend_if_sent,
    "prune": lambda s, scene: Operator(s).prune(OLD, states=sorted(FINAL_STATES), topic=scene.name),
}
ENQUEUES = ("enqueue", "enqueue coalesced", "enqueue deduped", "resend")
WORKERS_OWN = ("claim", "finish sent", "finish retry", "renew")
# Beside acts of others, promises/test_interleavings.py holds these transactions of a real worker open.
HELD_OPEN = {"claim", "finish sent", "finish retry"}
PAIRS = [
    (first, second)
    for first in OPERATIONS
    for second in OPERATIONS
    if {first, second}.isdisjoint(HELD_OPEN) or {first, second} <= {*WORKERS_OWN}
]
LOST_RACES = (
    psycopg.errors.SerializationFailure,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.LockNotAvailable,
    psycopg.errors.UniqueViolation,
)


@dataclass(slots=True)
class Sessions:
    """Two sessions, an observer, and a thread for the second."""

    db: psycopg.Connection
    first: psycopg.Connection
    second: psycopg.Connection
    thread: ThreadPoolExecutor

    def play(self, scene: Scene, first: str, second: str, *, commits: bool) -> None:
        """Stop the first session before its commit, and run the second one until it finishes or blocks."""
        self.first.execute("SELECT")  # The following statements run in this transaction.
        first_result = OPERATIONS[first](self.first, scene)
        future = self.thread.submit(self._run_second, scene, second)
        self._until_it_ends_or_waits(future)
        if commits:
            self.first.commit()
            self._account(scene, first, first_result)
        else:
            self.first.rollback()
        self._account(scene, second, future.result(PATIENCE_SECONDS))

    def _run_second(self, scene: Scene, name: str) -> object:
        while True:
            try:
                return OPERATIONS[name](self.second, scene)
            except LOST_RACES as error:
                # A worker repeats its statement; applications and operators never see this error.
                if name not in WORKERS_OWN or scene.lost_races.total() == 5:
                    raise
                scene.lost_races[type(error).__name__] += 1

    def _until_it_ends_or_waits(self, future: Future[object]) -> None:
        while not wait([future], timeout=0.001).done:
            (waits,) = self.db.execute(
                "SELECT coalesce(wait_event_type IN ('Lock', 'Timeout'), false) FROM pg_stat_activity WHERE pid = %s",
                [self.second.info.backend_pid],
            ).fetchone() or (False,)
            if waits:
                return

    @staticmethod
    def _account(scene: Scene, name: str, result: object) -> None:
        if name in ENQUEUES and isinstance(result, int):
            scene.enqueued.add(result)
        elif name == "claim" and isinstance(result, list):
            scene.claimed += result

    def drain(self, scene: Scene) -> None:
        """Expire all leases, make every message due, and deliver all owed messages."""
        for number in range(20):
            self.db.execute(
                "UPDATE pgoutbox.message_live SET available_at = now() - interval '1 s' WHERE topic = %s", [scene.name]
            )
            self.db.execute(
                "UPDATE pgoutbox.claim AS c SET lease_expires_at = now() - interval '1 s'"
                " FROM pgoutbox.in_flight_view AS v"
                " WHERE v.topic = %s AND v.worker = c.worker AND v.claimed_at = c.claimed_at",
                [scene.name],
            )
            worker = f"drain-{number}"  # A worker leaves its own lapsed attempts alone.
            claimed = scene.claim(self.db, worker)
            scene.claimed += claimed
            finish_sent(self.db, *((i, row_of(self.db, i).attempt_count) for i in claimed), worker=worker)
            (owed,) = self.db.execute(
                "SELECT count(*) FROM pgoutbox.message_live WHERE topic = %s", [scene.name]
            ).fetchone() or (0,)
            if not owed:
                return
        raise AssertionError("owed messages are never delivered")


@pytest.fixture
def sessions(connect: Connect, db: psycopg.Connection) -> Iterator[Sessions]:
    """Provide the sessions for one scene after the other."""
    with ThreadPoolExecutor(1) as thread:
        yield Sessions(db, connect(), connect(autocommit=True), thread)


def left_undone(db: psycopg.Connection, scene: Scene, *, pruned: bool) -> list[str]:
    """Return the broken rules after every owed message has been delivered."""
    rows = {
        row_id: (state, key)
        for row_id, state, key in db.execute(
            "SELECT id, state, coalesce_key FROM pgoutbox.message WHERE topic = %s", [scene.name]
        )
    }
    problems = [f"message {i} is lost" for i in scene.enqueued - rows.keys() if not (pruned and i == scene.message_id)]
    problems += [f"message {i} was never enqueued" for i in rows.keys() - scene.enqueued]
    keyed = [i for i in scene.claimed if i == scene.message_id or rows.get(i, ("", ""))[1] == "k"]
    if keyed != sorted(keyed):
        problems.append(f"an older message is handed over after a newer one: {keyed}")
    newest = max((i for i, (_, key) in rows.items() if key == "k"), default=None)
    if newest is not None and rows[newest][0] == "skipped":
        problems.append("the newest message of the key is skipped")
    return problems + [str(violation) for violation in violations(db)]


@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
@pytest.mark.parametrize("state", SCENES)
def test_two_operations_on_one_message_keep_all_rules_in_either_order(
    sessions: Sessions, state: str, commits: bool
) -> None:
    problems = {}
    # A transaction that rolls back changes nothing, so fewer scenes are enough: each pair in one of the states.
    pairs = PAIRS if commits else PAIRS[SCENES.index(state) :: len(SCENES)]
    for number, (first, second) in enumerate(pairs):
        scene = build(sessions.db, number, state)
        sessions.play(scene, first, second, commits=commits)
        if "prune" in (first, second):
            # Like maintenance: a prune leaves a key that an enqueue has locked.
            sessions.db.execute(sql.PRUNE_DEDUPE_BY_RULE, {"limit": 1_000, "after_scope": "", "after_key": ""})
        found = [str(violation) for violation in violations(sessions.db)]
        sessions.drain(scene)
        pruned = state in FINAL_STATES and "prune" in (first if commits else None, second)
        if found := found or left_undone(sessions.db, scene, pruned=pruned):
            problems[f"{first}, then {second}"] = found
    assert problems == {}


# --- crowds -----------------------------------------------------------------------------------------------------------

PRODUCERS = 64
CLAIMANTS = 32


@contextmanager
def crowd(connect: Connect, size: int) -> Iterator[tuple[ThreadPoolExecutor, list[psycopg.Connection]]]:
    """Open this many threads and connections, and close them at the end. A server allows a hundred."""
    connections = [connect(autocommit=True) for _ in range(size)]
    with ThreadPoolExecutor(size) as threads:
        yield threads, connections
    for connection in connections:
        connection.close()


def claim_again(session: psycopg.Connection, total: int = 100) -> list[ClaimedRow]:
    """Claim like a worker: again, if the claim met a row that another claim moved to another partition."""
    return claim(session, total=total, worker=f"worker-{session.info.backend_pid}", again_on=LOST_RACES)


def test_many_producers_of_one_key_deliver_the_last_committed_message(connect: Connect, db: psycopg.Connection) -> None:
    together = threading.Barrier(PRODUCERS + 1, timeout=PATIENCE_SECONDS)
    over = threading.Event()
    delivered: list[int] = []

    def produce(connection: psycopg.Connection, number: int) -> int | None:
        # They queue for one row, which on a slow machine takes longer than the tests' lock timeout.
        connection.execute("SET lock_timeout = '60s'")
        together.wait()
        connection.execute("BEGIN")
        message_id = enqueue(connection, payload=number, coalesce_key="k")
        connection.execute("COMMIT" if number % 2 else "ROLLBACK")
        return message_id if number % 2 else None

    def deliver() -> None:
        together.wait()
        while not over.is_set():
            deliver_what_is_due()

    def deliver_what_is_due() -> None:
        rows = [row for row in claim_again(db) if row.state == State.SENDING]
        overtaken = [row for row in rows if row.superseded]
        worker = f"worker-{db.info.backend_pid}"
        finish(
            db,
            *(End(row.id, row.attempt_count, AttemptOutcome.RETRY, "superseded") for row in overtaken),
            worker=worker,
        )
        sent = [row for row in rows if not row.superseded]
        delivered.extend(row.id for row in sent)
        finish_sent(db, *((row.id, row.attempt_count) for row in sent), worker=worker)

    with crowd(connect, PRODUCERS) as (threads, connections), ThreadPoolExecutor(1) as worker:
        futures = [threads.submit(produce, c, number) for number, c in enumerate(connections)]
        work = worker.submit(deliver)
        try:
            committed = {message_id for f in futures if (message_id := f.result(PATIENCE_SECONDS)) is not None}
        finally:
            over.set()
            work.result(PATIENCE_SECONDS)
    rolled_back = connect()
    enqueue(rolled_back, coalesce_key="k")
    rolled_back.rollback()
    deliver_what_is_due()
    assert len(committed) == PRODUCERS // 2
    assert {row.id for row in rows_of(db)} == committed
    assert delivered == sorted(set(delivered))
    assert delivered[-1] == max(committed)
    assert {row.id for row in rows_of(db) if row.state == "sent"} == set(delivered)
    assert {row.id for row in rows_of(db) if row.state == "skipped"} == committed - set(delivered)
    assert violations(db) == []


def test_many_workers_at_one_message_claim_it_once(connect: Connect, db: psycopg.Connection) -> None:
    together = threading.Barrier(CLAIMANTS, timeout=PATIENCE_SECONDS)

    def take(connection: psycopg.Connection) -> list[int]:
        together.wait()
        return ids_in_flight(claim_again(connection))

    message_id = enqueue(db, max_attempts=40)
    with crowd(connect, CLAIMANTS) as (threads, connections):
        for _ in range(20):
            taken = list(threads.map(take, connections))
            assert sorted(taken) == [*([[]] * (CLAIMANTS - 1)), [message_id]]
            lapse(db, message_id)
    assert row_of(db, message_id).attempt_count == 20
    assert violations(db) == []


def test_many_workers_at_many_messages_each_claim_some_and_none_twice(connect: Connect, db: psycopg.Connection) -> None:
    together = threading.Barrier(CLAIMANTS, timeout=PATIENCE_SECONDS)

    def claim_five(connection: psycopg.Connection) -> list[int]:
        return ids_in_flight(claim_again(connection, total=5))

    def take(connection: psycopg.Connection) -> list[int]:
        taken: list[int] = []
        together.wait()
        part = claim_five(connection)
        together.wait()  # Nobody claims twice before everybody has claimed.
        while part:
            taken += part
            finish_sent(connection, *((message_id, 1) for message_id in part))
            part = claim_five(connection)
        return taken

    ids = [
        row[0]
        for row in db.execute("SELECT pgoutbox.enqueue('greet', 'null') FROM generate_series(1, 1000)").fetchall()
    ]
    with crowd(connect, CLAIMANTS) as (threads, connections):
        shares = list(threads.map(take, connections))
    assert sorted(message_id for share in shares for message_id in share) == ids
    assert min(len(share) for share in shares) > 0
    assert violations(db) == []


# The storm has happened when every one of these answers has been given.
ANSWERS_OF_A_STORM = {
    "cancel: cancelled",
    "cancel: sent",
    "redrive: done",
    "redrive: refused",
    "resend: done",
    "prune: deleted",
}


class Storm:
    """Operators that cancel, redrive, resend and prune any message that they find, each on its own connection."""

    def __init__(self, dsn: str, ids: list[int], seed: int) -> None:
        self.settings = settings_for(dsn)
        self.ids = ids
        self.seed = seed
        self.resent: list[int] = []
        self.redriven: set[int] = set()
        self.cancelled: dict[int, int] = {}
        self.answers: Counter[str] = Counter()
        self.over = threading.Event()

    def cancel(self, session: psycopg.Connection, choice: random.Random) -> None:
        message_id = choice.choice(self.ids)
        answer = Operator(session).cancel(message_id).result
        self.answers[f"cancel: {answer}"] += 1
        if answer == "cancelled":
            self.cancelled[message_id] = self.cancelled.get(message_id, 0) + 1

    def redrive(self, session: psycopg.Connection, choice: random.Random) -> None:
        (batch,) = Operator(session).bulk("redrive", choice.sample(self.ids, 20))
        for answer in batch.results:
            self.answers[f"redrive: {'done' if answer.result is ActResult.REDRIVEN else 'refused'}"] += 1
            if answer.result is ActResult.REDRIVEN:
                self.redriven.add(answer.id)

    def redrive_failed(self, session: psycopg.Connection, choice: random.Random) -> None:
        for batch in Operator(session).bulk("redrive", MessageFilter(), batch_size=choice.randint(1, 30)):
            self.answers["redrive failed: done"] += sum(result.is_done for result in batch.results)

    def resend(self, session: psycopg.Connection, choice: random.Random) -> None:
        answer = Operator(session).resend(choice.choice(self.ids))
        if answer.is_done and answer.other_id is not None:
            self.resent.append(answer.other_id)
        self.answers[f"resend: {'done' if answer.is_done else 'refused'}"] += 1

    def prune(self, session: psycopg.Connection, choice: random.Random) -> None:
        totals = Operator(session).prune(
            timedelta(milliseconds=choice.randint(1, 300)), batch_size=choice.randint(1, 30)
        )
        self.answers["prune: deleted"] += totals.total

    def met(self) -> set[str]:
        """Return the kinds of answers so far."""
        return {answer for answer, count in list(self.answers.items()) if count}

    def rage(self, number: int) -> None:
        """Act as one operator until the storm is over."""
        choice = random.Random(self.seed + number)
        act = (self.cancel, self.redrive, self.redrive_failed, self.resend, self.prune)[number % 5]
        with session.connect(self.settings) as connection:
            while not self.over.is_set():
                act(connection, choice)


async def test_operators_storming_claiming_workers_break_no_rule_and_always_get_answers(
    dsn: str, db: psycopg.Connection
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    outbox = Outbox(settings_for(dsn, batch_size=20, concurrency=10))
    delivered: Counter[int] = Counter()

    @outbox.handler("greet", retry=RetryPolicy.steps(0, jitter=0))
    async def greet(message: Message, ctx: Context) -> None:
        delivered[message.id] += 1
        stumble(message)

    ids = [
        row[0]
        for row in db.execute(
            "SELECT pgoutbox.enqueue('greet', 'null', coalesce_key => CASE WHEN n % 3 = 0 THEN 'k' || n % 90 END) "
            "FROM generate_series(1, 2000) AS n"
        ).fetchall()
    ]
    storm = Storm(dsn, ids, seed)
    with ThreadPoolExecutor(5) as threads:
        operators = [threads.submit(storm.rage, number) for number in range(5)]
        try:
            async with running(Worker(outbox)), running(Worker(outbox)):
                await until(lambda: delivered.total() >= 800 and storm.met() >= ANSWERS_OF_A_STORM)
        finally:
            storm.over.set()
        for operator in operators:
            operator.result(PATIENCE_SECONDS)  # Raises an error that an operator got.
    await Worker(outbox).drain()
    assert violations(db) == []
    rows = {row.id: row for row in rows_of(db)}
    assert {row.state for row in rows.values()} <= {str(state) for state in FINAL_STATES}
    # Each operator that got `cancelled` was right: the message was not delivered, and only a redrive has revived it.
    for message_id in storm.cancelled.keys() - storm.redriven:
        assert message_id not in rows or rows[message_id].state == "cancelled"


# --- stale owners -----------------------------------------------------------------------------------------------------

# --- other interleavings ----------------------------------------------------------------------------------------------


def put_back_by_hand(db: psycopg.Connection, message_id: int) -> None:
    """Put a message back by SQL instead of a redrive: the count goes back, and its numbers repeat."""
    db.execute("ALTER TABLE pgoutbox.message DISABLE TRIGGER judge")
    db.execute(
        "UPDATE pgoutbox.message SET state = 'pending', attempt_count = 0, lane = 0, finished_at = NULL WHERE id = %s",
        [message_id],
    )


@pytest.mark.parametrize("end", ["retry", "lost"])
def test_a_message_put_back_by_hand_does_not_block_the_others(db: psycopg.Connection, end: str) -> None:
    """Its attempt number occurs again, and both attempts are in the history."""
    message_id = enqueue(db)
    claim(db)
    finish(db, End(message_id, 1, AttemptOutcome.FAILED, "first"))
    put_back_by_hand(db, message_id)
    other = enqueue(db)
    assert ids_in_flight(claim(db)) == [message_id, other]
    if end == "retry":
        verdicts = (
            End(message_id, 1, AttemptOutcome.RETRY, "second"),
            End(other, 1, AttemptOutcome.RETRY, "busy"),
        )
        assert finish(db, *verdicts) == {message_id: State.PENDING, other: State.PENDING}
    else:
        lapse(db, message_id)
        lapse(db, other)
    assert ids_in_flight(claim(db, worker="successor", spread=False)) == [message_id, other]
    assert [attempt[:2] for attempt in attempts_of(db, message_id)] == [(1, "failed"), (1, end)]
    assert [row.attempt_count for row in rows_of(db)] == [2, 2]


async def test_a_message_that_falls_due_during_the_due_time_query_is_delivered(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query reaches the server late. By then the message has been due for longer than the query looks back."""
    outbox = Outbox(settings_for(dsn))
    delivered, overslept = asyncio.Event(), asyncio.Event()
    trip = Link.trip
    questions: list[float] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        delivered.set()

    async def ask_late(self: Link, steps: Sequence[Step]) -> list[list[Row]]:
        asked = next((parameters for statement, parameters in steps if statement is statements.NEXT_DUE), None)
        if asked is None:
            return await trip(self, steps)
        since_seconds = cast("float", asked["since_seconds"])
        if since_seconds < PATIENCE_SECONDS:  # The first query, before any claim, has no lower bound.
            questions.append(since_seconds)
        if len(questions) == 1:
            db.execute("UPDATE pgoutbox.message_live SET available_at = clock_timestamp()")
            db.execute("SELECT pg_sleep(%s)", [since_seconds + 0.1])  # Simulates a slow network.
        results = await trip(self, steps)
        if all(seconds is None for row in results[-1] for seconds in row[3:5]) and questions:
            overslept.set()
        return results

    monkeypatch.setattr(Link, "trip", ask_late)
    message_id = enqueue(db)
    db.execute("UPDATE pgoutbox.message_live SET available_at = now() + interval '1 h'")
    async with running(Worker(outbox)):
        await first_of(delivered, overslept)
        assert delivered.is_set()
    assert state_of(db, message_id) == State.SENT

"""Tests concurrent operators at the dashboard and at the command line, on messages that two workers deliver."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs, urlsplit

import httpx
import psycopg

from pgoutbox import Outbox, RetryPolicy
from pgoutbox.dashboard import create_app
from pgoutbox.message import FINAL_STATES, Message, State
from pgoutbox.operations import Operator
from pgoutbox.worker import Worker
from tests.support.judge import violations
from tests.support.outbox_actions import rows_of, running, settings_for, stumble
from tests.support.waiting import PROCESS_PATIENCE_SECONDS, wait_until
from tests.support.web_server import OPERATOR_TOKEN, be_patient, serving, web_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from pgoutbox.handlers import Context

# Every answer that operators may get: done, the current state of the message, or pruned.
ANSWERS: Final = {
    *(("cancel", status) for status in (303, 404, 409)),
    *(("redrive", status) for status in (303, 404, 409)),
    *(("resend", status) for status in (303, 404, 409)),
    ("bulk", 303),
    ("bulk", 409),  # Two requests are in progress.
    ("pause", 303),
    ("resume", 303),
}

MORE: Final = "SELECT pgoutbox.enqueue('greet', 'null') FROM generate_series(1, 10)"
BACKLOG: Final = 50
RECENT: Final = 300


class Operators:
    """The operators and their answers."""

    def __init__(self, url: str, dsn: str, seed: int) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        self.told: defaultdict[str, list[int]] = defaultdict(list)
        self.pruned = 0
        self.over = threading.Event()
        self._url = url
        self._dsn = dsn
        self._ids: list[int] = []
        self._seed = seed

    def acts(self) -> list[Callable[[], None]]:
        """Run the loop of one operator until the end. One of them enqueues messages for the others."""
        on_one = [lambda act=act: self._act_on_one(act) for act in ("cancel", "redrive", "resend")]
        return [self._enqueue, *on_one, self._redrive_many, self._redrive_many, self._pause_and_resume, self._prune]

    def have_met_everything(self) -> bool:
        """Return whether each of the answers was given, and something was pruned."""
        return set(self.answers) >= ANSWERS and self.pruned > 0

    def _client(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {OPERATOR_TOKEN}", "Accept": "text/html"}
        return httpx.Client(base_url=self._url, headers=headers, timeout=PROCESS_PATIENCE_SECONDS)

    def _enqueue(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as db:
            while not self.over.is_set():
                ((owed,),) = db.execute("SELECT count(*) FROM pgoutbox.message_live").fetchall()
                if owed < BACKLOG:
                    self._ids += [row[0] for row in db.execute(MORE)]

    def _act_on_one(self, act: str) -> None:
        choice = random.Random(f"{self._seed} {act}")
        with self._client() as client:
            while not self.over.is_set():
                message_id = choice.choice(self._ids_for(act, choice) or [1])
                answer = client.post(f"/messages/{message_id}/{act}")
                self.answers[act, answer.status_code] += 1
                if answer.status_code == 303:
                    (done,) = parse_qs(urlsplit(answer.headers["location"]).query)["done"]
                    self.told[done].append(message_id)

    def _ids_for(self, act: str, choice: random.Random) -> list[int]:
        """Choose mostly new messages; the oldest, which are pruned; and for a redrive cancelled messages."""
        if choice.random() < 0.1:
            return self._ids[:RECENT]
        if act == "redrive" and choice.random() < 0.5:
            return self.told["cancelled"][-RECENT:]  # The bulk actions have usually taken the failed messages already.
        return self._ids[-RECENT:]

    def _redrive_many(self) -> None:
        with self._client() as client:
            while not self.over.is_set():
                answer = client.post("/bulk", data={"do": "redrive"})
                self.answers["bulk", answer.status_code] += 1

    def _pause_and_resume(self) -> None:
        with self._client() as client:
            while not self.over.is_set():
                for act in ("pause", "resume"):
                    answer = client.post(f"/queues/default/{act}")
                    self.answers[act, answer.status_code] += 1

    def _prune(self) -> None:
        command = [sys.executable, "-m", "pgoutbox", "prune", "--older-than", "1s", "--yes", "--json"]
        while not self.over.is_set():
            done = subprocess.run(
                command, env=os.environ | {"PGOUTBOX_DSN": self._dsn}, capture_output=True, text=True, check=True
            )
            self.pruned += sum(json.loads(done.stdout)["deleted"].values())


async def test_operators_always_get_answers_and_break_no_rule(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch)  # A late answer would be a 503.
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    outbox = Outbox(settings_for(dsn, batch_size=20, concurrency=10))
    handed_over: Counter[int] = Counter()

    @outbox.handler("greet", retry=RetryPolicy.steps(0, jitter=0))
    async def greet(message: Message, ctx: Context) -> None:
        stumble(message)
        handed_over[message.id] += 1

    settings = web_settings(dsn=dsn)
    with serving(create_app(settings), settings) as url:
        operators = Operators(url, dsn, seed)
        acts = operators.acts()
        with ThreadPoolExecutor(len(acts)) as threads:
            working = [threads.submit(act) for act in acts]
            try:
                async with running(Worker(outbox)), running(Worker(outbox)):
                    await asyncio.to_thread(
                        wait_until,
                        lambda: any(act.done() for act in working) or operators.have_met_everything(),
                        lambda: f"{ANSWERS - set(operators.answers)} were not given: {operators.answers}",
                    )
            finally:
                operators.over.set()
            for future in working:
                future.result(PROCESS_PATIENCE_SECONDS)  # Raises an error that an operator got.

    Operator(db).resume("default")
    await Worker(outbox).drain()
    assert set(operators.answers) == ANSWERS
    assert violations(db) == []
    states = {row.id: row.state for row in rows_of(db)}
    assert set(states.values()) <= {str(state) for state in FINAL_STATES}
    # Each operator that got `cancelled` was right, until somebody revived the message.
    for message_id in set(operators.told["cancelled"]) - set(operators.told["redriven"]):
        assert states.get(message_id, State.CANCELLED) == State.CANCELLED
        assert message_id not in handed_over
    # The audit records each act with its operator, once for each answer.
    on_record: dict[str, int] = dict(
        db.execute("SELECT action, count(*) FROM pgoutbox.audit WHERE actor = 'ada' GROUP BY action").fetchall()
    )
    answered = Counter({act: count for (act, status), count in operators.answers.items() if status == 303})
    for act in ("cancel", "resend", "pause", "resume"):
        assert on_record[act] == answered[act], act

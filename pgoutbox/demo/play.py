"""The scenario: an embedded PostgreSQL, an SMTP server, two worker processes, hundreds of people, one kill -9."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import psycopg

from pgoutbox import migrate
from pgoutbox.demo import service
from pgoutbox.demo.ledger import Verdict, balance, read_rows
from pgoutbox.demo.mailbox import BUSY, GONE, Mailbox, open_mailbox
from pgoutbox.demo.service import Enqueued
from pgoutbox.embedded import embedded_server
from pgoutbox.errors import PgOutboxError

if TYPE_CHECKING:
    from rich.console import Console

LEASE_SECONDS = 3
WORKER_COUNT = 2
KILL_AT_SHARE = 0.4
RESETS_PER_PERSON = 3
PACE_SECONDS = 0.012
ROLLBACK_SHARE = 0.15
DRAIN_LIMIT_SECONDS = 60.0

QUERIES = (
    "SELECT topic, state, count(*) FROM pgoutbox.message GROUP BY topic, state ORDER BY topic, state",
    "SELECT id, destination, state, attempt_count, last_error FROM pgoutbox.message WHERE state = 'failed'",
    "SELECT id, coalesce_key, skip_reason FROM pgoutbox.message WHERE superseded_by IS NOT NULL ORDER BY id LIMIT 5",
    "SELECT * FROM pgoutbox.attempt_view WHERE outcome = 'lost' ORDER BY message_id LIMIT 5",
)


@dataclass(slots=True)
class _Stage:
    """The parts of the scenario, and the application's own record of its transactions."""

    connection: psycopg.Connection
    mailbox: Mailbox
    workers: list[subprocess.Popen[bytes]]
    people: int
    chance: random.Random
    show: Callable[[str, float], None]
    committed: list[Enqueued] = field(default_factory=list)
    rolled_back: list[Enqueued] = field(default_factory=list)
    kill_planned: bool = False
    killed: bool = False

    def commit(self, *enqueued: Enqueued) -> None:
        self.connection.commit()
        now = time.monotonic()
        self.committed.extend(replace(message, committed_at=now) for message in enqueued)

    def roll_back(self, *enqueued: Enqueued) -> None:
        self.connection.rollback()
        self.rolled_back.extend(enqueued)


def run_demo(*, people: int = 300, seed: int | None = None, keep: bool = False, json_output: bool = False) -> int:
    """Play the scenario and print the result. Return 0 if the ledger balances, 1 if not.

    `people` sign up, some of them roll back; `keep` leaves the server running until Enter is pressed.
    """
    from rich.console import Console

    seed = secrets.randbelow(1_000_000) if seed is None else seed
    console = Console(stderr=json_output)
    console.print(f"[bold]pgoutbox demo[/]: {people} people sign up (seed {seed})", highlight=False)
    with contextlib.ExitStack() as stack:
        console.print("Starting PostgreSQL, an SMTP server and two workers ...")
        mailbox, port = stack.enter_context(open_mailbox())  # First: it names the extra that has everything.
        server = stack.enter_context(embedded_server())
        migrate.upgrade(server.dsn)
        connection = stack.enter_context(psycopg.connect(server.dsn))
        connection.execute(service.TABLES)
        connection.commit()
        workers = stack.enter_context(_workers(connection, server.dsn, port))
        began_at = time.monotonic()
        with _progress(console) as show:
            stage = _Stage(connection, mailbox, workers, people, random.Random(seed), show)
            _play(stage)
            _wait_until_drained(stage)
        seconds = time.monotonic() - began_at
        verdict = balance(stage.committed, stage.rolled_back, mailbox.receipts, read_rows(connection))
        if not stage.killed:
            verdict.problems.append("no worker was killed: the scenario did not happen")
        if json_output:
            answer = {"people": people, "seed": seed, "seconds": round(seconds, 3), **vars(verdict)}
            print(json.dumps(answer))  # noqa: T201 - the answer of the command
        else:
            _report(console, verdict, stage, seconds)
        if keep:
            console.print(f"\nThe server runs until you press Enter: psql '{server.dsn}'", highlight=False)
            with contextlib.suppress(EOFError, KeyboardInterrupt):
                input()
    return 1 if verdict.problems else 0


def _play(stage: _Stage) -> None:
    signed_up: list[str] = []
    for number in range(stage.people):
        email = {10: GONE, 20: BUSY}.get(number, f"person{number}@example.org")
        enqueued = service.sign_up(stage.connection, f"Person {number}", email)
        if number % 25 == 24:
            service.leave(stage.connection, email)  # Messages about a person who left are skipped.
        if email not in (GONE, BUSY) and stage.chance.random() < ROLLBACK_SHARE:
            stage.roll_back(*enqueued)
        else:
            stage.commit(*enqueued)
            signed_up.append(email)
        if signed_up and number % 4 == 3:
            _ask_for_resets(stage, stage.chance.choice(signed_up))
        _kill_when_it_is_time(stage)
        stage.show(_counts(stage), number / stage.people)
        time.sleep(PACE_SECONDS)


def _ask_for_resets(stage: _Stage, email: str) -> None:
    """Ask for several resets, each in a transaction; sometimes the last one is rolled back."""
    for request in range(1, RESETS_PER_PERSON + 1):
        reset = service.ask_for_reset(stage.connection, email, request)
        if request == RESETS_PER_PERSON and stage.chance.random() < ROLLBACK_SHARE:
            stage.roll_back(reset)
        else:
            stage.commit(reset)


def _kill_when_it_is_time(stage: _Stage) -> None:
    """kill -9 at the worst moment: the server has accepted an e-mail, and the worker has not got the answer yet."""
    if stage.kill_planned or stage.mailbox.count <= KILL_AT_SHARE * 2 * stage.people:
        return

    def kill(name: str) -> None:
        worker = next(worker for number, worker in enumerate(stage.workers) if _host_name(number) == name)
        worker.kill()
        worker.wait()
        stage.killed = True

    stage.kill_planned = True
    # Of a newer password reset, the older one would not be handed over again.
    stage.mailbox.on_next_accepted(service.WELCOME, kill)


def _wait_until_drained(stage: _Stage) -> None:
    deadline = time.monotonic() + DRAIN_LIMIT_SECONDS
    most = 1
    while time.monotonic() < deadline:
        row = stage.connection.execute("SELECT count(*) FROM pgoutbox.message_live").fetchone()
        stage.connection.rollback()
        left = row[0] if row else 0
        most = max(most, left)
        stage.show(f"{_counts(stage)}  waiting for {left}", 1 - left / most)
        if left == 0:
            return
        time.sleep(PACE_SECONDS)


def _counts(stage: _Stage) -> str:
    killed = "  one worker killed -9" if stage.killed else ""
    return f"committed {len(stage.committed)}  received {stage.mailbox.count}{killed}"


@contextlib.contextmanager
def _workers(connection: psycopg.Connection, dsn: str, port: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PGOUTBOX_")}
    environment |= {
        "PGOUTBOX_DSN": dsn,
        "PGOUTBOX_LEASE_SECONDS": str(LEASE_SECONDS),
        "PGOUTBOX_SMTP_HOST": "127.0.0.1",
        "PGOUTBOX_SMTP_PORT": str(port),
        "PGOUTBOX_SMTP_SECURITY": "none",
        "PGOUTBOX_SMTP_SENDER": "Club <club@example.org>",
        "PGOUTBOX_LOG_LEVEL": "ERROR",
    }
    command = [sys.executable, "-m", "pgoutbox", "worker", "--app", "pgoutbox.demo.service:outbox"]
    processes = [
        subprocess.Popen(
            command,
            env=environment | {"PGOUTBOX_SMTP_EHLO_NAME": _host_name(number)},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        for number in range(WORKER_COUNT)
    ]
    try:
        _wait_until_listening(connection, processes)
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _host_name(number: int) -> str:
    return f"worker{number}.example.org"


def _wait_until_listening(connection: psycopg.Connection, processes: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + 20
    while True:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgoutbox listen'"
        ).fetchone()
        connection.rollback()
        if row is not None and row[0] >= len(processes):
            return
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            raise PgOutboxError("the workers did not start; the lines above say why")
        time.sleep(PACE_SECONDS)


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, float], None]]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda text, share: progress.update(task, description=text, completed=share)


def _report(console: Console, verdict: Verdict, stage: _Stage, seconds: float) -> None:
    from rich.table import Table

    table = Table(title=f"Result of {stage.people} people in {seconds:.1f} s", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for label, value, remark in _lines(verdict, stage.mailbox):
        table.add_row(label, value, remark)
    console.print(table)
    console.print("Look at it yourself (pgoutbox demo --keep leaves the server running):", style="dim")
    for query in QUERIES:
        console.print(f"  {query};", style="dim", highlight=False, soft_wrap=True)
    if verdict.problems:
        console.print(f"\n[bold red]The ledger does not add up: {len(verdict.problems)} problems[/]")
        for problem in verdict.problems[:20]:
            console.print(f"  {problem}", highlight=False)
    else:
        console.print("\n[bold green]The ledger adds up.[/]")


def _lines(verdict: Verdict, mailbox: Mailbox) -> Iterator[tuple[str, str, str]]:
    for kind, count in sorted(verdict.committed.items()):
        yield f"committed: {kind.replace('_', ' ')}", str(count), ""
    yield "rolled back", str(verdict.rolled_back), "none of them was delivered"
    yield "received by the SMTP server", str(verdict.received), f"{verdict.distinct} different messages"
    yield (
        "received twice",
        str(verdict.unavoidable_duplicates),
        "in flight when the worker was killed, same Message-ID",
    )
    yield "sent", str(verdict.states["sent"]), ""
    yield "skipped", str(verdict.states["skipped"]), f"{verdict.superseded} superseded, the others had left"
    yield "failed", str(verdict.states["failed"]), f"the mailbox that said 550 ({mailbox.refusals[550]} times)"
    yield "retried", str(verdict.retried), f"451 was said {mailbox.refusals[451]} times, the kill did the rest"
    yield "latency p50", f"{verdict.latency_p50_ms:.1f} ms", "commit to hand-over, first attempts"
    yield "latency p99", f"{verdict.latency_p99_ms:.1f} ms", ""

"""While a breaker is open, the messages behind it wait untouched, and all other messages go on."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, LiteralString

import pytest

from tests.support.command_line import run_process
from tests.support.dialogues import HOST
from tests.support.smtp_server import accepting_server
from tests.support.waiting import wait_until
from tests.support.webhook_server import webhook_server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import psycopg

    from tests.promises.conftest import StartWorker
    from tests.support.worker_process import WorkerProcess

pytestmark = pytest.mark.slow

APPLICATION: Final = """
    from pgoutbox import Context, Email, Message, Outbox, Topic, Webhook

    outbox = Outbox()
    for queue in ("mail", "hooks", "texts"):
        outbox.define(Topic(f"of.{queue}", queue=queue))


    @outbox.handler("notice")
    async def notice(message: Message, ctx: Context) -> Email | Webhook:
        if message.destination.startswith("mailto:"):
            return Email(subject="Notice", text="Hello")
        return Webhook(body={"id": message.id}, signed=False)


    @outbox.handler("text")
    async def text(message: Message, ctx: Context) -> None: ...


    @outbox.handler("pgoutbox.alert")
    async def alert(message: Message, ctx: Context) -> None: ...
"""
# Messages that a worker may have claimed when the breaker opens: slots, surplus and two batches.
IN_FLIGHT: Final = 60
NIGHT_COUNT: Final = int(os.environ.get("PGOUTBOX_TEST_NIGHT_COUNT", "10000"))


@pytest.fixture
def mail_port() -> int:
    """A port where no server listens until the test starts one."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        return int(free.getsockname()[1])


@pytest.fixture
def start(start_worker: StartWorker, mail_port: int) -> Callable[..., WorkerProcess]:
    """Start a worker whose mail server may be dead; its breaker probes twice a second."""

    def start(*queues: str, hook_port: int = 443, **settings: str) -> WorkerProcess:
        told: dict[str, Any] = {
            "concurrency": "10",
            "batch_size": "10",
            "smtp_host": HOST,
            "smtp_port": str(mail_port),
            "smtp_security": "none",
            "smtp_sender": "club@example.org",
            "webhook_allow_http": "true",
            "webhook_allowed_networks": f"{HOST}/32",
            "webhook_ports": str(hook_port),
            "breaker_cooldown_seconds": "0.5",
            "breaker_max_cooldown_seconds": "0.5",
        }
        named = [argument for queue in queues for argument in ("--queue", queue)]
        return start_worker(APPLICATION, *named, **told | settings)

    return start


def enqueue(
    db: psycopg.Connection,
    count: int,
    *,
    topic: str = "notice",
    queue: str = "mail",
    destination: str | None = "mailto:ada@example.org",
    **options: object,
) -> None:
    """Enqueue messages; an ordering key gets a number."""
    key = options.pop("ordering_key", None)
    db.execute(
        "SELECT pgoutbox.enqueue(%s, '{}', queue => %s, destination => %s,"
        " ordering_key => %s::text || n, expires_after => %s::interval) FROM generate_series(1, %s) AS n",
        (topic, queue, destination, key, options.pop("expires_after", None), count),
    )
    assert not options


def count(db: psycopg.Connection, condition: str, *parameters: object) -> int:
    ((number,),) = db.execute(f"SELECT count(*) FROM pgoutbox.message WHERE {condition}", parameters).fetchall()
    return int(number)


def claims_of(db: psycopg.Connection, condition: str) -> int:
    """Count how often these messages were claimed, each time with two writes."""
    ((number,),) = db.execute(
        f"SELECT coalesce(sum(attempt_count), 0) FROM pgoutbox.message WHERE {condition}"
    ).fetchall()
    return int(number)


def is_other(db: psycopg.Connection, query: LiteralString, answer: object) -> bool:
    return db.execute(query).fetchall() != answer


async def become(condition: Callable[[], object], what: Callable[[], object]) -> None:
    """Wait for the condition, while the servers of this test answer."""
    await asyncio.to_thread(wait_until, condition, lambda: str(what()))


async def probes(worker: WorkerProcess, number: int) -> int:
    """Wait for more failed probes, and return the number of all."""
    seen = len(worker.records("breaker_reopened"))
    await become(lambda: len(worker.records("breaker_reopened")) >= seen + number, lambda: worker.log[-500:])
    return len(worker.records("breaker_reopened"))


async def test_later_queues_of_a_strict_order_go_on_while_the_mail_server_is_dead(
    db: psycopg.Connection, start: Callable[..., WorkerProcess], mail_port: int
) -> None:
    async with webhook_server() as hooks:
        enqueue(db, 3_000)
        enqueue(db, 200, queue="hooks", destination=hooks.url(scheme="http"))
        enqueue(db, 200, queue="texts", topic="text", destination=None)
        worker = start("mail", "hooks", "texts", hook_port=hooks.port)

        await become(
            lambda: count(db, "state = 'sent' AND queue IN ('hooks', 'texts')") == 400,
            lambda: db.execute("SELECT queue, state, count(*) FROM pgoutbox.message GROUP BY 1, 2").fetchall(),
        )
        assert len(hooks.received) == 200
        failed_probes = await probes(worker, 3)
        assert claims_of(db, "queue = 'mail' AND topic = 'notice'") <= IN_FLIGHT + 2 * failed_probes
        assert count(db, "state = 'sent' AND topic = 'pgoutbox.alert'") == 1

        async with accepting_server(port=mail_port) as inbox:
            await become(lambda: len(inbox.received) == 3_000, lambda: len(inbox.received))
            await become(lambda: count(db, "state <> 'sent'") == 0, lambda: worker.log[-500:])


async def test_a_dead_host_holds_no_message_of_another_host(
    db: psycopg.Connection, start: Callable[..., WorkerProcess], mail_port: int
) -> None:
    async with webhook_server() as hooks:
        enqueue(db, 1_000, queue="hooks", destination=f"http://{HOST}:{mail_port}/hook")
        enqueue(db, 200, queue="hooks", destination=hooks.url(scheme="http"))
        worker = start("hooks", webhook_ports=f"{hooks.port},{mail_port}")

        await become(lambda: len(hooks.received) == 200, lambda: len(hooks.received))
        failed_probes = await probes(worker, 3)
        assert claims_of(db, f"destination LIKE '%:{mail_port}/%'") <= IN_FLIGHT + 2 * failed_probes


async def test_other_destinations_of_the_same_topic_and_queue_go_on(
    db: psycopg.Connection, start: Callable[..., WorkerProcess]
) -> None:
    async with webhook_server() as hooks:
        enqueue(db, 2_000)
        enqueue(db, 200, destination=hooks.url(scheme="http"))
        worker = start("mail", hook_port=hooks.port)
        await become(lambda: len(hooks.received) == 200, lambda: len(hooks.received))

        enqueue(db, 1, destination=hooks.url(scheme="http"))
        await become(lambda: len(hooks.received) == 201, lambda: len(hooks.received))
        failed_probes = await probes(worker, 3)
        assert claims_of(db, "destination LIKE 'mailto:%%'") <= IN_FLIGHT + 2 * failed_probes


async def test_messages_behind_a_breaker_stay_within_the_limits_of_their_queue_and_expire(
    db: psycopg.Connection, start: Callable[..., WorkerProcess], mail_port: int
) -> None:
    db.execute("INSERT INTO pgoutbox.queue (name, max_in_flight) VALUES ('mail', 5)")
    enqueue(db, 200)
    worker = start("mail")
    failed_probes = await probes(worker, 3)
    assert claims_of(db, "topic = 'notice'") <= IN_FLIGHT + 2 * failed_probes

    enqueue(db, 10, expires_after="1 second")
    await become(lambda: count(db, "state = 'skipped'") == 10, lambda: worker.log[-500:])
    async with accepting_server(port=mail_port):
        await become(lambda: count(db, "state = 'sent' AND topic = 'notice'") == 200, lambda: worker.log[-500:])


async def test_ordered_messages_behind_a_breaker_wait_too(
    db: psycopg.Connection, start: Callable[..., WorkerProcess], mail_port: int
) -> None:
    enqueue(db, 500, ordering_key="member ")
    worker = start("mail")
    failed_probes = await probes(worker, 3)
    assert claims_of(db, "topic = 'notice'") <= IN_FLIGHT + 2 * failed_probes
    async with accepting_server(port=mail_port):
        await become(lambda: count(db, "state = 'sent' AND topic = 'notice'") == 500, lambda: worker.log[-500:])


async def test_an_operator_who_closes_the_breaker_sends_the_messages_at_once(
    db: psycopg.Connection, start: Callable[..., WorkerProcess], mail_port: int
) -> None:
    enqueue(db, 300)
    worker = start("mail", breaker_cooldown_seconds="3600", breaker_max_cooldown_seconds="3600")
    await become(lambda: worker.records("breaker_opened"), lambda: worker.log[-500:])
    # A send that is still in flight would open it again.
    await become(lambda: count(db, "state = 'sending'") == 0, lambda: worker.log[-500:])
    async with accepting_server(port=mail_port):
        db.execute("SELECT pgoutbox.close_breaker(key) FROM pgoutbox.breaker")
        await become(
            lambda: count(db, "state = 'sent' AND topic = 'notice'") == 300,
            lambda: db.execute("SELECT state, count(*) FROM pgoutbox.message GROUP BY 1").fetchall(),
        )


async def test_a_mail_that_another_worker_releases_during_the_outage_is_sent_after_it(
    db: psycopg.Connection, start: Callable[..., WorkerProcess], mail_port: int
) -> None:
    enqueue(db, 300)
    workers = [start("mail"), start("mail")]
    failed_probes = [await probes(worker, 1) for worker in workers]
    assert claims_of(db, "topic = 'notice'") <= 2 * IN_FLIGHT + 4 * sum(failed_probes)
    workers[0].stop()
    async with accepting_server(port=mail_port):
        await become(lambda: count(db, "state = 'sent' AND topic = 'notice'") == 300, lambda: workers[1].log[-500:])


async def test_list_and_doctor_name_the_breaker_as_the_cause(
    db: psycopg.Connection, dsn: str, start: Callable[..., WorkerProcess]
) -> None:
    enqueue(db, 300)
    worker = start("mail", breaker_cooldown_seconds="3600", breaker_max_cooldown_seconds="3600")
    await become(lambda: worker.records("breaker_opened"), lambda: worker.log[-500:])
    reasons = "SELECT reason, count(*) FROM pgoutbox.waiting_view GROUP BY 1"
    await become(lambda: db.execute(reasons).fetchall() == [("breaker", 300)], lambda: db.execute(reasons).fetchall())
    ((distance,),) = db.execute(
        "SELECT max(until) - max(retry_at) FROM pgoutbox.waiting_view, pgoutbox.breaker WHERE attempt_count = 0"
    ).fetchall()
    assert distance.total_seconds() == 0

    listed = run_process("list", "--queue", "mail", "--json", dsn=dsn)
    assert '"breaker"' in listed.out
    db.execute("UPDATE pgoutbox.message SET available_at = now() - interval '1 hour' WHERE attempt_count = 0")
    examined = run_process("doctor", dsn=dsn).out
    assert "queue mail" in examined
    assert "behind the breaker" in examined
    assert "keep up" not in examined


@pytest.mark.parametrize("queues", [("mail", "hooks", "texts"), ("*",)], ids=["strict", "all"])
async def test_a_night_with_a_dead_mail_server(
    db: psycopg.Connection, start: Callable[..., WorkerProcess], queues: Sequence[str]
) -> None:
    """Print the rates of both orders, to compare them: `pytest -n 0 -s`."""
    async with webhook_server() as hooks:
        enqueue(db, NIGHT_COUNT)
        enqueue(db, NIGHT_COUNT // 100, queue="hooks", destination=hooks.url(scheme="http"))
        enqueue(db, NIGHT_COUNT // 100, queue="texts", topic="text", destination=None)
        db.execute("ANALYZE pgoutbox.message_live")
        worker = start(*queues, hook_port=hooks.port, breaker_cooldown_seconds="2", breaker_max_cooldown_seconds="60")
        await become(lambda: worker.records("breaker_opened"), lambda: worker.log[-500:])
        began_at = time.monotonic()
        waiting = "SELECT count(*) FROM pgoutbox.message_live WHERE queue IN ('hooks', 'texts')"
        while left := db.execute(waiting).fetchall():
            if left == [(0,)]:
                break
            await become(partial(is_other, db, waiting, left), lambda: worker.log[-500:])
        per_minute = NIGHT_COUNT // 50 / (time.monotonic() - began_at) * 60
        failed_probes = await probes(worker, 1)
        claims = claims_of(db, "destination LIKE 'mailto:%%'")
        rewritten = count(db, "attempt_count > 0 AND destination LIKE 'mailto:%%'")
        print(  # noqa: T201 - the measurement
            f"\n{' '.join(queues)}: {NIGHT_COUNT} e-mails, {rewritten} rewritten in {claims} claims, {failed_probes}"
            f" failed probes, webhooks and texts per minute: {per_minute:.0f}"
        )
        assert claims <= IN_FLIGHT + 2 * failed_probes

"""While a breaker is open, the messages behind it wait untouched, and all other messages go on."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, LiteralString

import pytest

from tests.support.command_line import run_process
from tests.support.dialogues import HOST
from tests.support.outbox_actions import cancel
from tests.support.smtp_server import accepting_server
from tests.support.waiting import wait_until
from tests.support.webhook_server import webhook_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import psycopg

    from tests.conftest import Connect
    from tests.promises.conftest import StartWorker
    from tests.support.worker_process import WorkerProcess

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
LATER_APPLICATION: Final = APPLICATION.replace(
    '@outbox.handler("notice")', '@outbox.handler(Topic("notice", version=2))'
)
# Messages that a worker may have claimed when the breaker opens: slots, surplus and two batches.
IN_FLIGHT: Final = 60


@pytest.fixture
def mail_port() -> int:
    """A port where no server listens until the test starts one."""
    return dead_ports(1)[0]


@pytest.fixture
def silent_ports() -> Iterator[Sequence[int]]:
    """Return ports of servers that take connections and never answer."""
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server((HOST, 0), backlog=100)) for _ in range(12)]
        yield [int(one.getsockname()[1]) for one in servers]


@pytest.fixture
def start(start_worker: StartWorker, mail_port: int) -> Callable[..., WorkerProcess]:
    """Start a worker whose mail server may be dead; its breaker probes twice a second."""

    def start(*queues: str, hook_port: int = 443, application: str = APPLICATION, **settings: str) -> WorkerProcess:
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
        return start_worker(application, *named, **told | settings)

    return start


def dead_ports(number: int) -> list[int]:
    """Return ports where no server listens."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind((HOST, 0))
        return [int(one.getsockname()[1]) for one in sockets]


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
        " ordering_key => %s::text || n, expires_after => %s::interval, payload_version => %s)"
        " FROM generate_series(1, %s) AS n",
        (
            topic,
            queue,
            destination,
            key,
            options.pop("expires_after", None),
            options.pop("payload_version", 1),
            count,
        ),
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


def holds(db: psycopg.Connection) -> list[str]:
    """Return which messages wait unclaimed."""
    return [hold for (hold,) in db.execute("SELECT unnest(holds) FROM pgoutbox.breaker_view").fetchall()]


async def become(condition: Callable[[], object], what: Callable[[], object]) -> None:
    """Wait for the condition, while the servers of this test answer."""
    await asyncio.to_thread(wait_until, condition, lambda: str(what()))


def failed_probes(workers: Sequence[WorkerProcess]) -> int:
    return sum(len(worker.records("breaker_reopened")) for worker in workers)


async def probes(worker: WorkerProcess, number: int) -> int:
    """Wait for more failed probes, and return the number of all."""
    seen = len(worker.records("breaker_reopened"))
    await become(lambda: len(worker.records("breaker_reopened")) >= seen + number, lambda: worker.log[-500:])
    return len(worker.records("breaker_reopened"))


async def test_later_queues_of_a_strict_order_go_on_while_the_mail_server_is_dead(
    db: psycopg.Connection, start: Callable[..., WorkerProcess]
) -> None:
    async with webhook_server() as hooks:
        enqueue(db, 3_000)
        enqueue(db, 200, queue="hooks", destination=hooks.url(scheme="http"))
        enqueue(db, 200, queue="texts", topic="text", destination=None)
        worker = start("mail", "hooks", "texts", hook_port=hooks.port)
        failed = await probes(worker, 10)
        assert claims_of(db, "queue = 'mail' AND topic = 'notice'") <= IN_FLIGHT + 2 * failed
        assert count(db, "state = 'sent' AND queue IN ('hooks', 'texts')") == 400


async def test_a_dead_host_holds_no_message_of_another_host(
    db: psycopg.Connection, start: Callable[..., WorkerProcess], mail_port: int
) -> None:
    async with webhook_server() as hooks:
        enqueue(db, 1_000, queue="hooks", destination=f"http://{HOST}:{mail_port}/hook")
        enqueue(db, 200, queue="hooks", destination=hooks.url(scheme="http"))
        worker = start("hooks", webhook_ports=f"{hooks.port},{mail_port}")

        await become(lambda: len(hooks.received) == 200, lambda: len(hooks.received))
        failed = await probes(worker, 3)
        assert claims_of(db, f"destination LIKE '%:{mail_port}/%'") <= IN_FLIGHT + 2 * failed


async def test_messages_behind_a_breaker_stay_within_the_limits_of_their_queue_and_expire(
    db: psycopg.Connection, start: Callable[..., WorkerProcess], mail_port: int
) -> None:
    db.execute("INSERT INTO pgoutbox.queue (name, max_in_flight) VALUES ('mail', 5)")
    enqueue(db, 200)
    worker = start("mail")
    failed = await probes(worker, 3)
    assert claims_of(db, "topic = 'notice'") <= IN_FLIGHT + 2 * failed

    enqueue(db, 10, expires_after="1 second")
    await become(lambda: count(db, "state = 'skipped'") == 10, lambda: worker.log[-500:])
    async with accepting_server(port=mail_port):
        await become(lambda: count(db, "state = 'sent' AND topic = 'notice'") == 200, lambda: worker.log[-500:])


async def test_ordered_messages_behind_a_breaker_wait_too(
    db: psycopg.Connection, start: Callable[..., WorkerProcess], mail_port: int
) -> None:
    enqueue(db, 500, ordering_key="member ")
    worker = start("mail")
    failed = await probes(worker, 3)
    assert claims_of(db, "topic = 'notice'") <= IN_FLIGHT + 2 * failed
    async with accepting_server(port=mail_port):
        await become(lambda: count(db, "state = 'sent' AND topic = 'notice'") == 500, lambda: worker.log[-500:])


async def test_cancelled_messages_behind_a_breaker_end_and_hold_nobody_up(
    db: psycopg.Connection, connect: Connect, start: Callable[..., WorkerProcess]
) -> None:
    """A cancel that finds the message locked becomes a request, which the next claim fulfils."""
    keys = (None, "member ")
    for key in keys:
        enqueue(db, 1, ordering_key=key)
    opener = start("mail", breaker_cooldown_seconds="3600", breaker_max_cooldown_seconds="3600")
    await become(lambda: holds(db) and count(db, "topic = 'notice' AND state = 'pending'") == 2, lambda: opener.log)
    opener.stop()
    locker = connect()
    locked = locker.execute("SELECT id FROM pgoutbox.message WHERE topic = 'notice' FOR UPDATE").fetchall()
    assert [cancel(db, message_id) for (message_id,) in locked] == ["requested"] * 2
    locker.rollback()
    for key in keys:
        enqueue(db, 1, topic="text", destination=None, ordering_key=key)
    worker = start("mail")
    await become(lambda: count(db, "topic = 'text' AND state = 'sent'") == 2, lambda: worker.log)
    await become(lambda: count(db, "topic = 'notice' AND state = 'cancelled'") == 2, lambda: worker.log)


async def test_a_recovered_host_is_probed_beside_the_backlog_of_a_dead_one(
    db: psycopg.Connection, start: Callable[..., WorkerProcess]
) -> None:
    dead, mended = dead_ports(2)
    enqueue(db, 3_000, queue="hooks", destination=f"http://{HOST}:{dead}/hook")
    enqueue(db, 20, queue="hooks", destination=f"http://{HOST}:{mended}/hook")
    worker = start("hooks", webhook_ports=f"{dead},{mended}")
    await become(lambda: len(worker.records("breaker_opened")) == 2, lambda: worker.log[-500:])
    async with webhook_server(port=mended) as hooks:
        await become(lambda: len(hooks.received) == 20, lambda: len(hooks.received))


async def test_probes_of_hosts_that_hang_leave_slots_to_others(
    db: psycopg.Connection, start: Callable[..., WorkerProcess], silent_ports: Sequence[int]
) -> None:
    for port in silent_ports:
        enqueue(db, 4, queue="hooks", destination=f"http://{HOST}:{port}/hook")
    async with webhook_server() as hooks:
        ports = ",".join(map(str, [hooks.port, *silent_ports]))
        worker = start("hooks", webhook_ports=ports, webhook_timeout_seconds="0.5", breaker_failures="2")
        await become(lambda: len(worker.records("breaker_opened")) == len(silent_ports), lambda: worker.log[-500:])
        worker.stop()

        worker = start("hooks", webhook_ports=ports, webhook_timeout_seconds="600")
        await become(lambda: count(db, "state = 'sending'") >= 2, lambda: worker.log[-500:])
        enqueue(db, 500, queue="hooks", destination=hooks.url(scheme="http"))
        await become(lambda: len(hooks.received) == 500, lambda: len(hooks.received))


async def test_messages_behind_a_breaker_take_no_tokens_of_a_rate(
    db: psycopg.Connection, start: Callable[..., WorkerProcess]
) -> None:
    async with webhook_server() as hooks:
        db.execute("INSERT INTO pgoutbox.queue (name, rate_seconds, rate_count, burst) VALUES ('mail', 1, 20, 20)")
        enqueue(db, 500)
        worker = start("mail", hook_port=hooks.port)
        await become(lambda: worker.records("breaker_opened"), lambda: worker.log[-500:])
        enqueue(db, 100, destination=hooks.url(scheme="http"))
        await become(lambda: len(hooks.received) == 100, lambda: len(hooks.received))
        failed = await probes(worker, 1)
        ((begun,),) = db.execute("SELECT begun_count FROM pgoutbox.queue WHERE name = 'mail'").fetchall()
        assert begun - 100 <= IN_FLIGHT + 2 * failed


async def test_an_operator_who_closes_the_breaker_sets_all_workers_to_work(
    db: psycopg.Connection, start: Callable[..., WorkerProcess], mail_port: int
) -> None:
    pause = {"breaker_cooldown_seconds": "3600", "breaker_max_cooldown_seconds": "3600"}
    workers = [start("mail", poll_interval_seconds="3600", **pause) for _ in range(2)]
    closes: Sequence[LiteralString] = (
        "SELECT pgoutbox.close_breaker(key) FROM pgoutbox.breaker",
        "DELETE FROM pgoutbox.breaker",
    )
    of_these = "topic = 'notice' AND id > %s"
    for close in closes:
        ((last_id,),) = db.execute("SELECT coalesce(max(id), 0) FROM pgoutbox.message").fetchall()
        enqueue(db, 500)
        await become(lambda: holds(db), lambda: workers[0].log[-500:])
        # A send that is still in flight would open it again.
        await become(lambda: count(db, "state = 'sending'") == 0, lambda: workers[0].log[-500:])
        async with accepting_server(port=mail_port):
            db.execute(close)
            await become(
                lambda after=last_id: count(db, f"state = 'sent' AND {of_these}", after) == 500,  # type: ignore[misc]
                lambda: workers[0].log[-500:],
            )
        query = f"SELECT count(DISTINCT worker) FROM pgoutbox.message WHERE {of_these}"
        assert db.execute(query.encode(), [last_id]).fetchone() == (2,)


async def test_a_worker_that_sends_on_another_way_sends_all_messages(
    db: psycopg.Connection, start: Callable[..., WorkerProcess], mail_port: int
) -> None:
    """A setting was wrong: the breaker of the old mail server stays open, and no message needs it."""
    enqueue(db, 500)
    worker = start("mail")
    await probes(worker, 1)
    worker.stop()
    async with accepting_server() as inbox:
        worker = start(
            "mail", smtp_port=str(inbox.port), breaker_cooldown_seconds="60", breaker_max_cooldown_seconds="60"
        )
        await become(lambda: count(db, "state = 'sent' AND topic = 'notice'") == 500, lambda: worker.log[-500:])


async def test_the_only_message_behind_a_breaker_is_its_next_probe(
    db: psycopg.Connection, start: Callable[..., WorkerProcess], mail_port: int
) -> None:
    enqueue(db, 100)
    worker = start("mail")
    await probes(worker, 1)
    db.execute("SELECT pgoutbox.cancel(id) FROM pgoutbox.message WHERE state IN ('pending', 'sending')")
    assert count(db, "state = 'cancelled'") > 90
    await become(lambda: not holds(db), lambda: holds(db))
    enqueue(db, 1)
    await probes(worker, 2)
    async with accepting_server(port=mail_port):
        await become(lambda: count(db, "state = 'sent' AND topic = 'notice'") == 1, lambda: worker.log[-500:])


async def test_a_worker_that_does_not_know_their_payload_version_leaves_messages_behind_a_breaker_to_others(
    db: psycopg.Connection, start: Callable[..., WorkerProcess]
) -> None:
    enqueue(db, 500, payload_version=2)
    later = start("mail", application=LATER_APPLICATION)
    await probes(later, 1)
    assert later.stop() == 0
    is_over = "SELECT bool_and(retry_at < now()) FROM pgoutbox.breaker_view"
    await become(lambda: db.execute(is_over).fetchone() == (True,), lambda: later.log)
    earlier = start("mail")
    for number in (1, 2, 3):
        enqueue(db, 1, topic="text", destination=None)
        await become(lambda sent=number: count(db, "topic = 'text' AND state = 'sent'") == sent, lambda: earlier.log)  # type: ignore[misc]
    assert holds(db) == ["mail notice@2 mailto"]
    claimed = claims_of(db, "topic = 'notice'")
    later = start("mail", application=LATER_APPLICATION)
    failed = await probes(later, 2)
    assert claims_of(db, "topic = 'notice'") <= claimed + failed + 1


async def test_a_lost_worker_leaves_the_probe_to_another_one(
    db: psycopg.Connection, start: Callable[..., WorkerProcess], silent_ports: Sequence[int]
) -> None:
    enqueue(db, 500)
    settings = {"smtp_port": str(silent_ports[0]), "breaker_probe_timeout_seconds": "3"}
    worker = start("mail", smtp_timeout_seconds="1", **settings)
    await become(lambda: worker.records("breaker_opened"), lambda: worker.log[-500:])
    worker.stop()
    worker = start("mail", smtp_timeout_seconds="60", **settings)
    await become(lambda: count(db, "state = 'sending'"), lambda: worker.log[-500:])
    worker.kill()
    await probes(start("mail", smtp_timeout_seconds="1", **settings), 1)


async def test_list_and_doctor_name_the_breaker_as_the_cause(
    db: psycopg.Connection, dsn: str, start: Callable[..., WorkerProcess]
) -> None:
    enqueue(db, 300)
    worker = start("mail", breaker_cooldown_seconds="3600", breaker_max_cooldown_seconds="3600")
    await become(lambda: worker.records("breaker_opened"), lambda: worker.log[-500:])
    reasons = (
        "SELECT reason, count(*) FROM pgoutbox.waiting_view WHERE topic = 'notice' AND attempt_count = 0 GROUP BY 1"
    )
    await become(lambda: [row[0] for row in db.execute(reasons)] == ["breaker"], lambda: db.execute(reasons).fetchall())

    db.execute("UPDATE pgoutbox.message SET available_at = now() - interval '1 hour' WHERE attempt_count = 0")
    examined = run_process("doctor", dsn=dsn).out
    assert "wait behind the breaker of smtp:" in examined


async def test_a_worker_believes_the_end_of_a_breaker_that_another_worker_has_closed(
    db: psycopg.Connection, start: Callable[..., WorkerProcess], mail_port: int
) -> None:
    enqueue(db, 500)
    workers = [start("mail") for _ in range(2)]
    await become(lambda: all(worker.records("breaker_reopened") for worker in workers), lambda: workers[0].log[-500:])
    claims, seen = claims_of(db, "topic = 'notice'"), failed_probes(workers)
    async with accepting_server(port=mail_port):
        await become(lambda: count(db, "state = 'sent' AND topic = 'notice'") == 500, lambda: workers[0].log[-500:])
    # Each message is claimed once more, and none of them twice because a worker took the breaker for open.
    assert claims_of(db, "topic = 'notice'") <= claims + 500 + 2 + failed_probes(workers) - seen

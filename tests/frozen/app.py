"""The messages of the frozen dump: each topic is named after what happens to its messages until the dump."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import psycopg

from pgoutbox import (
    Context,
    Message,
    Operator,
    Outbox,
    Outcome,
    Permanent,
    Settings,
    Skip,
    Snooze,
    Topic,
    Webhook,
    Worker,
    load_settings,
)
from pgoutbox.operations import MessageFilter, Rate
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

# Of the made-up messages alone.
SECRET: Final = "whsec_MTIzNDU2Nzg5MDEyMzQ1Njc4OTAxMjM0"
KEY: Final = "MTIzNDU2Nzg5MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTI="
NOBODY_LISTENS: Final = "http://127.0.0.1:9/"
LARGE: Final = "".join(chr(65 + number * number % 58) for number in range(40_000))

# The states in the dump, and after a worker of any later release has delivered all due messages.
BEFORE: Final = {
    "cancelled": ["cancelled"],
    "cancelled.in.flight": ["sending"],
    "deduped": ["sent"],
    "dismissed": ["skipped"],
    "encrypted": ["pending"],
    "fanout": ["pending", "pending"],
    "failed": ["failed"],
    "halting": ["failed", "pending"],
    "held": ["pending"],
    "in.flight": ["sending"],
    "keyed": ["pending", "pending"],
    "large": ["pending"],
    "ordered": ["pending", "pending"],
    "paused": ["pending"],
    "paused.queue": ["pending"],
    "redriven": ["pending"],
    "retried": ["pending"],
    "scheduled": ["pending"],
    "sent": ["sent"],
    "skipped": ["skipped"],
    "snoozed": ["pending"],
    "superseded": ["skipped", "sent"],
}
WAITS: Final = frozenset({"halting", "held", "paused", "paused.queue", "scheduled"})
AFTER: Final = {
    topic: ["cancelled" if topic == "cancelled.in.flight" else "sent"]
    if states == ["sending"]
    else states
    if topic in WAITS
    else ["sent" if state == "pending" else state for state in states]
    for topic, states in BEFORE.items()
} | {"keyed": ["skipped", "sent"]}
# Messages that the worker has not finished with. The second one of `halting` waits behind the first.
UNHANDLED: Final = """
SELECT count(*)
FROM pgoutbox.message AS m
WHERE CASE m.state
    WHEN 'pending' THEN m.last_error IS NULL AND (m.topic <> 'halting' OR m.payload = '{"number": 1}')
    WHEN 'sending' THEN m.topic !~ 'in.flight'
END
"""
STATES: Final = "SELECT topic, array_agg(state ORDER BY id) FROM pgoutbox.message GROUP BY topic"


def settings_for(dsn: str) -> Settings:
    """Return the settings of the workers, before and after the dump."""
    return load_settings(
        dsn=dsn,
        encryption_keys=KEY,
        lease_seconds=3,
        maintenance_interval_seconds=0,
        breaker={"failures": 1},
        webhook={"secrets": SECRET, "allow_http": True, "ports": "9", "allowed_networks": "127.0.0.0/8"},
        worker_name="frozen",
    )


def states(connection: psycopg.Connection) -> dict[str, list[str]]:
    """Return the states of the messages of each topic."""
    return dict(connection.execute(STATES).fetchall())


class Application:
    """The handlers. Those of a release after the dump deliver all messages, if they can."""

    def __init__(self, dsn: str, *, is_later: bool) -> None:
        self.outbox = Outbox(settings_for(dsn))
        self.delivered: dict[str, list[object]] = {}
        self.has_dumped = asyncio.Event()
        for topic in BEFORE:
            handle = self._deliver if is_later and topic != "held" else self._handle
            declared = Topic(topic, encrypted=topic == "encrypted", halts_key=topic == "halting")
            self.outbox.handler(declared)(handle)

    async def _deliver(self, message: Message[Any], ctx: Context) -> None:
        self.delivered.setdefault(message.topic, []).append(message.payload)

    async def _handle(self, message: Message[Any], ctx: Context) -> Outcome | Webhook | None:
        match message.topic:
            case "failed" | "dismissed" | "redriven" | "halting":
                return Permanent("refused")
            case "held":
                return Webhook(body={"number": 1})
            case "retried":
                raise ValueError("try again")
            case "skipped":
                return Skip("not wanted")
            case "snoozed":
                return Snooze(timedelta(seconds=1), "not yet")
            case "in.flight" | "cancelled.in.flight":
                await self.has_dumped.wait()
        return None


async def play(dsn: str, dump: Callable[[], None]) -> None:
    """Bring the messages into their states, and dump them while some are in flight."""
    application = Application(dsn, is_later=False)
    worker = Worker(application.outbox)
    with psycopg.connect(dsn, autocommit=True) as connection, Operator(dsn, actor="ada", origin="frozen") as operator:
        enqueue_handled(application.outbox, connection)
        running = asyncio.create_task(worker.run())
        await until(lambda: connection.execute(UNHANDLED).fetchone() == (0,))
        operate(operator, connection)
        enqueue_waiting(application.outbox, connection)
        # The worker, which runs on this event loop, does not notice it before the dump.
        operator.act_on_all("cancel", MessageFilter(topic="cancelled.in.flight"))
        found = states(connection)
        if found != BEFORE:
            other = [one for one in found.items() if one not in BEFORE.items()]
            raise RuntimeError(f"other states than expected: {other}")
        dump()
        application.has_dumped.set()
        worker.stop()
        await running


def enqueue_handled(outbox: Outbox, connection: psycopg.Connection) -> None:
    """Enqueue the messages that a worker takes before the dump."""
    with connection.transaction():
        producer = outbox.on(connection)
        for topic in ("failed", "dismissed", "redriven", "retried", "skipped", "snoozed", "sent", "in.flight"):
            producer.enqueue(topic, {"topic": topic}, owner="ada", headers={"traceparent": "00-1"})
        producer.enqueue("cancelled.in.flight", {})
        producer.enqueue("deduped", {"number": 1}, dedupe_key="d1")
        for number in (1, 2):
            producer.enqueue("halting", {"number": number}, ordering_key="h")
            producer.enqueue("superseded", {"number": number}, coalesce_key="s")
        producer.enqueue("held", {}, destination=NOBODY_LISTENS)


def operate(operator: Operator, connection: psycopg.Connection) -> None:
    """Act as operators do. Nothing is claimed from then on."""
    rows = connection.execute("SELECT topic, id FROM pgoutbox.message").fetchall()
    ids = {topic: int(message_id) for topic, message_id in rows}
    operator.pause("default")
    operator.pause("quiet")
    operator.pause_topic("paused")
    operator.dismiss(ids["dismissed"], "not needed")
    operator.redrive(ids["redriven"])
    operator.limit_rate("default", Rate(1_000, 1), burst=100)
    operator.limit_in_flight("default", 100)
    operator.set_retention("sent", "sent", timedelta(days=400))
    operator.set_redirect("tester@example.org", topics=["other"])
    connection.execute("INSERT INTO pgoutbox.blackout (first_day, last_day) VALUES ('2001-01-01', '2001-01-02')")


def enqueue_waiting(outbox: Outbox, connection: psycopg.Connection) -> None:
    """Enqueue the messages that no worker takes before the dump."""
    with connection.transaction():
        producer = outbox.on(connection)
        producer.cancel(producer.enqueue("cancelled", {"number": 1}).id)
        producer.enqueue("encrypted", {"secret": "c4n4ry"})
        producer.enqueue_fanout("fanout", {}, ["custom:a", "custom:b"], content={"text": "Hello"})
        for number in (1, 2):
            producer.enqueue("keyed", {"number": number}, coalesce_key="k")
            producer.enqueue("ordered", {"number": number}, ordering_key="o")
        producer.enqueue("large", {"text": LARGE})
        producer.enqueue("paused", {})
        producer.enqueue("paused.queue", {}, queue="quiet")
        producer.enqueue("scheduled", {}, delay=timedelta(days=3_600))

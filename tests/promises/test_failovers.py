"""After a failover, a worker does not rely on leases that the new primary may not know."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from tests.support.outbox_actions import enqueue, lapse, row_of
from tests.support.proxy import proxy_to
from tests.support.smtp_server import accepting_server, mail_settings
from tests.support.waiting import until

if TYPE_CHECKING:
    import psycopg

    from tests.promises.conftest import StartWorker

APPLICATION = """
    from pgoutbox import Email, Outbox

    outbox = Outbox()


    @outbox.handler("greet")
    async def greet(message, ctx):
        return Email(subject="Hello", text="Hello")
"""


async def test_an_email_that_waits_for_its_connection_is_not_sent_if_a_failover_has_lost_its_lease(
    dsn: str, db: psycopg.Connection, start_worker: StartWorker
) -> None:
    async with accepting_server() as inbox:
        inbox.delays = lambda _: not inbox.delayed and not inbox.received
        mail: dict[str, Any] = {name: str(value) for name, value in mail_settings(inbox.port).items()}
        settings = {**mail, "smtp_connections": "1", "smtp_timeout_seconds": "60"}
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            with proxy_to(dsn, listening) as proxy:
                worker = start_worker(APPLICATION, dsn=proxy.dsn, **settings)
                first = enqueue(db, destination="mailto:first@example.org")
                await until(lambda: inbox.delayed)
                second = enqueue(db, destination="mailto:second@example.org")
                await until(lambda: row_of(db, second).state == "sending")
        await until(lambda: "the database does not answer" in worker.log)
        for message_id in (first, second):
            lapse(db, message_id)  # The new primary has not received the last renewal.
        start_worker(APPLICATION, "--drain", **settings)
        await until(lambda: row_of(db, second).state == "sent")
        inbox.may_go_on.set()
        with socket.create_server(("127.0.0.1", port)) as listening, proxy_to(dsn, listening):
            third = enqueue(db, destination="mailto:third@example.org")
            await until(lambda: row_of(db, third).state == "sent")
    assert [mail.recipients for mail in inbox.received].count(["second@example.org"]) == 1

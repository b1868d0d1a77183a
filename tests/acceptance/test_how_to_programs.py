"""Tests that the programs of some how-to pages do what the pages promise, as their readers save them."""

from __future__ import annotations

import asyncio
import importlib
import sys
from email import message_from_bytes, policy
from typing import TYPE_CHECKING, Any

import pytest

from pgoutbox.webhooks import verify
from pgoutbox.worker import Worker
from tests.support.dialogues import HOST
from tests.support.pages import DOCS, blocks_of
from tests.support.smtp_server import accepting_server, parsed
from tests.support.webhook_server import answer, webhook_server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

    import psycopg

pytestmark = pytest.mark.slow


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dsn: str) -> Callable[..., ModuleType]:
    """Save a block of a page, and import it with the settings of a test."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PGOUTBOX_DSN", dsn)

    def save_one(page: str, number: int, name: str) -> ModuleType:
        block = blocks_of(DOCS / f"how-to/{page}.md", "python")[number]
        assert block.file_name in {f"{name}.py", None}
        (tmp_path / f"{name}.py").write_text(block.text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return save_one


def text_of(mail: bytes) -> str:
    return str(message_from_bytes(mail, policy=policy.default).get_content())


def states(db: psycopg.Connection, topic: str) -> list[str]:
    rows = db.execute("SELECT m.state FROM pgoutbox.message AS m WHERE m.topic = %s ORDER BY m.id", [topic])
    return [state for (state,) in rows]


async def test_an_endpoint_is_tested_retired_and_reactivated(
    save: Callable[..., ModuleType], db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoints: Any = save("customer-webhooks", 0, "endpoints")
    silent: Any = save("customer-webhooks", 1, "silent_endpoints")
    db.execute(endpoints.TABLE)
    async with webhook_server(answer(200)) as server:
        for name, value in (("ALLOWED_NETWORKS", "127.0.0.0/8"), ("PORTS", str(server.port)), ("ALLOW_HTTP", "true")):
            monkeypatch.setenv(f"PGOUTBOX_WEBHOOK_{name}", value)
        url = server.url(scheme="http")

        def reason(endpoint: int) -> str | None:
            ((found,),) = db.execute("SELECT e.reason FROM endpoint AS e WHERE e.id = %s", [endpoint]).fetchall()
            return None if found is None else str(found)

        endpoint_id, secret = endpoints.register(db, 7, url)
        with db.transaction():
            endpoints.publish(db, 7, "order.paid", {"id": 1})
        assert states(db, "customer.hook") == []
        refused, _ = endpoints.register(db, 8, f"http://10.0.0.7:{server.port}/")
        assert (await asyncio.to_thread(endpoints.test, db, refused)).startswith(
            "refused: 10.0.0.7: is not in the public"
        )
        assert reason(refused) == "not tested"

        assert await asyncio.to_thread(endpoints.test, db, endpoint_id) == "accepted"
        assert reason(endpoint_id) is None
        with db.transaction():
            endpoints.publish(db, 7, "order.paid", {"id": 1})
        await Worker(endpoints.outbox, queues=["hooks"]).run_once()
        *_, received = server.received
        assert verify(received.body, received.headers, secret)
        assert states(db, "customer.hook") == ["sent"]

        server.answers = [answer(410)]
        for number in (2, 3):
            with db.transaction():
                endpoints.publish(db, 7, "order.paid", {"id": number})
        # The newest one waits.
        db.execute(
            "UPDATE pgoutbox.message AS m SET available_at = now() + interval '1 day'"
            " WHERE m.id = (SELECT max(n.id) FROM pgoutbox.message AS n)"
        )
        await Worker(endpoints.outbox, queues=["hooks"]).run_once()
        await Worker(endpoints.outbox, queues=["hooks"]).run_once()
        assert (reason(endpoint_id), states(db, "customer.hook")) == ("410 Gone", ["sent", "failed", "cancelled"])
        assert await asyncio.to_thread(endpoints.test, db, endpoint_id) == "refused: 410 Gone"
        assert reason(endpoint_id) == "410 Gone"

        server.answers = [answer(200)]
        assert await asyncio.to_thread(endpoints.test, db, endpoint_id) == "accepted"
        with db.transaction():
            endpoints.publish(db, 7, "order.paid", {"id": 4})
        with db.transaction():
            silent.retire_silent(db)
        assert reason(endpoint_id) is None
        db.execute("UPDATE pgoutbox.message SET created_at = now() - interval '4 days' WHERE state = 'pending'")
        with db.transaction():
            silent.retire_silent(db)
        assert reason(endpoint_id) is None, "it has accepted one since then"
        db.execute("UPDATE pgoutbox.message SET finished_at = now() - interval '4 days' WHERE state = 'sent'")
        with db.transaction():
            silent.retire_silent(db)
    assert reason(endpoint_id) == "nothing was accepted for three days"
    assert states(db, "customer.hook")[-1] == "cancelled"


async def test_a_recipient_unsubscribes_by_the_link_and_gets_no_waiting_newsletter(
    save: Callable[..., ModuleType], db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    from starlette.testclient import TestClient

    monkeypatch.setenv("PGOUTBOX_UNSUBSCRIBE_URL", "https://club.example.org/unsubscribe")
    monkeypatch.setenv("PGOUTBOX_UNSUBSCRIBE_KEYS", "a key of the test with 32 characters")
    newsletter: Any = save("unsubscribe", 0, "newsletter")
    page: Any = save("unsubscribe", 1, "unsubscribe_page")
    db.execute("CREATE TABLE member (address text)")
    db.execute("INSERT INTO member VALUES ('Ada@example.org'), ('bob@example.org')")
    async with accepting_server() as inbox:
        for name, value in (("HOST", HOST), ("PORT", inbox.port), ("SECURITY", "none"), ("SENDER", "club@club.org")):
            monkeypatch.setenv(f"PGOUTBOX_SMTP_{name}", str(value))
        with db.transaction():
            newsletter.publish(db, "May", "Tea")
        await Worker(newsletter.outbox).run_once()
        assert states(db, "newsletter") == ["sent", "sent"]
        (to_ada,) = [received for received in inbox.received if received.recipients == ["Ada@example.org"]]
        mail = parsed(to_ada.content)
        link = str(mail["List-Unsubscribe"]).strip("<>")
        assert f"Unsubscribe: {link}" in text_of(to_ada.content)
        with db.transaction():
            newsletter.publish(db, "June", "Tea")
        path = link.removeprefix("https://club.example.org")
        with TestClient(page.app) as client:
            assert "<form" in client.get(path).text
            assert client.post(path[:-2], data={"List-Unsubscribe": "One-Click"}).status_code == 403
            assert client.post(path, data={"List-Unsubscribe": "One-Click"}).status_code == 200
        await Worker(newsletter.outbox).run_once()
    assert states(db, "newsletter")[2:] == ["skipped", "sent"]

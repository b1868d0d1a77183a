"""An outbox with made-up messages, for tests of pages and for the pictures of the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import psycopg

# The message of the detail page: it failed after several attempts.
TOLD_ID: Final = 10_001
PAGES: Final = {
    "overview": "/",
    "messages": "/messages",
    "message": f"/messages/{TOLD_ID}",
    "failed": "/failed",
    "queues": "/queues",
    "queue": "/queues?queue=mail",
    "workers": "/workers",
    "breakers": "/breakers",
    "topics": "/topics",
    "topic": "/topics?topic=webhook.order",
    "audit": "/audit",
    "redrive-many": "/bulk?do=redrive&state=failed",
}


def fill(connection: psycopg.Connection) -> None:
    """Put the messages into an empty outbox: one hour of a busy shop."""
    with connection.transaction():
        connection.execute(Path(__file__).with_suffix(".sql").read_bytes())

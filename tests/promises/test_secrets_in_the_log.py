"""The log of a worker hides the secrets of its settings, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from pgoutbox import Outbox

if TYPE_CHECKING:
    import psycopg

    from tests.promises.conftest import StartWorker

APPLICATION: Final = """
    from pgoutbox import Message, Outbox, Permanent

    outbox = Outbox()

    @outbox.handler("mail")
    async def refuse(message: Message, ctx: object) -> Permanent:
        return Permanent(message.payload["reason"])
"""


def test_a_short_secret_masks_no_part_of_a_word(start_worker: StartWorker, db: psycopg.Connection, dsn: str) -> None:
    password = "&password=ada" if "?" in dsn else "?password=ada"
    with db.transaction():
        Outbox().on(db).enqueue("mail", {"reason": "adam@canada.example has left"})
        Outbox().on(db).enqueue("mail", {"reason": "the server wants ada, not this"})
    worker = start_worker(APPLICATION, "--drain", dsn=dsn + password)
    assert worker.wait() == 0
    assert "adam@canada.example has left" in worker.log
    assert "the server wants ***, not this" in worker.log


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_short_secret_at_the_beginning_of_a_line_is_masked(
    start_worker: StartWorker, db: psycopg.Connection, dsn: str, log_format: str
) -> None:
    password = "&password=ada" if "?" in dsn else "?password=ada"
    with db.transaction():
        for before in ("line\n", "cell\t", "dots\u2026"):
            Outbox().on(db).enqueue("mail", {"reason": f"{before}ada, not this"})
    worker = start_worker(APPLICATION, "--drain", dsn=dsn + password, log_format=log_format)
    assert worker.wait() == 0
    assert "ada, not this" not in worker.log
    assert worker.log.count("***, not this") == 3

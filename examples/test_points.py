"""Test handlers with a worker instead of the plugin's driver: each outcome counts, and no transport is replaced.

python -m pytest examples/test_points.py
"""

from __future__ import annotations

import asyncio

import psycopg

from examples import points
from pgoutbox import Settings, Worker


def worker(dsn: str) -> Worker:
    """Return a worker of the queue `points`."""
    return Worker(points.outbox, settings=Settings(dsn=dsn), queues=["points"])


def test_each_customer_has_the_sum_of_their_purchases(pgoutbox_dsn: str) -> None:
    with psycopg.connect(pgoutbox_dsn) as connection:
        points.create_tables(connection)
        connection.execute("INSERT INTO purchase VALUES ('ada', 100), ('ada', 20), ('bob', 5)")
        points.enqueue_recounts(connection)
        connection.commit()
        asyncio.run(worker(pgoutbox_dsn).run_once())
        rows = connection.execute("SELECT customer, total FROM points ORDER BY customer").fetchall()
        assert rows == [("ada", 120), ("bob", 5)]


def test_an_attempt_that_fails_stores_no_points(pgoutbox_dsn: str) -> None:
    with psycopg.connect(pgoutbox_dsn) as connection:
        points.create_tables(connection)
        connection.execute("INSERT INTO purchase VALUES ('ada', 100)")
        connection.execute("ALTER TABLE points ADD CHECK (total < 100)")
        points.enqueue_recounts(connection)
        connection.commit()
        asyncio.run(worker(pgoutbox_dsn).run_once())
        assert connection.execute("SELECT FROM points").fetchall() == []
        assert connection.execute("SELECT state, attempt_count FROM pgoutbox.message").fetchall() == [("pending", 1)]

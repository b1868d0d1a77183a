"""Lanes: fresh messages with a backlog of due retries that is older, as after an outage."""

from __future__ import annotations

import psycopg

from benchmarks.options import RETRY_NUMBER, TOPIC, Options
from benchmarks.processes import answer_of
from benchmarks.report import Result, Table, Verdict, median, ratio_of_rounds
from benchmarks.server import Server, empty_outbox, load_due_retries, load_pending, settle

_TABLES = ("pgoutbox.message_live", "pgoutbox.key_head", "pgoutbox.queue")


def run(server: Server, options: Options) -> Result:
    """Measure fresh messages alone, and the same with a backlog of due retries."""
    fresh, retries = options.fresh_messages, options.due_retries
    alone, behind, everything = [], [], []
    with server.database() as dsn, psycopg.connect(dsn, autocommit=True) as connection:
        for _ in range(options.rounds):
            alone.append(_fresh_seconds(dsn, connection, fresh, 0)[0])
            seconds, total = _fresh_seconds(dsn, connection, fresh, retries)
            behind.append(seconds)
            everything.append(total)
    result = Result("lanes", settings={"fresh": fresh, "due retries": retries, "rounds": options.rounds})
    rows = [
        (f"{fresh:,} fresh alone", median(alone), min(alone), max(alone)),
        (f"{fresh:,} fresh, {retries:,} older retries due", median(behind), min(behind), max(behind)),
        ("the retries too", median(everything), min(everything), max(everything)),
    ]
    result.tables.append(Table("seconds until all were handled", ("messages", "seconds", "fastest", "slowest"), rows))
    # Taking turns with the retries doubles the time.
    result.verdicts.append(
        Verdict("fresh behind retries / fresh alone", ratio_of_rounds(behind, alone), 3.0, "at most")
    )
    result.samples = {"alone": alone, "behind": behind, "everything": everything}
    return result


def _fresh_seconds(
    dsn: str, connection: psycopg.Connection[tuple[object, ...]], fresh: int, retries: int
) -> tuple[float, float]:
    """Return the seconds from the first claim to the last fresh message's handler, and to the end of all messages."""
    empty_outbox(connection)
    load_due_retries(connection, retries, topic=TOPIC, number=RETRY_NUMBER)
    load_pending(connection, fresh, topic=TOPIC)
    settle(connection, *_TABLES)
    answer = answer_of("deliver", "lanes", dsn=dsn)
    if answer["handled_count"] != fresh + retries:
        raise RuntimeError(f"{answer['handled_count']} of {fresh + retries} messages were handled")
    seconds, total = answer["fresh_seconds"], answer["seconds"]
    assert isinstance(seconds, float)
    assert isinstance(total, float)
    return seconds, total

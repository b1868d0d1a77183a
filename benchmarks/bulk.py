"""enqueue_many: rows per second of a bulk enqueue in one transaction, Python's checks and the COMMIT included.

The limit is one INSERT of the same rows into the same table, from prepared arrays.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence

import psycopg

from benchmarks.options import TOPIC, Options, rotated
from benchmarks.report import Result, Table, Verdict, median, ratio_of_rounds
from benchmarks.server import Server, empty_outbox, settle
from pgoutbox.outbox import Outbox
from pgoutbox.settings import load_settings
from pgoutbox.topics import NewMessage

_OURS = "enqueue_many"
_WITH_COALESCE_KEY = f"{_OURS}, each with a coalesce key"
_WITH_DEDUPE_KEY = f"{_OURS}, each with a dedupe key"
_INSERT = "INSERT from arrays"
_TARGETS = {_OURS: 0.8, _WITH_COALESCE_KEY: 0.5, _WITH_DEDUPE_KEY: 0.4}


def run(server: Server, options: Options) -> Result:
    """Alternate the variants; every measurement starts with empty tables."""
    count = options.bulk_messages
    outbox = Outbox(load_settings())
    payloads = [{"user_id": number} for number in range(count)]
    texts = [json.dumps(payload) for payload in payloads]
    variants: dict[str, Callable[[psycopg.Connection[tuple[object, ...]]], object]] = {
        _OURS: lambda c: outbox.on(c).enqueue_many(NewMessage(TOPIC, p) for p in payloads),
        f"{_OURS}, 1,000 a transaction": lambda c: _in_pieces(outbox, c, payloads),
        _WITH_COALESCE_KEY: lambda c: outbox.on(c).enqueue_many(
            NewMessage(TOPIC, p, coalesce_key=str(p["user_id"])) for p in payloads
        ),
        _WITH_DEDUPE_KEY: lambda c: outbox.on(c).enqueue_many(
            NewMessage(TOPIC, p, dedupe_key=str(p["user_id"])) for p in payloads
        ),
        _INSERT: lambda c: c.execute(
            "INSERT INTO pgoutbox.message (topic, payload) SELECT %s, p FROM unnest(%s::text[]::jsonb[]) AS p",
            (TOPIC, texts),
        ),
    }
    rates: dict[str, list[float]] = {name: [] for name in variants}
    with server.database() as dsn, psycopg.connect(dsn, autocommit=True) as operator:
        for round_number in range(options.rounds):
            for name in rotated(list(variants), round_number):
                empty_outbox(operator)
                settle(operator, "pgoutbox.message_live")
                with psycopg.connect(dsn) as connection:
                    began_at = time.perf_counter()
                    variants[name](connection)
                    connection.commit()
                    rates[name].append(count / (time.perf_counter() - began_at))
                _check(operator, count)
    result = Result(_OURS, settings={"rows": count, "rounds": options.rounds}, samples=dict(rates))
    result.tables.append(
        Table(
            "rows per second",
            ("variant", "rows/s", "slowest", "fastest", "ratio to INSERT"),
            [(n, median(v), min(v), max(v), ratio_of_rounds(v, rates[_INSERT])) for n, v in rates.items()],
        )
    )
    result.verdicts.append(Verdict("enqueue_many", median(rates[_OURS]), 100_000, "at least", "rows/s"))
    for name, target in _TARGETS.items():
        ratio = ratio_of_rounds(rates[name], rates[_INSERT])
        result.verdicts.append(Verdict(f"{name} / {_INSERT}", ratio, target, "at least"))
    return result


def _in_pieces(
    outbox: Outbox, connection: psycopg.Connection[tuple[object, ...]], payloads: Sequence[dict[str, int]]
) -> None:
    for piece in _pieces(payloads, 1000):
        outbox.on(connection).enqueue_many([NewMessage(TOPIC, payload) for payload in piece])
        connection.commit()


def _pieces(payloads: Sequence[dict[str, int]], size: int) -> Iterator[Sequence[dict[str, int]]]:
    for start in range(0, len(payloads), size):
        yield payloads[start : start + size]


def _check(connection: psycopg.Connection[tuple[object, ...]], count: int) -> None:
    row = connection.execute("SELECT count(*) FROM pgoutbox.message_live").fetchone()
    assert row is not None
    if row[0] != count:
        raise RuntimeError(f"{row[0]} of {count} rows are there")

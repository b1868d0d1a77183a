"""Send a whole transaction in one message to the server, so that a suspended process keeps no locks.

The driver's own pipeline sends each statement separately. This module sends all statements up to COMMIT in one piece,
so that the server never waits for this process while it holds a lock. A single statement is sent the same way.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import LiteralString

import psycopg
from psycopg import abc, generators, pq
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.rows import TupleRow
from psycopg.waiting import Ready, Wait

Step = tuple[LiteralString, Mapping[str, object]]

_numbers = itertools.count()
_PLACEHOLDER = re.compile(r"%%|%\((\w+)\)s")
_REFUSED = (pq.ExecStatus.FATAL_ERROR, pq.ExecStatus.BAD_RESPONSE)


class Pipeline:
    """Sends statements over one connection, each list of them in one message. Nothing else may use the connection.

    With `prepares` each statement is prepared once. That needs a connection that keeps its session.
    """

    def __init__(self, connection: psycopg.AsyncConnection[TupleRow], *, prepares: bool) -> None:
        self._connection = connection
        # Like a cursor's transformer, it caches the types of values.
        self._transformer: abc.Transformer = Transformer(connection)
        self._names: dict[tuple[bytes, Sequence[int]], bytes] | None = {} if prepares else None

    async def run(self, statements: bytes) -> None:
        """Run statements without parameters and rows, in one message. Raises the error of the first refused one."""
        self._connection.pgconn.send_query(statements)
        self._check(await self._connection.wait(generators.execute(self._connection.pgconn)))

    async def fetch(self, steps: Sequence[Step], *, finally_run: LiteralString | None = None) -> list[list[TupleRow]]:
        """Run all steps, without waiting between them, and return the rows of each.

        A step that returns no rows has one row, with the number of the rows that it wrote. Raises the first error of a
        step. Later steps have not run then, and a transaction that a step began is still open. Without one, all steps
        are rolled back: PostgreSQL commits the statements before a synchronization together, so that BEGIN and COMMIT
        are not needed. `finally_run` travels with steps that end in COMMIT or ROLLBACK, and runs after them if none is
        refused. Its error closes the connection, nothing else.
        """
        pgconn = self._connection.pgconn
        adapted = [self._adapted(*step) for step in steps]
        new_names: dict[tuple[bytes, Sequence[int]], tuple[bytes, int]] = {}  # With the place of the result.
        places = []
        count = 0
        pgconn.enter_pipeline_mode()
        for text, values, types, formats in adapted:
            if self._names is None:
                pgconn.send_query_params(text, values, types, formats, pq.Format.BINARY)
            else:
                name = self._names.get((text, types)) or new_names.get((text, types), (None, 0))[0]
                if name is None:
                    name = b"pgoutbox_%d" % next(_numbers)
                    new_names[text, types] = name, count
                    pgconn.send_prepare(name, text, types)
                    count += 1  # Preparing has its own result.
                pgconn.send_query_prepared(name, values, formats, pq.Format.BINARY)
            places.append(count)
            count += 1
        if finally_run is not None:
            pgconn.send_query_params(finally_run.encode(), None)
        pgconn.pipeline_sync()
        results = await self._receive(None if finally_run is None else count)
        if self._names is not None and new_names:
            # The server keeps them, whatever becomes of the transaction.
            is_prepared = [result.status == pq.ExecStatus.COMMAND_OK for result in results]
            self._names |= {
                key: name for key, (name, place) in new_names.items() if any(is_prepared[place : place + 1])
            }
        if pgconn.status == pq.ConnStatus.OK:
            pgconn.exit_pipeline_mode()
        if finally_run is None:
            self._check(results)  # One more than the steps, if the server has refused to commit them.
        else:
            self._check(results[:count])
            if pgconn.status != pq.ConnStatus.OK or any(result.status in _REFUSED for result in results):
                pgconn.finish()
        return [self._rows_of(results[place]) for place in places]

    def _rows_of(self, answer: pq.abc.PGresult) -> list[TupleRow]:
        if answer.status == pq.ExecStatus.COMMAND_OK:
            return [(answer.command_tuples,)]
        self._transformer.set_pgresult(answer)
        rows = self._transformer.load_rows(0, answer.ntuples, tuple)
        self._transformer.set_pgresult(None)
        return rows

    async def _receive(self, own_count: int | None) -> list[pq.abc.PGresult]:
        """Return the results. After those of `own_count` steps, the connection may break."""
        results: list[pq.abc.PGresult] = []
        try:
            await self._connection.wait(_receive(self._connection.pgconn, results))
        except psycopg.OperationalError:
            if own_count is not None and len(results) >= own_count:
                return results
            self._check(results)  # The server may have sent the reason for the end of the session.
            raise
        return results

    def _check(self, results: Sequence[pq.abc.PGresult]) -> None:
        for result in results:
            if result.status in _REFUSED:
                raise error_from_result(result, encoding=self._connection.info.encoding)

    def _adapted(
        self, statement: LiteralString, parameters: Mapping[str, object]
    ) -> tuple[bytes, Sequence[pq.abc.Buffer | None], Sequence[int], Sequence[pq.Format]]:
        text, names = _numbered(statement)
        if not names:
            return text, (), (), ()
        transformer = self._transformer
        values = transformer.dump_sequence([parameters[name] for name in names], [PyFormat.AUTO] * len(names))
        return text, values, tuple(transformer.types or ()), tuple(transformer.formats or ())


@functools.cache
def _numbered(statement: str) -> tuple[bytes, tuple[str, ...]]:
    """Return the statement with PostgreSQL's own placeholders, and their names."""
    numbers: dict[str, int] = {}

    def number(found: re.Match[str]) -> str:
        name = found[1]
        return "%" if name is None else f"${numbers.setdefault(name, len(numbers) + 1)}"

    text = _PLACEHOLDER.sub(number, statement).encode()
    return text, tuple(numbers)


def _receive(pgconn: pq.abc.PGconn, results: list[pq.abc.PGresult]) -> abc.PQGen[None]:
    """Send all steps, and receive one result for each."""
    while pgconn.flush():
        if ((yield Wait.RW) or 0) & Ready.R:  # psycopg resumes it with None after a cancellation.
            pgconn.consume_input()
    while True:
        while pgconn.is_busy():
            if ((yield Wait.R) or 0) & Ready.R:
                pgconn.consume_input()
        result = pgconn.get_result()  # None separates the results of two steps.
        if result is not None and result.status == pq.ExecStatus.PIPELINE_SYNC:
            return
        if result is not None:
            results.append(result)
        elif pgconn.status == pq.ConnStatus.BAD:
            raise psycopg.OperationalError("the connection is lost")

"""Tests that deliver inside the transaction of a Django `TestCase`.

The statements of the worker run on Django's connection, and handlers in the thread of the test. So handlers see what
the test has written, and everything is rolled back with the test.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from functools import cached_property
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

import psycopg
from asgiref.sync import async_to_sync, sync_to_async
from django.core.mail.backends import locmem
from django.db import DatabaseError, connections, transaction
from django.test import TestCase

from pgoutbox.contrib.django import conf, outbox
from pgoutbox.errors import ConfigurationError
from pgoutbox.handlers import CallNext
from pgoutbox.message import Message, Outcome
from pgoutbox.testing.borrowed import borrow, run_pass
from pgoutbox.testing.driver import OutboxDriver, recording

__all__ = ["OutboxTestCase", "ProjectDriver"]

P = ParamSpec("P")
R = TypeVar("R")


class ProjectDriver(OutboxDriver):
    """An `OutboxDriver` for the outbox of the project, in the open transaction of Django's connection.

    The time of a transaction stands still: only `make_due` and `drain` make retries and scheduled messages due. Circuit
    breakers are off. Async tests call it by `sync_to_async`.
    """

    def __init__(self) -> None:
        settings = outbox.settings
        super().__init__(outbox, settings.require_dsn())
        self._settings = settings.model_copy(update={"redirect": self._settings.redirect})

    @contextlib.contextmanager
    def _connect(self) -> Iterator[psycopg.Connection]:
        connection = connections[conf.alias()]
        with connection.cursor() as cursor:
            cursor.execute("SELECT")  # Connects, and refuses async tests, broken transactions and forbidden databases.
        if not connection.in_atomic_block:
            raise ConfigurationError(
                f"driver: DATABASES[{conf.alias()!r}] has no open transaction; outside of TestCase and atomic() use "
                "pgoutbox.testing.OutboxDriver(outbox, outbox.settings.require_dsn())"
            )
        borrowed = borrow(connection.connection)
        with borrowed.transaction():
            yield borrowed

    def _deliver(self) -> None:
        opened = connections.all(initialized_only=True)
        counts = [len(connection.run_on_commit) for connection in opened]
        queues = self._queues()
        with self._connect() as connection:
            async_to_sync(run_pass)(
                connection,
                self._outbox,
                self._settings,
                queues=queues,
                transports=self._transports,
                middlewares=(recording(self._exceptions), *self._outbox.middlewares, _in_savepoints),
                threads=_TestThread(),
            )
        for wrapper, count in zip(opened, counts, strict=True):
            # In a worker the handlers' transactions have committed.
            registered, wrapper.run_on_commit[count:] = wrapper.run_on_commit[count:], []
            for _, callback, *_ in registered:
                callback()


class OutboxTestCase(TestCase):
    """A `TestCase` with a `driver`. `mail.outbox` refuses what the project's backend of pgoutbox refuses."""

    @classmethod
    def setUpClass(cls) -> None:
        """Check e-mails for `mail.outbox` in these tests."""
        from pgoutbox.contrib.django import mail  # It needs the settings.

        super().setUpClass()
        if mail.is_used():
            cls.enterClassContext(patch.object(locmem.EmailBackend, "send_messages", _send_checked))

    @cached_property
    def driver(self) -> ProjectDriver:
        """The driver of this test."""
        return ProjectDriver()


_send = locmem.EmailBackend.send_messages


def _send_checked(backend: locmem.EmailBackend, messages: Sequence[Any]) -> int:
    from pgoutbox.contrib.django import mail

    accepted = []
    for one in messages:
        try:
            mail.check(one)
        except (TypeError, ValueError):
            if not vars(backend).get("fail_silently", vars(backend).get("_fail_silently")):  # Django 6.1 warns of it.
                raise
        else:
            accepted.append(one)
    count: int = _send(backend, accepted)
    return count


class _TestThread(Executor):
    """Runs plain functions in the thread of the test, which waits in `async_to_sync`."""

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        return asyncio.run_coroutine_threadsafe(sync_to_async(fn)(*args, **kwargs), asyncio.get_running_loop())


async def _in_savepoints(messages: Sequence[Message[object]], call_next: CallNext) -> Sequence[Outcome]:  # noqa: ARG001
    """Undo what a handler has written if it leaves a transaction of the test broken. A middleware."""
    savepoints = await sync_to_async(_begin)()
    try:
        return await call_next()
    finally:
        await sync_to_async(_end)(savepoints)


def _begin() -> list[transaction.Atomic]:
    opened = [one for one in connections.all(initialized_only=True) if one.in_atomic_block]
    savepoints = [transaction.atomic(one.alias) for one in opened]
    for savepoint in savepoints:
        savepoint.__enter__()
    return savepoints


def _end(savepoints: list[transaction.Atomic]) -> None:
    for savepoint in reversed(savepoints):
        with contextlib.suppress(DatabaseError):  # It is broken, and Django has rolled it back.
            savepoint.__exit__(None, None, None)

"""A session that stands for a sleeping worker."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from pgoutbox.database import sql
from tests.support.outbox_actions import ask_for_locks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import Connect


@contextmanager
def sleeping_worker(connect: Connect, bell: str | None = "own") -> Iterator[Callable[[], list[str]]]:
    """Open a session that listens and has armed the bell. Yield a function that returns the rung queues so far."""
    listener = connect(autocommit=True)
    listener.execute(sql.LISTEN)
    ((_, _, wake_up_lock, _),) = ask_for_locks(listener, "default")
    assert wake_up_lock == bell
    yield lambda: [notification.payload for notification in listener.notifies(timeout=10, stop_after=1)]

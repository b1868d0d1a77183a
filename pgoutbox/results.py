"""The results of attempts, between the parts of the worker that run them and the parts that write them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Protocol

from pgoutbox.handlers import Context
from pgoutbox.message import Outcome


@dataclass(frozen=True, slots=True)
class Released:
    """The attempt did not run, or the worker's shutdown stopped it: pending again, no attempt used up.

    `unknown` means that its handler ran, so the message may have been sent: the handler's `on_unknown` applies.
    """

    unknown: bool = False


@dataclass(frozen=True, slots=True)
class AlreadyFinished:
    """The attempt wrote its own end, in the handler's transaction, or no longer has a message."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The worker ends and the handler goes on: no outcome may be written, and the lease is left to lapse."""


RELEASED: Final = Released()
STOPPED: Final = Released(unknown=True)
ALREADY_FINISHED: Final = AlreadyFinished()
ABANDONED: Final = Abandoned()
Ending = Outcome | Released | AlreadyFinished | Abandoned

Work = Sequence[Context]
ThreadWatch = Callable[[Future[object]], None]


class Runner(Protocol):
    """Runs the attempts of one piece of work: one message, or a batch of one handler."""

    def __call__(self, work: Work, watch_thread: ThreadWatch) -> Awaitable[Sequence[Ending]]: ...

"""Who did what by hand: one row in `pgoutbox.audit` for each batch that an operator's act changed, in its transaction.

The schema records acts itself, those by SQL too; here it is told who acts and what was asked for. An act that changed
nothing leaves no row. Deliveries and the workers' own upkeep are nobody's act; `attempt` has those.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import UUID, uuid4

from psycopg.types.json import Jsonb

from pgoutbox.database import sql

if TYPE_CHECKING:
    import psycopg
    from psycopg.rows import TupleRow
    from pydantic import JsonValue


class Action(enum.StrEnum):
    """Everything that an operator can do."""

    REDRIVE = "redrive"
    RESEND = "resend"
    CANCEL = "cancel"
    PRUNE = "prune"
    PAUSE = "pause"
    RESUME = "resume"
    LIMIT = "limit"
    RETENTION = "retention"
    BREAKER = "breaker"


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts, and from where: `Actor("ada", "web 192.0.2.7")`. Without a name it is the role of the database."""

    name: str | None = None
    origin: str | None = None


_NOBODY: Final = Actor()
_actor: ContextVar[Actor | None] = ContextVar("pgoutbox_actor", default=None)


@contextlib.contextmanager
def acting_as(actor: Actor) -> Iterator[None]:
    """Put the acts of the `with` block down to this actor: those of its thread or asyncio task.

    with acting_as(Actor("ada", "cli")), connect(load_settings()) as connection:
        redrive(connection, [17])
    """
    token = _actor.set(actor)
    try:
        yield
    finally:
        _actor.reset(token)


class Act:
    """One act, which may take several batches. Without details the schema records its own."""

    def __init__(self, **details: JsonValue) -> None:
        self._id: UUID = uuid4()
        self._details: Mapping[str, JsonValue] = {
            name: value for name, value in details.items() if value not in (None, [])
        }

    def announce(self, connection: psycopg.Connection[TupleRow]) -> None:
        """Have the schema record what the open transaction does next as this act."""
        actor = _actor.get() or _NOBODY
        connection.execute(
            sql.ANNOUNCE_ACT,
            {
                "act_id": self._id,
                "actor": actor.name,
                "origin": actor.origin,
                "details": Jsonb(self._details) if self._details else None,
            },
        )

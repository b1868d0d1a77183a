"""The audit of acts: one row in `pgoutbox.audit` for each changed batch of an operator's act, in its transaction.

The schema records acts itself, also those by SQL. This module gives it the actor and the details of the request. An
act that changed nothing leaves no row. Deliveries (`attempt` records them) and maintenance by workers are not acts.
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
    """The kinds of acts of an operator."""

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
    """The name and origin of an operator: `Actor("ada", "web 192.0.2.7")`. Without a name it is the database role."""

    name: str | None = None
    origin: str | None = None


_NOBODY: Final = Actor()
_actor: ContextVar[Actor | None] = ContextVar("pgoutbox_actor", default=None)


@contextlib.contextmanager
def as_actor(actor: Actor) -> Iterator[None]:
    """Attribute the acts of the `with` block, in its thread or asyncio task, to this actor.

    with acting_as(Actor("ada", "cli")), connect(load_settings()) as connection:
        redrive(connection, [17])
    """
    token = _actor.set(actor)
    try:
        yield
    finally:
        _actor.reset(token)


class OperatorAction:
    """One act, which may consist of several batches. Without details, the schema records its own."""

    def __init__(self, **details: JsonValue) -> None:
        self._id: UUID = uuid4()
        self._details: Mapping[str, JsonValue] = {
            name: value for name, value in details.items() if value not in (None, [])
        }

    def announce(self, connection: psycopg.Connection[TupleRow]) -> None:
        """Make the schema record the next changes of the open transaction as this act."""
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

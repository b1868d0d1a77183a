"""Drafts as applications make them, the text of a refusal, and bulks in SQL."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Any

import pytest
from psycopg.types.json import Jsonb
from pydantic import BaseModel, ConfigDict, Field, computed_field

from pgoutbox.enqueue.validation import Draft, Route, prepare
from pgoutbox.errors import ArgumentError
from pgoutbox.topics import NewMessage, Topic

if TYPE_CHECKING:
    from collections.abc import Mapping

    import psycopg

LIMIT = 1_000_000
DEFAULT = 7


class Address(BaseModel):
    """A nested model."""

    street: str
    since: date | None = None


class Account(BaseModel):
    """A payload's model with an alias, a computed field and a field that holds anything."""

    model_config = ConfigDict(populate_by_name=True)

    user_id: int = Field(alias="userId")
    email: str = ""
    addresses: list[Address] = []
    extra: Any = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def label(self) -> str:
        """Compute a field that is not written."""
        return f"{self.user_id}"


def draft_of(topic: str | Topic[Any] = "mail", payload: object = None, /, **options: object) -> Draft:
    known: dict[str, Any] = options
    return prepare(
        NewMessage(topic, payload, **known),
        Route(topic if isinstance(topic, Topic) else Topic(topic), max_attempts=DEFAULT, max_payload_bytes=LIMIT),
    )


def refusal(topic: str | Topic[Any] = "mail", payload: object = None, /, **options: object) -> str:
    """Return the text of the message's refusal."""
    with pytest.raises(ArgumentError) as caught:
        draft_of(topic, payload, **options)
    assert str(caught.value).isprintable()
    return str(caught.value)


def enqueue_many(connection: psycopg.Connection, *messages: Mapping[str, object]) -> list[tuple[int, int, bool]]:
    """Enqueue by the SQL function. Return its rows in the order of the items: index, id, whether it is a duplicate."""
    return connection.execute(
        "SELECT m.item_index, m.id, m.duplicate FROM pgoutbox.enqueue_many(%s) AS m ORDER BY m.item_index",
        [Jsonb(messages)],
    ).fetchall()

"""Tests of examples of payloads, and of the options that a definition leaves open."""

from __future__ import annotations

import enum
from datetime import date, datetime, timedelta
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import AnyUrl, BaseModel, ConfigDict, Field

from pgoutbox import Topic
from pgoutbox.catalogue import example_payload, open_options


class Colour(enum.StrEnum):
    RED = "red"


class Part(BaseModel):
    count: int = Field(gt=2)
    ratio: float = Field(le=-1)
    children: list[Part] = []


class Order(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: UUID
    day: date
    made_at: datetime
    wait: timedelta
    link: AnyUrl
    colour: Colour
    kind: Literal["gift"]
    name: Annotated[str, Field(min_length=3)]
    parts: Annotated[list[Part], Field(min_length=2)]
    pair: tuple[int, str]
    extra: dict[str, int]
    note: str | None
    is_paid: bool
    total: int = Field(alias="sum", ge=1)
    anything: Any


def test_the_example_of_a_payload_fits_its_model() -> None:
    example = example_payload(Topic("order", payload=Order))
    assert isinstance(example, dict)
    order = Order.model_validate(example)
    assert (order.total, order.name, order.colour, len(order.parts)) == (1, "xxx", Colour.RED, 2)
    assert list(example) == [field.alias or name for name, field in Order.model_fields.items()]


class Node(BaseModel):
    next: Node


class Opaque(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    thing: type[int] | memoryview


@pytest.mark.parametrize("model", [Node, Opaque, None])
def test_a_model_without_a_finite_example_has_a_start(model: type[BaseModel] | None) -> None:
    assert isinstance(example_payload(Topic("order", payload=model)), dict)


def test_an_ordering_key_is_not_open_beside_a_coalesce_key() -> None:
    assert open_options(Topic("a")) == (
        "destination", "owner", "coalesce_key", "dedupe_key", "ordering_key", "fair_key", "delay",
    )  # fmt: skip
    assert open_options(Topic("a", coalesce_key=str, delay=5)) == ("destination", "owner", "dedupe_key", "fair_key")
    assert "ordering_key" not in open_options(Topic("a", fair_key=str))
    assert open_options(Topic("a", ordering_key=str, destination="tel:1")) == ("owner", "dedupe_key", "delay")

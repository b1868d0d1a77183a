"""Tests an event's envelope, and the refusals before a broker is contacted."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import pytest
from pydantic import BaseModel

from pgoutbox.message import Permanent, Unavailable
from pgoutbox.settings import Settings, load_settings
from pgoutbox.transports.brokers.events import CloudEvent, parse_name, render, source_key
from pgoutbox.transports.smtp.mail import Email
from tests.support.sends import outgoing


class Order(BaseModel):
    order_id: int


@pytest.fixture
def settings() -> Settings:
    return load_settings(event_source="https://club.example.org")


def envelope_of(event: CloudEvent, settings: Settings) -> dict[str, Any]:
    envelope = json.loads(render(event, outgoing(), settings).content)
    assert isinstance(envelope, dict)
    return envelope


def test_the_envelope_has_the_required_attributes_of_a_cloudevent(settings: Settings) -> None:
    assert envelope_of(CloudEvent({"order_id": 7}), settings) == {
        "specversion": "1.0",
        "id": outgoing().idempotency_key,
        "source": "https://club.example.org",
        "type": "welcome",
        "time": "2026-03-01T12:00:00Z",
        "datacontenttype": "application/json",
        "data": {"order_id": 7},
    }


def test_the_handler_can_set_more_attributes(settings: Settings) -> None:
    event = CloudEvent(
        None,
        type="org.example.order.placed",
        source="/orders",
        subject="orders/ü",
        key="7",
        extensions={"tenant": "club", "urgent": True, "weight": 3},
    )
    envelope = envelope_of(event, settings)
    assert envelope["data"] is None
    wanted = {
        "type": "org.example.order.placed", "source": "/orders", "subject": "orders/ü", "partitionkey": "7",
        "tenant": "club", "urgent": True, "weight": 3,
    }  # fmt: skip
    assert {name: envelope[name] for name in wanted} == wanted


def test_every_attempt_has_the_same_bytes(settings: Settings) -> None:
    event = CloudEvent({"b": 1, "a": 2})
    assert render(event, outgoing(attempt_count=1), settings) == render(event, outgoing(attempt_count=9), settings)


def test_bytes_travel_as_base64_and_a_model_as_json(settings: Settings) -> None:
    binary = envelope_of(CloudEvent(b"\x00\xff", content_type="image/png"), settings)
    assert (base64.b64decode(binary["data_base64"]), binary["datacontenttype"]) == (b"\x00\xff", "image/png")
    assert "data" not in binary
    assert envelope_of(CloudEvent(b""), settings)["datacontenttype"] == "application/octet-stream"
    assert envelope_of(CloudEvent(Order(order_id=7)), settings)["data"] == {"order_id": 7}


@pytest.mark.parametrize(
    ("event", "content_type", "body"),
    [
        (CloudEvent({"b": 1, "a": "ü"}, mode="binary"), "application/json", '{"b":1,"a":"ü"}'.encode()),
        (CloudEvent(Order(order_id=7), mode="binary"), "application/json", b'{"order_id":7}'),
        (CloudEvent(None, mode="binary"), "application/json", b"null"),
        (CloudEvent("Hi", mode="binary"), "application/json", b'"Hi"'),
        (CloudEvent("7", content_type="application/vnd.club+json", mode="binary"), "application/vnd.club+json", b'"7"'),
        (CloudEvent("<a/>", content_type="text/xml", mode="binary"), "text/xml", b"<a/>"),
        (CloudEvent(b"\x00\xff", mode="binary"), "application/octet-stream", b"\x00\xff"),
    ],
)
def test_in_binary_mode_the_body_is_the_data_alone(
    event: CloudEvent, content_type: str, body: bytes, settings: Settings
) -> None:
    rendered = render(event, outgoing(), settings)
    assert (rendered.content_type, rendered.content) == (content_type, body)
    assert rendered.headers_with("ce_").keys() == {"ce_specversion", "ce_id", "ce_source", "ce_type", "ce_time"}


def test_in_structured_mode_no_attribute_is_a_header(settings: Settings) -> None:
    assert render(CloudEvent(1, headers={"a": "b"}), outgoing(), settings).headers_with("ce_") == {"a": "b"}


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ({"type": ""}, "event.type: is empty"),
        ({"type": "a\nb"}, "event.type: contains CR, LF or NUL"),
        ({"source": "x" * 256}, "event.source: 256 bytes are more than 255"),
        ({"subject": "\x00"}, "event.subject: contains CR, LF or NUL"),
        ({"subject": 7}, "event.subject: must be text, not int"),
        ({"key": "\ud800"}, "event.key: contains the character U+D800"),
        ({"key": ""}, "event.key: is empty"),
        ({"content_type": "json"}, "event.content_type: is not a media type"),
        ({"data": {1, 2}}, "event.data: is not JSON"),
        ({"data": math.nan}, "event.data: is not JSON"),
        ({"data": "\ud800"}, "event.data: contains the character U+D800"),
        ({"data": ENDLESS}, "event.data: is not JSON"),
        ({"extensions": {"Tenant": "a"}}, "event.extensions['Tenant']: its name must be"),
        ({"extensions": {"id": "a"}}, "event.extensions['id']: is an attribute that pgoutbox sets itself"),
        ({"extensions": {f"e{n}": "" for n in range(65)}}, "event.extensions: 65 are more than 64"),
        ({"data": {1, 2}, "mode": "binary"}, "event.data: is not JSON"),
        (
            {"data": "\ud800", "content_type": "text/plain", "mode": "binary"},
            "event.data: contains the character U+D800",
        ),
        ({"mode": "batch"}, "event.mode: must be structured or binary, not 'batch'"),
        ({"headers": {"data": "a"}}, "event.headers['data']: is reserved"),
        ({"extensions": {"a": 2**31}}, "event.extensions['a']: does not fit into 32 bits"),
        ({"extensions": {"a": None}}, "event.extensions['a']: must be text, not NoneType"),
        ({"headers": {"a b": "c"}}, "event.headers['a b']: is not the name of a header"),
        ({"headers": {"a": "b\r\nc"}}, "event.headers['a']: contains CR, LF or NUL"),
        ({"headers": {"a": "x" * 1_025}}, "event.headers['a']: 1025 bytes are more than 1024"),
        ({"headers": {"Nats-Rollup": "all"}}, "event.headers['Nats-Rollup']: is reserved"),
        ({"headers": {"CC": "a"}}, "event.headers['CC']: is reserved"),
        ({"headers": {f"h{n}": "" for n in range(65)}}, "event.headers: 65 are more than 64"),
    ],
)
def test_an_invalid_event_is_refused_by_name(event: dict[str, Any], error: str, settings: Settings) -> None:
    with pytest.raises(Permanent) as caught:
        render(CloudEvent(**event), outgoing(), settings)
    assert caught.value.error.startswith(error)


def test_a_missing_source_costs_no_attempt() -> None:
    with pytest.raises(Unavailable, match="PGOUTBOX_EVENT_SOURCE is not set") as caught:
        render(CloudEvent(), outgoing(), load_settings())
    assert caught.value.breaker == source_key(CloudEvent()) == "event:PGOUTBOX_EVENT_SOURCE"
    assert source_key(CloudEvent(source="shop")) is None
    with pytest.raises(Permanent, match="PGOUTBOX_EVENT_SOURCE: contains"):
        render(CloudEvent(), outgoing(), load_settings(event_source="a\tb"))


def test_another_content_type_is_refused(settings: Settings) -> None:
    with pytest.raises(Permanent, match="sends an Event, not Email"):
        render(Email(subject="Hello", text="Hi"), outgoing(), settings)


def test_the_data_is_not_in_the_repr() -> None:
    assert "canary" not in repr(CloudEvent("canary", headers={"a": "canary"}, extensions={"a": "canary"}))


@pytest.mark.parametrize(
    ("destination", "name"), [("nats:a.b", "a.b"), ("redis:a:b%20c", "a:b c"), ("kafka:%C3%BC", "ü")]
)
def test_the_destination_needs_a_name_after_its_scheme(destination: str, name: str) -> None:
    assert parse_name(outgoing(destination=destination)) == name


@pytest.mark.parametrize(
    ("destination", "error"),
    [
        (None, "destination: names nothing"),
        ("nats:", "destination: names nothing"),
        ("nats://evil.example.org/a", "destination: names a server"),
        ("nats:a%0d%0aPUB", "destination: contains CR, LF or NUL"),
        ("nats:%ff", "destination: contains the character U+DCFF"),
        ("nats:" + "x" * 256, "destination: 256 bytes are more than 255"),
    ],
)
def test_an_invalid_destination_is_refused(destination: str | None, error: str) -> None:
    with pytest.raises(Permanent) as caught:
        parse_name(outgoing(destination=destination))
    assert caught.value.error.startswith(error)

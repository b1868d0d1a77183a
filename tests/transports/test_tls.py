"""Tests TLS verification in transports: valid CA files, and the errors about an untrusted server."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import pytest
import trustme

from pgoutbox.errors import ConfigurationError
from pgoutbox.transports import SmtpTransport
from pgoutbox.transports.brokers.kafka import KafkaTransport
from pgoutbox.transports.brokers.nats_jetstream import NatsTransport
from pgoutbox.transports.brokers.rabbitmq import RabbitMQTransport
from pgoutbox.transports.brokers.redis_streams import RedisTransport
from pgoutbox.transports.tls import describe_refusal, verifying_context
from tests.support.settings import settings_with

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ENCRYPTED: dict[Callable[..., object], dict[str, object]] = {
    RedisTransport: {"redis_url": "rediss://host"},
    NatsTransport: {"nats_url": "nats://a,tls://b"},
    RabbitMQTransport: {"rabbitmq_url": "amqps://host"},
    KafkaTransport: {"kafka_servers": "host:1"},
    SmtpTransport: {"smtp_host": "host"},
}
PLAIN: dict[Callable[..., object], dict[str, object]] = {
    RedisTransport: {"redis_url": "redis://host"},
    NatsTransport: {"nats_url": "nats://a,nats://b"},
    RabbitMQTransport: {"rabbitmq_url": "amqp://host"},
    KafkaTransport: {"kafka_servers": "host:1", "kafka_security": "none"},
    SmtpTransport: {"smtp_host": "host", "smtp_security": "none"},
}


def setting_of(given: dict[str, object]) -> str:
    """Return the name of the CA-file setting for these settings."""
    return f"{next(iter(given)).partition('_')[0]}_ca_file"


@pytest.fixture
def ca_file(tmp_path: Path) -> str:
    path = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(path)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "given"), ENCRYPTED.items())
async def test_an_unusable_ca_file_is_refused_by_name_at_the_start(
    transport: Callable[..., object], given: dict[str, object], tmp_path: Path, ca_file: str
) -> None:
    setting = setting_of(given)
    transport(settings_with(**given, **{setting: ca_file}))
    empty = tmp_path / "empty.pem"
    empty.write_text("no certificate")
    for path in (empty, tmp_path / "missing.pem"):
        with pytest.raises(ConfigurationError, match=f"PGOUTBOX_{setting.upper()}='{path}': "):
            transport(settings_with(**given, **{setting: str(path)}))


@pytest.mark.parametrize(("transport", "given"), PLAIN.items())
async def test_a_ca_file_with_plain_text_is_refused_at_the_start(
    transport: Callable[..., object], given: dict[str, object], ca_file: str
) -> None:
    setting = setting_of(given)
    transport(settings_with(**given))
    with pytest.raises(ConfigurationError, match=f"PGOUTBOX_{setting.upper()} is set, but .* asks for plain text"):
        transport(settings_with(**given, **{setting: ca_file}))


def test_the_context_verifies_and_requires_tls_1_2(ca_file: str) -> None:
    system, both = verifying_context(), verifying_context(ca_file=ca_file)
    for context in (system, both):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert context.check_hostname
    assert len(both.get_ca_certs()) == len(system.get_ca_certs()) + 1


def test_a_certificate_error_is_found_inside_the_errors_of_a_client() -> None:
    hidden = ConnectionError("no server")
    hidden.__context__ = ssl.SSLError(1, "wrong version number")
    said = describe_refusal(hidden)
    assert said is not None
    assert said.startswith("TLS: ")
    assert "wrong version number" in said
    assert describe_refusal(ConnectionError("refused")) is None

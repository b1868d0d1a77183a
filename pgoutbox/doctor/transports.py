"""The checks of the ways out: SMTP, webhooks, notifications and brokers, with the settings that a worker would use.

Servers are connected and signed in to as for a send, and left again. Nothing is handed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from pgoutbox.doctor.environment import LOOPBACK
from pgoutbox.doctor.findings import Level, Note, Notes, ok, one_line, problem, skipped, warning
from pgoutbox.errors import ConfigurationError
from pgoutbox.transports import ChecksItself
from pgoutbox.transports.readiness import is_example, is_reserved

if TYPE_CHECKING:
    from pgoutbox.outbox import Outbox
    from pgoutbox.settings import Settings
    from pgoutbox.transports import Transport

_PATIENCE_SECONDS: Final = 60.0
_PLAIN_SCHEMES: Final = frozenset({"redis", "nats", "amqp"})


def is_served(scheme: str, settings: Settings, outbox: Outbox | None) -> bool:
    """Whether a worker with these settings has a transport for the scheme."""
    if outbox is not None and scheme in outbox.own_transports:
        return True
    return {
        "mailto": settings.smtp_host is not None,
        "apprise": settings.apprise_urls is not None,
        "https": _has_webhooks(),
        "http": _has_webhooks() and settings.webhook_allow_http,
        "redis": settings.redis_url is not None,
        "nats": settings.nats_url is not None,
        "rabbitmq": settings.rabbitmq_url is not None,
        "kafka": settings.kafka_servers is not None,
    }.get(scheme, False)


def check_smtp(settings: Settings, outbox: Outbox | None) -> Iterator[Note]:
    """Sender, encryption and sign-in of e-mail."""
    own = _own("mailto", outbox)
    if settings.smtp_host is None and own is None:
        yield skipped("no SMTP server is set")
        return
    yield from _sender(settings)
    host = settings.smtp_host or ""
    if is_example(host) and host.lower() not in LOOPBACK:
        yield _never_edited("PGOUTBOX_SMTP_HOST", host, "it does not exist, and no e-mail goes out")
    if settings.smtp_host is not None and settings.smtp_security == "none" and host.lower() not in LOOPBACK:
        yield problem(
            f"PGOUTBOX_SMTP_SECURITY=none to {host}",
            "every e-mail, with the links that sign people in, crosses the network for all to read",
            "use starttls or tls",
        )
    yield from _tried(
        own or _smtp,
        settings,
        in_order=f"{host or 'the server'} takes e-mail: {_SECURITY[settings.smtp_security]}"
        + (", signed in" if settings.smtp_username else ""),
        why="no e-mail goes out; it waits, and is tried again",
        mend="check PGOUTBOX_SMTP_HOST, _PORT, _SECURITY, _USERNAME, _PASSWORD and _FROM; see docs/how-to/email.md",
    )


_SECURITY: Final = {"starttls": "STARTTLS", "tls": "TLS", "none": "plain text"}


def _sender(settings: Settings) -> Iterator[Note]:
    if settings.smtp_from is None:
        yield warning(
            "PGOUTBOX_SMTP_FROM is not set",
            "e-mails that name no sender themselves wait until it is",
            "set it to an address of yours",
        )
    elif is_reserved(settings.smtp_from):
        yield warning(
            f"the domain of PGOUTBOX_SMTP_FROM={settings.smtp_from} is reserved for tests (RFC 6761)",
            "it suits a test system; elsewhere mail servers refuse it, and neither answers nor bounces reach you",
            "set it to an address of yours before this system sends to anybody",
        )
    elif is_example(settings.smtp_from):
        yield _never_edited(
            "PGOUTBOX_SMTP_FROM",
            settings.smtp_from,
            "every e-mail claims to come from a domain that is not yours: it is refused or taken for spam, and "
            "neither answers nor bounces reach you",
        )
    if settings.alert_destination is not None and is_example(settings.alert_destination):
        yield _never_edited(
            "PGOUTBOX_ALERT_DESTINATION", settings.alert_destination, "no alert of a dead server reaches you"
        )


def _never_edited(variable: str, value: str, why: str) -> Note:
    return problem(
        f"{variable}={value} IS THE EXAMPLE OF THE DOCUMENTATION: it was never edited",
        why,
        f"set {variable} to one of your own, before anything else",
    )


def check_webhooks(settings: Settings, outbox: Outbox | None) -> Iterator[Note]:
    """Where webhooks may go, and whether their settings can be used."""
    if not _has_webhooks() and settings.webhook_secrets is None:
        yield skipped("the extra webhook is not installed")
        return
    found = []
    if settings.webhook_allow_http:
        found.append(
            warning(
                "PGOUTBOX_WEBHOOK_ALLOW_HTTP=true",
                "what is sent to http: can be read and changed on its way",
                "unset it, and have the receivers use https",
            )
        )
    if settings.webhook_allowed_networks is not None:
        found.append(
            warning(
                f"PGOUTBOX_WEBHOOK_ALLOWED_NETWORKS={settings.webhook_allowed_networks}",
                "whoever may choose a URL can have requests sent into these networks",
                "name no network but those that receivers are in",
            )
        )
    is_used = any(name.startswith("webhook_") for name in settings.model_fields_set)
    if is_used and settings.webhook_secrets is None:
        found.append(
            warning(
                "PGOUTBOX_WEBHOOK_SECRETS is not set, and other settings of webhooks are",
                "unless handlers bring secrets of their own, nobody can tell your webhooks from a forger's",
                "set PGOUTBOX_WEBHOOK_SECRETS, and tell it to the receivers",
            )
        )
    yield from found
    own = _own("https", outbox)
    if own is not None:
        yield skipped("the application brings a transport of its own for https")
        return
    why, mend = "a worker with these settings does not start", "correct it; see docs/how-to/webhooks.md"
    in_order = "the settings of webhooks can be used"
    for note in _tried(_webhook, settings, in_order=in_order, why=why, mend=mend, connects=False):
        if note.level is not Level.OK or not found:
            yield note


def check_apprise(settings: Settings, outbox: Outbox | None) -> Iterator[Note]:
    """Whether the URLs of notifications can be read. Nothing tells whether a service takes them but a notification."""
    if settings.apprise_urls is None or _own("apprise", outbox) is not None:
        yield skipped("no notification services are set")
        return
    yield from _tried(
        _apprise,
        settings,
        in_order="the URLs of notifications can be read",
        why="a worker with these settings does not start",
        mend="correct PGOUTBOX_APPRISE_URLS; see docs/how-to/notifications.md",
        connects=False,
    )


def _broker(
    scheme: str, title: str, variable: str, make: Callable[[Settings], Transport]
) -> Callable[[Settings, Outbox | None], Notes]:
    def check(settings: Settings, outbox: Outbox | None) -> Iterator[Note]:
        own = _own(scheme, outbox)
        if own is None and getattr(settings, variable) is None:
            yield skipped(f"no {title} is set")
            return
        name = f"PGOUTBOX_{variable.upper()}"
        if own is None and (host := _plain_host(settings, variable)) is not None:
            yield warning(
                f"{name}: plain text to {host}",
                "events, and the password, can be read and changed on their way",
                "use TLS: see docs/how-to/events.md",
            )
        yield from _tried(
            own or make,
            settings,
            in_order=f"{title} takes the connection",
            why="no event goes out; it waits, and is tried again",
            mend=f"check {name}, and that the server runs and lets this user in; see docs/how-to/events.md",
        )

    return check


def _plain_host(settings: Settings, variable: str) -> str | None:
    """The first host that is not this machine and is spoken to without TLS."""
    if variable == "kafka_servers":
        servers = settings.kafka_servers or ""
        hosts = [server.strip().rpartition(":")[0] for server in servers.split(",")]
        is_plain = settings.kafka_security == "none"
    else:
        urls = [_split(url) for url in getattr(settings, variable).get_secret_value().split(",")]
        hosts = [host for scheme, host in urls if scheme in _PLAIN_SCHEMES]
        is_plain = all(scheme in _PLAIN_SCHEMES for scheme, _ in urls)
    return next((host for host in hosts if host and host.lower() not in LOOPBACK), None) if is_plain else None


def _split(url: str) -> tuple[str, str]:
    try:
        parts = urlsplit(url.strip())
    except ValueError:
        return "", ""  # The transport says what is wrong with it.
    return parts.scheme, parts.hostname or ""


def _own(scheme: str, outbox: Outbox | None) -> Callable[[Settings], Transport] | None:
    """The transport that the application brings for the scheme."""
    if outbox is None or scheme not in outbox.own_transports:
        return None
    transport = outbox.own_transports[scheme]
    return lambda _: transport


def _tried(
    make: Callable[[Settings], Transport],
    settings: Settings,
    *,
    in_order: str,
    why: str,
    mend: str,
    connects: bool = True,
) -> Iterator[Note]:
    """Make the transport, and let it open what a send needs."""
    try:
        fault = asyncio.run(_fault(make, settings, connects=connects))
    except ConfigurationError as error:
        yield problem(one_line(str(error)), "a worker with these settings does not start", mend)
    except _UntriableError:
        yield skipped("the application's own transport cannot be tried", "give it a method `check`")
    except Exception as error:  # noqa: BLE001 - the application's own transport may raise anything; so may a client
        yield problem(f"the check failed: {one_line(str(error)) or type(error).__name__}", why, mend)
    else:
        yield ok(in_order) if fault is None else problem(one_line(fault), why, mend)


class _UntriableError(Exception):
    """The transport has no way to be tried without sending."""


async def _fault(make: Callable[[Settings], Transport], settings: Settings, *, connects: bool) -> str | None:
    transport = make(settings)
    if not connects:
        await transport.aclose()
        return None
    if not isinstance(transport, ChecksItself):
        raise _UntriableError
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            return await transport.check()
    except TimeoutError:
        return f"no answer within {_PATIENCE_SECONDS:g} s"
    finally:
        await transport.aclose()


def _has_webhooks() -> bool:
    from pgoutbox.transports.webhook.transport import is_installed

    return is_installed()


def _smtp(settings: Settings) -> Transport:
    from pgoutbox.transports.smtp import SmtpTransport

    return SmtpTransport(settings)


def _webhook(settings: Settings) -> Transport:
    from pgoutbox.transports.webhook import WebhookTransport

    return WebhookTransport(settings)


def _apprise(settings: Settings) -> Transport:
    from pgoutbox.transports.apprise import AppriseTransport

    return AppriseTransport(settings)


def _redis(settings: Settings) -> Transport:
    from pgoutbox.transports.brokers.redis_streams import RedisTransport

    return RedisTransport(settings)


def _nats(settings: Settings) -> Transport:
    from pgoutbox.transports.brokers.nats_jetstream import NatsTransport

    return NatsTransport(settings)


def _rabbitmq(settings: Settings) -> Transport:
    from pgoutbox.transports.brokers.rabbitmq import RabbitMQTransport

    return RabbitMQTransport(settings)


def _kafka(settings: Settings) -> Transport:
    from pgoutbox.transports.brokers.kafka import KafkaTransport

    return KafkaTransport(settings)


CHECKS: Final[Mapping[str, Callable[[Settings, Outbox | None], Notes]]] = {
    "smtp": check_smtp,
    "webhooks": check_webhooks,
    "apprise": check_apprise,
    "redis": _broker("redis", "Redis", "redis_url", _redis),
    "nats": _broker("nats", "NATS", "nats_url", _nats),
    "rabbitmq": _broker("rabbitmq", "RabbitMQ", "rabbitmq_url", _rabbitmq),
    "kafka": _broker("kafka", "Kafka", "kafka_servers", _kafka),
}

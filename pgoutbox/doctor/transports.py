"""The checks of the transports: SMTP, webhooks, notifications and brokers, with the settings of a worker.

Each check connects and signs in as for a send, then disconnects. It sends nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Final
from urllib.parse import urlsplit

from pgoutbox import transports
from pgoutbox.doctor.environment import LOOPBACK
from pgoutbox.doctor.findings import HOW_TO, Finding, Findings, ok, problem, skipped, warning
from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Message, Outcome, Permanent, SendFailure, Sent, Transient, Unavailable
from pgoutbox.outbox import Outbox
from pgoutbox.settings import Settings, variable_of
from pgoutbox.text import one_line
from pgoutbox.transports import ChecksItself, Transport
from pgoutbox.transports.readiness import is_placeholder, is_reserved
from pgoutbox.transports.registry import build, is_configured

_PATIENCE_SECONDS: Final = 60.0
_NO_MAIL: Final = "no e-mail is sent; messages wait and are retried"
_PLAIN_SCHEMES: Final = frozenset({"redis", "nats", "amqp"})


def is_served(scheme: str, settings: Settings, outbox: Outbox | None) -> bool:
    """Return whether a worker with these settings has a transport for the scheme."""
    return (outbox is not None and scheme in outbox.transports) or is_configured(scheme, settings)


def check_smtp(settings: Settings, outbox: Outbox | None) -> Iterator[Finding]:
    """Check the sender, the encryption and the sign-in of e-mail."""
    if settings.mail.transport == "log":
        yield warning(
            "mail-only-logged",
            "PGOUTBOX_MAIL_TRANSPORT=log",
            "e-mails are written to the log and nobody gets them, but their messages end `sent`",
            "unset it and set PGOUTBOX_SMTP_HOST, unless this is a developer's machine",
        )
        return
    own = _own("mailto", outbox)
    if own is None and not is_configured("mailto", settings):
        yield skipped(
            "smtp-not-set",
            "this process has neither an SMTP server (PGOUTBOX_SMTP_HOST) nor a sendmail program (PGOUTBOX_SENDMAIL)",
            "to check that of the workers, run the doctor with their environment",
        )
        return
    if own is not None and not isinstance(own(settings), transports.SmtpTransport):
        # It has a server, a sender and an encryption of its own.
        yield from _try_transport(
            own,
            settings,
            in_order="the application's own transport for e-mail works",
            why=_NO_MAIL,
            fix=f"check the settings of that transport; see {HOW_TO}/mail-providers.html",
        )
    elif settings.sendmail is not None and own is None:
        yield from _try_transport(
            partial(build, "mailto"),
            settings,
            in_order=f"{settings.sendmail} is an executable program",
            why=_NO_MAIL,
            fix=f"install the mail server, or correct PGOUTBOX_SENDMAIL; see {HOW_TO}/email.html",
        )
        yield from _sender(settings)
    else:
        yield from _smtp_server(settings, own or partial(build, "mailto"))
        yield from _sender(settings)
    for destination in filter(is_placeholder, settings.alert_destinations):
        yield _placeholder(
            "alert-destination-placeholder",
            "PGOUTBOX_ALERT_DESTINATION",
            destination,
            "alerts about failed messages and a dead server do not reach you",
        )


def _smtp_server(settings: Settings, make: Callable[[Settings], Transport]) -> Iterator[Finding]:
    host = settings.smtp.host or ""
    signed_in = f"{_SECURITY[settings.smtp.security]}{', signed in' if settings.smtp.username else ''}"
    yield from _try_transport(
        make,
        settings,
        in_order=f"{host or 'the server'} accepts e-mail: {signed_in}",
        why=_NO_MAIL,
        fix="check PGOUTBOX_SMTP_HOST, _PORT, _SECURITY, _USERNAME, _PASSWORD and _SENDER, and that the server lets "
        f"this account or machine send to other servers; see {HOW_TO}/email.html",
        doubtful=_doubtful_sender,
    )
    if is_placeholder(host) and host.lower() not in LOOPBACK:
        yield _placeholder(
            "smtp-host-placeholder", "PGOUTBOX_SMTP_HOST", host, "this server does not exist, so no e-mail is sent"
        )
    if settings.smtp.host is not None and settings.smtp.security == "none" and host.lower() not in LOOPBACK:
        yield problem(
            "smtp-plain-text",
            f"PGOUTBOX_SMTP_SECURITY=none to {host}",
            "everybody on the network can read the e-mails, sign-in links included",
            "set it to starttls or tls",
        )


_SECURITY: Final = {"starttls": "STARTTLS", "tls": "TLS", "none": "plain text"}


def _sender(settings: Settings) -> Iterator[Finding]:
    if settings.smtp.sender is None:
        yield warning(
            "sender-missing",
            "PGOUTBOX_SMTP_SENDER is not set",
            "e-mails without a sender of their own wait until it is set",
            "set it to your own address",
        )
    elif is_reserved(settings.smtp.sender):
        yield warning(
            "sender-reserved",
            f"the domain of PGOUTBOX_SMTP_SENDER={settings.smtp.sender} is reserved for tests (RFC 6761)",
            "mail servers outside a test system refuse it, and you get neither replies nor bounces",
            "set it to your own address before this system sends to real receivers",
        )
    elif is_placeholder(settings.smtp.sender):
        yield _placeholder(
            "sender-placeholder",
            "PGOUTBOX_SMTP_SENDER",
            settings.smtp.sender,
            "every e-mail claims to come from an address that is not yours: servers refuse it or treat it as spam, and "
            "you get neither replies nor bounces",
        )


def _doubtful_sender(answer: str) -> Finding:
    return warning(
        "sender-not-a-recipient",
        answer,
        "the server does not accept the sender as a recipient: nobody gets replies and bounces, and it may refuse "
        "other recipients",
        "set PGOUTBOX_SMTP_SENDER to an address that receives e-mail, or fix the reason in the answer",
    )


def _placeholder(code: str, variable: str, value: str, why: str) -> Finding:
    return problem(
        code,
        f"{variable}={value} is still a placeholder",
        why,
        f"set {variable} to your own value first",
    )


def check_webhooks(settings: Settings, outbox: Outbox | None) -> Iterator[Finding]:
    """Check the settings of webhooks, and where webhooks may be sent."""
    if not is_configured("https", settings) and settings.webhook.secrets is None:
        yield skipped("webhook-extra-missing", "the extra webhook is not installed")
        return
    if settings.webhook.allow_http:
        yield warning(
            "webhook-http-allowed",
            "PGOUTBOX_WEBHOOK_ALLOW_HTTP=true",
            "an attacker on the network can read and change webhooks to http:",
            "unset it, and let the receivers use https",
        )
    if settings.webhook.allowed_networks is not None:
        yield warning(
            "webhook-networks-allowed",
            f"PGOUTBOX_WEBHOOK_ALLOWED_NETWORKS={settings.webhook.allowed_networks}",
            "whoever chooses a webhook URL can send requests into these networks",
            "allow only the networks of your receivers",
        )
    if settings.webhook.model_fields_set and settings.webhook.secrets is None:
        yield warning(
            "webhook-secrets-missing",
            "PGOUTBOX_WEBHOOK_SECRETS is not set, but other webhook settings are",
            "unless handlers use their own secrets, receivers cannot tell your webhooks from forged ones",
            "set PGOUTBOX_WEBHOOK_SECRETS, and give it to the receivers",
        )
    own = _own("https", outbox)
    if own is not None:
        yield skipped("own-transport", "the application has its own transport for https")
        return
    yield from _try_transport(
        partial(build, "https"),
        settings,
        in_order="the webhook settings are valid",
        why="a worker with these settings does not start",
        fix=f"correct the setting; see {HOW_TO}/webhooks.html",
        connects=False,
    )


def check_apprise(settings: Settings, outbox: Outbox | None) -> Iterator[Finding]:
    """Check the URLs of notifications. Only a real notification can show whether a service accepts it."""
    if settings.apprise_urls is None or _own("apprise", outbox) is not None:
        yield skipped("apprise-not-set", "no notification service is set")
        return
    yield from _try_transport(
        partial(build, "apprise"),
        settings,
        in_order="the notification URLs are valid",
        why="a worker with these settings does not start",
        fix=f"correct PGOUTBOX_APPRISE_URLS; see {HOW_TO}/notifications.html",
        connects=False,
    )


def _broker(scheme: str, title: str, field: str) -> Callable[[Settings, Outbox | None], Findings]:
    def check(settings: Settings, outbox: Outbox | None) -> Iterator[Finding]:
        own = _own(scheme, outbox)
        if own is None and getattr(getattr(settings, scheme), field) is None:
            yield skipped(f"{scheme}-not-set", f"no {title} is set")
            return
        name = variable_of(f"{scheme}.{field}")
        yield from _try_transport(
            own or partial(build, scheme),
            settings,
            in_order=f"{title} accepts the connection",
            why="no event is sent; messages wait and are retried",
            fix=f"check {name}, and that the server runs and accepts this user; see {HOW_TO}/events.html",
        )
        if own is None and (host := _plain_host(settings, scheme)) is not None:
            yield warning(
                "broker-plain-text",
                f"{name}: plain text to {host}",
                "an attacker on the network can read and change the events, and read the password",
                f"use TLS; see {HOW_TO}/events.html",
            )

    return check


def _plain_host(settings: Settings, scheme: str) -> str | None:
    """Return the first remote host that is contacted without TLS."""
    if scheme == "kafka":
        servers = settings.kafka.servers or ""
        hosts = [server.strip().rpartition(":")[0] for server in servers.split(",")]
        is_plain = settings.kafka.security == "none"
    else:
        urls = [_split(url) for url in getattr(settings, scheme).url.get_secret_value().split(",")]
        hosts = [host for its_scheme, host in urls if its_scheme in _PLAIN_SCHEMES]
        is_plain = all(its_scheme in _PLAIN_SCHEMES for its_scheme, _ in urls)
    return next((host for host in hosts if host and host.lower() not in LOOPBACK), None) if is_plain else None


def _split(url: str) -> tuple[str, str]:
    try:
        parts = urlsplit(url.strip())
    except ValueError:
        return "", ""  # The transport reports the fault of the URL.
    return parts.scheme, parts.hostname or ""


def _own(scheme: str, outbox: Outbox | None) -> Callable[[Settings], Transport] | None:
    """Return a factory of the application's own transport for the scheme, or None."""
    if outbox is None or scheme not in outbox.transports:
        return None
    transport = outbox.transports[scheme]
    return lambda _: transport


def _try_transport(
    make: Callable[[Settings], Transport],
    settings: Settings,
    *,
    in_order: str,
    why: str,
    fix: str,
    doubtful: Callable[[str], Finding] | None = None,
    connects: bool = True,
) -> Iterator[Finding]:
    """Build the transport, and let it open the connection that a send needs.

    `doubtful` reports a failure that need not concern every message.
    """
    try:
        outcome, breaker = asyncio.run(_tried(make, settings, connects=connects))
    except ConfigurationError as error:
        yield problem(
            "transport-setting-invalid", one_line(str(error)), "a worker with these settings does not start", fix
        )
        return
    except Exception as error:  # noqa: BLE001 - transports and client libraries may raise anything
        yield problem(
            "transport-check-failed", f"the check failed: {one_line(str(error)) or type(error).__name__}", why, fix
        )
        return
    match outcome:
        case None:
            yield skipped(
                "transport-without-check", "the application's own transport has no check", "give it a method `check`"
            )
        case Sent():
            yield ok("transport-in-order", in_order)
        case Unavailable() | SendFailure(outage=True, doubtful=None):
            about = {} if breaker is None else {"breaker": breaker}
            yield replace(problem("transport-unavailable", one_line(str(outcome)), why, fix), about=about)
        case Permanent() | Transient():
            answer = one_line(outcome.error)
            yield warning("transport-refused", answer, why, fix) if doubtful is None else doubtful(answer)
        case _:
            yield problem("transport-outcome-unexpected", one_line(str(outcome)), why, fix)


async def _tried(
    make: Callable[[Settings], Transport], settings: Settings, *, connects: bool
) -> tuple[Outcome | None, str | None]:
    """Return the outcome of the transport's check, None if it has none, and the key of its breaker for all messages."""
    transport = make(settings)
    breaker = _breaker_of(transport)
    try:
        if not connects:
            return Sent(), breaker
        if not isinstance(transport, ChecksItself):
            return None, breaker
        async with asyncio.timeout(_PATIENCE_SECONDS):
            return await transport.check(), breaker
    except TimeoutError:
        return SendFailure(f"no answer within {_PATIENCE_SECONDS:g} s", outage=True), breaker
    finally:
        await transport.aclose()


def _breaker_of(transport: Transport) -> str | None:
    never = datetime.fromtimestamp(0, UTC)
    message: Message[object] = Message(
        id=0,
        topic="doctor",
        queue="doctor",
        destination=f"{transport.schemes[0]}:",
        payload=None,
        headers={},
        attempt_count=1,
        max_attempts=1,
        created_at=never,
        available_at=never,
        coalesce_key=None,
    )
    try:
        return transports.breaker_key(transport, message, None)
    except Exception:  # noqa: BLE001 - an application's transport may not know such a destination
        return None


CHECKS: Final[Mapping[str, Callable[[Settings, Outbox | None], Findings]]] = {
    "smtp": check_smtp,
    "webhooks": check_webhooks,
    "apprise": check_apprise,
    "redis": _broker("redis", "Redis", "url"),
    "nats": _broker("nats", "NATS", "url"),
    "rabbitmq": _broker("rabbitmq", "RabbitMQ", "url"),
    "kafka": _broker("kafka", "Kafka", "servers"),
}

"""The checks without a server: settings, misspelt variables, and TLS of the database connections."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Final

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from pgoutbox.doctor.findings import Finding, ok, problem, skipped, warning
from pgoutbox.encryption import keyring_of
from pgoutbox.errors import ConfigurationError
from pgoutbox.settings import Settings, renamed_variables, unknown_variables
from pgoutbox.transports.redirect import RedirectRules

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1", "[::1]"})


def check_settings(settings: Settings, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Find variables with a former name, unknown ones, and settings that are meant for testing."""
    for variable, name in renamed_variables(environment):
        yield warning(
            "renamed-setting",
            f"setting {variable} is now {name}",
            "a later version ignores the former name",
            f"set {name} instead",
        )
    for variable, nearest in unknown_variables(environment):
        yield warning(
            "unknown-setting",
            f"unknown setting {variable}",
            "it is ignored, and the intended setting keeps its default",
            f"did you mean {nearest}?",
        )
    yield from _redirected(settings)
    if settings.log.level == "DEBUG":
        yield warning(
            "log-level-debug",
            "PGOUTBOX_LOG_LEVEL=DEBUG",
            "every connection and claim is logged: this is slow and fills the log",
            "use INFO",
        )
    if settings.webhook.error_body_chars:
        yield warning(
            "webhook-error-bodies",
            f"PGOUTBOX_WEBHOOK_ERROR_BODY_CHARS={settings.webhook.error_body_chars}",
            "errors contain the receivers' answers: whoever chooses a webhook URL can read from your network",
            "unset it when you have finished debugging the receiver",
        )
    if not settings.breaker.enabled:
        yield warning(
            "breakers-disabled",
            "PGOUTBOX_BREAKER_ENABLED=false",
            "while a server is down, every message to it uses up its attempts",
            "unset it: an open circuit breaker then holds back messages to a server that is down",
        )
    try:
        keyring_of(settings.encryption_keys)
    except ConfigurationError as error:
        yield problem(
            "encryption-keys-unusable",
            str(error),
            "encrypted payloads cannot be written or read",
            "install the missing extra",
        )
    yield ok("settings-in-order", "all PGOUTBOX_ variables are known settings, and none is for testing only")


def _redirected(settings: Settings) -> Iterator[Finding]:
    try:
        rules = RedirectRules.of(settings.redirect)
    except ConfigurationError as error:
        yield problem(
            "redirect-invalid",
            str(error),
            "a worker with these settings does not start",
            "correct or unset the setting",
        )
        return
    if rules.to is None:
        return
    exempt = [text for text in (settings.redirect.exempt, settings.redirect.exempt_topics) if text]
    exceptions = f", except for {', '.join(exempt)}" if exempt else ""
    yield warning(
        "redirect-by-setting",
        f"PGOUTBOX_REDIRECT_TO={settings.redirect.to}: all e-mail goes there{exceptions}",
        "your users get no e-mail, and notifications, webhooks and events are held back",
        "unset PGOUTBOX_REDIRECT_TO, unless this is a test system",
    )


def check_tls(settings: Settings) -> Iterator[Finding]:
    """Check that connections to PostgreSQL over the network are encrypted and verified."""
    for variable, dsn in (("PGOUTBOX_DSN", settings.dsn), ("PGOUTBOX_LISTEN_DSN", settings.listen_dsn)):
        if dsn is None:
            continue
        try:
            given = conninfo_to_dict(dsn.get_secret_value())
        except ProgrammingError:
            yield skipped("dsn-unreadable", f"{variable} is not a connection string")
            continue
        hosts = str(given.get("host") or given.get("hostaddr") or os.environ.get("PGHOST") or "").split(",")
        remote = [host for host in hosts if host and not host.startswith(("/", "@")) and host.lower() not in LOOPBACK]
        mode = str(given.get("sslmode") or os.environ.get("PGSSLMODE") or "prefer")
        if remote and mode != "verify-full":
            yield warning(
                "tls-unverified",
                f"{variable}: sslmode={mode} to {remote[0]}",
                "an attacker on the network can read and change everything, or pose as the server",
                "add sslmode=verify-full, and sslrootcert with the CA certificate of the server; "
                "channel_binding=require helps too",
            )
    yield ok("tls-in-order", "the connections to PostgreSQL are local, or encrypted and verified")

"""The checks that need no server: what is set, what is misspelt, and how the way to the database is protected."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Final

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from pgoutbox.doctor.findings import Note, ok, problem, skipped, warning
from pgoutbox.encryption import keyring_of
from pgoutbox.errors import ConfigurationError
from pgoutbox.settings import Settings, unknown_variables
from pgoutbox.transports.redirect import Redirect

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1", "[::1]"})


def check_settings(settings: Settings, environment: Mapping[str, str]) -> Iterator[Note]:
    """Variables that nobody reads, and settings that are for testing."""
    found = [*_misspelt(environment), *_redirected(settings), *_for_testing(settings)]
    try:
        keyring_of(settings.encryption_keys)
    except ConfigurationError as error:
        found.append(problem(str(error), "encrypted payloads can be neither written nor read", "install it"))
    yield from found or [ok("every PGOUTBOX_ variable is a setting, and none is for testing only")]


def _misspelt(environment: Mapping[str, str]) -> Iterator[Note]:
    for variable, nearest in unknown_variables(environment):
        yield warning(
            f"{variable} is no setting of pgoutbox",
            "nobody reads it, and what was meant keeps its default",
            f"did you mean {nearest}?",
        )


def _redirected(settings: Settings) -> Iterator[Note]:
    try:
        redirect = Redirect.at_start(settings)
    except ConfigurationError as error:
        yield problem(str(error), "a worker with these settings does not start", "correct or unset it")
        return
    if redirect is not None:
        exceptions = f", except for {settings.redirect_except}" if settings.redirect_except else ""
        yield warning(
            f"PGOUTBOX_REDIRECT_TO={settings.redirect_to}: all e-mail goes there{exceptions}",
            "your users get none of their e-mail, and notifications, webhooks and events are held back",
            "unset PGOUTBOX_REDIRECT_TO, unless this is a test system",
        )


def _for_testing(settings: Settings) -> Iterator[Note]:
    if settings.log_level == "DEBUG":
        yield warning(
            "PGOUTBOX_LOG_LEVEL=DEBUG", "every connection and claim is logged: slow, and much to store", "use INFO"
        )
    if settings.webhook_excerpt_length:
        yield warning(
            f"PGOUTBOX_WEBHOOK_EXCERPT_LENGTH={settings.webhook_excerpt_length}",
            "errors quote what receivers answer, which tells whoever chose the URL what your network sees",
            "unset it when the receiver is understood",
        )
    if not settings.breaker:
        yield warning(
            "PGOUTBOX_BREAKER=false",
            "while a server is away every message to it uses up its attempts",
            "unset it, so that a destination that is dead is left alone for a while",
        )


def check_tls(settings: Settings) -> Iterator[Note]:
    """Whether the connections to PostgreSQL that leave the machine are encrypted and verified."""
    found = [
        *_unverified("PGOUTBOX_DSN", settings.dsn.get_secret_value() if settings.dsn else None),
        *_unverified("PGOUTBOX_LISTEN_DSN", settings.listen_dsn.get_secret_value() if settings.listen_dsn else None),
    ]
    yield from found or [ok("the way to PostgreSQL is local, or encrypted and verified")]


def _unverified(variable: str, dsn: str | None) -> Iterator[Note]:
    if dsn is None:
        return
    try:
        given = conninfo_to_dict(dsn)
    except ProgrammingError:
        yield skipped(f"{variable} is not a connection string")
        return
    hosts = str(given.get("host") or given.get("hostaddr") or os.environ.get("PGHOST") or "").split(",")
    remote = [host for host in hosts if host and not host.startswith(("/", "@")) and host.lower() not in LOOPBACK]
    mode = str(given.get("sslmode") or os.environ.get("PGSSLMODE") or "prefer")
    if remote and mode != "verify-full":
        yield warning(
            f"{variable}: sslmode={mode} to {remote[0]}",
            "whoever stands between can read and change everything, or pose as the server",
            "add sslmode=verify-full, and sslrootcert with the server's authority; channel_binding=require helps too",
        )

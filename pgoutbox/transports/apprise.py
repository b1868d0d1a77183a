"""Notifications to chats, phones and a hundred other services, through Apprise.

The URLs of the services contain credentials. A setting maps names to them; rows, logs and errors contain only the
names.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args
from urllib.parse import unquote

from pgoutbox.errors import ConfigurationError, require_extra
from pgoutbox.message import Message, Outcome, Permanent, Sent, Snooze, Transient, Unavailable
from pgoutbox.text import NAME, one_line
from pgoutbox.transports import pass_gate
from pgoutbox.transports.addresses import header_text
from pgoutbox.transports.checks import encode_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pgoutbox.settings import Settings
    from pgoutbox.transports import Content

_VARIABLE = "PGOUTBOX_APPRISE_URLS"
_MIN_SECRET_LENGTH = 3
# The status of the service, as the plugins of Apprise log it.
_REFUSED_CREDENTIALS = re.compile(r"\berror=40[13]\b")

# The warnings of the current call. Apprise has its own threads, and passes its context to them.
_reasons: ContextVar[list[str] | None] = ContextVar("pgoutbox_apprise_reasons", default=None)

Kind = Literal["info", "success", "warning", "failure"]
Format = Literal["text", "markdown", "html"]


@dataclass(frozen=True, slots=True)
class Notification:
    """A short text for a chat, a phone or another service of Apprise: return it from a handler.

    It goes to the message's destination, `apprise:NAME`, where NAME is one of the setting `apprise_urls`. Services
    without titles show the title in the body. `kind` selects the colour or icon. `format` is the format of the body;
    services that cannot show it get plain text.

    >>> Notification("Backup", "Done in 12 minutes.", kind="success").scheme
    'apprise'
    """

    title: str = field(repr=False)
    body: str = field(repr=False)
    kind: Kind = "info"
    format: Format = "text"

    @property
    def scheme(self) -> str:
        """`apprise`."""
        return "apprise"


class AppriseTransport:
    """Sends `Notification` to the services that the setting `apprise_urls` names.

    The notifications to one name are sent one after another, in a thread, at Apprise's rate for that service. Apprise
    does not send idempotency keys: a repetition cannot be recognised.

    Raises `ConfigurationError`, naming the entry, for a URL that Apprise does not know; `MissingExtraError` without
    Apprise.
    """

    schemes: tuple[str, ...] = ("apprise",)

    def __init__(self, settings: Settings) -> None:
        require_extra("apprise", "the notification transport", "apprise")
        urls = _urls(settings)
        self._capture = _LogCapture()
        try:
            self._services = {name: _Service(name, url) for name, url in urls.items()}
        except BaseException:
            self._capture.close()
            raise

    async def send(self, message: Message[object], content: Content) -> Outcome:
        """Hand the notification over once.

        Apprise only returns whether it succeeded: any failure is `Transient`, with the warnings of Apprise. A service
        that refuses the credentials of its URL (401, 403) is `Unavailable`, and so is a name that is not in the
        setting.
        """
        if not isinstance(content, Notification):
            return Permanent(f"content: the notification transport sends a Notification, not {type(content).__name__}")
        name = (message.destination or "").partition(":")[2]
        if not NAME.fullmatch(name):
            return Permanent(f"destination: must be apprise:NAME, with a NAME of {_VARIABLE}")
        try:
            _check(content)
        except Permanent as refusal:
            return refusal
        service = self._services.get(name)
        if service is None:
            known = ", ".join(sorted(self._services)) or "none"
            return Unavailable(f"destination: {_VARIABLE} has no {name!r} (it has: {known})")
        return await service.send(content)

    def breaker_key(self, message: Message[object], content: Content | None) -> str:  # noqa: ARG002 - a name is enough
        """Return a key for each name of the setting: each is a service with its own credentials."""
        name = (message.destination or "").partition(":")[2]
        return f"apprise:{name}" if NAME.fullmatch(name) else "apprise"

    async def aclose(self) -> None:
        """Stop listening to Apprise's log."""
        self._capture.close()


def _urls(settings: Settings) -> dict[str, str]:
    """Return the checked setting. Errors contain no part of a URL."""
    if settings.apprise_urls is None:
        return {}
    try:
        urls = json.loads(settings.apprise_urls.get_secret_value())
    except ValueError:
        urls = None
    if not isinstance(urls, dict):
        raise ConfigurationError(f'{_VARIABLE}: must be a JSON object of names and URLs: {{"ops": "..."}}')
    for name, url in urls.items():
        if not NAME.fullmatch(name):
            raise ConfigurationError(f"{_VARIABLE}: {name!r}: give names of a-z, 0-9, underscore, dot and hyphen")
        if not isinstance(url, str):
            raise ConfigurationError(f"{_VARIABLE}: {name!r}: must be one URL, as text")
    return urls


def _check(notification: Notification) -> None:
    """Raise `Permanent`, naming the field. Some services send the title in a header."""
    header_text("notification.title", notification.title)
    encode_text("notification.body", notification.body)  # It raises for a text that is not valid.
    if not notification.body.strip():
        raise Permanent("notification.body: is empty")
    for name, value, accepted in (("kind", notification.kind, Kind), ("format", notification.format, Format)):
        if value not in get_args(accepted):
            raise Permanent(f"notification.{name}: {value!r}: must be one of {', '.join(get_args(accepted))}")


class _Service:
    """One name of the setting, with its thread."""

    def __init__(self, name: str, url: str) -> None:
        import apprise

        self._name = name
        self._secrets = _secrets_in(url)
        self._turn = asyncio.Lock()
        self._apprise = apprise.Apprise()
        with _listening() as reasons:
            plugin = apprise.Apprise.instantiate(url)
        if plugin is None:
            raise ConfigurationError(f"{_VARIABLE}: {name!r}: {self._explain(reasons, 'Apprise cannot use this URL')}")
        self._apprise.add(plugin)

    async def send(self, notification: Notification) -> Outcome:
        loop = asyncio.get_running_loop()
        async with self._turn:
            return await asyncio.to_thread(self._send, notification, loop)

    def _send(self, notification: Notification, loop: asyncio.AbstractEventLoop) -> Outcome:
        try:
            asyncio.run_coroutine_threadsafe(pass_gate(), loop).result()
        except Snooze as refusal:
            return refusal
        with _listening() as reasons:
            try:
                result = self._apprise.notify(
                    body=notification.body,
                    title=notification.title,
                    notify_type=notification.kind,
                    body_format=notification.format,
                )
            except Exception as error:  # noqa: BLE001 - any error of a plugin is the outcome of this attempt
                result = None
                reasons.append(f"{type(error).__name__}: {error}")
        if result:
            return Sent()
        text = f"apprise:{self._name}: {self._explain(reasons, 'Apprise gave no reason')}"
        return Unavailable(text) if any(map(_REFUSED_CREDENTIALS.search, reasons)) else Transient(text)

    def _explain(self, reasons: list[str], otherwise: str) -> str:
        return one_line(" ".join(reasons), hide=self._secrets) or otherwise


def _secrets_in(url: str) -> list[str]:
    """Return all parts of the URL that may be credentials, longest first: their place differs by service."""
    parts = re.split(r"[/:@?&=,#\s]+", url.partition("://")[2])
    spellings = {url, *parts, *map(unquote, parts)}
    return sorted((s for s in spellings if len(s) >= _MIN_SECRET_LENGTH), key=len, reverse=True)


@contextlib.contextmanager
def _listening() -> Iterator[list[str]]:
    """Collect the warnings of this call instead of logging them."""
    reasons: list[str] = []
    token = _reasons.set(reasons)
    try:
        yield reasons
    finally:
        _reasons.reset(token)


class _LogCapture(logging.Filter):
    """Suppress log records during a call of a service, and collect the warnings.

    Apprise and its HTTP client log URLs, with credentials in their paths, at the level DEBUG.
    """

    _LOGGERS = ("apprise", "urllib3.connectionpool")

    def __init__(self) -> None:
        super().__init__()
        for name in self._LOGGERS:
            logging.getLogger(name).addFilter(self)

    def close(self) -> None:
        for name in self._LOGGERS:
            logging.getLogger(name).removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        reasons = _reasons.get()
        if reasons is None:
            return True
        if record.name == "apprise" and record.levelno >= logging.WARNING:
            reasons.append(record.getMessage())
        return False

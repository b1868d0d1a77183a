"""What the address of links to unsubscribe answers, for every kind of server.

A GET shows a page with one button and changes nothing, because scanners open all links. A POST with the field of RFC
8058 unsubscribes, without a sign-in and without cookies. A text that is not signed costs no question to the database,
and its answer says nothing about anybody.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from http import HTTPStatus
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

import psycopg

from pgoutbox.database import connections, sql
from pgoutbox.errors import ConfigurationError
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.settings import Settings
from pgoutbox.unsubscribe.tokens import Target, keys_of, target_of

MAX_BODY_BYTES: Final = 4_096
ONE_CLICK: Final = b"List-Unsubscribe=One-Click"
_PATIENCE_SECONDS: Final = 5
_telemetry: Final = Telemetry(logging.getLogger("pgoutbox.unsubscribe"))
# RFC 8058 allows both encodings of a form.
_ONE_CLICK: Final = re.compile(
    rb"(?:\A|&)%s(?:&|\s*\Z)" % ONE_CLICK
    + rb'|name="?List-Unsubscribe"?(?:;[^\r\n]*)?\r?\n(?:[^\r\n]+\r?\n)*\r?\nOne-Click\r?\n'
)
_STYLE: Final = (
    "body{font:18px/1.5 system-ui,sans-serif;max-width:32em;margin:15vh auto;padding:0 1em;color-scheme:light dark}"
    "button{font:inherit;padding:.5em 1.5em}"
)
_STYLE_DIGEST: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS: Final = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_DIGEST}'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Robots-Tag": "noindex",
}
_BUTTON: Final = '<form method="post"><button name="List-Unsubscribe" value="One-Click">Unsubscribe</button></form>'
_INVALID: Final = "This link is not valid. Copy the whole link from the mail."


class Answer(NamedTuple):
    """An answer to a request."""

    status: HTTPStatus
    headers: Sequence[tuple[str, str]]
    body: bytes


class Endpoint:
    """Answers the requests of one address, in any number of threads. Each click has a connection of its own.

    Raises `ConfigurationError` without a database or without `unsubscribe.keys`.
    """

    def __init__(self, settings: Settings) -> None:
        self._dsn = settings.require_dsn()
        self._keys = keys_of(settings.unsubscribe)
        if not self._keys:
            raise ConfigurationError("PGOUTBOX_UNSUBSCRIBE_KEYS is not set: it signs the links")
        self.place = unquote(urlsplit(settings.unsubscribe.url or "").path).rstrip("/") + "/"
        """The path below which the links are."""

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        """Return the answer to a request. A body may be cut after `MAX_BODY_BYTES` and one more."""
        if method not in ("GET", "HEAD", "POST"):
            return _page(HTTPStatus.METHOD_NOT_ALLOWED, _INVALID, headers={"Allow": "GET, HEAD, POST"})
        target = target_of(path.rstrip("/").rpartition("/")[2], self._keys)
        if target is None:
            return _page(HTTPStatus.FORBIDDEN, _INVALID)
        if method != "POST":
            page = _page(HTTPStatus.OK, f"Do you want no more mail of the list {target.mailing_list}?", form=_BUTTON)
            return page if method == "GET" else page._replace(body=b"")
        if len(body) > MAX_BODY_BYTES or _ONE_CLICK.search(body) is None:
            return _page(HTTPStatus.BAD_REQUEST, _INVALID)
        return self._unsubscribe(target)

    def _unsubscribe(self, target: Target) -> Answer:
        try:
            connection = connections.connect(
                self._dsn,
                purpose="unsubscribe",
                connect_timeout_seconds=_PATIENCE_SECONDS,
                answer_seconds=_PATIENCE_SECONDS,
            )
            with closing(connection):
                ((is_done,),) = connection.execute(sql.UNSUBSCRIBE, target._asdict()).fetchall()
        except (psycopg.Error, OSError) as error:
            # Without the link: readers of the log could use it.
            kind = {"error_type": type(error).__name__, "sqlstate": getattr(error, "sqlstate", None)}
            _telemetry.report(logging.WARNING, LogEvent.UNSUBSCRIBE_FAILED, "a click could not be taken", **kind)
            text = "That did not work. Please try again in a minute."
            return _page(HTTPStatus.SERVICE_UNAVAILABLE, text, headers={"Retry-After": "60"})
        if is_done is None:
            return _page(HTTPStatus.FORBIDDEN, _INVALID)
        if not is_done:
            text = "This link is too old, because you have subscribed again. Use the link of a newer mail."
            return _page(HTTPStatus.GONE, text)
        return _page(HTTPStatus.OK, f"You get no more mail of the list {target.mailing_list}.")


def _page(status: HTTPStatus, text: str, *, form: str = "", headers: Mapping[str, str] | None = None) -> Answer:
    """Return a page. The name of a list has no character that HTML changes."""
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Unsubscribe</title><style>{_STYLE}</style><main><p>{text}</p>{form}</main></html>\n"
    )
    body = page.encode()
    found = {**_HEADERS, **(headers or {}), "Content-Length": str(len(body))}
    return Answer(status, list(found.items()), body)

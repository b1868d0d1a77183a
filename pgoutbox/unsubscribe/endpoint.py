"""What the address of links to unsubscribe answers, for every kind of server.

A GET shows a page with one button and changes nothing, because scanners open all links. A POST with the field of RFC
8058 unsubscribes, without a sign-in and without cookies. A text that is not signed costs no question to the database,
and its answer says nothing about anybody.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
import threading
from asyncio import Future
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import KW_ONLY, dataclass
from http import HTTPStatus
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import psycopg

from pgoutbox.database import connections, sql
from pgoutbox.errors import ConfigurationError
from pgoutbox.settings import Settings
from pgoutbox.unsubscribe.tokens import Target, keys_of, target_of

MAX_BODY_BYTES: Final = 4_096
MOST_AT_ONCE: Final = 4
"""The number of clicks that ask the database at a time, each by a connection of its own."""
_PATIENCE_SECONDS: Final = 5
_TURN_SECONDS: Final = 1.0
# RFC 8058 allows both encodings of a form.
_ONE_CLICK: Final = re.compile(
    rb'(?:\A|&)List-Unsubscribe=One-Click(?:&|\Z)|name="?List-Unsubscribe"?\r?\n(?:[^\r\n]+\r?\n)*\r?\nOne-Click\r?\n'
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
_BUTTON: Final = '<form method="post"><button name="List-Unsubscribe" value="One-Click">{}</button></form>'


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts of the page. `{mailing_list}` stands for the name of the list.

    >>> Texts(language="de", button="Abmelden").button
    'Abmelden'
    """

    _: KW_ONLY
    language: str = "en"
    question: str = "Do you want no more mail of the list {mailing_list}?"
    button: str = "Unsubscribe"
    done: str = "You get no more mail of the list {mailing_list}."
    outdated: str = "This link is too old, because you have subscribed again. Use the link of a newer mail."
    invalid: str = "This link is not valid. Copy the whole link from the mail."
    busy: str = "That did not work. Please try again in a minute."


class Answer(NamedTuple):
    """An answer to a request."""

    status: HTTPStatus
    headers: Mapping[str, str]
    body: bytes


class Endpoint:
    """Answers the requests of one address. Any number of threads may call it; up to four change something at once.

    Raises `ConfigurationError` without a database or without `unsubscribe.keys`.
    """

    def __init__(self, settings: Settings, texts: Texts) -> None:
        self._dsn = settings.require_dsn()
        self._texts = texts
        self._keys = keys_of(settings.unsubscribe)
        if not self._keys:
            raise ConfigurationError("PGOUTBOX_UNSUBSCRIBE_KEYS is not set: it signs the links")
        self.place = urlsplit(settings.unsubscribe.url or "").path.rstrip("/") + "/"
        """The path below which the links are."""
        self._turns = threading.BoundedSemaphore(MOST_AT_ONCE)
        self.threads = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="pgoutbox-unsubscribe")
        """For event loops. It has no thread before the first use."""
        self.clicks: set[Future[Answer]] = set()
        """The clicks in these threads."""

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        """Return the answer to a request. A body may be cut after `MAX_BODY_BYTES` and one more."""
        if method not in ("GET", "HEAD", "POST"):
            return self._page(HTTPStatus.METHOD_NOT_ALLOWED, self._texts.invalid, headers={"Allow": "GET, HEAD, POST"})
        target = target_of(path.rstrip("/").rpartition("/")[2], self._keys)
        if target is None:
            return self._page(HTTPStatus.FORBIDDEN, self._texts.invalid)
        if method != "POST":
            page = self._page(HTTPStatus.OK, self._texts.question, target, button=self._texts.button)
            return page if method == "GET" else page._replace(body=b"")
        if len(body) > MAX_BODY_BYTES or _ONE_CLICK.search(body) is None:
            return self._page(HTTPStatus.BAD_REQUEST, self._texts.invalid)
        return self._unsubscribe(target)

    def _unsubscribe(self, target: Target) -> Answer:
        if not self._turns.acquire(timeout=_TURN_SECONDS):
            return self.busy()
        try:
            connection = connections.connect(
                self._dsn,
                purpose="unsubscribe",
                connect_timeout_seconds=_PATIENCE_SECONDS,
                answer_seconds=_PATIENCE_SECONDS,
            )
            with closing(connection):
                ((is_done,),) = connection.execute(sql.UNSUBSCRIBE, target._asdict()).fetchall()
        except (psycopg.Error, OSError):
            return self.busy()
        finally:
            self._turns.release()
        if not is_done:
            return self._page(HTTPStatus.GONE, self._texts.outdated)
        return self._page(HTTPStatus.OK, self._texts.done, target)

    def busy(self) -> Answer:
        """Return the answer to a click that cannot be taken now."""
        return self._page(HTTPStatus.SERVICE_UNAVAILABLE, self._texts.busy, headers={"Retry-After": "60"})

    def _page(
        self,
        status: HTTPStatus,
        text: str,
        target: Target | None = None,
        *,
        button: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        told = text if target is None else text.replace("{mailing_list}", target.mailing_list)
        form = "" if button is None else _BUTTON.format(html.escape(button))
        page = (
            f'<!doctype html><html lang="{html.escape(self._texts.language)}"><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width"><title>{html.escape(self._texts.button)}</title>'
            f"<style>{_STYLE}</style><main><p>{html.escape(told)}</p>{form}</main></html>\n"
        )
        return Answer(status, {**_HEADERS, **(headers or {})}, page.encode())

"""Mailing lists: an attempt of a list asks right before its handler whether its address is suppressed.

No answer is kept for another attempt. So no handler begins after a suppression has committed, except one that has its
answer already. Attempts that wait for an answer share the next question. Without the database nothing is sent. After a
handler that takes more than two seconds, the attempt asks again before its mail is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Final

import psycopg

from pgoutbox.clock import elapsed_clock
from pgoutbox.database import sql
from pgoutbox.errors import ArgumentError
from pgoutbox.message import Outcome, Permanent, Snooze, Suppressed
from pgoutbox.options import check_address
from pgoutbox.transports import Content
from pgoutbox.transports.smtp.mail import Email, RawEmail, address_of
from pgoutbox.unsubscribe.tokens import Target, keys_of, token_of
from pgoutbox.worker.attempt import ListAnswer
from pgoutbox.worker.threads import thread_owner

if TYPE_CHECKING:
    from pgoutbox.database.store import Store
    from pgoutbox.settings import Settings
    from pgoutbox.worker.attempt import Attempt, Work

_MOST: Final = 1_000  # Of one question.
_FRESH_SECONDS: Final = 2.0  # A process that was suspended after the answer asks again.
_PAUSE_SECONDS: Final = 5.0


_Answer = tuple[str, str | None, datetime]
_Waiting = tuple[str, str, asyncio.Future[_Answer]]


class MailingLists:
    """The questions of one run of a worker."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._store = store
        # The token does not name a database: one of many would get the links of the others.
        self._url = (
            None if settings.unsubscribe.url is None or settings.database else settings.unsubscribe.url.rstrip("/")
        )
        self._keys = keys_of(settings.unsubscribe)
        self._waiting: list[_Waiting] = []
        self._asking: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Stop asking."""
        if self._asking is not None:
            self._asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._asking

    async def refusals(self, work: Work) -> Mapping[Attempt, Outcome]:
        """Return the outcomes of the attempts whose handlers must not begin."""
        slot = thread_owner.get()
        slot.pause_timeout()  # The answer may take longer than the handler may.
        for attempt in work:
            attempt.is_at_gate = True
        try:
            found = await asyncio.gather(*map(self._refusal, work))
        finally:
            slot.restart_timeout()
        for attempt in work:
            attempt.is_at_gate = False
        return {attempt: refusal for attempt, refusal in zip(work, found, strict=True) if refusal is not None}

    async def prepared(self, attempt: Attempt, content: Content) -> Content | Outcome:
        """Return the content of a list as it is sent, or why it is not: the handler may have taken long."""
        if isinstance(content, Email) and (content.to is not None or content.cc or content.bcc):
            return Permanent("email.to, cc, bcc: a mail of a mailing list goes to the destination of its message alone")
        if isinstance(content, RawEmail) and content.to is not None:
            return Permanent("raw_email.to: a mail of a mailing list goes to the destination of its message alone")
        is_fresh = attempt.list_answer is not None and elapsed_clock() - attempt.list_answer.asked_at < _FRESH_SECONDS
        refusal = None if is_fresh else await self._refusal(attempt)
        return refusal or _with_link(content, attempt.list_answer)

    async def _refusal(self, attempt: Attempt) -> Outcome | None:
        """Ask about the address of an attempt. Return the outcome if it must not go on."""
        mailing_list = attempt.handler.mailing_list or ""
        try:
            address = check_address("destination", address_of(attempt.message))
        except (ArgumentError, Permanent) as error:
            return Permanent(f"a message of a mailing list needs a mailto: destination; {error}")
        while True:
            asked_at = elapsed_clock()
            try:
                digest, reason, answered_at = await self._ask(address, mailing_list)
            except (psycopg.Error, OSError) as error:
                # Without an answer nothing is sent.
                return Snooze(_PAUSE_SECONDS, f"not sent: the suppressed addresses are unknown: {type(error).__name__}")
            if elapsed_clock() - asked_at < _FRESH_SECONDS:
                break
        link = None
        if self._url is not None:
            link = f"{self._url}/{token_of(Target(digest, mailing_list, answered_at), self._keys)}"
        attempt.list_answer = ListAnswer(asked_at, link)
        return None if reason is None else Suppressed(reason)

    async def _ask(self, address: str, mailing_list: str) -> _Answer:
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((address, mailing_list, answer))
        if self._asking is None:
            self._asking = asyncio.create_task(self._answer())
        return await answer

    async def _answer(self) -> None:
        """Ask for all that wait, until none does."""
        while self._waiting:
            asked, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
            addresses, mailing_lists, futures = zip(*asked, strict=True)
            parameters = {"addresses": list(addresses), "mailing_lists": list(mailing_lists)}
            try:
                rows = await self._store.claims.fetch(sql.SUPPRESSED, parameters)
            except Exception as error:  # noqa: BLE001 - it is the answer to those that wait
                for future in futures:
                    if not future.done():
                        future.set_exception(error)
            else:
                for place, *answer in rows:
                    if not (future := futures[place - 1]).done():
                        future.set_result((answer[0], answer[1], answer[2]))
        self._asking = None


def _with_link(content: Content, answer: ListAnswer | None) -> Content:
    """Return an e-mail with the headers of RFC 8058, unless its handler has set them itself."""
    if not isinstance(content, Email) or answer is None or answer.link is None:
        return content
    if any(name.lower() == "list-unsubscribe" for name in content.headers):
        return content
    headers = {"List-Unsubscribe": f"<{answer.link}>", "List-Unsubscribe-Post": "List-Unsubscribe=One-Click"}
    return dataclasses.replace(content, headers={**content.headers, **headers})

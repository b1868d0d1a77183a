"""Mailing lists: before each call of a handler the worker asks whether the addresses of its messages are suppressed.

The call begins with the answer. Only a call that is repeated for a half of its messages may have one that is up to two
seconds old. A hand-over, and a handler that has waited for its thread, ask again if the answer is older. Attempts that
wait for an answer share the next question. Without one nothing is sent.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, LiteralString, TypeAlias

import psycopg
from psycopg.errors import RaiseException

from pgoutbox.clock import elapsed_clock
from pgoutbox.database import sql
from pgoutbox.database.worker_connection import kind_of
from pgoutbox.errors import ArgumentError
from pgoutbox.message import Permanent, Snooze, Suppressed
from pgoutbox.options import check_address
from pgoutbox.transports import Content
from pgoutbox.transports.smtp.mail import Email, RawEmail, address_of
from pgoutbox.unsubscribe.tokens import Target, keys_of, token_of
from pgoutbox.worker.threads import thread_owner

if TYPE_CHECKING:
    from psycopg.rows import TupleRow

    from pgoutbox.settings import Settings
    from pgoutbox.worker.attempt import Attempt, Work

    _Fetch = Callable[[LiteralString, Mapping[str, object]], Awaitable[Sequence[TupleRow]]]

_Refusal: TypeAlias = Permanent | Snooze | Suppressed
_QUESTIONS: Final = 3  # Of an attempt, while the answers are slow.
_FRESH_SECONDS: Final = 2.0
_PAUSE_SECONDS: Final = 5.0
_UNKNOWN: Final = "not sent: the suppressed addresses are unknown"


def is_doubtful(attempt: Attempt) -> bool:
    """Whether its topic has a list, and the last answer is too old to begin a handler or a hand-over."""
    return attempt.handler.mailing_list is not None and elapsed_clock() - attempt.unsuppressed_at >= _FRESH_SECONDS


class _Question:
    """A question of attempts that wait while the one before is answered. Its answers are in the order of `asked`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.asked_at = -math.inf
        self.answers: Sequence[TupleRow] | Snooze | None = None


class MailingLists:
    """The questions of one run of a worker.

    `fetch` must not be that of the connection of claims: a lock must not hold back messages without a list.
    """

    def __init__(self, settings: Settings, fetch: _Fetch) -> None:
        self._fetch = fetch
        # The token does not name a database: one of many would get the links of the others.
        self._url = None if settings.database else settings.unsubscribe.url
        self._keys = keys_of(settings.unsubscribe)
        self._next = _Question()
        self._turn = asyncio.Lock()

    async def refusals(self, work: Work) -> Mapping[Attempt, _Refusal]:
        """Return the outcomes of the attempts whose handlers must not begin."""
        for attempt in work:
            attempt.is_at_gate = True
        found = await self._ask_about(work)
        for attempt in work:
            attempt.is_at_gate = False
        return found

    async def pass_gate(self, attempt: Attempt) -> None:
        """Raise the outcome of an attempt whose handler or hand-over must not begin. See `Attempt.pass_gate`."""
        await attempt.pass_gate()
        while is_doubtful(attempt):
            for refusal in (await self._ask_about((attempt,))).values():
                raise refusal
            await attempt.pass_gate()  # The answer may have taken long.

    async def _ask_about(self, work: Work) -> Mapping[Attempt, _Refusal]:
        slot = thread_owner.get()
        slot.pause_timeout()  # The answer may take longer than the handler may.
        try:
            found = await asyncio.gather(*map(self._refusal, work))
        finally:
            slot.restart_timeout()
        return {attempt: refusal for attempt, refusal in zip(work, found, strict=True) if refusal is not None}

    async def _refusal(self, attempt: Attempt) -> _Refusal | None:
        """Ask about the address of an attempt without a fresh answer. Return the outcome if it must not go on."""
        if not is_doubtful(attempt):
            return None
        mailing_list = attempt.handler.mailing_list or ""
        try:
            address = check_address("destination", address_of(attempt.message))
        except (ArgumentError, Permanent) as error:
            return Permanent(f"a message of a mailing list needs a mailto: destination; {error}")
        for _ in range(_QUESTIONS):
            question, place = self._next, len(self._next.asked)
            question.asked.append((address, mailing_list))
            async with self._turn:
                answers = question.answers or await self._put(question)
            if isinstance(answers, Snooze):
                return answers
            digest, reason, answered_at = answers[place]
            if reason is not None:
                return Suppressed(reason)
            attempt.unsuppressed_at = question.asked_at
            if self._url is not None:
                token = token_of(Target(digest, mailing_list, answered_at), self._keys)
                attempt.link = f"{self._url.rstrip('/')}/{token}"
            if not is_doubtful(attempt):
                return None
        return Snooze(_PAUSE_SECONDS, f"{_UNKNOWN}: the database answers too slowly")

    async def _put(self, question: _Question) -> Sequence[TupleRow] | Snooze:
        """Put a question to the database, for all that wait for it."""
        await asyncio.sleep(0)  # The other attempts of a batch join it.
        self._next = _Question()
        question.asked_at = elapsed_clock()
        addresses, mailing_lists = zip(*question.asked, strict=True)
        parameters = {"addresses": list(addresses), "mailing_lists": list(mailing_lists)}
        try:
            question.answers = await self._fetch(sql.SUPPRESSED, parameters)
        except (psycopg.Error, OSError) as error:
            cause = error.diag.message_primary if isinstance(error, RaiseException) else kind_of(error)
            question.answers = Snooze(_PAUSE_SECONDS, f"{_UNKNOWN}: {cause}")
        return question.answers


def prepared(attempt: Attempt, content: Content) -> Content:
    """Return the content of a list as it is sent: with the headers of RFC 8058, unless its handler has set them.

    Raises `Permanent` for another recipient, who could not be asked about.
    """
    if isinstance(content, Email) and (content.to is not None or content.cc or content.bcc):
        raise Permanent("email.to, cc, bcc: a mail of a mailing list goes to the destination of its message alone")
    if isinstance(content, RawEmail) and content.to is not None:
        raise Permanent("raw_email.to: a mail of a mailing list goes to the destination of its message alone")
    if attempt.link is None or not isinstance(content, Email):
        return content
    if any(name.lower().startswith("list-unsubscribe") for name in content.headers):
        return content
    own = {"List-Unsubscribe": f"<{attempt.link}>", "List-Unsubscribe-Post": "List-Unsubscribe=One-Click"}
    return dataclasses.replace(content, headers={**content.headers, **own})

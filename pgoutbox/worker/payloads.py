"""Payloads and the contents of fan-outs: read from their JSON texts, and decrypted if they are encrypted.

A problem of one text (no JSON, a missing key) is the outcome of its own attempt and does not affect the others.

A claim leaves large texts out. They are read when a slot has taken their attempt, and forgotten at its end. The next
one is read only while the others take up little memory. So no producer can use up the memory of a worker.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final, NamedTuple, cast

import psycopg
from pydantic import JsonValue
from pydantic_core import from_json

from pgoutbox.database import sql
from pgoutbox.database.store import ClaimedRow, fence
from pgoutbox.database.worker_connection import is_transient_error
from pgoutbox.encryption import Identity, Keyring, is_sealed, unseal
from pgoutbox.handlers import Handler
from pgoutbox.message import Failure, Message, Outcome, Permanent, Postponed, Snooze, Transient
from pgoutbox.redaction import redact_text
from pgoutbox.text import clean_text, describe
from pgoutbox.worker.attempt import RELEASED, Attempt
from pgoutbox.worker.run_state import RunState

# Large texts are read while those in memory have at most so many characters.
_HELD_CHARS: Final = 8_388_608
_PAUSE_SECONDS: Final = 1.0

_SAMPLED_PER_END: Final = 25

Content = JsonValue | Permanent | Transient  # The shared content of a fan-out, or the outcome if it cannot be read.


@dataclass(slots=True)
class _LargeContent:
    value: Content
    size: int
    user_count: int = 0


class SampledPayload(NamedTuple):
    """A pending message with its payload as a JSON text: a row of PENDING_PAYLOADS."""

    topic: str
    destination: str | None
    coalesce_key: str | None
    ordering_key: str | None
    payload: str
    payload_version: int = 1


@dataclass(slots=True)
class Unreadable:
    """How many payloads of a sample do not fit the model of their topic, with the first error, redacted."""

    message_count: int
    sampled_count: int
    reason: str


def sample_parameters(handlers: Mapping[str, Handler], *, served: Sequence[str] | None) -> dict[str, object]:
    """Return the parameters of PENDING_PAYLOADS for the topics with a model, in the `served` queues or in all."""
    topics = sorted(topic for topic, handler in handlers.items() if handler.payload is not None or handler.version > 1)
    return {"topics": topics, "served": served, "cap": _SAMPLED_PER_END, "prefix": "", "queues": 200}


def find_unreadable(
    rows: Iterable[SampledPayload], handlers: Mapping[str, Handler], keyring: Keyring | None, names: Sequence[str]
) -> dict[str, Unreadable]:
    """Return the topics of which sampled payloads do not fit the model. Payloads that no key decrypts are left out."""
    found: dict[str, Unreadable] = {}
    counts: Counter[str] = Counter()
    for row in rows:
        handler = handlers[row.topic]
        if row.payload_version > handler.version:
            continue  # It waits for a worker that knows its version.
        message = _message_of(row)
        payload, problem = read_payload(row.payload, message, handler, keyring)
        if problem is not None:
            continue
        counts[row.topic] += 1
        try:
            handler.parse(replace(message, payload=payload))
        except Postponed as unreadable:
            reason = redact_text(clean_text(str(unreadable.reason)), (*names, *handler.redact))
            found.setdefault(row.topic, Unreadable(0, 0, reason)).message_count += 1
        except Exception:  # noqa: BLE001, S112 - a validator with a bug: its attempts are retried
            continue
    for topic, of_topic in found.items():
        of_topic.sampled_count = counts[topic]
    return found


def _message_of(row: SampledPayload) -> Message[object]:
    start = datetime.min.replace(tzinfo=UTC)
    keys = row.coalesce_key, row.ordering_key
    version = row.payload_version
    return Message(0, row.topic, "", row.destination, None, {}, 0, 0, start, start, *keys, payload_version=version)


class LargeTexts:
    """The large payloads and contents of the running attempts of one worker."""

    def __init__(self, run: RunState, *, keyring: Keyring | None) -> None:
        self._store = run.store
        self._keyring = keyring
        self._held: dict[Attempt, tuple[Message[object], int]] = {}
        self._held_chars = 0
        self._contents: dict[int, _LargeContent] = {}  # Those in use, and the last one: its fan-out is likely to go on.
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._is_stopped = False

    async def read(self, attempt: Attempt) -> Outcome | None:
        """Give the attempt what its claim left out, until `forget`. Return its result if it cannot begin."""
        async with self._turn:
            while not self._has_room(attempt):
                if self._is_stopped:
                    return RELEASED
                self._freed.clear()
                await self._freed.wait()
            try:
                return await self._give(attempt)
            except (psycopg.Error, OSError) as error:
                if not is_transient_error(error):
                    raise
                return Snooze(_PAUSE_SECONDS, f"its payload could not be read: {type(error).__name__}")

    def forget(self, attempt: Attempt) -> None:
        """Take from an attempt that has ended what `read` gave it."""
        if attempt in self._held:
            attempt.message, size = self._held.pop(attempt)
            self._held_chars -= size
            if attempt.large_content_id is not None:
                self._contents[attempt.large_content_id].user_count -= 1
                self._drop_unused(but=next(reversed(self._contents)))
        self._freed.set()

    def stop(self) -> None:
        """Let no further attempt wait for memory."""
        self._is_stopped = True
        self._freed.set()

    def _has_room(self, attempt: Attempt) -> bool:
        self._drop_unused(but=attempt.large_content_id)
        return not self._held or self._held_chars <= _HELD_CHARS

    async def _give(self, attempt: Attempt) -> Outcome | None:
        message, size = attempt.message, 0
        payload, content = message.payload, message.content
        if attempt.is_payload_large:
            rows = await self._store.attempts.fetch(sql.LARGE_PAYLOAD, fence([attempt.token], self._store.worker))
            if not rows:
                return RELEASED  # The attempt no longer holds its message, so nothing is written.
            ((text,),) = rows
            payload, problem = read_payload(text, message, attempt.handler, self._keyring)
            if problem is not None:
                return problem
            size = len(text)
        if attempt.large_content_id is not None:
            shared = self._contents.get(attempt.large_content_id) or await self._read_content(attempt)
            if shared is None:
                return missing_content(attempt.large_content_id)
            if isinstance(shared.value, (Permanent, Transient)):
                return shared.value
            content = shared.value
            shared.user_count += 1
        self._held[attempt] = message, size
        self._held_chars += size
        attempt.message = replace(message, payload=payload, content=content)
        return None

    async def _read_content(self, attempt: Attempt) -> _LargeContent | None:
        content_id = cast("int", attempt.large_content_id)
        rows = await self._store.attempts.fetch(sql.LARGE_CONTENT, {"id": content_id})
        if not rows:
            return None
        ((text,),) = rows
        value = read_content(text, attempt.message.topic, self._keyring)
        content = self._contents[content_id] = _LargeContent(value, len(text))
        self._held_chars += content.size
        return content

    def _drop_unused(self, *, but: int | None) -> None:
        for content_id, content in list(self._contents.items()):
            if not content.user_count and content_id != but:
                del self._contents[content_id]
                self._held_chars -= content.size


def missing_content(content_id: int) -> Permanent:
    """Return the outcome of a message whose shared content is gone."""
    return Permanent(f"its content {content_id} is missing: it has been deleted")


def read_payload(
    text: str, message: ClaimedRow | Message[object], handler: Handler, keyring: Keyring | None
) -> tuple[JsonValue, Permanent | Transient | None]:
    """Return the payload of a message from this text, or the problem with it."""
    try:
        payload = read_json(text)
        if is_sealed(payload):
            identity = Identity(
                "payload", message.topic, message.destination, message.coalesce_key, message.ordering_key
            )
            payload = read_json(unseal(payload, keyring, identity))
        if handler.payload is Failure:
            payload = _read_failure(payload, keyring)
    except (ValueError, RecursionError) as error:
        return None, Permanent(f"payload: cannot be read as JSON: {describe(error)}")
    except (Transient, Permanent) as sealed:
        return None, sealed
    return payload, None


def read_content(text: str, topic: str, keyring: Keyring | None) -> Content:
    """Return the shared content of a fan-out, or the problem with it."""
    try:
        content = read_json(text)
        return read_json(unseal(content, keyring, Identity("content", topic))) if is_sealed(content) else content
    except (ValueError, RecursionError) as error:
        return Permanent(f"content: cannot be read as JSON: {describe(error)}")
    except (Transient, Permanent) as sealed:
        return sealed


def read_json(text: str) -> JsonValue:
    """Return the value of a JSON text. Raises `ValueError` or `RecursionError`."""
    try:
        value: JsonValue = from_json(text)
    except ValueError:
        # The fast parser has its own limit on nesting.
        value = json.loads(text)
    return value


def _read_failure(failure: JsonValue, keyring: Keyring | None) -> JsonValue:
    """Return the payload of a hook's message with that of the failed message decrypted, which was sealed for it."""
    if not isinstance(failure, dict) or not is_sealed(failure.get("payload")):
        return failure
    keys = (cast("str | None", failure.get(key)) for key in ("destination", "coalesce_key", "ordering_key"))
    identity = Identity("payload", str(failure.get("topic")), *keys)
    return {**failure, "payload": read_json(unseal(failure["payload"], keyring, identity))}

"""Outcomes that PostgreSQL refuses to write, and the topics that stop because of them.

A trigger, a constraint or a missing right can refuse the outcome of a message that was handed over. The worker keeps
such a message in flight. So its lease is renewed, no worker hands it over again, and the outcome is written again with
growing pauses. After several refusals in a row, or with many kept outcomes, the worker stops claiming the topic until
one of them is written.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from pgoutbox.database.store import FinishRequest
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.worker.attempt import Attempt
from pgoutbox.worker.backoff import Backoff

_IN_A_ROW: Final = 5
_KEPT_OF_A_TOPIC: Final = 100


@dataclass(slots=True)
class RefusedOutcome:
    """The outcome of one attempt that the database refuses: `request`, or sent if it is None."""

    request: FinishRequest | None
    reason: str
    backoff: Backoff = field(default_factory=lambda: Backoff(1.0, 60.0))
    timer: asyncio.TimerHandle | None = None


class RefusedOutcomes:
    """The refused outcomes of one worker. `write_again` is called when it is time to try one again.

    `on_halted` and `on_resumed` are called with the topic. Used on the event loop only.
    """

    def __init__(
        self,
        *,
        write_again: Callable[[Attempt], None],
        on_halted: Callable[[str], None],
        on_resumed: Callable[[str], None],
        telemetry: Telemetry,
    ) -> None:
        self._write_again = write_again
        self._on_halted = on_halted
        self._on_resumed = on_resumed
        self._telemetry = telemetry
        self._kept: dict[Attempt, RefusedOutcome] = {}
        self._in_a_row: Counter[str] = Counter()
        self.halted_topics: set[str] = set()

    @property
    def count(self) -> int:
        """The number of kept outcomes."""
        return len(self._kept)

    @property
    def count_of_open_topics(self) -> int:
        """The number of kept outcomes of topics that are still claimed."""
        return sum(attempt.message.topic not in self.halted_topics for attempt in self._kept)

    def __contains__(self, attempt: Attempt) -> bool:
        """Whether the outcome of this attempt is kept."""
        return attempt in self._kept

    def finish_request_of(self, attempt: Attempt) -> FinishRequest | None:
        """Return the kept finish request, None if sent."""
        return self._kept[attempt].request

    def note(self, attempt: Attempt, request: FinishRequest | None, error: BaseException) -> None:
        """Keep a refused outcome. It may be kept already."""
        message = attempt.message
        reason = getattr(error, "sqlstate", None) or type(error).__name__
        refusal = self._kept.get(attempt)
        if refusal is None:
            self._kept[attempt] = refusal = RefusedOutcome(request, reason)
            self._in_a_row[message.topic] += 1
            self._telemetry.report(
                logging.ERROR,
                LogEvent.FINISH_REFUSED,
                "the database refused the outcome; it is kept and written again",
                message_id=message.id,
                topic=message.topic,
                queue=message.queue,
                attempt_count=message.attempt_count,
                reason=reason,
            )
        else:
            refusal.reason = reason
        self.wait(attempt)
        self._halt_if_many(message.topic, reason)

    def wait(self, attempt: Attempt) -> None:
        """Write a kept outcome again after its pause."""
        refusal = self._kept[attempt]
        if refusal.timer is None:
            refusal.timer = asyncio.get_running_loop().call_later(refusal.backoff.next(), self._try, attempt)

    def forget(self, attempts: Iterable[Attempt]) -> None:
        """Forget the outcomes of these attempts: they are written, or other attempts own the messages."""
        if not self._kept and not self._in_a_row:
            return
        for attempt in attempts:
            topic = attempt.message.topic
            self._in_a_row.pop(topic, None)
            refusal = self._kept.pop(attempt, None)
            if refusal is not None and refusal.timer is not None:
                refusal.timer.cancel()
            if refusal is not None and topic in self.halted_topics:
                self._resume(topic)

    def stop(self) -> dict[Attempt, RefusedOutcome]:
        """Stop trying again. Return the kept outcomes."""
        for refusal in self._kept.values():
            if refusal.timer is not None:
                refusal.timer.cancel()
        return dict(self._kept)

    def _halt_if_many(self, topic: str, reason: str) -> None:
        if topic in self.halted_topics:
            return
        kept_count = sum(attempt.message.topic == topic for attempt in self._kept)
        if self._in_a_row[topic] >= _IN_A_ROW or kept_count >= _KEPT_OF_A_TOPIC:
            self.halted_topics.add(topic)
            self._telemetry.report(
                logging.ERROR,
                LogEvent.TOPIC_HALTED,
                "topic halted: the database refuses its outcomes",
                topic=topic,
                refused_count=kept_count,
                reason=reason,
            )
            self._on_halted(topic)

    def _resume(self, topic: str) -> None:
        self.halted_topics.discard(topic)
        self._telemetry.report(
            logging.INFO, LogEvent.TOPIC_RESUMED, "topic resumed: an outcome was written", topic=topic
        )
        for attempt, refusal in self._kept.items():
            if attempt.message.topic == topic and refusal.timer is not None:
                refusal.timer.cancel()
                self._try(attempt)
        self._on_resumed(topic)

    def _try(self, attempt: Attempt) -> None:
        self._kept[attempt].timer = None
        self._write_again(attempt)

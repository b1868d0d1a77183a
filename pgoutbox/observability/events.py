"""The catalogue of events: one name for each, in logs and counters alike.

A log record has a constant text, and the event with its fields in `extra`. It never contains a payload, a key or a
secret.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from typing import TYPE_CHECKING

from pgoutbox.message import AttemptOutcome, State

if TYPE_CHECKING:
    from pgoutbox.observability.measures import Measures


class LogEvent(enum.StrEnum):
    """The events that are logged or counted."""

    METRICS_SERVED = "metrics_served"
    WORKER_STARTED = "worker_started"
    WORKER_STOPPING = "worker_stopping"
    WORKER_STOPPED = "worker_stopped"
    CLAIMED = "claimed"
    SENT = "sent"
    RETRY = "retry"
    FAILED = "failed"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"
    SNOOZED = "snoozed"
    RELEASED = "released"
    CLAIM_LOST = "claim_lost"
    CLAIM_REFUSED = "claim_refused"
    LEASE_EXPIRED = "lease_expired"
    LEASE_LOST = "lease_lost"
    ATTEMPT_OVERTAKEN = "attempt_overtaken"
    ATTEMPT_OVERDUE = "attempt_overdue"
    ATTEMPT_ABANDONED = "attempt_abandoned"
    FINISH_REFUSED = "finish_refused"
    TOPIC_HALTED = "topic_halted"
    TOPIC_RESUMED = "topic_resumed"
    OUTCOME_UNWRITTEN = "outcome_unwritten"
    DATABASE_LOST = "database_lost"
    DATABASE_BACK = "database_back"
    SERVER_CLOCK_STEPPED = "server_clock_stepped"
    LISTENER_LOST = "listener_lost"
    LISTENER_POOLED = "listener_pooled"
    LISTENER_BACK = "listener_back"
    NOTIFY_QUEUE_FILLING = "notify_queue_filling"
    NOTIFY_QUEUE_DRAINED = "notify_queue_drained"
    LOOP_BLOCKED = "loop_blocked"
    LEASE_KEEPER_FAILED = "lease_keeper_failed"
    PROCESS_STARTED = "process_started"
    PROCESS_DIED = "process_died"
    MIDDLEWARE_FAILED = "middleware_failed"
    ENQUEUE_FAILED = "enqueue_failed"
    REDIRECTING = "redirecting"
    MAIL_NOT_READY = "mail_not_ready"
    SMTP_CONNECTION_OPENED = "smtp_connection_opened"
    SMTP_CONNECTION_REPLACED = "smtp_connection_replaced"
    WEBHOOK_ADDRESS_REFUSED = "webhook_address_refused"
    BREAKER_OPENED = "breaker_opened"
    BREAKER_REOPENED = "breaker_reopened"
    BREAKER_CLOSED = "breaker_closed"
    BREAKER_UNKNOWN = "breaker_unknown"
    MAINTENANCE_DONE = "maintenance_done"
    MAINTENANCE_FAILED = "maintenance_failed"
    MAINTENANCE_BACK = "maintenance_back"
    SCHEMA_KEPT = "schema_kept"
    WEB_STARTED = "web_started"
    WEB_SIGNED_IN = "web_signed_in"
    WEB_SIGN_IN_REFUSED = "web_sign_in_refused"
    WEB_SIGN_IN_BRAKED = "web_sign_in_braked"
    WEB_PAGE_FAILED = "web_page_failed"
    WEB_UNAVAILABLE = "web_unavailable"
    WEB_READER_LOST = "web_reader_lost"
    WEB_BULK_BROKEN = "web_bulk_broken"


def event_of_outcome(outcome: AttemptOutcome) -> LogEvent:
    """Return the event for an attempt after which its message is pending again."""
    return LogEvent(outcome)


def event_of_state(state: State) -> LogEvent:
    """Return the event for an attempt that ended in this state."""
    return LogEvent.RETRY if state is State.PENDING else LogEvent(state)


class Telemetry:
    """Counts and logs the events of one worker. It has `measures` while metrics are exported."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self.counts: Counter[LogEvent] = Counter()
        self.measures: Measures | None = None

    def count(self, event: LogEvent, number: int = 1) -> None:
        """Count an event without a log line, because it may happen thousands of times a second."""
        self.counts[event] += number

    def report(self, level: int, event: LogEvent, text: str, /, **fields: object) -> None:
        """Count the event and log the constant `text` with the event and its fields."""
        self.counts[event] += 1
        if self._logger.isEnabledFor(level):
            self._logger.log(level, text, extra={"event": event.value, **fields})

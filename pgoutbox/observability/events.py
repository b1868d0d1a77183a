"""The catalogue of events: one name for each, in logs and counters alike.

A log record has a constant text, and the event with its fields in `extra`. It never contains a payload or a secret.
Only `enqueue_failed` has keys, because its message has no id.
"""

from __future__ import annotations

import enum
import json
import logging
import re
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from pgoutbox.message import AttemptOutcome, State
from pgoutbox.text import iso_utc

if TYPE_CHECKING:
    from pgoutbox.observability.measures import Measures


class LogEvent(enum.StrEnum):
    """The events that are logged or counted, each with its meaning."""

    METRICS_SERVED = "metrics_served"
    """`/metrics`, `/livez` and `/readyz` are served at this address."""
    WORKER_STARTED = "worker_started"
    """The worker is connected and starts to claim."""
    TOPICS_NOT_SERVED = "topics_not_served"
    """At start: topics of the application are in queues that this worker does not serve."""
    WORKER_STOPPING = "worker_stopping"
    """The worker begins to stop: it claims no more messages and waits for its handlers."""
    WORKER_STOPPED = "worker_stopped"
    """The worker has stopped."""
    WORKER_FAILED = "worker_failed"
    """A worker has failed: that of a `lifespan`, whose application stops, or one beside handlers that never return."""
    WORKER_LEFT_OUT = "worker_left_out"
    """Under the pytest plugin a `lifespan` starts no worker: a test delivers itself."""
    RUN_DONE = "run_done"
    """A run of `worker --once` or `--drain` has ended. It counts outcomes, and the due messages that it left."""
    CLAIMED = "claimed"
    """Attempts begun."""
    SENT = "sent"
    """Attempts that ended sent."""
    RETRY = "retry"
    """An attempt failed and its message is pending again."""
    HANDLER_RAISED = "handler_raised"
    """A handler raised an exception that is not an outcome, with its traceback. Logged once a minute for its place."""
    ATTEMPT_STARTED = "attempt_started"
    """A handler starts. Only if DEBUG was on when the worker started."""
    ATTEMPT_ENDED = "attempt_ended"
    """A handler and its send have ended. Only if DEBUG was on when the worker started."""
    FAILED = "failed"
    """A message failed permanently and waits for an operator."""
    SKIPPED = "skipped"
    """A message ended skipped: by its handler, superseded or expired. Debug level without an attempt."""
    CANCELLED = "cancelled"
    """A message was cancelled while an attempt was in flight, and ended cancelled."""
    SNOOZED = "snoozed"
    """An attempt ended with a snooze, and its message is pending again."""
    PAYLOAD_UNREADABLE = "payload_unreadable"
    """A payload does not fit the model of this worker. Its message waits for another one. Once a minute by topic."""
    RELEASED = "released"
    """An attempt was given up, for example at shutdown. It does not count; its message is pending again."""
    CLAIM_LOST = "claim_lost"
    """The answer to a claim was lost. Its messages, which no handler has seen, were released."""
    CLAIM_REFUSED = "claim_refused"
    """PostgreSQL refused a claim, for example by a trigger or because of damage. The worker ends."""
    LEASE_EXPIRED = "lease_expired"
    """The lease of an attempt ended without an outcome. The message is retried, or ends in `state`."""
    LEASE_LOST = "lease_lost"
    """An attempt ended after its message had another owner. Its outcome was not written."""
    ATTEMPT_OVERTAKEN = "attempt_overtaken"
    """A message in flight was cancelled, superseded or lost. Its handler is notified."""
    ATTEMPT_OVERDUE = "attempt_overdue"
    """A sync handler runs past its timeout. It keeps its message for one lease at most."""
    ATTEMPT_ABANDONED = "attempt_abandoned"
    """A handler still runs after the end of its attempt or of its worker. It keeps its slot."""
    TOPIC_SUSPENDED = "topic_suspended"
    """Handlers of this topic hold a quarter of the slots after their timeout: its messages wait until one ends."""
    FINISH_REFUSED = "finish_refused"
    """PostgreSQL refused to write an outcome. The worker keeps the message and tries again."""
    OUTCOME_UNWRITTEN = "outcome_unwritten"
    """The worker stopped with a refused outcome. The lease ends and the message is retried."""
    DATABASE_LOST = "database_lost"
    """The database does not answer; the worker tries again with growing pauses."""
    DATABASE_BACK = "database_back"
    """The database answers again."""
    DATABASE_LEFT_OUT = "database_left_out"
    """The worker of several databases cannot serve this one, and tries again. The others are served."""
    DATABASES_UNKNOWN = "databases_unknown"
    """The list of databases cannot be read again. The worker or the dashboard goes on with the last one."""
    HELD_IN_COPY = "held_in_copy"
    """The database is a copy: nothing is claimed until `pgoutbox adopt`. Repeated once a minute, with the reason."""
    COPY_ADOPTED = "copy_adopted"
    """The database is no longer a copy. The worker claims again."""
    LISTENER_LOST = "listener_lost"
    """The listener's connection is lost. The worker polls once a second until it is back."""
    LISTENER_POOLED = "listener_pooled"
    """The listener connects through a pooler. `polls`: whether the pooler shares sessions."""
    LISTENER_BACK = "listener_back"
    """The listener is connected again."""
    NOTIFY_QUEUE_FILLING = "notify_queue_filling"
    """The server's notification queue is half full, so workers poll. A session listens in a long transaction."""
    NOTIFY_QUEUE_DRAINED = "notify_queue_drained"
    """The notification queue has room again."""
    LOOP_BLOCKED = "loop_blocked"
    """A handler has blocked the event loop for two seconds, and with it its whole process."""
    HANDLERS_LIMITED = "handlers_limited"
    """Too few connections for transactional handlers, so at most `limit` run at once. It tries more after a pause."""
    LEASE_KEEPER_FAILED = "lease_keeper_failed"
    """Leases could not be renewed; the keeper tries again."""
    PROCESS_STARTED = "process_started"
    """The supervisor started a worker process."""
    PROCESS_DIED = "process_died"
    """A worker process died; another one is started after a pause."""
    MIDDLEWARE_FAILED = "middleware_failed"
    """A middleware raised or returned nonsense after its attempt. The outcome stands."""
    ENQUEUE_FAILED = "enqueue_failed"
    """`best_effort=True` caught an error. The transaction continues without the message. `error` is redacted."""
    UNSUBSCRIBE_FAILED = "unsubscribe_failed"
    """The database did not take a click on a link to unsubscribe. The person is asked to try again."""
    REDIRECTING = "redirecting"
    """A redirect is on: its `mail` goes to its `target`, and its contents other than e-mail are held back."""
    REDIRECT_REFUSED = "redirect_refused"
    """A redirect is on, and a blackout forbids it: its `mail` is held back, except to exempt addresses."""
    REDIRECT_ENDED = "redirect_ended"
    """The redirect is off. Held-back messages are sent."""
    REDIRECT_UNKNOWN = "redirect_unknown"
    """The redirect could not be read. Until it is read, all contents are held back."""
    TRANSPORT_NOT_READY = "transport_not_ready"
    """At start, this setting is missing or an example, so the messages of its topics wait or are refused."""
    EMAIL_LOGGED = "email_logged"
    """`PGOUTBOX_MAIL_TRANSPORT=log`: this e-mail was not sent. `text` is redacted."""
    SMTP_CONNECTION_OPENED = "smtp_connection_opened"
    """A connection to the SMTP server was opened."""
    SMTP_CONNECTION_REPLACED = "smtp_connection_replaced"
    """An idle SMTP connection had died and was replaced."""
    WEBHOOK_ADDRESS_REFUSED = "webhook_address_refused"
    """A webhook's host has an address that is not public and not allowed."""
    BREAKER_OPENED = "breaker_opened"
    """The breaker of a transport or host opened: its messages wait, and use up no attempts."""
    BREAKER_REOPENED = "breaker_reopened"
    """A probe has failed; the pause doubles."""
    BREAKER_CLOSED = "breaker_closed"
    """A probe has succeeded. The messages that waited for the breaker are sent now."""
    BREAKER_UNKNOWN = "breaker_unknown"
    """The shared state of a breaker could not be read or written. A later send asks again."""
    BREAKER_STILL_OPEN = "breaker_still_open"
    """A breaker is open when a worker starts, or for a minute and again each hour: its messages wait for a repair."""
    MESSAGES_UNCLAIMED = "messages_unclaimed"
    """Late messages that no running worker claims: none serves the queue, or none has a handler for the topics. After a
    run of `worker --once` or `--drain`: due messages in `queues` that nothing serves."""
    PRESENCE_UNKNOWN = "presence_unknown"
    """The worker could not report its queues and topics, look for unclaimed messages, or report its end."""
    MAINTENANCE_DONE = "maintenance_done"
    """A worker had its turn of maintenance and changed something."""
    MAINTENANCE_FAILED = "maintenance_failed"
    """A turn of maintenance failed. It is tried again, and deliveries continue."""
    MAINTENANCE_BACK = "maintenance_back"
    """Maintenance works again."""
    ALERTS_FAILED = "alerts_failed"
    """The alerts about failed messages could not be enqueued. It is tried again, and deliveries continue."""
    SCHEDULES_FAILED = "schedules_failed"
    """Schedules could not be read. It is tried again, and deliveries continue."""
    SCHEDULE_REFUSED = "schedule_refused"
    """The times of a schedule cannot be computed, or its message is refused. It is tried again each minute."""
    SCHEMA_KEPT = "schema_kept"
    """The schema was not dropped: it has objects that are not from the migrations, or another owner."""
    WEB_STARTED = "web_started"
    """The dashboard accepts connections."""
    WEB_SIGNED_IN = "web_signed_in"
    """A person has signed in to the dashboard."""
    WEB_SIGN_IN_REFUSED = "web_sign_in_refused"
    """A sign-in with a wrong token, name or password was refused."""
    WEB_SIGN_IN_BRAKED = "web_sign_in_braked"
    """Too many failed sign-ins from this address, or from all together; refused unchecked."""
    WEB_PAGE_FAILED = "web_page_failed"
    """A page of the dashboard failed because of a bug; `error_place` is its location."""
    WEB_UNAVAILABLE = "web_unavailable"
    """The database did not answer the dashboard, and the page said so."""
    WEB_READER_LOST = "web_reader_lost"
    """The listener of the live pages lost the database, and tries again."""
    WEB_BULK_BROKEN = "web_bulk_broken"
    """A redrive or cancel of many messages ended early. The finished part is kept."""


def event_of_outcome(outcome: AttemptOutcome) -> LogEvent:
    """Return the event for an attempt after which its message is pending again."""
    return LogEvent(outcome)


def event_of_state(state: State) -> LogEvent:
    """Return the event for an attempt that ended in this state."""
    return LogEvent.RETRY if state is State.PENDING else LogEvent(state)


class Facts:
    """The fields of an event, which become text only if a record is formatted: ` event=failed topic=mail`."""

    __slots__ = ("fields",)

    def __init__(self, fields: Mapping[str, object]) -> None:
        self.fields = fields

    def __str__(self) -> str:
        return "".join(f" {name}={field_text(value)}" for name, value in self.fields.items())


def field_text(value: object) -> str:
    """Return the value as text, in quotes if it has spaces, and escaped if it cannot be printed."""
    text = iso_utc(value) if isinstance(value, datetime) else str(value)
    if text and text.isprintable() and not re.search(r"[ \"=]", text):
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())


class Telemetry:
    """Counts and logs the events of one worker. It has `measures` while metrics are exported.

    With `database`, the name of one of several databases, each event has it as a field.
    """

    def __init__(self, logger: logging.Logger, *, database: str | None = None) -> None:
        self._logger = logger
        self._names = {} if database is None else {"database": database}
        self.counts: Counter[LogEvent] = Counter()
        self.measures: Measures | None = None

    def event_counts(self) -> Mapping[str, int]:
        """Return the count of each event from 0 on: Prometheus sees no increase in a series that begins with 1."""
        return {event.value: self.counts[event] for event in LogEvent}

    def count(self, event: LogEvent, number: int = 1) -> None:
        """Count an event without a log line, because it may happen thousands of times a second."""
        self.counts[event] += number

    def logs(self, level: int) -> bool:
        """Whether records of this level are logged."""
        return self._logger.isEnabledFor(level)

    def report(self, level: int, event: LogEvent, text: str, /, *, traceback: object = None, **fields: object) -> None:
        """Count the event and log `text` with the event and its fields, and a redacted traceback.

        The fields are in the text for the formatters of applications, and attributes of the record for the others. The
        format of the record is constant, so that services that group records by it can do so.
        """
        self.counts[event] += 1
        if not self._logger.isEnabledFor(level):
            return
        extra = {"event": event.value, **self._names, **fields}
        template = text + "%s"
        if traceback is None:
            self._logger.log(level, template, Facts(extra), extra=extra)
            return
        # The exception itself would be logged with values that must be redacted.
        arguments = (Facts(extra),)
        record = self._logger.makeRecord(self._logger.name, level, __file__, 0, template, arguments, None, extra=extra)
        record.exc_text = str(traceback)
        self._logger.handle(record)

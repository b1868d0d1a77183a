"""The outcomes of attempts: the finish request of each, and the report when it is written.

It writes nothing to the database, and removes the attempts that have ended from `in_flight`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, assert_never

from pgoutbox.database.store import ClaimedRow
from pgoutbox.kernel.seams import End
from pgoutbox.message import (
    AttemptOutcome,
    Message,
    Outcome,
    Permanent,
    Postponed,
    ReasonCode,
    SendFailure,
    Sent,
    Skip,
    Snooze,
    State,
    Suppressed,
    Transient,
    Unavailable,
)
from pgoutbox.observability.events import LogEvent, event_of_outcome, event_of_state
from pgoutbox.redaction import redact_text
from pgoutbox.retry import bounded_delay
from pgoutbox.text import MAX_TEXT_LENGTH, clean_text, describe
from pgoutbox.worker.attempt import Attempt, Released
from pgoutbox.worker.breakers.circuit_breakers import CircuitBreakers
from pgoutbox.worker.dispatcher import MIN_SNOOZE_SECONDS
from pgoutbox.worker.handler_errors import RaisedPermanent, RaisedTransient, RepeatedErrors, place_of, traceback_of
from pgoutbox.worker.run_state import RunState

_PENDING_AGAIN: Final = frozenset({AttemptOutcome.RETRY, AttemptOutcome.SNOOZED, AttemptOutcome.RELEASED})
_SENT: Final = State.SENT  # Looking up an enum member costs more than a comparison.
_Unsent = Transient | Unavailable | Permanent | Skip | Snooze


class Outcomes:
    """The outcomes of one run. `ended` are the attempts that wait for the next trip, which writes their end."""

    def __init__(self, run: RunState, breakers: CircuitBreakers) -> None:
        self._run = run
        self._breakers = breakers
        self._in_flight = run.in_flight
        self._redacted_names = run.settings.redacted_names
        self._error_texts = run.settings.error_texts
        self._telemetry = run.telemetry
        self._repeated = RepeatedErrors()
        self.ended: deque[Attempt] = deque()

    def collect(self, attempt: Attempt, outcome: Outcome) -> None:
        """Take over the end of an attempt."""
        if self._breakers.grants:
            self._breakers.end_grant(attempt.message_id, is_sent=attempt.is_written or isinstance(outcome, Sent))
        if attempt.is_written:
            self.note_sent([attempt])
            if attempt.keys is not None:
                self._run.kernel.note_finished(attempt.keys)
            self._run.note_ends()
            self._run.note_progress()
            return
        if not isinstance(outcome, Sent):
            attempt.end = self._end_of(attempt, outcome)
        if not self.ended:  # Woken once for all attempts that end before the next trip takes them.
            self._run.note_progress()
        self.ended.append(attempt)

    def abandon(self, attempt: Attempt) -> None:
        """Leave an attempt to its lease: the worker ends while its handler still runs, so no outcome is written."""
        attempt.done = True
        self._breakers.end_grant(attempt.message_id, is_sent=False)
        self._in_flight.abandon(attempt)
        text = "worker stopped while the handler still runs; its lease will expire"
        self.report_message(logging.WARNING, LogEvent.ATTEMPT_ABANDONED, text, attempt.message)

    def note_sent(self, attempts: Sequence[Attempt]) -> None:
        """Forget attempts that are written as sent, and count them."""
        in_flight = self._in_flight
        for attempt in attempts:
            if in_flight.get(attempt.message_id) is attempt:  # Inline: a call costs each message.
                del in_flight[attempt.message_id]
        self._telemetry.count(LogEvent.SENT, len(attempts))
        if self._telemetry.measures is not None and attempts:
            self._telemetry.measures.sent([attempt.message for attempt in attempts])

    def settle(self, attempts: Sequence[Attempt], states: Mapping[int, str]) -> None:
        """Report written ends, and forget the attempts."""
        sent = []
        for attempt in attempts:
            state = states.get(attempt.message_id)
            if state == _SENT:
                sent.append(attempt)
                continue
            self._in_flight.forget(attempt)
            if attempt.end is None:
                self._in_flight.note_lost(attempt)
            self.note_end(attempt.message, None if state is None else State(state), attempt.end)
        self.note_sent(sent)

    def note_end(self, message: Message[object], state: State | None, request: End | None) -> None:
        """Report the end of an attempt that was not sent; without a state it has lost its message."""
        if state is State.PENDING:
            self._run.kernel.sweep()  # A sleeping worker does not know its due time yet.
        if self._telemetry.measures is not None:
            self._telemetry.measures.ended(message, _reported_outcome(state, request))
        if state is None:
            self.report_message(logging.WARNING, LogEvent.LEASE_LOST, "lease lost, outcome not written", message)
        elif state is State.FAILED:
            self._run.failed.set()
            reason = None if request is None else request.reason
            self.report_message(logging.WARNING, LogEvent.FAILED, "message failed", message, reason=reason)
        elif state is State.PENDING and request is not None and request.reason_code is ReasonCode.UNAVAILABLE:
            # There may be no breaker, whose opening would be logged.
            text = "message waits until something is mended"
            self.report_message(logging.WARNING, LogEvent.SNOOZED, text, message, reason=request.reason)
        elif state is State.PENDING and request is not None and request.reason_code is ReasonCode.UNREADABLE:
            self._telemetry.count(LogEvent.SNOOZED)
            omitted_count = self._repeated.admit(message.topic, request.reason_code, None)
            if omitted_count is None:
                self._telemetry.count(LogEvent.PAYLOAD_UNREADABLE)
                return
            text = "message waits for a worker that can read its payload"
            fields = {"reason": request.reason, "omitted_count": omitted_count}
            self.report_message(logging.WARNING, LogEvent.PAYLOAD_UNREADABLE, text, message, **fields)
        elif state is State.PENDING and request is not None:
            self.report_message(
                logging.DEBUG,
                event_of_outcome(AttemptOutcome(request.outcome)),
                "attempt ended, pending again",
                message,
            )
        else:
            self.report_message(logging.INFO, event_of_state(state), "message ended", message)

    def report_unattempted(self, rows: Sequence[ClaimedRow]) -> None:
        for row in rows:
            level = logging.DEBUG
            if row.state == State.FAILED:
                level = logging.WARNING
                self._run.failed.set()
            event = event_of_state(State(row.state))
            self.report_message(level, event, "message ended without an attempt", row, state=row.state)
            if self._telemetry.measures is not None:
                self._telemetry.measures.unattempted(row.topic, row.queue, row.state)

    def report_lost(self, row: ClaimedRow) -> None:
        """Report a message whose attempt was lost and that is tried again."""
        self.report_message(
            logging.WARNING, LogEvent.LEASE_EXPIRED, "lease expired, trying again", row, state=row.state
        )

    def report_message(
        self,
        level: int,
        event: LogEvent,
        text: str,
        message: Message[object] | ClaimedRow,
        **fields: object,
    ) -> None:
        self._telemetry.report(
            level,
            event,
            text,
            message_id=message.id,
            topic=message.topic,
            queue=message.queue,
            attempt_count=message.attempt_count,
            **fields,
        )

    def _end_of(self, attempt: Attempt, result: _Unsent) -> End:
        names = (*self._redacted_names, *attempt.handler.redact)
        try:
            request = end_of(attempt, result)
            if isinstance(result, (RaisedTransient, RaisedPermanent)):
                request = self._with_place(attempt, result, request, names)
            return request if request.reason is None else replace(request, reason=_redacted(request.reason, names))
        except Exception as error:  # noqa: BLE001 - an invalid outcome ends its own message, not the worker
            text = f"the outcome cannot be read: {describe(error)}"
            return End(AttemptOutcome.FAILED, text)

    def _with_place(
        self, attempt: Attempt, result: RaisedTransient | RaisedPermanent, request: End, names: Sequence[str]
    ) -> End:
        """Log the exception of a handler, unless it repeats one, and return the request with its place."""
        error = result.__cause__
        if error is None:
            return request
        place = place_of(error)
        if not result.is_logged:
            result.is_logged = True
            self._log_exception(attempt.message, error, place, names)
        reason = request.reason if self._error_texts else type(error).__name__
        return replace(request, reason=reason, error_place=place)

    def _log_exception(
        self, message: Message[object], error: BaseException, place: str | None, names: Sequence[str]
    ) -> None:
        error_type = type(error).__name__
        omitted_count = self._repeated.admit(message.topic, error_type, place)
        if omitted_count is None:
            self._telemetry.count(LogEvent.HANDLER_RAISED)
            return
        self.report_message(
            logging.WARNING,
            LogEvent.HANDLER_RAISED,
            "handler raised an exception",
            message,
            error_type=error_type,
            error_place=place,
            omitted_count=omitted_count,
            traceback=redact_text(traceback_of(error, with_texts=self._error_texts), names),
        )


def end_of(attempt: Attempt, result: _Unsent) -> End:
    """Return the finish request for a result other than sent."""
    if attempt.handler.on_unknown == "hold" and (reason := _unknown_reason(result)) is not None:
        return End(AttemptOutcome.FAILED, clean_text(reason))
    match result:
        case Transient(error=error, retry_after=retry_after):
            delay = attempt.handler.retry.delay_seconds(attempt.used_count, retry_after=retry_after)
            return End(AttemptOutcome.RETRY, clean_text(str(error)), delay)
        case Unavailable(error=error, retry_after=retry_after):
            # The count of claims grows with each claim, also with claims that use up no attempt.
            pause = attempt.handler.retry.delay_seconds(attempt.attempt_count)
            delay = max(pause, retry_after or 0.0, MIN_SNOOZE_SECONDS)  # No budget limits the attempts of a tight loop.
            text = clean_text(str(error))
            return End(AttemptOutcome.SNOOZED, text, bounded_delay(delay), ReasonCode.UNAVAILABLE)
        case Permanent(error=error):
            return End(AttemptOutcome.FAILED, clean_text(str(error)))
        case Skip(reason=reason):
            text = clean_text(str(reason)) or "skipped by its handler"
            code = ReasonCode.SUPPRESSED if isinstance(result, Suppressed) else None
            return End(AttemptOutcome.SKIPPED, text, reason_code=code)
        case Released():
            return End(AttemptOutcome.RELEASED, is_for_others=True)
        case Snooze(delay_seconds=delay, reason=reason):
            why = None if reason is None else clean_text(str(reason))
            code, key = (result.code, result.breaker_key) if isinstance(result, Postponed) else (None, None)
            limit = attempt.handler.unreadable_timeout_seconds if code is ReasonCode.UNREADABLE else None
            return End(
                AttemptOutcome.SNOOZED,
                why,
                bounded_delay(delay),
                code,
                key,
                fails_after_seconds=limit,
                held_delay_seconds=result.held_delay if isinstance(result, Postponed) else None,
                is_for_others=code is ReasonCode.UNREADABLE,
            )
        case _:
            assert_never(result)


def minimal_end(end: End | None, reason: str) -> End:
    """Return a minimal end, which the database can hardly refuse: failed if the message was handed over."""
    if end is not None and end.outcome in _PENDING_AGAIN:
        return replace(end, reason=f"the database refused to write its outcome ({reason})")
    outcome = AttemptOutcome.SENT if end is None else end.outcome
    return End(
        AttemptOutcome.FAILED,
        f"it was handed over and ended {outcome}, which the database refused to write ({reason})",
    )


def _reported_outcome(state: State | None, request: End | None) -> AttemptOutcome:
    """Return the reported outcome of an attempt that was not sent."""
    if state is None:
        return AttemptOutcome.LOST
    if state is State.PENDING:
        return AttemptOutcome.RETRY if request is None else AttemptOutcome(request.outcome)
    return AttemptOutcome(state)


def _redacted(text: str, names: Sequence[str]) -> str:
    return redact_text(text, names)[:MAX_TEXT_LENGTH]


def _unknown_reason(result: object) -> str | None:
    """Return the reason why the attempt may have sent its message; None if it is known whether it did."""
    match result:
        case SendFailure(unknown=True, error=error):
            return str(error)
        case Postponed(unknown_error=error):
            return error
        case Released(unknown=True):
            return "stopped with its worker, outcome unknown"
        case _:
            return None

"""The filter, the results and the rows of `Operator`. A row contains sensitive values until `redacted` hides them.

The fields of a row have the order of the columns of its statement.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Final, Literal, NamedTuple, TypeAlias, cast
from uuid import UUID

from pydantic import JsonValue

from pgoutbox.encryption import SEALED, is_sealed
from pgoutbox.errors import MissingExtraError
from pgoutbox.message import PARTITIONS, State
from pgoutbox.operations.acts import ACTS, ActName, MessageResult
from pgoutbox.redaction import redact, redact_text
from pgoutbox.schedules import RuleError, next_times
from pgoutbox.text import pluralize
from pgoutbox.transports.redirect import redirected_mail

_ENCRYPTED: Final = "(encrypted)"
_PERIODS: Final = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}


# Called after each committed batch of a prune, with the number of messages deleted so far.
Progress: TypeAlias = Callable[[int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFilter:
    """A filter for messages: a message matches if it fulfils all given conditions.

    `destination` may omit `mailto:`. `key` is a coalesce, dedupe, ordering or fair key. `text` is searched in the
    destination, the owner, the keys, the skip reason and the last error, ignoring case and without wildcards. Payloads
    are not searched. The times are enqueue times, the first one inclusive. `error_group` is the id of a group of
    similar failures, as the dashboard's links have it. `breaker` is the key of an open circuit breaker, for the
    pending messages behind it. `due` selects the pending messages that are due `now`, or `later`, or that have been
    tried and are tried `again`; `ids` selects these messages.
    """

    states: Collection[State] = ()
    topic: str | None = None
    queue: str | None = None
    destination: str | None = None
    owner: str | None = None
    key: str | None = None
    text: str | None = None
    created_from: datetime | None = None
    created_before: datetime | None = None
    error_group: str | None = None
    breaker: str | None = None
    due: Literal["now", "later", "again"] | None = None
    ids: Sequence[int] | None = None

    def given(self) -> dict[str, JsonValue]:
        """Return the given conditions, for display and for the audit."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["states"] = [state.value for state in sorted(self.states)] or None
        return {
            name: value.isoformat() if isinstance(value, datetime) else value
            for name, value in values.items()
            if value is not None
        }

    def parameters(self) -> dict[str, object]:
        """Return the parameters of the statements that take a filter."""
        states = set(self.states)
        if self.error_group is not None:
            states = {State.FAILED}
        elif self.due is not None or self.breaker is not None:
            states = {State.PENDING}
        partitions = [partition for partition in PARTITIONS if states.intersection(partition)]
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "ids": None if self.ids is None else list(self.ids),
            "states": [state.value for state in self.states] or None,
            "partition_states": sorted(state for partition in partitions for state in partition) or None,
        }

    def limited_to(self, action: ActName) -> MessageFilter:
        """Return the filter for a bulk action, limited to the states that it can change.

        Raises `StateError` if the filter selects others. Without states, a redrive selects only failed messages.
        """
        act = ACTS[action]
        act.require_states(self.states)
        return replace(self, states=tuple(sorted(self.states or act.usual)))


class EraseResult(enum.StrEnum):
    """The result of an erasure of one message.

    `erased`: the message is deleted, with all that belongs to it. `in_flight`: its attempt is asked to stop; erase
    again after it. `locked`: another transaction has locked the message or its key; erase again. `changed`: it got
    another owner or destination since it was found. `missing`: no such message exists.
    """

    ERASED = "erased"
    IN_FLIGHT = "in_flight"
    LOCKED = "locked"
    CHANGED = "changed"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Batch:
    """One committed batch of a bulk act, with one result for each message.

    With a filter, all messages up to `reached_id` have been searched, and the act ends at `through_id`. A batch may be
    empty, because a part of the table may contain no match.
    """

    results: Sequence[MessageResult]
    reached_id: int
    through_id: int


class Pause(NamedTuple):
    """A pause of a queue or a topic. Without `resume_at` it lasts until an operator resumes the queue or the topic."""

    paused_at: datetime
    resume_at: datetime | None


class PausedTopic(NamedTuple):
    """A paused topic. Without `resume_at` the pause lasts until an operator resumes the topic."""

    topic: str
    paused_at: datetime
    resume_at: datetime | None


class StoredSchedule(NamedTuple):
    """A schedule. `asked_at` is the time of the database, from which the next times count."""

    name: str
    topic: str
    queue: str
    rule: str
    timezone: str
    missed: str
    is_declared: bool
    next_at: datetime | None
    last_at: datetime | None
    last_message_id: int | None
    until_at: datetime | None
    paused_at: datetime | None
    ended_at: datetime | None
    problem: str | None
    asked_at: datetime

    @property
    def next_time(self) -> datetime | str:
        """The next time, or why there is none."""
        if self.problem is not None:
            return self.problem
        if self.paused_at is not None:
            return "paused"
        return self.next_at or ("ended" if self.ended_at is not None else "not computed yet")

    def next_times(self, most: int = 5) -> list[datetime]:
        """Return the next times, as far as this process can compute them.

        A schedule that is paused, has ended or has a problem has none.
        """
        if self.problem is not None or self.paused_at is not None or self.ended_at is not None:
            return []
        try:
            times = next_times(self.rule, self.timezone, self.asked_at, most)
        except (RuleError, MissingExtraError):  # The rule is checked by a worker, which has cronsim.
            times = [] if self.next_at is None else [self.next_at]
        return [time for time in times if self.until_at is None or time <= self.until_at]


class Suppression(NamedTuple):
    """A suppression in force: the digest of an address, and the mailing list that it stops. None: every list."""

    digest: str
    mailing_list: str | None
    reason: str
    created_at: datetime


class FairKey(NamedTuple):
    """A fair key of a queue, with the share that holds for it: its own one, or that of its queue.

    `due` messages wait for their turn, those `in_flight` have it and have not ended. Each number stops at 10,000. Up to
    `rate_count` get their turn in `rate_seconds`, the next one at `next_turn_at`; None: the rate permits it now.
    """

    key: str
    due: int
    in_flight: int
    oldest_due_at: datetime | None
    oldest_due_seconds: float | None
    weight: int
    max_in_flight: int | None
    rate_count: int | None
    rate_seconds: int | None
    next_turn_at: datetime | None

    @property
    def limit(self) -> str:
        """The limit in flight in words."""
        if self.max_in_flight is None:
            return "none"
        return f"{self.max_in_flight:,}" if self.max_in_flight else "paused"

    @property
    def rate(self) -> str:
        """The rate in words, such as 20/s, 60/h or 100/15m."""
        if self.rate_count is None or self.rate_seconds is None:
            return "none"
        unit, length = next((u, n) for u, n in _PERIODS.items() if self.rate_seconds % n == 0)
        times = self.rate_seconds // length
        return f"{self.rate_count}/{times if times > 1 else ''}{unit}"


class FairKeys(NamedTuple):
    """Some fair keys of a queue, and the number of all of them, among the first 50,000 in order of their names."""

    keys: list[FairKey]
    key_count: int


class ClosedBreaker(NamedTuple):
    """The result of a close: whether the breaker was open, and how many postponed messages are due now."""

    was_open: bool
    message_count: int


@dataclass(frozen=True, slots=True)
class PruneTotals:
    """The number of deleted messages by state, of deleted keys without a message, and of deleted acts of the audit.

    The messages of dropped partitions are not counted, because they are not read.
    """

    messages: Mapping[State, int]
    key_heads: int
    dedupe_keys: int = 0
    acts: int = 0
    partitions_made: int = 0
    partitions_dropped: int = 0

    @property
    def total(self) -> int:
        """The number of deleted messages in all states."""
        return sum(self.messages.values())


class Mention(NamedTuple):
    """A place that contains a text.

    `id` is the message, the act of `audit`, or the row of `content`; None in the tables without ids, such as `breaker`.
    The id of a key is the newest message of the key, which may be deleted.
    """

    table: str
    column: str
    id: int | None


@dataclass(frozen=True, slots=True)
class Erasure:
    """The results of an erasure by message, and the places that still contain the owner or the address.

    `mentions` is None if the role may not search payloads.
    """

    results: Mapping[int, EraseResult]
    mentions: Sequence[Mention] | None

    @property
    def is_complete(self) -> bool:
        """Whether no message is left: none was in flight or locked."""
        return not {EraseResult.IN_FLIGHT, EraseResult.LOCKED}.intersection(self.results.values())


class JsonText(str):
    """JSON text that is shown unparsed: it is cut off, nested too deeply, or has a number too long for Python."""

    __slots__ = ()


class ListedMessage(NamedTuple):
    """A message in a list, without its payload.

    `waits` is the reason why a pending message is not delivered yet, `waits_for` the message for which it waits, and
    `waits_until` the end of it, if known. `handled_as` is the name that a worker must have for it, such as
    `mail.welcome@2` for the second version of its payload. `cap` is the limit of its fair key that is reached.
    """

    id: int
    topic: str
    queue: str
    destination: str | None
    state: State
    attempt_count: int
    max_attempts: int
    attempt_budget: int
    created_at: datetime
    available_at: datetime
    finished_at: datetime | None
    coalesce_key: str | None
    dedupe_key: str | None
    fair_key: str | None
    skip_reason: str | None
    last_error: str | None
    waits: str | None = None
    waits_for: int | None = None
    waits_until: datetime | None = None
    handled_as: str | None = None
    cap: str | None = None

    @property
    def wait(self) -> str | None:
        """`waits`, with the version of the payload that no worker handles, or the fair key and its limit."""
        return _wait(self)

    @property
    def attempts(self) -> str:
        """The attempts that count, of those that the policy grants."""
        return _attempts(self)

    @property
    def why_it_waits(self) -> str | None:
        """`waits` in words."""
        return _why_it_waits(self)

    @property
    def why_not_sent(self) -> str | None:
        """The reason of a skip, or the last error. None if it was sent: its error is that of an earlier attempt."""
        return self.skip_reason or (None if self.state == State.SENT else self.last_error)

    def redacted(self, names: Collection[str]) -> ListedMessage:
        """Return the message without values whose name matches `names`."""
        return self._replace(
            destination=_redact_text(self.destination, names),
            skip_reason=_redact_text(self.skip_reason, names),
            last_error=_redact_text(self.last_error, names),
        )


_NO_HANDLER: Final = "no handler"
_SHARE: Final = "share"
# In sentences, the reasons of `pgoutbox.waiting_view`.
WAITS: Final = {
    "superseded": "a newer message of its coalesce key takes its place",
    "paused": "its queue or its topic is paused",
    "scheduled": "its time has not come",
    "retry": "for the pause before its next attempt",
    "breaker": "an open circuit breaker holds it back, or its receiver took no message at its last attempt",
    "unavailable": "a setting or a server must be repaired first",
    "redirect": "the redirect holds it back",
    "unreadable": "its payload does not fit the model of the worker that tried it; another version may read it",
    "halted": "an earlier message of its ordering key has failed",
    "in order": "an earlier message of its ordering key is delivered first",
    "in flight": "another message of its key is being sent",
    "rate": "the rate limit of its queue is used up",
    "max_in_flight": "the limit in flight of its queue is reached",
    _SHARE: "its fair key is at its limit",
    "no worker": "no running worker serves its queue; pgoutbox workers lists the queues",
    _NO_HANDLER: "no running worker of its queue has a handler for its topic; pgoutbox workers lists the topics",
    "next run": "no worker of its queue is running; the next run of pgoutbox worker takes it, as the last one did",
    "turn": "it waits for the turn of its fair key",
    "due": "it is due, and the next free slot of a worker takes it",
}


class ShownMessage(NamedTuple):
    """All data of one message.

    The fields are columns of `pgoutbox.message_view`, and others of SHOW_MESSAGE and SHOW_CONTENT. Headers, payload and
    content can be a `JsonText`. Their sizes are the sizes of the whole JSON text. `waits` is the reason why a pending
    message is not delivered yet, `handled_as` the name that a worker must have for it, and `cap` the limit of its fair
    key that is reached, as in `pgoutbox.waiting_view`. `content` is what the messages of a fan-out share.
    """

    id: int
    topic: str
    payload_version: int
    queue: str
    destination: str | None
    state: State
    attempt_count: int
    max_attempts: int
    attempt_budget: int
    created_at: datetime
    available_at: datetime
    waits: str | None
    waits_for: int | None
    waits_until: datetime | None
    handled_as: str | None
    cap: str | None
    expires_at: datetime | None
    claimed_at: datetime | None
    lease_expires_at: datetime | None
    cancel_requested_at: datetime | None
    finished_at: datetime | None
    worker: str | None
    coalesce_key: str | None
    dedupe_key: str | None
    ordering_key: str | None
    fair_key: str | None
    owner: str | None
    halts_key: bool
    superseded_by: int | None
    resend_of: int | None
    failure_of: int | None
    content_id: int | None
    skip_reason: str | None
    last_error: str | None
    headers: JsonValue
    headers_bytes: int | None
    payload: JsonValue
    payload_bytes: int
    content: JsonValue = None
    content_bytes: int | None = None

    @property
    def attempts(self) -> str:
        """The attempts that count, of those that the policy grants."""
        return _attempts(self)

    @property
    def wait(self) -> str | None:
        """`waits`, with the version of the payload that no worker handles, or the fair key and its limit."""
        return _wait(self)

    @property
    def why_it_waits(self) -> str | None:
        """`waits` in words."""
        return _why_it_waits(self)

    def redacted(self, names: Collection[str]) -> ShownMessage:
        """Return the message without an encrypted payload, and without values whose name matches `names`."""
        return self._replace(
            destination=_redact_text(self.destination, names),
            skip_reason=_redact_text(self.skip_reason, names),
            last_error=_redact_text(self.last_error, names),
            headers=_redact_json(self.headers, names),
            payload=_redact_json(self.payload, names),
            content=_redact_json(self.content, names),
        )


def _attempts(message: ListedMessage | ShownMessage) -> str:
    free_count = message.max_attempts - message.attempt_budget  # Of snoozes, releases, and before a redrive.
    return f"{message.attempt_count - free_count}/{message.attempt_budget}"


def _wait(message: ListedMessage | ShownMessage) -> str | None:
    if message.waits == _SHARE:
        return f"{message.waits} ({message.fair_key}: {message.cap})"
    if message.waits != _NO_HANDLER or message.handled_as in (None, message.topic):
        return message.waits
    return f"{message.waits} for version {message.handled_as.removeprefix(f'{message.topic}@')}"


def _why_it_waits(message: ListedMessage | ShownMessage) -> str | None:
    if message.waits is None:
        return None
    if message.waits == _SHARE:
        state = "is paused" if message.cap == "paused" else f"is at its limit of {message.cap}"
        return f"its fair key {message.fair_key} {state}"
    text = WAITS[message.waits]
    if _wait(message) == message.waits:
        return text
    return text.replace("its topic", f"{message.handled_as}, its topic with the version of its payload", 1)


class ShownAttempt(NamedTuple):
    """One attempt, or several alike."""

    attempt_count: int
    times: int
    outcome: str
    worker: str
    started_at: datetime
    ended_at: datetime
    error: str | None
    reason_code: str | None
    breaker_key: str | None
    error_place: str | None

    def redacted(self, names: Collection[str]) -> ShownAttempt:
        """Return the attempt without values whose name matches `names`."""
        return self._replace(error=_redact_text(self.error, names))


class FailureGroup(NamedTuple):
    """The failed messages of one topic and cause.

    `cause` is the error without addresses, quoted values, ids and numbers; None if there is none. `last_hour` of the
    `messages` failed within the last hour, `hour_before` within the hour before it, and `failed_again` of them had
    failed before and were redriven. `error` is that of the newest message, at most 300 characters, and `place` the line
    of its handler that raised it.
    """

    topic: str
    cause: str | None
    group: str
    messages: int
    last_hour: int
    hour_before: int
    failed_again: int
    first_at: datetime
    last_at: datetime
    newest_id: int
    error: str | None
    place: str | None

    def redacted(self, names: Collection[str]) -> FailureGroup:
        """Return the group without values whose name matches `names`."""
        return self._replace(cause=_redact_text(self.cause, names), error=_redact_text(self.error, names))


class TopicCounts(NamedTuple):
    """The numbers of messages of one topic in one queue by state.

    `due` and `scheduled` messages are pending. `oldest_due_seconds` is the waiting time of the oldest due message.
    """

    queue: str
    topic: str
    due: int
    scheduled: int
    sending: int
    sent: int
    failed: int
    skipped: int
    cancelled: int
    oldest_due_seconds: float | None

    @property
    def unfinished(self) -> int:
        """The number of pending and in-flight messages."""
        return self.due + self.scheduled + self.sending


class AuditRow(NamedTuple):
    """One batch of one act. It lists the first twenty messages.

    The login `db_role` states `actor`, `origin` and `stated`. The database finds the rest.
    """

    id: int
    act_id: UUID
    acted_at: datetime
    actor: str
    origin: str | None
    db_role: str
    action: str
    queue: str | None
    message_count: int | None
    first_ids: list[int] | None
    details: dict[str, JsonValue] | None
    stated: dict[str, JsonValue] | None

    @property
    def stated_by(self) -> str | None:
        """The database role that states the actor; None if the actor is the role itself."""
        return None if self.actor == self.db_role else self.db_role

    def redacted(self, names: Collection[str]) -> AuditRow:
        """Return the act without values whose name matches `names`: the text of a filter may be sensitive."""
        return self._replace(details=_redact_values(self.details, names), stated=_redact_values(self.stated, names))


class QueueControls(NamedTuple):
    """A queue that is paused or has limits.

    Up to `rate_count` attempts may begin in any `rate_seconds`, up to `burst` at once, and `tokens` now. Operators may
    allow up to `ceiling_count` in any `ceiling_seconds`.
    """

    queue: str
    paused_at: datetime | None
    resume_at: datetime | None
    rate_count: int | None
    rate_seconds: float | None
    burst: int | None
    tokens: float | None
    max_in_flight: int | None
    ceiling_count: int | None
    ceiling_seconds: float | None
    in_flight: int


@dataclass(frozen=True, slots=True)
class Rate:
    """A number of attempts in a period."""

    count: int
    seconds: float


class SwitchedRedirect(NamedTuple):
    """A redirect that an operator has switched on. Without `until_at` it lasts until it is switched off.

    It covers `topics`, or all if there are none, except `exempt_topics`. A final `*` stands for the rest of a name.
    """

    target: str
    set_by: str
    set_at: datetime
    until_at: datetime | None
    topics: tuple[str, ...] = ()
    exempt_topics: tuple[str, ...] = ()

    @property
    def mail(self) -> str:
        """The redirected e-mail in words."""
        return redirected_mail(self.topics, self.exempt_topics)


class WorkerRedirect(NamedTuple):
    """A worker's own redirect, `PGOUTBOX_REDIRECT_TO`."""

    worker: str
    target: str
    reported_at: datetime


class Redirects(NamedTuple):
    """All redirects that are on, the operator's and those that workers have reported, and the blackout of today."""

    switched: SwitchedRedirect | None
    workers: tuple[WorkerRedirect, ...]
    blackout: str | None

    def warnings(self) -> list[str]:
        """Return what happens to redirected e-mail: a sentence for each redirect that is on."""
        found = []
        switched = self.switched
        if switched is not None:
            until = "" if switched.until_at is None else f" until {switched.until_at.isoformat(timespec='seconds')}"
            rest = f" to {switched.target} since {switched.set_at.isoformat(timespec='seconds')}{until}"
            found.append(self._sentence(switched.set_by, switched.mail, rest))
        for target, count in Counter(report.target for report in self.workers).items():
            is_later = switched is not None and switched.mail == redirected_mail((), ())
            mail = f"all {'e-mail' if switched is None or is_later else 'other e-mail'} of {pluralize(count, 'worker')}"
            rest = f" when {switched.set_by} no longer does" if switched is not None and is_later else ""
            found.append(self._sentence(f"PGOUTBOX_REDIRECT_TO={target}", mail, rest))
        return found

    def _sentence(self, who: str, mail: str, rest: str) -> str:
        if self.blackout is None:
            return f"{who} redirects {mail}{rest}"
        return (
            f"{mail} is held back, except for exempt addresses and topics: {who} redirects it{rest}, "
            f"and the blackout {self.blackout} forbids that"
        )

    def as_json(self) -> dict[str, object]:
        """Return all of them as JSON values."""
        return {
            "switched": None if self.switched is None else self.switched._asdict(),
            "workers": [report._asdict() for report in self.workers],
            "blackout": self.blackout,
        }


class ClearedRedirect(NamedTuple):
    """The result of a switch off: whether the redirect was on, and how many held-back messages are due now."""

    was_on: bool
    message_count: int


class Home(NamedTuple):
    """The database that the schema belongs to, and the messages that workers would send from this one.

    In a copy `is_here` is false, and workers send nothing. Without a `deployment`, they need no PGOUTBOX_DEPLOYMENT.
    """

    database_name: str
    home_name: str | None
    deployment: str | None
    is_here: bool
    due: int
    scheduled: int
    in_flight: int


class OpenBreaker(NamedTuple):
    """An open circuit breaker."""

    key: str
    open_seconds: float
    last_error: str

    def redacted(self, names: Collection[str]) -> OpenBreaker:
        """Return the breaker without values whose name matches `names`."""
        return self._replace(last_error=redact_text(self.last_error, names))


class RetentionRule(NamedTuple):
    """How long final messages of a topic, or of `*`, are kept in one state; None means forever.

    The state is a final one, `dedupe_key` for the dedupe keys of deleted messages, or `audit` for acts.
    """

    topic: str
    state: str
    keep: timedelta | None


def _redact_text(text: str | None, names: Collection[str]) -> str | None:
    return None if text is None else redact_text(text, names)


def _redact_values(values: dict[str, JsonValue] | None, names: Collection[str]) -> dict[str, JsonValue] | None:
    if values is None:
        return None
    texts: dict[str, JsonValue] = {
        name: redact_text(value, names) if isinstance(value, str) else value for name, value in values.items()
    }
    return cast("dict[str, JsonValue]", redact(texts, names))


def _redact_json(value: JsonValue, names: Collection[str]) -> JsonValue:
    if isinstance(value, JsonText):
        return _ENCRYPTED if f'"{SEALED}"' in value else JsonText(redact_text(value, names))
    return _ENCRYPTED if is_sealed(value) else redact(value, names)

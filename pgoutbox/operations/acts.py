"""What operators do to messages, as data.

An act is the SQL function of its name. It locks the messages, changes them, records the act, and returns a row of
`pgoutbox.act_result` for each, so that operators may call it. From its `Act`, `Operator`, the command line, the
dashboard and Django's admin offer it. To add one, add the function, its `Act`, and a method of `Operator`.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal, LiteralString, TypeAlias, TypedDict

from psycopg.types.json import Jsonb
from pydantic import JsonValue

from pgoutbox.clock import Duration
from pgoutbox.enqueue.payloads import to_json
from pgoutbox.errors import ArgumentError, StateError
from pgoutbox.message import OWED, State
from pgoutbox.options import OPTIONS, check_available_at, check_delay, if_given
from pgoutbox.text import check_storable

REDRIVABLE: Final = (State.FAILED, State.CANCELLED)
CORRECTABLE: Final = (State.FAILED, State.PENDING)
_MAX_PAYLOAD_BYTES: Final = 16 * 1024 * 1024  # The limit of the schema.
_MAX_REASON: Final = 1_000
_LEAST_SNOOZE: Final = timedelta(seconds=1)

ActName: TypeAlias = Literal["redrive", "correct", "release", "dismiss", "snooze", "reschedule", "resend", "cancel"]


class Action(enum.StrEnum):
    """The kinds of acts of an operator, as the audit records them."""

    ENQUEUE = "enqueue"
    REDRIVE = "redrive"
    CORRECT = "correct"
    RELEASE = "release"
    DISMISS = "dismiss"
    SNOOZE = "snooze"
    RESCHEDULE = "reschedule"
    RESEND = "resend"
    CANCEL = "cancel"
    PRUNE = "prune"
    PAUSE = "pause"
    RESUME = "resume"
    LIMIT = "limit"
    RETENTION = "retention"
    BREAKER = "breaker"
    REDIRECT = "redirect"
    ERASE = "erase"
    EXPORT = "export"
    ADOPT = "adopt"
    SUPPRESS = "suppress"
    UNSUPPRESS = "unsuppress"


class Correction(TypedDict, total=False):
    """The fields of a message that a correction changes. None removes the headers, the destination or the owner.

    Payload and headers are merge patches (RFC 7396): objects with the members to replace, and None for those to remove.
    `payload_version` is the version of the patch. One that is later than that of the message is no patch: `payload` is
    then the whole new payload.
    """

    payload: JsonValue
    payload_version: int
    headers: dict[str, str | None] | None
    destination: str | None
    owner: str | None
    queue: str


class ActArguments(TypedDict, total=False):
    """The further arguments of the acts: each act has those of its method of `Operator`."""

    correction: Correction
    reason: str
    available_at: datetime | None
    duration: Duration


class ActResult(enum.StrEnum):
    """What an act did to one message, or why it left the message alone.

    `redriven`, `corrected`: the message is pending again. `released`: its worker no longer has it, and it is tried
    again when the lease ends. `dismissed`: it is skipped. `snoozed`, `rescheduled`: it has another due time. `resent`:
    a copy is pending. `cancelled`: it is not delivered. `requested`: the attempt in flight is notified, the last one.

    `missing`: no such message exists. `wrong_state`: its state is not one that the act changes; for a cancel
    `already_cancelled`, `sent`, `failed`, `skipped`, or `pending` and `sending` if the caller has excluded them.
    `changed`: it was attempted again since it was listed. `superseded`: a newer message of its coalesce key exists.
    `dedupe_key_taken`: another message has its dedupe key. `expires`: it would expire before its new due time.
    `encrypted`: its payload can only be opened as it is, for its own destination. `ordered`: the place in its ordering
    key belongs to its queue. `locked`: another transaction has locked its row; try again.
    """

    REDRIVEN = "redriven"
    CORRECTED = "corrected"
    RELEASED = "released"
    DISMISSED = "dismissed"
    SNOOZED = "snoozed"
    RESCHEDULED = "rescheduled"
    RESENT = "resent"
    CANCELLED = "cancelled"
    REQUESTED = "requested"
    ALREADY_CANCELLED = "already_cancelled"
    MISSING = "missing"
    WRONG_STATE = "wrong_state"
    CHANGED = "changed"
    SUPERSEDED = "superseded"
    DEDUPE_KEY_TAKEN = "dedupe_key_taken"
    EXPIRES = "expires"
    ENCRYPTED = "encrypted"
    ORDERED = "ordered"
    LOCKED = "locked"
    PENDING = "pending"
    SENDING = "sending"
    SENT = "sent"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class MessageResult:
    """The result of an act on one message.

    `other_id` is the copy of a resent message, the newer message that supersedes it, or the message that has its dedupe
    key. `explanation` tells people why the message was left alone, as in "message 42 is locked by another transaction".
    It is empty if the act was done.
    """

    id: int
    result: ActResult
    other_id: int | None = None
    explanation: str = ""

    @property
    def is_done(self) -> bool:
        """Whether the act changed or copied the message."""
        return not self.explanation


@dataclass(frozen=True, slots=True)
class ActArgument:
    """What an act asks for besides the messages: a name in `ActArguments`, and the words beside it in a form.

    `check` returns the value for the SQL function, and raises `ArgumentError`. Its value for None is the default.
    """

    name: str
    kind: Literal["text", "time", "duration", "correction"]
    hint: str
    check: Callable[[Any], object]
    required: bool = True

    @property
    def label(self) -> str:
        """The name in words."""
        return {"available_at": "due"}.get(self.name, self.name).capitalize()


@dataclass(frozen=True, slots=True)
class Act:
    """One act on messages.

    `statement` calls its SQL function with `ids`, `states`, `attempt_counts` and those of `arguments`. It can
    change messages in `states`. A caller that names no states changes those in `by_id`, and with a filter those in
    `usual`. `results` are all results, first the one of a change, and `did` describes a changed message to people.
    `button` does it to one message without arguments, and `form` with them; with `in_lists` it can be done to all
    messages of a list, and without `for_all` not to all messages without a filter. The help is `says` and `more`.
    """

    name: ActName
    statement: LiteralString
    _: KW_ONLY
    states: tuple[State, ...]
    results: str
    did: str
    says: str
    more: str = ""
    usual: tuple[State, ...] = ()
    by_id: tuple[State, ...] = ()
    arguments: tuple[ActArgument, ...] = ()
    button: str = ""
    form: str = ""
    in_lists: bool = False
    for_all: bool = True
    is_harmful: bool = False

    def __post_init__(self) -> None:
        for name in ("usual", "by_id"):
            object.__setattr__(self, name, getattr(self, name) or self.states)

    @property
    def done(self) -> ActResult:
        """The result for a message that the act changed."""
        return ActResult(self.results.split()[0])

    def require_states(self, states: Collection[State]) -> None:
        """Raise `StateError` if the act cannot change messages in one of these states."""
        if others := set(states).difference(self.states):
            raise StateError(
                f"only {' and '.join(self.states)} messages can be {self.done}, not {', '.join(sorted(others))}"
            )

    def checked(self, changes: Mapping[str, object]) -> dict[str, object]:
        """Return the arguments for the SQL function. Raises `ArgumentError`, or `TypeError` for those of other acts."""
        if unknown := changes.keys() - {argument.name for argument in self.arguments}:
            raise TypeError(f"{self.name} has no argument {min(unknown)!r}")
        return {argument.name: argument.check(changes.get(argument.name)) for argument in self.arguments}

    def answers(self, rows: Sequence[Sequence[Any]], states: Collection[State] = ()) -> list[MessageResult]:
        """Return the results of these rows; with the states that the caller has named, for the explanations."""
        can_be = f"only {' and '.join(states or self.by_id)} messages can be {self.done}"
        return [
            MessageResult(message_id, ActResult(result), other_id, _explanation(result, state, other_id, can_be))
            for message_id, result, state, other_id in rows
        ]


def _explanation(result: str, state: str | None, other_id: int | None, can_be: str) -> str:
    """Return the reason why an act has left a message alone; empty if it was done."""
    explanations = {
        "missing": "does not exist",
        "wrong_state": f"is {state}; {can_be}",
        "changed": "was attempted again",
        "superseded": "is superseded by a newer message, which is deleted"
        if other_id is None
        else f"is superseded by message {other_id}, which is newer",
        "expires": "expires before that time",
        "encrypted": "is encrypted for its destination; let the application enqueue it again",
        "ordered": "has an ordering key, which belongs to its queue",
        "dedupe_key_taken": f"has lost its dedupe key to message {other_id}",
        "locked": "is locked by another transaction; try again",
        "already_cancelled": "is already cancelled",
    }
    # A cancel finds the other states.
    explanations.update({ended: f"is already {ended}" for ended in State if ended is not State.CANCELLED})
    return explanations.get(result, "")


def _check_reason(value: object) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if not 1 <= len(text) <= _MAX_REASON:
        raise ArgumentError("reason", f"must have 1 to {_MAX_REASON:,} characters")
    check_storable("reason", text)
    return text


def _check_duration(value: object) -> timedelta:
    duration = timedelta(seconds=check_delay("duration", value))
    if duration < _LEAST_SNOOZE:
        raise ArgumentError("duration", "must be at least 1 second")
    return duration


def _check_correction(value: Correction | None) -> Jsonb:
    changes: dict[str, object] = {}
    for name, change in (value or {}).items():
        if name in ("payload", "headers"):
            changes[name] = json.loads(to_json(change, max_bytes=_MAX_PAYLOAD_BYTES, field=name))
        elif name in OPTIONS and (change is not None or name in ("queue", "payload_version")):
            changes[name] = OPTIONS[name](name, change)
        else:
            changes[name] = change
    return Jsonb(changes)


ACTS: Final[Mapping[ActName, Act]] = {
    act.name: act
    for act in (
        Act(
            "redrive",
            "SELECT * FROM pgoutbox.redrive(%(ids)s::bigint[], %(states)s::text[], %(attempt_counts)s::integer[])",
            states=REDRIVABLE,
            usual=(State.FAILED,),
            results="redriven missing wrong_state changed superseded dedupe_key_taken locked",
            did="pending again",
            says="Make failed and cancelled messages pending again.",
            more="A filter without --state selects failed messages. Each message gets its initial number of attempts. "
            "Superseded messages are left alone.",
            button="Redrive",
            in_lists=True,
        ),
        Act(
            "correct",
            "SELECT * FROM pgoutbox.correct("
            "%(ids)s::bigint[], %(correction)s::jsonb, %(states)s::text[], %(attempt_counts)s::integer[])",
            states=(State.PENDING, *REDRIVABLE),
            usual=CORRECTABLE,
            by_id=CORRECTABLE,
            results="corrected missing wrong_state changed superseded encrypted ordered dedupe_key_taken locked",
            did="corrected, and pending",
            says="Change fields of pending and failed messages, and make failed ones pending.",
            more='--set owner= removes the owner. --set payload=\'{"email": "ada@example.org"}\' replaces this member '
            "and keeps the others; null removes one. With --app or PGOUTBOX_APP, a payload is brought forward to the "
            "version of its topic, and the model checks it; --set payload_version=1 corrects version 1 as it is. "
            "Payload and headers need a role that may read them. The audit records the names of the fields, and no "
            "values.",
            arguments=(ActArgument("correction", "correction", "the fields to change", _check_correction),),
        ),
        Act(
            "release",
            "SELECT * FROM pgoutbox.release(%(ids)s::bigint[], %(attempt_counts)s::integer[])",
            states=(State.SENDING,),
            results="released missing wrong_state changed locked",
            did="taken from its worker, and tried again when the lease ends",
            says="Take messages in flight away from their workers, for attempts that do not end.",
            more="A worker stops the attempt within seconds. It counts as lost when its lease ends, and the message is "
            "tried again: it may be delivered twice.",
            button="Put back",
        ),
        Act(
            "dismiss",
            "SELECT * FROM pgoutbox.dismiss(%(ids)s::bigint[], %(reason)s::text, %(attempt_counts)s::integer[])",
            states=(State.FAILED,),
            results="dismissed missing wrong_state changed locked",
            did="dismissed",
            says="End failed messages as skipped.",
            more="The message and the audit record who dismissed it, and why.",
            arguments=(ActArgument("reason", "text", "why nobody will deliver it", _check_reason),),
            form="Dismiss",
            in_lists=True,
            is_harmful=True,
        ),
        Act(
            "snooze",
            "SELECT * FROM pgoutbox.snooze("
            "%(ids)s::bigint[], %(duration)s::interval, %(reason)s::text, %(attempt_counts)s::integer[])",
            states=(State.PENDING,),
            results="snoozed missing wrong_state changed superseded expires locked",
            did="not due before the end of this time",
            says="Let pending messages wait for at least some time.",
            more="A message that is due later keeps its time. The audit records the reason.",
            arguments=(
                ActArgument("duration", "duration", "from now", _check_duration),
                ActArgument("reason", "text", "why it has to wait", _check_reason),
            ),
            form="Snooze",
            in_lists=True,
        ),
        Act(
            "reschedule",
            "SELECT * FROM pgoutbox.reschedule(%(ids)s::bigint[], %(available_at)s::timestamptz)",
            states=(State.PENDING,),
            results="rescheduled missing wrong_state superseded expires locked",
            did="due at its new time",
            says="Make pending messages due now, or at another time.",
            more="Also brings the next attempt of a failing message forward. Superseded messages are left alone.",
            arguments=(
                ActArgument(
                    "available_at",
                    "time",
                    "without it: now",
                    lambda value: if_given(check_available_at, "available_at", value),
                    required=False,
                ),
            ),
            button="Deliver now",
            form="Deliver at another time",
            in_lists=True,
        ),
        Act(
            "resend",
            "SELECT r.* FROM (SELECT DISTINCT unnest(%(ids)s::bigint[])) AS i(id) "
            "CROSS JOIN LATERAL pgoutbox.resend(i.id) AS r",
            states=(State.SENT,),
            results="resent missing wrong_state superseded",
            did="resent as a copy",
            says="Enqueue copies of sent messages and print their ids.",
            more="Superseded messages are left alone.",
            button="Resend",
            for_all=False,
        ),
        Act(
            "cancel",
            "SELECT * FROM pgoutbox._cancel_each(%(ids)s::bigint[], %(states)s::text[])",
            states=OWED,
            results="cancelled requested already_cancelled sent failed skipped pending sending missing",
            did="cancelled",
            says="Cancel messages.",
            more="Asks the handler of an in-flight message to stop. The message is not retried.",
            button="Cancel",
            in_lists=True,
            is_harmful=True,
        ),
    )
}
# The description of a changed message, by the result of its act.
DID: Final[Mapping[ActResult, str]] = {
    **{act.done: act.did for act in ACTS.values()},
    ActResult.REQUESTED: "asked to stop; its handler is notified, and it is not retried",
}


def act_named(name: str) -> Act:
    """Return the act of this name. Raises `ArgumentError` if there is none."""
    found = next((act for act in ACTS.values() if act.name == name), None)
    if found is None:
        raise ArgumentError("action", f"must be one of {', '.join(ACTS)}, not {name!r}")
    return found

"""The messages of an owner, for an application that shows them to a person and lets the person change one.

A message of another owner is treated as missing. The guards are in the SQL functions `find` and `edit`.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from datetime import datetime
from typing import Any, ClassVar, Final, NamedTuple, cast

from pydantic import AwareDatetime, BaseModel, ConfigDict
from pydantic_core import from_json

from pgoutbox.clock import Duration
from pgoutbox.database import sql
from pgoutbox.encryption import decrypted, is_sealed
from pgoutbox.enqueue.adapters import Call, Rows
from pgoutbox.enqueue.generators import Steps, new_time_of, text_of, transaction
from pgoutbox.enqueue.payloads import Serializer
from pgoutbox.enqueue.routes import Router
from pgoutbox.enqueue.validation import Route, prepare
from pgoutbox.errors import ArgumentError, ConfigurationError, StateError
from pgoutbox.message import State, Transient
from pgoutbox.options import MAX_ID, check_destination, check_name, check_owner, check_whole, if_given
from pgoutbox.text import preview
from pgoutbox.topics import MessageOptions, NewMessage, Topic

MAX_FOUND: Final = 1_000

_KEYS: Final = ("coalesce_key", "dedupe_key", "ordering_key")


class OwnedMessage(BaseModel):
    """A message as its owner may see it: see `Producer.find`.

    `destination` and `reason` are redacted. `reason` says why the message was skipped or failed. `edit` takes a new
    payload while the state is `pending` and `attempt_count` is 0. `payload` is the JSON value that was enqueued,
    decrypted if it was encrypted, or None if it was not requested.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True)

    id: int
    topic: str
    queue: str
    state: State
    destination: str | None
    attempt_count: int
    created_at: AwareDatetime
    available_at: AwareDatetime
    expires_at: AwareDatetime | None
    finished_at: AwareDatetime | None
    coalesce_key: str | None
    dedupe_key: str | None
    ordering_key: str | None
    reason: str | None
    payload: Any = None


class EditResult(enum.StrEnum):
    """The result of `edit`.

    `edited`: the message has its new values. `missing`: the owner has no such message. `wrong_state`: it is not
    pending. `attempted`: an attempt had begun, which may have sent the old payload; only the due time can be changed.
    `superseded`: a newer message of its coalesce key exists. `expires`: it would expire before its due time.
    `encrypted`: its destination contains a secret or has changed meanwhile: pass the destination; or the topic is not
    encrypted in this outbox. `shared`: it has the shared content of a fan-out. `locked`: another transaction has locked
    its row; try again.
    """

    EDITED = "edited"
    MISSING = "missing"
    WRONG_STATE = "wrong_state"
    ATTEMPTED = "attempted"
    SUPERSEDED = "superseded"
    EXPIRES = "expires"
    ENCRYPTED = "encrypted"
    SHARED = "shared"
    LOCKED = "locked"


def search_of(
    owner: str,
    message_id: int | None,
    topics: Collection[str | Topic[Any]] | None,
    states: Collection[State],
    before_id: int | None,
    limit: int,
) -> tuple[object, ...]:
    """Return the parameters of `sql.FIND`."""
    if isinstance(topics, (str, Topic)):
        raise ArgumentError("topics", f"must be several topics, not {preview(topics)}; pass a list")
    if isinstance(states, str) or not states or not set(states) <= set(State):
        raise ArgumentError("states", f"must be some of {', '.join(State)}, not {preview(states)}")
    names = None if topics is None else [topic.name if isinstance(topic, Topic) else topic for topic in topics]
    return (
        check_owner("owner", owner),
        None if message_id is None else check_whole("message_id", message_id, most=MAX_ID),
        None if names is None else [check_name("topics", name) for name in names],
        [State(state).value for state in states],
        None if before_id is None else check_whole("before_id", before_id, most=MAX_ID),
        check_whole("limit", limit, most=MAX_FOUND),
    )


def find_owned(search: tuple[object, ...], router: Router, *, payloads: bool) -> Steps[list[OwnedMessage]]:
    """Return the messages of `search_of`, newest first."""
    yield from transaction(required=False)
    call = Call(sql.FIND_WITH_PAYLOADS, (*search, search[0])) if payloads else Call(sql.FIND, search)
    rows = cast("Rows", (yield call))
    found = [OwnedMessage.model_validate_json(text_of(cast("str", text))) for (text,) in rows]
    return [_opened(message, router) if is_sealed(message.payload) else message for message in found]


def _opened(message: OwnedMessage, router: Router) -> OwnedMessage:
    """Return the message with its payload decrypted. The destination, which may be redacted, is not compared."""
    try:
        sealed_for, text = decrypted(message.payload, router.keyring)
    except Transient:
        raise ConfigurationError(
            f"the payload of message {message.id} is encrypted: add its key to PGOUTBOX_ENCRYPTION_KEYS"
        ) from None
    for name in ("topic", "coalesce_key", "ordering_key"):
        if getattr(sealed_for, name) != getattr(message, name):
            raise StateError(
                f"the payload of message {message.id} was encrypted for another message: its {name} differs"
            )
    return message.model_copy(update={"payload": from_json(text)})


class Edit(NamedTuple):
    """The checked arguments of `edit`. None leaves a value as it is."""

    message_id: int
    owner: str
    payload: object
    destination: str | None
    available_at: object
    delay: object


def edit_of(
    message_id: int,
    owner: str,
    payload: object,
    destination: str | None,
    available_at: datetime | None,
    delay: Duration | None,
) -> Edit:
    """Return the edit, if it changes something."""
    if payload is None and destination is not None:
        raise ArgumentError("destination", "give the payload, too: a new destination must not get the old one")
    if payload is None and available_at is None and delay is None:
        raise ArgumentError("payload", "give a payload, a due time, or both")
    target_id, *time = new_time_of(message_id, available_at, delay)
    return Edit(
        cast("int", target_id),
        check_owner("owner", owner),
        payload,
        if_given(check_destination, "destination", destination),
        *time,
    )


def edit_owned(
    edit: Edit, router: Router, serializer: Serializer | None, *, require_transaction: bool
) -> Steps[EditResult]:
    """Change the message. A new payload is checked by the definition of the message's topic, and encrypted by it."""
    yield from transaction(required=require_transaction)
    content: tuple[str | None, ...] = (None, None, None)
    if edit.payload is not None:
        search = search_of(edit.owner, edit.message_id, None, tuple(State), None, 1)
        found = yield from find_owned(search, router, payloads=False)
        if not found:
            return EditResult.MISSING
        content = _content_of(edit, found[0], router.route(found[0].topic, serializer))
    payload, destination, sealed_for = content
    ((result,),) = yield Call(
        sql.EDIT, (edit.message_id, edit.owner, payload, destination, edit.available_at, edit.delay, sealed_for)
    )
    return EditResult(text_of(result))


def _content_of(edit: Edit, found: OwnedMessage, route: Route) -> tuple[str, str | None, str | None]:
    """Return the payload as JSON text, the destination to set, and the one for which the payload is encrypted."""
    topic = route.topic
    # An encrypted payload is bound to the keys and the destination of its message.
    fixed = {name: getattr(found, name) for name in _KEYS} | {"owner": edit.owner}
    options = {name: value for name, value in fixed.items() if getattr(topic, name) is None}
    keeps_destination = edit.destination is None and topic.destination is None
    if not keeps_destination:
        options["destination"] = edit.destination
    elif topic.encrypted:
        options["destination"] = found.destination
    draft = prepare(NewMessage(found.topic, edit.payload, **cast("MessageOptions", options)), route)
    for name in (*_KEYS, "owner"):
        if draft.options.get(name) != fixed[name]:
            raise ArgumentError("payload", f"gives message {found.id} another {name}; cancel it and enqueue a new one")
    destination = draft.options.get("destination")
    if destination is None and found.destination is not None and not keeps_destination:
        raise ArgumentError("payload", f"gives message {found.id} no destination; cancel it and enqueue a new one")
    return draft.payload, None if keeps_destination else destination, destination

"""The messages of an owner, for an application that shows them to a person and lets the person change one.

A message of another owner is treated as missing. The guards are in the SQL functions `find` and `edit`.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Any, ClassVar, Final, cast

from pydantic import AwareDatetime, BaseModel, ConfigDict
from pydantic_core import from_json

from pgoutbox.encryption import decrypted, is_sealed
from pgoutbox.enqueue.routes import Router
from pgoutbox.enqueue.validation import Route, prepare
from pgoutbox.errors import ArgumentError, ConfigurationError, StateError
from pgoutbox.message import State, Transient, upgraded
from pgoutbox.options import KEYS, MessageOptions, check_id, check_name, check_owner, check_whole, if_given
from pgoutbox.text import preview
from pgoutbox.topics import NewMessage, Topic, name_of

MAX_FOUND: Final = 1_000


class OwnedMessage(BaseModel):
    """A message as its owner may see it: see `Producer.find`.

    `destination` and `reason` are redacted. `reason` says why the message was skipped or failed. `edit` takes a new
    payload while the state is `pending` and `attempt_count` is 0. `payload` is the JSON value that was enqueued,
    decrypted if it was encrypted, and brought forward to the version of its topic in this outbox. `payload_version` is
    another one only if the topic is not defined, has no upgrade of this version, or is older. Both are None if payloads
    were not requested.
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
    payload_version: int | None = None


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
    names = None if topics is None else [check_name("topics", name_of(topic)) for topic in topics]
    return (
        check_owner("owner", owner),
        if_given(check_id, "message_id", message_id),
        names,
        [State(state).value for state in states],
        if_given(check_id, "before_id", before_id),
        check_whole("limit", limit, most=MAX_FOUND),
    )


def opened(text: str | bytes, router: Router) -> OwnedMessage:
    """Return a message of `sql.FIND`, decrypted and in the version of its topic's definition."""
    message = _decrypted(OwnedMessage.model_validate_json(text), router)
    topic = router.defined(message.topic)
    version = message.payload_version
    if topic is None or version is None or version not in topic.upgrade:
        return message
    try:
        payload = upgraded(message.payload, version, topic.version, topic.upgrade)
    except StateError as error:
        raise StateError(f"message {message.id}: {error}") from error.__cause__
    return message.model_copy(update={"payload": payload, "payload_version": topic.version})


def _decrypted(message: OwnedMessage, router: Router) -> OwnedMessage:
    """Return the message with its payload decrypted. The destination, which may be redacted, is not compared."""
    if not is_sealed(message.payload):
        return message
    try:
        sealed_for, payload = decrypted(message.payload, router.keyring)
    except Transient:
        raise ConfigurationError(
            f"the payload of message {message.id} is encrypted: add its key to PGOUTBOX_ENCRYPTION_KEYS"
        ) from None
    for name in ("topic", "coalesce_key", "ordering_key"):
        if getattr(sealed_for, name) != getattr(message, name):
            raise StateError(
                f"the payload of message {message.id} was encrypted for another message: its {name} differs"
            )
    return message.model_copy(update={"payload": from_json(payload)})


def content_of(
    found: OwnedMessage, owner: str, payload: object, destination: str | None, route: Route
) -> tuple[str, str | None, str | None, int]:
    """Return the payload as JSON text, the destination to set, that for which it is encrypted, and its version."""
    topic = route.topic
    # An encrypted payload is bound to the keys and the destination of its message.
    fixed = {name: getattr(found, name) for name in KEYS} | {"owner": owner}
    options = {name: value for name, value in fixed.items() if getattr(topic, name) is None}
    keeps_destination = destination is None and topic.destination is None
    if not keeps_destination:
        options["destination"] = destination
    elif topic.encrypted:
        options["destination"] = found.destination
    draft = prepare(NewMessage(found.topic, payload, **cast("MessageOptions", options)), route)
    for name, value in fixed.items():
        if draft.options.get(name) != value:
            raise ArgumentError("payload", f"gives message {found.id} another {name}; cancel it and enqueue a new one")
    destination = draft.options.get("destination")
    if destination is None and found.destination is not None and not keeps_destination:
        raise ArgumentError("payload", f"gives message {found.id} no destination; cancel it and enqueue a new one")
    version = draft.options.get("payload_version", 1)
    return draft.payload, None if keeps_destination else destination, destination, version

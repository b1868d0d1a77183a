"""The topics of an application as facts for operators, and new and corrected messages by their definitions.

The command line and the dashboard share it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from pydantic import BaseModel, JsonValue
from pydantic.errors import PydanticUserError
from typing_extensions import Unpack

from pgoutbox.clock import seconds_of
from pgoutbox.encryption import is_sealed
from pgoutbox.enqueue.payloads import fit
from pgoutbox.enqueue.validation import Draft
from pgoutbox.errors import ArgumentError, PgOutboxError, StateError, UnknownTopicError
from pgoutbox.handlers import OnUnknown
from pgoutbox.message import upgraded
from pgoutbox.operations import Correction, MessageResult, Operator, ShownMessage
from pgoutbox.options import KEYS, OPTIONS, MessageOptions, check_name
from pgoutbox.outbox import Outbox
from pgoutbox.retry import RetryPolicy
from pgoutbox.topics import Topic, name_of

# The options of a message that a topic can compute from the payload.
_COMPUTABLE: Final = ("destination", "owner", *KEYS, "fair_key")
_SHOWN_NAMES: Final = 10
_MAX_LEVELS: Final = 8
# An example of each format that pydantic checks.
_FORMATS: Final[Mapping[str, str]] = {
    "email": "ada@example.org",
    "uri": "https://example.org/",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "date": "2030-01-31",
    "date-time": "2030-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "duration": "PT1H",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
}


class TopicFacts(NamedTuple):
    """The settings of a topic.

    `present_name` is the name under which a topic with this former name is defined. `options` are the fixed options of
    its messages, with durations in seconds; `computed` names the computed ones. `handler` is async, sync or None.
    `max_size` is that of a batch, or of messages that share a transaction.
    """

    topic: str
    present_name: str | None
    is_defined: bool
    queue: str
    payload: str | None
    options: Mapping[str, object]
    computed: tuple[str, ...]
    max_attempts: int
    retry: str
    encrypted: bool
    redact: tuple[str, ...]
    mailing_list: str | None
    unreadable_timeout_seconds: float | None
    handler: str | None
    is_batch: bool
    max_size: int | None
    transactional: bool
    on_unknown: OnUnknown | None
    timeout_seconds: float | None

    @property
    def handler_text(self) -> str:
        """The kind of the handler in a few words."""
        if self.handler is None:
            return "none"
        words = [f"{self.handler} batch of {self.max_size}" if self.is_batch else self.handler]
        if self.transactional:
            words.append("transactional")
        if self.max_size is not None and not self.is_batch:
            words.append(f"up to {self.max_size} messages in a transaction")
        if self.on_unknown == "hold":
            words.append("on_unknown=hold")
        if self.timeout_seconds is not None:
            words.append(f"timeout {self.timeout_seconds:g} s")
        return ", ".join(words)


def describe_topics(outbox: Outbox) -> list[TopicFacts]:
    """Return the facts of all topics that the outbox defines or handles, by name."""
    return [_facts(outbox, name) for name in sorted({*outbox.topics, *outbox.handlers})]


def _facts(outbox: Outbox, name: str) -> TopicFacts:
    topic: Topic[Any] = outbox.topics.get(name) or Topic(name)
    handler = outbox.handlers.get(name)
    retry = topic.retry or (RetryPolicy() if handler is None else handler.retry)
    return TopicFacts(
        topic=name,
        present_name=None if topic.name == name else topic.name,
        is_defined=name in outbox.topics,
        queue=topic.queue or "default",
        payload=None if topic.payload is None else topic.payload.__name__,
        options=_fixed_options(topic),
        computed=tuple(field for field in _COMPUTABLE if callable(getattr(topic, field))),
        max_attempts=retry.max_attempts,
        retry=_retry_text(retry),
        encrypted=topic.encrypted,
        redact=topic.redact,
        mailing_list=topic.mailing_list,
        unreadable_timeout_seconds=None if topic.payload is None else seconds_of(topic.unreadable_timeout),
        handler=None if handler is None else "async" if handler.is_async else "sync",
        is_batch=handler is not None and handler.is_batch,
        max_size=None if handler is None else handler.max_size,
        transactional=handler is not None and handler.transactional,
        on_unknown=None if handler is None else handler.on_unknown,
        timeout_seconds=None if handler is None else handler.timeout_seconds,
    )


def names_of(outbox: Outbox, topic: str) -> tuple[str, ...]:
    """Return the present name and the former names of a topic that is given by one of them."""
    known = outbox.topics.get(topic)
    return (topic,) if known is None else (known.name, *known.aliases)


def _fixed_options(topic: Topic[Any]) -> dict[str, object]:
    given = {name: getattr(topic, name, None) for name in OPTIONS if name != "queue"}
    return {name: OPTIONS[name](name, value) for name, value in given.items() if not (value is None or callable(value))}


def _retry_text(retry: RetryPolicy) -> str:
    if retry.step_seconds:
        return f"after {', '.join(f'{seconds:g}' for seconds in retry.step_seconds)} s"
    return f"after {retry.base_seconds:g} s, doubling to {retry.cap_seconds:g} s"


# --- new messages -----------------------------------------------------------------------------------------------------


def find_topic(outbox: Outbox, name: str) -> Topic[Any]:
    """Return the definition of a topic, or an empty one for a topic that has only a handler.

    Raises `UnknownTopicError` with similar names for a topic that the outbox neither defines nor handles.
    """
    check_name("topic", name)
    if name in outbox.topics:
        return outbox.topics[name]
    if name in outbox.handlers:
        return Topic(name)
    known = sorted({*outbox.topics, *outbox.handlers})
    similar = difflib.get_close_matches(name, known)
    if similar:
        hint = f"did you mean {' or '.join(similar)}?"
    elif known:
        hint = f"its topics: {', '.join(known[:_SHOWN_NAMES])}{', ...' if len(known) > _SHOWN_NAMES else ''}"
    else:
        hint = "it has no topics"
    raise UnknownTopicError(f"topic {name!r} is neither defined nor handled by the application; {hint}")


def draft_message(outbox: Outbox, topic: str | Topic[Any], payload: object, **options: Unpack[MessageOptions]) -> Draft:
    """Check a message of an operator by its topic's definition, and complete it.

    Raises like `Producer.enqueue`. An error of the definition's functions becomes an `ArgumentError`.
    """
    try:
        return outbox.draft(topic, payload, **options)
    except PgOutboxError:
        raise
    except Exception as error:
        reason = f"the definition of topic {name_of(topic)!r} fails for it: {type(error).__name__}: {error}"
        raise ArgumentError("payload", reason) from error


def correct_message(
    operator: Operator, outbox: Outbox | None, message_id: int, correction: Correction
) -> MessageResult:
    """Correct a message like `Operator.correct`, after its topic's model has checked the payload.

    A payload of an earlier version is brought forward first, unless the correction names its version. Without an outbox
    no model checks it. Raises like `Operator.correct`, `MessageNotFoundError`, and `UnknownTopicError` for a topic that
    the outbox neither defines nor handles.
    """
    if "payload" in correction and outbox is not None and operator.reads_payloads():
        message, _ = operator.show_message(message_id, whole=True)
        if not is_sealed(message.payload):
            correction = _checked(message, find_topic(outbox, message.topic), correction)
    return operator.correct(message_id, correction)


def _checked(message: ShownMessage, topic: Topic[Any], correction: Correction) -> Correction:
    """Return the correction in the version that it names, or in that of the topic, if the topic's model accepts it."""
    own, patch = message.payload_version, correction["payload"]
    version = correction.get("payload_version", topic.version)
    try:
        if own == version:
            new = _merged(message.payload, patch)
        elif "payload_version" in correction:
            new = patch
        else:
            new = _merged(cast("JsonValue", upgraded(message.payload, own, version, topic.upgrade)), patch)
            correction = {**correction, "payload": new, "payload_version": version}
        if topic.payload is not None and version == topic.version:
            fit(topic.payload, new)
    except RecursionError:
        raise ArgumentError("payload", "is nested too deep") from None
    except StateError as error:
        hint = f"give payload_version {own} to change members of version {own}"
        raise ArgumentError("payload", f"message {message.id}: {error}; {hint}") from error.__cause__
    return correction


def _merged(value: JsonValue, patch: JsonValue) -> JsonValue:
    """Return what `pgoutbox._after_patch` makes of them."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(value) if isinstance(value, dict) else {}
    for name, change in patch.items():
        if change is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(merged.get(name), change)
    return merged


def open_options(topic: Topic[Any]) -> tuple[str, ...]:
    """Return the options of a new message that the definition leaves open, of those that operators give."""
    left = [option for option in (*_COMPUTABLE, "delay") if getattr(topic, option) is None]
    # A message with an ordering key has no coalesce key and no fair key.
    has_other = topic.coalesce_key or topic.fair_key
    excluded = {"ordering_key"} if has_other else {"coalesce_key", "fair_key"} if topic.ordering_key else set()
    return tuple(option for option in left if option not in excluded)


def example_payload(topic: Topic[Any]) -> JsonValue:
    """Return a payload with the members of the topic's model, as a start for the operator's own."""
    model = cast("type[BaseModel] | None", topic.payload)
    if model is None:
        return {}
    try:
        schema = model.model_json_schema()
    except PydanticUserError:  # A type of the model has no JSON schema.
        return {}
    return _example(schema, schema.get("$defs", {}), 0)


def _example(schema: Mapping[str, Any], definitions: Mapping[str, Any], level: int) -> JsonValue:
    if "$ref" in schema:
        schema = {**definitions.get(schema["$ref"].rpartition("/")[2], {}), **schema}
    given = [schema[name] for name in ("default", "const") if name in schema]
    chosen = [*(schema.get("examples") or ()), *given, *(schema.get("enum") or ())]
    if chosen:
        return cast("JsonValue", chosen[0])
    if level == _MAX_LEVELS:
        return None
    for name in ("anyOf", "oneOf", "allOf"):
        if schema.get(name):
            return _example(schema[name][0], definitions, level + 1)
    if schema.get("type") == "object":
        members: Mapping[str, Any] = schema.get("properties", {})
        return {name: _example(part, definitions, level + 1) for name, part in members.items()}
    if schema.get("type") == "array":
        return _examples(schema, definitions, level)
    return _scalar_example(schema)


def _scalar_example(schema: Mapping[str, Any]) -> JsonValue:
    match schema.get("type"):
        case "string":
            return _FORMATS.get(schema.get("format", ""), "x" * int(schema.get("minLength", 0)))
        case "integer" | "number":
            return _least(schema)
        case "boolean":
            return False
        case _:
            return None


def _examples(schema: Mapping[str, Any], definitions: Mapping[str, Any], level: int) -> list[JsonValue]:
    parts: Sequence[Mapping[str, Any]] = schema.get("prefixItems") or [schema.get("items") or {}]
    if "prefixItems" not in schema:
        parts = [*parts] * min(max(schema.get("minItems", 1), 1), 10)
    return [_example(part, definitions, level + 1) for part in parts]


def _least(schema: Mapping[str, Any]) -> float:
    """Return the least allowed number from 0 on, or the greatest allowed one below."""
    bounds: list[float] = [min(schema.get("maximum", 0), 0), schema.get("minimum", -math.inf)]
    if "exclusiveMinimum" in schema:
        bounds.append(schema["exclusiveMinimum"] + 1)
    return max(bounds)

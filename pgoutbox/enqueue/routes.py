"""Routes: what a message needs from the definitions and settings of its outbox."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property, lru_cache
from typing import Any, Protocol

from pgoutbox.encryption import Keyring, keyring_of
from pgoutbox.enqueue.payloads import Serializer
from pgoutbox.enqueue.validation import Bulk, Route, carrying, prepare
from pgoutbox.errors import ArgumentError, ConfigurationError, UnknownTopicError
from pgoutbox.handlers import Handler
from pgoutbox.message import P
from pgoutbox.observability.tracing import UNTRACED, Producing, producing
from pgoutbox.options import check_name
from pgoutbox.retry import DEFAULT_MAX_ATTEMPTS
from pgoutbox.settings import Settings
from pgoutbox.topics import NewMessage, Topic, name_of


class HasSettings(Protocol):
    """An outbox. It reads its settings when one is first needed."""

    @property
    def settings(self) -> Settings: ...


class Router:
    """Finds the routes of an outbox. It reads the topics and handlers that are registered later, too."""

    def __init__(
        self,
        topics: Mapping[str, Topic[Any]],
        handlers: Mapping[str, Handler],
        source: HasSettings,
        *,
        strict: bool,
    ) -> None:
        self._topics = topics
        self._handlers = handlers
        self._strict = strict
        self.source = source

    def route(self, topic: str | Topic[P], serializer: Serializer | None) -> Route:
        """Return the route of a topic. Raise `UnknownTopicError` for an unknown one if the outbox is strict."""
        definition = self._definition(topic)
        handler = self._handlers.get(definition.name)
        retry = definition.retry or (None if handler is None else handler.retry)
        # The default of the database needs no argument.
        max_attempts = None if retry is None or retry.max_attempts == DEFAULT_MAX_ATTEMPTS else retry.max_attempts
        keyring = self.keyring if definition.encrypted else None
        return Route(definition, max_attempts, self.source.settings.max_payload_bytes, serializer, keyring)

    def defined(self, name: str) -> Topic[Any] | None:
        """Return the definition that is registered under this name, or a former one."""
        return self._topics.get(name)

    def _definition(self, topic: str | Topic[P]) -> Topic[P]:
        """Return the topic's own definition, or the one registered under its name."""
        name = check_name("topic", name_of(topic))
        known = self._topics.get(name)
        if known is None and self._strict and name not in self._handlers:
            raise UnknownTopicError(f"topic {name!r} is neither defined nor handled by this outbox")
        if not isinstance(topic, Topic):
            return known or _undefined(name)
        if known is not None and known != topic:
            raise ConfigurationError(f"topic {name!r} has another definition in this outbox")
        return topic

    @cached_property
    def keyring(self) -> Keyring | None:
        """The keys of encrypted payloads, None if they are not set."""
        return keyring_of(self.source.settings.encryption_keys)

    def prepare_all(
        self, items: Iterable[NewMessage[Any]], serializer: Serializer | None, context: Mapping[str, str]
    ) -> Bulk:
        """Check the messages of a bulk, and give them the headers of a trace. An error names its item."""
        routes: dict[object, Route] = {}
        bulk = Bulk()
        for index, item in enumerate(items):
            try:
                if not isinstance(item, NewMessage):
                    raise TypeError(f"items[{index}] must be a NewMessage, not {type(item).__name__}")
                key = item.topic if type(item.topic) is str else id(item.topic)
                if key not in routes:
                    routes[key] = self.route(item.topic, serializer)
                draft = prepare(carrying(item, context), routes[key])
            except ArgumentError as error:
                raise ArgumentError(f"items[{index}].{error.field}", error.reason) from error.__cause__
            bulk.add(draft)
        return bulk

    def producing(self, topic: str | Topic[P] | None) -> AbstractContextManager[Producing]:
        """Open a span for enqueuing, if tracing is on."""
        if not self._traces:
            return UNTRACED
        return producing(topic and name_of(topic))

    @cached_property
    def _traces(self) -> bool:
        try:
            return self.source.settings.otel.traces
        except ConfigurationError:
            return False  # An invalid setting raises its error at its first use.


@lru_cache(maxsize=1_024)
def _undefined(name: str) -> Topic[Any]:
    return Topic(name)

"""The application's side of pgoutbox: topics, handlers and hooks, and the producers on the caller's connections."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias, TypeVar, overload

from typing_extensions import Unpack

from pgoutbox.clock import Duration, seconds_of
from pgoutbox.enqueue.adapters import AsyncConnection, SyncConnection
from pgoutbox.enqueue.payloads import Serializer
from pgoutbox.enqueue.producer import AsyncProducer, Producer, producer_on
from pgoutbox.enqueue.routes import Router
from pgoutbox.enqueue.validation import Draft, prepare
from pgoutbox.errors import ArgumentError, ConfigurationError
from pgoutbox.handlers import Context, Handler, HandlerOptions, Middleware, SyncContext
from pgoutbox.message import Failure, Message, Outcome, P
from pgoutbox.options import MessageOptions
from pgoutbox.retry import RetryPolicy
from pgoutbox.schedules import Every, Missed, Schedule, rule_of
from pgoutbox.settings import Settings, load_settings
from pgoutbox.signatures import is_async
from pgoutbox.text import MAX_NAME_LENGTH
from pgoutbox.topics import NewMessage, Topic
from pgoutbox.transports import Content, Transport

_FAILED: Final = ".failed"  # The end of a hook's topic; _enqueue_failure() appends it too.

Result: TypeAlias = Outcome | Content | None
M = TypeVar("M", bound=Middleware)
F = TypeVar("F", bound="Callable[..., object]")
ResultT = TypeVar("ResultT", bound=Result)
ResultsT = TypeVar("ResultsT", bound="Sequence[Result] | None")


class Outbox:
    """The topics and handlers of one application. It enqueues messages for them.

    Without `settings` the environment is read when a setting is first needed, so that importing the application needs
    no settings. `transports` send the contents that handlers return. The transports of SMTP, Apprise and the brokers
    are created automatically when their settings name a server, and `https` when the extra `webhook` is installed. With
    `strict` a topic that is neither defined nor handled raises `UnknownTopicError`.

    `databases` is for one fleet with many databases. It is a sync function that returns the names and the DSNs of all
    databases, such as `{"acme": "postgresql://app@db/acme"}`. It may query a table of tenants, because it is called
    again while a worker runs. It has the rules of PGOUTBOX_DSNS, and replaces it.

        outbox = Outbox()

        @outbox.handler("mail.welcome")
        async def welcome(message: Message, ctx: Context) -> Email: ...

        with psycopg.connect(dsn) as connection:
            outbox.on(connection).enqueue("mail.welcome", {"user_id": 7})
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        transports: Sequence[Transport] = (),
        strict: bool = False,
        databases: Callable[[], Mapping[str, str]] | None = None,
    ) -> None:
        if settings is not None and not isinstance(settings, Settings):
            # The value is not shown: it may be a DSN with a password.
            raise ConfigurationError(
                f"settings: must be Settings, not {type(settings).__name__}; "
                "set PGOUTBOX_DSN, or pass Outbox(Settings(dsn=...))"
            )
        if isinstance(transports, (str, Mapping)) or not isinstance(transports, Iterable):
            raise ConfigurationError(f"transports: must be a list of transports, not {type(transports).__name__}")
        if not isinstance(strict, bool):
            raise ConfigurationError(f"strict: must be True or False, got {strict!r}")
        if databases is not None and (is_async(databases) or not callable(databases)):
            # The value is not shown: it may be a mapping with DSNs.
            raise ConfigurationError("databases: must be a sync function that returns names and DSNs")
        self._settings = settings
        self._databases = databases
        self._topics: dict[str, Topic[Any]] = {}
        self._handlers: dict[str, Handler] = {}
        self._router = Router(self._topics, self._handlers, self, strict=strict)
        self._hooks: dict[str, str] = {}
        self._schedules: dict[str, Schedule] = {}
        self._middlewares: list[Middleware] = []
        self._transports: dict[str, Transport] = {}
        for index, transport in enumerate(transports):
            if isinstance(transport, type) or not hasattr(transport, "schemes") or not hasattr(transport, "send"):
                raise ConfigurationError(
                    f"transports[{index}]: must be an object with `schemes` and `send`, got {transport!r}"
                )
            for scheme in transport.schemes:
                if self._transports.setdefault(scheme, transport) is not transport:
                    raise ConfigurationError(f"transports: two serve the scheme {scheme!r}")

    @property
    def settings(self) -> Settings:
        """The given settings, or else those of the environment, read once."""
        if self._settings is None:
            self._settings = load_settings()
        return self._settings

    # --- registry -----------------------------------------------------------------------------------------------------

    @property
    def topics(self) -> Mapping[str, Topic[Any]]:
        """The defined topics by name, and by their former names."""
        return MappingProxyType(self._topics)

    @property
    def transports(self) -> Mapping[str, Transport]:
        """The given transports by scheme. A worker adds those whose servers the settings name, and `https`."""
        return MappingProxyType(self._transports)

    @property
    def databases(self) -> Callable[[], Mapping[str, str]] | None:
        """The given function that returns the names and the DSNs of all databases."""
        return self._databases

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The registered handlers by topic."""
        return MappingProxyType(self._handlers)

    @property
    def hooks(self) -> Mapping[str, str]:
        """The topics with a hook for failed messages, each with the topic of the hook: see `on_failed`."""
        return MappingProxyType(self._hooks)

    @property
    def schedules(self) -> Mapping[str, Schedule]:
        """The registered schedules by name."""
        return MappingProxyType(self._schedules)

    @property
    def default_queues(self) -> Sequence[str]:
        """The queues that the command `worker` serves if it names none."""
        return ("default",)

    def define(self, topic: Topic[P]) -> Topic[P]:
        """Register the definition and return it. Call sites can then use its name alone.

        Define each name once, and before the topic's handler, or this raises `ConfigurationError`. Defining the same
        object again is fine.
        """
        names = (topic.name, *topic.aliases)
        for name in names:
            known = self._topics.get(name)
            if known is not None and known is not topic:
                raise ConfigurationError(f"topic {name!r} is already defined")
            if known is None and name in self._handlers:
                raise ConfigurationError(f"topic {name!r} has a handler already: define the topic before it")
            if known is None and name in self._hooks:
                raise ConfigurationError(f"topic {name!r} has a hook already: define the topic before it")
        self._topics.update(dict.fromkeys(names, topic))
        return topic

    @property
    def middlewares(self) -> Sequence[Middleware]:
        """The registered middlewares, the outermost one first."""
        return tuple(self._middlewares)

    def middleware(self, function: M) -> M:
        """Register an async function that runs around each call of a handler; the first one is the outermost.

        It gets the messages (several for a batch handler) and `call_next`, and returns an outcome for each message, in
        their order. Context variables that it sets are set in the handler, also in a thread. The exception behind an
        outcome is its `__cause__`.

            @outbox.middleware
            async def report_errors(messages, call_next):
                outcomes = await call_next()
                for outcome in outcomes:
                    if isinstance(outcome, Exception) and outcome.__cause__ is not None:
                        sentry_sdk.capture_exception(outcome.__cause__)
                return outcomes

        An exception before `call_next` ends the attempts as if the handler had raised it. After `call_next` it is
        logged, and the outcomes stand: the messages may have been sent. The outcome of a transactional handler that has
        committed cannot be changed.
        """
        if not is_async(function):
            raise ConfigurationError(f"middleware {function!r}: must be an async function")
        self._middlewares.append(function)
        return function

    def handler(
        self,
        topic: str | Topic[P],
        *,
        max_size: int | None = None,
        **options: Unpack[HandlerOptions],
    ) -> HandlerDecorator[P]:
        """Register the decorated function as the topic's handler, and return it unchanged.

        An `async def` gets `(Message, Context)` on the worker's event loop, a `def` gets `(Message, SyncContext)` in a
        thread. It returns nothing (sent), an outcome, or a content to deliver. It runs at least once per message; a
        retry gets the same `message.idempotency_key`. With `max_size` (1 to 64) up to so many messages of one claim
        share a transaction: the handler runs for one after the other, each in a savepoint, and they commit together,
        without the writes of messages that are not sent.

        Raises `ConfigurationError` for a second handler of a topic, for a function of another signature, for a
        generator, and for annotations that contradict what a worker passes.

            @outbox.handler(activation, retry=RetryPolicy.steps(60, 300, 900, 3600))
            async def activate(message: Message[Activation], ctx: Context) -> Email: ...
        """
        return self._decorator("handler", topic, options, max_size=max_size)

    def batch_handler(
        self,
        topic: str | Topic[P],
        *,
        max_size: int = 100,
        **options: Unpack[HandlerOptions],
    ) -> BatchHandlerDecorator[P]:
        """Register the decorated function as the topic's handler of up to `max_size` (1 to 5000) messages at once.

        It gets a list of messages and a list of contexts. It returns None (all sent) or one result for each message, in
        their order. If it raises, the exception is the outcome of every message of the batch; an exception that ends
        messages, such as `Permanent`, is first tried again with each half.

        The contexts of a `transactional` batch have one `connection`. The writes of a call commit together with the
        completion of all its messages, or they are rolled back. If some messages are not sent, the handler runs again
        for the others. Everything else is as in `handler`.

            @outbox.batch_handler("search.index", max_size=500)
            async def index(messages: Sequence[Message], contexts: Sequence[Context]) -> None: ...
        """
        return self._decorator("batch_handler", topic, options, max_size=max_size, is_batch=True)

    def on_failed(self, topic: str | Topic[Any], **options: Unpack[HandlerOptions]) -> HandlerDecorator[Failure]:
        """Register the decorated function as the hook of a topic: it runs when a message of the topic ends `failed`.

        The hook is a handler of its own topic, `<topic>.failed`. The transaction that ends a message as failed enqueues
        one message of that topic, in the same queue. So the hook runs at least once for each failure that was
        committed, with its own retries, and never for another. A message that is redriven and fails again has another
        failure. A hook that fails has no hook itself: its message ends `failed` like any other.

        Register the hook in the outbox that has the topic's handler. Raises `ConfigurationError` for a second hook of a
        topic, for the hook of a hook, and for a topic of more than 56 characters.

            @outbox.on_failed("mail.welcome", transactional=True)
            async def mark_address(message: Message[Failure], ctx: Context) -> None:
                await ctx.connection.execute(
                    "UPDATE member SET bounced_at = now() WHERE id = %s", (message.payload.payload["member_id"],)
                )
        """
        _require_topic("on_failed", topic)

        def register(function: F) -> F:
            definition = self.define(topic) if isinstance(topic, Topic) else self._topics.get(topic) or Topic(topic)
            hook_topic = self._topic_of_hook(definition)
            self._decorator("on_failed", hook_topic, options)(function)
            self._hooks[definition.name] = hook_topic.name
            self._hooks.update(zip(definition.aliases, hook_topic.aliases, strict=True))
            return function

        return register

    def schedule(
        self,
        rule: str | Every,
        *,
        topic: str | Topic[P],
        payload: P,
        name: str | None = None,
        timezone: str = "UTC",
        missed: Missed = "latest",
        jitter: Duration = 0,
        until: datetime | None = None,
        **options: Unpack[MessageOptions],
    ) -> Callable[[F], F]:
        """Enqueue a message of the topic again and again: at the times of a cron rule in the time zone, or of `Every`.

        Workers with this outbox enqueue it, each time once, however many there are. They need the extra `schedules`. A
        message has the headers `schedule` and `scheduled-for`, and a dedupe key of its time. `missed` says what becomes
        of times that passed while no worker ran: the latest one is enqueued, or all (the last 100), or none. `jitter`
        delays the messages by a part that depends on the name, so that not all schedules begin at once. `until` is the
        last time. The name is that of the topic if none is given. A schedule that leaves the code rests.

        It can stand above the handler. Raises `ConfigurationError` for a mistake, and for an encrypted topic.

            @outbox.schedule("0 7 * * mon-fri", topic="digest", payload={"days": 1}, timezone="Europe/Berlin")
            @outbox.handler("digest")
            async def digest(message: Message, ctx: Context) -> Email: ...
        """
        _require_topic("schedule", topic)
        named = name if name is not None else topic.name if isinstance(topic, Topic) else topic
        if named in self._schedules:
            raise ConfigurationError(f"schedule {named!r} is already defined; give the second one a name of its own")
        try:
            self._schedules[named] = Schedule(
                name=named,
                rule=rule_of(rule, timezone),
                topic=topic,
                payload=payload,
                missed=missed,
                jitter=jitter,
                until=until,
                options=options,
            )
        except ArgumentError as error:
            raise ConfigurationError(f"schedule {named!r}: {error}") from None
        return lambda function: function

    def _topic_of_hook(self, failing: Topic[Any]) -> Topic[Failure]:
        """Return the topic of the messages for a new hook. Their payload contains that of the failed message."""
        name = failing.name
        if name in self._hooks:
            raise ConfigurationError(f"on_failed: topic {name!r} has a hook already")
        if name in self._hooks.values():
            raise ConfigurationError(f"on_failed: topic {name!r} is that of a hook, which can have no hook itself")
        if name + _FAILED in self._hooks:
            raise ConfigurationError(f"on_failed: topic {name + _FAILED!r} has a hook, which can have no hook itself")
        if len(name + _FAILED) > MAX_NAME_LENGTH:
            raise ConfigurationError(
                f"on_failed: topic {name!r}: its hook's topic {name + _FAILED!r} would have more than "
                f"{MAX_NAME_LENGTH} characters; shorten the topic to {MAX_NAME_LENGTH - len(_FAILED)}"
            )
        aliases = tuple(alias + _FAILED for alias in failing.aliases)
        return Topic(name + _FAILED, payload=Failure, redact=failing.redact, aliases=aliases)

    def _decorator(
        self,
        name: str,
        topic: str | Topic[Any],
        options: HandlerOptions,
        *,
        max_size: int | None = None,
        is_batch: bool = False,
    ) -> Callable[[F], F]:
        _require_topic(name, topic)
        if unknown := options.keys() - HandlerOptions.__annotations__.keys():
            raise TypeError(f"{name}: unexpected keyword argument {min(unknown)!r}")
        others: dict[str, Any] = {**options}
        retry, timeout = others.pop("retry", None), others.pop("timeout", None)

        def register(function: F) -> F:
            definition = self.define(topic) if isinstance(topic, Topic) else self._topics.get(topic) or Topic(topic)
            topic_name = definition.name
            if definition.retry is not None and retry is not None:
                raise ConfigurationError(
                    f"handler of topic {topic_name!r}: retry: belongs to the definition of the topic"
                )
            handler = Handler(
                topic_name,
                function,
                retry=retry or definition.retry or RetryPolicy(),
                timeout_seconds=timeout.total_seconds() if isinstance(timeout, timedelta) else timeout,
                payload=definition.payload,
                version=definition.version,
                upgrade=definition.upgrade,
                redact=definition.redact,
                mailing_list=definition.mailing_list,
                unreadable_timeout_seconds=seconds_of(definition.unreadable_timeout),
                max_size=max_size,
                is_batch=is_batch,
                **others,
            )
            for known_as in (topic_name, *definition.aliases):
                if known_as in self._handlers:
                    raise ConfigurationError(f"topic {known_as!r} has a handler already")
                self._handlers[known_as] = replace(handler, topic=known_as)
            return function

        return register

    # --- enqueue ------------------------------------------------------------------------------------------------------

    @overload
    def on(self, connection: SyncConnection) -> Producer: ...
    @overload
    def on(self, connection: AsyncConnection) -> AsyncProducer: ...
    def on(self, connection: SyncConnection | AsyncConnection) -> Producer | AsyncProducer:
        """Return a producer, which writes and changes messages in the transaction of the caller's connection.

        On a psycopg `Connection`, SQLAlchemy's `Connection` or `Session` (on psycopg), or Django's `connection`, it is
        a `Producer`. On a psycopg `AsyncConnection`, SQLAlchemy's `AsyncConnection` or `AsyncSession` (on psycopg or
        asyncpg), or an asyncpg `Connection`, it is an `AsyncProducer`, whose calls are awaited. Sends no statement.
        Raises `TypeError` for another kind of connection.

            outbox.on(connection).enqueue("mail.welcome", {"user_id": 7})
            await outbox.on(async_connection).enqueue("mail.welcome", {"user_id": 7})
        """
        return producer_on(connection, self._router)

    def draft(
        self,
        topic: str | Topic[P],
        payload: P,
        *,
        serializer: Serializer | None = None,
        **options: Unpack[MessageOptions],
    ) -> Draft:
        """Check a message like `Producer.enqueue`, and complete it from its topic's definition, without a connection.

        The result is for `Operator.enqueue`. Raises like `enqueue`.

            operator.enqueue(outbox.draft("mail.welcome", {"user_id": 7}))
        """
        return prepare(NewMessage(topic, payload, **options), self._router.route(topic, serializer))


def _require_topic(name: str, topic: object) -> None:
    """Refuse a decorator without a topic, with an example."""
    if not isinstance(topic, (str, Topic)):
        function_name = getattr(topic, "__qualname__", None) if callable(topic) else None
        got = repr(topic) if function_name is None else f"the function {function_name}"
        raise ConfigurationError(f'{name}: needs a topic, as in @outbox.{name}("mail.welcome"); got {got}')


class HandlerDecorator(Protocol[P]):
    """The decorator that `Outbox.handler` returns."""

    @overload
    def __call__(
        self, function: Callable[[Message[P], Context], Coroutine[object, object, ResultT]], /
    ) -> Callable[[Message[P], Context], Coroutine[object, object, ResultT]]: ...
    @overload
    def __call__(
        self, function: Callable[[Message[P], SyncContext], ResultT], /
    ) -> Callable[[Message[P], SyncContext], ResultT]: ...


class BatchHandlerDecorator(Protocol[P]):
    """The decorator that `Outbox.batch_handler` returns."""

    @overload
    def __call__(
        self, function: Callable[[Sequence[Message[P]], Sequence[Context]], Coroutine[object, object, ResultsT]], /
    ) -> Callable[[Sequence[Message[P]], Sequence[Context]], Coroutine[object, object, ResultsT]]: ...
    @overload
    def __call__(
        self, function: Callable[[Sequence[Message[P]], Sequence[SyncContext]], ResultsT], /
    ) -> Callable[[Sequence[Message[P]], Sequence[SyncContext]], ResultsT]: ...

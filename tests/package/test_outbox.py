"""Tests the registry: topics, handlers and transports, and the errors that the application sees at its start."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from pgoutbox import (
    ConfigurationError,
    Context,
    Email,
    Message,
    MissingExtraError,
    Outbox,
    RetryPolicy,
    Sent,
    SyncContext,
    Topic,
)
from pgoutbox.settings import Settings, load_settings
from pgoutbox.transports import SmtpTransport, WebhookTransport
from pgoutbox.transports.registry import complete
from pgoutbox.webhooks import make_secret
from tests.support.settings import settings_with

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgoutbox.message import Outcome
    from pgoutbox.transports import Content


class Order(BaseModel):
    number: int


@pytest.fixture
def outbox() -> Outbox:
    return Outbox()


async def handle(message: Message, context: Context) -> None: ...


class Nowhere:
    """A transport that sends nothing."""

    def __init__(self, *schemes: str) -> None:
        self.schemes = schemes

    async def send(self, message: Message[object], content: Content) -> Outcome:
        return Sent()

    async def aclose(self) -> None: ...


def test_the_settings_are_read_from_the_environment_at_their_first_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outbox = Outbox()
    monkeypatch.setenv("PGOUTBOX_BATCH_SIZE", "17")
    assert outbox.settings.batch_size == 17
    monkeypatch.setenv("PGOUTBOX_BATCH_SIZE", "18")
    assert outbox.settings.batch_size == 17
    given = load_settings(batch_size=3)
    assert Outbox(given).settings is given


def test_an_invalid_setting_is_reported_at_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGOUTBOX_BATCH_SIZE", "0")
    outbox = Outbox()
    with pytest.raises(ConfigurationError, match="PGOUTBOX_BATCH_SIZE='0'"):
        outbox.settings  # noqa: B018 - the look at it is the test


def test_a_handler_is_registered_and_returned_unchanged(outbox: Outbox) -> None:
    retry = RetryPolicy.steps(1, 2)
    returned = outbox.handler(
        "mail", retry=retry, timeout=5, on_unknown="hold", transactional=True, permanent=[ValueError]
    )(handle)
    assert returned is handle
    handler = outbox.handlers["mail"]
    assert handler.function is handle
    assert handler.is_async
    assert (handler.retry, handler.timeout_seconds, handler.on_unknown) == (retry, 5, "hold")
    assert handler.transactional
    assert handler.permanent == (ValueError,)
    assert handler.max_size is None
    assert handler.payload is None


def test_a_sync_handler_is_recognised(outbox: Outbox) -> None:
    @outbox.handler("mail")
    def send(message: Message, context: SyncContext) -> Email:
        return Email(to="a@example.org", subject="x", text="y")

    assert not outbox.handlers["mail"].is_async


def test_a_batch_handler_is_registered_with_its_size(outbox: Outbox) -> None:
    @outbox.batch_handler("search.index", max_size=500, retry=RetryPolicy(max_attempts=2))
    async def index(messages: Sequence[Message], contexts: Sequence[Context]) -> None: ...

    assert outbox.handlers["search.index"].function is index
    assert outbox.handlers["search.index"].max_size == 500
    assert outbox.handlers["search.index"].retry.max_attempts == 2


def test_a_handler_of_a_defined_topic_has_its_model_and_policy(outbox: Outbox) -> None:
    topic = Topic("order", payload=Order, retry=RetryPolicy(max_attempts=3))

    @outbox.handler(topic)
    async def ship(message: Message[Order], context: Context) -> None: ...

    handler = outbox.handlers["order"]
    assert handler.retry.max_attempts == 3
    assert handler.payload is Order
    assert outbox.topics["order"] is topic


def test_a_handler_can_name_its_defined_topic_by_text(outbox: Outbox) -> None:
    outbox.define(Topic("order", payload=Order, retry=RetryPolicy(max_attempts=3)))
    outbox.handler("order")(handle)
    assert outbox.handlers["order"].retry.max_attempts == 3
    assert outbox.handlers["order"].payload is Order


def test_a_second_handler_of_a_topic_is_refused(outbox: Outbox) -> None:
    outbox.handler("mail")(handle)
    for again in (outbox.handler("mail"), outbox.handler(Topic("mail"))):
        with pytest.raises(ConfigurationError, match="topic 'mail' has a handler already"):
            again(handle)
    with pytest.raises(ConfigurationError, match="topic 'mail' has a handler already"):
        outbox.batch_handler("mail")(lambda messages, contexts: None)


def test_a_handler_must_not_have_a_policy_if_the_topic_has_one(outbox: Outbox) -> None:
    topic = outbox.define(Topic("mail", retry=RetryPolicy()))
    with pytest.raises(ConfigurationError, match="handler of topic 'mail': retry: belongs to the definition"):
        outbox.handler(topic, retry=RetryPolicy())(handle)
    assert outbox.handlers == {}


@pytest.mark.parametrize(
    ("topic", "options", "problem"),
    [
        ("Mail", {}, "topic 'Mail': name: must be 1 to 63"),
        ("mail", {"timeout": 0}, "timeout=0: must be positive"),
        ("mail", {"timeout": float("nan")}, "timeout=nan: must be positive"),
        ("mail", {"timeout": float("inf")}, "timeout=inf: must be positive"),
        ("mail", {"timeout": timedelta(seconds=-1)}, "must be positive"),
        ("mail", {"timeout": "5"}, "timeout='5': must be positive, in seconds or as a timedelta"),
        ("mail", {"on_unknown": "drop"}, "on_unknown='drop': must be 'retry' or 'hold'"),
        ("mail", {"retry": 3}, "retry=3: must be a RetryPolicy"),
        ("mail", {"permanent": ValueError}, "permanent=<class 'ValueError'>: must be a list of exception classes"),
        ("mail", {"permanent": ["ValueError"]}, "must be a list of exception classes"),
    ],
)
def test_an_invalid_registration_is_refused_and_leaves_nothing_behind(
    outbox: Outbox, topic: str, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        outbox.handler(topic, **options)(handle)
    assert outbox.handlers == {}


@pytest.mark.parametrize("decorator", ["handler", "batch_handler", "on_failed"])
@pytest.mark.parametrize("option", ["is_batch", "payload", "timeuot"])
def test_an_unknown_option_of_a_handler_is_refused_by_its_name(outbox: Outbox, decorator: str, option: str) -> None:
    with pytest.raises(TypeError, match=f"^{decorator}: unexpected keyword argument '{option}'$"):
        getattr(outbox, decorator)("mail", **{option: True})(handle)
    assert outbox.handlers == {}


@pytest.mark.parametrize("decorator", ["handler", "batch_handler"])
def test_a_decorator_without_parentheses_is_refused_with_the_correct_form(outbox: Outbox, decorator: str) -> None:
    register: Any = getattr(outbox, decorator)
    with pytest.raises(ConfigurationError) as refusal:
        register(handle)
    assert str(refusal.value) == (
        f'{decorator}: needs a topic, as in @outbox.{decorator}("mail.welcome"); got the function handle'
    )
    with pytest.raises(ConfigurationError, match=f"{decorator}: needs a topic, .*; got 7"):
        register(7)


@pytest.mark.parametrize(
    ("arguments", "options", "problem"),
    [
        (("postgresql://app:s3cret@localhost/app",), {}, r"settings: must be Settings, not str; .*Settings\(dsn="),
        ((), {"transports": Nowhere("sms")}, "transports: must be a list of transports, not Nowhere"),
        ((), {"transports": {"sms": Nowhere("sms")}}, "transports: must be a list of transports, not dict"),
        ((), {"transports": [Nowhere("sms"), "tel"]}, r"transports\[1\]: must be an object with .*, got 'tel'"),
        ((), {"transports": [Nowhere]}, r"transports\[0\]: must be an object with"),
        ((), {"strict": "yes"}, "strict: must be True or False, got 'yes'"),
    ],
)
def test_an_outbox_refuses_arguments_of_another_type(
    arguments: tuple[Any, ...], options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem) as refusal:
        Outbox(*arguments, **options)
    assert "s3cret" not in str(refusal.value)


def test_a_topic_is_defined_once_and_before_its_handler(outbox: Outbox) -> None:
    topic = outbox.define(Topic("order", payload=Order))
    assert outbox.define(topic) is topic
    with pytest.raises(ConfigurationError, match="topic 'order' is already defined"):
        outbox.define(Topic("order", payload=Order))
    outbox.handler("mail")(handle)
    with pytest.raises(ConfigurationError, match="topic 'mail' has a handler already: define the topic before it"):
        outbox.define(Topic("mail", queue="bulk"))
    assert list(outbox.topics) == ["order"]


def test_the_registries_are_read_only(outbox: Outbox) -> None:
    for registry in (outbox.topics, outbox.handlers, outbox.transports):
        with pytest.raises(TypeError):
            registry["mail"] = None  # type: ignore[index]


def test_two_transports_of_one_scheme_are_refused() -> None:
    both = Nowhere("sms", "tel")
    assert complete(Outbox(transports=[both]).transports, load_settings()).items() >= {"sms": both, "tel": both}.items()
    with pytest.raises(ConfigurationError, match="transports: two serve the scheme 'tel'"):
        Outbox(transports=[both, Nowhere("tel")])


def test_mailto_is_served_by_smtp_if_the_settings_name_a_server(outbox: Outbox) -> None:
    settings: Settings = settings_with(smtp_host="mx.test")
    assert "mailto" not in complete(outbox.transports, load_settings())
    assert isinstance(complete(outbox.transports, settings)["mailto"], SmtpTransport)
    own = Nowhere("mailto")
    assert complete(Outbox(transports=[own]).transports, settings)["mailto"] is own


def test_https_is_served_by_webhooks_and_http_if_the_settings_allow_it(outbox: Outbox) -> None:
    assert complete(outbox.transports, load_settings()).keys() == {"https"}
    served = complete(outbox.transports, settings_with(webhook_allow_http=True))
    assert served.keys() == {"https", "http"}
    assert served["https"] is served["http"]
    assert isinstance(served["https"], WebhookTransport)
    own = Nowhere("https")
    assert complete(Outbox(transports=[own]).transports, settings_with(webhook_allow_http=True)) == {"https": own}


def test_a_missing_webhook_extra_is_reported_only_if_secrets_are_set(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "h11", None)
    assert complete(outbox.transports, load_settings()) == {}
    with pytest.raises(MissingExtraError, match=r"pip install 'pgoutbox\[webhook\]'"):
        complete(outbox.transports, settings_with(webhook_secrets=make_secret()))

"""Tests that the programs in examples/ do what they promise: run as commands, delivered by a worker process."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
import redis

from examples.mail_provider import MailProvider
from examples.sms import Sms, SmsTransport
from pgoutbox import Email, Permanent, Sent, Unavailable
from pgoutbox.message import SendFailure
from pgoutbox.webhooks import verify
from tests.support import webhook_server as http
from tests.support.brokers import HOST, redis_server
from tests.support.example_shell import ROOT, mails, states
from tests.support.ports import free_port
from tests.support.sends import outgoing
from tests.support.settings import settings_with
from tests.support.smtp_server import parsed
from tests.support.webhook_server import webhook_server

if TYPE_CHECKING:
    from pgoutbox.message import Outcome
    from pgoutbox.transports import Content, Transport
    from tests.conftest import Server
    from tests.support.example_shell import Shell
    from tests.support.smtp_server import Inbox

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"


async def test_a_new_member_is_welcomed_once_and_a_member_who_left_is_not(shell: Shell, inbox: Inbox, dsn: str) -> None:
    assert await shell.example("sign_up") == [
        "ada@example.org joined",
        "bob@example.org joined",
        "ada@example.org was here before",
        "bob@example.org left, the welcome is cancelled",
        "cid@example.org changed their mind",
    ]
    await shell.deliver("sign_up")
    assert [recipient for recipient, _ in mails(inbox)] == ["ada@example.org"]
    assert states(dsn) == {"sent": 1, "cancelled": 1}


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_the_customer_is_told_of_the_last_change(shell: Shell, inbox: Inbox, dsn: str, driver: str) -> None:
    assert [line.partition(":")[0] for line in await shell.example("orders", driver)] == [
        "quantity 1",
        "quantity 2",
        "quantity 3",
    ]
    await shell.deliver("orders")
    ((recipient, text),) = mails(inbox)
    assert recipient == "ada@example.org"
    assert text == "You will get 3 of them."
    assert states(dsn) == {"sent": 1, "skipped": 2}


async def test_a_subscriber_gets_a_webhook_that_its_secret_verifies(shell: Shell, dsn: str) -> None:
    async with webhook_server() as server:
        shell.environment.update(
            PGOUTBOX_WEBHOOK_ALLOW_HTTP="true",
            PGOUTBOX_WEBHOOK_ALLOWED_NETWORKS="127.0.0.0/8",
            PGOUTBOX_WEBHOOK_PORTS=str(server.port),
        )
        subscribers, secret = await shell.example("webhooks", server.url(scheme="http"))
        await shell.deliver("webhooks")
    assert subscribers == "subscribers 1"
    (received,) = server.received
    assert json.loads(received.body) == {"type": "order.paid", "data": {"order_id": 7}}
    assert verify(received.body, received.headers, secret.removeprefix("secret "))
    assert states(dsn) == {"sent": 1}


async def test_the_bookings_of_an_account_arrive_in_order(shell: Shell, dsn: str) -> None:
    with redis_server() as broker:
        shell.environment["PGOUTBOX_REDIS_URL"] = f"redis://{HOST}:{broker.port}/0"
        assert await shell.example("bookings") == ["pending (5,)"]
        await shell.deliver("bookings")
        with redis.Redis(HOST, broker.port) as client:
            events = [json.loads(fields[b"data"]) for _, fields in client.xrange("bookings")]
    amounts = {name: [e["data"]["amount"] for e in events if e["subject"] == name] for name in ("ada", "bob")}
    assert amounts == {"ada": [100, -30, 5], "bob": [20, 1]}
    assert states(dsn) == {"sent": 5}


async def test_every_reader_gets_the_newsletter_which_is_stored_once(shell: Shell, dsn: str, inbox: Inbox) -> None:
    assert await shell.example("newsletter", "12") == ["messages 12", "contents 1"]
    # A drain waits for the tokens of the rate.
    await shell.pgoutbox("worker", "--app", "examples.newsletter:outbox", "--drain", "--queue", "bulk")
    got = mails(inbox)
    assert {recipient for recipient, _ in got} == {f"reader{n}@example.org" for n in range(12)}
    assert len({text for _, text in got}) == 1
    assert states(dsn) == {"sent": 12}


async def test_a_text_message_reaches_each_number_once(shell: Shell, dsn: str) -> None:
    async with webhook_server(http.answer(202)) as gateway:
        shell.environment.update(SMS_GATEWAY_URL=gateway.url("/v1/messages", scheme="http"), SMS_GATEWAY_KEY="k3y")
        assert await shell.example("sms", "+491701234567", "+491707654321") == ["enqueued 2"]
        await shell.deliver("sms")
    bodies = [json.loads(received.body) for received in gateway.received]
    assert sorted(bodies, key=lambda body: body["to"]) == [
        {"to": "+491701234567", "text": "See you at 18:30."},
        {"to": "+491707654321", "text": "See you at 18:30."},
    ]
    assert {received.headers["authorization"] for received in gateway.received} == {"Bearer k3y"}
    assert len({received.headers["idempotency-key"] for received in gateway.received}) == 2
    assert states(dsn) == {"sent": 2}


async def test_a_gateway_that_is_not_configured_holds_text_messages_back(shell: Shell, dsn: str) -> None:
    await shell.example("sms", "+491701234567")
    await shell.deliver("sms")
    assert states(dsn) == {"pending": 1}
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT last_error FROM pgoutbox.message").fetchone() == (
            "circuit breaker sms: is open: SMS_GATEWAY_URL is not set",
        )


async def test_an_email_reaches_its_recipient_by_the_providers_api(shell: Shell, dsn: str) -> None:
    for name in [name for name in shell.environment if name.startswith("PGOUTBOX_SMTP")]:
        del shell.environment[name]
    async with webhook_server(http.answer(200)) as api:
        shell.environment.update(MAIL_PROVIDER_URL=api.url("/v1", scheme="http"), MAIL_PROVIDER_KEY="k3y")
        assert await shell.example("mail_provider", "ada@example.org") == ["enqueued 1"]
        await shell.deliver("mail_provider")
        assert await MailProvider(settings_with(), api.url("/v1", scheme="http"), "k3y").check() == Sent()
    sent, checked = api.received
    body = json.loads(sent.body)
    mail = parsed(base64.b64decode(body.pop("mime")))
    assert body == {"sender": "shop@club.test", "recipients": ["ada@example.org"]}
    assert (mail["To"], mail["Subject"]) == ("ada@example.org", "Your receipt")
    assert (sent.target, sent.headers["authorization"]) == ("/v1/send", "Bearer k3y")
    assert f"<{sent.headers['idempotency-key']}@club.test>" == mail["Message-ID"]
    assert checked.target == "/v1/account"
    assert states(dsn) == {"sent": 1}


async def test_the_redirect_holds_for_the_providers_api(shell: Shell) -> None:
    shell.environment["PGOUTBOX_REDIRECT_TO"] = "tester@example.org"
    async with webhook_server(http.answer(200)) as api:
        shell.environment.update(MAIL_PROVIDER_URL=api.url("/v1", scheme="http"), MAIL_PROVIDER_KEY="k3y")
        await shell.example("mail_provider", "ada@example.org")
        await shell.deliver("mail_provider")
    (sent,) = api.received
    assert json.loads(sent.body)["recipients"] == ["tester@example.org"]


ANSWERS: dict[str, tuple[http.Answer, Outcome]] = {
    "accepted": (http.answer(202), Sent()),
    "refused": (http.answer(400), Permanent("400")),
    "unprocessable": (http.answer(422), Permanent("422")),
    "wrong key": (http.answer(401), Unavailable("401")),
    "no credit": (http.answer(402), Unavailable("402")),
    "forbidden": (http.answer(403), Unavailable("403")),
    "too many": (http.answer(429, Retry_After="120"), SendFailure("429", 120)),
    "too many until a date": (http.answer(429, Retry_After="Sun, 01 Mar 2026 12:00:00 GMT"), SendFailure("429")),
    "down": (http.answer(503, Retry_After="7"), SendFailure("503", 7, outage=True)),
    "silent": (http.Misbehaviour.HANG, SendFailure("ReadTimeout", outage=True, unknown=True)),
    "lost": (http.Misbehaviour.DROP, SendFailure("RemoteProtocolError", outage=True, unknown=True)),
}


def told(outcome: Outcome) -> tuple[object, ...]:
    """Return everything that an outcome says."""
    values = [getattr(outcome, name, None) for name in ("error", "retry_after", "outage", "unknown")]
    return type(outcome), *values


async def outcome_of(transport: Transport, destination: str, content: Content) -> Outcome:
    try:
        return await transport.send(outgoing(destination=destination), content)
    finally:
        await transport.aclose()


@pytest.mark.parametrize(("given", "expected"), ANSWERS.values(), ids=ANSWERS.keys())
async def test_the_answers_of_a_gateway_become_outcomes(given: http.Answer, expected: Outcome) -> None:
    email = Email(sender="a@club.test", subject="Hello", text="Hi")
    async with webhook_server(given) as server:
        url = server.url(scheme="http")
        sms = await outcome_of(SmsTransport(url, "k3y", timeout=1), "sms:+491701234567", Sms("Hi"))
        provider = MailProvider(settings_with(), url, "k3y", timeout=1)
        mail = await outcome_of(provider, "mailto:ada@example.org", email)
    kind, error, *rest = told(expected)
    named = {name: None if error is None else f"{name}: {error}" for name in ("SMS gateway", "mail provider")}
    assert told(sms) == (kind, named["SMS gateway"], *rest)
    assert told(mail) == (kind, named["mail provider"], *rest)


async def test_a_gateway_that_is_down_is_an_outage_and_nothing_was_sent() -> None:
    transport = SmsTransport(f"http://{HOST}:{free_port()}", "k3y")
    assert transport.breaker_key(outgoing(destination="sms:+491701234567"), None) == f"sms:{HOST}"
    outcome = await outcome_of(transport, "tel:+491701234567", Sms("Hi"))
    assert told(outcome) == (SendFailure, "SMS gateway: ConnectError", None, True, False)


@pytest.mark.parametrize("number", ["", "sms:", "sms:0170123", "sms:+49170123456\n7", "sms:+49170?body=x"])
async def test_a_wrong_number_is_refused(number: str) -> None:
    assert isinstance(await outcome_of(SmsTransport("http://127.0.0.1:1", ""), number, Sms("Hi")), Permanent)


async def test_a_missing_key_holds_messages_back() -> None:
    """No HTTP client sends `Bearer` without a key, so the error would look like an outage."""
    email = Email(sender="a@club.test", subject="Hello", text="Hi")
    sms = await outcome_of(SmsTransport("http://127.0.0.1:1", ""), "sms:+491701234567", Sms("Hi"))
    provider = MailProvider(settings_with(), "http://127.0.0.1:1", "")
    mail = await outcome_of(provider, "mailto:ada@example.org", email)
    assert told(sms) == told(Unavailable("SMS_GATEWAY_KEY is not set"))
    assert told(mail) == told(Unavailable("MAIL_PROVIDER_KEY is not set"))


def indexed_ids(shell: Shell) -> list[int]:
    """Return the documents in the index, once for each write."""
    lines = Path(shell.environment["SEARCH_INDEX"]).read_text().splitlines()
    return [json.loads(line)["id"] for line in lines]


async def test_each_document_of_a_batch_has_its_own_outcome(shell: Shell, dsn: str) -> None:
    assert await shell.example("search_index") == ["enqueued 100"]
    await shell.deliver("search_index")
    assert sorted(indexed_ids(shell)) == list(range(1, 100))
    assert states(dsn) == {"sent": 99, "failed": 1}


async def test_a_script_delivers_its_messages(shell: Shell, dsn: str) -> None:
    assert await shell.example("points") == ["ada 120", "bob 5"]
    assert states(dsn) == {"sent": 2}


@pytest.mark.parametrize(("name", "count"), [("test_sign_up", 4), ("test_points", 2)])
async def test_the_example_tests_pass(shell: Shell, server: Server, name: str, count: int) -> None:
    shell.environment["PGOUTBOX_TEST_DSN"] = server.dsn_for(server.maintenance_dbname)
    said = await shell.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", f"examples/{name}.py")
    assert f"{count} passed" in said


def test_every_example_is_listed_and_tested() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    tested = "".join(path.read_text() for path in Path(__file__).parent.glob("test_example*.py"))
    for path in EXAMPLES.glob("*.py"):
        assert f"({path.name})" in listed
        assert path.stem in tested


async def test_one_trace_covers_the_request_up_to_the_smtp_server(shell: Shell, inbox: Inbox, dsn: str) -> None:
    printed = await shell.example("tracing")
    assert [line.rpartition(")")[0] + ")" for line in printed[1:]] == [
        "POST /members (server)",
        "  business transaction (internal)",
        "    send mail.welcome (producer)",
        "      process mail.welcome (consumer, sent)",
        "        render the e-mail (internal)",
        "        hand over smtp (client, sent, 127.0.0.1)",
    ]
    assert printed[0] == "HTTP 201"
    assert [recipient for recipient, _ in mails(inbox)] == ["ada@example.org"]
    assert states(dsn) == {"sent": 1}

"""Tests the doctor's transport checks with real servers that refuse, and its command: streams, exit codes, secrets."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from typing import TYPE_CHECKING, Final

import psycopg
import pytest
import trustme
from cryptography.fernet import Fernet

from pgoutbox import Outbox
from pgoutbox.doctor import Finding, Level, examine
from pgoutbox.message import Message, Permanent, SendFailure, Sent, Transient, Unavailable
from pgoutbox.transports import SmtpTransport
from tests.support.brokers import HOST, kafka_server, nats_server, rabbitmq_server, redis_server
from tests.support.command_line import run_on_terminal, run_process
from tests.support.outbox_actions import enqueue
from tests.support.settings import settings_with
from tests.support.smtp_server import accepting_server, mail_settings, scripted_server

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgoutbox.message import Outcome
    from pgoutbox.transports import Content
    from tests.support.command_line import Done


CANARY: Final = "c4n4ry-s3cret"
NOWHERE: Final = "192.0.2.1"
APP: Final = """
from pgoutbox import Context, Message, Outbox

outbox = Outbox()


@outbox.handler("greet")
async def greet(message: Message, ctx: Context) -> None: ...
"""


def found(check: str, outbox: Outbox | None = None, /, **given: object) -> list[Finding]:
    """Run one check without a database."""
    dsn = "host=127.0.0.1 port=1"
    settings = settings_with(**({"dsn": dsn, "connect_timeout_seconds": 1, "broker_timeout_seconds": 2} | given))
    return [finding for finding in examine(settings, outbox) if finding.check == check]


async def afound(check: str, outbox: Outbox | None = None, /, **given: object) -> list[Finding]:
    """Run one check while the test's own servers answer on its event loop."""
    return await asyncio.to_thread(lambda: found(check, outbox, **given))


def expect(findings: list[Finding], level: Level, code: str, *facts: str) -> Finding:
    matching = [finding for finding in findings if finding.level is level]
    assert [finding.code for finding in matching] == [code], findings
    (finding,) = matching
    for fact in facts:
        assert fact in f"{finding.what}\n{finding.why}\n{finding.fix}"
    assert CANARY not in str(finding)
    return finding


# --- e-mail -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sender", ["Club <no-reply@mail.example.com>", "you@gmail.com"])
async def test_an_unedited_example_sender_is_a_problem(sender: str) -> None:
    async with accepting_server() as inbox:
        findings = await afound("smtp", **mail_settings(inbox.port) | {"smtp_sender": sender})
    expect(findings, Level.PROBLEM, "sender-placeholder", f"PGOUTBOX_SMTP_SENDER={sender}")
    expect(findings, Level.OK, "transport-in-order")


@pytest.mark.parametrize("sender", ["root@localhost", "Shop <a@shop.test>", "a@club.invalid"])
async def test_a_sender_of_a_test_system_is_a_warning_that_says_so(sender: str) -> None:
    async with accepting_server() as inbox:
        findings = await afound("smtp", **mail_settings(inbox.port) | {"smtp_sender": sender})
    expect(findings, Level.WARNING, "sender-reserved", f"PGOUTBOX_SMTP_SENDER={sender}")
    expect(findings, Level.OK, "transport-in-order")


CLUB: Final = {"smtp_sender": "Club <a@club.org>"}
OWN: Final = "RCPT TO:<a@club.org>"
ELSEWHERE: Final = "RCPT TO:<pgoutbox-doctor@example.com>"


async def test_the_check_of_email_ends_before_the_content() -> None:
    async with scripted_server() as server:
        findings = await afound("smtp", **mail_settings(server.port) | CLUB)
    assert [finding.level for finding in findings] == [Level.OK]
    assert server.commands[1:] == ["MAIL FROM:<a@club.org>", OWN, ELSEWHERE, "RSET", "QUIT"]


RELAY: Final = "554 5.7.1 <pgoutbox-doctor@example.com>: Relay access denied"
NOT_OWNED: Final = "553 5.7.1 <a@club.org>: Sender address rejected: not owned by user club"


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"MAIL": "553 5.1.8 unknown"}, "MAIL: 553 5.1.8 unknown"),
        ({"RCPT": NOT_OWNED}, NOT_OWNED),
        # The server of the sender's domain takes e-mail to the sender from everybody.
        ({ELSEWHERE: RELAY}, f"RCPT pgoutbox-doctor@example.com: {RELAY}"),
        ({"RCPT": "454 4.7.1 <a@club.org>: Relay access denied"}, "Relay access denied"),
        ({"RCPT": "550 5.7.1 Client host rejected: Access denied"}, "Client host rejected"),
        ({"RCPT": "550 Domain club.org has exceeded the max emails per hour (60/60)"}, "exceeded the max emails"),
        ({"RCPT": "550 Administrative prohibition"}, "RCPT a@club.org: 550 Administrative prohibition"),
        ({"RCPT": "421 4.3.0 closing"}, "421 4.3.0 closing"),
    ],
)
async def test_a_refusal_that_holds_every_email_is_a_problem(answers: dict[str, str], words: str) -> None:
    async with scripted_server(answers) as server:
        expect(
            await afound("smtp", **mail_settings(server.port) | CLUB),
            Level.PROBLEM,
            "transport-unavailable",
            words,
            "_SENDER",
        )
    assert "DATA" not in server.verbs


@pytest.mark.parametrize(
    "answer",
    [
        "550 5.1.1 <a@club.org>: user unknown",
        "550 Administrative prohibition",
        "450 4.2.0 greylisted",
        "552 5.2.2 full",
    ],
)
async def test_a_sender_that_the_server_does_not_accept_as_a_recipient_is_a_warning(answer: str) -> None:
    async with scripted_server({OWN: answer}) as server:
        findings = await afound("smtp", **mail_settings(server.port) | CLUB)
    assert [finding.level for finding in findings] == [Level.WARNING]
    expect(findings, Level.WARNING, "sender-not-a-recipient", f"RCPT a@club.org: {answer}", "PGOUTBOX_SMTP_SENDER")


@pytest.mark.parametrize(
    "answer",
    ["556 5.1.10 Recipient address rejected: Domain example.com does not accept mail (nullMX)", "550 no such domain"],
)
async def test_a_server_that_knows_that_no_email_reaches_the_other_address_is_in_order(answer: str) -> None:
    async with scripted_server({ELSEWHERE: answer}) as server:
        findings = await afound("smtp", **mail_settings(server.port) | CLUB)
    assert [finding.level for finding in findings] == [Level.OK]


async def test_an_example_server_and_an_example_alert_address_are_problems() -> None:
    findings = await afound("smtp", smtp_host="smtp.example.com", smtp_sender="a@club.org", smtp_timeout_seconds=1)
    assert [finding.code for finding in findings] == ["smtp-host-placeholder", "transport-unavailable"]
    assert findings[0].level is Level.PROBLEM
    assert "PGOUTBOX_SMTP_HOST=smtp.example.com" in findings[0].what
    async with accepting_server() as inbox:
        given = mail_settings(inbox.port) | {"smtp_sender": "a@club.org", "alert_destination": "mailto:ops@example.org"}
        expect(
            await afound("smtp", **given),
            Level.PROBLEM,
            "alert-destination-placeholder",
            "PGOUTBOX_ALERT_DESTINATION=mailto:ops@example.org",
        )


async def test_an_accepting_mail_server_is_in_order_and_gets_no_mail() -> None:
    async with accepting_server() as inbox:
        findings = await afound("smtp", **mail_settings(inbox.port) | {"smtp_sender": "Club <club@example-club.org>"})
        assert [finding.level for finding in findings] == [Level.OK]
        assert (inbox.connection_count, inbox.received) == (1, [])


async def test_a_missing_sender_is_a_warning() -> None:
    async with accepting_server() as inbox:
        findings = await afound("smtp", **mail_settings(inbox.port) | {"smtp_sender": None})
    expect(findings, Level.WARNING, "sender-missing", "PGOUTBOX_SMTP_SENDER")


class Provider:
    """The application's own transport for e-mail, which says what its check finds."""

    schemes = ("mailto",)

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    async def send(self, message: Message[object], content: Content) -> Outcome:
        return Sent()

    async def check(self) -> Outcome:
        return self._outcome

    async def aclose(self) -> None: ...


def test_the_applications_own_transport_for_email_needs_no_smtp_settings() -> None:
    works = Outbox(transports=[Provider(Sent())])
    finding = expect(found("smtp", works), Level.OK, "transport-in-order")
    assert found("smtp", works) == [finding], "and no warning of a missing sender"
    given = {"alert_destination": "mailto:ops@example.org"}
    expect(found("smtp", works, **given), Level.PROBLEM, "alert-destination-placeholder", "PGOUTBOX_ALERT_DESTINATION")


@pytest.mark.parametrize(
    ("outcome", "level", "code"),
    [
        (Unavailable("mail provider: 401"), Level.PROBLEM, "transport-unavailable"),
        (SendFailure("mail provider: 503", outage=True), Level.PROBLEM, "transport-unavailable"),
        (Transient("mail provider: 429"), Level.WARNING, "transport-refused"),
        (Permanent("mail provider: 404"), Level.WARNING, "transport-refused"),
    ],
)
def test_the_outcome_of_a_check_is_judged_as_that_of_a_send(outcome: Outcome, level: Level, code: str) -> None:
    findings = found("smtp", Outbox(transports=[Provider(outcome)]))
    expect(findings, level, code, str(outcome), "/how-to/mail-providers.html")


def test_plain_text_to_another_machine_is_a_problem() -> None:
    given = {"smtp_host": NOWHERE, "smtp_security": "none", "smtp_sender": "a@club.org", "smtp_timeout_seconds": 0.5}
    findings = found("smtp", **given)
    assert [finding.level for finding in findings] == [Level.PROBLEM, Level.PROBLEM]
    assert [finding.code for finding in findings] == ["smtp-plain-text", "transport-unavailable"]
    assert NOWHERE in findings[0].what


async def test_a_server_that_accepts_plain_text_works_and_is_a_problem() -> None:
    elsewhere = f"::ffff:{HOST}"  # The doctor does not know this name of the same machine.
    async with accepting_server() as inbox:
        findings = await afound("smtp", **mail_settings(inbox.port) | CLUB | {"smtp_host": elsewhere})
    expect(findings, Level.OK, "transport-in-order", f"{elsewhere} accepts e-mail: plain text")
    expect(findings, Level.PROBLEM, "smtp-plain-text")


async def test_a_server_without_encryption_is_a_problem() -> None:
    async with accepting_server() as inbox:
        given = mail_settings(inbox.port) | {"smtp_sender": "a@club.org", "smtp_security": "starttls"}
        expect(await afound("smtp", **given), Level.PROBLEM, "transport-unavailable", "STARTTLS")


async def test_an_unknown_authority_and_a_refused_password_are_problems() -> None:
    authority = trustme.CA()
    theirs, ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("localhost", HOST).configure_cert(theirs)
    authority.configure_trust(ours)
    async with accepting_server(starttls=theirs, password=b"right") as inbox:
        given = mail_settings(inbox.port) | {
            "smtp_sender": "a@club.org",
            "smtp_security": "starttls",
            "smtp_username": "club",
            "smtp_password": CANARY,
        }
        expect(await afound("smtp", **given), Level.PROBLEM, "transport-unavailable", "certificate")
        assert inbox.logins == []
        own = Outbox(transports=[SmtpTransport(settings_with(**given), tls_context=ours)])
        expect(
            await afound("smtp", own, **given),
            Level.PROBLEM,
            "transport-unavailable",
            "AUTH: 535",
            "PGOUTBOX_SMTP_HOST",
        )
        right = given | {"smtp_password": "right"}
        own = Outbox(transports=[SmtpTransport(settings_with(**right), tls_context=ours)])
        expect(await afound("smtp", own, **right), Level.OK, "transport-in-order", "STARTTLS, signed in")
        assert inbox.received == []


def test_settings_that_stop_a_worker_at_its_start_are_a_problem() -> None:
    given = {"smtp_host": "mx.club.org", "smtp_sender": "no address", "smtp_timeout_seconds": 0.5}
    expect(found("smtp", **given), Level.PROBLEM, "transport-setting-invalid", "PGOUTBOX_SMTP_SENDER")


def test_no_mail_server_means_no_check() -> None:
    for check in ("smtp", "apprise", "redis", "nats", "rabbitmq", "kafka"):
        assert [finding.level for finding in found(check)] == [Level.SKIPPED]


def test_a_custom_transport_without_a_check_is_skipped() -> None:
    class Printer:
        schemes = ("redis",)

        async def send(self, message: Message[object], content: Content) -> Outcome:
            return Sent()

        async def aclose(self) -> None: ...

    expect(found("redis", Outbox(transports=[Printer()])), Level.SKIPPED, "transport-without-check")


# --- webhooks and notifications ---------------------------------------------------------------------------------------

SIGNING: Final = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ({"webhook_secrets": f"whsec_{CANARY}!"}, "PGOUTBOX_WEBHOOK_SECRETS"),
        ({"webhook_ports": "x", "webhook_secrets": SIGNING}, "PGOUTBOX_WEBHOOK_PORTS"),
        ({"webhook_ca_file": "/nowhere"}, "PGOUTBOX_WEBHOOK_CA_FILE"),
        ({"webhook_allowed_networks": "10.0.0.0/33"}, "PGOUTBOX_WEBHOOK_ALLOWED_NETWORKS"),
    ],
)
def test_errors_in_webhook_settings_are_reported(given: dict[str, object], setting: str) -> None:
    expect(found("webhooks", **given), Level.PROBLEM, "transport-setting-invalid", setting)


def test_missing_secrets_are_a_warning_if_webhooks_are_set_up() -> None:
    expect(found("webhooks", webhook_connections=9), Level.WARNING, "webhook-secrets-missing")
    expect(found("webhooks"), Level.OK, "transport-in-order")


def test_unrestricted_webhooks_are_a_warning() -> None:
    given = {"webhook_allow_http": True, "webhook_allowed_networks": "10.0.0.0/8", "webhook_secrets": SIGNING}
    findings = found("webhooks", **given)
    assert [finding.level for finding in findings] == [Level.WARNING, Level.WARNING]
    assert [finding.code for finding in findings] == ["webhook-http-allowed", "webhook-networks-allowed"]
    assert "10.0.0.0/8" in findings[1].what


@pytest.mark.slow
def test_unreadable_notification_urls_are_a_problem() -> None:
    expect(
        found("apprise", apprise_urls=f'{{"ops": "nosuch://{CANARY}"}}'),
        Level.PROBLEM,
        "transport-setting-invalid",
        "PGOUTBOX_APPRISE_URLS",
    )
    expect(found("apprise", apprise_urls='{"ops": "json://localhost/"}'), Level.OK, "transport-in-order")


# --- brokers ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_problems_of_redis_are_reported() -> None:
    with redis_server("--requirepass", "right") as broker:
        given = {"redis_url": f"redis://:right@{HOST}:{broker.port}"}
        expect(found("redis", **given), Level.OK, "transport-in-order", "Redis")
        given = {"redis_url": f"redis://:{CANARY}@{HOST}:{broker.port}"}
        expect(found("redis", **given), Level.PROBLEM, "transport-unavailable", "connect:", "PGOUTBOX_REDIS_URL")
        with broker.frozen():
            expect(found("redis", **given), Level.PROBLEM, "transport-unavailable", "2 s")
    expect(found("redis", **given), Level.PROBLEM, "transport-unavailable", "connect:")
    expect(found("redis", redis_url=f"nonsense://{CANARY}"), Level.PROBLEM, "transport-setting-invalid", "(hidden)")


def test_problems_of_nats_are_reported() -> None:
    with nats_server("authorization { user: app, password: right }") as broker:
        expect(found("nats", nats_url=f"nats://app:right@{HOST}:{broker.port}"), Level.OK, "transport-in-order", "NATS")
        given = {"nats_url": f"nats://app:{CANARY}@{HOST}:{broker.port}"}
        expect(
            found("nats", **given),
            Level.PROBLEM,
            "transport-unavailable",
            "connect:",
            "uthorization",
            "PGOUTBOX_NATS_URL",
        )
    expect(found("nats", **given), Level.PROBLEM, "transport-unavailable", "connect:")


@pytest.mark.slow
def test_problems_of_rabbitmq_are_reported() -> None:
    with rabbitmq_server() as broker:
        given = {"rabbitmq_url": f"amqp://app:secret@{HOST}:{broker.plain_port}", "broker_timeout_seconds": 20}
        expect(found("rabbitmq", **given), Level.OK, "transport-in-order", "RabbitMQ")
        given |= {"rabbitmq_url": f"amqp://app:{CANARY}@{HOST}:{broker.plain_port}"}
        expect(
            found("rabbitmq", **given),
            Level.PROBLEM,
            "transport-unavailable",
            "connect:",
            "ACCESS_REFUSED",
            "PGOUTBOX_RABBITMQ_URL",
        )
    expect(found("rabbitmq", **given), Level.PROBLEM, "transport-unavailable", "connect:")


@pytest.mark.slow
def test_problems_of_kafka_are_reported() -> None:
    with kafka_server() as broker:
        given = {"kafka_servers": f"{HOST}:{broker.port}", "kafka_security": "none"}
        expect(found("kafka", **given), Level.OK, "transport-in-order", "Kafka")
    expect(found("kafka", **given), Level.PROBLEM, "transport-unavailable", "connect:", "2 s", "PGOUTBOX_KAFKA_SERVERS")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "given"),
    [
        ("redis", {"redis_url": f"redis://:{CANARY}@{NOWHERE}"}),
        ("nats", {"nats_url": f"nats://app:{CANARY}@{NOWHERE}"}),
        ("rabbitmq", {"rabbitmq_url": f"amqp://app:{CANARY}@{NOWHERE}"}),
        ("kafka", {"kafka_servers": f"{NOWHERE}:9092", "kafka_security": "none"}),
    ],
)
def test_plain_text_to_a_broker_on_another_machine_is_a_warning(check: str, given: dict[str, object]) -> None:
    findings = found(check, **given | {"broker_timeout_seconds": 0.5})
    expect(findings, Level.WARNING, "broker-plain-text", NOWHERE)
    expect(findings, Level.PROBLEM, "transport-unavailable", "connect:")


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_a_line_for_each_finding_and_fails_only_for_a_problem(
    cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = cli("doctor")
    rows = [line.split("\t") for line in done.out.splitlines()]
    reckless = [row for row in rows if row[0] == "problem"]
    assert {row[0] for row in rows} <= {"ok", "skipped", "warning", "problem"}
    assert {len(row) for row in rows} == {5}
    assert done.exit_code == (1 if reckless else 0)
    assert {row[1] for row in reckless} <= {"durability"}  # The tests' server may be configured for speed.
    monkeypatch.setenv("PGOUTBOX_DSN", "host=127.0.0.1 port=1")
    assert cli("doctor").exit_code == 1


def test_with_json_each_finding_is_a_separate_document(cli: Callable[..., Done]) -> None:
    done = cli("doctor", "--json")
    assert done.err == ""
    for line in done.lines:
        assert list(line) == ["check", "level", "code", "what", "why", "fix", "about", "messages"]
        assert (line["level"] in ("warning", "problem")) == (line["why"] is not None)
    assert len(done.lines) > 25


def test_a_dead_mail_server_is_one_finding(dsn: str, db: psycopg.Connection) -> None:
    """It is that of the late messages if there are any, else that of the transport, which names the settings."""
    settings = settings_with(
        dsn=dsn, smtp_host="127.0.0.1", smtp_port=1, smtp_security="none", smtp_sender="a@club.org"
    )

    def told() -> list[str]:
        return [one.code for one in examine(settings) if "smtp:127.0.0.1:1" in str(one) or "Connect" in str(one)]

    hold = "default greet mailto"
    db.execute(
        "INSERT INTO pgoutbox.breaker (key, holds, opened_at, retry_at, cooldown_seconds, worker, last_error)"
        " VALUES ('smtp:127.0.0.1:1', ARRAY[%s], now(), now(), 60, 'w', 'ConnectionRefusedError')",
        [hold],
    )
    assert told() == ["transport-unavailable"]
    enqueue(db, destination="mailto:ada@example.org")
    db.execute("UPDATE pgoutbox.message SET available_at = now() - interval '1 hour'")
    assert told() == ["due-behind-breaker"]


@pytest.mark.slow
def test_with_strict_a_warning_also_fails(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pgoutbox import doctor as examination
    from pgoutbox.cli.main import main

    monkeypatch.setenv("PGOUTBOX_DSN", dsn)
    for level, plain, strict in (("ok", 0, 0), ("skipped", 0, 0), ("warning", 0, 1), ("problem", 1, 1)):
        findings = [Finding("x", Level(level), "code", "what", "why", "fix")]
        monkeypatch.setattr(examination, "examine", lambda *_, findings=findings, **__: iter(findings))
        assert (main(["doctor"]), main(["doctor", "--strict"])) == (plain, strict)


@pytest.mark.slow
def test_problems_come_first_and_alone_if_asked(
    dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pgoutbox import doctor as examination
    from pgoutbox.cli.main import main

    monkeypatch.setenv("PGOUTBOX_DSN", dsn)
    levels = ("ok", "warning", "skipped", "problem", "ok", "warning", "problem")
    findings = [Finding(str(number), Level(level), "code", "what") for number, level in enumerate(levels)]
    monkeypatch.setattr(examination, "examine", lambda *_, **__: iter(findings))

    def printed(*options: str) -> tuple[int, list[str]]:
        code = main(["doctor", *options])
        shown, summary = capsys.readouterr()
        assert summary == "2 problems, 2 warnings, 1 skipped, 2 ok\n"
        return code, [line.split("\t")[1] for line in shown.splitlines()]

    assert printed() == (1, ["3", "6", "1", "5", "0", "2", "4"])
    assert printed("--problems") == (1, ["3", "6"])
    assert printed("--problems", "--strict") == (1, ["3", "6", "1", "5"])


def test_wrong_usage_has_its_own_exit_code(cli_anywhere: Callable[..., Done], dsn: str) -> None:
    assert (cli_anywhere("doctor").exit_code, "PGOUTBOX_DSN" in cli_anywhere("doctor").err) == (2, True)
    assert cli_anywhere("doctor", "--nonsense").exit_code == 2
    assert cli_anywhere("doctor", "--dsn", dsn, "--app", "nosuch").exit_code == 2


def test_the_application_is_checked_too(cli: Callable[..., Done], tmp_path_factory: pytest.TempPathFactory) -> None:
    place = tmp_path_factory.mktemp("app")
    (place / "doctored_app.py").write_text(APP)
    before = os.getcwd()  # noqa: PTH109 - as a shell would
    os.chdir(place)
    try:
        done = cli("doctor", "--app", "doctored_app:outbox", "--json")
    finally:
        os.chdir(before)
    assert [line["code"] for line in done.lines if line["check"] == "handlers"] == ["handlers-in-order"]


@pytest.mark.slow
def test_on_a_terminal_reason_and_fix_are_below_the_finding(dsn: str) -> None:
    done = run_on_terminal("doctor", dsn=dsn, PGOUTBOX_SMTP_HSOT="x")
    lines = done.out.replace("\r", "").splitlines()
    place = next(number for number, line in enumerate(lines) if "PGOUTBOX_SMTP_HSOT" in line)
    assert lines[place].startswith("\x1b[33mwarning ")
    assert [line.split(":")[0].strip() for line in lines[place + 1 : place + 3]] == ["why", "fix"]
    assert lines[-1].endswith(" ok")
    assert "\x1b" not in run_on_terminal("doctor", dsn=dsn, NO_COLOR="1").out


SECRETS: Final = {
    "PGOUTBOX_DSN": f"postgresql://app:{CANARY}@127.0.0.1:1/app",
    "PGOUTBOX_LISTEN_DSN": f"postgresql://app:{CANARY}@127.0.0.1:1/app",
    "PGOUTBOX_SMTP_HOST": "127.0.0.1",
    "PGOUTBOX_SMTP_PORT": "1",
    "PGOUTBOX_SMTP_USERNAME": "club",
    "PGOUTBOX_SMTP_PASSWORD": CANARY,
    "PGOUTBOX_REDIS_URL": f"redis://:{CANARY}@127.0.0.1:1/0",
    "PGOUTBOX_NATS_URL": f"nats://app:{CANARY}@127.0.0.1:1",
    "PGOUTBOX_RABBITMQ_URL": f"amqp://app:{CANARY}@127.0.0.1:1",
    "PGOUTBOX_KAFKA_SERVERS": "127.0.0.1:1",
    "PGOUTBOX_KAFKA_USERNAME": "app",
    "PGOUTBOX_KAFKA_PASSWORD": CANARY,
    "PGOUTBOX_WEBHOOK_SECRETS": f"whsec_{CANARY}",
    "PGOUTBOX_APPRISE_URLS": f'{{"ops": "nosuch://{CANARY}"}}',
    "PGOUTBOX_BROKER_TIMEOUT_SECONDS": "1",
    "PGPASSWORD": CANARY,
}
BROKEN: Final = {
    "PGOUTBOX_DSN": f"host=127.0.0.1 password={CANARY} nonsense",
    "PGOUTBOX_LISTEN_DSN": f"postgresql://app:a@{CANARY}:x@127.0.0.1:1/app",
    "PGOUTBOX_REDIS_URL": f"redis://:{CANARY}@[127.0.0.1/0",
    "PGOUTBOX_NATS_URL": f"nats://app:{CANARY}@:x",
    "PGOUTBOX_RABBITMQ_URL": f"amqp://app:{CANARY}@127.0.0.1:x",
    "PGOUTBOX_ENCRYPTION_KEYS": Fernet.generate_key().decode(),
}


@pytest.mark.slow
@pytest.mark.parametrize("extra", [{}, BROKEN], ids=["refused", "misspelt"])
def test_no_secret_is_ever_printed(extra: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in (SECRETS | extra).items():
        monkeypatch.setenv(variable, value)
    for arguments in (("doctor",), ("doctor", "--json")):
        done = run_process(*arguments)
        assert done.exit_code == 1, done.err
        assert CANARY not in done.out + done.err
        assert BROKEN["PGOUTBOX_ENCRYPTION_KEYS"] not in done.out + done.err
        assert "Traceback" not in done.err
        assert sum("problem" in line for line in done.out.splitlines()) >= 6


@pytest.mark.slow
def test_no_secret_is_printed_with_a_reachable_database(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in SECRETS.items():
        monkeypatch.setenv(variable, value)
    done = run_process("doctor", "--json", dsn=dsn)
    listener = [json.loads(line) for line in done.out.splitlines() if '"listener"' in line]
    assert [finding["level"] for finding in listener] == ["problem"]
    assert CANARY not in done.out + done.err

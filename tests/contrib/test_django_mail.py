"""Tests the mail backend of Django: what Django's own tests ask of a backend, Anymail, a killed worker, and moves."""

from __future__ import annotations

import json
import re
import signal
from typing import TYPE_CHECKING, Final

import django
import psycopg
import pytest
from cryptography.fernet import Fernet

from tests.support.django_project import BACKEND, ROLLED_BACK, Project, are_sent, states
from tests.support.pages import DOCS, blocks_of
from tests.support.smtp_server import Misbehaviour, accepting_server, parsed, scripted_server
from tests.support.waiting import until
from tests.support.webhook_server import answer, webhook_server

if TYPE_CHECKING:
    from email.message import EmailMessage

pytestmark = pytest.mark.slow

# --- the behaviours that tests/mail of Django asks of a backend -------------------------------------------------------

BEHAVIOURS: Final = r"""
from email.message import EmailMessage as MimeMessage
from django.core import mail
from django.core.mail import EmailMessage, EmailMultiAlternatives, mail_admins, mail_managers, send_mail
from django.db import transaction
from django.test.utils import override_settings
from django.utils.translation import gettext_lazy as _

new = hasattr(mail, "mailers")
backend = mail.mailers.default if new else mail.get_connection(username="", password="", fail_silently=True)
backend.close()
with backend as same:
    assert same is backend
if new:
    assert backend.alias == "default"
    from pgoutbox.contrib.django.mail import EmailBackend
    try:
        EmailBackend(alias="x", oops_typo=True)
        raise AssertionError
    except mail.InvalidMailer as error:
        assert "MAILERS['x']: Unknown options 'oops_typo'" in str(error)

# Sent, and counted.
one = EmailMessage("one", "Je t'aime très fort\n", "from@example.com", ["to@example.com"], cc=["cc@example.com"])
assert backend.send_messages([one]) == 1
one.subject = "changed after it was sent"
one.to.append("later@example.com")
assert backend.send_messages(EmailMessage(f"many {n}", to=[f"to-{n}@example.com"]) for n in (1, 2)) == 2
assert backend.send_messages([]) == 0
assert backend.send_messages([EmailMessage("nobody", to=[])]) == 0
assert send_mail("html", "Content", "sender@example.com", ["nobody@example.com"], html_message="HTML Content") == 1
people = [("nobody", "nobody@example.com")] if django.VERSION < (6, 0) else ["nobody@example.com"]
with override_settings(ADMINS=people, MANAGERS=people):
    mail_admins(_("admins"), "Content", html_message="HTML Content")
    mail_managers(_("managers"), "Content")
mail_admins("to no admin", "Content")
EmailMessage("long", "В южных морях " * 60, to=["to@example.com"]).send()
EmailMessage("lazy", from_email=_("f@example.com"), to=[_("t@example.com")], bcc=[_("b@example.com")]).send()
EmailMessage(
    "idna", "From here\n.\n", '"Firstname Sürname" <lists@discussão.example.org>', ["To <to@漢字.example.com>"],
    bcc=["bcc@xn--fa-hia.example.com"], reply_to=["reply@example.com"],
    headers={"From": "Lista <l@discussão.example.org>"},
).send()
full = EmailMultiAlternatives("full", "Grüße", to=["to@example.com"], alternatives=[("<b>Grüße</b>", "text/html")])
full.attach("bytes.bin", bytes(range(256)), "application/x-data")
full.attach("größe.txt", "Größe\n", "text/plain")
inner = MimeMessage()
inner["Subject"] = "inner"
inner.set_content("Größe\n")
full.attach("inner.eml", inner.as_bytes(), "message/rfc822")
full.send()

# Refused, and the caller's transaction still commits.
with transaction.atomic():
    for address in (
        "to@other.com@example.com", "to@other.com <to@example.com>", "to@example.com, other@example.com", "@", "to@",
        "@example.com", '"evil@example.com\r\nto"@example.com', "to\nevil@example.com", "to@example.com\u2028", "<>",
    ):
        try:
            EmailMessage(bcc=[address]).send()
            raise AssertionError(address)
        except ValueError as error:
            assert "Invalid address" in str(error), error
    for subject, body in ("a\nb", "text"), ("too long", "x" * 20_000_000):
        try:
            EmailMessage(subject, body, to=["to@example.com"]).send()
            raise AssertionError(subject)
        except ValueError:
            pass
    send_mail("after errors", "Content", None, ["to@example.com"])
"""


async def test_the_backend_passes_the_behaviours_of_the_tests_of_django(project: Project) -> None:
    async with accepting_server() as inbox:
        project.send_by(inbox.port)
        await project.run(f"import django\n{BEHAVIOURS}")
        await project.manage("pgoutbox", "worker", "--once")
    assert {state for _, state in states(project)} == {"sent"}
    assert all(one.content.isascii() for one in inbox.received)  # Servers without 8BITMIME take it too.
    assert all(b"\r" not in one.content.replace(b"\r\n", b"") for one in inbox.received)
    by_subject = {str(parsed(one.content)["subject"]): (one, parsed(one.content)) for one in inbox.received}
    assert by_subject.keys() == {
        "one", "many 1", "many 2", "html", "[Django] admins", "[Django] managers", "long", "lazy", "idna", "full",
        "after errors",
    }  # fmt: skip

    def headers(message: EmailMessage, *names: str) -> list[str]:
        return [str(message[name]) for name in names]

    received, one = by_subject["one"]
    assert (received.sender, received.recipients) == ("from@example.com", ["to@example.com", "cc@example.com"])
    assert headers(one, "from", "to", "cc") == ["from@example.com", "to@example.com", "cc@example.com"]
    assert one.get_content() == "Je t'aime très fort\r\n"
    assert one["date"]
    assert one["message-id"]
    _, html = by_subject["html"]
    assert [part.get_content_type() for part in html.iter_parts()] == ["text/plain", "text/html"]
    _, long = by_subject["long"]
    assert long["content-transfer-encoding"] in {"quoted-printable", "base64"}
    assert long.get_content().strip() == ("В южных морях " * 60).strip()
    received, lazy = by_subject["lazy"]
    assert (received.recipients, lazy["bcc"]) == (["t@example.com", "b@example.com"], None)
    received, idna = by_subject["idna"]
    assert received.sender == "lists@xn--discusso-xza.example.org"
    assert received.recipients == ["to@xn--p8s937b.example.com", "bcc@xn--fa-hia.example.com"]
    assert headers(idna, "from", "reply-to") == ["Lista <l@xn--discusso-xza.example.org>", "reply@example.com"]
    assert idna.get_content().startswith("From here\r\n.\r\n")
    _, full = by_subject["full"]
    alternatives, *attached = full.iter_parts()
    assert [part.get_content().strip() for part in alternatives.iter_parts()] == ["Grüße", "<b>Grüße</b>"]
    assert [part.get_filename() for part in attached] == ["bytes.bin", "größe.txt", "inner.eml"]
    assert attached[0].get_content() == bytes(range(256))
    assert attached[1].get_content().strip() == "Größe"
    assert attached[2].get_content().get_content().strip() == "Größe"


# --- Anymail ----------------------------------------------------------------------------------------------------------

TESTING: Final = "anymail.backends.test.EmailBackend"
POSTMARK: Final = "anymail.backends.postmark.EmailBackend"
SMTP: Final = "django.core.mail.backends.smtp.EmailBackend"
LOCMEM: Final = "django.core.mail.backends.locmem.EmailBackend"
# Writes what Anymail hands to the provider.
RECEIVER: Final = """
from pprint import pformat

from anymail.exceptions import AnymailCancelSend
from anymail.signals import post_send, pre_send
from django.dispatch import receiver


@receiver(pre_send)
def cancel(message, **_):
    if message.subject == "cancelled":
        raise AnymailCancelSend


@receiver(post_send)
def write(message, esp_name, **_):
    if esp_name == "Test":
        parameters = dict(message.anymail_test_params)
        parameters["send_at"] = parameters["send_at"].timestamp()
        parameters["attachments"] = [vars(one) | {"_attachment": None} for one in parameters.get("attachments", ())]
        with open("handed-over", "a") as file:
            print(type(message).__name__, pformat(parameters, width=100_000), file=file)
"""
ANYMAIL_MESSAGES: Final = r"""
from datetime import date, datetime, timezone
from email.mime.image import MIMEImage
from anymail.message import AnymailMessage, attach_inline_image
from django.core import mail
from django.core.mail import EmailMessage
from django.utils.translation import gettext_lazy as _
from pgoutbox.contrib.django.mail import EmailBackend

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))


def of(name):
    return mail.mailers[name] if hasattr(mail, "mailers") else EmailBackend(deliver_with=name.partition(":")[2] or name)


full = AnymailMessage(
    subject=_("Hello"), body="text", to=["Ann <ann@example.org>", "bo@example.org"], tags=["a", _("b")],
    cc=["c@example.org"], metadata={"order": 7, "nested": {"a": [1, None, True]}},
    merge_data={"ann@example.org": {"name": "Ann", "n": 1.5}},
    merge_global_data={"year": 2026}, merge_metadata={"ann@example.org": {"id": 1}}, template_id="welcome",
    merge_headers={"ann@example.org": {"List-Unsubscribe": "<https://example.org/u>"}},
    esp_extra={"stream": {"x": [1]}},
    envelope_sender="bounces@example.org", track_opens=True, track_clicks=False, reply_to=["r@example.org"],
    send_at=datetime(2027, 1, 2, 3, 4, 5, 678, timezone.utc), headers={"X-Number": 5},
)
full.attach_alternative("<b>html</b>", "text/html")
attach_inline_image(full, PNG, "logo.png", idstring="logo")
full.attach("a.txt", "Größe", "text/plain")
full.attach("a.bin", PNG, "application/x-data")
inner = EmailMessage("inner", "text", to=["x@example.org"], headers={"Message-ID": "<1@x>", "Date": "now"})
full.attach("b.eml", inner, "message/rfc822")
template = EmailMessage(to=["ann@example.org"])
template.subject = template.from_email = None
template.template_id = 123
template.send_at = date(2027, 1, 2)
messages = [full, template]
"""
REFUSALS: Final = """
for number in range(6):
    of("outbox:" + POSTMARK).send_messages([EmailMessage(f"postmark {number}", to=["ann@example.org"])])
of("outbox:" + POSTMARK).send_messages([EmailMessage("cancelled", to=["ann@example.org"])])
unsupported = EmailMessage("Postmark cannot", to=["ann@example.org"])
unsupported.envelope_sender = "bounces@example.org"
of("outbox:" + POSTMARK).send_messages([unsupported])
for number in range(3):
    of("outbox:" + SMTP).send_messages([EmailMessage(f"smtp {number}", to=["ann@example.org"])])
for value in (object(), datetime.now()):
    message = EmailMessage("not JSON", to=["ann@example.org"])
    message.metadata = {"key": value}
    try:
        of("outbox:" + TESTING).send_messages([message])
        raise AssertionError
    except ValueError as error:
        assert "payload.email.others.metadata.key" in str(error), error


class Local(EmailMessage):
    pass


try:
    of("outbox:" + TESTING).send_messages([Local("local", to=["ann@example.org"])])
    raise AssertionError
except TypeError as error:
    assert "cannot store the e-mail class" in str(error)
try:
    of("outbox:" + TESTING).send_messages([EmailMessage("a\\nb", to=["ann@example.org"])])
    raise AssertionError
except ValueError:
    pass
"""


async def test_anymail_gets_the_same_email_and_refusals_have_the_right_outcomes(project: Project) -> None:
    (project.directory / "members" / "outbox.py").write_text(RECEIVER)
    refused = b'{"ErrorCode": 406, "Message": "Found inactive addresses: ann@example.org. Inactive recipients are"}'
    other = b'{"ErrorCode": 10, "Message": "no"}'
    answers = [answer(status, other) for status in (401, 429, 500, 413)]
    taken = b'{"ErrorCode": 0, "Message": "OK", "To": "ann@example.org", "MessageID": "1"}'
    replies = {"connect": ["220 mx.test", "220 mx.test", "554 mx.test closed"], "RCPT": ["550 unknown", "450 later"]}
    async with (
        webhook_server(answer(422, refused), answer(200, taken), *answers) as http,
        scripted_server(replies) as smtp,
    ):
        project.set(ANYMAIL={"POSTMARK_SERVER_TOKEN": "t", "POSTMARK_API_URL": http.url("/", scheme="http")})
        if django.VERSION >= (6, 1):
            mailers: dict[str, object] = {"default": {"BACKEND": LOCMEM}}
            for name in (TESTING, POSTMARK, SMTP):
                options = {"host": "127.0.0.1", "port": smtp.port} if name == SMTP else {}
                mailers[name] = {"BACKEND": name, "OPTIONS": options}
                mailers[f"outbox:{name}"] = {"BACKEND": BACKEND, "OPTIONS": {"deliver_with": name}}
            project.set(MAILERS=mailers)
        else:
            project.set(EMAIL_HOST="127.0.0.1", EMAIL_PORT=smtp.port)
        await project.run(
            f"TESTING, POSTMARK, SMTP = {TESTING!r}, {POSTMARK!r}, {SMTP!r}\n{ANYMAIL_MESSAGES}\n"
            "assert of('outbox:' + TESTING).send_messages(messages) == 2\n"
            "direct = mail.mailers[TESTING] if hasattr(mail, 'mailers') else mail.get_connection(TESTING)\n"
            f"assert direct.send_messages(messages) == 2\n{REFUSALS}"
        )
        await project.manage("pgoutbox", "worker", "--once", "--concurrency", "1")
    direct, direct_template, through, template = (project.directory / "handed-over").read_text().splitlines()
    assert through == direct
    assert template == direct_template
    assert "logo.png" in direct
    assert "1798859045.000678" in direct
    assert json.loads(http.received[1].body)["Subject"] == "postmark 1"
    with psycopg.connect(project.dsn) as connection:
        rows = connection.execute(
            "SELECT state, max_attempts - attempt_count FROM pgoutbox.message ORDER BY id"
        ).fetchall()
    sent, failed, again, blocked = ("sent", 10), ("failed", 10), ("pending", 10), ("pending", 11)
    assert rows[:2] == [sent, sent]
    assert rows[2:10] == [failed, sent, blocked, again, again, failed, ("skipped", 10), failed]  # Postmark.
    assert rows[10:] == [failed, again, blocked]  # SMTP.


# --- a killed worker --------------------------------------------------------------------------------------------------

TWO: Final = f"""
{ROLLED_BACK}
with transaction.atomic():
    send_mail("First", "text", None, ["ann@example.org"])
    send_mail("Second", "text", None, ["ann@example.org"])
"""


async def test_after_kill_9_another_worker_sends_once_unless_the_server_had_accepted_the_data(project: Project) -> None:
    """The first worker dies before MAIL FROM, the second while the server has the e-mail and has not answered."""
    async with scripted_server({"MAIL": [Misbehaviour.HANG], ".": ["250 taken", Misbehaviour.HANG]}) as server:
        project.send_by(server.port, LEASE_SECONDS=1, POLL_INTERVAL_SECONDS=1)
        await project.run(TWO)
        assert states(project) == [("django.mail", "pending")] * 2
        with psycopg.connect(project.dsn, autocommit=True) as connection:
            connection.execute("UPDATE pgoutbox.message SET available_at = now() + interval '1 h' WHERE id = 3")
            workers = [project.start("pgoutbox", "worker")]
            try:
                await server.is_silent.wait()
                workers.append(project.start("pgoutbox", "worker"))
                await until(lambda: connection.execute("SELECT count(*) FROM pgoutbox.worker").fetchone() == (2,))
                workers[0].send_signal(signal.SIGKILL)
                await until(lambda: ("django.mail", "sent") in states(project))
                assert [parsed(one)["subject"] for one in server.contents] == ["First"]

                server.is_silent.clear()
                connection.execute("UPDATE pgoutbox.message SET available_at = now() WHERE id = 3")
                await server.is_silent.wait()
                workers[1].send_signal(signal.SIGKILL)
                workers.append(project.start("pgoutbox", "worker"))
                await until(are_sent(project, 2))
            finally:
                for worker in workers:
                    worker.send_signal(signal.SIGKILL)
                    worker.wait()
    first, *second = [parsed(one) for one in server.contents]
    assert first["subject"] == "First"
    assert [one["subject"] for one in second] == ["Second", "Second"]
    assert len({one["message-id"] for one in second}) == 1


# --- the pages for those who move -------------------------------------------------------------------------------------

QUEUED: Final = """
from datetime import timedelta
from django.core.mail import send_mail
from django.utils import timezone
from post_office import mail
from post_office.models import EmailTemplate

EmailTemplate.objects.create(name="welcome", subject="Welcome {{ name }}", content="Hello")
send_mail("From send_mail", "text", None, ["ann@example.org"])
many = {"recipients": ["ann@example.org"], "sender": "club@example.org", "context": {"name": "Ann"}}
mail.send(template="welcome", render_on_delivery=True, **many)
mail.send(subject="Tomorrow", scheduled_time=timezone.now() + timedelta(days=1), **many)
mail.send(subject="Expired", expires_at=timezone.now(), **many)
"""
MOVED: Final = """
from django.db import transaction
from members.sign_up import sign_up
from post_office import mail

for is_committed in (False, True):
    with transaction.atomic():
        sign_up("ann")
        mail.send("ann@example.org", "club@example.org", subject="Through both", message="text")
        transaction.set_rollback(not is_committed)
"""
LEFT: Final = """
from django.contrib.auth.models import User
from post_office.models import Email

assert User.objects.get().is_active
print(sorted((one.subject, one.get_status_display()) for one in Email.objects.all()))
"""


def _with_mailers(settings: str) -> str:
    """Return settings of the page, for Django 6.1 as the page on Django says."""
    if django.VERSION < (6, 1):
        return settings
    settings = settings.replace('"BACKENDS": {"default": EMAIL_BACKEND}, ', "")
    return re.sub(r'EMAIL_BACKEND = "(.*)"', r'MAILERS = {"default": {"BACKEND": "\1"}}', settings)


async def test_the_pages_lead_from_celery_and_from_django_post_office(new_project: Project) -> None:
    project = new_project
    for block in blocks_of(DOCS / "how-to/from-celery.md", "python"):
        name = block.text.partition("\n")[0].removeprefix("# ")
        (project.directory / name).write_text(block.text)
    before, after, script = (one.text for one in blocks_of(DOCS / "how-to/from-django-post-office.md", "python"))
    (move,) = blocks_of(DOCS / "how-to/from-django-post-office.md", "sh")
    (project.directory / "move_queue.py").write_text(script)
    file = project.directory / "club" / "settings.py"
    common = file.read_text()
    file.write_text(common + _with_mailers(before))
    await project.manage("migrate", "-v0")
    await project.run(QUEUED)
    async with accepting_server() as inbox:
        file.write_text(common.replace('"pgoutbox.contrib.django", ', "") + _with_mailers(after))
        project.set(PGOUTBOX={"SMTP_HOST": "127.0.0.1", "SMTP_PORT": inbox.port, "SMTP_SECURITY": "none"})
        await project.run(MOVED)
        await project.type(move.text)
        left = await project.run(LEFT)
    subjects = ["From send_mail", "Through both", "Welcome Ann"]
    assert sorted(str(parsed(one.content)["subject"]) for one in inbox.received) == subjects
    assert "('Expired', 'queued')" in left
    assert "('Tomorrow', 'queued')" in left
    assert left.count("'sent'") == 3


# --- differences from the SMTP backend --------------------------------------------------------------------------------

# What Django's own SMTP backend hands to the server, or did in some release.
UNUSUAL: Final = (
    '"quoted"@x.test', "Ann <a@[127.0.0.1]>", f"{'l' * 65}@x.test", "jürgen@club.test", "jane.@x.test", "root",
    '"a, b"@x.test',
)  # fmt: skip
ENQUEUED: Final = """
from django.core.mail import EmailMessage

for address in UNUSUAL:
    assert EmailMessage("to", "text", to=[address]).send() == 1, address
assert EmailMessage("from", "text", "webmaster", ["ann@x.test"]).send() == 1
"""


async def test_an_address_that_smtp_may_refuse_is_enqueued_and_ends_with_a_reason(project: Project) -> None:
    async with accepting_server() as inbox:
        project.send_by(inbox.port)
        await project.run(f"UNUSUAL = {UNUSUAL!r}\n{ENQUEUED}")
        await project.manage("pgoutbox", "worker", "--once")
    with psycopg.connect(project.dsn) as connection:
        rows = connection.execute("SELECT state, last_error FROM pgoutbox.message_view ORDER BY id").fetchall()
    assert len(rows) == len(UNUSUAL) + 1
    assert {state for state, _ in rows} <= {"sent", "failed"}
    reasons = [reason for state, reason in rows if state == "failed"]
    assert [reason for reason in reasons if not re.match(r"raw_email\.(to\[0\]|envelope_sender): \w", reason)] == []


SILENT: Final = """
from django.core import mail
from django.core.mail import EmailMessage, send_mass_mail
from django.db import transaction
from pgoutbox.contrib.django.mail import EmailBackend

good, bad = EmailMessage("good", "text", to=["a@x.test"]), EmailMessage("bad", "text", to=["a@x.test, b@x.test"])
folded, large = EmailMessage("a\\nb", to=["a@x.test"]), EmailMessage("large", "x" * 20_000_000, to=["a@x.test"])
silent = EmailBackend(fail_silently=True)
with transaction.atomic():
    assert silent.send_messages([good, bad, folded, large, good]) == 2
assert silent.send_messages([bad]) == 0
try:
    EmailBackend().send_messages([good, bad, good])
    raise AssertionError
except ValueError:
    pass
if not hasattr(mail, "mailers"):
    data = [("mass", "text", None, [address]) for address in ("a@x.test", "a@x.test, b@x.test", "c@x.test")]
    assert send_mass_mail(data, fail_silently=True) == 2
    assert bad.send(fail_silently=True) == 0
"""


async def test_fail_silently_skips_and_logs_refused_emails_and_counts_the_others(project: Project) -> None:
    project.send_by()
    printed = await project.run(SILENT)
    assert len(states(project)) == (2 if django.VERSION >= (6, 1) else 4)
    assert printed.count("an e-mail could not be enqueued") >= 3
    assert "b@x.test" not in printed


MAIL_OUTBOX: Final = """
from django.core import mail
from django.core.mail import EmailMessage
from pgoutbox.contrib.django.test import OutboxTestCase


class MailTest(OutboxTestCase):
    def test_an_email_that_the_backend_refuses_is_refused(self):
        with self.assertRaisesRegex(ValueError, "Invalid address"):
            EmailMessage("two", "text", to=["a@x.test, b@x.test"]).send()
        if not hasattr(mail, "mailers"):
            self.assertEqual(EmailMessage("two", to=["a@x.test, b@x.test"]).send(fail_silently=True), 0)
        with self.assertRaisesRegex(ValueError, "payload"):
            EmailMessage("large", "x" * 20_000_000, to=["a@x.test"]).send()
        self.assertEqual(EmailMessage("umlaut", "text", to=["jürgen@club.test"]).send(), 1)
        self.assertEqual([message.subject for message in mail.outbox], ["umlaut"])
        self.assertEqual(self.driver.messages(), [])
"""


async def test_mail_outbox_of_a_test_refuses_what_the_backend_refuses(project: Project) -> None:
    project.send_by()
    (project.directory / "members" / "tests.py").write_text(MAIL_OUTBOX)
    assert "OK" in await project.manage("test", "members")
    if django.VERSION > (6, 1):
        project.set(MAILERS={"default": {"BACKEND": LOCMEM}})
    else:
        project.set(EMAIL_BACKEND=LOCMEM)
    assert "FAILED (failures=1)" in await project.manage("test", "members", code=1)


async def test_a_project_starts_with_a_backend_that_is_no_class_or_is_missing(project: Project) -> None:
    (project.directory / "members" / "backends.py").write_text("def connect(**options): ...\n")
    for name in ("connect", "missing"):
        path = f"members.backends.{name}"
        if django.VERSION > (6, 1):
            project.set(MAILERS={"default": {"BACKEND": path}})
        else:
            project.set(EMAIL_BACKEND=path)
        assert "no issues" in await project.manage("check")


# --- links that sign their reader in ----------------------------------------------------------------------------------


async def test_check_warns_of_links_that_anybody_who_reads_the_queue_could_use(project: Project) -> None:
    assert "pgoutbox.mail-readable" not in await project.manage("check")
    project.send_by()
    shown = await project.manage("check")
    assert "(pgoutbox.mail-readable)" in shown
    assert "ENCRYPTION_KEYS" in shown
    assert "pgoutbox retention set django.mail" in shown
    await project.manage("migrate", "-v0", "--check")
    project.set(SILENCED_SYSTEM_CHECKS=["pgoutbox.mail-readable"])
    assert "pgoutbox.mail-readable)" not in await project.manage("check")
    project.set(SILENCED_SYSTEM_CHECKS=[])
    project.send_by(ENCRYPTION_KEYS=Fernet.generate_key().decode())
    assert "pgoutbox.mail-readable" not in await project.manage("check")


RESET: Final = """
import re
from django.contrib.auth.models import User
from django.test import Client

User.objects.create_user("ada", "ada@x.test", "old")
answer = Client().post("/reset/", {"email": "ada@x.test"}, headers={"host": "localhost"})
assert answer.status_code == 302, answer.status_code
"""
USED: Final = """
import sys
from django.contrib.auth.models import User
from django.test import Client

client = Client(headers={"host": "localhost"})
form = client.get(LINK, follow=True).request["PATH_INFO"]
answer = client.post(form, {"new_password1": "a-new-password", "new_password2": "a-new-password"})
assert User.objects.get().check_password("a-new-password"), answer.content
"""


async def test_the_recipe_of_the_page_renders_the_link_of_a_password_reset_when_it_is_sent(project: Project) -> None:
    recipe = [b.text for b in blocks_of(DOCS / "how-to/django.md", "python") if "reset" in b.text]
    assert len(recipe) == 3
    for text in recipe:
        name = text.partition("\n")[0].removeprefix("# ")
        with (project.directory / name).open("a") as file:
            file.write(text)
    with (project.directory / "club" / "urls.py").open("a") as file:
        file.write('urlpatterns += [path("done/", PasswordResetView.as_view(), name="password_reset_complete")]\n')
    templates = project.directory / "members" / "templates" / "registration"
    templates.mkdir(parents=True)
    for name in ("password_reset_form", "password_reset_done", "password_reset_confirm"):
        (templates / f"{name}.html").write_text("{{ form }}")
    async with accepting_server() as inbox:
        project.send_by(inbox.port)
        project.set(ALLOWED_HOSTS=["localhost"], MIDDLEWARE=["django.contrib.sessions.middleware.SessionMiddleware"])
        with (project.directory / project.settings).open("a") as file:
            file.write('INSTALLED_APPS += ["django.contrib.sessions"]\n')
        await project.manage("migrate", "-v0")
        await project.run(RESET)
        with psycopg.connect(project.dsn) as connection:
            rows = connection.execute("SELECT topic, payload::text FROM pgoutbox.message").fetchall()
        assert [topic for topic, _ in rows] == ["mail.reset"]
        assert "/reset/" not in rows[0][1]
        await project.manage("pgoutbox", "worker", "--once")
        (received,) = inbox.received
    link = re.search(r"http://localhost(/reset/\S+)", parsed(received.content).get_content())
    assert link is not None
    await project.run(f"LINK = {link[1]!r}\n{USED}")

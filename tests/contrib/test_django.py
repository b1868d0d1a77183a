"""Tests a real Django project whose only change is its settings: the schema, handlers, commands, checks and e-mail."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Final

import django
import psycopg
import pytest

from tests.support.django_project import ROLLED_BACK, Project, are_sent, states
from tests.support.pages import DOCS, blocks_of
from tests.support.smtp_server import accepting_server, parsed
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

TEMPLATES: Final = ("password_reset_form.html", "password_reset_done.html", "password_reset_email.html")


CALLED: Final = """
import io, os
from django.core.management import call_command

before, out = os.environ.copy(), io.StringIO()
call_command("pgoutbox", "list", "--state", "pending", stdout=out)
assert os.environ == before
print(out.getvalue())
"""

# --- schema, commands, checks -----------------------------------------------------------------------------------------


async def test_migrate_brings_the_schema_and_the_commands_know_the_project(new_project: Project) -> None:
    assert "the schema is at pgoutbox_0001" in await new_project.manage("migrate")
    assert "the schema is at" not in await new_project.manage("migrate")
    await new_project.manage("makemigrations", "--check")
    assert "mail.welcome" in await new_project.manage("pgoutbox", "topics")
    await new_project.manage("pgoutbox", "enqueue", "mail.welcome", "{}", "--destination", "mailto:ann@example.org")
    assert "pending" in await new_project.manage("pgoutbox", "list", "--settings=club.settings")
    assert "No such command" in await new_project.manage("pgoutbox", "nonsense", code=2)
    assert "mail.welcome" in await new_project.run(CALLED)


async def test_a_schema_of_a_newer_package_stops_migrate_and_check_names_it(project: Project) -> None:
    with psycopg.connect(project.dsn) as connection:
        connection.execute("UPDATE pgoutbox.alembic_version SET version_num = 'pgoutbox_9999'")
        connection.execute("INSERT INTO pgoutbox.revision SELECT now(), 9999, '0.1', '99.1', 'x'")
    assert "the schema pgoutbox is at pgoutbox_9999, and this version of the package" in await project.manage(
        "migrate", code=1
    )
    assert "pgoutbox.schema-outdated" in await project.manage("check", "--database", "default")


async def test_check_names_a_database_that_does_not_answer(new_project: Project) -> None:
    new_project.set(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "HOST": "/nowhere", "NAME": "x"}})
    assert "pgoutbox.database-unreachable" in await new_project.manage("check", "--database", "default", code=0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"SMPT_HOST": "mail.example.org"}, "PGOUTBOX['SMPT_HOST']: unknown setting; did you mean 'SMTP_HOST'?"),
        ({"DATABASE": "nowhere"}, "PGOUTBOX['DATABASE']: DATABASES has no 'nowhere'"),
        ({"DSN": "postgresql:///"}, "PGOUTBOX['DSN']: name a database of DATABASES by 'DATABASE'"),
        ({"DSNS": "a postgresql:///"}, "PGOUTBOX['DSNS']: name a database of DATABASES by 'DATABASE'"),
        ({"SMTP_PORT": "many"}, "PGOUTBOX_SMTP_PORT"),
        ({"QUEUES": ["a"]}, "PGOUTBOX['QUEUES']: unknown setting"),
        ({"REDACT": ["a"]}, "PGOUTBOX['REDACT']: must be text, a number or a boolean"),
        ("mail", "PGOUTBOX: must be a dictionary, not str"),
    ],
)
async def test_a_wrong_setting_is_named(new_project: Project, value: object, text: str) -> None:
    new_project.send_by()
    new_project.set(PGOUTBOX=value)
    shown = await new_project.manage("check", code=1)
    assert text in shown
    assert "Traceback" not in shown or not isinstance(value, dict)


async def test_another_database_and_a_database_that_is_not_postgresql(new_project: Project) -> None:
    with (new_project.directory / "club" / "settings.py").open("a") as file:
        file.write("DATABASES = {'default': {'ENGINE': 'django.db.backends.sqlite3', 'NAME': 'db.sqlite3'}, ")
        file.write("'mail': {'ENGINE': 'django.db.backends.postgresql', **DATABASE}}\n")
    assert "DATABASES['default']: pgoutbox needs PostgreSQL, not sqlite" in await new_project.manage("check", code=1)
    new_project.set(PGOUTBOX={"DATABASE": "mail"})
    assert "the schema is at" not in await new_project.manage("migrate")
    assert "the schema is at" in await new_project.manage("migrate", "--database", "mail")


async def test_check_names_topics_without_a_handler_and_what_the_doctor_finds(project: Project) -> None:
    with (project.directory / "members" / "outbox.py").open("a") as file:
        file.write("\noutbox.define(Topic('mail.farewell'))\n")
    assert "the topic 'mail.farewell' has no handler" in await project.manage("check")
    await project.manage("pgoutbox", "enqueue", "mail.farewell", "{}")
    assert "(pgoutbox." not in await project.manage("check", "--database", "default", "--tag", "database")
    found = await project.manage("check", "--database", "default", "--tag", "database", "--deploy")
    assert "(pgoutbox." in found


# --- e-mail -----------------------------------------------------------------------------------------------------------

SEND: Final = f"""
{ROLLED_BACK}
send_mail("Outside", "of a transaction", None, ["ann@example.org"])
with transaction.atomic():
    message = EmailMultiAlternatives("Grüße", "text", None, ["Bo <bo@example.org>"], bcc=["eve@example.org"])
    message.attach_alternative("<p>html</p>", "text/html")
    message.attach("data.bin", bytes(range(256)) * 400, "application/x-data")
    message.send()
assert EmailMultiAlternatives("Nobody", "reads it").send() == 0
"""


async def test_an_email_commits_with_the_transaction_and_is_sent_by_smtp_once(project: Project) -> None:
    async with accepting_server() as inbox:
        project.send_by(inbox.port)
        await project.run(SEND)
        assert states(project) == [("django.mail", "pending")] * 2
        workers = [project.start("pgoutbox", "worker") for _ in range(2)]
        try:
            await until(are_sent(project, 2))
        finally:
            for worker in workers:
                worker.send_signal(signal.SIGKILL)
                worker.wait()
    outside, inside = sorted(inbox.received, key=lambda one: len(one.recipients))
    assert (outside.sender, outside.recipients) == ("club@example.org", ["ann@example.org"])
    assert parsed(outside.content)["from"] == "The club <club@example.org>"
    assert inside.recipients == ["bo@example.org", "eve@example.org"]
    message = parsed(inside.content)
    assert (message["subject"], message["to"]) == ("Grüße", "Bo <bo@example.org>")
    assert b"eve" not in inside.content
    (attachment,) = message.iter_attachments()
    assert attachment.get_content() == bytes(range(256)) * 400


async def test_a_password_reset_is_sent_and_its_link_is_hidden_from_operators(project: Project) -> None:
    async with accepting_server() as inbox:
        project.send_by(inbox.port)
        project.set(ALLOWED_HOSTS=["testserver"])
        folder = project.directory / "members" / "templates" / "registration"
        folder.mkdir(parents=True)
        for name in TEMPLATES:
            (folder / name).write_text(
                "{% if token %}{% url 'password_reset_confirm' uidb64=uid token=token %}{% endif %}"
            )
        await project.run(
            "from django.contrib.auth.models import User; from django.test import Client\n"
            "User.objects.create_user('ann', 'ann@example.org', 'a-password')\n"
            "assert Client().post('/reset/', {'email': 'ann@example.org'}).status_code == 302"
        )
        shown = await project.manage("pgoutbox", "show", "1", "--json")
        await project.manage("pgoutbox", "worker", "--once")
    (received,) = inbox.received
    assert "/reset/" in parsed(received.content).get_content()
    assert '"data": "(redacted)"' in shown


async def test_an_email_with_two_addresses_in_one_is_refused_and_with_a_broken_header_too(project: Project) -> None:
    project.send_by()
    for arguments in ("'x', 'y', None, ['ann@example.org, bo@example.org']", "'a\\nb', 'y', None, ['ann@example.org']"):
        failed = await project.run(f"from django.core.mail import send_mail; send_mail({arguments})", code=1)
        assert "Invalid address" in failed or "Header values may" in failed or "Header values can't" in failed
    assert states(project) == []


async def test_an_encryption_key_encrypts_the_emails(project: Project) -> None:
    from cryptography.fernet import Fernet

    async with accepting_server() as inbox:
        project.send_by(inbox.port, ENCRYPTION_KEYS=Fernet.generate_key().decode())
        await project.run(
            "from django.core.mail import send_mail; send_mail('x', 'a secret', None, ['ann@example.org'])"
        )
        with psycopg.connect(project.dsn) as connection:
            ((payload,),) = connection.execute("SELECT payload::text FROM pgoutbox.message").fetchall()
        await project.manage("pgoutbox", "worker", "--once")
    assert "ann@" not in payload.replace("mailto:", "")
    assert "data" not in payload
    assert [parsed(one.content).get_content() for one in inbox.received] == ["a secret\r\n"]


MAILER: Final = """
from django.core.mail.backends.base import BaseEmailBackend


class Refusal(Exception):
    status_code = 422


class EmailBackend(BaseEmailBackend):
    def send_messages(self, messages):
        with open("delivered", "a") as file:
            for one in messages:
                if "refused" in one.subject:
                    raise Refusal("no such template")
                file.write(f"{type(one).__name__} {one.subject} {one.to} {one.attachments} {one.alternatives} ")
                file.write(f"{getattr(one, 'tags', None)} {one.extra_headers} {one.body}\\n")
        return None if messages[0].subject == "Outside" else len(messages)
"""


async def test_another_mailer_gets_the_same_email_and_its_refusals_are_final(project: Project) -> None:
    (project.directory / "members" / "mailer.py").write_text(MAILER)
    project.send_by(deliver_with="members.mailer.EmailBackend")
    await project.run(
        SEND.replace("message.send()", "message.tags = ['new']; message.extra_headers['X-A'] = 'b'; message.send()")
        + "send_mail('refused', 'text', None, ['ann@example.org'])"
    )
    await project.manage("pgoutbox", "worker", "--once")
    assert [state for _, state in states(project)] == ["sent", "sent", "failed"]
    first, second = sorted((project.directory / "delivered").read_text().splitlines(), reverse=True)
    assert "Outside ['ann@example.org'] [] []" in first
    for part in ("Grüße ['Bo <bo@example.org>']", "data.bin", "<p>html</p>", "['new'] {'X-A': 'b'} text"):
        assert part in second


async def test_a_mailer_that_does_not_exist_holds_the_emails_and_uses_up_no_attempt(project: Project) -> None:
    project.send_by(deliver_with="members.nowhere.EmailBackend")
    await project.run("from django.core.mail import send_mail; send_mail('x', 'y', None, ['ann@example.org'])")
    await project.manage("pgoutbox", "worker", "--once")
    with psycopg.connect(project.dsn) as connection:
        row = connection.execute(
            "SELECT state, max_attempts - attempt_count, last_error FROM pgoutbox.message"
        ).fetchone()
    assert row is not None
    assert row[:2] == ("pending", 11)
    assert "members.nowhere" in row[2]


# --- the page ---------------------------------------------------------------------------------------------------------


async def test_the_page_leads_from_a_new_project_to_a_delivered_email(new_project: Project, tmp_path: Path) -> None:
    page = DOCS / "how-to/django.md"
    reader = Project(tmp_path / "reader", new_project.dsn)
    reader.directory.mkdir()
    start, deliver, test, _ = (block.text for block in blocks_of(page, "sh"))
    await reader.type(start.partition("\n")[2])  # Both packages are installed here.
    for block in blocks_of(page, "python"):
        if named := re.match(r"# (\w+/\w+\.py)\n", block.text):
            with (reader.directory / named[1]).open("a") as file:
                text = re.sub(r'"NAME": "app".*"localhost"', f"**{new_project.database!r}", block.text)
                if django.VERSION < (6, 1):  # As the page says.
                    text = re.sub(r'MAILERS = .*"(pgoutbox.*)"}}', r'EMAIL_BACKEND = "\1"', text)
                file.write(text)
    shown = await reader.type(deliver)
    assert "the schema is at" in shown
    assert shown.count("\tsent\t") == 2
    assert states(reader) == [("mail.welcome", "sent"), ("django.mail", "sent")]
    assert "Ran 1 test" in await reader.type(test.partition("\n")[2])
    assert states(reader) == [("mail.welcome", "sent"), ("django.mail", "sent")]

"""Tests the messages in Django's admin by real requests of real users, against a real project."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import psycopg
import pytest

from tests.support.shop import TOLD_ID, fill

if TYPE_CHECKING:
    from tests.support.django_project import Project

pytestmark = pytest.mark.slow

HANDLERS: Final = """
from pgoutbox import Topic
from pgoutbox.contrib.django import outbox

outbox.define(Topic("webhook.order", redact=("total",), queue="webhooks"))
"""
# The functions of the programs below. `page` returns the text of a page, `act` posts an action of the list.
USERS: Final = """
import re
from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from pgoutbox.contrib.django import conf

LIST = "/admin/pgoutbox/message/"

def user(name, *permissions):
    made, _ = User.objects.get_or_create(username=name, is_staff=True)
    made.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(made)
    return client

viewer, operator = user("eve", "view_message"), user("ada", "view_message", "change_message")

def page(client, path="", status=200):
    response = client.get(LIST + path)
    assert response.status_code == status, (path, response.status_code)
    return response.content.decode()

def post(client, path, **fields):
    response = client.post(LIST + path, fields)
    return response.status_code, [str(one) for one in get_messages(response.wsgi_request)]

def act(client, action, *ids, path="", **fields):
    return post(client, path, action=action, _selected_action=ids, **fields)

def ids(path=""):
    return [int(found) for found in re.findall(r"message/([0-9]+)/change", page(operator, path))]

def count(path=""):
    return int(re.search(r'class="paginator".*?([0-9]+) messages?\\s*<', page(operator, path), re.DOTALL)[1])
"""


async def staff(project: Project, **settings: object) -> None:
    """Give a project the admin, and the messages of the shop."""
    (project.directory / "members" / "outbox.py").write_text(HANDLERS)
    project.add_admin(ALLOWED_HOSTS=["testserver"], **settings)
    await project.run(MIGRATE)
    with psycopg.connect(project.dsn) as connection:
        fill(connection)
        connection.execute("SELECT setval('pgoutbox.message_id_seq', 40000)")


async def test_pages_show_search_and_filter_messages_in_few_queries_and_hide_values(new_project: Project) -> None:
    sqlite = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(new_project.directory / "db.sqlite3")}
    postgresql = {"ENGINE": "django.db.backends.postgresql", **new_project.database}
    databases = {"default": sqlite, "mail": postgresql}
    await staff(new_project, DATABASES=databases, PGOUTBOX={"DATABASE": "mail"})
    with psycopg.connect(new_project.dsn) as connection:
        change = "owner = 'ann', fair_key = 'tenant-7', last_error = 'total=59.90, password=x'"
        connection.execute(f"UPDATE pgoutbox.message SET {change} WHERE id = %s".encode(), [TOLD_ID])
        connection.execute("UPDATE pgoutbox.message SET last_error = U&'cod.\\202Eexe' WHERE id = 9890")
        # The list searches 25,000 rows, and these are as many with those above, without the first 100.
        connection.execute(
            "INSERT INTO pgoutbox.message (id, topic, payload)"
            " SELECT i, 'mail.bulk', '{}' FROM generate_series(20001, 35099) AS i"
        )
    await new_project.run(USERS + PAGES)


MIGRATE: Final = """
from django.conf import settings
from django.core.management import call_command

for name in settings.DATABASES:
    call_command("migrate", database=name, verbosity=0)
call_command("makemigrations", "--check")
"""
PAGES: Final = """
# The list, its filters and its search.
assert ids() == list(range(35_099, 35_049, -1)), ids()
assert count() == 25_000, count()
assert (count("?state__exact=failed"), count("?state__exact=sending")) == (434, 10)
assert ids("?topic=webhook.order&state__exact=failed")[:2] == [10_001, 9_890] and ids("?topic=nothing") == []
assert ids("?queue=webhooks&p=2")[0] == 9_802
assert ids("?q=17") == [17] and ids("?q=order-4711") == [10_001] == ids("?q=ann") and ids("?q=x") == []
assert ids("?q=tenant-7") == [10_001] and ids("?q=user-9990") == [9_990] and ids("?q=9999999999999999999999") == []
assert ids("?created_at__lt=2000-01-01 00:00:00Z") == []
listed = page(operator, "?queue=webhooks")
for text in ("webhook.order", "4/11", "https://shop7.example.org/hook", "total=(redacted)"):
    assert text in listed, text
assert "59.90" not in listed and "Add message" not in listed
for path in ("?last_error__contains=59", "?owner__startswith=a", "?payload__x=1"):
    page(operator, path, status=400)

# Characters that change the direction of text are escaped, and a filter with a NUL is answered as an invalid one.
for text in (page(operator, "9890/change/"), page(operator, "?state__exact=failed")):
    assert "cod.\\\\u202eexe" in text and "\u202e" not in text
for name in ("topic", "queue", "state__exact", "q", "created_at__gte"):
    assert operator.get(LIST + f"?{name}=a%00").headers["location"] == LIST + "?e=1", name
    assert post(operator, f"?{name}=a%00", action="redrive", _selected_action=1)[0] == 302, name

# The filters offer the topics and queues of messages too that no application defines.
listed = page(operator)
assert "?topic=mail.bulk" in listed and "?queue=webhooks" in listed and "pgoutbox/admin.css" in listed

# The page of a message.
shown = page(operator, "10001/change/")
for text in ("&quot;order&quot;: 4711", "&quot;total&quot;: &quot;(redacted)&quot;", "total=(redacted)"):
    assert text in shown, text
assert "hidden here" not in shown and "59.90" not in shown
assert shown.count("HTTP 503 from shop3.example.org") == 3
assert re.findall(r'name="act" value="([a-z]+)"', shown) == ["redrive", "dismiss"]
assert "no running worker serves its queue" in page(operator, "9988/change/")
assert 'href="/admin/pgoutbox/message/36/change/"' in page(operator, "31/change/")
for missing in ("77777", "99999999999999999999", "x"):
    page(operator, f"{missing}/change/", status=302)

# A viewer sees no values and no acts.
shown = page(viewer, "10001/change/")
assert "order-4711" in shown and "HTTP 503" in shown and 'name="act"' not in shown
assert "4711" not in shown.replace("order-4711", "")
listed = page(viewer)
assert "mail.bulk" in listed and 'name="action"' not in listed

# The queries are as many for 50 messages as for one: session, user and two for permissions, and those of the outbox.
for path in ("", "?state__exact=sent", "?q=17", "10001/change/"):
    with CaptureQueriesContext(connections["default"]) as own, CaptureQueriesContext(connections["mail"]) as found:
        page(operator, path)
    if "change" not in path:
        assert all("set_config" in one["sql"] for one in found[1:3]), "the timeout holds for all statements of the page"
    words = [one["sql"].lstrip("(").split()[0] for one in found]
    searched = ["SELECT"] * 2 if "q=" in path else []
    expected = [] if "change" in path else ["BEGIN", *["SELECT"] * 5, *searched, *["SELECT"] * 2, "COMMIT"]
    assert len(own) == 4 and words == expected, (path, own.captured_queries, found.captured_queries)
"""


async def test_acts_change_what_they_can_tell_the_rest_and_are_audited_and_only_for_permitted_users(
    new_project: Project,
) -> None:
    database = {"ENGINE": "django.db.backends.postgresql", **new_project.database, "ATOMIC_REQUESTS": True}
    await staff(new_project, DATABASES={"default": database})
    await new_project.run(USERS + REFUSALS)
    with psycopg.connect(new_project.dsn) as connection:
        assert connection.execute("SELECT count(*) FROM pgoutbox.audit WHERE actor LIKE 'django:%'").fetchone() == (0,)
        found = connection.execute("SELECT topic, state FROM pgoutbox.message WHERE id = %s", [TOLD_ID]).fetchone()
    assert found == ("webhook.order", "failed")
    await new_project.run(USERS + ACTS)
    with psycopg.connect(new_project.dsn) as connection:
        acts = connection.execute(
            "SELECT action, message_count, origin FROM pgoutbox.audit WHERE actor = 'django:ada' ORDER BY id"
        ).fetchall()
        states = connection.execute(
            "SELECT id, state, skip_reason FROM pgoutbox.message WHERE id IN (23, 46, 69, 92, 9985, 9995) ORDER BY id"
        ).fetchall()
        copies = connection.execute("SELECT array_agg(resend_of ORDER BY id) FROM pgoutbox.message").fetchone()
    origin = "admin 127.0.0.1"
    assert acts == [
        ("redrive", 2, origin),
        ("dismiss", 1, origin),
        ("cancel", 2, origin),
        ("resend", 1, origin),
        ("resend", 1, origin),
        ("dismiss", 1, origin),
        ("redrive", 1, origin),
        ("redrive", 107, origin),
    ]
    assert states == [
        (23, "pending", None),
        (46, "skipped", "dismissed by django:ada: the shop is closed"),
        (69, "skipped", "dismissed by django:ada: gone"),
        (92, "pending", None),
        (9985, "cancelled", None),
        (9995, "sending", None),
    ]
    assert copies is not None
    assert [one for one in copies[0] if one is not None] == [1, 3]


REFUSALS: Final = """
stranger = user("bo")
for client in (stranger, Client()):
    for path in ("", "10001/change/"):
        page(client, path, status=403 if client is stranger else 302)
for client in (viewer, stranger):
    for action in ("redrive", "dismiss", "cancel", "resend", "delete_selected"):
        act(client, action, 10_001, 9_985, 1, reason="x")
    assert post(client, "10001/change/", act="redrive")[0] == 403
act(operator, "delete_selected", 10_001, post="yes")
post(operator, "10001/change/", topic="another", _save="Save")
for client in (viewer, operator):
    assert post(client, "10001/delete/", post="yes")[0] == post(client, "add/", topic="x")[0] == 403
strict = Client(enforce_csrf_checks=True)
strict.cookies = operator.cookies
assert strict.post(LIST, {"action": "redrive", "_selected_action": 10_001}).status_code == 403
assert strict.post(LIST + "10001/change/", {"act": "redrive"}).status_code == 403
"""
ACTS: Final = """
def told(reply, *expected):
    assert reply[0] == 302 and reply[1][-len(expected):] == list(expected), reply

told(
    act(operator, "redrive", 10_001, 23, 1, 3),
    "2 left alone: message 1 is sent; only failed and cancelled messages can be redriven",
    "2 redriven",
)
told(act(operator, "dismiss", 46), "dismiss: reason: must have 1 to 1,000 characters")
told(act(operator, "dismiss", 46, reason="the shop is closed"), "1 dismissed")
told(
    act(operator, "cancel", 9_995, 9_985, 1),
    "1 left alone: message 1 is already sent",
    "1 cancelled",
    "1 asked to stop",
)
told(act(operator, "resend", 1), "1 resent")
told(act(operator, "resend", 3, path="?state__exact=sent&topic=sms.code"), "1 resent")
told(act(operator, "resend", 3, select_across="1"), "select at most 1,000 messages to resend, not 10,003")
told(post(operator, "69/change/", act="dismiss", reason="gone"), "1 dismissed")
told(post(operator, "92/change/", act="redrive"), "1 redriven")
told(act(operator, "redrive", 138, path="?state__exact=failed&topic=webhook.order", select_across="1"), "107 redriven")
assert ids("?state__exact=failed&topic=webhook.order") == []
"""

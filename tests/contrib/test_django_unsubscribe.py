"""Tests one-click unsubscribe in a Django project."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from tests.support.django_project import Project

pytestmark = pytest.mark.slow

URLS: Final = """
from django.urls import include, path

urlpatterns = [path("unsubscribe/", include("pgoutbox.contrib.django.unsubscribe"))]
"""
READS_FORMS: Final = """
def read(get_response):
    def answer(request):
        request.POST.get("name")
        return get_response(request)
    return answer
"""
CLICKS: Final = """
import asyncio
from django.test import Client
from pgoutbox import Context, Message, Topic, asend_directly
from pgoutbox.contrib.django import outbox

links = []

@outbox.handler(Topic("news", mailing_list="news"))
async def news(message: Message, ctx: Context) -> None:
    links.append(ctx.unsubscribe_url)

asyncio.run(asend_directly(outbox, "news", None, destination="mailto:ada@example.org"))
path = links[0].removeprefix("https://club.example.org")
client = Client(enforce_csrf_checks=True)
one_click = {"content_type": "application/x-www-form-urlencoded", "data": "List-Unsubscribe=One-Click"}
page = client.get(path)
print(page.status_code, page.headers["Referrer-Policy"], b"<form" in page.content, len(page.cookies))
print(client.post(path[:-2], **one_click).status_code, client.post(path).status_code)
print(client.post(path, **one_click).status_code)
print(client.post(path, {"List-Unsubscribe": "One-Click"}).status_code)
print(type(asyncio.run(asend_directly(outbox, "news", None, destination="mailto:ada@example.org"))).__name__)
"""


SETTINGS: Final = {
    "UNSUBSCRIBE_URL": "https://club.example.org/unsubscribe",
    "UNSUBSCRIBE_KEYS": "a key of 32 characters for tests",
}


async def test_a_view_takes_the_click_without_a_csrf_token(project: Project) -> None:
    (project.directory / "club" / "urls.py").write_text(URLS)
    project.set(PGOUTBOX=SETTINGS, ALLOWED_HOSTS=["testserver"])
    (project.directory / "club" / "forms.py").write_text(READS_FORMS)
    project.set(MIDDLEWARE=["club.forms.read", "django.middleware.csrf.CsrfViewMiddleware"])
    told = await project.manage("shell", "-c", CLICKS)
    wanted = ["200 no-referrer True 0", "403 400", "200", "200", "Suppressed"]
    assert [line for line in told.splitlines() if line in wanted] == wanted, told

"""One-click unsubscribe in a Django project: one view, without a sign-in and without cookies.

urlpatterns = [path("unsubscribe/", include("pgoutbox.contrib.django.unsubscribe"))]
"""

from __future__ import annotations

from functools import lru_cache

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from pgoutbox.contrib.django import outbox
from pgoutbox.unsubscribe.endpoint import ONE_CLICK, Endpoint

_endpoint = lru_cache(maxsize=1)(Endpoint)


@csrf_exempt  # Mail programs send no cookies. The signature of the link is enough.
@transaction.non_atomic_requests
def unsubscribe(request: HttpRequest, token: str) -> HttpResponse:
    """Show the page of a link, or unsubscribe."""
    # Not the body: a middleware may have read the form.
    body = ONE_CLICK if str(request.POST.get("List-Unsubscribe")).strip() == "One-Click" else b""
    answer = _endpoint(outbox.settings).answer(str(request.method), token, body)
    return HttpResponse(answer.body, status=answer.status, headers=dict(answer.headers))


urlpatterns = [path("<str:token>", unsubscribe, name="pgoutbox-unsubscribe")]

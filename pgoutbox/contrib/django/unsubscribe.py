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
from pgoutbox.settings import Settings
from pgoutbox.unsubscribe.endpoint import MAX_BODY_BYTES, Endpoint, Texts


@csrf_exempt  # Mail programs send no cookies. The signature of the link is enough.
@transaction.non_atomic_requests
def unsubscribe(request: HttpRequest, token: str) -> HttpResponse:
    """Show the page of a link, or unsubscribe."""
    answer = _endpoint(outbox.settings).answer(str(request.method), token, request.read(MAX_BODY_BYTES + 1))
    return HttpResponse(answer.body, status=answer.status, headers=dict(answer.headers))


@lru_cache(maxsize=1)
def _endpoint(settings: Settings) -> Endpoint:
    return Endpoint(settings, Texts())


urlpatterns = [path("<str:token>", unsubscribe, name="pgoutbox-unsubscribe")]

"""Views that enqueue, in the transaction of their request."""

from __future__ import annotations

from asgiref.sync import sync_to_async
from django.core.exceptions import PermissionDenied
from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse

from pgoutbox.contrib.django import outbox

from .models import Member


def sign_up(email: str) -> None:
    with transaction.atomic():
        member = Member.objects.create(email=email)
        outbox.on(connection).enqueue("mail.welcome", {"pk": member.pk})


def join(request: HttpRequest) -> HttpResponse:
    member = Member.objects.create(email="ada@example.org")
    outbox.on(connection).enqueue("mail.welcome", {"pk": member.pk})  # ATOMIC_REQUESTS
    if "refuse" in request.GET:
        raise PermissionDenied
    return HttpResponse("joined")


@transaction.non_atomic_requests  # type: ignore[untyped-decorator] # Django ships no types.
async def join_async(request: HttpRequest) -> HttpResponse:
    if "directly" in request.GET:
        outbox.on(connection).enqueue("mail.welcome", {"pk": 1})
    await sync_to_async(sign_up)("ada@example.org")
    return HttpResponse("joined")

"""A task."""

from __future__ import annotations

import django

from .models import Member

if django.VERSION >= (6, 0):
    from django.tasks import task
else:
    from django_tasks import task


@task(priority=10)  # type: ignore[untyped-decorator] # Django ships no types.
def count_members() -> int:
    return int(Member.objects.count())

"""The members, and how often each was greeted."""

from __future__ import annotations

from django.db import models


class Member(models.Model):  # type: ignore[misc] # Django ships no types.
    """A member of the club."""

    email = models.TextField(primary_key=True)
    greeting_count = models.IntegerField(default=0)

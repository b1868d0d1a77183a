"""Members of the club."""

from __future__ import annotations

from django.db import models


class Member(models.Model):  # type: ignore[misc] # Django ships no types.
    """A member, and how often handlers have greeted it."""

    email = models.TextField(unique=True)
    greeting_count = models.IntegerField(default=0)

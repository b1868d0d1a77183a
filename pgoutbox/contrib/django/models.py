"""The models of the application: the messages for Django's admin, and the results of tasks.

`Message` is not managed, because the migrations of pgoutbox itself create its view.
"""

from __future__ import annotations

from django.db import models

from pgoutbox.message import State


class _Nothing(models.Manager):
    """The first manager of a model, which `dumpdata` reads: `loaddata` could not write the messages."""

    def get_queryset(self) -> models.QuerySet:
        return super().get_queryset().none()


class Message(models.Model):
    """A message of `pgoutbox.message_view`, which hides all values of payloads. It has the columns of a list."""

    id = models.BigIntegerField(primary_key=True)
    topic = models.TextField()
    queue = models.TextField()
    destination = models.TextField(null=True)
    state = models.TextField(choices=[(state.value, state.value) for state in State])
    attempt_count = models.IntegerField()
    max_attempts = models.IntegerField()
    attempt_budget = models.IntegerField()
    created_at = models.DateTimeField("created")
    available_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True)
    coalesce_key = models.TextField(null=True)
    dedupe_key = models.TextField(null=True)
    ordering_key = models.TextField(null=True)
    fair_key = models.TextField(null=True)
    owner = models.TextField(null=True)
    skip_reason = models.TextField(null=True)
    last_error = models.TextField(null=True)

    undumped = _Nothing()
    objects = models.Manager()

    class Meta:
        """The view of another schema, in quotes that Django leaves alone."""

        managed = False
        db_table = '"pgoutbox"."message_view"'
        default_permissions = ("view", "change")

    def __str__(self) -> str:
        return f"message {self.pk}"


class StoredResult(models.Model):
    """What the message of a task does not have: its return value and its errors, as JSON that may be sealed.

    It says nothing without the message of the same id and time.
    """

    message_id = models.BigIntegerField(primary_key=True)
    created_at = models.DateTimeField()
    attempt_count = models.IntegerField()
    content = models.JSONField()

    objects = _Nothing()

    class Meta:
        """The table is only written by `tasks`."""

        db_table = "pgoutbox_task_result"
        default_permissions = ()

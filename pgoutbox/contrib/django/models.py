"""The results of tasks. The schema of pgoutbox has no models: its own migrations create it."""

from __future__ import annotations

from django.db import models


class StoredResult(models.Model):
    """The part of a task's result that its message does not have: the return value and the errors.

    It says nothing while the message does not exist or has a higher attempt count. `content` is a JSON object, or a
    sealed one. `check_at` is when to ask whether the message still exists.
    """

    message_id = models.BigIntegerField(primary_key=True)
    attempt_count = models.IntegerField()
    content = models.JSONField()
    check_at = models.DateTimeField(db_index=True)

    class Meta:
        """The table is only written by `tasks`."""

        db_table = "pgoutbox_task_result"
        verbose_name = "task result"

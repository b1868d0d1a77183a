"""`outbox` is the outbox of a Django project with `pgoutbox.contrib.django` in INSTALLED_APPS.

Each application registers its topics and handlers in its module `outbox`, which is imported when Django starts:

    from pgoutbox.contrib.django import outbox

    @outbox.handler("mail.welcome")
    def welcome(message: Message, ctx: SyncContext) -> Email: ...

The database is one of DATABASES. The setting PGOUTBOX has its alias and the other settings of pgoutbox:

    PGOUTBOX = {"DATABASE": "default", "SMTP_HOST": "mail.example.org", "SMTP_SENDER": "club@example.org"}
"""

from __future__ import annotations

from pgoutbox.contrib.django.conf import ProjectOutbox

__all__ = ["outbox"]

outbox: ProjectOutbox = ProjectOutbox()
"""The topics and handlers of the project. Its settings are read when one is first needed."""

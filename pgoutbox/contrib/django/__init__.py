"""`outbox` is the outbox of a Django project with `pgoutbox.contrib.django` in INSTALLED_APPS.

Each application registers its topics and handlers in its module `outbox`, which is imported when Django starts. The
setting PGOUTBOX has the alias of the database, one of DATABASES, as `DATABASE`, and the other settings of pgoutbox.
"""

from __future__ import annotations

from pgoutbox.contrib.django.conf import ProjectOutbox

__all__ = ["outbox"]

outbox: ProjectOutbox = ProjectOutbox()
"""The topics and handlers of the project. Its settings are read when one is first needed."""

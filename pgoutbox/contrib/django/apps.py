"""The application: it imports the handlers of all applications, and keeps the schema up to date."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core.management.base import CommandError
from django.db.models.signals import post_migrate
from django.utils.module_loading import autodiscover_modules, import_string

from pgoutbox import migrate
from pgoutbox.contrib.django import conf
from pgoutbox.errors import SchemaError


class PgOutboxConfig(AppConfig):
    """`pgoutbox.contrib.django` of INSTALLED_APPS."""

    name = "pgoutbox.contrib.django"
    label = "pgoutbox"
    verbose_name = "pgoutbox"

    def ready(self) -> None:
        """Register the checks, the handlers of e-mail and tasks, and those in the module `outbox` of applications."""
        from pgoutbox.contrib.django import checks, mail  # noqa: F401 - they register themselves

        mail.is_used()
        for backend in getattr(settings, "TASKS", {}).values():
            with contextlib.suppress(ImportError, KeyError):  # Django reports them.
                import_string(backend["BACKEND"])  # A worker needs the handler of tasks.
        autodiscover_modules("outbox")
        post_migrate.connect(_migrate, sender=self)


def _migrate(*, using: str, verbosity: int = 1, stdout: Any = None, **_: object) -> None:  # noqa: ANN401 - Django's
    """Bring the schema to the revision of the installed package, at the end of `manage.py migrate`.

    Raises `CommandError` for a schema that a newer package has migrated, one of other files, or one that does not match
    its version table.
    """
    if using != conf.alias():
        return
    found = migrate.state(conf.dsn())
    if found.fault is None and found.revision == migrate.head():  # Tests send the signal often.
        return
    report: Callable[[str], None] | None = (stdout.write if stdout else print) if verbosity else None
    try:
        migrate.upgrade(conf.dsn(), report=report)
    except SchemaError as error:
        raise CommandError(str(error)) from error
    if report is not None:
        report(f"pgoutbox: the schema is at {migrate.head()}")

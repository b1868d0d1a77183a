"""Checks for `manage.py check`: settings always, the schema with `--database`, delivery with `--deploy` too.

A fault in the database is only a warning, because `migrate` refuses to run with an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
from django.core import checks

from pgoutbox import migrate
from pgoutbox.contrib.django import conf, mail, outbox
from pgoutbox.doctor import Level, examine
from pgoutbox.errors import PgOutboxError


@checks.register
def check_settings(**_: object) -> list[checks.CheckMessage]:
    """Report wrong settings, and topics without a handler."""
    try:
        outbox.settings.require_dsn()
    except PgOutboxError as error:
        return [checks.Error(str(error), id="pgoutbox.settings")]
    missing = sorted(outbox.topics.keys() - outbox.handlers.keys())
    hint = "Register one with @outbox.handler in the module `outbox` of an application, or deliver them elsewhere."
    return [
        checks.Warning(f"the topic {name!r} has no handler", hint, id="pgoutbox.topic-unhandled") for name in missing
    ]


@checks.register
def check_mail(**_: object) -> list[checks.CheckMessage]:
    """Report e-mails that are stored as plain text. Only the database knows whether a rule deletes them."""
    if conf.has_keys() or not mail.is_used():
        return []
    text = "e-mails are stored as plain text: a reader of the queue can use the link of a password reset"
    hint = (
        "Set PGOUTBOX['ENCRYPTION_KEYS'], or delete e-mails early by `manage.py pgoutbox retention set "
        f"{mail.TOPIC} sent 0`, also for failed ones, and then name the check in SILENCED_SYSTEM_CHECKS."
    )
    return [checks.Warning(text, hint, id="pgoutbox.mail-readable")]


@checks.register(checks.Tags.database)
def check_schema(databases: Sequence[str] | None = None, **_: object) -> list[checks.CheckMessage]:
    """Report a schema that does not match the package or its version table. A missing one is created by `migrate`."""
    if not _is_among(databases):
        return []
    try:
        found = migrate.state(conf.dsn())
    except psycopg.Error as error:
        return [checks.Warning(f"the database does not answer: {error}", id="pgoutbox.database-unreachable")]
    if found.fault is not None:
        return [checks.Warning(found.fault, id="pgoutbox.schema-faulty")]
    if found.revision in (None, migrate.head()):
        return []
    text = f"the schema pgoutbox is at {found.revision}, and the package needs {migrate.head()}"
    hint = "Run manage.py migrate. If the schema is newer, install the package that migrated it."
    return [checks.Warning(text, hint, id="pgoutbox.schema-outdated")]


@checks.register(checks.Tags.database, deploy=True)
def check_delivery(databases: Sequence[str] | None = None, **_: object) -> list[checks.CheckMessage]:
    """Report what `pgoutbox doctor` finds, such as queues without a worker and messages without a handler."""
    if not _is_among(databases):
        return []
    found = [finding for finding in examine(outbox.settings, outbox) if finding.level in (Level.PROBLEM, Level.WARNING)]
    return [checks.Warning(f"{one.what}: {one.why}", one.fix, id=f"pgoutbox.{one.code}") for one in found]


def _is_among(databases: Sequence[str] | None) -> bool:
    try:
        return conf.alias() in (databases or ()) and outbox.settings is not None
    except PgOutboxError:
        return False  # The check of the settings reports it.

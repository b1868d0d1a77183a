"""The settings of pgoutbox in a Django project, from DATABASES, the setting PGOUTBOX and the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Final

import psycopg
from django.conf import settings as project
from django.core.signals import setting_changed
from django.db import connections, transaction
from django.dispatch import receiver
from psycopg.conninfo import make_conninfo

from pgoutbox.clock import Duration
from pgoutbox.errors import ConfigurationError
from pgoutbox.outbox import Outbox
from pgoutbox.schedules import Every, Missed
from pgoutbox.settings import (
    ENVIRONMENT_PREFIX,
    Settings,
    fields_of,
    former_names,
    load_settings,
    variable_of,
    with_present_names,
)
from pgoutbox.text import preview

DATABASE: Final = "DATABASE"
DELIVER_WITH: Final = "DELIVER_WITH"
SCHEDULED_TOPIC: Final = "django.schedule"
"""The topic of messages that enqueue a task whose time has come. Its arguments are in the code: they may be secrets."""
# These are Django's to give.
_REFUSED: Final = {
    "DSN": f"name a database of DATABASES by {DATABASE!r}",
    "DSNS": f"name a database of DATABASES by {DATABASE!r}",
    "APP": "each application has a module outbox",
}
# Django's mail backends accept attachments of any size.
_LARGEST: Final = 16_777_216
_LIBPQ: Final = frozenset(option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults())


class ProjectOutbox(Outbox):
    """An outbox with the settings of the Django project."""

    @property
    def settings(self) -> Settings:
        """The settings of the project. They are read again when the database or a setting changes, as in tests."""
        return _load(str(connections[alias()].settings_dict["NAME"]))

    @property
    def default_queues(self) -> Sequence[str]:
        """The queues of all topics, and of all tasks."""
        tasks = sys.modules.get("pgoutbox.contrib.django.tasks")
        return tasks.queues() if tasks else ("*",)

    def schedule_task(
        self,
        task: Any,  # noqa: ANN401 - Django has no types
        rule: str | Every,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
        timezone: str | None = None,
        missed: Missed = "latest",
        jitter: Duration = 0,
        until: datetime | None = None,
    ) -> None:
        """Enqueue a task of Django again and again, with these arguments, as `schedule` does with a message.

        The time zone is `TIME_ZONE` of the settings, and the name that of the function with its module. Raises
        `ConfigurationError` for a mistake.
        """
        if not hasattr(task, "get_backend"):
            raise ConfigurationError(f"schedule_task: must get a task of Django, not {preview(task)}")
        name = name or str(task.module_path)
        if isinstance(args, (str, bytes, Mapping)):
            raise ConfigurationError(f"schedule {name!r}: args: must be a list or a tuple, not {preview(args)}")
        call = (tuple(args), dict(kwargs or {}))
        backend = task.get_backend()
        if not hasattr(backend, "scheduled"):
            raise ConfigurationError(f"schedule {name!r}: the backend {task.backend!r} must be OutboxBackend")
        try:
            queue = backend.queue_of_call(task, *call)
        except TypeError as error:
            raise ConfigurationError(f"schedule {name!r}: {error}") from None
        self.schedule(
            rule,
            topic=SCHEDULED_TOPIC,
            payload={},
            name=name,
            timezone=timezone or project.TIME_ZONE,
            missed=missed,
            jitter=jitter,
            until=until,
            queue=queue,
        )
        backend.scheduled[name] = (task, *call)


def alias() -> str:
    """Return the alias of the database with the outbox."""
    name = _mapping().get(DATABASE, "default")
    if name not in connections.settings:
        raise ConfigurationError(f"PGOUTBOX[{DATABASE!r}]: DATABASES has no {name!r}")
    return str(name)


def dsn() -> str:
    """Return the connection string of that database; in tests, of the test database."""
    connection = connections[alias()]
    if connection.vendor != "postgresql":
        raise ConfigurationError(
            f"DATABASES[{alias()!r}]: pgoutbox needs PostgreSQL, not {connection.vendor}; "
            f"name another one by PGOUTBOX[{DATABASE!r}]"
        )
    parameters = {name: value for name, value in connection.get_connection_params().items() if name in _LIBPQ}
    if role := connection.settings_dict["OPTIONS"].get("assume_role"):
        role = role.replace("\\", "\\\\").replace(" ", "\\ ")
        parameters["options"] = f"{parameters.get('options', '')} -c role={role}".strip()
    return make_conninfo(**parameters)


def transaction_of(connection: Any) -> AbstractContextManager[None]:  # noqa: ANN401 - Django has no types
    """Return the transaction of the caller, which a refusal does not break, or one that commits at once."""
    return nullcontext() if connection.in_atomic_block else transaction.atomic(connection.alias)


def deliver_with() -> str | None:
    """Return the mailer that sends e-mails by default; None: pgoutbox does by SMTP."""
    return _mapping().get(DELIVER_WITH)


def mail_backends() -> list[str]:
    """Return the paths of the project's mail backends."""
    mailers = getattr(project, "MAILERS", {})
    backends = [project.EMAIL_BACKEND] if project.is_overridden("EMAIL_BACKEND") else []
    return [*backends, *(mailer["BACKEND"] for mailer in mailers.values() if mailer.get("BACKEND"))]


def has_keys() -> bool:
    """Whether payloads can be encrypted."""
    return bool(_mapping().get("ENCRYPTION_KEYS") or os.environ.get(variable_of("encryption_keys")))


def given() -> dict[str, str]:
    """Return the values of PGOUTBOX by field, as text. Raises `ConfigurationError` for an unknown name."""
    fields = {_name_of(path): path for path in fields_of(Settings)}
    values = _defaults()
    for name, value in with_present_names(_mapping(), former_names(_name_of)).items():
        if name in (DATABASE, DELIVER_WITH):
            continue
        if name in _REFUSED:
            raise ConfigurationError(f"PGOUTBOX[{name!r}]: {_REFUSED[name]}")
        if name not in fields:
            nearest = get_close_matches(str(name), [DATABASE, DELIVER_WITH, *fields], 1, 0)
            raise ConfigurationError(f"PGOUTBOX[{name!r}]: unknown setting; did you mean {nearest[0]!r}?")
        if not isinstance(value, (str, int, float)):
            raise ConfigurationError(f"PGOUTBOX[{name!r}]: must be text, a number or a boolean, as in the environment")
        values[fields[name]] = str(value)
    return values


def _name_of(path: str) -> str:
    return variable_of(path).removeprefix(ENVIRONMENT_PREFIX)


def environment() -> dict[str, str]:
    """Return the settings as environment variables, for the commands of pgoutbox and for their processes."""
    variables = {variable_of(path): value for path, value in given().items()}
    return variables | {variable_of("dsn"): dsn(), variable_of("app"): "pgoutbox.contrib.django.project:outbox"}


def _mapping() -> Mapping[str, Any]:
    values = getattr(project, "PGOUTBOX", {})
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"PGOUTBOX: must be a dictionary, not {type(values).__name__}")
    return values


def _defaults() -> dict[str, str]:
    """Return the sender and the mail server that Django's own settings name, and the environment does not."""
    values: dict[str, Any] = {"max_payload_bytes": _LARGEST}
    if project.is_overridden("DEFAULT_FROM_EMAIL"):
        values["smtp.sender"] = project.DEFAULT_FROM_EMAIL
    if project.is_overridden("EMAIL_HOST") and variable_of("smtp.host") not in os.environ:
        security = "tls" if project.EMAIL_USE_SSL else "starttls" if project.EMAIL_USE_TLS else "none"
        values |= {
            "smtp.host": project.EMAIL_HOST,
            "smtp.port": project.EMAIL_PORT,
            "smtp.security": security,
            "smtp.username": project.EMAIL_HOST_USER,
            "smtp.password": project.EMAIL_HOST_PASSWORD,
        }
    return {name: str(value) for name, value in values.items() if value and variable_of(name) not in os.environ}


@lru_cache(maxsize=1)
def _load(name: str) -> Settings:  # noqa: ARG001 - the name of the database, for the cache
    overrides: dict[str, Any] = {"dsn": dsn()}
    for path, value in given().items():
        group, _, field = path.rpartition(".")
        (overrides.setdefault(group, {}) if group else overrides)[field] = value
    return load_settings(**overrides)


@receiver(setting_changed)
def _forget(**_: object) -> None:
    _load.cache_clear()

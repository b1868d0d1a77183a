"""The table of members, and the schema of pgoutbox beside it."""

from __future__ import annotations

from typing import Any

from django.db import migrations, models

from pgoutbox.migrate import upgrade
from tests.django_club.database import dsn_of


def upgrade_pgoutbox(_apps: object, schema_editor: Any) -> None:  # noqa: ANN401 - Django ships no types
    """Migrate pgoutbox in the database that Django migrates, including a test database."""
    upgrade(dsn_of(schema_editor.connection))


class Migration(migrations.Migration):  # type: ignore[misc] # Django ships no types.
    """Both steps, outside a transaction: pgoutbox migrates on its own connection."""

    atomic = False
    operations = (
        migrations.CreateModel(
            "Member",
            [("email", models.TextField(primary_key=True)), ("greeting_count", models.IntegerField(default=0))],
        ),
        migrations.RunPython(upgrade_pgoutbox, migrations.RunPython.noop),
    )

"""The table for the results of tasks, and the permissions for messages, of which Django compares no fields."""

from typing import Any

from django.core.management.base import CommandError
from django.db import migrations, models


def refuse_to_drop_results(apps: Any, schema_editor: Any) -> None:  # noqa: ANN401 - Django has no types
    """Raise an error for `migrate pgoutbox zero` while there are results of tasks."""
    results = apps.get_model("pgoutbox", "StoredResult").objects.using(schema_editor.connection.alias)
    if count := results.count():
        raise CommandError(
            f"{count} results of tasks would be deleted. If nobody needs them, stop the workers and delete the rows "
            "of pgoutbox_task_result first"
        )


class Migration(migrations.Migration):
    """Create `pgoutbox_task_result`, and make permissions for the messages."""

    initial = True
    operations = (
        migrations.CreateModel(
            name="Message",
            fields=[("id", models.BigIntegerField(primary_key=True, serialize=False))],
            options={
                "db_table": '"pgoutbox"."message_view"',
                "managed": False,
                "default_permissions": ("view", "change"),
            },
        ),
        migrations.CreateModel(
            name="StoredResult",
            fields=[
                ("message_id", models.BigIntegerField(primary_key=True, serialize=False)),
                ("created_at", models.DateTimeField()),
                ("attempt_count", models.IntegerField()),
                ("content", models.JSONField()),
            ],
            options={"db_table": "pgoutbox_task_result", "default_permissions": ()},
        ),
        # Reversed first.
        migrations.RunPython(migrations.RunPython.noop, refuse_to_drop_results, hints={"model_name": "storedresult"}),
    )

"""The table for the results of tasks, and the permissions for messages, of which Django compares no fields."""

from django.db import migrations, models


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
    )

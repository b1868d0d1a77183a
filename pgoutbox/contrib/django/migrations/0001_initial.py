"""The table for the results of tasks."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """Create `pgoutbox_task_result`."""

    initial = True
    operations = (
        migrations.CreateModel(
            name="StoredResult",
            fields=[
                ("message_id", models.BigIntegerField(primary_key=True, serialize=False)),
                ("attempt_count", models.IntegerField()),
                ("content", models.JSONField()),
                ("check_at", models.DateTimeField(db_index=True)),
            ],
            options={"db_table": "pgoutbox_task_result", "verbose_name": "task result"},
        ),
    )

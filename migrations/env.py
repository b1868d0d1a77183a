"""How Alembic runs these revisions by themselves, for `pgoutbox.migrate`.

An application that takes the revisions into its own history (`version_locations`) runs them through its own `env.py`;
this one is not read then.
"""

from alembic import context
from alembic.util import CommandError

from pgoutbox.migrate import SCHEMA, VERSION_TABLE

if context.is_offline_mode():
    # With psycopg's own parameter style every percent sign of a function's body would come out doubled.
    context.configure(
        dialect_name="postgresql",
        dialect_opts={"paramstyle": "named"},
        version_table=VERSION_TABLE,
        version_table_schema=SCHEMA,
    )
    with context.begin_transaction():
        context.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
        context.run_migrations()
else:
    connection = context.config.attributes.get("connection")
    if connection is None:
        raise CommandError("these revisions run through `pgoutbox migrate`, or through your application's own env.py")
    # The caller has begun the transaction and ends it, so a run of several revisions is applied as a whole or not.
    context.configure(connection=connection, version_table=VERSION_TABLE, version_table_schema=SCHEMA)
    context.run_migrations()

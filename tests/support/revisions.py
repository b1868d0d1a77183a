"""A revision after the first one, like those of later releases, so that tests can migrate between two revisions."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING, Final

from pgoutbox.database import revisions
from pgoutbox.database.index_builds import Index

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pytest

FIRST: Final = "pgoutbox_0001"

# It replaces the function that every enqueue runs, and adds a table, a view and a function that their owner calls.
_NEXT: Final = """
from pathlib import Path

from alembic import op
from sqlalchemy import DDL

revision = "pgoutbox_next"
down_revision = "pgoutbox_0001"

FILE = Path(__file__).parents[1] / "sql" / "functions" / "_enqueue_receipt.sql"
ENQUEUE = FILE.read_text().replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION")


def upgrade():
    op.execute(DDL(ENQUEUE.replace("BEGIN\\n", "BEGIN\\n    -- next\\n")))
    op.execute("CREATE TABLE pgoutbox.next_table (id bigint PRIMARY KEY)")
    op.execute("CREATE VIEW pgoutbox.next_view AS SELECT n.id FROM pgoutbox.next_table AS n")
    op.execute("CREATE FUNCTION pgoutbox.next_function() RETURNS bigint LANGUAGE sql RETURN 1")
    op.execute("DO $$ BEGIN PERFORM pgoutbox.set_up_roles(); END $$")


def downgrade():
    op.execute("DROP FUNCTION pgoutbox.next_function")
    op.execute("DROP VIEW pgoutbox.next_view")
    op.execute("DROP TABLE pgoutbox.next_table")
    op.execute(DDL(ENQUEUE))
    op.execute("DO $$ BEGIN PERFORM pgoutbox.set_up_roles(); END $$")
"""

_INDEXES: Final = """
from alembic import op
from sqlalchemy import DDL

from pgoutbox.migrate import FORGET_REVISION, Index, is_applied_by_another_run, note_revision

revision = "pgoutbox_{number:04}"
down_revision = "pgoutbox_{before:04}"
INDEXES = {indexes}


def upgrade():
    if is_applied_by_another_run(revision, down_revision):
        return
    for index in INDEXES:
        for statement in index.statements:
            op.execute(DDL(statement.replace("%", "%%")))
    op.execute(note_revision({number}, lowest_package="0.1"))


def downgrade():
    op.execute(FORGET_REVISION)
    for index in {dropped}:
        op.execute(f"DROP INDEX pgoutbox.{{index.name}}")
"""

_RUNNING: Final = """
from alembic import op
from sqlalchemy import DDL

revision = "pgoutbox_next"
down_revision = "pgoutbox_0001"


def upgrade():
    for statement in {statements!r}:
        op.execute(DDL(statement.replace("%", "%%")))
"""


def running(statements: Sequence[str]) -> str:
    """Return the text of a revision that runs these statements."""
    return _RUNNING.format(statements=[*statements])


def adding(*indexes: Index, number: int = 2, keeps_them: bool = False) -> str:
    """Return the text of a revision that adds these large indexes. With `keeps_them`, its downgrade leaves them."""
    dropped = "()" if keeps_them else "INDEXES"
    return _INDEXES.format(indexes=indexes, number=number, before=number - 1, dropped=dropped)


INDEXES: Final = adding(
    Index("message_worker", "pgoutbox.message", "(worker) WHERE worker IS NOT NULL"),
    Index("message_failed_by_worker", "pgoutbox.message_failed", "(worker, id)"),
)


def add_revision(directory: Path, monkeypatch: pytest.MonkeyPatch, text: str = _NEXT) -> str:
    """Let `pgoutbox.migrate` work on a copy of the revisions that has this one more. Return its name."""
    (copy_revisions(directory, monkeypatch) / "versions" / "0002_next.py").write_text(text)
    (name,) = re.findall(r'^revision = "(\w+)"$', text, re.MULTILINE)
    return str(name)


def copy_revisions(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let `pgoutbox.migrate` work on a copy of the revisions, and return its folder."""
    copied = directory / "revisions"
    shutil.copytree(revisions.MIGRATIONS, copied)
    monkeypatch.setattr(revisions, "MIGRATIONS", copied)
    return copied

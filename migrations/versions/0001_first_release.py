"""The first release: run the files of `migrations/sql`, and drop on the way down what they create.

Each file has one object. Its first paragraph is the COMMENT of the object, and the comment behind or above a column is
that of the column. The name of a private function begins with an underscore. All grants are in
`roles/set_up_roles.sql`. To add an object, add a file. After the release these files are frozen: a later revision has a
folder of its own, such as `migrations/sql_0002`, for the objects that it adds or replaces.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from alembic import context, op
from alembic.util import CommandError
from sqlalchemy import DDL

from pgoutbox.errors import ConfigurationError
from pgoutbox.migrate import check_revisions, is_applied_by_another_run, note_revision, refusal_in_a_sentence

if TYPE_CHECKING:
    from collections.abc import Iterator

revision = "pgoutbox_0001"
down_revision = None
branch_labels = ("pgoutbox",)
depends_on = None

try:
    check_revisions()  # In an application's own history, every command of Alembic loads this file.
except ConfigurationError as error:
    raise CommandError(str(error)) from None

SQL = Path(__file__).resolve().parents[1] / "sql"

# Files that match one pattern run in the order of their names. A file that matches several runs at the first one.
ORDER = (
    "schema.sql",
    "types/*.sql",
    "tables/message*.sql",  # First in the reference of the schema.
    "tables/*.sql",
    "functions/*.sql",
    "triggers/*.sql",
    "views/worker_view.sql",  # The view of waiting messages reads it.
    "views/*.sql",
    "roles/*.sql",
    "setup.sql",
)

# A semicolon ends a statement unless it is in a comment, a literal or the body of a function.
STATEMENT = re.compile(r"(?>--[^\n]*|'[^']*'|(\$\w*\$).*?\1|BEGIN ATOMIC\b.*?\nEND|[^;])+;", re.DOTALL)

# Partitions and indexes are dropped with their table.
CREATED = re.compile(
    r"^CREATE (?:CONSTRAINT )?(?:(TABLE|TYPE|FUNCTION|VIEW) (pgoutbox\.\w+)\b(?! PARTITION OF)"
    r"|(TRIGGER) (\w+)\b.*(\bON pgoutbox\.\w+))",
    re.MULTILINE | re.DOTALL,
)

# The first paragraph of a file, and the object that it creates.
COMMENTED = re.compile(
    r"((?:-- .*\n)+)(?:--.*\n|\n|CREATE SEQUENCE.*\n)*CREATE (TABLE|TYPE|FUNCTION|VIEW) (pgoutbox\.\w+)"
)
# The lines above a column, its name, and the comment behind it.
COLUMN = re.compile(r"^((?:    -- .*\n)*)    ([a-z_]+) +\S.*?,?(-- .*)?$", re.MULTILINE)


def texts(patterns: tuple[str, ...]) -> Iterator[str]:
    for path in dict.fromkeys(path for pattern in patterns for path in sorted(SQL.glob(pattern))):
        yield path.read_text(encoding="utf-8")


def statements(patterns: tuple[str, ...]) -> Iterator[str]:
    """Yield the statements one by one, because some drivers of host applications refuse several at once."""
    for text in texts(patterns):
        for match in STATEMENT.finditer(text):
            yield match[0].strip().removesuffix(";")


def comments() -> Iterator[str]:
    """Yield a COMMENT for each object, and for each column of a table or a type that has one."""
    for text in texts(ORDER):
        if found := COMMENTED.match(text):
            yield comment(f"{found[2]} {found[3]}", found[1])
            if found[2] in ("TABLE", "TYPE"):
                for above, name, behind in COLUMN.findall(text[: text.index("\n)")]):
                    if above or behind:
                        yield comment(f"COLUMN {found[3]}.{name}", above or behind)


def comment(subject: str, lines: str) -> str:
    words = lines.replace("-- ", "").replace("'", "''").split()
    return f"COMMENT ON {subject} IS '{' '.join(words)}'"


def drops() -> list[str]:
    """Return a DROP for each object that `upgrade` creates, the last object first."""
    created = (CREATED.search(statement) for statement in statements(ORDER))
    return [" ".join(("DROP", *filter(None, match.groups()))) for match in created if match][::-1]


def run(statement: str) -> None:
    # DDL() interpolates %, and unlike text() it leaves colons alone.
    op.execute(DDL(statement.replace("%", "%%")))


def upgrade() -> None:
    if is_applied_by_another_run(revision, down_revision):
        return
    # Functions call each other, whatever the order of their names. SET LOCAL has no effect on an AUTOCOMMIT engine.
    run("SET check_function_bodies = off")
    for statement in (*statements(ORDER), *comments()):
        run(statement)
    run("RESET check_function_bodies")
    run(note_revision(1, lowest_package="0.1"))


def downgrade() -> None:
    # `pgoutbox migrate downgrade` has asked in its own way.
    if context.get_x_argument(as_dictionary=True).get("pgoutbox_drop") == "yes":
        run("SET LOCAL pgoutbox.delete_messages = 'all'")
    with refusal_in_a_sentence():
        for statement in statements(("down/before.sql",)):
            run(statement)
    for statement in (*drops(), *statements(("down/after.sql",))):
        run(statement)

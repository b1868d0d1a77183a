"""The plan of a migration names each statement on a relation that exists, with the lock that PostgreSQL takes."""

from __future__ import annotations

import os
import pty
import re
from typing import TYPE_CHECKING, Final

from pgoutbox import migration_plan
from pgoutbox.cli.main import main
from tests.support.revisions import add_revision, running

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg
    import pytest

WHOLE: Final = "ACCESS EXCLUSIVE"
# Each with its relation and lock, and whether it reads the whole relation. A semicolon in a literal, a name, a comment
# or a body does not end it.
PLANNED: Final = {
    "CREATE INDEX later ON pgoutbox.message (topic) WHERE topic <> ';'": ("message", "SHARE", True),
    'CREATE UNIQUE INDEX "later;" ON pgoutbox.worker (name, version)': ("worker", "SHARE", True),
    "CREATE TRIGGER later BEFORE UPDATE ON pgoutbox.queue FOR EACH ROW"
    " EXECUTE FUNCTION suppress_redundant_updates_trigger()": ("queue", "SHARE ROW EXCLUSIVE", False),
    "DROP TRIGGER queue_acts ON pgoutbox.queue": ("queue", WHOLE, False),
    "ALTER TABLE pgoutbox.queue VALIDATE CONSTRAINT queue_sound": ("queue", "SHARE UPDATE EXCLUSIVE", True),
    "ALTER TABLE pgoutbox.queue SET (fillfactor = 90)": ("queue", "SHARE UPDATE EXCLUSIVE", False),
    "ALTER TABLE pgoutbox.message ADD CONSTRAINT later CHECK (id <> /* none; or all */ 0)": ("message", WHOLE, True),
    "ALTER TABLE pgoutbox.message ADD CONSTRAINT later CHECK (id <> 0) NOT VALID": ("message", WHOLE, False),
    "ALTER TABLE ONLY pgoutbox.topic_pause ADD COLUMN later text DEFAULT 'a;b'": ("topic_pause", WHOLE, False),
    "ALTER TABLE pgoutbox.revision ALTER COLUMN digest TYPE varchar(99)": ("revision", WHOLE, True),
    "ALTER VIEW pgoutbox.worker_view RENAME COLUMN slots TO later": ("worker_view", WHOLE, False),
    "CREATE OR REPLACE VIEW pgoutbox.home_view AS SELECT v.*, ';'::text AS later FROM"
    " (SELECT 1) AS one, pgoutbox.home_view AS v": ("home_view", WHOLE, False),
    "CREATE TABLE pgoutbox.later_one PARTITION OF pgoutbox.message FOR VALUES IN ('later')": ("message", WHOLE, False),
    "DROP TABLE pgoutbox.rate_claim": ("rate_claim", WHOLE, False),
    "TRUNCATE pgoutbox.dedupe": ("dedupe", WHOLE, False),
    "SELECT pgoutbox._note_revision(2, '0.1', '0.2', 'x')": ("worker", "SHARE", False),
    "UPDATE pgoutbox.queue SET burst = burst": ("queue", "ROW EXCLUSIVE", True),
    "DELETE FROM pgoutbox.content": ("content", "ROW EXCLUSIVE", True),
    "INSERT INTO pgoutbox.queue (name) VALUES ('a')": ("queue", "ROW EXCLUSIVE", False),
}
# It locks what its body says, so a person must read it.
UNKNOWN: Final = "DO $$ BEGIN PERFORM 1; PERFORM 2; END $$"
UNPLANNED: Final = (
    "-- Only; a comment\nCREATE FUNCTION pgoutbox.later() RETURNS integer BEGIN ATOMIC SELECT 1; SELECT 2;\nEND",
    "CREATE TABLE pgoutbox.later (id bigint)",
    "CREATE INDEX later_id ON pgoutbox.later (id)",
    "COMMENT ON TABLE pgoutbox.later IS 'it''s; new'",
)
LOCKS: Final = """
SELECT upper(trim(regexp_replace(replace(l.mode, 'Lock', ''), '([A-Z])', ' \\1', 'g')))
FROM pg_locks AS l
WHERE l.pid = pg_backend_pid() AND l.relation = %s::regclass
"""


def test_the_plan_has_each_statement_with_its_lock(
    dsn: str, db: psycopg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration_plan, "_BYTES_PER_SECOND", 1)
    add_revision(tmp_path, monkeypatch, running([*PLANNED, UNKNOWN, *UNPLANNED]))
    expected = [(f"{text};", f"pgoutbox.{one}", lock, reads) for text, (one, lock, reads) in PLANNED.items()]
    steps = [(step.statement, step.relation, step.lock, step.seconds > 0) for step in migration_plan.plan(dsn)]
    assert steps == [*expected, (f"{UNKNOWN};", "", "unknown", False)]
    for statement, relation, lock, _ in expected:
        with db.transaction(force_rollback=True):
            before = {mode for (mode,) in db.execute(LOCKS, [relation])}
            oid = db.execute("SELECT %s::regclass::oid", [relation]).fetchone()
            db.execute(statement.encode())
            taken = {mode for (mode,) in db.execute(LOCKS.replace("%s::regclass", "%s"), oid)} - before
        assert lock in taken, (statement, taken)


def test_a_narrow_terminal_shows_each_step_of_the_plan(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long statement is cut, and breaks no name and no number."""
    view = "CREATE OR REPLACE VIEW pgoutbox.home_view AS SELECT" + " h.deployment," * 100 + " 1 FROM pgoutbox.home AS h"
    constraint = "ALTER TABLE pgoutbox.maintenance_run VALIDATE CONSTRAINT maintenance_run_single"
    add_revision(tmp_path, monkeypatch, running([view, constraint]))
    terminal, its_end = pty.openpty()
    with open(its_end, "w") as output, monkeypatch.context() as patch:  # noqa: PTH123 - it has no path
        patch.setattr("sys.stdout", output)
        patch.setenv("COLUMNS", "80")
        assert main(["migrate", "--plan", "--dsn", dsn]) == 0
        output.flush()
        shown = re.sub(r"\x1b\[[0-9;]*m", "", os.read(terminal, 65_536).decode())
    os.close(terminal)
    lines = [line.rstrip() for line in shown.splitlines()]
    assert max(map(len, lines)) <= 80, shown
    assert len(lines) < 20, shown
    words = " ".join(lines).split()
    assert [words.count(word) for word in ("home_view", "maintenance_run", "ACCESS", "UPDATE")] == [1, 1, 1, 1]
    place = next(line.index("statement") for line in lines if "statement" in line)
    statements = "".join(word for line in lines for word in line[place:].split())
    assert f"{constraint};".replace(" ", "") in statements, shown

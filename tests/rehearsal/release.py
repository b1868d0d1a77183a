"""Two releases as installed wheels: this one, and a made-up 0.2.0 with a change of each kind.

The later one has a new column of messages, an index on it, changed functions, a new option, a renamed setting, a claim
that reads the new column, and needs its own schema. It changes the files of this package by replacing texts that must
occur once.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pgoutbox
from pgoutbox.database.index_builds import Index
from tests.support.pages import ROOT
from tests.support.revisions import adding
from tests.support.wheels import build, install_alone

LATER: Final = "0.2.0"
FORMER_VARIABLE: Final = "PGOUTBOX_WORKER_NAME"
PRESENT_VARIABLE: Final = "PGOUTBOX_WORKER_LABEL"

_REVISION: Final = """
from pathlib import Path

from alembic import op
from sqlalchemy import DDL

from pgoutbox.migrate import FORGET_REVISION, LOCK_MESSAGES, is_applied_by_another_run, note_revision

revision = "pgoutbox_0002"
down_revision = "pgoutbox_0001"

SQL = Path(__file__).resolve().parents[1]
CHANGED = ("_enqueue", "_enqueue_receipt")


def run(text):
    op.execute(DDL(text.replace("%", "%%")))


def replace_functions(folder):
    for name in CHANGED:
        run((folder / f"{name}.sql").read_text().replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1))


def upgrade():
    if is_applied_by_another_run(revision, down_revision):
        return
    run(LOCK_MESSAGES)
    run("ALTER TYPE pgoutbox.draft ADD ATTRIBUTE campaign text")
    run("ALTER TABLE pgoutbox.message ADD COLUMN campaign text")
    replace_functions(SQL / "sql_0002")
    run(note_revision(2, lowest_package="0.1"))


def downgrade():
    # The column stays: a call that began with the later functions would not find it.
    run(FORGET_REVISION)
    replace_functions(SQL / "sql" / "functions")
"""
_CAMPAIGNS: Final = Index("message_campaign", "pgoutbox.message", "(campaign) WHERE campaign IS NOT NULL")


@dataclass(frozen=True, slots=True)
class Release:
    """An installed package: its version, and the folder to put on Python's path."""

    version: str
    path: Path


def install_both(directory: Path) -> tuple[Release, Release]:
    """Build and install this release and the later one."""
    return _install(ROOT, directory, pgoutbox.__version__), _install(_later(directory / "source"), directory, LATER)


def _install(source: Path, directory: Path, version: str) -> Release:
    path = directory / f"pgoutbox-{version}"
    install_alone(build(source, directory / f"dist-{version}"), path)
    return Release(version, path)


def _later(source: Path) -> Path:
    """Make the source of the later release."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("pgoutbox", "migrations"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    package, migrations = source / "pgoutbox", source / "migrations"
    _replace(package / "__init__.py", f'__version__ = "{pgoutbox.__version__}"', f'__version__ = "{LATER}"')
    functions, added = migrations / "sql" / "functions", migrations / "sql_0002"
    added.mkdir()
    for name, given in (("_enqueue", "d"), ("_enqueue_receipt", "options")):
        target = added / f"{name}.sql"
        shutil.copy(functions / target.name, target)
        _replace(
            target, "attempt_budget, headers, payload_version", "attempt_budget, headers, campaign, payload_version"
        )
        _replace(target, f"{given}.headers, coalesce(", f"{given}.headers, {given}.campaign, coalesce(")
    (migrations / "versions" / "0002_campaigns.py").write_text(_REVISION)
    (migrations / "versions" / "0003_index_of_campaigns.py").write_text(
        adding(_CAMPAIGNS, number=3, keeps_them=True)  # The index stays, as its column does.
    )
    _replace(
        package / "database" / "server.py", "REQUIRED_SCHEMA_VERSION: Final = 1", "REQUIRED_SCHEMA_VERSION: Final = 2"
    )
    options = package / "options.py"
    _replace(options, '    "headers": check_headers,\n', '    "headers": check_headers,\n    "campaign": check_key,\n')
    _replace(
        options,
        "    destination: str | None\n    coalesce",
        "    campaign: str | None\n    destination: str | None\n    coalesce",
    )
    claim = package / "kernel" / "sql" / "claim.sql"
    _replace(claim, "j.lane, m.payload_version\n", "j.lane, m.payload_version, m.campaign\n")
    _replace(claim, "j.queue, NULL, 3,\n    NULL\n", "j.queue, NULL, 3,\n    NULL, NULL\n")
    lapsed = package / "kernel" / "sql" / "lapsed.sql"
    _replace(lapsed, "m.lane, m.payload_version,\n", "m.lane, m.payload_version, m.campaign,\n")
    _replace(lapsed, "    f.payload_version\n", "    f.payload_version, f.campaign\n")
    _replace(
        package / "database" / "store.py",
        "    payload_version: int = 1\n",
        "    payload_version: int = 1\n    campaign: str | None = None\n",
    )
    _replace(
        package / "message.py",
        "    content: JsonValue = None\n    payload_version: int = 1\n",
        "    content: JsonValue = None\n    payload_version: int = 1\n    campaign: str | None = None\n",
    )
    _replace(
        package / "worker" / "loader.py",
        "            row.payload_version,\n",
        "            row.payload_version,\n            row.campaign,\n",
    )
    settings = package / "settings.py"
    _replace(settings, "    worker_name: str", "    worker_label: str")
    _replace(settings, "FORMER_NAMES: Final[Mapping[str, str]] = {}", 'FORMER_NAMES = {"worker_name": "worker_label"}')
    _replace(package / "worker" / "run.py", "settings.worker_name", "settings.worker_label")
    for old in ('"worker_name": name', "if settings.worker_name is", '"--name", settings.worker_name'):
        _replace(package / "cli" / "worker.py", old, old.replace("worker_name", "worker_label"))
    return source


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    if text.count(old) != 1:
        raise ValueError(f"{path.name}: {text.count(old)} times, not once: {old}")
    path.write_text(text.replace(old, new))

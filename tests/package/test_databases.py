"""Tests the list of databases: its sources, its rules, and that no error shows a DSN."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pgoutbox import ConfigurationError, Outbox
from pgoutbox.databases import read_databases, settings_of
from pgoutbox.errors import NotReadyError
from pgoutbox.settings import Settings, load_settings
from tests.support.command_line import clean_environment

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["clean_environment"]

SECRET = "c4n4ry"
ACME = f"postgresql://app:{SECRET}@db/acme"
BETA = f"host=db dbname=beta user=app password={SECRET}"


def of_lines(*lines: str) -> dict[str, str] | None:
    return read_databases(load_settings(dsns="\n".join(lines)), None)


def of_function(found: object) -> dict[str, str] | None:
    outbox = Outbox(databases=lambda: found)  # type: ignore[arg-type,return-value]
    return read_databases(load_settings(), outbox)


def refusal_of(*lines: str) -> str:
    with pytest.raises(ConfigurationError) as refused:
        of_lines(*lines)
    assert SECRET not in str(refused.value)
    return str(refused.value)


def test_each_line_has_a_name_and_a_dsn_in_the_order_given() -> None:
    found = of_lines("# tenants", "", f"beta  {BETA} ", f"\tacme\t{ACME}")
    assert found is not None
    assert list(found.items()) == [("beta", BETA), ("acme", ACME)]


def test_a_file_has_the_same_lines_and_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "databases"
    file.write_text(f"# tenants\nacme {ACME}\n")
    settings = load_settings(dsns=str(file))
    assert read_databases(settings, None) == {"acme": ACME}
    file.write_text(f"acme {ACME}\nbeta {BETA}\n")
    assert read_databases(settings, None) == {"acme": ACME, "beta": BETA}


def test_a_function_of_the_outbox_is_called_again() -> None:
    tenants = {"acme": ACME}
    outbox = Outbox(databases=lambda: tenants)
    assert read_databases(load_settings(), outbox) == {"acme": ACME}
    tenants["beta"] = BETA
    assert read_databases(load_settings(), outbox) == {"acme": ACME, "beta": BETA}


def test_without_a_list_there_is_none() -> None:
    assert read_databases(load_settings(dsn=ACME), Outbox()) is None
    assert read_databases(load_settings(), None) is None


def test_the_settings_of_one_database_have_no_list() -> None:
    outbox = Outbox(databases=lambda: {"acme": ACME})
    one = settings_of(load_settings(dsns=f"acme {ACME}", concurrency=7), "acme", ACME)
    assert (one.require_dsn(), one.database, one.dsns, one.concurrency) == (ACME, "acme", None, 7)
    assert read_databases(one, outbox) is None


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([ACME], "PGOUTBOX_DSNS, line 1: must begin with a name"),
        (["", f"a/b {ACME}"], "PGOUTBOX_DSNS, line 2: must begin with a name"),
        (["x" * 64 + f" {ACME}"], "PGOUTBOX_DSNS, line 1: must begin with a name"),
        (["acme"], "PGOUTBOX_DSNS, line 1: database 'acme' has no DSN"),
        ([f"acme {ACME}", f"acme {BETA}"], "PGOUTBOX_DSNS, line 2: there are two databases 'acme'"),
        ([f"acme {ACME}", f"beta {ACME}"], "PGOUTBOX_DSNS, line 2: 'acme' and 'beta' are the same database"),
        (
            ["a postgresql://one@db/x", "b host=db dbname=x user=two port=5432"],
            "PGOUTBOX_DSNS, line 2: 'a' and 'b' are the same database",
        ),
        (
            [f"acme postgresql+psycopg://app:{SECRET}@db/acme"],
            "PGOUTBOX_DSNS, line 1, database 'acme': is a SQLAlchemy URL; remove +psycopg",
        ),
        ([f"acme {SECRET}"], "PGOUTBOX_DSNS, line 1, database 'acme': the DSN is not a connection string"),
        (["# none"], "PGOUTBOX_DSNS: has no database"),
        (["/etc/databases", f"acme {ACME}"], "PGOUTBOX_DSNS, line 1: must begin with a name"),
    ],
)
def test_a_wrong_line_is_named_without_its_dsn(lines: list[str], reason: str) -> None:
    assert refusal_of(*lines).startswith(reason)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"port": 5433}, "port"),
        ({"host": "db2"}, "host"),
        ({"dbname": "y"}, "name"),
        ({"service": "s"}, "service"),
    ],
)
def test_databases_with_another_place_differ(other: Mapping[str, object], reason: str) -> None:
    place = {"host": "db", "dbname": "x", **other}
    assert of_lines("a host=db dbname=x", "b " + " ".join(f"{name}={value}" for name, value in place.items())), reason


def test_a_fault_in_a_file_names_the_file_and_the_line(tmp_path: Path) -> None:
    file = tmp_path / "databases"
    file.write_text(f"acme {ACME}\n\nacme {BETA}\n")
    assert refusal_of(str(file)) == f"{file}, line 3: there are two databases 'acme'; give one of them another name"
    file.write_bytes(b"acme host=\xff\n")
    assert refusal_of(str(file)) == f"PGOUTBOX_DSNS: {file} is not UTF-8 at byte 10"


def test_a_file_that_cannot_be_read_may_be_readable_later(tmp_path: Path) -> None:
    with pytest.raises(NotReadyError, match=f"PGOUTBOX_DSNS: {tmp_path}/none cannot be read: No such file"):
        of_lines(f"{tmp_path}/none")


@pytest.mark.parametrize(
    ("given", "other"),
    [
        ({"dsns": f"acme {ACME}", "dsn": BETA}, "PGOUTBOX_DSN"),
        ({"dsns": f"acme {ACME}", "listen_dsn": BETA}, "PGOUTBOX_LISTEN_DSN"),
    ],
)
def test_a_list_excludes_other_databases(given: dict[str, str], other: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_databases(load_settings(**given), None)
    assert str(refused.value) == f"PGOUTBOX_DSNS and {other} are both set: unset one of them"


@pytest.mark.parametrize("name", ["dsn", "dsns", "listen_dsn"])
def test_a_function_excludes_other_databases(name: str) -> None:
    settings = load_settings(**{name: f"acme {ACME}" if name == "dsns" else BETA})
    with pytest.raises(ConfigurationError, match="are both set: unset one of them"):
        read_databases(settings, Outbox(databases=lambda: {"acme": ACME}))


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (None, "must return a mapping of names and DSNs, not NoneType"),
        ([("acme", ACME)], "must return a mapping of names and DSNs, not list"),
        ({}, "has no database"),
        ({1: ACME}, "must begin with a name"),
        ({ACME: "acme"}, "must begin with a name"),
        ({"acme": None}, "database 'acme' has no DSN"),
        ({"acme": " "}, "database 'acme' has no DSN"),
        ({"acme": ACME, "beta": ACME}, "entry 2: 'acme' and 'beta' are the same database"),
    ],
)
def test_a_wrong_result_of_the_function_is_named_without_its_dsn(found: object, reason: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        of_function(found)
    assert reason in str(refused.value)
    assert "`databases`" in str(refused.value)
    assert SECRET not in str(refused.value)


def test_a_function_that_raises_may_succeed_later() -> None:
    def fail() -> dict[str, str]:
        raise OSError(f"cannot connect to {ACME}")

    with pytest.raises(NotReadyError, match=r"`databases` raised OSError \(.*test_databases.py, line \d+\)") as refused:
        read_databases(load_settings(), Outbox(databases=fail))
    assert SECRET not in str(refused.value)


async def never() -> dict[str, str]:
    return {}


@pytest.mark.parametrize("given", [{"acme": ACME}, "acme", never])
def test_an_outbox_takes_only_a_sync_function(given: Any) -> None:  # noqa: ANN401 - the mistakes of applications
    with pytest.raises(ConfigurationError, match="databases: must be a sync function") as refused:
        Outbox(databases=given)
    assert SECRET not in str(refused.value)


def test_a_list_without_a_name_is_no_dsn() -> None:
    with pytest.raises(ConfigurationError, match=r"PGOUTBOX_DSNS has several databases: name one with --database NAME"):
        Settings(dsns=f"acme {ACME}").require_dsn()

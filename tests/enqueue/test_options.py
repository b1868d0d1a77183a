"""Tests the options of a message, which are the fields of the type draft, in every function that takes them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import psycopg
import pytest
from psycopg import errors
from psycopg.types.json import Jsonb

from pgoutbox import Outbox
from pgoutbox.options import OPTIONS
from tests.support.drafts import enqueue_many
from tests.support.missing import setting_of_old_servers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Way: TypeAlias = Callable[[psycopg.Connection, Mapping[str, Any]], int]

TOMORROW: Final = (datetime.now(UTC) + timedelta(days=1)).replace(microsecond=123_456)
MINUTE: Final = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Case:
    """A value of an option as JSON, where it is seen, and the other options that it needs."""

    value: object
    column: str
    seen: object
    others: Mapping[str, object] = field(default_factory=dict)


CASES: Final[Mapping[str, Case]] = {
    "queue": Case("bulk", "m.queue", "bulk"),
    "destination": Case("mailto:a@example.org", "m.destination", "mailto:a@example.org"),
    "owner": Case("ada", "m.owner", "ada"),
    "coalesce_key": Case("k", "m.coalesce_key", "k"),
    "ordering_key": Case("k", "m.ordering_key", "k"),
    "dedupe_key": Case("k", "m.dedupe_key", "k"),
    "fair_key": Case("k", "ARRAY[m.fair_key, m.lane::text]", ["k", "2"]),
    # The message that `known` has written before, with another payload.
    "on_duplicate": Case("ignore", "m.payload", "known", {"dedupe_key": "known"}),
    "halts_key": Case(True, "m.halts_key", True, {"ordering_key": "k"}),
    "available_at": Case(TOMORROW.isoformat(), "m.available_at", TOMORROW),
    "delay": Case(60, "m.available_at - m.created_at", MINUTE),
    "max_delay": Case(60, "m.available_at - m.created_at", MINUTE, {"coalesce_key": "k", "delay": 3_600}),
    "expires_at": Case(TOMORROW.isoformat(), "m.expires_at", TOMORROW),
    "expires_after": Case(60, "m.expires_at - m.available_at", MINUTE, {"delay": 3_600}),
    "max_attempts": Case(3, "ARRAY[m.max_attempts, m.attempt_budget]", [3, 3]),
    "headers": Case({"trace": "1"}, "m.headers", {"trace": "1"}),
    "payload_version": Case(2, "m.payload_version", 2),
}
EVERY_OPTION: Final[Mapping[str, object]] = {
    name: CASES[name].value for name in CASES if name not in ("ordering_key", "halts_key", "available_at", "expires_at")
}
"""All that are allowed together."""


def scalar(connection: psycopg.Connection, statement: str, *parameters: object) -> object:
    row = connection.execute(statement.encode(), parameters).fetchone()
    assert row is not None
    return row[0]


def id_of(connection: psycopg.Connection, statement: str, *parameters: object) -> int:
    """Return the id of the message, also if it is a duplicate."""
    receipt = scalar(connection, statement, *parameters)
    assert isinstance(receipt, int)
    return abs(receipt)


def fields(connection: psycopg.Connection) -> list[str]:
    """Return the names of the options."""
    rows = connection.execute(
        """
        SELECT a.attname
        FROM pg_attribute AS a
        WHERE a.attrelid = 'pgoutbox.draft'::regclass AND NOT a.attisdropped AND a.attname NOT IN ('topic', 'payload')
        ORDER BY a.attnum
        """
    ).fetchall()
    return [name for (name,) in rows]


def by_names(connection: psycopg.Connection, options: Mapping[str, Any]) -> int:
    given = "".join(f", {name} => d.{name}" for name in options)
    call = f"pgoutbox.enqueue('mail', '1'{given}) FROM jsonb_populate_record(NULL::pgoutbox.draft, %s) AS d"
    return id_of(connection, f"SELECT {call}", Jsonb(options))


def by_receipt(connection: psycopg.Connection, options: Mapping[str, Any]) -> int:
    draft = "jsonb_populate_record(NULL::pgoutbox.draft, %s)"
    return id_of(connection, f"SELECT pgoutbox._enqueue_receipt('mail', '1', {draft}, true)", Jsonb(options))


def by_bulk(connection: psycopg.Connection, options: Mapping[str, Any]) -> int:
    _, (_, message_id, _) = enqueue_many(
        connection, {"topic": "mail", "payload": 0}, {"topic": "mail", "payload": 1, **options}
    )
    return message_id


def by_fan_out(connection: psycopg.Connection, options: Mapping[str, Any]) -> int:
    message = {"topic": "mail", "payload": 1, **options}
    return id_of(connection, "SELECT (pgoutbox.enqueue_fanout(%s, '[\"a:1\"]')).id", Jsonb(message))


WAYS: Final[tuple[Way, ...]] = (by_names, by_receipt, by_bulk)


# --- each option ------------------------------------------------------------------------------------------------------


def test_every_option_has_a_case_here_and_a_check_in_python(rolled_back: psycopg.Connection) -> None:
    assert sorted(CASES) == sorted(OPTIONS) == sorted(fields(rolled_back))


def test_enqueue_has_an_argument_for_every_option(rolled_back: psycopg.Connection) -> None:
    names = scalar(rolled_back, "SELECT p.proargnames FROM pg_proc AS p WHERE p.oid = 'pgoutbox.enqueue'::regproc")
    assert names == ["topic", "payload", *fields(rolled_back), "notify"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_every_option_reaches_its_column(rolled_back: psycopg.Connection, way: Way, name: str) -> None:
    case = CASES[name]
    enqueue_many(rolled_back, {"topic": "mail", "payload": "known", "dedupe_key": "known"})
    message_id = way(rolled_back, {**case.others, name: case.value})
    assert scalar(rolled_back, f"SELECT {case.column} FROM pgoutbox.message AS m WHERE m.id = %s", message_id) == (
        case.seen
    )


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("_key") and not CASES[name].others])
def test_the_message_of_a_fan_out_takes_the_options(rolled_back: psycopg.Connection, name: str) -> None:
    case = CASES[name]
    message_id = by_fan_out(rolled_back, {name: case.value})
    seen = scalar(rolled_back, f"SELECT {case.column} FROM pgoutbox.message AS m WHERE m.id = %s", message_id)
    assert seen == ("a:1" if name == "destination" else case.seen)


def row_without(connection: psycopg.Connection, way: Way, options: Mapping[str, Any], *columns: str) -> object:
    """Return the row that the call writes, without these columns. Leave nothing behind."""
    with connection.transaction(force_rollback=True):
        message_id = way(connection, options)
        connection.execute(
            "SET LOCAL TimeZone = 'UTC'; SET LOCAL DateStyle = 'ISO'; SET LOCAL IntervalStyle = postgres"
        )
        rows = "SELECT to_jsonb(m) - %s::text[] FROM pgoutbox.message AS m WHERE m.id = %s"
        return scalar(connection, rows, ["id", *columns], message_id)


@pytest.mark.parametrize("way", WAYS)
def test_every_option_that_is_null_has_its_default(rolled_back: psycopg.Connection, way: Way) -> None:
    rolled_back.execute("SELECT")
    default = row_without(rolled_back, way, {})
    assert row_without(rolled_back, way, dict.fromkeys(CASES)) == default


def test_all_ways_write_the_same_row(rolled_back: psycopg.Connection) -> None:
    rolled_back.execute("SELECT")
    first, *others = (row_without(rolled_back, way, EVERY_OPTION) for way in WAYS)
    assert others == [first] * len(others)
    assert isinstance(first, dict)
    assert {first[name] is not None for name in first.keys() & EVERY_OPTION} == {True}


# --- unknown options and wrong types ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["queu", "Queue", "id", "state", "notify", "", "a: b", "must not be null"])
@pytest.mark.parametrize(("way", "place"), [(by_bulk, "messages[1]"), (by_fan_out, "destinations[0]")])
def test_an_unknown_option_is_refused_by_name(rolled_back: psycopg.Connection, way: Way, place: str, name: str) -> None:
    with pytest.raises(errors.InvalidParameterValue) as caught:
        way(rolled_back, {"queue": "a", name: None})
    diag = caught.value.diag
    assert (diag.schema_name, diag.column_name) == ("pgoutbox", "options")
    assert diag.message_primary == f"pgoutbox.enqueue: {place}.options: unknown option {name}"


WRONG: Final[Mapping[str, tuple[object, ...]]] = {
    "text": (7, 1.5, True, [], {}, ["a"]),
    "boolean": ("true", "", 0, 1, [], [True], {}),
    "integer": ("3", 1.5, 3.0, True, [], [3], {}, 2**31, 2**63, -(2**31)),
    "interval": ("60", "1 hour", "01:00", True, [], [60], [[60]], {}, -1, -0.5, 315_360_001, 1e300),
    "timestamp with time zone": (
        7, True, [], {}, [TOMORROW.isoformat()], "", "now", "tomorrow", "epoch", "infinity", "-infinity", "2030-01-01",
        "2030-01-01T00:00:00", "2030-01-01 00:00:00", "2030-01-01T00:00:00 UTC", "2030-01-01 00:00:00 Europe/Zurich",
        "01/02/2030 00:00:00+00", "1.2.2030 00:00:00Z", "20300101T000000Z", "12:00:00Z", "2030-02-30T00:00:00Z",
        "2030-01-01T25:00:00Z", "2030-01-01T00:00:00+99", "2030-01-01T00:00:00Z\n", " 2030-01-01T00:00:00Z",
        "0000-01-01T00:00:00Z",
    ),
    "jsonb": ("a", 7, True, [], [{"a": "b"}], {"a": 1}, {"a": None}, {"a": ["b"]}, {"a": {}}),
}  # fmt: skip
TYPES: Final = """
    SELECT format_type(a.atttypid, a.atttypmod)
    FROM pg_attribute AS a
    WHERE a.attrelid = 'pgoutbox.draft'::regclass AND a.attname = %s
"""


def refusal(connection: psycopg.Connection, options: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the column and the start of the message of the error, or that there was none."""
    try:
        with connection.transaction():
            by_bulk(connection, options)
    except errors.InvalidParameterValue as error:
        return error.diag.column_name, str(error.diag.message_primary).partition(" must ")[0]
    return None, "accepted"


@pytest.mark.parametrize("name", CASES)
def test_a_value_of_a_wrong_type_is_refused_by_name(rolled_back: psycopg.Connection, name: str) -> None:
    rolled_back.execute("SELECT")
    kind = scalar(rolled_back, TYPES, name)
    others = CASES[name].others
    refusals = {repr(value): refusal(rolled_back, {**others, name: value}) for value in WRONG[str(kind)]}
    assert refusals == dict.fromkeys(refusals, (name, f"pgoutbox.enqueue: messages[1].{name}:"))


def test_a_topic_of_a_wrong_type_is_refused(rolled_back: psycopg.Connection) -> None:
    with pytest.raises(errors.InvalidParameterValue, match=r"messages\[0\]\.topic: must be a text"):
        enqueue_many(rolled_back, {"topic": 7, "payload": 1})


@pytest.mark.parametrize("text", ["2026-01-31T09:00Z", "2026-01-31 09:00:00+01", "2026-01-31T09:00:00.123456-0330"])
@pytest.mark.parametrize("name", ["available_at"])
def test_a_time_with_its_zone_is_accepted(rolled_back: psycopg.Connection, name: str, text: str) -> None:
    by_bulk(rolled_back, {name: text})


@pytest.mark.parametrize("seconds", [0, 0.5, 1e-6, 90_061, 315_360_000])
def test_a_delay_is_a_number_of_seconds(rolled_back: psycopg.Connection, seconds: float) -> None:
    message_id = by_bulk(rolled_back, {"delay": seconds})
    due_in = "SELECT m.available_at - m.created_at FROM pgoutbox.message AS m WHERE m.id = %s"
    assert scalar(rolled_back, due_in, message_id) == timedelta(seconds=seconds)


# --- settings of the session ------------------------------------------------------------------------------------------

SETTINGS: Final = (
    *(("DateStyle", style) for style in ("ISO, DMY", "SQL, MDY", "SQL, DMY", "German", "Postgres, YMD")),
    *(("IntervalStyle", style) for style in ("postgres_verbose", "sql_standard", "iso_8601")),
    *(("TimeZone", zone) for zone in ("America/St_Johns", "Asia/Kathmandu", "UTC", "<+14>-14")),
    ("array_nulls", "off"),
    ("standard_conforming_strings", "off"),
    ("backslash_quote", "off"),
    ("transform_null_equals", "on"),
    ("extra_float_digits", "-15"),
    ("bytea_output", "escape"),
    ("search_path", ""),
    ("search_path", "public"),
    ("search_path", "pg_temp, pgoutbox"),
    ("quote_all_identifiers", "on"),
    ("default_text_search_config", "simple"),
)


def by_second_receipt(connection: psycopg.Connection, options: Mapping[str, Any]) -> int:
    """Enqueue where the keys are known: their heads and digests are compared."""
    by_receipt(connection, {**options, "dedupe_key": "other"})
    return by_receipt(connection, options)


@pytest.mark.parametrize("way", [*WAYS, by_second_receipt])
@pytest.mark.parametrize(("setting", "value"), SETTINGS)
def test_no_setting_of_the_session_changes_the_row(
    rolled_back: psycopg.Connection, way: Way, setting: str, value: str
) -> None:
    """Texts with a backslash, a quote, an array's and a pattern's special characters, and times in an odd zone."""
    options: dict[str, object] = {
        **EVERY_OPTION,
        "coalesce_key": "a\\b'c",
        "dedupe_key": "{NULL}",
        "owner": "NULL",
        "headers": {"a\\": "'\\\\'"},
        "delay": 90_061.123456,
        "max_delay": 86_400.5,
        "expires_after": 1e-6,
    }
    del options["on_duplicate"]
    times = {
        "available_at": "2026-02-03T04:05:06.789012+05:45",
        "expires_at": TOMORROW.astimezone().isoformat(),
        "ordering_key": "NULL",
        "halts_key": True,
    }
    rolled_back.execute("SELECT")
    for given in (options, times):
        expected = row_without(rolled_back, way, given)
        with rolled_back.transaction(force_rollback=True):
            with setting_of_old_servers():
                rolled_back.execute("SELECT set_config(%s, %s, true)", [setting, value])
            assert row_without(rolled_back, way, given) == expected


@pytest.mark.parametrize("style", ["postgres", "postgres_verbose", "sql_standard", "iso_8601"])
@pytest.mark.parametrize(
    "delay", ["1 mon 2 days 03:04:05.678901", "1 mon -1 day", "2 days -1 hour", "1 year", "1 microsecond", "0"]
)
def test_an_interval_is_its_seconds_in_every_style(rolled_back: psycopg.Connection, style: str, delay: str) -> None:
    """A day has 24 hours and a month 30 days, whatever the session's time zone."""
    rolled_back.execute("CREATE TEMP TABLE given AS SELECT %s::text::interval AS delay", [delay])
    rolled_back.execute(
        "SELECT set_config('IntervalStyle', %s, true), set_config('timezone', 'Europe/Berlin', true)", [style]
    )
    rolled_back.execute("SELECT pgoutbox.enqueue('mail', '1', delay => given.delay) FROM given")
    due = (
        "SELECT m.available_at = now() + make_interval(secs => extract(epoch FROM given.delay)::float8)"
        " FROM pgoutbox.message AS m CROSS JOIN given"
    )
    assert scalar(rolled_back, due) is True


def test_the_shortest_delay_of_python_is_accepted(rolled_back: psycopg.Connection) -> None:
    """Its decimal notation has more digits than PostgreSQL reads for an interval."""
    Outbox().on(rolled_back).enqueue("mail", 1, delay=math.ulp(0.0))
    assert scalar(rolled_back, "SELECT m.available_at = now() FROM pgoutbox.message AS m") is True


def test_the_short_check_of_a_single_message_knows_each_option(rolled_back: psycopg.Connection) -> None:
    """An option that it left out would be written without its check."""
    (source,) = rolled_back.execute("SELECT pg_get_functiondef('pgoutbox._enqueue_receipt'::regproc)").fetchone() or (
        "",
    )
    names = rolled_back.execute(
        "SELECT a.attname::text FROM pg_attribute AS a WHERE a.attrelid = 'pgoutbox.draft'::regclass"
    ).fetchall()
    short_check, _, _ = source.partition(") IS NOT TRUE THEN")
    assert len(names) > 15
    assert [name for (name,) in names if f"options.{name}" not in short_check] == []

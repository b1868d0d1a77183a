"""Tests that the search for a person reads every column of the schema that may name one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from pgoutbox.operations import Mention, Operator
from tests.support.messages import put

if TYPE_CHECKING:
    import psycopg

NAME: Final = "Ada Löwe"

COLUMNS: Final = """
    SELECT c.relname::text, a.attname::text, format_type(a.atttypid, NULL)
    FROM pg_class AS c
    JOIN pg_attribute AS a ON a.attrelid = c.oid
    WHERE c.relnamespace = 'pgoutbox'::regnamespace
        AND c.relkind IN ('r', 'p')
        AND NOT c.relispartition
        AND a.attnum > 0
        AND NOT a.attisdropped
        AND format_type(a.atttypid, NULL) NOT IN (
            'bigint', 'bigint[]', 'boolean', 'date', 'double precision', 'integer', 'interval', 'oid', 'smallint',
            'timestamp with time zone', 'uuid'
        )
"""

NAMELESS: Final = {
    "names of topics, queues, schedules and mailing lists": {
        "mailing_list", "topic", "topics", "exempt_topics", "queue", "queue.name", "queues", "scope", "schedule.name",
    },
    "names of processes and databases": {
        "worker", "worker.name", "released_from", "database_name", "deployment",
    },
    "words of pgoutbox and PostgreSQL": {
        "suppression.reason", "schedule.rule", "schedule.timezone", "schedule.missed", "schedule.problem",
        "state", "action", "time_zone", "version", "version_num", "lowest_package", "applied_by",
    },
    "digests and random bytes": {"payload_digest", "digest", "secret.key"},
    "has the coalesce or ordering key of the same row": {"key_in_flight"},
}  # fmt: skip
"""Columns that may not name a person: the reason, and the column, with its table if another one has that name."""

ROWS: Final = """
    INSERT INTO pgoutbox.message (topic, payload) VALUES ('mail', '1');
    INSERT INTO pgoutbox.content (body) VALUES ('1');
    INSERT INTO pgoutbox.dedupe (message_id, topic, dedupe_key, payload_digest) VALUES (1, 'mail', 'k', '');
    INSERT INTO pgoutbox.key_head (newest_id, scope, key) VALUES (1, 'mail', 'k');
    INSERT INTO pgoutbox.audit (act_id, actor, action) VALUES (gen_random_uuid(), 'olga', 'cancel');
    INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error) VALUES ('k', now(), 1, 'w', '');
    INSERT INTO pgoutbox.redirect (set_at, target, set_by) VALUES (now(), '@example.org', 'olga');
    INSERT INTO pgoutbox.fair_share (queue) VALUES ('q');
    INSERT INTO pgoutbox.schedule (name, rule, message) VALUES ('s', 'every 60', '{}');
    INSERT INTO pgoutbox.worker (name, queues, topics) VALUES ('w', '{}', '{}')
"""
"""A row of each table with a column that may name a person; `home` has one already."""

VALUES: Final = {"text": "%(name)s", "text[]": "ARRAY[%(name)s]", "jsonb": "jsonb_build_object('to', %(name)s::text)"}


def test_mentions_are_found_in_every_column_that_may_name_a_person(rolled_back: psycopg.Connection) -> None:
    """A new column must be searched, or be among the nameless ones."""
    nameless = {name for names in NAMELESS.values() for name in names}
    unknown, operator = set(nameless), Operator(rolled_back)
    for statement in ROWS.split(";"):
        rolled_back.execute(statement.encode())
    for table, column, type_ in rolled_back.execute(COLUMNS).fetchall():
        if excepted := nameless & {column, f"{table}.{column}"}:
            unknown -= excepted
            continue
        place, value = sql.Identifier(column), sql.SQL(VALUES[type_])
        update = sql.SQL("UPDATE pgoutbox.{} SET {} = {}").format(sql.Identifier(table), place, value)
        name = f"Ada {table} {column}"
        assert rolled_back.execute(update, {"name": name}).rowcount == 1, f"{table} needs a row in ROWS"
        assert [found[:2] for found in operator.mentions(name)] == [(table, column)]
    assert unknown == set()


@pytest.mark.parametrize("before", [" ", "to:", "\n", "\t", "\r\n"])
def test_a_mention_may_begin_a_line_of_a_payload(rolled_back: psycopg.Connection, before: str) -> None:
    message_id = put(rolled_back)
    rolled_back.execute("UPDATE pgoutbox.message SET payload = %s", [Jsonb({"body": f"Hello{before}{NAME}!"})])
    assert Operator(rolled_back).mentions(NAME) == [Mention("message", "payload", message_id)]
    assert Operator(rolled_back).mentions(NAME[1:]) == []


def test_a_mention_is_found_in_any_case(rolled_back: psycopg.Connection) -> None:
    message_id = put(rolled_back)
    rolled_back.execute("UPDATE pgoutbox.message SET last_error = 'gone: ' || upper(%s)", [NAME])
    assert Operator(rolled_back).mentions(NAME) == [Mention("message", "last_error", message_id)]

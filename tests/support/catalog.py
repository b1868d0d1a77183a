"""PostgreSQL's own description of the schema, to compare two ways of creating it."""

from __future__ import annotations

from typing import Final

import psycopg

_CATALOG: Final = """
    SELECT 'column' AS kind,
           format('%s.%s', c.relname, a.attname) AS name,
           concat_ws(' ', format_type(a.atttypid, a.atttypmod), a.attnotnull, pg_get_expr(d.adbin, d.adrelid)) AS what
    FROM pg_class AS c
    JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
    LEFT JOIN pg_attrdef AS d ON d.adrelid = c.oid AND d.adnum = a.attnum
    WHERE c.relnamespace = to_regnamespace('pgoutbox')
    UNION ALL
    SELECT 'relation',
           c.relname,
           concat_ws(' ', c.relkind, c.relacl, c.reloptions, pg_get_partkeydef(c.oid),
                     pg_get_expr(c.relpartbound, c.oid), pg_get_indexdef(c.oid))
    FROM pg_class AS c
    WHERE c.relnamespace = to_regnamespace('pgoutbox')
    UNION ALL
    SELECT 'constraint', format('%s.%s', k.conrelid::regclass, k.conname), pg_get_constraintdef(k.oid)
    FROM pg_constraint AS k
    WHERE k.connamespace = to_regnamespace('pgoutbox')
    UNION ALL
    SELECT 'function', p.oid::regprocedure::text, concat_ws(' ', pg_get_functiondef(p.oid), p.proacl)
    FROM pg_proc AS p
    WHERE p.pronamespace = to_regnamespace('pgoutbox')
    UNION ALL
    SELECT 'trigger', format('%s.%s', t.tgrelid::regclass, t.tgname), pg_get_triggerdef(t.oid)
    FROM pg_trigger AS t
    JOIN pg_class AS c ON c.oid = t.tgrelid
    WHERE c.relnamespace = to_regnamespace('pgoutbox') AND NOT t.tgisinternal
    UNION ALL
    SELECT 'comment', concat_ws('.', c.relname, a.attname), d.description
    FROM pg_description AS d
    JOIN pg_class AS c ON d.classoid = 'pg_class'::regclass AND c.oid = d.objoid
    LEFT JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = d.objsubid AND d.objsubid > 0
    WHERE c.relnamespace = to_regnamespace('pgoutbox')
    ORDER BY 1, 2, 3
"""


def catalog(dsn: str) -> list[tuple[str, str, str]]:
    """Return PostgreSQL's own description of everything that the revisions create."""
    with psycopg.connect(dsn) as connection:
        return connection.execute(_CATALOG).fetchall()

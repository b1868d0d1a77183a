-- The conditions of a filter of messages, and that of a group of failed_groups.sql: its topic and folded error, hashed.
\ir ../operators/_matches.sql
AND (
    %(error_group)s::text IS NULL
    OR left(encode(sha256(convert_to(
        m.topic || E'\n' ||
        \ir _folded_error.sql
    , 'UTF8')), 'hex'), 32) = %(error_group)s::text
)

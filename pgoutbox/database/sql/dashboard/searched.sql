-- The last of the `rows` rows that search_messages.sql has read: after less than a page of matches, the next search
-- continues there. No row: it has read all rows.
SELECT near.id
\ir _before.sql
OFFSET %(rows)s::bigint - 1
LIMIT 1

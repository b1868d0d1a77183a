-- Those of these messages that have the text in an owner or a key, in which nothing is hidden.
SELECT m.id
FROM pgoutbox.message_view AS m
WHERE m.id = ANY (%(ids)s::bigint[])
    AND strpos(
        lower(concat_ws(E'\n', m.coalesce_key, m.dedupe_key, m.ordering_key, m.fair_key, m.owner)),
        lower(%(text)s::text)
    ) > 0

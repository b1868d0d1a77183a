-- Owner, id, topics, states, id before which the page ends, and number of messages.
pgoutbox.find(
    owner => %s::pg_catalog.text,
    message_id => %s::pg_catalog.int8,
    topics => %s::pg_catalog.text[],
    states => %s::pg_catalog.text[],
    before_id => %s::pg_catalog.int8,
    max_count => %s::pg_catalog.int4
) AS f

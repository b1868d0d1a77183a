-- Change a pending message of an owner in the caller's transaction.
SELECT pgoutbox.edit(
    message_id => %s::pg_catalog.int8,
    owner => %s::pg_catalog.text,
    payload => %s::pg_catalog.text::pg_catalog.jsonb,
    destination => %s::pg_catalog.text,
    available_at => greatest(
        %s::pg_catalog.timestamptz,
        pg_catalog.now() OPERATOR(pg_catalog.+) pg_catalog.make_interval(secs => %s::pg_catalog.float8)
    ),
    sealed_for => %s::pg_catalog.text,
    payload_version => %s::pg_catalog.int4
)

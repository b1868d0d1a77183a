-- Topic, payload, options and whether to notify. JSON is sent as text, because an asyncpg connection may have the
-- application's own codec for jsonb.
%s::pg_catalog.text,
%s::pg_catalog.text::pg_catalog.jsonb,
pg_catalog.jsonb_populate_record(NULL::pgoutbox.draft, %s::pg_catalog.text::pg_catalog.jsonb),
%s::pg_catalog.bool

-- PostgreSQL inlines the body.
CREATE FUNCTION pgoutbox._draft(topic text, payload jsonb, options jsonb)
RETURNS pgoutbox.draft
LANGUAGE sql
STABLE
RETURN pg_catalog.jsonb_populate_record(
    ROW(
        topic, payload, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
    )::pgoutbox.draft,
    options
);

COMMENT ON FUNCTION pgoutbox._draft IS 'The draft with these options, which are the fields of the type draft.';

-- Suppress an address in the caller's transaction. True: it was not suppressed before.
SELECT pgoutbox.suppress(
    address => %s::pg_catalog.text,
    reason => %s::pg_catalog.text,
    mailing_list => %s::pg_catalog.text,
    detail => %s::pg_catalog.text
)

-- The messages of a fan-out as rows: the values of each destination, or else the common ones. PostgreSQL inlines the
-- query.
CREATE FUNCTION pgoutbox._fanout_items(
    destinations text[],
    payload jsonb,
    available_at timestamptz,
    headers jsonb,
    owner text,
    payloads jsonb[],
    headers_each jsonb[],
    available_ats timestamptz[],
    delays double precision[],
    owners text[]
)
RETURNS TABLE (
    item_index integer, destination text, payload jsonb, available_at timestamptz, headers jsonb, owner text
)
LANGUAGE sql
STABLE
BEGIN ATOMIC
    SELECT
        d.ordinality::integer OPERATOR(pg_catalog.-) 1,
        d.destination,
        coalesce(d.payload, _fanout_items.payload),
        coalesce(
            greatest(
                d.available_at, pg_catalog.now() OPERATOR(pg_catalog.+) pg_catalog.make_interval(secs => d.delay)
            ),
            _fanout_items.available_at
        ),
        coalesce(d.headers, _fanout_items.headers),
        coalesce(d.owner, _fanout_items.owner)
    FROM unnest(destinations, payloads, headers_each, available_ats, delays, owners)
        WITH ORDINALITY AS d(destination, payload, headers, available_at, delay, owner, ordinality);
END;

COMMENT ON FUNCTION pgoutbox._fanout_items IS 'The messages of enqueue_fanout as rows.';

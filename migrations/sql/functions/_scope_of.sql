-- The scope of the key of a message in key_head. PostgreSQL inlines the body. No topic begins with a slash.
CREATE FUNCTION pgoutbox._scope_of(topic text, queue text, ordering_key text)
RETURNS text
LANGUAGE sql
IMMUTABLE
RETURN CASE
    WHEN ordering_key IS NULL THEN topic
    ELSE '/' OPERATOR(pg_catalog.||) coalesce(queue, 'default')
END;

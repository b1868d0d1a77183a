-- Only this function uses a detached table. If a rule deletes sent messages at once, their dedupe keys stay here too.
CREATE FUNCTION pgoutbox._clear_retired(page_size integer)
RETURNS TABLE (name text, cleared_count bigint, is_dropped boolean)
LANGUAGE plpgsql
VOLATILE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO, YMD'
SET lock_timeout = '100ms'
-- A page is small beside the tables of keys: their indexes find its rows, and a hash join would read all keys each time.
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $function$
DECLARE
    chosen pgoutbox.retired;
    first_id bigint;
    last_id bigint;
BEGIN
    BEGIN
        LOCK TABLE pgoutbox.retired IN SHARE ROW EXCLUSIVE MODE NOWAIT;
    EXCEPTION WHEN lock_not_available THEN
        RETURN;
    END;
    SELECT r.* INTO chosen FROM pgoutbox.retired AS r ORDER BY r.name LIMIT 1 FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    name := chosen.name;
    cleared_count := 0;
    EXECUTE 'SELECT min(m.id), max(m.id) FROM pgoutbox.' || quote_ident(chosen.name) || ' AS m WHERE m.id > $1'
        INTO first_id, last_id
        USING chosen.cleared_id;
    is_dropped := first_id IS NULL
        OR NOT EXISTS (SELECT FROM pgoutbox.dedupe)
        AND NOT EXISTS (SELECT FROM pgoutbox.attempt AS a WHERE a.message_id BETWEEN first_id AND last_id)
        AND NOT EXISTS (SELECT FROM pgoutbox.large_payload AS l WHERE l.message_id BETWEEN first_id AND last_id);
    IF NOT is_dropped THEN
        EXECUTE '
            WITH page AS MATERIALIZED (
                SELECT m.id, m.topic, m.state, m.dedupe_key, m.payload IS NULL AS has_large_payload
                FROM pgoutbox.' || quote_ident(chosen.name) || ' AS m
                WHERE m.id > $1
                ORDER BY m.id
                LIMIT $2
            ), history AS (
                DELETE FROM pgoutbox.attempt AS a
                USING page AS p
                WHERE a.message_id = p.id
            ), large AS (
                DELETE FROM pgoutbox.large_payload AS l
                USING page AS p
                WHERE l.message_id = p.id AND p.has_large_payload
            ), keys AS (
                DELETE FROM pgoutbox.dedupe AS d
                USING page AS p
                WHERE p.dedupe_key IS NOT NULL
                    AND d.topic = p.topic
                    AND d.dedupe_key = p.dedupe_key
                    AND d.message_id = p.id
                    AND (
                        SELECT r.keep
                        FROM pgoutbox.retention AS r
                        WHERE r.state = p.state AND r.state = ''sent'' AND r.topic IN (p.topic, ''*'')
                        ORDER BY r.topic = ''*''
                        LIMIT 1
                    ) IS DISTINCT FROM interval ''0''
            )
            SELECT max(p.id), count(*) FROM page AS p'
            INTO last_id, cleared_count
            USING chosen.cleared_id, page_size;
        is_dropped := cleared_count < page_size;
    END IF;
    IF is_dropped THEN
        EXECUTE 'DROP TABLE pgoutbox.' || quote_ident(chosen.name);
        DELETE FROM pgoutbox.retired AS r WHERE r.name = chosen.name;
    ELSE
        UPDATE pgoutbox.retired AS r SET cleared_id = last_id WHERE r.name = chosen.name;
    END IF;
    RETURN NEXT;
END
$function$;

COMMENT ON FUNCTION pgoutbox._clear_retired IS
    'Delete attempts, large payloads and dedupe keys of a batch of messages of a retired partition, and drop it after '
    'the last batch. No row if there is none, or another session is doing this.';

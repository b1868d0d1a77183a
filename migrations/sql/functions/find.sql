-- The messages of an owner in these states, newest first: all of its topics, or only these, or one message. The next
-- page begins before the last id of a page. Destination and reason are redacted as in message_view; the reason says why
-- a message was skipped or failed.
--
-- For a page such as "my scheduled messages". It returns no payload: see read_payloads. Messages for hooks belong to the
-- application, not to the owner.
CREATE FUNCTION pgoutbox.find(
    owner text,
    message_id bigint DEFAULT NULL,
    topics text[] DEFAULT NULL,
    states text[] DEFAULT '{pending,sending}',
    before_id bigint DEFAULT NULL,
    max_count integer DEFAULT 100
)
RETURNS TABLE (
    id            bigint,
    topic         text,
    queue         text,
    state         text,
    destination   text,
    attempt_count integer,
    created_at    timestamptz,
    available_at  timestamptz,
    expires_at    timestamptz,
    finished_at   timestamptz,
    coalesce_key  text,
    dedupe_key    text,
    ordering_key  text,
    reason        text
)
LANGUAGE plpgsql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    wanted constant text[] := ARRAY(SELECT DISTINCT unnest(find.states));
    upper_id constant bigint := least(find.before_id - 1, find.message_id, 9223372036854775807);
    problem constant text := CASE
        WHEN find.owner IS NULL THEN 'owner: must not be null'
        WHEN find.states IS NULL OR find.states = '{}'
            OR NOT find.states <@ '{pending,sending,sent,failed,skipped,cancelled}'
            THEN 'states: must be some of pending, sending, sent, failed, skipped and cancelled'
        WHEN find.max_count IS NULL OR find.max_count NOT BETWEEN 1 AND 1000 THEN 'max_count: must be from 1 to 1000'
    END;
BEGIN
    PERFORM pgoutbox._raise_argument_error(problem, in_function => 'find');
    RETURN QUERY
    SELECT
        m.id,
        m.topic,
        m.queue,
        m.state,
        pgoutbox._redacted_text(m.destination),
        m.attempt_count,
        m.created_at,
        m.available_at,
        m.expires_at,
        m.finished_at,
        m.coalesce_key,
        m.dedupe_key,
        m.ordering_key,
        pgoutbox._redacted_text(CASE m.state WHEN 'skipped' THEN m.skip_reason WHEN 'failed' THEN m.last_error END)
    FROM pgoutbox.message AS m
    WHERE m.owner = find.owner
        AND m.id BETWEEN coalesce(find.message_id, 0) AND upper_id
        -- PostgreSQL skips the partitions of other states for a list of values, but not for an array, in a generic plan.
        AND m.state IN (wanted[1], wanted[2], wanted[3], wanted[4], wanted[5], wanted[6])
        AND (find.topics IS NULL OR m.topic = ANY (find.topics))
        AND m.failure_of IS NULL
    ORDER BY m.id DESC
    LIMIT find.max_count;
END
$function$;

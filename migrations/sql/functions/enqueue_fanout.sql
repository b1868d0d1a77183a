-- Write one message for each destination in this transaction, and the shared content once. A destination is a text, or
-- an object with a destination and values of its own, which replace those of the message.
CREATE FUNCTION pgoutbox.enqueue_fanout(
    message jsonb, destinations jsonb, content jsonb DEFAULT NULL, notify boolean DEFAULT true
)
RETURNS TABLE (item_index integer, id bigint)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_variable
DECLARE
    drafts pgoutbox.draft[];
    shared_id bigint;
BEGIN
    IF jsonb_typeof(message) IS DISTINCT FROM 'object' THEN
        PERFORM pgoutbox._raise_argument_error('message: must be a JSON object');
    ELSIF message ?| '{coalesce_key,ordering_key,dedupe_key}' THEN
        PERFORM pgoutbox._raise_argument_error('message: the messages of a fan-out have no keys; use enqueue_many');
    ELSIF jsonb_typeof(destinations) IS DISTINCT FROM 'array' THEN
        PERFORM pgoutbox._raise_argument_error('destinations: must be a JSON array');
    ELSIF pg_column_size(content) > 65536 AND octet_length(content::text) > 16777216 THEN
        PERFORM pgoutbox._raise_argument_error('content: must not have more than 16777216 bytes');
    END IF;
    PERFORM pgoutbox._raise_argument_error(o.problem, 'destinations', o.n)
    FROM (
        SELECT d.ordinality - 1 AS n, CASE
            WHEN jsonb_typeof(d.own) NOT IN ('object', 'string') THEN 'destination: must be a text or an object'
            WHEN d.own ?| '{topic,coalesce_key,ordering_key,dedupe_key}'
                THEN 'destination: the messages of a fan-out have one topic and no keys; use enqueue_many'
            WHEN jsonb_typeof(d.own) = 'object' AND d.own ->> 'destination' IS NULL THEN 'destination: must be given'
        END AS problem
        FROM jsonb_array_elements(destinations) WITH ORDINALITY AS d(own, ordinality)
    ) AS o
    WHERE o.problem IS NOT NULL
    ORDER BY o.n
    LIMIT 1;
    drafts := pgoutbox._drafts(
        (
            SELECT coalesce(jsonb_agg(
                -- Its own time replaces the common one.
                CASE WHEN d.own ?| '{available_at,delay}' THEN message - '{available_at,delay}'::text[] ELSE message END
                || CASE jsonb_typeof(d.own) WHEN 'string' THEN jsonb_build_object('destination', d.own) ELSE d.own END
                ORDER BY d.ordinality
            ), '[]')
            FROM jsonb_array_elements(destinations) WITH ORDINALITY AS d(own, ordinality)
        ),
        'destinations'
    );
    IF content IS NOT NULL AND cardinality(drafts) > 0 THEN
        INSERT INTO pgoutbox.content AS c (body) VALUES (content) RETURNING c.id INTO shared_id;
    END IF;
    RETURN QUERY
    SELECT (r.ordinality - 1)::integer, r.id
    FROM unnest(
        pgoutbox._enqueue(drafts, notify, 'destinations', content_id => shared_id)
    ) WITH ORDINALITY AS r(id, ordinality);
END
$function$;

-- All data of the messages with these ids, of this owner, or to this destination: the row with its attempts and the
-- acts of operators, headers, payload, and the content of a fan-out.
--
-- It returns payloads, so only the owner of the schema may call it, and logins to which the owner grants it.
CREATE FUNCTION pgoutbox.export(ids bigint[] DEFAULT NULL, owner text DEFAULT NULL, destination text DEFAULT NULL)
RETURNS TABLE (id bigint, message jsonb, headers jsonb, payload jsonb, content jsonb)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
AS $function$
#variable_conflict use_column
DECLARE
    found_ids constant bigint[] := ARRAY(
        SELECT m.id
        FROM pgoutbox._selected_messages(export.ids, export.owner, export.destination) AS m
        ORDER BY m.id
    );
BEGIN
    PERFORM pgoutbox._record_act(
        'export',
        message_ids => found_ids,
        details => jsonb_build_object(
            'by',
            CASE
                WHEN export.ids IS NOT NULL THEN 'ids'
                WHEN export.owner IS NOT NULL THEN 'owner'
                ELSE 'destination'
            END
        )
    );
    RETURN QUERY
    SELECT
        m.id,
        to_jsonb(m) - '{payload,headers}'::text[] || jsonb_build_object(
            'acts',
            ARRAY(
                SELECT jsonb_build_object('acted_at', a.acted_at, 'actor', a.actor, 'action', a.action)
                FROM pgoutbox.audit AS a
                WHERE a.message_ids @> ARRAY[m.id]
                ORDER BY a.id
            )
        ),
        m.headers,
        m.payload,
        (SELECT c.body FROM pgoutbox.content AS c WHERE c.id = m.content_id)
    FROM pgoutbox.message AS m
    WHERE m.id = ANY (found_ids)
    ORDER BY m.id;
END
$function$;

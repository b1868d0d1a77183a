-- Digests by which enqueue recognizes a repeated payload; several for an encrypted one. Encrypting the same payload
-- gives a different text each time. So an encrypted payload contains digests, one for each key of its producer. Any of
-- them identifies a repeated payload, so that keys can be rotated.
CREATE FUNCTION pgoutbox._payload_digests(p_payload jsonb)
RETURNS bytea[]
LANGUAGE plpgsql
STABLE
AS $function$
DECLARE
    digests bytea[];
BEGIN
    IF p_payload -> 'pgoutbox.encrypted' IS NOT NULL THEN
        SELECT array_agg(sha256(convert_to('digest ' || (d.digest #>> '{}'), 'UTF8')) ORDER BY d.ordinality)
        INTO digests
        FROM jsonb_path_query(
            p_payload, 'strict $."pgoutbox.encrypted"."digests"[*] ? (@.type() == "string")', '{}', true
        ) WITH ORDINALITY AS d(digest, ordinality);
    END IF;
    RETURN coalesce(digests, ARRAY[sha256(convert_to(p_payload::text, 'UTF8'))]);
END
$function$;

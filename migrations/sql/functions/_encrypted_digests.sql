-- The digests of the producer's keys in an encrypted payload; null if it has none.
CREATE FUNCTION pgoutbox._encrypted_digests(payload jsonb)
RETURNS bytea[]
LANGUAGE plpgsql
STABLE
AS $function$
BEGIN
    RETURN (
        SELECT array_agg(sha256(convert_to('digest ' || (d.digest #>> '{}'), 'UTF8')) ORDER BY d.ordinality)
        FROM jsonb_path_query(
            payload, 'strict $."pgoutbox.encrypted"."digests"[*] ? (@.type() == "string")', '{}', true
        ) WITH ORDINALITY AS d(digest, ordinality)
    );
END
$function$;

-- For each of these addresses and mailing lists: its place, the digest of the address, the reason why mail of the list must
-- not go there, or null, and the time of the answer.
CREATE FUNCTION pgoutbox._suppressed(addresses text[], mailing_lists text[])
RETURNS TABLE (place bigint, digest text, reason text, asked_at timestamptz)
LANGUAGE sql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
SELECT a.place, d.digest, s.reason, clock_timestamp()
FROM unnest(addresses, mailing_lists) WITH ORDINALITY AS a(address, mailing_list, place)
CROSS JOIN LATERAL (SELECT pgoutbox.address_digest(a.address) AS digest OFFSET 0) AS d
LEFT JOIN LATERAL (
    SELECT s.reason
    FROM pgoutbox.suppression AS s
    WHERE s.digest = d.digest AND s.mailing_list IN ('', a.mailing_list) AND s.ended_at IS NULL
    ORDER BY s.mailing_list
    LIMIT 1
) AS s ON true
$function$;

-- For each of these addresses and mailing lists in their order: the digest of the address, the reason why mail of the list
-- must not go there, or null, and the time of the answer. An error if the digests of the table are those of another secret:
-- without it nobody would be suppressed.
CREATE FUNCTION pgoutbox._suppressed(addresses text[], mailing_lists text[])
RETURNS TABLE (digest text, reason text, asked_at timestamptz)
LANGUAGE plpgsql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    mark constant text := pgoutbox._list_mark();
BEGIN
    IF (SELECT min(s.digest) < mark OR max(s.digest) > mark || 'g' FROM pgoutbox.suppression AS s) THEN
        RAISE EXCEPTION 'the suppressed addresses are those of another pgoutbox.secret' USING
            HINT = 'Restore its row from the backup that has the addresses, or delete and import them again.';
    END IF;
    RETURN QUERY
    SELECT d.digest, s.reason, clock_timestamp()
    FROM unnest(addresses, mailing_lists) WITH ORDINALITY AS a(address, mailing_list, place)
    CROSS JOIN LATERAL (SELECT pgoutbox.address_digest(a.address) AS digest OFFSET 0) AS d
    LEFT JOIN LATERAL (
        SELECT s.reason
        FROM pgoutbox.suppression AS s
        WHERE s.digest = d.digest AND s.mailing_list IN ('', a.mailing_list) AND s.ended_at IS NULL
        ORDER BY s.mailing_list
        LIMIT 1
    ) AS s ON true
    ORDER BY a.place;
END
$function$;

-- Suppress many addresses: a JSON array of objects with `address` or `digest`, and with `reason`, `mailing_list` and
-- `created_at`. The digests are those of this database. Suppressions that are in force stay as they are, and ended ones begin
-- again unless they ended after `created_at`. Returns the number of new ones.
CREATE FUNCTION pgoutbox.import_suppressions(items jsonb)
RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    changed_count bigint;
BEGIN
    PERFORM pgoutbox._raise_argument_error(CASE
        WHEN items IS NULL THEN 'items: must not be null'
        WHEN jsonb_typeof(items) <> 'array' THEN 'items: must be a JSON array'
    END, in_function => 'import_suppressions');
    PERFORM pgoutbox._raise_argument_error(
        pgoutbox._suppression_error(i.address, i.digest, i.mailing_list, i.reason, i.created_at),
        'items', i.place - 1, 'import_suppressions'
    )
    FROM ROWS FROM (jsonb_to_recordset(items) AS (
        address text, digest text, mailing_list text, reason text, created_at timestamptz
    )) WITH ORDINALITY AS i(address, digest, mailing_list, reason, created_at, place);
    SELECT count(*) FILTER (
        WHERE pgoutbox._suppress(
            f.digest, f.mailing_list, f.reason, coalesce(f.created_at, now()), coalesce(f.created_at, 'infinity')
        )
    )
    INTO changed_count
    FROM (
        SELECT coalesce(i.digest, pgoutbox.address_digest(i.address)) AS digest, i.mailing_list, i.reason, i.created_at
        FROM jsonb_to_recordset(items) AS i(
            address text, digest text, mailing_list text, reason text, created_at timestamptz
        )
        ORDER BY 1, 2 -- Two imports lock the same rows in one order.
        OFFSET 0
    ) AS f;
    IF changed_count > 0 THEN
        PERFORM pgoutbox._record_act('suppress', details => jsonb_build_object('imported', changed_count));
    END IF;
    RETURN changed_count;
END
$function$;

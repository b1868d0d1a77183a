-- Record that a revision is applied, as the last step of its upgrade. Raise object_in_use while workers run that are too old
-- for it: they would end in the midst of their work.
CREATE FUNCTION pgoutbox._note_revision(number integer, lowest_package text, applied_by text, digest text)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    too_old text;
BEGIN
    LOCK TABLE pgoutbox.worker IN SHARE MODE; -- A worker that starts now reports after the commit, and is refused.
    SELECT string_agg(format('%s (%s)', w.name, w.version), ', ' ORDER BY w.name)
    INTO too_old
    FROM pgoutbox.worker_view AS w
    WHERE w.ended_at IS NULL
        AND pgoutbox._release_of(w.version) < pgoutbox._release_of(_note_revision.lowest_package);
    IF too_old IS NOT NULL THEN
        RAISE EXCEPTION 'pgoutbox: workers run that are too old for revision %: %', _note_revision.number, too_old USING
            ERRCODE = 'object_in_use',
            HINT = format(
                'Replace them by workers of version %s or later. A killed worker counts for three minutes.',
                _note_revision.lowest_package
            );
    END IF;
    INSERT INTO pgoutbox.revision (number, lowest_package, applied_by, digest)
    VALUES (
        _note_revision.number, _note_revision.lowest_package, _note_revision.applied_by, _note_revision.digest
    )
    -- That of a downgrade without forget_revision.
    ON CONFLICT ON CONSTRAINT revision_pkey DO UPDATE
    SET applied_at = excluded.applied_at,
        lowest_package = excluded.lowest_package,
        applied_by = excluded.applied_by,
        digest = excluded.digest;
END
$function$;

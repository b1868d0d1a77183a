-- Report this worker's redirect or blackout, or delete its report if it has neither. Old reports of others are deleted.
WITH deleted AS (
    DELETE FROM pgoutbox.redirect_report AS old
    WHERE old.worker IN (
        SELECT stale.worker
        FROM pgoutbox.redirect_report AS stale
        WHERE CASE
            -- The INSERT below updates the row if there is something to report.
            WHEN stale.worker = %(worker)s::text
                THEN num_nonnulls(%(target)s::text, %(refused_within)s::text) = 0
            ELSE stale.reported_at < now() - interval '1 hour'
        END
        LIMIT 1000
        FOR UPDATE SKIP LOCKED
    )
)
INSERT INTO pgoutbox.redirect_report AS r (worker, reported_at, target, refused_within)
SELECT %(worker)s::text, now(), %(target)s::text, %(refused_within)s::text
WHERE num_nonnulls(%(target)s::text, %(refused_within)s::text) > 0
ON CONFLICT ON CONSTRAINT redirect_report_pkey DO UPDATE
SET reported_at = excluded.reported_at, target = excluded.target, refused_within = excluded.refused_within
RETURNING r.worker

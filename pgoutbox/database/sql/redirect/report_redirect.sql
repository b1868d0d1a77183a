-- Report this worker's redirect. Old reports of others are deleted.
WITH deleted AS (
    DELETE FROM pgoutbox.redirect_report AS old
    WHERE old.worker IN (
        SELECT stale.worker
        FROM pgoutbox.redirect_report AS stale
        WHERE stale.worker <> %(worker)s::text AND stale.reported_at < now() - interval '1 hour'
        LIMIT 1000
        FOR UPDATE SKIP LOCKED
    )
)
INSERT INTO pgoutbox.redirect_report AS r (worker, reported_at, target)
VALUES (%(worker)s::text, now(), %(target)s::text)
ON CONFLICT ON CONSTRAINT redirect_report_pkey DO UPDATE
SET reported_at = excluded.reported_at, target = excluded.target
RETURNING r.worker

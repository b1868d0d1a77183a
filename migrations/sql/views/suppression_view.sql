-- The suppressed addresses, by their digests. An ended suppression has an `ended_at`.
CREATE VIEW pgoutbox.suppression_view AS
SELECT
    s.digest,
    nullif(s.mailing_list, '') AS mailing_list,
    s.reason,
    s.created_at,
    s.ended_at
FROM pgoutbox.suppression AS s;

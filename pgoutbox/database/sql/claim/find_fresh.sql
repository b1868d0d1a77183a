-- The messages that claim_fresh.sql or claim_fresh_by_permits.sql would claim. The worker runs this after the database
-- refused a claim of one message because of its row, to learn which message it was.
WITH due AS MATERIALIZED (
    \ir _due.sql
        \ir _fresh.sql
    ORDER BY m.available_at, m.id
    \ir _locked_by_permits.sql
)
SELECT d.id
FROM due AS d

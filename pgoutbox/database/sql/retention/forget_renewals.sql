-- Delete old renewals of locked rows.
SELECT pgoutbox._forget_renewals()

-- The database that the schema belongs to, and whether one of its newest messages is an e-mail.
SELECT
    h.database_name,
    h.deployment,
    EXISTS (
        SELECT
        FROM (SELECT m.destination FROM pgoutbox.message_view AS m ORDER BY m.id DESC LIMIT 1000) AS newest
        WHERE starts_with(newest.destination, 'mailto:')
    ) AS has_mail
FROM pgoutbox.home_view AS h

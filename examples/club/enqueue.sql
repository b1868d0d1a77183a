-- Register a person: psql "$PGOUTBOX_DSN" -q -v number=7 -v name='Ada Lovelace' -v email=ada@example.org -f enqueue.sql
\set ON_ERROR_STOP on
BEGIN;

INSERT INTO registration (number, name, email)
VALUES (:number, :'name', :'email')
ON CONFLICT (number) DO UPDATE SET name = EXCLUDED.name, email = EXCLUDED.email;

-- An error behind the savepoint, and a table that another session locks for a second, cost the mails but not the registration.
\set ON_ERROR_STOP off
SAVEPOINT mail;
SELECT pgoutbox.lock_for_enqueue() \g /dev/null
SELECT
    m.mail,
    pgoutbox.enqueue(
        'mail.registration',
        jsonb_build_object('registration', r.number, 'mail', m.mail),
        queue => 'mail',
        dedupe_key => r.number || ':' || m.mail,
        on_duplicate => 'ignore',
        owner => 'registration-' || r.number,
        max_attempts => 10
    ) AS message
FROM registration AS r
CROSS JOIN (VALUES ('member'), ('organiser')) AS m (mail)
WHERE r.number = :number;
\if :ERROR
    ROLLBACK TO SAVEPOINT mail;
    \warn registration :number has no mails
\endif
\set ON_ERROR_STOP on

COMMIT;

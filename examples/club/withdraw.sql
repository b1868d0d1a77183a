-- Delete a registration: psql "$PGOUTBOX_DSN" -q -v number=7 -f withdraw.sql
\set ON_ERROR_STOP on
BEGIN;

DELETE FROM registration
WHERE number = :number;

-- Delete its mails too, waiting or sent, with their dedupe keys. If this fails, the handler skips them as orphans.
\set ON_ERROR_STOP off
SAVEPOINT mail;
SET LOCAL lock_timeout = '2s';
SELECT id AS message, result
FROM pgoutbox.erase(owner => 'registration-' || :number);
\if :ERROR
    ROLLBACK TO SAVEPOINT mail;
    \warn the mails of registration :number are not erased
\endif
\set ON_ERROR_STOP on

COMMIT;

-- CREATE SCHEMA IF NOT EXISTS needs the privilege to create schemas even if the schema exists.
DO $block$
BEGIN
    IF to_regnamespace('pgoutbox') IS NULL THEN
        CREATE SCHEMA pgoutbox;
    END IF;
END
$block$;

COMMENT ON SCHEMA pgoutbox IS 'Transactional outbox: messages of committed transactions to external receivers.';

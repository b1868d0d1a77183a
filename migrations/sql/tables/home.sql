-- One row: the database that the schema belongs to. A copy carries the row of the original, so workers recognize it. Only
-- the migration that creates the table and adopt write the row.
CREATE TABLE pgoutbox.home (
    adopted_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    server_id     bigint,
    database_id   oid,
    is_single     boolean     NOT NULL DEFAULT true,
    database_name text        NOT NULL DEFAULT current_database(),
    adopted_by    text        NOT NULL DEFAULT session_user,
    deployment    text,
    CONSTRAINT home_pkey PRIMARY KEY (is_single),
    CONSTRAINT home_sound CHECK (
        is_single AND length(adopted_by) BETWEEN 1 AND 200 AND deployment ~ '^[A-Za-z0-9_.-]{1,63}$'
    )
);

COMMENT ON TABLE pgoutbox.home IS
    'One row: the database that the schema belongs to. In any other database, workers send nothing until adopt.';
COMMENT ON COLUMN pgoutbox.home.adopted_at IS 'When the schema was created or adopted.';
COMMENT ON COLUMN pgoutbox.home.server_id IS
    'The system identifier of the server. Null: any server, because the owner may not read the identifier.';
COMMENT ON COLUMN pgoutbox.home.database_id IS
    'The OID of the database, which a rename keeps. Null: any database, for templates of tests.';
COMMENT ON COLUMN pgoutbox.home.is_single IS 'Always true: limits the table to one row.';
COMMENT ON COLUMN pgoutbox.home.database_name IS 'Its name at that time, for people.';
COMMENT ON COLUMN pgoutbox.home.adopted_by IS 'The person who adopted it; else the role.';
COMMENT ON COLUMN pgoutbox.home.deployment IS
    'PGOUTBOX_DEPLOYMENT of the workers that may send. Null: the name is not compared.';

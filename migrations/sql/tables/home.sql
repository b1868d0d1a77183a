-- One row: the database that the schema belongs to. In any other database, workers send nothing until adopt.
--
-- A copy carries the row of the original, so workers recognize it. Only the migration that creates the table and adopt
-- write the row.
CREATE TABLE pgoutbox.home (
    adopted_at    timestamptz NOT NULL DEFAULT clock_timestamp(), -- When the schema was created or adopted.
    -- The system identifier of the server. Null: any server, because the owner may not read the identifier.
    server_id     bigint,
    database_id   oid, -- The OID of the database, which a rename keeps. Null: any database, for templates of tests.
    is_single     boolean     PRIMARY KEY DEFAULT true, -- Always true: limits the table to one row.
    database_name text        NOT NULL DEFAULT current_database(), -- Its name at that time, for people.
    adopted_by    text        NOT NULL DEFAULT session_user, -- The person who adopted it; else the role.
    deployment    text, -- PGOUTBOX_DEPLOYMENT of the workers that may send. Null: the name is not compared.
    CONSTRAINT home_sound CHECK (
        is_single AND length(adopted_by) BETWEEN 1 AND 200 AND deployment ~ '^[A-Za-z0-9_.-]{1,63}$'
    )
);

-- The club's own table. pgoutbox has its tables in the schema pgoutbox, which `pgoutbox migrate` creates.
CREATE TABLE IF NOT EXISTS registration (
    number        bigint      PRIMARY KEY,
    name          text        NOT NULL,
    email         text        NOT NULL,
    registered_at timestamptz NOT NULL DEFAULT now()
);

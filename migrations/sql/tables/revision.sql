-- The revisions of this schema that were applied. The newest one says which versions of the package may work with it.
CREATE TABLE pgoutbox.revision (
    applied_at     timestamptz NOT NULL DEFAULT clock_timestamp(), -- When it was applied.
    number         integer     PRIMARY KEY, -- 1 for pgoutbox_0001.
    lowest_package text        NOT NULL, -- Workers and commands of a lower version of the package are refused.
    applied_by     text        NOT NULL, -- The version of the package that applied it.
    digest         text        NOT NULL, -- Of its SQL files: pgoutbox migrate refuses a revision of other files.
    CONSTRAINT revision_sound CHECK (number > 0 AND lowest_package ~ '^[0-9]+([.][0-9]+)*$')
);

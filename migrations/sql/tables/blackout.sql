-- Only the owner of the schema writes it. In the environment of workers, it would not hold for acts by SQL.
CREATE TABLE pgoutbox.blackout (
    first_day date             NOT NULL,
    last_day  date             NOT NULL,
    time_zone text COLLATE "C" NOT NULL DEFAULT 'UTC',
    CONSTRAINT blackout_pkey PRIMARY KEY (first_day, last_day, time_zone),
    CONSTRAINT blackout_sound CHECK (
        first_day <= last_day
        AND first_day >= date '2000-01-01'
        AND last_day <= date '9999-12-31'
        -- An unknown time zone raises an error.
        AND (first_day::timestamp AT TIME ZONE time_zone) IS NOT NULL
    )
);

COMMENT ON TABLE pgoutbox.blackout IS
    'Days on which no operator may get the e-mail of others: by a redirect, or by another destination. The owner of the '
    'schema inserts and deletes them.';
COMMENT ON COLUMN pgoutbox.blackout.first_day IS 'The first day of the blackout.';
COMMENT ON COLUMN pgoutbox.blackout.last_day IS 'The last day of the blackout.';
COMMENT ON COLUMN pgoutbox.blackout.time_zone IS 'Where these days begin and end, for example Europe/Berlin.';

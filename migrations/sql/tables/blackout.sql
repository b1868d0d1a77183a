-- Days on which no operator may get the e-mail of others: by a redirect, or by another destination. The owner of the
-- schema inserts and deletes them.
--
-- Only the owner of the schema writes it. In the environment of workers, it would not hold for acts by SQL.
CREATE TABLE pgoutbox.blackout (
    first_day date             NOT NULL, -- The first day of the blackout.
    last_day  date             NOT NULL, -- The last day of the blackout.
    time_zone text COLLATE "C" NOT NULL DEFAULT 'UTC', -- Where these days begin and end, for example Europe/Berlin.
    CONSTRAINT blackout_pkey PRIMARY KEY (first_day, last_day, time_zone),
    CONSTRAINT blackout_sound CHECK (
        first_day <= last_day
        AND first_day >= date '2000-01-01'
        AND last_day <= date '9999-12-31'
        -- An unknown time zone raises an error.
        AND (first_day::timestamp AT TIME ZONE time_zone) IS NOT NULL
    )
);

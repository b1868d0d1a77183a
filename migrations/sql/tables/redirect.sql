-- At most one row: without it, no operator redirects e-mail. It is written by set_redirect and clear_redirect.
CREATE TABLE pgoutbox.redirect (
    is_only  boolean     NOT NULL DEFAULT true,
    set_at   timestamptz NOT NULL,
    until_at timestamptz,
    target   text        NOT NULL,
    set_by   text        NOT NULL,
    CONSTRAINT redirect_pkey PRIMARY KEY (is_only),
    CONSTRAINT redirect_sound CHECK (
        is_only
        AND until_at > set_at
        AND length(set_by) BETWEEN 1 AND 200
    )
);

COMMENT ON TABLE pgoutbox.redirect IS 'The redirect of all e-mail that an operator has switched on. No row: it is off.';
COMMENT ON COLUMN pgoutbox.redirect.is_only IS 'Always true, so that there is one row at most.';
COMMENT ON COLUMN pgoutbox.redirect.set_at IS 'When an operator switched it on.';
COMMENT ON COLUMN pgoutbox.redirect.until_at IS 'Automatic end; null: until an operator switches it off.';
COMMENT ON COLUMN pgoutbox.redirect.target IS 'The address, or @ and the domain, that gets all e-mail.';
COMMENT ON COLUMN pgoutbox.redirect.set_by IS 'The person who switched it on; else the role.';

-- At most one row: without it, no operator redirects e-mail. It is written by set_redirect and clear_redirect.
CREATE TABLE pgoutbox.redirect (
    is_only       boolean     NOT NULL DEFAULT true,
    set_at        timestamptz NOT NULL,
    until_at      timestamptz,
    target        text        NOT NULL,
    set_by        text        NOT NULL,
    topics        text[],
    exempt_topics text[],
    CONSTRAINT redirect_pkey PRIMARY KEY (is_only),
    CONSTRAINT redirect_sound CHECK (
        is_only
        AND until_at > set_at
        AND length(set_by) BETWEEN 1 AND 200
        -- An empty or broken list would redirect other topics than the operator has named.
        AND (topics IS NULL OR array_ndims(topics) = 1 AND cardinality(topics) BETWEEN 1 AND 50)
        AND (exempt_topics IS NULL OR array_ndims(exempt_topics) = 1 AND cardinality(exempt_topics) BETWEEN 1 AND 50)
        AND array_to_string(topics || exempt_topics, ',', '?')
            ~ '^[a-z][a-z0-9_.-]{0,62}[*]?(,[a-z][a-z0-9_.-]{0,62}[*]?)*$'
    )
);

COMMENT ON TABLE pgoutbox.redirect IS 'The redirect of e-mail that an operator has switched on. No row: it is off.';
COMMENT ON COLUMN pgoutbox.redirect.is_only IS 'Always true, so that there is one row at most.';
COMMENT ON COLUMN pgoutbox.redirect.set_at IS 'When an operator switched it on.';
COMMENT ON COLUMN pgoutbox.redirect.until_at IS 'Automatic end; null: until an operator switches it off.';
COMMENT ON COLUMN pgoutbox.redirect.target IS 'The address, or @ and the domain, that gets the e-mail.';
COMMENT ON COLUMN pgoutbox.redirect.set_by IS 'The person who switched it on; else the role.';
COMMENT ON COLUMN pgoutbox.redirect.topics IS
    'The redirected topics; null: all. A * at the end stands for the rest of a name.';
COMMENT ON COLUMN pgoutbox.redirect.exempt_topics IS 'Topics that are not redirected, in the same form; null: none.';

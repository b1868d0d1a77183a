-- The redirect of e-mail that an operator has switched on. No row: it is off.
CREATE TABLE pgoutbox.redirect (
    is_only       boolean     PRIMARY KEY DEFAULT true, -- Always true, so that there is one row at most.
    set_at        timestamptz NOT NULL, -- When an operator switched it on.
    until_at      timestamptz, -- Automatic end; null: until an operator switches it off.
    target        text        NOT NULL, -- The address, or @ and the domain, that gets the e-mail.
    set_by        text        NOT NULL, -- The person who switched it on; else the role.
    topics        text[], -- The redirected topics; null: all. A * at the end stands for the rest of a name.
    exempt_topics text[], -- Topics that are not redirected, in the same form; null: none.
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

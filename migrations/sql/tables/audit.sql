-- Manual changes by operators: a row for each batch of an act.
CREATE TABLE pgoutbox.audit (
    id            bigint      PRIMARY KEY GENERATED ALWAYS AS IDENTITY, -- Grows with every row.
    acted_at      timestamptz NOT NULL DEFAULT clock_timestamp(), -- Time of the change.
    act_id        uuid        NOT NULL, -- The same for all batches of one act, which have one db_role and one actor.
    -- Number of messages that the batch changed; null for an act on a queue, a topic, a rule or the audit.
    message_count integer,
    -- The person, as db_role states it: the user of the dashboard, for example. Without a statement, db_role.
    actor         text        NOT NULL,
    -- The login of the session. The database knows it; nobody states it.
    db_role       text        NOT NULL DEFAULT session_user,
    -- Where the act comes from, as db_role states it: the dashboard and the client address, for example.
    origin        text,
    -- The function that acted, such as redrive or dismiss, or pause, resume, limit, retention, breaker or redirect.
    action        text        NOT NULL,
    queue         text, -- The queue that was paused, resumed or limited.
    message_ids   bigint[], -- The changed messages; null for a prune, and for an erasure that changed only the audit.
    details       jsonb, -- Parameters of the act, as the database found them: the limit or the rule.
    stated        jsonb, -- Further parameters, as db_role states them: the filter of a bulk act.
    CONSTRAINT audit_sound CHECK (
        action ~ '^[a-z]{1,20}$'
        AND length(actor) BETWEEN 1 AND 200
        AND (origin IS NULL OR length(origin) BETWEEN 1 AND 200)
        AND message_count > 0
        AND (message_ids IS NULL OR cardinality(message_ids) = message_count)
        AND octet_length(details::text) <= 8192
        AND octet_length(stated::text) <= 8192
    )
);

CREATE INDEX audit_message_ids ON pgoutbox.audit USING gin (message_ids);

-- Manual changes. A bulk is one act of several batches, with a row for each batch.
CREATE TABLE pgoutbox.audit (
    id            bigint      NOT NULL GENERATED ALWAYS AS IDENTITY,
    acted_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    act_id        uuid        NOT NULL,
    message_count integer,
    actor         text        NOT NULL,
    db_role       text        NOT NULL DEFAULT session_user,
    origin        text,
    action        text        NOT NULL,
    queue         text,
    message_ids   bigint[],
    details       jsonb,
    stated        jsonb,
    CONSTRAINT audit_pkey PRIMARY KEY (id),
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

COMMENT ON TABLE pgoutbox.audit IS 'Manual changes by operators: a row for each batch of an act.';
COMMENT ON COLUMN pgoutbox.audit.id IS 'Grows with every row.';
COMMENT ON COLUMN pgoutbox.audit.acted_at IS 'Time of the change.';
COMMENT ON COLUMN pgoutbox.audit.act_id IS
    'The same for all batches of one act, which have one db_role and one actor.';
COMMENT ON COLUMN pgoutbox.audit.message_count IS
    'Number of messages that the batch changed; null for an act on a queue, a topic, a rule or the audit.';
COMMENT ON COLUMN pgoutbox.audit.actor IS 
    'The person, as db_role states it: the user of the dashboard, for example. Without a statement, db_role.';
COMMENT ON COLUMN pgoutbox.audit.db_role IS 'The login of the session. The database knows it; nobody states it.';
COMMENT ON COLUMN pgoutbox.audit.origin IS 
    'Where the act comes from, as db_role states it: the dashboard and the client address, for example.';
COMMENT ON COLUMN pgoutbox.audit.action IS
    'The function that acted, such as redrive or dismiss, or pause, resume, limit, retention, breaker or redirect.';
COMMENT ON COLUMN pgoutbox.audit.queue IS 'The queue that was paused, resumed or limited.';
COMMENT ON COLUMN pgoutbox.audit.message_ids IS 'The changed messages; null for a prune, and for an erasure that changed only the audit.';
COMMENT ON COLUMN pgoutbox.audit.details IS 'Parameters of the act, as the database found them: the limit or the rule.';
COMMENT ON COLUMN pgoutbox.audit.stated IS 'Further parameters, as db_role states them: the filter of a bulk act.';

-- How long final messages are kept, by topic and state. Without a rule they are never deleted.
--
-- The most specific rule applies: the rule of the topic, or else the rule of all topics.
CREATE TABLE pgoutbox.retention (
    keep  interval, -- Time to keep the messages. Zero deletes sent messages as they are sent; null never deletes them.
    topic text COLLATE "C" NOT NULL, -- A topic, or * for every topic without a rule of its own for the state.
    -- sent, failed, skipped or cancelled; dedupe_key, for keys whose message is deleted; or audit, for acts.
    state text COLLATE "C" NOT NULL,
    CONSTRAINT retention_pkey PRIMARY KEY (topic, state),
    CONSTRAINT retention_topic_sound CHECK (topic = '*' OR (length(topic) <= 63 AND topic ~ '^[a-z][a-z0-9_.-]*$')),
    CONSTRAINT retention_state_known CHECK (state IN ('sent', 'failed', 'skipped', 'cancelled', 'dedupe_key', 'audit')),
    -- Whoever sets this rule cannot hide it: the act stays in the audit for as long.
    CONSTRAINT retention_audit_sound CHECK (state <> 'audit' OR (topic = '*' AND keep >= interval '30 days')),
    CONSTRAINT retention_keep_sound CHECK (
        keep >= interval '0'
        AND keep <= interval '36500 days'
        -- Months count as 30 days above. Opposite months and days would overflow in a query.
        AND timestamp '2000-01-01' + keep BETWEEN timestamp '2000-01-01' AND timestamp '2101-01-01'
    )
);

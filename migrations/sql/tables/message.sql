-- One row per message, partitioned by state: live (pending, sending), failed, done (the others).
--
-- CACHE 1 is part of the guarantee: with a larger cache a session could draw ids that are smaller than the ids of a
-- transaction that committed before, and the newest message of a key would not have the greatest id.
CREATE SEQUENCE pgoutbox.message_id_seq AS bigint CACHE 1;

CREATE TABLE pgoutbox.message (
    -- Grows with every enqueue. The newest ids of a coalesce key grow in the order of the commits.
    id                  bigint      NOT NULL DEFAULT nextval('pgoutbox.message_id_seq'),
    created_at          timestamptz NOT NULL DEFAULT now(), -- Start of the transaction that enqueued the message.
    available_at        timestamptz NOT NULL DEFAULT now(), -- Earliest claim of a pending message.
    expires_at          timestamptz, -- Time after which the message is skipped if it was not handed over.
    claimed_at          timestamptz, -- Start of the last attempt.
    finished_at         timestamptz, -- When the message reached its final state.
    superseded_by       bigint, -- The newer message of the same coalesce key that superseded this one.
    resend_of           bigint, -- The message of which an operator enqueued this copy.
    failure_of          bigint, -- The failed message of which this one, for the hook of its topic, has a copy.
    content_id          bigint, -- The shared content of a fan-out.
    -- Number of attempts so far, part of the fence: up by one at each claim, never down.
    attempt_count       integer     NOT NULL DEFAULT 0,
    -- The attempt after which a transient failure is final. Snooze, release and redrive raise it.
    max_attempts        integer     NOT NULL DEFAULT 11,
    -- Number of attempts that enqueue granted. Each redrive grants as many again.
    attempt_budget      integer     NOT NULL DEFAULT 11,
    -- The lane of its next claim: 0 before the first attempt, 1 after it. A claim does not change it. In lane 2 a message
    -- with a fair key waits for its turn: no claim reads it.
    lane                smallint    NOT NULL DEFAULT 0,
    payload_version     smallint    NOT NULL DEFAULT 1, -- The version of the payload: see `_handled_as`.
    state               text        NOT NULL DEFAULT 'pending', -- pending, sending, sent, failed, skipped or cancelled.
    topic               text COLLATE "C" NOT NULL, -- Kind of the message; selects the handler.
    -- The queue, which has its own workers, limits and pause.
    queue               text COLLATE "C" NOT NULL DEFAULT 'default',
    destination         text, -- The receiver, as a URI.
    -- Of the messages with one topic and coalesce key only the newest committed one is delivered.
    coalesce_key        text COLLATE "C",
    -- At most one message has this topic and dedupe key, besides cancelled and skipped ones.
    dedupe_key          text COLLATE "C",
    -- Messages of one queue and ordering key are delivered one after the other, in order of ids.
    ordering_key        text COLLATE "C",
    -- Messages of one queue take turns by this key, such as a tenant: see fair_share.
    fair_key            text COLLATE "C",
    owner               text COLLATE "C", -- The person or thing of the application to which the message belongs.
    -- The coalesce or ordering key of a message in flight. Two of one key cannot be in flight.
    key_in_flight       text COLLATE "C",
    -- If this message fails, later messages of its ordering key wait for redrive or prune.
    halts_key           boolean     NOT NULL DEFAULT false,
    worker              text, -- The worker of the current or last attempt.
    skip_reason         text, -- Reason for which the message was skipped.
    last_error          text, -- Error or snooze reason of the last attempt, cut at 4000 characters.
    payload             jsonb       NOT NULL, -- Input of the handler. Contains no usable secret.
    headers             jsonb, -- Texts that travel with the message, for example a trace context.
    -- The last attempts that did not end as sent, oldest first: an array of the type attempt. attempt_view shows them.
    attempts            jsonb
) PARTITION BY LIST (state);

ALTER SEQUENCE pgoutbox.message_id_seq OWNED BY pgoutbox.message.id;

CREATE INDEX message_content ON pgoutbox.message (content_id) WHERE content_id IS NOT NULL;

-- For the calls that find, cancel, export or erase messages of an owner. `find` reads a page by id. Messages without an owner
-- are not in it.
CREATE INDEX message_owner ON pgoutbox.message (owner, id) WHERE owner IS NOT NULL;

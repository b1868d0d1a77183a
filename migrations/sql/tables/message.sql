-- CACHE 1 is part of the guarantee: with a larger cache a session could draw ids that are smaller than the ids of a
-- transaction that committed before, and the newest message of a key would not have the greatest id.
CREATE SEQUENCE pgoutbox.message_id_seq AS bigint CACHE 1;

CREATE TABLE pgoutbox.message (
    id                  bigint      NOT NULL DEFAULT nextval('pgoutbox.message_id_seq'),
    created_at          timestamptz NOT NULL DEFAULT now(),
    available_at        timestamptz NOT NULL DEFAULT now(),
    expires_at          timestamptz,
    claimed_at          timestamptz,
    finished_at         timestamptz,
    superseded_by       bigint,
    resend_of           bigint,
    failure_of          bigint,
    content_id          bigint,
    attempt_count       integer     NOT NULL DEFAULT 0,
    max_attempts        integer     NOT NULL DEFAULT 11,
    attempt_budget      integer     NOT NULL DEFAULT 11,
    lane                smallint    NOT NULL DEFAULT 0,
    state               text        NOT NULL DEFAULT 'pending',
    topic               text COLLATE "C" NOT NULL,
    queue               text COLLATE "C" NOT NULL DEFAULT 'default',
    destination         text,
    coalesce_key        text COLLATE "C",
    dedupe_key          text COLLATE "C",
    ordering_key        text COLLATE "C",
    owner               text COLLATE "C",
    key_in_flight       text COLLATE "C",
    halts_key           boolean     NOT NULL DEFAULT false,
    worker              text,
    skip_reason         text,
    last_error          text,
    payload             jsonb       NOT NULL,
    headers             jsonb,
    attempts            jsonb
) PARTITION BY LIST (state);

ALTER SEQUENCE pgoutbox.message_id_seq OWNED BY pgoutbox.message.id;

CREATE INDEX message_content ON pgoutbox.message (content_id) WHERE content_id IS NOT NULL;

-- For the calls that find, cancel, export or erase messages of an owner. `find` reads a page by id. Messages without an owner
-- are not in it.
CREATE INDEX message_owner ON pgoutbox.message (owner, id) WHERE owner IS NOT NULL;

COMMENT ON TABLE pgoutbox.message IS
    'One row per message, partitioned by state: live (pending, sending), failed, done (the others).';
COMMENT ON COLUMN pgoutbox.message.id IS
    'Grows with every enqueue. The newest ids of a coalesce key grow in the order of the commits.';
COMMENT ON COLUMN pgoutbox.message.created_at IS 'Start of the transaction that enqueued the message.';
COMMENT ON COLUMN pgoutbox.message.available_at IS 'Earliest claim of a pending message.';
COMMENT ON COLUMN pgoutbox.message.expires_at IS 'Time after which the message is skipped if it was not handed over.';
COMMENT ON COLUMN pgoutbox.message.claimed_at IS 'Start of the last attempt.';
COMMENT ON COLUMN pgoutbox.message.finished_at IS 'When the message reached its final state.';
COMMENT ON COLUMN pgoutbox.message.superseded_by IS
    'The newer message of the same coalesce key that superseded this one.';
COMMENT ON COLUMN pgoutbox.message.resend_of IS 'The message of which an operator enqueued this copy.';
COMMENT ON COLUMN pgoutbox.message.failure_of IS
    'The failed message of which this one, for the hook of its topic, has a copy.';
COMMENT ON COLUMN pgoutbox.message.content_id IS 'The shared content of a fan-out.';
COMMENT ON COLUMN pgoutbox.message.attempt_count IS
    'Number of attempts so far, part of the fence: up by one at each claim, never down.';
COMMENT ON COLUMN pgoutbox.message.max_attempts IS
    'The attempt after which a transient failure is final. Snooze, release and redrive raise it.';
COMMENT ON COLUMN pgoutbox.message.attempt_budget IS
    'Number of attempts that enqueue granted. Each redrive grants as many again.';
COMMENT ON COLUMN pgoutbox.message.lane IS
    'The lane of its next claim: 0 before the first attempt, 1 after it. A claim does not change it.';
COMMENT ON COLUMN pgoutbox.message.state IS 'pending, sending, sent, failed, skipped or cancelled.';
COMMENT ON COLUMN pgoutbox.message.topic IS 'Kind of the message; selects the handler.';
COMMENT ON COLUMN pgoutbox.message.queue IS 'The queue, which has its own workers, limits and pause.';
COMMENT ON COLUMN pgoutbox.message.destination IS 'The receiver, as a URI.';
COMMENT ON COLUMN pgoutbox.message.coalesce_key IS
    'Of the messages with one topic and coalesce key only the newest committed one is delivered.';
COMMENT ON COLUMN pgoutbox.message.dedupe_key IS
    'At most one message has this topic and dedupe key, besides cancelled and skipped ones.';
COMMENT ON COLUMN pgoutbox.message.ordering_key IS
    'Messages of one queue and ordering key are delivered one after the other, in order of ids.';
COMMENT ON COLUMN pgoutbox.message.owner IS
    'The person or thing of the application to which the message belongs.';
COMMENT ON COLUMN pgoutbox.message.key_in_flight IS
    'The coalesce or ordering key of a message in flight. Two of one key cannot be in flight.';
COMMENT ON COLUMN pgoutbox.message.halts_key IS
    'If this message fails, later messages of its ordering key wait for redrive or prune.';
COMMENT ON COLUMN pgoutbox.message.worker IS 'The worker of the current or last attempt.';
COMMENT ON COLUMN pgoutbox.message.skip_reason IS 'Reason for which the message was skipped.';
COMMENT ON COLUMN pgoutbox.message.last_error IS 'Error or snooze reason of the last attempt, cut at 4000 characters.';
COMMENT ON COLUMN pgoutbox.message.payload IS
    'Input of the handler. Contains no usable secret.';
COMMENT ON COLUMN pgoutbox.message.headers IS 'Texts that travel with the message, for example a trace context.';
COMMENT ON COLUMN pgoutbox.message.attempts IS
    'The last attempts that did not end as sent, oldest first: an array of the type attempt. attempt_view shows them.';

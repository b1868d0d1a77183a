-- What an act of an operator did to one message.
CREATE TYPE pgoutbox.act_result AS (
    id       bigint,
    result   text,
    state    text,
    other_id bigint
);

COMMENT ON TYPE pgoutbox.act_result IS
    'What an act did to one message. Each act has a result of its own for a message that it changed. The others: missing; '
    'wrong_state; changed (it was attempted again); superseded; expires (it would, before the new time); encrypted; '
    'ordered (its ordering key belongs to its queue); dedupe_key_taken; locked (try again).';
COMMENT ON COLUMN pgoutbox.act_result.id IS 'The message.';
COMMENT ON COLUMN pgoutbox.act_result.result IS 'What the act did, or why it left the message alone.';
COMMENT ON COLUMN pgoutbox.act_result.state IS 'The state of the message before the act.';
COMMENT ON COLUMN pgoutbox.act_result.other_id IS
    'The newer message that supersedes it, the message that has its dedupe key, or its copy.';

-- What an act did to one message. Each act has a result of its own for a message that it changed. The others: missing;
-- wrong_state; changed (it was attempted again); superseded; expires (it would, before the new time); encrypted;
-- ordered (its ordering key belongs to its queue); dedupe_key_taken; locked (try again).
CREATE TYPE pgoutbox.act_result AS (
    id       bigint, -- The message.
    result   text, -- What the act did, or why it left the message alone.
    state    text, -- The state of the message before the act.
    other_id bigint -- The newer message that supersedes it, the message that has its dedupe key, or its copy.
);

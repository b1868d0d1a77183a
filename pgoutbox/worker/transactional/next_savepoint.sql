-- Keep the part of a message in a shared transaction, and begin that of the next one. It fails if the handler has ended
-- the transaction. A role that the handler has set must not reach the next message.
RELEASE SAVEPOINT pgoutbox_message;
SET SESSION AUTHORIZATION DEFAULT;
SAVEPOINT pgoutbox_message

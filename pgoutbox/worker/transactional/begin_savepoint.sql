-- Begin the part of the first message in a shared transaction.
SAVEPOINT pgoutbox_message

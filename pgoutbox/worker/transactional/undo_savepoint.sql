-- Undo the part of a message in a shared transaction. The savepoint stays, for the next one.
ROLLBACK TO SAVEPOINT pgoutbox_message

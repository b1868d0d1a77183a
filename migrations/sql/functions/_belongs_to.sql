-- Whether a message has this owner and one of these destinations, if given. The message for a hook about a failed message
-- counts as one to its destination. The failed message may have been deleted, so its destination is read from the copy.
CREATE FUNCTION pgoutbox._belongs_to(message pgoutbox.message, owner text, destinations text[])
RETURNS boolean
LANGUAGE sql
IMMUTABLE
RETURN (owner IS NULL OR (message).owner = owner)
    AND (
        destinations IS NULL
        OR (message).destination = ANY (destinations)
        OR (message).failure_of IS NOT NULL AND (message).payload ->> 'destination' = ANY (destinations)
    );

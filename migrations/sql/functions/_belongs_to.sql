-- Whether a message has this owner and this destination, if given; the URI, or an e-mail address without mailto. The
-- message for a hook about a failed message counts as one to its destination. The failed message may have been deleted,
-- so its destination is read from the copy.
CREATE FUNCTION pgoutbox._belongs_to(message pgoutbox.message, owner text, destination text)
RETURNS boolean
LANGUAGE sql
IMMUTABLE
RETURN (owner IS NULL OR (message).owner = owner)
    AND (
        destination IS NULL
        OR (message).destination IN (destination, 'mailto:' || destination)
        OR (message).failure_of IS NOT NULL
        AND (message).payload ->> 'destination' IN (destination, 'mailto:' || destination)
    );

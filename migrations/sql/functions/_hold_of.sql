-- The hold of a message: its queue, the name by which workers claim it (`_handled_as`), and the scheme or web host of its
-- destination, separated by spaces. An open breaker has the holds of the messages behind it, and claims leave these
-- messages out. All messages of a hold have the same breaker, and a worker that handles one handles all: a queue, a
-- topic, a version, and the scheme of the destination, or the scheme, host and port of a web address. A user name before
-- the host may be a secret and is left out. Never null, for the use in NOT IN.
CREATE FUNCTION pgoutbox._hold_of(queue text, topic text, payload_version smallint, destination text)
RETURNS text
LANGUAGE sql
IMMUTABLE
RETURN (
    queue || ' ' || pgoutbox._handled_as(topic, payload_version) || ' '
    || CASE
        WHEN split_part(destination COLLATE "C", ':', 1) IN ('http', 'https')
            THEN split_part(destination COLLATE "C", ':', 1) || '://'
                || split_part(split_part(destination COLLATE "C", '/', 3), '@', -1)
        ELSE coalesce(split_part(destination COLLATE "C", ':', 1), '')
    END
);

-- The name by which workers claim a message: its topic, and from version 2 of its payload on its version too, such as
-- mail.welcome@2. A worker names the topics that it has handlers for, and the later versions of their payloads that it can
-- read. So it leaves a payload of an unknown version alone, like that of a topic without a handler.
CREATE FUNCTION pgoutbox._handled_as(topic text, payload_version smallint)
RETURNS text
LANGUAGE sql
IMMUTABLE
RETURN (CASE WHEN payload_version = 1 THEN topic ELSE topic || '@' || payload_version::text END);

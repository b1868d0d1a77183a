-- The name of the group of failed messages with this topic and cause.
CREATE FUNCTION pgoutbox._error_group(topic text, cause text)
RETURNS text
LANGUAGE sql
IMMUTABLE
PARALLEL SAFE
RETURN left(encode(sha256(convert_to(topic || E'\n' || coalesce(cause, ''), 'UTF8')), 'hex'), 12);

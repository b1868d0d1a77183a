-- The name of the group of failed messages with this topic and cause.
left(encode(sha256(convert_to(m.topic || E'\n' || coalesce(m.cause, ''), 'UTF8')), 'hex'), 12)

-- One message with the structure of its payload, for roles that may not read payloads.
WITH m AS MATERIALIZED (SELECT v.* FROM pgoutbox.message_view AS v WHERE v.id = %(id)s::bigint)
\ir _shown.sql

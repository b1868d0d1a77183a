-- The names of up to `queues` queues that begin with `prefix`: those with live messages, limits or a pause.
\ir _live_queue_names.sql
SELECT named.queue FROM named WHERE named.number > 0

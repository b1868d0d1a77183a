-- Give messages with a fair key their turn, in queues in the order of their names: each is locked for a moment.
SELECT q.queue, t.admitted_count, t.is_waiting, t.cut_at, t.permit_seconds
FROM unnest(%(queues)s::text[]) AS q(queue)
CROSS JOIN LATERAL pgoutbox._give_turns(q.queue, %(topics)s::text[], %(total)s::bigint) AS t

-- Erase those of the messages that still have this owner and this destination. One row per id with the result.
SELECT e.id, e.result
FROM pgoutbox._erase(%(ids)s::bigint[], %(owner)s::text, %(destination)s::text) AS e

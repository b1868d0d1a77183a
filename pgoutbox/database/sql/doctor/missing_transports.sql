-- Those of the given breakers that workers without a transport have opened.
SELECT b.key
FROM pgoutbox.breaker_view AS b
WHERE b.key = ANY (%(keys)s::text[])

-- Wait until at most one other claim chooses from the backlog of this queue, for a quarter of a second at most. Runs
-- before a claim in its transaction. It is a separate statement, because the claim's snapshot must be later.
SELECT pgoutbox._take_turn(%(queue)s::text)

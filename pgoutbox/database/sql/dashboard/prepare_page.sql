-- Planner settings of a page of the dashboard, and of the gauges that must not disappear. Each of their statements reads an
-- index from one end, and stops early.
-- A bitmap would read all matching rows before the limit applies. A sequential scan would only seem cheaper because of
-- outdated statistics, and its estimated cost would start JIT compilation or parallel workers, which takes longer than
-- the statement.
SELECT
    set_config('enable_seqscan', 'off', true),
    set_config('enable_bitmapscan', 'off', true),
    set_config('max_parallel_workers_per_gather', '0', true),
    set_config('jit', 'off', true)

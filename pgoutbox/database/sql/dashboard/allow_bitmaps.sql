-- Undo one setting of prepare_page.sql, for indexes that need a bitmap: block ranges, and the messages of an act.
SELECT set_config('enable_bitmapscan', 'on', true)

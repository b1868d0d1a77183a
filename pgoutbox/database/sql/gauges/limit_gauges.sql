-- Limit the statements of monitoring. Monitoring does not wait: its answer may be missing.
SELECT set_config('statement_timeout', '2s', true), set_config('lock_timeout', '500ms', true)

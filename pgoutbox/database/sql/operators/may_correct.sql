-- Whether this role may correct messages. The owner can revoke this right.
SELECT has_function_privilege('pgoutbox.correct(bigint[], jsonb, text[])', 'EXECUTE') AS may_correct

-- Whether this role may correct messages. The owner can revoke this right.
SELECT has_function_privilege('pgoutbox.correct(bigint[], jsonb, text[], integer[])', 'EXECUTE') AS may_correct

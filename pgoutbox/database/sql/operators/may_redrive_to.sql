-- Whether this role may redrive messages to another destination. The owner can revoke this right.
SELECT has_function_privilege('pgoutbox.redrive_to(bigint[], text, text[], integer[])', 'EXECUTE') AS may_redrive_to

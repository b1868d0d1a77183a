-- Delete a batch of old acts by the rule of the audit; the answer is that of prune_keys.sql.
SELECT p.last_topic, p.last_key, p.key_count, p.forgotten_count
FROM pgoutbox._prune_audit(at_most => %(limit)s::bigint) AS p

-- Write messages of another queue in this transaction, like enqueue_many. Each needs a dedupe_key, so that a second
-- import is a duplicate. Further fields: attempt_count, the number of attempts made, which count towards max_attempts;
-- last_error; failed_at, the time at which the message failed, for a redrive. Only for the owner.
--
-- It writes attempts that no worker made, so only the owner of the schema may call it, and logins to which the owner
-- grants it. _enqueue writes the messages, so their keys and ids are those of any enqueue. Their progress is written in
-- the same transaction, before a claim can see them. A message that a newer one of the same call has superseded is not
-- pending any more, and stays as it is.
CREATE FUNCTION pgoutbox.import_messages(messages jsonb)
RETURNS TABLE (item_index integer, id bigint, duplicate boolean)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    drafts constant pgoutbox.draft[] := pgoutbox._drafts(messages, 'messages', 'pgoutbox.progress');
    receipts bigint[];
BEGIN
    PERFORM pgoutbox._raise_argument_error(o.problem, 'messages', o.n, 'import_messages')
    FROM (
        SELECT d.ordinality - 1 AS n, CASE
            WHEN d.dedupe_key IS NULL
                THEN 'dedupe_key: must not be null, because it makes a second import of the message a duplicate'
            WHEN p.attempt_count NOT BETWEEN 0 AND 10000 THEN 'attempt_count: must be from 0 to 10000'
            WHEN p.failed_at > clock_timestamp() THEN 'failed_at: must not be later than now'
            WHEN p.failed_at IS NOT NULL AND coalesce(p.attempt_count, 0) = 0
                THEN 'attempt_count: must be at least 1 for a failed message'
            WHEN p.failed_at IS NULL AND p.attempt_count >= coalesce(d.max_attempts, 11)
                THEN 'attempt_count: must be less than max_attempts (' || coalesce(d.max_attempts, 11)
                    || '); raise max_attempts, or pass failed_at'
        END AS problem
        FROM unnest(drafts) WITH ORDINALITY AS d
        CROSS JOIN LATERAL jsonb_populate_record(
            NULL::pgoutbox.progress, messages -> (d.ordinality - 1)::integer
        ) AS p
    ) AS o
    WHERE o.problem IS NOT NULL
    ORDER BY o.n
    LIMIT 1;
    receipts := pgoutbox._enqueue(drafts, true, 'messages');
    UPDATE pgoutbox.message AS m
    SET state = CASE WHEN p.failed_at IS NULL THEN 'pending' ELSE 'failed' END,
        finished_at = p.failed_at,
        attempt_count = coalesce(p.attempt_count, 0),
        lane = CASE WHEN m.fair_key IS NULL THEN least(coalesce(p.attempt_count, 0), 1) ELSE 2 END,
        last_error = left(p.last_error, 4000)
    FROM unnest(receipts) WITH ORDINALITY AS r(receipt, ordinality)
    CROSS JOIN LATERAL jsonb_populate_record(
        NULL::pgoutbox.progress, messages -> (r.ordinality - 1)::integer
    ) AS p
    WHERE m.id = r.receipt -- The receipt of a duplicate is negative.
        AND m.state = 'pending'
        AND num_nonnulls(p.attempt_count, p.last_error, p.failed_at) > 0;
    RETURN QUERY
    SELECT (r.ordinality - 1)::integer, abs(r.receipt), r.receipt < 0
    FROM unnest(receipts) WITH ORDINALITY AS r(receipt, ordinality);
END
$function$;

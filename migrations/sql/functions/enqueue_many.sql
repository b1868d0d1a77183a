-- Write messages in this transaction: a JSON array of objects with a topic, a payload and the options of enqueue.
-- Intervals are numbers of seconds.
CREATE FUNCTION pgoutbox.enqueue_many(messages jsonb, notify boolean DEFAULT true)
RETURNS TABLE (item_index integer, id bigint, duplicate boolean)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN QUERY
    SELECT (r.ordinality - 1)::integer, abs(r.receipt), r.receipt < 0
    FROM unnest(
        pgoutbox._enqueue(pgoutbox._drafts(messages, 'messages'), notify, 'messages')
    ) WITH ORDINALITY AS r(receipt, ordinality);
END
$function$;

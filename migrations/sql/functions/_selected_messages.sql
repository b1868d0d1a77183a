-- The messages with these ids, of this owner, or to this destination, and those for hooks about failed messages to this
-- destination; about failed messages with these ids only with_failures. The address is the destination, redacted. An
-- act on an owner or a destination needs all of its messages at once. No index has the destination, so all messages are
-- read for one. So are they for messages about failures of ids: they have the owner of the failed message.
CREATE FUNCTION pgoutbox._selected_messages(
    ids bigint[] DEFAULT NULL,
    owner text DEFAULT NULL,
    destination text DEFAULT NULL,
    with_failures boolean DEFAULT false
)
RETURNS TABLE (id bigint, state text, address text)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
-- A plan for the given arguments has no condition on the others, so an index finds ids and owners.
SET plan_cache_mode = force_custom_plan
AS $function$
#variable_conflict use_column
BEGIN
    IF num_nonnulls(ids, _selected_messages.owner, _selected_messages.destination) <> 1 THEN
        RAISE EXCEPTION USING
            ERRCODE = '22023', SCHEMA = 'pgoutbox', COLUMN = 'owner',
            MESSAGE = 'pgoutbox: owner: give exactly one of ids, owner and destination';
    END IF;
    RETURN QUERY
    SELECT m.id, m.state, pgoutbox._redacted_text(m.destination)
    FROM pgoutbox.message AS m
    WHERE (ids IS NULL OR m.id = ANY (ids) OR with_failures AND m.failure_of = ANY (ids))
        AND pgoutbox._belongs_to(m, _selected_messages.owner, _selected_messages.destination);
END
$function$;

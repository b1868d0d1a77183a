-- For how long messages of a topic are kept in a state, or its dedupe keys without a message: the rule of the topic, or
-- else that of all topics. Null without a rule, and by a rule that keeps them without a limit.
CREATE FUNCTION pgoutbox._keep_of(topic text, state text)
RETURNS interval
LANGUAGE plpgsql
STABLE
AS $function$
BEGIN
    RETURN (
        SELECT r.keep
        FROM pgoutbox.retention AS r
        WHERE r.topic IN (_keep_of.topic, '*') AND r.state = _keep_of.state
        ORDER BY r.topic = '*'
        LIMIT 1
    );
END
$function$;

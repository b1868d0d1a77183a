-- The latest version of the payloads of a topic that a worker or a run knows, such as 2 for mail.welcome@2. Null if none
-- knows a version after the first.
CREATE FUNCTION pgoutbox._newest_version(topic text)
RETURNS integer
LANGUAGE plpgsql
STABLE
AS $function$
BEGIN
    RETURN (
        SELECT max(substr(known.name, length(topic) + 2)::integer)
        FROM pgoutbox.worker_view AS w
        CROSS JOIN unnest(w.topics) AS known(name)
        WHERE starts_with(known.name, topic || '@')
    );
END
$function$;

-- Raise OB002 in another transaction than that of this attempt, and OB003 if its completion found no message. The
-- setting is local to the transaction that the worker has begun. It is gone after a COMMIT or ROLLBACK of the handler,
-- whether or not another transaction has followed.
CREATE FUNCTION pgoutbox._require_completion(attempt text, sent_count bigint)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF current_setting('pgoutbox.attempt', true) IS DISTINCT FROM attempt THEN
        RAISE EXCEPTION USING
            ERRCODE = 'OB002', MESSAGE = 'the transaction of the handler is not the one that its worker began';
    ELSIF sent_count = 0 THEN
        RAISE EXCEPTION USING ERRCODE = 'OB003', MESSAGE = 'the attempt does not hold its message';
    END IF;
END
$function$;

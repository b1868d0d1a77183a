-- Raise OB002 in another transaction than the one that the worker has begun, and OB003 if attempts do not hold their
-- message. The setting is local to the transaction of begin_for_handler.sql. It is gone after a COMMIT or ROLLBACK of the
-- handler, whether or not another transaction has followed.
CREATE FUNCTION pgoutbox._require_completion(lost_count bigint)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF current_setting('pgoutbox.is_of_worker', true) IS DISTINCT FROM 'true' THEN
        RAISE EXCEPTION USING
            ERRCODE = 'OB002', MESSAGE = 'the transaction of the handler is not the one that its worker began';
    ELSIF lost_count > 0 THEN
        RAISE EXCEPTION USING ERRCODE = 'OB003', MESSAGE = 'an attempt does not hold its message';
    END IF;
END
$function$;

-- At the commit, because the worker renews its lease until then. An earlier lock of its claim would keep it from renewing
-- the leases of its other attempts.
CREATE FUNCTION pgoutbox._end_with_lease()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET standard_conforming_strings = on
AS $function$
DECLARE
    worker_lease timestamptz;
BEGIN
    SELECT c.lease_expires_at
    INTO worker_lease
    FROM pgoutbox.claim AS c
    WHERE c.worker = NEW.released_from AND c.claimed_at = NEW.claimed_at
    FOR SHARE;
    UPDATE pgoutbox.claim AS c
    SET lease_expires_at = coalesce(worker_lease, clock_timestamp())
    WHERE c.worker = NEW.worker AND c.claimed_at = NEW.claimed_at;
    RETURN NULL;
END
$function$;

COMMENT ON FUNCTION pgoutbox._end_with_lease IS
    'Let the claim of a released message end with the lease of the worker that it was released from.';

CREATE CONSTRAINT TRIGGER claim_released
AFTER INSERT ON pgoutbox.claim
DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW
WHEN (NEW.released_from IS NOT NULL)
EXECUTE FUNCTION pgoutbox._end_with_lease();

-- A digest that only this database computes, in 64 hexadecimal digits. The form of HMAC: two passes, so that a digest cannot
-- be extended. The purpose keeps a digest from being used for another.
CREATE FUNCTION pgoutbox._keyed_digest(purpose text, value text)
RETURNS text
LANGUAGE plpgsql
STABLE
AS $function$
DECLARE
    key constant bytea := (SELECT s.key FROM pgoutbox.secret AS s);
BEGIN
    IF key IS NULL THEN
        RAISE EXCEPTION 'pgoutbox: the table pgoutbox.secret has no row' USING
            HINT = 'Restore it from a backup. A new one, by INSERT INTO pgoutbox.secret DEFAULT VALUES, compares no digest'
                ' of before: empty the table pgoutbox.suppression then, and import the addresses again.';
    END IF;
    RETURN encode(sha256(key || sha256(key || convert_to(purpose || chr(10) || value, 'UTF8'))), 'hex');
END
$function$;

-- The first mistake in the values of a suppression; null: there is none.
CREATE FUNCTION pgoutbox._suppression_error(
    address text, digest text, mailing_list text, reason text, created_at timestamptz DEFAULT NULL
)
RETURNS text
LANGUAGE sql
STABLE
AS $function$
SELECT CASE
    WHEN num_nonnulls(address, digest) <> 1 THEN 'address: must not be null'
    -- Python writes others in ASCII: PostgreSQL has no IDNA, and the case of letters depends on the database.
    WHEN octet_length(address) <> length(address) THEN 'address: must be ASCII, with the domain in its xn-- form'
    WHEN address !~* '^(mailto:)?[^[:space:]@<>,]+@[a-z0-9_.-]*[a-z0-9_]$' OR length(address) > 500
        THEN 'address: must be one e-mail address, without a name'
    WHEN address ~* '^mailto:.*%[0-9a-f]{2}' THEN 'address: must not be percent-encoded'
    WHEN digest !~ '^[0-9a-f]{40}$' THEN 'digest: must be 40 hexadecimal digits'
    WHEN left(digest, 8) <> pgoutbox._list_mark() THEN 'digest: is one of another database; import the addresses'
    WHEN mailing_list !~ '^([a-z][a-z0-9_.-]{0,62})?$'
        THEN 'mailing_list: must be 1 to 63 of a-z, 0-9, underscore, dot and hyphen, the first a letter'
    WHEN reason IS NULL THEN 'reason: must not be null'
    WHEN reason NOT IN ('bounce', 'complaint', 'unsubscribe', 'manual')
        THEN 'reason: must be bounce, complaint, unsubscribe or manual'
    WHEN mailing_list <> '' AND reason IN ('bounce', 'complaint')
        THEN 'mailing_list: must be empty, because a bounce or a complaint stops every list'
    WHEN created_at NOT BETWEEN timestamptz '2000-01-01 00:00Z' AND timestamptz '3000-01-01 00:00Z'
        THEN 'created_at: must be between the years 2000 and 3000'
END
$function$;

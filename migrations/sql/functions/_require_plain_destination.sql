-- Refuse a destination that an operator sets during a blackout, or in a spelling that hides its address. The audit has
-- digests of the destinations that operators set. Two spellings of one address would have two digests.
CREATE FUNCTION pgoutbox._require_plain_destination(in_function text, destination text)
RETURNS void
LANGUAGE plpgsql
STABLE
AS $function$
BEGIN
    PERFORM pgoutbox._raise_argument_error(
        'destination: must be a plain address, such as mailto:ada@example.org, without a name and escapes',
        in_function => in_function
    )
    WHERE lower(left(destination, 7)) = 'mailto:' AND destination ~ '[%<>"()[:space:]]';
    PERFORM pgoutbox._refuse_in_blackout(in_function || ': destination');
END
$function$;

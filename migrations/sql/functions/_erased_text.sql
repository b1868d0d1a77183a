-- A text with (erased) instead of these texts, in any case. A text counts only between characters that are neither
-- letters nor digits: erasing ada@example.org changes no text about bada@example.org. Before it may be the end of a line,
-- which JSON writes as a letter.
CREATE FUNCTION pgoutbox._erased_text(value text, texts text[])
RETURNS text
LANGUAGE plpgsql
IMMUTABLE
AS $function$
DECLARE
    one text;
BEGIN
    -- The longest first: an address contains the name of its owner.
    FOR one IN SELECT t.text FROM unnest(texts) AS t(text) ORDER BY length(t.text) DESC LOOP
        CONTINUE WHEN (one <> '' AND strpos(lower(value), lower(one)) > 0) IS NOT TRUE;
        value := regexp_replace(
            value,
            $form$((?<![[:alnum:]])|(?<=\\[bfnrt]))$form$
                || regexp_replace(one, $form$([].^$*+?(){}|\\[-])$form$, $form$\\\1$form$, 'g') || '(?![[:alnum:]])',
            '(erased)',
            'gi'
        );
    END LOOP;
    RETURN value;
END
$function$;

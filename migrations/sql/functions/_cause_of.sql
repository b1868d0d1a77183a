-- What errors of one cause have in common: the error without addresses, quoted values, ids and numbers, and without the
-- DETAIL and CONTEXT of PostgreSQL, which quote rows. A status code such as 404 or 550 stays, where such codes stand:
-- at the beginning, and after a colon, a bracket or the name of a protocol. A quotation that is cut off ends with the
-- text. Python quotes names of the program in some errors: KeyError: 'vat_id' stays.
CREATE FUNCTION pgoutbox._cause_of(error text)
RETURNS text
LANGUAGE sql
IMMUTABLE
STRICT
PARALLEL SAFE
RETURN left(
    -- Each code and each number becomes the code, if there is one, and a mark. Then the marks of codes go. To look behind
    -- each digit instead takes five times as long for a long error.
    regexp_replace(
        regexp_replace(
            regexp_replace(
                regexp_replace(
                    regexp_replace(
                        regexp_replace(left(error, 400), $form$\n\s*(DETAIL|CONTEXT):.*$form$, ''),
                        $form$[^\s<>(),:;"'=][^\s<>(),:;"=]*(@|%40)[^\s<>(),:;"'&]+$form$, '(address)', 'g'
                    ),
                    $form$(?:(?<!^(?:Key|Attribute|Name|Import|ModuleNotFound)Error: .*)|(?!'[A-Za-z_]{1,60}'))(?<![[:alnum:]])[bru]?'([^']|'(?=[[:alnum:]]))*('(?![[:alnum:]])|$)|"[^"]*("|$)|“[^”]*(”|$)|«[^»]*(»|$)|»[^«]*(«|$)|‘[^’]*(’|$)|`[^`]*(`|$)$form$,
                    '(value)', 'g'
                ),
                $form$\m[[:xdigit:]]{8}(-[[:xdigit:]]{4}){3}-[[:xdigit:]]{12}\M|\m(?=[[:xdigit:]]*\d)[[:xdigit:]]{8,}\M|\m(?=\w*\d)\w{20,}\M$form$,
                '#', 'g'
            ),
            $form$(^|: |\(|HTTP |SMTP |status |code )([245]\d\d)(?!\d)|\d+$form$, '\1\2#', 'g'
        ),
        $form$(\d)#$form$, '\1', 'g'
    ),
    200
);

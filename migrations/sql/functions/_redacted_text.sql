-- Redaction hides too much rather than too little: everything after a sensitive name. Most texts have none, and
-- are scanned once.
CREATE FUNCTION pgoutbox._redacted_text(value text)
RETURNS text
LANGUAGE sql
IMMUTABLE
PARALLEL SAFE
RETURN CASE
    WHEN pg_catalog.strpos(value, '://') OPERATOR(pg_catalog.=) 0
        AND value OPERATOR(pg_catalog.!~*)
            'pass|pwd|secret|token|authoriz|cookie|credential|key|value|bearer|basic|digest|sig|jwt|eyj|a[ks]ia|aiza'
        THEN value
    ELSE pg_catalog.regexp_replace(
        pg_catalog.regexp_replace(
            pg_catalog.regexp_replace(
                pg_catalog.regexp_replace(
                    pg_catalog.regexp_replace(
                        value,
                        '(://)([^\s/?#"''<>]*'
                            '|[^\s/?#"''<>:@]*:(?![0-9]+[\s/?#,;.)])([^\s"''<>]*|[^\r\n"''<>@]*))@',
                        '\1(redacted)@',
                        'g'
                    ),
                    '\m(eyJ[\w-]+\.[\w-]+\.[\w-]*|A[KS]IA[A-Z0-9]+|AIza[\w-]+)'
                        '|-----BEGIN [A-Z ]*PRIVATE KEY-----.*',
                    '(redacted)',
                    'g'
                ),
                '\m(bearer|basic|digest)\s+[\w.~+/=-]{6,}',
                '\1 (redacted)',
                'gi'
            ),
            '\m(passwd|password|passphrase|pwd)(\s+(is\s+)?)(?=\S*[0-9])\S+',
            '\1\2(redacted)',
            'gi'
        ),
        '(((pass[-_]*w[-_]*o?[-_]*r?[-_]*d|pass[-_]*phrase|secret|token|authorization|cookie|credential'
            '|api[-_]*key|access[-_]*key|private[-_]*key|input[-_]*value)[\w.-]*'
            '|(?<![a-z])(pass|pwd|jwt|sig|signature)|[?&]key)[\\"'')\]\s]*[=:]+>?).*',
        '\1(redacted)',
        'i'
    )
END;

COMMENT ON FUNCTION pgoutbox._redacted_text IS 'A text without the values of names such as password or token.';

-- Switch the redirect on, for `seconds` or until it is switched off, of some topics or of all.
SELECT r.set_by, r.set_at, r.until_at
FROM pgoutbox.set_redirect(
    %(target)s::text,
    make_interval(secs => %(seconds)s::float8),
    %(topics)s::text[],
    %(exempt_topics)s::text[]
) AS r

-- Facts about the server, to refuse an unusable one with the fix. The order is that of `ServerFacts`.
SELECT
    current_setting('server_version_num')::integer AS server_version,
    pg_is_in_recovery() AS in_recovery,
    current_setting('transaction_read_only')::boolean AS read_only,
    current_setting('server_encoding') AS encoding,
    to_regprocedure('pgoutbox._require_package(text)') IS NOT NULL AS has_schema

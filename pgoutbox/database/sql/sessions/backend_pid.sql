-- The process number of this session, to end it later if a statement stays without an answer.
SELECT pg_backend_pid()

-- As discard_session.sql, behind a pooler. It runs in a transaction, because only there the session is the handler's. It
-- keeps prepared statements, which are the pooler's. The settings of the client and COMMIT follow.
CLOSE ALL;
SET SESSION AUTHORIZATION DEFAULT;
RESET ROLE;
RESET ALL;
UNLISTEN *;
SELECT pg_advisory_unlock_all();
DISCARD TEMP;
DISCARD SEQUENCES

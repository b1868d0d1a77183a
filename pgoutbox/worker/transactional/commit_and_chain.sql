-- Commit, and keep the server's session behind a pooler, to clean it by discard_pooled.sql.
COMMIT AND CHAIN

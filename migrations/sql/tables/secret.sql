-- The key of the digests in the audit and of suppressed addresses. Only the owner of the schema reads it. No role has a right on it.
--
-- A copy of the database has the same key, so its digests can still be compared.
CREATE TABLE pgoutbox.secret (
    is_only boolean PRIMARY KEY DEFAULT true, -- Always true, so that there is one row at most.
    -- Random. With a new key, nobody can compare the digests that the audit already has.
    key     bytea   NOT NULL DEFAULT uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()),
    CONSTRAINT secret_sound CHECK (is_only AND octet_length(key) >= 32)
);

INSERT INTO pgoutbox.secret DEFAULT VALUES;

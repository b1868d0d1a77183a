-- The destinations that a person means by an address: the URI itself, or an e-mail address without mailto.
CREATE FUNCTION pgoutbox._destinations_of(address text)
RETURNS text[]
LANGUAGE sql
IMMUTABLE
RETURN CASE WHEN address IS NOT NULL THEN ARRAY[address, 'mailto:' OPERATOR(pg_catalog.||) address] END;

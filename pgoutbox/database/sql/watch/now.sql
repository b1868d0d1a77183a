-- The start of this transaction, by the database's clock.
SELECT now()

-- Roll back the transaction of begin.sql after an error.
ROLLBACK

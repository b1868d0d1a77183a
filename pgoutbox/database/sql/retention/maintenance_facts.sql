-- The facts for a turn of maintenance that an operator starts. The workers' turns are in begin_maintenance_if_due.sql.
\ir _maintenance_facts.sql

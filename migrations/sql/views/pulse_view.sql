-- Counters of which one changes with nearly every event: for programs that follow the outbox.
--
-- Counters for a dashboard that change with the outbox, the last id drawn, and when maintenance succeeded. They reveal no
-- data of the tables that only the owner may read. All of them together are cheap, and unused columns cost nothing.
CREATE VIEW pgoutbox.pulse_view AS
SELECT
    (SELECT s.last_value FROM pgoutbox.message_id_seq AS s) AS last_id,
    (SELECT max(a.id) FROM pgoutbox.audit AS a) AS last_act,
    (SELECT r.succeeded_at FROM pgoutbox.maintenance_run AS r) AS maintained_at,
    (
        SELECT count(*)
        FROM (SELECT FROM pgoutbox.in_flight_view AS v LIMIT 1000) AS held
    ) AS in_flight,
    (SELECT count(*) FROM (SELECT FROM pgoutbox.message_live AS m LIMIT 1000) AS live) AS live,
    (SELECT count(*) FROM (SELECT FROM pgoutbox.message_failed AS m LIMIT 1000) AS failed) AS failed,
    (SELECT count(*) FROM (SELECT FROM pgoutbox.breaker AS b LIMIT 1000) AS breakers) AS breakers,
    (
        SELECT sum(
            pg_stat_get_tuples_inserted(c.oid) + pg_stat_get_tuples_updated(c.oid) + pg_stat_get_tuples_deleted(c.oid)
        )
        FROM pg_catalog.pg_class AS c
        WHERE c.relnamespace = 'pgoutbox'::regnamespace AND c.relkind = 'r'
    ) AS written;

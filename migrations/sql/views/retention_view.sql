-- How long final messages are kept.
CREATE VIEW pgoutbox.retention_view AS
SELECT
    r.topic,
    r.state,
    r.keep
FROM pgoutbox.retention AS r;

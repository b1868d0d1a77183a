-- The topics of rules that delete sent messages at once; `*` stands for all topics. One row per rule.
SELECT r.topic
FROM pgoutbox.retention AS r
WHERE r.state = 'sent' AND r.keep = interval '0'

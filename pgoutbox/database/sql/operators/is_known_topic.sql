-- Whether the database knows this topic.
SELECT pgoutbox._is_known_topic(%(topic)s::text)

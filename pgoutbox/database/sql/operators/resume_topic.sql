-- End the pause of a topic. False: the topic was not paused.
SELECT pgoutbox.resume_topic(%(topic)s::text)

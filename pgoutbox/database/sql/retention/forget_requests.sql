-- Delete the requests to cancel messages that have ended, and let enqueues refuse the ids that are drawn until now.
SELECT pgoutbox._forget_requests()

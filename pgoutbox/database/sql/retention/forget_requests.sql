-- Delete the requests to cancel messages that have ended.
SELECT pgoutbox._forget_requests()

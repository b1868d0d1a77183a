-- The arguments of a function that enqueues, from `draft`.
topic => draft.topic,
payload => draft.payload,
queue => draft.queue,
destination => draft.destination,
coalesce_key => draft.coalesce_key,
dedupe_key => draft.dedupe_key,
available_at => draft.available_at,
expires_at => coalesce(
    draft.expires_at,
    greatest(draft.available_at, pg_catalog.now()) OPERATOR(pg_catalog.+) draft.expires_after
),
headers => draft.headers,
max_attempts => draft.max_attempts,
ordering_key => draft.ordering_key,
on_failed => draft.on_failed,
max_delay => draft.max_delay,
owner => draft.owner,
on_duplicate => draft.on_duplicate,
notify => draft.notify

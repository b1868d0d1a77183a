-- The claims of queues with a rate, in the last period of the rate or the ceiling.
--
-- The running number tells without a sum how many attempts began in a period. The trigger queue_attempts writes it.
CREATE TABLE pgoutbox.rate_claim (
    claimed_at    timestamptz NOT NULL, -- Start of the attempts.
    begun_count   bigint      NOT NULL, -- The begun_count of the queue after the claim.
    attempt_count integer     NOT NULL, -- Number of attempts that the claim has begun.
    queue         text COLLATE "C" NOT NULL, -- The queue.
    CONSTRAINT rate_claim_pkey PRIMARY KEY (queue, claimed_at)
) WITH (
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_cost_delay = 1
);

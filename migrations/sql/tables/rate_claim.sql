-- One row for each claim of a queue with a rate, until its attempts no longer count. The running number tells without a sum
-- how many attempts began in a period. The trigger queue_attempts writes it.
CREATE TABLE pgoutbox.rate_claim (
    claimed_at    timestamptz NOT NULL,
    begun_count   bigint      NOT NULL,
    attempt_count integer     NOT NULL,
    queue         text COLLATE "C" NOT NULL,
    CONSTRAINT rate_claim_pkey PRIMARY KEY (queue, claimed_at)
) WITH (
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_cost_delay = 1
);

COMMENT ON TABLE pgoutbox.rate_claim IS 'The claims of queues with a rate, in the last period of the rate or the ceiling.';
COMMENT ON COLUMN pgoutbox.rate_claim.claimed_at IS 'Start of the attempts.';
COMMENT ON COLUMN pgoutbox.rate_claim.begun_count IS 'The begun_count of the queue after the claim.';
COMMENT ON COLUMN pgoutbox.rate_claim.attempt_count IS 'Number of attempts that the claim has begun.';
COMMENT ON COLUMN pgoutbox.rate_claim.queue IS 'The queue.';

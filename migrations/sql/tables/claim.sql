-- The claims of workers: which messages each has begun, and when its lease ends. A message in flight belongs to the
-- claim with its worker and claimed_at; the others of the list have ended since.
--
-- One row for each claim, so that a lease is renewed in one row for all of its attempts. Nothing else of a message in
-- flight changes. A claim is deleted by the trip of its worker that finishes the last of its attempts, or when its lease
-- has ended.
CREATE TABLE pgoutbox.claim (
    claimed_at       timestamptz NOT NULL, -- Start of the attempts.
    lease_expires_at timestamptz NOT NULL, -- When the attempts count as lost unless their worker renews the lease.
    queue            text COLLATE "C" NOT NULL, -- The queue of the messages.
    worker           text COLLATE "C" NOT NULL, -- The worker.
    -- The messages that this claim chose; the attempt of one that changed meanwhile did not begin.
    ids              bigint[]    NOT NULL,
    -- The worker from which an operator has released the message; empty when the lease was extended.
    released_from    text COLLATE "C",
    CONSTRAINT claim_pkey PRIMARY KEY (worker, claimed_at)
) WITH (
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_cost_delay = 1
);

-- Recovery reads the claims whose lease has expired.
CREATE INDEX claim_lease ON pgoutbox.claim (lease_expires_at, queue);

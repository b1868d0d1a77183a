-- Open circuit breakers of transports and destinations. A working one has no row.
--
-- The fence of a probe is its id: closing and reopening a breaker check it.
CREATE TABLE pgoutbox.breaker (
    -- The name that the transport gives to the dead transport or destination.
    key              text COLLATE "C" PRIMARY KEY,
    -- When the breaker opened. Since then only probes are sent.
    opened_at        timestamptz      NOT NULL DEFAULT now(),
    retry_at         timestamptz      NOT NULL, -- When one message may be sent as a probe.
    cooldown_seconds double precision NOT NULL, -- Length of the last pause. A failed probe doubles it.
    probe_id         uuid, -- The current probe: the fence of its outcome.
    probe_until      timestamptz, -- When that probe counts as lost and another one may be sent.
    worker           text             NOT NULL, -- The worker that opened the breaker or sent the last probe.
    last_error       text             NOT NULL, -- Error message, cut at 4000 characters.
    -- Messages that wait behind it unclaimed: each a queue, a topic with its later version, and the scheme or web host of their
    -- destinations.
    holds            text[]           NOT NULL DEFAULT '{}',
    CONSTRAINT breaker_sound CHECK (cooldown_seconds > 0 AND (probe_id IS NULL) = (probe_until IS NULL))
);

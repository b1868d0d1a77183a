-- A working destination has no row. The fence of a probe is its id: closing and reopening a breaker check it.
CREATE TABLE pgoutbox.breaker (
    key              text COLLATE "C" NOT NULL,
    opened_at        timestamptz      NOT NULL DEFAULT now(),
    retry_at         timestamptz      NOT NULL,
    cooldown_seconds double precision NOT NULL,
    probe_id         uuid,
    probe_until      timestamptz,
    worker           text             NOT NULL,
    last_error       text             NOT NULL,
    holds            text[]           NOT NULL DEFAULT '{}',
    CONSTRAINT breaker_pkey PRIMARY KEY (key),
    CONSTRAINT breaker_sound CHECK (cooldown_seconds > 0 AND (probe_id IS NULL) = (probe_until IS NULL))
);

COMMENT ON TABLE pgoutbox.breaker IS 'Open circuit breakers of transports and destinations. A working one has no row.';
COMMENT ON COLUMN pgoutbox.breaker.key IS 'The name that the transport gives to the dead transport or destination.';
COMMENT ON COLUMN pgoutbox.breaker.opened_at IS 'When the breaker opened. Since then only probes are sent.';
COMMENT ON COLUMN pgoutbox.breaker.retry_at IS 'When one message may be sent as a probe.';
COMMENT ON COLUMN pgoutbox.breaker.cooldown_seconds IS 'Length of the last pause. A failed probe doubles it.';
COMMENT ON COLUMN pgoutbox.breaker.probe_id IS 'The current probe: the fence of its outcome.';
COMMENT ON COLUMN pgoutbox.breaker.probe_until IS 'When that probe counts as lost and another one may be sent.';
COMMENT ON COLUMN pgoutbox.breaker.worker IS 'The worker that opened the breaker or sent the last probe.';
COMMENT ON COLUMN pgoutbox.breaker.last_error IS 'Error message, cut at 4000 characters.';
COMMENT ON COLUMN pgoutbox.breaker.holds IS
    'Messages that wait behind it unclaimed: each a queue, a topic, and the scheme or web host of their destinations.';

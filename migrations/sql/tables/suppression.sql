-- Suppressed addresses: no mail of a mailing list goes to them.
--
-- It has digests and no addresses: only this database can compare one with an address. A worker asks it before each handler
-- of a topic with a mailing list. An ended suppression stays, because it refuses the links of earlier mails.
CREATE TABLE pgoutbox.suppression (
    created_at   timestamptz NOT NULL DEFAULT now(), -- Start of the suppression.
    ended_at     timestamptz, -- When unsuppress has ended it; null: it is in force.
    digest       text COLLATE "C" NOT NULL, -- Digest of the address: see address_digest.
    mailing_list text COLLATE "C" NOT NULL, -- The list that it stops; empty: every list.
    reason       text        NOT NULL, -- bounce, complaint, unsubscribe or manual.
    detail       text, -- A note, such as the code of a bounce. Addresses in it are replaced.
    CONSTRAINT suppression_pkey PRIMARY KEY (digest, mailing_list),
    CONSTRAINT suppression_sound CHECK (
        digest ~ '^[0-9a-f]{32}$'
        AND (mailing_list = '' OR length(mailing_list) <= 63 AND mailing_list ~ '^[a-z][a-z0-9_.-]*$')
        AND reason IN ('bounce', 'complaint', 'unsubscribe', 'manual')
        AND (mailing_list = '' OR reason IN ('unsubscribe', 'manual'))
        AND length(detail) <= 200
        AND detail !~ '@'
        -- Python reads no other times.
        AND created_at BETWEEN timestamptz '2000-01-01 00:00Z' AND timestamptz '3000-01-01 00:00Z'
    )
);

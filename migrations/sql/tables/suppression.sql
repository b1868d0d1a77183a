-- Suppressed addresses: no mail of a mailing list goes to them.
--
-- It has digests and no addresses: only this database can compare one with an address. A worker asks it before each handler
-- of a topic with a mailing list. An ended suppression stays, because it refuses the links of earlier mails. So does one of a
-- person whose messages are erased: she shall still get no mail.
CREATE TABLE pgoutbox.suppression (
    created_at   timestamptz NOT NULL DEFAULT now(), -- Start of the suppression.
    ended_at     timestamptz, -- When unsuppress has ended it; null: it is in force.
    digest       text COLLATE "C" NOT NULL, -- Digest of the address: see address_digest.
    mailing_list text COLLATE "C" NOT NULL, -- The list that it stops; empty: every list.
    reason       text        NOT NULL, -- bounce, complaint, unsubscribe or manual.
    CONSTRAINT suppression_pkey PRIMARY KEY (digest, mailing_list),
    CONSTRAINT suppression_sound CHECK (digest ~ '^[0-9a-f]{40}$')
);

"""Invariants that hold under every fault: a trigger that records each forbidden change, and queries over the whole
table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from psycopg import sql

from tests.support.transitions import TRANSITIONS

if TYPE_CHECKING:
    import psycopg

# Only the owner of an unexpired lease may end its attempt. The attempt number only grows, and only a claim raises it.
JUDGE = """
CREATE TABLE violation (message_id bigint, what text);
CREATE FUNCTION judge() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $judge$
DECLARE
    change text := OLD.state || '>' || NEW.state;
    claims boolean := NEW.attempt_count = OLD.attempt_count + 1;
    problem text := CASE
        WHEN NEW.state <> OLD.state AND NOT change = ANY (ARRAY[{allowed}]) THEN 'no such transition'
        WHEN NEW.attempt_count <> OLD.attempt_count AND NOT claims THEN 'the count of attempts jumps'
        WHEN claims AND NEW.state <> 'sending' THEN 'an attempt without a claim'
        WHEN claims AND OLD.state = 'sending' AND EXISTS (
            SELECT FROM pgoutbox.claim AS c
            WHERE c.worker = OLD.worker AND c.claimed_at = OLD.claimed_at AND c.lease_expires_at > now()
        ) THEN 'a lease was taken away'
        WHEN NOT claims AND NEW.worker IS DISTINCT FROM OLD.worker THEN 'another worker without a claim'
    END;
BEGIN
    IF problem IS NOT NULL THEN
        INSERT INTO public.violation
        VALUES (OLD.id, format('%s: %s, attempt %s to %s', problem, change, OLD.attempt_count, NEW.attempt_count));
    END IF;
    RETURN NEW;
END
$judge$;
CREATE TRIGGER judge BEFORE UPDATE ON pgoutbox.message FOR EACH ROW EXECUTE FUNCTION judge();
"""

RULES = {
    "an attempt in flight has no claim": """
        SELECT m.id FROM pgoutbox.message_live AS m
        WHERE m.state = 'sending' AND NOT EXISTS (SELECT FROM pgoutbox.in_flight_view AS v WHERE v.id = m.id)
    """,
    "two messages of one key are in flight": """
        SELECT min(m.id) FROM pgoutbox.message_live AS m
        WHERE m.state = 'sending' AND m.coalesce_key IS NOT NULL
        GROUP BY m.topic, m.coalesce_key HAVING count(*) > 1
    """,
    "a message that is owed is newer than the head of its key": """
        SELECT m.id FROM pgoutbox.message_live AS m
        LEFT JOIN pgoutbox.key_head AS head ON head.scope = m.topic AND head.key = m.coalesce_key
        WHERE m.coalesce_key IS NOT NULL AND coalesce(head.newest_id < m.id, true)
    """,
    "a copy supersedes messages newer than its original": """
        SELECT copy.id FROM pgoutbox.message AS copy
        JOIN pgoutbox.message AS newer USING (topic, coalesce_key)
        WHERE newer.id > copy.resend_of AND newer.id < copy.id AND newer.resend_of IS DISTINCT FROM copy.resend_of
    """,
    "a dedupe key does not lead to its message": """
        SELECT m.id FROM pgoutbox.message AS m
        LEFT JOIN pgoutbox.dedupe AS d USING (topic, dedupe_key)
        WHERE m.dedupe_key IS NOT NULL
            AND d.message_id IS DISTINCT FROM m.id
            AND (m.state NOT IN ('cancelled', 'skipped') OR m.superseded_by IS NOT NULL)
    """,
    "a dedupe key leads nowhere": """
        SELECT d.message_id FROM pgoutbox.dedupe AS d
        WHERE NOT EXISTS (SELECT FROM pgoutbox.message AS m WHERE m.id = d.message_id)
    """,
    # Every attempt has a line in the history, unless it was sent or is in flight. A history of 20 lines may lack some.
    "the history does not account for every attempt": """
        SELECT m.id FROM pgoutbox.message AS m
        WHERE m.attempt_count - (m.state IN ('sending', 'sent'))::integer
            <> (SELECT coalesce(sum(a.times), 0) FROM jsonb_populate_recordset(NULL::pgoutbox.attempt, m.attempts) AS a)
            AND coalesce(jsonb_array_length(m.attempts), 0) < 20
    """,
}


def install_judge(db: psycopg.Connection) -> None:
    """Start to record forbidden changes of messages in the table `violation`."""
    allowed = [f"{old}>{new}" for old, news in TRANSITIONS.items() for new in news]
    db.execute(sql.SQL(JUDGE).format(allowed=sql.SQL(", ").join(map(sql.Literal, allowed))))


def violations(db: psycopg.Connection) -> list[tuple[int, str]]:
    """Return the changes that the trigger recorded, and the messages that break a rule of the table in its current
    state."""
    found = db.execute("SELECT message_id, what FROM violation").fetchall()
    for rule, question in RULES.items():
        found += [(row[0], rule) for row in db.execute(question.encode())]
    return found

"""The database's own record of the run: an account of attempts, tokens and breakers, in the order of the locks.

Triggers write it in the transactions that they record. The number of a line is drawn before its transaction commits
and after the snapshot on which it acted. If one of two transactions had to see the other, their order is therefore
right.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, LiteralString, NamedTuple

import psycopg
from psycopg.rows import class_row

MAX_COOLDOWN_SECONDS: Final = 2.0
"""The longest pause of a breaker in the run."""

# A row that moves to another partition is deleted there and inserted here, in one transaction.
_WITNESS: Final[LiteralString] = """
CREATE TABLE soak_flight (
    seq           bigserial PRIMARY KEY,
    xid           xid8    NOT NULL DEFAULT pg_current_xact_id(),
    at            float8  NOT NULL DEFAULT extract(epoch FROM clock_timestamp()),
    message_id    bigint  NOT NULL,
    ledger_key    text    NOT NULL,
    topic         text    NOT NULL,
    queue         text    NOT NULL,
    ordering_key  text,
    halts         boolean NOT NULL,
    what          text    NOT NULL,
    attempt_count integer NOT NULL,
    worker        text,
    in_flight     bigint,
    max_in_flight integer,
    is_paused     boolean
);
CREATE INDEX soak_flight_attempt ON soak_flight (message_id, attempt_count);
CREATE FUNCTION soak_note() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $function$
DECLARE
    seen pgoutbox.message := CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
    did text := CASE WHEN TG_OP = 'DELETE' THEN 'gone' ELSE seen.state END;
    present bigint;
    limits pgoutbox.queue;
BEGIN
    IF TG_OP = 'UPDATE' AND NEW.state = 'sending' AND OLD.attempt_count = NEW.attempt_count THEN
        RETURN NULL;
    ELSIF TG_OP = 'UPDATE' AND NEW.state = 'sending' THEN
        SELECT q.* INTO limits FROM pgoutbox.queue AS q WHERE q.name = seen.queue;
        IF limits.max_in_flight IS NOT NULL THEN
            -- Whose lease had ended before its worker renewed it is one too many by rights.
            SELECT count(*) INTO present
            FROM pgoutbox.in_flight_view AS m
            WHERE m.queue = seen.queue AND m.lease_expires_at > clock_timestamp()
                AND NOT EXISTS (
                    SELECT FROM public.soak_flight AS f
                    WHERE f.message_id = m.id AND f.attempt_count = m.attempt_count AND f.what = 'revived'
                );
        END IF;
    END IF;
    INSERT INTO public.soak_flight (
        message_id, ledger_key, topic, queue, ordering_key, halts, what, attempt_count, worker, in_flight,
        max_in_flight, is_paused
    ) VALUES (
        seen.id, seen.payload ->> 'ledger_key', seen.topic, seen.queue, seen.ordering_key,
        seen.halts_key, did, seen.attempt_count, seen.worker, present, limits.max_in_flight,
        limits.paused_at IS NOT NULL AND (limits.resume_at > clock_timestamp()) IS NOT FALSE
    );
    RETURN NULL;
END
$function$;
CREATE TRIGGER soak_entered AFTER INSERT ON pgoutbox.message FOR EACH ROW
    WHEN (NEW.queue IN ('ordered', 'rated', 'crowded') OR NEW.topic = 'soak.forgotten') EXECUTE FUNCTION soak_note();
CREATE TRIGGER soak_changed AFTER UPDATE ON pgoutbox.message FOR EACH ROW
    WHEN (NEW.queue IN ('ordered', 'rated', 'crowded') OR NEW.topic = 'soak.forgotten') EXECUTE FUNCTION soak_note();
CREATE TRIGGER soak_left AFTER DELETE ON pgoutbox.message FOR EACH ROW
    WHEN (OLD.queue IN ('ordered', 'rated', 'crowded') OR OLD.topic = 'soak.forgotten') EXECUTE FUNCTION soak_note();

-- The turns of fair keys. The statement that gives them sees those that have begun and ended before.
CREATE TABLE soak_turn (message_id bigint NOT NULL, present bigint NOT NULL, most integer);
CREATE FUNCTION soak_turn() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $function$
BEGIN
    INSERT INTO public.soak_turn (message_id, present, most)
    SELECT
        NEW.id,
        (
            SELECT count(*) FROM pgoutbox.message_live AS m
            WHERE m.queue = NEW.queue AND m.fair_key = NEW.fair_key AND m.lane < 2
        ),
        s.max_in_flight
    FROM pgoutbox.fair_share AS s
    WHERE s.queue = NEW.queue AND s.fair_key IN (NEW.fair_key, '')
    ORDER BY s.fair_key DESC
    LIMIT 1;
    RETURN NULL;
END
$function$;
CREATE TRIGGER soak_turn AFTER UPDATE OF lane ON pgoutbox.message_live FOR EACH ROW
    WHEN (OLD.lane = 2 AND NEW.lane < 2) EXECUTE FUNCTION soak_turn();
INSERT INTO pgoutbox.fair_share (queue, fair_key, weight, max_in_flight)
VALUES ('bulk', '', NULL, 20), ('bulk', 'tenant-1', 3, 8);

CREATE FUNCTION soak_revived() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $function$
BEGIN
    INSERT INTO public.soak_flight (
        message_id, ledger_key, topic, queue, ordering_key, halts, what, attempt_count, is_paused
    )
    SELECT
        m.id, m.payload ->> 'ledger_key', m.topic, m.queue, m.ordering_key, m.halts_key,
        'revived', m.attempt_count, false
    FROM pgoutbox.in_flight_view AS v
    JOIN pgoutbox.message_live AS m ON m.id = v.id
    WHERE v.worker = NEW.worker AND v.claimed_at = NEW.claimed_at
        AND (m.queue IN ('ordered', 'rated', 'crowded') OR m.topic = 'soak.forgotten');
    RETURN NULL;
END
$function$;
CREATE TRIGGER soak_revived AFTER UPDATE ON pgoutbox.claim FOR EACH ROW
    WHEN (OLD.lease_expires_at <= clock_timestamp() AND NEW.lease_expires_at > OLD.lease_expires_at)
    EXECUTE FUNCTION soak_revived();

-- Every attempt that ended, also those that the history of a message counts together or no longer has. It is not
-- deleted with the message. A trigger after the change would not see a row that moves to another partition.
CREATE TABLE soak_attempt (
    message_id    bigint      NOT NULL,
    attempt_count integer     NOT NULL,
    outcome       text        NOT NULL,
    worker        text        NOT NULL,
    started_at    timestamptz NOT NULL,
    ended_at      timestamptz NOT NULL,
    error         text
);
CREATE INDEX soak_attempt_message ON soak_attempt (message_id, attempt_count);
CREATE FUNCTION soak_ended() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $function$
DECLARE
    last pgoutbox.attempt := jsonb_populate_record(NULL::pgoutbox.attempt, NEW.attempts -> -1);
BEGIN
    INSERT INTO public.soak_attempt
    VALUES (NEW.id, OLD.attempt_count, last.outcome, OLD.worker, OLD.claimed_at, last.ended_at, last.error);
    RETURN NEW;
END
$function$;
CREATE TRIGGER soak_ended BEFORE UPDATE ON pgoutbox.message FOR EACH ROW
    WHEN (NEW.attempts IS DISTINCT FROM OLD.attempts AND NEW.attempts IS NOT NULL) EXECUTE FUNCTION soak_ended();

-- A claim may begin just before a pause and commit after it, unless its queue has limits. A trespass is an attempt that
-- begins although its claim's own snapshot shows the pause: a trigger's condition is evaluated with that snapshot.
CREATE TABLE soak_trespass (message_id bigint NOT NULL);
CREATE FUNCTION soak_is_paused(p_queue text, p_topic text) RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER AS $function$
BEGIN
    RETURN EXISTS (
        SELECT FROM pgoutbox.queue AS q
        WHERE q.name = p_queue AND q.paused_at IS NOT NULL AND (q.resume_at > clock_timestamp()) IS NOT FALSE
    ) OR EXISTS (
        SELECT FROM pgoutbox.topic_pause AS p
        WHERE p.topic = p_topic AND (p.resume_at > clock_timestamp()) IS NOT FALSE
    );
END
$function$;
CREATE FUNCTION soak_trespass() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $function$
BEGIN
    INSERT INTO public.soak_trespass (message_id) SELECT NEW.id WHERE public.soak_is_paused(NEW.queue, NEW.topic);
    RETURN NULL;
END
$function$;
CREATE TRIGGER soak_trespass AFTER UPDATE ON pgoutbox.message FOR EACH ROW
    WHEN (
        NEW.state = 'sending' AND NEW.attempt_count > OLD.attempt_count
        AND public.soak_is_paused(NEW.queue, NEW.topic)
    )
    EXECUTE FUNCTION soak_trespass();

CREATE TABLE soak_bucket (
    seq   bigserial PRIMARY KEY,
    xid   xid8   NOT NULL DEFAULT pg_current_xact_id(),
    queue text   NOT NULL,
    rate  float8 NOT NULL,
    burst float8 NOT NULL,
    at    float8 NOT NULL,
    most    integer NOT NULL DEFAULT 1000,
    seconds float8  NOT NULL DEFAULT 1
);
CREATE FUNCTION soak_tokens() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $function$
BEGIN
    INSERT INTO public.soak_bucket (queue, rate, burst, at, most, seconds)
    VALUES (
        NEW.name, NEW.tokens_per_second, NEW.burst, extract(epoch FROM NEW.tokens_at), NEW.rate_count, NEW.rate_seconds
    );
    RETURN NULL;
END
$function$;
CREATE TRIGGER soak_tokens AFTER INSERT OR UPDATE ON pgoutbox.queue FOR EACH ROW
    WHEN (NEW.rate_count IS NOT NULL) EXECUTE FUNCTION soak_tokens();

CREATE TABLE soak_breaker (
    seq   bigserial PRIMARY KEY,
    key   text        NOT NULL,
    what  text        NOT NULL,
    at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    until timestamptz
);
CREATE FUNCTION soak_switch() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $function$
BEGIN
    IF TG_OP = 'DELETE' THEN
        INSERT INTO public.soak_breaker (key, what) VALUES (OLD.key, 'closed');
    ELSIF TG_OP = 'UPDATE' AND NEW.opened_at = OLD.opened_at THEN
        INSERT INTO public.soak_breaker (key, what, until)
        VALUES (NEW.key, 'changed', greatest(NEW.retry_at, NEW.probe_until));
    ELSE
        INSERT INTO public.soak_breaker (key, what, until) VALUES (NEW.key, 'opened', NEW.retry_at);
    END IF;
    RETURN NULL;
END
$function$;
CREATE TRIGGER soak_switch AFTER INSERT OR UPDATE OR DELETE ON pgoutbox.breaker
    FOR EACH ROW EXECUTE FUNCTION soak_switch()
"""

_FLIGHT: Final = """
SELECT
    seq, xid::text, at, message_id, ledger_key, topic, queue, ordering_key, halts, what, attempt_count, worker,
    in_flight > max_in_flight AS is_crowded, is_paused
FROM soak_flight
ORDER BY seq
"""
_BUCKET: Final = "SELECT xid::text, queue, rate, burst, at, most, seconds FROM soak_bucket ORDER BY seq"
# The state of the row one second before the attempt began is valid until its end, unless the row changes in the
# meantime. A worker may fail and query at the moment when the row is being committed, and then misses it. It also
# ignores a row whose time has passed by more than the longest pause: nobody has probed for long.
_USED_UP: Final[LiteralString] = """
SELECT
    a.message_id,
    extract(epoch FROM a.started_at)::float8,
    extract(epoch FROM a.ended_at)::float8
FROM soak_attempt AS a
JOIN pgoutbox.message AS m ON m.id = a.message_id
CROSS JOIN LATERAL (
    SELECT b.seq, b.key, b.what, b.until
    FROM soak_breaker AS b
    WHERE b.key LIKE 'line:%%' AND b.at < a.started_at - interval '1 s'
    ORDER BY b.seq DESC
    LIMIT 1
) AS o
WHERE o.what <> 'closed'
    AND o.until + make_interval(secs => %s::float8) > a.ended_at
    AND m.topic = 'soak.line'
    AND a.outcome = 'retry'
    AND a.error ~ '^(Connection[A-Za-z]*Error|TimeoutError|no answer)'
    AND NOT EXISTS (
        SELECT FROM soak_breaker AS c
        WHERE c.key = o.key
            AND c.seq > o.seq
            AND c.at < a.ended_at
            AND (c.what <> 'changed' OR c.until + make_interval(secs => %s::float8) <= a.ended_at)
    )
ORDER BY a.message_id
"""
_FINAL: Final = frozenset({"sent", "skipped", "cancelled", "failed", "gone"})


class Flight(NamedTuple):
    """One line of the account of attempts. `what` is the entered state, `gone` or `revived`."""

    seq: int
    xid: str
    at: float
    message_id: int
    ledger_key: str
    topic: str
    queue: str
    ordering_key: str | None
    halts: bool
    what: str
    attempt_count: int
    worker: str | None
    is_crowded: bool | None
    is_paused: bool | None


class _Bucket(NamedTuple):
    xid: str
    queue: str
    rate: float
    burst: float
    at: float
    most: int
    seconds: float


def install_witness(connection: psycopg.Connection) -> None:
    """Start to write the account. Call it before the first enqueue, in a database that only this run uses."""
    connection.execute(_WITNESS)


def flights(connection: psycopg.Connection) -> list[Flight]:
    """Return the account of attempts. A row that moved to another partition in one transaction is not gone."""
    lines = connection.cursor(row_factory=class_row(Flight)).execute(_FLIGHT).fetchall()
    entered = {(line.xid, line.message_id) for line in lines if line.what != "gone"}
    return [line for line in lines if line.what != "gone" or (line.xid, line.message_id) not in entered]


def begun(lines: Iterable[Flight]) -> Iterator[Flight]:
    """Return each attempt that began."""
    return (line for line in lines if line.what == "sending")


def out_of_turn(lines: Sequence[Flight]) -> dict[str, list[int]]:
    """Return ordered messages that began beside another one of the key, or before an earlier one was done."""
    states: defaultdict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    passed: set[int] = set()
    beside: list[int] = []
    early: list[int] = []
    for line in lines:
        if line.ordering_key is None or line.what == "revived":
            continue
        key = states[line.queue, line.ordering_key]
        if line.what == "sending":
            others = {message_id: state for message_id, state in key.items() if message_id != line.message_id}
            if "sending" in others.values():
                beside.append(line.message_id)
            # A failed message that has not been passed halts the key.
            if any(
                message_id < line.message_id and message_id not in passed and state in ("pending", "sending", "failed")
                for message_id, state in others.items()
            ):
                early.append(line.message_id)
        key[line.message_id] = line.what
        if line.what in _FINAL and not (line.what == "failed" and line.halts):
            passed.add(line.message_id)
    return {
        "begun while another message of its ordering key was in flight": beside,
        "begun before an earlier message of its ordering key was done with": early,
    }


def brought_back(lines: Sequence[Flight]) -> set[int]:
    """Return ordered messages that let later ones pass, and were redriven."""
    passed: set[int] = set()
    back: set[int] = set()
    for line in lines:
        if line.what in _FINAL and not (line.what == "failed" and line.halts):
            passed.add(line.message_id)
        elif line.what == "pending" and line.message_id in passed:
            back.add(line.message_id)
    return back


def beyond_limits(lines: Sequence[Flight], connection: psycopg.Connection) -> dict[str, list[int]]:
    """Return attempts for which there was no token, no room or no permission. The bucket is simulated again here."""
    buckets = connection.cursor(row_factory=class_row(_Bucket)).execute(_BUCKET).fetchall()
    claims: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for line in begun(lines):
        claims[line.queue, line.xid].append(line.message_id)
    limited = {bucket.queue for bucket in buckets}
    spending = Counter((bucket.queue, bucket.xid) for bucket in buckets)
    beyond = [
        message_id
        for claim, message_ids in claims.items()
        if claim[0] in limited and claim not in spending
        for message_id in message_ids
    ]
    for queue in limited:
        beyond += _overspent([bucket for bucket in buckets if bucket.queue == queue], claims)
    return {
        "begun beyond the rate of its queue": beyond,
        "begun beyond the number in flight of its queue": [line.message_id for line in begun(lines) if line.is_crowded],
        "given a turn beyond the number in flight of its key": [
            message_id
            for (message_id,) in connection.execute("SELECT t.message_id FROM soak_turn AS t WHERE present > most")
        ],
        "begun in a queue or topic that was paused": [
            *(line.message_id for line in begun(lines) if line.is_paused and line.queue in limited),
            *(message_id for (message_id,) in connection.execute("SELECT t.message_id FROM soak_trespass AS t")),
        ],
    }


def _overspent(buckets: Sequence[_Bucket], claims: dict[tuple[str, str], list[int]]) -> Iterator[int]:
    before = buckets[0]
    tokens = before.burst
    begun_at = list[float]()
    for bucket in buckets:
        tokens = min(before.burst, tokens + max(0.0, bucket.at - before.at) * before.rate, bucket.burst)
        begun_at = [at for at in begun_at if at > bucket.at - bucket.seconds + 1e-5]
        allowed = min(tokens + 0.001, bucket.most - len(begun_at))
        wanted = claims.get((bucket.queue, bucket.xid), [])
        yield from wanted[max(0, int(allowed)) :]
        tokens = max(0.0, tokens - len(wanted))
        begun_at += [bucket.at] * len(wanted)
        before = bucket


def used_up_while_open(connection: psycopg.Connection) -> list[tuple[int, float, float]]:
    """Return attempts that were used up while the breaker of their destination was open: key, begin and end."""
    return connection.execute(_USED_UP, [MAX_COOLDOWN_SECONDS, MAX_COOLDOWN_SECONDS]).fetchall()


def account(lines: Sequence[Flight], connection: psycopg.Connection) -> str:
    """Return the number of judged records."""
    counts = Counter(line.queue for line in begun(lines))
    gone = sum(line.what == "gone" and line.topic == "soak.forgotten" for line in lines)
    halted = sum(line.what == "failed" and line.halts for line in lines)
    opened = connection.execute("SELECT count(*) FROM soak_breaker WHERE what = 'opened'").fetchall()[0][0]
    webhooks = "SELECT count(*) FROM pgoutbox.message WHERE topic = 'soak.webhook' AND state = 'sent'"
    webhook_count = connection.execute(webhooks).fetchall()[0][0]
    ((turn_count,),) = connection.execute("SELECT count(*) FROM soak_turn").fetchall()
    revived = sum(line.what == "revived" for line in lines)
    return (
        f"{counts['ordered']} ordered attempts ({halted} halted their key), {counts['rated']} under a rate, "
        f"{counts['crowded']} under a number in flight, {turn_count} turns of fair keys, {webhook_count} webhooks, "
        f"{gone} deleted as they were sent, {opened} breakers opened, {revived} leases renewed after their end"
    )

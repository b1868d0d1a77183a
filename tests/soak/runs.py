"""The handlers' own account: when and in which process each attempt ran, compared with its recorded outcome.

A handler records its begin, its hand-over and its end in the ledger. An attempt without an end belongs to a killed
process; its end is unknown, and no invariant covers it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, LiteralString, NamedTuple

from tests.soak.app import EFFECT_TOPICS, THREAD_TIMEOUT_SECONDS
from tests.soak.crew import LEASE_SECONDS
from tests.support.ledger import Entries, HandOver, Run

if TYPE_CHECKING:
    import psycopg

TAKEN_OVER_SECONDS: Final = 0.5
"""The time between the last check of a lease and the first bytes on a busy machine."""
REFUSED_HAND_OVERS: Final = 2
"""How often a message may be handed over by living processes while its finish is refused: one may be suspended."""

# A transaction of the handler may roll back after its hand-over, and a transport learns of a cancel after it.
_IN_TRANSPORT: Final = ("soak.mail", "soak.webhook")
_MAY_REPEAT: Final = (*EFFECT_TOPICS, "soak.line", *_IN_TRANSPORT, "soak.errand")
_THREADED: Final = ("soak.thread", "soak.errand")

REFUSALS: Final[LiteralString] = """
CREATE TABLE soak_refusal (
    modulus   integer NOT NULL,
    remainder integer NOT NULL,
    from_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    until_at  timestamptz
);
CREATE FUNCTION soak_refuse() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $function$
BEGIN
    IF EXISTS (
        SELECT
        FROM public.soak_refusal AS r
        WHERE r.until_at IS NULL AND NEW.id % r.modulus = r.remainder
    ) THEN
        RAISE EXCEPTION 'a trigger of the user refuses message %', NEW.id USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END
$function$;
CREATE TRIGGER soak_refuse BEFORE INSERT ON pgoutbox.message_done FOR EACH ROW
    WHEN (NEW.state = 'sent') EXECUTE FUNCTION soak_refuse();

-- The attempts that handed their message over and ended as failed: their worker stopped while their finish was refused.
CREATE VIEW soak_given_up AS
SELECT a.message_id, a.attempt_count
FROM soak_attempt AS a
WHERE a.outcome = 'failed'
    AND a.error = 'it was handed over and ended sent, which the database refused to write (23514)'
    AND EXISTS (
        SELECT
        FROM soak_refusal AS r
        WHERE a.message_id % r.modulus = r.remainder AND r.from_at <= a.ended_at
    )
"""
_REFUSALS: Final = """
SELECT
    modulus, remainder, extract(epoch FROM from_at)::float8,
    extract(epoch FROM coalesce(until_at, clock_timestamp()))::float8
FROM soak_refusal
"""
_MESSAGES: Final = """
SELECT
    message.payload ->> 'ledger_key'
        || CASE WHEN content_id IS NULL THEN '' ELSE '/' || destination END AS key,
    id, topic, queue, coalesce_key, ordering_key, state, attempt_count,
    message.payload ->> 'bulk' AS bulk, (message.payload ->> 'item')::integer AS item
FROM pgoutbox.message
"""
_ENDED: Final = """
SELECT
    message_id, attempt_count, split_part(worker, ':', 2),
    extract(epoch FROM started_at)::float8, extract(epoch FROM ended_at)::float8
FROM soak_attempt
WHERE outcome IN ('retry', 'snoozed', 'released', 'failed')
"""
# The transaction of a transactional handler is older than its hand-over.
_SENT: Final = """
SELECT id, attempt_count, split_part(worker, ':', 2), extract(epoch FROM finished_at)::float8
FROM pgoutbox.message
WHERE state = 'sent' AND topic NOT LIKE 'soak.effect%' AND topic NOT LIKE '%.failed' AND worker LIKE '%:%:%'
"""
# Every attempt that the database knows: it is over, or it is the last one of its message.
_KNOWN: Final = """
SELECT id, attempt_count, split_part(worker, ':', 2) FROM pgoutbox.message WHERE worker IS NOT NULL
UNION ALL
SELECT message_id, attempt_count, split_part(worker, ':', 2) FROM soak_attempt
"""
# With the time when the same worker claimed the message again: its attempt goes on under the new number.
_TAKEN_OVER: Final = """
SELECT
    a.message_id, a.attempt_count, extract(epoch FROM a.ended_at)::float8,
    coalesce(extract(epoch FROM min(own.claimed_at)), 'infinity')::float8
FROM soak_attempt AS a
LEFT JOIN (
    SELECT id, attempt_count, worker, claimed_at FROM pgoutbox.message
    UNION ALL
    SELECT message_id, attempt_count, worker, started_at FROM soak_attempt
) AS own ON own.id = a.message_id AND own.worker = a.worker AND own.attempt_count > a.attempt_count
WHERE a.outcome = 'lost'
GROUP BY a.message_id, a.attempt_count, a.ended_at
"""
_LIMITS: Final = """
SELECT message_id, attempt_count, max_in_flight
FROM soak_flight
WHERE what = 'sending' AND queue = 'crowded' AND max_in_flight IS NOT NULL
"""
_OUTCOMES: Final = "SELECT message_id, attempt_count, outcome, extract(epoch FROM ended_at)::float8 FROM soak_attempt"


# An attempt that counted as lost, and whose process began the one that was sent. It knows what it has done.
CONTINUED: Final = """
SELECT m.id, a.attempt_count
FROM pgoutbox.message AS m
JOIN soak_attempt AS a ON a.message_id = m.id AND a.outcome = 'lost' AND a.worker = m.worker
WHERE m.state = 'sent'
"""


class _Message(NamedTuple):
    key: str
    id: int
    topic: str
    queue: str
    coalesce_key: str | None
    ordering_key: str | None
    state: str
    attempt_count: int
    bulk: str | None
    item: int | None


class Lost(NamedTuple):
    """The commits that a failover lost: all commits of these seconds. A run without a failover lost nothing."""

    from_at: float = float("inf")
    until_at: float = float("-inf")

    def covers(self, at: float) -> bool:
        """Return whether a commit at that time is lost."""
        return self.from_at <= at <= self.until_at

    def may_hide_end_of(self, hand_over: HandOver) -> bool:
        """Return whether the outcome of this hand-over may be lost: it is written later, within a lease."""
        return self.from_at - LEASE_SECONDS <= hand_over.at <= self.until_at

    def touches(self, run: Run) -> bool:
        """Return whether the begin or the end of an attempt may be lost."""
        return run.began_at <= self.until_at and (run.ended_at is None or run.ended_at >= self.from_at)

    def may_hide_claim_of(self, run: Run) -> bool:
        """Return whether its claim may be lost: a claimed message waits for its handler for less than a lease."""
        return self.from_at <= run.began_at <= self.until_at + LEASE_SECONDS


class Struck(NamedTuple):
    """The time of a fault during which leases of living workers may lapse."""

    from_at: float
    until_at: float


class _Account(NamedTuple):
    messages: Mapping[str, _Message]
    outcomes: Mapping[tuple[int, int], tuple[str, float]]
    lost: Lost
    lost_runs: Collection[Run]

    def began_lost(self, run: Run) -> bool:
        """Return whether the attempt counted as lost before its handler began: its process was suspended."""
        outcome, at = self.outcomes.get((self.messages[run.key].id, run.attempt_count), (None, 0.0))
        return outcome == "lost" and at < run.began_at

    def is_lost(self, run: Run) -> bool:
        """Return whether the attempt's lease lapsed, or a failover lost it."""
        outcome, _ = self.outcomes.get((self.messages[run.key].id, run.attempt_count), (None, 0.0))
        return outcome == "lost" or run in self.lost_runs


def install_refusals(connection: psycopg.Connection) -> None:
    """Refuse the finishes of messages whose number a row of `soak_refusal` names, from now on."""
    connection.execute(REFUSALS)


def lost_by_failover(entries: Entries, connection: psycopg.Connection, lost: Lost) -> set[Run]:
    """Return the attempts whose claim or outcome the failover may have lost.

    The database's record of such a number may belong to another attempt. An attempt that was claimed on the lost
    timeline may begin on the new one, where the database has no record of it.
    """
    id_of = {message.key: message.id for message in map(_Message._make, connection.execute(_MESSAGES))}
    known = set(connection.execute(_KNOWN).fetchall())
    return {
        run
        for run in entries.runs
        if lost.touches(run)
        or (lost.may_hide_claim_of(run) and (id_of.get(run.key), run.attempt_count, pid_of(run)) not in known)
    }


def by_runs(
    entries: Entries,
    connection: psycopg.Connection,
    lost: Lost,
    lost_runs: Collection[Run],
    struck: Sequence[Struck],
) -> dict[str, list[int]]:
    """Return the invariants of this account, each with the messages that break it."""
    account = _Account(
        {message.key: message for message in map(_Message._make, connection.execute(_MESSAGES))},
        {(message_id, count): (outcome, at) for message_id, count, outcome, at in connection.execute(_OUTCOMES)},
        lost,
        lost_runs,
    )
    runs = [run for run in entries.runs if run.key in account.messages]
    hand_overs = [hand_over for hand_over in entries.hand_over_order if hand_over.key in account.messages]
    return {
        "in flight twice at once, though its lease had not lapsed": list(_twice_at_once(runs, account)),
        "in flight beside another message of its key, whose lease had not lapsed": list(_beside(runs, account)),
        "handed over again by the process that had handed it over": list(_by_itself(hand_overs, account)),
        "succeeded after its timeout, and was not recorded as sent": list(_late(runs, hand_overs, account)),
        "in flight beside more than the limit of its queue, though no lease had lapsed": list(
            _crowded(runs, account, connection, struck)
        ),
        "begun inside a transport after another worker had taken it over": list(_too_late(runs, account, connection)),
        "handed over after a later item of its bulk": list(_out_of_line(hand_overs, account)),
        "handed over again and again while its finish was refused": list(
            _again_and_again(runs, hand_overs, account, connection.execute(_REFUSALS).fetchall())
        ),
        "ended by another than the process that handled it": list(
            _ended_by_others(runs, hand_overs, account, connection)
        ),
    }


def _overlaps(runs: Iterable[tuple[Hashable, Run]]) -> Iterator[tuple[Run, Run]]:
    """Return the pairs of one group that ran at the same time, ordered by begin."""
    open_runs: defaultdict[Hashable, list[Run]] = defaultdict(list)
    for group, run in sorted(runs, key=lambda pair: pair[1].began_at):
        still_open = [earlier for earlier in open_runs[group] if (earlier.ended_at or 0.0) > run.began_at]
        for earlier in still_open:
            yield earlier, run
        open_runs[group] = [*still_open, run]


def _twice_at_once(runs: Sequence[Run], account: _Account) -> Iterator[int]:
    """Return attempts that ran beside an attempt of the same message.

    A lapsed attempt may still run, or may begin if its process was suspended, but only in another process: a process
    knows its own attempts. After a failover, numbers repeat, so an earlier attempt may begin later."""
    for pair in _overlaps((run.key, run) for run in runs):
        former, latter = sorted(pair, key=lambda run: run.attempt_count)
        is_own = former.process == latter.process and latter.attempt_count - former.attempt_count in (0, 1)
        if is_own or not (account.is_lost(former) or pair[0] in account.lost_runs):
            yield account.messages[latter.key].id


def _beside(runs: Sequence[Run], account: _Account) -> Iterator[int]:
    def groups() -> Iterator[tuple[Hashable, Run]]:
        for run in runs:
            message = account.messages[run.key]
            if message.coalesce_key is not None:
                yield ("coalesce", message.topic, message.coalesce_key), run
            if message.ordering_key is not None:
                yield ("ordering", message.queue, message.ordering_key), run

    for earlier, later in _overlaps(groups()):
        if earlier.key != later.key and not (account.is_lost(earlier) or account.began_lost(later)):
            yield account.messages[later.key].id


def _crowded(
    runs: Sequence[Run], account: _Account, connection: psycopg.Connection, struck: Sequence[Struck]
) -> Iterator[int]:
    """Return attempts that began beside more attempts of their queue than any of their limits allowed."""
    limits = {(message_id, count): limit for message_id, count, limit in connection.execute(_LIMITS).fetchall()}
    still_open: list[tuple[Run, int]] = []
    for run in runs:
        limit = limits.get((account.messages[run.key].id, run.attempt_count))
        if limit is None or run.ended_at is None or account.is_lost(run):
            continue
        still_open = [(other, n) for other, n in still_open if (other.ended_at or 0.0) > run.began_at] + [(run, limit)]
        since = min(other.began_at for other, _ in still_open) - LEASE_SECONDS
        may_lapse = any(fault.from_at < run.began_at and fault.until_at > since for fault in struck)
        if len(still_open) > max(n for _, n in still_open) and not may_lapse:
            yield account.messages[run.key].id


def _too_late(runs: Sequence[Run], account: _Account, connection: psycopg.Connection) -> Iterator[int]:
    """Return e-mails and webhooks that began after another worker had taken over their message."""
    taken_over = {row[:2]: row[2:] for row in connection.execute(_TAKEN_OVER).fetchall()}
    for run in runs:
        message = account.messages[run.key]
        at, again_at = taken_over.get((message.id, run.attempt_count), (float("inf"), float("inf")))
        if message.topic in _IN_TRANSPORT and at + TAKEN_OVER_SECONDS < run.began_at < again_at:
            yield message.id


def _by_itself(hand_overs: Sequence[HandOver], account: _Account) -> Iterator[int]:
    process_of: dict[tuple[str, int], str] = {}
    for hand_over in hand_overs:
        message = account.messages[hand_over.key]
        former = process_of.get((hand_over.key, hand_over.attempt_count - 1))
        if former == hand_over.process and message.topic not in _MAY_REPEAT:
            yield message.id
        if not account.lost.may_hide_end_of(hand_over):
            process_of[hand_over.key, hand_over.attempt_count] = hand_over.process


def _late(runs: Sequence[Run], hand_overs: Sequence[HandOver], account: _Account) -> Iterator[int]:
    handed_over_at = {(h.key, h.attempt_count, h.process): h.at for h in hand_overs}
    for run in runs:
        message = account.messages[run.key]
        at = handed_over_at.get(run[:3], 0.0)
        if (
            message.topic == "soak.thread"
            and run.ended_at is not None
            and at > run.began_at + THREAD_TIMEOUT_SECONDS
            and (message.state, message.attempt_count) != ("sent", run.attempt_count)
            and not account.is_lost(run)
        ):
            yield message.id


def _out_of_line(hand_overs: Sequence[HandOver], account: _Account) -> Iterator[int]:
    """A lost attempt may hand over at any later time."""
    latest: dict[str, int] = {}
    for hand_over in hand_overs:
        message = account.messages[hand_over.key]
        outcome, _ = account.outcomes.get((message.id, hand_over.attempt_count), (None, 0.0))
        if message.bulk is None or message.item is None or outcome == "lost" or account.lost.covers(hand_over.at):
            continue
        if message.item < latest.get(message.bulk, 0):
            yield message.id
        latest[message.bulk] = max(message.item, latest.get(message.bulk, 0))


def _ended_by_others(
    runs: Sequence[Run], hand_overs: Sequence[HandOver], account: _Account, connection: psycopg.Connection
) -> Iterator[int]:
    """Return attempts whose outcome another process wrote.

    A worker's name contains its process number. If the database has an outcome of an attempt that has not ended, or
    has `sent` from a process that had not handed it over, another process wrote it."""
    ended = {row[:3]: row[3:] for row in connection.execute(_ENDED).fetchall()}
    for run in runs:
        message = account.messages[run.key]
        started_at, at = ended.get((message.id, run.attempt_count, pid_of(run)), (0.0, 0.0))
        # A thread keeps its message for a lease after its timeout, and then goes on without it.
        is_abandoned = message.topic in _THREADED and at - started_at >= THREAD_TIMEOUT_SECONDS + LEASE_SECONDS
        if run.ended_at is not None and run.began_at <= at < run.ended_at and not is_abandoned:
            yield message.id
    proven: defaultdict[int, list[tuple[str, int, float]]] = defaultdict(list)
    for hand_over in hand_overs:
        proof = pid_of(hand_over), hand_over.attempt_count, hand_over.at
        proven[account.messages[hand_over.key].id].append(proof)
    continued = set(connection.execute(CONTINUED).fetchall())
    for message_id, count, pid, at in connection.execute(_SENT).fetchall():
        if not any(
            # A worker continues an attempt whose claim a failover lost, or whose lease had lapsed.
            who == pid
            and when <= at
            and (number == count or (message_id, number) in continued or account.lost.from_at < when)
            for who, number, when in proven[message_id]
        ):
            yield message_id


def pid_of(entry: Run | HandOver) -> str:
    return entry.process.partition("-")[0]


def _again_and_again(
    runs: Sequence[Run],
    hand_overs: Sequence[HandOver],
    account: _Account,
    refusals: Sequence[tuple[int, int, float, float]],
) -> Iterator[int]:
    """Yield messages that were handed over too often while their finish was refused.

    A killed process cannot keep its message. This excludes transactional handlers: a refused finish rolls their effect
    back, so a retry is needed."""
    lived_until: defaultdict[str, float] = defaultdict(float)
    for run in runs:
        lived_until[run.process] = max(lived_until[run.process], run.began_at)
    others = [hand_over for hand_over in hand_overs if account.messages[hand_over.key].topic not in EFFECT_TOPICS]
    for modulus, remainder, from_at, until_at in refusals:
        former: dict[str, HandOver] = {}
        counts: Counter[int] = Counter()
        for hand_over in others:
            if from_at < hand_over.at < until_at:
                before = former.get(hand_over.key)
                if before is None or lived_until[before.process] > hand_over.at:
                    counts[account.messages[hand_over.key].id] += 1
                former[hand_over.key] = hand_over
        for message_id, count in counts.items():
            if message_id % modulus == remainder and count > REFUSED_HAND_OVERS:
                yield message_id

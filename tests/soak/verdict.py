"""The invariants after a run: the ledger's verdict, the tables, and the order of the hand-overs."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, LiteralString, NamedTuple

import psycopg
from psycopg.rows import class_row

from tests.soak.app import EFFECT_TOPICS
from tests.soak.liveness import passed_over
from tests.soak.runs import CONTINUED, Lost, Struck, by_runs, lost_by_failover, pid_of
from tests.soak.witness import Flight, account, beyond_limits, brought_back, flights, out_of_turn, used_up_while_open
from tests.support.judge import violations
from tests.support.ledger import Entries, HandOver, judge, read_entries

# Every query returns the ids of the messages that break the invariant.
INVARIANTS: Final[Mapping[str, LiteralString]] = {
    "two messages of one dedupe key": """
        SELECT max(id) FROM pgoutbox.message WHERE dedupe_key IS NOT NULL GROUP BY topic, dedupe_key HAVING count(*) > 1
    """,
    "superseded by nothing newer that exists": """
        SELECT m.id
        FROM pgoutbox.message AS m
        LEFT JOIN pgoutbox.message AS newer
            ON newer.id = m.superseded_by AND newer.topic = m.topic AND newer.coalesce_key = m.coalesce_key
        WHERE m.superseded_by IS NOT NULL AND (newer.id IS NULL OR newer.id <= m.id)
    """,
    "the newest of a key was superseded": """
        SELECT m.id
        FROM (
            SELECT max(id) AS id FROM pgoutbox.message WHERE coalesce_key IS NOT NULL GROUP BY topic, coalesce_key
        ) AS newest
        JOIN pgoutbox.message AS m ON m.id = newest.id
        WHERE m.superseded_by IS NOT NULL
    """,
    "skipped without a reason to be": """
        SELECT id
        FROM pgoutbox.message
        WHERE state = 'skipped' AND superseded_by IS NULL AND skip_reason NOT LIKE 'dismissed by %'
    """,
    "failed though its plan was to succeed": """
        SELECT m.id
        FROM pgoutbox.message AS m
        WHERE m.state = 'failed'
            AND m.payload #>> '{plan,-1}' <> 'permanent'
            AND NOT EXISTS (
                SELECT FROM soak_given_up AS g WHERE g.message_id = m.id AND g.attempt_count = m.attempt_count
            )
    """,
    "sent though its plan was to fail": """
        SELECT m.id
        FROM pgoutbox.message AS m
        WHERE m.state = 'sent' AND m.payload #>> '{plan,-1}' <> 'ok'
    """,
    "sent without its one effect in the database": """
        SELECT m.id
        FROM pgoutbox.message AS m
        LEFT JOIN soak_effect AS e ON e.message_id = m.id
        WHERE (m.topic LIKE 'soak.effect%' OR m.topic LIKE '%.failed') AND m.state = 'sent'
        GROUP BY m.id, m.attempt_count, m.worker
        HAVING count(e.message_id) <> 1 OR (
            max(e.attempt_count) <> m.attempt_count
            -- A process goes on with an attempt that counted as lost, under the number of its next one.
            AND NOT EXISTS (
                SELECT
                FROM soak_attempt AS a
                WHERE a.message_id = m.id AND a.outcome = 'lost' AND a.worker = m.worker
                    AND a.attempt_count = max(e.attempt_count)
            )
        )
    """,
    "an effect in the database without being sent": """
        SELECT e.message_id
        FROM soak_effect AS e
        LEFT JOIN pgoutbox.message AS m ON m.id = e.message_id
        WHERE m.state IS DISTINCT FROM 'sent'
    """,
    "a failure without its one message for the hook": """
        WITH failures AS MATERIALIZED (
            SELECT a.message_id, count(*) FROM soak_attempt AS a WHERE a.outcome = 'failed' GROUP BY a.message_id
        ), hooks AS MATERIALIZED (
            SELECT (m.payload ->> 'message_id')::bigint AS message_id, m.topic, count(*)
            FROM pgoutbox.message AS m
            WHERE m.topic IN ('soak.sync.failed', 'soak.batch.failed')
            GROUP BY 1, 2
        )
        SELECT m.id
        FROM pgoutbox.message AS m
        LEFT JOIN failures AS f ON f.message_id = m.id
        LEFT JOIN hooks AS h ON h.message_id = m.id AND h.topic = m.topic || '.failed'
        WHERE m.topic IN ('soak.sync', 'soak.batch') AND coalesce(f.count, 0) <> coalesce(h.count, 0)
    """,
    "a hook that did not run": """
        -- A cancel of all messages of an owner cancels the hook's message too, which has its owner.
        SELECT id
        FROM pgoutbox.message
        WHERE topic LIKE '%.failed' AND state <> 'sent' AND NOT (state = 'cancelled' AND owner IS NOT NULL)
    """,
    "an attempt that was not made is in the history": """
        SELECT a.message_id
        FROM soak_attempt AS a
        JOIN pgoutbox.message AS m ON m.id = a.message_id
        WHERE a.attempt_count > m.attempt_count
    """,
    "an attempt is missing from the history": """
        SELECT m.id
        FROM pgoutbox.message AS m
        LEFT JOIN soak_attempt AS a ON a.message_id = m.id AND a.outcome <> 'skipped'
        WHERE m.state = 'sent'
        GROUP BY m.id, m.attempt_count
        HAVING count(a.message_id) <> m.attempt_count - 1
    """,
    "a history that does not account for every attempt": """
        SELECT m.id
        FROM pgoutbox.message AS m
        WHERE m.state = 'sent'
            AND m.attempt_count - 1 <> (
                SELECT coalesce(sum(a.times), 0)
                FROM jsonb_populate_recordset(NULL::pgoutbox.attempt, m.attempts) AS a
            )
            AND coalesce(jsonb_array_length(m.attempts), 0) < 20
    """,
    "a content that no message names": """
        SELECT c.id
        FROM pgoutbox.content AS c
        WHERE NOT EXISTS (SELECT FROM pgoutbox.message AS m WHERE m.content_id = c.id)
    """,
    "a message whose content is gone": """
        SELECT m.id
        FROM pgoutbox.message AS m
        WHERE NOT EXISTS (SELECT FROM pgoutbox.content AS c WHERE c.id = m.content_id) AND m.content_id IS NOT NULL
    """,
}

_MESSAGES: Final = """
SELECT
    message.payload ->> 'ledger_key'
        || CASE WHEN content_id IS NULL THEN '' ELSE '/' || destination END AS key,
    id, topic, queue, coalesce_key, ordering_key, state,
    attempt_count,
    extract(epoch FROM finished_at)::float8 AS finished_at
FROM pgoutbox.message
WHERE topic NOT LIKE '%.failed'
"""
# An attempt whose transaction failed to commit has no effect either, and is retried. A thread continues when its
# attempt is released, which ends a message that was cancelled or superseded in the meantime.
_UNCERTAIN: Final = """
SELECT a.message_id, a.attempt_count
FROM soak_attempt AS a
JOIN pgoutbox.message AS m ON m.id = a.message_id
WHERE a.outcome IN ('lost', 'released')
    OR m.topic LIKE 'soak.effect%'
    OR (m.topic = 'soak.sync' AND a.outcome IN ('skipped', 'cancelled'))
    OR m.topic IN ('soak.errand', 'soak.mail', 'soak.webhook')
"""
# Expected exit codes: told to stop, before or after it could listen, or twice; and killed, also by a message's plan.
ENDS: Final = frozenset({0, -signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGKILL, 137})


class _Row(NamedTuple):
    key: str
    id: int
    topic: str
    queue: str
    coalesce_key: str | None
    ordering_key: str | None
    state: str
    attempt_count: int
    finished_at: float


class Line(NamedTuple):
    """One invariant, how often it is broken, and some of the messages that break it."""

    invariant: str
    broken: int
    examples: Sequence[Any]


class Balance(NamedTuple):
    """The lines of the table, and a sentence about the number of judged records."""

    lines: list[Line]
    summary: str


def balance(
    path: Path,
    connection: psycopg.Connection,
    ends: Mapping[str, Mapping[int, int]],
    lost: Lost | None = None,
    struck: Sequence[Struck] = (),
) -> Balance:
    """Judge a run whose producers and workers have stopped. `ends` counts each worker's exit codes; `lost` gives the
    time of lost commits, `struck` the times at which leases of living workers may have lapsed."""
    lost = lost or Lost()
    entries = read_entries(path)
    verdict = judge(path, connection)
    gone = {key for key in verdict.lost if lost.covers(entries.acknowledged[key])}
    lost_runs = lost_by_failover(entries, connection, lost)
    uncertain_keys = {run.key for run in lost_runs}
    verdict.lost = [key for key in verdict.lost if key not in gone]
    verdict.unexplained_duplicates = [key for key in verdict.unexplained_duplicates if key not in uncertain_keys]
    lines = [
        Line(name.replace("_", " "), len(getattr(verdict, name)), getattr(verdict, name)[:5])
        for name in (
            "lost",
            "rolled_back_delivered",
            "two_final_states",
            "sent_without_hand_over",
            "unexplained_duplicates",
            "undrained",
            "no_attempt_after_commit",
        )
    ]
    for invariant, query in INVARIANTS.items():
        broken = [row[0] for row in connection.execute(query)]
        lines.append(Line(invariant, len(broken), broken[:5]))
    seen = flights(connection)
    lines += _by_order(entries, connection, brought_back(seen), uncertain_keys)
    lines += _by_deletion(entries, seen)
    for invariant, broken in (out_of_turn(seen) | beyond_limits(seen, connection)).items():
        lines.append(Line(invariant, len(broken), broken[:5]))
    lines.append(_by_breaker(path, connection))
    for invariant, broken in by_runs(entries, connection, lost, lost_runs, struck).items():
        lines.append(Line(invariant, len(broken), broken[:5]))
    overdue = passed_over(connection)
    lines.append(Line("passed over by claims while later messages began", len(overdue), overdue[:5]))
    hung = [message_id for (message_id,) in connection.execute("SELECT message_id FROM soak_hung")]
    lines.append(Line("a cancel and a transactional handler that wait for each other", len(hung), hung[:5]))
    refused = sorted(entries.refused)
    lines.append(Line("a producer's transaction failed for want of room for a notification", len(refused), refused[:5]))
    by_itself = [
        f"{name}: {code}" for name, codes in ends.items() for code in Counter(codes).elements() if code not in ENDS
    ]
    lines.append(Line("a worker ended by itself", len(by_itself), by_itself[:5]))
    forbidden = violations(connection)
    lines.append(Line("a forbidden change of a row, or rule of the tables", len(forbidden), forbidden[:5]))
    summary = f"{str(verdict).split(';', maxsplit=1)[0]}; {account(seen, connection)}"
    return Balance(lines, f"{summary}; {len(gone)} lost by a failover" if gone else summary)


def _by_order(
    entries: Entries, connection: psycopg.Connection, redriven: Collection[int], uncertain_keys: Collection[str]
) -> list[Line]:
    """Check the order of the hand-overs. A lost attempt may hand over at any later time."""
    messages = {row.key: row for row in connection.cursor(row_factory=class_row(_Row)).execute(_MESSAGES)}
    # A failover assigns numbers twice, so such hand-overs are judged by their process.
    uncertain = set(connection.execute(_UNCERTAIN))
    given_up = set(connection.execute("SELECT message_id, attempt_count FROM soak_given_up"))
    continued = connection.execute(CONTINUED).fetchall()
    unproven = _unproven(entries, messages.values(), uncertain_keys, continued)
    unfenced: list[int] = []
    stale: list[int] = []
    overtaken: list[int] = []
    latest: dict[tuple[str, str], int] = {}
    latest_in_turn: dict[tuple[str, str], int] = {}
    for hand_over in entries.hand_over_order:
        row = messages.get(hand_over.key)
        # Without a row it is counted as rolled back, but delivered.
        if row is None or (row.id, hand_over.attempt_count) in uncertain or hand_over.key in uncertain_keys:
            continue
        is_last = row.state == "sent" and hand_over.attempt_count == row.attempt_count
        if not is_last and (row.id, hand_over.attempt_count) not in given_up:
            unfenced.append(row.id)
        if row.coalesce_key is not None:
            place = (row.topic, row.coalesce_key)
            if row.id < latest.get(place, 0):
                stale.append(row.id)
            latest[place] = max(latest.get(place, 0), row.id)
        # A message that was revived after later ones had passed it has no place in the order.
        if row.ordering_key is not None and row.id not in redriven:
            turn = (row.queue, row.ordering_key)
            if row.id < latest_in_turn.get(turn, 0):
                overtaken.append(row.id)
            latest_in_turn[turn] = max(latest_in_turn.get(turn, 0), row.id)
    return [
        Line("handed over by an attempt that neither sent nor was lost", len(unfenced), unfenced[:5]),
        Line("sent, and not handed over before by that very attempt", len(unproven), sorted(unproven)[:5]),
        Line("an older message handed over after a newer one", len(stale), stale[:5]),
        Line("an ordered message handed over after a later one of its key", len(overtaken), overtaken[:5]),
    ]


def _unproven(
    entries: Entries, rows: Iterable[_Row], uncertain_keys: Collection[str], continued: Iterable[Sequence[int]]
) -> set[int]:
    """Return sent messages that neither the sending attempt nor one that it continues had handed over before."""
    continued_counts = defaultdict(list)
    for message_id, attempt_count in continued:
        continued_counts[message_id].append(attempt_count)
    handed_over_at: dict[tuple[str, int], float] = {}
    for hand_over in entries.hand_over_order:
        handed_over_at.setdefault((hand_over.key, hand_over.attempt_count), hand_over.at)
    unproven = set()
    for row in rows:
        counts = (row.attempt_count, *continued_counts[row.id])
        at = min(handed_over_at.get((row.key, count), float("inf")) for count in counts)
        latest = time.time() if row.topic in EFFECT_TOPICS else row.finished_at
        if row.state == "sent" and at > latest and row.key not in uncertain_keys:
            unproven.add(row.id)
    return unproven


def _by_deletion(entries: Entries, seen: Sequence[Flight]) -> list[Line]:
    """Check messages that were deleted as they were sent: the attempt that deleted a message had handed it over, and
    the row was never kept. The rule is older than every worker.

    A process that had handed it over in an attempt that counted as lost ends its next attempt with that.
    """
    hand_overs: defaultdict[str, list[HandOver]] = defaultdict(list)
    for hand_over in entries.hand_over_order:
        hand_overs[hand_over.key].append(hand_over)
    last = {line.message_id: line for line in seen}
    unproven = [
        line.message_id
        for line in last.values()
        if line.topic == "soak.forgotten"
        and line.what == "gone"
        and not any(
            one.at <= line.at and (one.attempt_count == line.attempt_count or f":{pid_of(one)}:" in (line.worker or ""))
            for one in hand_overs[line.ledger_key]
        )
    ]
    kept = [line.message_id for line in seen if line.topic == "soak.forgotten" and line.what == "sent"]
    return [
        Line("deleted, and not handed over before by that very attempt", len(unproven), unproven[:5]),
        Line("sent, and kept though a rule keeps nothing of it", len(kept), kept[:5]),
    ]


def _by_breaker(path: Path, connection: psycopg.Connection) -> Line:
    """A worker that could not query, because the database was away, logs this and cannot know."""
    unasked = [
        datetime.fromisoformat(record["time"]).timestamp()
        for log in path.parent.glob("worker-*.log")
        for line in log.read_text(errors="replace").splitlines()
        if '"breaker_unknown"' in line and (record := json.loads(line))
    ]
    used_up = [
        message_id
        for message_id, started_at, ended_at in used_up_while_open(connection)
        if not any(started_at - 1 <= at <= ended_at + 1 for at in unasked)
    ]
    return Line("an attempt used up while its breaker was open", len(used_up), used_up[:5])

"""The ledger: a record outside the database of the producers' commits and the handlers' work, and the comparison with
the database.

Any number of threads and processes write to one file; each record is one append. A producer records the keys of a
transaction before it sends COMMIT, so a key without an answer has an unknown outcome. A handler records a hand-over
before its effect. A process that is killed during an append leaves half a line. Half a line is not a record, because
its action has not happened.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal, NamedTuple, Self

import psycopg
from psycopg.rows import class_row

LEDGER_VARIABLE: Final = "LEDGER"
"""The environment variable with the file that the processes of a test write to."""

KEY: Final = "ledger_key"
"""The name of the ledger key in a message's payload, which is a JSON object."""

Entry = Literal["intended", "acknowledged", "rolled_back", "refused", "began", "handed_over", "ended"]

# A row that moves to another partition fires the trigger as an insert, and one that stays fires it as an update. This
# table is the database's own record of final states, and outlives the messages that retention deletes.
_AUDIT: Final = """
CREATE TABLE IF NOT EXISTS public.ledger_audit (
    seq        bigserial PRIMARY KEY,
    message_id bigint NOT NULL,
    ledger_key text   NOT NULL,
    state      text   NOT NULL
);
CREATE OR REPLACE FUNCTION public.ledger_note() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $function$
DECLARE
    seen constant pgoutbox.message := NEW;
    payload constant jsonb := seen.payload;
BEGIN
    IF payload ? 'ledger_key' THEN
        INSERT INTO public.ledger_audit (message_id, ledger_key, state)
        VALUES (
            seen.id,
            payload ->> 'ledger_key' || CASE WHEN seen.content_id IS NULL THEN '' ELSE '/' || seen.destination END,
            seen.state
        );
    END IF;
    RETURN NULL;
END
$function$;
CREATE OR REPLACE TRIGGER ledger_entered AFTER INSERT ON pgoutbox.message
    FOR EACH ROW WHEN (NEW.payload IS NULL OR NEW.payload ? 'ledger_key') EXECUTE FUNCTION public.ledger_note();
CREATE OR REPLACE TRIGGER ledger_changed AFTER UPDATE ON pgoutbox.message
    FOR EACH ROW WHEN (
        (NEW.payload IS NULL OR NEW.payload ? 'ledger_key') AND NEW.state NOT IN ('pending', 'sending')
    )
    EXECUTE FUNCTION public.ledger_note();
"""

# The messages of a fan-out share one payload, so the key of each includes its destination.
_ROWS: Final = """
SELECT
    m.id,
    m.payload ->> 'ledger_key' || CASE WHEN m.content_id IS NULL THEN '' ELSE '/' || m.destination END,
    m.state
FROM pgoutbox.message AS m
WHERE m.payload ? 'ledger_key'
"""
_AUDITED: Final = "SELECT message_id, ledger_key, state FROM public.ledger_audit ORDER BY message_id, seq"
_ENDED_ATTEMPTS: Final = """
SELECT
    m.payload ->> 'ledger_key' || CASE WHEN m.content_id IS NULL THEN '' ELSE '/' || m.destination END,
    -- Like ends in a row are one entry, with the number of the last one.
    generate_series(a.attempt_count - a.times + 1, a.attempt_count)
FROM pgoutbox.attempt_view AS a
JOIN pgoutbox.message AS m ON m.id = a.message_id
WHERE m.payload ? 'ledger_key' AND a.outcome <> 'sent'
"""
# A cancelled or expired message needs no attempt.
_COALESCED: Final = """
SELECT
    id,
    message.payload ->> 'ledger_key' AS key,
    state = 'cancelled' OR skip_reason IS NOT DISTINCT FROM 'expired' AS is_excused,
    superseded_by
FROM pgoutbox.message
WHERE message.payload ? 'ledger_key' AND coalesce_key IS NOT NULL
ORDER BY id DESC
"""
_OWED: Final = """
SELECT count(*)
FROM pgoutbox.message AS m
WHERE m.state IN ('pending', 'sending') AND m.payload ? 'ledger_key'
"""

_OPEN_STATES: Final = frozenset({"pending", "sending"})
_REDRIVABLE_STATES: Final = frozenset({"failed", "cancelled"})
_DISMISSED: Final = ("failed", "skipped")
_SHOWN_KEYS: Final = 5


class Ledger:
    """Appends to the file. Threads can share one object; other processes open their own."""

    def __init__(self, path: Path, *, fsync: bool = True) -> None:
        self.path = path
        self._fsync = fsync
        self._token = secrets.token_hex(4)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; nothing is buffered."""
        os.close(self._fd)

    @contextlib.contextmanager
    def committing(self, connection: psycopg.Connection, *keys: str) -> Iterator[None]:
        """Commit `connection`, which enqueues the messages of these keys, at the end of the block, and record the
        result.

        If the block raises, nothing was committed. If the commit raises, the outcome is unknown. Both errors are raised
        again, after a rollback if the connection is alive.
        """
        try:
            yield
            # Recorded before COMMIT is sent: from here on only its answer can tell the outcome.
            self.write("intended", *keys)
        except BaseException:
            self.write("rolled_back", *keys)
            if not connection.closed:
                connection.rollback()
            raise
        connection.commit()
        self.write("acknowledged", *keys)

    @contextlib.contextmanager
    def rolling_back(self, connection: psycopg.Connection, *keys: str) -> Iterator[None]:
        """Roll back `connection`, which enqueues the messages of these keys, at the end of the block."""
        self.write("rolled_back", *keys)
        try:
            yield
        finally:
            if not connection.closed:
                connection.rollback()

    def hand_over(self, payload: object, attempt_count: int) -> None:
        """Record that a handler is about to deliver the message with this payload."""
        self.write("handed_over", _key_of(payload), attempt_count=attempt_count)

    @contextlib.contextmanager
    def running(self, payload: object, attempt_count: int) -> Iterator[None]:
        """Record when a handler begins and ends an attempt. A killed process leaves an attempt without an end."""
        key = _key_of(payload)
        self._append("began", key, attempt_count=attempt_count)
        try:
            yield
        finally:
            self._append("ended", key, attempt_count=attempt_count)

    def write(self, entry: Entry, *keys: str, attempt_count: int | None = None) -> None:
        """Append one record. When this returns, the record is on disk."""
        self._append(entry, *keys, attempt_count=attempt_count)
        if self._fsync:
            os.fsync(self._fd)

    def _append(self, entry: Entry, *keys: str, attempt_count: int | None) -> None:
        record: dict[str, object] = {"entry": entry, "keys": keys, "at": time.time()}
        if attempt_count is not None:
            record |= {"attempt_count": attempt_count, "process": f"{os.getpid()}-{self._token}"}
        # The newline comes first, so that the half line of a killed process does not corrupt this record.
        line = b"\n" + json.dumps(record).encode()
        if os.write(self._fd, line) != len(line):
            raise OSError(f"could not append to {self.path}")


def _key_of(payload: object) -> str:
    assert isinstance(payload, Mapping), f"not a payload with a ledger key: {payload!r}"
    return str(payload[KEY])


@functools.cache
def told_ledger() -> Ledger:
    """Return the ledger that the environment names, for a process that a test starts."""
    return Ledger(Path(os.environ[LEDGER_VARIABLE]))


class HandOver(NamedTuple):
    """One delivery. `at` is the machine's clock, in seconds since 1970."""

    key: str
    attempt_count: int
    at: float
    process: str


class Run(NamedTuple):
    """The time in which the handler of one attempt ran. The end is unknown if its process was killed."""

    key: str
    attempt_count: int
    process: str
    began_at: float
    ended_at: float | None


@dataclass(frozen=True, slots=True)
class Entries:
    """The contents of a ledger file. Keys in none of the three sets never reached a commit."""

    intended: Mapping[str, float]
    """The time of the first commit attempt of each key. The commit did not happen earlier."""
    acknowledged: Mapping[str, float]
    """The time of the acknowledgement of each key."""
    unknown: frozenset[str]
    rolled_back: frozenset[str]
    refused: frozenset[str]
    """Keys whose transaction failed because the server's notification queue was full."""
    hand_overs: Mapping[str, Sequence[int]]
    """For each key, the attempts that handed it over, in file order."""
    hand_over_order: Sequence[HandOver]
    """Every hand-over in file order, which is the order of the appends."""
    runs: Sequence[Run]
    """Every attempt whose handler records its begin and end, ordered by begin."""


def read_entries(path: Path) -> Entries:
    """Read a ledger file. Other processes may still append to it."""
    keys_of: defaultdict[str, set[str]] = defaultdict(set)
    hand_overs: defaultdict[str, list[int]] = defaultdict(list)
    order: list[HandOver] = []
    intended: dict[str, float] = {}
    acknowledged: dict[str, float] = {}
    runs: list[Run] = []
    open_runs: dict[tuple[str, int, str], int] = {}
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # Half a line, or the empty line before the first record.
        if "attempt_count" not in record:
            match record["entry"]:
                case "intended":
                    for key in record["keys"]:
                        intended.setdefault(key, record["at"])
                case "acknowledged":
                    acknowledged |= dict.fromkeys(record["keys"], record["at"])
                case entry:
                    keys_of[entry].update(record["keys"])
            continue
        attempt = record["keys"][0], record["attempt_count"], record["process"]
        match record["entry"]:
            case "handed_over":
                hand_overs[record["keys"][0]].append(record["attempt_count"])
                order.append(HandOver(*attempt[:2], record["at"], record["process"]))
            case "began":
                open_runs[attempt] = len(runs)
                runs.append(Run(*attempt, record["at"], None))
            case "ended":
                number = open_runs[attempt]
                runs[number] = runs[number]._replace(ended_at=record["at"])
    rolled_back = keys_of["rolled_back"]
    return Entries(
        intended=intended,
        acknowledged=acknowledged,
        unknown=frozenset(intended.keys() - acknowledged.keys() - rolled_back),
        rolled_back=frozenset(rolled_back),
        refused=frozenset(keys_of["refused"]),
        hand_overs=dict(hand_overs),
        hand_over_order=order,
        runs=runs,
    )


@dataclass(slots=True)
class Verdict:
    """The result of the comparison. Each list has the keys of the messages that break the invariant of its name."""

    acknowledged_count: int = 0
    unknown_count: int = 0
    unknown_committed_count: int = 0
    rolled_back_count: int = 0
    hand_over_count: int = 0
    duplicate_count: int = 0
    """Hand-overs beyond each message's first."""
    states: Counter[str] = field(default_factory=Counter)

    lost: list[str] = field(default_factory=list)
    """Acknowledged, but missing in the database."""
    rolled_back_delivered: list[str] = field(default_factory=list)
    """Rolled back or never committed, but in the database or handed over."""
    two_final_states: list[str] = field(default_factory=list)
    """Two rows, or two final states without a redrive between them."""
    sent_without_hand_over: list[str] = field(default_factory=list)
    unexplained_duplicates: list[str] = field(default_factory=list)
    """Handed over twice by one attempt, or again without an earlier attempt that is recorded as not sent."""
    undrained: list[str] = field(default_factory=list)
    """In the database, but not in a final state."""
    no_attempt_after_commit: list[str] = field(default_factory=list)
    """With a coalesce key, but no attempt of the message or of its superseding messages began after the commit."""

    @property
    def violations(self) -> dict[str, list[str]]:
        """Return the broken invariants, with the keys that break them."""
        every = {
            "lost": self.lost,
            "rolled_back_delivered": self.rolled_back_delivered,
            "two_final_states": self.two_final_states,
            "sent_without_hand_over": self.sent_without_hand_over,
            "unexplained_duplicates": self.unexplained_duplicates,
            "undrained": self.undrained,
            "no_attempt_after_commit": self.no_attempt_after_commit,
        }
        return {name: keys for name, keys in every.items() if keys}

    def __str__(self) -> str:
        broken = [f"{name}: {len(keys)} {keys[:_SHOWN_KEYS]}" for name, keys in self.violations.items()]
        states = ", ".join(f"{state} {count}" for state, count in sorted(self.states.items()))
        return (
            f"{self.acknowledged_count} acknowledged, {self.unknown_count} unknown "
            f"({self.unknown_committed_count} of them committed), {self.rolled_back_count} rolled back, "
            f"{self.hand_over_count} handed over ({self.duplicate_count} again); {states}; "
            + ("; ".join(broken) if broken else "the books agree")
        )


def install_audit(connection: psycopg.Connection) -> None:
    """Make the database record every final state of a message; without this record an overwritten final state is
    invisible.

    Call it before the first enqueue, in a database that only this test uses."""
    connection.execute(_AUDIT)


def owed_count(connection: psycopg.Connection) -> int:
    """Count the messages of the ledger that have not reached a final state."""
    row = connection.execute(_OWED).fetchone()
    return 0 if row is None else int(row[0])


def judge(path: Path, connection: psycopg.Connection) -> Verdict:
    """Compare the ledger file with the database after producers and workers have stopped."""
    entries = read_entries(path)
    ids_of: defaultdict[str, set[int]] = defaultdict(set)
    states: list[tuple[str, str]] = []
    for message_id, key, state in connection.execute(_ROWS):
        ids_of[key].add(message_id)
        states.append((key, state))
    histories = _histories(connection)
    for message_id, (key, _) in histories.items():
        ids_of[key].add(message_id)
    ended: defaultdict[str, set[int]] = defaultdict(set)
    for key, attempt_count in connection.execute(_ENDED_ATTEMPTS):
        ended[key].add(attempt_count)

    row_counts = Counter(key for key, _ in states)
    committed = entries.acknowledged.keys() | entries.unknown
    present = set(ids_of)
    return Verdict(
        acknowledged_count=len(entries.acknowledged),
        unknown_count=len(entries.unknown),
        unknown_committed_count=len(entries.unknown & present),
        rolled_back_count=len(entries.rolled_back),
        hand_over_count=sum(map(len, entries.hand_overs.values())),
        duplicate_count=sum(len(attempts) - 1 for attempts in entries.hand_overs.values()),
        states=Counter(state for _, state in states),
        lost=sorted(entries.acknowledged.keys() - present),
        rolled_back_delivered=sorted((present | set(entries.hand_overs)) - committed),
        two_final_states=sorted(
            {key for key, count in row_counts.items() if count > 1}
            | {key for key, ids in ids_of.items() if len(ids) > 1}
            | {key for key, history in histories.values() if _ended_twice(history)}
        ),
        sent_without_hand_over=sorted({k for k, state in states if state == "sent" and k not in entries.hand_overs}),
        unexplained_duplicates=sorted(
            key
            for key, attempts in entries.hand_overs.items()
            if len(set(attempts)) < len(attempts)
            or (key in row_counts and not set(attempts) - {max(attempts)} <= ended[key])
        ),
        undrained=sorted({key for key, state in states if state in _OPEN_STATES}),
        no_attempt_after_commit=sorted(_without_attempt(entries, connection)),
    )


class _Coalesced(NamedTuple):
    id: int
    key: str
    is_excused: bool
    superseded_by: int | None


def _without_attempt(entries: Entries, connection: psycopg.Connection) -> Iterator[str]:
    """Return the keys of messages with a coalesce key for which no attempt began after their commit.

    For a superseded message, the message at the end of its chain counts. An attempt of another message of the key does
    not count: it would not have begun if this message had been the last one.
    """
    latest: dict[str, float] = {}
    for key, at in _beginnings(entries):
        latest[key] = max(at, latest.get(key, at))
    last_of: dict[int | None, _Coalesced] = {}
    for message in connection.cursor(row_factory=class_row(_Coalesced)).execute(_COALESCED):
        last = last_of[message.id] = last_of.get(message.superseded_by, message)
        began_at = max(latest.get(key, float("-inf")) for key in (message.key, last.key))
        if began_at < entries.intended.get(message.key, float("-inf")) and not last.is_excused:
            yield message.key


def _beginnings(entries: Entries) -> Iterator[tuple[str, float]]:
    """Return when the attempts of each key began. A handler that does not record its begin hands over immediately."""
    noted = {(run.key, run.attempt_count, run.process) for run in entries.runs}
    yield from ((run.key, run.began_at) for run in entries.runs)
    for hand_over in entries.hand_over_order:
        if (hand_over.key, hand_over.attempt_count, hand_over.process) not in noted:
            yield hand_over.key, hand_over.at


def _histories(connection: psycopg.Connection) -> dict[int, tuple[str, list[str]]]:
    """Return each message's key and, if the database recorded them, the states that it reached."""
    histories: dict[int, tuple[str, list[str]]] = {}
    row = connection.execute("SELECT to_regclass('public.ledger_audit') IS NOT NULL").fetchone()
    if row is not None and row[0]:
        for message_id, key, state in connection.execute(_AUDITED):
            histories.setdefault(message_id, (key, []))[1].append(state)
    return histories


def _ended_twice(history: Sequence[str]) -> bool:
    return any(
        former not in _OPEN_STATES
        and (former not in _REDRIVABLE_STATES or state not in _OPEN_STATES)
        and (former, state) != _DISMISSED
        for former, state in pairwise(history)
    )

"""Deletion of messages, by age at an operator's request and by the retention rules, and the partitions for it.

Each batch is committed separately, so that an interruption loses no reported result. A partition of `message_done` is
dropped when no rule keeps any of its messages. The wait for its lock is short.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, LiteralString, NamedTuple, cast

import psycopg
from psycopg.errors import LockNotAvailable
from psycopg.rows import TupleRow
from pydantic import JsonValue

from pgoutbox.database import sql
from pgoutbox.database.operator_connection import fetch
from pgoutbox.errors import ConfigurationError, StateError
from pgoutbox.message import FINAL_STATES, State
from pgoutbox.operations.records import Progress, PruneTotals, RetentionRule

PRUNED_BY_DEFAULT: Final = (State.SENT, State.SKIPPED, State.CANCELLED)
MAX_AGE: Final = timedelta(days=36_500)
DEDUPE_KEY: Final = "dedupe_key"
AUDIT: Final = "audit"
AUDIT_AT_LEAST: Final = timedelta(days=30)
RETAINED: Final = (*(state.value for state in State if state in FINAL_STATES), DEDUPE_KEY, AUDIT)

PRUNE_BATCH: Final = 5_000
_DAYS_AHEAD: Final = timedelta(days=7)
# A partition is dropped as a whole, and not emptied before, if that keeps a message at most this much longer than its
# rule, as a fraction of the rule's time.
_MOST_DROP_DELAY: Final = 0.25
_DROP_GRACE: Final = timedelta(hours=1)  # A partition that is still not dropped this long after its end is emptied.
_COMMIT_DELAY: Final = timedelta(hours=1)  # A message that was finished this long ago is committed by now.
_LOCK_TRIALS: Final = 5
_LOCK_PAUSE_SECONDS: Final = 1.0
_KEYS_EVERY_SECONDS: Final = 3_600.0
_REMEMBERED_SECONDS: Final = 86_400.0
_CLOCK_TOLERANCE_DAYS: Final = 1.0


# Runs one statement in a transaction of its own. An operator's is recorded in the audit.
Run = Callable[[LiteralString, Mapping[str, object]], list[TupleRow]]


class Partition(NamedTuple):
    """A partition of `message_done`, with the messages that ended from `lower_at` until before `upper_at`."""

    name: str
    lower_at: datetime
    upper_at: datetime


class MaintenanceFacts(NamedTuple):
    """The facts at the start of a turn of maintenance: the database's time, its partitions and its rules."""

    asked_at: datetime
    default_bytes: int
    partitions: Sequence[Partition]
    rules: Sequence[RetentionRule]

    @classmethod
    def of_row(cls, row: TupleRow) -> MaintenanceFacts:
        """Return the facts from the columns of `sql.MAINTENANCE_FACTS`."""
        asked_at, default_bytes, names, lowers, uppers, topics, states, keeps = row
        keep_of = [None if seconds is None else timedelta(seconds=seconds) for seconds in keeps or ()]
        return cls(
            asked_at,
            default_bytes,
            [Partition(*found) for found in zip(names or (), lowers or (), uppers or (), strict=True)],
            [RetentionRule(*found) for found in zip(topics or (), states or (), keep_of, strict=True)],
        )

    @property
    def lacks_partition(self) -> bool:
        """Whether one of the next days has no partition yet, regardless of the end of the last partition."""
        covered_until = today = self.asked_at.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        for partition in self.partitions:
            if partition.lower_at <= covered_until:
                covered_until = max(covered_until, partition.upper_at)
        return covered_until < today + _DAYS_AHEAD


def read_maintenance_facts(connection: psycopg.Connection[TupleRow]) -> MaintenanceFacts:
    """Return the current facts."""
    (row,) = fetch(connection, sql.MAINTENANCE_FACTS, {})
    return MaintenanceFacts.of_row(row)


@dataclass(slots=True)
class PartitionCache:
    """The knowledge of earlier turns about partitions. It is valid for a day, and while the rules stay the same.

    `kept_until` has the retention end of each closed partition, by its name. `done_until` is the time up to which a
    rule has been applied to a partition. `passes` holds the unfinished passes over tables of keys, page by page: the
    statement of each, with the last key that it has read. If this is lost, the pass starts again.
    """

    rules: Sequence[RetentionRule] = ()
    kept_until: dict[str, datetime] = field(default_factory=dict)
    done_until: dict[tuple[str, RetentionRule], datetime] = field(default_factory=dict)
    began_at: float = -math.inf
    keys_at: float = -math.inf
    passes: dict[LiteralString, tuple[str, str]] = field(default_factory=dict)

    def refresh(self, rules: Sequence[RetentionRule]) -> None:
        """Forget outdated knowledge."""
        if self.rules != rules or time.monotonic() - self.began_at > _REMEMBERED_SECONDS:
            self.rules = rules
            self.kept_until.clear()
            self.done_until.clear()
            self.began_at = time.monotonic()


class Deletion(NamedTuple):
    """Messages to delete row by row: those of a rule that ended from `since` until before `until`.

    `partition` is the name of the partition with this time; an empty name stands for all tables outside of them.
    """

    rule: RetentionRule
    since: datetime
    until: datetime
    partition: str = ""


class MaintenancePlan(NamedTuple):
    """The work on messages and partitions, as far as it is known without a query.

    The retention end of the partitions in `check` is unknown: the plan is made again when it has been read.
    """

    check: list[Partition]
    drop: list[Partition]
    delete: list[Deletion]


def plan_maintenance(
    facts: MaintenanceFacts, cache: PartitionCache, dropped: Collection[str] = frozenset()
) -> MaintenancePlan:
    """Return the work that is due at the time of the facts. `dropped` partitions were dropped since then."""
    now = facts.asked_at
    partitions = [partition for partition in facts.partitions if partition.name not in dropped]
    past = [partition for partition in partitions if partition.upper_at <= now]
    keeps = [rule.keep for rule in facts.rules if rule.keep is not None and rule.state in PRUNED_BY_DEFAULT]
    return MaintenancePlan(
        check=[p for p in past if p.name not in cache.kept_until and any(p.lower_at + keep <= now for keep in keeps)],
        drop=[p for p in past if p.name in cache.kept_until and cache.kept_until[p.name] <= now],
        delete=list(_deletions(facts, cache, partitions)),
    )


def _deletions(facts: MaintenanceFacts, cache: PartitionCache, partitions: Sequence[Partition]) -> Iterator[Deletion]:
    for rule in facts.rules:
        if rule.state == State.FAILED and rule.keep is not None:
            yield Deletion(rule, _BEGINNING, _END)
    for rule in facts.rules:
        if rule.state not in PRUNED_BY_DEFAULT or rule.keep is None:
            continue
        if facts.default_bytes:
            yield from (Deletion(rule, since, until) for since, until in _gaps(facts))
        for partition in partitions:
            since = max(partition.lower_at, cache.done_until.get((partition.name, rule), partition.lower_at))
            if (
                since < partition.upper_at
                and partition.lower_at + rule.keep <= facts.asked_at
                and not _is_dropped_soon(partition, rule.keep, cache.kept_until.get(partition.name), facts.asked_at)
            ):
                yield Deletion(rule, since, partition.upper_at, partition.name)


def _is_dropped_soon(partition: Partition, keep: timedelta, kept_until: datetime | None, now: datetime) -> bool:
    """Whether the drop of the partition replaces the deletion of its rows by a rule, without much delay."""
    return (
        kept_until is not None
        and partition.upper_at - partition.lower_at <= keep * _MOST_DROP_DELAY
        and kept_until <= partition.upper_at + keep
        and now < kept_until + _DROP_GRACE
    )


def _gaps(facts: MaintenanceFacts) -> Iterator[tuple[datetime, datetime]]:
    """Return the ranges of time without a partition. Their messages are in the default partition."""
    after = _BEGINNING
    for partition in facts.partitions:
        if partition.lower_at > after:
            yield after, partition.lower_at
        after = partition.upper_at
    if after <= facts.asked_at:
        yield after, _END


_BEGINNING: Final = datetime(1, 1, 1, tzinfo=UTC)
_END: Final = datetime(9999, 1, 1, tzinfo=UTC)


class MaintenanceRun:
    """One turn of maintenance: it executes the plan to its end, or until `is_over`, checked between transactions.

    If the database's clock is more than a day ahead of this machine's, the turn deletes nothing, because messages may
    seem older than they are. `errors` reports that, and statements that PostgreSQL refused; the other steps run anyway.
    The turn of an operator passes `write`, which runs the deletions.
    """

    def __init__(
        self,
        facts: MaintenanceFacts,
        cache: PartitionCache,
        *,
        batch_size: int = PRUNE_BATCH,
        is_over: Callable[[], bool] = lambda: False,
        pause: Callable[[float], object] = time.sleep,
        progress: Progress | None = None,
        write: Run | None = None,
    ) -> None:
        self.errors: list[psycopg.Error | ConfigurationError] = []
        self._facts = facts
        self._cache = cache
        self._limit = {"limit": batch_size}
        self._is_over = is_over
        self._pause = pause
        self._progress = progress or (lambda _: None)
        self._is_workers = write is None
        self._write = write or self._fetch
        self._dropped: set[str] = set()
        self._deleted: Counter[State] = Counter()
        self._counts = Counter(key_heads=0)
        cache.refresh(facts.rules)

    @property
    def totals(self) -> PruneTotals:
        """The work done so far."""
        return PruneTotals(dict(self._deleted), **self._counts)

    @property
    def has_work(self) -> bool:
        """Whether there may be work, as far as is known without a query."""
        return self._facts.lacks_partition or self._keys_are_due() or any(self._plan())

    def take(self, connection: psycopg.Connection[TupleRow]) -> None:
        """Run the turn. It raises only errors that ended the connection."""
        self._connection = connection
        steps = [self._make, self._check, self._drop, self._delete, self._forget_keys]
        days_ahead = (self._facts.asked_at - datetime.now(UTC)) / timedelta(days=1)
        if days_ahead > _CLOCK_TOLERANCE_DAYS:
            steps = steps[:1]
            self.errors.append(
                ConfigurationError(
                    f"the database's clock is {days_ahead:.0f} days ahead of this machine's, so nothing is deleted; "
                    "synchronise both by NTP"
                )
            )
        for step in steps:
            if self._is_over():
                return
            try:
                step()
            except psycopg.Error as error:
                if connection.broken or connection.closed:
                    raise
                self.errors.append(error)

    def _plan(self) -> MaintenancePlan:
        return plan_maintenance(self._facts, self._cache, self._dropped)

    def _make(self) -> None:
        while self._facts.lacks_partition and not self._is_over():
            if self._with_retries(self._fetch, sql.MAKE_PARTITION) is None:
                break
            self._counts["partitions_made"] += 1

    def _check(self) -> None:
        """Read until when the rules keep the messages of each partition."""
        for partition in self._plan().check:
            if self._is_over():
                break
            ((kept_until,),) = self._fetch(sql.KEPT_UNTIL, partition._asdict())
            self._cache.kept_until[partition.name] = kept_until

    def _drop(self) -> None:
        for partition in self._plan().drop:
            if self._is_over():
                break
            answer = self._with_retries(self._write, sql.DROP_PARTITION, name=partition.name)
            if answer is None or answer == "busy":
                break  # If one partition is locked, the others are too.
            if answer != "kept":
                self._dropped.add(partition.name)
                self._counts["partitions_dropped"] += answer == "dropped"
            self._cache.kept_until.pop(partition.name, None)  # `kept`: its retention has changed.

    def _with_retries(self, run: Run, statement: LiteralString, **parameters: object) -> str | None:
        """Return the answer of the statement; None if every try met a lock of another transaction.

        Each try waits only briefly for the lock, because others queue behind it. They proceed between two tries.
        """
        for trial in range(_LOCK_TRIALS):
            if trial and not self._is_over():
                self._pause(_LOCK_PAUSE_SECONDS)
            if self._is_over():
                break
            with contextlib.suppress(LockNotAvailable):
                ((answer,),) = run(statement, parameters)
                return cast("str | None", answer)
        return None

    def _delete(self) -> None:
        for rule, since, until, partition in self._plan().delete:
            parameters = {"topic": rule.topic, "state": rule.state, "since": since, "until": until} | self._limit
            if not _delete_batches(
                self._write,
                sql.PRUNE_BY_RULE,
                parameters,
                self._deleted,
                self._progress,
                self._is_over,
            ):
                break
            if partition and rule.keep is not None:
                # Messages committed even later are deleted a day later, when the cache is refreshed.
                ended = self._facts.asked_at - rule.keep
                self._cache.done_until[partition, rule] = until if until <= ended else ended - _COMMIT_DELAY

    def _keys_are_due(self) -> bool:
        return bool(self._cache.passes) or time.monotonic() - self._cache.keys_at > _KEYS_EVERY_SECONDS

    def _forget_keys(self) -> None:
        if not self._keys_are_due():
            return
        passes = self._cache.passes
        if not passes:
            if self._is_workers:  # Only workers have the right.
                self._fetch(sql.FORGET_REQUESTS)
            if any(rule.state == AUDIT for rule in self._facts.rules):
                passes[sql.PRUNE_AUDIT] = _FIRST_PAGE
            passes.update(dict.fromkeys((sql.PRUNE_DEDUPE_BY_RULE, *_PASSES), _FIRST_PAGE))
            self._cache.keys_at = time.monotonic()
        forgotten = _take_passes(self._fetch, passes, self._limit, self._is_over)
        self._counts["key_heads"] = forgotten[sql.PRUNE_KEYS]
        self._counts["dedupe_keys"] = forgotten[sql.PRUNE_DEDUPE_BY_RULE]
        self._counts["acts"] = forgotten[sql.PRUNE_AUDIT]

    def _fetch(self, statement: LiteralString, parameters: Mapping[str, object] | None = None) -> list[TupleRow]:
        return fetch(self._connection, statement, parameters or {})


def prune(
    connection: psycopg.Connection[TupleRow], parameters: Mapping[str, object], write: Run, progress: Progress | None
) -> PruneTotals:
    """Delete final messages by age with `write`, and then keys and contents without a message."""
    deleted: Counter[State] = Counter()
    _delete_batches(write, sql.PRUNE, parameters, deleted, progress)
    passes = dict.fromkeys(_PASSES, _FIRST_PAGE)
    if State.SENT in cast("Collection[str]", parameters["states"]):
        passes[sql.PRUNE_DEDUPE] = _FIRST_PAGE
    forgotten = _take_passes(functools.partial(fetch, connection), passes, parameters)
    return PruneTotals(dict(deleted), forgotten[sql.PRUNE_KEYS], forgotten[sql.PRUNE_DEDUPE])


def _delete_batches(
    write: Run,
    statement: LiteralString,
    parameters: Mapping[str, object],
    deleted: Counter[State],
    progress: Progress | None,
    is_over: Callable[[], bool] = lambda: False,
) -> bool:
    """Delete batch by batch. Return whether it reached the end."""
    while not is_over():
        rows = write(statement, parameters)
        deleted.update(State(state) for (state,) in rows)
        if rows and progress is not None:
            progress(deleted.total())
        if len(rows) < cast("int", parameters["limit"]):
            return True
    return False


def _take_passes(
    run: Run,
    passes: dict[LiteralString, tuple[str, str]],
    parameters: Mapping[str, object],
    is_over: Callable[[], bool] = lambda: False,
) -> Counter[LiteralString]:
    """Run each pass page by page, until it ends or `is_over`. Return the number of deleted keys by statement.

    A pass that ends is removed from `passes`. Each page is committed by itself.
    """
    forgotten: Counter[LiteralString] = Counter()
    while passes and not is_over():
        statement, (scope, key) = next(iter(passes.items()))
        rows = run(statement, {**parameters, "after_scope": scope, "after_key": key})
        if not rows:
            del passes[statement]
            continue
        ((last_scope, last_key, key_count, forgotten_count),) = rows
        forgotten[statement] += forgotten_count
        passes[statement] = last_scope, last_key
        if key_count < cast("int", parameters["limit"]):
            del passes[statement]
    return forgotten


_FIRST_PAGE: Final = ("", "")
_PASSES: Final = (sql.PRUNE_KEYS, sql.PRUNE_CONTENT)


def prune_parameters(older_than: timedelta, states: Collection[State], topic: str | None) -> dict[str, JsonValue]:
    """Return the parameters of PRUNE. Raises `ConfigurationError` or `StateError`."""
    if not timedelta() < older_than <= MAX_AGE:
        raise ConfigurationError(f"older_than={older_than}: must be positive and at most {MAX_AGE.days} days")
    for state in states:
        if state not in FINAL_STATES:
            raise StateError(f"messages in state {state} are not final; cancel them instead")
    return {
        "states": [state.value for state in sorted(states)],
        "older_than_seconds": older_than.total_seconds(),
        "topic": topic,
    }

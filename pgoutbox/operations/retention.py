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
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Final, LiteralString, NamedTuple, cast

import psycopg
from psycopg.errors import LockNotAvailable
from psycopg.rows import TupleRow

from pgoutbox.database import sql
from pgoutbox.database.operator_connection import Progress, fetch, transact
from pgoutbox.errors import ConfigurationError, PayloadError, StateError
from pgoutbox.message import FINAL_STATES, State
from pgoutbox.operations.audit import OperatorAction
from pgoutbox.options import check_name

PRUNED_BY_DEFAULT: Final = frozenset({State.SENT, State.SKIPPED, State.CANCELLED})
MAX_AGE: Final = timedelta(days=36_500)
DEDUPE_KEY: Final = "dedupe_key"
RETAINED: Final = (*(state.value for state in State if state in FINAL_STATES), DEDUPE_KEY)

_PRUNE_BATCH: Final = 5_000
_PARTITIONED_BY_TIME: Final = frozenset({State.SENT.value, State.SKIPPED.value, State.CANCELLED.value})
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


@dataclass(frozen=True, slots=True)
class PruneTotals:
    """The number of deleted messages by state, and the number of deleted keys without a message.

    The messages of dropped partitions are not counted, because they are not read.
    """

    messages: Mapping[State, int]
    coalesce_keys: int
    dedupe_keys: int = 0
    partitions_made: int = 0
    partitions_dropped: int = 0

    @property
    def total(self) -> int:
        """The number of deleted messages in all states."""
        return sum(self.messages.values())


class RetentionRule(NamedTuple):
    """How long final messages of a topic, or of `*`, are kept in one state; None means forever.

    The state is a final one, or `dedupe_key` for the dedupe keys of deleted messages.
    """

    topic: str
    state: str
    keep: timedelta | None


def count_prunable(
    connection: psycopg.Connection[TupleRow],
    older_than: timedelta,
    *,
    states: Collection[State] = PRUNED_BY_DEFAULT,
    topic: str | None = None,
) -> dict[State, int]:
    """Return the number of messages that `prune` with the same arguments would delete."""
    rows = fetch(connection, sql.COUNT_PRUNABLE, _prune_parameters(older_than, states, topic))
    return {State(state): count for state, count in rows}


def prune(
    connection: psycopg.Connection[TupleRow],
    older_than: timedelta,
    *,
    states: Collection[State] = PRUNED_BY_DEFAULT,
    topic: str | None = None,
    batch_size: int = _PRUNE_BATCH,
    progress: Progress | None = None,
) -> PruneTotals:
    """Delete messages that have been in one of these final states for longer than `older_than`, with their attempts.

    This frees their dedupe keys. With `sent` it also frees the old keys of messages that were deleted as they were
    sent. `failed` messages wait for an operator, so they are deleted only if `states` names them. If one of them halted
    its ordering key, the messages behind it are claimable at once. Each batch is committed separately. Keys and
    contents without a message are deleted last.
    """
    parameters = _prune_parameters(older_than, states, topic) | {"limit": batch_size}
    deleted: Counter[State] = Counter()
    act = OperatorAction(
        states=[state.value for state in sorted(states)],
        older_than_seconds=older_than.total_seconds(),
        topic=topic,
    )
    _prune_messages(connection, sql.PRUNE, parameters, deleted, progress, act)
    passes = dict.fromkeys(_PASSES, _FIRST_PAGE)
    if State.SENT in states:
        passes[KeyPass(sql.PRUNE_DEDUPE)] = _FIRST_PAGE
    forgotten = _take_passes(connection, passes, parameters)
    return PruneTotals(dict(deleted), forgotten[sql.PRUNE_COALESCE], forgotten[sql.PRUNE_DEDUPE])


def prune_by_retention(
    connection: psycopg.Connection[TupleRow], *, batch_size: int = _PRUNE_BATCH, progress: Progress | None = None
) -> PruneTotals:
    """Delete the messages that no retention rule keeps, with their attempts. Without rules nothing is deleted.

    This runs the same turn of maintenance as a worker, at once and to the end. It creates partitions ahead, and drops
    those of which no rule keeps a message. Other messages are deleted in batches. Each batch is committed separately,
    and follows the rule as it is then. This frees the dedupe keys of the messages, unless the rule keeps nothing: then
    the rule for `dedupe_key` applies to them. Any number of sessions may run it at once. Keys and contents without a
    message are deleted last.
    """
    act = OperatorAction()
    turn = MaintenanceRun(
        read_maintenance_facts(connection), PartitionCache(), batch_size=batch_size, progress=progress, act=act
    )
    turn.take(connection)
    if turn.errors:
        raise turn.errors[0]
    return turn.totals


class Partition(NamedTuple):
    """A partition of `message_done`, with the messages that ended from `lower_at` until before `upper_at`."""

    name: str
    lower_at: datetime
    upper_at: datetime


class MaintenanceFacts(NamedTuple):
    """The facts at the start of a turn of maintenance: the database's time, its partitions and its rules."""

    asked_at: datetime
    default_bytes: int
    has_retired: bool
    partitions: Sequence[Partition]
    rules: Sequence[RetentionRule]

    @classmethod
    def of_row(cls, row: TupleRow) -> MaintenanceFacts:
        """Return the facts from the columns of `sql.MAINTENANCE_FACTS`."""
        asked_at, default_bytes, has_retired, names, lowers, uppers, topics, states, keeps = row
        keep_of = [None if seconds is None else timedelta(seconds=seconds) for seconds in keeps or ()]
        return cls(
            asked_at,
            default_bytes,
            has_retired,
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


class KeyPass(NamedTuple):
    """A pass over a table of keys, page by page. The topic is that of a rule for dedupe keys."""

    statement: LiteralString
    topic: str | None = None


@dataclass(slots=True)
class PartitionCache:
    """The knowledge of earlier turns about partitions. It is valid for a day, and while the rules stay the same.

    `kept_until` has the retention end of each closed partition, by its name. `done_until` is the time up to which a
    rule has been applied to a partition. `passes` holds the unfinished passes over tables of keys, each with the last
    key that it has read. If this is lost, the pass starts again.
    """

    rules: Sequence[RetentionRule] = ()
    kept_until: dict[str, datetime] = field(default_factory=dict)
    done_until: dict[tuple[str, RetentionRule], datetime] = field(default_factory=dict)
    began_at: float = -math.inf
    keys_at: float = -math.inf
    passes: dict[KeyPass, tuple[str, str]] = field(default_factory=dict)

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
    facts: MaintenanceFacts, cache: PartitionCache, retired: Collection[str] = frozenset()
) -> MaintenancePlan:
    """Return the work that is due at the time of the facts. `retired` partitions were detached since then."""
    now = facts.asked_at
    partitions = [partition for partition in facts.partitions if partition.name not in retired]
    past = [partition for partition in partitions if partition.upper_at <= now]
    keeps = [rule.keep for rule in facts.rules if rule.keep is not None and rule.state in _PARTITIONED_BY_TIME]
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
        if rule.state not in _PARTITIONED_BY_TIME or rule.keep is None:
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
    With `act` it is an operator's turn, which the audit records.
    """

    def __init__(
        self,
        facts: MaintenanceFacts,
        cache: PartitionCache,
        *,
        batch_size: int = _PRUNE_BATCH,
        is_over: Callable[[], bool] = lambda: False,
        pause: Callable[[float], object] = time.sleep,
        progress: Progress | None = None,
        act: OperatorAction | None = None,
    ) -> None:
        self.errors: list[psycopg.Error | ConfigurationError] = []
        self._facts = facts
        self._cache = cache
        self._limit = {"limit": batch_size}
        self._is_over = is_over
        self._pause = pause
        self._progress = progress
        self._act = act
        self._retired: set[str] = set()
        self._deleted: Counter[State] = Counter()
        self._totals = PruneTotals({}, 0)
        cache.refresh(facts.rules)

    @property
    def totals(self) -> PruneTotals:
        """The work done so far."""
        return replace(self._totals, messages=dict(self._deleted))

    @property
    def has_work(self) -> bool:
        """Whether there may be work, as far as is known without a query."""
        return self._facts.lacks_partition or self._facts.has_retired or self._keys_are_due() or any(self._plan())

    def take(self, connection: psycopg.Connection[TupleRow]) -> None:
        """Run the turn. It raises only errors that ended the connection."""
        steps = [self._make, self._check, self._retire, self._clear, self._delete, self._forget_keys]
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
                step(connection)
            except psycopg.Error as error:
                if connection.broken or connection.closed:
                    raise
                self.errors.append(error)

    def _plan(self) -> MaintenancePlan:
        return plan_maintenance(self._facts, self._cache, self._retired)

    # --- partitions ---------------------------------------------------------------------------------------------------

    def _make(self, connection: psycopg.Connection[TupleRow]) -> None:
        while self._facts.lacks_partition and not self._is_over():
            answer = self._patiently(lambda: fetch(connection, sql.MAKE_PARTITION, {})[0][0])
            if answer is None:
                break
            self._totals = replace(self._totals, partitions_made=self._totals.partitions_made + 1)

    def _check(self, connection: psycopg.Connection[TupleRow]) -> None:
        """Read until when the rules keep the messages of each partition."""
        for partition in self._plan().check:
            if self._is_over():
                break
            ((kept_until,),) = fetch(connection, sql.KEPT_UNTIL, partition._asdict())
            self._cache.kept_until[partition.name] = kept_until

    def _retire(self, connection: psycopg.Connection[TupleRow]) -> None:
        for partition in self._plan().drop:
            if self._is_over():
                break
            answer = self._patiently(functools.partial(self._retire_one, connection, partition.name))
            if answer is None or answer == "busy":
                break  # If one partition is locked, the others are too.
            if answer != "kept":
                self._retired.add(partition.name)
            self._cache.kept_until.pop(partition.name, None)  # `kept`: its retention has changed.

    def _clear(self, connection: psycopg.Connection[TupleRow]) -> None:
        """Delete the attempts and keys of detached partitions page by page, then the partitions themselves."""
        while not self._is_over() and (rows := fetch(connection, sql.CLEAR_RETIRED, self._limit)):
            ((_, _, is_dropped),) = rows
            self._totals = replace(self._totals, partitions_dropped=self._totals.partitions_dropped + is_dropped)

    def _retire_one(self, connection: psycopg.Connection[TupleRow], name: str) -> str:
        def retire() -> str:
            if self._act is not None:
                self._act.announce(connection)
            ((answer,),) = connection.execute(sql.RETIRE_PARTITION, {"name": name}).fetchall()
            return str(answer)

        return transact(connection, retire)

    def _patiently(self, work: Callable[[], str | None]) -> str | None:
        """Return the result of `work`; None if every try met a lock of another transaction.

        Each try waits only briefly for the lock, because others queue behind it. They proceed between two tries.
        """
        for trial in range(_LOCK_TRIALS):
            if trial and not self._is_over():
                self._pause(_LOCK_PAUSE_SECONDS)
            if self._is_over():
                break
            with contextlib.suppress(LockNotAvailable):
                return work()
        return None

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _delete(self, connection: psycopg.Connection[TupleRow]) -> None:
        for rule, since, until, partition in self._plan().delete:
            parameters = {"topic": rule.topic, "state": rule.state, "since": since, "until": until} | self._limit
            is_complete = _prune_messages(
                connection, sql.PRUNE_BY_RULE, parameters, self._deleted, self._progress, self._act, self._is_over
            )
            if not is_complete:
                break
            if partition and rule.keep is not None:
                # Messages committed even later are deleted a day later, when the cache is refreshed.
                ended = self._facts.asked_at - rule.keep
                self._cache.done_until[partition, rule] = until if until <= ended else ended - _COMMIT_DELAY

    # --- keys ---------------------------------------------------------------------------------------------------------

    def _keys_are_due(self) -> bool:
        return bool(self._cache.passes) or time.monotonic() - self._cache.keys_at > _KEYS_EVERY_SECONDS

    def _forget_keys(self, connection: psycopg.Connection[TupleRow]) -> None:
        if not self._keys_are_due():
            return
        passes = self._cache.passes
        if not passes:
            if self._act is None:  # Only workers have the right to write these rows.
                transact(connection, lambda: connection.execute(sql.FORGET_RENEWALS))
            for rule in self._facts.rules:
                if rule.state == DEDUPE_KEY and rule.keep is not None:
                    passes[KeyPass(sql.PRUNE_DEDUPE_BY_RULE, rule.topic)] = _FIRST_PAGE
            passes.update(dict.fromkeys(_PASSES, _FIRST_PAGE))
            self._cache.keys_at = time.monotonic()
        forgotten = _take_passes(connection, passes, self._limit, self._is_over)
        self._totals = replace(
            self._totals,
            coalesce_keys=forgotten[sql.PRUNE_COALESCE],
            dedupe_keys=forgotten[sql.PRUNE_DEDUPE_BY_RULE],
        )


def _prune_messages(
    connection: psycopg.Connection[TupleRow],
    statement: LiteralString,
    parameters: Mapping[str, object],
    deleted: Counter[State],
    progress: Progress | None,
    act: OperatorAction | None,
    is_over: Callable[[], bool] = lambda: False,
) -> bool:
    """Delete batch by batch. Return whether it reached the end."""

    def delete() -> list[TupleRow]:
        if act is not None:
            act.announce(connection)
        return connection.execute(statement, parameters).fetchall()

    while not is_over():
        rows = transact(connection, delete)
        deleted.update(State(state) for (state,) in rows)
        if rows and progress is not None:
            progress(deleted.total())
        if len(rows) < cast("int", parameters["limit"]):
            return True
    return False


def _take_passes(
    connection: psycopg.Connection[TupleRow],
    passes: dict[KeyPass, tuple[str, str]],
    parameters: Mapping[str, object],
    is_over: Callable[[], bool] = lambda: False,
) -> Counter[LiteralString]:
    """Run each pass page by page, until it ends or `is_over`. Return the number of deleted keys by statement.

    A pass that ends is removed from `passes`. Each page is committed by itself.
    """
    forgotten: Counter[LiteralString] = Counter()
    while passes and not is_over():
        one, (scope, key) = next(iter(passes.items()))
        arguments = {**parameters, "after_scope": scope, "after_key": key}
        if one.topic is not None:
            arguments["topic"] = one.topic
        rows = transact(connection, functools.partial(_fetch_page, connection, one.statement, arguments))
        if not rows:
            del passes[one]
            continue
        ((last_scope, last_key, key_count, forgotten_count),) = rows
        forgotten[one.statement] += forgotten_count
        passes[one] = last_scope, last_key
        if key_count < cast("int", parameters["limit"]):
            del passes[one]
    return forgotten


def _fetch_page(
    connection: psycopg.Connection[TupleRow], statement: LiteralString, arguments: Mapping[str, object]
) -> list[TupleRow]:
    return connection.execute(statement, arguments).fetchall()


_FIRST_PAGE: Final = ("", "")
_PASSES: Final = (KeyPass(sql.PRUNE_ORDERING), KeyPass(sql.PRUNE_CONTENT), KeyPass(sql.PRUNE_COALESCE))


def retention_rules(connection: psycopg.Connection[TupleRow]) -> list[RetentionRule]:
    """Return the retention rules by topic and state; the rules for all topics come last."""
    return [RetentionRule._make(row) for row in fetch(connection, sql.RETENTION_RULES, {})]


def set_retention(connection: psycopg.Connection[TupleRow], topic: str, state: str, keep: timedelta | None) -> None:
    """Set how long messages of a topic are kept in this state; None means forever.

    The topic `*` stands for every topic without a rule of its own. With zero for `sent`, workers delete a message
    instead of setting it to `sent`; this takes effect within a minute. All other messages are deleted by
    `prune_by_retention`. Raises `ConfigurationError`.
    """
    if topic != "*":
        try:
            check_name("topic", topic)
        except PayloadError as error:
            raise ConfigurationError(f"{error}; or * for all topics") from None
    if state not in RETAINED:
        raise ConfigurationError(f"state={state!r}: must be one of {', '.join(RETAINED)}")
    if keep is not None and not timedelta() <= keep <= MAX_AGE:
        raise ConfigurationError(f"keep={keep}: must be from 0 to {MAX_AGE.days} days")
    seconds = None if keep is None else keep.total_seconds()
    act = OperatorAction()

    def rule() -> None:
        act.announce(connection)
        connection.execute(sql.SET_RETENTION, {"topic": topic, "state": state, "keep_seconds": seconds})

    transact(connection, rule)


def unset_retention(connection: psycopg.Connection[TupleRow], topic: str, state: str) -> bool:
    """Remove a rule. Return False if there was none."""
    act = OperatorAction()

    def unset() -> bool:
        act.announce(connection)
        return bool(connection.execute(sql.UNSET_RETENTION, {"topic": topic, "state": state}).fetchall())

    return transact(connection, unset)


def _prune_parameters(older_than: timedelta, states: Collection[State], topic: str | None) -> dict[str, object]:
    if not timedelta() < older_than <= MAX_AGE:
        raise ConfigurationError(f"older_than={older_than}: must be positive and at most {MAX_AGE.days} days")
    for state in states:
        if state not in FINAL_STATES:
            raise StateError(f"messages in state {state} are not final; cancel them instead")
    return {
        "states": [state.value for state in states],
        "older_than_seconds": older_than.total_seconds(),
        "topic": topic,
    }

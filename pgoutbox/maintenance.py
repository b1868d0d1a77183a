"""What is deleted: by age, when an operator says so, and by the rules of retention.

In batches that are committed one by one, so that an interruption loses nothing that was reported done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, LiteralString, NamedTuple, cast

import psycopg
from psycopg.rows import TupleRow

from pgoutbox import sql
from pgoutbox.audit import Act, Action
from pgoutbox.drafts import check_name
from pgoutbox.errors import ConfigurationError, PayloadError, StateError
from pgoutbox.message import FINAL_STATES, State
from pgoutbox.session import Progress, fetch, transact

PRUNED_BY_DEFAULT: Final = frozenset({State.SENT, State.SKIPPED, State.CANCELLED})
MAX_AGE: Final = timedelta(days=36_500)
DEDUPE_KEY: Final = "dedupe_key"
RETAINED: Final = (*(state.value for state in State if state in FINAL_STATES), DEDUPE_KEY)

_PRUNE_BATCH: Final = 5_000


@dataclass(frozen=True, slots=True)
class PruneTotals:
    """How many messages were deleted by the state they had, and how many keys that had no message any more."""

    messages: Mapping[State, int]
    coalesce_keys: int
    dedupe_keys: int = 0

    @property
    def total(self) -> int:
        """All deleted messages."""
        return sum(self.messages.values())


class RetentionRule(NamedTuple):
    """How long final messages of a topic, or of `*`, are kept in one state; None for ever.

    The state is a final one, or `dedupe_key` for the keys of messages that are deleted.
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
    """What `prune` with the same arguments would delete."""
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

    Their dedupe keys are free again after that, and with `sent` the old keys of messages that were deleted as they were
    sent. `failed` messages wait for a person, so they are deleted only when `states` names them; what waited behind one
    that halted its ordering key goes on at once. In batches that are committed one by one; keys and contents without a
    message go last.
    """
    parameters = _prune_parameters(older_than, states, topic) | {"limit": batch_size}
    deleted: Counter[State] = Counter()
    act = Act(
        Action.PRUNE,
        states=[state.value for state in sorted(states)],
        older_than_seconds=older_than.total_seconds(),
        topic=topic,
    )
    _prune_messages(connection, sql.PRUNE, parameters, deleted, progress, act)
    keys = _prune_keys(connection, sql.PRUNE_DEDUPE, parameters) if State.SENT in states else 0
    return PruneTotals(dict(deleted), _prune_what_has_no_message(connection, batch_size), keys)


def prune_by_retention(
    connection: psycopg.Connection[TupleRow], *, batch_size: int = _PRUNE_BATCH, progress: Progress | None = None
) -> PruneTotals:
    """Delete what the rules of retention no longer keep, with its attempts. Without rules nothing is deleted.

    In batches that are committed one by one, each by the rule as it then stands. The dedupe keys of the messages are
    free again after that, unless the rule keeps nothing: then they go by the rule for `dedupe_key`. Any number of
    sessions may do it at once. Keys and contents without a message go last.
    """
    act = Act(Action.PRUNE)
    deleted: Counter[State] = Counter()
    keys = 0
    for rule in retention_rules(connection):
        parameters = {"topic": rule.topic, "state": rule.state, "limit": batch_size}
        if rule.keep is None:
            continue
        if rule.state == DEDUPE_KEY:
            keys += _prune_keys(connection, sql.PRUNE_DEDUPE_BY_RULE, parameters)
        else:
            _prune_messages(connection, sql.PRUNE_BY_RULE, parameters, deleted, progress, act)
    return PruneTotals(dict(deleted), _prune_what_has_no_message(connection, batch_size), keys)


def _prune_messages(
    connection: psycopg.Connection[TupleRow],
    statement: LiteralString,
    parameters: Mapping[str, object],
    deleted: Counter[State],
    progress: Progress | None,
    act: Act,
) -> None:
    def delete() -> list[TupleRow]:
        rows = connection.execute(statement, parameters).fetchall()
        act.record(connection, message_count=len(rows))
        return rows

    while rows := transact(connection, delete):
        deleted.update(State(state) for state, _ in rows)
        if progress is not None:
            progress(deleted.total())
        if len(rows) < cast("int", parameters["limit"]):
            break


def _prune_what_has_no_message(connection: psycopg.Connection[TupleRow], batch_size: int) -> int:
    """Forget keys and contents without a message; returns how many coalesce keys."""
    for statement in (sql.PRUNE_ORDERING, sql.PRUNE_CONTENT):
        _prune_keys(connection, statement, {"limit": batch_size})
    return _prune_keys(connection, sql.PRUNE_COALESCE, {"limit": batch_size})


def _prune_keys(
    connection: psycopg.Connection[TupleRow], statement: LiteralString, parameters: Mapping[str, object]
) -> int:
    total = 0
    while count := transact(connection, lambda: connection.execute(statement, parameters).rowcount):
        total += count
    return total


def retention_rules(connection: psycopg.Connection[TupleRow]) -> list[RetentionRule]:
    """The rules of retention, by topic and state; those of all topics come last."""
    return [RetentionRule._make(row) for row in fetch(connection, sql.RETENTION_RULES, {})]


def set_retention(connection: psycopg.Connection[TupleRow], topic: str, state: str, keep: timedelta | None) -> None:
    """Keep messages of the topic (`*`: of every topic without a rule of its own) so long in this state, None for ever.

    Zero for `sent` has workers delete a message at the moment at which it would become `sent`, within a minute from
    now. Everything else is deleted by `prune_by_retention`. Raises `ConfigurationError`.
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
    act = Act(Action.RETENTION, topic=topic, state=state, keep_seconds="for ever" if keep is None else seconds)

    def rule() -> None:
        connection.execute(sql.SET_RETENTION, {"topic": topic, "state": state, "keep_seconds": seconds})
        act.record(connection)

    transact(connection, rule)


def unset_retention(connection: psycopg.Connection[TupleRow], topic: str, state: str) -> bool:
    """Take a rule back; False if there was none."""
    act = Act(Action.RETENTION, topic=topic, state=state, keep_seconds="no rule")

    def unset() -> bool:
        found = connection.execute(sql.UNSET_RETENTION, {"topic": topic, "state": state}).fetchall()
        if found:
            act.record(connection)
        return bool(found)

    return transact(connection, unset)


def _prune_parameters(older_than: timedelta, states: Collection[State], topic: str | None) -> dict[str, object]:
    if not timedelta() < older_than <= MAX_AGE:
        raise ConfigurationError(f"older_than={older_than}: must be more than nothing and at most {MAX_AGE.days} days")
    for state in states:
        if state not in FINAL_STATES:
            raise StateError(f"messages in state {state} are still owed; cancel them instead")
    return {
        "states": [state.value for state in states],
        "older_than_seconds": older_than.total_seconds(),
        "topic": topic,
    }

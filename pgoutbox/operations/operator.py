"""`Operator`: one method for each thing that people do to messages, queues, topics, retention rules and breakers.

Each call is a transaction of its own; a bulk act commits each batch. So an interruption loses no reported result. Every
write checks the expected state in SQL: it reports a concurrent change by a worker or another operator, and never
overwrites it. The schema records each act in its own transaction; this module states the actor, the origin and
the filter.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from itertools import islice
from typing import Final, Literal, LiteralString, Self, TypeAlias, TypeVar, cast, get_args
from uuid import uuid4

import psycopg
from psycopg.abc import Params
from psycopg.errors import CheckViolation, IntegrityError, InvalidParameterValue, NullValueNotAllowed, RaiseException
from psycopg.rows import TupleRow
from psycopg.types.json import Jsonb
from pydantic import ConfigDict, JsonValue, TypeAdapter
from typing_extensions import Unpack

from pgoutbox.clock import Duration
from pgoutbox.database import operator_connection, sql
from pgoutbox.encryption import Keyring, decrypted, is_sealed, keyring_of
from pgoutbox.enqueue.adapters import Psycopg, run
from pgoutbox.enqueue.calls import Enqueued, insert
from pgoutbox.enqueue.payloads import MAX_DEPTH, is_plain
from pgoutbox.enqueue.validation import Draft
from pgoutbox.errors import ArgumentError, ConfigurationError, MessageNotFoundError, StateError
from pgoutbox.message import State, Transient
from pgoutbox.operations import retention
from pgoutbox.operations.acts import (
    ACTS,
    CORRECTABLE,
    REDRIVABLE,
    Act,
    ActArguments,
    Action,
    ActName,
    Correction,
    MessageResult,
    act_named,
)
from pgoutbox.operations.records import (
    AuditRow,
    Batch,
    ClearedRedirect,
    ClosedBreaker,
    EraseResult,
    Erasure,
    FailureGroup,
    FairKey,
    FairKeys,
    Home,
    JsonText,
    ListedMessage,
    Mention,
    MessageFilter,
    OpenBreaker,
    Pause,
    PausedTopic,
    Progress,
    PruneTotals,
    QueueControls,
    Rate,
    Redirects,
    RetentionRule,
    ShownAttempt,
    ShownMessage,
    StoredSchedule,
    Suppression,
    SwitchedRedirect,
    TopicCounts,
    WorkerRedirect,
)
from pgoutbox.operations.window import Window
from pgoutbox.options import SuppressionReason, check_address, check_name
from pgoutbox.settings import Settings, load_settings
from pgoutbox.text import check_storable
from pgoutbox.transports.redirect import REDIRECT_SECONDS, check_topics, parse_target

ShareValue: TypeAlias = Literal["weight", "max_in_flight", "rate"]
BATCH_SIZE: Final = 500
FAIR_COUNTS: Final = {"keys": 50_000, "cap": 10_000}
"""The most fair keys of a queue that are read, and the most messages of each that are counted."""
SHARE_VALUES: Final[tuple[ShareValue, ...]] = get_args(ShareValue)
# A bulk act searches so many rows at a time, and fewer if it has to normalise the error of each.
_SEARCHED_ROWS: Final = 20_000
_SEARCHED_GROUP_ROWS: Final = 3_000
_SHOWN_CHARACTERS: Final = 65_536
_ALL: Final = 2**31 - 1
_SHOWN: Final = TypeAdapter(ShownMessage, config=ConfigDict(defer_build=True))
_MAX_REDIRECT: Final = timedelta(days=3_650)
# Each row of the schema is compared with each text.
_MAX_SEARCHED_ADDRESSES: Final = 20

_T = TypeVar("_T")


class Operator:
    """Act on messages, queues, topics, retention rules and circuit breakers, and read them.

        with Operator("postgresql:///shop", actor="ada@example.org") as operator:
            operator.redrive(42)
            operator.act_on_all("cancel", MessageFilter(topic="mail.reminder"))
            operator.pause("mail", duration=timedelta(minutes=10))

    `database` is a connection string or `Settings`: the operator then opens a connection, which `close` and the end of
    the `with` block close. Or it is your own psycopg connection, which stays open. If that is in a transaction, the
    acts become part of it, and change its `search_path` and timeouts until it ends.

    The audit records each act with the `actor` and its `origin`, for example "deploy script", as statements of the
    database role. Without an actor it records the role. With `read_only` the operator only reads, also on a standby.

    An operator serves one thread at a time. In async code, call it in a thread, as by `asyncio.to_thread`. Raises
    `ConfigurationError` or `SchemaError` for an unsuitable database, and the errors of psycopg.
    """

    def __init__(
        self,
        database: str | Settings | psycopg.Connection[TupleRow],
        *,
        actor: str | None = None,
        origin: str | None = None,
        read_only: bool = False,
    ) -> None:
        self._resources = contextlib.ExitStack()
        self._actor = {"actor": actor, "origin": origin}
        self._may_act: bool | None = None
        self._keyring: Keyring | None = None
        if isinstance(database, psycopg.Connection):
            self._connection = database
            return
        settings = load_settings(dsn=database) if isinstance(database, str) else database
        if not isinstance(settings, Settings):
            kind = type(database).__name__
            raise ConfigurationError(
                f"database: give a connection string, Settings or a psycopg.Connection, not {kind}"
            )
        self._keyring = keyring_of(settings.encryption_keys)
        opened = operator_connection.connect(settings, read_only=read_only)
        self._connection = self._resources.enter_context(opened)

    def close(self) -> None:
        """Close the connection that the operator has opened. Idempotent."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def dry_run(self) -> AbstractContextManager[object]:
        """Roll back all acts of a `with` block at its end. Their results tell what they would do."""
        return self._connection.transaction(force_rollback=True)

    def list_messages(
        self, which: MessageFilter | None = None, *, before_id: int | None = None, limit: int = 50
    ) -> list[ListedMessage]:
        """Return the newest matching messages, newest first. For the next page, pass the last id as `before_id`."""
        parameters = (which or MessageFilter()).parameters() | {"before_id": before_id, "limit": limit}
        rows = self._fetch(sql.LIST_MESSAGES, parameters)
        return self.with_waits([ListedMessage(*row)._replace(state=State(row[4])) for row in rows])

    def with_waits(self, messages: Sequence[ListedMessage]) -> list[ListedMessage]:
        """Return the messages with the reason why each pending one waits, as in `pgoutbox.waiting_view`."""
        rows = self._fetch(sql.WHY_THEY_WAIT, {"ids": [message.id for message in messages]})
        found = {message_id: waits for message_id, *waits in rows}
        return [ListedMessage(*message[:-5], *found.get(message.id, (None,) * 5)) for message in messages]

    def count_matching(self, which: MessageFilter, *, limit: int) -> int:
        """Return the number of matching messages, counted up to `limit`."""
        ((count,),) = self._fetch(sql.COUNT_MATCHING, which.parameters() | {"limit": limit})
        return int(count)

    def count_messages(self, *, queue: str | None = None) -> list[TopicCounts]:
        """Return the numbers of messages by queue and topic. Reads all messages."""
        return [TopicCounts._make(row) for row in self._fetch(sql.STATS, {"queue": queue})]

    def list_failures(
        self,
        *,
        topic: str | None = None,
        within: timedelta | None = None,
        newest: int = _SEARCHED_GROUP_ROWS,
        limit: int = 100,
    ) -> list[FailureGroup]:
        """Return failed messages by topic and cause, those with the most failures in the last hour first.

        `within` restricts them to messages that failed that lately. Reads those that failed last, up to `newest`.
        """
        parameters = {"topic": topic, "seconds": _seconds(within), "cap": newest, "limit": limit}
        rows = self._fetch(sql.LIST_FAILURES, parameters)
        return [FailureGroup._make(row[: len(FailureGroup._fields)]) for row in rows]

    def show_message(
        self, message_id: int, *, whole: bool = False, with_values: bool = True
    ) -> tuple[ShownMessage, list[ShownAttempt]]:
        """Return one message and its last attempts, newest first.

        Without `whole`: the first 65,536 characters of headers, payload, content and the last error.

        Neither is redacted: call `redacted` before you show them. Without `with_values`, and for a role that may not
        read the tables, payload and headers are those of `pgoutbox.message_view`, and the content of a fan-out is None.
        Raises `MessageNotFoundError`.
        """
        statement = sql.SHOW_MESSAGE if with_values and self.reads_payloads() else sql.SHOW_MESSAGE_VIEW
        parameters = {"id": message_id, "characters": _ALL if whole else _SHOWN_CHARACTERS}
        rows = self._fetch(statement, parameters)
        if not rows:
            raise MessageNotFoundError(f"no such message: {message_id}")
        attempts = self._fetch(sql.SHOW_ATTEMPTS, parameters)
        ((columns,),) = rows
        message = _SHOWN.validate_python({name: columns[name] for name in ShownMessage._fields if name in columns})
        message = message._replace(
            headers=_json_of(message.headers, message.headers_bytes),
            payload=_json_of(message.payload, message.payload_bytes),
        )
        if with_values and message.content_id is not None and self._answer(sql.READS_CONTENTS):
            for text, size in self._fetch(sql.SHOW_CONTENT, parameters | {"id": message.content_id}):
                message = message._replace(content=_json_of(text, size), content_bytes=size)
        return message, [ShownAttempt._make(row) for row in attempts]

    def reads_payloads(self) -> bool:
        """Whether the role may read payloads and headers, and not only the views, which hide all values."""
        return self._answer(sql.READS_PAYLOADS)

    def corrects(self) -> bool:
        """Whether the role may correct messages."""
        return self._answer(sql.MAY_CORRECT)

    def reads_audit(self) -> bool:
        """Whether the role may read the audit."""
        return self._answer(sql.READS_AUDIT)

    def list_acts(
        self,
        *,
        message_id: int | None = None,
        actor: str | None = None,
        action: Action | None = None,
        before_id: int | None = None,
        limit: int = 50,
    ) -> list[AuditRow]:
        """Return the acts of operators, newest first: all, or of one message, of one actor, of one kind."""
        parameters = {
            "message_id": message_id,
            "actor": actor,
            "action": action,
            "before_id": before_id,
            "limit": limit,
        }
        return [AuditRow._make(row) for row in self._fetch(sql.LIST_ACTS, parameters)]

    def is_known_topic(self, topic: str) -> bool:
        """Whether a worker, a retention rule, a coalesce key or one of the newest messages has this topic.

        With a `*` at the end: whether a worker or one of the newest messages has a topic that begins so. This needs a
        role that may read the views.
        """
        if topic.endswith("*"):
            return self._answer(sql.IS_KNOWN_PREFIX, {"prefix": topic[:-1]})
        return self._answer(sql.IS_KNOWN_TOPIC, {"topic": topic})

    def enqueue(self, draft: Draft) -> Enqueued:
        """Enqueue a message that `Outbox.draft` has made by its topic's definition.

        The audit records the topic and the id, but not the payload. A login with only the role of a producer or a
        worker enqueues too, without a record. Raises like `Producer.enqueue`.

            operator.enqueue(outbox.draft("mail.welcome", {"user_id": 7}))
        """
        adapter = Psycopg(self._connection)

        def write() -> Enqueued:
            statement = sql.ENQUEUE_ACT if self._is_operator() else sql.ENQUEUE
            return run(insert(adapter, draft, notify=True, statement=statement))

        return self._announced(self._named(), write)

    def redrive(self, message_id: int, *, states: Collection[State] = REDRIVABLE) -> MessageResult:
        """Make a failed or cancelled message pending again, with its original budget of attempts.

        It is left alone if it is in none of `states`, or superseded by a newer message of its key. So is a cancelled
        message if a later message has its dedupe key.
        """
        return self.act_on("redrive", message_id, states=states)

    def correct(
        self, message_id: int, correction: Correction, *, states: Collection[State] = CORRECTABLE
    ) -> MessageResult:
        """Change fields of a pending or failed message, and make it pending if it is failed.

        A message that has been tried gets its initial number of attempts. With another payload, headers or destination
        it is due at once. Payload and headers need a role that may read them. No model checks the payload. If workers
        know a later version of the payload than the message has, the correction must name its own version. The operator
        can read the message at another destination, so the owner may have revoked this right, and the audit records
        digests of the old and the new one. It has no values, only the names of the fields and the queue. An encrypted
        message is left alone, and so is one that is superseded. Raises `ArgumentError` for invalid values, and
        `StateError` for a destination during a blackout.

            operator.correct(42, {"destination": "mailto:ada@example.org"})
        """
        return self.act_on("correct", message_id, states=states, correction=correction)

    def release(self, message_id: int) -> MessageResult:
        """Take a message in flight away from its worker, for an attempt that does not end.

        Its worker stops the attempt within seconds. The attempt counts as lost when its lease ends, and the message is
        tried again, with one more attempt. It may be delivered twice.
        """
        return self.act_on("release", message_id)

    def dismiss(self, message_id: int, reason: str) -> MessageResult:
        """End a failed message as skipped, because nobody will deliver it. `reason` has 1 to 1,000 characters.

        The skip reason of the message names the actor and the reason. Its dedupe key is free again, and the messages
        that waited behind it follow.
        """
        return self.act_on("dismiss", message_id, reason=reason)

    def snooze(self, message_id: int, duration: Duration, reason: str) -> MessageResult:
        """Let a pending message wait for at least so long from now, in seconds or as a timedelta: 1 second to 10 years.

        A message that is due later keeps its time. The audit records the reason, of 1 to 1,000 characters. A message
        that would expire before is left alone, and so is one that is superseded by a newer message of its key.
        """
        return self.act_on("snooze", message_id, duration=duration, reason=reason)

    def reschedule(self, message_id: int, available_at: datetime | None = None) -> MessageResult:
        """Make a pending message due at a time, or at once. It keeps its attempts and its keys.

        `available_at` needs a time zone. A message that would expire before is left alone, and so is one that is
        superseded by a newer message of its key.
        """
        return self.act_on("reschedule", message_id, available_at=available_at)

    def resend(self, message_id: int) -> MessageResult:
        """Enqueue a copy of a sent message, marked as `resend_of` it. `other_id` of the result is the copy.

        No copy is made if the message is in another state, or superseded by a newer message of its key.
        """
        return self.act_on("resend", message_id)

    def cancel(self, message_id: int) -> MessageResult:
        """Cancel a message, as the SQL function `pgoutbox.cancel` does."""
        return self.act_on("cancel", message_id)

    def cancel_by_key(
        self, topic: str, *, coalesce_key: str | None = None, dedupe_key: str | None = None
    ) -> list[MessageResult]:
        """Cancel the newest message of a coalesce key and the message of a dedupe key. Return none if there is none."""
        target: dict[str, JsonValue] = {"topic": topic, "coalesce_key": coalesce_key, "dedupe_key": dedupe_key}
        return ACTS["cancel"].answers(self._act(sql.CANCEL_BY_KEY, target, self._named(target)))

    def act_on(
        self,
        action: ActName,
        message_id: int,
        *,
        states: Collection[State] | None = None,
        **changes: Unpack[ActArguments],
    ) -> MessageResult:
        """Do this to one message, if it is in one of the states. The method of the act tells what it does.

        Raises `StateError` for states that the act cannot change.
        """
        kind = act_named(action)
        kind.require_states(states or ())
        allowed = kind.by_id if states is None else states
        (result,) = self._take(kind, {message_id: None}, allowed, kind.checked(changes), self._named())
        return result

    def act_on_all(self, action: ActName, which: MessageFilter, **changes: Unpack[ActArguments]) -> Counter[str]:
        """Do this to all matching messages, and count the results: `{"redriven": 40, "superseded": 2}`.

        Without states in the filter, a redrive selects only failed messages. A message that was attempted again in the
        meantime is left alone. Otherwise this is `bulk`.
        """
        batches = self.bulk(action, which, **changes)
        return Counter(result.result for batch in batches for result in batch.results)

    def bulk(
        self,
        action: ActName,
        which: MessageFilter | Sequence[int],
        *,
        batch_size: int = BATCH_SIZE,
        limit: int | None = None,
        **changes: Unpack[ActArguments],
    ) -> Iterator[Batch]:
        """Do this to the messages of a filter, oldest first, or with these ids.

        The further arguments of an act are those of its method for one message.

        Nothing happens before you iterate. Each step changes a batch, commits it and returns its results. If you stop
        iterating, the remaining messages stay as they are. The act takes at most `limit` messages. A filter selects
        only messages that exist at the start. Each copy of a resend has a transaction of its own.

        Raises `StateError` for states that the action cannot change.
        """
        kind = act_named(action)
        asked = kind.checked(changes)
        act = self._named()
        if isinstance(which, MessageFilter):
            which = which.limited_to(action)
            act = self._named(which.given())
            states: Collection[State] = which.states
            found = self._search(which, batch_size)
        else:
            states = kind.by_id
            found = ((dict.fromkeys(ids), ids[-1], which[-1]) for ids in _slices(which, batch_size) if ids)
        left = _ALL if limit is None else limit
        for counts, reached_id, through_id in found:
            chosen = dict(islice(counts.items(), left))
            left -= len(chosen)
            # Each copy has a transaction of its own.
            parts = [{message_id: None} for message_id in chosen] if action == "resend" else [chosen]
            results = [result for part in parts if part for result in self._take(kind, part, states, asked, act)]
            yield Batch(results, reached_id, through_id)
            if not left:
                return

    def _search(self, which: MessageFilter, batch_size: int) -> Iterator[tuple[Mapping[int, int | None], int, int]]:
        """Yield matching ids with their attempt counts, the last id searched, and the last id to search.

        Yields an empty batch after rows without a match, so that the caller can stop.
        """
        ((through_id,),) = self._fetch(sql.NEWEST_ID)
        rows = _SEARCHED_ROWS if which.error_group is None else _SEARCHED_GROUP_ROWS
        parameters = which.parameters() | {"through_id": through_id}
        after_id: int | None = 0
        window = Window(rows)
        while after_id is not None:
            with window.read() as rows:
                asked = parameters | {"after_id": after_id, "rows": rows}
                ((ids, counts, last_id, _),) = self._fetch(sql.SEARCH_AHEAD, asked)
            found = list(zip(ids or (), counts or (), strict=True))
            for part in _slices(found, batch_size):
                yield dict(part), part[-1][0] if part else last_id or through_id, through_id
            after_id = last_id

    def _take(
        self,
        kind: Act,
        counts: Mapping[int, int | None],
        states: Collection[State],
        asked: Mapping[str, object],
        act: Mapping[str, object],
    ) -> list[MessageResult]:
        """Do this in one transaction to the messages that still have these numbers of attempts; None means any."""
        parameters = {
            **asked,
            "ids": list(counts),
            "attempt_counts": None if None in counts.values() else list(counts.values()),
            "states": list(states),
        }
        return kind.answers(self._act(kind.statement, parameters, act), states)

    def erase(
        self,
        *,
        ids: Sequence[int] | None = None,
        owner: str | None = None,
        destination: str | None = None,
        batch_size: int = BATCH_SIZE,
        progress: Progress | None = None,
    ) -> Erasure:
        """Delete messages in every state, with payloads, attempts, keys, and their traces in the audit.

        Messages for the hooks of `on_failed` about these messages are deleted, too.
        Give `ids`, an `owner` or a `destination`, which may omit `mailto:`. The attempt of a message in flight is asked
        to stop: erase again after it. Each batch is committed separately. The audit records the ids, and neither the
        owner nor the destination.

        A role that may read payloads then searches all other rows for the owner and up to 20 of the addresses, and for
        copies of the messages. `mentions` of the result has the places, for a person to decide.
        """
        chosen = _chosen(ids, owner, destination)
        rows = self._fetch(sql.SELECTED_MESSAGES, chosen)
        found = list(dict.fromkeys([*(ids or ()), *(row[0] for row in rows)]))
        act, results = self._named(), dict[int, EraseResult]()
        for part in _slices(found, batch_size):
            # A selection without messages is erased too: the audit may contain it.
            for message_id, result in self._act(sql.ERASE, {**chosen, "ids": part}, act):
                results[message_id] = EraseResult(result)
            if progress is not None:
                progress(len(results))
        mentions = None
        if self._answer(sql.READS_MENTIONS):
            addresses = sorted({address for _, _, address in rows if address} if ids is None else ())
            few = addresses[:_MAX_SEARCHED_ADDRESSES] if owner is not None else []
            mentions = self.mentions(*filter(None, (owner, destination)), *few, copies_of=list(results))
        return Erasure(results, mentions)

    def count_erasable(
        self, *, ids: Sequence[int] | None = None, owner: str | None = None, destination: str | None = None
    ) -> dict[State, int]:
        """Return the number of messages by state that `erase` with the same arguments would delete."""
        rows = self._fetch(sql.SELECTED_MESSAGES, _chosen(ids, owner, destination))
        return {State(state): count for state, count in sorted(Counter(row[1] for row in rows).items())}

    def export(
        self,
        *,
        ids: Sequence[int] | None = None,
        owner: str | None = None,
        destination: str | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> Iterator[dict[str, JsonValue]]:
        """Yield all data of each message, oldest first: the row, payload, headers, content, attempts, and acts.

        The arguments are those of `erase`. Encrypted payloads are opened if the operator was made from `Settings` with
        the keys; the others stay encrypted. Only the owner of the schema may export, and logins to which the owner has
        granted `pgoutbox.export`. The audit records each batch.
        """
        chosen = _chosen(ids, owner, destination)
        rows = self._fetch(sql.SELECTED_MESSAGES, chosen)
        # The audit outlives the messages, so it does not name the owner or the address.
        act = self._named({"by": next(name for name, value in chosen.items() if value is not None)})
        for part in _slices(rows, batch_size):
            for message, *texts in self._act(sql.EXPORT, {"ids": [row[0] for row in part]}, act):
                yield message | {
                    name: self._opened(_json_of(text, None if text is None else len(text.encode())))
                    for name, text in zip(("headers", "payload", "content"), texts, strict=True)
                }

    def _opened(self, value: JsonValue) -> JsonValue:
        if self._keyring is None or not is_sealed(value):
            return value
        try:
            _, text = decrypted(value, self._keyring)
        except Transient:
            return value
        return _json_of(text, len(text.encode()))

    def mentions(self, *texts: str, copies_of: Sequence[int] = ()) -> list[Mention]:
        """Return the places in all tables that contain one of these texts, in any case, and copies of these messages.

        `mailto:` may be omitted. A text counts only between characters that are neither letters nor digits. Encrypted
        payloads are not searched. Only the owner of the schema may search, and logins to which the owner has granted
        `pgoutbox.mentions`. Reads all rows.
        """
        words = sorted({text.removeprefix("mailto:") for text in texts})
        return [Mention._make(row) for row in self._fetch(sql.MENTIONS, {"texts": words, "copies_of": list(copies_of)})]

    def list_queues(self) -> list[QueueControls]:
        """Return the queues that are paused or have limits, by name."""
        return [QueueControls._make(row) for row in self._fetch(sql.LIST_QUEUES)]

    def known_queues(self) -> list[str]:
        """Return all queues that have messages, a pause or limits. Reads all messages."""
        return [row[0] for row in self._fetch(sql.KNOWN_QUEUES)]

    def unknown_queues(self, queues: Sequence[str]) -> list[str]:
        """Return the names in `queues` that have neither messages nor a pause or limits: probably misspelt, or new."""
        return [row[0] for row in self._fetch(sql.UNKNOWN_QUEUES, {"queues": list(queues)})]

    def pause(self, queue: str, *, duration: timedelta | None = None) -> Pause:
        """Stop all claims of a queue, for some time or until `resume`.

        Messages in flight continue, and enqueue is not affected.
        """
        return Pause._make(*self._act(sql.PAUSE_QUEUE, {"queue": queue, "seconds": _seconds(duration)}))

    def resume(self, queue: str) -> bool:
        """Allow claims again and wake a worker. Return False if the queue was not paused."""
        return bool(self._act(sql.RESUME_QUEUE, {"queue": queue}))

    def list_paused_topics(self) -> list[PausedTopic]:
        """Return the paused topics, by name."""
        return [PausedTopic._make(row) for row in self._fetch(sql.LIST_PAUSED_TOPICS)]

    def pause_topic(self, topic: str, *, duration: timedelta | None = None) -> Pause:
        """Stop all claims of the messages of a topic, in every queue, for some time or until `resume_topic`.

        Messages in flight continue, and enqueue is not affected. Messages that expire, are cancelled or superseded
        end. Messages behind a paused one of their ordering key wait for it. `duration` is from 1 second to 10 years.
        Raises `ArgumentError`.
        """
        return Pause._make(*self._act(sql.PAUSE_TOPIC, {"topic": topic, "seconds": _seconds(duration)}))

    def resume_topic(self, topic: str) -> bool:
        """Allow claims of a topic again and wake the workers. Return False if the topic was not paused."""
        ((was_paused,),) = self._act(sql.RESUME_TOPIC, {"topic": topic})
        return bool(was_paused)

    def list_schedules(self, *, prefix: str = "", limit: int = 100) -> list[StoredSchedule]:
        """Return up to `limit` schedules whose names begin with `prefix`, the next one first."""
        rows = self._fetch(sql.LIST_SCHEDULES, {"prefix": prefix, "limit": limit})
        return [StoredSchedule._make(row) for row in rows]

    def pause_schedule(self, name: str) -> bool:
        """Let the times of a schedule pass until `resume_schedule`. Return False if it is missing or paused."""
        ((was_running,),) = self._act(sql.PAUSE_SCHEDULE, {"name": name})
        return bool(was_running)

    def resume_schedule(self, name: str) -> bool:
        """Go on with a schedule, at its next time from now on. Return False if it is missing or not paused."""
        ((was_paused,),) = self._act(sql.RESUME_SCHEDULE, {"name": name})
        return bool(was_paused)

    def run_schedule(self, name: str) -> int | None:
        """Enqueue the message of a schedule now, beside its times. Return its id; None if there is no schedule.

        Raises `StateError` if a constraint or a trigger of the database refuses the message.
        """
        try:
            ((message_id,),) = self._act(sql.RUN_SCHEDULE, {"name": name})
        except (IntegrityError, RaiseException) as error:  # The detail may quote the payload.
            raise StateError(f"schedule {name}: its message is refused: {error.diag.message_primary}") from None
        return None if message_id is None else int(message_id)

    def list_suppressions(self, *, address: str | None = None, limit: int | None = 100) -> list[Suppression]:
        """Return up to `limit` suppressions in force, the newest first; of an address if it is given.

        Without a limit it returns all, which `import_suppressions` of this database takes again.
        """
        checked = None if address is None else check_address("address", address)
        rows = self._fetch(sql.LIST_SUPPRESSIONS, {"address": checked, "limit": limit})
        return [Suppression._make(row) for row in rows]

    def suppress(self, address: str, reason: SuppressionReason, *, mailing_list: str | None = None) -> bool:
        """Stop the mail of a mailing list, or of every list, to an address, as `Producer.suppress` does."""
        ((has_changed,),) = self._act(sql.SUPPRESS, (check_address("address", address), reason, mailing_list))
        return bool(has_changed)

    def unsuppress(self, address: str, *, mailing_list: str | None = None) -> bool:
        """End the suppression of an address for a mailing list, or that for every list. Return False without one."""
        ((has_changed,),) = self._act(sql.UNSUPPRESS, (check_address("address", address), mailing_list))
        return bool(has_changed)

    def import_suppressions(
        self,
        items: Iterable[Mapping[str, JsonValue]],
        *,
        batch_size: int = BATCH_SIZE,
        progress: Progress | None = None,
    ) -> int:
        """Suppress many addresses, and return the number of new suppressions. Each batch is committed separately.

        An item has an `address` or a `digest` of this database, a `reason`, and may have a `mailing_list` and a time
        `created_at`. Raises `ArgumentError` for the first wrong item, whose batch is not imported.
        """
        act, count, numbered = self._named(), 0, enumerate(items)
        while part := list(islice(numbered, batch_size)):
            given = [_in_one_form(number, item) for number, item in part]
            try:
                ((added,),) = self._act(sql.IMPORT_SUPPRESSIONS, {"items": Jsonb(given)}, act)
            except ArgumentError as error:  # It counts within its batch.
                index, _, field = error.field.removeprefix("items[").partition("].")
                raise ArgumentError(f"items[{part[int(index)][0]}].{field}", error.reason) from None
            count += added
            if progress is not None:
                progress(part[-1][0] + 1)
        return count

    def limit_rate(self, queue: str, rate: Rate | None, *, burst: int | None = None) -> None:
        """Limit the attempts of a queue that begin in any period of the rate, in all workers together; None removes it.

        Up to `burst` of them begin at once after an idle time, the others at the pace of the rate. The default is a
        tenth of the rate's count, from 1 to 5; the attempts of a second may always begin at once. Attempts that began
        under an earlier rate count too. The limit applies from the next claim of each worker. Raises `ArgumentError` if
        the burst is above the rate's count, and `StateError` if the rate is above the queue's ceiling, which the owner
        of the schema has set.
        """
        count, seconds = (None, None) if rate is None else (rate.count, rate.seconds)
        if burst is not None and count is not None and not 1 <= burst <= count:
            raise ArgumentError("burst", f"must be from 1 to {count}, because it is a part of the rate; got {burst}")
        self._act(sql.LIMIT_RATE, {"queue": queue, "count": count, "seconds": seconds, "burst": burst})

    def limit_ceiling(self, queue: str, at_most: Rate | None) -> None:
        """Set the most attempts in any period that operators may allow for a queue; None removes the ceiling.

        A higher or missing rate is lowered to the ceiling. Whatever rates operators set, no period of the ceiling sees
        more attempts. Only the owner of the schema may do this. For other roles it raises the driver's
        `InsufficientPrivilege`.
        """
        count, seconds = (None, None) if at_most is None else (at_most.count, at_most.seconds)
        self._act(sql.LIMIT_CEILING, {"queue": queue, "count": count, "seconds": seconds})

    def limit_in_flight(self, queue: str, max_in_flight: int | None) -> None:
        """Limit the number of attempts of a queue in flight, in all workers together; None removes the limit."""
        self._act(sql.LIMIT_IN_FLIGHT, {"queue": queue, "max_in_flight": max_in_flight})

    def list_fair_keys(self, queue: str, *, prefix: str = "", limit: int = 100) -> FairKeys:
        """Return up to `limit` fair keys of a queue that begin with `prefix`, those that wait longest first.

        They have messages or a share of their own. A key that is the whole prefix comes before all others.
        """
        check_storable("prefix", prefix)
        rows = self._fetch(sql.LIST_FAIR_KEYS, {"queue": queue, "prefix": prefix, "limit": limit, **FAIR_COUNTS})
        return FairKeys([FairKey._make(row[:-1]) for row in rows], rows[0][-1] if rows else 0)

    def set_fair_share(
        self,
        queue: str,
        fair_key: str | None = None,
        *,
        weight: int | None = None,
        max_in_flight: int | None = None,
        rate: Rate | None = None,
        remove: Collection[ShareValue] = (),
    ) -> bool:
        """Set how many messages of a fair key get each turn, may be in flight, and get their turn in a period.

        These hold for all workers together. None leaves a value as it is, and `remove` names values that end:
        `weight`, `max_in_flight`, `rate`. If nothing is given, the key gets the share of its queue again. Without a
        key, this is the share of all keys of the queue that have no own one. The weight is from 1 to 1,000. The limit
        is from 0 to 1,000,000: 0 pauses the key, and messages that already have their turn continue. The rate spreads
        turns over whole seconds, up to 30 days, and the messages of one turn may begin at once. Returns False if
        nothing changes. Raises `ArgumentError`.

            operator.set_fair_share("mail", "acme", rate=Rate(10, 1), remove=["max_in_flight"])
        """
        count, seconds = (None, None) if rate is None else (rate.count, rate.seconds)
        numbers = {"weight": weight, "max_in_flight": max_in_flight, "rate_count": count, "rate_seconds": seconds}
        for name, number in numbers.items():
            if number is not None and number % 1 != 0:
                raise ArgumentError(name, f"must be a whole number; got {number}")
        check_storable("fair_key", fair_key or "")
        # The schema refuses a number that no integer holds, with its own bounds.
        storable = {name: number and int(min(max(number, -_ALL), _ALL)) for name, number in numbers.items()}
        share = {"queue": queue, "fair_key": fair_key, "remove": list(remove), **storable}
        ((has_changed,),) = self._act(sql.SET_FAIR_SHARE, share)
        return bool(has_changed)

    def list_open_breakers(self) -> list[OpenBreaker]:
        """Return the open circuit breakers, at most the oldest 20. Their errors are not redacted."""
        return [OpenBreaker._make(row) for row in self._fetch(sql.OPEN_BREAKERS)]

    def close_breaker(self, key: str) -> ClosedBreaker:
        """Close a circuit breaker for all workers, and make the messages that it postponed due.

        Workers send them after a second. Each batch of messages has its own transaction. Idempotent.
        """
        return ClosedBreaker(*self._released(sql.CLOSE_BREAKER, {"key": key}))

    def redirects(self) -> Redirects:
        """Return the redirect that an operator has switched on, the redirects of workers, and the blackout of today."""
        switched, workers, blackout = None, [], None
        for source, target, name, since, until_at, topics, exempt_topics in self._fetch(sql.READ_REDIRECTS):
            if source == "operator":
                switched = SwitchedRedirect(
                    target, name, since, until_at, tuple(topics or ()), tuple(exempt_topics or ())
                )
            elif source == "worker":
                workers.append(WorkerRedirect(name, target, since))
            else:
                blackout = name
        return Redirects(switched, tuple(workers), blackout)

    def set_redirect(
        self,
        target: str,
        *,
        duration: timedelta | None = None,
        topics: Collection[str] = (),
        exempt_topics: Collection[str] = (),
    ) -> SwitchedRedirect:
        """Redirect e-mail of all workers to `target`, for some time or until `clear_redirect`.

        `target` is an address, or `@` and a domain. With `topics` only their messages are redirected, and those of
        `exempt_topics` never: `mail.club.*` stands for all topics that begin with `mail.club.`. It replaces an earlier
        redirect, and takes precedence over `PGOUTBOX_REDIRECT_TO` of the workers, which still holds for other topics.
        Contents other than e-mail are held back.

        The call waits for two seconds after its commit. When it returns, no worker begins to hand an e-mail of these
        topics over to its real recipients, except to the exempt addresses and topics of its settings. In a transaction
        of your own connection it does not wait: count the two seconds from your commit. Raises `ArgumentError` for an
        invalid target, duration or topic, and `StateError` during a blackout.
        """
        try:
            parse_target("target", target)
            check_topics(topics, exempt_topics)
        except ConfigurationError as error:
            raise ArgumentError(*str(error).split(": ", 1)) from None
        if duration is not None and not timedelta(seconds=1) <= duration <= _MAX_REDIRECT:
            raise ArgumentError("duration", f"must be from 1 second to {_MAX_REDIRECT.days} days, not {duration}")
        covered = {"topics": list(topics), "exempt_topics": list(exempt_topics)}
        parameters = {"target": target, "seconds": _seconds(duration), **covered}
        ((set_by, set_at, until_at),) = self._act(sql.SET_REDIRECT, parameters)
        if self._connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
            time.sleep(REDIRECT_SECONDS)  # So long a worker may rely on what it has read.
        return SwitchedRedirect(target, set_by, set_at, until_at, tuple(sorted(topics)), tuple(sorted(exempt_topics)))

    def clear_redirect(self) -> ClearedRedirect:
        """Switch the redirect off for all workers, and make the messages that it held back due.

        Workers follow within two seconds. A redirect in the environment of a worker stays on. Each batch of messages
        has its own transaction. Idempotent.
        """
        return ClearedRedirect(*self._released(sql.CLEAR_REDIRECT, {}))

    def _released(self, statement: LiteralString, parameters: Mapping[str, object]) -> tuple[bool, int]:
        """Release held-back messages batch by batch. Return whether something held them, and their number."""
        act, was_held, message_count = self._named(), False, 0
        while True:
            ((holds, batch_count),) = self._act(statement, parameters, act)
            was_held |= holds
            message_count += batch_count
            if not batch_count:
                return was_held, message_count

    def home(self) -> Home:
        """Return the database that the schema belongs to, and the numbers of unfinished messages in this one."""
        (row,) = self._fetch(sql.SHOW_HOME)
        return Home._make(row)

    def adopt(self, deployment: str | None = None) -> None:
        """Let workers send from this database: after a restore, an upgrade of the server, or in a copy.

        With `deployment`, only workers with this `PGOUTBOX_DEPLOYMENT` send from it. Workers follow within seconds.
        """
        self._act(sql.ADOPT, {"deployment": deployment})

    def retention_rules(self) -> list[RetentionRule]:
        """Return the retention rules by topic and state; the rules for all topics come last."""
        return [RetentionRule._make(row) for row in self._fetch(sql.RETENTION_RULES)]

    def set_retention(self, topic: str, state: str, keep: timedelta | None) -> None:
        """Set how long messages of a topic are kept in this state; None means forever.

        The topic `*` stands for every topic without a rule of its own. With zero for `sent`, workers delete a message
        instead of setting it to `sent`; this takes effect within a minute. All other messages are deleted by
        `prune_by_retention`. The state `audit` stands for the acts of the audit. Its rule keeps at least 30 days, and
        only a member of the schema's owner may set it. Raises `ConfigurationError`.
        """
        if topic != "*":
            try:
                check_name("topic", topic)
            except ArgumentError as error:
                raise ConfigurationError(f"{error}; or * for all topics") from None
        if state not in retention.RETAINED:
            raise ConfigurationError(f"state={state!r}: must be one of {', '.join(retention.RETAINED)}")
        if keep is not None and not timedelta() <= keep <= retention.MAX_AGE:
            raise ConfigurationError(f"keep={keep}: must be from 0 to {retention.MAX_AGE.days} days")
        if state == retention.AUDIT and (topic != "*" or (keep is not None and keep < retention.AUDIT_AT_LEAST)):
            raise ConfigurationError(
                f"state=audit: needs the topic * and at least {retention.AUDIT_AT_LEAST.days} days, "
                f"got topic={topic!r}, keep={keep}"
            )
        self._act(sql.SET_RETENTION, {"topic": topic, "state": state, "keep_seconds": _seconds(keep)})

    def unset_retention(self, topic: str, state: str) -> bool:
        """Remove a rule. Return False if there was none."""
        ((was_set,),) = self._act(sql.UNSET_RETENTION, {"topic": topic, "state": state})
        return bool(was_set)

    def count_prunable(
        self,
        older_than: timedelta,
        *,
        states: Collection[State] = retention.PRUNED_BY_DEFAULT,
        topic: str | None = None,
    ) -> dict[State, int]:
        """Return the number of messages that `prune` with the same arguments would delete."""
        rows = self._fetch(sql.COUNT_PRUNABLE, retention.prune_parameters(older_than, states, topic))
        return {State(state): count for state, count in rows}

    def prune(
        self,
        older_than: timedelta,
        *,
        states: Collection[State] = retention.PRUNED_BY_DEFAULT,
        topic: str | None = None,
        batch_size: int = retention.PRUNE_BATCH,
        progress: Progress | None = None,
    ) -> PruneTotals:
        """Delete messages that have been in one of these final states for longer than `older_than`.

        This deletes their attempts too, and frees their dedupe keys. With `sent` it also frees the old keys of messages
        that were deleted as they were sent. `failed` messages wait for an operator, so they are deleted only if
        `states` names them. If one of them halted its ordering key, the messages behind it are claimable at once. Each
        batch is committed separately. Keys and contents without a message are deleted last.
        """
        which = retention.prune_parameters(older_than, states, topic)
        return retention.prune(self._connection, which | {"limit": batch_size}, self._as(self._named(which)), progress)

    def prune_by_retention(
        self, *, batch_size: int = retention.PRUNE_BATCH, progress: Progress | None = None
    ) -> PruneTotals:
        """Delete the messages that no retention rule keeps, with their attempts. Without rules nothing is deleted.

        This runs the same turn of maintenance as a worker, at once and to the end. It creates partitions ahead, and
        drops those of which no rule keeps a message. Other messages are deleted in batches. Each batch is committed
        separately, and follows the rule as it is then. This frees the dedupe keys of the messages, unless the rule
        keeps nothing: then the rule for `dedupe_key` applies to them. Any number of sessions may run it at once. Keys
        and contents without a message are deleted last.
        """
        turn = retention.MaintenanceRun(
            retention.read_maintenance_facts(self._connection),
            retention.PartitionCache(),
            batch_size=batch_size,
            progress=progress,
            write=self._as(self._named()),
        )
        turn.take(self._connection)
        if turn.errors:
            raise turn.errors[0]
        return turn.totals

    def _fetch(self, statement: LiteralString, parameters: Mapping[str, object] | None = None) -> list[TupleRow]:
        return operator_connection.fetch(self._connection, statement, parameters or {})

    def _answer(self, question: LiteralString, parameters: Mapping[str, object] | None = None) -> bool:
        ((answer,),) = self._fetch(question, parameters)
        return bool(answer)

    def _as(self, act: Mapping[str, object]) -> retention.Run:
        return lambda statement, parameters: self._act(statement, parameters, act)

    def _named(self, stated: Mapping[str, JsonValue] | None = None) -> Mapping[str, object]:
        """Return the name of an act, for each of its batches. The schema records `stated` apart from what it finds."""
        given = {name: value for name, value in (stated or {}).items() if value not in (None, [])}
        return {**self._actor, "act_id": uuid4(), "stated": Jsonb(given) if given else None}

    def _act(
        self, statement: LiteralString, parameters: Params, act: Mapping[str, object] | None = None
    ) -> list[TupleRow]:
        """Run one statement in a transaction that the schema records as this act, if it changes something."""
        return self._announced(act or self._named(), lambda: self._connection.execute(statement, parameters).fetchall())

    def _is_operator(self) -> bool:
        """Whether the role may announce acts. A producer enqueues and cancels without a record."""
        if self._may_act is None:
            ((self._may_act,),) = self._connection.execute(sql.MAY_ACT).fetchall()
        return bool(self._may_act)

    def _announced(self, act: Mapping[str, object], work: Callable[[], _T]) -> _T:
        """Run `work` in a transaction with the name of this act."""

        def announce_and_run() -> _T:
            if self._is_operator():
                self._connection.execute(sql.ANNOUNCE_ACT, act)
            return work()

        try:
            return operator_connection.transact(self._connection, announce_and_run)
        except (InvalidParameterValue, NullValueNotAllowed) as error:
            found = re.search(
                rf": ((?:items\[\d+\]\.)?{error.diag.column_name}): (.+)", error.diag.message_primary or ""
            )
            if error.diag.schema_name != "pgoutbox" or found is None:
                raise
            raise ArgumentError(found[1], found[2]) from None
        except CheckViolation as error:
            if error.diag.constraint_name not in ("queue_ceiling", "blackout"):
                raise
            raise StateError(f"{error.diag.message_primary}. {error.diag.message_hint}") from None


def _chosen(ids: Sequence[int] | None, owner: str | None, destination: str | None) -> dict[str, object]:
    """Return the parameters of a selection. Raises `ConfigurationError` unless it is made in exactly one way."""
    chosen: dict[str, object] = {"ids": None if ids is None else list(ids), "owner": owner, "destination": destination}
    if sum(value is not None for value in chosen.values()) != 1:
        raise ConfigurationError("ids, owner, destination: give exactly one of them")
    for name in ("owner", "destination"):
        if chosen[name] == "":
            raise ConfigurationError(f"{name}: must not be empty")
    return chosen


def _in_one_form(number: int, item: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """Return an item of an import with the address in the form that is compared."""
    address = item.get("address")
    return item if address is None else {**item, "address": check_address(f"items[{number}].address", address)}


def _seconds(duration: timedelta | None) -> float | None:
    return None if duration is None else duration.total_seconds()


def _slices(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    """Yield the items in slices of this size; one empty slice if there are none."""
    return (items[start : start + size] for start in range(0, len(items) or 1, size))


def _json_of(text: JsonValue, size: int | None) -> JsonValue:
    if not isinstance(text, str):
        return None
    if len(text.encode()) == size:
        with contextlib.suppress(ValueError, RecursionError):
            value = cast("JsonValue", json.loads(text))
            if is_plain(value, MAX_DEPTH):
                return value
    return JsonText(text)

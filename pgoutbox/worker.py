"""The worker: claim, dispatch, finish, and sleep until there is more to do.

One event loop. The main task claims and hands messages to the slots; outcomes collect in a buffer that a second task
writes in batches, on another connection; so claims, handlers and finishes overlap, and none of them waits for a single
message. What is in flight is in `_held`, from the claim's answer to the finish's, and those of it whose attempt before
was lost are in `_suspects`: any of them may end this process.

Nothing here decides about correctness: every write is fenced in its statement. If this process stops at any line,
the rows alone say what is left to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import re
import secrets
import socket
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import psycopg
from pydantic import JsonValue
from pydantic_core import from_json

from pgoutbox.alert import ALERT_TOPIC, alert_handler
from pgoutbox.breaker import Breakers
from pgoutbox.dispatch import (
    Context,
    Dispatcher,
    Send,
    describe,
    elapsed_clock,
    outcome_of_error,
    send_by,
)
from pgoutbox.doorbell import Bell, Doorbell
from pgoutbox.encryption import Keyring, is_sealed, keyring_of, unseal
from pgoutbox.errors import ConfigurationError, LeaseLostError, SchemaError
from pgoutbox.finisher import Finisher
from pgoutbox.lanes import Lanes
from pgoutbox.lease import LeaseKeeper
from pgoutbox.measures import Vitals
from pgoutbox.message import Message, Outcome, Permanent, State, Transient
from pgoutbox.observer import Observer
from pgoutbox.outbox import Outbox
from pgoutbox.settings import Settings
from pgoutbox.slots import RELEASED, Ending, Runner, Slots, ThreadWatch, Work
from pgoutbox.store import MIGRATE_HINT, ClaimedRow, Store, is_out_of_reach, is_passing
from pgoutbox.telemetry import Event, Telemetry, event_of_state
from pgoutbox.tracing import Tracing
from pgoutbox.transactions import Transactions
from pgoutbox.transports import Content, Transport, breaker_key, scheme_of
from pgoutbox.transports.redirect import Redirect
from pgoutbox.upkeep import Upkeep

_log = logging.getLogger("pgoutbox.worker")

Mode = Literal["run", "once", "drain"]

_MAX_PAUSE_SECONDS = 5.0
_MAX_PRODUCERS_PAUSE_SECONDS = 0.1
_LISTENER_DOWN_SWEEP_SECONDS = 1.0
_FOREIGN_WORK_SECONDS = 1.0
_PATIENCE_SECONDS = 0.1
_RING_SECONDS = 1.0
_ROUND_TRIP_SECONDS = 0.002
_STUBBORN_CONFLICTS = 3
_FRUITLESS_WAKES = 20
_FRUITLESS_PAUSE_SECONDS = 0.05
_SENDING = State.SENDING  # To look a member up costs more than to compare with it.
_KEPT_CONTENTS = 16
_IN_FLIGHT_CONSTRAINTS = {"message_live_in_flight", "message_live_ordered_in_flight"}
_LOST_RACES = (
    psycopg.errors.SerializationFailure,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.LockNotAvailable,
)
_EMPTY_HEADERS: Mapping[str, str] = {}
_Content = JsonValue | Permanent | Transient  # What a fan-out shares, or why it cannot be read.


@dataclass(frozen=True, slots=True)
class QueueShare:
    """A queue that a worker serves. Without weights, queues are served strictly in the order given."""

    name: str
    weight: int | None = None


def parse_queues(values: Sequence[str]) -> tuple[QueueShare, ...]:
    """Read `name` or `name:weight` from the command line; all or none have a weight. Nothing given means `default`.

    >>> parse_queues(["critical:6", "bulk:1"])
    (QueueShare(name='critical', weight=6), QueueShare(name='bulk', weight=1))
    """
    shares = []
    for value in values:
        match = re.fullmatch(r"([a-z][a-z0-9_.-]{0,62})(?::([1-9][0-9]{0,3}))?", value)
        if match is None:
            raise ConfigurationError(
                f"queue {value!r}: give NAME or NAME:WEIGHT, the name of a-z, 0-9, underscore, dot and hyphen, "
                "the weight from 1 to 9999"
            )
        shares.append(QueueShare(match[1], int(match[2]) if match[2] else None))
    if len({share.name for share in shares}) < len(shares):
        raise ConfigurationError(f"queues {', '.join(values)}: each may be named once")
    if len({share.weight is None for share in shares}) > 1:
        raise ConfigurationError(f"queues {', '.join(values)}: give all of them a weight, or none")
    return tuple(shares) or (QueueShare("default"),)


class Worker:
    """Delivers the messages of some queues with the handlers of an outbox.

    `await worker.run()` works until `stop()`; `await worker.run_once()` works off what is due and returns;
    `await worker.drain()` also waits for retries. Several workers, on any machines, share the work by the rows alone.
    """

    def __init__(
        self,
        outbox: Outbox,
        *,
        settings: Settings | None = None,
        queues: Sequence[QueueShare] = (QueueShare("default"),),
        transports: Mapping[str, Transport] | None = None,
    ) -> None:
        self._settings = settings if settings is not None else outbox.settings
        self._handlers = dict(outbox.handlers)
        if not self._handlers:
            raise ConfigurationError("the outbox has no handlers: register one with @outbox.handler(topic)")
        if self._settings.alert_destination is not None:
            self._handlers.setdefault(ALERT_TOPIC, alert_handler())
        self._topics = sorted(self._handlers)
        self._hold_topics = sorted(t for t, h in self._handlers.items() if h.on_unknown == "hold")
        self._shares = tuple(queues)
        self._queue_names = [share.name for share in queues]
        self._lanes = {share.name: Lanes(share.name) for share in queues}
        self._credits = {share.name: 0 for share in queues}
        self.name = f"{self._settings.worker_name or socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        self.telemetry = Telemetry(_log)
        self._redirect = Redirect.at_start(self._settings)
        self._keyring = keyring_of(self._settings.encryption_keys)
        self._transports = transports if transports is not None else outbox.transports_for(self._settings)
        self._held: dict[int, Context] = {}
        self._suspects: list[Context] = []
        self._contents: dict[int, _Content] = {}
        self._prefetch = 0
        self._stopping = False
        self._work_ahead = False
        self._look_from_beginning = True
        self._ring_is_unanswered = False
        self._was_rung = False
        self._rang_at = 0.0
        self._fruitless_count = 0
        self._conflict_count = 0
        self._looked_at = elapsed_clock()
        self._database_down = False
        self._is_started = False
        self._run: Runner = self._run_handler
        self._pause = 0.0
        self._wake = asyncio.Event()  # There may be something to claim, or the worker is to stop.
        self._progress = asyncio.Event()  # An attempt has ended, or its end is written.

    # --- lifecycle ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until `stop()`, once the server can be reached: one that is down, starting or full is waited for.

        A database that cannot be worked with is a `ConfigurationError` or `SchemaError`, and a refusal that is not
        going to pass, such as that of a password, is the driver's error.
        """
        async with (
            self._at_work(listen=self._settings.listen, patient=True, serves=True),
            Upkeep(self._settings, self._store, self.telemetry),
        ):
            await self._work()

    async def run_once(self) -> None:
        """Work off everything that is due now, then return. Overlapping runs share the work.

        Like `drain` it waits for no server: an error of the first connection is raised.
        """
        async with self._at_work(listen=False):
            await self._work_off()

    async def drain(self) -> None:
        """Work until nothing is due, in flight or waiting for a retry in these queues.

        Messages that were scheduled for later and never attempted are not waited for.
        """
        async with self._at_work(listen=False):
            while not self._stopping:
                self._wake.clear()
                await self._work_off()
                if not await self._store.count_owed(self._queue_names, self._topics):
                    return
                due = await self._next_due_seconds()
                # What another worker has may come back at any time, and nobody rings for a drain.
                await self._sleep(_FOREIGN_WORK_SECONDS if due is None else min(due, _FOREIGN_WORK_SECONDS))

    def stop(self) -> None:
        """Begin to stop: claim nothing more, wait for handlers up to the grace time, release the rest. Idempotent.

        Call it on the event loop.
        """
        if not self._stopping:
            self._stopping = True
            self.telemetry.report(logging.INFO, Event.WORKER_STOPPING, "worker stopping", held_count=len(self._held))
        self._wake.set()
        self._progress.set()

    @contextlib.asynccontextmanager
    async def _at_work(self, *, listen: bool, patient: bool = False, serves: bool = False) -> AsyncIterator[None]:
        async with (
            Observer(self, self._settings, self.telemetry, serves=serves) as self.observer,
            self._running(listen=listen, patient=patient),
            self.observer.at_work(self._store.server_time),
        ):
            yield

    def vitals(self) -> Vitals:
        """How the worker is. Reads what is there, so that any thread can ask."""
        claimed_at = None if self.telemetry.measures is None else self.telemetry.measures.claimed_at
        now = elapsed_clock()
        is_started = self._is_started
        return Vitals(
            is_started=is_started,
            is_stopping=self._stopping,
            in_flight=len(self._held),
            slots=self._slots.capacity if is_started else 0,
            busy=self._slots.running_count if is_started else 0,
            abandoned=self._slots.outlived_count if is_started else 0,
            is_listener_up=None if not is_started or self._bell is None else self._bell.is_up,
            is_database_up=is_started and not self._database_down,
            looked_seconds_ago=now - self._looked_at,
            claimed_seconds_ago=None if claimed_at is None else now - claimed_at,
            breakers_open=self._breakers.open_count if is_started else 0,
        )

    @contextlib.asynccontextmanager
    async def _running(self, *, listen: bool, patient: bool = False) -> AsyncIterator[None]:
        settings = self._settings
        self._store = Store(settings, worker=self.name)
        self._run = self._run_handler
        send: Send = send_by
        if settings.otel_traces and (tracing := Tracing.at_start()) is not None:
            self._run = partial(self._run_traced, tracing)
            send = partial(_send_traced, tracing)
        self._threads = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="pgoutbox-handler")
        self._breakers = Breakers(
            self._store,
            self._transports,
            settings,
            self.telemetry,
            alert_queue=self._queue_names[0] if ALERT_TOPIC in self._handlers else None,
            hold_topics=self._hold_topics,
            hand_over=send,
        )
        self._dispatcher = Dispatcher(
            self._transports,
            self._threads,
            lease_seconds=settings.lease_seconds,
            redirect_to=settings.redirect_to,
            send=self._breakers.send if settings.breaker else send,
        )
        self._transactions = Transactions(settings, self._store, self._dispatcher, self._threads)
        self._finisher = Finisher(
            self._store,
            self._held,
            batch_size=settings.batch_size,
            redacted_names=settings.redacted_names,
            on_ended=self._note_progress,
            on_written=self._note_written,
            on_successors=self._wake_for_successors,
            on_pending=self._wake.set,
            telemetry=self.telemetry,
        )
        self._slots = Slots(
            self._run_attempts,
            concurrency=settings.concurrency,
            default_timeout_seconds=settings.handler_timeout_seconds,
            on_outcome=self._finisher.collect,
            on_free=self._note_progress,
            telemetry=self.telemetry,
        )
        self._bell = Doorbell(settings, self._on_ring, self.telemetry) if listen else None
        self._keeper = LeaseKeeper(settings, self._held, self.telemetry, spare=self._store.claims)
        try:
            await self._check_server(patient=patient)
            self._keeper.start()
            if self._bell is not None and not self._stopping:
                await self._bell.start()
            self._finishing = asyncio.create_task(self._finisher.run(), name="pgoutbox-finisher")
            self._finishing.add_done_callback(lambda task: None if task.cancelled() else self.stop())
            self.telemetry.report(
                logging.INFO, Event.WORKER_STARTED, "worker started", worker=self.name, queues=self._queue_names
            )
            self._is_started = True
            if self._redirect is not None:
                self.telemetry.report(logging.WARNING, Event.REDIRECTING, "e-mail is redirected, the rest held back")
            try:
                yield
            finally:
                await self._wind_down()
        finally:
            await self._close()
            self.telemetry.report(logging.INFO, Event.WORKER_STOPPED, "worker stopped", worker=self.name)

    async def _check_server(self, *, patient: bool) -> None:
        while not self._stopping:
            try:
                await self._store.check_server()
            except (psycopg.Error, OSError) as error:
                if not patient or not await is_out_of_reach(error, self._settings.require_dsn(), self._settings):
                    raise
                await self._endure(error)
            else:
                self._database_is_up()
                return

    async def _wind_down(self) -> None:
        self._slots.give_back()
        deadline = asyncio.get_running_loop().time() + self._settings.shutdown_grace_seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._until_idle(finished=False)
        self._breakers.stop()
        await self._slots.stop()
        for context in [context for context in self._held.values() if not context.done]:
            context.done = True  # Its handler has ignored its cancellation.
            self._finisher.collect(context, RELEASED)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(5.0, deadline - asyncio.get_running_loop().time())):
                await self._until_idle(finished=True)
                if self.telemetry.counts[Event.RELEASED]:
                    await self._ring_all(self._queue_names)
        self._finishing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._finishing  # An error that ended it ends the worker.

    async def _close(self) -> None:
        if self._bell is not None:
            await self._bell.stop()
        await self._keeper.stop()
        await self._transactions.close()
        await self._breakers.close()
        for transport in {id(t): t for t in self._transports.values()}.values():
            await transport.aclose()
        await self._store.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _until_idle(self, *, finished: bool) -> None:
        """Wait until no handler runs, or with `finished` until every outcome is written."""
        while (self._held and not self._finishing.done()) if finished else self._slots.open_count:
            self._progress.clear()
            await self._progress.wait()

    # --- claim --------------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        may_leave_out_others = True
        while not self._stopping:
            self._wake.clear()
            self._progress.clear()
            room = self._room()
            if room == 0:
                await self._ring_if_saturated()
                await self._progress.wait()
                continue
            # A ring speaks of a fresh message. Between two such looks all lanes have their turn.
            fresh_only = may_leave_out_others and self._ring_is_unanswered
            may_leave_out_others = not fresh_only
            from_beginning = False
            if fresh_only:
                self._ring_is_unanswered = False
            else:
                from_beginning, self._look_from_beginning = self._look_from_beginning, False
            found = await self._claim_round(room, from_beginning=from_beginning, fresh_only=fresh_only)
            # Only a look at everything that is due may end in sleep.
            self._look_from_beginning |= not (found and self._work_ahead)
            if found:
                await self._stay_awake()
            elif found == 0 and from_beginning and not self._work_ahead:
                await self._rest()

    async def _work_off(self) -> None:
        from_beginning = True
        while not self._stopping:
            self._progress.clear()
            room = self._room()
            if room == 0:
                await self._progress.wait()
                continue
            was_idle = not self._held  # What ends during the claim may be due again, and the claim does not see it.
            found = await self._claim_round(room, from_beginning=from_beginning)
            if found == 0 and from_beginning and not self._work_ahead:
                if was_idle:
                    return
                await self._progress.wait()
            from_beginning = found == 0

    def _room(self) -> int:
        """How many messages to claim now: a batch's worth, or none while enough wait for their handlers.

        More than the handlers can take at once are claimed only while they keep up: the surplus doubles when it was
        used up although more was waiting in the table, and halves when a message waited long in this process.
        """
        slots = self._slots
        settings = self._settings
        if slots.longest_wait_seconds > _PATIENCE_SECONDS:
            self._prefetch //= 2
        elif slots.waiting_count == 0 and self._work_ahead:
            self._prefetch = min(2 * settings.batch_size, max(1, self._prefetch * 2))
        slots.longest_wait_seconds = 0.0
        open_limit = slots.capacity + self._prefetch
        if slots.capacity == 0 or (slots.open_count >= slots.capacity and slots.waiting_count > self._prefetch // 2):
            return 0
        held_limit = open_limit + 2 * settings.batch_size
        return max(0, min(settings.batch_size, open_limit - slots.open_count, held_limit - len(self._held)))

    async def _claim_round(self, room: int, *, from_beginning: bool, fresh_only: bool = False) -> int | None:
        """Claim from the queues in their order until the room is used up. None if the database did not let us."""
        found = 0
        self._work_ahead = False
        self._looked_at = elapsed_clock()
        if self._conflict_count > _STUBBORN_CONFLICTS:
            room = 1  # Claims of several rows meet at one coalesce key again and again: one row cannot.
        for queue in self._queue_order():
            lanes = self._lanes[queue]
            count = await self._claim(lanes, room, from_beginning=from_beginning, fresh_only=fresh_only)
            if count is None:
                return None
            self._conflict_count = 0
            found += count
            room -= count
            if room <= 0:
                break
        return found

    def _queue_order(self) -> list[str]:
        if self._shares[0].weight is None:
            return self._queue_names
        # Smooth weighted round robin: who is owed most goes first, and pays for it.
        for share in self._shares:
            self._credits[share.name] += share.weight or 0
        order = sorted(self._queue_names, key=lambda name: -self._credits[name])
        self._credits[order[0]] -= sum(share.weight or 0 for share in self._shares)
        return order

    async def _claim(self, lanes: Lanes, room: int, *, from_beginning: bool, fresh_only: bool) -> int | None:
        """Claim from one queue. Messages with an ordering key and the others take turns at being first."""
        if fresh_only or not lanes.has_ordered:
            return await self._claim_unordered(lanes, room, from_beginning=from_beginning, fresh_only=fresh_only)
        lanes.ordered_first = not lanes.ordered_first
        found = 0
        for ordered in (lanes.ordered_first, not lanes.ordered_first):
            if room - found <= 0:
                self._work_ahead = True
                break
            if ordered:
                count = await self._claim_ordered(lanes, room - found, complete=from_beginning)
            else:
                count = await self._claim_unordered(
                    lanes, room - found, from_beginning=from_beginning, fresh_only=False
                )
            if count is None:
                return None
            found += count
        return found

    async def _claim_ordered(self, lanes: Lanes, room: int, *, complete: bool) -> int | None:
        """Go on behind the key where the last look ended; a complete look goes round once if it finds nothing."""
        began_after, end_count = lanes.after_key, 0
        while not self._stopping:
            began_at = elapsed_clock()
            try:
                message_ids, lanes.after_key = await self._store.find_ordered(
                    lanes.queue, topics=self._topics, after_key=lanes.after_key, key_limit=room
                )
                rows = []
                if message_ids:
                    rows = await self._store.claim_ordered(lanes.queue, message_ids, hold_topics=self._hold_topics)
            except (psycopg.Error, OSError) as error:
                await self._endure(error)
                return None
            self._database_is_up()
            self._measure_claim(lanes.queue, rows)
            if rows:
                lanes.is_limited = rows[0].is_limited
                self._work_ahead = True
                await self._take_over(rows, began_at)
                return len(rows)
            end_count += lanes.after_key == ""
            # The keys behind which it began may be gone by now: then the second end is all there is.
            if not complete or end_count == 2 or (end_count == 1 and lanes.after_key >= began_after):
                break
        return 0

    async def _claim_unordered(self, lanes: Lanes, room: int, *, from_beginning: bool, fresh_only: bool) -> int | None:
        began_at = elapsed_clock()
        if fresh_only:
            plan = lanes.plan_fresh(room)
        else:
            plan = lanes.plan(room, now=began_at, from_beginning=from_beginning, suspects_in_flight=len(self._suspects))
        try:
            rows = await self._store.claim(
                lanes.queue,
                topics=self._topics,
                hold_topics=self._hold_topics,
                fresh_limit=plan.fresh_limit,
                total=plan.total,
                fresh_floor=plan.fresh_floor,
                retry_floor=plan.retry_floor,
                suspect_limit=plan.suspect_limit,
                fresh_only=plan.fresh_only,
            )
        except (psycopg.Error, OSError) as error:
            await self._endure(error)
            return None
        self._database_is_up()
        self._measure_claim(lanes.queue, rows)
        self._work_ahead |= lanes.learn(plan, rows, began_at=began_at, ended_at=elapsed_clock())
        if rows:
            await self._take_over(rows, began_at)
        return len(rows)

    async def _take_over(self, rows: Sequence[ClaimedRow], leased_at: float) -> None:
        contents = await self._contents_of(rows)
        works: list[Work] = []
        batches: dict[str, list[Context]] = {}
        ended = []
        suspects = []
        for row in rows:
            if row.state != _SENDING:
                ended.append(row)
                continue
            handler = self._handlers[row.topic]
            message, problem = _message_of(row, contents or {}, self._keyring)
            used_count = row.attempt_count - row.max_attempts + row.attempt_budget
            context = Context(message, handler, leased_at, self._keeper.ensure, used_count)
            self._held[row.id] = context
            if row.content_id is not None and row.content_id not in (contents or {}):
                context.done = True
                gone = Permanent(f"its content {row.content_id} is gone: somebody deleted it")
                self._finisher.collect(context, RELEASED if contents is None else gone)
                continue
            if row.former_state == _SENDING:
                suspects.append(context)
            if problem is not None or row.superseded:
                context.done = True
                # Superseded since the claim began: a retry is what the finish turns into `skipped`.
                self._finisher.collect(context, problem or Transient("superseded"))
                continue
            if handler.max_batch is None:
                works.append((context,))
            else:
                batches.setdefault(row.topic, []).append(context)
            if row.former_state == _SENDING:
                self._report_row(logging.WARNING, Event.LEASE_EXPIRED, "lease expired, trying again", row)
        for contexts in batches.values():
            size = contexts[0].handler.max_batch or 1
            works.extend(contexts[start : start + size] for start in range(0, len(contexts), size))
        self._watch_suspects(suspects)
        self.telemetry.count(Event.CLAIMED, len(rows) - len(ended))
        self._slots.put(works)
        if ended:
            await self._account_for_ended(ended)

    def _measure_claim(self, queue: str, rows: Sequence[ClaimedRow]) -> None:
        if (measures := self.telemetry.measures) is not None:
            topics = [row.topic for row in rows if row.state == _SENDING]
            measures.claim(queue, topics, at=elapsed_clock())

    async def _contents_of(self, rows: Sequence[ClaimedRow]) -> Mapping[int, _Content] | None:
        """The contents that these rows name, those that exist, each decrypted and parsed once for all of its messages.

        None if the database did not answer.
        """
        asked = {row.content_id for row in rows if row.content_id is not None and row.state == _SENDING}
        contents = {content_id: self._contents[content_id] for content_id in asked & self._contents.keys()}
        if missing := sorted(asked - contents.keys()):
            try:
                found = await self._store.contents(missing)
            except (psycopg.Error, OSError) as error:
                await self._endure(error)
                return None
            contents.update((content_id, _read_content(text, self._keyring)) for content_id, text in found.items())
            # The messages of a fan-out come together: the last contents are those that are asked for next.
            self._contents = dict(list((self._contents | contents).items())[-_KEPT_CONTENTS:])
        return contents

    async def _account_for_ended(self, rows: Sequence[ClaimedRow]) -> None:
        for row in rows:
            event = event_of_state(State(row.state))
            level = logging.WARNING if row.state == State.FAILED else logging.DEBUG
            self._report_row(level, event, "message ended without an attempt", row)
            if self.telemetry.measures is not None:
                self.telemetry.measures.unattempted(row.topic, row.queue, row.state)
        freed = [row for row in rows if row.former_state == _SENDING and row.coalesce_key is not None]
        if not freed:
            return
        try:
            queues = await self._store.queues_of_successors(
                [row.id for row in freed],
                [row.topic for row in freed],
                [row.coalesce_key or "" for row in freed],
            )
        except (psycopg.Error, OSError) as error:
            await self._endure(error)
        else:
            await self._wake_for_successors(queues)

    def _report_row(self, level: int, event: Event, text: str, row: ClaimedRow) -> None:
        self.telemetry.report(
            level,
            event,
            text,
            message_id=row.id,
            topic=row.topic,
            queue=row.queue,
            attempt_count=row.attempt_count,
            state=row.state,
        )

    # --- suspects -----------------------------------------------------------------------------------------------------

    def _watch_suspects(self, suspects: list[Context]) -> None:
        """These count as suspects in flight until they have ended, but for no longer than a lease."""
        if suspects:
            self._suspects += suspects
            asyncio.get_running_loop().call_later(self._settings.lease_seconds, self._trust, suspects)

    def _trust(self, suspects: Sequence[Context]) -> None:
        self._suspects = [context for context in self._suspects if context not in suspects]
        if any(lanes.may_take_suspects(len(self._suspects)) for lanes in self._lanes.values()):
            self._progress.set()
            self._wake.set()

    def _note_progress(self) -> None:
        """An attempt has ended, or its end is written."""
        self._progress.set()
        if self._suspects:
            ended = [context for context in self._suspects if self._held.get(context.message.id) is not context]
            if ended:
                self._trust(ended)

    def _note_written(self) -> None:
        self._note_progress()
        if any(lanes.is_limited or lanes.has_ordered for lanes in self._lanes.values()):
            self._wake.set()  # The end of an attempt may be what the next one waits for.

    # --- sleep --------------------------------------------------------------------------------------------------------

    def _on_ring(self, queue: str | None) -> None:
        if queue is None or queue in self._lanes:
            self._ring_is_unanswered = self._was_rung = True
            self._wake.set()

    async def _wake_for_successors(self, queues: Sequence[str]) -> None:
        """Messages that had to wait for some of ours can be claimed now, here or by the workers of their queues."""
        if not self._lanes.keys().isdisjoint(queues):
            self._look_from_beginning = True
            self._wake.set()
        foreign = [queue for queue in queues if queue not in self._lanes]
        if foreign:
            await self._ring_all(foreign)

    async def _stay_awake(self) -> None:
        """Give up the bells, so that producers need not ring while this worker looks by itself."""
        self._fruitless_count = 0
        self._was_rung = False
        if self._bell is not None:
            if self._bell.is_armed:
                await asyncio.sleep(0)  # The handlers of what was claimed start first.
            await self._bell.disarm()

    async def _rest(self) -> None:
        """Sleep until a bell rings, a message falls due or the sweep; but look once more after arming the bell."""
        self._prefetch = 0
        self._fruitless_count = self._fruitless_count + 1 if self._was_rung else 0
        self._was_rung = False
        if self._fruitless_count == _FRUITLESS_WAKES and self._bell is not None:
            await self._bell.disarm()  # The queue may be paused, or at its limit: then nobody needs to ring.
        pause = 0.001
        while not self._stopping:
            bell = Bell.DOWN if self._bell is None else await self._bell.arm(self._queue_names)
            if bell in (Bell.DOWN, Bell.STILL_ARMED):
                break
            room = self._room()
            if room == 0:
                return
            # What woke the worker since it asked for the bell is not forgotten: it may say that this bell was given up.
            if self._stopping:
                return
            found = await self._claim_round(room, from_beginning=True)
            if found is None:
                self._look_from_beginning = True
                return
            if found or self._work_ahead:
                await self._stay_awake()
                return
            if bell is Bell.ARMED:
                break
            # Open transactions may have enqueued something, and no ring will tell when they commit.
            await self._sleep(pause)
            if self._stopping:
                return
            self._wake.clear()  # The claim that follows the next answer sees what this was about.
            pause = min(pause * 2, _MAX_PRODUCERS_PAUSE_SECONDS)
        await self._sleep_long()

    async def _sleep_long(self) -> None:
        if self._fruitless_count > _FRUITLESS_WAKES:
            # Anyone may send a NOTIFY: a flood of rings that lead nowhere costs so many claims a second and no more.
            await asyncio.sleep(_FRUITLESS_PAUSE_SECONDS)
        limit = self._settings.sweep_seconds
        if self._bell is not None and not self._bell.is_up:
            limit = min(limit, _LISTENER_DOWN_SWEEP_SECONDS)
        if self._bell is not None and self._bell.unarmed_seconds is not None:
            limit = min(limit, self._bell.unarmed_seconds)
        self._look_from_beginning = True
        try:
            due = await self._next_due_seconds()
        except (psycopg.Error, OSError) as error:
            await self._endure(error)
        else:
            await self._sleep(limit if due is None else min(limit, due))

    async def _next_due_seconds(self) -> float | None:
        # What fell due since the last claim began is in neither answer unless it is asked for; and the question may
        # reach the server later than it was asked.
        slack = _ROUND_TRIP_SECONDS
        while True:
            asked_at = elapsed_clock()
            due, ordered = await self._store.next_due_seconds(
                self._queue_names, since_seconds=asked_at - self._looked_at + slack
            )
            if self._note_ordered(ordered):
                return 0.0
            took = elapsed_clock() - asked_at
            if took <= slack or (due is not None and due <= 0):
                return due
            slack = 2 * took

    def _note_ordered(self, queues: Collection[str]) -> bool:
        """Remember which queues hold messages with an ordering key. Returns whether one was not known to."""
        is_news = any(not self._lanes[queue].has_ordered for queue in queues)
        for lanes in self._lanes.values():
            lanes.has_ordered = lanes.queue in queues
        return is_news

    async def _sleep(self, seconds: float) -> bool:
        """Sleep until woken; False if the time ran out before that."""
        try:
            async with asyncio.timeout(max(seconds, 0.0)):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    async def _ring_if_saturated(self) -> None:
        """Every handler is busy and more is waiting: let idle replicas help."""
        now = elapsed_clock()
        if self._work_ahead and now - self._rang_at >= _RING_SECONDS:
            await self._ring_all(self._queue_names)

    async def _ring_all(self, queues: Sequence[str]) -> None:
        self._rang_at = elapsed_clock()
        try:
            await self._store.ring(queues)
        except (psycopg.Error, OSError) as error:
            await self._endure(error)

    async def _endure(self, error: BaseException) -> None:
        """Pause after an error of the database that will pass; raise one that will not."""
        if isinstance(error, psycopg.errors.UniqueViolation) and error.diag.constraint_name in _IN_FLIGHT_CONSTRAINTS:
            self._conflict_count += 1
            return  # Two workers met at one coalesce key; the other one has it.
        if isinstance(error, _LOST_RACES):
            return  # Two claims met at one row; the next one sees how it ended.
        if isinstance(error, (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedFunction)):
            raise SchemaError(f"the schema pgoutbox is gone; {MIGRATE_HINT}") from error
        if not is_passing(error):
            raise error
        if not self._database_down:
            self._database_down = True
            self._pause = 0.05
            self.telemetry.report(
                logging.WARNING, Event.DATABASE_LOST, "database does not answer, trying again", reason=_name_of(error)
            )
        await self._sleep_through(self._pause * (0.5 + random.random() / 2))  # noqa: S311 - jitter guards nothing
        self._pause = min(self._pause * 2, _MAX_PAUSE_SECONDS)

    async def _sleep_through(self, seconds: float) -> None:
        """Sleep without being woken by rings, which are many while the database restarts."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not self._stopping and loop.time() < deadline:
            self._wake.clear()
            await self._sleep(deadline - loop.time())

    def _database_is_up(self) -> None:
        if self._database_down:
            self._database_down = False
            self.telemetry.report(logging.INFO, Event.DATABASE_BACK, "database answers again")

    # --- attempt ------------------------------------------------------------------------------------------------------

    async def _run_attempts(self, work: Work, watch_thread: ThreadWatch) -> Sequence[Ending]:
        lapsing_at = elapsed_clock() - self._settings.lease_seconds / 2
        for context in work:
            if context.leased_at < lapsing_at or context.overtaken is not None:
                return await self._run_if_still_held(work, watch_thread)
        return await (self._run_admitted if self._breakers.watches_any else self._run)(work, watch_thread)

    async def _run_admitted(self, work: Work, watch_thread: ThreadWatch) -> Sequence[Ending]:
        refusals = {c: refusal for c in work if (refusal := await self._breakers.refusal(c.message)) is not None}
        admitted = [context for context in work if context not in refusals]
        try:
            endings = iter(await self._run(admitted, watch_thread) if admitted else ())
            return [refusals.get(context) or next(endings) for context in work]
        finally:
            for context in admitted:
                self._breakers.let_go(context.message)

    async def _run_traced(self, tracing: Tracing, work: Work, watch_thread: ThreadWatch) -> Sequence[Ending]:
        messages = [context.message for context in work]
        return await tracing.attempt(messages, lambda: self._run_handler(work, watch_thread))

    async def _run_handler(self, work: Work, watch_thread: ThreadWatch) -> Sequence[Ending]:
        context = work[0]
        if context.handler.max_batch is not None:
            return await self._dispatcher.run_batch(work, watch_thread)
        if context.handler.transactional:
            return (await self._transactions.run(context, watch_thread),)
        return (await self._dispatcher.run(context, watch_thread),)

    async def _run_if_still_held(self, work: Work, watch_thread: ThreadWatch) -> Sequence[Ending]:
        """The process may have been suspended between the claim and now: ask before anything is handed over."""
        endings: dict[int, Ending] = {}
        for context in work:
            try:
                await context.ensure_lease()
            except LeaseLostError as error:
                endings[context.message.id] = outcome_of_error(context.handler, error)
            except (psycopg.Error, OSError):
                endings[context.message.id] = RELEASED
        held = [context for context in work if context.message.id not in endings]
        if held:
            results = await self._run_admitted(held, watch_thread)
            endings.update((c.message.id, e) for c, e in zip(held, results, strict=True))
        return [endings[context.message.id] for context in work]


async def _send_traced(tracing: Tracing, transport: Transport, message: Message[object], content: Content) -> Outcome:
    scheme = content.scheme if message.destination is None else scheme_of(message.destination)
    key = breaker_key(transport, message, content)
    return await tracing.hand_over(scheme, key, lambda: transport.send(message, content))


def _message_of(
    row: ClaimedRow, contents: Mapping[int, _Content], keyring: Keyring | None
) -> tuple[Message[object], Permanent | Transient | None]:
    """The message, and what is wrong if its payload cannot be read: one such row must not keep the others."""
    problem: Permanent | Transient | None = None
    payload = headers = None
    content: JsonValue = None
    if row.content_id is not None:
        found = contents.get(row.content_id)
        if isinstance(found, (Permanent, Transient)):
            problem = found
        else:
            content = found
    try:
        headers = None if row.headers_json is None else _read_json(row.headers_json)
        payload = _read_json(row.payload_json)
        if type(payload) is dict and is_sealed(payload):
            payload = _read_json(unseal(payload, keyring))
    except (ValueError, RecursionError) as error:
        problem = Permanent(f"payload: cannot be read as JSON: {describe(error)}")
    except Transient as missing_key:
        problem, payload = missing_key, None
    message: Message[object] = Message(
        row.id,
        row.topic,
        row.queue,
        row.destination,
        payload,
        cast("Mapping[str, str]", headers) if headers is not None else _EMPTY_HEADERS,
        row.attempt_count,
        row.max_attempts,
        row.created_at,
        row.available_at,
        row.coalesce_key,
        row.ordering_key,
        content,
    )
    return message, problem


def _read_content(text: str, keyring: Keyring | None) -> _Content:
    try:
        content = _read_json(text)
        return _read_json(unseal(content, keyring)) if is_sealed(content) else content
    except (ValueError, RecursionError) as error:
        return Permanent(f"content: cannot be read as JSON: {describe(error)}")
    except Transient as missing_key:
        return missing_key


def _read_json(text: str) -> JsonValue:
    try:
        return cast("JsonValue", from_json(text))
    except ValueError:
        # The fast reader has a limit of its own on nesting.
        return cast("JsonValue", json.loads(text))


def _name_of(error: BaseException) -> str:
    name = type(error).__name__
    if isinstance(error, psycopg.OperationalError) and error.sqlstate is None:
        return f"{name}: {' '.join(str(error).split())[:300]}"  # Of a connection: only the words tell what is wrong.
    sqlstate = getattr(error, "sqlstate", None)
    return name if sqlstate is None else f"{name} {sqlstate}"

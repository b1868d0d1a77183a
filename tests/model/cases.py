"""The explored cases and their expected results: models that hold, guards that are needed, and known limits."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from tests.model import breaker, delivery, doorbell, limits, ordering, retention
from tests.model.breaker import Breaker
from tests.model.delivery import Delivery
from tests.model.doorbell import Doorbell
from tests.model.explorer import Exploration, explore
from tests.model.limits import Limited
from tests.model.ordering import Ordering
from tests.model.retention import Retention

Model = Delivery | Doorbell | Ordering | Limited | Breaker | Retention
Guard = delivery.Guard | doorbell.Guard | ordering.Guard | limits.Guard | breaker.Guard | retention.Guard

ATTEMPTS = Delivery(max_attempts=2, releases=1, renews=True)
FEW_ATTEMPTS = replace(ATTEMPTS, max_attempts=1, redrives=1)
ATTEMPTS_AND_REDRIVE = replace(ATTEMPTS, redrives=1)
CANCEL = Delivery(max_attempts=2, cancels=1, renews=True)
CANCEL_AND_REDRIVE = Delivery(cancels=1, redrives=1)
CANCEL_FAILOVER = Delivery(cancels=1, failovers=1)
CANCELS = replace(CANCEL, cancels=2, releases=1)
TWO_IN_ONE_CLAIM = Delivery(messages=2, renews=True, share_process=True)
TRAFFIC = Delivery(cancels=1, releases=1, flows=True)
FAILOVER = Delivery(renews=True, failovers=1)
FAILOVER_OF_ONE = replace(FAILOVER, share_process=True)
FAILOVER_LOSES_MESSAGE = replace(FAILOVER_OF_ONE, loses_messages=True)
FAILOVER_LOSES_ONE_OF_TWO = replace(FAILOVER_LOSES_MESSAGE, messages=2)
FAILOVER_UNANSWERED = replace(FAILOVER_OF_ONE, releases=1, lose_answers=True)
SUSPENDED = Delivery(max_attempts=2, renews=True, share_process=True)
UNANSWERED = Delivery(releases=2, lose_answers=True)
THREADS = replace(FEW_ATTEMPTS, have_threads=True)
KEY = Delivery(producers=(1, 1))
KEY_AND_REDRIVE = replace(KEY, redrives=1)
KEY_AND_ATTEMPTS = replace(KEY, max_attempts=2)
KEY_AND_CANCEL = replace(KEY, cancels=1)
KEY_AND_TRAFFIC = replace(KEY, flows=True)
THREE_OF_A_KEY = replace(KEY, producers=(2, 1))
FLEET = Doorbell(sends=((0,), (1,)), handles=(0b11, 0b11))
FLEET_FULL = Doorbell(sends=((0,),), handles=(0b01, 0b01), fills=True)
FLEET_HUSHES = replace(FLEET_FULL, hushes=True)
ROLLING = Doorbell(sends=((0,), (1,)), handles=(0b01, 0b10))
ROLLING_HUSHES = Doorbell(sends=((0, 1),), handles=(0b01, 0b10), hushes=True)
FROZEN = Doorbell(sends=((0,),), handles=(0b01, 0b01), hushes=True, looks=True, freezes=1)
KILLED = Doorbell(sends=((0,),), handles=(0b01, 0b01), looks=True, deaths=1)
KILLED_CLAIMING = replace(KILLED, dies_claiming=True)
PAUSED = Doorbell(sends=((0,),), handles=(0b01, 0b01), pauses=True)
PAUSED_FULL = replace(PAUSED, fills=True)
ALONE = Doorbell(sends=((0,), (1,)), handles=(0b11,), breaks=2)
CUT_OFF = Doorbell(sends=((0,),), handles=(0b01, 0b01), breaks=1)
ROLLING_CUT_OFF = Doorbell(sends=((1,),), handles=(0b01, 0b10), looks=True, breaks=1)
SUCCESSOR = Doorbell(sends=((0, 1),), handles=(0b11,), has_key=True)
SUCCESSOR_ELSEWHERE = replace(SUCCESSOR, handles=(0b01, 0b10))
SUCCESSOR_IN_FLEET = replace(SUCCESSOR, handles=(0b11, 0b11))

LINE = Ordering(producers=(1, 1))
LINE_OF_BULKS = replace(LINE, bulk=2)
LINE_FORGOTTEN = replace(LINE, halts=True, forgets=True)
LINE_AND_OPERATOR = Ordering(messages=2, redrives=1, cancels=1)
LINE_HALTS = replace(LINE_AND_OPERATOR, halts=True)
LINE_AND_ALL = Ordering(producers=(1, 1), halts=True, max_attempts=2, redrives=1, cancels=1, prunes=1)
LINE_AND_ALL_GOES_ON = replace(LINE_AND_ALL, halts=False)
LINE_OF_THREE = Ordering(producers=(2, 1), halts=True, redrives=1, prunes=1)
RATE = Limited(messages=2, rate=2, max_attempts=2)
RATE_AND_PAUSE = Limited(messages=2, rate=2, pauses=1)
RATE_CUT = Limited(messages=2, rate=2, max_attempts=2, cuts=1)
IN_FLIGHT = Limited(messages=2, max_in_flight=1, max_attempts=2, pauses=1)
IN_FLIGHT_CUT = Limited(messages=3, max_in_flight=2, cuts=1)
RATE_AND_IN_FLIGHT = Limited(messages=2, rate=1, max_in_flight=1, max_attempts=2)
RATE_OF_THREE = Limited(messages=3, rate=2, max_attempts=1, pauses=1)
DESTINATION = Breaker(deaths=2)
DESTINATION_OF_THREE = Breaker(workers=3)
DESTINATION_AND_SURVIVORS = Breaker(may_lose=False)
ZERO = Retention(changes=2)
ZERO_AND_REDRIVE = Retention(changes=1, redrives=1)
RESEND = Retention(changes=0, resends=True)

NAMES: dict[Model, str] = {
    ATTEMPTS: "one message, two attempts, a release",
    ATTEMPTS_AND_REDRIVE: "one message, two attempts, a release, a redrive",
    CANCEL: "one message, two attempts, a cancel",
    CANCEL_AND_REDRIVE: "one message, one attempt, a cancel, a redrive",
    CANCEL_FAILOVER: "one message, one attempt, a cancel, a failover that loses commits",
    CANCELS: "one message, two attempts, two cancels, a release",
    TWO_IN_ONE_CLAIM: "two messages of one claim, one attempt, one process",
    TRAFFIC: "one message, one attempt, a release, a cancel, other messages never end",
    KEY_AND_CANCEL: "two producers, one coalesce key, a cancel",
    KEY_AND_TRAFFIC: "two producers, one coalesce key, other messages never end",
    FEW_ATTEMPTS: "one message, one attempt, a release, a redrive",
    FAILOVER: "one message, one attempt, a failover that loses commits",
    FAILOVER_OF_ONE: "one message, one attempt, one process, a failover that loses commits",
    FAILOVER_LOSES_MESSAGE: "one message, one attempt, one process, a failover that loses a message",
    FAILOVER_LOSES_ONE_OF_TWO: "two messages, one attempt, one process, a failover that loses one of them",
    FAILOVER_UNANSWERED: "one message, one attempt, one process, a failover and an answer to a claim is lost",
    SUSPENDED: "one message, two attempts, one process",
    UNANSWERED: "one message, one attempt, answers to claims are lost",
    THREADS: "one message, one attempt, a thread",
    KEY: "two producers, one coalesce key",
    replace(KEY, is_strict=False): "two producers, one coalesce key, only hand-overs count",
    KEY_AND_REDRIVE: "two producers, one coalesce key, a redrive",
    KEY_AND_ATTEMPTS: "two producers, one coalesce key, two attempts",
    THREE_OF_A_KEY: "two producers, one coalesce key, three messages",
    FLEET: "two producers, two equal workers",
    FLEET_FULL: "one producer, two equal workers, which may be full",
    FLEET_HUSHES: "one producer, two equal workers, which may be full or poll",
    ROLLING: "two producers, two workers with a topic each",
    ROLLING_HUSHES: "one producer, two workers with a topic each, which may poll",
    FROZEN: "one producer, two equal workers, which may poll, one hangs",
    KILLED: "one producer, two equal workers, one is killed",
    KILLED_CLAIMING: "one producer, two equal workers, one is killed, perhaps before the commit of a claim",
    PAUSED: "one producer, two equal workers, a pause",
    PAUSED_FULL: "one producer, two equal workers, which may be full, a pause",
    ALONE: "two producers, one worker, its listener breaks twice",
    CUT_OFF: "one producer, two equal workers, a listener breaks",
    ROLLING_CUT_OFF: "one producer, two workers with a topic each, a listener breaks",
    SUCCESSOR: "a message that waits for the one before it",
    SUCCESSOR_ELSEWHERE: "a message that waits for the one before it, two workers with a topic each",
    SUCCESSOR_IN_FLEET: "a message that waits for the one before it, two equal workers",
    LINE: "two producers, one ordering key",
    LINE_OF_BULKS: "two producers, one ordering key, two messages at once",
    LINE_FORGOTTEN: "two producers, one ordering key, a prune of keys",
    LINE_AND_OPERATOR: "two messages of one ordering key, a redrive, a cancel",
    LINE_HALTS: "two messages of one ordering key, a redrive, a cancel, a failure halts",
    LINE_AND_ALL: "two producers, one ordering key, two attempts, an operator, a failure halts",
    LINE_AND_ALL_GOES_ON: "two producers, one ordering key, two attempts, an operator",
    LINE_OF_THREE: "two producers, three messages of one ordering key, an operator, a failure halts",
    RATE: "two messages, two attempts in a period, two attempts",
    RATE_AND_PAUSE: "two messages, two attempts in a period, a pause",
    RATE_CUT: "two messages, two attempts in a period, then one, two attempts",
    IN_FLIGHT: "two messages, one in flight, two attempts, a pause",
    IN_FLIGHT_CUT: "three messages, two in flight, then one",
    RATE_AND_IN_FLIGHT: "two messages, one attempt in a period, one in flight, two attempts",
    RATE_OF_THREE: "three messages, two attempts in a period, a pause",
    DESTINATION: "two workers, a destination that dies twice",
    DESTINATION_OF_THREE: "three workers, a destination that dies",
    DESTINATION_AND_SURVIVORS: "two workers that are not killed, a destination that dies",
    ZERO: "one message, a rule that is set and unset",
    ZERO_AND_REDRIVE: "one message, a rule that is set, a redrive",
    RESEND: "one message, a resend, prunes",
}

STALE = "the write of a stale owner took effect"
TAKEN_AWAY = "a lease that had not lapsed was taken away"
UNHEARD = "an attempt begins although a cancel was committed before its claim"
IN_HAND_TWICE = "a process attempts one message twice at once"
OUTLIVED = "a thread handed over a message whose attempt had ended"
STUCK = "no possible event leads to the end"
TWO = "two messages of one key are in flight"
ORDER = "an older message was handed over after a newer one"
MISSED_0 = "message 0 waits, and all workers that handle it are idle"
MISSED_1 = "message 1 waits, and all workers that handle it are idle"

OVERTAKEN = "a message was handed over before one that was committed earlier"
OVERSPENT = "more attempts began in a period than the rate allows"
CROWDED = "more attempts are in flight than the limit allows"
GIVEN_UP = "a probe that was given up decides"
USED_UP = "an attempt is used up though the breaker was open"


@dataclass(frozen=True, slots=True)
class Case:
    """A model, the guards it leaves out, and the fault that follows in `length` steps. Without a fault the model
    holds."""

    model: Model
    without: tuple[Guard, ...] = ()
    fault: str = ""
    length: int = 0

    @property
    def model_name(self) -> str:
        return NAMES[self.model]

    @property
    def name(self) -> str:
        return f"{self.model_name}, without {', '.join(g.name for g in self.without) or 'nothing'}"


_HOLDING: tuple[Model, ...] = (
    ATTEMPTS, FEW_ATTEMPTS, TWO_IN_ONE_CLAIM, CANCEL, CANCEL_AND_REDRIVE, CANCEL_FAILOVER, TRAFFIC,
    FAILOVER, FAILOVER_OF_ONE, FAILOVER_LOSES_MESSAGE, FAILOVER_UNANSWERED, SUSPENDED, UNANSWERED,
    KEY, FLEET, FLEET_FULL, FLEET_HUSHES, ROLLING, ROLLING_HUSHES, FROZEN, KILLED, PAUSED,
    ALONE, CUT_OFF, ROLLING_CUT_OFF, SUCCESSOR, SUCCESSOR_ELSEWHERE, SUCCESSOR_IN_FLEET,
    LINE_OF_BULKS, LINE_FORGOTTEN, LINE_OF_THREE, LINE_AND_ALL, LINE_AND_ALL_GOES_ON,
    RATE, RATE_AND_PAUSE, RATE_CUT, IN_FLIGHT, IN_FLIGHT_CUT, RATE_AND_IN_FLIGHT,
    DESTINATION, DESTINATION_OF_THREE, DESTINATION_AND_SURVIVORS,
    ZERO, ZERO_AND_REDRIVE, RESEND,
)  # fmt: skip
HOLD = [Case(model) for model in _HOLDING]

# These models take minutes and found nothing more: `python -m tests.model --large`.
_LARGE: tuple[Model, ...] = (
    ATTEMPTS_AND_REDRIVE,
    CANCELS,
    FAILOVER_LOSES_ONE_OF_TWO,
    KEY_AND_REDRIVE,
    KEY_AND_ATTEMPTS,
    KEY_AND_CANCEL,
    KEY_AND_TRAFFIC,
    THREE_OF_A_KEY,
    PAUSED_FULL,
    RATE_OF_THREE,
)
LARGE = [Case(model) for model in _LARGE]

G = TypeVar("G", bound=Guard)

_D = delivery.Guard
_B = doorbell.Guard
_O = ordering.Guard
_L = limits.Guard
_C = breaker.Guard
_R = retention.Guard

BREAK = [
    Case(FEW_ATTEMPTS, (_D.TOKEN_IN_SENT, _D.CLAIM_IN_SENT), STALE, 20),
    Case(FEW_ATTEMPTS, (_D.TOKEN_IN_FINISH, _D.CLAIM_IN_FINISH), STALE, 15),
    Case(FEW_ATTEMPTS, (_D.STATE_IN_SENT,), STALE, 16),
    Case(FEW_ATTEMPTS, (_D.STATE_IN_FINISH,), STALE, 11),
    Case(FEW_ATTEMPTS, (_D.COUNT_KEPT_BY_REDRIVE, _D.CLAIM_IN_SENT, _D.CLAIM_IN_FINISH), STALE, 17),
    Case(KEY_AND_REDRIVE, (_D.COUNT_KEPT_BY_REDRIVE, _D.CLAIM_IN_SENT, _D.CLAIM_IN_FINISH), STALE, 21),
    Case(FEW_ATTEMPTS, (_D.COUNT_KEPT_BY_RELEASE, _D.CLAIM_IN_SENT, _D.CLAIM_IN_FINISH), STALE, 15),
    Case(FEW_ATTEMPTS, (_D.EXPIRED_LEASES,), STUCK, 5),
    Case(FEW_ATTEMPTS, (_D.SECOND_LOOK,), TAKEN_AWAY, 8),
    Case(FAILOVER, (_D.WORKER_IN_SENT, _D.CLAIM_IN_SENT), STALE, 15),
    Case(FAILOVER, (_D.WORKER_IN_FINISH, _D.CLAIM_IN_FINISH), STALE, 14),
    Case(FAILOVER_LOSES_MESSAGE, (_D.CLAIM_IN_SENT,), STALE, 15),
    Case(FAILOVER_LOSES_MESSAGE, (_D.CLAIM_IN_FINISH,), STALE, 14),
    Case(FAILOVER_LOSES_MESSAGE, (_D.LAST_IN_BATCH,), STALE, 17),
    Case(FEW_ATTEMPTS, (_D.LEASE_ASKED_AGAIN,), TAKEN_AWAY, 10),
    Case(FEW_ATTEMPTS, (_D.LEASE_LOCKED,), TAKEN_AWAY, 10),
    Case(TWO_IN_ONE_CLAIM, (_D.CLAIM_KEPT,), STUCK, 9),
    Case(TWO_IN_ONE_CLAIM, (_D.LAPSED_CLAIM_KEPT,), STUCK, 7),
    Case(TWO_IN_ONE_CLAIM, (_D.LAPSED_CLAIM_DELETED,), STUCK, 5),
    Case(CANCEL, (_D.REQUEST_WRITTEN,), UNHEARD, 9),
    Case(CANCEL, (_D.PENDING_ASKED_AGAIN,), "a message was handed over after its cancel had been answered", 8),
    Case(CANCEL, (_D.REQUESTS_IN_CLAIM,), UNHEARD, 9),
    Case(CANCEL, (_D.REQUESTS_IN_TAKE_OVER,), UNHEARD, 11),
    Case(CANCEL, (_D.REQUESTS_IN_FINISH,), "a message that its finish knows to be cancelled becomes pending", 10),
    Case(CANCEL_AND_REDRIVE, (_D.REQUESTS_FORGOTTEN,), "a request from before its redrive ends a message", 15),
    Case(TRAFFIC, (_D.SEARCH_BY_THE_CLOCK,), STUCK, 7),
    Case(FAILOVER_OF_ONE, (_D.OWN_TAKEN_OVER,), IN_HAND_TWICE, 10),
    Case(FAILOVER_OF_ONE, (_D.FORGOTTEN_CLAIMED,), STUCK, 10),
    Case(
        FAILOVER_OF_ONE,
        (_D.FOUND_BY_TIME,),
        "an attempt that had a handler is given back as if it had none",
        11,
    ),
    Case(SUSPENDED, (_D.OWN_LEFT_ALONE,), "a process gives up a message of its own running attempt", 13),
    Case(SUSPENDED, (_D.ENDS_NOT_REPEATED,), "an attempt that no handler began ends as retry", 12),
    Case(UNANSWERED, (_D.FOUND_BY_NAME,), "a message fails without any attempt", 8),
    Case(THREADS, (_D.TIMEOUT_KEEPS_THREAD,), OUTLIVED, 9),
    Case(THREADS, (_D.STOP_KEEPS_THREAD,), OUTLIVED, 9),
    Case(KEY, (_D.IN_FLIGHT_INDEX,), TWO, 14),
    Case(KEY, (_D.SIBLINGS,), "a whole claim fails because of a message that it could have skipped", 13),
    Case(
        KEY,
        (_D.SUPERSEDED_IN_CLAIM,),
        "an attempt begins although the claim's snapshot called the message superseded",
        9,
    ),
    Case(KEY, (_D.SUPERSEDED_ASKED_AGAIN,), ORDER, 22),
    Case(KEY, (_D.SUPERSEDED_IN_FINISH,), "a message that its finish knows to be superseded becomes failed", 14),
    Case(KEY_AND_REDRIVE, (_D.SUPERSEDED_IN_REDRIVE,), "a redrive revived a message that it knew to be superseded", 17),
    Case(KEY, (_D.ID_UNDER_HEAD_LOCK,), ORDER, 22),
    Case(ROLLING, (_B.NOTIFY,), MISSED_0, 11),
    Case(ROLLING, (_B.HELD_TO_COMMIT,), MISSED_0, 11),
    Case(ROLLING, (_B.RELEASED_AFTER_VISIBLE,), MISSED_0, 12),
    Case(ROLLING, (_B.CONFIRMED,), MISSED_0, 9),
    Case(ROLLING, (_B.LISTEN_FIRST,), MISSED_0, 12),
    Case(ROLLING, (_B.PRODUCERS_AWAITED,), MISSED_0, 12),
    Case(ROLLING, (_B.NEWS_KEPT_WHILE_CLAIMING,), MISSED_0, 13),
    Case(FLEET_FULL, (_B.NEWS_KEPT_WHILE_ASKING,), MISSED_0, 18),
    Case(FLEET_FULL, (_B.RELEASE_ANNOUNCED,), MISSED_0, 17),
    Case(FLEET_FULL, (_B.FULL_RELEASES,), MISSED_0, 16),
    Case(PAUSED_FULL, (_B.LIMITED_RELEASES,), MISSED_0, 26),
    Case(PAUSED, (_B.ACTS_TELL_ALL,), MISSED_0, 15),
    Case(ROLLING_HUSHES, (_B.HUSH_ANNOUNCED,), MISSED_1, 30),
    Case(ROLLING, (_B.WATCH_OF_TOPICS,), MISSED_0, 10),
    Case(ROLLING, (_B.EVERY_WATCH_ANSWERS,), MISSED_0, 23),
    Case(KILLED, (_B.IDLE_LOOKS,), MISSED_0, 11),
    Case(FROZEN, (_B.IDLE_LOOKS,), MISSED_0, 15),
    Case(ROLLING_CUT_OFF, (_B.IDLE_LOOKS,), MISSED_1, 22),
    Case(FROZEN, (_B.LOOKS_ASK_DUE,), STUCK, 11),
    Case(SUCCESSOR, (_B.SUCCESSORS_ASKED_FOR,), MISSED_1, 17),
    Case(SUCCESSOR_ELSEWHERE, (_B.SUCCESSORS_ASKED_LATE,), MISSED_1, 20),
    Case(SUCCESSOR_ELSEWHERE, (_B.SUCCESSORS_OF_OTHERS,), MISSED_1, 20),
    Case(LINE, (_O.ID_UNDER_TAIL_LOCK,), OVERTAKEN, 9),
    Case(LINE_OF_BULKS, (_O.ITEMS_IN_ORDER,), OVERTAKEN, 6),
    Case(LINE_FORGOTTEN, (_O.TAIL_UNCHANGED,), OVERTAKEN, 11),
    Case(LINE_FORGOTTEN, (_O.TAIL_UNNEEDED,), OVERTAKEN, 11),
    Case(
        LINE_AND_OPERATOR,
        (_O.FIRST_IN_CLAIM,),
        "a claim begins a message that is not the first of its key in its snapshot",
        2,
    ),
    Case(
        LINE_AND_OPERATOR,
        (_O.SIBLINGS_IN_CLAIM,),
        "a whole claim fails because of a message that it could have skipped",
        6,
    ),
    Case(LINE_HALTS, (_O.HALT_IN_CLAIM,), "a claim begins a message that is halted in its snapshot", 6),
    Case(LINE_AND_OPERATOR, (_O.IN_FLIGHT_INDEX,), "two messages of one ordering key are in flight", 6),
    Case(LINE_AND_OPERATOR, (_O.LAPSED_HAVE_KEYS,), STUCK, 3),
    Case(RATE, (_L.ROW_LOCKED,), OVERSPENT, 10),
    Case(IN_FLIGHT_CUT, (_L.ROW_LOCKED,), CROWDED, 4),
    Case(IN_FLIGHT, (_L.LIMITS_ASKED_AGAIN,), "an attempt begins in a queue that is paused", 4),
    Case(RATE, (_L.LIMITS_ASKED_AGAIN,), OVERSPENT, 10),
    Case(IN_FLIGHT, (_L.COUNTED_AFTERWARDS,), CROWDED, 6),
    Case(IN_FLIGHT, (_L.LAPSED_LEFT_OUT,), STUCK, 4),
    Case(RATE, (_L.ASKED_BY_EACH_STATEMENT,), OVERSPENT, 9),
    Case(RATE, (_L.COUNTED_IN_THE_ROW,), OVERSPENT, 10),
    Case(RATE, (_L.COUNTED_WITH_THE_CLAIM,), OVERSPENT, 7),
    Case(DESTINATION, (_C.ONE_PROBE,), "two probes are let through at once", 12),
    Case(DESTINATION, (_C.PROBE_LAPSES,), STUCK, 13),
    Case(DESTINATION, (_C.FENCE_IN_CLOSE,), GIVEN_UP, 14),
    Case(DESTINATION, (_C.FENCE_IN_REOPEN,), GIVEN_UP, 15),
    Case(DESTINATION, (_C.FENCE_IN_RELEASE,), GIVEN_UP, 15),
    Case(DESTINATION, (_C.ASKED_AFTER_FAILURE,), USED_UP, 7),
    Case(DESTINATION, (_C.ASKED_TWICE,), USED_UP, 9),
    Case(DESTINATION, (_C.SNOOZED,), USED_UP, 9),
    Case(DESTINATION, (_C.STALE_ROW,), STUCK, 9),
    Case(DESTINATION_AND_SURVIVORS, (_C.CLOSED_ELSEWHERE,), STUCK, 12),
    Case(ZERO, (_R.TOKEN_IN_FORGET,), STALE, 6),
    Case(ZERO_AND_REDRIVE, (_R.STATE_IN_FORGET,), STALE, 10),
    Case(ZERO, (_R.RULE_IN_FORGET,), "a message is deleted though no rule says so", 4),
    Case(ZERO_AND_REDRIVE, (_R.STATE_IN_PRUNE,), "a prune deleted an owed message", 8),
    Case(RESEND, (_R.SOURCE_LOCKED,), "a copy lost the content of its source", 8),
    Case(RESEND, (_R.CONTENT_IS_NAMED,), "a message names a content that is deleted", 2),
]

# Promises with two guards: with one of the two the hand-overs are still right, without both they are not.
_HANDED_OVER = replace(KEY, is_strict=False)
TWICE_GUARDED = [
    Case(_HANDED_OVER, (_D.SUPERSEDED_IN_CLAIM,)),
    Case(_HANDED_OVER, (_D.SUPERSEDED_IN_FINISH,)),
    Case(_HANDED_OVER, (_D.SUPERSEDED_IN_CLAIM, _D.SUPERSEDED_ASKED_AGAIN), ORDER, 19),
    Case(SUSPENDED, (_D.OWN_TAKEN_OVER,)),
    Case(SUSPENDED, (_D.OWN_LEFT_ALONE, _D.OWN_TAKEN_OVER), IN_HAND_TWICE, 9),
    Case(ALONE, (_B.POLL_WHEN_LOST,)),
    Case(ALONE, (_B.POLL_AFTER_RECONNECT,)),
    Case(ALONE, (_B.POLL_WHEN_LOST, _B.POLL_AFTER_RECONNECT), MISSED_0, 14),
]

# Cases in which only the periodic poll helps.
LIMITS = [Case(KILLED_CLAIMING, (), MISSED_0, 14)]

CASES = [*HOLD, *BREAK, *TWICE_GUARDED, *LIMITS]


@functools.cache
def explored(case: Case) -> Exploration:
    """Explore a case once, and return the result."""

    def taken_out(kind: type[G]) -> frozenset[G]:
        return frozenset(guard for guard in case.without if isinstance(guard, kind))

    match case.model:
        case Delivery() as model:
            return explore(replace(model, without=taken_out(delivery.Guard)))
        case Doorbell() as model:
            return explore(replace(model, without=taken_out(doorbell.Guard)))
        case Ordering() as model:
            return explore(replace(model, without=taken_out(ordering.Guard)))
        case Limited() as model:
            return explore(replace(model, without=taken_out(limits.Guard)))
        case Breaker() as model:
            return explore(replace(model, without=taken_out(breaker.Guard)))
        case Retention() as model:
            return explore(replace(model, without=taken_out(retention.Guard)))


# The tables of the documentation: their cases and their headers.
TABLES = [
    (HOLD, ["| explored in full | states | steps |", "| --- | --- | --- |"]),
    (BREAK, ["| taken out | in the model | result | in steps |", "| --- | --- | --- | --- |"]),
    (
        TWICE_GUARDED,
        [
            "| taken out, where another guard stands behind | in the model | result | in steps |",
            "| --- | --- | --- | --- |",
        ],
    ),
    (LIMITS, ["| without the periodic poll | result | in steps |", "| --- | --- | --- |"]),
]


def tables() -> Iterator[str]:
    """Return the results as lines of the documentation."""
    for number, (cases, head) in enumerate(TABLES):
        yield from head if number == 0 else ["", *head]
        yield from (row_of(case) for case in cases)


def row_of(case: Case) -> str:
    """Return the row of one case in the documentation."""
    found = explored(case)
    if case.without:
        guards = "; and ".join(guard.value for guard in case.without)
        result = found.fault or f"nothing, in all {found.state_count:,} states"
        return f"| {guards} | {case.model_name} | {result} | {len(found.trace) or '-'} |"
    if found.fault:
        return f"| {case.model_name} | {found.fault} | {len(found.trace)} |"
    return f"| {case.model_name} | {found.state_count:,} | {found.step_count:,} |"


def trace_of(case: Case) -> str:
    """Return the shortest way to the fault, one step per line."""
    found = explored(case)
    steps = "\n".join(f"  {number:2}. {step}" for number, step in enumerate(found.trace, 1))
    result = found.fault or f"holds in all {found.state_count:,} states"
    return f"{case.name}: {result}\n{steps}"

"""What is explored and what is expected of it: models that hold, guards that must not be taken out, known limits."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.model import delivery, doorbell
from tests.model.delivery import Delivery
from tests.model.doorbell import Doorbell
from tests.model.explorer import Exploration, explore

ATTEMPTS = Delivery(max_attempts=2, redrives=1, releases=1, renews=True)
FEW_ATTEMPTS = replace(ATTEMPTS, max_attempts=1)
KEY = Delivery(producers=(1, 1))
KEY_AND_REDRIVE = replace(KEY, redrives=1)
KEY_AND_ATTEMPTS = replace(KEY, max_attempts=2)
THREE_OF_A_KEY = replace(KEY, producers=(2, 1))
FLEET = Doorbell(sends=((0,), (1,)), handles=(0b11, 0b11))
ROLLING = Doorbell(sends=((0,), (1,)), handles=(0b01, 0b10))
ALONE = Doorbell(sends=((0,), (1,)), handles=(0b11,), breaks=2)
CUT_OFF = Doorbell(sends=((0,),), handles=(0b01, 0b01), breaks=1)
SUCCESSOR = Doorbell(sends=((0, 1),), handles=(0b11,), has_key=True)
SUCCESSOR_IN_FLEET = replace(SUCCESSOR, handles=(0b11, 0b11))

NAMES: dict[Delivery | Doorbell, str] = {
    ATTEMPTS: "one message, two attempts, a release, a redrive",
    FEW_ATTEMPTS: "one message, one attempt, a release, a redrive",
    KEY: "two producers, one coalesce key",
    replace(KEY, is_strict=False): "two producers, one coalesce key, only what is handed over counts",
    KEY_AND_REDRIVE: "two producers, one coalesce key, a redrive",
    KEY_AND_ATTEMPTS: "two producers, one coalesce key, two attempts",
    THREE_OF_A_KEY: "two producers, one coalesce key, three messages",
    FLEET: "two producers, two equal workers",
    ROLLING: "two producers, two workers with a topic each",
    ALONE: "two producers, one worker, its listener breaks twice",
    CUT_OFF: "one producer, two equal workers, a listener breaks",
    SUCCESSOR: "a message that waits for the one before it",
    SUCCESSOR_IN_FLEET: "a message that waits for the one before it, two equal workers",
    replace(FLEET, sends=((0,),), handles=(1, 1), deaths=1): "one producer, two equal workers, one is killed",
    replace(ROLLING, sends=((1,),), breaks=1): "one producer, two workers with a topic each, a listener breaks",
}

STALE = "the write of a stale owner took effect"
STALE_RENEWAL = "a stale owner renewed the lease of another"
TWICE = "a message was handed over twice, and nothing made it necessary"
STUCK = "nothing that can happen from here ends it"
TWO = "two messages of one key are in flight"
ORDER = "an older message was handed over after a newer one"
MISSED_0 = "message 0 waits, and everybody who handles it sleeps"
MISSED_1 = "message 1 waits, and everybody who handles it sleeps"

Guard = delivery.Guard | doorbell.Guard


@dataclass(frozen=True, slots=True)
class Case:
    """A model, what is taken out of it, and the fault that follows in `length` steps; without a fault it holds."""

    model: Delivery | Doorbell
    without: tuple[Guard, ...] = ()
    fault: str = ""
    length: int = 0

    @property
    def model_name(self) -> str:
        return NAMES[self.model]

    @property
    def name(self) -> str:
        return f"{self.model_name}, without {', '.join(g.name for g in self.without) or 'nothing'}"


HOLD = [Case(model) for model in (ATTEMPTS, KEY, FLEET, ROLLING, ALONE, CUT_OFF, SUCCESSOR)]

# They take minutes and found nothing more: `python -m tests.model --large`.
LARGE = [Case(model) for model in (KEY_AND_REDRIVE, KEY_AND_ATTEMPTS, THREE_OF_A_KEY, SUCCESSOR_IN_FLEET)]

_D = delivery.Guard
_B = doorbell.Guard

BREAK = [
    Case(FEW_ATTEMPTS, (_D.TOKEN_IN_SENT,), STALE, 22),
    Case(FEW_ATTEMPTS, (_D.TOKEN_IN_FINISH,), STALE, 17),
    Case(FEW_ATTEMPTS, (_D.TOKEN_IN_RENEW,), STALE_RENEWAL, 16),
    Case(FEW_ATTEMPTS, (_D.STATE_IN_SENT,), STALE, 17),
    Case(FEW_ATTEMPTS, (_D.STATE_IN_FINISH,), STALE, 12),
    Case(FEW_ATTEMPTS, (_D.COUNT_KEPT_BY_REDRIVE,), STALE_RENEWAL, 18),
    Case(KEY_AND_REDRIVE, (_D.COUNT_KEPT_BY_REDRIVE,), STALE, 22),
    Case(FEW_ATTEMPTS, (_D.COUNT_KEPT_BY_RELEASE,), STALE_RENEWAL, 16),
    Case(FEW_ATTEMPTS, (_D.EXPIRED_LEASES,), STUCK, 6),
    Case(FEW_ATTEMPTS, (_D.SECOND_LOOK,), TWICE, 12),
    Case(KEY, (_D.IN_FLIGHT_INDEX,), TWO, 16),
    Case(
        KEY, (_D.SIBLINGS,), "a claim, with all that is in it, fails for a message that it could have passed over", 14
    ),
    Case(
        KEY,
        (_D.SUPERSEDED_IN_CLAIM,),
        "an attempt begins although the claim's snapshot called the message superseded",
        9,
    ),
    Case(KEY, (_D.SUPERSEDED_ASKED_AGAIN,), ORDER, 22),
    Case(KEY, (_D.SUPERSEDED_IN_FINISH,), "a message that its finish knows to be superseded becomes failed", 14),
    Case(KEY_AND_REDRIVE, (_D.SUPERSEDED_IN_REDRIVE,), "a redrive brought back what it knew to be superseded", 17),
    Case(KEY, (_D.ID_UNDER_HEAD_LOCK,), ORDER, 22),
    Case(ROLLING, (_B.RING,), MISSED_0, 8),
    Case(ROLLING, (_B.HELD_TO_COMMIT,), MISSED_0, 8),
    Case(ROLLING, (_B.RELEASED_AFTER_VISIBLE,), MISSED_0, 9),
    Case(ROLLING, (_B.CLAIM_AFTER_ARMING,), MISSED_0, 7),
    Case(ROLLING, (_B.PRODUCERS_AWAITED,), MISSED_0, 10),
    Case(ROLLING, (_B.WAKE_CLEARED_FIRST,), MISSED_0, 19),
    Case(ROLLING, (_B.RINGS_KEPT_WHILE_ARMING,), MISSED_1, 21),
    Case(ROLLING, (_B.DISARM_ANNOUNCED,), MISSED_1, 20),
    Case(ALONE, (_B.LISTEN_FIRST,), MISSED_0, 13),
    Case(ALONE, (_B.LOOK_AFTER_RECONNECT,), MISSED_0, 10),
    Case(SUCCESSOR, (_B.SUCCESSORS_ASKED_FOR,), MISSED_1, 16),
    Case(SUCCESSOR, (_B.SUCCESSORS_ASKED_LATE,), MISSED_1, 17),
]

# What is guarded twice: one of the guards alone keeps what is handed over right, both gone do not.
_HANDED_OVER = replace(KEY, is_strict=False)
TWICE_GUARDED = [
    Case(_HANDED_OVER, (_D.SUPERSEDED_IN_CLAIM,)),
    Case(_HANDED_OVER, (_D.SUPERSEDED_IN_FINISH,)),
    Case(_HANDED_OVER, (_D.SUPERSEDED_IN_CLAIM, _D.SUPERSEDED_ASKED_AGAIN), ORDER, 19),
    Case(ALONE, (_B.LOOK_WHEN_LOST,)),
]

# What the sweep is for.
LIMITS = [
    Case(replace(FLEET, sends=((0,),), handles=(1, 1), deaths=1), (), MISSED_0, 12),
    Case(replace(ROLLING, sends=((1,),), breaks=1), (), MISSED_1, 13),
]

CASES = [*HOLD, *BREAK, *TWICE_GUARDED, *LIMITS]


@functools.cache
def explored(case: Case) -> Exploration:
    """What exploring a case finds; each is explored once."""
    match case.model:
        case Delivery() as model:
            return explore(replace(model, without=frozenset(guard for guard in case.without if isinstance(guard, _D))))
        case Doorbell() as model:
            return explore(replace(model, without=frozenset(guard for guard in case.without if isinstance(guard, _B))))


def tables() -> Iterator[str]:
    """The results as the documentation shows them, line by line."""
    yield "| explored in full | states | steps |"
    yield "| --- | --- | --- |"
    for case in HOLD:
        found = explored(case)
        yield f"| {case.model_name} | {found.state_count:,} | {found.step_count:,} |"
    for title, cases in (("taken out", BREAK), ("taken out, where another guard stands behind", TWICE_GUARDED)):
        yield ""
        yield f"| {title} | in the model | what follows | in steps |"
        yield "| --- | --- | --- | --- |"
        for case in cases:
            found = explored(case)
            guards = "; and ".join(guard.value for guard in case.without)
            result = found.fault or f"nothing, in all {found.state_count:,} states"
            yield f"| {guards} | {case.model_name} | {result} | {len(found.trace) or '-'} |"
    yield ""
    yield "| without the sweep | what follows | in steps |"
    yield "| --- | --- | --- |"
    for case in LIMITS:
        found = explored(case)
        yield f"| {case.model_name} | {found.fault} | {len(found.trace)} |"


def trace_of(case: Case) -> str:
    """The shortest way to the fault, one step a line."""
    found = explored(case)
    steps = "\n".join(f"  {number:2}. {step}" for number, step in enumerate(found.trace, 1))
    result = found.fault or f"holds in all {found.state_count:,} states"
    return f"{case.name}: {result}\n{steps}"

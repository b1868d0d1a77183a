"""Visits every state that a model can reach, breadth first, so that the first broken promise has the shortest trace.

A state can break a promise itself (safety), or be a state from which nothing leads to the end (liveness).
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

S = TypeVar("S", bound=Hashable)

NO_WAY_TO_THE_END = "no possible event leads to the end"


class Model(Protocol[S]):
    """The interface of a model. A state is a value; each event makes another value."""

    def initial(self) -> S:
        """Return the initial state."""

    def steps(self, state: S) -> Iterator[tuple[str, S]]:
        """Yield every possible next event: its label, and the state after it."""

    def canonical(self, state: S) -> S:
        """Return one state for all states that differ only by which of several equal actors is which."""

    def fault(self, state: S) -> str:
        """Return the promise that this state breaks, or an empty string."""

    def is_settled(self, state: S) -> bool:
        """Return whether every promise has been fulfilled."""


@dataclass(frozen=True, slots=True)
class Exploration:
    """The result. Without a fault, the model has exactly these states."""

    state_count: int
    step_count: int
    depth: int
    fault: str = ""
    trace: tuple[str, ...] = ()


def explore(model: Model[S]) -> Exploration:
    """Visit all states until the first one that breaks a promise."""
    was_collecting = gc.isenabled()
    gc.disable()  # States have no reference cycles, and the garbage collector would take most of the time.
    try:
        return _explore(model)
    finally:
        if was_collecting:
            gc.enable()


def _explore(model: Model[S]) -> Exploration:
    first = model.canonical(model.initial())
    states = [first]
    index_of = {first: 0}
    parents = array("l", [-1])
    depths = array("l", [0])
    sources, targets = array("l"), array("l")
    settled = []
    at = 0
    while at < len(states):
        state = states[at]
        fault = model.fault(state)
        if fault:
            return Exploration(len(states), len(sources), depths[at], fault, _trace(model, states, parents, at))
        if model.is_settled(state):
            settled.append(at)
        for _, following in model.steps(state):
            known = model.canonical(following)
            index = index_of.setdefault(known, len(states))
            if index == len(states):
                states.append(known)
                parents.append(at)
                depths.append(depths[at] + 1)
            sources.append(at)
            targets.append(index)
        at += 1
    lost = _first_without_way_to(settled, len(states), sources, targets)
    if lost is None:
        return Exploration(len(states), len(sources), depths[-1])
    trace = _trace(model, states, parents, lost)
    return Exploration(len(states), len(sources), depths[lost], NO_WAY_TO_THE_END, trace)


def _first_without_way_to(settled: list[int], count: int, sources: array[int], targets: array[int]) -> int | None:
    before: list[list[int]] = [[] for _ in range(count)]
    for source, target in zip(sources, targets, strict=True):
        before[target].append(source)
    has_way = bytearray(count)
    for index in settled:
        has_way[index] = True
    waiting = settled
    while waiting:
        for source in before[waiting.pop()]:
            if not has_way[source]:
                has_way[source] = True
                waiting.append(source)
    lost = has_way.find(0)
    return None if lost < 0 else lost


def _trace(model: Model[S], states: list[S], parents: array[int], index: int) -> tuple[str, ...]:
    """Replay the events on the way to a state, so that every actor keeps its name."""
    path = []
    while index > 0:
        path.append(states[index])
        index = parents[index]
    labels = []
    state = model.initial()
    for known in reversed(path):
        label, state = next(step for step in model.steps(state) if model.canonical(step[1]) == known)
        labels.append(label)
    return tuple(labels)

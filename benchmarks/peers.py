"""Peers: drain by one, two and four processes, and bulk enqueue, of pgoutbox and the other available systems.

The same clock measures all of them: from the first handler call until the database has recorded all messages as
finished, each time in a new database. The systems on Redis come last. They keep no record of finished messages.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

import psycopg

from benchmarks.clock import drain
from benchmarks.options import Options, rotated
from benchmarks.report import Cell, Result, Table, Verdict, median, ratio_of_rounds
from benchmarks.server import Server, settle_all
from benchmarks.systems import System, available_systems

_RIVAL = "graphile-worker"
# Systems that drain a long backlog within seconds.
_FAST = ("pgoutbox", _RIVAL, "pg-boss")


def run(server: Server, options: Options) -> Result:
    """Alternate the systems and the numbers of processes, in an order that shifts with the round."""
    systems, notes = available_systems(on_redis=True)
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    long_rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    enqueued: dict[str, list[float]] = defaultdict(list)
    cases = [(system, processes) for system in systems for processes in _processes(system, options)]
    for round_number in range(options.peer_rounds):
        for system, processes in rotated(cases, round_number * len(options.peer_processes)):
            count = _count(system, options)
            drained, loaded = _measure(server, system, count, processes, system.worker)
            rates[system.name, processes].append(drained)
            enqueued[system.name].append(loaded)
        for system, processes in rotated(cases, round_number * len(options.peer_processes)):
            if system.name in _FAST:
                drained, _ = _measure(server, system, options.long_messages, processes, system.worker)
                long_rates[system.name, processes].append(drained)
    result = Result(
        "peers",
        settings={
            "rounds": options.peer_rounds,
            "messages of a long drain": options.long_messages,
            **{f"messages of {system.name}": _count(system, options) for system in systems},
            **{system.name: system.settings for system in systems},
        },
        notes=notes,
    )
    _add_drain(result, systems, rates, options)
    _add_long_drain(result, [system for system in systems if system.name in _FAST], long_rates, options)
    rows: list[tuple[Cell, ...]] = [
        (
            system.name,
            median(enqueued[system.name]),
            min(enqueued[system.name]),
            max(enqueued[system.name]),
            median(enqueued[system.name]) / median(enqueued["pgoutbox"]),
        )
        for system in systems
    ]
    columns = ("system", "messages/s", "slowest", "fastest", "of pgoutbox")
    result.tables.append(Table("messages enqueued per second, by the fastest bulk call of each system", columns, rows))
    result.samples |= {f"enqueue, {name}": values for name, values in enqueued.items()}
    return result


def _processes(system: System, options: Options) -> tuple[int, ...]:
    # pgoutbox's own throughput must not fall when more processes run than in the comparison with other systems.
    return options.own_processes if system.migrated else options.peer_processes


def _count(system: System, options: Options) -> int:
    return max(1000, int(options.peer_messages * system.share))


def _measure(
    server: Server, system: System, count: int, processes: int, worker: tuple[str, ...]
) -> tuple[float, float]:
    """Return the messages per second of the drain, and of the enqueue before it."""
    with system.database(server) as dsn:
        loaded = count / system.load(count, dsn=dsn)
        if not system.redis:
            with psycopg.connect(dsn, autocommit=True) as connection:
                settle_all(connection)
        with system.asking(dsn) as is_unfinished:
            drained = drain(
                system.command("work", *worker),
                dsn=dsn,
                count=count,
                is_unfinished=is_unfinished,
                processes=processes,
                environment=system.environment(dsn),
            )
    return count / drained.seconds, loaded


def _add_drain(
    result: Result, systems: list[System], rates: dict[tuple[str, int], list[float]], options: Options
) -> None:
    many = options.own_processes
    rows: list[tuple[Cell, ...]] = []
    for system in systems:
        values = rates[system.name, many[0]]
        ratio = ratio_of_rounds(values, rates["pgoutbox", many[0]])
        medians = [median(rates[system.name, number]) if rates[system.name, number] else None for number in many]
        rows.append((system.name, *medians, ratio))
    columns = ("system", *(_processes_text(number) for number in many), "of pgoutbox")
    result.tables.append(Table("messages delivered per second, with a handler that does nothing", columns, rows))
    _judge(result, rates, "pgqueuer", 3.0, many[:1])
    _judge(result, rates, _RIVAL, 1.5, options.peer_processes)
    _judge_scaling(result, rates, many)
    result.samples |= {
        f"drain, {name}, {number} processes": values for (name, number), values in rates.items() if values
    }


def _add_long_drain(
    result: Result, systems: list[System], rates: dict[tuple[str, int], list[float]], options: Options
) -> None:
    """Measure a drain of seconds instead of one second, so that the start of the processes counts less."""
    many = options.own_processes
    columns = ("system", *(_processes_text(number) for number in many))
    rows: list[tuple[Cell, ...]] = [
        (system.name, *(median(rates[system.name, n]) if rates[system.name, n] else None for n in many))
        for system in systems
    ]
    title = f"the same with {options.long_messages:,} messages"
    result.tables.append(Table(title, columns, rows))
    _judge(result, rates, _RIVAL, 1.5, options.peer_processes, kind=", long")
    _judge_scaling(result, rates, many, kind=", long")
    result.samples |= {
        f"long drain, {name}, {number} processes": values for (name, number), values in rates.items() if values
    }


def _judge(
    result: Result,
    rates: Mapping[tuple[str, int], list[float]],
    name: str,
    target: float,
    numbers: Sequence[int],
    *,
    kind: str = "",
) -> None:
    for number in numbers:
        if theirs := rates[name, number]:
            ratio = ratio_of_rounds(rates["pgoutbox", number], theirs)
            what = f"pgoutbox / {name}{kind}, {_processes_text(number)}"
            result.verdicts.append(Verdict(what, ratio, target, "at least"))


def _judge_scaling(
    result: Result, rates: Mapping[tuple[str, int], list[float]], numbers: Sequence[int], *, kind: str = ""
) -> None:
    """Check that several processes deliver more than one, and that more processes are never slower."""
    pairs = [(numbers[0], more, 1.5) for more in numbers[1:]]
    pairs += [(fewer, more, 1.0) for fewer, more in itertools.pairwise(numbers[1:])]
    for fewer, more, target in pairs:
        ratio = ratio_of_rounds(rates["pgoutbox", more], rates["pgoutbox", fewer])
        result.verdicts.append(Verdict(f"pgoutbox{kind}, {more} processes / {fewer}", ratio, target, "at least"))


def _processes_text(number: int) -> str:
    return f"{number} process{'es' * (number > 1)}"


def run_settings(server: Server, options: Options) -> Result:
    """Measure every system's drain with its candidate settings, to choose the settings of the other scenarios."""
    systems, notes = available_systems(on_redis=True)
    rates: dict[tuple[str, tuple[str, ...]], list[float]] = defaultdict(list)
    for _ in range(options.peer_rounds):
        for system in systems:
            for candidate in system.candidates:
                drained, _loaded = _measure(server, system, _count(system, options), 1, candidate)
                rates[system.name, candidate].append(drained)
    rows = [
        (f"{name} {' '.join(candidate)}", median(values), min(values), max(values))
        for (name, candidate), values in rates.items()
    ]
    return Result(
        "peer-settings",
        settings={"messages": options.peer_messages, "rounds": options.peer_rounds},
        tables=[Table("the drain of one process", ("system and settings", "messages/s", "slowest", "fastest"), rows)],
        notes=notes,
        samples={f"{name} {' '.join(candidate)}": values for (name, candidate), values in rates.items()},
    )

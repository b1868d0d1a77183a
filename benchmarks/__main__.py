"""python -m benchmarks [scenario ...] [--quick] [--json FILE] [--report PAGE] [--dsn DSN]"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks import (
    beside,
    bulk,
    dashboard,
    databases,
    deliver,
    doorbell,
    drain,
    explain,
    fair,
    fleet,
    idle,
    lanes,
    latency,
    load,
    peers,
    retention,
    scale,
    single,
    waking,
    wal,
)
from benchmarks.options import QUICK, Options
from benchmarks.publish import TEMPLATE, publish, read_results
from benchmarks.report import Result, document_of, machine_facts, show, write_json
from benchmarks.server import Server, running_server
from benchmarks.systems import versions

Scenario = Callable[[Server, Options], Result]

SCENARIOS: Mapping[str, Scenario] = {
    "doorbell": doorbell.run,
    "drain": drain.run,
    "deliver": deliver.run,
    "lanes": lanes.run,
    "peers": peers.run,
    "latency": latency.run,
    "load": load.run,
    "idle": idle.run,
    "waking": waking.run,
    "beside": beside.run,
    "enqueue_one": single.run,
    "enqueue_many": bulk.run,
    "wal": wal.run,
    "explain": explain.run,
}
# Not part of a run without arguments: the limits of several workers, fair shares, the dashboard, many databases, sizes,
# and the search for the settings of the other systems.
EXTRA_SCENARIOS: Mapping[str, Scenario] = {
    "limits": fleet.run_limits,
    "ordering": fleet.run_ordering,
    "fanout": fleet.run_fanout,
    "fair": fair.run,
    "retention": retention.run,
    "dashboard": dashboard.run,
    "databases": databases.run,
    "scale": scale.run,
    "peer-settings": peers.run_settings,
}


def main() -> int:
    """Run the scenarios. Return 0 if they ran, whatever their verdicts, and 130 if interrupted."""
    scenarios = {**SCENARIOS, **EXTRA_SCENARIOS}
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure pgoutbox and other systems.")
    parser.add_argument("scenario", nargs="*", help=f"{', '.join(scenarios)}; all but the last nine if none is named")
    parser.add_argument("--quick", action="store_true", help="small sizes: check that the benchmarks work")
    parser.add_argument("--rounds", type=int, help="rounds of the alternating scenarios")
    parser.add_argument("--finished", type=int, metavar="N", help="finished messages in the table of drain")
    parser.add_argument("--idle-seconds", type=float, help="duration of the scenario idle, in seconds")
    parser.add_argument("--dsn", help="superuser's DSN of a server, instead of the embedded one")
    parser.add_argument(
        "--report", type=Path, metavar="PAGE", help="also write this page from the results, with plots in img"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to this file")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.scenario if name not in scenarios]
    if unknown:
        parser.error(f"unknown scenario {', '.join(unknown)}; known: {', '.join(scenarios)}")
    options = QUICK if arguments.quick else Options()
    if arguments.rounds is not None:
        options = dataclasses.replace(options, rounds=max(1, arguments.rounds), peer_rounds=max(1, arguments.rounds))
    if arguments.finished is not None:
        options = dataclasses.replace(options, finished_messages=max(0, arguments.finished))
    if arguments.idle_seconds is not None:
        options = dataclasses.replace(options, idle_seconds=arguments.idle_seconds)

    # A terminated run cleans up like an interrupted one.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    results: list[Result] = []
    document: dict[str, object] = {}
    try:
        with running_server(arguments.dsn) as server:
            machine = machine_facts(server.version)
            print(", ".join(f"{name}: {value}" for name, value in machine.items()))
            for name in arguments.scenario or SCENARIOS:
                result = scenarios[name](server, options)
                show(result)
                results.append(result)
                if arguments.json is not None or arguments.report is not None:
                    document = document_of(machine, versions(), results, quick=arguments.quick)
                if arguments.json is not None:
                    write_json(arguments.json, document)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if arguments.report is not None:
        # Convert to JSON and back, so that the page equals one that is made later from the file.
        with tempfile.TemporaryDirectory() as directory:
            path = arguments.json or Path(directory) / "results.json"
            write_json(path, document)
            publish(read_results(path), arguments.report, TEMPLATE.read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

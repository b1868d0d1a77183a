"""A Prometheus with a synthetic clock: real scrapes, one a minute, and the alerts that promtool derives from them."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from prometheus_client.parser import text_string_to_metric_families as parse

from tests.support.http_client import ask
from tests.support.missing import server_missing

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from prometheus_client.samples import Sample

    from pgoutbox.worker import MultiWorker, Worker

_FIRING: Final = 'count by (alertname, severity) (ALERTS{alertstate="firing"})'


def promtool(*arguments: str | Path) -> None:
    """Run promtool. Fails with its output."""
    if shutil.which("promtool") is None:
        server_missing("promtool is not installed (Debian: prometheus)")
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def port_of(worker: Worker | MultiWorker) -> int:
    """Return the port of the worker's pages."""
    port = worker.telemetry_server.port
    assert port is not None
    return port


class Scrapes:
    """Scrapes of workers by one `job`. Every target has the same number of minutes."""

    def __init__(self, directory: Path, rules: Path) -> None:
        self._directory = directory
        self._rules = rules
        self.job = "pgoutbox"
        self.minutes = 0
        self._series: dict[str, dict[int, float]] = defaultdict(dict)

    async def take(self, *workers: Worker | MultiWorker | None, minutes: int) -> None:
        """Scrape these workers, and repeat the result for this many minutes. None is a target that does not answer."""
        for number, worker in enumerate(workers):
            target = {"job": self.job, "instance": f"127.0.0.1:{9101 + number}"}
            values = {series("up", target): float(worker is not None)}
            if worker is not None:
                for sample in await fresh_samples(worker):
                    values[series(sample.name, sample.labels | target)] = float(sample.value)
            for name, value in values.items():
                self._series[name] |= dict.fromkeys(range(self.minutes, self.minutes + minutes), value)
        self.minutes += minutes

    def names(self) -> set[str]:
        """Return the names of all scraped series."""
        return {name.partition("{")[0] for name in self._series}

    def assert_firing(self, alerts: Mapping[str, str]) -> None:
        """Compare with the alerts that fire at the last scrape, and their severities."""
        test = {
            "rule_files": [str(self._rules)],
            "evaluation_interval": "1m",
            "tests": [
                {
                    "interval": "1m",
                    "input_series": [
                        {"series": name, "values": self._sequence(values)} for name, values in self._series.items()
                    ],
                    "promql_expr_test": [
                        {
                            "expr": _FIRING,
                            "eval_time": f"{self.minutes - 1}m",
                            "exp_samples": [
                                {"labels": series("", {"alertname": name, "severity": severity}), "value": 1}
                                for name, severity in alerts.items()
                            ],
                        }
                    ],
                }
            ],
        }
        path = self._directory / "test.yaml"
        path.write_text(json.dumps(test))  # JSON is YAML.
        promtool("test", "rules", path)

    def _sequence(self, values: Mapping[int, float]) -> str:
        """Return the values in promtool's notation. Prometheus marks a series that has ended as stale."""
        parts = []
        for minute in range(self.minutes):
            if minute in values:
                parts.append(f"{values[minute]:.3f}")
            else:
                parts.append("stale" if minute - 1 in values else "_")
        return " ".join(parts)


async def fresh_samples(worker: Worker | MultiWorker) -> list[Sample]:
    """Scrape the worker until its gauges of the database are newer than this call, if it has any."""
    asked_at = time.monotonic()
    while True:
        sent_at = time.monotonic()
        answer = await ask(port_of(worker), "/metrics")
        samples = [sample for family in parse(answer.body) for sample in family.samples]
        ages = [sample.value for sample in samples if sample.name == "pgoutbox_backlog_age_seconds"]
        if not ages or ages[0] < sent_at - asked_at:
            return [sample for sample in samples if sample.name.startswith("pgoutbox_")]


def series(name: str, labels: Mapping[str, str]) -> str:
    """Return a series in the notation of PromQL."""
    return name + "{" + ",".join(f"{label}={json.dumps(value)}" for label, value in sorted(labels.items())) + "}"

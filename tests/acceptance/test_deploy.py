"""Tests the examples for operators: a systemd unit, manifests, alert rules and a dashboard, as their programs read
them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest
import yaml

from pgoutbox.message import AttemptOutcome, State
from pgoutbox.observability.events import LogEvent
from pgoutbox.observability.measures import OF_THE_DATABASE, OF_WORKERS, Kind
from pgoutbox.settings import VARIABLES, Settings, load_settings
from tests.support.missing import server_missing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT: Final = Path(__file__).parents[2]
DEPLOY: Final = ROOT / "examples" / "deploy"
GRACE_SECONDS: Final = Settings.model_fields["shutdown_grace_seconds"].default
CLOSING_SECONDS: Final = 15


# --- PromQL -----------------------------------------------------------------------------------------------------------

_TOKEN: Final = re.compile(
    r"""\s*(?:
      (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<variable>\$\w+)
    | (?P<number>[0-9.]+(?:ms|[smhdwy])?)
    | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<operator>=~|!~|!=|==|>=|<=|[-+*/%^<>=(){}\[\],])
    )\s*""",
    re.VERBOSE,
)
_FUNCTIONS: Final = frozenset({"rate", "increase", "histogram_quantile", "absent", "vector", "label_values"})
_AGGREGATIONS: Final = frozenset({"sum", "max", "min", "count", "avg"})
_GROUPINGS: Final = frozenset({"by", "without", "on", "ignoring"})
_OPERATORS: Final = frozenset({"and", "or", "unless"})
_BRACKETS: Final = {"(": ")", "{": "}", "[": "]"}
_TARGET_LABELS: Final = frozenset({"instance", "job"})
_OUTCOMES: Final = frozenset(outcome.value for outcome in AttemptOutcome) | {State.SENT}
_VALUES: Final[Mapping[str, frozenset[str]]] = {
    "outcome": _OUTCOMES,
    "event": frozenset(event.value for event in LogEvent),
    "state": frozenset({"due", "scheduled", "sending", "failed", "open", "half_open"}),
    "connection": frozenset({"database", "listener"}),
}


def exported() -> dict[str, frozenset[str]]:
    """Return the labels of every available series."""
    found = {"pgoutbox_build_info": frozenset({"version"}), "up": frozenset()}
    for metric in (*OF_WORKERS, *OF_THE_DATABASE):
        labels = frozenset(metric.labels)
        if metric.kind is Kind.HISTOGRAM:
            found |= {f"{metric.series}_{part}": labels for part in ("sum", "count")}
            found[f"{metric.series}_bucket"] = labels | {"le"}
        else:
            found[metric.series] = labels
    return found


EXPORTED: Final = exported()


class Token(NamedTuple):
    kind: str
    text: str


def tokens_of(expression: str) -> list[Token]:
    found, position = [], 0
    while position < len(expression):
        match = _TOKEN.match(expression, position)
        assert match is not None, f"no PromQL at {expression[position:]!r}"
        kind = str(match.lastgroup)
        found.append(Token(kind, match[kind]))
        position = match.end()
    return found


class Checker:
    """Reads a PromQL expression token by token, and records wrong names, labels and brackets."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._open: list[str] = []
        self._grouping_depth = 0
        self._metric = ""
        self._labels = set(_TARGET_LABELS)
        self._grouped: list[str] = []

    def read(self, tokens: list[Token]) -> None:
        for before, token, after, value in zip(
            [Token("", ""), *tokens],
            tokens,
            [*tokens[1:], Token("", "")],
            [*tokens[2:], *[Token("", "")] * 2],
            strict=False,
        ):
            if token.text in _BRACKETS:
                self._open.append(token.text)
                if before.text in _GROUPINGS:
                    self._grouping_depth = len(self._open)
            elif token.text in _BRACKETS.values():
                self._close(token.text)
            elif token.kind == "name" and self._open[-1:] == ["{"]:
                self._read_matcher(token.text, after.text, value.text)
            elif token.kind == "name":
                self._read_name(token.text)
        self.problems += [f"unbalanced {bracket}" for bracket in self._open]
        self.problems += [f"no metric has the label {label}" for label in self._grouped if label not in self._labels]

    def _close(self, bracket: str) -> None:
        if not self._open or _BRACKETS[self._open.pop()] != bracket:
            self.problems.append(f"unbalanced {bracket}")
        if len(self._open) < self._grouping_depth:
            self._grouping_depth = 0

    def _read_matcher(self, label: str, operator: str, value: str) -> None:
        if label not in EXPORTED.get(self._metric, frozenset()) | _TARGET_LABELS:
            self.problems.append(f"{self._metric} has no label {label}")
        self.problems += wrong_values(label, operator, value)

    def _read_name(self, name: str) -> None:
        if self._grouping_depth:
            self._grouped.append(name)
        elif name in EXPORTED:
            self._metric = name
            self._labels |= EXPORTED[name]
        elif name not in _FUNCTIONS | _AGGREGATIONS | _GROUPINGS | _OPERATORS:
            self.problems.append(f"nobody exports {name}")


def problems_of(expression: str) -> list[str]:
    """Return the errors of a PromQL expression."""
    checker = Checker()
    checker.read(tokens_of(expression))
    return checker.problems


def wrong_values(label: str, operator: str, text: str) -> list[str]:
    values = text.strip('"').split("|") if operator in ("=~", "!~") else [text.strip('"')]
    known = _VALUES.get(label)
    return [f"{label} is never {v}" for v in values if known is not None and v not in known and not v.startswith("$")]


def test_the_promql_check_reports_errors() -> None:
    assert problems_of('sum by (topic) (rate(pgoutbox_attempts_total{outcome="sent"}[5m])) > 0.5') == []
    assert problems_of("pgoutbox_attempts") == ["nobody exports pgoutbox_attempts"]
    assert problems_of("pgoutbox_handler_seconds") == ["nobody exports pgoutbox_handler_seconds"]
    assert problems_of('pgoutbox_slots{topic="a"}') == ["pgoutbox_slots has no label topic"]
    assert problems_of('pgoutbox_events_total{event="boredom"}') == ["event is never boredom"]
    assert problems_of("sum by (topic) (pgoutbox_slots)") == ["no metric has the label topic"]
    assert problems_of("sum(pgoutbox_slots") == ["unbalanced ("]
    assert problems_of("summ(pgoutbox_slots)") == ["nobody exports summ"]


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: str(rule["alert"]))
def test_each_alert_uses_exported_metrics_and_gives_an_instruction(rule: dict[str, Any]) -> None:
    assert problems_of(rule["expr"]) == []
    assert rule["labels"]["severity"] in ("page", "ticket", "none")
    assert rule["annotations"].keys() == {"summary", "description"}
    if "for" in rule:
        assert re.fullmatch(r"\d+[smh]", rule["for"])
    kept = {label for group in re.findall(r"\bby \(([^)]*)\)", rule["expr"]) for label in re.findall(r"\w+", group)}
    told = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
    assert told <= kept


def test_the_alert_rules_that_prometheus_loads_exist() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    assert all((DEPLOY / name).exists() for name in config["rule_files"])


def panels() -> Iterator[dict[str, Any]]:
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    return (panel for panel in dashboard["panels"] if panel["type"] != "row")


@pytest.mark.parametrize("panel", list(panels()), ids=lambda panel: str(panel["title"]))
def test_each_panel_uses_exported_metrics(panel: dict[str, Any]) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        expression = target["expr"]
        assert problems_of(expression) == []
        groups = re.findall(r"\bby \(([^)]*)\)", expression)
        kept = {label for group in groups for label in re.findall(r"\w+", group)}
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept


def test_panels_do_not_overlap_and_their_variables_exist() -> None:
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert taken.isdisjoint(cells), panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard["panels"]))) - {"__rate_interval"}
    assert used == variables.keys()
    for name in ("topic", "queue"):
        assert problems_of(variables[name]["query"]["query"].replace(f", {name}", "")) == []


def test_each_worker_metric_is_in_a_panel_or_an_alert() -> None:
    shown = (DEPLOY / "grafana-dashboard.json").read_text() + (DEPLOY / "alerts.yaml").read_text()
    missing = {metric.name for metric in (*OF_WORKERS, *OF_THE_DATABASE) if metric.series not in shown}
    assert missing == {"breakers_open", "backlog_age_seconds", "backlog_read_seconds"}


# --- Kubernetes -------------------------------------------------------------------------------------------------------


def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    return {(document["kind"], document["metadata"]["name"]): document for document in documents}


def container_of(manifest: dict[str, Any]) -> dict[str, Any]:
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    return dict(container)


def sources_of(container: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the secrets and config maps of a container's environment."""
    kinds = {"secretRef": "Secret", "configMapRef": "ConfigMap"}
    return [(kinds[kind], reference["name"]) for entry in container["envFrom"] for kind, reference in entry.items()]


def test_the_settings_in_the_manifests_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    found = manifests()
    worker = container_of(found["Deployment", "pgoutbox-worker"])
    values: dict[str, str] = {}
    for source in sources_of(worker):
        values |= found[source].get("data", {}) | found[source].get("stringData", {})
    assert values.keys() <= VARIABLES
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    port = next(port["containerPort"] for port in worker["ports"] if port["name"] == "metrics")
    assert settings.metrics.address == f"0.0.0.0:{port}"
    spec = found["Deployment", "pgoutbox-worker"]["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] >= settings.shutdown_grace_seconds + CLOSING_SECONDS


def test_the_worker_is_probed_at_its_address_and_disrupted_one_at_a_time() -> None:
    found = manifests()
    deployment = found["Deployment", "pgoutbox-worker"]
    worker = container_of(deployment)
    assert worker["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "metrics"}
    assert worker["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}
    budget = found["PodDisruptionBudget", "pgoutbox-worker"]["spec"]
    assert budget["selector"] == deployment["spec"]["selector"]
    assert budget["minAvailable"] < deployment["spec"]["replicas"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_migrations_and_workers_have_separate_passwords_and_no_node_rights() -> None:
    found = manifests()
    worker, job = found["Deployment", "pgoutbox-worker"], found["Job", "pgoutbox-migrate"]
    secrets = [{name for kind, name in sources_of(container_of(m)) if kind == "Secret"} for m in (worker, job)]
    assert secrets == [{"pgoutbox-worker"}, {"pgoutbox-owner"}]
    users = [
        found["Secret", name]["stringData"]["PGOUTBOX_DSN"].split("//")[1].split(":")[0]
        for name in ("pgoutbox-worker", "pgoutbox-owner")
    ]
    assert len(set(users)) == 2
    for manifest in (worker, job):
        pod = manifest["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        container = container_of(manifest)
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        name, *arguments = container["command"]
        assert (name, arguments[0] in {"worker", "migrate"}) == ("pgoutbox", True)


# --- systemd ----------------------------------------------------------------------------------------------------------

UNIT: Final = DEPLOY / "pgoutbox-worker@.service"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        server_missing("systemd-analyze is not installed")
    # The program need not exist, but systemd looks for it.
    text = re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", UNIT.read_text(), flags=re.MULTILINE)
    unit = tmp_path / UNIT.name
    unit.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_allows_the_worker_its_stop_time_and_uses_its_watchdog() -> None:
    lines = [line.partition("=") for line in UNIT.read_text().splitlines() if "=" in line and not line.startswith("#")]
    options = {name: value for name, _, value in lines if name != "Environment"}
    assert (options["Type"], options["KillMode"], options["WatchdogSec"]) == ("notify", "mixed", "30s")
    assert int(options["TimeoutStopSec"].rstrip("s")) >= GRACE_SECONDS + CLOSING_SECONDS
    assert options["RestartPreventExitStatus"] == "2"
    environment = dict(value.split("=", 1) for name, _, value in lines if name == "Environment")
    assert environment.keys() <= VARIABLES

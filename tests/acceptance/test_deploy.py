"""Tests the examples for operators: a systemd unit, manifests, alert rules and a dashboard, as their programs read
them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, LiteralString, NamedTuple

import pytest
import yaml

import pgoutbox
from pgoutbox.message import AttemptOutcome, State
from pgoutbox.observability.events import LogEvent
from pgoutbox.observability.measures import DATABASE_METRICS, SERVED, WORKER_METRICS, Kind
from pgoutbox.settings import VARIABLES, Settings, load_settings
from tests.support.messages import PUT_SENDING
from tests.support.missing import server_missing
from tests.support.prometheus import promtool

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import psycopg

ROOT: Final = Path(__file__).parents[2]
DEPLOY: Final = ROOT / "examples" / "deploy"
ALERTMANAGER: Final = DEPLOY / "alertmanager.yaml"
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
_FUNCTIONS: Final = frozenset(
    {"rate", "increase", "histogram_quantile", "absent", "vector", "label_values", "max_over_time"}
)
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
    """Return the labels of every available series. With many databases, each series names its database."""
    found = {"pgoutbox_build_info": frozenset({"version"}), "up": frozenset()}
    for metric in (*WORKER_METRICS, *DATABASE_METRICS, SERVED):
        labels = frozenset(metric.labels) | {"database"}
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
    assert all(re.fullmatch(r"\d+[smh]", rule[name]) for name in ("for", "keep_firing_for") if name in rule)
    kept = {label for group in re.findall(r"\bby \(([^)]*)\)", rule["expr"]) for label in re.findall(r"\w+", group)}
    told = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
    assert told <= kept


def test_the_commands_that_an_alert_names_exist() -> None:
    commands = re.findall(r"^#+ `pgoutbox (\w+)", (ROOT / "docs" / "reference" / "cli.md").read_text(), re.MULTILINE)
    named = re.findall(r"pgoutbox ([a-z]+)", " ".join(rule["annotations"]["description"] for rule in alerts()))
    assert set(named) <= set(commands)


def test_a_page_outlasts_the_workers_until_the_page_about_their_death() -> None:
    """The gauges of the other pages end with the workers."""
    pages = {rule["alert"]: rule for rule in alerts() if rule["labels"]["severity"] == "page"}
    no_worker = pages.pop("PgoutboxNoWorker")
    for rule in pages.values():
        assert int(rule["keep_firing_for"].removesuffix("m")) > int(no_worker["for"].removesuffix("m")), rule["alert"]


# --- Prometheus and Alertmanager --------------------------------------------------------------------------------------


def test_prometheus_accepts_its_configuration_with_the_rules_and_sends_alerts() -> None:
    promtool("check", "config", DEPLOY / "prometheus.yaml")
    config = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    assert all((DEPLOY / name).exists() for name in config["rule_files"])
    (alertmanager,) = config["alerting"]["alertmanagers"]
    assert [target for group in alertmanager["static_configs"] for target in group["targets"]] == ["127.0.0.1:9093"]


def test_each_route_of_alertmanager_has_a_receiver_with_one_address() -> None:
    config = yaml.safe_load(ALERTMANAGER.read_text())
    root = config["route"]
    assert {tuple(route["matchers"]): route["receiver"] for route in root["routes"]} == {
        ('alertname="PgoutboxWatchdog"',): "dead-mans-switch",
        ('severity="page"',): "pager",
    }
    addresses = {
        receiver.pop("name"): [one.get("url", one.get("to")) for kind in receiver.values() for one in kind]
        for receiver in config["receivers"]
    }
    assert addresses.keys() == {root["receiver"], *(route["receiver"] for route in root["routes"])}
    assert all("example.org" in address for (address,) in addresses.values())


def test_the_watchdog_is_repeated_each_minute_and_never_resolved() -> None:
    config = yaml.safe_load(ALERTMANAGER.read_text())
    (route,) = [route for route in config["route"]["routes"] if route["receiver"] == "dead-mans-switch"]
    assert (route["group_wait"], route["group_interval"], route["repeat_interval"]) == ("0s", "1m", "50s")
    (switch,) = [receiver for receiver in config["receivers"] if receiver["name"] == "dead-mans-switch"]
    assert [webhook["send_resolved"] for webhook in switch["webhook_configs"]] == [False]


def amtool(*arguments: str | Path) -> str:
    if shutil.which("amtool") is None:
        server_missing("amtool is not installed (Debian: prometheus-alertmanager)")
    done = subprocess.run(["amtool", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_alertmanager_accepts_its_configuration_and_routes_each_alert_by_its_severity() -> None:
    amtool("check-config", ALERTMANAGER)
    receivers = {"page": "pager", "ticket": "tickets", "none": "dead-mans-switch"}
    for rule in alerts():
        severity = rule["labels"]["severity"]
        labels = (f"alertname={rule['alert']}", f"severity={severity}")
        assert amtool("config", "routes", "test", f"--config.file={ALERTMANAGER}", *labels) == receivers[severity]


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
    missing = {metric.name for metric in (*WORKER_METRICS, *DATABASE_METRICS) if metric.series not in shown}
    assert missing == {"breakers_open", "backlog_age_seconds", "backlog_read_seconds"}


# --- Kubernetes -------------------------------------------------------------------------------------------------------

RELEASE: Final = "1.0.0"
MIGRATION: Final = ("Job", f"pgoutbox-migrate-{RELEASE.replace('.', '-')}")
WORKER: Final = ("Deployment", "pgoutbox-worker")
DASHBOARD: Final = ("Deployment", "pgoutbox-dashboard")


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


def environment_of(container: dict[str, Any]) -> dict[str, str]:
    found = manifests()
    values: dict[str, str] = {}
    for source in sources_of(container):
        values |= found[source].get("data", {}) | found[source].get("stringData", {})
    assert values.keys() <= VARIABLES
    return values


def settings_of(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return load_settings()


def test_the_settings_of_the_worker_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = manifests()[WORKER]
    worker = container_of(deployment)
    settings = settings_of(environment_of(worker), monkeypatch)
    port = next(port["containerPort"] for port in worker["ports"] if port["name"] == "metrics")
    assert settings.metrics.address == f"0.0.0.0:{port}"
    spec = deployment["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] >= settings.shutdown_grace_seconds + CLOSING_SECONDS


def test_the_worker_is_probed_at_its_address_and_disrupted_one_at_a_time() -> None:
    found = manifests()
    deployment = found[WORKER]
    worker = container_of(deployment)
    assert worker["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "metrics"}
    assert worker["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}
    budget = found["PodDisruptionBudget", "pgoutbox-worker"]["spec"]
    assert budget["selector"] == deployment["spec"]["selector"]
    assert budget["minAvailable"] < deployment["spec"]["replicas"]
    # While the database is down no worker is ready. Nodes can still be drained.
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_only_the_namespace_of_prometheus_reads_the_metrics_of_a_worker() -> None:
    found = manifests()
    policy = found["NetworkPolicy", "pgoutbox-worker"]["spec"]
    assert policy["podSelector"] == found[WORKER]["spec"]["selector"]
    assert policy["policyTypes"] == ["Ingress"]
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    (port,) = rule["ports"]
    assert port["port"] in {port["name"] for port in container_of(found[WORKER])["ports"]}


def test_each_release_migrates_by_a_job_of_its_own_that_ends() -> None:
    """The image of a Job cannot change, so a fixed name would refuse a second release, or show the old success."""
    found = manifests()
    images = {container_of(found[key])["image"] for key in (MIGRATION, WORKER, DASHBOARD)}
    assert images == {f"registry.example.org/club:{RELEASE}"}
    assert found[MIGRATION]["spec"]["activeDeadlineSeconds"] <= 3600
    text = (DEPLOY / "kubernetes.yaml").read_text()
    (waited,) = re.findall(r"--timeout=(\d+)s job/(\S+)", text)
    assert waited == (str(found[MIGRATION]["spec"]["activeDeadlineSeconds"]), MIGRATION[1])


def test_each_process_has_its_own_password_and_no_node_rights() -> None:
    found = manifests()
    pods = [found[key] for key in (WORKER, MIGRATION, DASHBOARD)]
    secrets = [{name for kind, name in sources_of(container_of(m)) if kind == "Secret"} for m in pods]
    assert secrets == [{"pgoutbox-worker"}, {"pgoutbox-owner"}, {"pgoutbox-dashboard"}]
    users = [
        found["Secret", name]["stringData"]["PGOUTBOX_DSN"].split("//")[1].split(":")[0]
        for name in ("pgoutbox-worker", "pgoutbox-owner", "pgoutbox-dashboard")
    ]
    assert len(set(users)) == 3
    # psycopg[binary] looks for `system` certificates in a directory of its own.
    assert "sslrootcert=system" not in (DEPLOY / "kubernetes.yaml").read_text()
    for manifest in pods:
        pod = manifest["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        # Kubernetes would set PGOUTBOX_DASHBOARD_PORT, which is not a setting.
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        container = container_of(manifest)
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"]
        name, *arguments = container["command"]
        assert (name, arguments[0] in {"worker", "migrate", "web"}) == ("pgoutbox", True)
        # The root file system is read-only. Libraries that spool files need one directory that is not.
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        (mount,) = container["volumeMounts"]
        (volume,) = pod["volumes"]
        assert (mount["mountPath"], mount["name"]) == ("/tmp", volume["name"])
        assert volume["emptyDir"]["sizeLimit"]


def test_the_dashboard_is_reached_only_by_its_host_name_and_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    found = manifests()
    dashboard = container_of(found[DASHBOARD])
    settings = settings_of(environment_of(dashboard), monkeypatch)
    assert settings.web.hosts == "outbox.example.org"
    assert settings.web.trusted_proxies is not None
    assert settings.web.secret is not None, "sessions would end with each pod"
    arguments = dashboard["command"]
    assert arguments[arguments.index("--host") + 1] == "0.0.0.0"
    port = next(port["containerPort"] for port in dashboard["ports"] if port["name"] == "http")
    assert arguments[arguments.index("--port") + 1] == str(port)
    for probe in ("livenessProbe", "readinessProbe"):
        assert dashboard[probe]["httpGet"] == {"path": "/healthz", "port": "http"}
    service = found["Service", "pgoutbox-dashboard"]["spec"]
    assert service["selector"] == found[DASHBOARD]["spec"]["template"]["metadata"]["labels"]
    assert [port["targetPort"] for port in service["ports"]] == ["http"]


def test_keda_counts_the_messages_that_more_workers_would_deliver(rolled_back: psycopg.Connection) -> None:
    documents = yaml.safe_load_all((DEPLOY / "keda.yaml").read_text())
    (spec,) = [document["spec"] for document in documents if document["kind"] == "ScaledObject"]
    assert ("Deployment", spec["scaleTargetRef"]["name"]) == WORKER
    assert spec["minReplicaCount"] == manifests()[WORKER]["spec"]["replicas"]
    ((query, target),) = [(t["metadata"]["query"], t["metadata"]["targetQueryValue"]) for t in spec["triggers"]]
    assert int(target) * spec["maxReplicaCount"] == int(re.findall(r"LIMIT (\d+)", query)[0])
    execute = rolled_back.execute
    execute("INSERT INTO pgoutbox.queue (name, paused_at) VALUES ('paused', now())")
    enqueue = "SELECT pgoutbox.enqueue('scale', '{}', queue => %s, delay => %s)"
    for queue, delay in (
        ("default", None),
        ("default", None),
        ("default", "1 hour"),
        ("paused", None),
        ("paused", None),
    ):
        execute(enqueue, (queue, delay))
    execute(PUT_SENDING, execute("SELECT max(id) FROM pgoutbox.message_live").fetchone())
    execute("SET LOCAL ROLE pgoutbox_viewer")
    assert execute(query).fetchone() == (3,)


# --- compose ----------------------------------------------------------------------------------------------------------


def test_the_services_of_compose_run_commands_of_pgoutbox_with_valid_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DEPLOY / "compose.yaml").read_text().replace("${TOKEN:?set it to 20 random characters or more}", "t" * 20)
    services = yaml.safe_load(text)["services"]
    database = services.pop("db")
    assert {name: service["command"][1] for name, service in services.items()} == {
        "migrate": "migrate",
        "worker": "worker",
        "dashboard": "web",
    }
    for service in services.values():
        with monkeypatch.context() as patch:
            settings = settings_of(service["environment"], patch)
        assert settings.dsn is not None
        assert f":{database['environment']['POSTGRES_PASSWORD']}@db/" in settings.dsn.get_secret_value()
    assert int(services["worker"]["stop_grace_period"].rstrip("s")) >= GRACE_SECONDS + CLOSING_SECONDS


def test_the_image_contains_this_version_and_extras_that_exist() -> None:
    (extras, version) = re.findall(r"pgoutbox\[(.*)\]==([\d.]+)", (DEPLOY / "Containerfile").read_text())[0]
    assert version == pgoutbox.__version__
    assert set(extras.split(",")) <= set(metadata("pgoutbox").get_all("Provides-Extra") or ())


# --- systemd ----------------------------------------------------------------------------------------------------------

UNIT: Final = DEPLOY / "pgoutbox-worker@.service"
REPORT: Final = DEPLOY / "pgoutbox-failed@.service"


def unit_options() -> list[tuple[str, str]]:
    lines = [line.partition("=") for line in UNIT.read_text().splitlines() if "=" in line and not line.startswith("#")]
    return [(name, value) for name, _, value in lines]


def unit_environment(instance: str) -> dict[str, str]:
    assignments = [value.replace("%i", instance) for name, value in unit_options() if name == "Environment"]
    environment = dict(value.split("=", 1) for value in assignments)
    assert environment.keys() <= VARIABLES
    return environment


SINCE_254: Final = "Unknown key (?:name )?'(?:RestartSteps|RestartMaxDelaySec)' in section "


def systemd_analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        server_missing("systemd-analyze is not installed")
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    # The program need not exist, but systemd looks for it.
    text = re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", UNIT.read_text(), flags=re.MULTILINE)
    (tmp_path / UNIT.name).write_text(text)
    (tmp_path / REPORT.name).write_text(REPORT.read_text())
    done = systemd_analyze("verify", "--man=no", tmp_path / UNIT.name, tmp_path / REPORT.name)
    version = int(systemd_analyze("--version").stdout.split()[1])
    unknown = [line for line in done.stderr.splitlines() if version < 254 and re.search(SINCE_254, line)]
    assert (done.returncode, done.stderr.splitlines()) == (0, unknown)


def test_systemd_judges_the_exposure_of_the_unit_as_ok() -> None:
    done = systemd_analyze("security", "--offline=true", "--threshold=20", UNIT)
    assert done.returncode == 0, done.stdout


def test_the_unit_allows_the_worker_its_stop_time_and_uses_its_watchdog() -> None:
    options = dict(unit_options())
    assert (options["Type"], options["KillMode"], options["WatchdogSec"]) == ("notify", "mixed", "30s")
    assert int(options["TimeoutStopSec"].rstrip("s")) >= GRACE_SECONDS + CLOSING_SECONDS


def test_the_unit_is_restarted_without_a_limit_and_reports_when_it_fails() -> None:
    options = dict(unit_options())
    # By default systemd gives up after five starts in ten seconds.
    assert (options["Restart"], options["StartLimitIntervalSec"]) == ("always", "0")
    assert options["RestartPreventExitStatus"] == "2"
    assert options["OnFailure"] == "pgoutbox-failed@%n.service"
    # Each of the three has an effect only together with the others.
    assert (options["RestartSec"], options["RestartSteps"], options["RestartMaxDelaySec"]) == ("2s", "5", "1min")


def test_the_name_of_an_instance_is_its_port_and_prometheus_scrapes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    command = r"systemctl enable --now ((?:pgoutbox-worker@\d+ ?)+)"
    started = {
        tuple(re.findall(r"@(\d+)", found))
        for path in (UNIT, ROOT / "docs" / "how-to" / "deploy.md")
        for found in re.findall(command, path.read_text())
    }
    (instances,) = started
    addresses = []
    for instance in instances:
        with monkeypatch.context() as patch:
            addresses.append(settings_of(unit_environment(instance), patch).metrics.address)
    config = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "pgoutbox", "the alert PgoutboxWorkerDown names the job"
    assert [target for group in job["static_configs"] for target in group["targets"]] == addresses


# --- memory -----------------------------------------------------------------------------------------------------------

HANDLERS: Final = """
import atexit
import pathlib

from pgoutbox import Outbox

outbox = Outbox()
status = pathlib.Path("/proc/self/status")
atexit.register(lambda: pathlib.Path(__file__).with_name("status").write_text(status.read_text()))


@outbox.handler("big")
async def big(message, ctx):
    pass
"""


ITEM: Final = '{"n": 12345, "t": "xxxxxxxxxxxxxxxx"}'
ITEM_COUNT: Final = Settings.model_fields["max_payload_bytes"].default // (len(ITEM) + 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("payload", "count"),
    [
        (f"(SELECT jsonb_agg('{ITEM}'::jsonb) FROM generate_series(1, {ITEM_COUNT}))", 60),
        ("jsonb_build_object('text', repeat('x', 16777200))", 40),
    ],
    ids=["many small values", "one letter"],
)
def test_a_backlog_of_the_largest_payloads_fits_into_the_limits_of_unit_and_pod(
    db: psycopg.Connection, dsn: str, tmp_path: Path, payload: LiteralString, count: int
) -> None:
    """A parsed payload of many small values takes about eight times its size. A repeated letter needs no disk."""
    pod = container_of(manifests()[WORKER])
    limits = {
        pod["resources"]["limits"]["memory"].removesuffix("Mi"),
        dict(unit_options())["MemoryMax"].removesuffix("M"),
    }
    (limit,) = limits
    db.execute(f"SELECT pgoutbox.enqueue('big', {payload}) FROM generate_series(1, {count})")
    (tmp_path / "big.py").write_text(HANDLERS)
    environment = os.environ | {
        "PGOUTBOX_DSN": dsn,
        "PGOUTBOX_APP": "big:outbox",
        "PYTHONPATH": str(tmp_path),
    }
    subprocess.run([sys.executable, "-m", "pgoutbox", "worker", "--drain"], env=environment, check=True)
    assert db.execute("SELECT state, count(*) FROM pgoutbox.message GROUP BY 1").fetchall() == [("sent", count)]
    # `wait4` would tell the peak of this process instead, if that is higher: a fork inherits it.
    (peak_kb,) = re.findall(r"^VmHWM:\s+(\d+) kB$", (tmp_path / "status").read_text(), re.MULTILINE)
    assert int(peak_kb) / 1024 < int(limit)


# --- clones -----------------------------------------------------------------------------------------------------------


def test_each_process_of_the_files_has_the_name_of_its_deployment() -> None:
    """Workers in a clone that has another name send nothing."""
    (name,) = re.findall(r"PGOUTBOX_DEPLOYMENT=(\w+)`", (ROOT / "docs/how-to/deploy.md").read_text())
    for path in (DEPLOY / "pgoutbox-worker@.service", ROOT / "examples/club/worker.env"):
        assert f"PGOUTBOX_DEPLOYMENT={name}\n" in path.read_text()
    for process in (MIGRATION, WORKER, DASHBOARD):
        assert environment_of(container_of(manifests()[process]))["PGOUTBOX_DEPLOYMENT"] == name
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert [who for who, one in services.items() if "PGOUTBOX_DEPLOYMENT" not in one["environment"]] == ["db"]

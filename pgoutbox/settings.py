"""All settings, read once from the environment (prefix `PGOUTBOX_`) and checked before anything is opened.

A wrong value raises `ConfigurationError` with the variable's name, the value (never a secret's) and what is accepted.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
from collections.abc import Iterable
from typing import Literal, Self, get_args

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pgoutbox.errors import ConfigurationError
from pgoutbox.redaction import REDACTED_NAMES, check_redacted_name

ENVIRONMENT_PREFIX = "PGOUTBOX_"
# What is no setting and yet means something: to those who run pgoutbox's own tests, and to supervised processes.
_TEST_PREFIX = f"{ENVIRONMENT_PREFIX}TEST_"
SUPERVISOR_FD_VARIABLE = f"{ENVIRONMENT_PREFIX}SUPERVISOR_FD"
_HOST_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]")
_FERNET_KEY = re.compile(r"\s*[A-Za-z0-9_-]{43}=\s*")


class Settings(BaseSettings):
    """Every knob of pgoutbox, with its default and bounds. Durations are in seconds."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX,
        frozen=True,
        extra="ignore",
        env_ignore_empty=False,
        hide_input_in_errors=True,
    )

    dsn: SecretStr | None = Field(None, description="libpq connection string or URL of the database.")
    listen_dsn: SecretStr | None = Field(
        None, description="Connection of the listener, when `dsn` leads through a transaction pooler."
    )
    app: str | None = Field(None, description="Where the worker finds the outbox: `module:attribute`.")

    listen: bool = Field(True, description="Wake on NOTIFY. Off: poll every `sweep_seconds` only.")
    lease_seconds: float = Field(60.0, ge=1, le=86_400, description="How long a claim lasts unless it is renewed.")
    renew_seconds: float | None = Field(
        None, ge=0.1, le=28_800, description="How often leases are renewed; a third of the lease when not given."
    )
    sweep_seconds: float = Field(60.0, ge=0.1, le=3_600, description="The longest a worker sleeps without looking.")
    probe_seconds: float = Field(10.0, ge=0.5, le=600, description="How often the idle listener is probed.")
    probe_timeout_seconds: float = Field(4.0, ge=0.1, le=60, description="When an unanswered probe means a dead link.")
    concurrency: int = Field(
        50, ge=1, le=5_000, description="Attempts under way at once in one process; sync handlers get a thread each."
    )
    batch_size: int = Field(500, ge=1, le=5_000, description="Messages per claim or finish statement, at most.")
    handler_timeout_seconds: float | None = Field(
        None, gt=0, le=86_400, description="Time limit of one attempt, unless the handler has its own. None: no limit."
    )
    shutdown_grace_seconds: float = Field(
        30.0, ge=0, le=3_600, description="How long a stopping worker waits for its handlers."
    )
    connect_timeout_seconds: int = Field(10, ge=1, le=300, description="Time limit of opening a connection.")
    statement_timeout_seconds: float = Field(
        20.0, ge=0.1, le=3_600, description="Time limit of each of the worker's own statements."
    )
    lock_timeout_seconds: float = Field(
        1.0, ge=0.01, le=600, description="Longest wait of the worker's own statements for a lock."
    )
    maintenance_interval_seconds: float = Field(
        300.0,
        ge=0,
        le=86_400,
        description="How often one worker of the fleet makes partitions and obeys the rules of retention. 0: never.",
    )
    max_payload_bytes: int = Field(
        1_000_000, ge=1, le=16_777_216, description="Largest payload that enqueue accepts, in bytes of UTF-8 JSON."
    )
    encryption_keys: SecretStr | None = Field(
        None,
        description="Fernet keys of encrypted topics, with commas between them: the first encrypts, all decrypt.",
    )
    worker_name: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="First part of the column `worker`; the host's name if not given.",
    )

    smtp_host: str | None = Field(None, description="SMTP server of the `mailto:` transport.")
    smtp_port: int | None = Field(None, ge=1, le=65_535, description="587 for starttls, 465 for tls, 25 for none.")
    smtp_security: Literal["starttls", "tls", "none"] = Field(
        "starttls", description="STARTTLS demanded, TLS from the first byte, or plain text (a local server only)."
    )
    smtp_ca_file: str | None = Field(None, description="PEM file of authorities to trust besides those of the system.")
    smtp_username: str | None = Field(None, description="User name for SMTP AUTH.")
    smtp_password: SecretStr | None = Field(None, description="Password for SMTP AUTH.")
    smtp_from: str | None = Field(None, description="Sender of e-mail that names none.")
    smtp_hostname: str | None = Field(None, description="Name given in EHLO; the machine's own if not given.")
    smtp_timeout_seconds: float = Field(30.0, ge=0.5, le=600, description="Time limit of each step of the dialogue.")
    smtp_connections: int = Field(10, ge=1, le=500, description="Open SMTP connections per process, at most.")

    redirect_to: str | None = Field(
        None, description="For testing: the address, or `@domain`, that gets all e-mail. Nothing else is handed over."
    )
    redirect_except: str | None = Field(
        None, description="Addresses and `@domain`s, with commas between, that get their e-mail in spite of it."
    )
    redirect_forbidden: str | None = Field(
        None, description="Days without a redirect, with commas between: `2026-04-01/2026-09-30[Europe/Berlin]`."
    )
    apprise_urls: SecretStr | None = Field(
        None, description="Where notifications go: a JSON object of names and Apprise URLs."
    )

    webhook_secrets: SecretStr | None = Field(
        None,
        description="What webhooks are signed with: `whsec_` and base64, or `name=whsec_...`; several, separated by "
        "spaces. Those of one name sign together.",
    )
    webhook_timeout_seconds: float = Field(
        30.0, ge=0.5, le=600, description="Time limit of one webhook from looking its host up to the answer."
    )
    webhook_connect_timeout_seconds: float = Field(
        10.0, ge=0.1, le=120, description="Time limit of looking a host up, connecting and the TLS handshake."
    )
    webhook_connections: int = Field(
        50, ge=1, le=5_000, description="Webhooks under way at once in one process, at most."
    )
    webhook_ports: str = Field("443,8443", description="Ports that webhooks may be sent to, separated by commas.")
    webhook_allow_http: bool = Field(False, description="Send to `http:` destinations too, in plain text.")
    webhook_allowed_networks: str | None = Field(
        None,
        description="Networks that webhooks may be sent to although they are not public, in CIDR notation, separated "
        "by commas.",
    )
    webhook_ca_file: str | None = Field(
        None, description="PEM file of authorities to trust besides those of the system."
    )
    webhook_retry_after_cap_seconds: float = Field(
        86_400.0,
        ge=0,
        le=2_592_000,
        description="Longest `Retry-After` that is believed; the retry policy has a cap too.",
    )
    webhook_excerpt_length: int = Field(
        0, ge=0, le=500, description="Characters of a refusing answer that the error quotes. 0: none."
    )

    breaker: bool = Field(True, description="Hold messages back from a transport or host that is dead.")
    breaker_failures: int = Field(
        5, ge=1, le=1_000, description="How many failures in a row, in one process, open a circuit breaker."
    )
    breaker_error_rate: float = Field(
        0.5, gt=0, le=1, description="Share of failures that opens it, of at least 20 sends within 60 s."
    )
    breaker_cooldown_seconds: float = Field(
        30.0, ge=0.1, le=86_400, description="How long it stays open before one message is sent as a probe."
    )
    breaker_max_cooldown_seconds: float = Field(
        600.0, ge=0.1, le=86_400, description="Each probe that fails doubles the pause, up to this."
    )
    breaker_probe_seconds: float = Field(
        120.0, ge=0.1, le=86_400, description="When a probe without an outcome counts as lost."
    )
    alert_destination: str | None = Field(
        None,
        max_length=2048,
        description="Where breakers that open and close are announced: a `mailto:` address, which gets an e-mail.",
    )

    redact: str | None = Field(
        None, description="Names of values to hide besides `password`, `token` and the like, with commas between them."
    )
    event_source: str | None = Field(None, description="`source` of events that name none: a URI of this application.")
    broker_timeout_seconds: float = Field(
        10.0, ge=0.5, le=600, description="How long a broker may take to connect, and again to acknowledge an event."
    )
    redis_url: SecretStr | None = Field(
        None, description="Redis of the `redis:` transport: `redis://user:password@host:6379/0`, or `rediss:` for TLS."
    )
    redis_ca_file: str | None = Field(None, description="PEM file of authorities to trust besides those of the system.")
    nats_url: SecretStr | None = Field(
        None,
        description="NATS of the `nats:` transport: `nats://user:password@host:4222`, or `tls:`; several by commas.",
    )
    nats_ca_file: str | None = Field(None, description="PEM file of authorities to trust besides those of the system.")
    rabbitmq_url: SecretStr | None = Field(
        None, description="Server of the `rabbitmq:` transport: `amqps://user:password@host/vhost`, or `amqp:`."
    )
    rabbitmq_ca_file: str | None = Field(
        None, description="PEM file of authorities to trust besides those of the system."
    )
    kafka_servers: str | None = Field(
        None, description="Brokers of the `kafka:` transport to start from: `host:port`, several by commas."
    )
    kafka_security: Literal["tls", "none"] = Field("tls", description="TLS, or plain text (a private network only).")
    kafka_ca_file: str | None = Field(
        None, description="PEM file of authorities to trust instead of those of the system."
    )
    kafka_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        "SCRAM-SHA-512", description="SASL mechanism, when there is a user name."
    )
    kafka_username: str | None = Field(None, description="User name for SASL.")
    kafka_password: SecretStr | None = Field(None, description="Password for SASL.")

    web_viewer_token: SecretStr | None = Field(
        None,
        description="Tokens of those who may look at the dashboard: `token`, or `name:token` with commas between them. "
        "Instead of a token what `pgoutbox web hash-password` prints.",
    )
    web_operator_token: SecretStr | None = Field(
        None, description="The same for those who may act in the dashboard, too: redrive, cancel, pause."
    )
    web_secret: SecretStr | None = Field(
        None,
        min_length=32,
        max_length=1_000,
        description="What the dashboard signs sessions with: the same in each of its processes. Not given: a random "
        "one, and sessions end with the process.",
    )
    web_hosts: str | None = Field(
        None,
        description="Names under which the dashboard answers, with commas between them. Not given: localhost when it "
        "listens there, else every name.",
    )
    web_trusted_proxies: str | None = Field(
        None,
        description="Addresses or networks of proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` the dashboard "
        "believes, with commas between them. Not given: nobody's.",
    )
    web_idle_seconds: float = Field(
        1_800.0, ge=60, le=604_800, description="When a session at the dashboard ends that nobody uses."
    )
    web_session_seconds: float = Field(
        43_200.0, ge=60, le=2_592_000, description="When a session at the dashboard ends in any case."
    )
    web_connections: int = Field(
        200, ge=2, le=10_000, description="Connections to the dashboard at once; a live page keeps one."
    )

    metrics_address: str | None = Field(
        None,
        description="Where a worker answers `/metrics`, `/livez` and `/readyz`: `127.0.0.1:9187`. Port 0: any free "
        "one.",
    )
    metrics_max_names: int = Field(
        100, ge=1, le=10_000, description="How many topics, and queues, are told apart by metrics; the rest is `other`."
    )
    metrics_backlog: bool = Field(True, description="Count the messages in the database for `/metrics`.")
    metrics_cache_seconds: float = Field(
        5.0, ge=0.1, le=3_600, description="How long such a count is good for; longer where it takes long."
    )
    otel_traces: bool = Field(
        True, description="Spans and trace contexts by OpenTelemetry, where the application has set it up."
    )
    otel_metrics: bool = Field(True, description="Metrics by OpenTelemetry, where the application has set it up.")
    webhook_trace_context: bool = Field(
        False, description="Send `traceparent` with webhooks: it tells receivers the id of the trace."
    )

    log_file: str | None = Field(
        None,
        description="File that the CLI's log is appended to instead of stderr; one that is moved away is made anew.",
    )
    log_format: Literal["text", "json"] = Field("text", description="Format of the CLI's log.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Level of the CLI's log.")

    def __init__(self, **values: object) -> None:
        """Read the environment; `values`, by field name, win over it.

        Raises `ConfigurationError` for an unknown name, and pydantic's `ValidationError` for a wrong value.
        """
        unknown = [name for name in values if not name.startswith("_") and name not in type(self).model_fields]
        if unknown:
            raise ConfigurationError(
                "\n".join(f"unknown setting {n!r}; did you mean {_nearest(n)!r}?" for n in unknown)
            )
        super().__init__(**values)  # type: ignore[arg-type] # pydantic checks the values

    @field_validator("*", mode="before")
    @classmethod
    def _no_empty_text(cls, value: object) -> object:
        if isinstance(value, str) and not value.strip():
            raise ValueError("is set but empty; give a value or unset it")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("must be a finite number")
        return value

    @field_validator("redact")
    @classmethod
    def _check_redact(cls, names: str | None) -> str | None:
        for name in names.split(",") if names is not None else ():
            check_redacted_name(name)
        return names

    @field_validator("metrics_address")
    @classmethod
    def _check_metrics_address(cls, address: str | None) -> str | None:
        if address is not None:
            parse_address(address)
        return address

    @field_validator("encryption_keys")
    @classmethod
    def _check_keys(cls, keys: SecretStr | None) -> SecretStr | None:
        for number, text in enumerate(keys.get_secret_value().split(",") if keys is not None else (), start=1):
            if _FERNET_KEY.fullmatch(text) is None:
                raise ValueError(
                    f"key {number} is no Fernet key, 32 bytes in URL-safe base64; make one with: "
                    "python -c 'from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())'"
                )
        return keys

    @field_validator("web_hosts")
    @classmethod
    def _check_hosts(cls, hosts: str | None) -> str | None:
        for name in hosts.split(",") if hosts is not None else ():
            if _HOST_NAME.fullmatch(name.strip()) is None:
                raise ValueError("give names without port or scheme, such as outbox.example.org,[::1]")
        return hosts

    @field_validator("web_trusted_proxies")
    @classmethod
    def _check_proxies(cls, proxies: str | None) -> str | None:
        for place in proxies.split(",") if proxies is not None else ():
            try:
                ipaddress.ip_network(place.strip())
            except ValueError:
                raise ValueError("give addresses or networks, such as 10.0.0.7,10.1.0.0/16") from None
        return proxies

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.lease_seconds < 3 * self.renew_interval_seconds:
            raise ValueError(
                f"PGOUTBOX_LEASE_SECONDS={self.lease_seconds:g} must be at least three times "
                f"PGOUTBOX_RENEW_SECONDS={self.renew_interval_seconds:g}, so that a renewal may fail twice"
            )
        if self.probe_timeout_seconds > self.probe_seconds:
            raise ValueError(
                f"PGOUTBOX_PROBE_TIMEOUT_SECONDS={self.probe_timeout_seconds:g} must not exceed "
                f"PGOUTBOX_PROBE_SECONDS={self.probe_seconds:g}"
            )
        if 0 < self.maintenance_interval_seconds < 1:
            raise ValueError(
                f"PGOUTBOX_MAINTENANCE_INTERVAL_SECONDS={self.maintenance_interval_seconds:g} must be at least 1, or 0"
            )
        if self.breaker_cooldown_seconds > self.breaker_max_cooldown_seconds:
            raise ValueError(
                f"PGOUTBOX_BREAKER_COOLDOWN_SECONDS={self.breaker_cooldown_seconds:g} must not exceed "
                f"PGOUTBOX_BREAKER_MAX_COOLDOWN_SECONDS={self.breaker_max_cooldown_seconds:g}"
            )
        if self.web_idle_seconds > self.web_session_seconds:
            raise ValueError(
                f"PGOUTBOX_WEB_IDLE_SECONDS={self.web_idle_seconds:g} must not exceed "
                f"PGOUTBOX_WEB_SESSION_SECONDS={self.web_session_seconds:g}"
            )
        if self.alert_destination is not None and not re.fullmatch(
            r"mailto:[^\s,\x00-\x1f\x7f]+", self.alert_destination
        ):
            raise ValueError("PGOUTBOX_ALERT_DESTINATION must be one address such as mailto:ops@example.org")
        if self.smtp_password is not None and self.smtp_username is None:
            raise ValueError("PGOUTBOX_SMTP_PASSWORD is set, PGOUTBOX_SMTP_USERNAME is not")
        if self.smtp_password is not None and self.smtp_security == "none":
            raise ValueError(
                "PGOUTBOX_SMTP_SECURITY=none would send PGOUTBOX_SMTP_PASSWORD in plain text; use starttls or tls"
            )
        if self.kafka_password is not None and self.kafka_username is None:
            raise ValueError("PGOUTBOX_KAFKA_PASSWORD is set, PGOUTBOX_KAFKA_USERNAME is not")
        return self

    @property
    def redacted_names(self) -> tuple[str, ...]:
        """The names whose values are hidden wherever people look: the usual ones and those of `redact`."""
        return (*REDACTED_NAMES, *(name.strip() for name in (self.redact or "").split(",") if name.strip()))

    @property
    def pooled(self) -> bool:
        """Whether `dsn` may lead through a transaction pooler, where nothing of a session outlives a transaction.

        So it is when there is a connection of its own for listening, or no listening at all.
        """
        return not self.listen or self.listen_dsn is not None

    @property
    def renew_interval_seconds(self) -> float:
        """How often leases are renewed, in seconds."""
        return self.renew_seconds if self.renew_seconds is not None else self.lease_seconds / 3

    def require_dsn(self) -> str:
        """The DSN in clear, or a `ConfigurationError` that says how to give one."""
        if self.dsn is None:
            raise ConfigurationError(
                "no database given: set PGOUTBOX_DSN, for example "
                "PGOUTBOX_DSN=postgresql://app@localhost/app, or pass --dsn"
            )
        return _plain(self.dsn, "PGOUTBOX_DSN")

    def require_listen_dsn(self) -> str:
        """The DSN of the listener in clear: `listen_dsn`, or else `dsn`."""
        return _plain(self.listen_dsn, "PGOUTBOX_LISTEN_DSN") if self.listen_dsn is not None else self.require_dsn()


def _plain(dsn: SecretStr, variable: str) -> str:
    """The DSN in clear. SQLAlchemy's URLs name a driver, which no connection string does."""
    if driver := re.match(r"postgres(?:ql)?(\+\w+)://", dsn.get_secret_value()):
        raise ConfigurationError(f"{variable}: is a URL of SQLAlchemy; remove {driver[1]} before ://")
    return dsn.get_secret_value()


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of `127.0.0.1:9187`, `[::1]:9187` or `localhost:9187`; `ValueError` for anything else."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+)):([0-9]{1,5})", text)
    if match is None or int(match[3]) > 65_535:
        raise ValueError("must be an address and a port, such as 127.0.0.1:9187 or [::1]:9187")
    return match[1] or match[2], int(match[3])


def load_settings(**overrides: object) -> Settings:
    """Read the environment; `overrides` (by field name, None meaning "not given") win over it.

    Raises `ConfigurationError` with one line for each wrong variable.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        raise ConfigurationError(_explain(error, given)) from None


def unknown_variables(environment: Iterable[str]) -> list[tuple[str, str]]:
    """The variables that look like a setting and are none, each with the setting that was likely meant."""
    known = {f"{ENVIRONMENT_PREFIX}{field.upper()}" for field in Settings.model_fields}
    return [
        (variable, f"{ENVIRONMENT_PREFIX}{_nearest(variable[len(ENVIRONMENT_PREFIX) :]).upper()}")
        for variable in sorted(environment)
        if variable.upper().startswith(ENVIRONMENT_PREFIX)
        and not variable.startswith(_TEST_PREFIX)
        and variable != SUPERVISOR_FD_VARIABLE
        and variable.upper() not in known
    ]


def _nearest(name: str) -> str:
    return difflib.get_close_matches(name.lower(), Settings.model_fields, n=1, cutoff=0.0)[0]


def _explain(error: ValidationError, given: dict[str, object]) -> str:
    import os

    lines = []
    for problem in error.errors(include_url=False, include_context=False):
        if not problem["loc"]:
            lines.append(problem["msg"].removeprefix("Value error, "))
            continue
        field = str(problem["loc"][0])
        variable = f"{ENVIRONMENT_PREFIX}{field.upper()}"
        value = given.get(field, os.environ.get(variable))
        shown = "(hidden)" if _is_secret(field) else repr(value)
        reason = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{variable}={shown}: {reason[:1].lower()}{reason[1:]}")
    return "\n".join(lines)


def _is_secret(field: str) -> bool:
    return field in Settings.model_fields and SecretStr in get_args(Settings.model_fields[field].annotation)

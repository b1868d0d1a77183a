"""All settings, read once from the environment (prefix `PGOUTBOX_`) and checked before any connection is opened.

A wrong value raises `ConfigurationError` with the variable's name, its value and the accepted values. Secrets are
never shown.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
from collections.abc import Iterable
from typing import ClassVar, Literal, Self, get_args

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pgoutbox.errors import ConfigurationError
from pgoutbox.redaction import REDACTED_NAMES, check_redacted_name

ENVIRONMENT_PREFIX = "PGOUTBOX_"
# Prefixed variables that are not settings: of pgoutbox's own tests, and of supervised processes.
_TEST_PREFIX = f"{ENVIRONMENT_PREFIX}TEST_"
SUPERVISOR_FD_VARIABLE = f"{ENVIRONMENT_PREFIX}SUPERVISOR_FD"
_HOST_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]")
_FERNET_KEY = re.compile(r"\s*[A-Za-z0-9_-]{43}=\s*")


class Settings(BaseSettings):
    """All settings of pgoutbox, with their defaults and bounds. Durations are in seconds."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX,
        frozen=True,
        extra="ignore",
        env_ignore_empty=False,
        hide_input_in_errors=True,
    )

    dsn: SecretStr | None = Field(None, description="Database to connect to: a libpq connection string or a URL.")
    listen_dsn: SecretStr | None = Field(
        None, description="Direct connection for LISTEN. Set it if `dsn` goes through a transaction pooler."
    )
    app: str | None = Field(None, description="Outbox that the worker runs, as `module:attribute`.")

    listen: bool = Field(True, description="Wake up on NOTIFY. If off, the worker only polls every `sweep_seconds`.")
    lease_seconds: float = Field(
        60.0,
        ge=1,
        le=86_400,
        description="Duration of a lease, in seconds. A claim ends when its lease is not renewed in time.",
    )
    renew_seconds: float | None = Field(
        None,
        ge=0.1,
        le=28_800,
        description="Interval between two renewals of a lease, in seconds (default: a third of `lease_seconds`).",
    )
    sweep_seconds: float = Field(
        60.0, ge=0.1, le=3_600, description="Maximum interval between two polls of an idle worker, in seconds."
    )
    probe_seconds: float = Field(
        10.0, ge=0.5, le=600, description="Interval between two checks of the idle LISTEN connection, in seconds."
    )
    probe_timeout_seconds: float = Field(
        4.0,
        ge=0.1,
        le=60,
        description="Time to wait for the answer to such a check, in seconds. Without one, the worker reconnects.",
    )
    concurrency: int = Field(
        50,
        ge=1,
        le=5_000,
        description="Maximum number of concurrent attempts in one process. Each attempt of a sync handler uses a "
        "thread.",
    )
    batch_size: int = Field(
        500, ge=1, le=5_000, description="Maximum number of messages in one claim or finish statement."
    )
    handler_timeout_seconds: float | None = Field(
        None,
        gt=0,
        le=86_400,
        description="Timeout of one attempt, in seconds, unless the handler sets its own (default: no limit).",
    )
    shutdown_grace_seconds: float = Field(
        30.0, ge=0, le=3_600, description="Time that a stopping worker gives its handlers to finish, in seconds."
    )
    connect_timeout_seconds: int = Field(
        10, ge=1, le=300, description="Timeout for opening a database connection, in seconds."
    )
    statement_timeout_seconds: float = Field(
        20.0,
        ge=0.1,
        le=3_600,
        description="Timeout of each statement of the worker, in seconds. Handlers' statements are not affected.",
    )
    lock_timeout_seconds: float = Field(
        1.0, ge=0.01, le=600, description="Maximum time that a statement of the worker waits for a lock, in seconds."
    )
    maintenance_interval_seconds: float = Field(
        300.0,
        ge=0,
        le=86_400,
        description="Interval between two rounds of maintenance in all workers together, in seconds. A round "
        "creates partitions and applies the retention rules. 0: no maintenance.",
    )
    max_payload_bytes: int = Field(
        1_000_000, ge=1, le=16_777_216, description="Maximum size of an enqueued payload, in bytes of UTF-8 JSON."
    )
    encryption_keys: SecretStr | None = Field(
        None,
        description="Fernet keys for encrypted topics, separated by commas. The first key encrypts; all keys decrypt.",
    )
    worker_name: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="First part of the worker's name, as recorded in the column `worker` (default: the host name).",
    )

    smtp_host: str | None = Field(None, description="SMTP server of the `mailto:` transport.")
    smtp_port: int | None = Field(
        None,
        ge=1,
        le=65_535,
        description="Port of the SMTP server (default: 587 for starttls, 465 for tls, 25 for none).",
    )
    smtp_security: Literal["starttls", "tls", "none"] = Field(
        "starttls",
        description="Encryption of the SMTP connection: required STARTTLS, implicit TLS, or none (for a local "
        "server only).",
    )
    smtp_ca_file: str | None = Field(
        None, description="PEM file of certificate authorities to trust in addition to the system's."
    )
    smtp_username: str | None = Field(None, description="User name for SMTP AUTH.")
    smtp_password: SecretStr | None = Field(None, description="Password for SMTP AUTH.")
    smtp_from: str | None = Field(None, description="Sender address of e-mails that do not set one.")
    smtp_hostname: str | None = Field(None, description="Host name to send in EHLO (default: the machine's host name).")
    smtp_timeout_seconds: float = Field(
        30.0, ge=0.5, le=600, description="Timeout of each step of the SMTP dialogue, in seconds."
    )
    smtp_connections: int = Field(
        10, ge=1, le=500, description="Maximum number of open SMTP connections in one process."
    )

    redirect_to: str | None = Field(
        None,
        description="For testing: the address, or `@domain`, that receives all e-mail. Other contents are held back.",
    )
    redirect_except: str | None = Field(
        None, description="Addresses and `@domain`s that are exempt from the redirect, separated by commas."
    )
    redirect_forbidden: str | None = Field(
        None,
        description="Date ranges in which the redirect is refused, separated by commas: "
        "`2026-04-01/2026-09-30[Europe/Berlin]`.",
    )
    apprise_urls: SecretStr | None = Field(
        None, description="Targets of the `apprise:` transport: a JSON object of names and Apprise URLs."
    )

    webhook_secrets: SecretStr | None = Field(
        None,
        description="Secrets that sign webhooks, separated by spaces: `whsec_` and base64, or `name=whsec_...`. "
        "Each webhook is signed with all secrets of its name.",
    )
    webhook_timeout_seconds: float = Field(
        30.0, ge=0.5, le=600, description="Timeout of one webhook, from the DNS lookup to the answer, in seconds."
    )
    webhook_connect_timeout_seconds: float = Field(
        10.0,
        ge=0.1,
        le=120,
        description="Timeout of the DNS lookup, the connection and the TLS handshake together, in seconds.",
    )
    webhook_connections: int = Field(
        50, ge=1, le=5_000, description="Maximum number of concurrent webhooks in one process."
    )
    webhook_ports: str = Field("443,8443", description="Ports that webhooks may use, separated by commas.")
    webhook_allow_http: bool = Field(False, description="Allow `http:` destinations, which are sent in plain text.")
    webhook_allowed_networks: str | None = Field(
        None,
        description="Private networks that webhooks may reach, in CIDR notation, separated by commas.",
    )
    webhook_ca_file: str | None = Field(
        None, description="PEM file of certificate authorities to trust in addition to the system's."
    )
    webhook_retry_after_cap_seconds: float = Field(
        86_400.0,
        ge=0,
        le=2_592_000,
        description="Upper bound on `Retry-After`, in seconds. The cap of the retry policy applies too.",
    )
    webhook_excerpt_length: int = Field(
        0, ge=0, le=500, description="Maximum length of the response excerpt in an error, in characters. 0: no excerpt."
    )

    breaker: bool = Field(True, description="Stop sending to a transport or host that is down.")
    breaker_failures: int = Field(
        5, ge=1, le=1_000, description="Number of consecutive failures in one process that open a circuit breaker."
    )
    breaker_error_rate: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of failed sends that opens a circuit breaker, of at least 20 sends within 60 seconds.",
    )
    breaker_cooldown_seconds: float = Field(
        30.0,
        ge=0.1,
        le=86_400,
        description="Time that a circuit breaker stays open before one message is sent as a probe, in seconds.",
    )
    breaker_max_cooldown_seconds: float = Field(
        600.0,
        ge=0.1,
        le=86_400,
        description="Upper bound on that time, in seconds. Each failed probe doubles the time.",
    )
    breaker_probe_seconds: float = Field(
        120.0, ge=0.1, le=86_400, description="Time after which a probe without an outcome counts as lost, in seconds."
    )
    alert_destination: str | None = Field(
        None,
        max_length=2048,
        description="`mailto:` address that receives an e-mail when a circuit breaker opens or closes.",
    )

    redact: str | None = Field(
        None,
        description="Additional names of values to hide, separated by commas. `password`, `token` and similar names"
        " are always hidden.",
    )
    event_source: str | None = Field(
        None, description="`source` of events that do not set one: a URI of this application."
    )
    broker_timeout_seconds: float = Field(
        10.0,
        ge=0.5,
        le=600,
        description="Timeout for connecting to a broker, and for the acknowledgement of an event, in seconds.",
    )
    redis_url: SecretStr | None = Field(
        None, description="Server of the `redis:` transport: `redis://user:password@host:6379/0`, or `rediss:` for TLS."
    )
    redis_ca_file: str | None = Field(
        None, description="PEM file of certificate authorities to trust in addition to the system's."
    )
    nats_url: SecretStr | None = Field(
        None,
        description="Servers of the `nats:` transport, separated by commas: `nats://user:password@host:4222`, or "
        "`tls:` for TLS.",
    )
    nats_ca_file: str | None = Field(
        None, description="PEM file of certificate authorities to trust in addition to the system's."
    )
    rabbitmq_url: SecretStr | None = Field(
        None,
        description="Server of the `rabbitmq:` transport: `amqps://user:password@host/vhost`, or `amqp:` without TLS.",
    )
    rabbitmq_ca_file: str | None = Field(
        None, description="PEM file of certificate authorities to trust in addition to the system's."
    )
    kafka_servers: str | None = Field(
        None, description="Bootstrap brokers of the `kafka:` transport, separated by commas: `host:port`."
    )
    kafka_security: Literal["tls", "none"] = Field(
        "tls", description="Encryption of the Kafka connection: TLS, or none (for a private network only)."
    )
    kafka_ca_file: str | None = Field(
        None, description="PEM file of certificate authorities to trust instead of the system's."
    )
    kafka_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        "SCRAM-SHA-512", description="SASL mechanism, used if `kafka_username` is set."
    )
    kafka_username: str | None = Field(None, description="User name for SASL.")
    kafka_password: SecretStr | None = Field(None, description="Password for SASL.")

    web_viewer_token: SecretStr | None = Field(
        None,
        description="Access tokens of the dashboard's viewers, separated by commas: `token` or `name:token`. A "
        "token may be replaced by its hash from `pgoutbox web hash-password`.",
    )
    web_operator_token: SecretStr | None = Field(
        None,
        description="Access tokens of the dashboard's operators, in the same format. Operators may also redrive, "
        "cancel and pause.",
    )
    web_secret: SecretStr | None = Field(
        None,
        min_length=32,
        max_length=1_000,
        description="Key that signs dashboard sessions; the same in every process of the dashboard (default: a "
        "random key, so that sessions end with the process).",
    )
    web_hosts: str | None = Field(
        None,
        description="Host names that the dashboard accepts, separated by commas (default: localhost if it listens "
        "there, else every name).",
    )
    web_trusted_proxies: str | None = Field(
        None,
        description="Addresses or networks of trusted proxies, separated by commas. The dashboard uses their "
        "`X-Forwarded-For` and `X-Forwarded-Proto` (default: none).",
    )
    web_idle_seconds: float = Field(
        1_800.0, ge=60, le=604_800, description="Idle timeout of a dashboard session, in seconds."
    )
    web_session_seconds: float = Field(
        43_200.0, ge=60, le=2_592_000, description="Maximum lifetime of a dashboard session, in seconds."
    )
    web_connections: int = Field(
        200,
        ge=2,
        le=10_000,
        description="Maximum number of concurrent connections to the dashboard. Each open live page uses one.",
    )

    metrics_address: str | None = Field(
        None,
        description="Address of the worker's `/metrics`, `/livez` and `/readyz`, such as `127.0.0.1:9187`. Port 0: "
        "any free port.",
    )
    metrics_max_names: int = Field(
        100,
        ge=1,
        le=10_000,
        description="Maximum number of topics, and of queues, with metrics of their own. The others count as `other`.",
    )
    metrics_backlog: bool = Field(True, description="Include counts of the messages in the database in `/metrics`.")
    metrics_cache_seconds: float = Field(
        5.0,
        ge=0.1,
        le=3_600,
        description="How long backlog counts are cached, in seconds; longer if the query is slow.",
    )
    otel_traces: bool = Field(
        True,
        description="Record spans and propagate trace contexts with OpenTelemetry, if the application configures it.",
    )
    otel_metrics: bool = Field(True, description="Record metrics with OpenTelemetry, if the application configures it.")
    webhook_trace_context: bool = Field(
        False, description="Send `traceparent` with webhooks. It reveals the trace id to the receivers."
    )

    log_file: str | None = Field(
        None,
        description="File to append the CLI's log to, instead of stderr. After log rotation the file is created again.",
    )
    log_format: Literal["text", "json"] = Field("text", description="Format of the CLI's log.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Minimum level of the CLI's log."
    )

    def __init__(self, **values: object) -> None:
        """Read the environment. `values`, by field name, take precedence.

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
                    f"key {number} is not a Fernet key, which is 32 bytes in URL-safe base64; make one with: "
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
        """The names whose values are hidden in views, output and logs: the default names and those of `redact`."""
        return (*REDACTED_NAMES, *(name.strip() for name in (self.redact or "").split(",") if name.strip()))

    @property
    def pooled(self) -> bool:
        """Whether `dsn` may go through a transaction pooler, where session state ends with each transaction.

        This is the case if the listener has a connection of its own, or if there is no listener.
        """
        return not self.listen or self.listen_dsn is not None

    @property
    def renew_interval_seconds(self) -> float:
        """The interval between two renewals of a lease, in seconds."""
        return self.renew_seconds if self.renew_seconds is not None else self.lease_seconds / 3

    def require_dsn(self) -> str:
        """Return the DSN in plain text, or raise a `ConfigurationError` that says how to set it."""
        if self.dsn is None:
            raise ConfigurationError(
                "no database given: set PGOUTBOX_DSN, for example "
                "PGOUTBOX_DSN=postgresql://app@localhost/app, or pass --dsn"
            )
        return _plain(self.dsn, "PGOUTBOX_DSN")

    def require_listen_dsn(self) -> str:
        """Return the DSN of the listener in plain text: `listen_dsn`, or else `dsn`."""
        return _plain(self.listen_dsn, "PGOUTBOX_LISTEN_DSN") if self.listen_dsn is not None else self.require_dsn()


def _plain(dsn: SecretStr, variable: str) -> str:
    """Return the DSN in plain text. Refuse a URL with a driver, which only SQLAlchemy understands."""
    if driver := re.match(r"postgres(?:ql)?(\+\w+)://", dsn.get_secret_value()):
        raise ConfigurationError(f"{variable}: is a SQLAlchemy URL; remove {driver[1]} before ://")
    return dsn.get_secret_value()


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `127.0.0.1:9187`, `[::1]:9187` or `localhost:9187`; raise `ValueError` otherwise."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+)):([0-9]{1,5})", text)
    if match is None or int(match[3]) > 65_535:
        raise ValueError("must be an address and a port, such as 127.0.0.1:9187 or [::1]:9187")
    return match[1] or match[2], int(match[3])


def load_settings(**overrides: object) -> Settings:
    """Read the environment. `overrides`, by field name, take precedence; None means "not given".

    Raises `ConfigurationError` with one line for each wrong variable.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        raise ConfigurationError(_explain(error, given)) from None


def unknown_variables(environment: Iterable[str]) -> list[tuple[str, str]]:
    """Return prefixed variables that are not settings, each with the most similar setting."""
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

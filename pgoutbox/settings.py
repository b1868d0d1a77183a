"""All settings, read once from the environment (prefix `PGOUTBOX_`) and checked before any connection is opened.

`Settings` has the general settings, and one field for each group: `settings.smtp.host` is `PGOUTBOX_SMTP_HOST`. A wrong
value raises `ConfigurationError` with the variable's name, its value and the accepted values. Secrets are never shown.
"""

from __future__ import annotations

import difflib
import functools
import ipaddress
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import ClassVar, Final, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NestedSecretsSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from pgoutbox.errors import ConfigurationError
from pgoutbox.redaction import REDACTED_NAMES, check_redacted_name

ENVIRONMENT_PREFIX = "PGOUTBOX_"
# The former names of settings, by path, such as {"smtp.server": "smtp.host"}. Each works, with a warning, in the minor
# version that has renamed it. A setting moves to another group only in the environment.
FORMER_NAMES: Final[Mapping[str, str]] = {}
# Prefixed variables that are not settings: of pgoutbox's own tests, and of supervised processes.
_TEST_PREFIX = f"{ENVIRONMENT_PREFIX}TEST_"
SUPERVISOR_FD_VARIABLE = f"{ENVIRONMENT_PREFIX}SUPERVISOR_FD"
_HOST_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]")
_ALERT_DESTINATION = re.compile(
    r"(?:mailto:[^@,<>]+@[^@,<>]+|https?://(?:[^/?#\[\]]+|\[[0-9A-Fa-f:.]+\](?::\d+)?)(?:[/?#].*)?|apprise:.+)"
)
_MAX_DESTINATION_BYTES = 2048
T = TypeVar("T")

_UNSUBSCRIBE_URL = re.compile(r"(?:https://|http://(?:localhost|127\.0\.0\.1)(?=[:/]))(?:(?![?#<>,])[!-~]){1,500}")
_MIN_KEY_LENGTH = 32
_FERNET_KEY = re.compile(r"\s*[A-Za-z0-9_-]{43}=\s*")


class _Group(BaseModel):
    """Settings that refuse unknown names, empty text and infinite numbers."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, hide_input_in_errors=True)

    def __init__(self, **values: object) -> None:
        kind = type(self)
        if values and FORMER_NAMES:
            values = with_present_names(values, _former_names_in(kind))
        unknown = [name for name in values if not name.startswith("_") and name not in kind.model_fields]
        if unknown:
            raise ConfigurationError(
                "\n".join(f"unknown setting {name!r}; did you mean {_nearest(name, kind)!r}?" for name in unknown)
            )
        super().__init__(**values)

    @field_validator("*", mode="before")
    @classmethod
    def _no_empty_text(cls, value: object) -> object:
        if isinstance(value, str) and not value.strip():
            raise ValueError("is set but empty; give a value or unset it")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("must be a finite number")
        return value


def _check_order(settings: BaseModel, low: str, high: str) -> None:
    """Raise `ValueError` if the value at one path exceeds the value at another, of the same group of settings."""
    least, most = (getattr(settings, path.rpartition(".")[2]) for path in (low, high))
    if least > most:
        raise ValueError(f"{variable_of(low)}={least:g} must not exceed {variable_of(high)}={most:g}")


class SmtpSettings(_Group):
    """E-mail over SMTP, with the `mailto:` transport."""

    host: str | None = None
    """SMTP server of the `mailto:` transport."""
    port: int | None = Field(default=None, ge=1, le=65_535)
    """Port of the SMTP server (default: 587 for starttls, 465 for tls, 25 for none)."""
    security: Literal["starttls", "tls", "none"] = "starttls"
    """Encryption of the SMTP connection: required STARTTLS, implicit TLS, or none (for a local server only)."""
    ca_file: str | None = None
    """PEM file of certificate authorities to trust in addition to the system's."""
    username: str | None = None
    """User name for SMTP AUTH."""
    password: SecretStr | None = None
    """Password for SMTP AUTH."""
    sender: str | None = None
    """Sender address of e-mails that do not set one."""
    ehlo_name: str | None = None
    """Host name to send in EHLO (default: the machine's host name)."""
    timeout_seconds: float = Field(default=30.0, ge=0.5, le=600)
    """Timeout of each step of the SMTP dialogue, in seconds; one second longer for each 100,000 bytes of an e-mail."""
    connections: int = Field(default=10, ge=1, le=500)
    """Maximum number of open SMTP connections in one process."""

    @model_validator(mode="after")
    def _check_password(self) -> Self:
        if self.password is not None and self.username is None:
            raise ValueError("PGOUTBOX_SMTP_PASSWORD is set, PGOUTBOX_SMTP_USERNAME is not")
        if self.password is not None and self.security == "none":
            raise ValueError(
                "PGOUTBOX_SMTP_SECURITY=none would send PGOUTBOX_SMTP_PASSWORD in plain text; use starttls or tls"
            )
        return self


class MailSettings(_Group):
    """E-mail on a developer's machine."""

    transport: Literal["smtp", "log"] = "smtp"
    """Transport of `mailto:`. `log`, for development, writes each e-mail to the log and sends nothing. It replaces also
    a transport of the application, and it is refused together with `smtp.host` or `sendmail`."""
    directory: str | None = None
    """Directory in which `log` also writes each complete e-mail as a file."""

    @model_validator(mode="after")
    def _check_directory(self) -> Self:
        if self.directory is not None and self.transport != "log":
            raise ValueError("PGOUTBOX_MAIL_DIRECTORY is set, and only PGOUTBOX_MAIL_TRANSPORT=log writes there")
        return self


class RedirectSettings(_Group):
    """The redirect of all e-mail for testing. Exempt addresses and topics also apply to an operator's redirect."""

    to: str | None = None
    """The address, or `@domain`, that receives all e-mail. Other contents are held back. Operators cannot end it."""
    exempt: str | None = None
    """Addresses and `@domain`s that are exempt from the redirect, separated by commas."""
    exempt_topics: str | None = None
    """Topics that are exempt from the redirect, separated by commas. A `*` at the end stands for the rest of a name."""


class WebhookSettings(_Group):
    """Webhooks, with the transports `https:` and `http:`."""

    secrets: SecretStr | None = None
    """Secrets that sign webhooks, separated by spaces: `whsec_` and base64, or `name=whsec_...`. Each webhook is signed
    with all secrets of its name."""
    timeout_seconds: float = Field(default=30.0, ge=0.5, le=600)
    """Timeout of one webhook, from the DNS lookup to the answer, in seconds."""
    connect_timeout_seconds: float = Field(default=10.0, ge=0.1, le=120)
    """Timeout of the DNS lookup, the connection and the TLS handshake together, in seconds."""
    connections: int = Field(default=50, ge=1, le=5_000)
    """Maximum number of concurrent webhooks in one process."""
    ports: str = "443,8443"
    """Ports that webhooks may use, separated by commas."""
    allow_http: bool = False
    """Allow `http:` destinations, which are sent in plain text."""
    allowed_networks: str | None = None
    """Private networks that webhooks may reach, in CIDR notation, separated by commas."""
    ca_file: str | None = None
    """PEM file of certificate authorities to trust in addition to the system's."""
    retry_after_cap_seconds: float = Field(default=86_400.0, ge=0, le=2_592_000)
    """Upper bound on `Retry-After`, in seconds. The cap of the retry policy applies too."""
    error_body_chars: int = Field(default=0, ge=0, le=500)
    """Maximum length of the response excerpt in an error, in characters. 0: no excerpt."""
    trace_context: bool = False
    """Send `traceparent` with webhooks. It reveals the trace id to the receivers."""


class UnsubscribeSettings(_Group):
    """Links to unsubscribe in the mail of topics with a mailing list."""

    url: str | None = None
    """Address of the links, where `pgoutbox.unsubscribe` is mounted, such as `https://club.example.org/unsubscribe`."""
    keys: SecretStr | None = None
    """Keys that sign the links, separated by commas, each of 32 characters at least. The first key signs; all keys
    verify. Keep an old key as long as links that it has signed shall work."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is not None and _UNSUBSCRIBE_URL.fullmatch(url) is None:
            raise ValueError(
                "must be an https: URL of up to 500 characters, without a query, such as https://club.example.org/unsubscribe"
            )
        return url

    @field_validator("keys")
    @classmethod
    def _check_keys(cls, keys: SecretStr | None) -> SecretStr | None:
        for number, text in enumerate(keys.get_secret_value().split(",") if keys is not None else (), start=1):
            if len(text.strip()) < _MIN_KEY_LENGTH:
                raise ValueError(
                    f"key {number} has less than {_MIN_KEY_LENGTH} characters; make one with: "
                    "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
                )
        return keys

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.url is not None and self.keys is None:
            raise ValueError("PGOUTBOX_UNSUBSCRIBE_URL is set, PGOUTBOX_UNSUBSCRIBE_KEYS is not")
        return self


class BreakerSettings(_Group):
    """The circuit breakers, which stop sending to a transport or host that is down."""

    enabled: bool = True
    """Stop sending to a transport or host that is down."""
    failures: int = Field(default=5, ge=1, le=1_000)
    """Number of consecutive failures that open a circuit breaker, in one process or in consecutive runs of `--once`."""
    error_rate: float = Field(default=0.5, gt=0, le=1)
    """Share of failed sends that opens a circuit breaker, of at least 20 sends within 60 seconds."""
    cooldown_seconds: float = Field(default=30.0, ge=0.1, le=86_400)
    """Time that a circuit breaker stays open before one message is sent as a probe, in seconds."""
    max_cooldown_seconds: float = Field(default=600.0, ge=0.1, le=86_400)
    """Upper bound on that time, in seconds. Each failed probe doubles the time."""
    probe_timeout_seconds: float = Field(default=120.0, ge=0.1, le=86_400)
    """Time after which a probe without an outcome counts as lost, in seconds."""

    @model_validator(mode="after")
    def _check_cooldown(self) -> Self:
        _check_order(self, "breaker.cooldown_seconds", "breaker.max_cooldown_seconds")
        return self


class RedisSettings(_Group):
    """The `redis:` transport."""

    url: SecretStr | None = None
    """Server of the `redis:` transport: `redis://user:password@host:6379/0`, or `rediss:` for TLS."""
    ca_file: str | None = None
    """PEM file of certificate authorities to trust in addition to the system's."""


class NatsSettings(_Group):
    """The `nats:` transport."""

    url: SecretStr | None = None
    """Servers of the `nats:` transport, separated by commas: `nats://user:password@host:4222`, or `tls:` for TLS."""
    ca_file: str | None = None
    """PEM file of certificate authorities to trust in addition to the system's."""


class RabbitMQSettings(_Group):
    """The `rabbitmq:` transport."""

    url: SecretStr | None = None
    """Server of the `rabbitmq:` transport: `amqps://user:password@host/vhost`, or `amqp:` without TLS."""
    ca_file: str | None = None
    """PEM file of certificate authorities to trust in addition to the system's."""


class KafkaSettings(_Group):
    """The `kafka:` transport."""

    servers: str | None = None
    """Bootstrap brokers of the `kafka:` transport, separated by commas: `host:port`."""
    security: Literal["tls", "none"] = "tls"
    """Encryption of the Kafka connection: TLS, or none (for a private network only)."""
    ca_file: str | None = None
    """PEM file of certificate authorities to trust instead of the system's."""
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    """SASL mechanism, used with a user name."""
    username: str | None = None
    """User name for SASL."""
    password: SecretStr | None = None
    """Password for SASL."""

    @model_validator(mode="after")
    def _check_password(self) -> Self:
        if self.password is not None and self.username is None:
            raise ValueError("PGOUTBOX_KAFKA_PASSWORD is set, PGOUTBOX_KAFKA_USERNAME is not")
        return self


class WebSettings(_Group):
    """The dashboard."""

    viewer_tokens: SecretStr | None = None
    """Access tokens of the dashboard's viewers, separated by commas: `token` or `name:token`. A token may be replaced
    by its hash from `pgoutbox web hash-password`."""
    operator_tokens: SecretStr | None = None
    """Access tokens of the dashboard's operators, in the same format. Operators may also redrive, cancel and pause."""
    secret: SecretStr | None = Field(default=None, min_length=32, max_length=1_000)
    """Key that signs dashboard sessions; the same in every process of the dashboard (default: a random key, so that
    sessions end with the process)."""
    hosts: str | None = None
    """Host names that the dashboard accepts, separated by commas (default: localhost if it listens there, else every
    name)."""
    trusted_proxies: str | None = None
    """Addresses or networks of trusted proxies, separated by commas. The dashboard uses their `X-Forwarded-For` and
    `X-Forwarded-Proto` (default: none)."""
    session_idle_seconds: float = Field(default=1_800.0, ge=60, le=604_800)
    """Idle timeout of a dashboard session, in seconds."""
    session_max_seconds: float = Field(default=43_200.0, ge=60, le=2_592_000)
    """Maximum lifetime of a dashboard session, in seconds."""
    connections: int = Field(default=200, ge=2, le=10_000)
    """Maximum number of concurrent connections to the dashboard. Each open live page uses one."""

    @field_validator("hosts")
    @classmethod
    def _check_hosts(cls, hosts: str | None) -> str | None:
        for name in hosts.split(",") if hosts is not None else ():
            if _HOST_NAME.fullmatch(name.strip()) is None:
                raise ValueError("give names without port or scheme, such as outbox.example.org,[::1]")
        return hosts

    @field_validator("trusted_proxies")
    @classmethod
    def _check_proxies(cls, proxies: str | None) -> str | None:
        for place in proxies.split(",") if proxies is not None else ():
            try:
                ipaddress.ip_network(place.strip())
            except ValueError:
                raise ValueError("give addresses or networks, such as 10.0.0.7,10.1.0.0/16") from None
        return proxies

    @model_validator(mode="after")
    def _check_session(self) -> Self:
        _check_order(self, "web.session_idle_seconds", "web.session_max_seconds")
        return self


class MetricsSettings(_Group):
    """The worker's metrics and health checks over HTTP."""

    address: str | None = None
    """Address of the worker's `/metrics`, `/livez` and `/readyz`, such as `127.0.0.1:9187`. Port 0: any free port."""
    max_label_values: int = Field(default=100, ge=1, le=10_000)
    """Maximum number of topics, and of queues, with metrics of their own. The others count as `other`."""
    backlog: bool = True
    """Include counts of the messages in the database in `/metrics`."""
    cache_seconds: float = Field(default=5.0, ge=0.1, le=3_600)
    """How long backlog counts are cached, in seconds; longer if the query is slow."""

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str | None) -> str | None:
        if address is not None:
            parse_address(address)
        return address


class OtelSettings(_Group):
    """OpenTelemetry."""

    traces: bool = True
    """Record spans and propagate trace contexts with OpenTelemetry, if the application configures it."""
    metrics: bool = True
    """Record metrics with OpenTelemetry, if the application configures it."""


class LogSettings(_Group):
    """The log of the command line."""

    file: str | None = None
    """File to append the CLI's log to, instead of stderr. After log rotation the file is created again. Runs of `worker
    --once` and `--drain` without a terminal have a default: `pgoutbox/worker.log` in `$XDG_STATE_HOME`, or in
    `~/.local/state`."""
    format: Literal["text", "json"] = "text"
    """Format of the CLI's log."""
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Minimum level of the CLI's log. The default of `worker --once` and `--drain` on stderr is WARNING, for cron."""


class Settings(_Group, BaseSettings):
    """All settings of pgoutbox, with their defaults and bounds. Durations are in seconds.

    A group may be given as a dict, such as `Settings(smtp={"host": "mx.example.org"})`, or as an instance, such as
    `Settings(smtp=SmtpSettings(host="mx.example.org"))`. With an instance, the group ignores the environment.
    """

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX,
        env_nested_delimiter="_",
        env_nested_max_split=1,
        extra="ignore",
    )

    dsn: SecretStr | None = None
    """Database to connect to: a libpq connection string or a URL."""
    listen_dsn: SecretStr | None = None
    """Direct connection for LISTEN. Set it if `dsn` goes through a transaction pooler."""
    dsns: SecretStr | None = None
    """Databases, one in each line: a name and its DSN; or the absolute path of a file with such lines."""
    database: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}$")
    """Name of one of `dsns`: commands look at this one."""
    deployment: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]{1,63}$")
    """Name of this deployment, such as `production`. After `pgoutbox adopt`, only workers with this name send from the
    database."""
    app: str | None = None
    """Outbox that the worker runs, as `module:attribute`."""
    listen: bool = True
    """Wake up on NOTIFY. If off, the worker only polls every `poll_interval_seconds`."""
    lease_seconds: float = Field(default=60.0, ge=1, le=86_400)
    """Duration of a lease, in seconds. A claim ends when its lease is not renewed in time."""
    renew_seconds: float | None = Field(default=None, ge=0.1, le=28_800)
    """Interval between two renewals of a lease, in seconds (default: a third of `lease_seconds`)."""
    poll_interval_seconds: float = Field(default=60.0, ge=0.1, le=3_600)
    """Maximum interval between two polls of an idle worker, in seconds."""
    listener_heartbeat_seconds: float = Field(default=10.0, ge=0.5, le=600)
    """Interval between two heartbeats of the idle LISTEN connection, in seconds."""
    listener_heartbeat_timeout_seconds: float = Field(default=4.0, ge=0.1, le=60)
    """Time to wait for the answer to a heartbeat, in seconds. Without one, the worker reconnects."""
    concurrency: int = Field(default=50, ge=1, le=5_000)
    """Maximum number of concurrent attempts in one process. Each attempt of a sync handler uses a thread."""
    batch_size: int = Field(default=500, ge=1, le=5_000)
    """Maximum number of messages in one claim or finish statement."""
    handler_timeout_seconds: float | None = Field(default=None, gt=0, le=86_400)
    """Timeout of one attempt, in seconds, unless the handler sets its own (default: no limit)."""
    shutdown_grace_seconds: float = Field(default=30.0, ge=0, le=3_600)
    """Time that a stopping worker gives its handlers to finish, in seconds."""
    connect_timeout_seconds: int = Field(default=10, ge=1, le=300)
    """Timeout for opening a database connection, in seconds."""
    statement_timeout_seconds: float = Field(default=20.0, ge=0.1, le=3_600)
    """Timeout of each statement of the worker, in seconds. Handlers' statements are not affected. Also the timeout of
    each statement of a command with `--all-databases`."""
    lock_timeout_seconds: float = Field(default=1.0, ge=0.01, le=600)
    """Maximum time that a statement of the worker waits for a lock, in seconds."""
    maintenance_interval_seconds: float = Field(default=300.0, ge=0, le=86_400)
    """Interval between two rounds of maintenance in all workers together, in seconds. A round creates partitions and
    applies the retention rules. 0: no maintenance."""
    max_payload_bytes: int = Field(default=1_000_000, ge=1, le=16_777_216)
    """Maximum size of an enqueued payload, in bytes of UTF-8 JSON."""
    encryption_keys: SecretStr | None = None
    """Fernet keys for encrypted topics, separated by commas. The first key encrypts; all keys decrypt."""
    worker_enabled: bool = True
    """Whether `pgoutbox worker` may work on this host. If not, it says so and ends with exit code 0."""
    worker_name: str | None = Field(default=None, min_length=1, max_length=200)
    """First part of the worker's name, as recorded in the column `worker` (default: the host name)."""
    apprise_urls: SecretStr | None = None
    """Targets of the `apprise:` transport: a JSON object of names and Apprise URLs."""
    sendmail: str | None = Field(default=None, max_length=1_000)
    """Program of a local mail server that sends e-mail instead of `smtp.host`, such as `/usr/sbin/sendmail`. It uses
    `smtp.sender`, `smtp.timeout_seconds`, and `smtp.connections` as the maximum number of running programs."""
    alert_destination: str | None = Field(default=None, max_length=4096)
    """Destinations of the alerts about failed messages, and about circuit breakers that open or close. Spaces separate
    them: `mailto:ops@example.org`, an `https:` URL, `apprise:NAME`. An alert about the mail server waits for it, so
    give a second destination of another kind."""
    redact: str | None = None
    """Additional names of values to hide, separated by commas. `password`, `token` and similar names are always hidden.
    """
    error_texts: bool = True
    """Whether the texts of handlers' exceptions are stored and logged. If not, only their types and places are."""
    event_source: str | None = None
    """`source` of events that do not set one: a URI of this application."""
    broker_timeout_seconds: float = Field(default=10.0, ge=0.5, le=600)
    """Timeout for connecting to a broker, and for the acknowledgement of an event, in seconds."""

    smtp: SmtpSettings = SmtpSettings()
    mail: MailSettings = MailSettings()
    redirect: RedirectSettings = RedirectSettings()
    webhook: WebhookSettings = WebhookSettings()
    unsubscribe: UnsubscribeSettings = UnsubscribeSettings()
    breaker: BreakerSettings = BreakerSettings()
    redis: RedisSettings = RedisSettings()
    nats: NatsSettings = NatsSettings()
    rabbitmq: RabbitMQSettings = RabbitMQSettings()
    kafka: KafkaSettings = KafkaSettings()
    web: WebSettings = WebSettings()
    metrics: MetricsSettings = MetricsSettings()
    otel: OtelSettings = OtelSettings()
    log: LogSettings = LogSettings()

    def __init__(self, **values: object) -> None:
        """Read the environment. `values`, by field name, take precedence.

        Raises `ConfigurationError` for an unknown name, and pydantic's `ValidationError` for a wrong value.
        """
        super().__init__(**values)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Ignore unknown variables, also in groups: they cause a warning, not an error."""
        known = {variable_of(path) for path in fields_of(settings_cls)}
        sources = (env_settings, dotenv_settings, NestedSecretsSettingsSource(file_secret_settings))
        found = [init_settings]
        for source in sources:
            if isinstance(source, EnvSettingsSource):
                found_variables = {name.upper(): text for name, text in source.env_vars.items()}
                given = with_present_names(found_variables, former_names(variable_of))
                source.env_vars = {name.lower(): text for name, text in given.items() if name in known}
                if not source.env_vars:  # It would look for each field in vain.
                    continue
            found.append(source)
        return tuple(found)

    @field_validator("redact")
    @classmethod
    def _check_redact(cls, names: str | None) -> str | None:
        for name in names.split(",") if names is not None else ():
            check_redacted_name(name)
        return names

    @field_validator("sendmail")
    @classmethod
    def _check_sendmail(cls, path: str | None) -> str | None:
        if path is not None and not (path.startswith("/") and path.isprintable()):
            raise ValueError("must be the absolute path of a program, without options, such as /usr/sbin/sendmail")
        return path

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

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.lease_seconds < 3 * self.renew_interval_seconds:
            raise ValueError(
                f"PGOUTBOX_LEASE_SECONDS={self.lease_seconds:g} must be at least three times "
                f"PGOUTBOX_RENEW_SECONDS={self.renew_interval_seconds:g}, so that a renewal may fail twice"
            )
        _check_order(self, "listener_heartbeat_timeout_seconds", "listener_heartbeat_seconds")
        if 0 < self.maintenance_interval_seconds < 1:
            raise ValueError(
                f"PGOUTBOX_MAINTENANCE_INTERVAL_SECONDS={self.maintenance_interval_seconds:g} must be at least 1, or 0"
            )
        if self.smtp.host is not None and self.sendmail is not None:
            raise ValueError("PGOUTBOX_SMTP_HOST and PGOUTBOX_SENDMAIL are both set: unset one of them")
        if self.mail.transport == "log" and (self.smtp.host is not None or self.sendmail is not None):
            name = "PGOUTBOX_SENDMAIL" if self.smtp.host is None else "PGOUTBOX_SMTP_HOST"
            raise ValueError(f"PGOUTBOX_MAIL_TRANSPORT=log sends no e-mail, but {name} is set: unset one of them")
        for destination in self.alert_destinations:
            is_short = len(destination.encode()) <= _MAX_DESTINATION_BYTES
            if not (is_short and destination.isprintable() and _ALERT_DESTINATION.fullmatch(destination)):
                raise ValueError(
                    "PGOUTBOX_ALERT_DESTINATION must be destinations such as mailto:ops@example.org, "
                    "https://hooks.example.org/alert or apprise:NAME, separated by spaces"
                )
        return self

    @property
    def redacted_names(self) -> tuple[str, ...]:
        """The names whose values are hidden in views, output and logs: the default names and those of `redact`."""
        return (*REDACTED_NAMES, *(name.strip() for name in (self.redact or "").split(",") if name.strip()))

    @property
    def alert_destinations(self) -> tuple[str, ...]:
        """The destinations of `alert_destination`."""
        return () if self.alert_destination is None else tuple(dict.fromkeys(self.alert_destination.split()))

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
        if self.dsn is None and self.dsns is not None:
            raise ConfigurationError(
                "PGOUTBOX_DSNS has several databases: name one with --database NAME, in Python with Settings(dsn=...)"
            )
        if self.dsn is None:
            raise ConfigurationError(
                "no database given: set PGOUTBOX_DSN, for example "
                "PGOUTBOX_DSN=postgresql://app@localhost/app, or pass --dsn"
            )
        return plain_dsn(self.dsn, "PGOUTBOX_DSN")

    def require_listen_dsn(self) -> str:
        """Return the DSN of the listener in plain text: `listen_dsn`, or else `dsn`."""
        if self.listen_dsn is None:
            return self.require_dsn()
        return plain_dsn(self.listen_dsn, "PGOUTBOX_LISTEN_DSN")


def plain_dsn(dsn: SecretStr, place: str) -> str:
    """Return the DSN in plain text. Refuse a URL with a driver, which only SQLAlchemy understands."""
    if driver := re.match(r"postgres(?:ql)?(\+\w+)://", dsn.get_secret_value()):
        raise ConfigurationError(f"{place}: is a SQLAlchemy URL; remove {driver[1]} before ://")
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
    try:
        return Settings(**{name: value for name, value in overrides.items() if value is not None})
    except ValidationError as error:
        raise ConfigurationError(_explain(error)) from None


@functools.cache
def fields_of(kind: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """Return the fields of the settings by path. The path of a field in a group is like `smtp.host`."""
    fields: dict[str, FieldInfo] = {}
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, _Group):
            fields |= {f"{name}.{path}": inner for path, inner in fields_of(field.annotation).items()}
        else:
            fields[name] = field
    return fields


def variable_of(path: str) -> str:
    """Return the environment variable of a field, given its path: `PGOUTBOX_SMTP_HOST` for `smtp.host`."""
    return f"{ENVIRONMENT_PREFIX}{path.replace('.', '_').upper()}"


def with_present_names(values: Mapping[str, T], former_names: Mapping[str, str]) -> dict[str, T]:
    """Return `values` with the present names of settings, and a `DeprecationWarning` for each former one.

    Raises `ConfigurationError` if a former name and the present one are both given.
    """
    present = dict(values)
    for former in sorted(former_names.keys() & values.keys()):
        name = former_names[former]
        if name in values:
            raise ConfigurationError(f"{former} is the former name of {name}, and both are set: unset {former}")
        warnings.warn(f"setting {former} is now {name}; set {name} instead", DeprecationWarning, stacklevel=3)
        present[name] = present.pop(former)
    return present


def former_names(spelt: Callable[[str], str]) -> dict[str, str]:
    """Return the present name of each former one, as `spelt` makes it of a path."""
    return {spelt(former): spelt(path) for former, path in FORMER_NAMES.items()}


VARIABLES: Final = frozenset(variable_of(path) for path in fields_of(Settings))
SECRET_VARIABLES: Final = frozenset(
    variable_of(path)
    for path in (*fields_of(Settings), *FORMER_NAMES)
    if SecretStr in get_args(fields_of(Settings)[FORMER_NAMES.get(path, path)].annotation)
)


def people_in(tokens: str) -> list[tuple[str | None, str]]:
    """Return the names, or None, and the secrets of `web.viewer_tokens` or `web.operator_tokens`."""
    # The parameters of a hash are separated by commas too: m=65536,t=3,p=4.
    entries = [entry.strip().rpartition(":") for entry in re.split(",(?![tp]=)", tokens)]
    return [(name if colon else None, secret) for name, colon, secret in entries]


def secret_values(settings: BaseModel) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each secret of the settings: of each field whose type is `SecretStr`."""
    for name in type(settings).model_fields:
        match getattr(settings, name):
            case SecretStr() as secret:
                yield name, secret.get_secret_value()
            case BaseModel() as group:
                yield from secret_values(group)


def renamed_variables(environment: Iterable[str]) -> list[tuple[str, str]]:
    """Return the variables with the former name of a setting, each with the present one."""
    present = former_names(variable_of)
    return [(variable, present[variable.upper()]) for variable in sorted(environment) if variable.upper() in present]


def unknown_variables(environment: Collection[str]) -> list[tuple[str, str]]:
    """Return prefixed variables that are not settings, each with the most similar setting."""
    renamed = dict(renamed_variables(environment))
    return [
        (variable, variable_of(_nearest(variable[len(ENVIRONMENT_PREFIX) :], Settings)))
        for variable in sorted(environment)
        if variable.upper().startswith(ENVIRONMENT_PREFIX)
        and not variable.startswith(_TEST_PREFIX)
        and variable != SUPERVISOR_FD_VARIABLE
        and variable.upper() not in VARIABLES
        and variable not in renamed
    ]


def _former_names_in(kind: type[BaseModel]) -> dict[str, str]:
    """Return the present name of each former one in a group, or of the general settings."""
    group = next((name for name, field in Settings.model_fields.items() if field.annotation is kind), "")
    paths = ((former.rpartition("."), path.rpartition(".")) for former, path in FORMER_NAMES.items())
    return {former: name for (place, _, former), (_, _, name) in paths if place == group}


def _nearest(name: str, kind: type[BaseModel]) -> str:
    # DNS is closer to DSN, with two letters in the wrong order, than to DSNS.
    swapped = [known for known in fields_of(kind) if sorted(known) == sorted(name.lower())]
    return (swapped or difflib.get_close_matches(name.lower(), fields_of(kind), n=1, cutoff=0.0))[0]


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors(include_url=False, include_context=False):
        reason = problem["msg"].removeprefix("Value error, ")
        field = fields_of(Settings).get(path := ".".join(map(str, problem["loc"])))
        if field is None:  # The rule applies to several settings, and names them.
            lines.append(reason)
            continue
        shown = "(hidden)" if SecretStr in get_args(field.annotation) else repr(problem["input"])
        lines.append(f"{variable_of(path)}={shown}: {reason[:1].lower()}{reason[1:]}")
    return "\n".join(lines)

"""Tests that settings are read once, refused with the variable's name and the accepted values, and never show a
secret."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from pgoutbox import settings as settings_module
from pgoutbox.errors import ConfigurationError
from pgoutbox.settings import (
    FORMER_NAMES,
    VARIABLES,
    Settings,
    SmtpSettings,
    WebSettings,
    fields_of,
    load_settings,
    renamed_variables,
    unknown_variables,
    variable_of,
)
from tests.support.settings import settings_with
from tools.reference import group_of, meanings

CANARY = "c4n4ry-s3cret"
SECRET_VARIABLES = (
    "PGOUTBOX_DSN",
    "PGOUTBOX_LISTEN_DSN",
    "PGOUTBOX_SMTP_PASSWORD",
    "PGOUTBOX_APPRISE_URLS",
    "PGOUTBOX_WEBHOOK_SECRETS",
    "PGOUTBOX_ENCRYPTION_KEYS",
    "PGOUTBOX_REDIS_URL",
    "PGOUTBOX_NATS_URL",
    "PGOUTBOX_RABBITMQ_URL",
    "PGOUTBOX_KAFKA_PASSWORD",
    "PGOUTBOX_WEB_VIEWER_TOKENS",
    "PGOUTBOX_WEB_OPERATOR_TOKENS",
    "PGOUTBOX_WEB_SECRET",
    "PGOUTBOX_UNSUBSCRIBE_KEYS",
)
FERNET_KEY = "c4n4ry-s3cret_c4n4ry-s3cret_c4n4ry-s3cret_A="


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def refusal(**overrides: object) -> str:
    with pytest.raises(ConfigurationError) as caught:
        settings_with(**overrides)
    return str(caught.value)


def test_every_setting_has_a_default_within_its_bounds() -> None:
    settings = load_settings()
    assert {path: attrgetter(path)(settings) for path in fields_of(Settings)} == {
        path: field.default for path, field in fields_of(Settings).items()
    }


@pytest.mark.slow
def test_every_setting_is_described() -> None:
    for path in fields_of(Settings):
        group, _, name = path.rpartition(".")
        assert name in meanings(group_of(group))


@pytest.mark.slow
def test_every_setting_is_read_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in fields_of(Settings):
        with monkeypatch.context() as patch:
            patch.setenv(variable_of(path), " ")
            assert refusal().partition("=")[0] == variable_of(path)


def test_a_group_of_arguments_takes_precedence_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGOUTBOX_SMTP_HOST", "environment.test")
    monkeypatch.setenv("PGOUTBOX_SMTP_TIMEOUT_SECONDS", "7")
    assert (load_settings().smtp.host, load_settings().smtp.timeout_seconds) == ("environment.test", 7)
    merged = load_settings(smtp={"host": "mx.test"}).smtp
    assert (merged.host, merged.timeout_seconds) == ("mx.test", 7)
    replaced = load_settings(smtp=SmtpSettings(host="mx.test")).smtp
    assert (replaced.host, replaced.timeout_seconds) == ("mx.test", 30)


def test_an_env_file_and_a_directory_of_secrets_set_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGOUTBOX_SMTP_PORT", "2525")
    env_file = tmp_path / "app.env"
    env_file.write_text(
        "PGOUTBOX_SMTP_HOST=mx.test\nPGOUTBOX_SMTP_HOTS=x\nPGOUTBOX_SMTP_PORT=25\nPGOUTBOX_POLL_INTERVAL_SECONDS=5\n"
    )
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    for name, text in {"dsn": "host=a", "web_secret": CANARY * 3, "web_secrets": "x"}.items():
        (secrets / f"pgoutbox_{name}").write_text(f"{text}\n")
    settings = Settings(_env_file=env_file, _secrets_dir=secrets)
    assert (settings.smtp.host, settings.smtp.port, settings.poll_interval_seconds) == ("mx.test", 2525, 5)
    assert settings.require_dsn() == "host=a"
    assert settings.web.secret is not None
    assert settings.web.secret.get_secret_value() == CANARY * 3


def test_overrides_take_precedence_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGOUTBOX_CONCURRENCY", "7")
    monkeypatch.setenv("PGOUTBOX_LISTEN", "off")
    assert (load_settings().concurrency, load_settings().listen) == (7, False)
    assert load_settings(concurrency=3).concurrency == 3
    assert load_settings(concurrency=None).concurrency == 7


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("abc", "valid number"),
        ("-1", "greater than or equal to 1"),
        ("0", "greater than or equal to 1"),
        ("1e400", "less than or equal to 86400"),
        ("inf", "less than or equal to 86400"),
        ("nan", "less than or equal to 86400"),
        ("", "give a value or unset it"),
        ("  ", "give a value or unset it"),
    ],
)
def test_an_invalid_value_names_variable_value_and_accepted_values(
    monkeypatch: pytest.MonkeyPatch, text: str, accepted: str
) -> None:
    monkeypatch.setenv("PGOUTBOX_LEASE_SECONDS", text)
    message = refusal()
    assert message.startswith(f"PGOUTBOX_LEASE_SECONDS={text!r}: ")
    assert accepted in message


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("poll_interval_seconds", "0"),
        ("batch_size", "0"),
        ("batch_size", "1000000"),
        ("concurrency", "0"),
        ("concurrency", "1.5"),
        ("listen", "perhaps"),
        ("smtp_port", "65536"),
        ("smtp_security", "ssl"),
        ("webhook_timeout_seconds", "0"),
        ("webhook_connections", "0"),
        ("webhook_retry_after_cap_seconds", "2592001"),
        ("webhook_error_body_chars", "501"),
        ("log_level", "loud"),
        ("web_hosts", "https://outbox.example.org"),
        ("web_hosts", "outbox.example.org:443"),
        ("web_hosts", "a,,b"),
        ("web_trusted_proxies", "proxy.example.org"),
        ("web_trusted_proxies", "10.0.0.1/8"),
        ("web_session_idle_seconds", "59"),
        ("web_session_max_seconds", "2592001"),
        ("web_connections", "1"),
        ("worker_name", "x" * 201),
    ],
)
def test_each_bound_is_enforced(monkeypatch: pytest.MonkeyPatch, field: str, text: str) -> None:
    variable = f"PGOUTBOX_{field.upper()}"
    monkeypatch.setenv(variable, text)
    assert refusal().startswith(f"{variable}={text!r}: ")


def test_each_invalid_variable_has_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGOUTBOX_BATCH_SIZE", "many")
    monkeypatch.setenv("PGOUTBOX_CONCURRENCY", "0")
    assert [line.partition("=")[0] for line in refusal().splitlines()] == [
        "PGOUTBOX_CONCURRENCY",
        "PGOUTBOX_BATCH_SIZE",
    ]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"lease_seconds": 10.0, "renew_seconds": 4.0}, ("PGOUTBOX_LEASE_SECONDS=10", "PGOUTBOX_RENEW_SECONDS=4")),
        (
            {"listener_heartbeat_seconds": 1.0, "listener_heartbeat_timeout_seconds": 2.0},
            ("PGOUTBOX_LISTENER_HEARTBEAT_TIMEOUT_SECONDS=2", "PGOUTBOX_LISTENER_HEARTBEAT_SECONDS=1"),
        ),
        (
            {"web_session_idle_seconds": 7200.0, "web_session_max_seconds": 3600.0},
            ("PGOUTBOX_WEB_SESSION_IDLE_SECONDS=7200", "PGOUTBOX_WEB_SESSION_MAX_SECONDS=3600"),
        ),
        (
            {"breaker_cooldown_seconds": 20.0, "breaker_max_cooldown_seconds": 10.0},
            ("PGOUTBOX_BREAKER_COOLDOWN_SECONDS=20", "PGOUTBOX_BREAKER_MAX_COOLDOWN_SECONDS=10"),
        ),
        ({"kafka_password": CANARY}, ("PGOUTBOX_KAFKA_PASSWORD", "PGOUTBOX_KAFKA_USERNAME")),
        ({"smtp_password": CANARY}, ("PGOUTBOX_SMTP_PASSWORD", "PGOUTBOX_SMTP_USERNAME")),
        (
            {"smtp_password": CANARY, "smtp_username": "app", "smtp_security": "none"},
            ("PGOUTBOX_SMTP_SECURITY=none", "PGOUTBOX_SMTP_PASSWORD"),
        ),
    ],
)
def test_contradictory_settings_are_both_named(given: dict[str, object], named: tuple[str, str]) -> None:
    message = refusal(**given)
    assert all(name in message for name in named)
    assert CANARY not in message


@pytest.mark.parametrize(
    "destination",
    [
        "mailto:a@example.org,b@example.org",
        "ops@example.org",
        "https:///x",
        "mailto:a@example.org, https://x/",
        "apprise:",
    ],
)
def test_an_alert_destination_that_nothing_can_reach_is_refused(
    monkeypatch: pytest.MonkeyPatch, destination: str
) -> None:
    monkeypatch.setenv("PGOUTBOX_ALERT_DESTINATION", destination)
    assert "PGOUTBOX_ALERT_DESTINATION must be destinations such as mailto:ops@example.org" in refusal()


def test_alerts_go_to_several_destinations() -> None:
    given = load_settings(alert_destination="mailto:ops@club.org  https://hooks.club.org/a apprise:phone")
    assert given.alert_destinations == ("mailto:ops@club.org", "https://hooks.club.org/a", "apprise:phone")


def test_leases_are_renewed_three_times_per_lease_by_default() -> None:
    assert load_settings(lease_seconds=30.0).renew_interval_seconds == 10.0
    assert load_settings(lease_seconds=30.0, renew_seconds=5.0).renew_interval_seconds == 5.0


def test_a_missing_dsn_names_the_variable_and_an_example() -> None:
    with pytest.raises(ConfigurationError, match=r"PGOUTBOX_DSN=postgresql://.*or pass --dsn"):
        load_settings().require_dsn()


def test_the_listener_uses_the_same_database_by_default() -> None:
    assert load_settings(dsn="host=a").require_listen_dsn() == "host=a"
    assert load_settings(dsn="host=a", listen_dsn="host=b").require_listen_dsn() == "host=b"


@pytest.mark.parametrize("variable", SECRET_VARIABLES)
def test_a_secret_never_shows(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for name in ("SMTP", "KAFKA"):
        monkeypatch.setenv(f"PGOUTBOX_{name}_USERNAME", "app")
    monkeypatch.setenv(variable, FERNET_KEY)
    settings = load_settings()
    for text in (repr(settings), str(settings), str(settings.model_dump()), settings.model_dump_json()):
        assert CANARY not in text


def test_the_error_of_a_group_does_not_show_its_values() -> None:
    with pytest.raises(ValidationError) as failure:
        SmtpSettings(password=SecretStr(CANARY), host=CANARY)
    assert CANARY not in str(failure.value)


@pytest.mark.parametrize("variable", SECRET_VARIABLES)
def test_the_refusal_of_a_secret_names_only_the_variable(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "")
    assert refusal() == f"{variable}=(hidden): is set but empty; give a value or unset it"


def test_settings_are_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings().concurrency = 5
    with pytest.raises(ValueError, match="frozen"):
        load_settings().smtp.port = 5


@pytest.mark.parametrize("keys", ["short", f"{FERNET_KEY},", f"{FERNET_KEY},{CANARY}", FERNET_KEY.replace("_", "/")])
def test_an_invalid_key_is_refused_by_its_number(keys: str) -> None:
    number = 1 if "," not in keys else 2
    message = refusal(encryption_keys=keys)
    assert message.startswith(f"PGOUTBOX_ENCRYPTION_KEYS=(hidden): key {number} is not a Fernet key")
    assert CANARY not in message


UNSUBSCRIBE_URL = "https://club.example.org/unsubscribe"
UNSUBSCRIBE_KEYS = "a key of the tests with 32 characters"


@pytest.mark.parametrize(
    "url",
    [
        "http://club.example.org/unsubscribe",
        "club.example.org/unsubscribe",
        f"{UNSUBSCRIBE_URL}?list=news",
        f"{UNSUBSCRIBE_URL}#news",
        f"{UNSUBSCRIBE_URL}>, <mailto:leave@example.org",
        f"{UNSUBSCRIBE_URL}\r\nBcc: ada@example.org",
        "https://b\u00fccher.example/unsubscribe",
        f"{UNSUBSCRIBE_URL}/{'x' * 500}",  # The header could not have it in one line.
    ],
)
def test_a_link_to_unsubscribe_fits_into_its_header(url: str) -> None:
    told = refusal(unsubscribe_url=url, unsubscribe_keys=UNSUBSCRIBE_KEYS)
    assert "must be an https: URL of up to 500 characters, without a query" in told
    settings_with(unsubscribe_url=UNSUBSCRIBE_URL, unsubscribe_keys=UNSUBSCRIBE_KEYS)


def test_links_to_unsubscribe_need_long_keys() -> None:
    told = refusal(unsubscribe_url=UNSUBSCRIBE_URL, unsubscribe_keys=f"{UNSUBSCRIBE_KEYS}, {CANARY}")
    assert told.startswith("PGOUTBOX_UNSUBSCRIBE_KEYS=(hidden): key 2 has less than 32 characters")
    assert CANARY not in told
    assert "PGOUTBOX_UNSUBSCRIBE_KEYS is not" in refusal(unsubscribe_url=UNSUBSCRIBE_URL)


def test_an_unknown_setting_is_refused_with_the_closest_one() -> None:
    with pytest.raises(ConfigurationError) as failure:
        Settings(lease_second=3, Dsn="postgresql://app:s3cret@localhost/app")
    assert str(failure.value) == (
        "unknown setting 'lease_second'; did you mean 'lease_seconds'?\nunknown setting 'Dsn'; did you mean 'dsn'?"
    )
    with pytest.raises(ConfigurationError, match=r"unknown setting 'smtp_hosts'; did you mean 'smtp\.host'"):
        load_settings(smtp_hosts="mx.test")
    for given in ({"hots": "mx.test"}, {"host": "mx.test", "hots": "mx.test"}):
        with pytest.raises(ConfigurationError, match=r"^unknown setting 'hots'; did you mean 'host'"):
            load_settings(smtp=given)


def test_a_positional_dsn_is_refused() -> None:
    make: Any = Settings
    with pytest.raises(TypeError, match="positional argument"):
        make("postgresql://app:s3cret@localhost/app")


def test_an_unknown_variable_does_not_prevent_reading_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGOUTBOX_LEASE_SECOND", "3")
    assert Settings().lease_seconds == 60
    assert unknown_variables(["PGOUTBOX_LEASE_SECOND"]) == [("PGOUTBOX_LEASE_SECOND", "PGOUTBOX_LEASE_SECONDS")]


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("PGOUTBOX_SMTP_HOTS", "PGOUTBOX_SMTP_HOST"),
        ("PGOUTBOX_BREAKER", "PGOUTBOX_BREAKER_ENABLED"),
        ("PGOUTBOX_WEB_SERVICE_PORT", "PGOUTBOX_WEB_SECRET"),
    ],
)
def test_an_unknown_variable_of_a_group_does_not_prevent_reading_the_group(
    monkeypatch: pytest.MonkeyPatch, variable: str, nearest: str
) -> None:
    monkeypatch.setenv(variable, "")
    monkeypatch.setenv("PGOUTBOX_SMTP_HOST", "mx.test")
    assert (Settings().smtp.host, Settings().web) == ("mx.test", WebSettings())
    assert unknown_variables([variable, "PGOUTBOX_SMTP_HOST"]) == [(variable, nearest)]


class TestFormerNames:
    """A later version has renamed two settings."""

    @pytest.fixture(autouse=True)
    def _renamed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            settings_module, "FORMER_NAMES", {"host": "worker_name", "smtp.server": "smtp.host", "smtp.key": "dsn"}
        )

    def test_a_former_variable_sets_the_present_setting_and_warns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PGOUTBOX_SMTP_SERVER", "mx.test")
        with pytest.warns(DeprecationWarning, match=r"^setting PGOUTBOX_SMTP_SERVER is now PGOUTBOX_SMTP_HOST; set"):
            assert load_settings().smtp.host == "mx.test"

    def test_a_setting_may_move_to_another_group_in_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("pgoutbox_smtp_key", "host=a")
        with pytest.warns(DeprecationWarning, match="PGOUTBOX_SMTP_KEY is now PGOUTBOX_DSN"):
            assert load_settings().require_dsn() == "host=a"

    def test_both_names_at_once_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PGOUTBOX_SMTP_SERVER", "mx.test")
        monkeypatch.setenv("PGOUTBOX_SMTP_HOST", "mx.test")
        assert refusal() == (
            "PGOUTBOX_SMTP_SERVER is the former name of PGOUTBOX_SMTP_HOST, and both are set: "
            "unset PGOUTBOX_SMTP_SERVER"
        )
        with pytest.raises(ConfigurationError, match=r"^host is the former name of worker_name, and both are set"):
            load_settings(host="a", worker_name="b")

    def test_a_former_name_in_python_sets_the_present_setting_and_warns(self) -> None:
        with pytest.warns(DeprecationWarning, match="^setting host is now worker_name; set worker_name instead$"):
            assert load_settings(host="night").worker_name == "night"
        with pytest.warns(DeprecationWarning, match="^setting server is now host; set host instead$"):
            assert load_settings(smtp={"server": "mx.test"}).smtp.host == "mx.test"

    @pytest.mark.filterwarnings("error")
    def test_the_same_name_in_another_group_is_not_a_former_one(self) -> None:
        assert SmtpSettings(host="mx.test").host == "mx.test"

    def test_a_former_variable_is_not_unknown(self) -> None:
        environment = ["PGOUTBOX_SMTP_SERVER", "PGOUTBOX_SMTP_SERVERS"]
        assert renamed_variables(environment) == [("PGOUTBOX_SMTP_SERVER", "PGOUTBOX_SMTP_HOST")]
        assert [variable for variable, _ in unknown_variables(environment)] == ["PGOUTBOX_SMTP_SERVERS"]


def test_a_former_name_is_not_the_name_of_a_setting() -> None:
    fields = fields_of(Settings)
    assert not FORMER_NAMES.keys() & fields.keys()
    assert {*FORMER_NAMES.values()} <= fields.keys()

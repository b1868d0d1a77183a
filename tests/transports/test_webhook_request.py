"""Tests the request of a `Webhook` before any connection, and the allowed destinations."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import SecretStr

from pgoutbox import Webhook
from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Permanent, Unavailable
from pgoutbox.settings import Settings
from pgoutbox.transports import WebhookTransport
from pgoutbox.transports.webhook.request import MAX_BODY_BYTES, RenderedRequest, Rules, render, secret_key
from pgoutbox.transports.webhook.transport import retry_after_seconds
from pgoutbox.transports.webhook.url_policy import UrlPolicy, parse_networks
from pgoutbox.webhooks import key_of, sign
from tests.support.sends import outgoing
from tests.support.settings import settings_with

if TYPE_CHECKING:
    from pathlib import Path

FIRST, SECOND, SHOP = (f"whsec_{base64.b64encode(letter * 32).decode()}" for letter in (b"1", b"2", b"s"))
CANARY = "whsec_" + base64.b64encode(b"c4n4ry" * 2).decode()
URL = "https://hooks.example.org/in"


def settings_for(**overrides: object) -> Settings:
    return settings_with(**({"webhook_secrets": f"{FIRST} shop={SHOP}"} | overrides))


def rendered(webhook: Webhook, destination: str | None = URL, **overrides: object) -> RenderedRequest:
    return render(webhook, outgoing(destination=destination), Rules.of(settings_for(**overrides).webhook))


def refusal(webhook: Webhook, destination: str | None = URL, **overrides: object) -> str:
    with pytest.raises(Permanent) as caught:
        rendered(webhook, destination, **overrides)
    return caught.value.error


def headers_of(request: RenderedRequest, timestamp: int = 7) -> dict[str, str]:
    return {name.decode().lower(): value.decode() for name, value in request.signed_headers(timestamp)}


def test_a_json_body_is_sent_to_the_destination_and_signed() -> None:
    request = rendered(Webhook(body={"name": "Zoë", "n": [1, None]}))
    assert (request.method, request.body) == ("POST", '{"name":"Zoë","n":[1,null]}'.encode())
    key = outgoing().idempotency_key
    assert headers_of(request) == {
        "host": "hooks.example.org",
        "content-type": "application/json",
        "content-length": str(len(request.body)),
        "accept-encoding": "identity",
        "idempotency-key": key,
        "user-agent": "pgoutbox",
        "webhook-id": key,
        "webhook-timestamp": "7",
        "webhook-signature": sign([key_of(FIRST)], key, 7, request.body),
    }


def test_bytes_are_sent_unchanged() -> None:
    request = rendered(Webhook(body=b"\xff\x00", method="PUT"))
    assert (request.method, request.body) == ("PUT", b"\xff\x00")
    assert headers_of(request)["content-type"] == "application/octet-stream"
    xml = rendered(Webhook(body=b"<a/>", media_type="application/xml; charset=utf-8", headers={"User-Agent": "club/1"}))
    assert headers_of(xml)["content-type"] == "application/xml; charset=utf-8"
    assert headers_of(xml)["user-agent"] == "club/1"


def test_the_url_of_the_content_takes_precedence_over_the_destination() -> None:
    request = rendered(Webhook(body=1, url="https://other.example.org:8443?a=1&b=2"))
    assert (request.endpoint.host, request.endpoint.port, request.endpoint.target) == (
        "other.example.org",
        8443,
        "/?a=1&b=2",
    )
    assert headers_of(request)["host"] == "other.example.org:8443"
    assert refusal(Webhook(body=1), None) == "webhook.url: none is given, and the message has no https: destination"


def test_without_a_destination_the_scheme_is_that_of_the_url() -> None:
    assert Webhook(body=1).scheme == "https"
    assert Webhook(body=1, url="http://a.test").scheme == "http"
    assert Webhook(body=1, url=7).scheme == "https"  # type: ignore[arg-type] # what an untyped handler may do


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({}, [FIRST, SECOND]),
        ({"secret_name": "shop"}, [SHOP]),
        ({"secrets": [SECOND, SecretStr(SHOP)]}, [SECOND, SHOP]),
        ({"signed": False}, []),
    ],
)
def test_the_secret_is_chosen_by_the_content_and_the_settings(changes: dict[str, Any], keys: list[str]) -> None:
    request = rendered(Webhook(body=1, **changes), webhook_secrets=f"{FIRST}\n shop={SHOP} {SECOND}")
    assert list(request.keys) == [key_of(key) for key in keys]
    signature = headers_of(request).get("webhook-signature")
    assert (signature is None) is (not keys)
    if signature is not None:
        assert len(signature.split(" ")) == len(keys)


def test_a_secret_missing_in_the_settings_costs_no_attempt() -> None:
    for webhook, which, key in (
        (Webhook(body=1), "one without a name", "webhook:PGOUTBOX_WEBHOOK_SECRETS"),
        (Webhook(body=1, secret_name="crm"), "one named 'crm'", "webhook:PGOUTBOX_WEBHOOK_SECRETS crm"),
    ):
        with pytest.raises(Unavailable) as caught:
            rendered(webhook, webhook_secrets=f"shop={SHOP}")
        assert caught.value.error == f"webhook.secret_name: PGOUTBOX_WEBHOOK_SECRETS does not have {which}"
        assert caught.value.breaker == secret_key(webhook) == key
    assert secret_key(Webhook(body=1, secrets=[FIRST])) is None
    assert secret_key(Webhook(body=1, signed=False)) is None


@pytest.mark.parametrize(
    ("webhook", "error"),
    [
        (Webhook(body=1, method="GET"), "webhook.method: must be POST or PUT, not 'GET'"),  # type: ignore[arg-type]
        (Webhook(body=float("nan")), "webhook.body: is not JSON: Out of range float values are not JSON compliant"),
        (Webhook(body={"a": "\ud800"}), "webhook.body: contains the character U+D800"),
        (Webhook(body=object()), "webhook.body: is not JSON: Object of type object is not JSON serializable"),  # type: ignore[arg-type]
        (Webhook(body=b"x" * (MAX_BODY_BYTES + 1)), "webhook.body: 20971521 bytes are more than 20971520"),
        (Webhook(body=1, media_type="json"), "webhook.media_type: is not a media type such as application/json"),
        (Webhook(body=1, media_type="a/b\r\nX: y"), "webhook.media_type: contains CR, LF or NUL"),
        (Webhook(body=1, secrets=FIRST), "webhook.secrets: must be a sequence of secrets"),
        (
            Webhook(body=1, secrets=[FIRST], secret_name="shop"),
            "webhook.secrets: are given, and webhook.secret_name too",
        ),
        (Webhook(body=1, secrets=[FIRST, CANARY]), "webhook.secrets[1]: holds 12 bytes; 24 to 64 are accepted"),
    ],
)
def test_an_invalid_webhook_is_refused_by_field(webhook: Webhook, error: str) -> None:
    assert refusal(webhook) == error


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        *[(f"X-A{c}", "1", "is not the name of a header") for c in "\r\n\0:\u0085 é"],
        ("X-A\r\nHost", "1", "is not the name of a header"),
        ("", "1", "is not the name of a header"),
        *[("X-A", f"1{c}2", "contains CR, LF or NUL") for c in "\r\n\0"],
        ("X-A", "1\r\nHost: 127.0.0.1", "contains CR, LF or NUL"),
        ("X-A", "1\u00852", "contains the character U+0085"),
        ("X-A", "1\u2028", "contains the character U+2028"),
        ("X-A", "1\x7f", "contains the character U+007F"),
        ("X-A", "Grüße", "contains the character U+00FC"),
        ("X-A", " 1", "begins or ends with white space"),
        ("X-A", "1" * 8_193, "has 8193 characters, the limit is 8192"),
        ("X-A", 1, "must be text, not int"),
        *[
            (name, "1", "is set by pgoutbox, not by headers")
            for name in (
                "Host", "HOST", "Content-Length", "Transfer-Encoding", "Connection", "Content-Type", "TE", "Trailer",
                "Upgrade", "Expect", "Keep-Alive", "Proxy-Authorization", "Accept-Encoding", "Idempotency-Key",
                "webhook-id", "Webhook-Timestamp", "WEBHOOK-SIGNATURE", "webhook-anything", "HTTP2-Settings",
            )
        ],
    ],
)  # fmt: skip
def test_a_header_that_could_inject_another_is_refused_by_name(name: str, value: str, error: str) -> None:
    assert refusal(Webhook(body=1, headers={name: value})) == f"webhook.headers[{name!r}]: {error}"


def test_headers_are_limited_in_number_and_must_be_unique() -> None:
    many = {f"X-{number}": "1" for number in range(65)}
    assert refusal(Webhook(body=1, headers=many)) == "webhook.headers: 65 are more than 64"
    assert refusal(Webhook(body=1, headers={"X-A": "1", "x-a": "2"})) == "webhook.headers['x-a']: is given twice"


def test_no_repr_shows_a_secret() -> None:
    webhook = Webhook(body="canary", url=f"{URL}/canary", headers={"Authorization": "canary"}, secrets=["canary"])
    assert "canary" not in repr(webhook)
    assert "canary" not in repr(rendered(replace(webhook, secrets=[FIRST], url=URL)))
    assert "hooks.example.org" in repr(rendered(replace(webhook, secrets=[FIRST], url=URL)))


# --- destinations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("ftp://a.test/", "must begin with https://"),
        ("file:///etc/passwd", "must begin with https://"),
        ("gopher://a.test/_x", "must begin with https://"),
        ("https:a.test", "must begin with https://"),
        ("//a.test", "must begin with https://"),
        ("", "must begin with https://"),
        ("http://a.test/", "http is refused; use https, or set PGOUTBOX_WEBHOOK_ALLOW_HTTP"),
        ("https://a@b.test/", "a user name or password in a URL is refused; send a header instead"),
        ("https://a.test:x@b.test/", "a user name or password in a URL is refused; send a header instead"),
        ("https://a.test\\@b.test/", "contains the character U+005C; percent-encode it"),
        ("https://a.test/ b", "contains the character U+0020; percent-encode it"),
        ("https://a.test/\r\nX: y", "contains the character U+000D; percent-encode it"),
        ("https://bücher.test/", "contains the character U+00FC; percent-encode it"),
        ("https://a.test/#b", "a fragment (#) is never sent; leave it out"),
        ("https:///a", "has no host name that can be looked up"),
        ("https://a..b/", "has no host name that can be looked up"),
        ("https://a%2eb/", "has no host name that can be looked up"),
        ("https://a_b-/", "has no host name that can be looked up"),
        (f"https://{'a' * 64}.test/", "has no host name that can be looked up"),
        (f"https://{'a.' * 127}test/", "has no host name that can be looked up"),
        ("https://localhost./", "the host must not end with a dot"),
        ("https://a.test:22/", "port 22 is refused; PGOUTBOX_WEBHOOK_PORTS allows 443, 8443"),
        ("https://a.test:25/", "port 25 is refused; PGOUTBOX_WEBHOOK_PORTS allows 443, 8443"),
        ("https://a.test:0/", "port 0 is refused; PGOUTBOX_WEBHOOK_PORTS allows 443, 8443"),
        ("https://a.test:65536/", "port 65536 is refused; PGOUTBOX_WEBHOOK_PORTS allows 443, 8443"),
        ("https://a.test:4433443/", "has no valid host and port"),
        ("https://a.test:443:443/", "has no valid host and port"),
        ("https://a.test:+443/", "has no valid host and port"),
        ("https://[::1/", "has no valid host and port"),
        ("https://[::1]x/", "has no valid host and port"),
        ("https://[fe80::1%25eth0]/", "the host is not an IPv6 address"),
        ("https://[1.2.3.4]/", "the host is not an IPv6 address"),
        ("https://2130706433/", "the host is a number, and not an address of four parts"),
        ("https://0x7f.1/", "the host is a number, and not an address of four parts"),
        ("https://0x7f000001/", "the host is a number, and not an address of four parts"),
        ("https://127.1/", "the host is a number, and not an address of four parts"),
        ("https://0177.0.0.1/", "the host is a number, and not an address of four parts"),
        ("https://127.0.0.256/", "the host is a number, and not an address of four parts"),
        ("https://a.test/" + "x" * 2_048, "has 2063 characters, the limit is 2048"),
    ],
)  # fmt: skip
def test_a_misleading_url_is_refused(url: str, error: str) -> None:
    with pytest.raises(Permanent) as caught:
        UrlPolicy().endpoint("destination", url)
    assert caught.value.error == f"destination: {error}"


@pytest.mark.parametrize(
    ("url", "host", "authority", "target"),
    [
        ("https://A.Test", "a.test", "a.test", "/"),
        ("HTTPS://a.test:443/x?y=%20;z", "a.test", "a.test", "/x?y=%20;z"),
        ("https://a.test:/x//../y", "a.test", "a.test", "/x//../y"),
        ("https://xn--bcher-kva.test:8443/@b", "xn--bcher-kva.test", "xn--bcher-kva.test:8443", "/@b"),
        ("https://1.1.1.1/", "1.1.1.1", "1.1.1.1", "/"),
        ("https://[2606:4700::0:1111]/", "2606:4700::1111", "[2606:4700::1111]", "/"),
        ("https://a_b.test?x", "a_b.test", "a_b.test", "/?x"),
    ],
)
def test_a_url_is_parsed_once(url: str, host: str, authority: str, target: str) -> None:
    endpoint = UrlPolicy().endpoint("destination", url)
    assert (endpoint.host, endpoint.authority, endpoint.target) == (host, authority, target)


PUBLIC = ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::1.1.1.1", "172.32.0.1"]
NOT_PUBLIC = [
    "127.0.0.1", "127.255.255.254", "0.0.0.0", "0.1.2.3", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.0.1",
    "169.254.169.254", "100.64.0.1", "100.100.100.200", "100.127.255.255", "192.0.0.192", "192.0.2.1", "192.88.99.1",
    "198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1", "224.0.1.1", "239.255.255.255",
    "240.0.0.1", "255.255.255.255", "168.63.129.16",
    "::", "::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:0:127.0.0.1", "64:ff9b::10.0.0.1",
    "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "100::1", "2001::1", "2001:0:7f00:1::", "2001:db8::1", "2002:7f00:1::",
    "2002:101:101::", "3fff::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1",
    "ff0e::1", "5f00::1", "4000::1", "localhost", "", "1.1.1.1.1",
]  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_allowed(address: str) -> None:
    assert UrlPolicy().allows(address)


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_a_private_address_is_refused(address: str) -> None:
    assert not UrlPolicy().allows(address)


def test_an_allowed_network_is_accepted_but_not_its_neighbours() -> None:
    policy = UrlPolicy(allowed_networks=parse_networks("X", "10.1.0.0/16, fd00::/8"))
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::10.1.2.3", "fd12::1", "1.1.1.1"):
        assert policy.allows(address)
    for address in ("10.2.0.1", "127.0.0.1", "fc00::1", "::ffff:10.2.0.1", "169.254.169.254"):
        assert not policy.allows(address)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value", "error"),
    [
        ("webhook_secrets", "canary", "PGOUTBOX_WEBHOOK_SECRETS: entry 1: must begin with whsec_"),
        ("webhook_secrets", f"{FIRST} whsec_canary!", "PGOUTBOX_WEBHOOK_SECRETS: entry 2: is not base64 after whsec_"),
        ("webhook_secrets", f"a={CANARY}", "PGOUTBOX_WEBHOOK_SECRETS: entry 1: holds 12 bytes; 24 to 64 are accepted"),
        (
            "webhook_secrets",
            f"Canary={FIRST}",
            "PGOUTBOX_WEBHOOK_SECRETS: entry 1: the name before = must match [a-z][a-z0-9_.-]{0,62}",
        ),
        ("webhook_ports", "443,x", "PGOUTBOX_WEBHOOK_PORTS='443,x': 'x' is not a port from 1 to 65535"),
        ("webhook_ports", "65536", "PGOUTBOX_WEBHOOK_PORTS='65536': '65536' is not a port from 1 to 65535"),
        ("webhook_ports", "0", "PGOUTBOX_WEBHOOK_PORTS='0': '0' is not a port from 1 to 65535"),
        (
            "webhook_allowed_networks",
            "10.0.0.1/8",
            "PGOUTBOX_WEBHOOK_ALLOWED_NETWORKS='10.0.0.1/8': 10.0.0.1/8 has host bits set; for example fd00::/8",
        ),
    ],
)
def test_an_unusable_setting_is_refused_by_name_at_the_start(setting: str, value: str, error: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        WebhookTransport(settings_for(**{setting: value}))
    assert str(caught.value) == error


def test_an_unreadable_ca_file_is_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.pem", tmp_path, tmp_path / "empty.pem"):
        (tmp_path / "empty.pem").write_text("")
        with pytest.raises(ConfigurationError, match=r"PGOUTBOX_WEBHOOK_CA_FILE='.*': "):
            WebhookTransport(settings_for(webhook_ca_file=str(path)))


def test_http_is_served_if_the_settings_allow_it() -> None:
    assert WebhookTransport(settings_for()).schemes == ("https",)
    assert WebhookTransport(settings_for(webhook_allow_http=True)).schemes == ("https", "http")


# --- Retry-After ------------------------------------------------------------------------------------------------------

DATE = "Sun, 06 Nov 1994 08:49:37 GMT"
LATER = "Sun, 06 Nov 1994 08:51:37 GMT"


@pytest.mark.parametrize(
    ("value", "date", "seconds"),
    [
        (None, None, None),
        ("120", None, 120.0),
        (" 0 ", None, 0.0),
        ("9" * 400, None, 999_999_999_999_999.0),
        ("-1", None, None),
        ("1.5", None, None),
        ("²", None, None),
        ("soon", None, None),
        ("", None, None),
        (LATER, DATE, 120.0),
        (DATE, LATER, 0.0),
        (LATER, None, 130.0),
        (LATER, "nonsense", 130.0),
        ("Sun Nov  6 08:51:37 1994", DATE, 120.0),
        ("Sun, 06 Nov 99999 08:51:37 GMT", DATE, None),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str | None, date: str | None, seconds: float | None) -> None:
    assert retry_after_seconds(value, date, now=784_111_767.0) == seconds

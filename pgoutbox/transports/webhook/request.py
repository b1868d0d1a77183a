"""The webhook and its request. Pure: opens nothing, needs no extra.

`render` refuses, naming the field, values that could become a second header or lead to a forbidden target.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from pydantic import JsonValue

from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Message, Permanent, Unavailable
from pgoutbox.text import NAME
from pgoutbox.transports import scheme_of
from pgoutbox.transports.checks import encode_json, refuse_characters, require_text
from pgoutbox.transports.webhook.url_policy import Endpoint, UrlPolicy, parse_networks, parse_ports
from pgoutbox.webhooks import Secret, key_of, keys_of, sign

if TYPE_CHECKING:
    from pgoutbox.settings import WebhookSettings

MAX_BODY_BYTES = 20 * 1024 * 1024
MAX_HEADER_COUNT = 64
MAX_HEADER_BYTES = 8 * 1024

_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_UNSAFE = re.compile("[^\t -~]")
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+(?:[ \t]*;[ \t]*[\t -~]+)?")
_SECRETS: Final = "PGOUTBOX_WEBHOOK_SECRETS"

_RESERVED_HEADERS = frozenset(
    {
        "accept-encoding", "connection", "content-length", "content-type", "expect", "host", "http2-settings",
        "idempotency-key", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade",
    }
)  # fmt: skip
_RESERVED_PREFIXES = ("proxy-", "webhook-")

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A request to a receiver's URL: return it from a handler.

    `body` is a JSON value, or bytes that are sent unchanged. It goes to the message's `https:` destination, or to `url`
    if given. The default of `media_type` is `application/json`, and `application/octet-stream` for bytes.

    It is signed by Standard Webhooks: with `secrets`, the receiver's own, or with the secrets of the setting
    `webhook.secrets` with the name `secret_name`, or without a name. Several secrets give several signatures, so that
    the receiver can rotate them. `signed=False` is for receivers with another scheme.

    >>> Webhook(body={"type": "order.paid", "data": {"id": 7}}).scheme
    'https'
    """

    body: JsonValue | bytes = field(repr=False)
    url: str | None = field(default=None, repr=False)
    method: Literal["POST", "PUT"] = "POST"
    media_type: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    secret_name: str | None = None
    secrets: Sequence[Secret] = field(default=(), repr=False)
    signed: bool = True

    @property
    def scheme(self) -> str:
        """The scheme of `url`; `https` without one."""
        return scheme_of(self.url) if isinstance(self.url, str) else "https"


@dataclass(frozen=True, slots=True)
class Rules:
    """The parsed settings of webhooks: their allowed targets and their secrets."""

    policy: UrlPolicy
    keys: Mapping[str, tuple[bytes, ...]] = field(repr=False)

    @classmethod
    def of(cls, settings: WebhookSettings) -> Rules:
        """Raises `ConfigurationError`, naming the variable and never a secret."""
        networks = settings.allowed_networks
        policy = UrlPolicy(
            ports=parse_ports("PGOUTBOX_WEBHOOK_PORTS", settings.ports),
            allow_http=settings.allow_http,
            allowed_networks=() if networks is None else parse_networks("PGOUTBOX_WEBHOOK_ALLOWED_NETWORKS", networks),
        )
        secrets = settings.secrets
        return cls(policy, {} if secrets is None else _keys_by_name(secrets.get_secret_value()))


def _keys_by_name(text: str) -> Mapping[str, tuple[bytes, ...]]:
    """Keys by name; keys without a name have the empty name."""
    found: dict[str, tuple[bytes, ...]] = {}
    for number, entry in enumerate(text.split(), start=1):
        name, equals, secret = entry.partition("=whsec_")
        name, secret = (name, f"whsec_{secret}") if equals else ("", entry)
        if equals and not NAME.fullmatch(name):
            raise ConfigurationError(f"{_SECRETS}: entry {number}: the name before = must match {NAME.pattern}")
        try:
            found[name] = (*found.get(name, ()), key_of(secret))
        except ValueError as error:
            raise ConfigurationError(f"{_SECRETS}: entry {number}: {error}") from None
    return found


@dataclass(frozen=True, slots=True)
class RenderedRequest:
    """One request without its signature, which is computed when it is sent."""

    endpoint: Endpoint
    method: str
    headers: Headers = field(repr=False)
    body: bytes = field(repr=False)
    webhook_id: str
    keys: Sequence[bytes] = field(repr=False)

    def signed_headers(self, timestamp: int) -> Headers:
        """Return all headers, signed for this second."""
        if not self.keys:
            return self.headers
        return [
            *self.headers,
            (b"webhook-id", self.webhook_id.encode()),
            (b"webhook-timestamp", str(timestamp).encode()),
            (b"webhook-signature", sign(self.keys, self.webhook_id, timestamp, self.body).encode()),
        ]

    def signed_bytes(self, timestamp: int) -> bytes:
        """Return the whole request in HTTP/1.1, signed for this second."""
        lines = [f"{self.method} {self.endpoint.target} HTTP/1.1\r\n".encode()]
        lines += [b"%s: %s\r\n" % header for header in self.signed_headers(timestamp)]
        return b"".join((*lines, b"\r\n", self.body))


def render(
    webhook: Webhook, message: Message[object], rules: Rules, context: Mapping[str, str] | None = None
) -> RenderedRequest:
    """Return the request that would be sent for this message; resolves and connects to nothing.

    `context` are headers to add, except those that the webhook has.

    Raises `Permanent`, naming the field, for an invalid request. A secret that is missing in the settings is
    `Transient`, because a setting fixes it.
    """
    if webhook.url is not None:
        endpoint = rules.policy.endpoint("webhook.url", webhook.url)
    elif message.destination is not None:
        endpoint = rules.policy.endpoint("destination", message.destination)
    else:
        raise Permanent("webhook.url: none is given, and the message has no https: destination")
    if webhook.method not in ("POST", "PUT"):
        raise Permanent(f"webhook.method: must be POST or PUT, not {webhook.method!r}")
    body = _body(webhook.body)
    webhook_id = message.idempotency_key
    return RenderedRequest(
        endpoint=endpoint,
        method=webhook.method,
        headers=[
            (b"Host", endpoint.authority.encode()),
            (b"Content-Type", _media_type(webhook)),
            (b"Content-Length", str(len(body)).encode()),
            (b"Accept-Encoding", b"identity"),
            (b"Idempotency-Key", webhook_id.encode()),
            *_own_headers(webhook.headers, {"User-Agent": "pgoutbox", **(context or {})}),
        ],
        body=body,
        webhook_id=webhook_id,
        keys=_keys(webhook, rules),
    )


def _body(value: object) -> bytes:
    body = value if isinstance(value, bytes) else encode_json("webhook.body", value)
    if len(body) > MAX_BODY_BYTES:
        raise Permanent(f"webhook.body: {len(body)} bytes are more than {MAX_BODY_BYTES}")
    return body


def _media_type(webhook: Webhook) -> bytes:
    value = webhook.media_type
    if value is None:
        return b"application/octet-stream" if isinstance(webhook.body, bytes) else b"application/json"
    text = _checked("webhook.media_type", value)
    if not _MEDIA_TYPE.fullmatch(text):
        raise Permanent("webhook.media_type: is not a media type such as application/json")
    return text.encode()


def _own_headers(headers: Mapping[str, str], defaults: Mapping[str, str]) -> Headers:
    if len(headers) > MAX_HEADER_COUNT:
        raise Permanent(f"webhook.headers: {len(headers)} are more than {MAX_HEADER_COUNT}")
    found: dict[str, tuple[bytes, bytes]] = {}
    for name, value in headers.items():
        where = f"webhook.headers[{name!r}]"
        if not _TOKEN.fullmatch(name):
            raise Permanent(f"{where}: is not the name of a header")
        lower = name.lower()
        if lower in _RESERVED_HEADERS or lower.startswith(_RESERVED_PREFIXES):
            raise Permanent(f"{where}: is set by pgoutbox, not by headers")
        if lower in found:
            raise Permanent(f"{where}: is given twice")
        found[lower] = (name.encode(), _checked(where, value).encode())
    for name, value in defaults.items():
        found.setdefault(name.lower(), (name.encode(), value.encode()))
    return list(found.values())


def _checked(name: str, value: object) -> str:
    text = require_text(name, value)
    if len(text) > MAX_HEADER_BYTES:
        raise Permanent(f"{name}: has {len(text)} characters, the limit is {MAX_HEADER_BYTES}")
    refuse_characters(name, text, _UNSAFE)
    if text != text.strip(" \t"):
        raise Permanent(f"{name}: begins or ends with white space")
    return text


def _keys(webhook: Webhook, rules: Rules) -> Sequence[bytes]:
    if not webhook.signed:
        return ()
    if webhook.secrets:
        return _given_keys(webhook)
    keys = rules.keys.get(webhook.secret_name or "")
    if keys is None:
        which = "one without a name" if webhook.secret_name is None else f"one named {webhook.secret_name!r}"
        raise Unavailable(f"webhook.secret_name: {_SECRETS} does not have {which}", breaker=secret_key(webhook))
    return keys


def secret_key(webhook: Webhook) -> str | None:
    """Return the breaker's key for webhooks with this secret of the setting. It opens while the secret is missing."""
    if not webhook.signed or webhook.secrets:
        return None
    return f"webhook:{_SECRETS}" + (f" {webhook.secret_name}" if webhook.secret_name is not None else "")


def _given_keys(webhook: Webhook) -> Sequence[bytes]:
    if webhook.secret_name is not None:
        raise Permanent("webhook.secrets: are given, and webhook.secret_name too")
    if isinstance(webhook.secrets, str) or not isinstance(webhook.secrets, Sequence):
        raise Permanent("webhook.secrets: must be a sequence of secrets")
    try:
        return keys_of("webhook.secrets", webhook.secrets)
    except ConfigurationError as error:
        raise Permanent(str(error)) from None

"""Signatures by Standard Webhooks (standardwebhooks.com): the webhook transport signs, and receivers verify.

It needs no settings, no database and no extra, so that a receiver can use it alone. Only symmetric signatures, `v1`,
are created and accepted.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets as random_source
import time
from collections.abc import Mapping, Sequence

from pydantic import SecretStr

from pgoutbox.errors import ConfigurationError, SignatureError

TOLERANCE_SECONDS = 300.0
MIN_KEY_BYTES = 24
MAX_KEY_BYTES = 64
_PREFIX = "whsec_"
_TIMESTAMP = re.compile("[0-9]{1,12}")

Secret = str | SecretStr


def verify(
    body: bytes,
    headers: Mapping[str, str],
    secrets: Secret | Sequence[Secret],
    *,
    tolerance_seconds: float = TOLERANCE_SECONDS,
    now: float | None = None,
) -> str:
    """Verify that one of the secrets signed a request, and return its `webhook-id`. A repetition has the same id.

    `body` is the raw body, before any parsing. Raises `SignatureError` if a header is missing, if the request is more
    than `tolerance_seconds` old or ahead of the clock, or if no signature is valid: then answer with 401. During the
    rotation of a secret, pass the old and the new one. `now` is for tests, in seconds since 1970.

        webhook_id = verify(await request.body(), request.headers, settings.webhook_secret)
    """
    keys = keys_of("secrets", [secrets] if isinstance(secrets, str | SecretStr) else secrets)
    if not keys:
        raise ConfigurationError("secrets: none is given")
    given = {name.lower(): value for name, value in headers.items()}
    webhook_id, timestamp, signatures = (
        _header(given, name) for name in ("webhook-id", "webhook-timestamp", "webhook-signature")
    )
    if not _TIMESTAMP.fullmatch(timestamp):
        raise SignatureError("webhook-timestamp: is not a number of seconds")
    age = (time.time() if now is None else now) - int(timestamp)
    if not abs(age) <= tolerance_seconds:
        when = "old" if age > 0 else "ahead of the clock"
        raise SignatureError(f"webhook-timestamp: is more than {tolerance_seconds:g} s {when}")
    expected = [_signature(key, webhook_id, timestamp, body).encode() for key in keys]
    offered = [signature.encode() for signature in signatures.split(" ")]
    # Every pair is compared, so that the time does not reveal which of them matches.
    if sum(hmac.compare_digest(mine, theirs) for mine in expected for theirs in offered) == 0:
        raise SignatureError("webhook-signature: no signature is valid")
    return webhook_id


def sign(keys: Sequence[bytes], webhook_id: str, timestamp: int, body: bytes) -> str:
    """Return the value of `webhook-signature`: one signature for each key, in their order."""
    return " ".join(_signature(key, webhook_id, str(timestamp), body) for key in keys)


def make_secret() -> str:
    """Return a new random secret.

    >>> make_secret().startswith("whsec_")
    True
    """
    return _PREFIX + base64.b64encode(random_source.token_bytes(32)).decode()


def key_of(secret: Secret) -> bytes:
    """Return the key of a secret. Raises `ValueError`, which never quotes the secret."""
    text = secret.get_secret_value() if isinstance(secret, SecretStr) else secret
    if not isinstance(text, str):
        raise ValueError(f"must be text, not {type(text).__name__}")  # noqa: TRY004 - one kind of error for callers
    if not text.startswith(_PREFIX):
        raise ValueError(f"must begin with {_PREFIX}")
    encoded = text.removeprefix(_PREFIX)
    try:
        key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"is not base64 after {_PREFIX}") from None
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"holds {len(key)} bytes; {MIN_KEY_BYTES} to {MAX_KEY_BYTES} are accepted")
    return key


def keys_of(field: str, secrets: Sequence[Secret]) -> Sequence[bytes]:
    """Return the keys of the secrets. Raises `ConfigurationError`, naming the field and the number of a wrong one."""
    keys = []
    for index, secret in enumerate(secrets):
        try:
            keys.append(key_of(secret))
        except ValueError as error:
            raise ConfigurationError(f"{field}[{index}]: {error}") from None
    return keys


def _header(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name)
    if not value:
        raise SignatureError(f"{name}: is missing")
    if not value.isascii():
        raise SignatureError(f"{name}: is not ASCII")
    return value


def _signature(key: bytes, webhook_id: str, timestamp: str, body: bytes) -> str:
    digest = hmac.digest(key, f"{webhook_id}.{timestamp}.".encode() + body, hashlib.sha256)
    return f"v1,{base64.b64encode(digest).decode()}"

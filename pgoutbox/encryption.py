"""Encrypted payloads: their form in the row, and their decryption by a worker. Pure: no I/O.

The row holds an object with one member, whose name is reserved at the top of payloads. Encrypting the same text twice
gives different results. So a message with a dedupe key also holds keyed digests of its payload, by which
`pgoutbox.enqueue` tells a repetition from a conflict. Errors never contain a key, a payload or its encrypted text.
"""

from __future__ import annotations

import base64
import hmac
import json
from typing import Final, Literal, NamedTuple, cast

from pydantic import JsonValue, SecretStr

from pgoutbox.errors import require_extra
from pgoutbox.message import Permanent, Transient

SEALED: Final = "pgoutbox.encrypted"
_DIGEST_PURPOSE: Final = b"pgoutbox: digest of a payload"


class Identity(NamedTuple):
    """The message that a sealed text belongs to.

    It is encrypted together with the text. So a token that was copied into a message of another topic or destination
    is refused. The messages of a fan-out share one payload and one content, which are bound to the topic alone.
    """

    kind: Literal["payload", "fan-out", "content"]
    topic: str
    destination: str | None = None
    coalesce_key: str | None = None
    ordering_key: str | None = None


class Keyring:
    """The keys of PGOUTBOX_ENCRYPTION_KEYS: the first key encrypts, all keys decrypt.

    Raises `MissingExtraError` if the package cryptography is not installed.
    """

    def __init__(self, keys: SecretStr) -> None:
        require_extra("cryptography.fernet", "an encrypted payload", "crypto")
        from cryptography.fernet import Fernet, MultiFernet

        texts = [text.strip() for text in keys.get_secret_value().split(",")]
        self._fernet = MultiFernet([Fernet(text) for text in texts])
        self._digest_keys = [hmac.digest(base64.urlsafe_b64decode(text), _DIGEST_PURPOSE, "sha256") for text in texts]

    def __repr__(self) -> str:
        return f"Keyring({len(self._digest_keys)} keys)"

    def seal(self, text: str, identity: Identity, *, dedupe_key: str | None) -> str:
        """Return the JSON text to store for a payload's JSON text. Only messages of this identity can open it.

        With a dedupe key it holds a digest by each key, so that a repetition is recognized during a key rotation. The
        digest covers topic and dedupe key, so messages with different keys cannot be compared.
        """
        plain = f"{json.dumps(identity)}\n{text}"  # JSON text without indentation contains no line feed.
        sealed: dict[str, object] = {"token": self._fernet.encrypt(plain.encode()).decode()}
        if dedupe_key is not None:
            content = json.dumps([identity.topic, dedupe_key, json.loads(text)], sort_keys=True).encode()
            sealed["digests"] = [hmac.digest(key, content, "sha256").hex() for key in self._digest_keys]
        return json.dumps({SEALED: sealed}, separators=(",", ":"))

    def open(self, token: str) -> tuple[Identity, str] | None:
        """Return the sealed identity and JSON text; None if no key fits, or if `seal` did not make the token."""
        from cryptography.fernet import InvalidToken

        try:
            identity, _, text = self._fernet.decrypt(token.encode()).decode().partition("\n")
            return Identity._make(json.loads(identity)), text
        except (InvalidToken, ValueError, TypeError):
            return None


def keyring_of(keys: SecretStr | None) -> Keyring | None:
    """Return the keyring of the setting `encryption_keys`, None if it is not set."""
    return None if keys is None else Keyring(keys)


def is_sealed(payload: object) -> bool:
    """Whether the payload has the form of a payload sealed by `Keyring.seal`."""
    return type(payload) is dict and SEALED in payload


def unseal(payload: JsonValue, keyring: Keyring | None, identity: Identity) -> str:
    """Return the JSON text of a payload, or content, that was sealed for a message of this identity.

    Raises `Transient` without the right key: an operator can add it, and a retry then delivers the message. Raises
    `Permanent` if it was sealed for another message.
    """
    sealed_for, text = decrypted(payload, keyring)
    what = identity.kind
    if sealed_for.kind == "fan-out" and identity.kind == "payload":
        identity = identity._replace(kind="fan-out", destination=None)
    for name, sealed, actual in zip(Identity._fields, sealed_for, identity, strict=True):
        if sealed != actual:
            raise Permanent(f"the {what} was encrypted for another message: its {name} differs")
    return text


def decrypted(payload: JsonValue, keyring: Keyring | None) -> tuple[Identity, str]:
    """Return the sealed identity and JSON text, of any message. Raises `Transient` without the right key."""
    if keyring is None:
        raise Transient("the payload is encrypted and this worker has no keys: set PGOUTBOX_ENCRYPTION_KEYS")
    sealed = cast("dict[str, JsonValue]", payload)[SEALED]
    token = sealed.get("token") if isinstance(sealed, dict) else None
    opened = keyring.open(token) if isinstance(token, str) else None
    if opened is None:
        raise Transient("no key of PGOUTBOX_ENCRYPTION_KEYS opens the payload: add the one that it was encrypted with")
    return opened

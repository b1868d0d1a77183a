"""Encrypted payloads: what a topic's payload becomes in its row, and how a worker reads it again. Pure: no I/O.

The row holds an object with one member, whose name no payload of a user may have at its top. An encrypted text is
another one each time, so a message with a dedupe key carries keyed digests of what it says, too, by which
`pgoutbox.enqueue` tells a repetition from a mistake. Errors never hold a key, a payload or its encrypted text.
"""

from __future__ import annotations

import base64
import hmac
import json
from typing import Final, Literal, NamedTuple, cast

from pydantic import JsonValue, SecretStr

from pgoutbox.errors import MissingExtraError
from pgoutbox.message import Permanent, Transient

SEALED: Final = "pgoutbox.encrypted"
_DIGEST_PURPOSE: Final = b"pgoutbox: digest of a payload"


class Identity(NamedTuple):
    """Which message a sealed text belongs to.

    It stands encrypted before the text, so that a token which somebody copies into a message of another topic or for
    another destination opens to nothing. The messages of a fan-out share one payload and one content, and these are
    bound to the topic alone.
    """

    kind: Literal["payload", "fan-out", "content"]
    topic: str
    destination: str | None = None
    coalesce_key: str | None = None
    ordering_key: str | None = None


class Keyring:
    """The keys of PGOUTBOX_ENCRYPTION_KEYS: the first one encrypts, each of them decrypts.

    Raises `MissingExtraError` without the package cryptography.
    """

    def __init__(self, keys: SecretStr) -> None:
        try:
            from cryptography.fernet import Fernet, MultiFernet
        except ImportError:
            raise MissingExtraError("an encrypted payload", "crypto") from None
        texts = [text.strip() for text in keys.get_secret_value().split(",")]
        self._fernet = MultiFernet([Fernet(text) for text in texts])
        self._digest_keys = [hmac.digest(base64.urlsafe_b64decode(text), _DIGEST_PURPOSE, "sha256") for text in texts]

    def __repr__(self) -> str:
        return f"Keyring({len(self._digest_keys)} keys)"

    def seal(self, text: str, identity: Identity, *, dedupe_key: str | None) -> str:
        """The JSON text to store for a payload's JSON text, which opens in messages of this identity only.

        With a dedupe key it holds a digest under each key, so that a repetition is known as one while keys are being
        exchanged. The digest covers topic and dedupe key: whether two messages say the same cannot be read from it.
        """
        plain = f"{json.dumps(identity)}\n{text}"  # JSON has no line feed of its own.
        sealed: dict[str, object] = {"token": self._fernet.encrypt(plain.encode()).decode()}
        if dedupe_key is not None:
            content = json.dumps([identity.topic, dedupe_key, json.loads(text)], sort_keys=True).encode()
            sealed["digests"] = [hmac.digest(key, content, "sha256").hex() for key in self._digest_keys]
        return json.dumps({SEALED: sealed}, separators=(",", ":"))

    def open(self, token: str) -> tuple[Identity, str] | None:
        """The identity and the JSON text of what was sealed; None if no key fits, or `seal` did not make the token."""
        from cryptography.fernet import InvalidToken

        try:
            identity, _, text = self._fernet.decrypt(token.encode()).decode().partition("\n")
            return Identity._make(json.loads(identity)), text
        except (InvalidToken, ValueError, TypeError):
            return None


def keyring_of(keys: SecretStr | None) -> Keyring | None:
    """The keyring of the setting `encryption_keys`, None where it is not set."""
    return None if keys is None else Keyring(keys)


def is_sealed(payload: object) -> bool:
    """Whether this is what `Keyring.seal` makes of a payload, or claims to be."""
    return type(payload) is dict and SEALED in payload


def unseal(payload: JsonValue, keyring: Keyring | None, identity: Identity) -> str:
    """The JSON text of a payload, or content, that was sealed for a message of this identity.

    Raises `Transient` without the right key: an operator can add it, and the message goes out without further help.
    Raises `Permanent` for what was sealed for another message.
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
    """What a sealed payload holds, whatever message it was sealed for. Raises `Transient` without the right key."""
    if keyring is None:
        raise Transient("the payload is encrypted and this worker has no keys: set PGOUTBOX_ENCRYPTION_KEYS")
    sealed = cast("dict[str, JsonValue]", payload)[SEALED]
    token = sealed.get("token") if isinstance(sealed, dict) else None
    opened = keyring.open(token) if isinstance(token, str) else None
    if opened is None:
        raise Transient("no key of PGOUTBOX_ENCRYPTION_KEYS opens the payload: add the one that it was encrypted with")
    return opened

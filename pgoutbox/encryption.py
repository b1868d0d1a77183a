"""Encrypted payloads: what a topic's payload becomes in its row, and how a worker reads it again. Pure: no I/O.

The row holds an object with one member, whose name no payload of a user may have at its top. An encrypted text is
another one each time, so a message with a dedupe key carries keyed digests of what it says, too, by which
`pgoutbox.enqueue` tells a repetition from a mistake. Errors never hold a key, a payload or its encrypted text.
"""

from __future__ import annotations

import base64
import hmac
import json
from typing import Final, cast

from pydantic import JsonValue, SecretStr

from pgoutbox.errors import MissingExtraError
from pgoutbox.message import Transient

SEALED: Final = "pgoutbox.encrypted"
_DIGEST_PURPOSE: Final = b"pgoutbox: digest of a payload"


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

    def seal(self, text: str, *, topic: str, dedupe_key: str | None) -> str:
        """The JSON text to store for a payload's JSON text.

        With a dedupe key it holds a digest under each key, so that a repetition is known as one while keys are being
        exchanged. The digest covers topic and dedupe key: whether two messages say the same cannot be read from it.
        """
        sealed: dict[str, object] = {"token": self._fernet.encrypt(text.encode()).decode()}
        if dedupe_key is not None:
            content = json.dumps([topic, dedupe_key, json.loads(text)], sort_keys=True).encode()
            sealed["digests"] = [hmac.digest(key, content, "sha256").hex() for key in self._digest_keys]
        return json.dumps({SEALED: sealed}, separators=(",", ":"))

    def open(self, token: str) -> str | None:
        """The payload's JSON text; None if no key fits, or the token was changed."""
        from cryptography.fernet import InvalidToken

        try:
            return self._fernet.decrypt(token.encode()).decode()
        except InvalidToken:
            return None


def keyring_of(keys: SecretStr | None) -> Keyring | None:
    """The keyring of the setting `encryption_keys`, None where it is not set."""
    return None if keys is None else Keyring(keys)


def is_sealed(payload: object) -> bool:
    """Whether this is what `Keyring.seal` makes of a payload, or claims to be."""
    return type(payload) is dict and SEALED in payload


def unseal(payload: JsonValue, keyring: Keyring | None) -> str:
    """The JSON text of a sealed payload.

    Raises `Transient` without the right key: an operator can add it, and the message goes out without further help.
    """
    if keyring is None:
        raise Transient("the payload is encrypted and this worker has no keys: set PGOUTBOX_ENCRYPTION_KEYS")
    sealed = cast("dict[str, JsonValue]", payload)[SEALED]
    token = sealed.get("token") if isinstance(sealed, dict) else None
    text = keyring.open(token) if isinstance(token, str) else None
    if text is None:
        raise Transient("no key of PGOUTBOX_ENCRYPTION_KEYS opens the payload: add the one that it was encrypted with")
    return text

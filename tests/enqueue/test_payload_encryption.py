"""Tests the encryption of payloads before any SQL: nothing is readable, and nothing is confused."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from cryptography.fernet import Fernet
from pydantic import JsonValue, SecretStr
from typing_extensions import Unpack

from pgoutbox.encryption import SEALED, Identity, Keyring, is_sealed, unseal
from pgoutbox.enqueue.validation import Draft, Route, prepare
from pgoutbox.errors import ArgumentError, ConfigurationError, MissingExtraError
from pgoutbox.message import Permanent, Transient
from pgoutbox.options import MessageOptions
from pgoutbox.topics import NewMessage, Topic

CANARY = "c4n4ry-s3cret"
OLD, NEW = Fernet.generate_key().decode(), Fernet.generate_key().decode()
MAIL = Identity("payload", "mail")


def keyring(*keys: str) -> Keyring:
    return Keyring(SecretStr(" , ".join(keys)))


def draft_of(
    payload: object,
    *,
    keys: Keyring | None = None,
    max_payload_bytes: int = 1_000,
    encrypted: bool = True,
    **options: Unpack[MessageOptions],
) -> Draft:
    return prepare(
        NewMessage("mail", payload, **options),
        Route(Topic("mail", encrypted=encrypted), None, max_payload_bytes, keyring=keys),
    )


def sealed_payload(payload: object, *keys: str, dedupe_key: str | None = None) -> dict[str, Any]:
    sealed: dict[str, Any] = json.loads(draft_of(payload, keys=keyring(*keys), dedupe_key=dedupe_key).payload)
    return sealed


@pytest.mark.parametrize("payload", [None, "text", 7, [1, {"a": None}], {"to": "ann", "n": 1.5}, {"käse": "\u2028"}])
def test_a_decrypted_payload_equals_the_original(payload: JsonValue) -> None:
    sealed = sealed_payload(payload, OLD)
    assert is_sealed(sealed)
    assert json.loads(unseal(sealed, keyring(OLD), MAIL)) == payload


@pytest.mark.parametrize(
    ("actual", "field"),
    [
        (Identity("payload", "public.hook", "mailto:a@example.org", "c"), "topic"),
        (Identity("payload", "mail", "https://attacker.example/", "c"), "destination"),
        (Identity("payload", "mail", None, "c"), "destination"),
        (Identity("payload", "mail", "mailto:a@example.org", "another"), "coalesce_key"),
        (Identity("payload", "mail", "mailto:a@example.org", "c", "o"), "ordering_key"),
        (Identity("content", "mail"), "kind"),
    ],
)
def test_a_token_copied_into_another_message_fails_permanently(actual: Identity, field: str) -> None:
    draft = draft_of(CANARY, keys=keyring(OLD), destination="mailto:a@example.org", coalesce_key="c")
    sealed = json.loads(draft.payload)
    assert unseal(sealed, keyring(OLD), Identity("payload", "mail", "mailto:a@example.org", "c")) == f'"{CANARY}"'
    with pytest.raises(Permanent) as caught:
        unseal(sealed, keyring(OLD), actual)
    assert caught.value.error == f"the {actual.kind} was encrypted for another message: its {field} differs"


def test_the_draft_contains_nothing_readable_of_the_payload() -> None:
    assert CANARY not in repr(draft_of({"password": CANARY}, keys=keyring(OLD), dedupe_key="k"))


def test_the_first_key_encrypts_and_every_key_decrypts() -> None:
    sealed = sealed_payload(CANARY, NEW, OLD)
    assert unseal(sealed, keyring(NEW), MAIL) == f'"{CANARY}"'
    assert unseal(sealed, keyring(OLD, NEW), MAIL) == f'"{CANARY}"'
    with pytest.raises(Transient):
        unseal(sealed, keyring(OLD), MAIL)


@pytest.mark.parametrize(
    ("keys", "named"),
    [(None, "set PGOUTBOX_ENCRYPTION_KEYS"), (keyring(NEW), "add the one that it was encrypted with")],
    ids=["without a key", "with another key"],
)
def test_a_missing_key_is_transient_and_shows_neither_text_nor_key(keys: Keyring | None, named: str) -> None:
    sealed = sealed_payload(CANARY, OLD)
    with pytest.raises(Transient) as caught:
        unseal(sealed, keys, MAIL)
    error = caught.value
    assert named in error.error
    assert error.__cause__ is None
    assert not any(secret in error.error for secret in (CANARY, OLD, NEW, sealed[SEALED]["token"]))


@pytest.mark.parametrize("sealed", [{SEALED: None}, {SEALED: {}}, {SEALED: {"token": 7}}, {SEALED: {"token": "käse"}}])
def test_a_payload_that_only_looks_encrypted_is_transient_too(sealed: JsonValue) -> None:
    with pytest.raises(Transient):
        unseal(sealed, keyring(OLD), MAIL)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.fernet", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'pgoutbox\[crypto\]'"):
        keyring(OLD)


def test_a_keyring_does_not_show_its_keys() -> None:
    assert OLD not in repr(keyring(OLD))


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_payload_that_looks_encrypted_is_refused(encrypted: bool) -> None:
    with pytest.raises(ArgumentError) as caught:
        draft_of({SEALED: "x", "to": "ann"}, keys=keyring(OLD), encrypted=encrypted)
    assert caught.value.field == f'payload["{SEALED}"]'


@pytest.mark.parametrize("payload", [{"a": {SEALED: 1}}, SEALED, [{SEALED: 1}], {"a": SEALED}])
def test_the_reserved_name_is_allowed_below_the_top_level(payload: JsonValue) -> None:
    assert json.loads(draft_of(payload, encrypted=False).payload) == payload


def test_an_encrypted_topic_without_keys_refuses_to_enqueue() -> None:
    with pytest.raises(ConfigurationError, match="'mail' is encrypted: set PGOUTBOX_ENCRYPTION_KEYS"):
        draft_of(CANARY)


def test_the_size_limit_applies_to_the_payload_and_its_encrypted_form() -> None:
    with pytest.raises(ArgumentError, match="has 1002 bytes as JSON"):
        draft_of("x" * 1_000, keys=keyring(OLD))
    with pytest.raises(ArgumentError, match=r"has \d+ bytes encrypted, the limit is 1000"):
        draft_of("x" * 900, keys=keyring(OLD))


def digests(payload: object, *keys: str, dedupe_key: str = "k") -> list[str]:
    found: list[str] = sealed_payload(payload, *keys, dedupe_key=dedupe_key)[SEALED]["digests"]
    return found


def test_a_digest_is_the_same_for_the_same_payload_and_only_for_it() -> None:
    assert digests({"a": 1, "b": 2}, OLD) == digests({"b": 2, "a": 1}, OLD)
    assert digests({"a": 1}, OLD) != digests({"a": 2}, OLD)


def test_digests_do_not_reveal_equal_payloads_of_different_messages() -> None:
    assert digests(CANARY, OLD) != digests(CANARY, OLD, dedupe_key="another")
    assert "digests" not in sealed_payload(CANARY, OLD)[SEALED]


def test_there_is_a_digest_for_each_key() -> None:
    assert digests(CANARY, NEW, OLD) == digests(CANARY, NEW) + digests(CANARY, OLD)

"""Tests Standard Webhooks signatures: signing, verification, and secrets."""

from __future__ import annotations

import base64
from datetime import UTC, datetime

import pytest
import standardwebhooks
from pydantic import SecretStr

from pgoutbox.errors import ConfigurationError, SignatureError
from pgoutbox.webhooks import Secret, key_of, make_secret, sign, verify

# The test vector that the project publishes with its libraries.
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
WEBHOOK_ID = "msg_p5jXN8AQM9LWM0D4loKWxJek"
TIMESTAMP = 1_614_265_330
BODY = b'{"test": 2432232314}'
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
HEADERS = {"webhook-id": WEBHOOK_ID, "webhook-timestamp": str(TIMESTAMP), "webhook-signature": SIGNATURE}
OTHER = "whsec_" + base64.b64encode(b"o" * 32).decode()


def refusal(**changes: str | None) -> str:
    headers = {
        name: value for name, value in (HEADERS | {k.replace("_", "-"): v for k, v in changes.items()}).items() if value
    }
    with pytest.raises(SignatureError) as caught:
        verify(BODY, headers, SECRET, now=TIMESTAMP)
    return str(caught.value)


def test_the_published_vector_is_signed_and_verified() -> None:
    assert sign([key_of(SECRET)], WEBHOOK_ID, TIMESTAMP, BODY) == SIGNATURE
    assert verify(BODY, HEADERS, SECRET, now=TIMESTAMP) == WEBHOOK_ID


def test_signatures_of_the_reference_library_are_accepted() -> None:
    signature = standardwebhooks.Webhook(OTHER).sign("a-1", datetime.fromtimestamp(TIMESTAMP, UTC), "{}")
    headers = {"Webhook-Id": "a-1", "WEBHOOK-TIMESTAMP": str(TIMESTAMP), "webhook-signature": signature}
    assert verify(b"{}", headers, SecretStr(OTHER), now=TIMESTAMP) == "a-1"


def test_during_a_rotation_both_secrets_work_on_either_side() -> None:
    both = sign([key_of(OTHER), key_of(SECRET)], WEBHOOK_ID, TIMESTAMP, BODY)
    receivers: list[Secret | list[Secret]] = [SECRET, OTHER, [SECRET, OTHER], [make_secret(), SecretStr(SECRET)]]
    for receiver in receivers:
        assert verify(BODY, HEADERS | {"webhook-signature": both}, receiver, now=TIMESTAMP) == WEBHOOK_ID
    assert verify(BODY, HEADERS, [OTHER, SECRET], now=TIMESTAMP) == WEBHOOK_ID


@pytest.mark.parametrize(
    ("header", "value", "error"),
    [
        ("webhook_id", None, "webhook-id: is missing"),
        ("webhook_timestamp", None, "webhook-timestamp: is missing"),
        ("webhook_signature", None, "webhook-signature: is missing"),
        ("webhook_id", "another", "webhook-signature: no signature is valid"),
        ("webhook_id", "\udc80", "webhook-id: is not ASCII"),
        ("webhook_timestamp", str(TIMESTAMP + 1), "webhook-signature: no signature is valid"),
        ("webhook_timestamp", f"{TIMESTAMP}.0", "webhook-timestamp: is not a number of seconds"),
        ("webhook_timestamp", "nan", "webhook-timestamp: is not a number of seconds"),
        ("webhook_timestamp", "-1", "webhook-timestamp: is not a number of seconds"),
        ("webhook_timestamp", "9" * 400, "webhook-timestamp: is not a number of seconds"),
        ("webhook_timestamp", str(TIMESTAMP - 301), "webhook-timestamp: is more than 300 s old"),
        ("webhook_timestamp", str(TIMESTAMP + 301), "webhook-timestamp: is more than 300 s ahead of the clock"),
        ("webhook_signature", SIGNATURE.replace("v1,", "v2,"), "webhook-signature: no signature is valid"),
        ("webhook_signature", SIGNATURE.removeprefix("v1,"), "webhook-signature: no signature is valid"),
        ("webhook_signature", SIGNATURE[:-2], "webhook-signature: no signature is valid"),
        ("webhook_signature", "v1, ,v1 v1a,x v1", "webhook-signature: no signature is valid"),
        ("webhook_signature", "é", "webhook-signature: is not ASCII"),
    ],
)
def test_an_invalid_request_is_refused_by_the_name_of_its_header(header: str, value: str | None, error: str) -> None:
    assert refusal(**{header: value}) == error


def test_a_changed_body_and_another_secret_are_refused() -> None:
    for body, secret in ((BODY + b" ", SECRET), (b"", SECRET), (BODY, OTHER)):
        with pytest.raises(SignatureError, match="no signature is valid"):
            verify(body, HEADERS, secret, now=TIMESTAMP)


def test_a_request_up_to_five_minutes_old_is_accepted() -> None:
    for now in (TIMESTAMP - 300, TIMESTAMP + 300):
        assert verify(BODY, HEADERS, SECRET, now=now) == WEBHOOK_ID
    assert verify(BODY, HEADERS, SECRET, now=TIMESTAMP + 900, tolerance_seconds=900) == WEBHOOK_ID
    with pytest.raises(SignatureError, match="is more than 300 s old"):
        verify(BODY, HEADERS, SECRET)


@pytest.mark.parametrize(
    ("secret", "error"),
    [
        ("", "must begin with whsec_"),
        ("canary", "must begin with whsec_"),
        ("whsec_", "holds 0 bytes; 24 to 64 are accepted"),
        ("whsec_canary!", "is not base64 after whsec_"),
        ("whsec_can_ary-", "is not base64 after whsec_"),
        ("whsec_canaryé", "is not base64 after whsec_"),
        ("whsec_" + base64.b64encode(b"c" * 23).decode(), "holds 23 bytes; 24 to 64 are accepted"),
        ("whsec_" + base64.b64encode(b"c" * 65).decode(), "holds 65 bytes; 24 to 64 are accepted"),
        (7, "must be text, not int"),
    ],
)
def test_an_unusable_secret_is_refused_and_never_quoted(secret: Secret, error: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        verify(BODY, HEADERS, [SECRET, secret])
    assert str(caught.value) == f"secrets[1]: {error}"


def test_a_missing_secret_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="secrets: none is given"):
        verify(BODY, HEADERS, [])


def test_a_new_secret_is_random_and_usable() -> None:
    first, second = make_secret(), make_secret()
    assert first != second
    assert len(key_of(first)) == 32


def test_padding_of_base64_is_optional() -> None:
    assert key_of(OTHER.rstrip("=")) == key_of(OTHER)

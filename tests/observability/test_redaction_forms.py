"""Tests of the secrets in texts: Python and the views hide the same, and ordinary errors stay readable."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pgoutbox.redaction import REDACTED, REDACTED_NAMES, redact_text

if TYPE_CHECKING:
    import psycopg

# The secret of each text. It looks like a secret to no form: only its surroundings give it away.
S = "hunter2key"

NAMED = [
    *(f"{name}: {S}" for name in REDACTED_NAMES),
    *(f"{name.replace('_', '-').upper()}={S}" for name in REDACTED_NAMES),
    *(f"{name.replace('_', ' ')}: {S}" for name in REDACTED_NAMES),
    *(f"{word} = {S}" for word in ("pass", "pwd", "jwt", "sig", "signature", "otp", "totp", "pin", "cvv", "session")),
    *(f"{word}: {S}" for word in ("pass", "Pwd", "OTP", "user_pin", "smtpPass", "session", "x-signature")),
    f"X-Api-Key: {S}",
    f"client_secret: {S}",
    f"AccountName=ann;AccountKey={S}==;EndpointSuffix=core.example.net",
    f"SharedAccessKey={S}",
    f"csrf_token: {S}",
    f"csrfmiddlewaretoken={S}",
    f"PHPSESSID={S}; path=/",
    f"JSESSIONID: {S}",
    f"db:\n  user: ann\n  password: {S}\n  port: 5432",
    f"token:\n  {S}",
    f"tokens:\n  - {S}",
    f"secret: |\n  one\n  {S}\nport: 7",
    f'{{\n  "password":\n    "{S}"\n}}',
    f'{{"password": "a\\"{S}", "to": "ann"}}',
    f"{{'password': 'it\\'s {S}', 'to': 'ann'}}",
    f"password='it''s {S}'",
    f"password='''{S}'''",
    f'password="a"{S}"',
    f'{{\\"password\\": \\"{S}\\", \\"to\\": \\"ann\\"}}',
    f"password={{'a': {{'b': '{S}'}}}}, to=ann",
    f"password=['x', {S!r}], to=ann",
    f'"password": [\n  "x",\n  "{S}"\n]',
    f'"credentials": {{\n  "a": ["x"],\n  "b": "{S}"\n}}',
    f"token=Token('a', value='{S}')",
    f"token=Token(Inner('a'), '{S}')",
    f"token=a([{{(((('{S}'))))}}])",
    f"DETAIL: Key (token)=({S}) already exists.",
    f"data['password'] = '{S}'",
    f"data['password'] == {S}",
    f"password=abc,{S}",
    f"password=abc {S}",
    f"password=abc; {S}",
    f"password=abc&{S}",
    f"password: abc def {S}",
    f"password=a(b {S}",
    f"password=a'b{S}",
    f"password=,{S}",
    f"password=){S}",
    f"password=\\{S}",
    f"password => {S}",
    f"password={S}",
    f"password = 'cut off {S}",
    f"password: ['cut off', '{S}",
    f"password={{'a': 'b'}}{S}",
    f"password:{S}",
    f"password\t:\t{S}",
    f"user[password]={S}&x=1",
    f"user%5Bpassword%5D={S}&x=1",
    f"https://example.org/a?b=1\\u0026access_token={S}",
    f'curl -H "X-Api-Key: {S}" https://example.org',
    f"curl -u ann:{S} https://example.org",
    f'curl -H "Authorization: Digest username=\\"ann\\", response={S}" https://example.org',
    f"run --token {S} --verbose",
    f"run --api-key '{S} and more' --verbose",
    f"run --db-password={S}",
    f"run --otp {S}",
    f"1 validation error\n  Input should be a number [type=x, input_value='{S}', input_type=str]",
    f"token: not{S}",
    f"password: is{S}",
    f"password: must={S}",
    f"a_token_of_{'x' * 50}: {S}",
    f"secret: data {S}",
    f"api_key: Token {S}",
    f"password -> {S}",
    f"<soap:password>{S}</soap:password>",
    f"Headers([('x-api-key', '{S}'), ('accept', '*/*')])",
    f"[(b'set-cookie', b'sid={S}; Path=/')]",
    f'["authorization", "Bearer {S}"]',
    f"body: password%3D{S}%26to%3Dann",
    f"body: %7B%22password%22%3A%22{S}%22%7D",
    f"body: password%3A%20{S}",
]
HEADERS = [
    f"Authorization: Bearer {S}",
    f"authorization=Bearer {S}, once",
    f"Proxy-Authorization: Basic {S}",
    f'Authorization: Digest username="ann", response="{S}", qop=auth',
    f"Cookie: a=1; sid={S}",
    f"Set-Cookie: sid={S}; Path=/; HttpOnly",
    f"'Cookie': 'sid={S}'",
    f"header was Bearer {S}",
    f"bearer {S}.{S}",
    "Bearer hunterkey",
    f"Basic {S}=",
    f"Digest {S}",
    f"Authorization: Token {S}",
    f"authorization: token {S}",
    f"Bearer: {S}",
    f"bearer '{S}'",
    f"sent Bearer%20{S}",
    "AUTH PLAIN AGFubgBodW50ZXIya2V5",
    "auth plain AGFubgBodW50ZXIya2V5",
    "a1 AUTHENTICATE PLAIN AGFubgBodW50ZXIya2V5",
    "AUTH LOGIN aHVudGVyMmtleQ==",
]
URLS = [
    f"https://ann:{S}@example.org/path",
    f"https://{S}@example.org/path",
    f"postgresql://ann:{S}@db/app and smtp://:{S}@mail",
    f"amqp://user:pa/{S}@host",
    f"amqp://user:p@a/{S}@host",
    f"amqp://user:pa {S}@host",
    f"redis://:p#{S}@host",
    f"redis://{S}@host",
    f"https://user:pa?{S}@host/",
    f"https://user:pa {S}@host/",
    f"HTTPS://ANN:{S}@EXAMPLE.ORG",
    f'connect to "postgresql://ann:{S}@db/app" failed',
    f"https://example.org/?page=1&access_token={S}&x=2",
    f"https://example.org/maps?key={S}",
    f"https://example.org/callback?code={S}&page=1",
    f"https://example.org/a?X-Amz-Signature={S}",
    f"https://example.org/a?sv=1&sig={S}&page=2",
    f'GET "/login?to=ann&password={S}" failed',
    f"https://example.org/reset/{S}",
    f"https://example.org/accounts/password-reset/MQ/{S}/",
    f"https://example.org/verify-email/{S}?next=1",
    f"https://example.org/invite/{S}.{S}",
    "https://example.org/activate/AbCdEfGhIjKlMnOpQrStUv",
    f"GET /magic-link/{S} HTTP/1.1",
    f"https://hooks.slack.com/services/T0000/B0000/{S}",
    f"https://discord.com/api/webhooks/123/{S}",
    f"https://api.telegram.org/bot123:{S}/sendMessage",
    f"https://club.webhook.office.com/webhookb2/{S}/IncomingWebhook/1",
    f"https://hooks.zapier.com/hooks/catch/123/{S}/",
    f"https://example.org/set-password/{S}",
    f"https://example.org/sign-in?next=%2Freset%3Ftoken%3D{S}",
]
# Secrets without a name; none of their characters may stay, so that they are compared as a whole.
BARE = [
    "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    "github_pat_11ABCDEFG0abcdefghijkl_abcdefghij",
    "glpat-abcDEF123456789012345",
    "xoxb-123456789012-abcDEF123",
    "xapp-1-A123-456-abcdef",
    "sk_live_4eC39HqLyjWDarjtT1zdp7dc",
    "rk_test_4eC39HqLyjWDarjtT1zdp7dc",
    "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
    "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",
    "sk-proj-abcdefghijklmnop1234567890",
    "npm_abcdefghijklmnopqrstuvwxyz0123456789",
    "pypi-AgEIcHlwaS5vcmcCJDU3",
    "SUAIBDPBAUTWCWBKIO6XHQNINK5FWJW4OHLXC3HQ2KFE4PEJUA44CNHTC4",
    "AKIAIOSFODNN7EXAMPLE",
    "AIzaSyA-1234567890-1234567890-1234567890",
    "ya29.a0AfH6SMBabcdefghij",
    "eyJhbGciOiJub25lIn0.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    "eyJhbGciOiJub25lIn0.eyJzdWIiOiIxIn0.",
    "gAAAAABh0aBcDeFgHiJkLmNoPqRsTuVwXyZ0123456789abcdefghij==",
    "key-3ax6xnjp29jd6fds4gc373sgvjxteol0".replace("x", "a").replace("n", "b").replace("j", "c").replace("p", "d")
    .replace("s", "e").replace("g", "f").replace("v", "1").replace("t", "2").replace("o", "3").replace("l", "4"),
    "123456789:AAHdqTcvCH1vGWJxfSeofSAs0K5PALDsaw",
    "bot123456789:AAHdqTcvCH1vGWJxfSeofSAs0K5PALDsaw",
    "xkeysib-0123456789abcdef0123456789abcdef-aBcDeFgHiJkLmNoP",
    "re_123456789_AbCdEfGhIjKlMnOpQrStUvWx",
    "hvs.CAESIAbCdEfGhIjKlMnOpQrStUv",
    "SK0123456789abcdef0123456789abcdef",
    "4111 1111 1111 1111",
    "4111-1111-1111-1111",
    "5500000000000004",
    "3400 000000 00009",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nhunter2\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\nMIIE\n-----END PGP PRIVATE KEY BLOCK-----",
    "-----BEGIN PRIVATE KEY-----\\nMIIEhunter2",
]  # fmt: skip
SPOKEN = [
    "the password is hunter2key!",
    "passwd hunter2key",
    "PWD\thunter2key",
    f"your OTP is {S}",
    f"the verification code is {S}",
    f"verification code: {S}",
    f"the password was {S}",
    f"invalid token {S}",
    f"no such API key {S}",
]
HIDDEN = [*NAMED, *HEADERS, *URLS, *SPOKEN, *(f"refused {secret}" for secret in BARE)]

READABLE = [
    "",
    "no such mailbox",
    "550 5.1.1 <ann@example.org>: Recipient address rejected: User unknown in virtual mailbox table",
    "550 5.7.1 <ann@example.org>: Relay access denied",
    "535 5.7.8 Error: authentication failed: UGFzc3dvcmQ6",
    "535 5.7.8 Error: basic authentication failed",
    "535 5.7.8 Username and Password not accepted. For more information, go to https://support.example.com/mail/?p=Bad",
    "250-AUTH PLAIN LOGIN XOAUTH2",
    "AUTH PLAIN rejected",
    "AUTH PLAIN Rejected by policy",
    "AUTH LOGIN failed: 535",
    "key: must match [a-z][a-z0-9_.-]{0,62}, got 'Mail Welcome'",
    "coalesce_key: must be a text, got 7",
    "ordering_key=orders/7, dedupe_key=welcome:7",
    "payload.token: Field required",
    "payload.password: Input should be a valid string",
    "token: must not be empty",
    "password: is too short",
    "Invalid token: Signature has expired",
    "invalid_token: The access token expired",
    "/run/secrets/db_password: No such file or directory",
    "/run/secrets/token: Permission denied: cannot read it",
    "argument --token: expected one argument".replace("expected", "missing"),
    "the following arguments are required: --token, --api-key",
    "--password is required",
    "the token has expired",
    "token expired",
    "Authorization: token is missing",
    "unexpected token 7 of 9",
    "give a <token> here, not <class 'app.Token'>: it has no text",
    "re_raise_7 and hvs.example and SK1",
    "pin 3 is high",
    "session closed",
    "SSH session: closed by the server",
    "bearer token expired",
    'WWW-Authenticate: Bearer realm="x", error="invalid_token"',
    "Bearer authentication is required",
    "digest mismatch: got 7 bytes",
    "PGOUTBOX_SMTP_PASSWORD is not set",
    'password authentication failed for user "ann"',
    "to=ann, page=2",
    "mailto:ann@example.org",
    "tel:+15551234567",
    "https://example.org/a@b?x=1",
    "https://example.org:8443/users/ann@example.org",
    "https://example.org/login?next=/orders/7",
    "https://example.org/verify/7",
    "https://example.org/reset/done",
    "https://example.org/orders/550e8400-e29b-41d4-a716-446655440000",
    "cannot reach nats://example.org:4222, asked ann@example.org",
    "cannot reach https://example.org:443 for ann@example.org",
    "postgresql://db:5432/app?application_name=ann@host",
    "connection refused: 10.0.0.7:25",
    "[2001:db8::7]:25: timed out after 3 s",
    "3 passengers=3, compass=4, design=5, assignature=6",
    "Key (id)=(7) already exists",
    'duplicate key value violates unique constraint "users_email_key"\nDETAIL:  Key (email)=(ann@example.org) exists.',
    "message 9007199254740993 of 2026-11-24T07:51:43.123456+00:00",
    "at 1700000000000 ms and 1700000000000000 us",
    "order 7f3a9b2c1d, trace 4bf92f3577b34da6a3ce929d0e0e4736",
    "SELECT token::text FROM reset",
    'Traceback (most recent call last):\n  File "/app/login/reset2.py", line 7, in f\n    raise Bad(7)\nBad: 7\n',
    'File "/usr/lib/python3.11/site-packages/token/verify_2/base64url.py", line 7',
    "eyJ is how a JSON Web Token begins",
    "SG.1 and sk-1 and key-value and ghp_ are prefixes",
    "spf=fail smtp.mailfrom=example.org; dkim=none",
    "cut -u 7:8",
    "status: 503, retry-after: 7",
    "(redacted)",
]


PARTLY = {
    "{'password': ['x', {'a': ('y', [])}], 'to': 'ann'}": "{'password': (redacted), 'to': 'ann'}",
    'token = sign(load(user["id"]), key=(1, [2]))\nValueError: x': "token = (redacted)\nValueError: x",
    'raise KeyError(f"password={secret}")\nKeyError: 7': 'raise KeyError(f"password=(redacted)")\nKeyError: 7',
    "host=db user=ann password=x port=5432": "host=db user=ann password=(redacted) port=5432",
    "Uid=ann;Pwd=x;Database=app": "Uid=ann;Pwd=(redacted);Database=app",
    "token: x, to: ann": "token: (redacted), to: ann",
    "password=x\nto=ann": "password=(redacted)\nto=ann",
    '{"password": "x", "to": "ann"}': '{"password": (redacted), "to": "ann"}',
    "{'password': ['x', 'y'], 'to': 'ann'}": "{'password': (redacted), 'to': 'ann'}",
    "login(password=x) failed": "login(password=(redacted)) failed",
    "Key (token)=(x) already exists": "Key (token)=(redacted) already exists",
    "https://ann:x@example.org/?token=y&page=2": "https://(redacted)@example.org/?token=(redacted)&page=2",
    "GET /reset/hunter2key?page=2": "GET /reset/(redacted)?page=2",
    "password=, token=": "password=, token=",
}


def shown_by_views(connection: psycopg.Connection, texts: list[str]) -> list[str]:
    statement = "SELECT pgoutbox._redacted_text(text) FROM unnest(%s::text[]) WITH ORDINALITY AS t(text, n) ORDER BY n"
    return [shown for (shown,) in connection.execute(statement, [texts])]


def test_the_views_show_the_same_as_python(rolled_back: psycopg.Connection) -> None:
    texts = [*HIDDEN, *READABLE, *PARTLY, "\n".join(HIDDEN[::-1])]
    assert shown_by_views(rolled_back, texts) == [redact_text(text) for text in texts]


@pytest.mark.parametrize("text", HIDDEN)
def test_a_secret_in_a_text_is_hidden_and_stays_hidden(text: str) -> None:
    shown = redact_text(text)
    assert S not in shown
    assert "hunterkey" not in shown
    assert REDACTED in shown
    assert redact_text(shown) == shown


@pytest.mark.parametrize("secret", BARE)
def test_a_token_of_a_known_form_is_hidden_as_a_whole(secret: str) -> None:
    assert redact_text(f"refused {secret}, sent once") in {f"refused {REDACTED}, sent once", f"refused {REDACTED}"}


@pytest.mark.parametrize("text", READABLE)
def test_an_ordinary_text_is_not_changed(text: str) -> None:
    assert redact_text(text) == text


@pytest.mark.parametrize("text", PARTLY)
def test_the_rest_of_a_text_stays(text: str) -> None:
    assert redact_text(text) == PARTLY[text]


@pytest.mark.parametrize(
    "text", [f"iban: {S}", f"iban={S}", f"IBAN = {S}", f"'iban': '{S}'", f"--iban {S}", f"?iban={S}&x=1"]
)
def test_added_names_are_hidden_in_every_form(text: str) -> None:
    assert S not in redact_text(text, (*REDACTED_NAMES, "user.iban"))
    assert redact_text(text) == text

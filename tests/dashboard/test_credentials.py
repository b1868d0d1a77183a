"""Tests tokens, passwords, sessions and the rate limit of sign-ins, without a server."""

from __future__ import annotations

import base64
import hmac
import json
import time

import argon2
import itsdangerous
import pytest

from pgoutbox.dashboard import credentials as module
from pgoutbox.dashboard.credentials import (
    Credentials,
    Person,
    RateLimiter,
    Sessions,
    hash_password,
    people_of,
)
from pgoutbox.errors import ConfigurationError
from tests.support.settings import settings_with

CANARY = "c4n4ry-s3cret"
TOKEN = f"{CANARY}-{CANARY}"
PASSWORD = "correct horse battery"
HASH = "$argon2id$v=19$m=19456,t=2,p=1$WFONIh87GnehH6UQIG/JIQ$FKoBRIeR9wy6rx2xjwHB/z4tOc9ZqIVRc8PGXaxp9WI"


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.at = 1_000_000.0

    def __call__(self) -> float:
        return self.at


def people(*, viewer: str | None = None, operator: str | None = None) -> tuple[Person, ...]:
    return people_of(settings_with(web_viewer_tokens=viewer, web_operator_tokens=operator))


# --- people -----------------------------------------------------------------------------------------------------------


def test_a_token_without_a_name_is_named_by_its_role() -> None:
    assert [(p.name, p.role) for p in people(viewer=TOKEN, operator=f"x{TOKEN}")] == [
        ("viewer", "viewer"),
        ("operator", "operator"),
    ]


def test_several_people_have_one_token_each() -> None:
    found = people(viewer=f"vera:{TOKEN}", operator=f"ada:1{TOKEN}, grace@example.org:2{TOKEN}")
    assert [(p.name, p.role) for p in found] == [
        ("vera", "viewer"),
        ("ada", "operator"),
        ("grace@example.org", "operator"),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("c4n4ry-s3cret", "entry 1 has no token of 20"),
        (f"ada:{TOKEN},grace:c4n4ry-s3cret", "entry 2 has no token of 20"),
        (f"ada:{TOKEN},", "entry 2 has no token"),
        (f"{TOKEN} {TOKEN}", "entry 1 has no token"),
        (f"ada:{TOKEN}\x00", "entry 1 has no token"),
        ("c4n4ry-s3cret-ünïcode-ünïcode", "entry 1 has no token"),
        (f"a b:{TOKEN}", "entry 1 has an invalid name"),
        (f":{TOKEN}", "entry 1 has an invalid name"),
        (f"{'a' * 64}:{TOKEN}", "entry 1 has an invalid name"),
        ("x" * 1_001, "entry 1 has no token"),
        (HASH, "without a name"),
        (f"ada:{HASH[:-3]}", "is not a valid password hash"),
        (f"ada:{HASH.replace('m=19456', 'm=1024')}", "too weak or too expensive"),
        (f"ada:{HASH.replace('m=19456', 'm=8388608')}", "too weak or too expensive"),
        (f"ada:{HASH.replace('t=2', 't=1')}", "too weak or too expensive"),
        (f"ada:{HASH.replace('t=2', 't=999')}", "too weak or too expensive"),
        (f"ada:{HASH.replace('p=1', 'p=0')}", "too weak or too expensive"),
        (f"ada:{HASH.replace('p=1', 'p=99')}", "too weak or too expensive"),
        (f"ada:{HASH.replace('m=19456,', '')}", "is not a valid password hash"),
        (f"ada:{HASH.replace('argon2id', 'argon2i')}", "is not a valid password hash"),
        ("ada:$argon2id$v=19$m=19456,t=2,p=1$c2hvcnQ$c2hvcnQ", "is not a valid password hash"),
        (f"ada:{TOKEN},ada:x{TOKEN}", "the same name"),
        (f"ada:{TOKEN},grace:{TOKEN}", "the same token"),
    ],
)
def test_an_invalid_credential_is_refused_by_variable_and_entry_and_never_shown(text: str, reason: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        people(operator=text)
    message = str(caught.value)
    assert "PGOUTBOX_WEB_OPERATOR_TOKENS" in message
    assert reason in message
    assert CANARY not in message
    assert "$" not in message


def test_no_repr_shows_a_secret_and_no_token_is_kept_in_clear() -> None:
    everybody = people(viewer=f"vera:{HASH}", operator=f"ada:{TOKEN}")
    shown = repr(everybody) + repr(vars(Credentials(everybody)))
    assert TOKEN not in shown
    assert "argon2" not in shown
    assert all(TOKEN.encode() not in person.proof for person in everybody)


# --- passwords --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_hash_matches_only_its_password() -> None:
    made = hash_password(PASSWORD)
    known = Credentials(people(viewer=f"vera:{made}, eve:{HASH}", operator=f"ada:{TOKEN}"))
    for name in ("vera", "eve"):
        person = await known.identify(name, PASSWORD)
        assert person is not None
        assert person.name == name
        assert await known.identify(name, f"{PASSWORD} ") is None


async def test_a_damaged_hash_matches_no_password() -> None:
    known = Credentials(people(viewer=f"vera:{HASH[:-4]}****"))
    assert await known.identify("vera", PASSWORD) is None


@pytest.mark.slow
def test_the_same_password_has_another_hash_each_time() -> None:
    assert hash_password(PASSWORD) != hash_password(PASSWORD)


@pytest.mark.parametrize("password", ["", "x" * 11, "x" * 1_001])
def test_a_password_that_is_too_short_or_too_long_is_refused(password: str) -> None:
    with pytest.raises(ConfigurationError, match="12 to 1000 characters"):
        hash_password(password)


@pytest.mark.slow
async def test_a_password_requires_a_name_and_a_token_does_not() -> None:
    known = Credentials(people(viewer=f"vera:{HASH}", operator=f"ada:{TOKEN}"))
    signed_in = [
        await known.identify(name, secret)
        for name, secret in [("vera", PASSWORD), ("ada", PASSWORD), ("", PASSWORD), ("", TOKEN), ("vera", HASH)]
    ]
    assert [person and person.name for person in signed_in] == ["vera", None, None, "ada", None]


async def test_a_surrogate_or_an_endless_secret_is_just_wrong() -> None:
    known = Credentials(people(viewer=f"vera:{HASH}", operator=f"ada:{TOKEN}"))
    assert await known.identify("\ud800", "\ud800") is None
    assert await known.identify("vera", "x" * 1_001) is None


@pytest.mark.slow
async def test_every_sign_in_computes_one_hash_for_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Credentials(people(viewer=f"vera:{HASH}", operator=f"ada:{TOKEN}"))
    hashed: list[str] = []
    verify = argon2.PasswordHasher.verify

    def counted(self: argon2.PasswordHasher, known_hash: str, password: bytes) -> bool:
        hashed.append(password.decode())
        return verify(self, known_hash, password)

    monkeypatch.setattr(argon2.PasswordHasher, "verify", counted)
    for name, secret in [("vera", PASSWORD), ("vera", "wrong"), ("nobody", "wrong"), ("", TOKEN)]:
        hashed.clear()
        await known.identify(name, secret)
        assert hashed == [secret]


def test_a_token_is_compared_with_every_token_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Credentials(people(operator=",".join(f"p{n}:{n}{TOKEN}" for n in range(5))))
    compared: list[object] = []
    compare = hmac.compare_digest

    def counted(left: bytes, right: bytes) -> bool:
        compared.append(left)
        return compare(left, right)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    for token in (f"0{TOKEN}", f"4{TOKEN}", "unknown"):
        compared.clear()
        known.by_token(token)
        assert len(compared) == 5


# --- sessions ---------------------------------------------------------------------------------------------------------


def sessions_of(known: Credentials, *, secret: str = "k" * 32) -> Sessions:
    return Sessions(known, secret=secret, idle_seconds=600, max_seconds=3_600)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of the sessions and of the rate limit."""
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


@pytest.fixture
def known() -> Credentials:
    return Credentials(people(operator=f"ada:{TOKEN}"))


def ada(known: Credentials) -> Person:
    person = known.by_name("ada")
    assert person is not None
    return person


def test_a_cookie_is_not_renewed_at_every_page(known: Credentials, clock: Clock) -> None:
    sessions = sessions_of(known)
    session = sessions.begin(ada(known))
    clock.at += 29
    assert not sessions.needs_new_cookie(session)
    clock.at += 1
    assert sessions.needs_new_cookie(session)


def test_after_a_sign_out_no_copy_of_the_cookie_is_valid(known: Credentials, clock: Clock) -> None:
    sessions = sessions_of(known)
    session = sessions.begin(ada(known))
    cookie, other = sessions.seal(session), sessions.seal(sessions.begin(ada(known)))
    clock.at += 60
    extended = sessions.seal(session)
    sessions.end(session)
    assert sessions.open(cookie) is None
    assert sessions.open(extended) is None
    assert not sessions.needs_new_cookie(session)
    assert sessions.open(other) is not None


def test_memory_of_sign_outs_is_limited_and_never_revives_a_session(
    known: Credentials, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_ENDED", 10)
    sessions = sessions_of(known)
    cookies = []
    for _ in range(25):
        session = sessions.begin(ada(known))
        cookies.append(sessions.seal(session))
        sessions.end(session)
    assert len(vars(sessions)["_ended"]) <= 10
    assert [sessions.open(cookie) for cookie in cookies] == [None] * 25
    clock.at += 1
    later = sessions.begin(ada(known))
    assert sessions.open(sessions.seal(later)) == later


def test_a_session_ends_when_its_token_or_its_role_changes(known: Credentials, clock: Clock) -> None:
    before = sessions_of(known)
    cookie = before.seal(before.begin(ada(known)))
    for others in (people(operator=f"ada:x{TOKEN}"), people(viewer=f"ada:{TOKEN}"), people(operator=f"eve:{TOKEN}")):
        assert sessions_of(Credentials(others)).open(cookie) is None
    assert sessions_of(Credentials(people(operator=f"ada:{TOKEN}"))).open(cookie) is not None
    assert sessions_of(known, secret="x" * 32).open(cookie) is None


def test_a_forged_cookie_is_invalid(known: Credentials, clock: Clock) -> None:
    sessions = sessions_of(known)
    session = sessions.begin(ada(known))
    cookie = sessions.seal(session)
    body, at, signature = cookie.split(".")
    longer = base64.urlsafe_b64encode(json.dumps([session.id, "ada", clock.at + 1e9, "x"]).encode()).decode()
    clock.at += 10
    _, later, _ = sessions.seal(session).split(".")
    forged = [
        "", ".", "..", "a.b", "a.b.c", f"{body}.{at}.", f"{body}.{at}.{signature[:-1]}!", f"{longer}.{at}.{signature}",
        f"{body}.{later}.{signature}", f"{body}.{signature}", f"{cookie}.x", f"{'A' * 2_000}.{at}.{signature}", "é.é.é",
        f".{body}.{at}.{signature}", itsdangerous.URLSafeTimedSerializer("k" * 32).dumps([session.id, "ada", 1e9, "x"]),
    ]  # fmt: skip
    assert sessions.open(cookie) is not None
    assert [sessions.open(cookie) for cookie in forged] == [None] * len(forged)


# --- rate limit -------------------------------------------------------------------------------------------------------


def test_a_network_of_ipv6_counts_as_one_address(clock: Clock) -> None:
    limiter = RateLimiter(burst=1, interval_seconds=10)
    assert limiter.take("2001:db8::1") == 0
    assert limiter.take("2001:db8::ffff:1%eth0") == 10
    assert limiter.take("2001:db8:0:1::1") == 0
    assert limiter.take("::ffff:192.0.2.1") == 0
    assert limiter.take("192.0.2.1") == 10
    assert limiter.take("local") == 0


def test_attempts_of_a_quiet_time_are_not_saved_up(clock: Clock) -> None:
    limiter = RateLimiter(burst=3, interval_seconds=10)
    assert limiter.take("192.0.2.1") == 0
    clock.at += 1_000
    assert [limiter.take("192.0.2.1") for _ in range(4)] == [0, 0, 0, 10]


def test_the_rate_limit_remembers_a_limited_number_of_addresses(clock: Clock) -> None:
    limiter = RateLimiter(burst=1, interval_seconds=10, capacity=100)
    for number in range(1_000):
        limiter.take(f"10.0.{number // 256}.{number % 256}")
    assert limiter.take("10.0.3.132") == 10, "one of the newest 100"
    assert limiter.take("10.0.3.131") == 0, "an older one"

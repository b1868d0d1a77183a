"""Credentials: tokens and hashed passwords from the settings, sessions in signed cookies, and a sign-in rate limit.

Stores no secret in clear: only the digest of a token and the Argon2 hash of a password. All checks take the same time
for right and wrong names and secrets.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

import argon2
import itsdangerous
from pydantic import SecretStr

from pgoutbox.errors import ConfigurationError
from pgoutbox.settings import Settings, people_in

Role: TypeAlias = Literal["viewer", "operator"]
VIEWER: Final = "pgoutbox.viewer"
SESSION: Final = "pgoutbox.session"

MIN_TOKEN_LENGTH: Final = 20
MIN_PASSWORD_LENGTH: Final = 12
MAX_SECRET_LENGTH: Final = 1_000

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_HASH_MARK: Final = "$argon2"
# In KiB, and in KiB times passes; the minimum is the least that OWASP recommends.
_MAX_MEMORY: Final = 256 * 1024
_MIN_WORK: Final = 7 * 1024 * 5
_MAX_WORK: Final = 1024 * 1024
_HASHER: Final = argon2.PasswordHasher()
_HASHES_AT_ONCE: Final = 2


@dataclass(frozen=True, slots=True)
class Person:
    """A person who signs in by a token, or by a name and a password.

    `proof` is the SHA-256 of the token or of the password's hash. A session is bound to it and ends when it changes.
    """

    name: str
    role: Role
    proof: bytes = field(repr=False)
    password_hash: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Viewer:
    """The authenticated viewer: `request.scope["pgoutbox.viewer"]` on every page after sign-in.

    The table `audit` records `origin`. Forms that POST contain `csrf_token`.
    """

    name: str
    role: Role
    csrf_token: str = field(default="", repr=False)
    origin: str = ""


def hash_password(password: str) -> str:
    """Hash a password for the settings with Argon2id. Raises `ConfigurationError` if it is too short or too long."""
    if not MIN_PASSWORD_LENGTH <= len(password) <= MAX_SECRET_LENGTH:
        raise ConfigurationError(f"password: give {MIN_PASSWORD_LENGTH} to {MAX_SECRET_LENGTH} characters")
    return _HASHER.hash(password)


def _check_hash(text: str) -> None:
    advice, found = "make one with: pgoutbox web hash-password", None
    with contextlib.suppress(argon2.exceptions.InvalidHashError):
        found = argon2.extract_parameters(text)
    if found is None or found.type is not argon2.Type.ID or found.salt_len < 16 or found.hash_len < 32:
        raise ValueError(f"is not a valid password hash; {advice}")
    work = found.memory_cost * found.time_cost
    if not (found.memory_cost <= _MAX_MEMORY and _MIN_WORK <= work <= _MAX_WORK and 1 <= found.parallelism <= 16):
        raise ValueError(f"is a password hash with too weak or too expensive parameters; {advice}")


def _matches(hashed: str, password: str) -> bool:
    try:
        return _HASHER.verify(hashed, password.encode(errors="surrogatepass"))
    except (argon2.exceptions.VerificationError, argon2.exceptions.InvalidHashError):
        return False


def people_of(settings: Settings) -> tuple[Person, ...]:
    """Return the people in the settings. Raises `ConfigurationError` with the variable, and never with a secret."""
    people: list[Person] = []
    tokens: dict[Role, SecretStr | None] = {
        "viewer": settings.web.viewer_tokens,
        "operator": settings.web.operator_tokens,
    }
    for role, given in tokens.items():
        entries = people_in(given.get_secret_value()) if given is not None else []
        for number, (name, secret) in enumerate(entries, start=1):
            try:
                people.append(_person_of(name, secret, role))
            except ValueError as error:
                raise ConfigurationError(f"PGOUTBOX_WEB_{role.upper()}_TOKENS: entry {number} {error}") from None
    for what, values in (("name", [p.name for p in people]), ("token", [p.proof for p in people])):
        if len(set(values)) < len(values):
            raise ConfigurationError(
                f"PGOUTBOX_WEB_VIEWER_TOKENS, PGOUTBOX_WEB_OPERATOR_TOKENS: two entries have the same {what}; "
                "give each person one, such as ada:TOKEN,grace:TOKEN"
            )
    return tuple(people)


def _person_of(name: str | None, secret: str, role: Role) -> Person:
    if name is not None and _NAME.fullmatch(name) is None:
        raise ValueError("has an invalid name: give name:token, where the name has only A-Z, a-z, 0-9, dot, _, @ and -")
    proof = hashlib.sha256(secret.encode()).digest()
    if secret.startswith(_HASH_MARK):
        if name is None:
            raise ValueError("is a password hash without a name: give name:hash")
        _check_hash(secret)
        return Person(name, role, proof, secret)
    if _TOKEN.fullmatch(secret) is None or not MIN_TOKEN_LENGTH <= len(secret) <= MAX_SECRET_LENGTH:
        raise ValueError(
            f"has no token of {MIN_TOKEN_LENGTH} to {MAX_SECRET_LENGTH} characters (A-Z, a-z, 0-9 and ._~+/-); make "
            "one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return Person(name or role, role, proof)


class Credentials:
    """Identifies people by their secrets."""

    def __init__(self, people: Sequence[Person]) -> None:
        self._people = {person.name: person for person in people}
        self._tokens = [person for person in people if person.password_hash is None]
        # An unknown user takes as long to reject as a known one.
        self._decoy = next((person for person in people if person.password_hash is not None), None)
        self.has_passwords: bool = self._decoy is not None
        self._hashing = asyncio.Semaphore(_HASHES_AT_ONCE)

    def by_name(self, name: str) -> Person | None:
        """Return the person with this name."""
        return self._people.get(name)

    def by_token(self, token: str) -> Person | None:
        """Return the owner of the token. Compares with every token, so that the time reveals nothing."""
        proof = hashlib.sha256(token.encode(errors="surrogatepass")).digest()
        found = None
        for person in self._tokens:
            if hmac.compare_digest(person.proof, proof):
                found = person
        return found

    async def identify(self, name: str, secret: str) -> Person | None:
        """Return the person with this token, or with this name and password."""
        if len(secret) > MAX_SECRET_LENGTH:
            return None
        found = self.by_token(secret)
        if self._decoy is None:
            return found
        person = self._people.get(name)
        if person is not None and person.password_hash is None:
            person = None
        hashed = (person or self._decoy).password_hash or ""
        async with self._hashing:
            is_right = await asyncio.to_thread(_matches, hashed, secret)
        return found or (person if is_right else None)


# --- sessions ---------------------------------------------------------------------------------------------------------

_MAX_ENDED: Final = 10_000


class Session(NamedTuple):
    """One sign-in. Times are seconds since 1970."""

    id: str
    person: Person
    begun_at: float
    seen_at: float


class Sessions:
    """Sessions as signed texts for a cookie.

    A session ends at sign-out, after `idle_seconds` without use, `max_seconds` after sign-in, or when its person is
    removed or has another token or password. Only sign-outs are stored, and only in this process.
    """

    def __init__(self, credentials: Credentials, *, secret: str, idle_seconds: float, max_seconds: float) -> None:
        self._credentials = credentials
        self._signer = itsdangerous.Signer(secret, salt="pgoutbox.form", digest_method=hashlib.sha256)
        self._serializer = itsdangerous.URLSafeTimedSerializer(
            secret, salt="pgoutbox.session", signer_kwargs={"digest_method": hashlib.sha256}
        )
        self._idle_seconds = idle_seconds
        self._max_seconds = max_seconds
        self._ended: dict[str, float] = {}
        self._not_before = 0.0

    def begin(self, person: Person) -> Session:
        """Begin a session with a new id."""
        return Session(secrets.token_urlsafe(18), person, time.time(), time.time())

    def seal(self, session: Session) -> str:
        """Return the text for the cookie. Its signature contains the time of use."""
        fields = [session.id, session.person.name, session.begun_at, self._proof_of(session.person)]
        return self._serializer.dumps(fields)

    def open(self, text: str) -> Session | None:
        """Return the session of a cookie, or None if it is invalid or has ended."""
        try:
            fields, seen_at = self._serializer.loads(text, max_age=int(self._idle_seconds), return_timestamp=True)
        except itsdangerous.BadData:
            return None
        session_id, name, begun_at, proof = fields
        person = self._credentials.by_name(name)
        if person is None or not secrets.compare_digest(self._proof_of(person), proof):
            return None
        if time.time() >= begun_at + self._max_seconds or begun_at <= self._not_before or session_id in self._ended:
            return None
        return Session(session_id, person, begun_at, seen_at.timestamp())

    def needs_new_cookie(self, session: Session) -> bool:
        """Return whether the cookie needs a new time of use."""
        return time.time() >= session.seen_at + self._idle_seconds / 20 and session.id not in self._ended

    def end(self, session: Session) -> None:
        """Sign out. Copies of the cookie become invalid too."""
        now = time.time()
        if len(self._ended) >= _MAX_ENDED:
            self._ended = {ended: until for ended, until in self._ended.items() if until > now}
        if len(self._ended) >= _MAX_ENDED:
            # A forgotten session would become valid again, so end all sessions instead.
            self._not_before = now
            self._ended.clear()
        self._ended[session.id] = session.begun_at + self._max_seconds

    def csrf_token(self, *subject: str) -> str:
        """Return the CSRF token for the forms of this session or viewer. No part may contain a NUL."""
        return self._sign("csrf", *subject)

    def _proof_of(self, person: Person) -> str:
        return self._sign("proof", person.role, person.proof.hex())

    def _sign(self, *parts: str) -> str:
        return self._signer.get_signature("\0".join(parts)).decode()


# --- rate limit -------------------------------------------------------------------------------------------------------


class RateLimiter:
    """Allows `burst` tries at once, then one per `interval_seconds`, for each address (GCRA).

    Keeps at most `capacity` addresses and drops the least recently seen. An IPv6 /64 counts as one address, because one
    customer usually has a whole /64.
    """

    def __init__(self, *, burst: int, interval_seconds: float, capacity: int = 10_000) -> None:
        self._slack_seconds = burst * interval_seconds
        self._interval_seconds = interval_seconds
        self._capacity = capacity
        self._full_until: OrderedDict[str, float] = OrderedDict()

    def take(self, address: str) -> float:
        """Count a try, and return the seconds to wait; 0 if it is allowed."""
        key, now = _network_of(address), time.monotonic()
        full_until = max(self._full_until.get(key, now), now) + self._interval_seconds
        if full_until - now > self._slack_seconds:
            return full_until - now - self._slack_seconds
        self._full_until[key] = full_until
        self._full_until.move_to_end(key)
        if len(self._full_until) > self._capacity:
            self._full_until.popitem(last=False)
        return 0.0

    def refund(self, address: str) -> None:
        """Uncount a successful try."""
        key = _network_of(address)
        if key in self._full_until:
            self._full_until[key] -= self._interval_seconds


def _network_of(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]
    if isinstance(parsed, ipaddress.IPv6Address):
        mapped = parsed.ipv4_mapped
        return str(mapped) if mapped is not None else str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)

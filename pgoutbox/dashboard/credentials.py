"""Credentials: tokens and hashed passwords from the settings, sessions in signed cookies, and a sign-in rate limit.

Stores no secret in clear: only the digest of a token and the scrypt hash of a password. All checks take the same time
for right and wrong names and secrets.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import json
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Self, TypeAlias

from pgoutbox.errors import ConfigurationError
from pgoutbox.settings import Settings

Role: TypeAlias = Literal["viewer", "operator"]

MIN_TOKEN_LENGTH: Final = 20
MIN_PASSWORD_LENGTH: Final = 12
MAX_SECRET_LENGTH: Final = 1_000

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_HASH_MARK: Final = "scrypt$"
_MAX_HASH_BYTES: Final = 256 * 1024 * 1024
_MAX_HASH_WORK: Final = 2**22
_HASHES_AT_ONCE: Final = 2


@dataclass(frozen=True, slots=True)
class Person:
    """A person who may sign in, with a token or with a name and a password.

    `proof` is the SHA-256 of the token or of the password's hash. A session is bound to it and ends when it changes.
    """

    name: str
    role: Role
    proof: bytes = field(repr=False)
    password: PasswordHash | None = field(default=None, repr=False)


class PasswordHash(NamedTuple):
    """Scrypt's parameters (RFC 7914), salt and key."""

    n: int
    r: int
    p: int
    salt: bytes
    key: bytes

    @classmethod
    def of(cls, password: str) -> Self:
        """Hash a new password with its own salt. Takes 16 MiB and about 0.2 s."""
        salt = secrets.token_bytes(16)
        made = cls(n=2**14, r=8, p=5, salt=salt, key=b"")
        return made._replace(key=made.derive(password))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the result of `str`. Raises `ValueError` if invalid, too weak or too expensive."""
        match = re.fullmatch(r"scrypt\$([0-9]{1,8})\$([0-9]{1,3})\$([0-9]{1,3})\$([\w-]+={0,2})\$([\w-]+={0,2})", text)
        if match is None:
            raise ValueError("is not a valid password hash; make one with: pgoutbox web hash-password")
        n, r, p = (int(number) for number in match.groups()[:3])
        try:
            salt, key = (base64.b64decode(part, altchars=b"-_", validate=True) for part in match.groups()[3:])
        except binascii.Error:
            raise ValueError("is not a valid password hash; make one with: pgoutbox web hash-password") from None
        costly = 128 * n * r > _MAX_HASH_BYTES or n * r * p > _MAX_HASH_WORK
        if n < 2**14 or n & (n - 1) or not r or not p or costly:
            raise ValueError(
                "is a password hash with too weak or too expensive parameters; "
                "make one with: pgoutbox web hash-password"
            )
        if len(salt) < 16 or len(key) != 32:
            raise ValueError("is not a valid password hash; make one with: pgoutbox web hash-password")
        return cls(n, r, p, salt, key)

    def __str__(self) -> str:
        salt, key = (base64.urlsafe_b64encode(part).decode() for part in (self.salt, self.key))
        return f"{_HASH_MARK}{self.n}${self.r}${self.p}${salt}${key}"

    def derive(self, password: str) -> bytes:
        """Derive the key of this password."""
        given = password.encode(errors="surrogatepass")
        limit = 128 * self.r * (self.n + self.p + 2)
        return hashlib.scrypt(given, salt=self.salt, n=self.n, r=self.r, p=self.p, maxmem=limit, dklen=32)

    def matches(self, password: str) -> bool:
        """Return whether this is the password."""
        return hmac.compare_digest(self.derive(password), self.key)


def hash_password(password: str) -> str:
    """Hash a password for the settings. Raises `ConfigurationError` if it is too short or too long."""
    if not MIN_PASSWORD_LENGTH <= len(password) <= MAX_SECRET_LENGTH:
        raise ConfigurationError(f"password: give {MIN_PASSWORD_LENGTH} to {MAX_SECRET_LENGTH} characters")
    return str(PasswordHash.of(password))


def people_of(settings: Settings) -> tuple[Person, ...]:
    """Return the people in the settings. Raises `ConfigurationError` with the variable, and never with a secret."""
    people: list[Person] = []
    for variable, given, role in (
        ("PGOUTBOX_WEB_VIEWER_TOKENS", settings.web.viewer_tokens, "viewer"),
        ("PGOUTBOX_WEB_OPERATOR_TOKENS", settings.web.operator_tokens, "operator"),
    ):
        entries = given.get_secret_value().split(",") if given is not None else []
        for number, entry in enumerate(entries, start=1):
            try:
                people.append(_parse_person(entry.strip(), "viewer" if role == "viewer" else "operator"))
            except ValueError as error:
                raise ConfigurationError(f"{variable}: entry {number} {error}") from None
    for what, values in (("name", [p.name for p in people]), ("token", [p.proof for p in people])):
        if len(set(values)) < len(values):
            raise ConfigurationError(
                f"PGOUTBOX_WEB_VIEWER_TOKENS, PGOUTBOX_WEB_OPERATOR_TOKENS: two entries have the same {what}; "
                "give each person one, such as ada:TOKEN,grace:TOKEN"
            )
    return tuple(people)


def _parse_person(entry: str, role: Role) -> Person:
    name, colon, secret = entry.rpartition(":")
    if colon and _NAME.fullmatch(name) is None:
        raise ValueError("has an invalid name: give name:token, where the name has only A-Z, a-z, 0-9, dot, _, @ and -")
    proof = hashlib.sha256(secret.encode()).digest()
    if secret.startswith(_HASH_MARK):
        if not colon:
            raise ValueError("is a password hash without a name: give name:hash")
        return Person(name, role, proof, PasswordHash.parse(secret))
    if _TOKEN.fullmatch(secret) is None or not MIN_TOKEN_LENGTH <= len(secret) <= MAX_SECRET_LENGTH:
        raise ValueError(
            f"has no token of {MIN_TOKEN_LENGTH} to {MAX_SECRET_LENGTH} characters (A-Z, a-z, 0-9 and ._~+/-); make "
            "one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return Person(name if colon else role, role, proof)


class Credentials:
    """Identifies people by their secrets."""

    def __init__(self, people: Sequence[Person]) -> None:
        self._people = {person.name: person for person in people}
        self._tokens = [person for person in people if person.password is None]
        passwords = [person.password for person in people if person.password is not None]
        self.has_passwords = bool(passwords)
        # An unknown user takes as long to reject as a known one.
        self._decoy = passwords[0]._replace(key=bytes(32)) if passwords else None
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
        password = person.password if person is not None else None
        async with self._hashing:
            right = await asyncio.to_thread((password or self._decoy).matches, secret)
        return found or (person if right and password is not None else None)


# --- sessions ---------------------------------------------------------------------------------------------------------

_MAX_COOKIE_LENGTH: Final = 1_000
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

    def __init__(
        self,
        credentials: Credentials,
        *,
        secret: bytes,
        idle_seconds: float,
        max_seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._credentials = credentials
        self._secret = secret
        self._idle_seconds = idle_seconds
        self._max_seconds = max_seconds
        self._clock = clock
        self._ended: dict[str, float] = {}
        self._not_before = 0.0

    def begin(self, person: Person) -> Session:
        """Begin a session with a new id."""
        at = self._clock()
        return Session(secrets.token_urlsafe(18), person, at, at)

    def seal(self, session: Session) -> str:
        """Return the text for the cookie."""
        fields = [session.id, session.person.name, session.begun_at, session.seen_at]
        body = base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()
        return f"{body}.{self._sign(session.person, 'session', body)}"

    def open(self, text: str) -> Session | None:
        """Return the session of a cookie, or None if it is invalid or has ended."""
        body, _, signature = text.partition(".")
        if len(text) > _MAX_COOKIE_LENGTH or not text.isascii():
            return None
        try:
            session_id, name, begun_at, seen_at = json.loads(base64.urlsafe_b64decode(body))
            person = self._credentials.by_name(name)
        except (ValueError, TypeError, RecursionError):
            return None
        if person is None or not hmac.compare_digest(self._sign(person, "session", body), signature):
            return None
        now = self._clock()
        if (
            now >= begun_at + self._max_seconds
            or now >= seen_at + self._idle_seconds
            or begun_at <= self._not_before
            or session_id in self._ended
        ):
            return None
        return Session(session_id, person, begun_at, seen_at)

    def extend(self, session: Session) -> Session | None:
        """Return the session with a new time of use; None if the cookie is recent enough."""
        now = self._clock()
        return session._replace(seen_at=now) if now >= session.seen_at + self._idle_seconds / 20 else None

    def end(self, session: Session) -> None:
        """Sign out. Copies of the cookie become invalid too."""
        now = self._clock()
        if len(self._ended) >= _MAX_ENDED:
            self._ended = {ended: until for ended, until in self._ended.items() if until > now}
        if len(self._ended) >= _MAX_ENDED:
            # A forgotten session would become valid again, so end all sessions instead.
            self._not_before = now
            self._ended.clear()
        self._ended[session.id] = session.begun_at + self._max_seconds

    def csrf_token(self, session: Session) -> str:
        """Return the CSRF token for the forms of this session."""
        return self._sign(session.person, "csrf", session.id)

    def _sign(self, person: Person, purpose: str, text: str) -> str:
        return sign(self._secret + person.proof, purpose, person.role, text)


def sign(key: bytes, *parts: str) -> str:
    """Return the HMAC-SHA256 of the parts as text. No part may contain a NUL."""
    digest = hmac.digest(key, "\0".join(parts).encode(errors="surrogatepass"), "sha256")
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


# --- rate limit -------------------------------------------------------------------------------------------------------


class RateLimiter:
    """Allows `burst` tries at once, then one per `interval_seconds`, for each address (GCRA).

    Keeps at most `capacity` addresses and drops the least recently seen. An IPv6 /64 counts as one address, because one
    customer usually has a whole /64.
    """

    def __init__(
        self,
        *,
        burst: int,
        interval_seconds: float,
        capacity: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slack_seconds = burst * interval_seconds
        self._interval_seconds = interval_seconds
        self._capacity = capacity
        self._clock = clock
        self._full_until: OrderedDict[str, float] = OrderedDict()

    def take(self, address: str) -> float:
        """Count a try, and return the seconds to wait; 0 if it is allowed."""
        key, now = _network_of(address), self._clock()
        full_until = max(self._full_until.get(key, now), now) + self._interval_seconds
        if full_until - now > self._slack_seconds:
            return full_until - now - self._slack_seconds
        self._full_until[key] = full_until
        self._full_until.move_to_end(key)
        if len(self._full_until) > self._capacity:
            self._full_until.popitem(last=False)
        return 0.0

    def give_back(self, address: str) -> None:
        """Uncount a successful try."""
        key = _network_of(address)
        if key in self._full_until:
            self._full_until[key] -= self._interval_seconds

    def __len__(self) -> int:
        return len(self._full_until)


def _network_of(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]
    if isinstance(parsed, ipaddress.IPv6Address):
        mapped = parsed.ipv4_mapped
        return str(mapped) if mapped is not None else str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)

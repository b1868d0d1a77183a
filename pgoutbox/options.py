"""The options of topics and messages, with their checks. Pure: no I/O.

A mistake raises `ArgumentError` with the path of the option.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from datetime import MAXYEAR, UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final, Literal, TypedDict, get_args, get_origin, get_type_hints
from urllib.parse import unquote

from pydantic import BaseModel, Secret, SecretBytes, SecretStr
from pydantic_core import to_json as encode_json
from typing_extensions import TypeVar, is_typeddict

from pgoutbox.clock import Duration
from pgoutbox.errors import ArgumentError
from pgoutbox.redaction import check_redacted_name
from pgoutbox.text import NAME, check_storable, member, preview

MAX_ID: Final = 2**63 - 1
MAX_KEY_BYTES: Final = 512
MAX_DESTINATION_BYTES: Final = 2_048
MAX_HEADER_COUNT: Final = 64
MAX_HEADER_BYTES: Final = 65_536
MAX_ATTEMPTS_BOUND: Final = 10_000
MAX_VERSION: Final = 100
MAX_DELAY: Final = timedelta(days=3_650)
SECRETS: Final = (Secret, SecretStr, SecretBytes)
NO_SECRETS: Final = (
    "holds a secret: do not store secrets; enqueue an id, and let the handler create the secret when it sends"
)

V = TypeVar("V")

KEYS: Final = ("coalesce_key", "dedupe_key", "ordering_key")
OnDuplicate = Literal["error", "ignore"]
SuppressionReason = Literal["bounce", "complaint", "unsubscribe", "manual"]

_DESTINATION = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[^\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_NOT_IN_ADDRESS = re.compile(r"[\s@<>,\\]")
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
DOMAIN = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
"""A host name that is valid after EHLO, in a Message-ID and in a URL."""
# IDNA 2003, which the standard library uses, maps these to other letters and so to another domain.
_IDNA_DEVIATIONS: Final = frozenset("\u00df\u03c2\u200c\u200d")
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

# PostgreSQL's clock decides, and the application's clock may be hours wrong. So only times that are wrong by more than
# a day are refused here, before a statement can fail.
CLOCK_TOLERANCE: Final = timedelta(days=1)
_MAX_AHEAD = timedelta(days=3_653)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class FanoutOptions(TypedDict, total=False):
    """The options of the messages of a fan-out at a call site."""

    queue: str | None
    available_at: datetime | None
    delay: Duration | None
    expires_at: datetime | None
    headers: Mapping[str, str] | None
    max_attempts: int | None
    owner: str | None
    fair_key: str | None


class MessageOptions(FanoutOptions, total=False):
    """The options of a message at a call site.

    `delay` and `max_delay` (seconds or timedeltas) count on PostgreSQL's clock; give `delay` or `available_at`.
    `available_at` and `expires_at` are datetimes with a time zone. With `on_duplicate="ignore"` a message with a known
    `dedupe_key` and another payload of its version is a duplicate, too; otherwise it is an error.
    """

    destination: str | None
    coalesce_key: str | None
    dedupe_key: str | None
    ordering_key: str | None
    halts_key: bool | None
    max_delay: Duration | None
    on_duplicate: OnDuplicate | None


def check_name(field: str, value: object) -> str:
    """Return the name of a topic or a queue, if the SQL function accepts it."""
    if not isinstance(value, str) or NAME.fullmatch(value) is None:
        raise ArgumentError(
            field,
            f"must be 1 to 63 of a-z, 0-9, underscore, dot and hyphen, the first a letter, not {preview(value)}",
        )
    return value


def check_key(field: str, value: object) -> str:
    """Return a coalesce, dedupe or ordering key. An empty key is refused: unrelated messages would share it."""
    if not isinstance(value, str):
        raise ArgumentError(field, f"must be text, not {type(value).__name__}")
    if not value:
        raise ArgumentError(field, "must not be empty; pass None for no key")
    if len(value) <= MAX_KEY_BYTES and value.isascii() and "\0" not in value:
        return value
    check_storable(field, value)
    size = len(value.encode())
    if size > MAX_KEY_BYTES:
        raise ArgumentError(field, f"has {size} bytes, the limit is {MAX_KEY_BYTES}")
    return value


def check_owner(field: str, value: object) -> str:
    """Return the owner of a message. An empty one is refused: unrelated messages would share it."""
    try:
        return check_key(field, value)
    except ArgumentError as error:
        raise ArgumentError(field, error.reason.replace("for no key", "for no owner")) from None


def check_destination(field: str, value: object) -> str:
    """Return a destination: a URI, which for `mailto:` names one recipient."""
    if not isinstance(value, str):
        raise ArgumentError(field, f"must be text, not {type(value).__name__}")
    check_storable(field, value)
    if _DESTINATION.fullmatch(value) is None:
        raise ArgumentError(
            field, f"must be a URI such as mailto:a@example.org, without control characters, not {preview(value)}"
        )
    if "," in value and value[:7].lower() == "mailto:":
        raise ArgumentError(
            field, "must name one recipient, without a comma; enqueue one message for each, or render Email(to=[...])"
        )
    size = len(value.encode())
    if size > MAX_DESTINATION_BYTES:
        raise ArgumentError(field, f"has {size} bytes, the limit is {MAX_DESTINATION_BYTES}")
    return value


def check_address(field: str, value: object) -> str:
    """Return an e-mail address in the one form that is compared: ASCII, in lower case.

    An address with a name is refused. Letters beyond ASCII before the @ are escaped with a backslash, which no address
    has: PostgreSQL has no rules for their case that are the same in every database.
    """
    if not isinstance(value, str):
        raise ArgumentError(field, f"must be text, not {type(value).__name__}")
    address = unquote(value[7:], errors="surrogateescape") if value[:7].lower() == "mailto:" else value
    local, at, domain = address.rpartition("@")
    if not (local and at) or _NOT_IN_ADDRESS.search(local) or not address.isprintable():
        raise ArgumentError(field, f"must be one e-mail address, without a name, not {preview(value)}")
    local = unicodedata.normalize("NFC", unicodedata.normalize("NFC", local).lower())
    return f"{local.encode('ascii', 'backslashreplace').decode()}@{ascii_domain(field, domain).lower()}"


def ascii_domain(field: str, domain: str) -> str:
    """Return the domain of an e-mail address in ASCII."""
    if deviating := _IDNA_DEVIATIONS.intersection(domain):
        raise ArgumentError(field, f"give a domain with U+{ord(min(deviating)):04X} in its xn-- form")
    with suppress(UnicodeError):
        if not domain.isascii():
            domain = domain.encode("idna").decode("ascii")
        if DOMAIN.fullmatch(domain):
            return domain
    raise ArgumentError(field, "the part after @ is not a domain")


def check_headers(field: str, value: object) -> dict[str, str]:
    """Return the headers."""
    if not isinstance(value, Mapping):
        raise ArgumentError(field, f"must be a mapping of text to text, not {type(value).__name__}")
    if len(value) > MAX_HEADER_COUNT:
        raise ArgumentError(field, f"has {len(value)} entries, the limit is {MAX_HEADER_COUNT}")
    for name, text in value.items():
        if not isinstance(name, str) or not name or _UNSAFE.search(name):
            raise ArgumentError(member(field, name), "a name must be text, not empty and without control characters")
        if not isinstance(text, str) or _UNSAFE.search(text):
            raise ArgumentError(member(field, name), "must be text without control characters")
    headers = dict(value)
    size = len(encode_json(headers))
    if size > MAX_HEADER_BYTES:
        raise ArgumentError(field, f"has {size} bytes as JSON, the limit is {MAX_HEADER_BYTES}")
    return headers


def check_whole(field: str, value: object, *, most: int) -> int:
    """Return a whole number from 1 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ArgumentError(field, f"must be a whole number from 1 to {most}, not {preview(value)}")
    return value


def check_id(field: str, value: object) -> int:
    """Return the id of a message."""
    return check_whole(field, value, most=MAX_ID)


def check_redact(field: str, value: object) -> None:
    """Check the names of the values that a topic hides."""
    if not isinstance(value, tuple):
        raise ArgumentError(field, f"must be a tuple of names, not {preview(value)}")
    try:
        for name in value:
            check_redacted_name(name)
    except ValueError as error:
        raise ArgumentError(field, str(error)) from None


def check_max_attempts(field: str, value: object) -> int:
    """Return a limit on the number of attempts."""
    return check_whole(field, value, most=MAX_ATTEMPTS_BOUND)


def check_flag(field: str, value: object) -> bool:
    """Return whether an option is on."""
    if not isinstance(value, bool):
        raise ArgumentError(field, f"must be True or False, not {preview(value)}")
    return value


def check_on_duplicate(field: str, value: object) -> str:
    """Return the rule for a dedupe key that a message with another payload has."""
    if value not in get_args(OnDuplicate):
        raise ArgumentError(field, f"must be error or ignore, not {preview(value)}")
    return str(value)


def check_delay(field: str, value: object) -> float:
    """Return a delay in seconds, from a number of seconds or a timedelta."""
    limit = MAX_DELAY.total_seconds()
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and -1 < value <= limit:
        seconds = float(value)
    else:
        seconds = math.nan
    if not 0 <= seconds <= limit:
        raise ArgumentError(field, f"must be from 0 to {limit:.0f} seconds, or such a timedelta, not {preview(value)}")
    return round(seconds, 6)  # A microsecond is PostgreSQL's unit.


def check_available_at(field: str, value: object) -> datetime:
    """Return a due time in UTC, at most ten years ahead."""
    moment = _moment(field, value)
    if moment > datetime.now(UTC) + _MAX_AHEAD + CLOCK_TOLERANCE:
        raise ArgumentError(field, f"must not be more than 10 years ahead: {moment.isoformat()}")
    return moment


def check_expires_at(field: str, value: object) -> datetime:
    """Return an expiry time in UTC. It must not be past, nor more than twenty years ahead."""
    moment = _moment(field, value)
    now = datetime.now(UTC)
    if moment > now + 2 * _MAX_AHEAD:
        raise ArgumentError(field, f"must not be more than 20 years ahead: {moment.isoformat()}")
    if moment < now - CLOCK_TOLERANCE:
        raise ArgumentError(field, f"is in the past: {moment.isoformat()}")
    return moment


def _moment(field: str, value: object) -> datetime:
    if not isinstance(value, datetime):
        raise ArgumentError(field, f"must be a datetime, not {type(value).__name__}")
    if value.utcoffset() is None:
        raise ArgumentError(field, f"timezone required: {value.isoformat()} is naive")
    # A past time means now, and years near the ends of the calendar have no equivalent in other time zones.
    return max(value, _EPOCH).astimezone(UTC) if value.year < MAXYEAR else value


def if_given(check: Callable[[str, object], V], field: str, value: object) -> V | None:
    """Check an option unless it is None."""
    return None if value is None else check(field, value)


def check_version(field: str, value: object) -> int:
    """Return the version of a payload."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_VERSION:
        raise ArgumentError(field, f"must be a whole number from 1 to {MAX_VERSION}, not {preview(value)}")
    return value


# The options and their checks, by their names in the type `pgoutbox.draft`. Only a topic has `expires_after` and
# `payload_version`.
OPTIONS: Final[Mapping[str, Callable[[str, object], object]]] = {
    "queue": check_name,
    "destination": check_destination,
    "owner": check_owner,
    "coalesce_key": check_key,
    "ordering_key": check_key,
    "fair_key": check_key,
    "dedupe_key": check_key,
    "on_duplicate": check_on_duplicate,
    "halts_key": check_flag,
    "available_at": check_available_at,
    "delay": check_delay,
    "max_delay": check_delay,
    "expires_at": check_expires_at,
    "expires_after": check_delay,
    "max_attempts": check_max_attempts,
    "headers": check_headers,
    "payload_version": check_version,
}
# An option, and the one that it needs.
_TOGETHER: Final = (("halts_key", "ordering_key"), ("max_delay", "coalesce_key"), ("on_duplicate", "dedupe_key"))
# An option of a message, and the field of a topic that takes its place.
REPLACED: Final[Mapping[str, str]] = {"available_at": "delay", "expires_at": "expires_after", "max_attempts": "retry"}


def check_defined(options: Mapping[str, object]) -> None:
    """Check the options of a definition. A function of the payload is checked by its results."""
    if "ordering_key" in options and "coalesce_key" in options:
        raise _not_both_keys()
    checked = {
        name: OPTIONS[name](name, value)
        for name, value in options.items()
        if name == "expires_after" or not callable(value)
    }
    if checked.get("expires_after") == 0:
        raise ArgumentError("expires_after", "must be more than 0")


def check_together(options: Mapping[str, Any]) -> None:
    """Refuse checked options that exclude or lack each other."""
    if "ordering_key" in options and "coalesce_key" in options:
        raise _not_both_keys()
    if "fair_key" in options and "ordering_key" in options:
        raise ArgumentError("fair_key", "give fair_key or ordering_key, not both: turns, or one order")
    for name, needed in _TOGETHER:
        if options.get(name, False) is not False and needed not in options:
            raise ArgumentError(name, f"only together with {needed}")
    available_at, delay, expires_at = options.get("available_at"), options.get("delay"), options.get("expires_at")
    if available_at is not None and delay is not None:
        raise ArgumentError("delay", "give delay or available_at, not both")
    if expires_at is None:
        return
    if available_at is not None and expires_at <= available_at:
        raise ArgumentError("expires_at", "must be later than available_at")
    if delay is not None and expires_at < datetime.now(UTC) + timedelta(seconds=delay) - CLOCK_TOLERANCE:
        raise ArgumentError("expires_at", "must be later than the end of the delay")


def _not_both_keys() -> ArgumentError:
    return ArgumentError(
        "ordering_key", "give ordering_key or coalesce_key, not both: newer messages replace older ones, or follow them"
    )


def check_model(field: str, model: object) -> None:
    """Refuse a class that is not a pydantic model, and a model with a field for a secret."""
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise ArgumentError(field, f"must be a pydantic model, not {preview(model)}")
    secret = secret_in_model(model)
    if secret is not None:
        raise ArgumentError(f"{field}{secret}", NO_SECRETS)


@lru_cache(maxsize=1_024)
def secret_in_model(model: type[BaseModel]) -> str | None:
    """Return the path of the first field, here or in a nested type, whose type is one of pydantic's secrets."""
    return _secret_in(model, set())


def _secret_in(annotation: object, seen: set[type]) -> str | None:
    annotation = getattr(annotation, "__value__", getattr(annotation, "__supertype__", annotation))
    kind = get_origin(annotation) or annotation
    if isinstance(kind, type) and kind not in seen:
        if issubclass(kind, SECRETS):
            return ""
        seen.add(kind)
        for name, member in _members_of(kind).items():
            found = _secret_in(member, seen)
            if found is not None:
                return f".{name}{found}"
    for argument in get_args(annotation):
        found = _secret_in(argument, seen)
        if found is not None:
            return found
    return None


def _members_of(kind: type) -> Mapping[str, object]:
    if issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    if is_dataclass(kind) or is_typeddict(kind) or issubclass(kind, tuple):
        # A name that cannot be resolved here could not be validated by pydantic either.
        with suppress(NameError, TypeError):
            return get_type_hints(kind, include_extras=True)
    return {}

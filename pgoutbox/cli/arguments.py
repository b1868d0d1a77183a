"""Arguments of the commands: ids, durations, names, payloads and the application's outbox.

An invalid argument raises a usage or configuration error that says which values are valid.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
import traceback
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from pgoutbox.enqueue.payloads import from_json
from pgoutbox.errors import ArgumentError, ConfigurationError, NotReadyError, PgOutboxError
from pgoutbox.message import FINAL_STATES, State
from pgoutbox.operations import Rate
from pgoutbox.operations.retention import MAX_AGE
from pgoutbox.options import MAX_ID
from pgoutbox.outbox import Outbox
from pgoutbox.text import NAME

if TYPE_CHECKING:
    from pydantic import JsonValue

MAX_RATE_COUNT: Final = 1_000_000
MAX_RATE_SECONDS: Final = 2_592_000
_MAX_IDS: Final = 1_000_000
_UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def parse_id(text: str) -> int:
    """Parse a message id: digits only, within bigint."""
    if re.fullmatch(r"[0-9]{1,19}", text) is None or not 1 <= int(text) <= MAX_ID:
        raise typer.BadParameter(f"{text!r} is not a message id: give a whole number from 1 to {MAX_ID}")
    return int(text)


def parse_duration(text: str) -> timedelta:
    """Parse a number and a unit, such as 90s, 15m, 12h, 30d or 2w: more than 0 and at most 36500 days."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)([smhdw])", text)
    seconds = float(match[1]) * _UNIT_SECONDS[match[2]] if match else math.nan
    if not 0 < seconds <= MAX_AGE.total_seconds():
        raise typer.BadParameter(
            f"{text!r} is not a duration: give a number and a unit (s, m, h, d, w), such as 15m or 30d, "
            f"of at most {MAX_AGE.days}d"
        )
    return timedelta(seconds=seconds)


def duration_option(name: str, description: str) -> Any:  # noqa: ANN401 - as typer declares its options
    """Return the option of this name, for a duration."""
    return typer.Option(name, parser=parse_duration, metavar="DURATION", help=description)


def parse_past_time(text: str) -> datetime:
    """Parse an ISO 8601 time with offset, such as 2026-11-21T10:00Z, or an age such as 2h."""
    return _parse_time(text, -1, "an age such as 2h")


def parse_due_time(text: str) -> datetime:
    """Parse an ISO 8601 time with offset, such as 2026-11-21T10:00Z, or a delay such as 2h."""
    return _parse_time(text, 1, "a delay such as 2h")


def _parse_time(text: str, direction: int, otherwise: str) -> datetime:
    if re.fullmatch(r"[0-9.]+[smhdw]", text) is not None:
        return datetime.now(UTC) + direction * parse_duration(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a time: give a time such as 2026-11-21T10:00Z, or {otherwise}"
        ) from None
    if moment.tzinfo is None:
        raise typer.BadParameter(f"{text!r} has no time zone: write {text}Z for UTC, or add an offset such as +01:00")
    return moment


def read_text(file: Path) -> str:
    """Read a file of UTF-8, or stdin for `-`."""
    try:
        return (sys.stdin.buffer.read() if str(file) == "-" else _read_file(file)).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{file}: not UTF-8 at byte {error.start}") from None


def read_ids(file: Path) -> list[int]:
    """Read the message ids of a file, one per line. Ignores empty lines and comments after `#`."""
    ids: list[int] = []
    for number, line in enumerate(read_text(file).splitlines(), 1):
        word = line.partition("#")[0].strip()
        if word:
            try:
                ids.append(parse_id(word))
            except typer.BadParameter as error:
                raise typer.BadParameter(f"{file}, line {number}: {error.message}") from None
    if len(ids) > _MAX_IDS:
        raise typer.BadParameter(f"{file}: {len(ids)} ids, more than {_MAX_IDS}; use a filter instead")
    return ids


def parse_keep(text: str) -> timedelta | None:
    """Parse a retention time: a duration, `0`, or `forever`."""
    if text == "forever":
        return None
    return timedelta() if text == "0" else parse_duration(text)


def format_keep(keep: timedelta | None) -> str:
    """Format a retention time for `parse_keep`, in the largest exact unit.

    >>> format_keep(timedelta(hours=36))
    '36h'
    """
    if not keep:
        return "forever" if keep is None else "0"
    seconds = keep.total_seconds()
    unit = next((unit for unit in ("d", "h", "m") if seconds % _UNIT_SECONDS[unit] == 0), "s")
    return f"{seconds / _UNIT_SECONDS[unit]:.6f}".rstrip("0").rstrip(".") + unit


def parse_rate(text: str) -> Rate | None:
    """Parse a number of attempts and a period, such as 20/s, 60/h or 100/15m; `none` means no limit."""
    if text == "none":
        return None
    match = re.fullmatch(r"([1-9][0-9]{0,6})/([1-9][0-9]{0,5})?(s|m|h|d|second|minute|hour|day)", text)
    if match is None or int(match[1]) > MAX_RATE_COUNT:
        raise typer.BadParameter(
            f"{text!r} is not a rate: give a number of attempts and a period, such as 20/s, 60/hour or 100/15m, "
            f"of at most {MAX_RATE_COUNT} attempts, or none"
        )
    seconds = int(match[2] or 1) * _UNIT_SECONDS[match[3][0]]
    if seconds > MAX_RATE_SECONDS:
        raise typer.BadParameter(f"{text!r} is not a rate: the period is longer than 30 days")
    return Rate(int(match[1]), seconds)


def parse_count(text: str) -> int | None:
    """Parse a number of at least 1; `none` means no limit."""
    if text == "none":
        return None
    if re.fullmatch(r"[1-9][0-9]{0,6}", text) is None or int(text) > MAX_RATE_COUNT:
        raise typer.BadParameter(f"{text!r} is not a limit: give a number from 1 to {MAX_RATE_COUNT}, or none")
    return int(text)


def parse_number(option: str, text: str | None, *, at_least: int, at_most: int) -> int | None:
    """Parse the number of an option, if it is given; `none` removes it."""
    if text is None or text == "none":
        return None
    if re.fullmatch(r"[0-9]{1,7}", text) is None or not at_least <= int(text) <= at_most:
        raise typer.BadParameter(f"{option}: give a number from {at_least} to {at_most}, or none; got {text!r}")
    return int(text)


def parse_final_state(text: str) -> State:
    """Parse a final state."""
    if text not in FINAL_STATES:
        raise typer.BadParameter(f"{text!r} is not a final state: give one of {', '.join(sorted(FINAL_STATES))}")
    return State(text)


def parse_queue(text: str) -> str:
    """Parse a queue name."""
    return _parse_name("queue", text)


def parse_topic(text: str) -> str:
    """Parse a topic name."""
    return _parse_name("topic", text)


def _parse_name(kind: str, text: str) -> str:
    if NAME.fullmatch(text) is None:
        raise typer.BadParameter(
            f"{text!r} is not a {kind} name: give 1 to 63 of a-z, 0-9, underscore, dot and hyphen, the first a letter"
        )
    return text


def parse_header(text: str) -> tuple[str, str]:
    """Parse a header as name=value."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise typer.BadParameter(f"{text!r} is not a header: give name=value")
    return name, value


def read_payload(argument: str | None, file: Path | None, *, limit: int) -> JsonValue:
    """Read the payload from the argument, stdin or a file. Raises `ArgumentError` with the source and the fault."""
    if file is None and argument != "-":
        data, origin = ("null" if argument is None else argument).encode("utf-8", "surrogateescape"), "payload"
    elif file is None:
        data, origin = sys.stdin.buffer.read(limit + 1), "stdin"
    else:
        data, origin = _read_file(file, limit + 1), str(file)
    if len(data) > limit:
        raise ArgumentError(origin, f"larger than PGOUTBOX_MAX_PAYLOAD_BYTES={limit}")
    return from_json(data, origin)


def _read_file(file: Path, limit: int = -1) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(limit)
    except FileNotFoundError:
        raise ArgumentError(str(file), "no such file") from None
    except IsADirectoryError:
        raise ArgumentError(str(file), "is a directory") from None
    except OSError as error:
        raise ArgumentError(str(file), f"cannot be read: {error.strerror}") from None


def load_outbox(where: str | None) -> Outbox:
    """Import the outbox `module:attribute`, with the current directory on the path.

    Raises `ConfigurationError` for a wrong name, and `NotReadyError` for a module that is missing or fails on import.
    """
    if where is None:
        raise ConfigurationError("no outbox given: set PGOUTBOX_APP, or pass --app module:attribute")
    module_name, separator, attribute = where.partition(":")
    if not (separator and module_name and attribute):
        raise ConfigurationError(f"app {where!r}: must be module:attribute, for example shop.messages:outbox")
    if (directory := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, directory)
    found: object = _import_module(module_name)
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ConfigurationError(f"app {where!r}: {module_name} has no attribute {attribute!r}") from None
    if not isinstance(found, Outbox):
        raise ConfigurationError(f"app {where!r}: is a {type(found).__name__}, not an Outbox")
    return found


def _import_module(name: str) -> object:
    try:
        return importlib.import_module(name)
    except PgOutboxError:
        raise
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (name == missing or name.startswith(f"{missing}.")):
            raise NotReadyError(
                f"no module {missing!r}; looked in {Path.cwd()} and in the installed packages"
            ) from None
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise NotReadyError(
            f"module {name!r} failed on import: {type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
        ) from error

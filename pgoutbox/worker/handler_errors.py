"""Exceptions that handlers raise without naming an outcome: their place in the application, and their traceback.

Neither contains values of variables. Without PGOUTBOX_ERROR_TEXTS they contain no text of the exceptions either.
"""

from __future__ import annotations

import math
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final

from pgoutbox.clock import elapsed_clock
from pgoutbox.message import Permanent, Transient
from pgoutbox.text import clean_text, describe

_OURS: Final = ("pgoutbox", "asyncio", "concurrent")
_LIBRARIES: Final = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_MAX_TRACEBACK_LENGTH: Final = 20_000
_MAX_CHAIN: Final = 10
_LOG_SECONDS: Final = 60.0
_MAX_KINDS: Final = 1_000


class RaisedTransient(Transient):
    """An exception of a handler that is retried. It is the `__cause__`."""

    is_logged = False


class RaisedPermanent(Permanent):
    """An exception of a handler that is not retried. It is the `__cause__`."""

    is_logged = False


class RepeatedErrors:
    """Decides which exceptions are logged: one a minute of each topic, type and place. The others are counted."""

    def __init__(self, clock: Callable[[], float] = elapsed_clock) -> None:
        self._clock = clock
        self._logged_at: dict[tuple[str, str, str | None], float] = {}
        self._omitted: Counter[tuple[str, str, str | None]] = Counter()

    def admit(self, topic: str, error_type: str, place: str | None) -> int | None:
        """Return how many of its kind were omitted since the last logged one; None if this one is omitted too."""
        kind, now = (topic, error_type, place), self._clock()
        if now - self._logged_at.get(kind, -math.inf) < _LOG_SECONDS:
            self._omitted[kind] += 1
            return None
        if len(self._logged_at) >= _MAX_KINDS:
            self._logged_at.clear()
            self._omitted.clear()
        self._logged_at[kind] = now
        return self._omitted.pop(kind, 0)


def outcome_of_exception(error: BaseException, *, is_permanent: bool) -> RaisedTransient | RaisedPermanent:
    """Return the outcome of an exception that is not an outcome itself."""
    outcome = RaisedPermanent(describe(error)) if is_permanent else RaisedTransient(describe(error))
    outcome.__cause__ = error  # For middleware that reports exceptions.
    return outcome


def place_of(error: BaseException) -> str | None:
    """Return the innermost frame of the application's code as `file:line function`; None if there is none.

    Frames of installed packages are passed over, unless the handler belongs to the same package.
    """
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if _package(frame) not in _OURS]
    if not frames:
        return None
    home = _package(frames[0][0])
    frame, line = next(
        ((frame, line) for frame, line in reversed(frames) if _package(frame) == home or not _is_library(frame)),
        frames[0],
    )
    return clean_text(f"{_file(frame)}:{line} {frame.f_code.co_qualname}")


def traceback_of(error: BaseException, *, with_texts: bool) -> str:
    """Return the traceback, with those of its causes. Only its end if it is long."""
    try:
        text = "".join(traceback.format_exception(error)) if with_texts else _without_texts(error)
    except BaseException:  # noqa: BLE001 - an error that cannot be printed must not keep its message
        text = _without_texts(error)
    # A log must be able to write it: text of an exception may contain lone surrogates.
    return text.rstrip()[-_MAX_TRACEBACK_LENGTH:].encode("utf-8", "backslashreplace").decode("utf-8")


def _without_texts(error: BaseException) -> str:
    parts: list[str] = []
    found: BaseException | None = error
    while found is not None and len(parts) < _MAX_CHAIN:
        frames = "".join(traceback.format_tb(found.__traceback__))
        parts.append(f"Traceback (most recent call last):\n{frames}{type(found).__qualname__}\n")
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return "\nThe exception above led to this one:\n\n".join(reversed(parts))


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _is_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(("<frozen", *_LIBRARIES))


def _file(frame: FrameType) -> str:
    """Return the file from its top package on: where the application is installed does not matter."""
    path = Path(frame.f_code.co_filename)
    depth = str(frame.f_globals.get("__name__")).count(".") + 1 + (path.name == "__init__.py")
    return "/".join(path.parts[-depth:])

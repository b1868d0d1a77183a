"""The list of the databases that one fleet serves: PGOUTBOX_DSNS, or the function `databases` of the outbox.

An error names the place of the fault: the variable or the file, with the line. No error shows a DSN.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import psycopg
from psycopg.conninfo import conninfo_to_dict
from pydantic import SecretStr

from pgoutbox.errors import ConfigurationError, NotReadyError
from pgoutbox.outbox import Outbox
from pgoutbox.settings import Settings, plain_dsn

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")
_VARIABLE: Final = "PGOUTBOX_DSNS"
_FUNCTION: Final = "the outbox's function `databases`"


class _Entry(NamedTuple):
    place: str
    name: object
    dsn: object


def read_databases(settings: Settings, outbox: Outbox | None) -> dict[str, str] | None:
    """Return the DSN of each database by its name, in the order given. None if there is no list, but one database.

    Reads the file or calls the function again each time. The settings of one database, from `settings_of`, have no
    list. Raises `ConfigurationError` for a wrong list, and `NotReadyError` for a file that cannot be read or a function
    that raises, because a later call may succeed.
    """
    function = None if outbox is None else outbox.databases
    if settings.dsns is not None:
        source, entries = _VARIABLE, _lines_of(settings.dsns)
    elif function is None or (settings.dsn is not None and settings.database is not None):
        return None
    else:
        source, entries = _FUNCTION, _results_of(function)
    others = {
        "PGOUTBOX_DSN": settings.dsn,
        "PGOUTBOX_LISTEN_DSN": settings.listen_dsn,
        _FUNCTION: function if source == _VARIABLE else None,
    }
    for other, value in others.items():
        if value is not None:
            raise ConfigurationError(f"{source} and {other} are both set: unset one of them")
    found = _checked(entries)
    if not found:
        raise ConfigurationError(f"{source}: has no database")
    return found


def settings_of(settings: Settings, name: str, dsn: str) -> Settings:
    """Return the settings of one database of the list."""
    return settings.model_copy(update={"dsn": SecretStr(dsn), "dsns": None, "database": name})


def _lines_of(dsns: SecretStr) -> Iterator[_Entry]:
    """Yield the lines of the value, or of the file that it names, without comments and blank lines."""
    text, place = dsns.get_secret_value(), _VARIABLE
    if text.startswith("/") and "\n" not in text.strip():
        place = text.strip()
        try:
            text = Path(place).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{_VARIABLE}: {place} is not UTF-8 at byte {error.start}") from None
        except OSError as error:
            raise NotReadyError(f"{_VARIABLE}: {place} cannot be read: {error.strerror}") from None
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, *rest = line.split(maxsplit=1)
            yield _Entry(f"{place}, line {number}", name, rest[0].strip() if rest else None)


def _results_of(function: Callable[[], Mapping[str, str]]) -> Iterator[_Entry]:
    """Call the function, and yield its results."""
    try:
        found: object = function()
        items = list(found.items()) if isinstance(found, Mapping) else None
    except Exception as error:
        # Its text may quote a DSN.
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise NotReadyError(
            f"{_FUNCTION} raised {type(error).__name__} ({where.filename}, line {where.lineno})"
        ) from error
    if items is None:
        raise ConfigurationError(f"{_FUNCTION}: must return a mapping of names and DSNs, not {type(found).__name__}")
    for number, (name, dsn) in enumerate(items, start=1):
        yield _Entry(f"{_FUNCTION}, entry {number}", name, dsn)


def _checked(entries: Iterable[_Entry]) -> dict[str, str]:
    found: dict[str, str] = {}
    targets: dict[object, str] = {}
    for place, name, dsn in entries:
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise ConfigurationError(
                f"{place}: must begin with a name of 1 to 63 of A-Z, a-z, 0-9, underscore, dot and hyphen, the last "
                "two not first, such as: acme postgresql://app@localhost/acme"
            )
        if name in found:
            raise ConfigurationError(f"{place}: there are two databases {name!r}; give one of them another name")
        if not isinstance(dsn, str) or not dsn.strip():
            raise ConfigurationError(f"{place}: database {name!r} has no DSN")
        target = _target_of(dsn, f"{place}, database {name!r}")
        if (other := targets.setdefault(target, name)) != name:
            raise ConfigurationError(
                f"{place}: {other!r} and {name!r} are the same database, which would be served twice; remove one"
            )
        found[name] = dsn
    return found


def _target_of(dsn: str, place: str) -> tuple[object, ...]:
    """Return what tells one database from another. The user and the options do not."""
    try:
        given = conninfo_to_dict(plain_dsn(SecretStr(dsn), place))
    except psycopg.ProgrammingError:
        raise ConfigurationError(f"{place}: the DSN is not a connection string") from None  # The driver would quote it.
    host, port = given.get("hostaddr") or given.get("host"), given.get("port") or "5432"
    return given.get("service"), host, port, given.get("dbname") or given.get("user")

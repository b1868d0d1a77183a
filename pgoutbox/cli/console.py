"""Output of the command line: tables, JSON, progress, the log, and errors without secrets.

Terminals get colours, tables and progress bars; pipes get tab-separated lines. Control characters in text from the
database are escaped. This module does not use the database.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import stat
import sys
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TextIO
from urllib.parse import unquote

from pgoutbox.observability.events import Facts
from pgoutbox.settings import people_in, secret_values
from pgoutbox.text import iso_utc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from io import TextIOWrapper

    from rich.table import Table

    from pgoutbox.settings import Settings

    TableContent = tuple[Sequence[str], Sequence[Sequence[object]]]

# Exit codes: success, failure, wrong usage or configuration, Ctrl-C.
DONE: Final = 0
FAILED: Final = 1
MISUSED: Final = 2
INTERRUPTED: Final = 130

MASK: Final = "***"
# A shorter one is often a part of other words.
_LONG_SECRET: Final = 8
# The log has line ends and other characters as escapes, whose last character is no part of the next word.
_BEGIN_OF_WORD: Final = r"(?:(?<![^\W_])|(?<=\\[bfnrt])|(?<=\\x[0-9a-f]{2})|(?<=\\u[0-9a-f]{4})|(?<=\\U[0-9a-f]{8}))"

# One line a minute: two weeks.
_MAX_OWN_BYTES: Final = 5_000_000

_STATE_COLOURS: Final = {
    "pending": "yellow",
    "sending": "cyan",
    "sent": "green",
    "failed": "red",
    "skipped": "bright_black",
    "cancelled": "bright_black",
}
# On a terminal, the texts in these columns are broken between words; a cell of any other column stays whole.
_TEXTS: Final = frozenset(
    {"cause", "destination", "error", "fix", "key", "queues", "reason", "statement", "topics", "what"}
)
_TEXT_WIDTH: Final = 20
# The columns that a narrow terminal leaves out, in this order. --json has them all.
_SPARE: Final = (
    "address", "connected_at", "ended_at", "seen_at", "lease_expires_at", "oldest_claimed_at", "ended_per_second",
    "available", "created", "first_at", "last_at", "newest_id", "error", "place", "failed_again", "hour_before",
    "last_hour", "worker", "started_at", "breaker_key", "cancelled", "skipped", "scheduled", "queue", "attempts",
    "destination", "size_bytes", "weight",
)  # fmt: skip
# Matches up to the next part of the error, the next error of a chain, or the end.
_DETAIL: Final = re.compile(
    r"^(\s*(?:DETAIL|CONTEXT):).*?(?=^\s*(?:DETAIL|HINT|QUERY|CONTEXT|LOCATION|LINE \d+):|^\s*$|^Traceback |\Z)",
    re.MULTILINE | re.DOTALL,
)
_RECORD_ATTRIBUTES: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def print_json(value: object) -> None:
    """Write one JSON document on one line. ASCII only, so that no terminal or encoding changes it."""
    sys.stdout.write(json.dumps(value, default=_json_value) + "\n")


def print_documents(rows: Sequence[NamedTuple], *, of: Sequence[str] | None = None) -> None:
    """Write one JSON document for each row, on one line. `of` is the name of each row's database."""
    for number, row in enumerate(rows):
        print_json(row._asdict() if of is None else {"database": of[number], **row._asdict()})


def print_line(text: str) -> None:
    """Write one line of text."""
    sys.stdout.write(printable(text) + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, of: Sequence[str] | None = None) -> None:
    """Print a table on a terminal; elsewhere a line of names and a line per row, separated by tabs.

    `of` is the name of each row's database, for a first column.
    """
    if of is not None:
        columns, rows = ("database", *columns), [(name, *row) for name, row in zip(of, rows, strict=True)]
    if sys.stdout.isatty():
        from rich.console import Console

        console = Console(highlight=False)
        console.print(_rich_table(columns, rows, console.width))
        return
    for line in (columns, *([cell(value) for value in row] for row in rows)):
        sys.stdout.write("\t".join(line) + "\n")


@contextlib.contextmanager
def live_tables() -> Iterator[Callable[[Sequence[TableContent]], None]]:
    """Yield a function that shows tables: on a terminal it replaces the previous ones, elsewhere it appends."""
    if not sys.stdout.isatty():

        def print_all(tables: Sequence[TableContent]) -> None:
            for columns, rows in tables:
                print_table(columns, rows)
            sys.stdout.flush()

        yield print_all
        return
    from rich.console import Console, Group
    from rich.live import Live

    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda tables: live.update(
            Group(*(_rich_table(columns, rows, console.width) for columns, rows in tables if rows)), refresh=True
        )


def _rich_table(columns: Sequence[str], rows: Iterable[Sequence[object]], width: int) -> Table:
    """Return the table for a terminal of this width. It breaks no word, and leaves out columns instead."""
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    cells = [[cell(value) for value in row] for row in rows]
    widths: list[int] = []
    for index, column in enumerate(columns):
        longest = max((cell_len(row[index]) for row in cells), default=0)
        head = max(map(len, column.split("_")))
        widths.append(max(head, min(longest, _TEXT_WIDTH) if column in _TEXTS else longest))
    shown = list(range(len(columns)))
    for spare in filter(columns.__contains__, _SPARE):
        if sum(widths[index] + 2 for index in shown) <= width:
            break
        shown.remove(columns.index(spare))
    is_narrow = sum(max(len(columns[i]), *(cell_len(row[i]) for row in cells), 0) + 2 for i in shown) > width
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index in shown:
        # Otherwise Rich takes width from all columns, and then cuts the last one, because each has its minimum.
        fixed = widths[index] if is_narrow and columns[index] not in _TEXTS else None
        title = columns[index].replace("_", " ")
        table.add_column(title, overflow="fold", min_width=widths[index], width=fixed)
    for row in cells:
        table.add_row(*(Text(row[index], style=_STATE_COLOURS.get(row[index], "")) for index in shown))
    return table


def print_fields(fields: Mapping[str, object]) -> None:
    """Print one line for each field with a value. On a terminal, further lines of a text are indented below it."""
    is_terminal = sys.stdout.isatty()
    width, gap = (max(map(len, fields)), "  ") if is_terminal else (0, "\t")
    for name, value in fields.items():
        if value is not None:
            lines = value.split("\n") if isinstance(value, str) and is_terminal else [cell(value)]
            text = f"\n{'':<{width}}{gap}".join(map(printable, lines))
            sys.stdout.write(f"{name:<{width}}{gap}{text}\n")


def print_error(text: str) -> None:
    """Write an error to stderr, in red on a terminal, with the prefix on each line of `text`."""
    _print_message("error", "31", text)


def print_warning(text: str) -> None:
    """Write a warning to stderr, in yellow on a terminal."""
    _print_message("warning", "33", text)


def print_note(text: str) -> None:
    """Write a note to stderr."""
    sys.stderr.write(printable(text) + "\n")
    sys.stderr.flush()


def _print_message(kind: str, colour: str, text: str) -> None:
    for line in text.splitlines():
        prefixed = f"{kind}: {printable(line)}"
        sys.stderr.write(coloured(prefixed, colour, sys.stderr) + "\n")
    sys.stderr.flush()


def coloured(text: str, colour: str, stream: TextIO) -> str:
    """Return the text in an ANSI colour, if the stream is a terminal and NO_COLOR is not set."""
    return f"\x1b[{colour}m{text}\x1b[0m" if stream.isatty() and not os.environ.get("NO_COLOR") else text


@contextlib.contextmanager
def progress(label: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr if it is a terminal. Yields a function that takes the number done so far."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=done)


def printable(text: str) -> str:
    """Escape every character of `text` that a terminal could interpret."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def cell(value: object) -> str:
    """Return a value as a table has it."""
    match value:
        case list():
            return ", ".join(map(cell, value))
        case None:
            return ""
        case datetime():
            return value.astimezone(UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00") + "Z"
        case float():
            return f"{value:.1f}"
        case str():
            return printable(value)
        case _:
            return printable(str(value))


def _json_value(value: object) -> str:
    return iso_utc(value) if isinstance(value, datetime) else str(value)


def secrets_in(values: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Return every secret text that an error about these values could quote.

    Each value comes with the name of its setting, which tells its form. Names of people and of webhook secrets are no
    secrets. If a password of a connection string is not percent-encoded, libpq parses the string differently and quotes
    parts of it, so the parts are secrets too. Texts of one or two characters are left out: masking them would make
    every line unreadable.
    """
    found: set[str] = set()
    for name, value in values:
        match name.lower().rpartition("_")[2]:
            case "dsn" | "dsns" | "url":
                passwords = re.findall(r"password\s*=\s*('(?:[^'\\]|\\.)*'|[^\s&]+)", value)
                found.update(_parts_of([*passwords, *re.findall(r"://[^:/@]*:(.+)@", value)]))
            case "urls":
                found.update(_parts_of(re.split(r"[&,]", "&".join(re.findall(r"://([^\"]+)", value)))))
            case "tokens":
                found.update(secret for _, secret in people_in(value))
            case "secrets":
                found.update(re.sub(r"^[^=]*=whsec_|^whsec_", "", entry) for entry in value.split())
            case "keys":
                found.update(re.split(r"[,\s]+", value))
            case _:
                found.add(value)
    found.update([json.dumps(text)[1:-1] for text in found])
    return frozenset(text for text in found if len(text) > 2)


def _parts_of(passwords: Iterable[str]) -> set[str]:
    texts = {text for password in passwords for text in (password, unquote(password), password.strip("'"))}
    return texts.union(*(re.split(r"[@:/?#]", text) for text in texts))


def mask(text: str, secrets: Iterable[str]) -> str:
    """Mask all `secrets` in `text`; the longest first, because some contain others. A short one masks whole words."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _LONG_SECRET:
            text = text.replace(secret, MASK)
        elif secret in text:
            begin, end = (_BEGIN_OF_WORD * secret[0].isalnum(), r"(?![^\W_])" * secret[-1].isalnum())
            text = re.sub(f"{begin}{re.escape(secret)}{end}", MASK, text)
    return text


def configure_logging(settings: Settings, *, is_quiet: bool = False, is_run: bool = False) -> None:
    """Configure the log of the process: target, format and level from the settings.

    With `is_quiet` only warnings go to stderr, unless PGOUTBOX_LOG_LEVEL is set. A quiet run of a worker (`is_run`)
    also keeps its whole log in a file of the user.
    """
    secrets = secrets_in(secret_values(settings))
    stderr = logging.StreamHandler(sys.stderr)
    handlers: list[logging.Handler] = [stderr]
    is_quiet &= settings.log.file is None and "level" not in settings.log.model_fields_set
    if settings.log.file is not None:
        handlers = [_LogFile(settings.log.file, then=_OwnFile(_temporary_file(), then=stderr) if is_run else stderr)]
    elif is_quiet and is_run:
        # The warnings are on stderr. A mail of cron each minute about the log would be worse than its loss.
        second = _OwnFile(_temporary_file(), then=logging.NullHandler(), is_told=False)
        handlers.append(_OwnFile(_state_file(), then=second, is_told=False))
    for handler in handlers:
        handler.setFormatter(JsonFormatter(secrets) if settings.log.format == "json" else TextFormatter(secrets))
        if isinstance(handler, _LogFile):
            handler.check()
    if is_quiet:
        stderr.setLevel(logging.WARNING)
    level = "WARNING" if is_quiet and not is_run else settings.log.level
    logging.basicConfig(level=level, handlers=handlers, force=True)


class _LogFile(WatchedFileHandler):
    """Appends to a file and reopens it after rotation. While the file fails, records go to the handler `then`.

    A log file that cannot be opened or written does not stop the process. Each record tries the file again. Unless
    `is_told` is false, a failure is told on stderr, once.
    """

    _setting = "PGOUTBOX_LOG_FILE="

    def __init__(self, path: str, *, then: logging.Handler, is_told: bool = True) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace", delay=True)
        self._then = then
        self._is_told = is_told
        self._has_failed = False

    def setFormatter(self, formatter: logging.Formatter | None) -> None:  # noqa: N802 - the base class's name
        """Set the formatter, for the other handler too."""
        super().setFormatter(formatter)
        self._then.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record to the file, or to the other handler if that fails."""
        try:
            self._write(self.format(record) + self.terminator)
        except OSError as error:
            self._note(error)
            self._then.emit(record)
        except Exception:  # noqa: BLE001 - like every handler, never raise into the code that logs
            self.handleError(record)
        else:
            self._has_failed = False

    def close(self) -> None:
        """Close the file, and the other handler."""
        super().close()
        self._then.close()

    def check(self) -> None:
        """Open the file at the start, to report a wrong path early."""
        try:
            self._write("")
        except OSError as error:
            self._note(error)
            if isinstance(self._then, _LogFile):
                self._then.check()

    def _write(self, text: str) -> None:
        # The base class's `emit` prints a traceback for each record if the disk is full.
        self.reopenIfNeeded()
        if self.stream is None:
            self.stream = self._open()
            self._statstream()
        self.stream.write(text)
        self.stream.flush()

    def _note(self, error: OSError) -> None:
        if not self._has_failed and self._is_told:
            reason = error.strerror or type(error).__name__
            target = self._then.baseFilename if isinstance(self._then, _LogFile) else "stderr"
            print_warning(f"{self._setting}{self.baseFilename}: {reason}; the log goes to {target}")
        self._has_failed = True
        stream, self.stream = self.stream, None
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


class _OwnFile(_LogFile):
    """A file that pgoutbox chooses: only this user can read it, and one older file is kept."""

    _setting = ""

    def check(self) -> None:
        """Open the file at the start. A large one is moved aside, because nobody rotates it."""
        path = Path(self.baseFilename)
        with contextlib.suppress(OSError):
            if path.lstat().st_size > _MAX_OWN_BYTES:
                path.replace(f"{path}.1")
        super().check()

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return open(self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=_open_own)


def _state_file() -> str:
    """Return the file for the log of runs in the state directory of the user (XDG Base Directory)."""
    given = os.environ.get("XDG_STATE_HOME", "")
    if given.startswith("/"):
        return f"{given}/pgoutbox/worker.log"
    try:
        return str(Path("~/.local/state/pgoutbox/worker.log").expanduser())
    except RuntimeError:
        return _temporary_file()  # The user has no home.


def _temporary_file() -> str:
    """Return the file for the log of runs whose first file cannot be written."""
    # tempfile.gettempdir() writes a file to find out, and raises an error if every disk is full.
    return f"{os.environ.get('TMPDIR') or '/tmp'}/pgoutbox-worker-{os.getuid()}.log"  # noqa: S108 - opened with care


def _open_own(path: str, flags: int) -> int:
    """Open a file of this user. Others may write to the temporary directory, and put a link or their own file there."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "is not a file of this user", path)
    return descriptor


class _Masking(logging.Formatter):
    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        self._secrets = frozenset(secrets)


class TextFormatter(_Masking):
    """Formats a record as one line: time, level, logger, text and the fields of `extra`; then the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record without secrets and control characters, except the line ends of a traceback."""
        text, fields = _text_and_facts(record)
        line = printable(f"{_time(record)} {record.levelname} {record.name}: {_without_detail(text)}{fields}")
        trace = self.formatException(record.exc_info) if record.exc_info else record.exc_text or ""
        return mask("\n".join([line, *map(printable, _without_detail(trace).splitlines())]), self._secrets)


class JsonFormatter(_Masking):
    """Formats a record as a JSON object: `time` (ISO, UTC), `level`, `logger`, `message`, and the `extra` fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as JSON on one line, without secrets."""
        entry: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": _without_detail(_text_and_facts(record)[0]),
        }
        if record.exc_info:
            entry["exception"] = _without_detail(self.formatException(record.exc_info))
        elif record.exc_text:
            entry["exception"] = _without_detail(record.exc_text)
        return mask(json.dumps(_extra(record) | entry, default=_json_value), self._secrets)


def _without_detail(text: str) -> str:
    """Remove the DETAIL and CONTEXT of PostgreSQL, which quote values of rows and parameters."""
    if "DETAIL:" not in text and "CONTEXT:" not in text:
        return text
    return _DETAIL.sub(r"\1 (left out)", text)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in record.__dict__.items() if name not in _RECORD_ATTRIBUTES}


def _text_and_facts(record: logging.LogRecord) -> tuple[str, Facts]:
    """Return the text of a record without its facts, and the facts."""
    match record.args:
        case (Facts() as facts,):
            return str(record.msg).removesuffix("%s"), facts
        case _:
            return record.getMessage(), Facts(_extra(record))

"""The generated parts of docs/reference, of docs/explanation/core.md and of the SQL function of redaction.

Cog runs a function of this module in each comment `[[[cog ... ]]]` of these files: `make docs` writes the results, and
`make check` compares them.
"""

from __future__ import annotations

import ast
import atexit
import copy
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, cast, get_args, get_origin

import griffe
import psycopg
from pydantic import SecretStr
from pydantic.fields import FieldInfo

import pgoutbox
from pgoutbox import migrate, transports
from pgoutbox.embedded import embedded_server
from pgoutbox.observability import measures
from pgoutbox.observability.events import LogEvent
from pgoutbox.observability.measures import Metric
from pgoutbox.redaction import OWN_FIELD, REDACTED, text_forms
from pgoutbox.settings import Settings, fields_of, variable_of

ROOT: Final = Path(__file__).parents[1]


@cache
def _connection() -> psycopg.Connection:
    """Return a connection to a migrated database, which ends with the process."""
    opened = ExitStack()
    atexit.register(opened.close)
    server = opened.enter_context(embedded_server(durable=False))
    migrate.upgrade(server.dsn)
    return opened.enter_context(psycopg.connect(server.dsn))


@cache
def _package() -> griffe.Object:
    """Return the names of the package with their docstrings."""
    return cast("griffe.Object", griffe.load("pgoutbox", search_paths=[ROOT]))


def _blocks(*blocks: str) -> str:
    """Return blocks of Markdown with empty lines between them and around them."""
    return "".join(f"\n{block.strip()}\n" for block in blocks)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def _code(text: object) -> str:
    return f"`{text}`"


def _first_paragraph(docstring: griffe.Docstring) -> str:
    return " ".join(docstring.value.partition("\n\n")[0].split())


# --- statements -------------------------------------------------------------------------------------------------------


def redacted_field() -> str:
    """Return the declaration of the field that an own error begins with, which is not redacted."""
    return (
        f"    field constant pg_catalog.text := coalesce(pg_catalog.\"substring\"(value, $form${OWN_FIELD}$form$), '');"
    )


def redactions() -> str:
    """Return the statements that hide the same secrets in a text as `redact_text`."""
    lines = []
    for form in text_forms():
        replacement = f"$form${form.pattern}$form$, $form$\\1{REDACTED}$form$, 'g'"
        statement = f"    value := pg_catalog.regexp_replace(value, {replacement});"
        hints = ", ".join(f"'%{hint}%'" for hint in form.hints)
        condition = f"    IF squeezed OPERATOR(pg_catalog.~~) ANY (ARRAY[{hints}]) THEN"
        lines += [condition, f"    {statement}", "    END IF;"] if hints else [statement]
    return "\n".join(lines)


def statement(file: str) -> str:
    """Return the text of a file as a block, or the first INSERT of the function in it."""
    text = (ROOT / file).read_text().rstrip()
    if "CREATE FUNCTION" in text:
        insert = re.search(r"^( *)(INSERT INTO .*?);$", text, re.DOTALL | re.MULTILINE)
        if insert is None:
            raise ValueError(f"{file}: the function has no INSERT")
        text = insert[2].replace(f"\n{insert[1]}", "\n")
    return f"```sql\n{text}\n```"


# --- settings ---------------------------------------------------------------------------------------------------------


def settings() -> str:
    """Return all settings by group, with their values, defaults and meanings."""
    rows = defaultdict(list)
    for path, info in fields_of(Settings).items():
        group, _, name = path.rpartition(".")
        meaning = meanings(group_of(group))[name]
        rows[group].append([_code(variable_of(path)), f"{_accepted(info)}{_default(info)}", meaning])
    blocks = []
    for group, lines in rows.items():
        blocks += [f"## {group}", _first_paragraph(_class(group_of(group)).docstring)] if group else ["## General"]
        blocks.append(_table(["variable", "values (default)", "meaning"], lines))
    return _blocks(*blocks)


def group_of(name: str) -> type:
    """Return the class of a group of settings, or of the general ones for an empty name."""
    return cast("type", Settings.model_fields[name].annotation) if name else Settings


def meanings(kind: type) -> dict[str, str]:
    """Return the docstrings of the fields of a class, which follow the fields."""
    return {name: member.docstring.value for name, member in _class(kind).members.items() if member.docstring}


def _class(kind: type) -> Any:  # noqa: ANN401 - griffe's own type of any path
    return _package()[f"{kind.__module__}.{kind.__qualname__}".removeprefix("pgoutbox.")]


def _accepted(info: FieldInfo) -> str:
    kinds = [kind for kind in (get_args(info.annotation) or (info.annotation,)) if kind is not NoneType]
    if get_origin(info.annotation) is Literal:
        return ", ".join(_code(choice) for choice in kinds)
    (kind,) = kinds
    limits = {name: getattr(bound, name) for bound in info.metadata for name in _LIMITS if hasattr(bound, name)}
    text = "secret text" if kind is SecretStr else {bool: "true, false", str: "text"}.get(kind, "")
    if kind in (int, float):
        text = "whole number" if kind is int else "number"
    bounds = " ".join(_LIMITS[name].format(f"{value:,}") for name, value in limits.items())
    return f"{text}, {bounds}" if bounds else text


_LIMITS: Final = {
    "gt": "more than {}",
    "ge": "from {}",
    "le": "to {}",
    "min_length": "{}",
    "max_length": "to {} characters",
}


def _default(info: FieldInfo) -> str:
    match info.default:
        case None:
            return ""
        case bool():
            return f" (`{str(info.default).lower()}`)"
        case float():
            return f" (`{info.default:g}`)"
        case _:
            return f" (`{info.default}`)"


# --- command line -----------------------------------------------------------------------------------------------------


def commands() -> str:
    """Return all commands with their arguments and options, as Typer documents them, and an index with links."""
    command = [sys.executable, "-m", "typer", "pgoutbox.cli.commands", "utils", "docs", "--name", "pgoutbox"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = re.findall(r"^##+ `pgoutbox (.+)`$", text, re.MULTILINE)
    index = ", ".join(f"[`{name}`](#pgoutbox-{name.replace(' ', '-')})" for name in names)
    general = text[text.index("**Usage**") : text.index("**Commands**")]
    return _blocks(general, f"**Commands**: {index}.", text[text.index("\n## ") :])


# --- SQL functions ----------------------------------------------------------------------------------------------------

_CAST: Final = re.compile(r"::[a-z ]+(?:\[\])?$")

_ARGUMENTS: Final = """
SELECT
    p.proname,
    coalesce(p.proargmodes[a.n]::text, 'i'),
    p.proargnames[a.n],
    format_type(a.type, NULL),
    pg_get_function_arg_default(p.oid, a.n::integer)
FROM pg_catalog.pg_proc AS p
CROSS JOIN unnest(coalesce(p.proallargtypes, p.proargtypes::oid[])) WITH ORDINALITY AS a(type, n)
WHERE p.pronamespace = 'pgoutbox'::regnamespace
ORDER BY p.proname, a.n
"""

_FUNCTIONS: Final = """
SELECT p.proname, pg_get_function_result(p.oid), obj_description(p.oid, 'pg_proc')
FROM pg_catalog.pg_proc AS p
WHERE p.pronamespace = 'pgoutbox'::regnamespace
"""


def sql_functions() -> str:
    """Return the SQL functions with their arguments."""
    arguments = defaultdict(list)
    for name, mode, argument, kind, default in _connection().execute(_ARGUMENTS):
        if mode == "i":
            arguments[name].append(_argument(f"{argument} {_short_type(kind)}", default))
    found = {name: (result, comment) for name, result, comment in _connection().execute(_FUNCTIONS)}
    public = sorted(name for name in found if not name.startswith("_") and name not in _FOR_WORKERS)
    blocks = []
    for name in public:
        result, comment = found[name]
        blocks += [f"## {name}", _function(name, arguments[name], result), comment]
    return _blocks(*blocks)


# Only workers and migrations call these.
_FOR_WORKERS: Final = frozenset({"next_permit_at"})


def sql_rules() -> str:
    """Return a line for each rule of enqueue, with the arguments that have it."""
    source = (ROOT / "migrations/sql/types/draft.sql").read_text()
    arguments: dict[str, dict[str, None]] = {}
    for text in re.findall(r"THEN\s+('[^']+'(?:\s+'[^']+')*)", source):
        argument, rule = re.sub(r"'(?:\s+')?", "", text).split(": ", 1)
        arguments.setdefault(rule, {})[_code(argument)] = None
    return _blocks("\n".join(f"- {', '.join(names)}: {rule}" for rule, names in arguments.items()))


def _argument(text: str, default: str | None) -> str:
    if default is None:
        return text
    value = _CAST.sub("", default)
    return f"[{text}]" if value == "NULL" else f"{text} DEFAULT {value}"


def _short_type(kind: str) -> str:
    return kind.replace("timestamp with time zone", "timestamptz")


def _function(name: str, arguments: Sequence[str], result: str) -> str:
    call = f"pgoutbox.{name}({', '.join(arguments)}) RETURNS {_short_type(result)}"
    if len(call) > 100:
        inside = "".join(f"    {argument},\n" for argument in arguments).removesuffix(",\n")
        call = f"pgoutbox.{name}(\n{inside}\n) RETURNS {_short_type(result)}"
    return f"```sql\n{call}\n```"


# --- tables -----------------------------------------------------------------------------------------------------------

# A column of a view has the meaning of the column with its name in the table or type of the view.
_RELATIONS: Final = """
SELECT c.oid::bigint, c.relname, base.oid::bigint, obj_description(c.oid, 'pg_class')
FROM pg_catalog.pg_class AS c
LEFT JOIN pg_catalog.pg_class AS base
    ON base.relnamespace = c.relnamespace AND c.relname = base.relname || '_view'
WHERE c.relnamespace = 'pgoutbox'::regnamespace
    AND (c.relkind = 'v' OR c.relname IN ('message', 'audit'))
ORDER BY c.relkind = 'v', c.relname <> 'message', c.relname
"""

_COLUMNS: Final = """
SELECT
    a.attname,
    format_type(a.atttypid, a.atttypmod) || CASE WHEN a.attnotnull THEN ', not null' ELSE '' END,
    col_description(coalesce(base.attrelid, a.attrelid), coalesce(base.attnum, a.attnum))
FROM pg_catalog.pg_attribute AS a
LEFT JOIN pg_catalog.pg_attribute AS base ON base.attrelid = %s::oid AND base.attname = a.attname
WHERE a.attrelid = %s::oid AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""


def tables() -> str:
    """Return the tables and views that people query, from the catalog."""
    connection = _connection()
    blocks: list[str] = []
    of_message: list[str] = []
    for oid, name, base, comment in connection.execute(_RELATIONS).fetchall():
        rows = [
            [_code(column), _short_type(kind), text or ""]
            for column, kind, text in connection.execute(_COLUMNS, [base, oid])
        ]
        blocks += [f"## {name}", comment]
        if name == "message":
            of_message = [row[0] for row in rows]
        elif name == "message_view":
            missing = [column for column in of_message if column not in {row[0] for row in rows}]
            rows = [row for row in rows if not row[2]]
            blocks.append(f"The columns of `message`, except {' and '.join(missing)}, and these:")
        if explained := [row for row in rows if row[2]]:
            blocks.append(_table(["column", "type", "meaning"], explained))
        if named := [f"{column} {kind}" for column, kind, text in rows if not text]:
            blocks.append(f"{'Also: ' if explained else ''}{', '.join(named)}.")
    return _blocks(*blocks)


# --- Python -----------------------------------------------------------------------------------------------------------

_DOCTEST: Final = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
# Members for the command line, the dashboard and the worker. Applications do not create the classes without `__init__`.
_LEFT_OUT: Final = {
    "Access": {"identify", "check_secret", "begin_session"},
    "AsyncProducer": {"__init__"},
    "Context": {"__init__"},
    "Draft": {"__init__", "options_json"},
    "EmbeddedServer": {"__init__"},
    "JsonText": {"__init__"},
    "MessageFilter": {"given", "limited_to", "parameters"},
    "OutboxTestCase": {"__init__"},
    "Producer": {"__init__"},
    "Redirects": {"as_json", "warnings"},
    "SwitchedRedirect": {"mail"},
    "SyncContext": {"__init__", "connection", "should_stop", "ensure_lease"},
    "doctor": {"examine_delivery", "verdict"},
    "migrate": {"check_revisions", "count_rows"},
    "webhooks": {"key_of", "sign"},
}
# Their members are explained once, in the protocols of `pgoutbox.transports`.
_TRANSPORTS: Final = frozenset(name for name in transports.__all__ if name.endswith("Transport")) - {"Transport"}


def api(*names: str) -> str:
    """Return the signatures and docstrings of names, and of their members that have a docstring."""
    return _blocks(*(block for name in names for block in _entry(_package()[name], 3)))


def module(path: str) -> str:
    """Return the first paragraph of a public module, and its names."""
    found = _package()[path]
    names = found.exports or [member.name for member in _members(found)]
    shown = [name for name in map(str, names) if name not in _LEFT_OUT.get(path, ()) and name not in pgoutbox.__all__]
    text = _first_paragraph(found.docstring)
    return _blocks(text, *(block for name in shown for block in _entry(found[name], 4)))


def calls() -> str:
    """Return the calls of a `Producer`, with its results in place of type variables."""
    shared, producer = (_package()[f"enqueue.producer.{name}"] for name in ("Calls", "Producer"))
    text = _blocks(*(block for call in _members(shared) for block in _entry(call, 4)))
    text = text.replace("EnqueuedT | MaybeT", "MaybeT")
    for variable, result in zip(*(kind.bases[0].slice.elements for kind in (shared, producer)), strict=True):
        text = re.sub(rf"\b{variable}\b", str(result), text)
    return text


def fixtures(path: str) -> str:
    """Return the fixtures of a module of pytest."""
    found = [member for member in _members(_package()[path]) if isinstance(member, griffe.Function)]
    return _blocks(
        "\n".join(
            f"- {_code(function.name)}: {_first_paragraph(function.docstring)}"
            for function in found
            if function.docstring and any("fixture" in str(decorator.value) for decorator in function.decorators)
        )
    )


def _entry(named: griffe.Object | griffe.Alias, level: int) -> Iterator[str]:
    thing = named.final_target if isinstance(named, griffe.Alias) else named
    yield f"{'#' * level} {_code(named.name)}"
    yield f"```python\n{_declaration(thing, named.name)}\n```"
    if thing.docstring is not None:
        yield _DOCTEST.sub(r"```python\n\g<0>\n```", thing.docstring.value)
    if isinstance(thing, griffe.Class):
        for member in _members(thing):
            yield from _entry(member, level + 1)


def _members(thing: griffe.Object) -> Iterator[griffe.Object]:
    left_out = _LEFT_OUT.get(thing.name, set())
    if thing.name in _TRANSPORTS:
        left_out = {name for protocol in _package()["transports"].classes.values() for name in protocol.members}
    for name, member in thing.members.items():
        if isinstance(member, griffe.Object) and member.docstring and not name.startswith("_") and name not in left_out:
            yield member


def _declaration(thing: griffe.Object, name: str) -> str:
    """Return a signature, or the first line of a class with its fields."""
    if isinstance(thing, griffe.Attribute):
        return _formatted(_field(thing))
    if isinstance(thing, griffe.Function):
        return f"{'async ' * ('async' in thing.labels)}{_signature(thing, name)}"
    assert isinstance(thing, griffe.Class)
    is_created = "__init__" not in _LEFT_OUT.get(name, ())
    init = thing.members.get("__init__")
    if isinstance(init, griffe.Function) and is_created:
        return _signature(init, name).removesuffix(" -> None").replace("def", "class", 1)
    bases = ", ".join(str(base) for base in thing.bases if not str(base).startswith("Calls["))
    head = f"class {name}({bases})" if bases else f"class {name}"
    fields = [
        f"    {_field(member)}"
        for member in thing.members.values()
        if isinstance(member, griffe.Attribute) and not member.docstring and not member.name.startswith(("_", "model_"))
    ]
    return _formatted("\n".join([f"{head}:", *fields])) if fields and is_created else head


def _field(attribute: griffe.Attribute) -> str:
    annotation = f": {attribute.annotation}" if attribute.annotation else ""
    return f"{attribute.name}{annotation}{f' = {attribute.value}' if attribute.value else ''}"


def _signature(function: griffe.Function, name: str) -> str:
    for parameter in function.parameters:
        if isinstance(parameter.default, griffe.ExprName | griffe.ExprAttribute):
            with suppress(KeyError):  # The value of a constant tells more than its name.
                parameter.default = _package()[parameter.default.canonical_path.removeprefix("pgoutbox.")].value
    public = copy.copy(function)
    public.parameters = griffe.Parameters(*(one for one in function.parameters if not one.name.startswith("_")))
    text = f"def {public.signature(return_type=True, name=name)}: ...".replace("= object()", "= ...")
    return _formatted(text, "--line-length", "100").removesuffix(": ...")


def _formatted(code: str, *options: str) -> str:
    command = [str(Path(sys.executable).with_name("ruff")), "format", *options, "-"]
    return subprocess.run(command, input=code, capture_output=True, text=True, check=True).stdout.strip()


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Report:
    """The levels, texts and fields of one event, collected from all calls that log it."""

    levels: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    fields: dict[str, None] = field(default_factory=dict)
    loggers: set[str] = field(default_factory=set)


def events() -> str:
    """Return the events with their meanings, levels and fields."""
    reports, meaning_of = _reports(), meanings(LogEvent)
    rows = []
    for event in LogEvent:
        report = reports.get(event, _Report())
        rows.append(
            [
                _code(event.value),
                ", ".join(sorted(report.levels)).lower() or "counted only",
                meaning_of[event.name],
                ", ".join(_short_fields(report.fields)),
            ]
        )
    return _blocks(_table(["event", "level", "meaning", "fields"], rows))


def _short_fields(fields: Mapping[str, None]) -> list[str]:
    named = [_code(name) for name in fields if name not in _MESSAGE]
    return ["message", *named] if fields.keys() >= {*_MESSAGE} else [*map(_code, fields)]


# Most events name a message by these fields.
_MESSAGE: Final = ("message_id", "topic", "queue", "attempt_count")


def _reports() -> dict[LogEvent, _Report]:
    """Collect the calls that log each event from the source."""
    found: dict[LogEvent, _Report] = defaultdict(_Report)
    package = Path(pgoutbox.__file__).parent
    trees = [ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))]
    public = {name: fields for tree in trees for name, fields in _helpers(tree).items() if not name.startswith("_")}
    for tree in trees:
        helpers = public | _helpers(tree)
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call):
                continue
            level = _level_of(call)
            if level is None:
                continue
            helper = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            for event in _events_of(call):
                report = found[event]
                report.levels.add(level)
                report.fields.update(dict.fromkeys([*helpers.get(helper, ()), *_fields_of(call)]))
    return found


def _helpers(tree: ast.Module) -> dict[str, list[str]]:
    """Return the fields that each `_report...` method of a module adds, and `report_message` of another one."""
    helpers = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name.startswith(("_report", "report_message")):
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and node.keywords]
            helpers[function.name] = [k.arg for call in calls for k in call.keywords if k.arg is not None]
    return helpers


def _level_of(call: ast.Call) -> str | None:
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("error", "warning", "info", "debug"):
        return call.func.attr
    for given in call.args:
        # A condition names the level of a special case first.
        argument = given.orelse if isinstance(given, ast.IfExp) else given
        if isinstance(argument, ast.Attribute) and ast.unparse(argument.value) == "logging":
            return argument.attr
    # The level is computed: warning for a failed message, debug for the others.
    return "warning" if any(isinstance(a, ast.Name) and a.id == "level" for a in call.args) else None


def _events_of(call: ast.Call) -> Iterator[LogEvent]:
    for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
        for node in ast.walk(argument):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "LogEvent":
                yield LogEvent[node.attr]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "event_of_state":
                yield from (LogEvent.RETRY, LogEvent.SKIPPED, LogEvent.CANCELLED)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "event_of_outcome":
                yield from (LogEvent.RETRY, LogEvent.SNOOZED, LogEvent.RELEASED)


def _fields_of(call: ast.Call) -> Iterator[str]:
    for keyword in call.keywords:
        if keyword.arg == "extra" and isinstance(keyword.value, ast.Dict):
            names = [key.value for key in keyword.value.keys if isinstance(key, ast.Constant)]
            yield from (name for name in names if isinstance(name, str) and name != "event")
        elif keyword.arg is not None:
            yield keyword.arg


# --- metrics ----------------------------------------------------------------------------------------------------------


def worker_metrics() -> str:
    """Return the metrics that each worker counts, with their labels."""
    return _metrics(measures.WORKER_METRICS)


def database_metrics() -> str:
    """Return the metrics that are read from the database, with their labels."""
    return _metrics(measures.DATABASE_METRICS)


def metrics_of_many() -> str:
    """Return the metrics that only a worker of many databases has, with their labels."""
    return _metrics([measures.SERVED])


def _metrics(metrics: Sequence[Metric]) -> str:
    rows = [[_code(m.series), m.kind.value, ", ".join(map(_code, m.labels)), m.meaning] for m in metrics]
    return _blocks(_table(["metric", "kind", "labels", "meaning"], rows))


def buckets() -> str:
    """Return the upper bounds of the buckets of a histogram."""
    return _blocks(", ".join(f"{bound:g}" for bound in measures.HANDLER_SECONDS.buckets))

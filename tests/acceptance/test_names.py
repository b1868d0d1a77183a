"""Tests that each name in backticks exists: on all pages, in the README, the changelog and the matrix of features.

Decisions are records of their day, so they may name removed things. `test_docs.py` checks the settings, the commands
and the fenced blocks.
"""

from __future__ import annotations

import ast
import inspect
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest

import pgoutbox
from pgoutbox import Context, Message, Outbox, Producer
from pgoutbox.contrib.django.conf import ProjectOutbox
from pgoutbox.operations import Operator
from pgoutbox.settings import Settings
from pgoutbox.testing import OutboxDriver
from tests.acceptance.test_docs import COMMANDS, arguments_of
from tests.support.pages import FENCE, ROOT, WRITTEN, title

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGES: Final = [page for page in WRITTEN if "decisions" not in page.parts]
OBJECTS: Final = {
    "outbox": ProjectOutbox, "Outbox": Outbox, "driver": OutboxDriver, "operator": Operator, "settings": Settings,
    "message": Message, "ctx": Context,
}  # fmt: skip
FOLDERS: Final = [ROOT, ROOT / "pgoutbox", ROOT / "migrations/sql", ROOT / "examples", ROOT / "docs", ROOT / "tests"]
FILE: Final = re.compile(r"[\w.-]+(?:/[\w.@*-]+)+\.(?:py|sql|md|yaml|json|toml|html)")
# Names of readers, of other programs, and of files that a reader writes.
FOREIGN: Final = frozenset([
    "--database", "--deploy", "--no-deps", "--token", "AlreadyEnqueued", "Strict", "ack_job", "autoretry_for",
    "bind_arguments", "cleanup_mail", "club/settings.py", "club_deploy", "club_oncall", "delay_on_commit",
    "pg_createsubscriber", "render_to_string", "retry_backoff", "send_queued_mail", "shared_task", "ssl_certfile",
    "ssl_keyfile", "task_always_eager", "time_limit", "whsec_new", "whsec_old", "worker_deduplicate_successful_tasks",
])  # fmt: skip

IDENTIFIER: Final = re.compile(r"\b[A-Z][a-z]+(?:[A-Z]\w*)?\b(?=\(|$)|\b[a-z]+_\w+")
IN_SCHEMA: Final = """
SELECT relname FROM pg_class WHERE relnamespace = 'pgoutbox'::regnamespace
UNION SELECT proname FROM pg_proc WHERE pronamespace = 'pgoutbox'::regnamespace
UNION SELECT typname FROM pg_type WHERE typnamespace = 'pgoutbox'::regnamespace
"""


def spans(page: Path) -> Iterator[tuple[int, str]]:
    """Yield each code span of the prose with its line."""
    text = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), page.read_text())
    for span in re.finditer(r"(?<!`)`([^`]+)`(?!`)", text):
        yield text.count("\n", 0, span.start()) + 1, " ".join(span[1].split())


KINDS: Final = OBJECTS | {
    name: one for name in pgoutbox.__all__ if inspect.isclass(one := getattr(pgoutbox, name)) and name != "Outbox"
}
OPTIONS: Final = frozenset(
    option for command in COMMANDS.values() for parameter in command.params for option in parameter.opts
)
ENDINGS: Final = ("py", "md", "html")
WORDS: Final = frozenset(
    word
    for folder in ("pgoutbox", "migrations", "examples", "tests", "benchmarks", "tools")
    for pattern in ("*.py", "*.sql", "*.html", "*.yaml", "*.diff")
    for path in (ROOT / folder).rglob(pattern)
    if path.name != "test_names.py"
    for word in (path.stem, *re.findall(r"\w+", path.read_text()))
)


def wrong_in(span: str, page: Path, in_schema: frozenset[str]) -> Iterator[str]:
    """Yield each name of a code span that does not exist."""
    for name in FILE.findall(span):
        if not any(list(folder.glob(name)) for folder in (*FOLDERS, page.parent)):
            yield name
    for name in re.findall(r"\bpgoutbox\.(\w+)(?!\w*/)", span):
        if name not in in_schema | WORDS:
            yield name
    yield from (name for name in IDENTIFIER.findall(span) if name not in in_schema | WORDS)
    yield from (option for option in re.findall(r"^--[a-z][a-z-]+", span) if option not in OPTIONS)
    with suppress(SyntaxError):
        yield from wrong_python(ast.walk(ast.parse(span.removeprefix("await "))))


def wrong_python(nodes: Iterator[ast.AST]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in KINDS:
                if not has(KINDS[name], attribute) and attribute not in ENDINGS:
                    yield f"{name}.{attribute}"
            case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Attribute(attr="on")), attr=attribute)):
                if not has(Producer, attribute):
                    yield attribute
                else:
                    yield from wrong_arguments(node, getattr(Producer, attribute))
            case ast.Call(func=ast.Name(id=name)) if name in KINDS:
                yield from wrong_arguments(node, KINDS[name])
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attribute)) if name in KINDS:
                yield from wrong_arguments(node, getattr(KINDS[name], attribute, None))


def has(kind: type, attribute: str) -> bool:
    return hasattr(kind, attribute) or any(attribute in inspect.get_annotations(one) for one in kind.__mro__)


def wrong_arguments(call: ast.Call, function: Any) -> Iterator[str]:  # noqa: ANN401 - any object can be called
    accepted = arguments_of(function) if callable(function) else {one.arg for one in call.keywords}
    yield from (
        f"no {ast.unparse(call.func)}({one.arg}=)" for one in call.keywords if one.arg and one.arg not in accepted
    )


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_the_names_in_backticks_exist(page: Path, rolled_back: psycopg.Connection) -> None:
    in_schema = frozenset(name for (name,) in rolled_back.execute(IN_SCHEMA))
    wrong = [
        f"{title(page)}:{line}: {one}"
        for line, span in spans(page)
        for one in {*wrong_in(span, page, in_schema)} - FOREIGN
    ]
    assert wrong == [], "\n".join(wrong)


def test_the_check_finds_removed_names(rolled_back: psycopg.Connection) -> None:
    in_schema = frozenset(name for (name,) in rolled_back.execute(IN_SCHEMA))
    for span in (
        "Transient(..., unknown=True)", "outbox.enqueue(connection)", "Outbox.publish()",
        "outbox.on(connection).enqueue_soon(1)", "outbox.on(connection).enqueue(1, qeue=2)",
        "pgoutbox.message_viewer", "worker/batcher.py", "Rescheduled", "operator.redrive_some()",
    ):  # fmt: skip
        assert list(wrong_in(span, ROOT / "README.md", in_schema)) != [], span
    for span in (
        "SendFailure(..., unknown=True)", "outbox.on(c).enqueue(1)", "pgoutbox.message_view", "worker/loader.py",
    ):  # fmt: skip
        assert list(wrong_in(span, ROOT / "README.md", in_schema)) == [], span

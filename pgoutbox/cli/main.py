"""The entry point of the command line: runs a command, and turns each expected error into one line and an exit code.

The module `commands` needs the extra `cli`. This module does not, so that it can report a missing extra.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import TYPE_CHECKING

import psycopg

from pgoutbox.cli.console import DONE, MISUSED, mask, print_error, secrets_in
from pgoutbox.cli.explain import chosen_database, explain
from pgoutbox.errors import PgOutboxError, require_extra
from pgoutbox.settings import SECRET_VARIABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. `arguments` are without the program's name; None means `sys.argv`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    chosen_database.set(None)
    try:
        _run(arguments)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else DONE
    except (PgOutboxError, psycopg.Error) as error:
        text, exit_code = explain(error, chosen_database.get())
        print_error(mask(text, _secrets(arguments)))
        return exit_code
    except UnicodeEncodeError:
        print_error("an argument is not valid UTF-8")
        return MISUSED
    return DONE


def _run(arguments: list[str]) -> None:
    for module in ("rich", "typer"):
        require_extra(module, "the command line")
    _command()(args=arguments, prog_name="pgoutbox")


@cache
def _command() -> Callable[..., object]:
    """Return the command with all its sub-commands, which takes longer to build than most of them run."""
    from typer.main import get_command

    from pgoutbox.cli.commands import app

    return get_command(app)


def _secrets(arguments: Sequence[str]) -> frozenset[str]:
    given = [("dsn", argument) for argument in arguments]
    return secrets_in([*given, *((name, os.environ.get(name, "")) for name in (*SECRET_VARIABLES, "PGPASSWORD"))])

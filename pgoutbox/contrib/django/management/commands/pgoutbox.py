"""`manage.py pgoutbox worker` and all other commands of pgoutbox, with the settings and the outbox of the project."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from pgoutbox.cli.main import main
from pgoutbox.contrib.django import conf
from pgoutbox.errors import ConfigurationError


class Command(BaseCommand):
    """Runs a command of pgoutbox."""

    help = "Run a command of pgoutbox in this project: worker, list, redrive, doctor, ... (see: pgoutbox --help)."
    requires_system_checks: Sequence[str] = ()

    def run_from_argv(self, argv: list[str]) -> None:
        """Pass all arguments to pgoutbox, without those that manage.py itself has used."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--settings")
        parser.add_argument("--pythonpath")
        _, arguments = parser.parse_known_args(argv[2:])
        try:
            sys.exit(_run(arguments))
        except (ConfigurationError, ImproperlyConfigured) as error:
            self.stderr.write(str(error))
            sys.exit(2)

    def add_arguments(self, parser: CommandParser) -> None:
        """Take any arguments, for `call_command("pgoutbox", "list", "--json")`."""
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def handle(self, *_: Any, arguments: list[str], **options: Any) -> None:  # noqa: ANN401 - Django's signature
        """Run the command. Raises `CommandError` if it fails."""
        out, err = options.get("stdout") or sys.stdout, options.get("stderr") or sys.stderr
        with redirect_stdout(out), redirect_stderr(err):
            code = _run(arguments)
        if code:
            raise CommandError(f"pgoutbox {' '.join(arguments[:1])} failed", returncode=code)


def _run(arguments: list[str]) -> int:
    before = os.environ.copy()
    os.environ.update(conf.environment())
    try:
        return main(arguments)
    finally:
        os.environ.clear()
        os.environ.update(before)  # The settings of the project may change, as in tests.

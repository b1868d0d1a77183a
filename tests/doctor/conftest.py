"""Fixtures that run commands."""

from tests.support.command_line import clean_environment, cli, cli_anywhere

__all__ = ["clean_environment", "cli", "cli_anywhere"]

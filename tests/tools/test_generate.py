"""Tests that the generated pages leave out no option and no public name."""

from __future__ import annotations

import importlib
import re
from typing import Final

import pytest

import pgoutbox
from tools import generate

CLI: Final = (generate.REFERENCE / "cli.md").read_text()
API: Final = (generate.REFERENCE / "api.md").read_text()
SHARED: Final = CLI.partition("## Shared options")[2].partition("\n## ")[0]


@pytest.mark.parametrize("command", [*generate.commands()], ids=lambda command: command.name)
def test_each_option_is_explained_in_its_command_or_named_there_and_shared(command: generate.Command) -> None:
    section = CLI.partition(f"\n## pgoutbox {command.name}\n")[2].partition("\n## ")[0]
    if "[Shared](#shared-options): filter" in section:
        section += SHARED.partition("The filter selects messages:")[2]
    for option in (option for parameter in command.command.params for option in parameter.opts[:1]):
        if option.startswith("--") and option != "--help":
            explained, named = rf"^- `{option}[` ]", rf"`{option}`"
            assert re.search(explained, section, re.MULTILINE) or (
                re.search(named, section) and re.search(explained, SHARED, re.MULTILINE)
            ), option


@pytest.mark.parametrize("module", ["pgoutbox", *pgoutbox.PUBLIC_MODULES])
def test_each_public_name_has_an_entry(module: str) -> None:
    names = getattr(importlib.import_module(module), "__all__", ())
    entry = r"^(?:- `{0}\b|`{0}` is |#{{3,4}} {0}$)"
    names = {*names} - {"examine_delivery", "verdict"}  # For the command line and the dashboard.
    assert [name for name in names if not re.search(entry.format(name), API, re.MULTILINE)] == []

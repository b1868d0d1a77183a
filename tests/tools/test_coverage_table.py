"""The table of coverage adds up the files of each package."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

from tools.coverage_table import main

if TYPE_CHECKING:
    import pytest


def summary(statements: int, lines: int, branches: int = 0, taken: int = 0) -> dict[str, dict[str, int]]:
    counts = {"num_statements": statements, "covered_lines": lines, "num_branches": branches, "covered_branches": taken}
    return {"summary": counts}


def test_files_are_added_up_by_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "pgoutbox/dashboard/app.py": summary(10, 4, 10, 6),
        "pgoutbox/outbox.py": summary(1000, 1000),
        "pgoutbox/retry.py": summary(70, 48, 30, 2),
        "pgoutbox/dashboard/__init__.py": summary(0, 0),
    }
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({"files": files})))
    main()
    assert capsys.readouterr().out.splitlines() == [
        "package             statements  branches  covered",
        "pgoutbox                 1,070        30    95.5%",
        "pgoutbox.dashboard          10        10    50.0%",
        "total                    1,080        40    94.6%",
    ]

"""Explore the models and print the tables. `--traces` prints the traces, `--write` updates results.md,
`--large` also explores the larger models.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.model.cases import CASES, LARGE, explored, tables, trace_of

PAGE = Path(__file__).resolve().parent / "results.md"
BEGIN = "<!-- begin: written by python -m tests.model --write -->\n"
END = "<!-- end -->\n"


def written(page: str) -> str:
    """Return the page with the current results."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n" + "\n".join(tables()) + f"\n\n{END}{tail}"


def main(arguments: list[str]) -> int:
    """Explore every case. Return 1 if a case ends differently than expected."""
    began_at = time.process_time()
    cases = [*CASES, *LARGE] if "--large" in arguments else CASES
    surprises = [
        case for case in cases if (explored(case).fault, len(explored(case).trace)) != (case.fault, case.length)
    ]
    if "--write" in arguments:
        PAGE.write_text(written(PAGE.read_text()))
    lines = [trace_of(case) for case in cases if case.fault] if "--traces" in arguments else list(tables())
    lines += [trace_of(case) for case in cases if case in LARGE]
    state_count = sum(explored(case).state_count for case in cases)
    lines += ["", f"{state_count:,} states, {time.process_time() - began_at:.0f} s of the processor's time"]
    lines += [f"expected {case.fault or 'no fault'} in {case.length} steps: {trace_of(case)}" for case in surprises]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if surprises else 0


sys.exit(main(sys.argv[1:]))
